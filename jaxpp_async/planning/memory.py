"""Compute the bytes of memory that each device needs for a compiled step, kind by kind.

A row is exact if it follows from the program alone, measured if an actor's compiler reported it, and assumed
otherwise. The sum of an actor's rows is the most that a device needs, since the rows may reach their largest
values at different times. A device holds the part of an array that the array's sharding gives it.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from msgspec import structs

from jaxpp_async.compiler.pipeline import CompilePlan
from jaxpp_async.planning.machine import Machine
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.buffer_table import buffer_sizes, peak_plan
from jaxpp_async.program.instructions import (
    ActorId,
    Aval,
    BufferId,
    Delete,
    Input,
    Output,
    Recv,
    Run,
    Send,
    buffers_made,
    runs,
)
from jaxpp_async.program.work import TaskWork

Source = Literal["exact", "measured", "assumed"]
"""How the number in a row was found."""

ARGUMENT, BUFFER_TABLE, RESULTS, TEMPORARIES = "argument ", "buffer table", "results", "temporaries of a task"
SENDS, RECEIVE_BUFFERS = "sends under way", "unused receive buffers"


class StepWithWork(Protocol):
    """A compiled step, such as a `CompiledStep` or the result of `compile_for`."""

    @property
    def compiled(self) -> CompilePlan: ...

    @property
    def works(self) -> Sequence[TaskWork]: ...

    @property
    def temp_bytes(self) -> Mapping[ActorId, Mapping[int, int]]: ...


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """The bytes of one kind that each device of an actor needs.

    Args:
        what: the kind of memory, such as `"argument state"` or `"buffer table"`.
        size_bytes: the bytes on each device.
        source: how the number was found.
        note: text that says what the number is made of.
    """

    what: str
    size_bytes: int
    source: Source
    note: str


@dataclass(frozen=True)
class ActorMemory:
    """The memory that a step needs on each device of one actor.

    Args:
        actor: the actor's id.
        rows: the bytes of each kind.
        peak_bytes: the most bytes of the actor's buffer table, where a sharded array counts as one whole
            array. The actor measures the same number (`StepStats.peak_bytes`).
        limit_bytes: the bytes of memory that each device has; None if unknown.
    """

    actor: ActorId
    rows: tuple[MemoryRow, ...]
    peak_bytes: int
    limit_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """The most bytes that each device needs."""
        return sum(row.size_bytes for row in self.rows)

    @property
    def batch_bytes(self) -> int:
        """The bytes that grow with the size of a microbatch, at most: all but arguments and results."""
        kinds = (BUFFER_TABLE, TEMPORARIES, SENDS, RECEIVE_BUFFERS)
        return sum(row.size_bytes for row in self.rows if row.what in kinds)

    @property
    def fits(self) -> bool | None:
        """Whether the step fits into each device's memory; None if the memory is unknown."""
        return None if self.limit_bytes is None else self.total_bytes <= self.limit_bytes

    def row(self, what: str) -> MemoryRow:
        """Return the row of a kind; a row of 0 bytes if the actor needs no memory of this kind."""
        return next((r for r in self.rows if r.what == what), MemoryRow(what, 0, "exact", ""))

    def __str__(self) -> str:
        width = max(len(row.what) for row in self.rows)
        lines = [f"actor {self.actor}, each device:"]
        for row in self.rows:
            lines.append(f"  {row.what:{width}}  {row.size_bytes:>15,} B  {row.source}: {row.note}")
        limit = "" if self.limit_bytes is None else f" of {self.limit_bytes:,} B"
        verdict = "" if self.fits is not False else ", which does not fit"
        return "\n".join([*lines, f"  {'at most':{width}}  {self.total_bytes:>15,} B{limit}{verdict}"])


