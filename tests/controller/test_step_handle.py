"""Direct tests of arrays that are to be freed, and of the handle of one step under way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from jaxpp_async.controller.requests import FreeList, StepHandle
from jaxpp_async.errors import ProtocolError, StepAbortedError
from jaxpp_async.protocol.actor_info import ActorInfo
from jaxpp_async.protocol.messages import Done, StepDone, StepStats, step_id

STEP = step_id(7)
STATS = StepStats(0.5, 0.25, 1.0, 4096, 3)

# ---------------------------------------------------------------- frees


def test_what_is_to_be_freed_is_taken_once_by_actor_and_in_order():
    frees = FreeList()
    for actor, array_id in [(1, 10), (0, 5), (1, 8)]:
        frees.add(actor, array_id)
    assert frees.take() == {1: (10, 8), 0: (5,)}
    assert frees.take() == {}


def test_what_no_request_took_along_is_freed_later():
    frees = FreeList()
    frees.add(0, 1)
    frees.add(0, 2)
    taken = frees.take()
    frees.add(0, 3)
    frees.give_back(taken)
    assert frees.take() == {0: (3, 1, 2)}


# ---------------------------------------------------------------- a step


def link(actor: int, rank: int = 0, size: int = 1) -> SimpleNamespace:
    """What a step looks at of an actor's connection."""
    return SimpleNamespace(info=ActorInfo(actor, "host", 1, (), "ready", rank=rank, size=size))


async def test_a_step_is_done_once_each_of_its_processes_has_answered():
    handle = StepHandle(STEP, 0, [0, 1])
    handle.on_reply(link(0), StepDone(STEP, STATS))
    assert (handle.done, handle.waits_for(0), handle.waits_for(1)) == (False, False, True)
    handle.on_reply(link(1), StepDone(STEP, STATS))
    assert handle.done
    assert await handle == {0: STATS, 1: STATS}
    assert set(handle.heard_s) == {0, 1}


async def test_the_first_process_speaks_for_its_actor():
    handle, other = StepHandle(STEP, 0, [2, 3]), StepStats(9.0, 9.0, 9.0, 9, 9)
    handle.on_reply(link(1, 0, 2), StepDone(STEP, STATS))
    handle.on_reply(link(1, 1, 2), StepDone(STEP, other))
    assert handle.result() == {1: STATS}


@pytest.mark.parametrize(
    "reply", [Done(), StepDone(step_id(6), STATS)], ids=["a reply of another kind", "another step"]
)
async def test_an_answer_that_is_none_to_this_step_is_refused(reply):
    with pytest.raises(ProtocolError) as caught:
        StepHandle(STEP, 0, [0]).on_reply(link(0), reply)
    assert str(caught.value) == f"actor 0 (host host, pid 1) answered step 7 with {type(reply).__name__}"
    assert caught.value.actor == 0


async def test_a_failed_step_raises_its_error_at_every_await_and_stays_as_it_failed():
    handle, error = StepHandle(STEP, 0, [0]), StepAbortedError("ended")
    handle.fail(error)
    handle.fail(StepAbortedError("later"))
    for _ in range(2):
        with pytest.raises(StepAbortedError, match="ended") as caught:
            await handle
        assert caught.value is error
    assert not handle.error_is_seen


async def test_callbacks_come_in_order_at_once_and_one_that_raises_stops_nobody():
    loop, reported, called = asyncio.get_running_loop(), [], []
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, said: reported.append((said["message"], str(said["exception"]))))
    try:
        handle = StepHandle(STEP, 0, [])

        def broken() -> None:
            raise ValueError("not now")

        for callback in (lambda: called.append("first"), broken, lambda: called.append("last")):
            handle.when_done(callback)
        handle.finish()
        handle.when_done(lambda: called.append("late"))
    finally:
        loop.set_exception_handler(before)
    assert called == ["first", "last", "late"]
    assert reported == [("a callback at the end of step 7 failed", "not now")]


async def test_who_waits_is_woken_and_who_was_cancelled_leaves_the_step_running():
    handle = StepHandle(STEP, 0, [0])
    gone, stays = asyncio.ensure_future(_await(handle)), asyncio.ensure_future(_await(handle))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    assert not handle.done
    handle.on_reply(link(0), StepDone(STEP, STATS))
    assert await stays == {0: STATS}
    assert gone.cancelled()


async def test_a_step_that_is_reset_waits_for_all_its_processes_anew():
    handle = StepHandle(STEP, 0, [0, 1])
    handle.on_reply(link(0), StepDone(STEP, STATS))
    handle.reset()
    assert handle.waits_for(0)
    handle.on_reply(link(1), StepDone(STEP, STATS))
    assert not handle.done


async def test_waiting_until_values_have_left_ends_with_the_last_of_them_or_with_the_step():
    loop = asyncio.get_running_loop()
    handle = StepHandle(STEP, 0, [0])
    await handle.wait_sent()  # there are none
    handle.sends = [loop.create_future(), loop.create_future()]
    sent = asyncio.ensure_future(handle.wait_sent())
    await asyncio.sleep(0)
    handle.sends[0].set_result(None)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not sent.done()
    handle.sends[1].set_result(None)
    await sent
    handle.sends.append(loop.create_future())
    left = asyncio.ensure_future(handle.wait_sent())
    await asyncio.sleep(0)
    handle.fail(StepAbortedError("ended"))
    await left


async def _await(handle: StepHandle) -> object:
    return await handle
