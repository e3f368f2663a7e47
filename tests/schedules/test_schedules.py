"""Built-in schedules: published properties as numbers. Wrong schedules: what the error says."""

from __future__ import annotations

import inspect
import pickle
import time
from dataclasses import FrozenInstanceError, dataclass
from itertools import pairwise

import numpy as np
import pytest
from paths import ROOT

import jaxpp_async
from jaxpp_async.errors import ScheduleError
from jaxpp_async.program.instructions import Task
from jaxpp_async.schedules import (
    NAMED,
    DualPipeV,
    Eager1F1B,
    GPipe,
    Interleaved1F1B,
    LoopedBFS,
    Schedule,
    Std1F1B,
    VHalf,
    VMin,
    ZeroBubbleH1,
    ZeroBubbleH2,
    ZeroBubbleV,
    bubble_fraction,
    dependencies,
    format_grid,
    format_task,
    global_order,
    idle_times,
    peak_activations,
    resolve,
    split_backwards,
    stage_actors,
    time_schedule,
)

NEIGHBOURING = (GPipe, Std1F1B, Eager1F1B)
DEALT = (Interleaved1F1B, LoopedBFS)
IN_LINE = (ZeroBubbleH1, ZeroBubbleH2)
FOLDED = (ZeroBubbleV, DualPipeV)
CAPPED = (VHalf, VMin)
BUILT_IN = NEIGHBOURING + DEALT + IN_LINE + FOLDED + CAPPED
assert set(BUILT_IN) == set(NAMED)
DOCS = ROOT / "docs" / "schedules.md"
HALVES = {"fwd": 1, "bwd": 2, "bwd_input": 1, "bwd_weight": 1}
UNEVEN = [(s, m, a) for s in (1, 2, 3, 5, 8, 12) for m in (1, 2, 3, 5, 8, 9) for a in (1, 2, 3, 4, 5)]


def _resolved(schedule, num_microbatches, num_actors):
    return resolve(
        schedule, num_stages=schedule.num_stages, num_microbatches=num_microbatches, num_actors=num_actors
    )


def _parse(text: str) -> list[list[Task]]:
    """`"0F0 0B0 | 1F0"`: a list an actor, in the notation of the grids."""
    letters = {"F": "fwd", "B": "bwd", "I": "bwd_input", "W": "bwd_weight"}
    rows = []
    for row in text.split("|"):
        cells = [(cell, next(c for c in cell if c in letters)) for cell in row.split()]
        rows.append([Task(int(cell.split(c)[1]), letters[c], int(cell.split(c)[0])) for cell, c in cells])
    return rows


# ---------------------------------------------------------------- built-ins


@pytest.mark.parametrize("cls", BUILT_IN)
def test_any_sizes_are_valid_and_placed_by_formula(cls):
    for stages, microbatches, actors in UNEVEN:
        rows = _resolved(cls(stages), microbatches, actors)
        assert len(rows) == actors
        work = {"fwd": 0, "bwd": 0, "bwd_input": 0, "bwd_weight": 0}
        for task in (task for row in rows for task in row):
            work[task.ty] += 1
        assert work["fwd"] == work["bwd"] + work["bwd_input"] == stages * microbatches
        assert work["bwd_input"] == work["bwd_weight"]
        assert (work["bwd"] == 0) if cls in IN_LINE + CAPPED else (work["bwd_input"] == 0 or cls in FOLDED)
        assert stage_actors(rows) == tuple(_place(cls, s, stages, actors) for s in range(stages))


def _place(cls, stage: int, stages: int, actors: int) -> int:
    """The actor of a stage, by the formula in the docs."""
    if cls in DEALT:
        return stage % actors
    if cls in FOLDED + CAPPED and stages > actors:
        part = stage * 2 * actors // stages
        return min(part, 2 * actors - 1 - part)
    return stage * min(stages, actors) // stages


