"""Make the report that tells a user what a compiled step does, what it costs, and why.

`make` computes a `CompileReport` from the compiler's result; docs/placement.md explains an example line by
line. `report_notes` logs what a user should know about a step that was compiled without an error. All numbers
follow from compiling; no step is run to measure anything.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from jaxpp_async.base.install_hints import page
from jaxpp_async.compiler.continued_arguments import changed_arguments
from jaxpp_async.compiler.describe import Explainer, join_names
from jaxpp_async.compiler.pipeline import Compiled, CompilePlan, StepRequest
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.buffer_table import peak_plan
from jaxpp_async.program.instructions import (
    ActorId,
    Aval,
    GraphOutput,
    Input,
    Recv,
    Run,
    Send,
    runs,
)
from jaxpp_async.program.leaf_parts import Parts, leaf_names, part_positions
from jaxpp_async.program.task_label import TaskLabel
from jaxpp_async.schedules.validate import describe_schedule

_LOG = logging.getLogger("jaxpp_async")

_INDICES = "microbatch indices"

_MOST_PARTS = 8
"""The most parts of a leaf that the text of a report shows; the data has all."""

_MOST_REASONS = 4
"""The most different reasons for parts of one leaf that the text of a report shows."""

_TASKS = re.compile(r"\b\w+\(stage \d+\)(?:, \w+\(stage \d+\))*")
"""Tasks of stages, one after the other, in the text of a reason."""

_NOTES = {
    "start": "start: makes the zeros that a stage's sums begin with, once a step.",
    "outer": "outer: what the step does outside its loops; one task an actor and exchange of values between "
    "actors.",
}


@dataclass(frozen=True)
class CompileReport:
    """The report of what a compiled step does and costs, which prints as text; see `CompiledStep.report`.

    Attributes:
        actors: one line per actor, with the actor's tasks, transfers and memory.
        transfers: one line per kind of array that one actor sends to another.
        inputs: one line per argument leaf, with the actors that hold the leaf.
        outputs: one line per result leaf, with the actors that hold the leaf.
        notes: lines of text that explain kinds of tasks and give the names of stages.
    """

    actors: tuple[ActorLine, ...]
    transfers: tuple[TransferLine, ...]
    inputs: tuple[PlaceLine, ...]
    outputs: tuple[PlaceLine, ...]
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        parts = [_actor_table(self.actors), *self.notes, ""]
        if self.transfers:
            parts += ["transfers in one step", _transfer_table(self.transfers), ""]
        else:
            parts += ["no transfers between actors", ""]
        asked = [p for p in self.inputs if not p.name.startswith(_INDICES)]  # indices are tiny
        for title, places in (("arguments", asked), ("results", self.outputs)):
            parts += [title, _place_table(places), ""]
        return "\n".join(parts[:-1])


@dataclass(frozen=True, slots=True)
class TransferLine:
    """One line of a report: the arrays of one kind that are sent from one actor to another in a step.

    Args:
        what: text that gives the type of the arrays and says where they come from: the task that makes them,
            or the operation and the line of the user's code.
        from_actor: the actor that sends the arrays.
        to_actor: the actor that receives the arrays.
        size_bytes: size of one array.
        count: number of arrays in one step.
        when: the part of the step in which they are sent: `"in the loop"`, `"before the loop"` or `"after the
            loop"`.
        in_loop: whether they are sent in a loop over microbatches.
        per_microbatch: how many of these arrays each microbatch of the loop sends; 0 outside the loops, and
            where some microbatches send more of them than others do.
        why: the reason for the transfer: text that says what the receiving actor needs the arrays for.
    """

    what: str
    from_actor: ActorId
    to_actor: ActorId
    size_bytes: int
    count: int
    when: str = ""
    in_loop: bool = False
    per_microbatch: int = 0
    why: str = ""

    @property
    def total_bytes(self) -> int:
        """The size in bytes of all arrays of this line together, in one step."""
        return self.size_bytes * self.count


@dataclass(frozen=True, slots=True)
class ActorLine:
    """One line of a report: one actor's tasks, transfers, memory and compile time in a step.

    Args:
        actor: the actor's id.
        tasks: number of executions by kind of task, such as `{"fwd": 8, "bwd": 8}`.
        sent_bytes: bytes that the actor sends to other actors in one step.
        received_bytes: bytes that the actor receives from other actors in one step; values from the
            controller are not counted.
        peak_bytes: the most bytes of buffers that the actor holds at one time during the step, computed from
            the actor's program (see `docs/memory.md`).
        peak_at: text that names the task that runs, or the buffer that arrives, when that peak is reached.
        temp_bytes: the most bytes that one executable needs for temporaries, as XLA reports after compiling.
        compile_s: seconds that the actor took to compile.
        argument_bytes: bytes of the arguments that the actor holds when the step starts.
    """

    actor: ActorId
    tasks: Mapping[str, int]
    sent_bytes: int
    received_bytes: int
    peak_bytes: int
    peak_at: str
    temp_bytes: int
    compile_s: float
    argument_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PlaceLine:
    """One line of a report: the actors that hold one argument leaf or result leaf.

    Args:
        name: the leaf's name, such as `"state['w']"`.
        type: the leaf's dtype, shape and sharding, as text.
        actors: the actors that hold the leaf or a part of it. Unless it is divided, each of them holds the
            whole leaf.
        size_bytes: bytes of the whole leaf.
        why: the reason why these actors hold the leaf, such as the tasks that use it.
        parts: the line of each part, if the leaf stacks layers and is divided; otherwise empty.
    """

    name: str
    type: str
    actors: tuple[ActorId, ...]
    size_bytes: int = 0
    why: str = ""
    parts: tuple[PlaceLine, ...] = ()

    def bytes_on(self, actor: ActorId) -> int:
        """Return how many bytes of the leaf an actor holds."""
        held = self.parts or (self,)
        return sum(line.size_bytes for line in held if actor in line.actors)


# ---------------------------------------------------------------- numbers


def make(
    compiled: Compiled | CompilePlan,
    temp_bytes: Mapping[ActorId, Mapping[int, int]],
    compile_s: Mapping[ActorId, float],
) -> CompileReport:
    """Return the report of a compiled step.

    Args:
        compiled: the compiler's result.
        temp_bytes: for each actor, the bytes of XLA's temporaries for each executable, by its index.
        compile_s: for each actor, the seconds that compiling took.
    """
    explainer = Explainer(compiled.traced, compiled.placed, compiled.continues)
    actors = tuple(
        _actor_line(compiled, a, temp_bytes.get(a, {}), compile_s.get(a, 0.0))
        for a in range(len(compiled.programs))
    )
    kinds = {kind for a in actors for kind in a.tasks}
    return CompileReport(
        actors=actors,
        transfers=_transfers(compiled, explainer),
        inputs=_inputs(compiled, explainer),
        outputs=_outputs(compiled, explainer),
        notes=(
            *(note for kind, note in _NOTES.items() if kind in kinds),
            *(f"schedule: {text}." for text in schedules_in_use(compiled)),
            *_stage_names(compiled),
            *_kept_whole(compiled),
        ),
    )


def why_taken(compiled: Compiled, name: str) -> str:
    """Return text that says why the actors that use an argument of a step need it.

    Args:
        compiled: the compiled step.
        name: the argument's name.
    """
    graph = compiled.placed.graph
    found = next(i for i in graph.inputs if graph.values[i.value].label == name)
    return Explainer(compiled.traced, compiled.placed, compiled.continues).why_input(
        found.value, found.actors
    )


def schedules_in_use(compiled: CompilePlan) -> list[str]:
    """Return the schedules of a step's loops as text, each once."""
    loops = [scheduled.staged.loop for scheduled in compiled.placed.loops.values()]
    return list(dict.fromkeys(describe_schedule(loop.schedule) for loop in loops))


