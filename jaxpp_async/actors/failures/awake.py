"""awake: a clock in, the time in which this process could have heard others out. Pure: the clock is a parameter.

Time in which the process was stopped, or its event loop blocked, is nobody's silence. Wall clocks are not used.
"""

from __future__ import annotations

TICK_S = 0.5
"""Between two looks at the clock."""


class AwakeClock:
    """Counts the time that this process was awake, in seconds: between two ticks never more than twice their distance.

    Args:
        now: of the monotonic clock. tick_s: the ticks' distance.
    """

    def __init__(self, now: float, tick_s: float = TICK_S):
        self._last, self._awake, self._most = now, 0.0, 2 * tick_s

    def tick(self, now: float) -> float:
        """The time at a tick."""
        self._awake, self._last = self.read(now), now
        return self._awake

    def read(self, now: float) -> float:
        """The time in between."""
        return self._awake + min(now - self._last, self._most)