def memory_needs(step: StepWithWork, machine: Machine | None = None) -> tuple[ActorMemory, ...]:
    """Return the memory that a compiled step needs on each device, for each actor.

    Args:
        step: the compiled step. The temporaries of a step that actors have compiled are measured; those of a
            step that was compiled for a machine are estimated from the work of its tasks.
        machine: the machine, which says how much memory a device has; None if that is not asked.
    """
    limit = None if machine is None else machine.memory
    return tuple(_actor_memory(step, program, limit) for program in step.compiled.programs)


def _actor_memory(step: StepWithWork, program: ActorProgram, limit: int | None) -> ActorMemory:
    compiled, actor = step.compiled, program.actor
    local = _on_device(program, compiled.target.axes)
    besides = _without_updates(local)
    peak = peak_plan(besides).peak_bytes
    rows = [
        MemoryRow(
            f"{ARGUMENT}{name}", size, "exact", f"{count} array{'s' * (count != 1)}, held before the step"
        )
        for name, (count, size) in _arguments(compiled, actor).items()
    ]
    rows += [
        MemoryRow(
            RESULTS, _result_bytes(local), "exact", "new arrays, besides the memory of donated arguments"
        ),
        MemoryRow(
            BUFFER_TABLE,
            peak,
            "exact",
            "the most held between tasks at one time, besides the memory of donated arguments",
        ),
        _temporaries(step, local),
        MemoryRow(SENDS, *_sends(local)),
        MemoryRow(
            RECEIVE_BUFFERS,
            _receive_bytes(besides, peak),
            "exact",
            "memory for later messages, kept between steps",
        ),
    ]
    return ActorMemory(actor, tuple(rows), peak_plan(program).peak_bytes, limit)