def _kept_whole(compiled: Compiled | CompilePlan) -> list[str]:
    """Return a line for each array that stacks layers of several stages and is not divided between them."""
    traced = compiled.traced
    if not traced.kept_whole:
        return []
    graph, lines = compiled.placed.graph, list[str]()
    positions = part_positions(traced.argument_parts or (None,) * len(traced.arg_names))
    for kept in traced.kept_whole:
        if kept.leaf is None:
            if graph.num_actors < 2:
                continue
            name, where = f"{_type(kept.aval)}, which the step computes,", "is gathered on one actor"
        else:
            (arg,) = positions[kept.leaf]
            given = next(i for i in graph.inputs if i.arg == arg)
            if len(given.actors) < 2:
                continue
            name, where = traced.arg_names[arg], f"lives whole on actors {', '.join(map(str, given.actors))}"
        lines.append(
            f"{name} stacks layers of several stages and {where}, {kept.aval.size_bytes} B, since "
            f"{kept.why}; {kept.instead}; see {page('placement.md')}."
        )
    return list(dict.fromkeys(lines))


def _stage_names(compiled: Compiled | CompilePlan) -> list[str]:
    """Return lines of text about the stage boundaries of each loop whose marks are named or were chosen.

    These are the names from `pipeline_yield`, or the marks that the schedule's `stages` named.
    """
    lines = []
    for loop in compiled.placed.loops.values():
        if (cut := loop.staged.loop.cut) is not None:
            lines.append(f"stages of the loop at {loop.staged.loop.line}: {cut.stage_ends}.")
            continue
        named = [f"{k} at {name!r}" for k, name in enumerate(loop.staged.stage_names) if name]
        if named:
            lines.append(f"stages of the loop at {loop.staged.loop.line} end: {', '.join(named)}.")
    return lines


