"""device_work: what was given to devices in, calls on the event loop when it has been done out. Decides nothing.

A GPU computes after a call has returned. Nobody asks it again and again, and the event loop never waits: a thread
sleeps until a mark is reached, and wakes the loop once. Runs and copies have a thread and a lane each, since a copy
must not be heard of only after a run that was called before it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import jax

from jaxpp_async.actors.devices.cuda import DeviceCopy, DeviceDoor, Mark, waits_elsewhere

Then: TypeAlias = Callable[[float, Exception | None], object]
"""Called on the event loop with the time (`time.monotonic`) at which a mark was reached, and why it was not."""


class DeviceWork:
    """Tells of the end of what one actor's devices do.

    Args:
        door: to the devices.
        name: of the threads.
        loop: where it tells.
    """

    def __init__(self, door: DeviceDoor, name: str, loop: asyncio.AbstractEventLoop):
        self._runs, self._copies, self._spreads = door.lane(), door.lane(), door.lane()
        self._run_watcher = _Watcher(f"{name}-runs", loop)
        self._copy_watcher = _Watcher(f"{name}-copies", loop)

    def after_run(self, outputs: Sequence[jax.Array], then: Then) -> None:
        """Tell when a run has computed; on the thread that called its executable, before it calls another.

        Args:
            outputs: of one executable: they are there together.
        """
        self._run_watcher.watch(self._runs.mark(_sign_of(outputs)), then)

    def after_copy(self, arrays: Sequence[jax.Array], then: Then) -> None:
        """Tell when arrays are there that no run has made; on the thread of `after_run`."""
        self._copy_watcher.watch(self._copies.mark(arrays), then)

    def spread(self, copies: Sequence[DeviceCopy], then: Then) -> None:
        """Copy between devices, and tell when it is done; on the event loop."""
        self._copy_watcher.watch(self._spreads.copy(copies), then)

    async def aclose(self, timeout_s: float = 1.0) -> None:
        """End the threads; leave those behind that wait for a device which does not answer."""
        await asyncio.gather(self._run_watcher.aclose(timeout_s), self._copy_watcher.aclose(timeout_s))


class _Watcher:
    """Waits for marks, one after the other."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop):
        self._marks: queue.SimpleQueue[tuple[Mark, Then] | None] = queue.SimpleQueue()
        self._loop = loop
        # A daemon: a device that never answers must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def watch(self, mark: Mark, then: Then) -> None:
        self._marks.put((mark, then))

    async def aclose(self, timeout_s: float) -> None:
        self._marks.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s)

    def _work(self) -> None:
        while (watched := self._marks.get()) is not None:
            mark, then = watched
            failure: Exception | None = None
            try:
                mark.wait()
            except Exception as error:  # whatever the device or its driver raises ends the step, with its words
                failure = error
            try:
                self._loop.call_soon_threadsafe(partial(then, time.monotonic(), failure))
            except RuntimeError:  # the loop has closed: nobody waits for it any more
                return
            del watched, mark, then  # they hold arrays, and the next may be long in coming


def _sign_of(outputs: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """One of a run's results, to tell by when it has computed: the last that holds anything, and of a type that can be
    waited for without stopping this thread, if there is one."""
    held = [array for array in reversed(outputs) if array.size]
    return [*filter(waits_elsewhere, held), *held, *outputs[-1:]][:1]
