"""Direct tests of owned tasks, of deadlines in time awake, and of waits that end whatever happens."""

from __future__ import annotations

import asyncio
import logging

import pytest

from jaxpp_async.protocol.task_group import (
    OwnedTasks,
    awake_timeout,
    retrieve,
    run_bounded,
    wait_uninterrupted,
)


async def fail() -> None:
    raise ValueError("broken")


async def test_an_owner_ends_all_of_its_tasks_and_waits_for_their_end():
    tasks, ended = OwnedTasks(), []

    async def work(name: str) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    started = [tasks.start(name, work(name)) for name in ("a", "b")]
    await asyncio.sleep(0)
    assert len(tasks) == 2
    assert [task.get_name() for task in started] == ["a", "b"]
    await tasks.aclose()
    assert sorted(ended) == ["a", "b"]
    assert all(task.cancelled() for task in started)
    assert len(tasks) == 0


async def test_the_task_that_closes_its_owner_is_not_cancelled():
    tasks, after = OwnedTasks(), []

    async def work() -> None:
        await tasks.aclose()
        after.append("closed")

    await tasks.start("closer", work())
    assert after == ["closed"]


async def test_the_error_of_a_task_that_nobody_awaits_is_logged_under_its_name(caplog):
    tasks = OwnedTasks()
    task = tasks.start("look after things", fail())
    await asyncio.wait([task])
    await asyncio.sleep(0)
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.ERROR, "look after things failed")
    assert str(record.exc_info[1]) == "broken"
    assert len(tasks) == 0


async def test_the_error_of_an_awaited_task_is_raised_and_not_logged(caplog):
    task = OwnedTasks().start("asked for", fail(), is_awaited=True)
    with pytest.raises(ValueError, match="broken"):
        await task
    await asyncio.sleep(0)
    assert caplog.records == []


async def test_retrieving_marks_an_error_as_seen_and_leaves_it_in_the_future():
    loop = asyncio.get_running_loop()
    failed, cancelled = loop.create_future(), loop.create_future()
    failed.set_exception(ValueError("kept"))
    cancelled.cancel()
    retrieve(failed)
    retrieve(cancelled)
    with pytest.raises(ValueError, match="kept"):
        failed.result()


async def test_work_that_ends_in_time_leaves_no_timer_behind():
    loop = asyncio.get_running_loop()
    async with awake_timeout(60.0):
        await asyncio.sleep(0)
    assert asyncio.current_task().cancelling() == 0
    assert loop.is_running()


async def test_what_is_not_there_when_the_time_is_over_is_a_timeout():
    with pytest.raises(TimeoutError):
        async with awake_timeout(0.0):
            await asyncio.get_running_loop().create_future()


# ---------------------------------------------------------------- waits that end


async def test_work_that_fails_at_the_end_is_logged_and_the_end_goes_on(caplog):
    async def fail() -> None:
        raise OSError("broken pipe")

    await run_bounded(fail(), 60.0, "cannot say goodbye")
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (
        logging.WARNING,
        "cannot say goodbye: OSError('broken pipe')",
    )


async def test_work_that_takes_too_long_at_the_end_is_given_up(caplog):
    async def hang() -> None:
        await asyncio.get_running_loop().create_future()

    await run_bounded(hang(), 0.0, "no answer")
    assert [record.getMessage() for record in caplog.records] == ["no answer: TimeoutError()"]


async def test_an_end_is_reached_however_often_its_caller_is_cancelled():
    go, hurried, ended = asyncio.get_running_loop().create_future(), [], []

    async def work() -> None:
        await go
        ended.append(True)

    task = asyncio.ensure_future(work())
    caller = asyncio.ensure_future(wait_uninterrupted(task, lambda: hurried.append(True)))
    for _ in range(2):
        await asyncio.sleep(0)
        caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    go.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert (ended, len(hurried)) == ([True], 2)


async def test_what_the_end_raises_is_raised_to_its_caller():
    async def work() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        await wait_uninterrupted(asyncio.ensure_future(work()), lambda: None)
