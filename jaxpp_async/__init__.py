"""Train pipelined JAX models over async actors: MPMD pipeline parallelism for JAX, with asyncio and UCX.

A user marks the stages of a step function (`pipeline_yield`, `accumulate_grads`), starts a `RemoteMesh` of
actors, and runs steps on it. Names load on first use, so that importing the package does not import JAX: an
actor has to set its environment first. The packages in reading order:

mesh, session   define the objects that a user works with: a mesh, steps, arrays on actors
markers         defines functions that mark stages, loops and shardings in a step function
compiler        turns a step function into one program per actor
schedules       chooses the order in which each actor runs its tasks, and checks and times such orders
program         defines the frozen types of programs, which all other packages share
controller      runs in the user's process: sends requests to actors, watches them, replaces lost ones
actors          defines the actor process, which runs programs
launch          starts actors on this host, over ssh, and under Slurm or Ray
protocol        defines messages and connections between controller and actors
transport       moves arrays between actors: UCX, NCCL, shared memory
layout          works out which process has which part of an array
checkpoint      saves trees of arrays to files and restores them
storage         reads and writes the files and folders of checkpoints
planning        predicts a step's time and memory, and chooses cut, schedule and order
timeline        shows what actors did in a step, and where the time went
doctor          checks whether a run would work on the given hosts
commands        defines the commands of the command line
jax_bridge      contains all code that uses private or unstable APIs of JAX
base            offers small tools that all other packages use
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "pipeline_yield": "markers.markers",
    "accumulate_grads": "markers.markers",
    "Sum": "markers.reductions",
    "Max": "markers.reductions",
    "Min": "markers.reductions",
    "Mean": "markers.reductions",
    "Stack": "markers.reductions",
    "Concat": "markers.reductions",
    "shard": "markers.logical_axes",
    "Task": "program.instructions",
    "Auto": "schedules",
    "GPipe": "schedules",
    "Std1F1B": "schedules",
    "Eager1F1B": "schedules",
    "Interleaved1F1B": "schedules",
    "LoopedBFS": "schedules",
    "ZeroBubbleH1": "schedules",
    "ZeroBubbleH2": "schedules",
    "ZeroBubbleV": "schedules",
    "DualPipeV": "schedules",
    "ControllableMemory": "schedules",
    "VHalf": "schedules",
    "VMin": "schedules",
    "schedule_from_csv": "schedules",
    "schedule_to_csv": "schedules",
    "RemoteMesh": "mesh",
    "Checkpoints": "checkpoint.retention",
    "CompiledStep": "session.step",
    "CostModel": "planning.cost_model",
    "simulate": "planning.simulation",
    "RemoteArray": "session.remote_array",
    "Event": "base.events",
    "ActorInfo": "protocol.actor_info",
    "StepFuture": "session.step_future",
    "Timeline": "timeline",
    "Saving": "checkpoint.save",
    "Launcher": "launch",
    "Machine": "planning.machine",
    "compile_for": "planning.machine",
    "Plan": "planning.plan",
    "plan": "planning.planner",
}

__all__ = (
    "ActorInfo",
    "Auto",
    "Checkpoints",
    "CompiledStep",
    "Concat",
    "ControllableMemory",
    "CostModel",
    "DualPipeV",
    "Eager1F1B",
    "Event",
    "GPipe",
    "Interleaved1F1B",
    "Launcher",
    "LoopedBFS",
    "Machine",
    "Max",
    "Mean",
    "Min",
    "Plan",
    "RemoteArray",
    "RemoteMesh",
    "Saving",
    "Stack",
    "Std1F1B",
    "StepFuture",
    "Sum",
    "Task",
    "Timeline",
    "VHalf",
    "VMin",
    "ZeroBubbleH1",
    "ZeroBubbleH2",
    "ZeroBubbleV",
    "accumulate_grads",
    "compile_for",
    "errors",
    "pipeline_yield",
    "plan",
    "schedule_from_csv",
    "schedule_to_csv",
    "shard",
    "simulate",
)
__version__ = "0.1.0"

if TYPE_CHECKING:
    from jaxpp_async import errors as errors
    from jaxpp_async.base.events import Event as Event
    from jaxpp_async.checkpoint.retention import Checkpoints as Checkpoints
    from jaxpp_async.checkpoint.save import Saving as Saving
    from jaxpp_async.launch import Launcher as Launcher
    from jaxpp_async.markers.logical_axes import shard as shard
    from jaxpp_async.markers.markers import accumulate_grads as accumulate_grads
    from jaxpp_async.markers.markers import pipeline_yield as pipeline_yield
    from jaxpp_async.markers.reductions import Concat as Concat
    from jaxpp_async.markers.reductions import Max as Max
    from jaxpp_async.markers.reductions import Mean as Mean
    from jaxpp_async.markers.reductions import Min as Min
    from jaxpp_async.markers.reductions import Stack as Stack
    from jaxpp_async.markers.reductions import Sum as Sum
    from jaxpp_async.mesh import RemoteMesh as RemoteMesh
    from jaxpp_async.planning.cost_model import CostModel as CostModel
    from jaxpp_async.planning.machine import Machine as Machine
    from jaxpp_async.planning.machine import compile_for as compile_for
    from jaxpp_async.planning.plan import Plan as Plan
    from jaxpp_async.planning.planner import plan as plan
    from jaxpp_async.planning.simulation import simulate as simulate
    from jaxpp_async.program.instructions import Task as Task
    from jaxpp_async.protocol.actor_info import ActorInfo as ActorInfo
    from jaxpp_async.schedules import Auto as Auto
    from jaxpp_async.schedules import ControllableMemory as ControllableMemory
    from jaxpp_async.schedules import DualPipeV as DualPipeV
    from jaxpp_async.schedules import Eager1F1B as Eager1F1B
    from jaxpp_async.schedules import GPipe as GPipe
    from jaxpp_async.schedules import Interleaved1F1B as Interleaved1F1B
    from jaxpp_async.schedules import LoopedBFS as LoopedBFS
    from jaxpp_async.schedules import Std1F1B as Std1F1B
    from jaxpp_async.schedules import VHalf as VHalf
    from jaxpp_async.schedules import VMin as VMin
    from jaxpp_async.schedules import ZeroBubbleH1 as ZeroBubbleH1
    from jaxpp_async.schedules import ZeroBubbleH2 as ZeroBubbleH2
    from jaxpp_async.schedules import ZeroBubbleV as ZeroBubbleV
    from jaxpp_async.schedules import schedule_from_csv as schedule_from_csv
    from jaxpp_async.schedules import schedule_to_csv as schedule_to_csv
    from jaxpp_async.session.remote_array import RemoteArray as RemoteArray
    from jaxpp_async.session.step import CompiledStep as CompiledStep
    from jaxpp_async.session.step_future import StepFuture as StepFuture
    from jaxpp_async.timeline import Timeline as Timeline


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("jaxpp_async.errors")
    if name in _HOMES:
        return getattr(import_module(f"jaxpp_async.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'jaxpp_async' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