@pytest.mark.parametrize("cls", NEIGHBOURING)
@pytest.mark.parametrize("per_actor", [1, 2, 3])
@pytest.mark.parametrize(("m", "a"), [(1, 4), (3, 4), (4, 4), (8, 4), (9, 4), (32, 4), (5, 2), (7, 1)])
def test_bubble_of_neighbouring_stages(cls, per_actor, m, a):
    rows = _resolved(cls(per_actor * a), m, a)
    assert bubble_fraction(rows) == pytest.approx((a - 1) / (m + a - 1))
    # Also with a backward twice as long as a forward.
    assert bubble_fraction(rows, {"fwd": 1, "bwd": 2}) == pytest.approx((a - 1) / (m + a - 1))


@pytest.mark.parametrize("cls", DEALT)
@pytest.mark.parametrize("v", [2, 3, 6])
@pytest.mark.parametrize(
    ("m", "a"), [(4, 4), (5, 4), (7, 4), (8, 4), (9, 4), (11, 4), (32, 4), (5, 2), (11, 3)]
)
def test_bubble_of_stages_dealt_round(cls, v, m, a):
    rows = _resolved(cls(v * a), m, a)
    assert bubble_fraction(rows) == pytest.approx((a - 1) / (v * m + a - 1))


# Schedule, fewest microbatches for A actors, units of work an actor and microbatch, units an actor idles in
# between.
SPLIT = [
    (ZeroBubbleH1, lambda a: a, 3, lambda a, actor: a - 1 - actor),
    (ZeroBubbleH2, lambda a: 2 * a - 1, 3, lambda a, actor: 0),
    (ZeroBubbleV, lambda a: 2 * a - 1, 6, lambda a, actor: 0),
    (DualPipeV, lambda a: 2 * a, 6, lambda a, actor: a - 1 - actor),
]


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(("cls", "fewest", "work", "idle"), SPLIT)
def test_bubble_of_split_backwards(cls, fewest, work, idle, k):
    for a in (1, 2, 3, 4, 7, 8):
        for m in (fewest(a), fewest(a) + 1, 4 * a + 3):
            rows = _resolved(cls(k * a * work // 3), m, a)
            assert bubble_fraction(rows, HALVES) == pytest.approx((a - 1) / (work * m + a - 1))
            assert idle_times(rows, HALVES) == tuple(k * idle(a, actor) for actor in range(a))


def test_bubble_of_zero_bubble_is_a_third_of_1f1b():
    whole, split = _resolved(Std1F1B(4), 8, 4), _resolved(ZeroBubbleH1(4), 8, 4)
    assert idle_times(whole, HALVES) == (9, 6, 3, 0)
    assert idle_times(split, HALVES) == (3, 2, 1, 0)


@pytest.mark.parametrize("a", [2, 4, 8])
def test_few_microbatches(a):
    """Where the published schedules are not defined, ours stay sensible."""
    for m in range(1, 2 * a):
        times = {
            cls: time_schedule(_resolved(cls(2 * a), m, a), HALVES).makespan
            for cls in (*IN_LINE, *FOLDED, Std1F1B)
        }
        assert times[ZeroBubbleV] <= times[ZeroBubbleH1] <= times[Std1F1B]
        assert DualPipeV(2 * a).tasks(m, a) == ZeroBubbleV(2 * a).tasks(m, a)
        idle = idle_times(_resolved(ZeroBubbleH2(a), m, a))
        assert max(idle) == 2 * a - 1 - m
        if m <= a:
            assert times[ZeroBubbleH1] <= times[ZeroBubbleH2]


@pytest.mark.parametrize("cls", FOLDED)
def test_without_a_second_stage_on_any_actor_nothing_folds(cls):
    for stages, actors in ((1, 1), (1, 3), (3, 3), (3, 4)):
        assert cls(stages).tasks(5, actors) == ZeroBubbleH1(stages).tasks(5, actors)
    assert stage_actors(_resolved(cls(8), 8, 4)) == (0, 1, 2, 3, 3, 2, 1, 0)
    assert stage_actors(_resolved(cls(5), 8, 3)) == (0, 1, 2, 2, 1)
    assert stage_actors(_resolved(cls(10), 8, 2)) == (0, 0, 0, 1, 1, 1, 1, 1, 0, 0)


@pytest.mark.parametrize(("m", "a"), [(8, 4), (9, 4), (20, 4), (6, 3), (2, 1)])
def test_dualpipev_pairs_a_forward_with_a_whole_backward_of_the_other_part(m, a):
    for actor, row in enumerate(DualPipeV(2 * a).tasks(m, a)):
        pairs = [
            (one, two)
            for one, two in pairwise(row)
            if (one.ty, two.ty) == ("fwd", "bwd") and one.stage != two.stage
        ]
        assert len(pairs) == 2 * (m - 2 * a + actor + 1) + (a - 1 - actor)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8, 32])
