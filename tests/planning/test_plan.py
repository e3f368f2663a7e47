"""Plans as values: their text, their files, and whether they suit a mesh and arguments, without a step."""

from __future__ import annotations

import jax
import msgspec
import pytest

import jaxpp_async as jpp
from jaxpp_async import Std1F1B
from jaxpp_async.errors import PlanError, ScheduleError
from jaxpp_async.planning.plan import (
    Candidate,
    Plan,
    describe_arguments,
    format_row,
    parse_row,
)
from jaxpp_async.planning.simulation import StepTimes
from jaxpp_async.program.instructions import Task
from jaxpp_async.schedules.planned import PlannedSchedule

ROWS = tuple(map(tuple, Std1F1B(2).tasks(3, 2)))
CHOSEN = Candidate(
    name="Std1F1B(2)",
    num_actors=2,
    spmd_mesh={},
    num_microbatches=3,
    cut=(1,),
    step_s=0.02,
    peak_bytes=50_000.0,
    cap_bytes=60_000.0,
    bubble=0.25,
    is_compiled=True,
    verdict="chosen",
)
LOST = msgspec.structs.replace(
    CHOSEN, name="GPipe(2)", peak_bytes=90_000.0, is_compiled=False, verdict="does not fit: 50% over the cap"
)
ARGUMENTS = ([jax.ShapeDtypeStruct((16, 16), "float32")], {"x": jax.ShapeDtypeStruct((3, 8, 16), "float32")})
PLAN = Plan(
    step="train_step",
    arguments=describe_arguments(ARGUMENTS),
    num_actors=2,
    spmd_mesh={},
    num_microbatches=3,
    marks=("model.py:7", "model.py:9"),
    mark_names=(None, None),
    cut=(1,),
    name="Std1F1B(2)",
    orders=tuple(map(format_row, ROWS)),
    task_s={"fwd": (0.002, 0.002), "bwd": (0.004, 0.004)},
    step_s=StepTimes(0.019, 0.02, 0.022),
    loop_s=0.018,
    bound=0.015,
    placement_bound=0.0175,
    memory=(50_000, 40_000),
    cap_bytes=60_000.0,
    candidates=(CHOSEN, LOST),
    search="a search has nothing to win",
    advice=("transfers that take no time: 3.0% less",),
    assumed=tuple(f"assumption {k}" for k in range(8)),
)


def test_rows_are_text_and_come_back():
    row = (Task(0, "fwd", 1), Task(12, "bwd_input", 0), Task(3, "bwd_weight", 2), Task(0, "bwd", 1))
    assert format_row(row) == "1F0 0I12 2W3 1B0" and parse_row(format_row(row)) == row
    assert parse_row("") == ()
    with pytest.raises(PlanError, match="'1X0' is no task of a plan"):
        parse_row("1F0 1X0")


def test_a_planned_schedule_is_for_its_microbatches_and_actors():
    rows = tuple(map(tuple, Std1F1B(2).tasks(3, 2)))
    schedule = PlannedSchedule(rows, (4,), "Std1F1B(2)")
    assert schedule.num_stages == 2 and schedule.stage_actors == (0, 1)
    assert [tuple(row) for row in schedule.tasks(3, 2)] == list(rows)
    with pytest.raises(
        ScheduleError, match="for 3 microbatches on 2 actors, and the step has 4 microbatches on 1"
    ):
        schedule.tasks(4, 1)


# ---------------------------------------------------------------- text and files


def test_a_plan_prints_candidates_the_order_and_what_was_assumed():
    assert str(PLAN).splitlines() == [
        "plan of step 'train_step': Std1F1B(2), 3 microbatches on 2 actors",
        "stages end at the marks 1 of 2",
        "predicted: 20 ms a step (p10 19 ms, p90 22 ms)",
        "memory: 50 kB of 60 kB on the fullest device",
        "bound: no order with these stages and task times runs the loop in less than 15 ms;",
        "       this one takes 18 ms, 20.0% more",
        "       with each stage on its actor none takes less than 17.5 ms; this one takes 2.9% more",
        "search: a search has nothing to win",
        "",
        "schedule    mbs  a step  memory  bubble  why",
        "Std1F1B(2)    3   20 ms   50 kB   25.0%  chosen",
        "GPipe(2)      3  ~20 ms  ~90 kB   25.0%  does not fit: 50% over the cap",
        "mbs: microbatches; ~: estimated, not compiled",
        "",
        "the order: stage, kind (F forward, B backward, I and W its halves), microbatch",
        "actor 0   0F0 0F1   . 0B0 0F2 0B1   . 0B2",
        "actor 1     . 1F0 1B0 1F1 1B1 1F2 1B2   .",
        "",
        "what would help next:",
        "  transfers that take no time: 3.0% less",
        "",
        "estimated or assumed, not measured:",
        *(f"  assumption {k}" for k in range(6)),
        "  and 2 more; `.assumed` has all",
    ]
    assert repr(PLAN).startswith("<Plan of 'train_step': Std1F1B(2), cut [1], 20 ms on 2 actors; ")


