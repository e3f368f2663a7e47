"""left_behind: steps whose `run` was cancelled in; a word about them out, once another step has waited behind one.

A step that was sent runs to its end in front of the next one, and nobody awaits it any more: without a word its length
looks like the next one's. Starts no task, and changes nothing of what runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from jaxpp_async.actors.rpc import StepHandle

PATIENCE_S = 5.0
"""How long a step may wait behind a cancelled one before that is said."""


class LeftBehind:
    """The steps of one mesh that run on without their caller.

    Args:
        tell: called once at most for each of them, with its handle and the name of the step that waits.
    """

    def __init__(self, tell: Callable[[StepHandle, str], None]):
        self._tell = tell
        self._timers: dict[StepHandle, asyncio.TimerHandle | None] = {}

    def note(self, handle: StepHandle) -> None:
        """A step's caller has gone."""
        if not handle.done:
            self._timers[handle] = None
            handle.when_done(lambda: self._forget(handle))

    def before(self, name: str) -> None:
        """A step is about to be sent, behind all that are under way."""
        for handle, timer in self._timers.items():
            if timer is None:
                later = asyncio.get_running_loop().call_later
                self._timers[handle] = later(PATIENCE_S, self._tell, handle, name)

    def _forget(self, handle: StepHandle) -> None:
        timer = self._timers.pop(handle, None)
        if timer is not None:
            timer.cancel()
