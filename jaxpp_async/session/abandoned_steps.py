"""Report a step that runs on without its caller once another step has waited long behind it.

A step that was sent runs to its end in front of the next one, and nobody awaits it after its caller was
cancelled: without a report its length looks like the length of the next step. Nothing here changes what runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxpp_async.controller.requests import StepHandle

PATIENCE_S = 5.0
"""How many seconds a step may wait behind an abandoned one until that is reported."""


@dataclass(slots=True, eq=False)
class StepQueueEntry:
    """One step, from when it begins to wait for admission until it has ended.

    As a context manager the entry surrounds the code that sends the step: an error there removes the entry.

    Attributes:
        loop: the mesh's event loop; a caller may leave where none runs, when its coroutine is closed or
            collected.
        handle: the step's handle, once the step was sent.
        waiter: the step behind this one whose wait is timed.
        is_reported: that wait, or an earlier one, was reported.
    """

    steps: AbandonedSteps
    name: str
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    handle: StepHandle | None = None
    waiter: StepQueueEntry | None = None
    timer: asyncio.TimerHandle | None = None
    is_reported: bool = False

    def __enter__(self) -> StepQueueEntry:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.steps.remove(self)

    def sent(self, handle: StepHandle) -> None:
        """Note that the step is under way, and remove the entry when the step ends."""
        self.handle = handle
        handle.when_done(lambda: self.steps.remove(self))

    def time_wait_of(self, waiter: StepQueueEntry | None) -> None:
        """Time how long `waiter`, and no other step, waits behind this step.

        The time begins now, unless the wait of `waiter` is timed already.
        """
        if waiter is self.waiter or self.is_reported:
            return
        if self.timer is not None:
            self.timer.cancel()
        self.waiter, self.timer = waiter, None
        if waiter is not None and not self.loop.is_closed():
            self.timer = self.loop.call_later(PATIENCE_S, self._report, waiter.name)

    def _report(self, name: str) -> None:
        assert self.handle is not None  # only a step that was sent can be abandoned
        self.is_reported = True
        self.steps.report(self.handle, name)


class AbandonedSteps:
    """The steps of one mesh in their order, and which of them run on without their caller.

    Args:
        report: called at most once for each abandoned step, with its handle and the name of the step that
            waits.
    """

    def __init__(self, report: Callable[[StepHandle, str], None]):
        self.report = report
        self._queue: dict[StepQueueEntry, None] = {}
        self._abandoned: set[StepQueueEntry] = set()

    def begin(self, name: str) -> StepQueueEntry:
        """Enter a step that is about to be sent, or to wait for that, behind all that have begun."""
        entry = StepQueueEntry(self, name)
        self._queue[entry] = None
        self._time_waits()
        return entry

    def mark_abandoned(self, handle: StepHandle) -> None:
        """Note that the caller of a step has gone."""
        self._abandoned.update(entry for entry in self._queue if entry.handle is handle)
        self._time_waits()

    def remove(self, entry: StepQueueEntry) -> None:
        """Forget a step that has ended, or will not be sent."""
        entry.time_wait_of(None)
        self._queue.pop(entry, None)
        self._abandoned.discard(entry)
        self._time_waits()

    def _time_waits(self) -> None:
        """Time the first wait behind each abandoned step."""
        if not self._abandoned:
            return
        waiter: StepQueueEntry | None = None
        for entry in reversed(self._queue):
            if entry in self._abandoned:
                entry.time_wait_of(waiter)
            else:
                waiter = entry
