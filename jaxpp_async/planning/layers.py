"""Find the costs of each layer of a real step: the `PipelineProblem` of a step with marks at every layer.

The step is planned once by the compiler under the finest cut: every mark is a boundary, and each stage has an
actor of its own. Tasks, transfers and buffers of an actor are then those of one layer. This is exact
for the finest cut. For stages of several layers the sums are estimates: values that neighbouring layers share
count twice, and the compiler may keep other values. `planning.plan` therefore compiles the best candidates.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxpp_async.compiler.cut import marks_of
from jaxpp_async.compiler.ir import Loop
from jaxpp_async.compiler.pipeline import gc_paused
from jaxpp_async.errors import PlanError
from jaxpp_async.planning.calibration import TaskTimes
from jaxpp_async.planning.cost_model import CostModel, TaskFormula
from jaxpp_async.planning.machine import Machine, PlannedStep, StepCompiler
from jaxpp_async.planning.memory import (
    ARGUMENT,
    BUFFER_TABLE,
    RESULTS,
    MemoryRow,
    device_aval,
    memory_needs,
)
from jaxpp_async.planning.plan import PlannedSchedule
from jaxpp_async.planning.problem import Layer, PipelineProblem
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import BufferId, Input, Recv, Run, Send, Task, runs
from jaxpp_async.program.task_label import LabelType, TaskLabel, TaskPart
from jaxpp_async.schedules.cut import Mark
from jaxpp_async.schedules.validate import plural

PROFILED_MICROBATCHES = 2
"""The number of microbatches of the step that is planned to find the costs of its layers."""


@dataclass(frozen=True)
class LayerCosts:
    """The costs of the layers of a step on some machine, for one size of microbatches.

    Attributes:
        layers: the layers, from the first to the last.
        marks: the marks (calls of `pipeline_yield`) between them.
        dispatch_s: the time of a task besides its computation, in seconds.
        latency_s: the time of a transfer besides that of its bytes.
        bytes_per_s: the rate of a link; infinite if bytes take no time.
        reserve_bytes: the bytes on a device that no layer's numbers have, such as temporaries of a task.
        batch_bytes: for each layer, the bytes of its part of a microbatch's arguments on a device.
        assumed: sentences, one for each number that was estimated.
    """

    layers: tuple[Layer, ...]
    marks: tuple[Mark, ...]
    dispatch_s: float
    latency_s: float
    bytes_per_s: float
    reserve_bytes: float
    batch_bytes: tuple[float, ...]
    assumed: tuple[str, ...]

    def problem(
        self, num_actors: int, num_microbatches: int, cap_bytes: float, num_stages: int | None = None
    ) -> PipelineProblem:
        """Return the problem of running the layers on some actors.

        Args:
            num_actors: the number of actors.
            num_microbatches: the number of microbatches.
            cap_bytes: the memory of each device; the reserve is taken off.
            num_stages: the number of stages that a cut must have; None for any.
        """
        layers = tuple(
            replace(layer, static_bytes=layer.static_bytes + num_microbatches * each)
            for layer, each in zip(self.layers, self.batch_bytes, strict=True)
        )
        return PipelineProblem(
            layers=layers,
            num_actors=num_actors,
            num_microbatches=num_microbatches,
            cap_bytes=max(0.0, cap_bytes - self.reserve_bytes),
            latency_s=self.latency_s,
            bytes_per_s=self.bytes_per_s,
            dispatch_s=self.dispatch_s,
            num_stages=num_stages,
        )


def find_marks(name: str, loops: Sequence[Loop]) -> tuple[Mark, ...]:
    """Return the marks of the one loop of a step that is cut into stages.

    Args:
        name: the name of the step function, for errors.
        loops: the microbatch loops of the traced step.

    Raises:
        PlanError: no loop has marks, or several have.
    """
    marked = [loop for loop in loops if marks_of(loop)]
    if not marked:
        raise PlanError(
            f"step {name!r} has no pipeline_yield inside accumulate_grads, so that there is nothing to "
            "cut; call pipeline_yield behind each layer"
        )
    if len(marked) > 1:
        lines = " and ".join(loop.line for loop in marked)
        raise PlanError(
            f"step {name!r} has {len(marked)} loops with pipeline_yield, at {lines}, and a plan is of one "
            "loop; give each loop a schedule of its own, such as Std1F1B(num_stages, stages='balanced'), or "
            "plan steps with one loop each"
        )
    return marks_of(marked[0])


@gc_paused()
def profile_layers(
    compiler: StepCompiler,
    args: Sequence[Any],
    machine: Machine,
    costs: CostModel,
    num_microbatches: int,
    batch_leaves: Callable[[int], bool],
) -> LayerCosts:
    """Return the costs of each layer of a step.

    Args:
        compiler: compiles the step.
        args: the types of a call's arguments, with few microbatches.
        machine: the machine; its number of actors says which links there are.
        costs: the costs of tasks and transfers.
        num_microbatches: the number of microbatches in `args`.
        batch_leaves: a function that says whether the argument at a position is a batch, whose bytes grow
            with the number of microbatches.

    Raises:
        PlanError: the step has no marks, or several loops with marks.
        MissingCost: the cost model has no cost for a task or a link.
    """
    marks = find_marks(compiler.name, compiler.loops(machine, args))
    count = len(marks) + 1
    order = tuple(
        tuple(
            Task(i, ty, stage) for ty in ("fwd", "bwd_input", "bwd_weight") for i in range(num_microbatches)
        )
        for stage in range(count)
    )
    finest = PlannedSchedule(order, tuple(range(len(marks))), "every mark")
    step = compiler.compile(replace(machine, actors=count), args, finest)
    overhead_s = costs.formula.overhead_s if costs.formula is not None else 0.0
    times = TaskTimes(costs, step.compiled.cut)
    profiles = [_Profile(step, program, times, overhead_s) for program in step.compiled.programs]
    needs = memory_needs(step)
    sent = _sent_bytes(step.compiled.programs, num_microbatches)
    layers, batch_bytes = [], []
    for stage, profile in enumerate(profiles):
        held, batch = profile.arguments(batch_leaves)
        batch_bytes.append(batch / num_microbatches)
        layers.append(
            Layer(
                forward_s=profile.seconds["fwd"] / num_microbatches,
                input_gradient_s=profile.seconds["bwd_input"] / num_microbatches,
                weight_gradient_s=profile.seconds["bwd_weight"] / num_microbatches,
                kept_bytes=profile.kept / num_microbatches,
                weight_kept_bytes=profile.weight_kept / num_microbatches,
                sent_bytes=sent[stage],
                static_bytes=held + profile.sums + needs[stage].row(RESULTS).size_bytes,
            )
        )
    latency_s, bytes_per_s = slowest_link(costs, machine.num_actors)
    reserve = max(sum(row.size_bytes for row in each.rows if not _is_of_layers(row)) for each in needs)
    assumed = [
        _how_measured(sum(profile.is_measured for profile in profiles), count, costs.formula),
        "a stage's time and memory are the sums of its layers', as a step cut at every mark has them; the "
        "candidates that are compiled have their own",
    ]
    if any(profile.is_fused for profile in profiles):
        assumed.append("half of a task that is forward and backward at once is the forward")
    return LayerCosts(
        layers=tuple(layers),
        marks=marks,
        dispatch_s=overhead_s + costs.dispatch.mean,
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        reserve_bytes=reserve,
        batch_bytes=tuple(batch_bytes),
        assumed=tuple(assumed),
    )


def _is_of_layers(row: MemoryRow) -> bool:
    """Return whether the bytes of a row are those of the layers: `Layer.static_bytes` and `kept_bytes`."""
    return row.what in (RESULTS, BUFFER_TABLE) or row.what.startswith(ARGUMENT)


def _how_measured(measured: int, count: int, formula: TaskFormula | None) -> str:
    """Return a sentence that says how many of some layers have measured times."""
    by = [
        f"{what} at {rate / 1e9:.3g} {unit}"
        for what, rate, unit in (
            ("FLOPs", formula and formula.flops_per_s, "GFLOP/s"),
            ("bytes", formula and formula.bytes_per_s, "GB/s"),
        )
        if rate
    ]
    text = f"{measured} of {plural(count, 'layer')} by the times of the measured stages that contain them"
    rest = f"; {count - measured} by {' and '.join(by) or 'a fixed time'}"
    return text if measured == count else text + rest


def slowest_link(costs: CostModel, num_actors: int) -> tuple[float, float]:
    """Return the latency and the rate of the slowest link between neighbouring actors."""
    if num_actors < 2:
        return 0.0, math.inf
    kinds = {costs.link_between(actor, actor + 1)[1] for actor in range(num_actors - 1)}
    links = [costs.links[kind] for kind in kinds]
    waiting_s = costs.post.mean + max(0.0, costs.wake.mean - costs.dispatch.mean)
    rate = min(link.bytes_per_s if link.bytes_per_s is not None else math.inf for link in links)
    return max(link.latency.mean for link in links) + waiting_s, rate


_SHARES: Mapping[LabelType, tuple[tuple[TaskPart, float], ...]] = {
    "fwd": (("fwd", 1.0),),
    "bwd_input": (("bwd_input", 1.0),),
    "bwd_weight": (("bwd_weight", 1.0),),
    "finish": (("bwd_weight", 1.0),),
    "bwd": (("bwd_weight", 1.0),),  # nothing waits for an input's gradient
    "fwd_bwd_input": (("fwd", 0.5), ("bwd_input", 0.5)),
    "fwd_bwd": (("fwd", 0.5), ("bwd_weight", 0.5)),
}
"""The parts of a layer's time to which a type of task belongs, and the share of its time in each."""


