"""Find silent actors and steps that make no progress, by judging heartbeats and reports every half second.

`HealthMonitor` runs on asyncio; the pure `failure_detector` and `stall_detector` make its decisions. The
monitor logs warnings about suspect actors, and makes the errors about actors that hang and steps that are
stuck. `failure_policy` decides what such an error means for the mesh. `ClockWatch` estimates from heartbeats
and reports how the actors' clocks differ from this process's clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxpp_async.controller.error_messages import describe_silence, silent_error, stuck_error
from jaxpp_async.controller.failure_detector import DeclaredDead, FailureDetector, Recovered, Suspect, Verdict
from jaxpp_async.controller.options import ControllerOptions
from jaxpp_async.controller.stall_detector import ProgramOf, Stall, StallDetector, describe_position
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.errors import ActorError
from jaxpp_async.program.instructions import ActorId, ProcessId
from jaxpp_async.protocol.actor_info import ActorInfo, Position, actor_and_rank, furthest_behind
from jaxpp_async.protocol.clocks import TICK_S, Clock, Clocks, SuspendAwareClock, clock_name
from jaxpp_async.protocol.frames import Identity
from jaxpp_async.protocol.messages import Beat, Reported
from jaxpp_async.protocol.task_group import OwnedTasks

_LOG = logging.getLogger("jaxpp_async")

REPORT_S = 2.0
"""The most seconds that an actor may take to report its position in its program."""

_QUIET_S = 1.5
"""The seconds without a heartbeat after which the failure detector alone judges an actor, whose process may
have been stopped.
"""


class HealthMonitor:
    """A monitor that detects silent actors and stuck steps of one mesh. Everything runs on the mesh's event
    loop.

    Args:
        program_of: called with a program id and an actor; returns the actor's part of the program, or None if
            there is none.
        under_way: the steps that have not ended, by step id.
        info: returns the host, pid and state of a process.
        ask: sends `Report` to a process and returns the future reply; may raise `ActorError`.
        fail: called with the error for a silent actor or a stuck step.
        options: the deadlines, and the number of processes per actor.
        read_progress: returns a process's position in its program, read from a page of memory that the
            process shares with this host, or None if there is no such page. The page is more recent than the
            last heartbeat.
        is_busy: returns whether actors do something other than steps, for example because one is being
            replaced. While they do, no step counts as stuck.
        on_verdict: called when a process becomes suspect, and when a suspect process recovers.
    """

    def __init__(
        self,
        *,
        program_of: ProgramOf,
        under_way: Mapping[int, SubmittedStep],
        info: Callable[[ProcessId], ActorInfo],
        ask: Callable[[ProcessId], asyncio.Future[Reported]],
        fail: Callable[[ActorError], None],
        options: ControllerOptions,
        read_progress: Callable[[ProcessId], Position | None] = lambda process: None,
        is_busy: Callable[[], bool] = lambda: False,
        on_verdict: Callable[[Suspect | Recovered], None] = lambda verdict: None,
    ):
        self._program_of, self._under_way, self._info, self._ask = program_of, under_way, info, ask
        self._fail, self._read_progress, self._is_busy = fail, read_progress, is_busy
        self._on_verdict, self._options = on_verdict, options
        self._clock = SuspendAwareClock(time.monotonic(), TICK_S)
        self._failure_detector = FailureDetector(options.suspect_s, options.dead_s)
        self._stall_detector = StallDetector(program_of, options.progress_s)
        self._pauses = 0
        self._tasks = OwnedTasks()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def watch(self, process: ProcessId) -> None:
        """Start to watch a process that is ready and sends heartbeats."""
        self._failure_detector.watch(process, self._now())
        if self._timer is None and not self._closed:
            self._schedule()

    def unwatch(self, process: ProcessId) -> None:
        """Stop watching a process that is dead or will be killed."""
        self._failure_detector.unwatch(process)

    def record_heartbeat(self, identity: Identity, beat: Beat) -> None:
        """Record a heartbeat of a process; the listener calls this (`ControlListener.on_beat`)."""
        position = Position(*beat.position) if beat.position is not None else None
        self._failure_detector.record_heartbeat(identity.process_id, self._now(), position)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context manager. While its context is open, no step counts as stuck; callers use it while
        actors compile.
        """
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            self._stall_detector.restart()

    async def aclose(self) -> None:
        """Stop judging processes and steps, and cancel requests for reports that are still open. A second
        call does nothing.
        """
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.aclose()

    # ------------------------------------------------------------ judging

    @property
    def _is_paused(self) -> bool:
        return self._pauses > 0 or self._is_busy()

    def _now(self) -> float:
        return self._clock.read(time.monotonic())

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        now = self._clock.tick(time.monotonic())
        if self._closed:
            return
        self._schedule()
        for verdict in self._failure_detector.judge(now):
            self._report_verdict(verdict)
        if self._is_paused:
            self._stall_detector.restart()
        elif not self._closed and not self._tasks:
            self._judge_steps(now)

    def _report_verdict(self, verdict: Verdict) -> None:
        info = self._info(verdict.process)
        if isinstance(verdict, Recovered):
            _LOG.warning("%s is heard again, after %.1f s", info, verdict.silence_s, extra=_log_fields(info))
            self._on_verdict(verdict)
            return
        position = self._read_progress(verdict.process) or verdict.position
        at = describe_position(self._program_of, info.id, position) if position is not None else None
        if isinstance(verdict, DeclaredDead):
            step = self._unfinished([verdict.process]).get(verdict.process)
            self._fail(silent_error(info, verdict.silence_s, step, at))
            return
        said = describe_silence(info, verdict.silence_s, at)
        _LOG.warning("%s; it is given up after %g s", said, self._options.dead_s, extra=_log_fields(info))
        self._on_verdict(verdict)

    def _unfinished(self, processes: Sequence[ProcessId]) -> dict[ProcessId, int]:
        """Return, for each process, the id of the oldest step that it has not finished.

        Processes that have finished all steps are left out.
        """
        found: dict[ProcessId, int] = {}
        for step, handle in sorted(self._under_way.items()):
            for process in processes:
                if process not in found and handle.waits_for(process):
                    found[process] = step
        return found

    def _actor_of(self, process: ProcessId) -> ActorId:
        return actor_and_rank(process, self._options.actors.processes_per_actor)[0]

    def _by_actor(self, unfinished: Mapping[ProcessId, int]) -> dict[ActorId, list[ProcessId]]:
        found: dict[ActorId, list[ProcessId]] = {}
        for process in unfinished:
            found.setdefault(self._actor_of(process), []).append(process)
        return found

    def _steps(self, unfinished: Mapping[ProcessId, int]) -> dict[ActorId, int]:
        by_actor = self._by_actor(unfinished)
        return {a: min(unfinished[p] for p in processes) for a, processes in by_actor.items()}

    def _silent_actors(self, now: float, for_s: float) -> frozenset[ActorId]:
        return frozenset(map(self._actor_of, self._failure_detector.silent(now, for_s)))

    def _judge_steps(self, now: float) -> None:
        unfinished = self._unfinished(self._failure_detector.watched)
        positions = {
            actor: furthest_behind([self._failure_detector.position(process) for process in processes])
            for actor, processes in self._by_actor(unfinished).items()
        }
        silent = self._silent_actors(now, self._options.suspect_s)
        stall = self._stall_detector.judge(now, self._steps(unfinished), positions, silent)
        if stall is not None:
            self._tasks.start("ask about a step that stands still", self._examine(stall))

    async def _examine(self, stall: Stall) -> None:
        """Ask the actors why a step makes no progress, and fail the mesh if the step is stuck."""
        reports_of = await self._ask_for_reports(self._unfinished(self._failure_detector.watched))
        now = self._now()
        silent = self._silent_actors(now, min(_QUIET_S, self._options.suspect_s))
        unfinished = self._unfinished(
            [process for process in self._failure_detector.watched if process in reports_of]
        )
        judged_process_of = {
            a: _furthest_behind_or_silent(processes, reports_of)
            for a, processes in self._by_actor(unfinished).items()
        }
        reports = {actor: reports_of[process] for actor, process in judged_process_of.items()}
        diagnosis = self._stall_detector.conclude(now, stall, self._steps(unfinished), reports, silent)
        if diagnosis is None or self._is_paused or self._closed:
            return
        actors = {actor: self._info(process) for actor, process in judged_process_of.items()}
        self._stall_detector.restart()
        self._fail(stuck_error(diagnosis, stall.still_s, actors))

    async def _ask_for_reports(self, processes: Mapping[ProcessId, int]) -> dict[ProcessId, Reported | None]:
        """Ask processes for their positions and open transfers, and return their replies by process.

        If a process does not answer in time, its value is None. If the mesh fails meanwhile, the result is
        empty.

        Args:
            processes: a dictionary whose keys are the processes to ask; its values are not used.
        """
        try:
            asked = {process: self._ask(process) for process in processes}
            if asked:
                await asyncio.wait(asked.values(), timeout=REPORT_S)
            return {process: future.result() if future.done() else None for process, future in asked.items()}
        except ActorError:
            return {}


