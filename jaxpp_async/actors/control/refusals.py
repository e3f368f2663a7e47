"""refusals: lines for the log out, no more than a person would read. The clock is a parameter.

Whoever can reach a port can be refused as often as it likes; the log must not grow with that.
"""

from __future__ import annotations

from collections.abc import Callable

MOST = 20
WINDOW_S = 10.0


class Refusals:
    """Passes on at most `MOST` lines in `WINDOW_S` seconds, and says with the next one how many there were besides.

    Args:
        log: takes a line. clock: monotonic, in seconds.
    """

    def __init__(self, log: Callable[[str], None], clock: Callable[[], float]):
        self._log, self._clock = log, clock
        self._began_s, self._num_said, self._num_hidden = clock(), 0, 0

    def say(self, text: str) -> None:
        """Log a refusal, or count it."""
        now_s = self._clock()
        if now_s - self._began_s > WINDOW_S:
            self.flush()
            self._began_s, self._num_said = now_s, 0
        if self._num_said < MOST:
            self._num_said += 1
            self._log(text)
        else:
            self._num_hidden += 1

    def flush(self) -> None:
        """Tell what was only counted."""
        if self._num_hidden:
            self._log(f"refused {self._num_hidden} more connections")
            self._num_hidden = 0