@pytest.mark.parametrize("k", [1, 3])
def test_activations_held(m, k):
    actors = range(4)

    def held(cls):
        return peak_activations(_resolved(cls(4 * k), m, 4))

    assert held(GPipe) == held(LoopedBFS) == tuple(k * m for _ in actors)
    assert held(Std1F1B) == tuple(k * min(m, 4 - a) for a in actors)
    assert held(Eager1F1B) == tuple(k * min(m, 2 * (4 - a) - 1) for a in actors)
    assert held(ZeroBubbleH1) == tuple(k * min(m, 4) for _ in actors)
    assert held(ZeroBubbleH2) == tuple(k * min(m, 2 * 4 - 1) for _ in actors)


@pytest.mark.parametrize("m", [1, 3, 7, 8, 9, 32])
@pytest.mark.parametrize("k", [1, 2])
def test_activations_held_in_a_v(m, k):
    zero_bubble_v, dualpipe_v = (peak_activations(_resolved(cls(8 * k), m, 4)) for cls in FOLDED)
    assert max(zero_bubble_v) == k * min(2 * m, 8)
    if m >= 7:
        assert zero_bubble_v == (8 * k,) * 4
    assert dualpipe_v == ((9 * k,) * 4 if m >= 8 else zero_bubble_v)


@pytest.mark.parametrize(
    ("v", "m", "a", "group"),
    [
        (2, 8, 4, 4),
        (3, 8, 4, 4),
        (6, 64, 8, 8),
        (2, 4, 4, 4),
        (2, 9, 4, 5),
        (3, 11, 4, 6),
        (3, 7, 4, 7),
        (2, 3, 4, 3),
    ],
)
def test_activations_held_when_interleaved(v, m, a, group):
    expected = tuple(min(v * m, (v - 1) * group + 2 * (a - 1 - actor) + 1) for actor in range(a))
    assert peak_activations(_resolved(Interleaved1F1B(v * a), m, a)) == expected


def test_with_a_stage_an_actor_interleaved_is_1f1b():
    assert Interleaved1F1B(4).tasks(8, 4) == Std1F1B(4).tasks(8, 4)
    assert Interleaved1F1B(2).tasks(8, 4)[:2] == Std1F1B(2).tasks(8, 2)


@pytest.mark.parametrize("cls", BUILT_IN)
def test_backwards_accumulate_in_order(cls):
    """Each stage's gradients are summed in the order of the plain loop, so that sums round alike."""
    for stages, microbatches, actors in UNEVEN:
        for row in cls(stages).tasks(microbatches, actors):
            for types in (("fwd",), ("bwd", "bwd_input"), ("bwd", "bwd_weight")):
                orders = {task.stage: [] for task in row}
                for task in row:
                    if task.ty in types:
                        orders[task.stage].append(task.i)
                assert all(order == list(range(microbatches)) for order in orders.values())


