"""lookout: how long the last waits took in, how long to look for messages before sleeping out. Pure, no clock.

Sleeping on a descriptor and being woken costs some ten microseconds, and so does looking in vain. Whether looking pays
is guessed from the waits before: a short one makes the next look longer, a long one makes it shorter, down to none.
"""

from __future__ import annotations

SHORTEST_S = 20e-6
"""Less than this is not worth looking for at all."""


class AdaptiveSpin:
    """One waiter's, for messages.

    Args:
        longest_s: of all looking for one message, and the longest wait that looking could have covered.

    Attributes:
        limit_s: for how long to look for the next message.
    """

    __slots__ = ("_longest_s", "_since_s", "limit_s")

    def __init__(self, longest_s: float) -> None:
        self.limit_s = self._longest_s = longest_s
        self._since_s: float | None = None

    def goes_on(self, now_s: float) -> bool:
        """Whether to go on looking. The first call after a message begins a wait."""
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s < self.limit_s

    def came(self, now_s: float) -> None:
        """A message came, whether it was looked for or slept for."""
        since_s, self._since_s = self._since_s, None
        if since_s is None:
            return
        if now_s - since_s <= self._longest_s:
            self.limit_s = min(max(self.limit_s * 2, SHORTEST_S), self._longest_s)
        else:
            self.limit_s = self.limit_s / 2 if self.limit_s > SHORTEST_S else 0.0

    def stop(self) -> None:
        """The wait ends without a message: nobody waits any more."""
        self._since_s = None
