"""Make task graphs by hand for tests, and interpret programs over plain Python values."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import (
    ActorId,
    Aval,
    Delete,
    GraphInput,
    GraphOutput,
    Input,
    Node,
    Output,
    Recv,
    Run,
    Send,
    Task,
    TaskGraph,
    Value,
    ValueId,
    ValueKind,
)

F4 = Aval((4,), "float32")


class GraphBuilder:
    """Collects values, nodes, inputs and outputs of a `TaskGraph`."""

    def __init__(self, num_actors: int):
        self.num_actors = num_actors
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.inputs: list[GraphInput] = []
        self.outputs: list[GraphOutput] = []

    def value(self, label: str, kind: ValueKind = "temp", aval: Aval = F4) -> ValueId:
        self.values.append(Value(aval, label, kind))
        return len(self.values) - 1

    def input(self, label: str, *actors: ActorId, donated: bool = False, aval: Aval = F4) -> ValueId:
        value = self.value(label, "input", aval)
        self.inputs.append(GraphInput(value, len(self.inputs), actors, donated))
        return value

    def node(
        self,
        label: str,
        actor: ActorId,
        inputs: Sequence[ValueId],
        outputs: Sequence[ValueId | str],
        *,
        executable: int | None = None,
        donatable: Sequence[int] = (),
        task: Task | None = None,
    ) -> tuple[ValueId, ...]:
        made = tuple(self.value(o) if isinstance(o, str) else o for o in outputs)
        executable = len(self.nodes) if executable is None else executable
        self.nodes.append(Node(label, actor, executable, tuple(inputs), made, tuple(donatable), task))
        return made

    def output(self, value: ValueId, *actors: ActorId) -> None:
        self.outputs.append(GraphOutput(value, len(self.outputs), actors))

    def graph(self) -> TaskGraph:
        return TaskGraph(
            self.num_actors, tuple(self.values), tuple(self.nodes), tuple(self.inputs), tuple(self.outputs)
        )


# ---------------------------------------------------------------- pipelines

ACTIVATION, RESIDUAL, WEIGHT = Aval((256,), "float32"), Aval((1000,), "float32"), Aval((50,), "float32")


def gpipe(actor: int, num_actors: int, num_microbatches: int) -> list[Task]:
    forward = [Task(i, "fwd", actor) for i in range(num_microbatches)]
    return forward + [Task(i, "bwd", actor) for i in range(num_microbatches)]


def std_1f1b(actor: int, num_actors: int, num_microbatches: int) -> list[Task]:
    warm = min(num_actors - actor, num_microbatches)
    order = [Task(i, "fwd", actor) for i in range(warm)]
    for i in range(num_microbatches):
        order.append(Task(i, "bwd", actor))
        if i + warm < num_microbatches:
            order.append(Task(i + warm, "fwd", actor))
    return order


def _topological(orders: list[list[Task]]) -> list[Task]:
    """Merge per-actor orders, one stage an actor."""
    last, done, merged = len(orders) - 1, set(), []
    heads = [0] * len(orders)
    while any(h < len(o) for h, o in zip(heads, orders, strict=True)):
        before = len(merged)
        for actor, order in enumerate(orders):
            while heads[actor] < len(order):
                task = order[heads[actor]]
                if task.ty == "fwd":
                    ready = task.stage == 0 or Task(task.i, "fwd", task.stage - 1) in done
                else:
                    ready = (
                        Task(task.i, "bwd" if task.stage < last else "fwd", min(task.stage + 1, last)) in done
                    )
                if not ready:
                    break
                done.add(task)
                merged.append(task)
                heads[actor] += 1
        assert len(merged) > before, "these orders deadlock"
    return merged


def pipeline_graph(num_stages: int, num_microbatches: int, order=std_1f1b) -> TaskGraph:
    """Forward, backward into a gradient accumulator, losses stacked, an update; stage k on actor k."""
    return _Pipeline(num_stages, num_microbatches).build(order)


class _Pipeline:
    def __init__(self, num_stages: int, num_microbatches: int):
        g = self.g = GraphBuilder(num_stages)
        self.num_stages, self.num_microbatches, self.last = num_stages, num_microbatches, num_stages - 1
        batch = g.input("batch", 0, aval=Aval((num_microbatches, 256), "float32"))
        self.weights = [g.input(f"w{s}", s, donated=True, aval=WEIGHT) for s in range(num_stages)]
        self.losses_aval = Aval((num_microbatches,), "float32")
        self.x = {(0, i): batch for i in range(num_microbatches)}
        self.residual: dict[tuple[int, int], ValueId] = {}
        self.dy: dict[tuple[int, int], ValueId] = {}

    def build(self, order) -> TaskGraph:
        g, stages = self.g, range(self.num_stages)
        zeros = [g.value(f"zeros{s}", "temp", WEIGHT) for s in stages]
        self.grads = [g.node(f"zeros(stage {s})", s, (), [zeros[s]], executable=4 * s)[0] for s in stages]
        losses = [g.value("losses", "result", self.losses_aval)]
        (self.losses,) = g.node("zeros(losses)", self.last, (), losses, executable=4 * self.num_stages)
        for task in _topological([order(s, self.num_stages, self.num_microbatches) for s in stages]):
            (self.forward if task.ty == "fwd" else self.backward)(task)
        for s in stages:
            new = g.value(f"new w{s}", "temp", WEIGHT)
            g.node(
                f"update({s})",
                s,
                (self.weights[s], self.grads[s]),
                [new],
                executable=4 * s + 3,
                donatable=(0, 1),
            )
            g.output(new, s)
        g.output(self.losses, self.last)
        return g.graph()

    def forward(self, t: Task) -> None:
        g, key, inputs = self.g, (t.stage, t.i), [self.weights[t.stage], self.x[t.stage, t.i]]
        self.residual[key] = g.value(f"residual@{t}", "temp", RESIDUAL)
        if t.stage == self.last:
            inputs.append(self.losses)
            made = self.losses = g.value(f"losses@{t}", "result", self.losses_aval)
        else:
            made = self.x[t.stage + 1, t.i] = g.value(f"y@{t}", "temp", ACTIVATION)
        donatable = (2,) if t.stage == self.last else ()
        outputs = [self.residual[key], made]
        g.node(str(t), t.stage, inputs, outputs, executable=4 * t.stage + 1, donatable=donatable, task=t)

    def backward(self, t: Task) -> None:
        g, s = self.g, t.stage
        inputs = [self.grads[s], self.weights[s], self.residual[s, t.i]]
        if s < self.last:
            inputs.append(self.dy[s, t.i])
        made = [g.value(f"grad@{t}", "accumulator", WEIGHT)]
        if s:
            self.dy[s - 1, t.i] = g.value(f"dx@{t}", "temp", ACTIVATION)
            made.append(self.dy[s - 1, t.i])
        g.node(str(t), s, inputs, made, executable=4 * s + 2, donatable=(0, 2), task=t)
        self.grads[s] = made[0]


# ---------------------------------------------------------------- meaning


def _call(executable: int, operands: Sequence[Any], num_results: int) -> list[int]:
    """A stand-in for an executable: results that tell its operands apart."""
    return [hash((executable, k, *operands)) for k in range(num_results)]


def evaluate(graph: TaskGraph) -> dict[tuple[ActorId, int], int]:
    """(actor, result) to value, straight from the graph."""
    known: dict[ValueId, int] = {i.value: hash(("arg", i.arg)) for i in graph.inputs}
    for node in graph.nodes:
        operands = [known[v] for v in node.inputs]
        known |= zip(node.outputs, _call(node.executable, operands, len(node.outputs)), strict=True)
    return {(a, o.result): known[o.value] for o in graph.outputs for a in o.actors}


class _Machine:
    """One actor: its buffers, and what it has issued."""

    def __init__(self, program: ActorProgram, wires: dict[int, int]):
        self.program, self.wires = program, wires
        self.buffers: dict[int, int] = {}
        self.pending: dict[int, int] = {}
        self.index = 0
        self.results: dict[tuple[ActorId, int], int] = {}
        self.kept: set[int] = set()

    @property
    def done(self) -> bool:
        return self.index == len(self.program.instructions)

    def arrived(self, buffers: Sequence[int]) -> bool:
        for b in buffers:
            if b in self.pending and self.pending[b] in self.wires:
                self.buffers[b] = self.wires.pop(self.pending.pop(b))
        return not any(b in self.pending for b in buffers)

    def step(self) -> bool:
        """Issue the next instruction if it can be."""
        match i := self.program.instructions[self.index]:
            case Input():
                self.buffers[i.buffer] = hash(("arg", i.arg))
                if not i.donated:
                    self.kept.add(i.buffer)
            case Recv():
                self.pending[i.buffer] = i.tag
            case Send():
                assert i.tag not in self.wires
                self.wires[i.tag] = self.buffers[i.buffer]
            case Run():
                if not self.arrived(i.inputs):
                    return False
                operands = [self.buffers[b] for b in i.inputs]
                for p in i.donated:
                    del self.buffers[i.inputs[p]]
                self.buffers |= zip(i.outputs, _call(i.executable, operands, len(i.outputs)), strict=True)
            case Delete():
                assert i.buffer not in self.kept
                del self.buffers[i.buffer]
            case Output():
                if not self.arrived((i.buffer,)):
                    return False
                self.results[self.program.actor, i.result] = self.buffers[i.buffer]
                self.kept.add(i.buffer)
        self.index += 1
        return True


def interpret(programs: Sequence[ActorProgram], seed: int) -> dict[tuple[ActorId, int], int]:
    """Run the programs interleaved at random; return (actor, result) to value. Leaks and deadlocks fail."""
    pick, wires = random.Random(seed), {}
    machines = [_Machine(p, wires) for p in programs]
    while running := [m for m in machines if not m.done]:
        pick.shuffle(running)
        assert any([m.step() for m in running]), "deadlock"
    assert not wires, "something was sent and never received"
    for m in machines:
        assert set(m.buffers) <= m.kept, f"actor {m.program.actor} leaks {set(m.buffers) - m.kept}"
    return {key: value for m in machines for key, value in m.results.items()}
