"""Where actors say that they are: the progress they note, and the answer to `Report` when a step stalls."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import numpy as np
from msgspec import structs

from jaxpp_async.actors.actor import report
from jaxpp_async.program.instructions import CONTROLLER, Input, Output, Recv, Run, Send
from jaxpp_async.protocol import messages as m
from jaxpp_async.protocol.messages import OpenTransfer
from jaxpp_async.transport.memory import MemoryNetwork
from tests.actors.test_actor import Harness, V, add, blob, double, harness

AHEAD = (
    Input(0, 0),
    Run("fwd", 0, (0,), (1,)),
    Send(1, 1, 5),
    Recv(2, 1, 6),
    Recv(3, 1, 7),
    Run("bwd", 1, (1, 2), (4,)),
    Output(4, 0),
    Output(3, 1),
)
BACK = (Recv(0, 0, 5), Run("fwd", 0, (0,), (1,)), Send(1, 0, 6), Send(0, 0, 7))


async def report_at(h: Harness, actor: int, at: int) -> m.Reported:
    """The report once the actor has come to an instruction."""
    async with asyncio.timeout(10):
        while True:
            run = h.actors[actor]._steps.current
            found = report(run)
            if run is not None and run.executor.at == at and not found.running:
                return found
            await asyncio.sleep(0.01)


def without_clock(found: m.Reported) -> m.Reported:
    assert found.now_s is not None
    return structs.replace(found, now_s=None)


async def test_an_idle_actor_has_no_step():
    assert without_clock(report(None)) == m.Reported(None)


async def test_what_a_run_waits_for_and_what_is_open_besides():
    async with harness(2) as h:
        await h.load(0, AHEAD, [V] * 5, [blob(double, V), blob(add, V, V)])
        await h.load(1, BACK, [V] * 2, [blob(double, V)])
        await h.put(0, 10, np.ones(8, np.float32))
        step: dict[str, Any] = {"step": 7, "epoch": h.epoch, "program_id": 0}
        first = await h.start(0, m.Step, inputs={0: 10}, outputs={0: 11, 1: 12}, **step)
        found = await report_at(h, 0, at=5)
        # the send
        assert (found.step, found.program_id, found.instruction, found.transfers_done) == (7, 0, 5, 1)
        assert found.at.startswith("#5 run") and found.at.endswith("waiting for 1 buffers")
        receive = lambda buffer, tag, needed: OpenTransfer("receive", buffer, 1, tag, 32, True, needed)  # noqa: E731
        assert found.transfers == (receive(2, 6, True), receive(3, 7, False))
        run = h.actors[0]._steps.current
        assert run is not None
        run._pieces_left[2] = 1  # as if it were still under way
        assert report(run).transfers[0] == OpenTransfer("send", 1, 1, 5, 32, True, False)
        run._pieces_left[2] = 0
        await (await h.start(1, m.Step, inputs={}, outputs={}, **step))
        await first
        assert without_clock(report(h.actors[0]._steps.current)) == m.Reported(None)


async def test_at_the_end_everything_open_is_needed():
    async with harness(2) as h:
        await h.load(0, (Recv(0, 1, 6), Output(0, 0)), [V], [])
        waiting = await h.start(0, m.Step, step=0, epoch=h.epoch, program_id=0, inputs={}, outputs={0: 11})
        found = await report_at(h, 0, at=2)
        assert found.at == "end of program, 1 transfers open"
        assert found.transfers == (OpenTransfer("receive", 0, 1, 6, 32, True, True),)
        await h.ask(0, m.Abort, epoch=2, cause="enough")
        assert isinstance(await waiting, m.Failed)


async def test_arguments_that_have_not_come():
    async with harness() as h:
        await h.load(
            0,
            (Input(0, 0), Send(0, 0, 9), Run("fwd", 0, (0,), (1,)), Output(1, 0)),
            [V, V],
            [blob(double, V)],
        )
        put = m.Put(10, V, None, 1)  # over the data plane, some day
        step: dict[str, Any] = {"step": 0, "epoch": h.epoch, "program_id": 0, "puts": (put,)}
        waiting = await h.start(0, m.Step, inputs={0: 10}, outputs={0: 11}, **step)
        found = await report_at(h, 0, at=2)
        assert found.transfers == (
            OpenTransfer("argument", 0, CONTROLLER, -1, 32, True, True),
            OpenTransfer("send", 0, 0, 9, 32, False, True),
        )
        await h.ask(0, m.Abort, epoch=2, cause="enough")
        assert isinstance(await waiting, m.Failed)


async def test_notes_say_who_computes_who_waits_and_when_it_is_over():
    notes: list[tuple[int, bool, bool]] = []
    h = Harness(2, MemoryNetwork())
    note = lambda step, program, at, waiting, computing=False: notes.append((at, waiting, computing))  # noqa: E731
    h.actors[0]._make_resources = partial(h.actors[0]._make_resources, note_progress=note)
    try:
        await h.configure()
        await h.load(0, AHEAD, [V] * 5, [blob(double, V), blob(add, V, V)])
        await h.load(1, (*BACK[:3], Run("wait", 0, (1,), (2,)), BACK[3]), [V] * 3, [blob(double, V)])
        await h.put(0, 10, np.ones(8, np.float32))
        step: dict[str, Any] = {"step": 0, "epoch": h.epoch, "program_id": 0}
        first = await h.start(0, m.Step, inputs={0: 10}, outputs={0: 11, 1: 12}, **step)
        await report_at(h, 0, at=5)
        assert notes == [(1, False, True), (1, False, False), (5, True, False)]
        notes.clear()
        await (await h.start(1, m.Step, inputs={}, outputs={}, **step))
        await first
        assert notes[:2] == [(5, False, True), (5, False, False)] and notes[-1] == (8, False, False)
        assert notes[2:-1] in ([], [(8, True, False)])
    finally:
        for actor in h.actors:
            await actor.aclose()
        await h.transport.aclose()
