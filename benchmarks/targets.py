"""targets: what the project promises of its speed, as a table. In: figures, the JSON of
`results/latest.json`. Out: rows. Pure; measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Scale:
    """A machine's speed, in terms of somebody else's time on it.

    Args:
        who: whose.
        measured: its time, from the JSON.
        known: its time where the limit was set.
        unit: of both.
    """

    who: str
    measured: Callable[[Figures], float]
    known: float
    unit: str


@dataclass(frozen=True)
class Target:
    """One promise.

    Args:
        what: as a reader of the table knows it.
        measured: the figure, from the JSON; raises KeyError, or gives None, where it was not measured.
        limit, wish: what it must keep, and where we want to end; None: no wish.
        unit: "x" (a ratio), "ms", "us", "s", "%" or "".
        at_least: the figure must be no smaller; otherwise no larger.
        strictly: the limit itself is a miss.
        scale: what limit and wish are multiplied with, from the JSON, where they were set on a machine on
            which somebody else's time is known; raises KeyError where that was not measured, and they stand
            as they are.
        reason: why the figure could not be measured, from the JSON; "" where it was.
    """

    what: str
    measured: Callable[[Figures], float | None]
    limit: float
    wish: float | None
    unit: str = "x"
    at_least: bool = False
    strictly: bool = False
    scale: Scale | None = None
    reason: Callable[[Figures], str] | None = None

    def keeps(self, value: float, bound: float) -> bool:
        """Whether `value` is on the right side of `bound`, at the precision that the table shows."""
        value, bound = round(value, 3), round(bound, 3)
        if value == bound:
            return not self.strictly
        return value > bound if self.at_least else value < bound


State = Literal["met", "wish met", "missed", "not measured"]


@dataclass(frozen=True)
class Row:
    """A target and what became of it.

    Args:
        target: as it was promised.
        value: what was measured; None: nothing was.
        scale: what limit and wish were multiplied with.
        note: what a reader has to know of this row; "" is nothing.
    """

    target: Target
    value: float | None
    scale: float = 1.0
    note: str = ""

    @property
    def limit(self) -> float:
        """What had to be kept in this run."""
        return self.target.limit * self.scale

    @property
    def wish(self) -> float | None:
        """Where we want to end, in this run."""
        return None if self.target.wish is None else self.target.wish * self.scale

    @property
    def state(self) -> State:
        """Met, missed, or not measured."""
        if self.value is None:
            return "not measured"
        if not self.target.keeps(self.value, self.limit):
            return "missed"
        return "wish met" if self.wish is not None and self.target.keeps(self.value, self.wish) else "met"


def ratio_of(part: str, one: str, other: str) -> Callable[[Figures], float | None]:
    """The ratio taken within rounds; quotients of medians from different runs are no substitute."""
    return lambda figures: figures[part]["ratio"][f"{one}/{other}"]


def best_schedule(figures: Figures) -> float | None:
    """The least of our schedules' ratios to `jax.jit` with both cores."""
    found = [r for pair, r in figures["big_step"]["ratio"].items() if pair.endswith("/jit_two_cores")]
    return min((r for r in found if r is not None), default=None)


def hidden_percent(compute: float, transfer: float, together: float, no_slack: float) -> float:
    """How much of what could be saved by doing both at once was saved: 0 where together takes as long as
    both, one after the other.

    Args:
        compute, transfer, together: a step's time (any unit): computing alone, transferring alone, both.
        no_slack: time of the transfers beside which the schedule has nothing to compute: the first and the
            last.
    """
    return 100 * (compute + transfer - together) / (min(compute, transfer) - no_slack)


def planned(program: str, *keys: str) -> Callable[[Figures], float]:
    """A figure of one of the programs of the part `plan`."""

    def measured(figures: Figures) -> float:
        found = figures["plan"][program]
        for key in keys:
            found = found[key]
        return found

    return measured


def per_memcpy(size: int) -> Callable[[Figures], float]:
    """Transport against a copy in memory."""
    return lambda figures: figures["transport"]["gb_s"][str(size)] / figures["transport"]["memcpy_gb_s"]