class _Profile:
    """The time and the bytes of one layer, from the program of the actor that has it alone.

    Args:
        step: the step under the finest cut.
        program: the actor's program.
        times: the times of tasks.
        overhead_s: the part of each task's time that does not depend on its work.

    Attributes:
        seconds: the time of each part, over all microbatches.
        kept: the bytes that forwards leave for backwards, over all microbatches.
        weight_kept: the bytes that weight gradients read, over all microbatches.
        sums: the bytes of the sums of gradients.
        is_measured: whether each task was measured, or the stages that contained its layer.
        is_fused: whether a forward and its backward are one task.
    """

    def __init__(self, step: PlannedStep, program: ActorProgram, times: TaskTimes, overhead_s: float) -> None:
        self._step, self._program = step, program
        self.seconds: dict[str, float] = defaultdict(float)
        self.kept = self.weight_kept = self.sums = 0.0
        self.is_fused, self.is_measured = False, True
        axes = step.compiled.target.axes
        sizes = [device_aval(aval, axes).size_bytes for aval in program.avals]
        made: dict[BufferId, str] = {}  # by buffer, the kind of what made it
        for i in program.instructions:
            if isinstance(i, Input):
                made[i.buffer] = "argument"
            elif isinstance(i, Recv):
                made[i.buffer] = "received"
            elif isinstance(i, Run):
                kind = TaskLabel.parse(i.label).type
                if kind in _SHARES:
                    work = step.works[i.executable]
                    task_s = max(0.0, times.task_s(work, i.label) - overhead_s)
                    self.is_measured &= times.is_known(work, i.label)
                    for part, share in _SHARES[kind]:
                        self.seconds[part] += share * task_s
                self.is_fused |= kind.startswith("fwd_bwd")
                if kind == "fwd":
                    for b in i.inputs:
                        if made.get(b) == "received":
                            made[b] = "fwd"  # kept, if a backward reads it as well
                elif kind == "bwd_input":
                    self.kept += sum(sizes[b] for b in set(i.inputs) if made.get(b) == "fwd")
                    for b in i.inputs:  # counted once
                        if made.get(b) in ("fwd", "received"):
                            made[b] = "bwd_input"
                elif kind in ("bwd_weight", "bwd"):
                    self.kept += sum(sizes[b] for b in set(i.inputs) if made.get(b) == "fwd")
                    left = ("fwd", "bwd_input", "received")
                    self.weight_kept += sum(sizes[b] for b in set(i.inputs) if made.get(b) in left)
                elif kind == "start":
                    self.sums += sum(sizes[b] for b in i.outputs)
                made.update(dict.fromkeys(i.outputs, "bwd_input" if kind == "fwd_bwd_input" else kind))

    def arguments(self, is_batch: Callable[[int], bool]) -> tuple[float, float]:
        """Return the bytes on a device of the arguments without batches, and of the batches.

        Args:
            is_batch: a function that says whether the argument at a position is a batch.
        """
        compiled = self._step.compiled
        graph, axes, arg_of = compiled.placed.graph, compiled.target.axes, compiled.traced.arg_of
        held = batch = 0.0
        for i in graph.inputs:
            if self._program.actor in i.actors and i.arg < len(arg_of):
                size = device_aval(graph.values[i.value].aval, axes).size_bytes
                if is_batch(arg_of[i.arg]):
                    batch += size
                else:
                    held += size
        return held, batch


