"""compute: calls in, results on the event loop out. One thread, in order; knows nothing of programs or arrays."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable

Job = Callable[[], Callable[[], None] | None]
"""Runs on the compute thread and returns what to call on the event loop afterwards, if anything. Must not raise."""


class ComputeThread:
    """Runs jobs one after the other off the event loop. A finished job wakes the loop once.

    Args:
        name: of the thread.
        loop: where results go.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop):
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._loop = loop
        # A daemon: a computation that never returns must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Run `job` after those submitted before it."""
        self._jobs.put(job)

    async def aclose(self, timeout_s: float = 5.0) -> None:
        """End the thread after the jobs submitted so far; leave one behind that does not end in time."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            after = job()
            if after is None:
                del job
                continue
            try:
                self._loop.call_soon_threadsafe(after)
            except RuntimeError:  # the loop has closed: nobody waits for the result any more
                return
            del job, after  # they hold arrays, and the next job may be long in coming
            # Where the loop shares this thread's core, what just ended is sent now, and not a time slice later.
            os.sched_yield()
