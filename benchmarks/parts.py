"""parts: what a benchmark run consists of: each part measures one thing and returns its figures, as they
stand in `results/latest.json`. Starts contenders through `rounds`; computes no ratio that mixes runs.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rounds import Contender, ContenderError, Plan, Taken, once, ours, ratio, take
from targets import hidden_percent

Figures = dict[str, Any]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Context:
    """What a part is given.

    Args:
        others: a part's name to the contenders beside ours.
        tell: takes a line for the user: what failed, and why.
        progress: takes what is being done now, which the next such line replaces.
    """

    others: Callable[[str], Sequence[Contender]]
    tell: Tell
    progress: Tell

    async def take(self, contenders: Sequence[Contender], plan: Plan) -> dict[str, Taken]:
        """`rounds.take`, and what failed is told."""
        taken = await take(contenders, plan, self.progress)
        for name, t in taken.items():
            if t.failure is not None:
                self.tell(f"{name}: {t.failure}")
        return taken


@dataclass(frozen=True)
class Part:
    """One part.

    Args:
        measure: returns its figures; raises ContenderError where there are none.
        may_take: how long that may last without the peers, for whoever waits.
    """

    measure: Callable[[Context], Awaitable[Any]]
    may_take: str

    @property
    def what(self) -> str:
        """What it measures, in a line."""
        return (self.measure.__doc__ or "").partition("\n")[0]


STEPS = {"tiny_step": Plan(num_rounds=5, num_steps=40, num_settling=10), "big_step": Plan(5, 5, 1)}
ZERO_BUBBLE = {"h1": ("ZeroBubbleH1", "4"), "h2": ("ZeroBubbleH2", "4"), "v": ("ZeroBubbleV", "2")}
"""Schedule, and blocks a stage."""
SAME_LOSS = 1e-4
"""Contenders whose first losses differ by no more than this share train the same model."""


async def tiny_step(context: Context) -> Figures:
    """Two stages of 8x8: what a step costs beside its computation."""
    mine = [
        ours("ours", "ours/step.py", "tiny"),
        ours("submit", "ours/step.py", "tiny", "--in-flight", "2"),
        ours("ours_fetched", "ours/step.py", "tiny", "--fetch"),
    ]
    taken = await context.take([*mine, *context.others("tiny_step")], STEPS["tiny_step"])
    figures = _medians(taken) | _first_losses(taken, context.tell)
    rivals = [name for name in taken if not name.startswith(("ours", "submit"))]
    return figures | {"ratio": _ratios(taken, [("ours", r) for r in rivals] + [("submit", "ours")])}


async def big_step(context: Context) -> Figures:
    """Two stages of four blocks: how well two cores are used."""
    mine = [
        ours("ours", "ours/step.py", "big"),
        ours("ours_interleaved", "ours/step.py", "big", "--schedule", "Interleaved1F1B", "--blocks", "2"),
    ]
    for key, (schedule, blocks) in ZERO_BUBBLE.items():
        mine.append(
            ours(f"ours_zero_bubble_{key}", "ours/step.py", "big", "--schedule", schedule, "--blocks", blocks)
        )
    taken = await context.take([*mine, *context.others("big_step")], STEPS["big_step"])
    _keep_best_zero_bubble(taken)
    figures = _medians(taken) | _first_losses(taken, context.tell)
    own = [name for name in taken if name.startswith("ours")]
    rivals = [name for name in taken if not name.startswith("ours")]
    bounds = {name: _median_bound(taken[name]) for name in own}
    efficiencies = {name: _efficiency(taken[name]) for name in own}
    return figures | {
        "schedule_bound": bounds.get("ours"),
        "efficiency": efficiencies.get("ours"),
        "usual_efficiency": _usual_efficiency(taken["ours"]),
        "schedule_bounds": bounds,
        "efficiencies": efficiencies,
        "ratio": _ratios(taken, [(o, r) for o in own for r in rivals]),
        "task_ms": {name: taken[name].extras[-1]["task_ms"] for name in own if taken[name].extras},
    }


def _keep_best_zero_bubble(taken: dict[str, Taken]) -> None:
    """Report the quickest zero-bubble schedule as `ours_zero_bubble`; its `schedule` fact has the name."""
    found = {key: taken[f"ours_zero_bubble_{key}"] for key in ZERO_BUBBLE}
    measured = [t for t in found.values() if t.median is not None and t.failure is None]
    if measured:
        taken["ours_zero_bubble"] = min(measured, key=lambda t: t.median or 0.0)


async def overlap(context: Context) -> Figures:
    """Transfers as slow as a forward: how much of them is hidden behind computation."""
    context.progress("how long a forward takes")
    settling = (await take([ours("calibration", "ours/overlap.py")], Plan(1, 5, 1)))["calibration"]
    if settling.failure is not None:
        raise ContenderError(settling.failure)
    # Whole ms, at least two: timers of the event loop know no less.
    delay = str(max(2, round(_median_of(settling, "forward_ms") or 0)))
    taken = await context.take(
        [
            ours("compute_only", "ours/overlap.py"),
            ours("transfer_only", "ours/overlap.py", "--delay-ms", delay, "--idle"),
            ours("together", "ours/overlap.py", "--delay-ms", delay),
        ],
        Plan(5, 5, 1),
    )
    figures = _medians(taken) | {"delay_ms": float(delay)}
    complete = all(t.failure is None for t in taken.values())
    return figures | _hidden(taken) if complete else figures


def _hidden(taken: Mapping[str, Taken]) -> Figures:
    """From figures of the same round, as all ratios."""
    no_slack = statistics.median(e["bound_slow_ms"] - e["usual_bound_ms"] for e in taken["together"].extras)
    times = [
        map(statistics.median, taken[name].rounds) for name in ("compute_only", "transfer_only", "together")
    ]
    hidden = statistics.median(hidden_percent(*of_round, no_slack) for of_round in zip(*times, strict=True))
    return {"no_slack": no_slack, "hidden_percent": hidden}


async def peak_bytes(context: Context) -> Figures:
    """What an actor's buffers hold, by schedule and number of microbatches."""
    return await once(ours("peak_bytes", "ours/peak_bytes.py"))


