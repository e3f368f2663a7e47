"""Follow each step on the controller, from the call of `mesh.run` or `mesh.submit` to its timeline.

`SubmittedStep` is the one object for a step. A `SubmittedStep` exists from when the caller begins to wait for
the step's turn, and receives the replies of the step's processes, also if a restart (the replacement of lost
actors) sends the step again. Afterwards the object computes the step's statistics and timeline. A move of
arrays ahead of a step is a small program of its own, and is followed by a `SubmittedStep` too.

`UnfinishedSteps` has the user's steps of one mesh until they end, and reports a step whose caller was
cancelled, if another step waits long for it. A step that has been sent to the actors runs to its end even if
its caller is cancelled, and later steps have to wait for it. Without a report, the next step would merely
seem to take longer.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxpp_async.base.printable import first_line
from jaxpp_async.errors import MeshError, ProtocolError
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import ActorId, ProcessId, Send
from jaxpp_async.program.work import CutChoice, LoopCut, TaskWork
from jaxpp_async.protocol.actor_info import ActorInfo
from jaxpp_async.protocol.clocks import Clock, Readings
from jaxpp_async.protocol.messages import RunKind, StepId, StepStats, step_number, step_text
from jaxpp_async.timeline import Recorded, Timeline, make_timeline, no_cut

if TYPE_CHECKING:
    from jaxpp_async.controller.requests import ActorLink

PATIENCE_S = 5.0
"""The number of seconds for which a step may wait behind an abandoned one before a warning reports it."""


class _Reply(NamedTuple):
    """The reply of an actor's first process to a step, with what is needed to compare its clock later.

    After a later restart the actor may run in another process, with another clock.

    Args:
        stats: the statistics that the process sent.
        heard_s: the time at which the reply arrived, in seconds of this process's monotonic clock.
        info: the host and pid of the process.
        clock: the estimate of the process's clock.
        readings: the readings of that clock at the time of the reply.
    """

    stats: StepStats
    heard_s: float
    info: ActorInfo
    clock: Clock
    readings: Readings

    def recorded(self, program: ActorProgram) -> Recorded:
        """Return what a timeline needs to know of the actor, which ran `program`."""
        offset = self.clock.offset(self.heard_s, self.readings)
        return Recorded(
            program=program,
            stamps=self.stats.stamps,
            heard_s=self.heard_s,
            offset_s=offset.offset_s if offset is not None else 0.0,
            error_s=offset.error_s if offset is not None else None,
            host=self.info.host,
            pid=self.info.pid,
        )


class SubmittedStep:
    """A step of one mesh, from when its caller begins to wait for its turn until nobody asks for it any more.

    Awaiting this object waits until every actor has finished the step, and then returns each actor's
    `StepStats` by actor id, or raises the step's error. If an await is cancelled, the step continues and can
    be awaited again.

    The object is not a future. When the step ends, it calls its callbacks immediately, and callers that await
    it continue in the next pass of the event loop. With a shielded future that would take two passes.

    Args:
        program_id: the program that the step runs.
        name: the name of the step function; empty if no user gets to see it.
        kind: the kind of the step.
        count_works: a function that returns the work of each executable of the step, for its timeline.
        find_cut: a function that returns the cut of the step's loop into stages, for its timeline.
        cut_choice: how that cut was chosen, for the timeline's advice.

    Attributes:
        id: the step's id; not set until the step's turn has come (see `assign`).
        is_sent: whether the step has been sent to its processes. The controller sets this.
        sent_s: the time at which the step was last sent, in seconds of this process's monotonic clock.
        sends: the future of each transfer of the step's large host values.
        error: the error with which the step failed, or None.
        loop: the event loop of the mesh. The step stores it because its caller's coroutine may be closed or
            garbage-collected while no loop runs.
        begun_s: the time at which the caller began to wait for the step's turn, in seconds of the loop's
            clock.
        abandoned_s: the time at which the caller was cancelled after the step had been sent, in seconds of
            the loop's clock; None if that has not happened.
    """

    id: StepId
    sent_s: float
    _processes: Sequence[ProcessId]
    _programs: Mapping[ActorId, ActorProgram]
    is_refused = False  # a step whose process reports a failure fails the mesh
    fails_mesh = True
    is_sent = False
    error: Exception | None = None
    abandoned_s: float | None = None
    _traceback: TracebackType | None = None
    _done = False
    _clock_of: Callable[[ProcessId], Clock] | None = None

    def __init__(
        self,
        program_id: int,
        name: str = "",
        kind: RunKind = "step",
        count_works: Callable[[], Sequence[TaskWork]] = tuple,
        find_cut: Callable[[], LoopCut | None] = no_cut,
        cut_choice: CutChoice = "",
    ):
        self.program_id, self.name = program_id, name
        self._count_works, self._find_cut = count_works, find_cut
        self._cut_choice: CutChoice = cut_choice
        self.kind: RunKind = kind
        self.loop = asyncio.get_running_loop()
        self.begun_s = self.loop.time()
        self.sends: list[asyncio.Future[None]] = []
        self._waiting: set[ProcessId] = set()
        self._replies: dict[ActorId, _Reply] = {}
        self._callbacks: list[Callable[[], object]] = []
        self._awaiting: list[asyncio.Future[None]] = []

    # ------------------------------------------------------------ from its turn to its end

    def assign(
        self,
        step_id: StepId,
        processes: Sequence[ProcessId],
        programs: Mapping[ActorId, ActorProgram],
        clock_of: Callable[[ProcessId], Clock],
    ) -> None:
        """Set what is known once the step's turn has come, immediately before the step is sent.

        Args:
            step_id: the step's id.
            processes: the processes that run the step. Of the processes of one actor, only the first one's
                statistics are kept.
            programs: the program of each actor.
            clock_of: returns the estimate of a process's clock.
        """
        self.id, self._processes, self._programs, self._clock_of = step_id, processes, programs, clock_of
        self.reset()

    def withdraw(self) -> None:
        """End the step, because it will not be sent; do nothing if the step has been sent."""
        if not self.is_sent:
            self._end(MeshError(f"step {self.name!r} was not sent"))

    def waits_for(self, process: ProcessId) -> bool:
        """Return whether this process has not finished the step yet."""
        return process in self._waiting

    def reset(self) -> None:
        """Forget all replies, since a restart is about to send the step again to all its processes."""
        self._waiting = set(self._processes)
        self._replies.clear()
        self.sent_s = time.monotonic()

    def on_reply(self, link: ActorLink, reply: Any) -> None:
        """Record the reply of one process; the step finishes with the last process's reply.

        A reply after the step's end is ignored. Such replies arrive if a restart runs a finished step again.

        Args:
            link: the process that replied.
            reply: the reply.

        Raises:
            ProtocolError: the reply is of another step.
        """
        info = link.info
        if reply.step != self.id:
            text = f"{info} answered {step_text(self.id)} with the end of {step_text(reply.step)}"
            raise ProtocolError(text, actor=info.id)
        if self._done:
            return
        process = info.process
        if info.rank == 0:
            assert self._clock_of is not None
            clock = self._clock_of(process)
            self._replies[info.id] = _Reply(reply.stats, time.monotonic(), info, clock, clock.readings)
        self._waiting.discard(process)
        if not self._waiting:
            self._end(None)

    def finish(self) -> None:
        """End the step successfully, and run its callbacks."""
        self._end(None)

    def fail(self, error: Exception) -> None:
        """End the step with an error and run its callbacks; do nothing if the step has already ended."""
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        if self._done:
            return
        self._done, self.error, self._traceback = True, error, error and error.__traceback__
        self._clock_of = None  # the step may be kept for long, and must not keep the controller
        callbacks, self._callbacks = self._callbacks, []
        awaiting, self._awaiting = self._awaiting, []
        for callback in callbacks:
            self._call(callback)
        for awaited in awaiting:
            if not awaited.done():
                awaited.set_result(None)

    def _call(self, callback: Callable[[], object]) -> None:
        try:
            callback()
        except Exception as error:
            # An error in a caller's callback must not keep the step's end from all others who wait for it.
            what = f"a callback at the end of {step_text(self.id)} failed"
            self.loop.call_exception_handler({"message": what, "exception": error})

    # ------------------------------------------------------------ waiting for its end

    def __await__(self) -> Generator[Any, None, dict[ActorId, StepStats]]:
        if not self._done:
            awaited: asyncio.Future[None] = self.loop.create_future()
            self._awaiting.append(awaited)
            yield from awaited
        return self.result()

    def result(self) -> dict[ActorId, StepStats]:
        """Return the statistics of a finished step, by actor id.

        Raises:
            Exception: the step's error, if it failed.
        """
        if self.error is not None:
            # The original traceback is restored, since otherwise every await would add to it.
            raise self.error.with_traceback(self._traceback)
        return {actor: reply.stats for actor, reply in self._replies.items()}

    @property
    def error_is_seen(self) -> bool:
        """Whether a caller would see an error that ends this step now.

        Every step has a caller, so this is True until the step has ended.
        """
        return not self._done

    @property
    def done(self) -> bool:
        """Whether the step has finished or failed, or will not be sent."""
        return self._done

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` as soon as the step has ended, or immediately if it already has.

        Callbacks are called in the order in which they were passed to this method. If a callback raises an
        error, the event loop's exception handler gets the error, and the other callbacks are still called.
        """
        if self._done:
            self._call(callback)
        else:
            self._callbacks.append(callback)

    async def wait_sent(self) -> None:
        """Wait until the step's host values (numpy arrays) have been sent, so that the arrays may be changed.

        This also returns when the step has failed. The transfers of a failed step may continue for a long
        time, since UCX releases memory only when all transfers that use the memory have ended. The transfers
        keep their memory alive, and the receiving actors ignore the data.
        """
        waiting = sum(not send.done() for send in self.sends)
        if not waiting or self.error is not None:
            return
        ended: asyncio.Future[None] = self.loop.create_future()

        def wake() -> None:
            if not ended.done():
                ended.set_result(None)

        def on_sent(_: object) -> None:
            nonlocal waiting
            waiting -= 1
            if waiting == 0:
                wake()

        for send in self.sends:
            if not send.done():
                send.add_done_callback(on_sent)
        self.when_done(lambda: wake() if self.error is not None else None)
        await ended

    # ------------------------------------------------------------ what is known of it afterwards

    @property
    def title(self) -> str:
        """The step's number and name, such as `"step 7 ('train_step')"`."""
        return f"{step_text(self.id)} ({self.name!r})"

    def stats(self) -> list[StepStats]:
        """Return the statistics of each actor for this step, in the order of the actors.

        Raises:
            MeshError: the step has not finished, or failed.
        """
        self._check_finished("stats")
        return [self._replies[actor].stats for actor in sorted(self._replies)]

    def sent_bytes(self) -> int:
        """Return the bytes that the actors send to each other in one run of the step's programs."""
        return sum(
            program.avals[instruction.buffer].size_bytes
            for program in self._programs.values()
            for instruction in program.instructions
            if isinstance(instruction, Send)
        )

    def timeline(self) -> Timeline:
        """Return what each actor did in this step, and when. Until this is called, nothing is computed.

        Raises:
            MeshError: the step has not finished, or failed.
        """
        self._check_finished("a timeline")
        recorded = {actor: reply.recorded(self._programs[actor]) for actor, reply in self._replies.items()}
        return make_timeline(
            step_number(self.id),
            self.name,
            self.sent_s,
            recorded,
            self._count_works,
            self._find_cut,
            self._cut_choice,
        )

    def _check_finished(self, wanted: str) -> None:
        if not self._done:
            raise MeshError(f"a step has {wanted} once it has finished; await it first")
        if self.error is not None:
            wanted = wanted.removeprefix("a ")
            raise MeshError(f"{self.title} failed, so it has no {wanted}: {first_line(self.error)}")


