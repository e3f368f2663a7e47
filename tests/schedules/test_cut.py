"""The `stages` of schedules: which marks they name, balanced cuts against all cuts, and every mistake."""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import pytest

from jaxpp_async import schedules
from jaxpp_async.errors import ScheduleError
from jaxpp_async.program.instructions import Task
from jaxpp_async.schedules.base import BuiltIn
from jaxpp_async.schedules.builtin import GPipe, Std1F1B, ZeroBubbleV
from jaxpp_async.schedules.cut import (
    Cut,
    Mark,
    balanced_cut,
    balanced_cut_on,
    check_stages,
    num_stages_asked,
    stages_of,
)
from jaxpp_async.schedules.torch_csv import CsvSchedule, schedule_from_csv

# ---------------------------------------------------------------- balanced cuts


def stage_costs(costs, boundaries):
    ends = [0, *(k + 1 for k in boundaries), len(costs)]
    return [sum(costs[a:b]) for a, b in pairwise(ends)]


def best_of_all(costs, num_stages):
    """The best cut by enumeration: least largest stage, least squares, latest boundaries."""

    def key(boundaries):
        stages = stage_costs(costs, boundaries)
        return max(stages), sum(c * c for c in stages), [-k for k in boundaries]

    return min(combinations(range(len(costs) - 1), num_stages - 1), key=key)


def test_a_balanced_cut_is_the_best_of_all_cuts():
    draw = random.Random(0)
    for _ in range(400):
        count = draw.randint(1, 9)
        costs = [draw.choice([0, 1, 1, 2, 3, 7, 20]) for _ in range(count)]
        num_stages = draw.randint(1, count)
        assert balanced_cut(costs, num_stages) == best_of_all(costs, num_stages), (costs, num_stages)


@pytest.mark.parametrize(
    ("costs", "num_stages", "boundaries"),
    [
        ([5], 1, ()),
        ([1, 1, 1, 1], 1, ()),
        ([1, 1, 1, 1], 4, (0, 1, 2)),
        ([1, 1, 1, 1, 1], 2, (2,)),  # the early stage is the larger one
        ([1, 1, 1, 1, 1, 3], 4, (1, 3, 4)),  # a heavy head stands alone
        ([0.5, 1.5, 1.0, 1.0], 2, (1,)),
        ([0, 0, 0], 2, (1,)),
        ([9, 1, 1, 1, 1], 3, (0, 2)),  # of all cuts with 9 at most, the one of least squares
    ],
)
def test_a_balanced_cut_by_hand(costs, num_stages, boundaries):
    assert balanced_cut(costs, num_stages) == boundaries


def test_a_balanced_cut_of_many_layers_is_quick():
    """The work grows with the square of the number of layers, not with the number of all cuts."""
    boundaries = balanced_cut([1.0] * 600, 64)
    assert sorted({b - a for a, b in pairwise(boundaries)}) == [9, 10] and len(boundaries) == 63


def actor_loads(costs, boundaries, actors):
    loads = dict.fromkeys(actors, 0)
    for actor, cost in zip(actors, stage_costs(costs, boundaries), strict=True):
        loads[actor] += cost
    return sorted(loads.values(), reverse=True)


@pytest.mark.parametrize(
    ("costs", "actors", "boundaries", "loads"),
    [
        # A V of two actors, of which the first has the heavy head: stages of 2, 3, 2, 4 and not 3, 2, 2, 4.
        ([1] * 7 + [4], (0, 1, 1, 0), (1, 4, 6), [6, 5]),
        # Stages of 3, 2, 2 and 4 in turn are balanced as they are.
        ([1] * 7 + [4], (0, 1, 0, 1), (2, 4, 6), [6, 5]),
        # The head alone is as heavy as what the other actor has in both its stages.
        ([1] * 8 + [6], (0, 1, 0, 1), (2, 3, 7), [7, 7]),
        ([5, 1, 1, 1, 1, 1], (0, 1, 0, 1), (0, 2, 3), [6, 4]),
        ([1] * 8, (0, 1, 0, 1), (1, 3, 5), [4, 4]),  # equal stages
        ([1] * 6, (0, 1, 1, 0), (1, 3, 4), [3, 3]),
        ([3, 1, 1, 1], (0, 0), (0,), [6]),  # one actor: the largest stage alone counts
    ],
)
def test_a_cut_on_actors_by_hand(costs, actors, boundaries, loads):
    found = balanced_cut_on(costs, actors)
    assert (found, actor_loads(costs, found, actors)) == (boundaries, loads)


