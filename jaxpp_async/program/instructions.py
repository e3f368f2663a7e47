"""Define the values between a schedule and an actor: tasks, the task graph, a program's instructions.

A step becomes, in this order:

* `Task`s, the entries of a schedule;
* a `TaskGraph`: every task of every microbatch, placed on its actor, joined by values (single assignment);
* one `ActorProgram` an actor (see `actor_program`): a flat instruction stream over integer buffer slots.

A step has a hundred thousand values, and hardly any is ever looked at but for its type. So `ValueTable` keeps
them as columns, and makes a `Value` when it is asked for.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, overload

from jaxpp_async.base.frozen import frozen

ActorId: TypeAlias = int
ProcessId: TypeAlias = int
"""Processes are numbered over the mesh, those of actor 0 first; with one an actor it is its number."""

BufferId: TypeAlias = int
ValueId: TypeAlias = int
ExecutableId: TypeAlias = int
Tag: TypeAlias = int

TaskType: TypeAlias = Literal["fwd", "bwd", "bwd_input", "bwd_weight"]
TASK_TYPES: tuple[TaskType, ...] = ("fwd", "bwd", "bwd_input", "bwd_weight")

SpecEntry: TypeAlias = str | tuple[str, ...] | None
"""How one array dimension is split: by one mesh axis, by several, or not at all."""

CONTROLLER: ProcessId = -1
"""The controller's number as a peer of the data plane, where the others are processes."""


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """One entry of a schedule.

    Args:
        i: microbatch index.
        ty: `"fwd"`, `"bwd"`, or the halves of a split backward, `"bwd_input"` and `"bwd_weight"`.
        stage: stage index.

    Source: the JaxPP paper, section "Task Scheduling".
    """

    i: int
    ty: TaskType
    stage: int

    def __str__(self) -> str:
        return f"{self.ty}(stage {self.stage}, mb {self.i})"


_MICROBATCH = re.compile(r",? ?\bmb \d+")


def task_kind(label: str) -> str:
    """Strip the microbatch from the label of a task: `"fwd(stage 0)"`."""
    return _MICROBATCH.sub("", label).replace("()", "")


@dataclass(frozen=True, slots=True)
class Aval:
    """Shape, dtype and sharding of an array inside one actor.

    Args:
        shape: global shape, in elements.
        dtype: numpy or ml_dtypes name, such as `"float32"` or `"bfloat16"`. Keys stand here as their `uint32`
            data.
        spec: one entry a dimension, as in `jax.sharding.PartitionSpec`; missing trailing entries are None.
        unreduced: mesh axes over which every device holds a part of a sum that nobody has added up yet.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: tuple[SpecEntry, ...] = ()
    unreduced: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of one whole copy (replicas on an actor's devices are not counted)."""
        return math.prod(self.shape) * itemsize(self.dtype)


_ITEMSIZES = {"bool": 1, "bfloat16": 2, "int2": 1, "int4": 1, "uint2": 1, "uint4": 1}


@functools.cache  # bounded by the types there are
def itemsize(dtype: str) -> int:
    """Return the bytes of one element in host memory. Sub-byte types take a byte each, as in numpy."""
    if dtype in _ITEMSIZES:
        return _ITEMSIZES[dtype]
    if dtype.startswith(("float8_", "float4_", "float6_")):  # with the underscore: float64 is none of them
        return 1
    bits = "".join(c for c in dtype if c.isdigit())
    if not bits:
        raise ValueError(f"unknown dtype {dtype!r}")
    return int(bits) // 8


# ---------------------------------------------------------------- task graph


ValueKind: TypeAlias = Literal["input", "temp", "accumulator", "result"]


@frozen()
class Value:
    """One array of the step, assigned once.

    Args:
        aval: shape, dtype and sharding.
        label: what a user reads in reports, such as `"x@fwd(stage 0, mb 3)"` or `"state['w']"`.
        kind: `"input"` for a step argument, `"accumulator"` for a partial result carried through the loop,
            `"result"` for a stacked or concatenated one (it grows with the number of microbatches and is left
            out of peak bytes), `"temp"` for everything else.
    """

    aval: Aval
    label: str
    kind: ValueKind = "temp"


@frozen()
class Node:
    """One run of one executable on one actor.

    Args:
        label: such as `"fwd(stage 1, mb 3)"`, `"before(0)"`, `"after(1)"`, `"zeros(stage 1)"`.
        actor: where it runs.
        executable: index into the step's executables.
        inputs: values read, in the executable's argument order.
        outputs: values made, in the executable's result order.
        donatable: positions in `inputs` which the executable may alias with a result when nothing else needs
            the value afterwards. Lowering decides per executable and position; see `compiler.lowering`.
        task: the schedule entry, for nodes of a loop.
    """

    label: str
    actor: ActorId
    executable: ExecutableId
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    donatable: tuple[int, ...] = ()
    task: Task | None = None


