"""Tables of what processes do and when, and what the monitor observes. The time is the tests' own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sent_steps import sent_step

from jaxpp_async.base.events import EventLog
from jaxpp_async.controller import health_monitor
from jaxpp_async.controller.deploy import LoadableProgram, LoadedPrograms
from jaxpp_async.controller.failure_policy import (
    ActorSilent,
    ConnectionLost,
    FailureReported,
    Observation,
    ProcessDied,
    ProtocolBroken,
    StepStuck,
)
from jaxpp_async.controller.health_monitor import HealthMonitor
from jaxpp_async.controller.mesh_events import MeshEvents
from jaxpp_async.controller.options import ControllerOptions
from jaxpp_async.controller.requests import ActorLink
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.errors import MeshClosedError
from jaxpp_async.launch.process_supervisor import Death
from jaxpp_async.protocol import messages as m
from jaxpp_async.protocol.actor_info import ActorInfo, Position, Topology
from jaxpp_async.protocol.clocks import FORGET_S, TICK_S, Clocks
from jaxpp_async.protocol.frames import Identity
from tests.controller.test_stall_detector import LOST, PARTS, STEP, WAITING, at, reported

END_S = 20.0
FAILED = m.Failed("TransferError", "the link broke", "")


class Process:
    """One process: its handle and its connection, as far as the monitor uses them."""

    def __init__(self) -> None:
        self.death: asyncio.Future[Death] = asyncio.get_running_loop().create_future()
        self.page: Position | None = None
        self.is_open = True
        self.on_message: Any = None
        self.on_closed: Any = None

    async def wait_dead(self) -> Death:
        return await asyncio.shield(self.death)

    def progress(self) -> Position | None:
        return self.page

    def output_tail(self) -> Sequence[str]:
        return ("last words",)


class Mesh:
    """What a monitor watches, and what it has observed.

    Args:
        beats: for each process, the first and the last second in which its heartbeats arrive.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        beats: dict[int, tuple[float, float]] | None = None,
        *,
        per_actor: int = 1,
        has_processes: bool = True,
    ):
        self.now, self.beats = 0.0, dict.fromkeys(range(3 * per_actor), (0.0, END_S)) | (beats or {})
        monkeypatch.setattr(health_monitor, "REPORT_S", 0.0)
        self.seen: list[tuple[float, Observation]] = []
        self.asked: list[int] = []
        self.answers: list[asyncio.Future[m.Reported]] = []
        self.reports: dict[int, m.Reported | None] = {}
        self.positions: dict[int, Position] = {}
        self.under_way: dict[int, SubmittedStep] = {}
        self.is_over = False
        self.pause = contextlib.ExitStack()
        topology, options = Topology(3, per_actor), ControllerOptions()
        programs = LoadedPrograms(topology, options)
        for _ in range(6):  # the actors run number 5
            programs.add(LoadableProgram(PARTS))
        self.links: dict[int, ActorLink] = {}
        self.events = EventLog()
        self.recovery = SimpleNamespace(is_running=True)
        self.group = SimpleNamespace(
            links=self.links,
            processes=topology,
            has_processes=has_processes,
            listener=SimpleNamespace(on_beat=None),
            request_report=self.ask,
        )
        self.monitor = HealthMonitor(
            cast(Any, self.group),
            cast(Any, self.recovery),
            programs,
            self.under_way,
            MeshEvents(self.events),
            options,
            lambda seen: self.seen.append((self.now, seen)),
            monotonic=lambda: self.now,
        )
        assert self.group.listener.on_beat == self.monitor.record_heartbeat
        for process in self.beats:
            actor, rank = divmod(process, per_actor)
            self.start(ActorInfo(actor, f"node{actor}", 100 + process, (), "ready", rank, per_actor))

    def ask(self, process: int) -> asyncio.Future[m.Reported]:
        if self.is_over:
            raise MeshClosedError("over")
        self.asked.append(process)
        self.answers.append(asyncio.get_running_loop().create_future())
        report = self.reports.get(process)
        if report is not None:
            self.answers[-1].set_result(report)
        return self.answers[-1]

    def beat(self, process: int, clock: str = "") -> None:
        name = clock or self.monitor.clocks._own
        beat = m.Beat(self.positions.get(process), name)
        self.monitor.record_heartbeat(Identity(process, 0, "beats"), beat)

    async def run(self, events: Sequence[tuple[Any, ...]] = (), end_s: float = END_S) -> list[str]:
        """Let time pass until `end_s`, with events at their times, and return what was observed by then."""
        left = sorted(events, key=lambda event: event[0])
        while self.now <= end_s:
            while left and left[0][0] <= self.now:
                _, what, *args = left.pop(0)
                getattr(self, what)(*args)
            for process, (first_s, last_s) in self.beats.items():
                if first_s <= self.now <= last_s:
                    self.beat(process)
            self.monitor.judge()
            for _ in range(6):
                await asyncio.sleep(0)
            self.now += TICK_S
        assert left == []
        return self.told()

    def told(self) -> list[str]:
        """Return each observation as its time, its kind, and the process or what a step waits for."""
        return [f"{when:g} {type(seen).__name__} {self._subject(seen)}" for when, seen in self.seen]

    def _subject(self, seen: Observation) -> object:
        if isinstance(seen, StepStuck):
            return f"{seen.diagnosis.cause} {seen.diagnosis.actor}"
        return "-" if not hasattr(seen, "info") else cast(Any, seen).info.process

    def warnings(self) -> list[str]:
        """Return the events about silences, each with its process."""
        return [f"{e.kind} {e.actor}" for e in self.events._kept if e.kind != "started"]

    # ------------------------------------------------------------ events

    def start(self, info: ActorInfo) -> None:
        fake: Any = Process()
        self.links[info.process] = ActorLink(info, fake, fake)
        self.monitor.watch(self.links[info.process])

    def of(self, process: int) -> Any:
        return self.links[process].handle

    def die(self, process: int, returncode: int = -9) -> None:
        self.of(process).death.set_result(Death(returncode, ("last words",)))

    def close(self, process: int, error: Exception | None = None) -> None:
        if self.of(process).on_closed is not None:
            self.of(process).on_closed(error)

    def say(self, process: int, message: Any, number: int | None = None) -> None:
        self.of(process).on_message(message, number)

    def remove(self, process: int) -> None:
        self.monitor.unwatch(process)
        self.links[process].detach()

    def replace(self, process: int) -> None:
        self.start(self.links[process].info)

    def step(self, positions: dict[int, Position], number: int = STEP) -> None:
        self.under_way[number] = sent_step(number, tuple(positions))
        self.positions |= positions

    def answer(self, reports: dict[int, m.Reported | None]) -> None:
        self.reports = dict(reports)

    def move(self, process: int, position: Position) -> None:
        self.positions[process] = position

    def hold_back(self) -> None:
        self.recovery.is_running = False

    def replay(self) -> None:
        self.recovery.is_running = True

    def compile(self) -> None:
        self.pause.enter_context(self.monitor.paused())

    def compiled(self) -> None:
        self.pause.close()

    def end(self) -> None:
        self.is_over = True

    def block(self, seconds: float) -> None:
        """Stop this process for some time."""
        self.now += seconds


