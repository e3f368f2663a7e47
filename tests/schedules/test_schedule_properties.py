"""Schedules drawn at random: valid ones always resolve and never deadlock, broken ones always raise
`ScheduleError`."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxpp_async.errors import ScheduleError
from jaxpp_async.program.instructions import Task
from jaxpp_async.schedules import (
    NAMED,
    ControllableMemory,
    bubble_fraction,
    dependencies,
    format_grid,
    global_order,
    resolve,
    split_backwards,
    stage_actors,
    time_schedule,
)

QUICK = settings(max_examples=80, deadline=None)
BUILT_IN = [*NAMED, partial(ControllableMemory, activations=1.5)]


@st.composite
def schedules(draw, *, min_actors=1):
    """(rows, sizes): a random interleaving of all tasks along their dependencies, dealt to a random actor a
    stage."""
    num_stages = draw(st.integers(1, 4))
    num_microbatches = draw(st.integers(1, 4))
    num_actors = draw(st.integers(min_actors, 5))
    places = draw(st.lists(st.integers(0, num_actors - 1), min_size=num_stages, max_size=num_stages))
    pairs = [(stage, i) for stage in range(num_stages) for i in range(num_microbatches)]
    split = {pair for pair in pairs if draw(st.booleans())} if draw(st.booleans()) else set()
    left = [Task(i, "fwd", stage) for stage, i in pairs]
    for stage, i in pairs:
        left += [
            Task(i, ty, stage) for ty in (("bwd_input", "bwd_weight") if (stage, i) in split else ("bwd",))
        ]
    random = draw(st.randoms(use_true_random=False))
    rows: list[list[Task]] = [[] for _ in range(num_actors)]
    done: set[Task] = set()
    while left:
        ready = [task for task in left if all(need in done for need in dependencies(task, num_stages, split))]
        task = random.choice(ready)
        left.remove(task)
        done.add(task)
        rows[places[task.stage]].append(task)
    return rows, {"num_stages": num_stages, "num_microbatches": num_microbatches, "num_actors": num_actors}


@QUICK
@given(drawn=schedules(), data=st.data())
def test_valid_schedules_run_under_any_durations(drawn, data):
    rows, sizes = drawn
    resolved = resolve(rows, **sizes)
    assert resolved == tuple(map(tuple, rows))

    random = data.draw(st.randoms(use_true_random=False))
    durations = {task: random.choice([0.0, 0.1, 1.0, 7.0]) for row in rows for task in row}
    timeline = time_schedule(resolved, durations.__getitem__)
    starts = {
        task: t
        for row, times in zip(rows, timeline.starts, strict=True)
        for task, t in zip(row, times, strict=True)
    }
    ends = {
        task: t
        for row, times in zip(rows, timeline.ends, strict=True)
        for task, t in zip(row, times, strict=True)
    }
    assert len(starts) == sum(map(len, rows))
    for row in rows:
        for before, after in pairwise(row):
            assert starts[after] >= ends[before]
    for task in starts:
        assert ends[task] == starts[task] + durations[task]
        for need in dependencies(task, sizes["num_stages"], split_backwards(rows)):
            assert starts[task] >= ends[need]


@QUICK
@given(drawn=schedules())
def test_global_order_is_topological_and_keeps_each_list(drawn):
    rows, sizes = drawn
    order = global_order(rows)
    for actor, row in enumerate(rows):
        assert [task for place, task in order if place == actor] == row
    seen: set[Task] = set()
    for actor, task in order:
        assert stage_actors(rows)[task.stage] == actor
        assert seen.issuperset(dependencies(task, sizes["num_stages"], split_backwards(rows)))
        seen.add(task)
    assert 0 <= bubble_fraction(rows) < 1
    assert len(format_grid(rows).splitlines()) == sizes["num_actors"] + 1


@QUICK
@given(
    cls=st.sampled_from(BUILT_IN),
    stages=st.integers(1, 20),
    microbatches=st.integers(1, 20),
    actors=st.integers(1, 9),
)
def test_built_ins_are_valid_at_any_size(cls, stages, microbatches, actors):
    rows = cls(stages).tasks(microbatches, actors)
    resolve(cls(stages), num_stages=stages, num_microbatches=microbatches, num_actors=actors)
    # No schedule is faster than its busiest actor, or than one microbatch through all stages.
    makespan = time_schedule(rows).makespan
    assert makespan >= max(*map(len, rows), 2 * stages)


# ---------------------------------------------------------------- broken ones


def _break(rows, sizes, kind, random):
    """A copy of `rows` with one mistake of `kind`, or None where it cannot be made."""
    rows = [list(row) for row in rows]
    actor = random.choice([a for a, row in enumerate(rows) if row])
    row = rows[actor]
    step = random.randrange(len(row))
    task = row[step]
    if kind == "drop":
        del row[step]
    elif kind == "twice":
        target = random.choice(rows)
        target.insert(random.randrange(len(target) + 1), task)
    elif kind == "swap":
        split = split_backwards(rows)
        needs = [need for need in dependencies(task, sizes["num_stages"], split) if need in row]
        if not needs:
            return None
        other = row.index(random.choice(needs))
        row[step], row[other] = row[other], row[step]
    elif kind == "move":
        others = [a for a in range(len(rows)) if a != actor]
        # A stage with a single task left where it was would merely have moved.
        if not others or sum(t.stage == task.stage for t in row) < 2:
            return None
        del row[step]
        target = rows[random.choice(others)]
        target.insert(random.randrange(len(target) + 1), task)
    elif kind == "stage":
        row[step] = Task(task.i, task.ty, random.choice([-1, sizes["num_stages"], task.stage + 1]))
    elif kind == "microbatch":
        row[step] = Task(random.choice([-1, sizes["num_microbatches"], task.i + 1]), task.ty, task.stage)
    elif kind == "type":
        row[step] = Task(
            task.i, random.choice(["bwd" if task.ty == "fwd" else "fwd", "Fwd", "", None]), task.stage
        )
    elif kind == "both":
        if task.ty == "fwd":
            return None
        ty = random.choice(["bwd_input", "bwd_weight"]) if task.ty == "bwd" else "bwd"
        row.insert(random.randrange(len(row) + 1), Task(task.i, ty, task.stage))
    elif kind == "list":
        rows.insert(random.randrange(len(rows) + 1), [])
    return rows


@pytest.mark.parametrize(
    "kind", ["drop", "twice", "swap", "move", "stage", "microbatch", "type", "both", "list"]
)
@settings(max_examples=40, deadline=None)
@given(drawn=schedules(), random=st.randoms(use_true_random=False))
def test_broken_schedules_raise(kind, drawn, random):
    rows, sizes = drawn
    broken = _break(rows, sizes, kind, random)
    assume(broken is not None)
    with pytest.raises(ScheduleError) as caught:
        resolve(broken, **sizes, where="train.py:41")
    assert str(caught.value).startswith("train.py:41: ")


@settings(max_examples=50, deadline=None)
@given(drawn=schedules(min_actors=2), random=st.randoms(use_true_random=False))
def test_cycles_across_actors_raise_with_the_cycle(drawn, random):
    """Exchange a task's dependency chain across actors: put on each list the later task of another microbatch
    first."""
    rows, sizes = drawn
    places = stage_actors(rows)
    crossings = [s for s in range(sizes["num_stages"] - 1) if places[s] != places[s + 1]]
    assume(crossings and sizes["num_microbatches"] >= 2)
    stage = random.choice(crossings)
    first, second = random.sample(range(sizes["num_microbatches"]), 2)
    # bwd(stage, first) ahead of fwd(stage, second) here, fwd(stage + 1, second) ahead of bwd(stage + 1,
    # first) there.
    rows = [list(row) for row in rows]
    _put_ahead(
        rows[places[stage]],
        lambda t: t.ty.startswith("bwd") and t.i == first,
        lambda t: t == Task(second, "fwd", stage),
    )
    _put_ahead(
        rows[places[stage + 1]],
        lambda t: t == Task(second, "fwd", stage + 1),
        lambda t: t.ty.startswith("bwd") and t.i == first,
    )
    with pytest.raises(ScheduleError) as caught:
        resolve(rows, **sizes)
    assert "deadlocks" in str(caught.value) or "runs before" in str(caught.value)
    with pytest.raises(ScheduleError, match=r"waits for"):
        time_schedule(rows)


def _put_ahead(row, moved, anchor):
    """Move the tasks for which `moved` holds to just before the first for which `anchor` holds."""
    at = next(step for step, task in enumerate(row) if anchor(task))
    late = [task for task in row[at:] if moved(task)]
    row[at:] = late + [task for task in row[at:] if not moved(task)]


@QUICK
@given(drawn=schedules(), random=st.randoms(use_true_random=False))
def test_a_shuffled_list_is_refused_exactly_when_it_cannot_run(drawn, random):
    """An independent oracle: rows can run if and only if some pass over the actors' heads always makes
    progress."""
    rows, sizes = drawn
    rows = [list(row) for row in rows]
    for row in rows:
        for _ in range(random.randrange(3)):
            if len(row) > 1:
                a, b = random.sample(range(len(row)), 2)
                row[a], row[b] = row[b], row[a]
    split = split_backwards(rows)
    heads, done = Counter(), set()
    progress = True
    while progress:
        progress = False
        for actor, row in enumerate(rows):
            while heads[actor] < len(row) and done.issuperset(
                dependencies(row[heads[actor]], sizes["num_stages"], split)
            ):
                done.add(row[heads[actor]])
                heads[actor] += 1
                progress = True
    if len(done) == sum(map(len, rows)):
        resolve(rows, **sizes)
    else:
        with pytest.raises(ScheduleError):
            resolve(rows, **sizes)
