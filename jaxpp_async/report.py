"""report: what a compiled step does and costs. In: the compiler's result. Out: plain numbers that print as text.

Measures nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from jaxpp_async.compiler.memory import peak_plan
from jaxpp_async.compiler.passes import Compiled
from jaxpp_async.program import ActorId, Recv, Run, Send


@dataclass(frozen=True, slots=True)
class TransferLine:
    """Arrays of one kind that cross from one actor to another in a step."""

    what: str
    from_actor: ActorId
    to_actor: ActorId
    size_bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class ActorLine:
    """One actor's part of a step.

    Args:
        tasks: executions by kind, such as `{"fwd": 8, "bwd": 8}`.
        sent_bytes, received_bytes: in one step, host values not counted.
        peak_bytes: most that its buffer table holds (see `docs/memory.md`); known before anything runs.
        temp_bytes: XLA's own largest temporary, known after compiling.
    """

    actor: ActorId
    tasks: Mapping[str, int]
    sent_bytes: int
    received_bytes: int
    peak_bytes: int
    peak_at: str
    temp_bytes: int
    compile_s: float


@dataclass(frozen=True, slots=True)
class PlaceLine:
    """Where one argument or result leaf lives."""

    name: str
    type: str
    actors: tuple[ActorId, ...]


@dataclass(frozen=True)
class Report:
    """See `CompiledStep.report`."""

    actors: tuple[ActorLine, ...]
    transfers: tuple[TransferLine, ...]
    inputs: tuple[PlaceLine, ...]
    outputs: tuple[PlaceLine, ...]

    def __str__(self) -> str:
        lines = ["actor  tasks  sent  received  peak bytes  XLA temporaries  compiled in"]
        for a in self.actors:
            tasks = " ".join(f"{n} {kind}" for kind, n in a.tasks.items())
            lines.append(
                f"{a.actor}  {tasks}  {a.sent_bytes}  {a.received_bytes}  {a.peak_bytes} ({a.peak_at})  "
                f"{a.temp_bytes}  {a.compile_s:.2f} s"
            )
        lines.append("transfers in one step")
        for t in self.transfers:
            lines.append(f"{t.from_actor} -> {t.to_actor}  {t.count} x {t.size_bytes} bytes  {t.what}")
        for title, places in (("arguments", self.inputs), ("results", self.outputs)):
            lines.append(title)
            lines += [f"{p.name}  {p.type}  on {list(p.actors)}" for p in places]
        return "\n".join(lines)


def make(
    compiled: Compiled, temp_bytes: Mapping[ActorId, Mapping[int, int]], compile_s: Mapping[ActorId, float]
) -> Report:
    """The report of a compiled step."""
    return Report(
        actors=tuple(_actor_line(compiled, a, temp_bytes.get(a, {}), compile_s.get(a, 0.0)) for a in _actors(compiled)),
        transfers=_transfers(compiled),
        inputs=_places(compiled, "inputs"),
        outputs=_places(compiled, "outputs"),
    )


def _actors(compiled: Compiled) -> range:
    return range(len(compiled.programs))


def _actor_line(compiled: Compiled, actor: ActorId, temp_bytes: Mapping[int, int], compile_s: float) -> ActorLine:
    program = compiled.programs[actor]
    avals = program.avals
    peak = peak_plan(program)
    at = program.instructions[peak.instruction] if program.instructions else None
    return ActorLine(
        actor=actor,
        tasks=dict(Counter(i.label.split("(")[0] for i in program.instructions if isinstance(i, Run))),
        sent_bytes=sum(avals[i.buffer].size_bytes for i in program.instructions if isinstance(i, Send)),
        received_bytes=sum(avals[i.buffer].size_bytes for i in program.instructions if isinstance(i, Recv)),
        peak_bytes=peak.peak_bytes,
        peak_at=at.label if isinstance(at, Run) else type(at).__name__.lower(),
        temp_bytes=max(temp_bytes.values(), default=0),
        compile_s=compile_s,
    )


def _transfers(compiled: Compiled) -> tuple[TransferLine, ...]:
    """Transfers grouped by what they carry: the task that makes it and the value, over all microbatches."""
    graph = compiled.placed.graph
    maker = {
        v: (n.label if n.task is None else f"{n.task.ty}(stage {n.task.stage})") for n in graph.nodes for v in n.outputs
    }
    holders = {i.value: set(i.actors) for i in graph.inputs} | {v: {n.actor} for n in graph.nodes for v in n.outputs}
    uses: dict[int, set[ActorId]] = defaultdict(set)
    for n in graph.nodes:
        for v in n.inputs:
            uses[v].add(n.actor)
    for o in graph.outputs:
        uses[o.value].update(o.actors)
    lines: Counter[tuple[str, ActorId, ActorId, int]] = Counter()
    for v, actors in uses.items():
        aval = graph.values[v].aval
        what = f"{aval.dtype}{list(aval.shape)} of {maker.get(v, graph.values[v].label)}"
        for a in actors - holders[v]:
            lines[what, min(holders[v]), a, aval.size_bytes] += 1
    return tuple(TransferLine(what, s, d, size, n) for (what, s, d, size), n in sorted(lines.items()))


def _places(compiled: Compiled, which: str) -> tuple[PlaceLine, ...]:
    graph = compiled.placed.graph
    found: dict[int, PlaceLine] = {}
    entries = graph.inputs if which == "inputs" else graph.outputs
    for e in entries:
        index = getattr(e, "arg" if which == "inputs" else "result")
        aval = graph.values[e.value].aval
        label = graph.values[e.value].label if which == "inputs" else compiled.traced.result_name(index)
        old = found[index].actors if index in found else ()
        spec = f" {aval.spec}" if aval.spec else ""
        found[index] = PlaceLine(label, f"{aval.dtype}{list(aval.shape)}{spec}", tuple(sorted({*old, *e.actors})))
    return tuple(found[k] for k in sorted(found))
