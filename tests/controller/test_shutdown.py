"""Direct tests of run_bounded waits for the end of things."""

from __future__ import annotations

import asyncio
import logging

import pytest

from jaxpp_async.controller.actor_group import wait_all_dead
from jaxpp_async.protocol.task_group import run_bounded, wait_uninterrupted


class Handle:
    """An actor whose process ends when it is told to."""

    def __init__(self):
        self.end = asyncio.get_running_loop().create_future()

    async def wait_dead(self) -> None:
        await self.end


async def test_waiting_for_no_actors_is_over_at_once():
    assert await wait_all_dead({}, 0.0) is True


async def test_waiting_ends_with_the_last_actor():
    handles = {0: Handle(), 1: Handle()}
    waiting = asyncio.ensure_future(wait_all_dead(handles, 60.0))
    handles[0].end.set_result(None)
    await asyncio.sleep(0)
    assert not waiting.done()
    handles[1].end.set_result(None)
    assert await waiting is True


async def test_an_actor_that_has_not_ended_in_time_is_told_and_no_task_is_left():
    before = asyncio.all_tasks()
    assert await wait_all_dead({0: Handle()}, 0.0) is False
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


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