async def compile_s(context: Context) -> Figures:
    """From entering a mesh to the end of the first step: with an empty compilation cache, then once more."""
    starts: dict[str, list[Figures]] = {"first": [], "second_start": []}
    for number in range(1, 4):
        with tempfile.TemporaryDirectory() as cache:
            for name, found in starts.items():
                context.progress(f"round {number} of 3: {name}")
                found.append(await once(ours("start", "ours/start.py", cache)))
    figures: Figures = {
        name: statistics.median(s["total_s"] for s in found) for name, found in starts.items()
    }
    for name, found in starts.items():
        figures[f"{name}_parts"] = {key: statistics.median(s[key] for s in found) for key in found[0]}
    return figures


async def launch_s(context: Context) -> Any:
    """Two actors, until the mesh is entered."""
    taken = (await take([ours("launch", "ours/launch.py")], Plan(1, 5, 1)))["launch"]
    if taken.median is None:
        raise ContenderError(taken.failure or "launch: no figures")
    return taken.median / 1e3


async def rpc_us(context: Context) -> Figures:
    """An empty step RPC to two actors."""
    mine = [
        ours("ours_two_actors", "rpc.py", "--serve", "ours"),
        ours("bare_sockets", "rpc.py", "--serve", "bare_sockets"),
    ]
    taken = await context.take([*mine, *context.others("rpc_us")], Plan(5, 200, 20))
    tenths = _tenths(taken["ours_two_actors"])
    return {
        **_medians(taken, ms=1e3),
        **({"ours_tenths": [ms * 1e3 for ms in tenths]} if tenths else {}),
        "ratio": _ratios(taken, [("ours_two_actors", name) for name in taken if name != "ours_two_actors"]),
    }


async def transport(context: Context) -> Figures:
    """Bytes between two processes of this host."""
    return await _module("transport")


async def controller(context: Context) -> Figures:
    """What a step costs the controller, by number of actors."""
    return await _module("controller")


async def stamps(context: Context) -> Figures:
    """What the time stamps of every instruction cost, as a share of the tiny step."""
    return await _module("stamps")


async def messages(context: Context) -> Figures:
    """What it takes to encode and decode a step's messages and a program."""
    return await _module("messages")


PLAN_PROGRAMS = {"plan": 240, "planned_step": 480, "real_prediction": 300, "process_memory": 400}
"""The programs of the part `plan`, and how many seconds each may take."""


async def plan(context: Context) -> Figures:
    """Plans and predictions: replay, planned against named schedules, real computation, processes' memory."""
    figures: Figures = {}
    for name, seconds in PLAN_PROGRAMS.items():
        context.progress(name)
        try:
            figures |= await once(ours(name, "ours/part.py", name, ready_s=seconds))
        except ContenderError as error:  # the figures of the other programs are still wanted
            context.tell(f"{name}: {error}")
    if not figures:
        raise ContenderError("none of its programs has figures")
    return figures


