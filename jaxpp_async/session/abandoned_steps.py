"""Report a step whose caller was cancelled, if another step waits long for it.

A step that has been sent to the actors runs to its end even if its caller is cancelled, and later steps have
to wait for it. Without a report, the next step would merely seem to take longer. This module only reports
such waits; it does not change how steps run.
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
    """The entry of one unfinished step in the queue of an `AbandonedSteps`.

    The step has an entry from when it begins to wait for its turn until it has ended. The code that sends the
    step runs with the entry as its context manager; an error in that code removes the entry from the queue.

    Attributes:
        steps: the queue that the entry is in.
        name: the step's name.
        loop: the mesh's event loop, which runs the timer. The entry stores the loop because the caller's
            coroutine may be closed or garbage-collected, and the timer started, while no loop runs.
        handle: the step's handle; None until the step is sent.
        waiter: the later step whose wait for this step is being timed; None if no wait is being timed.
        timer: the timer of that wait; None if no wait is being timed.
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
        """Start a timer that reports this step if `waiter` still waits for it after `PATIENCE_S` seconds.

        If a timer for another waiter is running, that timer is cancelled. Nothing changes if the wait of
        `waiter` is timed already, or if a wait for this step has been reported.

        Args:
            waiter: the entry of the waiting step; None: cancel the running timer, and start none.
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
        report: a function that is called at most once for each abandoned step, when another step has waited
            long for that step. Its arguments are the abandoned step's handle and the waiting step's name.
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
        """Record that a step is abandoned: the step was sent, but its caller no longer awaits it.

        Args:
            handle: the handle of the abandoned step.
        """
        self._abandoned.update(entry for entry in self._queue if entry.handle is handle)
        self._time_waits()

    def remove(self, entry: StepQueueEntry) -> None:
        """Remove an entry from the queue, because its step has ended or will not be sent."""
        entry.time_wait_of(None)
        self._queue.pop(entry, None)
        self._abandoned.discard(entry)
        self._time_waits()

    def _time_waits(self) -> None:
        """For each abandoned step, start a timer for the wait of the next step that is not abandoned."""
        if not self._abandoned:
            return
        waiter: StepQueueEntry | None = None
        for entry in reversed(self._queue):
            if entry in self._abandoned:
                entry.time_wait_of(waiter)
            else:
                waiter = entry
