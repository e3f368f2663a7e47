"""Direct tests of tasks that have an owner, and of deadlines in time awake."""

from __future__ import annotations

import asyncio
import logging

import pytest

from jaxpp_async.protocol.task_group import OwnedTasks, awake_timeout, retrieve


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