# ---------------------------------------------------------------- processes and connections

FATES: dict[str, tuple[list[tuple[Any, ...]], list[str]]] = {
    "all is well": ([], []),
    "a death": ([(3, "die", 1)], ["3 ProcessDied 1"]),
    "a lost connection": ([(3, "close", 1, OSError("reset"))], ["3 ConnectionLost 1"]),
    "both, the death first": (
        [(3, "die", 1), (3.5, "close", 1)],
        ["3 ProcessDied 1", "3.5 ConnectionLost 1"],
    ),
    "both, the connection first": (
        [(3, "close", 1), (3.5, "die", 1)],
        ["3 ConnectionLost 1", "3.5 ProcessDied 1"],
    ),
    "two deaths at once": ([(3, "die", 0), (3, "die", 2)], ["3 ProcessDied 0", "3 ProcessDied 2"]),
    "a reported failure": ([(3, "say", 2, FAILED)], ["3 FailureReported 2"]),
    "a reply to nothing": ([(3, "say", 2, m.Done(), 7)], ["3 ProtocolBroken -"]),
    "a log record": ([(3, "say", 2, m.Log(10, "jaxpp_async", "fine"))], []),
    "the death of a removed process": ([(2, "remove", 1), (3, "die", 1)], []),
    "words and the end of a removed process": (
        [(2, "remove", 1), (3, "say", 1, FAILED), (3, "say", 1, m.Done(), 7), (3, "close", 1)],
        [],
    ),
    "the death of a successor": (
        [(2, "die", 1), (2.5, "remove", 1), (3, "replace", 1), (5, "die", 1)],
        ["2 ProcessDied 1", "5 ProcessDied 1"],
    ),
}