@dataclass(frozen=True, slots=True)
class GraphInput:
    """A step argument, and every actor that holds it when the step starts; none: nobody uses it.

    Args:
        value: the value in the graph.
        arg: flat index of the argument.
        actors: its homes.
        donated: whether the step may overwrite it.
    """

    value: ValueId
    arg: int
    actors: tuple[ActorId, ...]
    donated: bool = False


@dataclass(frozen=True, slots=True)
class GraphOutput:
    """A step result, and every actor that holds it when the step ends.

    Args:
        value: the value in the graph.
        result: flat index of the result.
        actors: its homes.
    """

    value: ValueId
    result: int
    actors: tuple[ActorId, ...]


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """All tasks of one step, placed.

    `nodes` is in a topological order that, restricted to one actor, is that actor's order of execution. Every
    value is an input or an output of exactly one node; a value used or returned on another actor than it is
    made on is transferred there once. `values` may be any sequence, such as a `ValueTable`.
    """

    num_actors: int
    values: Sequence[Value]
    nodes: tuple[Node, ...]
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]


# ---------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True)
class Input:
    """Bind step argument `arg` to `buffer`. A donated argument belongs to the program, which deletes it."""

    buffer: BufferId
    arg: int
    aval: Aval
    donated: bool = False


@frozen()
class Run:
    """Call a compiled executable. `donated` are positions in `inputs` whose buffers the call consumes."""

    label: str
    executable: ExecutableId
    inputs: tuple[BufferId, ...]
    outputs: tuple[BufferId, ...]
    donated: tuple[int, ...] = ()


@frozen()
class Send:
    """Start a send as soon as the buffer is ready, without waiting.

    Tags count from zero over all programs of a step.
    """

    buffer: BufferId
    to_actor: ActorId
    tag: Tag


@frozen()
class Recv:
    """Post a receive; the buffer becomes ready when the data is in."""

    buffer: BufferId
    from_actor: ActorId
    tag: Tag
    aval: Aval


@frozen()
class Delete:
    """Free the buffer now or, while a send of it is under way, when that send completes."""

    buffer: BufferId


@dataclass(frozen=True, slots=True)
class Output:
    """Turn the buffer into step result `result`, which leaves the program.

    Only another `Output` may name the buffer afterwards.
    """

    buffer: BufferId
    result: int


Instruction: TypeAlias = Input | Run | Send | Recv | Delete | Output


def buffers_made(instruction: Instruction) -> tuple[BufferId, ...]:
    """Return the buffers that an instruction defines."""
    if isinstance(instruction, Run):
        return instruction.outputs
    return (instruction.buffer,) if isinstance(instruction, Input | Recv) else ()


def runs(instructions: Iterable[Instruction]) -> list[Run]:
    """Return the `Run`s among `instructions`, in order."""
    return [i for i in instructions if isinstance(i, Run)]


# ---------------------------------------------------------------- columns


class ValueTable(Sequence[Value]):
    """A sequence of values that is kept as columns, and makes a `Value` when it is asked for.

    Args:
        avals, kinds: a column each.
        label: row to label.
    """

    def __init__(
        self, avals: Sequence[Aval], kinds: Sequence[ValueKind], label: Callable[[ValueId], str]
    ) -> None:
        self.avals, self.kinds, self.label = avals, kinds, label

    def __len__(self) -> int:
        return len(self.avals)

    @overload
    def __getitem__(self, index: int) -> Value: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Value, ...]: ...
    def __getitem__(self, index: int | slice) -> Value | tuple[Value, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        row = range(len(self))[index]
        return Value(self.avals[row], self.label(row), self.kinds[row])

    def __iter__(self) -> Iterator[Value]:
        return map(Value, self.avals, map(self.label, range(len(self))), self.kinds)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ValueTable) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self.avals))

    def with_avals(self, avals: Sequence[Aval]) -> ValueTable:
        """Return the same values with other types."""
        return ValueTable(avals, self.kinds, self.label)


def avals_of(values: Sequence[Value]) -> Sequence[Aval]:
    """Return the type of each value."""
    return values.avals if isinstance(values, ValueTable) else [v.aval for v in values]


def kinds_of(values: Sequence[Value]) -> Sequence[ValueKind]:
    """Return the kind of each value."""
    return values.kinds if isinstance(values, ValueTable) else [v.kind for v in values]
