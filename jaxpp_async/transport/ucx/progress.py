"""Drive a UCX worker on the event loop, without a thread of its own.

UCX signals events through the worker's file descriptor. A callback on the loop lets the worker make progress
until nothing is left to do, and then arms the descriptor, so that the loop sleeps until UCX signals the next
event. While the caller only waits for messages (`Transport.hurry`), the callback polls for messages for a
short time before the loop sleeps. The work of one callback is bounded, so that a flood of messages does not
starve the loop's other work.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sized
from time import monotonic
from typing import Any

from jaxpp_async.base.spinning import AdaptiveSpin

_STEPS_PER_ROUND, _ROUNDS_PER_CALLBACK = 256, 4
"""The greatest number of progress steps per round and of rounds per callback, so that a flood of messages
does not starve the loop's other work."""

_POLL_S, _POLLS_PER_YIELD = 100e-6, 4
"""The time in seconds for which one callback polls for messages, and the number of polls after which it
offers the core to other processes."""

_SPIN_S = 1e-3
"""The longest time in seconds to poll for one message before sleeping, which is many times the time that a
message takes. If a third process, the controller, uses the peer's core for a moment, sleeping would delay
both sides."""

_STALL_AFTER_S, _STALL_DELAY_S = 0.05, 0.002
"""The time in seconds after which a worker that cannot be armed and yet has nothing to do counts as stalled,
and the delay in seconds between attempts from then on. Such a state is common for microseconds, while a peer
is writing into this worker's queue, but lasts for ever if that peer has died (see `transport.py`)."""

_STALL_RUNS = 50
"""The runs in a row, each without progress, before a worker counts as stalled. On a busy host this process
may have waited for a processor for most of the time."""


class Progress:
    """A driver that lets one UCX worker make progress on the running event loop.

    Args:
        worker: the worker of ucxx, in blocking progress mode.
        failures: the base class of the errors that the worker's calls raise when it is broken.
        disturbed: the class of the error that `arm` raises after an empty datagram has arrived at the socket
            by which peers on this host wake the worker. UCX mistakes the datagram for an end of file, but
            every user of this machine can send one.
        completed: the collection of operations that have ended and were not processed yet; UCX's callbacks
            fill it.
        finish_ended: a function that processes the operations that have ended, and returns whether there were
            any.
        may_spin: a function that returns whether it is worthwhile to poll for messages before sleeping.
        on_broken: a function that is called with the cause when the worker cannot make progress any more.

    Attributes:
        adaptive_spin: chooses how long to poll. The owner of this object reports to `adaptive_spin` when a
            message has arrived, and when nobody waits for messages any more.
    """

    def __init__(
        self,
        worker: Any,
        failures: type[Exception],
        disturbed: type[Exception],
        completed: Sized,
        *,
        finish_ended: Callable[[], bool],
        may_spin: Callable[[], bool],
        on_broken: Callable[[str], None],
    ):
        self._worker, self._failures, self._completed = worker, failures, completed
        self._disturbed = disturbed
        self._finish_ended, self._may_spin, self._on_broken = finish_ended, may_spin, on_broken
        self._loop = asyncio.get_running_loop()
        self._run_scheduled = self._running = self._stalled = False
        self._idle_since_s: float | None = None
        self._idle_runs = 0  # since then
        self.adaptive_spin = AdaptiveSpin(_SPIN_S)
        self._descriptor: int = worker.epoll_file_descriptor
        self._loop.add_reader(self._descriptor, self.run)

    @property
    def stalled_s(self) -> float:
        """The seconds for which the worker could not be armed although it had nothing to do; 0 if it can be.
        A worker that is stalled for long receives nothing any more, from any peer."""
        if self._idle_since_s is None or self._idle_runs < _STALL_RUNS:
            return 0.0
        return self._loop.time() - self._idle_since_s

    def schedule_run(self) -> None:
        """Schedule `run` for the loop's next pass. UCX needs progress after every post, before its descriptor
        signals events again."""
        if not self._run_scheduled and not self._running:
            self._run_scheduled = True
            self._loop.call_soon(self.run)

    def run(self) -> None:
        """Let UCX make progress until UCX has nothing left to do and its file descriptor is armed (so that
        the descriptor signals new events), or until the loop's other work has to run."""
        self._run_scheduled = False
        worker = self._worker
        if worker is None:
            return
        self._running = True  # operations that callbacks post meanwhile need no further run
        try:
            is_armed, was_idle = self._run_rounds(worker)
        except self._failures as error:
            self._on_broken(f"UCX makes no progress any more: {error}")
            return
        finally:
            self._running = False
        self._idle_runs += 1
        if is_armed or not was_idle:
            self._idle_since_s, self._idle_runs = None, 0
        elif self._idle_since_s is None:
            self._idle_since_s = self._loop.time()
        elif self._loop.time() - self._idle_since_s > _STALL_AFTER_S:
            self._stall()
            return
        if not is_armed:
            self.schedule_run()

    def unwatch(self) -> None:
        """Make the event loop no longer call `run` when UCX's file descriptor signals an event. Explicit
        calls of `run` still work."""
        self._loop.remove_reader(self._descriptor)

    def end(self) -> None:
        """Stop watching the worker for good, and forget the worker."""
        self.unwatch()
        self._worker = None

    def _run_rounds(self, worker: Any) -> tuple[bool, bool]:
        """Make some rounds of progress, at most as many as one callback may make.

        Returns:
            Two booleans: whether UCX's file descriptor is armed, so that the loop may sleep; and whether UCX
            had nothing to do.
        """
        was_idle = True
        for _ in range(_ROUNDS_PER_CALLBACK):
            num_steps = 0
            while num_steps < _STEPS_PER_ROUND and worker.progress_once():
                num_steps += 1
            was_idle = was_idle and num_steps == 0
            if self._finish_ended():
                was_idle = False
            elif num_steps < _STEPS_PER_ROUND:
                if self._may_spin() and self.adaptive_spin.should_spin(monotonic()):
                    self._poll(worker)
                    # Return to the loop: messages that came have set futures, whose callbacks run in its
                    # next pass.
                    return False, False
                if self._arm(worker):
                    return True, was_idle
        return False, was_idle

    def _arm(self, worker: Any) -> bool:
        try:
            return worker.arm()
        except self._disturbed:  # UCX has read the datagram by now, so that it causes no more wake-ups
            return False

    def _poll(self, worker: Any) -> None:
        """Poll for messages for a short time, and process the operations that have ended."""
        completed, look = self._completed, worker.progress_once
        until_s = monotonic() + _POLL_S
        while not completed and monotonic() < until_s:
            for _ in range(_POLLS_PER_YIELD):
                look()
                if completed:
                    break
            else:
                os.sched_yield()
        self._finish_ended()

    def _stall(self) -> None:
        """Stop watching UCX's file descriptor for a while, and call `run` again after a delay.

        This is called when the descriptor could not be armed for some time although UCX had nothing to do, as
        happens after a peer died while it was writing to this process. Without the delay, the event loop
        would call `run` continuously.
        """
        if not self._stalled:
            self._stalled = True
            self.unwatch()
            self._loop.call_later(_STALL_DELAY_S, self._resume)

    def _resume(self) -> None:
        self._stalled = False
        if self._worker is not None:
            self._loop.add_reader(self._descriptor, self.run)
            self.run()
