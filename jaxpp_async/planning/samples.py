"""Define measured times as distributions, and the costs of a link between two actors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from numbers import Real

import msgspec
import numpy as np

from jaxpp_async.errors import CostError

MOST_S, LEAST_RATE, MOST_RATE = 1e12, 1e-6, 1e30
"""The longest time in seconds, and the least and the greatest rate per second, that costs may have, so that
every sum of them is finite."""

MAX_SAMPLES = 512
"""The greatest number of values that a distribution keeps. Of more, evenly spaced quantiles are kept."""


def _is_number(value: object) -> bool:
    """Return whether a value is a finite number that a float can be."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


class Samples(msgspec.Struct, frozen=True, dict=True):
    """A distribution of times, as the sorted values that were measured.

    Args:
        seconds: the values in ascending order, at least one; none is negative or more than `MOST_S`.

    Raises:
        CostError: there is no value, or one that is no such number, or they are not sorted.
    """

    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.seconds, tuple) or not self.seconds:
            raise CostError("a distribution needs a tuple of at least one value")
        for x in self.seconds:
            if not _is_number(x) or not 0 <= x <= MOST_S:
                raise CostError(
                    "the values of a distribution must be finite and not negative, and at most "
                    f"{MOST_S:g} seconds, and one is {x!r:.40}"
                )
        if any(a > b for a, b in zip(self.seconds, self.seconds[1:], strict=False)):
            raise CostError("the values of a distribution must be in ascending order")

    @classmethod
    def of(cls, values: Iterable[float]) -> Samples:
        """Return the distribution of some measured values, at most `MAX_SAMPLES` of them.

        Args:
            values: the values in any order; negative ones, as clocks that differ cause, count as 0.

        Raises:
            CostError: there is no value, or one that is not a finite number of at most `MOST_S`.
        """
        given = list(values)
        if wrong := [x for x in given if not _is_number(x) or not abs(x) <= MOST_S]:
            raise CostError(
                f"a measured time must be a finite number of seconds, and one is {wrong[0]!r:.40}"
            )
        found = sorted(max(0.0, float(x)) for x in given)
        if len(found) > MAX_SAMPLES:
            found = [found[(2 * k + 1) * len(found) // (2 * MAX_SAMPLES)] for k in range(MAX_SAMPLES)]
        return cls(tuple(found))

    @cached_property
    def mean(self) -> float:
        """The mean of the values."""
        return math.fsum(self.seconds) / len(self.seconds)

    def quantile(self, u: float) -> float:
        """Return the value at a quantile.

        Args:
            u: the quantile, at least 0 and less than 1.
        """
        return self.seconds[int(u * len(self.seconds))]

    def draw(self, u: np.ndarray) -> np.ndarray:
        """Return the value at each of many quantiles, as an array of the same shape as `u`."""
        return self._array[(u * len(self.seconds)).astype(np.intp)]

    @cached_property
    def _array(self) -> np.ndarray:
        return np.array(self.seconds)


ZERO = Samples((0.0,))
"""The distribution of something that takes no time."""


class LinkCost(msgspec.Struct, frozen=True):
    """The costs of a link in one direction.

    Args:
        latency: the time that a transfer takes in addition to that of its bytes.
        bytes_per_s: the rate at which bytes are carried; None if bytes take no time.

    Raises:
        CostError: the rate is not positive, or not between `LEAST_RATE` and `MOST_RATE`, or the latency is no
            distribution.
    """

    latency: Samples
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.latency, Samples):
            raise CostError(f"the latency of a link is {self.latency!r:.40}; write Samples((seconds,))")
        check_rate(self.bytes_per_s, "bytes_per_s of a link")

    def occupied_s(self, size_bytes: float) -> float:
        """Return for how many seconds a message of this size keeps others from the link."""
        return size_bytes / self.bytes_per_s if self.bytes_per_s is not None else 0.0

    def of_lanes(self, count: int) -> LinkCost:
        """Return the costs of some such links side by side, each of which carries a part of a message."""
        return LinkCost(self.latency, None if self.bytes_per_s is None else count * self.bytes_per_s)


def check_rate(rate: float | None, name: str) -> None:
    """Check that a rate is None, or positive and between `LEAST_RATE` and `MOST_RATE`.

    Raises:
        CostError: the rate is neither.
    """
    if rate is None:
        return
    if not _is_number(rate) or not rate > 0:
        raise CostError(f"{name} is {rate!r:.40}, which is no positive number")
    if not LEAST_RATE <= rate <= MOST_RATE:
        raise CostError(f"{name} is {float(rate):g}; write a rate between {LEAST_RATE:g} and {MOST_RATE:g}")


def fit_line(
    sizes: Sequence[float],
    times_s: Sequence[float],
    weights: Sequence[float] | None = None,
    most_overhead_s: float = math.inf,
) -> tuple[float, float, float]:
    """Fit `time = overhead + slope * size` by least squares of the relative errors, with nothing negative.

    Args:
        sizes: the amounts, not negative.
        times_s: the time of each in seconds, not negative.
        weights: how much each counts; None: all count the same.
        most_overhead_s: the largest overhead that the line may have.

    Returns:
        The overhead in seconds, the slope in seconds per unit of size, and the weighted sum of the squared
        relative errors.
    """
    x, t = np.array(sizes, dtype=float), np.maximum(np.array(times_s, dtype=float), 1e-12)
    scale = max(float(x.max(initial=0.0)), 1e-300)
    root = np.sqrt(np.ones(len(t)) if weights is None else np.array(weights, dtype=float))
    columns = np.stack([root / t, root * x / scale / t], axis=1)
    best = (math.inf, 0.0, 0.0)
    for used in ([0, 1], [1], [0]):  # where both together have a negative part, one of them is 0
        if used == [0, 1] and len(set(x.tolist())) < 2:
            continue
        found = np.zeros(2)
        found[used] = np.linalg.lstsq(columns[:, used], root, rcond=None)[0]
        if found[0] > most_overhead_s:
            found[0], rest = most_overhead_s, columns[:, 1:]
            found[1] = np.linalg.lstsq(rest, root - columns[:, 0] * most_overhead_s, rcond=None)[0].item()
        error = float(np.sum((columns @ found - root) ** 2))
        if (found >= 0).all() and error < best[0] - 1e-12:
            best = (error, float(found[0]), float(found[1]) / scale)
    error, overhead, slope = best
    return overhead, slope, error