@pytest.mark.parametrize("cls", BUILT_IN)
def test_the_table_in_the_docs(cls):
    stages = 8 if cls in DEALT + FOLDED + CAPPED else 4
    rows = _resolved(cls(stages), 8, 4)
    size = 4 / stages

    def listed(values):
        return ", ".join(f"{value * size:g}" for value in values)

    line = (
        f"| `{cls.__name__}({stages})` | {time_schedule(rows, HALVES).makespan * size:g} | "
        f"{bubble_fraction(rows, HALVES):.3f} | {listed(idle_times(rows, HALVES))} | "
        f"{listed(peak_activations(rows))} |"
    )
    assert line in DOCS.read_text().splitlines()


def test_the_examples_in_the_docs():
    code, error = (
        block
        for block in DOCS.read_text().split("```")
        if "class OneAtATime" in block or "\ntrain.py" in block
    )
    names = {"dataclass": dataclass, "jpp": jaxpp_async}
    exec(code.removeprefix("python"), names)
    assert bubble_fraction(_resolved(names["OneAtATime"](4), 3, 4)) == 0.75
    with pytest.raises(ScheduleError) as caught:
        resolve(
            _parse("0F0 0F1 0B0 0F2 0B1 0B2 | 1B0 1F0 1F1 1B1 1F2 1B2"),
            **{**SIZES, "num_microbatches": 3},
            where="train.py:41",
        )
    assert str(caught.value) == error.strip()


@pytest.mark.parametrize("cls", BUILT_IN)
def test_equal_schedules_are_one_key(cls):
    assert cls(4) == cls(num_stages=4)
    assert len({cls(4), cls(4), cls(5)}) == 2
    assert all(cls(4) != other(4) for other in BUILT_IN if other is not cls)
    assert repr(cls(4)) == f"{cls.__name__}(num_stages=4)"
    assert pickle.loads(pickle.dumps(cls(4))) == cls(4)
    assert isinstance(cls(4), Schedule)
    assert cls(4).tasks(num_microbatches=2, num_actors=2) == cls(4).tasks(2, 2)


@pytest.mark.parametrize("num_stages", [0, -1, 2.0, "2", None, True])
def test_constructor_wants_a_positive_int(num_stages):
    with pytest.raises(ScheduleError, match=r"Std1F1B\(num_stages=\.\.\.\): expected a positive int, got"):
        Std1F1B(num_stages)


@pytest.mark.parametrize("args", [(0, 2), (2, 0), (2.0, 2), (2, True)])
def test_tasks_wants_positive_ints(args):
    with pytest.raises(ScheduleError, match="expected a positive int"):
        GPipe(2).tasks(*args)


@pytest.mark.parametrize("cls", BUILT_IN)
def test_large_schedule_resolves_quickly(cls):
    """48 stages, 8 actors, 64 microbatches: 40 to 80 ms alone on a core; a test machine may be busy."""
    best = min(_timed(lambda: global_order(_resolved(cls(48), 64, 8))) for _ in range(2))
    assert best < 0.4


def _timed(fn) -> float:
    start = time.process_time()
    fn()
    return time.process_time() - start


# ---------------------------------------------------------------- timelines and orders


def test_dependencies():
    split = {(2, 0)}
    table = {
        "0F0": "", "2F0": "1F0", "2B0": "2F0", "0B0": "0F0 1B0", "1B0": "1F0 2I0", "1B1": "1F1 2B1",
        "1I0": "1F0 2I0", "0I0": "0F0 1B0", "2I0": "2F0", "2W0": "2I0", "0W1": "0I1",
    }  # fmt: skip
    for task, needs in table.items():
        assert dependencies(_parse(task)[0][0], 3, split) == tuple(_parse(needs)[0]), task


