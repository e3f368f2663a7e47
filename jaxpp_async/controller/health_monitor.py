"""Watch the processes of a mesh, and observe deaths, lost connections, silences and steps that stand still.

`HealthMonitor` runs on asyncio; the pure `failure_detector` and `stall_detector` judge heartbeats and reports
for it, every half second. The monitor passes each observation on to one callback. `failure_policy` decides
which observations are failures to act on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from jaxpp_async.controller.actor_group import ActorGroup
from jaxpp_async.controller.deploy import LoadedPrograms
from jaxpp_async.controller.failure_detector import FailureDetector, Verdict
from jaxpp_async.controller.failure_policy import (
    ActorSilent,
    ConnectionLost,
    FailureReported,
    Observation,
    ProcessDied,
    ProtocolBroken,
    StepStuck,
)
from jaxpp_async.controller.mesh_events import MeshEvents
from jaxpp_async.controller.options import ControllerOptions
from jaxpp_async.controller.recovery import Recovery
from jaxpp_async.controller.requests import ActorLink
from jaxpp_async.controller.stall_detector import Stall, StallDetector, describe_position
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.errors import ActorError, ProtocolError
from jaxpp_async.program.instructions import ActorId, ProcessId
from jaxpp_async.protocol.actor_info import Activity, Position, furthest_behind
from jaxpp_async.protocol.clocks import TICK_S, Clocks, SuspendAwareClock, clock_name
from jaxpp_async.protocol.frames import Identity
from jaxpp_async.protocol.messages import Beat, Failed, Reported, step_text
from jaxpp_async.protocol.task_group import OwnedTasks

REPORT_S = 2.0
"""The most seconds that an actor may take to report its position in its program."""

_QUIET_S = 1.5
"""The seconds without a heartbeat after which the failure detector alone judges an actor, whose process may
have been stopped.
"""


class HealthMonitor:
    """A monitor of the processes and steps of one mesh. Everything runs on the mesh's event loop.

    Only processes that are expected to run are watched: nothing is observed of a process that was replaced or
    told to end.

    Args:
        actor_group: the processes, and their heartbeats.
        recovery: tells whether a restart is under way. Until its end, no step counts as stuck.
        programs: the loaded programs, which tell at which instruction a process is.
        under_way: the steps that have not ended, by step id.
        mesh_events: tells users which processes are ready, suspect, and heard again.
        options: the deadlines of the mesh.
        observe: called with each observation.
        monotonic: returns the time in seconds; tests pass a clock of their own.

    Attributes:
        clocks: estimates of the clocks of the processes.
    """

    def __init__(
        self,
        actor_group: ActorGroup,
        recovery: Recovery,
        programs: LoadedPrograms,
        under_way: Mapping[int, SubmittedStep],
        mesh_events: MeshEvents,
        options: ControllerOptions,
        observe: Callable[[Observation], None],
        monotonic: Callable[[], float] = time.monotonic,
    ):
        self._actor_group, self._recovery = actor_group, recovery
        self._programs, self._under_way = programs, under_way
        self._mesh_events, self._options, self._observe = mesh_events, options, observe
        self.clocks, self._monotonic = Clocks(clock_name()), monotonic
        self._awake = SuspendAwareClock(monotonic(), TICK_S)
        self._failure_detector = FailureDetector(options.suspect_s, options.dead_s)
        self._stall_detector = StallDetector(programs.part, options.progress_s)
        self._num_pauses = 0
        self._tasks = OwnedTasks()
        self._examination: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        actor_group.listener.on_beat = self.record_heartbeat

    def watch(self, link: ActorLink) -> None:
        """Start to watch a process that is ready."""
        process = link.info.process
        link.listen(self._on_failed, self._on_connection_lost)
        self._mesh_events.started(link.info)
        self._tasks.start(f"watch {link.info}", self._watch_death(link))
        if self._actor_group.has_processes:
            self._failure_detector.watch(process, self._now())
            if self._timer is None and not self._closed:
                self._set_timer()
        if not link.connection.is_open:
            self._on_connection_lost(link, None)

    def unwatch(self, process: ProcessId) -> None:
        """Stop expecting heartbeats of a process that is dead or will be killed, and forget its clock."""
        self._failure_detector.unwatch(process)
        self.clocks.forget(process)

    def record_heartbeat(self, identity: Identity, beat: Beat) -> None:
        """Record a heartbeat of a process, and ask the process for its time if its clock is not known.

        The listener calls this (`ControlListener.on_beat`).
        """
        process = identity.process_id
        self._failure_detector.record_heartbeat(process, self._now(), beat.position)
        sent_s = self._monotonic()
        if self.clocks.begin_reading(process, beat.clock, sent_s):
            try:
                answer = self._actor_group.request_report(process)
            except ActorError:  # the mesh or the actor has ended
                return
            answer.add_done_callback(partial(self._end_reading, process, sent_s))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context manager. While its context is open, no step counts as stuck; callers use it while
        actors compile.
        """
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses -= 1
            self._stall_detector.restart()

    def judge(self) -> None:
        """Observe which processes are silent now, and begin to examine a step that seems stuck. A timer calls
        this every `TICK_S` seconds.
        """
        now = self._awake.tick(self._monotonic())
        for verdict in self._failure_detector.judge(now):
            self._tell(verdict)
        if self._is_paused:
            self._stall_detector.restart()
        elif self._examination is None or self._examination.done():
            self._judge_steps(now)

    async def aclose(self) -> None:
        """Stop watching processes and steps, and cancel requests for reports that are still open. A second
        call does nothing.
        """
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.aclose()

    # ------------------------------------------------------------ processes and connections

    def _is_current(self, link: ActorLink) -> bool:
        return self._actor_group.links.get(link.info.process) is link and not link.is_detached

    async def _watch_death(self, link: ActorLink) -> None:
        death = await link.handle.wait_dead()
        if self._is_current(link):
            process = link.info.process
            self.unwatch(process)
            step = self._step_of(process)
            self._observe(ProcessDied(link.info, death, step, self._instruction_of(link, step)))

    def _on_connection_lost(self, link: ActorLink, error: Exception | None) -> None:
        if self._is_current(link):
            step = self._step_of(link.info.process)
            self._observe(ConnectionLost(link.info, error, tuple(link.handle.output_tail()), step))

    def _on_failed(self, link: ActorLink, failed: Failed | ProtocolError) -> None:
        is_broken = isinstance(failed, ProtocolError)
        self._observe(ProtocolBroken(failed) if is_broken else FailureReported(link.info, failed))

    def _step_of(self, process: ProcessId) -> int | None:
        """Return the id of the oldest step that a process has not finished, or None if the process has
        finished all steps.
        """
        return self._unfinished([process]).get(process)

    def _instruction_of(self, link: ActorLink, step: int | None) -> str | None:
        """Return the text of the instruction at which a process died in `step`, or None if that is not known.

        The process's position in its program is read with `ActorHandle.progress`, which also works after the
        death.
        """
        at = link.handle.progress()
        return self._programs.instruction_at(link.info.id, at) if at is not None and at.step == step else None

    # ------------------------------------------------------------ heartbeats

    def _now(self) -> float:
        return self._awake.read(self._monotonic())

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._set_timer()
        self.judge()

    def _tell(self, verdict: Verdict) -> None:
        """Pass on a verdict about a process: as an observation if the process is given up, and otherwise as
        an event for users.
        """
        link = self._actor_group.links[verdict.process]
        if verdict.health == "recovered":
            self._mesh_events.recovered(link.info, verdict.silence_s)
            return
        # The page of progress is more recent than the last heartbeat.
        position = link.handle.progress() or verdict.position
        at = describe_position(self._programs.part, link.info.id, position) if position is not None else None
        if verdict.health == "dead":
            step = self._step_of(verdict.process)
            self._observe(ActorSilent(link.info, verdict.silence_s, step, at))
        else:
            self._mesh_events.suspect(link.info, verdict.silence_s, at, self._options.dead_s)

    def _end_reading(self, process: ProcessId, sent_s: float, answer: asyncio.Future[Reported]) -> None:
        has_answer = not answer.cancelled() and answer.exception() is None
        shown_s = answer.result().now_s if has_answer else None
        self.clocks.end_reading(process, sent_s, shown_s, self._monotonic())

    # ------------------------------------------------------------ steps

    @property
    def _is_paused(self) -> bool:
        return self._num_pauses > 0 or not self._recovery.is_running

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

    def activities(self) -> dict[ActorId, Activity]:
        """Return what each actor does that has not finished all steps, by the actor's id."""
        unfinished = self._unfinished(self._failure_detector.watched)
        found: dict[ActorId, Activity] = {}
        for actor, processes in sorted(self._by_actor(unfinished).items()):
            known = [self._position(process) for process in processes]
            at = furthest_behind(known)
            steps = [unfinished[process] for process in processes]
            # the position may be of an earlier step, whose reply is on its way
            is_current = at is not None and at.step in steps
            found[actor] = (
                Activity(describe_position(self._programs.part, actor, at), at.waiting)
                if at is not None and is_current
                else Activity(step_text(min(steps)))
            )
        return found

    def _position(self, process: ProcessId) -> Position | None:
        link = self._actor_group.links.get(process)
        page = link.handle.progress() if link is not None else None
        return page or self._failure_detector.position(process)

    def _by_actor(self, unfinished: Mapping[ProcessId, int]) -> dict[ActorId, list[ProcessId]]:
        found: dict[ActorId, list[ProcessId]] = {}
        for process in unfinished:
            found.setdefault(self._actor_group.processes.actor_of(process), []).append(process)
        return found

    def _steps(self, unfinished: Mapping[ProcessId, int]) -> dict[ActorId, int]:
        by_actor = self._by_actor(unfinished)
        return {a: min(unfinished[p] for p in processes) for a, processes in by_actor.items()}

    def _silent_actors(self, now: float, for_s: float) -> frozenset[ActorId]:
        silent = self._failure_detector.silent(now, for_s)
        return frozenset(map(self._actor_group.processes.actor_of, silent))

    def _judge_steps(self, now: float) -> None:
        unfinished = self._unfinished(self._failure_detector.watched)
        positions = {
            actor: furthest_behind([self._failure_detector.position(process) for process in processes])
            for actor, processes in self._by_actor(unfinished).items()
        }
        silent = self._silent_actors(now, self._options.suspect_s)
        stall = self._stall_detector.judge(now, self._steps(unfinished), positions, silent)
        if stall is not None:
            self._examination = self._tasks.start("ask about a step that stands still", self._examine(stall))

    async def _examine(self, stall: Stall) -> None:
        """Ask the actors why a step makes no progress, and observe that the step is stuck if it is."""
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
        links = self._actor_group.links
        actors = {actor: links[process].info for actor, process in judged_process_of.items()}
        self._stall_detector.restart()
        self._observe(StepStuck(diagnosis, stall.still_s, actors))

    async def _ask_for_reports(self, processes: Mapping[ProcessId, int]) -> dict[ProcessId, Reported | None]:
        """Ask processes for their positions and open transfers, and return their replies by process.

        If a process does not answer in time, its value is None. If the mesh fails meanwhile, the result is
        empty.

        Args:
            processes: a dictionary whose keys are the processes to ask; its values are not used.
        """
        try:
            asked = {process: self._actor_group.request_report(process) for process in processes}
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
        if report is None:
            return -1, 0, False
        return report.step or 0, report.instruction, report.running

    return min(processes, key=position)
