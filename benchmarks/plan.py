"""plan: how fast compiled programs are replayed in virtual time.

    python benchmarks/plan.py

Compiles a transformer for actors that nobody starts, and counts how many instructions a replay of its
programs gets through in a second of processor time, in one thread: every instruction of every actor, once for
each draw, until the times of all of them are known. `load` is what is done once for any number of replays.
Then plans GPT-3 175B for 64 GPUs under 80 GB a GPU, from tracing to the printed plan.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import compile as compile_benchmark
import numpy as np
from paper.costs import Constants, machine_of
from paper.models import GPT3, training_step

from jaxpp_async.compiler.pipeline import plan
from jaxpp_async.planning.planner import plan as plan_step
from jaxpp_async.planning.replay import Replay, ReplayDelays
from jaxpp_async.schedules import Std1F1B

CASES = ((8, 16), (48, 64))
"""Stages and microbatches, on eight actors."""

DRAWS = 15
"""As many as `simulate` makes."""


def delays(replay: Replay, draws: int) -> ReplayDelays:
    """Delays of a usual step: tasks of 10 to 20 ms, everything else tenths of a ms."""
    random = np.random.default_rng(0)
    num_actors, num_runs, num_sends = len(replay.actors), len(replay.run_labels), len(replay.sends)

    def tenths(count: int) -> np.ndarray:
        return 1e-4 * random.random((count, draws))

    return ReplayDelays(
        begin_s=tenths(num_actors),
        arguments_s=tenths(len(replay.late_inputs)),
        dispatch_s=tenths(num_runs),
        run_s=1e-2 * (1 + random.random((num_runs, draws))),
        wake_s=tenths(num_runs),
        post_s=tenths(num_sends),
        occupied_s=tenths(num_sends),
        latency_s=tenths(num_sends),
    )


def least_s(job: Callable[[], Any], rounds: int = 7) -> float:
    """The least processor time of some rounds, in this thread."""
    found = []
    for _ in range(rounds):
        start_s = time.thread_time()
        job()
        found.append(time.thread_time() - start_s)
    return min(found)


def gpt3_64_gpus_s() -> float:
    """The time of a full plan for GPT-3 175B on 64 GPUs, with a mark behind every layer, in seconds."""
    step = training_step(GPT3, [1] * GPT3.num_layers + [0], Std1F1B(8, stages="balanced"), 32, 4)
    machine = machine_of(8, 1)
    costs = Constants(matmul=0.66).costs_on(machine)
    start_s = time.perf_counter()
    plan_step(
        step.fn,
        step.args,
        machine=machine,
        memory="80GB",
        costs=costs,
        in_shardings=step.in_shardings,
        donate_argnums=0,
    )
    return time.perf_counter() - start_s


def run() -> dict[str, Any]:
    """The figures of `make bench`."""
    figures: dict[str, Any] = {}
    for num_stages, num_microbatches in CASES:
        programs = plan(compile_benchmark.request(num_stages, num_microbatches)).programs
        replay = Replay(programs)
        count = replay.num_instructions
        one, many = delays(replay, 1), delays(replay, DRAWS)
        load_s = least_s(lambda programs=programs: Replay(programs), rounds=3)
        one_s = least_s(lambda replay=replay, one=one: replay.run(one))
        many_s = least_s(lambda replay=replay, many=many: replay.run(many))
        figures[f"{num_stages}x{num_microbatches}"] = {
            "instructions": count,
            "one_draw_per_s": count / one_s,
            "per_s": DRAWS * count / many_s,
            "load_per_s": count / load_s,
        }
    return {"replay": figures, "gpt3_64_gpus_s": gpt3_64_gpus_s()}


def main() -> None:
    print(json.dumps({"plan": run()}))


if __name__ == "__main__":
    main()