def device_aval(aval: Aval, axes: Mapping[str, int]) -> Aval:
    """Return the type of an array with the shape of the part that one device holds.

    Args:
        aval: the array.
        axes: the number of devices along each mesh axis.
    """
    shape = list(aval.shape)
    for dim, entry in enumerate(aval.spec):
        names = (entry,) if isinstance(entry, str) else entry or ()
        shape[dim] = -(-shape[dim] // math.prod(axes[name] for name in names))
    return structs.replace(aval, shape=tuple(shape))


def _on_device(program: ActorProgram, axes: Mapping[str, int]) -> ActorProgram:
    """Return a program whose arrays are the parts of one device."""
    known: dict[int, Aval] = {}  # equal avals are mostly the same object
    avals = []
    for aval in program.avals:
        if id(aval) not in known:
            known[id(aval)] = device_aval(aval, axes)
        avals.append(known[id(aval)])
    return structs.replace(program, avals=tuple(avals))


def _without_updates(program: ActorProgram) -> ActorProgram:
    """Return a program in which results that are made in the memory of donated arguments do not count.

    A result takes the memory of an argument of the same type that the same task donates. The argument's bytes
    are those of the step's arguments already.
    """
    arguments = {i.buffer for i in program.instructions if isinstance(i, Input)}
    updates: set[BufferId] = set()
    for run in runs(program.instructions):
        free = Counter(program.avals[b] for b in (run.inputs[p] for p in run.donated) if b in arguments)
        for b in run.outputs:
            if b not in program.uncounted and free[program.avals[b]]:
                free[program.avals[b]] -= 1
                updates.add(b)
    return structs.replace(program, uncounted=program.uncounted | updates)


_TOP = re.compile(r"[\[.]")


def _arguments(compiled: CompilePlan, actor: ActorId) -> dict[str, tuple[int, int]]:
    """Return the number of arrays, and the bytes on a device of an actor, of each argument of the step."""
    graph, axes, count = compiled.placed.graph, compiled.target.axes, len(compiled.traced.arg_of)
    found: dict[str, tuple[int, int]] = {}
    for i in sorted(graph.inputs, key=lambda i: i.arg):
        if actor not in i.actors:
            continue
        value = graph.values[i.value]
        name = _TOP.split(value.label)[0] if i.arg < count else "of the step itself"
        arrays, size = found.get(name, (0, 0))
        found[name] = arrays + 1, size + device_aval(value.aval, axes).size_bytes
    return found


def _result_bytes(program: ActorProgram) -> int:
    """Return the most bytes of results that a device holds besides the arguments, at one time.

    Results that the program makes in the memory of donated arguments do not count.
    """
    sizes = [aval.size_bytes for aval in program.avals]
    arguments: dict[BufferId, bool] = {}  # whether the argument is donated
    held: set[BufferId] = set()
    now = most = 0
    for instruction in program.instructions:
        freed: Sequence[BufferId] = ()
        if isinstance(instruction, Run):
            freed = [instruction.inputs[p] for p in instruction.donated]
        elif isinstance(instruction, Delete):
            freed = (instruction.buffer,)
        for b in freed:
            if arguments.pop(b, False) or b in held:
                now -= sizes[b]
            held.discard(b)
        made: Sequence[BufferId] = ()
        if isinstance(instruction, Input):
            arguments[instruction.buffer] = instruction.donated
        elif isinstance(instruction, Output):
            made = (instruction.buffer,) if instruction.buffer not in arguments else ()
        else:
            made = [b for b in buffers_made(instruction) if b in program.uncounted]
        for b in made:
            if b not in held:
                held.add(b)
                now += sizes[b]
        most = max(most, now)
    return most


def _temporaries(step: StepWithWork, program: ActorProgram) -> MemoryRow:
    measured = step.temp_bytes.get(program.actor)
    if measured is not None:
        note = "the largest of any task, as XLA reported when it compiled"
        return MemoryRow(TEMPORARIES, max(measured.values(), default=0), "measured", note)
    largest = max((step.works[run.executable].temp_bytes for run in runs(program.instructions)), default=0.0)
    note = (
        "the most that is live at one time in any task, in program order, with elementwise operations fused"
    )
    return MemoryRow(TEMPORARIES, math.ceil(largest), "assumed", note)


def _sends(program: ActorProgram) -> tuple[int, Source, str]:
    """Return the bytes of deleted buffers that sends still read, how that was found, and a note."""
    largest: dict[ActorId, int] = defaultdict(int)
    for i in program.instructions:
        if isinstance(i, Send):
            largest[i.to_actor] = max(largest[i.to_actor], program.avals[i.buffer].size_bytes)
    return (
        sum(largest.values()),
        "assumed",
        "one array to each other actor is sent after the program deleted it",
    )


def _receive_bytes(program: ActorProgram, peak: int) -> int:
    """Return the most bytes of receive buffers that lie unused, beyond the peak of the buffer table.

    An actor keeps as many buffers for each type of array as its program uses at one time. A buffer in use is
    a part of the buffer table.

    Args:
        program: a program in which updates of donated arguments do not count.
        peak: the peak of its buffer table.
    """
    sizes = buffer_sizes(program)
    received: dict[BufferId, Aval] = {}
    now, most = Counter[Aval](), Counter[Aval]()
    table: dict[BufferId, int] = {}
    others = highest = 0
    for instruction in program.instructions:
        if isinstance(instruction, Run):
            freed: Sequence[BufferId] = [instruction.inputs[p] for p in instruction.donated]
        else:
            freed = (instruction.buffer,) if isinstance(instruction, Delete | Output) else ()
        for b in freed:
            if b in received:
                now[received.pop(b)] -= 1
            others -= table.pop(b, 0)
        if isinstance(instruction, Recv):
            aval = received[instruction.buffer] = program.avals[instruction.buffer]
            now[aval] += 1
            most[aval] = max(most[aval], now[aval])
        else:
            for b in buffers_made(instruction):
                if b not in program.uncounted:
                    table[b] = sizes[b]
                    others += sizes[b]
        highest = max(highest, others)
    kept = sum(aval.size_bytes * count for aval, count in most.items())
    return max(0, highest + kept - peak)
