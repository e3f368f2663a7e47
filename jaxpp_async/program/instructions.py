"""Define the data structures between a schedule and an actor: tasks, the task graph, program instructions.

The compiler turns a step into these, in this order:

* `Task`s, the entries of a schedule;
* a `TaskGraph`: every task of every microbatch, placed on its actor, and the arrays that connect the tasks;
* one `ActorProgram` per actor (see `actor_program`): a flat instruction stream over integer buffer slots.

A step has a hundred thousand arrays (values), and of nearly all of them only the type is ever read. So
`ValueTable` stores values as columns, and makes a `Value` object only when one is read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, overload

import msgspec

from jaxpp_async.program.task_label import write_label

ActorId: TypeAlias = int
ProcessId: TypeAlias = int
"""The number of a process in the mesh. The processes of actor 0 come first; if each actor has one process,
the number of a process is that of its actor."""

BufferId: TypeAlias = int
ValueId: TypeAlias = int
ExecutableId: TypeAlias = int
Tag: TypeAlias = int

TaskType: TypeAlias = Literal["fwd", "bwd", "bwd_input", "bwd_weight"]
TASK_TYPES: tuple[TaskType, ...] = ("fwd", "bwd", "bwd_input", "bwd_weight")

SpecEntry: TypeAlias = str | tuple[str, ...] | None
"""The sharding of one array dimension: the mesh axis or axes that split it, or None if it is not split."""

CONTROLLER: ProcessId = -1
"""The number of the controller as a peer of the data plane, whose other peers are processes of actors."""


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """One entry of a schedule: one stage's forward or backward on one microbatch.

    Args:
        i: the index of the microbatch.
        ty: `"fwd"` or `"bwd"`, or one half of a split backward, `"bwd_input"` or `"bwd_weight"`.
        stage: the index of the stage.

    Source: the JaxPP paper, section "Task Scheduling".
    """

    i: int
    ty: TaskType
    stage: int

    def __str__(self) -> str:
        return write_label(self.ty, self.stage, self.i)


class Aval(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, cache_hash=True
):
    """The shape, dtype and sharding of an array that is spread over the devices of one actor.

    Args:
        shape: the global shape, in elements.
        dtype: the numpy or ml_dtypes name, such as `"float32"` or `"bfloat16"`. PRNG keys have the shape and
            dtype of their `uint32` data.
        spec: one entry per dimension, as in `jax.sharding.PartitionSpec`; missing trailing entries are None.
        unreduced: the mesh axes over which each device has only one summand of the array, still to be added
            up.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: tuple[SpecEntry, ...] = ()
    unreduced: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """The size in bytes of the array, counted once even if several devices of an actor store copies."""
        return math.prod(self.shape) * itemsize(self.dtype)


_ITEMSIZES = {"bool": 1, "bfloat16": 2, "int2": 1, "int4": 1, "uint2": 1, "uint4": 1}


@functools.cache  # bounded by the number of dtypes
def itemsize(dtype: str) -> int:
    """Return the number of bytes that one element of a dtype occupies in host memory.

    An element of a type smaller than a byte occupies one byte, as in numpy.

    Raises:
        ValueError: the dtype is unknown.
    """
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


class Value(msgspec.Struct, frozen=True, gc=False):
    """One array of a step's task graph, made by one node of the graph or passed by the caller of the step.

    Args:
        aval: the shape, dtype and sharding of the array.
        label: the name of the array in reports, such as `"x@fwd(stage 0, mb 3)"` or `"state['w']"`.
        kind: `"input"` for a step argument; `"accumulator"` for a partial result carried through the
            microbatch loop; `"result"` for a stacked or concatenated result of the loop, which grows with the
            number of microbatches and is left out of peak bytes; `"temp"` for everything else.
    """

    aval: Aval
    label: str
    kind: ValueKind = "temp"


class Node(msgspec.Struct, frozen=True, gc=False):
    """A node of a task graph: one call of one executable on one actor.

    Args:
        label: the name of the node in reports, such as `"fwd(stage 1, mb 3)"` or `"outer(0, actor 1)"`.
        actor: the actor that runs the node.
        executable: the index of the executable among those of the step.
        inputs: the ids of the arrays that the node reads, in the order of the executable's arguments.
        outputs: the ids of the arrays that the node makes, in the order of the executable's results.
        donatable: the positions in `inputs` of arrays whose buffers the executable may reuse for a result if
            nothing else needs the array afterwards. Lowering decides per executable and position; see
            `compiler.lowering`.
        task: the entry of the schedule that the node runs; None for a node outside the microbatch loops.
    """

    label: str
    actor: ActorId
    executable: ExecutableId
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    donatable: tuple[int, ...] = ()
    task: Task | None = None


