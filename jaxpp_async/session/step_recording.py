"""recording: a step that has been sent in; its timeline out, once it has finished. Keeps what that takes, and reads it
when somebody asks: a step that nobody asks about costs a few references here.

left_behind: steps whose caller has gone in; a word about them out, once another step has waited behind one.

A step that was sent runs to its end in front of the next one, and nobody awaits it any more: without a word its length
looks like the next one's. Starts no task, and changes nothing of what runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from jaxpp_async.controller.controller import Controller
from jaxpp_async.controller.requests import StepHandle
from jaxpp_async.errors import MeshError
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import ActorId
from jaxpp_async.protocol.actor_info import ActorInfo
from jaxpp_async.protocol.clocks import Clock, Readings
from jaxpp_async.protocol.messages import step_number, step_text
from jaxpp_async.timeline import Recorded, Timeline, make_timeline


class Recording:
    """A step under way, or finished.

    Args:
        name: the step function's.
        handle: knows what the actors answered, and when.
        programs: what they ran.
        controller: knows who the actors are, and their clocks.
    """

    __slots__ = ("_controller", "_processes", "handle", "name", "programs")

    def __init__(
        self, name: str, handle: StepHandle, programs: Sequence[ActorProgram], controller: Controller
    ):
        self.name, self.handle, self.programs = name, handle, programs
        self._controller: Controller | None = controller
        self._processes: dict[ActorId, tuple[ActorInfo, Clock, Readings]] = {}
        handle.when_done(self._keep)

    @property
    def what(self) -> str:
        """Which step it is, such as `"step 7 ('train_step')"`."""
        return f"{step_text(self.handle.step)} ({self.name!r})"

    def timeline(self) -> Timeline:
        """What each actor did, and when.

        Raises:
            MeshError: the step has not finished, or failed.
        """
        if not self.handle.done:
            raise MeshError("a step has a timeline once it has finished; await it first")
        if (error := self.handle.error) is not None:
            raise MeshError(f"{self.what} failed, so it has no timeline: {first_line(error)}")
        by_actor = {p.actor: p for p in self.programs}
        recorded = {a: self._recorded(by_actor[a], stats.stamps) for a, stats in self.handle.result().items()}
        return make_timeline(step_number(self.handle.step), self.name, self.handle.sent_s, recorded)

    def _keep(self) -> None:
        """The step has ended: keep who ran it. After a restart its actors may be other processes, with other clocks."""
        controller, self._controller = self._controller, None
        if controller is None or self.handle.error is not None:
            return
        for actor in self.handle.heard_s:
            clock = controller.clock(actor)
            first = controller.processes.process(actor, 0)
            self._processes[actor] = controller.request_log.info(first), clock, clock.readings

    def _recorded(self, program: ActorProgram, stamps: bytes) -> Recorded:
        info, clock, readings = self._processes[program.actor]
        heard_s = self.handle.heard_s[program.actor]
        offset = clock.offset(heard_s, readings)
        return Recorded(
            program=program,
            stamps=stamps,
            heard_s=heard_s,
            offset_s=offset.offset_s if offset is not None else 0.0,
            error_s=offset.error_s if offset is not None else None,
            host=info.host,
            pid=info.pid,
        )


def first_line(error: Exception) -> str:
    """The first line of what an error says, or its type."""
    return next(iter(str(error).splitlines()), type(error).__name__)


# ---------------------------------------------------------------- left behind

PATIENCE_S = 5.0
"""How long a step may wait behind a cancelled one before that is said."""


@dataclass(slots=True, eq=False)
class StepQueueEntry:
    """One step's, from when it begins to wait for its place until it has ended.

    As a context it is around what sends the step: whatever is raised there ends the turn.

    Attributes:
        loop: the mesh's; a caller may go where none runs, when its coroutine is closed or collected.
        handle: once it was sent.
        waiter: the step behind it whose wait is timed.
        is_told: that wait, or an earlier one, was told.
    """

    line: AbandonedSteps
    name: str
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    handle: StepHandle | None = None
    reply_handler: StepQueueEntry | None = None
    timer: asyncio.TimerHandle | None = None
    is_told: bool = False

    def __enter__(self) -> StepQueueEntry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None:
            self.line.end(self)

    def sent(self, handle: StepHandle) -> None:
        """It is under way."""
        self.handle = handle
        handle.when_done(lambda: self.line.end(self))

    def time(self, reply_handler: StepQueueEntry | None, tell: Callable[[StepHandle, str], None]) -> None:
        """Have `waiter`'s wait timed, from now if it was not already, and nobody else's."""
        if reply_handler is self.reply_handler or self.is_told:
            return
        if self.timer is not None:
            self.timer.cancel()
        self.reply_handler, self.timer = reply_handler, None
        if reply_handler is not None and not self.loop.is_closed():
            self.timer = self.loop.call_later(PATIENCE_S, self._tell, tell, reply_handler.name)

    def _tell(self, tell: Callable[[StepHandle, str], None], name: str) -> None:
        assert self.handle is not None  # only one that was sent is left behind
        self.is_told = True
        tell(self.handle, name)


class AbandonedSteps:
    """The steps of one mesh in their order, and which of them run on without their caller.

    Args:
        tell: called once at most for each of these, with its handle and the name of the step that waits.
    """

    def __init__(self, tell: Callable[[StepHandle, str], None]):
        self._tell = tell
        self._line: dict[StepQueueEntry, None] = {}
        self._left: set[StepQueueEntry] = set()

    def begin(self, name: str) -> StepQueueEntry:
        """A step is about to be sent, or to wait for that, behind all that have begun."""
        turn = StepQueueEntry(self, name)
        self._line[turn] = None
        self._look()
        return turn

    def note(self, handle: StepHandle) -> None:
        """A step's caller has gone."""
        self._left.update(turn for turn in self._line if turn.handle is handle)
        self._look()

    def end(self, turn: StepQueueEntry) -> None:
        """A step has ended, or will not be sent."""
        turn.time(None, self._tell)
        self._line.pop(turn, None)
        self._left.discard(turn)
        self._look()

    def _look(self) -> None:
        """Time the first wait behind each that was left."""
        if not self._left:
            return
        reply_handler: StepQueueEntry | None = None
        for turn in reversed(self._line):
            if turn in self._left:
                turn.time(reply_handler, self._tell)
            else:
                reply_handler = turn