class UnfinishedSteps:
    """The user's unfinished steps of one mesh, in the order of their calls.

    A step is abandoned when its caller has been cancelled after the step was sent. This object reports an
    abandoned step for which another step has waited long, and does not change how steps run.

    Args:
        report: a function that is called at most once for each abandoned step. Its arguments are the
            abandoned step and the step that waits for it.
    """

    def __init__(self, report: Callable[[SubmittedStep, SubmittedStep], None]):
        self._report = report
        self._steps: dict[SubmittedStep, None] = {}

    def add(self, step: SubmittedStep) -> None:
        """Add a step that begins to wait for its turn; it is removed when it ends."""
        self._steps[step] = None
        step.when_done(partial(self._steps.pop, step, None))

    def mark_abandoned(self, step: SubmittedStep) -> None:
        """Record that the caller of a step no longer awaits it, although the step was sent.

        A step that has ended is ignored, since it delays no other step.
        """
        if not step.done and not step.loop.is_closed():
            step.abandoned_s = step.loop.time()
            step.loop.call_later(PATIENCE_S, self._report_if_due, step)

    def _report_if_due(self, step: SubmittedStep) -> None:
        """Report an abandoned step if the next step has waited for it for `PATIENCE_S` seconds.

        Otherwise look again as soon as the next step may have waited that long.
        """
        if step.done:
            return
        behind = itertools.dropwhile(lambda other: other is not step, self._steps)
        waiter = next((other for other in behind if other.abandoned_s is None), None)
        waited_s = 0.0
        if waiter is not None:
            assert step.abandoned_s is not None
            waited_s = step.loop.time() - max(step.abandoned_s, waiter.begun_s)
            if waited_s >= PATIENCE_S:
                self._report(step, waiter)
                return
        step.loop.call_later(PATIENCE_S - waited_s, self._report_if_due, step)
