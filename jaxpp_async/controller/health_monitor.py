"""watch: the asyncio shell around `monitor` and `stuck`: beats in; warnings about suspects, and the errors that hung
actors and stuck steps are, out. Judges every half second; never decides what an error means for the mesh.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from jaxpp_async.controller.error_messages import describe_silence, silent_error, stuck_error
from jaxpp_async.controller.failure_detector import DeclaredDead, FailureDetector, Recovered, Suspect, Verdict
from jaxpp_async.controller.options import Deadlines
from jaxpp_async.controller.requests import StepHandle
from jaxpp_async.controller.stall_detector import ProgramOf, Stall, StallDetector, place
from jaxpp_async.errors import ActorError
from jaxpp_async.program.instructions import ActorId, ProcessId
from jaxpp_async.protocol.actor_info import ActorInfo, Position, Topology, furthest_behind, actor_and_rank
from jaxpp_async.protocol.clocks import TICK_S, SuspendAwareClock
from jaxpp_async.protocol.frames import Identity
from jaxpp_async.protocol.messages import Beat, Reported
from jaxpp_async.protocol.task_group import OwnedTasks

_LOG = logging.getLogger("jaxpp_async")

REPORT_S = 2.0
"""What an actor may take to say where it is."""

_QUIET_S = 1.5
"""An actor that was not heard for so long is the monitor's affair: it may be stopped."""