def _actor_line(
    compiled: Compiled | CompilePlan, actor: ActorId, temp_bytes: Mapping[int, int], compile_s: float
) -> ActorLine:
    program = compiled.programs[actor]
    avals, graph = program.avals, compiled.placed.graph
    peak = peak_plan(program)
    return ActorLine(
        actor=actor,
        tasks=dict(
            Counter(TaskLabel.parse(i.label).type for i in program.instructions if isinstance(i, Run))
        ),
        sent_bytes=sum(avals[i.buffer].size_bytes for i in program.instructions if isinstance(i, Send)),
        received_bytes=sum(avals[i.buffer].size_bytes for i in program.instructions if isinstance(i, Recv)),
        peak_bytes=peak.peak_bytes,
        peak_at=_peak_at(program, peak.instruction),
        temp_bytes=max(temp_bytes.values(), default=0),
        compile_s=compile_s,
        argument_bytes=sum(graph.values[i.value].aval.size_bytes for i in graph.inputs if actor in i.actors),
    )


def _peak_at(program: ActorProgram, index: int) -> str:
    """Return text that says what an actor is doing when its memory use is at its peak.

    Args:
        program: the actor's program.
        index: the index of the instruction at which the peak is reached.

    Returns:
        The name of the task, if the instruction runs one; if a buffer arrives, the buffer and the first task
        that reads it; otherwise the type of the instruction. For an empty program, `"none"`.
    """
    if not program.instructions:
        return "none"
    at = program.instructions[index]
    if isinstance(at, Run):
        return at.label
    if not isinstance(at, Recv | Input):
        return type(at).__name__.lower()
    what = f"recv tag {at.tag}" if isinstance(at, Recv) else f"input b{at.buffer}"
    later = (i for i in program.instructions[index:] if isinstance(i, Run) and at.buffer in i.inputs)
    reader = next(later, None)
    return what if reader is None else f"{what} for {reader.label}"


def _transfers(compiled: Compiled | CompilePlan, explainer: Explainer) -> tuple[TransferLine, ...]:
    """Return one report line per kind of transfer between two actors, with the count over all microbatches.

    Transfers in the loops come first, and larger totals before smaller ones.
    """
    values = compiled.placed.graph.values
    counts = Counter(
        (c.when, c.from_actor, c.to_actor, values[c.value].aval.size_bytes, c.what, c.why)
        for c in explainer.crossings()
    )
    lines = []
    for (when, source, to, size, what, why), n in counts.items():
        in_loop = explainer.is_in_loop(when)
        each, rest = divmod(n, explainer.num_microbatches)
        per_microbatch = each if in_loop and not rest else 0
        lines.append(TransferLine(what, source, to, size, n, when, in_loop, per_microbatch, why))
    lines.sort(
        key=lambda t: (
            not t.in_loop,
            -t.per_microbatch,
            -t.total_bytes,
            t.what,
            t.from_actor,
            t.to_actor,
            t.why,
        )
    )
    return tuple(lines)


