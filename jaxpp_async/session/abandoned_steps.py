"""Report a step that runs on without its caller once another step has waited long behind it.

A step that was sent runs to its end before the next one, even if its caller was cancelled and nobody awaits
it. Without a report, the next step would merely seem to take longer. This module only reports; it changes
nothing about what runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxpp_async.controller.requests import StepHandle

PATIENCE_S = 5.0
"""The number of seconds for which a step may wait behind an abandoned one before a warning reports it."""


@dataclass(slots=True, eq=False)
class StepQueueEntry:
    """The record of one step, kept from when the step begins to wait for its turn until it has ended.

    As a context manager the entry surrounds the code that sends the step, and an error in that code removes
    the entry from the queue.

    Attributes:
        steps: the queue that the entry is in.
        name: the step's name.
        loop: the mesh's event loop, stored because a caller's coroutine may be closed or garbage-collected
            while no loop runs.
        handle: the step's handle; None until the step is sent.
        waiter: the later step whose wait for this one is being timed; None if there is none.
        timer: the timer of that wait.
        is_reported: whether a wait for this step has been reported already.
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
        """Record that the step was sent, and remove this entry from the queue once the step ends."""
        self.handle = handle
        handle.when_done(lambda: self.steps.remove(self))

    def time_wait_of(self, waiter: StepQueueEntry | None) -> None:
        """Start a timer that reports that `waiter` has waited `PATIENCE_S` seconds for this step to end.

        A timer for another waiter is cancelled. If the wait of `waiter` is timed already, or a wait for this
        step has been reported, nothing changes.

        Args:
            waiter: the entry of the waiting step; None cancels the timer and starts none.
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
    """The queue of one mesh's unfinished steps, which reports an abandoned step that delays another step.

    A step is abandoned when its caller has been cancelled after the step was sent.

    Args:
        report: called at most once for each abandoned step, with the handle of that step and the name of the
            step that waits for it.
    """

    def __init__(self, report: Callable[[StepHandle, str], None]):
        self.report = report
        self._queue: dict[StepQueueEntry, None] = {}
        self._abandoned: set[StepQueueEntry] = set()

    def begin(self, name: str) -> StepQueueEntry:
        """Add a step that is not sent yet to the end of the queue, and return its entry."""
        entry = StepQueueEntry(self, name)
        self._queue[entry] = None
        self._time_waits()
        return entry

    def mark_abandoned(self, handle: StepHandle) -> None:
        """Record that the caller of a step no longer awaits it, although the step was sent."""
        self._abandoned.update(entry for entry in self._queue if entry.handle is handle)
        self._time_waits()

    def remove(self, entry: StepQueueEntry) -> None:
        """Remove from the queue a step that has ended, or that will not be sent."""
        entry.time_wait_of(None)
        self._queue.pop(entry, None)
        self._abandoned.discard(entry)
        self._time_waits()

    def _time_waits(self) -> None:
        """Start a timer for each abandoned step: it times the wait of the next step that is not abandoned."""
        if not self._abandoned:
            return
        waiter: StepQueueEntry | None = None
        for entry in reversed(self._queue):
            if entry in self._abandoned:
                entry.time_wait_of(waiter)
            else:
                waiter = entry
