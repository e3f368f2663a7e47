"""planned_step: how much shorter a planned step is than named schedules, on a device of known speed.

    python benchmarks/planned_step.py [--layer-ms 5] [--rounds 3] [--examples 256]

The model is uneven: 16 layers and a head as heavy as four of them, with a mark behind each of these 17, so
that the loss alone follows the last mark. Four actors run it, whose tasks last as long as their FLOPs say
(`RemoteMesh(device_model=)`); of a layer the forward and both gradients have as many. Steps of 1F1B on the
equal cut, four layers to each actor and the head to the last, are measured, and by them the step is planned.
The cap is what the fullest device of 1F1B on the equal cut needs in all, by `memory_needs`.

Then the planned step and every named schedule that fits into this memory take turns: each on the equal cut,
and on every cut that the planner compiled or thought best for it. Whether one fits says `memory_needs` of its
compiled form, which is also what the planner goes by.

That memory is tight, since activations are most of it: 1F1B on a better cut keeps more of them on the first
actor. With few examples a microbatch, such as `--examples 32`, parameters are most of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from layers import Layers
from plan_tables import planned_step_table
from prediction import Device
from rich.console import Console
from turns import durations, in_turns

import jaxpp_async as jpp
from jaxpp_async.planning.cut import equal_cut
from jaxpp_async.planning.memory import memory_needs
from jaxpp_async.planning.named import named_order, named_schedules

NUM_ACTORS, MEASURED_STEPS, STEPS_A_TURN = 4, 8, 3
NUM_MICROBATCHES, PARTS = 12, (1,) * 16 + (4, 0)
"""The number of microbatches, and the layers between two marks; only the loss is behind the last one."""


def equal(schedule: Any) -> Any:
    """Return a named schedule on stages of equally many parts, where the loss belongs to the head."""
    cut = equal_cut(sum(map(bool, PARTS)), schedule.num_stages)
    return replace(schedule, stages=[boundary - 1 for boundary in cut])


FIRST = equal(jpp.Std1F1B(NUM_ACTORS))
"""The schedule whose steps are measured, and whose memory is the cap."""


@dataclass(frozen=True)
class Form:
    """A named schedule on a cut.

    Args:
        name: the schedule.
        which: "equal" or "best", the kind of the cut.
        schedule: the schedule with its `stages`.
        size_bytes: what the fullest device needs.
    """

    name: str
    which: str
    schedule: Any
    size_bytes: int


def named_forms(plan: jpp.Plan, bytes_of: Callable[[Any], int]) -> Iterator[Form]:
    """Yield every named schedule on the equal cut and on the best one.

    Args:
        plan: the plan, whose candidates are the named schedules on their best cuts.
        bytes_of: returns what the fullest device needs for a schedule.
    """
    known: dict[str, Any] = {
        named_order(schedule, NUM_MICROBATCHES, NUM_ACTORS).name: schedule
        for schedule in named_schedules(len(PARTS), NUM_ACTORS)
    }
    seen = set()
    for name, schedule in known.items():
        form = equal(schedule)
        seen.add((name, tuple(form.stages)))
        yield Form(name, "equal", form, bytes_of(form))
    for candidate in plan.candidates:
        if candidate.name in known and candidate.cut and (candidate.name, candidate.cut) not in seen:
            seen.add((candidate.name, candidate.cut))
            form = replace(known[candidate.name], stages=list(candidate.cut))
            yield Form(candidate.name, "best", form, bytes_of(form))


async def measure(layer_s: float, num_rounds: int, num_examples: int) -> dict[str, Any]:
    """Plan the step, measure it beside the named schedules, and return the figures.

    Args:
        layer_s: the seconds of the forward of a layer.
        num_rounds: the number of turns that count of each step.
        num_examples: the number of examples of a microbatch.
    """
    model = Layers(sum(PARTS), width=32, rows=num_examples, num_microbatches=NUM_MICROBATCHES)
    params, batch = model.values()
    train_step = model.training(PARTS, FIRST)

    def bytes_of(schedule: Any) -> int:
        machine = jpp.Machine(NUM_ACTORS)
        step = jpp.compile_for(machine, train_step, (params, batch), donate_argnums=0, schedule=schedule)
        return max(each.total_bytes for each in memory_needs(step))

    async with jpp.RemoteMesh(NUM_ACTORS, device_model=Device(model, layer_s)) as mesh:
        first, state = mesh.distributed(train_step, donate_argnums=0), params
        for _ in range(MEASURED_STEPS):
            state, _ = await mesh.run(first, state, batch)
        cap_bytes = bytes_of(FIRST)
        plan = await mesh.plan(first, params, batch, memory=cap_bytes)
        forms = [form for form in named_forms(plan, bytes_of) if form.size_bytes <= cap_bytes]
        steps = {f"{k}": first.with_schedule(form.schedule) for k, form in enumerate(forms)}
        steps["planned"] = mesh.distributed(train_step, donate_argnums=0, plan=plan)
        timelines = await in_turns(
            mesh, steps, params, batch, num_rounds=num_rounds, steps_a_turn=STEPS_A_TURN
        )
    named = [
        {
            "schedule": form.name,
            "which": form.which,
            "cut": list(form.schedule.stages),
            "bytes": form.size_bytes,
            **durations(timelines[f"{k}"]),
        }
        for k, form in enumerate(forms)
    ]
    planned = {
        "schedule": plan.name,
        "cut": list(plan.cut),
        "bytes": max(plan.memory),
        "predicted_ms": 1e3 * plan.step_s.p50,
        "bound_ms": 1e3 * plan.bound,
        **durations(timelines["planned"]),
    }
    return figures_of(planned, named) | {"cap_bytes": cap_bytes}


def figures_of(planned: dict[str, Any], named: list[dict[str, Any]]) -> dict[str, Any]:
    """Return by how much the planned step is shorter than the quickest named schedules, and as predicted."""
    took_ms = planned["measured_ms"]
    on_equal_cut = min(form["measured_ms"] for form in named if form["which"] == "equal")
    on_any_cut = min(form["measured_ms"] for form in named)
    return {
        "planned": planned,
        "named": sorted(named, key=lambda form: form["measured_ms"]),
        "shorter_than_equal_cut_percent": 100 * (1 - took_ms / on_equal_cut),
        "shorter_than_best_cut_percent": 100 * (1 - took_ms / on_any_cut),
        "error_percent": 100 * (planned["predicted_ms"] / took_ms - 1),
    }


def run(layer_s: float = 5e-3, num_rounds: int = 3, num_examples: int = 256) -> dict[str, Any]:
    """Return the figures of `make bench`."""
    return {"planned_step": asyncio.run(measure(layer_s, num_rounds, num_examples))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layer-ms", type=float, default=5.0, help="the forward of a layer")
    parser.add_argument("--rounds", type=int, default=3, help="two counted steps of each schedule a round")
    parser.add_argument("--examples", type=int, default=256, help="the examples of a microbatch")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    figures = run(args.layer_ms / 1e3, args.rounds, args.examples)
    if args.json:
        print(json.dumps(figures, indent=1))
    else:
        Console(highlight=False).print(planned_step_table(figures["planned_step"]))


if __name__ == "__main__":
    main()
