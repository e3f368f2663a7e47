"""Pipelines to plan that are small: drawn at random, and solved by looking at every order."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import combinations, product

from jaxpp_async.planning.problem import Boundaries, Layer, PipelineProblem


def drawn_problem(
    rng: random.Random,
    *,
    num_layers: int,
    num_actors: int,
    num_microbatches: int,
    spread: float = 3.0,
    is_tight: bool = False,
) -> PipelineProblem:
    """A problem with random times and bytes; with `is_tight` not all microbatches fit into the memory."""
    layers = tuple(
        Layer(
            forward_s=rng.uniform(1, spread),
            input_gradient_s=rng.uniform(1, spread),
            weight_gradient_s=rng.uniform(1, spread),
            kept_bytes=(kept := rng.uniform(1, spread)),
            weight_kept_bytes=kept * rng.choice((0.0, 0.5, 1.0)),
            sent_bytes=rng.uniform(0, 1),
            static_bytes=rng.uniform(0, 1),
        )
        for _ in range(num_layers)
    )
    whole = sum(layer.kept_bytes + layer.static_bytes for layer in layers)
    cap = whole * rng.uniform(0.7, 1.6) if is_tight else math.inf
    latency_s, dispatch_s = rng.choice((0.0, 0.3)), rng.choice((0.0, 0.1))
    bytes_per_s = rng.choice((math.inf, 5.0))
    return PipelineProblem(layers, num_actors, num_microbatches, cap, latency_s, bytes_per_s, dispatch_s)


def cuts(num_layers: int, max_stages: int) -> Iterator[Boundaries]:
    """Every cut into at most so many stages."""
    for num_boundaries in range(min(num_layers, max_stages)):
        yield from combinations(range(1, num_layers), num_boundaries)


def placements(num_stages: int, num_actors: int) -> Iterator[tuple[int, ...]]:
    """Every placement, up to the names of the actors."""
    for actors in product(range(num_actors), repeat=num_stages):
        if all(actor <= max(actors[:stage], default=-1) + 1 for stage, actor in enumerate(actors)):
            yield actors


def least_step(
    problem: PipelineProblem, cut: Boundaries, actors: tuple[int, ...], best: float = math.inf
) -> float:
    """The shortest step of any order of the tasks of a cut and placement that fits into the memory; `best` if
    none is shorter. Looks at all of them: branches over the next task of any actor.

    A microbatch is (forwards done, end of the last one, input gradients done, end of the last one, bits of
    the weight gradients done); all microbatches are alike, so they are sorted.
    """
    stages, count = problem.stages(cut), problem.num_microbatches
    num, hops = len(stages), stages.hops(actors)
    kept, weight_kept = stages.kept_bytes, stages.weight_kept_bytes
    caps = [cap * (1 + 1e-9) for cap in problem.caps]
    static = stages.static_bytes_of_actors(actors, problem.num_actors)
    weights = [w - problem.dispatch_s for w in stages.weight_gradient_s]
    seen: set[object] = set()
    start = ((0, 0.0, 0, 0.0, 0),) * count, (0.0,) * problem.num_actors
    pending = [start]
    while pending:
        state = pending.pop()
        if state in seen:
            continue
        seen.add(state)
        batches, clocks = state
        left, held = [0.0] * problem.num_actors, list(static)
        for forwards, _, inputs, _, done in batches:
            for stage, actor in enumerate(actors):
                ran_input = stage >= num - inputs
                if stage >= forwards:
                    left[actor] += stages.forward_s[stage]
                elif not ran_input:
                    held[actor] += kept[stage]
                if not ran_input:
                    left[actor] += stages.input_gradient_s[stage]
                if not done >> stage & 1:
                    left[actor] += weights[stage]
                    if ran_input:
                        held[actor] += weight_kept[stage]
        if max(map(float.__add__, clocks, left)) >= best - 1e-12:
            continue
        if not any(left):
            best = max(clocks)
            continue
        for index, (forwards, forward_end, inputs, input_end, done) in enumerate(batches):
            if index and batches[index] == batches[index - 1]:
                continue

            def follow(actor, end, batch, index=index, batches=batches, clocks=clocks):
                others = (*batches[:index], batch, *batches[index + 1 :])
                pending.append((tuple(sorted(others)), (*clocks[:actor], end, *clocks[actor + 1 :])))

            if forwards < num:
                actor = actors[forwards]
                if held[actor] + kept[forwards] <= caps[actor]:
                    hop = hops[forwards - 1] if forwards else 0.0
                    end = max(clocks[actor], forward_end + hop) + stages.forward_s[forwards]
                    follow(actor, end, (forwards + 1, end, inputs, input_end, done))
            elif inputs < num:
                stage = num - 1 - inputs
                actor = actors[stage]
                ready = max(clocks[actor], input_end + hops[stage] if inputs else forward_end)
                end = ready + stages.input_gradient_s[stage]
                if held[actor] - kept[stage] + weight_kept[stage] <= caps[actor]:
                    follow(actor, end, (forwards, forward_end, inputs + 1, end, done))
                if problem.dispatch_s:
                    end = ready + stages.backward_s(stage)
                    follow(actor, end, (forwards, forward_end, inputs + 1, end, done | 1 << stage))
            for stage in range(num - inputs, num):
                if not done >> stage & 1:
                    actor = actors[stage]
                    end = clocks[actor] + stages.weight_gradient_s[stage]
                    follow(actor, end, (forwards, forward_end, inputs, input_end, done | 1 << stage))
    return best


def least_step_of_all(problem: PipelineProblem, max_stages: int) -> float:
    """The shortest step over every cut into at most so many stages, placement and order."""
    best = math.inf
    for cut in cuts(len(problem.layers), max_stages):
        for actors in placements(len(cut) + 1, problem.num_actors):
            best = least_step(problem, cut, actors, best)
    return best
