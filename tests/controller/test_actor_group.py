"""Direct tests of waiting until the processes of actors have ended."""

from __future__ import annotations

import asyncio

from jaxpp_async.controller.actor_group import wait_all_dead


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
