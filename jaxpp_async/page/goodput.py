"""Divide the time of a run into steps that count and what kept the run from steps: the goodput.

Goodput is the share of the time since the start in which actors worked on steps whose results count. Each
piece of time belongs to exactly one item, so that all items add up to the time since the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias, get_args

Item: TypeAlias = Literal["steps", "start", "compile", "restarts", "between"]
"""The items of the time of a run: steps that count; launching processes; compiling; restarts, with the work
that they lose and repeat; and everything between two steps, such as loading data, saving and evaluation code.
"""


@dataclass(frozen=True, slots=True)
class Goodput:
    """The time of a run, divided into items.

    Args:
        spent_s: the seconds of each item. The latest time is part of what seems to go on, which may turn out
            to be another item: a step under way may fail.
        decided_s: the seconds of each item that will not be counted otherwise any more, and never decrease.
        undecided_s: the latest seconds, of which nobody knows yet what they were spent on.
    """

    spent_s: Mapping[Item, float]
    decided_s: Mapping[Item, float]
    undecided_s: float

    @property
    def total_s(self) -> float:
        """The seconds that have been divided so far: the time since the start, less a step under way."""
        return sum(self.spent_s.values())

    @property
    def ratio(self) -> float:
        """The share of steps that count, from 0 to 1; 0 if no time has passed."""
        return self.spent_s["steps"] / self.total_s if self.total_s > 0 else 0.0


class _Division(NamedTuple):
    """The division of the time since the occurrence before.

    Args:
        item: the item that has ended and gets the seconds that are told, the last part of the time; None if
            none has.
        then: the item that goes on from now; None if the one that went on before does.
    """

    item: Item | None = None
    then: Item | None = None


Occurrence: TypeAlias = Literal["start", "compilation", "step", "failure", "restart", "repetition", "end"]
"""The occurrences that divide the time: all actors are ready; a step has been compiled, with the seconds that
this took; a step has ended that counts, with the seconds that actors worked on it; an actor was lost, with
the seconds since the oldest step was sent that is lost; the actors work again, with the seconds since the
failure; a step that counts waits for steps to be repeated; the run has ended.
"""

_DIVISIONS: Mapping[Occurrence, _Division] = MappingProxyType(
    {
        "start": _Division(then="between"),
        "compilation": _Division("compile"),
        "step": _Division("steps", then="between"),
        "failure": _Division("restarts", then="restarts"),
        "restart": _Division("restarts", then="between"),
        "repetition": _Division(then="restarts"),
        "end": _Division(),
    }
)


class GoodputMeter:
    """A meter of goodput, told of what happens in the order of time.

    Each call divides the time since the call before. A part of it, at its end, belongs to what has ended; the
    rest belongs to what went on, which is the start, a restart, or the time between steps. Time that has been
    divided stays so.

    Args:
        now_s: the time of the start, in seconds of any clock that does not jump.
    """

    def __init__(self, now_s: float):
        self._until_s = now_s
        self._going_on: Item = "start"
        self._spent_s: dict[Item, float] = dict.fromkeys(get_args(Item), 0.0)

    def divide(self, occurrence: Occurrence, now_s: float, told_s: float = 0.0) -> float:
        """Divide the time until now.

        Args:
            occurrence: what has happened.
            now_s: the present time.
            told_s: the seconds that it took, up to now. At most the time since the call before counts.

        Returns:
            The seconds that the item has got that has ended.
        """
        item, then = _DIVISIONS[occurrence]
        elapsed_s = max(0.0, now_s - self._until_s)
        ended_s = min(max(0.0, told_s), elapsed_s)
        self._spent_s[item or self._going_on] += ended_s
        self._spent_s[self._going_on] += elapsed_s - ended_s
        self._until_s, self._going_on = max(now_s, self._until_s), then or self._going_on
        return ended_s

    def goodput(self, now_s: float, *, is_step_under_way: bool) -> Goodput:
        """Return how the time was spent.

        Args:
            now_s: the present time.
            is_step_under_way: whether actors are at a step. Nobody knows yet whether the time since the last
                end counts, so it is left out; otherwise it belongs to what goes on.
        """
        spent_s, undecided_s = dict(self._spent_s), max(0.0, now_s - self._until_s)
        if not is_step_under_way:
            spent_s[self._going_on] += undecided_s
        return Goodput(spent_s, dict(self._spent_s), undecided_s)
