"""parts: what a benchmark run consists of: each part measures one thing and returns its figures, as they stand in
`results/latest.json`. Starts contenders through `rounds`; computes no ratio that mixes runs.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rounds import Contender, Plan, Taken, once, ours, ratio, take
from targets import hidden_percent

Figures = dict[str, Any]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Context:
    """What a part is given.

    Args:
        others: a part's name to the contenders beside ours.
        tell: takes a line for the user: what failed, and why.
    """

    others: Callable[[str], Sequence[Contender]]
    tell: Tell


STEPS = {"tiny_step": Plan(num_rounds=5, num_steps=40, num_settling=10), "big_step": Plan(5, 5, 1)}
ZERO_BUBBLE = {"h1": ("ZeroBubbleH1", "4"), "h2": ("ZeroBubbleH2", "4"), "v": ("ZeroBubbleV", "2")}
"""Schedule, and blocks a stage."""


async def tiny_step(context: Context) -> Figures:
    """Two stages of 8x8: what a step costs beside its computation."""
    mine = [
        ours("ours", "ours/step.py", "tiny"),
        ours("submit", "ours/step.py", "tiny", "--in-flight", "2"),
        ours("ours_fetched", "ours/step.py", "tiny", "--fetch"),
    ]
    taken = await take([*mine, *context.others("tiny_step")], STEPS["tiny_step"])
    figures = _medians(taken, context.tell)
    rivals = [name for name in taken if not name.startswith(("ours", "submit"))]
    return figures | {"ratio": _ratios(taken, [("ours", r) for r in rivals] + [("submit", "ours")])}


async def big_step(context: Context) -> Figures:
    """Two stages of four blocks: how well two cores are used."""
    mine = [
        ours("ours", "ours/step.py", "big"),
        ours("ours_interleaved", "ours/step.py", "big", "--schedule", "Interleaved1F1B", "--blocks", "2"),
    ]
    for key, (schedule, blocks) in ZERO_BUBBLE.items():
        mine.append(ours(f"ours_zero_bubble_{key}", "ours/step.py", "big", "--schedule", schedule, "--blocks", blocks))
    taken = await take([*mine, *context.others("big_step")], STEPS["big_step"])
    _keep_best_zero_bubble(taken)
    figures = _medians(taken, context.tell)
    own = [name for name in taken if name.startswith("ours")]
    rivals = [name for name in taken if not name.startswith("ours")]
    bounds = {name: _median_of(taken[name], "bound_ms") for name in own}
    efficiencies = {name: _efficiency(taken[name]) for name in own}
    return figures | {
        "schedule_bound": bounds.get("ours"),
        "efficiency": efficiencies.get("ours"),
        "schedule_bounds": bounds,
        "efficiencies": efficiencies,
        "ratio": _ratios(taken, [(o, r) for o in own for r in rivals]),
        "task_ms": {name: taken[name].extras[-1]["task_ms"] for name in own if taken[name].extras},
    }


def _keep_best_zero_bubble(taken: dict[str, Taken]) -> None:
    """The quickest of the zero-bubble schedules is `ours_zero_bubble`; its `schedule` fact says which it is."""
    found = {key: taken[f"ours_zero_bubble_{key}"] for key in ZERO_BUBBLE}
    measured = [t for t in found.values() if t.median is not None and t.failure is None]
    if measured:
        taken["ours_zero_bubble"] = min(measured, key=lambda t: t.median or 0.0)


async def overlap(context: Context) -> Figures:
    """Transfers as slow as a forward: how much of them is hidden behind computation."""
    settling = (await take([ours("calibration", "ours/overlap.py")], Plan(1, 5, 1)))["calibration"]
    if settling.failure is not None:
        context.tell(settling.failure)
        return {}
    # Whole ms, at least two: timers of the event loop know no less.
    delay = str(max(2, round(_median_of(settling, "forward_ms") or 0)))
    taken = await take(
        [
            ours("compute_only", "ours/overlap.py"),
            ours("transfer_only", "ours/overlap.py", "--delay-ms", delay, "--idle"),
            ours("together", "ours/overlap.py", "--delay-ms", delay),
        ],
        Plan(5, 5, 1),
    )
    figures = _medians(taken, context.tell) | {"delay_ms": float(delay)}
    complete = all(t.failure is None for t in taken.values())
    return figures | _hidden(taken) if complete else figures


def _hidden(taken: Mapping[str, Taken]) -> Figures:
    """From figures of the same round, as all ratios."""
    no_slack = statistics.median(e["bound_slow_ms"] - e["bound_ms"] for e in taken["together"].extras)
    times = [map(statistics.median, taken[name].rounds) for name in ("compute_only", "transfer_only", "together")]
    hidden = statistics.median(hidden_percent(*of_round, no_slack) for of_round in zip(*times, strict=True))
    return {"no_slack": no_slack, "hidden_percent": hidden}


async def peak_bytes(context: Context) -> Figures:
    """What an actor's buffers hold, by schedule and number of microbatches."""
    return await once(ours("peak_bytes", "ours/peak_bytes.py"))


