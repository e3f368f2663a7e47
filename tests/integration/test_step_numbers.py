"""Every number that a user sees counts the user's steps: not the moves and inits that go ahead of them."""

from __future__ import annotations

from typing import Any

import pytest
from models import grads_step, mlp

import jaxpp_async as jpp
from jaxpp_async.actors.step_run import StepRun
from jaxpp_async.controller.state_replicas import Stage
from jaxpp_async.errors import RemoteError
from jaxpp_async.protocol.messages import step_id, step_kind, step_number, step_text

MODEL = mlp(2)
BATCH = MODEL.batch(0, 2)


async def started(mesh: jpp.RemoteMesh) -> tuple[jpp.DistributedStep, Any]:
    """A step, and parameters that lie where it takes them: made by an init, which is no step."""
    step = mesh.distributed(grads_step(MODEL, jpp.GPipe(2)), name="train")
    await step.compile(MODEL.init(0), BATCH)
    return step, await step.init(0, lambda: MODEL.init(0))


def swapped(params: Any) -> Any:
    """Each block lies where the other one is taken."""
    return {**params, "blocks": params["blocks"][::-1]}


def test_ids_have_the_order_in_which_they_are_given_out():
    ids = [
        step_id(0, "init"),
        step_id(0, "move", 1),
        step_id(0, "step", 2),
        step_id(1),
        step_id(2, "move"),
        step_id(2),
    ]
    assert ids == sorted(ids) and len(set(ids)) == len(ids) and max(ids) < 1 << 63
    assert [step_number(i) for i in ids] == [0, 0, 0, 1, 2, 2]
    assert [step_kind(i) for i in ids] == ["init", "move", "step", "step", "move", "step"]
    texts = [
        "an init ahead of step 0",
        "a move for step 0",
        "step 0",
        "step 1",
        "a move for step 2",
        "step 2",
    ]
    assert [step_text(i) for i in ids] == texts
    assert step_number(step_id(1 << 30, "step", 1 << 29)) == 1 << 30


async def test_moves_and_inits_are_not_counted():
    async with jpp.RemoteMesh(2, launcher="inline", max_restarts=1, backup_every=100) as mesh:
        events = mesh.events()
        step, params = await started(mesh)
        for number in range(3):
            await mesh.run(step, params, BATCH)
            future = await mesh.submit(step, swapped(params), BATCH)
            assert len(future.moves) == (4 if number == 0 else 0)  # from then on they lie on both
            assert repr(future).startswith(f"<StepFuture: step {2 * number + 1} ('train'), ")
            await future
            assert future.timeline().step == mesh.last_step_timeline().step == 2 * number + 1
        while mesh._running()._recovery.replicas.stage is not Stage.IDLE:
            await mesh.fetch(params)
        mesh._running()._actor_group.handles[1].kill()
        await mesh.run(step, params, BATCH)
        seen = [event async for event in _until(events, "restarted")]
    assert [event.step for event in seen if event.kind == "died"] == [6]
    # The copy was taken at the first step.
    assert [event.details["num_steps"] for event in seen if event.kind == "restarted"] == [6]


async def _until(events, kind):
    async for event in events:
        yield event
        if event.kind == kind:
            return


async def test_a_move_that_fails_says_of_which_argument_and_for_which_step(monkeypatch):
    real = StepRun.start

    def start(run: StepRun) -> None:
        run.fail(ValueError("lost")) if step_kind(run.message.step) == "move" else real(run)

    async with jpp.RemoteMesh(2, launcher="inline") as mesh:
        step, params = await started(mesh)
        await mesh.run(step, params, BATCH)
        monkeypatch.setattr(StepRun, "start", start)
        with pytest.raises(
            RemoteError, match=r"^actor \d \(.*\), a move for step 1, .*: ValueError: lost"
        ) as raised:
            await mesh.run(step, swapped(params), BATCH)
    assert raised.value.step == 1
    said = "params['blocks'][0]['b'] (32 bytes) was being moved from actor 1 to actors [0] "
    said += "for step 1 ('train'), which"
    assert raised.value.__notes__[0].startswith(said)