def test_a_cut_on_actors_is_never_worse_and_mostly_best():
    draw, num_best = random.Random(0), 0
    for _ in range(200):
        num_actors, count = draw.randint(2, 3), draw.randint(6, 10)
        num_stages = draw.randint(num_actors + 1, 2 * num_actors)
        costs = [draw.choice([1, 1, 2, 3, 7, 20]) for _ in range(count)]
        turns, folded = range(num_stages), [min(s, 2 * num_actors - 1 - s) for s in range(num_stages)]
        actors = draw.choice([[s % num_actors for s in turns], folded])
        found = actor_loads(costs, balanced_cut_on(costs, actors), actors)
        assert found <= actor_loads(costs, balanced_cut(costs, num_stages), actors)
        cuts = combinations(range(count - 1), num_stages - 1)
        num_best += found[0] == min(actor_loads(costs, cut, actors)[0] for cut in cuts)
    assert num_best >= 180


def test_a_cut_with_one_stage_an_actor_is_the_balanced_one():
    costs = [9, 1, 1, 1, 1, 4]
    assert balanced_cut_on(costs, (2, 0, 1)) == balanced_cut(costs, 3)


# ---------------------------------------------------------------- what schedules have


def test_equal_stages_are_equal_and_hashable_in_whatever_form_they_were_written():
    made = [Std1F1B(4, stages=s) for s in ([5, 11, 17], (5, 11, 17), np.array([5, 11, 17]), range(5, 18, 6))]
    assert len(set(made)) == 1 and made[0].stages == (5, 11, 17)
    assert repr(made[2]) == "Std1F1B(num_stages=4, stages=(5, 11, 17))"
    assert pickle.loads(pickle.dumps(made[0])) == made[0]
    assert Std1F1B(4) != made[0] != Std1F1B(4, stages="balanced")
    assert Std1F1B(4, stages=None) == Std1F1B(4) and repr(Std1F1B(4)) == "Std1F1B(num_stages=4)"
    assert repr(ZeroBubbleV(8, stages="balanced")) == "ZeroBubbleV(num_stages=8, stages='balanced')"
    assert made[0].tasks(2, 2) == Std1F1B(4).tasks(2, 2)


@dataclass(frozen=True)
class OneMore(BuiltIn):
    """A schedule of one's own on the common base, with a field behind `num_stages`."""

    extra: int = 3


def test_a_schedule_of_ones_own_has_stages_too():
    assert repr(OneMore(2, 4)) == "OneMore(num_stages=2, extra=4)"
    assert repr(OneMore(2, stages=[0])) == "OneMore(num_stages=2, stages=(0,), extra=3)"
    assert OneMore(2, stages=["embed"]).stages == ("embed",)


@pytest.mark.parametrize("stages", [3, "balance", 1.5])
def test_stages_are_a_list_or_balanced_or_none(stages, tmp_path):
    with pytest.raises(ScheduleError, match=r"^GPipe\(stages=...\): stages is .*; write a list of marks"):
        GPipe(2, stages=stages)
    path = tmp_path / "s.csv"
    path.write_text("0F0,0B0")
    with pytest.raises(ScheduleError, match=r"s\.csv: stages is "):
        schedule_from_csv(path, stages=stages)


def test_a_file_of_tasks_gets_its_stages_where_it_is_read(tmp_path):
    path = tmp_path / "s.csv"
    schedules.schedule_to_csv(GPipe(2, stages=[1]), path, 2, 2)
    plain, cut = schedule_from_csv(path), schedule_from_csv(path, stages=[1])
    assert plain.stages is None and cut.stages == (1,)
    assert plain != cut == CsvSchedule(cut.rows, "elsewhere", stages=[1]) and hash(plain) != hash(cut)
    assert repr(cut).endswith("s.csv', stages=(1,))") and "stages" not in repr(plain)
    assert num_stages_asked(cut) == 2


def test_the_stages_of_a_schedule_come_before_those_of_the_one_that_it_replaces():
    balanced, listed = Std1F1B(4, stages="balanced"), GPipe(2, stages=[3])
    lists = GPipe(2).tasks(2, 2)
    assert [stages_of(s) for s in (balanced, listed, GPipe(2), lists, Std1F1B)] == [
        "balanced",
        (3,),
        None,
        None,
        None,
    ]
    assert stages_of(GPipe(3), listed) == stages_of(lists, listed) == (3,)
    assert stages_of(balanced, listed) == "balanced"