def _sent_bytes(programs: Sequence[ActorProgram], num_microbatches: int) -> list[float]:
    """Return the bytes that cross the mark behind each layer for one microbatch, in the larger direction.

    Only results of forwards and backwards count, and no sums over microbatches. A value that a later layer
    needs crosses all marks between.
    """
    count = len(programs)
    ahead, back = [0.0] * count, [0.0] * count
    for program in programs:
        sums = _sums(program)
        made: dict[BufferId, bool] = {}  # whether a buffer is sent for each microbatch
        for i in program.instructions:
            if isinstance(i, Run):
                is_in_loop = bool(TaskLabel.parse(i.label).traits.parts)
                for k, b in enumerate(i.outputs):
                    made[b] = is_in_loop and (i.executable, k) not in sums
            elif isinstance(i, Recv):
                made[i.buffer] = True
            elif isinstance(i, Send) and made.get(i.buffer, False):
                low, high = sorted((program.actor, i.to_actor))
                direction = ahead if program.actor == low else back
                for mark in range(low, high):
                    direction[mark] += program.avals[i.buffer].size_bytes / num_microbatches
    return [max(pair) for pair in zip(ahead, back, strict=True)]


def _sums(program: ActorProgram) -> set[tuple[int, int]]:
    """Return the executables and positions of results that the same executable is given again, to add to."""
    made: dict[BufferId, tuple[int, int]] = {}
    found: set[tuple[int, int]] = set()
    for run in runs(program.instructions):
        donated = [made[b] for b in (run.inputs[p] for p in run.donated) if b in made]
        found.update(place for place in donated if place[0] == run.executable)
        made.update({b: (run.executable, k) for k, b in enumerate(run.outputs)})
    return found


