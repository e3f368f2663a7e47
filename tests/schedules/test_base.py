"""Direct tests of what every built-in schedule shares."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest

from jaxpp_async.errors import ScheduleError
from jaxpp_async.program.instructions import Task
from jaxpp_async.schedules.base import (
    BuiltIn,
    Schedule,
    divided_stages,
    flat,
    freeze_stages,
    neighbouring_stages,
    tasks_through,
)
from jaxpp_async.schedules.builtin import GPipe
from jaxpp_async.schedules.validate import format_grid, resolve


@pytest.mark.parametrize(
    ("num_stages", "num_actors", "groups"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (5, 2, [[0, 1, 2], [3, 4]]),
        (2, 3, [[0], [1], []]),
        (2, 8, [[0], [1], [], [], [], [], [], []]),
        (1, 2, [[0], []]),
        (3, 1, [[0, 1, 2]]),
    ],
)
def test_neighbouring_stages_are_on_neighbouring_actors(num_stages, num_actors, groups):
    found = [list(stages) for stages in neighbouring_stages(num_stages, num_actors)]
    assert found == groups
    used = min(num_stages, num_actors)
    assert all(s * used // num_stages == actor for actor, stages in enumerate(found) for s in stages)


def test_with_fewer_stages_than_parts_the_empty_parts_are_spread():
    assert [list(stages) for stages in divided_stages(2, 4)] == [[0], [], [1], []]


def test_stages_that_run_as_one_go_forward_in_order_and_backward_the_other_way_round():
    assert tasks_through(range(1, 3), "fwd", 5) == [Task(5, "fwd", 1), Task(5, "fwd", 2)]
    for ty in ("bwd", "bwd_input", "bwd_weight"):
        assert tasks_through(range(1, 3), ty, 5) == [Task(5, ty, 2), Task(5, ty, 1)]
    assert flat([[Task(0, "fwd", 0)], [], [Task(1, "fwd", 0)]]) == [Task(0, "fwd", 0), Task(1, "fwd", 0)]


class OneForward(BuiltIn):
    """A schedule that gives nothing but its order, as the built-in ones."""

    def _rows(self, num_microbatches, num_actors):
        return [[Task(0, "fwd", 0)]]


@dataclass(frozen=True)
class Backwards(BuiltIn):
    """A schedule of one's own on the common base."""

    extra: int = 3

    def _rows(self, num_microbatches, num_actors):
        return [[Task(num_microbatches, "fwd", self.extra)]] * num_actors


def test_a_schedule_on_the_base_is_a_frozen_value_that_checks_its_counts():
    made = Backwards(2, extra=4)
    assert made == Backwards(num_stages=2, extra=4)
    assert hash(made) == hash(Backwards(2, 4))
    with pytest.raises(FrozenInstanceError):
        made.num_stages = 3
    assert isinstance(made, Schedule)
    assert made.tasks(1, 2) == [[Task(1, "fwd", 4)]] * 2
    with pytest.raises(ScheduleError, match=r"^Backwards\(num_stages=...\): expected a positive int, got 0$"):
        Backwards(0)
    with pytest.raises(ScheduleError, match=r"^num_microbatches: expected a positive int, got 0$"):
        made.tasks(0, 1)
    with pytest.raises(ScheduleError, match=r"^num_actors: expected a positive int, got 0$"):
        made.tasks(1, 0)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
def test_a_count_is_a_positive_int(value):
    assert len(Backwards(1).tasks(1, 1)) == 1
    for said, make in {
        "Backwards(num_stages=...)": lambda: Backwards(value),
        "num_microbatches": lambda: Backwards(1).tasks(value, 1),
        "num_actors": lambda: Backwards(1).tasks(1, value),
    }.items():
        with pytest.raises(ScheduleError) as caught:
            make()
        assert str(caught.value) == f"{said}: expected a positive int, got {value!r}"


@pytest.mark.parametrize(
    ("option", "where"),
    [("num_microbatches", "how many there are says the leading axis"), ("num_actors", "the mesh says")],
)
def test_a_count_that_a_schedule_does_not_take_is_refused_with_where_it_goes(option, where):
    with pytest.raises(TypeError) as caught:
        OneForward(2, **{option: 4})
    assert str(caught.value).startswith(f"OneForward has no option {option}=; {where}")


def test_what_has_no_tasks_is_no_schedule():
    assert not isinstance([[Task(0, "fwd", 0)]], Schedule)


# ---------------------------------------------------------------- the example in the docstring


def docstring_example() -> str:
    """Return the indented code of `Schedule`'s docstring, as it stands there."""
    lines = (inspect.getdoc(Schedule) or "").partition("\nAttributes:")[0].splitlines()
    return textwrap.dedent("\n".join(line for line in lines if line.startswith("    ") or not line))


def test_the_users_schedule_in_the_docstring_runs_one_microbatch_at_a_time():
    calls: list[Any] = []

    def accumulate_grads(grads_of, schedule):
        calls.append((grads_of, schedule))
        return calls.append

    names = {"accumulate_grads": accumulate_grads, "grads_of": "the gradients", "batch": "the batch"}
    exec(compile(docstring_example(), "docstring of Schedule", "exec"), names)
    (grads_of, schedule), batch = calls
    assert (grads_of, batch) == ("the gradients", "the batch")
    assert isinstance(schedule, Schedule)
    assert schedule == names["OneAtATime"](num_stages=4)
    rows = resolve(schedule, num_stages=4, num_microbatches=2, num_actors=2)
    assert [line.split()[2:] for line in format_grid(rows).splitlines()[1:]] == [
        ["0F0", ".", "2F0", ".", ".", "2B0", ".", "0B0", "0F1", ".", "2F1", ".", ".", "2B1", ".", "0B1"],
        [".", "1F0", ".", "3F0", "3B0", ".", "1B0", ".", ".", "1F1", ".", "3F1", "3B1", ".", "1B1", "."],
    ]


def test_frozen_schedules_are_schedules_to_a_type_checker():
    """`make check` reads the assignments, which pyright refuses if `num_stages` had to be writable."""

    @dataclass(frozen=True)
    class Frozen:
        num_stages: int

        def tasks(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
            return [[] for _ in range(num_actors)]

    schedules: list[Schedule] = [Frozen(2), GPipe(2)]
    assert all(isinstance(schedule, Schedule) for schedule in schedules)


@pytest.mark.parametrize("stages", [b"ab", {"a": 1}])
def test_bytes_and_dictionaries_are_no_list_of_marks(stages):
    with pytest.raises(ScheduleError, match="write a list of marks"):
        freeze_stages(stages, "here")