def _type(aval: Aval) -> str:
    spec = f" {aval.spec}" if aval.spec else ""
    return f"{aval.dtype}{list(aval.shape)}{spec}"


def _inputs(compiled: Compiled | CompilePlan, explainer: Explainer) -> tuple[PlaceLine, ...]:
    """Return one report line per argument and captured array, and one for all microbatch indices together.

    The microbatch indices are arrays that tell each microbatch its number; they stay on the actors between
    steps.
    """
    graph, count, traced = compiled.placed.graph, compiled.placed.num_indices, compiled.traced
    lines = []
    inputs = sorted(graph.inputs, key=lambda i: i.arg)
    for i in inputs[: len(inputs) - count]:
        value = graph.values[i.value]
        why = explainer.why_input(i.value, i.actors)
        lines.append(PlaceLine(value.label, _type(value.aval), i.actors, value.aval.size_bytes, why))
    avals = [graph.values[i.value].aval for i in inputs]
    lines = _by_leaf(lines, avals, len(traced.arg_names), traced.argument_parts)
    if count:
        actors, size = inputs[-1].actors, graph.values[inputs[-1].value].aval.size_bytes
        name, why = f"{_INDICES} 0 to {count - 1}", "put there once, and kept"
        lines.append(PlaceLine(name, f"{count} x int32[]", actors, count * size, why))
    return tuple(lines)


def _outputs(compiled: Compiled | CompilePlan, explainer: Explainer) -> tuple[PlaceLine, ...]:
    graph = compiled.placed.graph
    found: dict[int, PlaceLine] = {}
    avals: dict[int, Aval] = {}
    values = {compiled.placed.value_ids[i.value]: i.value for i in graph.inputs}
    back = [GraphOutput(values[v], k, ()) for k, v in compiled.placed.placement.handed_back.items()]
    for o in (*graph.outputs, *back):
        value, name = graph.values[o.value], compiled.traced.result_name(o.result)
        actors = {*o.actors, *(found[o.result].actors if o.result in found else ())}
        why = explainer.why_result(o.result, o.value)
        avals[o.result] = value.aval
        found[o.result] = PlaceLine(
            name, _type(value.aval), tuple(sorted(actors)), value.aval.size_bytes, why
        )
    traced, order = compiled.traced, sorted(found)
    lines = [found[k] for k in order]
    return tuple(_by_leaf(lines, [avals[k] for k in order], len(traced.out_names), traced.result_parts))


def _by_leaf(
    lines: list[PlaceLine], avals: Sequence[Aval], count: int, leaves: Sequence[Parts | None]
) -> list[PlaceLine]:
    """Return the lines of a report with one line in place of those of a divided leaf's parts.

    Args:
        lines: one line per part of a divided leaf, and one per other array.
        avals: the aval of each line's array.
        count: the number of leading lines that are of leaves.
        leaves: the parts of each leaf, or None; empty if no leaf is divided.
    """
    if not leaves:
        return lines
    names = leaf_names([line.name for line in lines[:count]], leaves)
    made = []
    for name, parts, positions in zip(names, leaves, part_positions(leaves), strict=True):
        if parts is None:
            made.append(lines[positions[0]])
            continue
        first = avals[positions[0]]
        whole = structs.replace(first, shape=parts.whole_shape(first.shape))
        of_parts = [lines[k] for k in positions]
        together = _join_neighbours(name, whole, parts, of_parts)
        made.append(
            PlaceLine(
                name,
                _type(whole),
                tuple(sorted({actor for line in of_parts for actor in line.actors})),
                sum(line.size_bytes for line in of_parts),
                _why_of_parts(of_parts, parts),
                together if len(together) > 1 else (),
            )
        )
    return [*made, *lines[count:]]


