"""The pure parts of the programs of `make bench ARGS=plan`: readings, figures, tables and targets."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import parts
import plan_tables
import planned_step
import process_memory
import real_prediction
import rounds
import targets
import turns
from rich.console import Console

import jaxpp_async as jpp
from jaxpp_async.planning.memory import ActorMemory, MemoryRow
from jaxpp_async.planning.plan import Candidate

STATUS = """Name:\tpython
VmHWM:\t    9000 kB
VmRSS:\t    8000 kB
RssAnon:\t    5000 kB
RssFile:\t    2000 kB
RssShmem:\t    1000 kB
Threads:\t12
"""


def timeline(ms: float):
    return SimpleNamespace(duration_s=ms / 1e3)


def times(ms: float, quartiles: float = 1.0) -> dict[str, float]:
    return {"measured_ms": ms, "mean_ms": ms, "quartiles_percent": quartiles}


def row(target: str, figures: dict) -> targets.Row:
    (found,) = [row for row in targets.rows({"plan": figures}) if row.target.what.startswith(target)]
    return found


# ---------------------------------------------------------------- steps in turns


def test_the_length_of_steps_is_the_median_with_its_quartiles():
    found = turns.durations([timeline(ms) for ms in (90, 100, 100, 110, 200)])
    assert found == pytest.approx({"measured_ms": 100, "mean_ms": 120, "quartiles_percent": 60})


async def test_steps_take_turns_and_the_first_of_each_turn_does_not_count():
    ran: list[str] = []

    class Mesh:
        async def run(self, step, state, batch):
            ran.append(step)
            return state + 1, None

        def last_step_timeline(self):
            return ran[-1], len(ran)

    found = await turns.in_turns(Mesh(), {"a": "A", "b": "B"}, 0, None, num_rounds=2, steps_a_turn=2)  # pyright: ignore[reportArgumentType]
    assert "".join(ran) == "AABB" * 3
    assert found == {"a": [("A", 6), ("A", 10)], "b": [("B", 8), ("B", 12)]}


# ---------------------------------------------------------------- planned steps


def candidate(name: str, *cut: int) -> Candidate:
    return Candidate(
        name=name,
        num_actors=4,
        spmd_mesh={},
        num_microbatches=12,
        cut=cut,
        step_s=1.0,
        peak_bytes=1.0,
        cap_bytes=None,
        bubble=0.0,
        is_compiled=False,
        verdict="",
    )


def test_named_schedules_are_tried_on_the_equal_cut_and_on_that_of_the_plan():
    candidates = (
        candidate("searched", 1, 2, 3),
        candidate("Std1F1B(4)", 4, 9, 14),
        candidate("Std1F1B(4)", 3, 7, 11),  # the equal cut, once more
        candidate("any schedule"),
    )
    plan = SimpleNamespace(candidates=candidates)
    forms = list(planned_step.named_forms(plan, lambda schedule: len(schedule.stages)))  # pyright: ignore[reportArgumentType]
    (best,) = [form for form in forms if form.which == "best"]
    assert best.schedule == jpp.Std1F1B(4, stages=[4, 9, 14]) and best.size_bytes == 3
    equal = {form.name: form.schedule for form in forms if form.which == "equal"}
    assert len(equal) == len(forms) - 1 and equal["Std1F1B(4)"] == planned_step.FIRST
    assert equal["VHalf(8)"] == jpp.VHalf(8, stages=[1, 3, 5, 7, 9, 11, 13])


PLANNED = {"schedule": "searched", "cut": [3, 8], "bytes": 90, "predicted_ms": 81.6, "bound_ms": 70}
NAMED = [
    {"schedule": "Std1F1B(4)", "which": "equal", "cut": [1, 2], "bytes": 99, **times(100)},
    {"schedule": "VHalf(8)", "which": "equal", "cut": [1, 2], "bytes": 98, **times(110)},
    {"schedule": "VHalf(8)", "which": "best", "cut": [2, 3], "bytes": 97, **times(84)},
]


def test_a_planned_step_is_held_against_the_quickest_of_each_kind():
    figures = planned_step.figures_of(PLANNED | times(80), NAMED) | {"cap_bytes": 99}
    assert [form["measured_ms"] for form in figures["named"]] == [84, 100, 110]
    known = {"planned_step": figures}
    assert row("planned step shorter", known).value == pytest.approx(20)
    assert row("the same, against the best named one", known).value == pytest.approx(100 * 4 / 84)
    assert row("the planned step as it was predicted", known).value == pytest.approx(2)
    states = [row(what, known).state for what in ("planned step shorter", "the same, against the best")]
    assert states == ["met", "missed"]


# ---------------------------------------------------------------- real computation


@pytest.mark.parametrize(
    ("spread", "state", "note"),
    [
        (9.9, "met", ""),
        (10.0, "not measured", "not measurable: the quartiles of equal steps are 10 % apart"),
    ],
)
def test_an_error_on_a_restless_machine_is_not_measurable(spread, state, note):
    schedules = {
        "Std1F1B": {"error_percent": 7.0, **times(100, spread)},  # the costs are of its own steps
        "GPipe": {"error_percent": -4.0, **times(100)},
        "ZeroBubbleH1": {"error_percent": 1.0, **times(100)},
    }
    found = row("simulated against measured mean", {"real_prediction": real_prediction.verdict(schedules)})
    assert found.state == state and found.note.startswith(note) and bool(found.note) == bool(note)
    assert found.value == (4.0 if state == "met" else None)


# ---------------------------------------------------------------- processes' memory


def test_growth_is_the_highest_memory_above_what_was_resident_before():
    before = process_memory.reading(STATUS)
    assert before == {
        "resident": 8192000,
        "anonymous": 5120000,
        "shared": 1024000,
        "file": 2048000,
        "most": 9216000,
    }
    after = {name: size + 1000 for name, size in before.items()}
    assert process_memory.growth(before, after) == {
        **dict.fromkeys(("resident", "anonymous", "shared", "file"), 1000),
        "most": 1025000,
    }


def memory_figures() -> dict:
    rows = (MemoryRow("argument state", 600, "exact", ""), MemoryRow("buffer table", 400, "exact", ""))
    fields = ("resident", "anonymous", "shared", "file", "most")
    before, after = dict.fromkeys(fields, 100), dict.fromkeys(fields, 1150)
    needs = [ActorMemory(0, rows, 400)]
    return process_memory.figures_of(needs, [before], [before], [after])


def test_an_actors_growth_is_held_against_the_sum_of_its_planned_memory():
    figures = memory_figures()
    (actor,) = figures["actors"]
    assert (actor["planned_bytes"], actor["most_bytes"]) == (1000, 1050)
    known = {"process_memory": {"kept": figures, "returned": figures}}
    assert row("growth of an actor's process", known).value == pytest.approx(5)
    assert row("the same, where malloc", known).state == "wish met"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="/proc is of Linux")
def test_this_process_can_be_read():
    (found,) = process_memory.read([os.getpid()])
    assert found["most"] >= found["resident"] >= found["anonymous"] > 0


# ---------------------------------------------------------------- the part


def test_every_program_has_a_table():
    schedules = {"Std1F1B": {"error_percent": 1.0, "task_ms": 9.0, "simulated_ms": 101.0, **times(100)}}
    figures = {
        "replay": {},
        "planned_step": planned_step.figures_of(PLANNED | times(80), NAMED) | {"cap_bytes": 99},
        "real_prediction": {"schedules": schedules, "not_measurable": "the machine is busy"},
        "process_memory": {"kept": memory_figures()},
    }
    said = io.StringIO()
    console = Console(width=160, file=said, color_system=None)
    for table in plan_tables.tables(figures):
        console.print(table)
    text = said.getvalue()
    assert "searched" in text and "best: 2 3" in text and "4.8 % shorter" in text
    assert "not measurable, the machine is busy" in text and "+5.0 %" in text
    assert list(plan_tables.tables({})) == []


async def test_a_program_that_fails_costs_the_others_nothing(monkeypatch):
    async def once(contender):
        name = contender.command[-1]
        if name == "planned_step":
            raise rounds.ContenderError("it died")
        return {name: 1}

    monkeypatch.setattr(parts, "once", once)
    told: list[str] = []
    context = parts.Context(others=lambda part: (), tell=told.append, progress=lambda line: None)
    assert await parts.plan(context) == {"plan": 1, "real_prediction": 1, "process_memory": 1}
    assert told == ["planned_step: it died"]