def _furthest_behind_or_silent(
    processes: Sequence[ProcessId], reports_of: Mapping[ProcessId, Reported | None]
) -> ProcessId:
    """Choose the process whose report stands for its whole actor in the search for the reason of a stall.

    This is a process that did not answer, if there is one. Otherwise it is the process whose reported
    position is furthest behind, because the other processes may be waiting for that process in a task that
    they compute together.

    Args:
        processes: the processes of one actor.
        reports_of: the report of each process, or None if it did not answer.
    """

    def position(process: ProcessId) -> tuple[int, int, bool]:
        report = reports_of[process]
        return (
            (report.step or 0, report.instruction, report.running) if report is not None else (-1, 0, False)
        )

    return min(processes, key=position)


def _log_fields(info: ActorInfo) -> dict[str, object]:
    """Return the extra fields of a log record about an actor: its id and host."""
    return {"actor": info.id, "host": info.host}


# ---------------------------------------------------------------- clocks

FORGET_S = 5.0
"""The seconds after which a question that has no answer is repeated, since a restart may have dropped it."""


class ClockWatch:
    """Estimates of the clocks of one mesh's actor processes, relative to this process's clock.

    Each heartbeat names the clock that its sender reads. If this process reads another clock, this object
    asks the sender for its time, unless an earlier question is still unanswered. This costs two small
    messages every half second, and needs no timer and no asyncio task.

    Args:
        ask: sends `Report` to a process and returns the future reply; may raise `ActorError`.
        own: the name of this process's clock; None: `clock_name()`. Tests pass a name.
    """

    def __init__(self, ask: Callable[[ProcessId], asyncio.Future[Reported]], own: str | None = None):
        self._ask = ask
        self._clocks = Clocks(clock_name() if own is None else own)
        self._asked: dict[ProcessId, float] = {}

    def begin(self, process: ProcessId) -> None:
        """Start to estimate the clock of a process that has just started, and forget the clock of the process
        that it replaces, if any.
        """
        self._clocks.forget(process)
        self._asked.pop(process, None)

    def record_heartbeat(self, identity: Identity, beat: Beat) -> None:
        """Record the clock that a heartbeat names. If this is not the clock of this process, ask the sender
        for its time.

        The listener calls this (`ControlListener.on_beat`).
        """
        process, now = identity.process_id, time.monotonic()
        self._clocks.name(process, beat.clock)
        if self._clocks.clock_of(process).is_own or now - self._asked.get(process, -math.inf) < FORGET_S:
            return
        try:
            answer = self._ask(process)
        except ActorError:  # the mesh or the actor has ended
            return
        self._asked[process] = now
        answer.add_done_callback(lambda future: self._note_answer(process, now, future))

    def clock_of(self, process: ProcessId) -> Clock:
        """Return the estimate of a process's clock.

        Later answers of the process update the returned object.
        """
        return self._clocks.clock_of(process)

    def _note_answer(self, process: ProcessId, sent_s: float, answer: asyncio.Future[Reported]) -> None:
        if self._asked.get(process) != sent_s:
            return  # the question was for this process's predecessor
        del self._asked[process]
        if answer.cancelled() or answer.exception() is not None or (shown_s := answer.result().now_s) is None:
            return
        self._clocks.note(process, sent_s, shown_s, time.monotonic())
