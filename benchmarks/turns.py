"""turns: steps of one mesh that take turns, so that all of them meet the machine in the same state."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jaxpp_async as jpp
from jaxpp_async.session.step import DistributedStep


async def in_turns(
    mesh: jpp.RemoteMesh,
    steps: Mapping[str, DistributedStep],
    state: Any,
    batch: Any,
    *,
    num_rounds: int,
    steps_a_turn: int,
) -> dict[str, list[jpp.Timeline]]:
    """Run steps in turns, and return the timelines of those that count.

    A first round and the first step of every turn do not count: in the one much is done for the first time,
    and in the other the caches have another step's arrays.

    Args:
        mesh: the mesh.
        steps: the steps by name. Each takes a state, which may be donated, and a batch, and returns the new
            state and something else. Each trains a state of its own.
        state: the first state of every step.
        batch: the batch of every step.
        num_rounds: the number of turns that count of each step.
        steps_a_turn: the number of steps of a turn, at least 2.
    """
    timelines: dict[str, list[jpp.Timeline]] = {name: [] for name in steps}
    states: dict[str, Any] = dict.fromkeys(steps, state)
    for number in range(num_rounds + 1):
        for name, step in steps.items():
            for k in range(steps_a_turn):
                states[name], _ = await mesh.run(step, states[name], batch)
                if number and k:
                    timelines[name].append(mesh.last_step_timeline())
    return timelines


def durations(timelines: Sequence[jpp.Timeline]) -> dict[str, float]:
    """Return the lengths of steps: median and mean in ms, and the quartiles' distance in % of the median."""
    times = [1e3 * timeline.duration_s for timeline in timelines]
    low, middle, high = statistics.quantiles(times, n=4)
    return {
        "measured_ms": middle,
        "mean_ms": statistics.fmean(times),
        "quartiles_percent": 100 * (high - low) / middle,
    }
