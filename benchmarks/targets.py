"""targets: what the project promises of its speed, as a table. In: figures, the JSON of `results/latest.json`. Out:
rows. Pure; measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """One promise.

    Args:
        what: as a reader of the table knows it.
        measured: the figure, from the JSON; raises KeyError, or gives None, where it was not measured.
        limit, wish: what it must keep, and where we want to end; None: no wish.
        unit: "x" (a ratio), "ms", "us", "%" or "".
        at_least: the figure must be no smaller; otherwise no larger.
        strictly: the limit itself is a miss.
    """

    what: str
    measured: Callable[[Figures], float | None]
    limit: float
    wish: float | None
    unit: str = "x"
    at_least: bool = False
    strictly: bool = False

    def keeps(self, value: float, bound: float) -> bool:
        """Whether `value` is on the right side of `bound`, at the precision that the table shows."""
        value, bound = round(value, 3), round(bound, 3)
        if value == bound:
            return not self.strictly
        return value > bound if self.at_least else value < bound


State = Literal["met", "wish met", "missed", "not measured"]


@dataclass(frozen=True)
class Row:
    """A target and what became of it."""

    target: Target
    value: float | None

    @property
    def state(self) -> State:
        """Met, missed, or not measured."""
        target = self.target
        if self.value is None:
            return "not measured"
        if not target.keeps(self.value, target.limit):
            return "missed"
        return "wish met" if target.wish is not None and target.keeps(self.value, target.wish) else "met"


def ratio_of(part: str, one: str, other: str) -> Callable[[Figures], float | None]:
    """The ratio taken within rounds; quotients of medians from different runs are no substitute."""
    return lambda figures: figures[part]["ratio"][f"{one}/{other}"]


def best_schedule(figures: Figures) -> float | None:
    """The least of our schedules' ratios to `jax.jit` with both cores."""
    found = [r for pair, r in figures["big_step"]["ratio"].items() if pair.endswith("/jit_two_cores")]
    return min((r for r in found if r is not None), default=None)


def hidden_percent(compute: float, transfer: float, together: float, no_slack: float) -> float:
    """How much of what could be saved by doing both at once was saved: 0 where together takes as long as both, one
    after the other.

    Args:
        compute, transfer, together: a step's time (any unit): computing alone, transferring alone, both.
        no_slack: time of the transfers beside which the schedule has nothing to compute: the first and the last.
    """
    return 100 * (compute + transfer - together) / (min(compute, transfer) - no_slack)


def per_memcpy(size: int) -> Callable[[Figures], float]:
    """Transport against a copy in memory."""
    return lambda figures: figures["transport"]["gb_s"][str(size)] / figures["transport"]["memcpy_gb_s"]


TARGETS = (
    Target("tiny step against torch.distributed.pipelining", ratio_of("tiny_step", "ours", "torch"), 0.40, 0.20),
    Target("tiny step against Ray tasks", ratio_of("tiny_step", "ours", "ray"), 0.10, 0.06),
    Target("tiny step", lambda f: f["tiny_step"]["ours"], 3.0, 1.5, "ms"),
    Target("big step, efficiency against its bound", lambda f: f["big_step"]["efficiency"], 0.95, 0.98, at_least=True),
    Target("big step against JAX SPMD pipelining", ratio_of("big_step", "ours", "jax_spmd"), 0.70, 0.60),
    Target("big step against torch 1F1B", ratio_of("big_step", "ours", "torch"), 0.75, 0.65),
    Target("big step, best schedule, against jit on both cores", best_schedule, 1.10, 0.97),
    Target("empty step RPC to two actors", lambda f: f["rpc_us"]["ours_two_actors"], 250, 120, "us"),
    Target("empty step RPC against Ray's", lambda f: f["rpc_us"]["ours_two_actors"] / f["rpc_us"]["ray"], 0.25, None),
    Target("transport, 1 MiB, against memcpy", per_memcpy(1 << 20), 0.90, 1.1, at_least=True),
    Target("transport, 16 MiB, against memcpy", per_memcpy(1 << 24), 0.90, 1.1, at_least=True),
    Target("transport, half round trip of 8 bytes", lambda f: f["transport"]["half_rtt_us"], 40, 25, "us"),
    Target("transfers hidden behind computation", lambda f: f["overlap"]["hidden_percent"], 90, 98, "%", at_least=True),
    Target(
        "peak bytes, 1F1B, 32 against 8 microbatches",
        lambda f: f["peak_bytes"]["std1f1b"]["32"] / f["peak_bytes"]["std1f1b"]["8"],
        1.0,
        1.0,
    ),
    Target(
        "controller, a step and actor, 64 actors against 2",
        lambda f: f["controller"]["actors"]["64"] / f["controller"]["actors"]["2"],
        1.5,
        1.0,
    ),
    Target("two steps in flight against one", ratio_of("tiny_step", "submit", "ours"), 1.0, 0.7, strictly=True),
    Target(
        "second start of a program against the first",
        lambda f: f["compile_s"]["second_start"] / f["compile_s"]["first"],
        0.5,
        0.2,
    ),
)


def rows(figures: Figures) -> list[Row]:
    """Every target and what became of it."""
    return [Row(target, _value(target, figures)) for target in TARGETS]


def _value(target: Target, figures: Figures) -> float | None:
    try:
        return target.measured(figures)
    except (KeyError, TypeError, ZeroDivisionError):  # a part was not measured, or some of its contenders were not
        return None
