"""Labels of tasks are written and read in one place, and every type has its row."""

from __future__ import annotations

from typing import get_args

import pytest

from jaxpp_async.program.instructions import TASK_TYPES, Task
from jaxpp_async.program.task_label import (
    TASK_TRAITS,
    LabelType,
    TaskKind,
    TaskLabel,
    TaskPart,
    task_kind,
    write_label,
)
from jaxpp_async.view.drawing import CELL_KINDS


def test_every_type_has_a_row_whose_kind_can_be_drawn():
    assert set(TASK_TRAITS) == set(get_args(LabelType))
    assert set(TASK_TYPES) < set(TASK_TRAITS)
    assert {traits.kind for traits in TASK_TRAITS.values()} == set(get_args(TaskKind)) < set(CELL_KINDS)
    assert {part for traits in TASK_TRAITS.values() for part in traits.parts} == set(get_args(TaskPart))


@pytest.mark.parametrize("type_", get_args(LabelType))
@pytest.mark.parametrize("numbers", [(3, 12), (3, None), (None, None), (None, 7)])
def test_what_is_written_is_read_again(type_, numbers):
    text = write_label(type_, *numbers)
    label = TaskLabel.parse(text)
    assert (label.text, label.type, label.stage, label.microbatch) == (text, type_, *numbers)
    assert label.without_microbatch == write_label(type_, numbers[0])


@pytest.mark.parametrize(
    ("text", "type_", "stage", "microbatch", "kind"),
    [
        (str(Task(3, "bwd_weight", 1)), "bwd_weight", 1, 3, "weight gradient"),
        ("finish(stage 1, mb 3)", "finish", 1, 3, "weight gradient"),
        ("fwd_bwd_input(stage 1, mb 0)", "fwd_bwd_input", 1, 0, "input gradient"),
        ("start(bwd, stage 0)", "start", 0, None, "update"),
        ("outer(2, actor 0)", "outer", None, None, "update"),
        ("anything", "outer", None, None, "update"),
        ("x@fwd", "outer", None, None, "update"),
    ],
)
def test_labels_of_every_form(text, type_, stage, microbatch, kind):
    label = TaskLabel.parse(text)
    assert (label.type, label.stage, label.microbatch) == (type_, stage, microbatch)
    assert label.traits.kind == kind
    assert label.number == ("" if microbatch is None else str(microbatch))


@pytest.mark.parametrize("text", ["bwd_bias(stage 0, mb 3)", "acc(mb 0)", "evaluate(stage 1)"])
def test_a_task_in_a_loop_of_an_unknown_type_is_an_error(text):
    with pytest.raises(ValueError, match=r"of the unknown type '\w+'; there are fwd, bwd_input, "):
        TaskLabel.parse(text)


@pytest.mark.parametrize(
    ("label", "kind"),
    [
        ("fwd(stage 1, mb 12)", "fwd(stage 1)"),
        ("bwd_input(stage 0, mb 3)", "bwd_input(stage 0)"),
        ("start(bwd, stage 1)", "start(bwd, stage 1)"),
        ("outer(0, actor 1)", "outer(0, actor 1)"),
        ("anything", "anything"),
    ],
)
def test_a_task_is_known_without_its_microbatch(label, kind):
    assert task_kind(label) == kind