@pytest.mark.parametrize("has_processes", [True, False], ids=["processes", "inline"])
@pytest.mark.parametrize("fate", FATES)
async def test_deaths_connections_and_messages(monkeypatch, fate, has_processes):
    events, expected = FATES[fate]
    mesh = Mesh(monkeypatch, has_processes=has_processes)
    assert await mesh.run(events, 6.0) == expected
    assert mesh.warnings() == []
    await mesh.monitor.aclose()


async def test_an_observation_of_a_death_says_in_which_step_and_where(monkeypatch):
    mesh = Mesh(monkeypatch)
    mesh.step(WAITING)
    mesh.step(WAITING, m.step_id(8))
    mesh.of(0).page, mesh.of(1).page = at(2), at(2, step=m.step_id(6))
    mesh.under_way[STEP]._waiting.discard(2)
    for process in range(3):
        mesh.die(process, -9 - process)
        mesh.close(process, OSError(str(process)))
    await mesh.run(end_s=0.0)
    infos, tail = [mesh.links[process].info for process in range(3)], ("last words",)
    steps = [STEP, STEP, m.step_id(8)]
    text = "send   b1 to 1 tag 0 (waiting for data)"
    # The page of process 1 is from an earlier step, and tells nothing about this one.
    expected: list[Observation] = [
        ProcessDied(infos[p], Death(-9 - p, tail), steps[p], text if p == 0 else None) for p in range(3)
    ]
    found = [seen for _, seen in mesh.seen]
    assert [seen for seen in found if isinstance(seen, ProcessDied)] == expected
    lost = [seen for seen in found if isinstance(seen, ConnectionLost)]
    assert [(seen.info, str(seen.error), seen.output_tail, seen.step) for seen in lost] == [
        (infos[p], str(p), tail, steps[p]) for p in range(3)
    ]
    await mesh.monitor.aclose()


async def test_what_a_process_reports_is_passed_on_as_it_is(monkeypatch):
    mesh = Mesh(monkeypatch)
    mesh.say(1, FAILED)
    mesh.say(2, m.Done(), 7)
    (_, failed), (_, broken) = mesh.seen
    assert failed == FailureReported(mesh.links[1].info, FAILED)
    assert isinstance(broken, ProtocolBroken) and broken.error.actor == 2
    assert "answered request 7, which nobody made" in str(broken.error)
    await mesh.monitor.aclose()


async def test_a_connection_that_is_lost_before_the_watch_begins_is_observed(monkeypatch):
    mesh = Mesh(monkeypatch)
    fake: Any = Process()
    fake.is_open = False
    mesh.links[1] = ActorLink(mesh.links[1].info, fake, fake)
    mesh.monitor.watch(mesh.links[1])
    assert [seen for _, seen in mesh.seen] == [
        ConnectionLost(mesh.links[1].info, None, ("last words",), None)
    ]
    await mesh.monitor.aclose()