TARGETS = (
    Target(
        "tiny step against torch.distributed.pipelining", ratio_of("tiny_step", "ours", "torch"), 0.40, 0.20
    ),
    Target("tiny step against Ray tasks", ratio_of("tiny_step", "ours", "ray"), 0.10, 0.06),
    Target(
        "tiny step",
        lambda f: f["tiny_step"]["ours"],
        3.0,
        1.5,
        "ms",
        # Taken in the same rounds: a part's contenders are measured together, and replaced together.
        scale=Scale("torch", lambda f: f["tiny_step"]["torch"], 8.0, "ms"),
    ),
    Target(
        "big step, efficiency against its bound",
        lambda f: f["big_step"]["efficiency"],
        0.95,
        0.98,
        at_least=True,
    ),
    # The stricter reading: what the machine does to single tasks counts as well.
    Target(
        "the same, tasks taking their usual time",
        lambda f: f["big_step"]["usual_efficiency"],
        0.95,
        0.98,
        at_least=True,
    ),
    Target("big step against JAX SPMD pipelining", ratio_of("big_step", "ours", "jax_spmd"), 0.70, 0.60),
    Target("big step against torch 1F1B", ratio_of("big_step", "ours", "torch"), 0.75, 0.65),
    Target("big step, best schedule, against jit on both cores", best_schedule, 1.10, 0.97),
    Target("empty step RPC to two actors", lambda f: f["rpc_us"]["ours_two_actors"], 250, 120, "us"),
    Target("empty step RPC against Ray's", ratio_of("rpc_us", "ours_two_actors", "ray"), 0.25, None),
    Target("transport, 1 MiB, against memcpy", per_memcpy(1 << 20), 0.90, 1.1, at_least=True),
    Target("transport, 16 MiB, against memcpy", per_memcpy(1 << 24), 0.90, 1.1, at_least=True),
    Target("transport, half round trip of 8 bytes", lambda f: f["transport"]["half_rtt_us"], 40, 25, "us"),
    Target(
        "transfers hidden behind computation",
        lambda f: f["overlap"]["hidden_percent"],
        90,
        98,
        "%",
        at_least=True,
    ),
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
    Target(
        "two steps in flight against one", ratio_of("tiny_step", "submit", "ours"), 1.0, 0.7, strictly=True
    ),
    Target(
        "second start of a program against the first",
        lambda f: f["compile_s"]["second_start"] / f["compile_s"]["first"],
        0.5,
        0.2,
    ),
    Target(
        "time stamps, share of the tiny step", lambda f: f["stamps"]["percent_of_tiny_step"], 2.0, None, "%"
    ),
    Target(
        "replay of compiled programs, thousand instructions a second",
        lambda f: f["plan"]["replay"]["48x64"]["one_draw_per_s"] / 1e3,
        300,
        1000,
        "",
        at_least=True,
    ),
    Target(
        "simulated against measured step, worst of eight schedules",
        lambda f: f["prediction"]["most_percent"],
        3.0,
        2.0,
        "%",
    ),
    Target("the same, mean of eight", lambda f: f["prediction"]["mean_percent"], 1.5, 0.8, "%"),
    Target(
        "simulated against measured mean step, real computation",
        planned("real_prediction", "most_percent"),
        5.0,
        3.0,
        "%",
        reason=lambda f: f["plan"]["real_prediction"]["not_measurable"],
    ),
    Target(
        "planned step shorter than the best named one on the equal cut, uneven model",
        planned("planned_step", "shorter_than_equal_cut_percent"),
        20.0,
        25.0,
        "%",
        at_least=True,
    ),
    Target(
        "the same, against the best named one on the best cut",
        planned("planned_step", "shorter_than_best_cut_percent"),
        5.0,
        10.0,
        "%",
        at_least=True,
    ),
    Target(
        "the planned step as it was predicted, against the measured one",
        lambda f: abs(f["plan"]["planned_step"]["error_percent"]),
        3.0,
        2.0,
        "%",
    ),
    Target(
        "growth of an actor's process against its planned memory",
        planned("process_memory", "kept", "most_percent"),
        10.0,
        5.0,
        "%",
    ),
    Target(
        "the same, where malloc gives freed memory back",
        planned("process_memory", "returned", "most_percent"),
        10.0,
        5.0,
        "%",
    ),
    Target(
        "searched step of an uneven model, shorter than the best named on the equal cut",
        lambda f: 100 * f["search"]["shorter_than_equal_cut"],
        20,
        25,
        "%",
        at_least=True,
    ),
    Target(
        "the same against the best named on its best cut, at 1F1B's memory",
        lambda f: 100 * f["search"]["shorter_than_best_cut"],
        5,
        10,
        "%",
        at_least=True,
    ),
    Target(
        "searched step above a proven bound, worst of 8 actors x 64 microbatches",
        lambda f: 100 * f["search"]["gap"],
        5,
        3,
        "%",
    ),
    Target(
        "the longest of these searches, time of one core",
        lambda f: f["search"]["search_cpu_s"],
        10,
        None,
        "s",
    ),
)


def rows(figures: Figures) -> list[Row]:
    """Every target and what became of it."""
    return [_row(target, figures) for target in TARGETS]


def _row(target: Target, figures: Figures) -> Row:
    value, scale = _found(target.measured, figures), target.scale
    if scale is None:
        reason = None if target.reason is None else _found(target.reason, figures)
        return Row(target, value, note=f"not measurable: {reason}" if reason else "")
    known = f"{scale.known:g} {scale.unit}"
    taken = _found(scale.measured, figures)
    if taken is None:
        return Row(target, value, note=f"limit as where {scale.who} takes {known}; it was not measured here")
    note = f"{target.limit:g} {target.unit} where {scale.who} takes {known}; "
    note += f"here it took {taken:.3g} {scale.unit}"
    return Row(target, value, taken / scale.known, note)


def _found(measured: Callable[[Figures], T], figures: Figures) -> T | None:
    try:
        return measured(figures)
    except (KeyError, TypeError, ZeroDivisionError):
        # a part was not measured, or some of its contenders were not
        return None
