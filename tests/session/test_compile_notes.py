"""Direct tests of what is said about a step that was compiled without an error."""

from __future__ import annotations

import logging
import warnings
from types import SimpleNamespace

import pytest

from jaxpp_async.compiler.ir import KeptWhole
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import Aval, GraphInput, Run
from jaxpp_async.program.leaf_parts import Parts
from jaxpp_async.schedules.cut import Cut, Mark
from jaxpp_async.session import report
from jaxpp_async.session.report import report_notes

F4 = Aval((4,), "float32")
WORKS = ActorProgram(0, (Run("fwd(stage 0, mb 0)", 0, (), (0,)),), (F4,))


def compiled(
    *programs: ActorProgram, microbatches: int = 2, leaves=("batch['x']",), cut: Cut | None = None
) -> SimpleNamespace:
    """What is looked at of a compiled step of one loop; of none with `microbatches=0`."""
    loop = SimpleNamespace(num_microbatches=microbatches, leaves=leaves, line="train.py:7", cut=cut)
    loops = {0: SimpleNamespace(staged=SimpleNamespace(loop=loop))} if microbatches else {}
    traced = SimpleNamespace(kept_whole=())
    return SimpleNamespace(
        placed=SimpleNamespace(loops=loops), programs=programs, traced=traced, continues={}
    )


def notes(step: SimpleNamespace, monkeypatch, changed=()) -> None:
    monkeypatch.setattr(report, "changed_arguments", lambda *_: list(changed))
    report_notes("train", "train.py:41", SimpleNamespace(num_actors=len(step.programs), donated=()), step)


@pytest.mark.parametrize(
    ("count", "leaves", "text"),
    [
        (1, ("batch",), "step 'train': 1 microbatch of batch (train.py:7)"),
        (
            4,
            ("batch['x']", "batch['y']"),
            "step 'train': 4 microbatches of batch['x'], batch['y'] (train.py:7)",
        ),
        (2, tuple("abcdefgh"), "step 'train': 2 microbatches of a, b, c, d, e, f, g, h (train.py:7)"),
        (2, tuple("abcdefghij"), "step 'train': 2 microbatches of a, b, c, d, e, f, g, 3 more (train.py:7)"),
    ],
)
def test_the_microbatches_of_each_loop_are_logged(monkeypatch, caplog, count, leaves, text):
    caplog.set_level(logging.INFO, "jaxpp_async")
    notes(compiled(WORKS, microbatches=count, leaves=leaves), monkeypatch)
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(logging.INFO, text)]


def test_the_marks_of_a_cut_are_logged(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "jaxpp_async")
    cut = Cut((Mark("model.py:3"),) * 4, (2,), (0.75, 0.25))
    notes(compiled(WORKS, cut=cut), monkeypatch)
    assert [record.getMessage() for record in caplog.records][1:] == [
        "step 'train': stages end behind mark 2 of 4 (counted from 0), balanced: the stages have 75.0%, "
        "25.0% of the work (train.py:7)"
    ]


def test_actors_without_a_task_are_named(monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "jaxpp_async")
    notes(compiled(WORKS, ActorProgram(1, (), ()), ActorProgram(2, (), ())), monkeypatch)
    (record,) = caplog.records
    assert record.getMessage().startswith("step 'train' leaves actors [1, 2] of 3 idle: its schedule ")


def test_of_a_step_without_a_loop_idle_actors_are_no_news(monkeypatch, caplog):
    notes(compiled(WORKS, ActorProgram(1, (), ()), microbatches=0), monkeypatch)
    assert caplog.records == []


def test_a_donated_argument_that_no_result_replaces_is_a_warning_at_the_users_line(monkeypatch):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        notes(compiled(WORKS), monkeypatch, ["state['w'] float32[2] as result[0] float32[3]"])
    (found,) = caught
    assert (found.filename, found.lineno, found.category) == ("train.py", 41, UserWarning)
    assert str(found.message) == (
        "Some donated buffers were not usable: step 'train' returns state['w'] float32[2] as result[0] "
        "float32[3]; a result can take an argument's memory only with its shape and dtype: return it as it "
        "came, or do not donate it"
    )


def test_a_stacked_array_that_stays_whole_is_named_with_its_bytes_and_the_reason(monkeypatch, caplog):
    step = compiled(WORKS, microbatches=0)
    parts = (Parts(0, (0, 1, 2)), None, None)
    names = ("p['a'][0:1]", "p['a'][1:2]", "p['b']", "p['c']")
    why = ("cumsum at train.py:9 is not computed in parts", "write it for each layer")
    kept = (KeptWhole(1, F4, *why), KeptWhole(2, F4, *why), KeptWhole(None, F4, *why))
    step.traced = SimpleNamespace(kept_whole=kept, argument_parts=parts, arg_names=names)
    inputs = (GraphInput(0, 2, (0, 1)), GraphInput(0, 3, (1,)))
    step.placed.graph = SimpleNamespace(inputs=inputs, num_actors=2)
    notes(step, monkeypatch)
    leaf, computed = (record.getMessage() for record in caplog.records)  # on one actor a leaf is in its place
    reason = f"16 B, since {why[0]}; {why[1]}; see "
    assert f"p['b'] stacks layers of several stages and lives whole on actors 0, 1, {reason}" in leaf
    assert "float32[4], which the step computes, stacks layers of several stages and is gathered" in computed
    assert reason in computed and "placement.md" in computed