# ---------------------------------------------------------------- heartbeats

SILENCES: dict[str, tuple[dict[int, tuple[float, float]], list[tuple[Any, ...]], list[str], list[str]]] = {
    "one falls silent": ({1: (0, 2)}, [], ["12 ActorSilent 1"], ["suspect 1"]),
    "two fall silent": (
        {1: (0, 2), 2: (0, 3)},
        [],
        ["12 ActorSilent 1", "13 ActorSilent 2"],
        ["suspect 1", "suspect 2"],
    ),
    "one comes back": (
        {1: (0, 2)},
        [(7, "beat", 1), (16, "remove", 1)],
        [],
        ["suspect 1", "recovered 1", "suspect 1"],
    ),
    "one is never heard": ({1: (99, 99)}, [], ["10 ActorSilent 1"], ["suspect 1"]),
    "one dies": ({1: (0, 2)}, [(4, "die", 1)], ["4 ProcessDied 1"], []),
    "a suspect dies": ({1: (0, 2)}, [(6, "die", 1)], ["6 ProcessDied 1"], ["suspect 1"]),
    "one is removed": ({1: (0, 2)}, [(4, "remove", 1)], [], []),
    "a successor is silent too": (
        {1: (0, 2)},
        [(4, "remove", 1), (6, "replace", 1)],
        ["16 ActorSilent 1"],
        ["suspect 1"],
    ),
    "this process is stopped for a minute": ({}, [(3, "block", 60)], [], []),
    "this process is stopped while one is silent": (
        {1: (0, 2)},
        [(3, "block", 60)],
        ["71.5 ActorSilent 1"],  # of the minute, a second counts
        ["suspect 1"],
    ),
}


@pytest.mark.parametrize("silence", SILENCES)
async def test_silences(monkeypatch, silence):
    beats, events, expected, warnings = SILENCES[silence]
    mesh = Mesh(monkeypatch, beats)
    if any(what == "block" for _, what, *_ in events):
        mesh.beats |= {p: (first_s, 99.0) for p, (first_s, last_s) in mesh.beats.items() if last_s == END_S}
        assert await mesh.run(events, 80.0) == expected
    else:
        assert await mesh.run(events) == expected
    assert mesh.warnings() == warnings
    await mesh.monitor.aclose()


async def test_inline_actors_send_no_heartbeats_and_are_never_silent(monkeypatch):
    mesh = Mesh(monkeypatch, dict.fromkeys(range(3), (99, 99)), has_processes=False)
    assert await mesh.run() == [] == mesh.warnings()


async def test_one_silent_process_of_an_actor_is_observed_by_its_number(monkeypatch):
    mesh = Mesh(monkeypatch, {3: (0, 2)}, per_actor=2)
    assert await mesh.run() == ["12 ActorSilent 3"]
    assert mesh.warnings() == ["suspect 1"]
    await mesh.monitor.aclose()


@pytest.mark.parametrize(
    ("page", "place"),
    [
        (None, "run fwd(stage 1, mb 0) of step 7"),
        (at(4), "run bwd(stage 1, mb 0) of step 7, waiting for data"),  # it has gone on since its last beat
    ],
)
async def test_a_silence_is_observed_with_the_step_and_the_latest_position(monkeypatch, caplog, page, place):
    mesh = Mesh(monkeypatch, {1: (0, 2)})
    mesh.step({1: at(1, waiting=False, computing=True)})
    mesh.of(1).page = page
    await mesh.run()
    assert [seen for _, seen in mesh.seen] == [ActorSilent(mesh.links[1].info, 10.0, STEP, place)]
    (warning,) = [r.getMessage() for r in caplog.records if "heard" in r.getMessage()]
    assert f"it was last at {place}" in warning and "given up after 10 s" in warning
    await mesh.monitor.aclose()