def resized(args: Sequence[Any], batch: Sequence[int], num_microbatches: int) -> list[Any]:
    """Return the types of a call's arguments with the same global batch in another number of microbatches.

    Args:
        args: the arguments, whose batches have leaves of shape (microbatches, microbatch size, ...).
        batch: the positions of the batches.
        num_microbatches: the number of microbatches to have.

    Raises:
        PlanError: the global batch cannot be divided into so many microbatches.
    """
    return [_with_count(arg, num_microbatches, n) if n in batch else arg for n, arg in enumerate(args)]


def _with_count(batch: Any, num_microbatches: int, argnum: int) -> Any:
    def leaf(x: Any) -> Any:
        shape = tuple(x.shape)
        if len(shape) < 2 or shape[0] == num_microbatches:
            if shape[:1] not in ((num_microbatches,), ()):
                raise PlanError(
                    f"argument {argnum} has a leaf of shape {shape}, which cannot be divided into "
                    f"{num_microbatches} microbatches: only leaves of shape (microbatches, microbatch size, "
                    "...) can"
                )
            return x
        rows = shape[0] * shape[1]
        if rows % num_microbatches:
            raise PlanError(
                f"argument {argnum} has a leaf of shape {shape}, a global batch of {rows}, which cannot be "
                f"divided into {num_microbatches} microbatches; give divisors of {rows}"
            )
        return jax.ShapeDtypeStruct((num_microbatches, rows // num_microbatches, *shape[2:]), x.dtype)

    return jax.tree.map(leaf, batch)


def shortened(args: Sequence[Any], batch: Sequence[int], num_microbatches: int) -> list[Any]:
    """Return the types of a call's arguments with fewer microbatches of the same size."""

    def leaf(x: Any) -> Any:
        return jax.ShapeDtypeStruct((num_microbatches, *x.shape[1:]), x.dtype) if x.shape else x

    return [jax.tree.map(leaf, arg) if n in batch else arg for n, arg in enumerate(args)]