def test_time_schedule_gives_times():
    timeline = time_schedule(_parse("0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1"), {"fwd": 1, "bwd": 2})
    assert timeline.starts == ((0, 1, 4, 7), (1, 2, 4, 5))
    assert timeline.ends == ((1, 2, 6, 9), (2, 4, 5, 7))
    assert timeline.makespan == 9
    by_task = time_schedule(_parse("0F0 0B0 | 1F0 1B0"), lambda task: 10 * task.stage + 1)
    assert by_task.makespan == 1 + 11 + 11 + 1


def test_global_order_is_by_time_then_actor():
    order = global_order(_parse("0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1"))
    assert [(actor, str(task)) for actor, task in order] == [
        (0, "fwd(stage 0, mb 0)"),
        (0, "fwd(stage 0, mb 1)"),
        (1, "fwd(stage 1, mb 0)"),
        (1, "bwd(stage 1, mb 0)"),
        (0, "bwd(stage 0, mb 0)"),
        (1, "fwd(stage 1, mb 1)"),
        (1, "bwd(stage 1, mb 1)"),
        (0, "bwd(stage 0, mb 1)"),
    ]


def test_split_backwards():
    rows = _parse("0F0 0F1 0I0 0B1 0W0 | 1F0 1I0 1F1 1B1 1W0")
    assert resolve(rows, num_stages=2, num_microbatches=2, num_actors=2) == tuple(map(tuple, rows))
    assert split_backwards(rows) == {(0, 0), (1, 0)}
    # The activations are held until the weights' half is done.
    assert peak_activations(rows) == (2, 2)
    assert peak_activations(_parse("0F0 0I0 0F1 0W0 0I1 0W1")) == (2,)


def test_grid():
    assert format_grid(_parse("0F0 0I0 0W0 | 1F0 1B0 | ")) == (
        "time     0    1    2    3    4\n"
        "actor 0  0F0  .    .    0I0  0W0\n"
        "actor 1  .    1F0  1B0  .    .\n"
        "actor 2  .    .    .    .    ."
    )
    assert format_task(Task(3, "bwd_weight", 1)) == "bwd_weight(stage 1, mb 3)"


def test_time_schedule_names_the_cycle():
    with pytest.raises(ScheduleError, match="deadlocks:\n  actor 0, step 0"):
        time_schedule(_parse("2F0 0F0 | 1F0"))


# ---------------------------------------------------------------- what resolve takes


GOOD = "0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1"
SIZES = {"num_stages": 2, "num_microbatches": 2, "num_actors": 2}


@dataclass(frozen=True)
class Own:
    """A user's schedule: returns whatever it was made with."""

    rows: object
    num_stages: object = 2

    def tasks(self, num_microbatches, num_actors):
        return self.rows() if callable(self.rows) else self.rows


def test_lists_tuples_and_objects_resolve_alike():
    rows = _parse(GOOD)
    frozen = tuple(map(tuple, rows))
    for schedule in (rows, frozen, Own(rows), Own(frozen), Own(rows, np.int64(2))):
        assert resolve(schedule, **SIZES) == frozen
    ints = [[Task(np.int32(t.i), t.ty, np.int64(t.stage)) for t in row] for row in rows]
    resolved = resolve(ints, **SIZES)
    assert resolved == frozen
    assert all(type(t.i) is int and type(t.stage) is int for row in resolved for t in row)


def test_forward_only():
    rows = _parse("0F0 0F1 | 1F0 1F1")
    assert resolve(rows, **SIZES, forward_only=True) == tuple(map(tuple, rows))
    assert resolve(_parse(GOOD), **SIZES, forward_only=True)
    with pytest.raises(ScheduleError, match=r"bwd\(stage 0, mb 0\), .* and 1 more are missing"):
        resolve(rows, **SIZES)
    with pytest.raises(ScheduleError, match=r"bwd\(stage 0, mb 1\) is missing"):
        resolve(_parse("0F0 0F1 0B0 | 1F0 1B0 1F1 1B1"), **SIZES, forward_only=True)