class HealthMonitor:
    """Watches the actors of one mesh. Everything runs on its event loop.

    Args:
        program_of: (program id, actor) to the actor's program, or None.
        under_way: the steps under way, by number.
        info: where an actor is.
        ask: sends `Report` to an actor; gives the reply, to come. May raise `ActorError`.
        fail: takes the error that a silent actor or a stuck step is.
        look: where an actor is by the page that it shares with this host, if it does; a stopped one has told since.
        processes: which are whose; None: each actor is one.
        is_busy: whether actors do something else than steps, such as being started anew; no step is stuck then.
        tell: told of suspects and of those that are back.
    """

    def __init__(
        self,
        *,
        program_of: ProgramOf,
        under_way: Mapping[int, StepHandle],
        info: Callable[[ProcessId], ActorInfo],
        ask: Callable[[ProcessId], asyncio.Future[Reported]],
        fail: Callable[[ActorError], None],
        look: Callable[[ProcessId], Position | None] = lambda process: None,
        is_busy: Callable[[], bool] = lambda: False,
        tell: Callable[[Suspect | Recovered], None] = lambda verdict: None,
        deadlines: Deadlines | None = None,
        processes: Topology | None = None,
    ):
        self._per_actor = processes.per_actor if processes is not None else 1
        deadlines = deadlines or Deadlines()
        self._program_of, self._under_way, self._info, self._ask = program_of, under_way, info, ask
        self._look, self._fail, self._is_busy, self._tell, self._deadlines = (
            look,
            fail,
            is_busy,
            tell,
            deadlines,
        )
        self._clock = SuspendAwareClock(time.monotonic(), TICK_S)
        self._monitor = FailureDetector(deadlines.suspect_s, deadlines.dead_s)
        self._stuck = StallDetector(program_of, deadlines.progress_s)
        self._pauses = 0
        self._tasks = OwnedTasks()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    # ------------------------------------------------------------ for owners

    def watch(self, process: ProcessId) -> None:
        """Watch a process from now on: one that is ready, and beats."""
        self._monitor.watch(process, self._now())
        if self._timer is None and not self._closed:
            self._schedule()

    def unwatch(self, process: ProcessId) -> None:
        """Watch a process no longer: it is dead, or will be made dead."""
        self._monitor.unwatch(process)

    def record_heartbeat(self, identity: Identity, beat: Beat) -> None:
        """Take a sign of life (`Gate.on_beat`)."""
        position = Position(*beat.position) if beat.position is not None else None
        self._monitor.record_heartbeat(identity.process_id, self._now(), position)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No step is stuck meanwhile: actors compile."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            self._stuck.restart()

    def stop(self) -> None:
        """Judge nobody any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    async def aclose(self) -> None:
        """Stop, and end what is asked. A second call does nothing."""
        self.stop()
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
        for verdict in self._monitor.judge(now):
            self._pronounce(verdict)
        if self._is_paused:
            self._stuck.restart()
        elif not self._closed and not self._tasks:
            self._judge_steps(now)

    def _pronounce(self, verdict: Verdict) -> None:
        info = self._info(verdict.process)
        if isinstance(verdict, Recovered):
            _LOG.warning("%s is heard again, after %.1f s", info, verdict.silence_s, extra=_where(info))
            self._tell(verdict)
            return
        position = self._look(verdict.process) or verdict.position
        at = place(self._program_of, info.id, position) if position is not None else None
        if isinstance(verdict, DeclaredDead):
            step = self._unfinished([verdict.process]).get(verdict.process)
            self._fail(silent_error(info, verdict.silence_s, step, at))
            return
        said = describe_silence(info, verdict.silence_s, at)
        _LOG.warning("%s; it is given up after %g s", said, self._deadlines.dead_s, extra=_where(info))
        self._tell(verdict)

    def _unfinished(self, processes: Sequence[ProcessId]) -> dict[ProcessId, int]:
        """The oldest step that each process has not finished; those without one are left out."""
        found: dict[ProcessId, int] = {}
        for step, handle in sorted(self._under_way.items()):
            for process in processes:
                if process not in found and handle.waits_for(process):
                    found[process] = step
        return found

    def _by_actor(self, unfinished: Mapping[ProcessId, int]) -> dict[ActorId, list[ProcessId]]:
        found: dict[ActorId, list[ProcessId]] = {}
        for process in unfinished:
            found.setdefault(actor_and_rank(process, self._per_actor)[0], []).append(process)
        return found

    def _steps(self, unfinished: Mapping[ProcessId, int]) -> dict[ActorId, int]:
        return {
            a: min(unfinished[p] for p in processes) for a, processes in self._by_actor(unfinished).items()
        }

    def _actors(self, processes: Collection[ProcessId]) -> frozenset[ActorId]:
        return frozenset(actor_and_rank(process, self._per_actor)[0] for process in processes)

    def _judge_steps(self, now: float) -> None:
        unfinished = self._unfinished(self._monitor.watched)
        positions = {
            actor: furthest_behind([self._monitor.position(process) for process in processes])
            for actor, processes in self._by_actor(unfinished).items()
        }
        silent = self._actors(self._monitor.silent(now, self._deadlines.suspect_s))
        stall = self._stuck.judge(now, self._steps(unfinished), positions, silent)
        if stall is not None:
            self._tasks.start("ask about a step that stands still", self._inquire(stall))

    async def _inquire(self, stall: Stall) -> None:
        told = await self._reports(self._unfinished(self._monitor.watched))
        now = self._now()
        silent = self._actors(self._monitor.silent(now, min(_QUIET_S, self._deadlines.suspect_s)))
        unfinished = self._unfinished([process for process in self._monitor.watched if process in told])
        speakers = {a: _speaker(processes, told) for a, processes in self._by_actor(unfinished).items()}
        reports = {actor: told[process] for actor, process in speakers.items()}
        diagnosis = self._stuck.conclude(now, stall, self._steps(unfinished), reports, silent)
        if diagnosis is None or self._is_paused or self._closed:
            return
        actors = {actor: self._info(process) for actor, process in speakers.items()}
        self._stuck.restart()
        self._fail(stuck_error(diagnosis, stall.still_s, actors))

    async def _reports(self, processes: Mapping[ProcessId, int]) -> dict[ProcessId, Reported | None]:
        """What they say; None of one that does not in time. Nothing at all if the mesh ends meanwhile."""
        try:
            asked = {process: self._ask(process) for process in processes}
            if asked:
                await asyncio.wait(asked.values(), timeout=REPORT_S)
            return {process: future.result() if future.done() else None for process, future in asked.items()}
        except ActorError:
            return {}


def _speaker(processes: Sequence[ProcessId], told: Mapping[ProcessId, Reported | None]) -> ProcessId:
    """Who tells where an actor is: one that says nothing, or the one that is furthest behind. Those before it may only
    wait for it, in a task that they compute together."""

    def actor_and_rank(process: ProcessId) -> tuple[int, int, bool]:
        said = told[process]
        return (said.step or 0, said.instruction, said.running) if said is not None else (-1, 0, False)

    return min(processes, key=actor_and_rank)


def _where(info: ActorInfo) -> dict[str, object]:
    """For log records."""
    return {"actor": info.id, "host": info.host}