def test_a_plan_prints_the_same_text_in_a_notebook(monkeypatch):
    outside = str(PLAN)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)  # rich would display tables by itself there
    assert str(PLAN) == outside


def test_gaps_are_shares_of_the_bounds():
    assert PLAN.gap == pytest.approx(0.2) and PLAN.order_gap == pytest.approx(0.018 / 0.0175 - 1)
    alike = msgspec.structs.replace(PLAN, placement_bound=PLAN.bound)
    assert "with each stage on its actor" not in str(alike)


def test_lines_of_a_plan_of_many_tasks_end_near_the_width():
    rows = tuple(map(tuple, Std1F1B(2).tasks(64, 2)))
    plan = msgspec.structs.replace(
        PLAN, orders=tuple(map(format_row, rows)), num_microbatches=64, candidates=(CHOSEN,) * 20
    )
    text = str(plan)
    assert max(map(len, text.splitlines())) <= 110 and "and 8 more; `.candidates` has all" in text
    assert text.count(" ...") == 2


def test_a_plan_is_saved_and_loaded(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert Plan.load(path) == PLAN and Plan.load(path).schedule == PLAN.schedule
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_the_order_is_a_file_of_torch(tmp_path):
    PLAN.to_csv(tmp_path / "plan.csv")
    again = jpp.schedule_from_csv(tmp_path / "plan.csv", stages=PLAN.cut)
    assert again.rows == ROWS and again.stages == PLAN.cut


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"version": 2', '"version": 7', "has version 7, .* plan' of version 2; plan again"),
        ('"jaxpp_async plan"', '"other"', "is no file of kind 'jaxpp_async plan', but"),
        ("0F0 ", "0Q0 ", "'0Q0' is no task of a plan"),
        ('"step":', '"stop', "is no file of kind 'jaxpp_async plan', or it is damaged"),
    ],
)
def test_files_that_are_no_plans_of_this_version(tmp_path, old, new, message):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(PlanError, match=message):
        Plan.load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kept_bytes": (1.0,)}, "it does not have the kept bytes of 2 stages"),
        ({"kept_bytes": (-1.0, 2.0), "weight_kept_bytes": (0.0, 0.0)}, "kept_bytes, stage 0 is -1.0"),
        ({"task_s": {"fwd": (-1.0, 2.0)}}, "task_s of fwd, stage 0 is -1.0"),
    ],
)
def test_numbers_that_cannot_be_are_refused(tmp_path, changes, message):
    msgspec.structs.replace(PLAN, **changes).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=f"plan.json' is damaged: {message}; plan again"):
        Plan.load(tmp_path / "plan.json")


# ---------------------------------------------------------------- checks


def test_a_plan_for_another_step_or_mesh_says_so():
    with pytest.raises(PlanError, match="made for the step 'train_step', and the step is 'other'"):
        PLAN.check_mesh("other", 2, {})
    with pytest.raises(PlanError, match="made for 2 actors, and the mesh has 3"):
        PLAN.check_mesh("train_step", 3, {})
    with pytest.raises(PlanError, match=r"made for spmd_mesh=\{\}, and the mesh has \{'data': 2\}"):
        PLAN.check_mesh("train_step", 2, {"data": 2})
    PLAN.check_mesh("train_step", 2, {})


def test_a_plan_for_other_arguments_says_so():
    PLAN.check_arguments(ARGUMENTS)
    params, _ = ARGUMENTS
    other = params, {"x": jax.ShapeDtypeStruct((4, 8, 16), "float32")}
    with pytest.raises(PlanError, match=r"argument 1\['x'\] is float32\[4, 8, 16\], and was float32\[3, 8"):
        PLAN.check_arguments(other)
    assert describe_arguments([3])["argument 0"] == "3"
