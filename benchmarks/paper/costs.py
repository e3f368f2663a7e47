"""Define the constants of the prediction, and the time of a task from its counted work.

All rows use the same constants. Three of them are calibrated, each on one row; the others are stated here,
each with the reason for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from msgspec import structs

from jaxpp_async.compiler.pipeline import CompilePlan
from jaxpp_async.planning.cost_model import CostModel
from jaxpp_async.planning.devices import BETWEEN_DEVICES, BETWEEN_HOSTS, SAME_HOST
from jaxpp_async.planning.machine import Machine
from jaxpp_async.planning.memory import device_aval
from jaxpp_async.planning.samples import Samples
from jaxpp_async.program.instructions import Run
from jaxpp_async.program.work import Collective, TaskWork
from paper.rows import GPUS_PER_NODE

DATA, MODEL = "data", "model"
"""The mesh axes of an actor: replicas, each on a node of its own, and the GPUs of a node."""


def machine_of(actors: int, replicas: int) -> Machine:
    """Return a machine of H100 nodes, one for each actor and replica."""
    axes = {DATA: replicas, MODEL: GPUS_PER_NODE}
    return Machine(actors, axes, "h100-sxm", {BETWEEN_HOSTS: "infiniband-ndr"})


SUM_PASSES = 3
"""How often a sum of gradients crosses the memory for a microbatch: the sum and the new gradient are read,
and the sum is written."""

LARGE_NODES = 64
"""The number of nodes above which steps lose time to stragglers."""


@dataclass(frozen=True)
class Constants:
    """The constants of the prediction.

    Args:
        matmul: the share of the published rate of bfloat16 products that tasks reach while they compute, with
            everything between the products. Calibrated on JaxPP's row of 64 GPUs.
        exposed: the share of FSDP's traffic that computation does not hide. Calibrated on FSDP's row of 64
            GPUs.
        straggling: the part by which each doubling of the nodes above 64 lengthens a step. Calibrated on
            FSDP's row of 1,024 GPUs.
        memory: the share of the published memory rate that streaming kernels reach; assumed.
        node_link: the share of NVLink's published rate that all-gathers and reduce-scatters among the GPUs of
            a node reach. NCCL's tests show 360 GB/s of 450 on eight H100, as NVIDIA expects (nccl-tests,
            issue 326).
        network: the share of InfiniBand's published rate that messages of megabytes reach; assumed.
        dispatch_s: the seconds that starting a task costs an actor, in which its devices compute nothing. The
            paper names this cost without a figure. Assumed is the middle of the range from 0.3 to 1 ms, in
            which the paper's own configuration comes out best (`choices`).
    """

    matmul: float
    exposed: float = 0.0
    straggling: float = 0.0
    memory: float = 0.9
    node_link: float = 0.8
    network: float = 0.92
    dispatch_s: float = 0.65e-3

    def costs_on(self, machine: Machine) -> CostModel:
        """Return the costs of single GPUs and links of a machine."""
        return CostModel.for_machine(
            machine,
            matmul=self.matmul,
            memory=self.memory,
            links={BETWEEN_DEVICES: self.node_link, SAME_HOST: self.node_link, BETWEEN_HOSTS: self.network},
            dispatch_s=self.dispatch_s,
        )

    @cached_property
    def _costs(self) -> CostModel:
        return self.costs_on(machine_of(1, 2))

    @property
    def flops_per_s(self) -> float:
        """The floating-point operations a second of one GPU."""
        assert self._costs.formula is not None
        return self._costs.formula.flops_per_s or 0.0

    @property
    def bytes_per_s(self) -> float:
        """The bytes a second that one GPU reads and writes."""
        assert self._costs.formula is not None
        return self._costs.formula.bytes_per_s or 0.0

    def link_bytes_per_s(self, axis: str) -> float:
        """Return the bytes a second that one GPU sends along a mesh axis, `DATA` or `MODEL`."""
        return self._costs.axes[axis].bytes_per_s or 0.0

    def exchange_s(self, kind: str, axis: str, devices: int, size_bytes: float) -> float:
        """Return the seconds of an exchange of some devices along a mesh axis; the arguments are those of
        `Collective`."""
        return self._costs.exchange_s(Collective(kind, ((axis, devices),), size_bytes))

    def straggling_factor(self, nodes: int) -> float:
        """Return by which factor stragglers lengthen a step on some nodes."""
        doublings = max(0, (nodes // LARGE_NODES).bit_length() - 1)
        return (1 + self.straggling) ** doublings


class Step(Protocol):
    """A compiled step, or what simulation needs of one."""

    @property
    def compiled(self) -> CompilePlan: ...

    @property
    def works(self) -> Sequence[TaskWork]: ...


def exposed_exchanges(collectives: Sequence[Collective]) -> list[Collective]:
    """Return the exchanges inside a node that a task waits for.

    A forward waits for all of its exchanges. The backward of a product of a gathered input gathers the
    gradient of its output, for which it waits, gathers the input a second time while it multiplies for the
    gradient of the input, and scatters this gradient while it multiplies for the gradient of the weights. So
    it hides one gather and one scatter. A forward has as many gathers as scatters, and a backward has one
    more gather than scatters for each such product.

    Args:
        collectives: the exchanges of the task.
    """
    gathers, scatters = (
        [c for c in collectives if c.kind == kind] for kind in ("all-gather", "reduce-scatter")
    )
    hidden = max(0, len(gathers) - len(scatters))
    others = [c for c in collectives if c.kind not in ("all-gather", "reduce-scatter")]
    return [*gathers[hidden:], *scatters[hidden:], *others]


def cost_model(constants: Constants, step: Step, machine: Machine) -> CostModel:
    """Return the costs of a compiled step on nodes of H100 GPUs.

    A task of the loop takes what its work takes, without the exchanges that it hides, and the time in which
    its sums of gradients cross the memory.

    Args:
        constants: the constants.
        step: the step.
        machine: the machine that the step was compiled for.
    """
    costs = constants.costs_on(machine)
    tasks: dict[str, Samples] = {}
    for program in step.compiled.programs:
        for run in program.instructions:
            if not isinstance(run, Run) or (key := step.works[run.executable].key) in tasks:
                continue
            work, sum_bytes = step.works[run.executable], 0
            if not run.label.startswith("outer"):
                work = structs.replace(work, collectives=tuple(exposed_exchanges(work.collectives)))
                sums = [program.avals[run.inputs[k]] for k in run.donated]
                sum_bytes = sum(device_aval(aval, machine.spmd_mesh).size_bytes for aval in sums)
            tasks[key] = Samples((costs.task_s(work) + SUM_PASSES * sum_bytes / constants.bytes_per_s,))
    return structs.replace(costs, tasks=tasks)