def _raise():
    raise RuntimeError("no luck")


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (3, "3: this is not a schedule (type int); pass an object with num_stages and tasks("),
        ("F0 B0", "'F0 B0': this is not a schedule (type str)"),
        (None, "None: this is not a schedule (type NoneType)"),
        (Std1F1B, "Std1F1B: this is a class, not a schedule; write Std1F1B(num_stages=2)"),
        (object(), "object: this is not a schedule (type object)"),
        (Own([], "2"), "its num_stages is '2' (type str); make it an int"),
        (Own([], 2.0), "its num_stages is 2.0 (type float); make it an int"),
        (Own([], np.ones(2)), "its num_stages is array([1., 1.]) (type ndarray)"),
        (Own(None), "tasks(num_microbatches=2, num_actors=2) returned None (type NoneType); return a list"),
        (Own("ab"), "returned 'ab' (type str)"),
        (Own({0: []}), "returned {0: []} (type dict)"),
        (Own(_raise), "tasks(num_microbatches=2, num_actors=2) raised RuntimeError: no luck"),
        (Own([[], 5]), "entry 1 is 5 (type int), not a list of Tasks; give one list of Tasks an actor"),
        ([Task(0, "fwd", 0)],
         "the schedule: entry 0 is Task(i=0, ty='fwd', stage=0) (type Task), not a list of Tasks"),
        ([], "0 lists of tasks for 2 actors"),
        (Std1F1B(2).tasks(2, 1), "1 list of tasks for 2 actors; give every actor of the mesh one list"),
        (Std1F1B(2).tasks(2, 3), "3 lists of tasks for 2 actors"),
        (
            Std1F1B(3),
            "Std1F1B(num_stages=3): it has 3 stages and the loop body 2 stages (1 pipeline_yield); "
            "make a schedule of 2 stages or a loop body with 2 pipeline_yields",
        ),
        (Std1F1B(1), "it has 1 stage and the loop body 2 stages (1 pipeline_yield)"),
        (Std1F1B(3).tasks(2, 2), "the schedule: it has 3 stages and the loop body 2 stages"),
        (Std1F1B(1).tasks(2, 2), "the schedule: it has 1 stage and the loop body 2 stages"),
        ([[], []],
         "the schedule: it has 0 stages and the loop body 2 stages (1 pipeline_yield); make a schedule of 2"),
        ([["fwd"], []],
         "actor 0, step 0: 'fwd' (type str) is not a Task; make every entry Task(i, ty, stage)"),
        ([[(0, "fwd", 0)], []], "actor 0, step 0: (0, 'fwd', 0) (type tuple) is not a Task"),
        ([[], [Task(0, "forward", 0)]],
         "step 0: 'forward' (type str) is not a type of task; ty is one of 'fwd'"),
        ([[], [Task(0, ["fwd"], 0)]], "actor 1, step 0: ['fwd'] (type list) is not a type of task"),
        ([[Task("0", "fwd", 0)], []], "actor 0, step 0: the microbatch of a fwd is '0' (type str)"),
        ([[Task(0, "fwd", 0.5)], []], "actor 0, step 0: the stage of a fwd is 0.5 (type float)"),
        ([[Task(True, "fwd", 0)], []], "actor 0, step 0: the microbatch of a fwd is True (type bool)"),
    ],
)  # fmt: skip
def test_not_a_schedule(schedule, message):
    with pytest.raises(ScheduleError) as caught:
        resolve(schedule, **SIZES, where="train.py:41")
    assert str(caught.value).startswith("train.py:41: ")
    assert message in str(caught.value)


def test_error_of_the_users_code_is_the_cause():
    with pytest.raises(ScheduleError) as caught:
        resolve(Own(_raise), **SIZES)
    assert isinstance(caught.value.__cause__, RuntimeError)