def _join_neighbours(
    name: str, whole: Aval, parts: Parts, lines: Sequence[PlaceLine]
) -> tuple[PlaceLine, ...]:
    """Return the lines of a leaf's parts, with one line for neighbours that lie on the same actors.

    Args:
        name: the name of the leaf.
        whole: the aval of the leaf.
        parts: the parts of the leaf.
        lines: the line of each part.
    """
    joined, made = parts.joined([line.actors for line in lines]), list[PlaceLine]()
    shapes = joined.shapes(whole.shape)
    for (start, stop), rows, shape in zip(joined.ranges, joined.names(name), shapes, strict=True):
        first, last = parts.bounds.index(start), parts.bounds.index(stop)
        own = lines[first:last]
        why = _why_of_parts(own, Parts(parts.axis, parts.bounds[first : last + 1]))
        size = sum(line.size_bytes for line in own)
        made.append(PlaceLine(rows, _type(structs.replace(whole, shape=shape)), own[0].actors, size, why))
    return tuple(made)


def _why_of_parts(lines: Sequence[PlaceLine], parts: Parts) -> str:
    """Return the reason why a divided leaf lies where it lies, once for all parts that have the same."""
    rows = parts.names("")
    # A part of a result continues the part of the argument that has the same rows; the leaf says it once.
    reasons = [line.why.replace(row, "") for line, row in zip(lines, rows, strict=True)]
    if len(set(reasons)) == 1:
        return reasons[0]
    of_kind: dict[str, list[int]] = {}
    for k, reason in enumerate(reasons):
        of_kind.setdefault(_without_stage(reason), []).append(k)
    if len(of_kind) == 1:
        return f"each {next(iter(of_kind))}"
    texts = [
        f"{', '.join(_few(_ranges(parts, ks), _MOST_REASONS))} "
        + (f"each {kind}" if len({reasons[k] for k in ks}) > 1 else reasons[ks[0]])
        for kind, ks in of_kind.items()
    ]
    return "; ".join(_few(texts, _MOST_REASONS))


def _ranges(parts: Parts, positions: Sequence[int]) -> list[str]:
    """Return the rows of some parts as text, neighbours as one range."""
    joined = parts.joined([k in positions for k in range(parts.count)])
    pairs = zip(joined.ranges, joined.names(""), strict=True)
    return [rows for (start, _), rows in pairs if parts.bounds.index(start) in positions]


def _without_stage(reason: str) -> str:
    """Return the reason for a part with "its own stage" for its tasks, if they are all of one stage.

    So the reasons of parts that lie with their stages are the same text, though forward and backward are two
    tasks of one stage and one task of another.
    """
    if len(set(re.findall(r"\(stage (\d+)\)", reason))) != 1:
        return reason

    def directions(tasks: re.Match[str]) -> str:
        types = {text.partition("(")[0] for text in tasks[0].split(", ")}
        forward, backward = (any(word in t.split("_") for t in types) for word in ("fwd", "bwd"))
        if any(not t.startswith(("fwd", "bwd")) for t in types):
            return tasks[0]
        both = " and ".join(["forward"] * forward + ["backward"] * backward)
        return f"its own stage ({both})"

    return _TASKS.sub(directions, reason)


def _few(texts: Sequence[str], most: int) -> list[str]:
    """Return at most so many texts: if there are more, the first and the last, and how many are between."""
    if len(texts) <= most:
        return list(texts)
    first, last = most // 2, most - most // 2 - 1
    return [*texts[:first], f"... {len(texts) - first - last} more ...", *texts[len(texts) - last :]]


# ---------------------------------------------------------------- text


def _table(columns: Sequence[tuple[str, str, Sequence[object]]]) -> str:
    """Return a table as text with aligned columns.

    Args:
        columns: for each column a tuple: the title; `"<"` to align the column left or `">"` to align it
            right; and one value per row.
    """
    aligned = []
    for title, side, values in columns:
        cells = [title, *map(str, values)]
        width = max(map(len, cells))
        aligned.append([f"{cell:{side}{width}}" for cell in cells])
    return "\n".join("  ".join(row).rstrip() for row in zip(*aligned, strict=True))