async def test_what_actors_do_is_told_without_asking_them(monkeypatch):
    mesh = Mesh(monkeypatch)
    assert mesh.monitor.activities() == {}
    mesh.step({1: at(1, waiting=False, computing=True)})
    mesh.beat(1)
    assert mesh.monitor.activities()[1] == ("run fwd(stage 1, mb 0) of step 7", False)
    mesh.of(1).page = at(4)  # it has gone on since its last heartbeat
    assert mesh.monitor.activities()[1] == ("run bwd(stage 1, mb 0) of step 7, waiting for data", True)
    assert mesh.asked == []
    await mesh.monitor.aclose()


# ---------------------------------------------------------------- steps

BEGIN: list[tuple[Any, ...]] = [(2, "step", WAITING), (2, "answer", LOST)]
COMPUTING = at(1, waiting=False, computing=True)

STALLS: dict[str, tuple[list[tuple[Any, ...]], list[str], bool]] = {
    "a transfer is lost": (BEGIN, ["12 StepStuck lost 2"], True),
    "one does not answer": ([*BEGIN, (3, "answer", {**LOST, 1: None})], ["12 StepStuck deaf 1"], True),
    "one moves late": ([*BEGIN, (6, "move", 2, at(0)), (7, "move", 2, at(1))], ["17 StepStuck lost 2"], True),
    "one computes": ([*BEGIN, (2, "move", 2, COMPUTING)], [], False),
    "one computes for a while": (
        [*BEGIN, (2, "move", 2, COMPUTING), (6, "move", 2, at(1))],
        ["16 StepStuck lost 2"],
        True,
    ),
    "one reports that it computes": (
        [*BEGIN, (2, "answer", {**LOST, 2: reported(1, running=True)})],
        [],
        True,
    ),
    "the mesh ends": ([*BEGIN, (11, "end")], [], False),
    "a restart": ([*BEGIN, (5, "hold_back"), (8, "replay")], ["18 StepStuck lost 2"], True),
    "a restart without end": ([*BEGIN, (5, "hold_back")], [], False),
    "a program is compiled": ([*BEGIN, (5, "compile"), (8, "compiled")], ["18 StepStuck lost 2"], True),
    "a program is being compiled": ([*BEGIN, (5, "compile")], [], False),
    "one dies": ([*BEGIN, (5, "die", 1), (5, "hold_back")], ["5 ProcessDied 1"], False),
    "no step": ([], [], False),
}


@pytest.mark.parametrize("story", STALLS)
async def test_steps_that_stand_still(monkeypatch, story):
    events, expected, is_asked = STALLS[story]
    mesh = Mesh(monkeypatch)
    assert await mesh.run(events) == expected
    assert bool(mesh.asked) == is_asked
    await mesh.monitor.aclose()
    mesh.pause.close()


async def test_a_stuck_step_is_asked_about_once_and_told_with_its_actors(monkeypatch):
    mesh = Mesh(monkeypatch)
    await mesh.run(BEGIN)
    ((_, stuck),) = mesh.seen
    assert isinstance(stuck, StepStuck) and stuck.still_s == 10.0 and stuck.diagnosis.step == STEP
    assert stuck.actors == {process: link.info for process, link in mesh.links.items()}
    assert mesh.asked == [0, 1, 2]
    await mesh.monitor.aclose()


@pytest.mark.parametrize("meanwhile", ["hold_back", "compile"])
async def test_a_stuck_step_is_no_failure_once_actors_do_something_else(monkeypatch, meanwhile):
    """A restart, or the loading of a program, begins while the actors are asked."""
    mesh = Mesh(monkeypatch)
    ask = mesh.ask

    def ask_and_begin(process: int) -> asyncio.Future[m.Reported]:
        if not mesh.asked:
            getattr(mesh, meanwhile)()
        return ask(process)

    monkeypatch.setattr(mesh.group, "request_report", ask_and_begin)
    assert await mesh.run(BEGIN) == []
    assert mesh.asked == [0, 1, 2]
    mesh.pause.close()
    await mesh.monitor.aclose()