# Lists, the marked entries, what the message holds.
WRONG = [
    ("0F0 0F2 0B0 0B1 | 1F0 1B0 1F1 1B1", "0F2", "actor 0, step 1: fwd(stage 0, mb 2) is out of range;"),
    ("0F0 0F2 0B0 0B1 | 1F0 1B0 1F1 1B1", "0F2", "the microbatches of the batch are 0 to 1"),
    ("0F0 0F-1 0B0 0B1 | 1F0 1B0 1F1 1B1", "0F-1", "fwd(stage 0, mb -1) is out of range"),
    ("-1F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1", "-1F0", "is out of range; the stages of the loop body are 0 to 1"),
    ("0F0 0F1 0F0 0B0 0B1 | 1F0 1B0 1F1 1B1", "0F0 0F0",
     "actor 0, step 2: fwd(stage 0, mb 0) is there twice"),
    ("0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1 0F1", "0F1 0F1",
     "mb 1) is there twice (first at actor 0, step 1); run every"),
    ("0F0 0F1 0B0 | 1F0 1B0 1F1 1B1 0B1", "0F0 0B1",
     "stage 0 is on two actors: fwd(stage 0, mb 0) on actor 0"),
    ("0F0 0F1 0B0 | 1F0 1B0 1F1 1B1 0B1", "0F0 0B1",
     "and bwd(stage 0, mb 1) on actor 1, step 4; give all tasks of"),
    ("0F0 0F1 0B0 0B1 | 1F0 1F1 1B1", "",
     "bwd(stage 1, mb 0) is missing; a step of 2 stages and 2 microbatches"),
    ("0F0 0B0 | 1F0 1B0", "",
     "fwd(stage 0, mb 1), bwd(stage 0, mb 1), fwd(stage 1, mb 1) and 1 more are missing"),
    ("0F0 0F1 0I0 0B1 | 1F0 1B0 1F1 1B1", "", "bwd_weight(stage 0, mb 0) is missing"),
    ("0F0 0F1 0B0 0B1 | 1F0 1W0 1F1 1B1", "", "bwd_input(stage 1, mb 0) is missing"),
    ("0F0 0F1 0B0 0W0 0B1 | 1F0 1B0 1F1 1B1", "0B0 0W0",
     "bwd(stage 0, mb 0) and bwd_weight(stage 0, mb 0) are both"),
    ("0F0 0F1 0B0 0B1 | 1B0 1F0 1F1 1B1", "1B0 1F0",
     "actor 1, step 0: bwd(stage 1, mb 0) runs before fwd(stage 1,"),
    ("0F0 0F1 0B0 0B1 | 1B0 1F0 1F1 1B1", "1B0 1F0",
     "(step 1), which it depends on; move fwd(stage 1, mb 0) ahead"),
    ("0F0 0F1 0W0 0I0 0B1 | 1F0 1B0 1F1 1B1", "0W0 0I0",
     "bwd_weight(stage 0, mb 0) runs before bwd_input(stage 0,"),
    ("1F0 0F0 0F1 1F1 1B0 0B0 1B1 0B1 | ", "1F0 0F0", "fwd(stage 1, mb 0) runs before fwd(stage 0, mb 0)"),
    ("0F0 1F0 0F1 1F1 0B0 1B0 1B1 0B1 | ", "0B0 1B0", "bwd(stage 0, mb 0) runs before bwd(stage 1, mb 0)"),
    (
        "0F0 0B0 0F1 0B1 | 1F0 1F1 1B0 1B1",
        "0B0 1F1",
        """it deadlocks: 2 actors wait for one another; change the order on one of them:
  actor 0, step 1: bwd(stage 0, mb 0) waits for bwd(stage 1, mb 0) on actor 1, step 2, \
which comes after fwd(stage 1, mb 1)
  actor 1, step 1: fwd(stage 1, mb 1) waits for fwd(stage 0, mb 1) on actor 0, step 2, \
which comes after bwd(stage 0, mb 0)
""",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "marked", "message"), WRONG)
def test_wrong_order(text, marked, message):
    with pytest.raises(ScheduleError) as caught:
        resolve(_parse(text), **SIZES, where="train.py:41")
    error = str(caught.value)
    assert error.startswith("train.py:41: the schedule: ")
    assert message in error
    grid = error[error.index("\nstep ") :]
    assert sorted(part.split("]")[0] for part in grid.split("[")[1:]) == sorted(marked.split())
    assert "\nactor 0 " in grid
    assert "\nactor 1" in grid


