"""Decide which task runs where and in which order: one list of `Task`s an actor.

A schedule sees counts of stages, microbatches and actors; it knows neither what a task computes nor how long
that takes.

    Schedule                what a schedule is, and how to write one (`base`)
    GPipe, Std1F1B, ...     the built-in schedules (`linear`, `v_shaped`)
    schedule_from_csv, ...  a schedule from and to a file (`torch_csv`)
    resolve, format_grid    a schedule, built-in or the user's own, checked, and drawn as text (`validate`)
    global_order, simulate  what follows from the lists: one order of all tasks, times, bubbles (`simulate`)
"""

from jaxpp_async.program.instructions import Task
from jaxpp_async.schedules.base import Schedule
from jaxpp_async.schedules.linear import (
    Eager1F1B,
    GPipe,
    Interleaved1F1B,
    LoopedBFS,
    Std1F1B,
    ZeroBubbleH1,
    ZeroBubbleH2,
)
from jaxpp_async.schedules.simulate import (
    UNIT,
    ScheduleTiming,
    bubble_fraction,
    dependencies,
    global_order,
    idle_times,
    peak_activations,
    simulate,
    split_backwards,
    stage_actors,
)
from jaxpp_async.schedules.torch_csv import CsvSchedule, schedule_from_csv, schedule_to_csv
from jaxpp_async.schedules.v_shaped import DualPipeV, ZeroBubbleV
from jaxpp_async.schedules.validate import format_grid, format_task, resolve

__all__ = [
    "UNIT",
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
    "ZeroBubbleH1",
    "ZeroBubbleH2",
    "ZeroBubbleV",
    "bubble_fraction",
    "dependencies",
    "format_grid",
    "format_task",
    "global_order",
    "idle_times",
    "peak_activations",
    "resolve",
    "schedule_from_csv",
    "schedule_to_csv",
    "simulate",
    "split_backwards",
    "stage_actors",
]
