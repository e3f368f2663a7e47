"""Lists made by priorities: always valid, always within the memory, whatever the keys are."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_pipelines import drawn_problem

from jaxpp_async.planning.evaluation import TaskTable, fits
from jaxpp_async.planning.list_scheduling import Priorities, list_schedule
from jaxpp_async.planning.problem import Layer, PipelineProblem
from jaxpp_async.schedules import resolve


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_actors=st.integers(1, 4),
    num_stages=st.integers(1, 8),
    weight_share=st.sampled_from((None, 2.0)),
)
def test_any_keys_give_valid_lists_within_the_cap(seed, num_actors, num_stages, weight_share):
    rng = random.Random(seed)
    count = rng.randint(1, 6)
    problem = drawn_problem(
        rng, num_layers=num_stages, num_actors=num_actors, num_microbatches=count, is_tight=True
    )
    if weight_share is not None:  # an input gradient leaves more than the forward left
        layers = [
            replace(layer, weight_kept_bytes=weight_share * layer.kept_bytes) for layer in problem.layers
        ]
        problem = replace(problem, layers=tuple(layers))
    actors = [rng.randrange(num_actors) for _ in range(num_stages)]
    stages = problem.stages(tuple(range(1, num_stages)))
    table = TaskTable(stages, actors, count, num_actors)
    least = list(table.static_bytes)
    for stage, actor in enumerate(actors):
        least[actor] += stages.kept_bytes[stage]
    caps = [need * rng.uniform(1, 1.5) for need in least]
    priorities = Priorities(
        period_s=rng.uniform(0, 5),
        offsets=tuple(rng.uniform(-20, 20) for _ in range(3 * num_stages)),
        limits=tuple(rng.randint(1, 4) for _ in range(num_stages)),
        patience=rng.choice((0.0, 0.5, 1.0)),
        whole=tuple(rng.random() < 0.3 for _ in range(num_stages)),
    )
    found = list_schedule(table, priorities, caps)
    assert found is not None
    ends, sum_of_ends, rows = found
    lists = [list(row) for row in table.tasks_of(rows)]
    resolve(lists, num_stages=num_stages, num_microbatches=count, num_actors=num_actors)
    assert fits(table.peak_bytes(rows), caps)
    # The ends that were promised are those of a replay, unless an actor waited on purpose.
    replayed = table.end_times(rows)
    lasts = [replayed[row[-1]] for row in rows if row]
    assert max(lasts) <= max(ends[row[-1]] for row in rows if row) + 1e-9
    if not priorities.patience:
        assert sum(lasts) == pytest.approx(sum_of_ends)


def test_nothing_is_made_where_one_microbatch_does_not_fit():
    problem = PipelineProblem((Layer(1, 1, 1, kept_bytes=5), Layer(1, 1, 1, kept_bytes=5)), 1, 2)
    table = TaskTable(problem.stages((1,)), (0, 0), 2, 1)
    priorities = Priorities(1.0, (0.0,) * 6, (2, 2))
    assert list_schedule(table, priorities, [9.0]) is None
    assert list_schedule(table, priorities, [10.0]) is not None


def test_the_least_key_goes_first():
    problem = PipelineProblem((Layer(1, 1, 1),), 1, 2)
    table = TaskTable(problem.stages(()), (0,), 2, 1)

    def order(offsets, limit=2):
        found = list_schedule(table, Priorities(1.0, offsets, (limit,)), [float("inf")])
        assert found is not None
        return [f"{task.ty} {task.i}" for task in table.tasks_of(found[2])[0]]

    forwards_first = ["fwd 0", "fwd 1", "bwd_input 0", "bwd_input 1", "bwd_weight 0", "bwd_weight 1"]
    assert order((0.0, 10.0, 20.0)) == forwards_first
    one_by_one = ["fwd 0", "bwd_input 0", "bwd_weight 0", "fwd 1", "bwd_input 1", "bwd_weight 1"]
    assert order((0.0, -10.0, -20.0)) == one_by_one
    # With one microbatch under way at most, weight gradients can still wait.
    assert order((0.0, 10.0, 20.0), limit=1)[:3] == ["fwd 0", "bwd_input 0", "fwd 1"]


def test_a_backward_is_whole_where_the_bytes_for_its_weight_gradient_do_not_fit():
    problem = PipelineProblem((Layer(1, 1, 1, kept_bytes=1, weight_kept_bytes=2),), 1, 2)
    table = TaskTable(problem.stages(()), (0,), 2, 1)
    priorities = Priorities(1.0, (0.0, -10.0, 20.0), (2,))

    def order(cap):
        found = list_schedule(table, priorities, [cap])
        assert found is not None and fits(table.peak_bytes(found[2]), [cap])
        return [f"{task.ty} {task.i}" for task in table.tasks_of(found[2])[0]]

    assert order(1.0) == ["fwd 0", "bwd 0", "fwd 1", "bwd 1"]
    assert order(2.0)[:3] == ["fwd 0", "bwd_input 0", "bwd_weight 0"]
    assert order(3.0)[:3] == ["fwd 0", "bwd_input 0", "fwd 1"]
    assert order(3.0)[3] == "bwd 1"  # beside what the first weight gradient needs there is one byte
    assert order(4.0)[:4] == ["fwd 0", "bwd_input 0", "fwd 1", "bwd_input 1"]
