"""Direct tests of the health monitor: which heartbeats and reports end in errors and logged warnings, and
which actors are asked for their time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpp_async.controller import health_monitor
from jaxpp_async.controller.failure_detector import Recovered, Suspect
from jaxpp_async.controller.health_monitor import FORGET_S, ClockWatch, HealthMonitor
from jaxpp_async.controller.options import ControllerOptions
from jaxpp_async.controller.requests import StepHandle
from jaxpp_async.errors import ActorError, ActorUnresponsiveError, MeshClosedError, TransferError
from jaxpp_async.protocol import messages as m
from jaxpp_async.protocol.actor_info import Position
from jaxpp_async.protocol.clocks import Offset
from jaxpp_async.protocol.frames import Identity
from tests.controller.test_stall_detector import INFOS, LOST, STEP, WAITING, at, part

LONG_S = 60.0


class Mesh:
    """What a watch asks of the mesh, and actors that beat."""

    def __init__(self, **deadlines: float):
        self.under_way: dict[int, StepHandle] = {}
        self.positions: dict[int, Position | None] = dict.fromkeys(INFOS)
        self.reports: dict[int, m.Reported | Exception | None] = {}
        self.asked: list[int] = []
        self.told: list[Any] = []
        self.failed: asyncio.Future[ActorError] = asyncio.get_running_loop().create_future()
        self.busy = False
        self.watch = HealthMonitor(
            program_of=part,
            under_way=self.under_way,
            info=INFOS.__getitem__,
            ask=self._ask,
            fail=lambda error: self.failed.done() or self.failed.set_result(error),
            is_busy=lambda: self.busy,
            on_verdict=self.told.append,
            options=ControllerOptions(
                **{"suspect_s": LONG_S, "dead_s": LONG_S, "progress_s": LONG_S, **deadlines}
            ),
        )
        for actor in INFOS:
            self.watch.watch(actor)

    def _ask(self, actor: int) -> asyncio.Future[m.Reported]:
        self.asked.append(actor)
        reply = asyncio.get_running_loop().create_future()
        report = self.reports[actor]
        if isinstance(report, ActorError):
            raise report
        if report is not None:
            reply.set_result(report)
        return reply

    def beat(self, *actors: int) -> None:
        for actor in actors:
            p = self.positions[actor]
            fields = (p.step, p.program_id, p.instruction, p.waiting, p.computing) if p is not None else None
            self.watch.record_heartbeat(Identity(actor, 0, "beats"), m.Beat(fields))

    def step(self, positions: dict[int, Position], number: int = STEP) -> None:
        self.under_way[number] = StepHandle(number, 5, tuple(positions))
        self.positions |= positions

    async def beating(self, seconds: float, *actors: int) -> None:
        """All of these beat, until then or until the watch fails the mesh."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.failed.done():
            self.beat(*actors)
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def watched(**deadlines: float) -> AsyncIterator[Mesh]:
    mesh = Mesh(**deadlines)
    try:
        yield mesh
    finally:
        await mesh.watch.aclose()
        assert not [t for t in asyncio.all_tasks() if "stands still" in t.get_name()]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(health_monitor, "TICK_S", 0.02)
    monkeypatch.setattr(health_monitor, "REPORT_S", 0.1)


async def test_the_silent_are_suspect_and_then_given_up(caplog):
    async with watched(suspect_s=0.15, dead_s=0.4) as mesh:
        mesh.step({1: at(1, waiting=False, computing=True)})
        mesh.beat(1)
        await mesh.beating(5.0, 0, 2)
        error = mesh.failed.result()
        assert isinstance(error, ActorUnresponsiveError) and (error.actor, error.step) == (1, 7)
        assert "it was last at run fwd(stage 1, mb 0) of step 7" in str(error)
        assert [(type(v), v.process) for v in mesh.told] == [(Suspect, 1)]
        await mesh.beating(0.1, 0, 2)
    (warning,) = [r.getMessage() for r in caplog.records if "heard" in r.getMessage()]
    assert (
        warning.startswith("actor 1 (host node1, pid 101) has not been heard of")
        and "given up after 0.4 s" in warning
    )


async def test_suspects_come_back(caplog):
    async with watched(suspect_s=0.1) as mesh:
        await mesh.beating(0.25, 0, 2)
        await mesh.beating(0.1, 0, 1, 2)
        assert [(type(v), v.process) for v in mesh.told] == [(Suspect, 1), (Recovered, 1)]
        assert not mesh.failed.done()
    assert "actor 1 (host node1, pid 101) is heard again, after 0." in caplog.text


async def test_nobody_is_blamed_for_a_blocked_event_loop():
    async with watched(suspect_s=0.2, dead_s=0.3) as mesh:
        for _ in range(3):
            await mesh.beating(0.05, 0, 1, 2)
            time.sleep(0.4)  # noqa: ASYNC251 - the point
        await mesh.beating(0.05, 0, 1, 2)
        assert not mesh.failed.done() and mesh.told == []


async def test_the_unwatched_are_not_judged_and_successors_are():
    async with watched(suspect_s=0.05, dead_s=0.1) as mesh:
        for actor in INFOS:
            mesh.watch.unwatch(actor)
        await asyncio.sleep(0.2)
        assert not mesh.failed.done() and mesh.told == []
        mesh.watch.watch(2)
        await mesh.beating(5.0)
        assert mesh.failed.result().actor == 2


