"""Define the labels of tasks: the one place that writes and reads them, and a table of their types.

The compiler labels each task of a program, such as `"fwd(stage 0, mb 3)"`. Timelines, cost models, drawings
and errors know a task by its label alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias, cast, get_args

LabelType: TypeAlias = Literal[
    "fwd", "bwd_input", "bwd_weight", "bwd", "fwd_bwd_input", "fwd_bwd", "finish", "start", "outer"
]
"""The types of tasks in a program: those of schedules; a forward and its backward in one; operations on
gradients that wait for an earlier stage's scalar (`finish`); the zeros that sums begin with (`start`); and
the computations outside loops (`outer`).
"""

TaskPart: TypeAlias = Literal["fwd", "bwd_input", "bwd_weight"]
"""The parts of the work of a stage: its forward, the gradient of its input, and that of its weights."""

TaskKind: TypeAlias = Literal["forward", "backward", "input gradient", "weight gradient", "update"]
"""The kinds of tasks that drawings tell apart, each of which is a `view.CellKind`."""


class TaskTraits(NamedTuple):
    """The properties of a type of task.

    Args:
        kind: the kind that drawings show.
        parts: the parts of the work of its stage that the task does.
    """

    kind: TaskKind
    parts: tuple[TaskPart, ...] = ()


TASK_TRAITS: Mapping[LabelType, TaskTraits] = MappingProxyType(
    {
        "fwd": TaskTraits("forward", ("fwd",)),
        "bwd_input": TaskTraits("input gradient", ("bwd_input",)),
        "bwd_weight": TaskTraits("weight gradient", ("bwd_weight",)),
        "bwd": TaskTraits("backward", ("bwd_input", "bwd_weight")),
        "fwd_bwd_input": TaskTraits("input gradient", ("fwd", "bwd_input")),
        "fwd_bwd": TaskTraits("backward", ("fwd", "bwd_input", "bwd_weight")),
        "finish": TaskTraits("weight gradient"),
        "start": TaskTraits("update"),
        "outer": TaskTraits("update"),
    }
)
"""The types of tasks. Of those that do a part of the work, the one that tells most of it comes first."""

_LABEL = re.compile(r"(\w+)(?:\((.*)\))?")
_STAGE, _MICROBATCH = re.compile(r"\bstage (\d+)"), re.compile(r"\bmb (\d+)")


@dataclass(frozen=True, slots=True)
class TaskLabel:
    """The label of a task.

    Args:
        text: the whole label.
        type: the type of the task.
        stage: the index of its stage; None for a task outside loops.
        microbatch: the index of its microbatch; None for a task of the whole step or of all microbatches.
    """

    text: str
    type: LabelType
    stage: int | None = None
    microbatch: int | None = None

    @classmethod
    def parse(cls, label: str) -> TaskLabel:
        """Return what a label says.

        Args:
            label: a label, such as `"fwd(stage 0, mb 3)"`, `"fwd(stage 0)"`, `"fwd"`, `"start(bwd, stage 0)"`
                or `"outer(1, actor 0)"`. Any other text without a stage and a microbatch is of type
                `"outer"`.

        Raises:
            ValueError: the label is of a task in a loop, of a type that is not known.
        """
        found = _LABEL.fullmatch(label)
        name, inside = (found[1], found[2] or "") if found is not None else ("", "")
        stage, microbatch = _STAGE.search(inside), _MICROBATCH.search(inside)
        if name not in TASK_TRAITS:
            if stage is not None or microbatch is not None:
                raise ValueError(
                    f"the label {label!r} is of a task of the unknown type {name!r}; there are "
                    f"{', '.join(get_args(LabelType))}"
                )
            name = "outer"
        return cls(
            label,
            cast(LabelType, name),
            int(stage[1]) if stage is not None else None,
            int(microbatch[1]) if microbatch is not None else None,
        )

    @property
    def traits(self) -> TaskTraits:
        """The properties of the task's type."""
        return TASK_TRAITS[self.type]

    @property
    def number(self) -> str:
        """The index of the microbatch as text; empty for a task without one."""
        return "" if self.microbatch is None else str(self.microbatch)

    @property
    def without_microbatch(self) -> str:
        """The label of all tasks that differ in their microbatch alone, such as `"fwd(stage 0)"`."""
        if self.microbatch is None:
            return self.text
        return write_label(self.type, self.stage)


def write_label(type_: str, stage: int | None, microbatch: int | None = None) -> str:
    """Return the label of a task in a loop.

    Args:
        type_: the type of the task, a `LabelType`.
        stage: the index of its stage; None if the label is to have none.
        microbatch: the index of its microbatch; None if the label is to have none.
    """
    if stage is None:
        return type_ if microbatch is None else f"{type_}(mb {microbatch})"
    return f"{type_}(stage {stage})" if microbatch is None else f"{type_}(stage {stage}, mb {microbatch})"


def task_kind(label: str) -> str:
    """Return a task's label without its microbatch, such as `"fwd(stage 0)"` for `"fwd(stage 0, mb 3)"`.

    Raises:
        ValueError: as `TaskLabel.parse` does.
    """
    return TaskLabel.parse(label).without_microbatch
