"""left_behind: steps whose caller has gone in; a word about them out, once another step has waited behind one.

A step that was sent runs to its end in front of the next one, and nobody awaits it any more: without a word its length
looks like the next one's. Starts no task, and changes nothing of what runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from jaxpp_async.actors.crew.step_handle import StepHandle

PATIENCE_S = 5.0
"""How long a step may wait behind a cancelled one before that is said."""


@dataclass(slots=True, eq=False)
class Turn:
    """One step's, from when it begins to wait for its place until it has ended.

    As a context it is around what sends the step: whatever is raised there ends the turn.

    Attributes:
        loop: the mesh's; a caller may go where none runs, when its coroutine is closed or collected.
        handle: once it was sent.
        waiter: the step behind it whose wait is timed.
        is_told: that wait, or an earlier one, was told.
    """

    line: LeftBehind
    name: str
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    handle: StepHandle | None = None
    waiter: Turn | None = None
    timer: asyncio.TimerHandle | None = None
    is_told: bool = False

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.line.end(self)

    def sent(self, handle: StepHandle) -> None:
        """It is under way."""
        self.handle = handle
        handle.when_done(lambda: self.line.end(self))

    def time(self, waiter: Turn | None, tell: Callable[[StepHandle, str], None]) -> None:
        """Have `waiter`'s wait timed, from now if it was not already, and nobody else's."""
        if waiter is self.waiter or self.is_told:
            return
        if self.timer is not None:
            self.timer.cancel()
        self.waiter, self.timer = waiter, None
        if waiter is not None and not self.loop.is_closed():
            self.timer = self.loop.call_later(PATIENCE_S, self._tell, tell, waiter.name)

    def _tell(self, tell: Callable[[StepHandle, str], None], name: str) -> None:
        assert self.handle is not None  # only one that was sent is left behind
        self.is_told = True
        tell(self.handle, name)


class LeftBehind:
    """The steps of one mesh in their order, and which of them run on without their caller.

    Args:
        tell: called once at most for each of these, with its handle and the name of the step that waits.
    """

    def __init__(self, tell: Callable[[StepHandle, str], None]):
        self._tell = tell
        self._line: dict[Turn, None] = {}
        self._left: set[Turn] = set()

    def begin(self, name: str) -> Turn:
        """A step is about to be sent, or to wait for that, behind all that have begun."""
        turn = Turn(self, name)
        self._line[turn] = None
        self._look()
        return turn

    def note(self, handle: StepHandle) -> None:
        """A step's caller has gone."""
        self._left.update(turn for turn in self._line if turn.handle is handle)
        self._look()

    def end(self, turn: Turn) -> None:
        """A step has ended, or will not be sent."""
        turn.time(None, self._tell)
        self._line.pop(turn, None)
        self._left.discard(turn)
        self._look()

    def _look(self) -> None:
        """Time the first wait behind each that was left."""
        if not self._left:
            return
        waiter: Turn | None = None
        for turn in reversed(self._line):
            if turn in self._left:
                turn.time(waiter, self._tell)
            else:
                waiter = turn
