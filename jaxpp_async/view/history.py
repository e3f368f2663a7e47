"""Keep a value of each step of a run in bounded memory, so that neither a spike nor the mean is lost.

A `History` has the latest values one by one. Older ones are groups of neighbours, each with its mean, its
least and its largest value with their steps, and the number of values that are not finite. `Buckets` are such
groups as arrays, which a chart reduces further.
"""

from __future__ import annotations

import math
from array import array as packed
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

EXACT = 2_000
"""The number of latest values that a history keeps one by one at least, and of older groups that it keeps at
most.
"""


@dataclass(frozen=True)
class Buckets:
    """Groups of values over steps. All arrays are float64 of shape (n,), with one element a group.

    Args:
        first, last: the least and the largest step of the group.
        num_good, num_bad: how many values are finite, and how many are NaN or infinite.
        mean: the mean of the finite values; NaN if there is none.
        least, most: the least and the largest finite value; NaN if there is none.
        least_step, most_step: the steps of those two values.
    """

    first: np.ndarray
    last: np.ndarray
    num_good: np.ndarray
    num_bad: np.ndarray
    mean: np.ndarray
    least: np.ndarray
    least_step: np.ndarray
    most: np.ndarray
    most_step: np.ndarray

    @classmethod
    def of(cls, steps: Sequence[float] | np.ndarray, values: Sequence[float] | np.ndarray) -> Buckets:
        """Return a group for each value.

        Args:
            steps: the step of each value, in any order; one that is not finite has no group.
            values: the values, as many as steps; they may be NaN or infinite.
        """
        step, value = np.array(steps, float), np.array(values, float)
        is_placed = np.isfinite(step)
        step, value = step[is_placed], value[is_placed]
        is_good = np.isfinite(value)
        value = np.where(is_good, value, np.nan)
        num_good = is_good.astype(float)
        return cls(step, step, num_good, 1 - num_good, value, value, step, value, step)

    def __len__(self) -> int:
        return len(self.first)

    @property
    def steps(self) -> np.ndarray:
        """The middle of the steps of each group."""
        return self.first / 2 + self.last / 2

    def ordered(self) -> Buckets:
        """Return the groups in the order of their steps."""
        order = np.argsort(self.steps, kind="stable")
        return Buckets(*(getattr(self, field.name)[order] for field in fields(self)))

    def followed_by(self, later: Buckets) -> Buckets:
        """Return the groups of both."""
        names = [field.name for field in fields(self)]
        return Buckets(*(np.concatenate((getattr(self, name), getattr(later, name))) for name in names))

    def at_most(self, most: int) -> Buckets:
        """Return these groups if they are few, or else groups that stand for equal numbers of steps.

        Args:
            most: the largest number of groups. A group without a value is left out.
        """
        if len(self) <= most:
            return self
        at = self.steps
        places = np.minimum((at - at[0]) * (most / ((at[-1] - at[0]) or 1.0)), most - 1).astype(int)
        return self.joined(np.flatnonzero(np.diff(places, prepend=-1)))

    def joined(self, firsts: np.ndarray) -> Buckets:
        """Return fewer groups, each of neighbouring ones.

        Args:
            firsts: the position of the first of the groups that become one, for each new group, ascending
                from 0.
        """
        if not len(firsts):
            return self
        num_good = np.add.reduceat(self.num_good, firsts)
        lengths = np.diff(firsts, append=len(self))
        # Each mean is weighted before the sum, which could be too large for a number otherwise.
        weights = self.num_good / np.repeat(np.maximum(num_good, 1), lengths)
        mean = np.add.reduceat(np.where(self.num_good > 0, self.mean, 0.0) * weights, firsts)
        least, most = np.fmin.reduceat(self.least, firsts), np.fmax.reduceat(self.most, firsts)
        return Buckets(
            np.minimum.reduceat(self.first, firsts),
            np.maximum.reduceat(self.last, firsts),
            num_good,
            np.add.reduceat(self.num_bad, firsts),
            np.where(num_good > 0, mean, np.nan),
            least,
            self.least_step[_positions_of(least, self.least, firsts, lengths)],
            most,
            self.most_step[_positions_of(most, self.most, firsts, lengths)],
        )


def _positions_of(
    found: np.ndarray, values: np.ndarray, firsts: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Return where each group's value stands first among all values; any place in the group for a NaN."""
    is_found = values == np.repeat(found, lengths)
    ends = np.repeat(firsts + lengths - 1, lengths)
    return np.minimum.reduceat(np.where(is_found, np.arange(len(values)), ends), firsts)


class History:
    """The history of one value, such as the seconds of a step.

    The latest `exact` to twice `exact` values are kept one by one, and the older ones as at most `exact`
    groups of equal size. Adding a value takes constant time on average.

    Args:
        exact: how many values and groups to keep.
    """

    def __init__(self, exact: int = EXACT):
        self._exact, self._group_size, self._num_grouped = exact, 1, 0
        self._steps, self._values = packed("d"), packed("d")
        self._groups = Buckets.of((), ())
        self._last: tuple[int, float] | None = None
        self._not_finite_since: int | None = None

    @property
    def num_values(self) -> int:
        """The number of values that were added."""
        return self._num_grouped + len(self._values)

    @property
    def last(self) -> tuple[int, float] | None:
        """The step and the value that were added last; None before."""
        return self._last

    @property
    def not_finite_since(self) -> int | None:
        """The step of the first of the latest values if these are all NaN or infinite; None if the last value
        is finite.
        """
        return self._not_finite_since

    def add(self, step: int, value: float) -> None:
        """Add a value, which may be NaN or infinite.

        Args:
            step: the step of the value, of any order.
            value: the value.
        """
        self._last = (step, value)
        if math.isfinite(value):
            self._not_finite_since = None
        elif self._not_finite_since is None:
            self._not_finite_since = step
        self._steps.append(step)
        self._values.append(value)
        if len(self._values) < 2 * self._exact:
            return
        older = Buckets.of(self._steps[: self._exact], self._values[: self._exact])
        del self._steps[: self._exact], self._values[: self._exact]
        self._groups = self._groups.followed_by(older)
        self._num_grouped += self._exact
        while -(-self._num_grouped // self._group_size) > self._exact:
            self._group_size *= 2
        sizes = self._groups.num_good + self._groups.num_bad
        places = (np.cumsum(sizes) - sizes) // self._group_size
        self._groups = self._groups.joined(np.flatnonzero(np.diff(places, prepend=-1)))

    def copy(self) -> History:
        """Return a history that does not change when values are added to this one."""
        other = History(self._exact)
        other._group_size, other._num_grouped, other._last = self._group_size, self._num_grouped, self._last
        other._not_finite_since = self._not_finite_since
        other._steps, other._values, other._groups = self._steps[:], self._values[:], self._groups
        return other

    def buckets(self) -> Buckets:
        """Return groups of all values in the order in which these were added; the latest have one value."""
        return self._groups.followed_by(Buckets.of(self._steps, self._values))
