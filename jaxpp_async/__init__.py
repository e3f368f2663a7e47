"""jaxpp_async: MPMD pipeline parallelism for JAX, run by async actors.

Names load on first use, so that importing the package does not import JAX (an actor sets its environment first).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "pipeline_yield": "markers",
    "accumulate_grads": "markers",
    "Sum": "reductions",
    "Max": "reductions",
    "Min": "reductions",
    "Mean": "reductions",
    "Stack": "reductions",
    "Concat": "reductions",
    "shard": "sharding",
    "Task": "program",
    "GPipe": "schedules",
    "Std1F1B": "schedules",
    "Eager1F1B": "schedules",
    "Interleaved1F1B": "schedules",
    "LoopedBFS": "schedules",
    "ZeroBubbleH1": "schedules",
    "ZeroBubbleH2": "schedules",
    "ZeroBubbleV": "schedules",
    "DualPipeV": "schedules",
    "schedule_from_csv": "schedules",
    "schedule_to_csv": "schedules",
    "RemoteMesh": "mesh",
    "Checkpoints": "checkpoint.series",
    "CompiledStep": "step",
    "RemoteArray": "arrays",
    "Event": "events",
    "ActorInfo": "actors.processes.actor_info",
    "StepFuture": "step_future",
    "Timeline": "timeline",
    "Saving": "checkpoint.saving",
    "Launcher": "actors.launch",
}

__all__ = (
    "ActorInfo",
    "Checkpoints",
    "CompiledStep",
    "Concat",
    "DualPipeV",
    "Eager1F1B",
    "Event",
    "GPipe",
    "Interleaved1F1B",
    "Launcher",
    "LoopedBFS",
    "Max",
    "Mean",
    "Min",
    "RemoteArray",
    "RemoteMesh",
    "Saving",
    "Stack",
    "Std1F1B",
    "StepFuture",
    "Sum",
    "Task",
    "Timeline",
    "ZeroBubbleH1",
    "ZeroBubbleH2",
    "ZeroBubbleV",
    "accumulate_grads",
    "errors",
    "pipeline_yield",
    "schedule_from_csv",
    "schedule_to_csv",
    "shard",
)
__version__ = "0.1.0"

if TYPE_CHECKING:
    from jaxpp_async import errors as errors
    from jaxpp_async.actors.launch import Launcher as Launcher
    from jaxpp_async.actors.processes.actor_info import ActorInfo as ActorInfo
    from jaxpp_async.arrays import RemoteArray as RemoteArray
    from jaxpp_async.checkpoint.saving import Saving as Saving
    from jaxpp_async.checkpoint.series import Checkpoints as Checkpoints
    from jaxpp_async.events import Event as Event
    from jaxpp_async.markers import accumulate_grads as accumulate_grads
    from jaxpp_async.markers import pipeline_yield as pipeline_yield
    from jaxpp_async.mesh import RemoteMesh as RemoteMesh
    from jaxpp_async.program import Task as Task
    from jaxpp_async.reductions import Concat as Concat
    from jaxpp_async.reductions import Max as Max
    from jaxpp_async.reductions import Mean as Mean
    from jaxpp_async.reductions import Min as Min
    from jaxpp_async.reductions import Stack as Stack
    from jaxpp_async.reductions import Sum as Sum
    from jaxpp_async.schedules import DualPipeV as DualPipeV
    from jaxpp_async.schedules import Eager1F1B as Eager1F1B
    from jaxpp_async.schedules import GPipe as GPipe
    from jaxpp_async.schedules import Interleaved1F1B as Interleaved1F1B
    from jaxpp_async.schedules import LoopedBFS as LoopedBFS
    from jaxpp_async.schedules import Std1F1B as Std1F1B
    from jaxpp_async.schedules import ZeroBubbleH1 as ZeroBubbleH1
    from jaxpp_async.schedules import ZeroBubbleH2 as ZeroBubbleH2
    from jaxpp_async.schedules import ZeroBubbleV as ZeroBubbleV
    from jaxpp_async.schedules import schedule_from_csv as schedule_from_csv
    from jaxpp_async.schedules import schedule_to_csv as schedule_to_csv
    from jaxpp_async.sharding import shard as shard
    from jaxpp_async.step import CompiledStep as CompiledStep
    from jaxpp_async.step_future import StepFuture as StepFuture
    from jaxpp_async.timeline import Timeline as Timeline


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("jaxpp_async.errors")
    if name in _HOMES:
        return getattr(import_module(f"jaxpp_async.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'jaxpp_async' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
