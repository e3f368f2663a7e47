"""Decide which actor runs which task and in which order; a schedule is one list of `Task`s per actor.

A schedule is computed from the numbers of stages, microbatches and actors, and does not depend on the
computation of a task or on its duration.

    Schedule                the protocol of schedules, with an example of a user-defined schedule (`base`)
    GPipe, Std1F1B, ...     the built-in schedules (`builtin`)
    VHalf, VMin, ...        built-in schedules with a cap on activations (`controllable_memory`)
    Auto                    a schedule that a mesh plans after some measured steps (`auto`)
    PlannedSchedule         an order of tasks that was planned for one step (`planned`)
    schedule_from_csv, ...  reading and writing a schedule as a file (`torch_csv`)
    resolve, format_grid    checking any schedule, and drawing it as text (`validate`)
    draw_schedule           a picture of any schedule (`drawing`)
    global_order, ...       one order of all tasks, their times, bubbles and memory (`timing`)
"""

import warnings
from typing import Any

from jaxpp_async.program.instructions import Task
from jaxpp_async.schedules.auto import Auto
from jaxpp_async.schedules.base import Schedule
from jaxpp_async.schedules.builtin import (
    DualPipeV,
    Eager1F1B,
    GPipe,
    Interleaved1F1B,
    LoopedBFS,
    Std1F1B,
    ZeroBubbleH1,
    ZeroBubbleH2,
    ZeroBubbleV,
)
from jaxpp_async.schedules.controllable_memory import ControllableMemory, VHalf, VMin
from jaxpp_async.schedules.drawing import draw_schedule
from jaxpp_async.schedules.timing import (
    UNIT,
    ScheduleTiming,
    bubble_fraction,
    dependencies,
    global_order,
    idle_times,
    peak_activations,
    split_backwards,
    stage_actors,
    time_schedule,
)
from jaxpp_async.schedules.torch_csv import CsvSchedule, schedule_from_csv, schedule_to_csv
from jaxpp_async.schedules.validate import format_grid, format_task, resolve

NAMED = (
    GPipe,
    Std1F1B,
    Eager1F1B,
    ZeroBubbleH1,
    ZeroBubbleH2,
    Interleaved1F1B,
    LoopedBFS,
    ZeroBubbleV,
    DualPipeV,
    VHalf,
    VMin,
)
"""The built-in schedules that have no options but `num_stages` and `stages`. Plans try each of them."""

__all__ = [
    "NAMED",
    "UNIT",
    "Auto",
    "ControllableMemory",
    "CsvSchedule",
    "DualPipeV",
    "Eager1F1B",
    "GPipe",
    "Interleaved1F1B",
    "LoopedBFS",
    "Schedule",
    "ScheduleTiming",
    "Std1F1B",
    "Task",
    "VHalf",
    "VMin",
    "ZeroBubbleH1",
    "ZeroBubbleH2",
    "ZeroBubbleV",
    "bubble_fraction",
    "dependencies",
    "draw_schedule",
    "format_grid",
    "format_task",
    "global_order",
    "idle_times",
    "peak_activations",
    "resolve",
    "schedule_from_csv",
    "schedule_to_csv",
    "split_backwards",
    "stage_actors",
    "time_schedule",
]

_OLD_NAMES = {"Timeline": "ScheduleTiming", "simulate": "time_schedule"}
"""Names of earlier releases. Each works for one release, with a warning."""


def __getattr__(name: str) -> Any:
    if name not in _OLD_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = _OLD_NAMES[name]
    warnings.warn(f"{__name__}.{name} is now called {new}", DeprecationWarning, stacklevel=2)
    return globals()[new]