async def compile_s(context: Context) -> Figures:
    """From entering a mesh to the end of the first step: with an empty compilation cache, and then once more."""
    starts: dict[str, list[Figures]] = {"first": [], "second_start": []}
    for _ in range(3):
        with tempfile.TemporaryDirectory() as cache:
            for found in starts.values():
                found.append(await once(ours("start", "ours/start.py", cache)))
    figures: Figures = {name: statistics.median(s["total_s"] for s in found) for name, found in starts.items()}
    for name, found in starts.items():
        figures[f"{name}_parts"] = {key: statistics.median(s[key] for s in found) for key in found[0]}
    return figures


async def launch_s(context: Context) -> Any:
    """Two actors, until the mesh is entered."""
    taken = (await take([ours("launch", "ours/launch.py")], Plan(1, 5, 1)))["launch"]
    if taken.median is None:
        context.tell(taken.failure or "launch: no figures")
        return None
    return taken.median / 1e3


async def rpc_us(context: Context) -> Figures:
    """An empty step RPC to two actors."""
    figures = await _module("rpc")
    taken = await take(context.others("rpc_us"), Plan(5, 200, 20))
    return figures | {name: _us(t) for name, t in taken.items() if _us(t) is not None} | _failures(taken, context.tell)


async def transport(context: Context) -> Figures:
    """Bytes between two processes of this host."""
    return await _module("transport")


async def controller(context: Context) -> Figures:
    """What a step costs the controller, by number of actors."""
    return await _module("controller")


PARTS: Mapping[str, Callable[[Context], Awaitable[Any]]] = {
    f.__name__: f
    for f in (tiny_step, big_step, overlap, peak_bytes, compile_s, launch_s, rpc_us, transport, controller)
}
"""By the key in the results, in the order in which they are measured."""


# ---------------------------------------------------------------- figures


def _medians(taken: Mapping[str, Taken], tell: Tell) -> Figures:
    """Each contender's median; beside them quartile distances, what contenders said, and why any failed."""
    measured = {name: t for name, t in taken.items() if t.median is not None}
    return {
        **{name: t.median for name, t in measured.items()},
        "spread": {name: t.spread for name, t in measured.items()},
        "facts": {name: t.facts for name, t in measured.items()},
        **_failures(taken, tell),
    }


def _failures(taken: Mapping[str, Taken], tell: Tell) -> Figures:
    failed = {name: t.failure for name, t in taken.items() if t.failure is not None}
    for name, why in failed.items():
        tell(f"{name}: {why}")
    return {"failed": failed} if failed else {}


def _ratios(taken: Mapping[str, Taken], pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    found = {f"{one}/{other}": ratio(taken[one], taken[other]) for one, other in pairs}
    return {pair: r for pair, r in found.items() if r is not None}


def _median_of(taken: Taken, key: str) -> float | None:
    """Over rounds, of what a contender says of itself."""
    values = [extra[key] for extra in taken.extras if key in extra]
    return statistics.median(values) if values else None


def _efficiency(taken: Taken) -> float | None:
    """Bound over measured, within rounds."""
    pairs = zip(taken.extras, taken.rounds, strict=True)
    found = [extra["bound_ms"] / statistics.median(ms) for extra, ms in pairs if "bound_ms" in extra]
    return statistics.median(found) if found else None


def _us(taken: Taken) -> float | None:
    return None if taken.median is None else taken.median * 1e3


async def _module(name: str) -> Any:
    return await once(ours(name, "ours/part.py", name, ready_s=120))