async def prediction(context: Context) -> Figures:
    """Simulated steps of eight schedules against measured ones, on a device of known speed."""
    return await once(ours("prediction", "ours/part.py", "prediction", ready_s=600))


async def search(context: Context) -> Figures:
    """How much shorter a searched cut, placement and order make a step, and the gap to a proven bound."""
    return await once(ours("search", "ours/part.py", "search", ready_s=900))


PARTS: Mapping[str, Part] = {
    part.measure.__name__: part
    for part in (
        Part(tiny_step, "a minute"),
        Part(big_step, "three minutes"),
        Part(overlap, "a minute"),
        Part(peak_bytes, "half a minute"),
        Part(compile_s, "two minutes"),
        Part(launch_s, "half a minute"),
        Part(rpc_us, "half a minute"),
        Part(transport, "half a minute"),
        Part(controller, "a minute"),
        Part(stamps, "half a minute"),
        Part(messages, "ten seconds"),
        Part(plan, "ten minutes"),
        Part(prediction, "four minutes"),
        Part(search, "five minutes"),
    )
}
"""By the key in the results, in the order in which they are measured."""


# ---------------------------------------------------------------- figures


def _medians(taken: Mapping[str, Taken], ms: float = 1.0) -> Figures:
    """Each contender's median; beside them quartile distances, what contenders said, and why any failed.

    Args:
        taken: by name.
        ms: what a millisecond is in the unit of the figures.
    """
    measured = {name: t for name, t in taken.items() if t.median is not None}
    failed = {name: t.failure for name, t in taken.items() if t.failure is not None}
    return {
        **{name: (t.median or 0.0) * ms for name, t in measured.items()},
        "spread": {name: None if t.spread is None else t.spread * ms for name, t in measured.items()},
        "facts": {name: t.facts for name, t in measured.items()},
        **({"failed": failed} if failed else {}),
    }


def _first_losses(taken: Mapping[str, Taken], tell: Tell) -> Figures:
    """By how much contenders' first losses differ: the largest distance from their median, relative to it.
    All train the same model from the same values, so that a loss of its own means another computation."""
    losses = {name: float(t.facts["loss"]) for name, t in taken.items() if "loss" in t.facts}
    if not losses:
        return {}
    middle = statistics.median(losses.values())
    apart = {name: abs(loss - middle) / abs(middle) for name, loss in losses.items()}
    for name, distance in apart.items():
        if not distance <= SAME_LOSS:  # also one that is no number
            tell(
                f"{name}: its first loss is {losses[name]:.6g}, the others' {middle:.6g}: "
                "it computes something else"
            )
    return {"first_losses_apart": max(apart.values())}


def _ratios(taken: Mapping[str, Taken], pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    found = {f"{one}/{other}": ratio(taken[one], taken[other]) for one, other in pairs}
    return {pair: r for pair, r in found.items() if r is not None}


def _median_of(taken: Taken, key: str) -> float | None:
    """Over rounds, of what a contender says of itself."""
    values = [extra[key] for extra in taken.extras if key in extra]
    return statistics.median(values) if values else None


def _median_bound(taken: Taken) -> float | None:
    """Over all steps."""
    bounds = [ms for extra in taken.extras for ms in extra.get("bounds_ms", ())]
    return statistics.median(bounds) if bounds else None


def _efficiency(taken: Taken) -> float | None:
    """Each step's bound over the step. What makes a task longer, the machine or our loop on its core, is in
    both."""
    found = [
        bound_ms / step_ms
        for extra, of_round in zip(taken.extras, taken.rounds, strict=True)
        for bound_ms, step_ms in zip(extra.get("bounds_ms", ()), of_round, strict=False)
    ]
    return statistics.median(found) if found else None


def _usual_efficiency(taken: Taken) -> float | None:
    """The bound of a step with usual task times over the usual step, within rounds. What makes a task longer
    now and then, the machine or our loop on its core, makes the step longer and the bound not."""
    pairs = zip(taken.extras, taken.rounds, strict=True)
    found = [
        extra["usual_bound_ms"] / statistics.median(ms) for extra, ms in pairs if "usual_bound_ms" in extra
    ]
    return statistics.median(found) if found else None


def _tenths(taken: Taken) -> tuple[float, float] | None:
    """Where the first and the last tenth of the steps lie, in ms."""
    steps = [ms for of_round in taken.rounds for ms in of_round]
    if len(steps) < 2:
        return None
    cuts = statistics.quantiles(steps, n=10)
    return cuts[0], cuts[-1]


async def _module(name: str) -> Any:
    return await once(ours(name, "ours/part.py", name, ready_s=120))