class GraphInput(msgspec.Struct, frozen=True):
    """A step argument in a task graph, and the actors that store it when the step starts.

    Args:
        value: the id of the argument's array in the graph.
        arg: the flat index of the argument.
        actors: the actors that store the argument; none if the step does not use it.
        donated: whether the step may overwrite the argument.
    """

    value: ValueId
    arg: int
    actors: tuple[ActorId, ...]
    donated: bool = False


class GraphOutput(msgspec.Struct, frozen=True):
    """A step result in a task graph, and the actors that store it when the step ends.

    Args:
        value: the id of the result's array in the graph.
        result: the flat index of the result.
        actors: the actors that store the result.
    """

    value: ValueId
    result: int
    actors: tuple[ActorId, ...]


class TaskGraph(msgspec.Struct, frozen=True):
    """The graph of all tasks of one step, each placed on an actor and connected by the arrays they exchange.

    `nodes` is in a topological order, and each actor runs its nodes in this order. Every array in `values` is
    either a step input or an output of exactly one node. An array that is used or returned on an actor that
    does not make it is transferred to that actor once. `values` may be any sequence, such as a `ValueTable`.
    """

    num_actors: int
    values: Sequence[Value]
    nodes: tuple[Node, ...]
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]


# ---------------------------------------------------------------- instructions


class _Instruction(
    msgspec.Struct, frozen=True, array_like=True, tag=str.lower, forbid_unknown_fields=True, gc=False
):
    """The base of all instructions. As a message an instruction is an array that begins with the name of its
    class in lower case, such as `"run"`."""


class Input(_Instruction, frozen=True):
    """An instruction that puts the step argument `arg` into the buffer slot `buffer`.

    A donated argument then belongs to the program, which has to delete, donate or return its buffer.
    """

    buffer: BufferId
    arg: int
    donated: bool = False


class Run(_Instruction, frozen=True):
    """An instruction that calls a compiled executable on buffer slots.

    `inputs` and `outputs` are the slots of the arguments and results. `donated` lists the positions in
    `inputs` of the buffers that the executable may overwrite; these buffers cannot be used afterwards.
    """

    label: str
    executable: ExecutableId
    inputs: tuple[BufferId, ...]
    outputs: tuple[BufferId, ...]
    donated: tuple[int, ...] = ()


class Send(_Instruction, frozen=True):
    """An instruction that sends a buffer to another actor as soon as the buffer is ready.

    The program continues without waiting for the transfer. The tag identifies the transfer; tags count from 0
    over all programs of a step.
    """

    buffer: BufferId
    to_actor: ActorId
    tag: Tag


class Recv(_Instruction, frozen=True):
    """An instruction that posts a receive into a buffer, which becomes ready when the data has arrived."""

    buffer: BufferId
    from_actor: ActorId
    tag: Tag


class Delete(_Instruction, frozen=True):
    """An instruction that frees a buffer as soon as no send of the buffer is in progress."""

    buffer: BufferId


class Output(_Instruction, frozen=True):
    """An instruction that returns a buffer as the step result `result`.

    The program no longer owns the buffer afterwards; only another `Output` may name the buffer again.
    """

    buffer: BufferId
    result: int


Instruction: TypeAlias = Input | Run | Send | Recv | Delete | Output


def buffers_made(instruction: Instruction) -> tuple[BufferId, ...]:
    """Return the buffer slots that an instruction assigns.

    Returns:
        The outputs of a `Run`, the buffer of an `Input` or `Recv`, or () for any other instruction.
    """
    if isinstance(instruction, Run):
        return instruction.outputs
    return (instruction.buffer,) if isinstance(instruction, Input | Recv) else ()


def runs(instructions: Iterable[Instruction]) -> list[Run]:
    """Return the `Run` instructions among `instructions`, in order."""
    return [i for i in instructions if isinstance(i, Run)]


# ---------------------------------------------------------------- columns


class ValueTable(Sequence[Value]):
    """A sequence of `Value`s (arrays of a task graph), stored as columns to save memory and time.

    A `Value` object is made only when it is read.

    Args:
        avals: the aval of each value.
        kinds: the kind of each value.
        label: a function that takes the position of a value and returns its label.
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
        """Return a table with the same labels and kinds as this one, but with other avals."""
        return ValueTable(avals, self.kinds, self.label)


def avals_of(values: Sequence[Value]) -> Sequence[Aval]:
    """Return the aval of each value, without making `Value` objects if `values` is a `ValueTable`."""
    return values.avals if isinstance(values, ValueTable) else [v.aval for v in values]


def kinds_of(values: Sequence[Value]) -> Sequence[ValueKind]:
    """Return the kind of each value, without making `Value` objects if `values` is a `ValueTable`."""
    return values.kinds if isinstance(values, ValueTable) else [v.kind for v in values]