def _actor_table(actors: Sequence[ActorLine]) -> str:
    tasks = [" ".join(f"{n} {kind}" for kind, n in a.tasks.items()) for a in actors]
    return _table(
        [
            ("actor", ">", [a.actor for a in actors]),
            ("tasks", "<", tasks),
            ("arguments B", ">", [a.argument_bytes for a in actors]),
            ("sent B", ">", [a.sent_bytes for a in actors]),
            ("received B", ">", [a.received_bytes for a in actors]),
            ("peak B", ">", [a.peak_bytes for a in actors]),
            ("peak at", "<", [a.peak_at for a in actors]),
            ("XLA temp B", ">", [a.temp_bytes for a in actors]),
            ("compiled in", ">", [f"{a.compile_s:.2f} s" for a in actors]),
        ]
    )


def _transfer_table(transfers: Sequence[TransferLine]) -> str:
    once = ["once" if t.count == 1 else f"{t.count} times" for t in transfers]
    often = [
        f"{t.per_microbatch} a microbatch" if t.per_microbatch else text
        for t, text in zip(transfers, once, strict=True)
    ]
    return _table(
        [
            ("when", "<", [t.when for t in transfers]),
            ("actors", "<", [f"{t.from_actor} -> {t.to_actor}" for t in transfers]),
            ("count x B", ">", [f"{t.count} x {t.size_bytes}" for t in transfers]),
            ("total B", ">", [t.total_bytes for t in transfers]),
            ("how often", "<", often),
            ("what", "<", [t.what for t in transfers]),
            ("why", "<", [t.why for t in transfers]),
        ]
    )


def _size_text(place: PlaceLine) -> str:
    if place.parts:
        return f"{place.size_bytes} in parts"
    return f"{place.size_bytes} each" if len(place.actors) > 1 else str(place.size_bytes)


def _actors_text(place: PlaceLine) -> str:
    actors = [", ".join(map(str, line.actors)) for line in place.parts or (place,)]
    rows = [line.name.removeprefix(place.name) for line in place.parts]
    if not rows:
        return actors[0]
    return "; ".join(_few([f"{row} {on}" for row, on in zip(rows, actors, strict=True)], _MOST_PARTS))


def _place_table(places: Sequence[PlaceLine]) -> str:
    return _table(
        [
            ("name", "<", [p.name for p in places]),
            ("type", "<", [p.type for p in places]),
            ("B", ">", [_size_text(p) for p in places]),
            ("actors", "<", [_actors_text(p) for p in places]),
            ("why", "<", [p.why for p in places]),
        ]
    )


# ---------------------------------------------------------------- notes in the log


def report_notes(name: str, line: str, request: StepRequest, compiled: Compiled) -> None:
    """Log information and warnings for the user about a step that was compiled without an error.

    The log gives the number of microbatches of each loop, and names the actors that have nothing to do. A
    Python warning names the donated arguments whose memory no result can reuse.

    Args:
        name: name of the step.
        line: `file:line` of the call of `mesh.distributed`, which the warning gives as its source.
        request: the compiler's input.
        compiled: the compiler's result.
    """
    loops = [scheduled.staged.loop for scheduled in compiled.placed.loops.values()]
    for loop in loops:
        count = loop.num_microbatches
        _LOG.info(
            "step %r: %d microbatch%s of %s (%s)",
            name,
            count,
            "es" * (count != 1),
            join_names(loop.leaves, 8),
            loop.line,
        )
        if loop.cut is not None:
            marks = f"mark{'s' * (len(loop.cut.boundaries) != 1)}"
            _LOG.info("step %r: stages end behind %s %s (%s)", name, marks, loop.cut, loop.line)
    idle = [program.actor for program in compiled.programs if not runs(program.instructions)]
    if loops and idle:
        _LOG.warning(
            "step %r leaves actors %s of %d idle: its schedule has fewer actors than the mesh; make more "
            "stages, or a mesh of as many actors as the schedule uses",
            name,
            idle,
            request.num_actors,
        )
    for text in _kept_whole(compiled):
        _LOG.warning("step %r: %s", name, text)
    if changed := changed_arguments(compiled.traced, request.donated, compiled.continues):
        file, _, number = line.rpartition(":")
        warnings.warn_explicit(
            f"Some donated buffers were not usable: step {name!r} returns {join_names(changed, 8)}; a result "
            "can take an argument's memory only with its shape and dtype: return it as it came, or do not "
            "donate it",
            UserWarning,
            file or line,
            int(number) if number.isdigit() else 0,
        )
