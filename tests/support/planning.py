"""Compile steps without actors: what the compiler's tests build on."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax

from jaxpp_async.compiler.ir import Loop
from jaxpp_async.compiler.partition import StagedLoop, TaskKey, partition
from jaxpp_async.compiler.pipeline import CompilePlan, plan
from jaxpp_async.program.instructions import Send
from jaxpp_async.session import mesh_options
from jaxpp_async.session.step import DistributedStep
from jaxpp_async.session.step_request import StepOptions


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def plan_step(
    fn: Any,
    *args: Any,
    actors: int = 2,
    spmd_mesh: dict[str, int] | None = None,
    axis_rules: dict[str, Any] | None = None,
    axis_types: dict[str, str] | None = None,
    in_shardings: Any = None,
    donate: tuple[int, ...] = (),
    schedule: Any = None,
    static: tuple[int, ...] = (),
    platform: str = "cpu",
    **request: Any,
) -> CompilePlan:
    """All passes but emission, for a mesh that nobody started."""
    axes, rules = spmd_mesh or {}, axis_rules or {}
    target = mesh_options.make_target(
        axes, mesh_options.check_axis_types(axis_types or {}, axes), rules, platform
    )
    runner = SimpleNamespace(num_actors=actors, target=target)
    step = DistributedStep(runner, fn, StepOptions(in_shardings, None, donate, static, schedule))  # pyright: ignore
    return plan(replace(step.request(args), **request))


def staged(fn: Any, *args: Any) -> StagedLoop:
    """The one loop of a step, cut."""
    from jaxpp_async.compiler.trace import trace

    traced = trace(fn, args)
    (loop,) = [op for op in traced.flat.ops if isinstance(op, Loop)]
    return partition(loop, traced.types)


def cross_task_values(staged: StagedLoop) -> dict[TaskKey, tuple[list[int], list[int]]]:
    """Return for each task the values it takes from other tasks and those it makes for them, by first use."""
    made_by: dict[int, TaskKey] = {}
    for key, task in staged.tasks.items():
        for v in task.made:
            made_by.setdefault(v, key)
    takes = {key: staged.takes(task) for key, task in staged.tasks.items()}
    makes: dict[TaskKey, dict[int, None]] = {key: {} for key in staged.tasks}
    for wanted in takes.values():
        for r in wanted:
            makes[made_by[r]][r] = None
    return {key: (takes[key], list(makes[key])) for key in staged.tasks}


def heavy(cut: StagedLoop) -> dict[str, list[str]]:
    """Names of the operations of each task that cost something, such as `{"fwd0": ["dot_general"]}`."""
    costly = (
        "remat2",
        "dot_general",
        "tanh",
        "sin",
        "exp",
        "reduce_sum",
        "reduce_max",
        "gather",
        "scatter-add",
        "sort",
    )
    return {
        f"{ty}{stage}": [op.name for op in t.ops if op.name in costly] for (ty, stage), t in cut.tasks.items()
    }


def taken(cut: StagedLoop, types: Any = None) -> dict[str, set[str]]:
    """For each task, the tasks that it takes values from."""
    maker = {v: key for key, (_, makes) in cross_task_values(cut).items() for v in makes}
    found: dict[str, set[str]] = defaultdict(set)
    for (ty, stage), (takes, _) in cross_task_values(cut).items():
        found[f"{ty}{stage}"] |= {"{}{}".format(*maker[v]) for v in takes}
    return dict(found)


def sent(done: CompilePlan) -> list[tuple[int, int, tuple[int, ...]]]:
    """(from, to, shape) of every transfer, in each sender's order."""
    return [
        (p.actor, i.to_actor, p.avals[i.buffer].shape)
        for p in done.programs
        for i in p.instructions
        if isinstance(i, Send)
    ]