@pytest.mark.parametrize(
    ("schedule", "count"),
    [
        (GPipe(3), 3),
        ([[Task(0, "fwd", 0)], [Task(0, "fwd", 1)]], 2),
        ([["no task"]], None),
        (3, None),
        (object(), None),
    ],
)
def test_the_number_of_stages_that_a_schedule_asks_for(schedule, count):
    assert num_stages_asked(schedule) == count


# ---------------------------------------------------------------- which marks they name

MARKS = [Mark("model.py:7", "embed"), *[Mark("model.py:9")] * 3, Mark("model.py:12", "tail")]


def find(stages, num_stages=3, marks=MARKS):
    return check_stages(stages, marks, num_stages=num_stages, schedule=GPipe(num_stages), where="train.py:41")


def test_marks_are_named_by_number_or_by_name():
    assert find([0, 4]) == find(["embed", "tail"]) == find([np.int64(0), "tail"]) == (0, 4)
    assert find([], num_stages=1) == () and find("balanced") is None
    assert find([0, 1, 2, 3, 4], num_stages=6) == (0, 1, 2, 3, 4)


TWINS = [Mark("a.py:1", "block"), Mark("a.py:1", "block"), Mark("a.py:2")]
WRONG = [
    ([3, 1], "stages names mark 1 behind mark 3; write each mark once, in ascending order: stages=[1, 3]"),
    ([2, 2], "stages names mark 2 twice; write each mark once, in ascending order: stages=[2]"),
    ([-1, 2], "stages[0] names mark -1 and the loop body has none of this number; its 5 marks are 0 to 4"),
    ([1, 5], "stages[1] names mark 5 and the loop body has none of this number; its 5 marks are 0 to 4"),
    ([1, 2.0], "stages[1] is 2.0 (type float); write the number or the name of a mark"),
    ([True, 2], "stages[0] is True (type bool); write the number or the name of a mark"),
    ([1, None], "stages[1] is None (type NoneType); write the number or the name of a mark"),
    (["head", 3], "stages[0] is 'head', and no mark has this name; write the number of a mark"),
    (["tail", "embed"], "stages names mark 0 behind mark 4; write each mark once"),
    (
        [1],
        "stages names 1 mark for 2 stages, and the schedule has 3; name 2 marks, or make a",
    ),
    ([0, 1, 2], "stages names 3 marks for 4 stages, and the schedule has 3; name 2 marks, or make a"),
    (7, "stages is 7 (type int); write a list of marks, such as [5, 11, 17], or 'balanced', or None"),
    ("embed", "stages is 'embed' (type str); write a list of marks"),
]


@pytest.mark.parametrize(("stages", "message"), WRONG)
def test_wrong_stages(stages, message):
    with pytest.raises(ScheduleError) as caught:
        find(stages)
    assert str(caught.value).startswith(f"train.py:41: GPipe(num_stages=3): {message}")


def test_an_error_lists_the_marks_each_line_once():
    with pytest.raises(ScheduleError) as caught:
        find([9, 10])
    assert str(caught.value).splitlines()[1:] == [
        "the marks of the loop body are:",
        "  0: model.py:7 'embed'",
        "  1 to 3: model.py:9",
        "  4: model.py:12 'tail'",
    ]
    with pytest.raises(ScheduleError, match=r"stages\[0\] is 'block', and marks 0, 1 have this name"):
        find(["block", 2], marks=TWINS)


@pytest.mark.parametrize("stages", ["balanced", [0, 1, 2]])
def test_a_loop_body_with_too_few_marks(stages):
    with pytest.raises(
        ScheduleError,
        match=r"it has 4 stages, and the 2 pipeline_yields of the loop body make 3 at most; make a schedule "
        r"of at most 3 stages, or call pipeline_yield at least 3 times\nthe marks .*\n  0 to 1: a.py:1 'bl",
    ):
        find(stages, num_stages=4, marks=TWINS[:2])
    with pytest.raises(
        ScheduleError, match=r"the 0 pipeline_yields of the loop body make 1 at most;.* times$"
    ):
        find(stages, num_stages=4, marks=[])


def test_a_cut_as_text():
    marks = tuple(MARKS)
    assert str(Cut(marks, (0, 4))) == "0, 4 of 5 (counted from 0)"
    assert str(Cut(marks, ())) == "none of 5 (counted from 0)"
    assert str(Cut(marks, (2,), (0.25, 0.75))) == (
        "2 of 5 (counted from 0), balanced: the stages have 25.0%, 75.0% of the work"
    )
    assert Cut(marks, (0, 2)).boundary_marks == ["0 (model.py:7 'embed')", "2 (model.py:9)"]