async def test_a_stuck_step_is_asked_about_and_fails_once():
    async with watched(progress_s=0.2) as mesh:
        mesh.step(WAITING)
        mesh.reports = dict(LOST)
        began = time.monotonic()
        await mesh.beating(5.0, 0, 1, 2)
        assert time.monotonic() - began >= 0.2
        assert isinstance(mesh.failed.result(), TransferError) and mesh.failed.result().step == 7
        assert sorted(mesh.asked) == [0, 1, 2]


async def test_an_actor_that_does_not_answer_is_the_finding():
    async with watched(progress_s=0.2) as mesh:
        mesh.step(WAITING)
        mesh.reports = {**LOST, 1: None}
        await mesh.beating(5.0, 0, 1, 2)
        error = mesh.failed.result()
        assert (
            type(error) is ActorUnresponsiveError
            and error.actor == 1
            and "event loop is blocked" in str(error)
        )


@pytest.mark.parametrize("why", ["moves", "computes", "busy", "paused", "reports otherwise", "closed"])
async def test_what_is_not_stuck(why):
    async with watched(progress_s=0.1) as mesh:
        mesh.step(WAITING)
        mesh.reports = dict(LOST)
        if why == "computes":
            mesh.positions[2] = at(1, waiting=False, computing=True)
        elif why == "reports otherwise":
            mesh.reports[2] = m.Reported(STEP, 5, 1, "#1 run", True)
        elif why == "closed":
            mesh.reports[1] = MeshClosedError("the mesh is closed")
        mesh.busy |= why == "busy"
        with mesh.watch.paused() if why == "paused" else contextlib.nullcontext():
            for k in range(5):
                if why == "moves":
                    mesh.positions[2] = at(k % 3)
                await mesh.beating(0.05, 0, 1, 2)
        assert not mesh.failed.done()
        assert bool(mesh.asked) == (why in ("reports otherwise", "closed"))


async def test_closing_ends_a_question_under_way(monkeypatch):
    monkeypatch.setattr(health_monitor, "REPORT_S", 60.0)
    async with watched(progress_s=0.1) as mesh:
        mesh.step(WAITING)
        mesh.reports = {**LOST, 1: None}
        while not mesh.asked:
            await mesh.beating(0.02, 0, 1, 2)
    mesh.watch.watch(0)  # too late; nothing happens
    assert mesh.watch._timer is not None and mesh.watch._timer.cancelled()


# ---------------------------------------------------------------- clocks


class Actors:
    """Actors that are asked for their time, and answer when they are told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, asyncio.Future[m.Reported]]] = []
        self.over = False
        self.watch = ClockWatch(self.ask, own="ours")

    def ask(self, actor: int) -> asyncio.Future[m.Reported]:
        if self.over:
            raise MeshClosedError("over")
        self.asked.append((actor, asyncio.get_running_loop().create_future()))
        return self.asked[-1][1]

    def beat(self, actor: int, clock: str) -> None:
        self.watch.record_heartbeat(Identity(actor, 0, "beats"), m.Beat(None, clock))

    async def answer(self, k: int, **reply: Any) -> None:
        self.asked[k][1].set_result(m.Reported(None, **reply))
        await asyncio.sleep(0)


async def test_only_other_clocks_are_asked_and_one_question_is_open():
    actors = Actors()
    for _ in range(3):
        actors.beat(0, "ours")
        actors.beat(1, "theirs")
    assert [actor for actor, _ in actors.asked] == [1]
    assert (
        actors.watch.clock_of(0).offset(0.0) == Offset(0.0, 0.0)
        and actors.watch.clock_of(1).offset(0.0) is None
    )
    await actors.answer(0, now_s=1e6)
    now = asyncio.get_running_loop().time()
    offset = actors.watch.clock_of(1).offset(now)
    assert offset is not None and abs(offset.offset_s - (1e6 - now)) <= offset.error_s + 1.0
    actors.beat(1, "theirs")
    assert len(actors.asked) == 2


async def test_answers_that_say_nothing():
    actors = Actors()
    actors.beat(1, "theirs")
    await actors.answer(0)  # an actor that does not tell the time
    actors.beat(1, "theirs")
    actors.asked[1][1].set_exception(MeshClosedError("over"))
    await asyncio.sleep(0)
    actors.beat(1, "theirs")
    actors.watch.begin(1)  # replaced meanwhile: the answer is of another life
    actors.beat(1, "theirs")
    await actors.answer(2, now_s=5.0)
    assert actors.watch.clock_of(1).offset(0.0) is None
    actors.over = True
    actors.watch.begin(1)
    actors.beat(1, "theirs")  # nobody to ask
    assert len(actors.asked) == 4


async def test_a_question_that_was_lost_is_asked_again(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(health_monitor, "time", SimpleNamespace(monotonic=lambda: now[0]))
    actors = Actors()
    for _ in range(2):
        actors.beat(1, "theirs")
    assert len(actors.asked) == 1
    now[0] += FORGET_S
    actors.beat(1, "theirs")
    assert len(actors.asked) == 2
    await actors.answer(0, now_s=7.0)  # the first answer comes after all
    assert actors.watch.clock_of(1).offset(now[0]) is None
