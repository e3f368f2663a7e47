"""Define the constants of the prediction, and the time of a task from its counted work.

All rows use the same constants. Three of them are calibrated, each on one row; the others are stated here,
each with the reason for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxpp_async.compiler.pipeline import CompilePlan
from jaxpp_async.planning.cost_model import DEVICES, CostModel
from jaxpp_async.planning.devices import find_device, find_link
from jaxpp_async.planning.memory import device_aval
from jaxpp_async.planning.samples import LinkCost, Samples
from jaxpp_async.program.instructions import Run
from jaxpp_async.program.work import Collective, TaskWork

DEVICE, NODE_LINK, NETWORK = "h100-sxm", "nvlink4", "infiniband-ndr"

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

    @property
    def flops_per_s(self) -> float:
        """The floating-point operations a second of one GPU."""
        return self.matmul * (find_device(DEVICE).bf16_flops_per_s or 0.0)

    @property
    def bytes_per_s(self) -> float:
        """The bytes a second that one GPU reads and writes."""
        return self.memory * (find_device(DEVICE).memory_bytes_per_s or 0.0)

    @property
    def node_link_bytes_per_s(self) -> float:
        """The bytes a second that one GPU sends to others of its node."""
        return self.node_link * find_link(NODE_LINK).bytes_per_s

    @property
    def network_bytes_per_s(self) -> float:
        """The bytes a second that one GPU sends to other nodes."""
        return self.network * find_link(NETWORK).bytes_per_s

    def straggling_factor(self, nodes: int) -> float:
        """Return by which factor stragglers lengthen a step on some nodes."""
        doublings = max(0, (nodes // LARGE_NODES).bit_length() - 1)
        return (1 + self.straggling) ** doublings

    def exchange_s(self, kind: str, devices: int, size_bytes: float, *, in_node: bool) -> float:
        """Return the seconds of an exchange in a ring of devices.

        Args:
            kind: as in `Collective`. An all-reduce is a reduce-scatter and an all-gather.
            devices: the number of devices in the ring.
            size_bytes: the bytes of the whole array, before a reduce-scatter or after an all-gather.
            in_node: whether all devices are in one node.
        """
        link = find_link(NODE_LINK if in_node else NETWORK)
        rate = self.node_link_bytes_per_s if in_node else self.network_bytes_per_s
        once = (devices - 1) * ((link.latency_s or 0.0) + size_bytes / devices / rate)
        return 2 * once if kind == "all-reduce" else once


class Step(Protocol):
    """A compiled step, or what simulation needs of one."""

    @property
    def compiled(self) -> CompilePlan: ...

    @property
    def works(self) -> Sequence[TaskWork]: ...


def task_s(constants: Constants, work: TaskWork, sum_bytes: float, *, in_node: bool) -> float:
    """Return the seconds that a task takes.

    Args:
        constants: the constants.
        work: the counted work of the task, for one device.
        sum_bytes: the bytes of the sums of gradients that the task adds to, on one device.
        in_node: whether the task's exchanges are among devices of one node.
    """
    computing = max(work.flops / constants.flops_per_s, work.size_bytes / constants.bytes_per_s)
    summing = SUM_PASSES * sum_bytes / constants.bytes_per_s
    exchanges = exposed_exchanges(work.collectives) if in_node else work.collectives
    exchanging = sum(
        constants.exchange_s(c.kind, c.devices, c.size_bytes, in_node=in_node) for c in exchanges
    )
    return computing + summing + exchanging


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


def cost_model(constants: Constants, step: Step, axes: dict[str, int]) -> CostModel:
    """Return the costs of a compiled step on nodes of H100 GPUs.

    Tasks of the loop exchange only along `"model"`, inside a node. Tasks outside the loop add up gradients
    along `"data"`, between nodes.

    Args:
        constants: the constants.
        step: the step.
        axes: the devices of an actor along each mesh axis, `"data"` and `"model"`.
    """
    per_actor = axes["data"] * axes["model"]
    costs = CostModel.from_device(
        DEVICE,
        network=NETWORK,
        devices_per_actor=per_actor,
        matmul=constants.matmul,
        memory=constants.memory,
        links=constants.network,
        dispatch_s=constants.dispatch_s,
    )
    tasks: dict[str, Samples] = {}
    for program in step.compiled.programs:
        for run in program.instructions:
            if not isinstance(run, Run) or (key := step.works[run.executable].key) in tasks:
                continue
            outside = run.label.startswith("outer")
            sums = [] if outside else [program.avals[run.inputs[k]] for k in run.donated]
            sum_bytes = sum(device_aval(aval, axes).size_bytes for aval in sums)
            seconds = task_s(constants, step.works[run.executable], sum_bytes, in_node=not outside)
            tasks[key] = Samples((seconds,))
    node_link = LinkCost(Samples((find_link(NODE_LINK).latency_s or 0.0,)), constants.node_link_bytes_per_s)
    return CostModel(
        tasks=tasks,
        formula=costs.formula,
        links={**costs.links, DEVICES: node_link},
        actors_per_host=1,
        dispatch=costs.dispatch,
        wake=costs.wake,
        assumed=costs.assumed,
    )
