"""Choose how long to look for messages before sleeping, from how long the last waits took.

To sleep and be woken costs some ten microseconds; to look for a message that does not come costs a core's
time. A short wait makes the next look longer, a long one makes it shorter, down to none.
"""

from __future__ import annotations

SHORTEST_S = 20e-6
"""A look shorter than this is not worth its cost, so that it becomes none."""


class AdaptiveSpin:
    """The length of one waiter's busy look for messages, which follows the lengths of its last waits.

    A wait up to `longest_s` could have been covered by looking, so it doubles the length; a longer one halves
    it. The caller passes the time, in seconds of any one clock.

    Args:
        longest_s: the longest look for one message.

    Attributes:
        limit_s: how long to look for the next message.
    """

    __slots__ = ("_longest_s", "_since_s", "limit_s")

    def __init__(self, longest_s: float) -> None:
        self.limit_s = self._longest_s = longest_s
        self._since_s: float | None = None

    def should_spin(self, now_s: float) -> bool:
        """Whether to look on for the next message. The first call after a message begins a wait."""
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s < self.limit_s

    def record_message(self, now_s: float) -> None:
        """End the wait because a message came, and adapt `limit_s`: whether it was looked for or slept
        for."""
        since_s, self._since_s = self._since_s, None
        if since_s is None:
            return
        if now_s - since_s <= self._longest_s:
            self.limit_s = min(max(self.limit_s * 2, SHORTEST_S), self._longest_s)
        else:
            self.limit_s = self.limit_s / 2 if self.limit_s > SHORTEST_S else 0.0

    def cancel_wait(self) -> None:
        """End the wait without a message, because nobody waits any more; `limit_s` stays."""
        self._since_s = None
