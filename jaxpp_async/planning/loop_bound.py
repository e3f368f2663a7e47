"""Prove that no order of a compiled step's tasks runs its loop in less than some time.

The bounds are of the very tasks that were compiled: their mean times, and the values that they pass on.

Notation: the *head* of a task is the least time before its values can be there, and its *tail* the least time
from its end to the end of the loop. Both are longest paths through the tasks of one microbatch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from jaxpp_async.planning.calibration import TaskTimes
from jaxpp_async.planning.cost_model import CostModel
from jaxpp_async.planning.packing import packed_s
from jaxpp_async.program.instructions import ActorId, Node, TaskGraph, ValueId
from jaxpp_async.program.task_label import task_kind
from jaxpp_async.program.work import TaskWork


@dataclass(frozen=True)
class LoopBounds:
    """Times in seconds below which no order of a compiled loop's tasks ends.

    Attributes:
        any_placement_s: the bound for stages on any actors.
        this_placement_s: the bound for stages on the actors on which they were compiled.
    """

    any_placement_s: float = 0.0
    this_placement_s: float = 0.0


def bounds_of_loop(
    graph: TaskGraph, works: Sequence[TaskWork], costs: CostModel, times: TaskTimes
) -> LoopBounds:
    """Return times below which no order of a compiled loop's tasks ends.

    For any placement the bound is the largest of the path of one microbatch, each stage's head and work, and
    the work of the actors however the stages are divided among them (`packed_s`). For one placement the tasks
    of each actor also run one after the other, each between its head and its tail (`one_machine_s`). A task
    that waits for its actor starts one dispatch later, and one that waits for data one wake-up later.

    Args:
        graph: the placed tasks of the step, as they were compiled.
        works: the work of each executable.
        costs: the costs of dispatch, wake-ups and transfers.
        times: the times of the step's tasks.
    """
    tasks = _Tasks(graph, works, costs, times)
    if not tasks.nodes:
        return LoopBounds()
    free = tasks.heads(lambda a, b, size: 0.0)
    any_placement_s = max(_free_s(tasks, free, costs), tasks.path_s(free) * (1 - 1e-9))

    def hop_s(a: ActorId, b: ActorId, size: int) -> float:
        if a == b:
            return 0.0
        link = costs.links[costs.link_between(a, b)[1]]
        return link.latency.mean + link.occupied_s(size)

    heads, tails = tasks.heads(hop_s), tasks.tails(hop_s)
    jobs: dict[ActorId, list[tuple[float, float, float]]] = defaultdict(list)
    for node, head, work_s, tail in zip(tasks.nodes, heads, tasks.work_s, tails, strict=True):
        jobs[node.actor].append((max(0.0, head - tasks.early_s), tasks.dispatch_s + work_s, tail))
    busiest = max(one_machine_s(each) for each in jobs.values())
    this_placement_s = max(any_placement_s, max(busiest, tasks.path_s(heads)) * (1 - 1e-9))
    return LoopBounds(any_placement_s, this_placement_s)


def one_machine_s(jobs: Iterable[tuple[float, float, float]]) -> float:
    """Return the least time at which jobs can end that run one after the other on a machine.

    Proof. The jobs may even be interrupted. Then running, at any time, the one with the longest tail makes
    the end as early as it can be (Jackson's preemptive schedule; Carlier, The one-machine sequencing problem,
    1982).

    Args:
        jobs: of each job the time before which it cannot start, the time that it takes, and the time that
            must pass after its end.
    """
    waiting = sorted(jobs)
    now, latest, position = 0.0, 0.0, 0
    ready: list[tuple[float, float]] = []
    while position < len(waiting) or ready:
        if not ready:
            now = max(now, waiting[position][0])
        while position < len(waiting) and waiting[position][0] <= now:
            heappush(ready, (-waiting[position][2], waiting[position][1]))
            position += 1
        tail, left = heappop(ready)
        until = waiting[position][0] if position < len(waiting) else float("inf")
        if now + left > until:
            heappush(ready, (tail, left - (until - now)))
            now = until
        else:
            now += left
            latest = max(latest, now - tail)
    return latest


# ---------------------------------------------------------------- heads and tails

_HopTime = Callable[[ActorId, ActorId, int], float]
"""A function that returns the time of a transfer between two actors, of a number of bytes."""


class _Tasks:
    """The tasks of a compiled loop.

    Attributes:
        nodes: the tasks, in a topological order.
        work_s: the mean time of each task.
        dispatch_s: the time of an actor between the end of a task and the begin of the next one.
        early_s: by how much a task that has waited for data begins earlier than `dispatch_s` after it.
    """

    def __init__(
        self, graph: TaskGraph, works: Sequence[TaskWork], costs: CostModel, times: TaskTimes
    ) -> None:
        self.nodes = [node for node in graph.nodes if node.task is not None]
        self.num_actors = graph.num_actors
        self.dispatch_s = costs.dispatch.mean
        self._begin_s = min(self.dispatch_s, costs.wake.mean)
        self.early_s = self.dispatch_s - self._begin_s
        known: dict[tuple[int, str], float] = {}
        self.work_s: list[float] = []
        for node in self.nodes:
            key = node.executable, task_kind(node.label)
            if key not in known:
                known[key] = times.task_s(works[node.executable], node.label)
            self.work_s.append(known[key])
        makers: dict[tuple[int, ValueId], int] = {}  # of the values of a microbatch
        self._edges: list[list[tuple[int, int]]] = []  # of each task: who makes an input, and its bytes
        for k, node in enumerate(self.nodes):
            i = _microbatch(node)
            made = [(makers.get((i, value)), value) for value in node.inputs]
            self._edges.append([(m, graph.values[v].aval.size_bytes) for m, v in made if m is not None])
            makers.update(((i, value), k) for value in node.outputs)

    def heads(self, hop_s: _HopTime) -> list[float]:
        """Return the head of each task."""
        heads: list[float] = []
        for node, edges in zip(self.nodes, self._edges, strict=True):
            ends = (
                heads[m] + self._begin_s + self.work_s[m] + hop_s(self.nodes[m].actor, node.actor, size)
                for m, size in edges
            )
            heads.append(max(ends, default=0.0))
        return heads

    def tails(self, hop_s: _HopTime) -> list[float]:
        """Return the tail of each task."""
        tails = [0.0] * len(self.nodes)
        for k in reversed(range(len(self.nodes))):
            rest = self._begin_s + self.work_s[k] + tails[k]
            for m, size in self._edges[k]:
                tails[m] = max(tails[m], rest + hop_s(self.nodes[m].actor, self.nodes[k].actor, size))
        return tails

    def path_s(self, heads: Sequence[float]) -> float:
        """Return the longest path of one microbatch."""
        return max(head + self._begin_s + work_s for head, work_s in zip(heads, self.work_s, strict=True))


def _microbatch(node: Node) -> int:
    assert node.task is not None
    return node.task.i


def _free_s(tasks: _Tasks, heads: Sequence[float], costs: CostModel) -> float:
    """Return a bound for stages on any actors, from the head and the work of each stage."""
    load: dict[int, float] = defaultdict(float)
    lead: dict[int, float] = {}
    for node, head, work_s in zip(tasks.nodes, heads, tasks.work_s, strict=True):
        assert node.task is not None
        load[node.task.stage] += tasks.dispatch_s + work_s
        lead[node.task.stage] = min(lead.get(node.task.stage, head), head)
    stages = sorted(load)
    count = max(map(_microbatch, tasks.nodes)) + 1
    # An actor's first task starts a wake-up after its data, where `load` has a dispatch.
    leads = [max(0.0, lead[stage] - tasks.early_s) for stage in stages]
    alone = max(start + load[stage] for start, stage in zip(leads, stages, strict=True))
    # Every actor but the one of the first stage waits for a transfer at least.
    hop = min((link.latency.mean for link in costs.links.values()), default=0.0)
    leads = [start + hop * (k > 0 and start > 0) for k, start in enumerate(leads)]
    for k in reversed(range(len(leads) - 1)):
        leads[k] = min(leads[k], leads[k + 1])
    packed = packed_s([load[stage] / count for stage in stages], leads, tasks.num_actors, count)
    return max(alone * (1 - 1e-9), packed)