def test_a_list_with_a_stage_too_many_marks_its_first_task():
    with pytest.raises(ScheduleError, match="it has 3 stages and the loop body 2 stages") as caught:
        resolve(_parse("0F0 0F1 0B0 0B1 | 1F0 1B0 2F1 1B1"), **SIZES)
    assert str(caught.value).count("[") == str(caught.value).count("[2F1]") == 1


def _twice(rows, step):
    rows[20].insert(step, rows[20][2])


def _out_of_range(rows, step):
    rows[20][step] = Task(99, "bwd", rows[20][step].stage)


def _not_a_task(rows, step):
    rows[20][step] = "2F2"


def _whole_and_split(rows, step):
    rows[21].insert(step, Task(0, "bwd_weight", rows[21][-1].stage))


def _too_late(rows, step):
    rows[20].insert(step, rows[20].pop(2))


def _elsewhere(rows, step):
    rows[22].insert(step, rows[20].pop(step))


# What is done to the lists, what the error says, how many entries it marks.
MISTAKES = [
    (_twice, "is there twice", 2),
    (_out_of_range, "is out of range", 1),
    (_not_a_task, "is not a Task", 1),
    (_whole_and_split, "are both there", 2),
    (_too_late, "which it depends on; move", 2),
    (_elsewhere, "is on two actors", 2),
]


@pytest.mark.parametrize(("mistake", "message", "num_marks"), MISTAKES)
def test_a_mistake_in_a_large_schedule_is_shown_on_one_screen(mistake, message, num_marks):
    rows = Std1F1B(60).tasks(40, 30)
    step = next(step for step, task in enumerate(rows[20]) if task.ty == "bwd" and step > 100)
    mistake(rows, step)
    with pytest.raises(ScheduleError, match=message) as caught:
        resolve(rows, num_stages=60, num_microbatches=40, num_actors=30)
    lines = str(caught.value).splitlines()
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 200
    assert sum(line.count("[") for line in lines[1:]) == num_marks
    assert f" {step} " in lines[1]
    assert lines[-1].startswith("(part of 30 actors x ")


def test_long_cycle_is_cut():
    rows = Interleaved1F1B(60).tasks(30, 30)
    rows[29].insert(0, rows[29].pop(30))
    with pytest.raises(ScheduleError, match="30 actors wait for one another") as caught:
        resolve(rows, num_stages=60, num_microbatches=30, num_actors=30)
    assert "and so on over" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 24


@pytest.mark.parametrize("kind", BUILT_IN)
def test_counts_that_a_schedule_is_not_given_are_told_where_they_go(kind):
    name = kind.__name__
    with pytest.raises(
        TypeError, match=rf"^{name} has no option num_microbatches=; .* leading axis of the batch .*"
    ):
        kind(num_stages=2, num_microbatches=4)
    with pytest.raises(
        TypeError, match=rf"^{name} has no option num_actors=; the mesh says .*: RemoteMesh\("
    ):
        kind(2, num_actors=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'microbatches'"):
        kind(2, microbatches=2)
    made = kind(num_stages=2)
    assert (
        str(inspect.signature(kind)) == "(num_stages: 'int', *, stages: 'Any' = None) -> None"
        and repr(made) == f"{name}(num_stages=2)"
    )
    assert made == kind(2) == pickle.loads(pickle.dumps(made)) and hash(made) == hash(kind(2))
    with pytest.raises(FrozenInstanceError):
        made.num_stages = 3