async def test_of_several_processes_the_one_that_is_behind_speaks_for_its_actor(monkeypatch):
    """Both processes of an actor wait where its program does; of actor 1, the second does not answer."""
    mesh = Mesh(monkeypatch, per_actor=2)
    mesh.step({process: WAITING[process // 2] for process in range(6)})
    mesh.reports = {process: LOST[process // 2] for process in range(6)} | {3: None}
    assert await mesh.run() == ["10 StepStuck deaf 1"]
    stuck = cast(StepStuck, mesh.seen[0][1])
    assert {actor: info.process for actor, info in stuck.actors.items()} == {0: 0, 1: 3, 2: 4}
    await mesh.monitor.aclose()


async def test_closing_ends_a_question_under_way_and_the_judging(monkeypatch):
    mesh = Mesh(monkeypatch)
    monkeypatch.setattr(health_monitor, "REPORT_S", 60.0)
    await mesh.run([(0, "step", WAITING)])
    assert mesh.asked == [0, 1, 2]  # no second question while the first is open
    await mesh.monitor.aclose()
    assert not [t for t in asyncio.all_tasks() if "stands still" in t.get_name()]
    mesh.replace(0)  # too late; nothing happens
    assert mesh.monitor._timer is not None and mesh.monitor._timer.cancelled()
    await mesh.monitor.aclose()


async def test_a_timer_judges(monkeypatch):
    monkeypatch.setattr(health_monitor, "TICK_S", 0.001)
    judged, count = asyncio.Event(), itertools.count()
    monkeypatch.setattr(HealthMonitor, "judge", lambda self: judged.set() if next(count) == 2 else None)
    mesh = Mesh(monkeypatch)
    async with asyncio.timeout(5):
        await judged.wait()
    await mesh.monitor.aclose()


# ---------------------------------------------------------------- clocks


async def test_clocks_that_are_not_ours_are_read_with_heartbeats(monkeypatch):
    mesh = Mesh(monkeypatch)
    mesh.monitor.clocks = Clocks("ours")
    for _ in range(3):
        mesh.beat(0, "ours")
        mesh.beat(1, "theirs")
    assert mesh.asked == [1]
    mesh.now = 2.0
    mesh.answers[0].set_result(m.Reported(0, None, now_s=101.0))
    await asyncio.sleep(0)
    offset = mesh.monitor.clocks.clock_of(1).offset(2.0)
    assert offset is not None and (offset.offset_s, offset.error_s) == (100.0, 1.0)
    await mesh.monitor.aclose()


@pytest.mark.parametrize("how", ["without the time", "with an error", "never", "from a predecessor"])
async def test_answers_that_tell_no_time_are_asked_for_again(monkeypatch, how):
    mesh = Mesh(monkeypatch)
    mesh.monitor.clocks = Clocks("ours")
    mesh.beat(1, "theirs")
    if how == "without the time":
        mesh.answers[0].set_result(m.Reported(0, None))
    elif how == "with an error":
        mesh.answers[0].set_exception(MeshClosedError("over"))
    elif how == "never":
        mesh.now += FORGET_S
    else:
        mesh.remove(1)
        mesh.replace(1)
        mesh.now += TICK_S
    await asyncio.sleep(0)
    mesh.beat(1, "theirs")
    assert mesh.asked == [1, 1]
    if how in ("never", "from a predecessor"):
        mesh.answers[0].set_result(m.Reported(0, None, now_s=5.0))
        await asyncio.sleep(0)
    assert mesh.monitor.clocks.clock_of(1).offset(0.0) is None
    await mesh.monitor.aclose()


async def test_nobody_is_asked_for_the_time_when_the_mesh_is_over(monkeypatch):
    mesh = Mesh(monkeypatch)
    mesh.end()
    mesh.beat(1, "theirs")
    assert mesh.asked == []
    await mesh.monitor.aclose()
