"""Represent a traced step as flat lists of operations over integer values, and its executables as recipes.

A recipe is what `task_graph` writes and `export` turns into StableHLO; a node's inputs and its recipe's
inputs agree position by position. The function that runs an operation is opaque here (`Op.run`), so that
partition and placement work on structure alone. Value ids count from zero over the whole step, loop bodies
included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, KeysView, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from jaxpp_async.base.frozen import frozen
from jaxpp_async.program.instructions import Aval


@frozen(eq=False)
class Lit:
    """A small constant operand."""

    value: Any


Ref: TypeAlias = int | Lit


@dataclass(frozen=True, slots=True)
class ValueType:
    """The type of a value: shape and dtype as it travels, and the JAX properties that its array form loses.

    Args:
        aval: of the array as it travels; a key array travels as its uint32 data.
        key_impl: PRNG implementation, for key arrays.
        weak: JAX's weak type.
        sharding: the sharding in the value's type on a mesh with explicit axes, else None.
        on_host: the value lies in host memory, which only values inside a task may do.
    """

    aval: Aval
    key_impl: str | None = None
    weak: bool = False
    sharding: Any = None
    on_host: bool = False


def stacked_type(element: ValueType, length: int) -> ValueType:
    """Make the type of `length` values of a type along a new leading axis, which no mesh axis splits."""
    known = element.sharding
    sharding = known and known.update(spec=known.spec.update(partitions=(None, *known.spec.partitions)))
    aval = replace(element.aval, shape=(length, *element.aval.shape))
    return ValueType(aval, element.key_impl, sharding=sharding)


@frozen(eq=False)
class Op:
    """An operation of a step.

    Args:
        name: of the JAX primitive, or of an operation of the compiler's own such as `"reduction_end"`.
        inputs: value ids and constants.
        outputs: ids of the values it makes; -1 where a result is not used.
        run: takes the operands' arrays and returns the results, under a JAX trace.
        line: `file:line` of the user.
        transposed: made by reverse-mode differentiation.
        params: properties that partitioning reads (a marker's name and side).
        expand: for an operation that wraps others (a checkpoint): returns those, over new value ids, and its
            results.
        split: for an operation that can be cut in two (a scan): takes the operation and the positions of the
            results that are wanted first; returns the operation that makes them, with the values that the
            rest needs of it, and the operation that makes the rest.
        branches: for a `cond` outside the loops, its branches.

    Attributes:
        reads: the values among `inputs`.
    """

    name: str
    inputs: tuple[Ref, ...]
    outputs: tuple[int, ...]
    run: Callable[[Sequence[Any]], Sequence[Any]]
    line: str
    transposed: bool = False
    params: dict[str, Any] = field(default_factory=dict)
    expand: Callable[[], tuple[tuple[Op, ...], tuple[Ref, ...]]] | None = None
    split: Callable[[Op, frozenset[int]], tuple[Op, Op] | None] | None = None
    branches: Branches | None = None
    reads: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        inputs: tuple[Any, ...] = self.inputs
        reads = tuple([r for r in inputs if isinstance(r, int)]) if Lit in map(type, inputs) else inputs
        object.__setattr__(self, "reads", reads)


@dataclass(frozen=True, eq=False)
class Branches:
    """The branches of a `cond`. Its first operand is the branch's position, the others are the branches'
    inputs.

    Args:
        bodies: one a branch, each over value ids of its own.
        choose: makes the `run` of a `cond` of the given bodies, which may be other ones than those above:
            reduced, reordered.
        select: the `run` of an operation that takes the position and one value a branch, and returns that
            branch's value.
        ends: no branch has a `while`, which may never end on values that it was not meant for.
        whole: the cond of which this one is a part, so that parts which meet again on one actor can be
            merged.
    """

    bodies: tuple[Flat, ...]
    choose: Callable[[Sequence[Flat]], Callable[[Sequence[Any]], Sequence[Any]]]
    select: Callable[[Sequence[Any]], Sequence[Any]]
    ends: bool = True
    whole: Op | None = None


@dataclass(frozen=True, eq=False)
class Loop:
    """An accumulate loop. The inputs of its `body` are invariants, one microbatch's leaves and the
    microbatch's index.

    Args:
        leaves: name and type of each leaf of a microbatch, as the user wrote it, such as `"batch['x']
            float32[2,4]"`.
    """

    body: Flat
    invariants: tuple[Ref, ...]
    batch: tuple[Ref, ...]
    outputs: tuple[int, ...]
    reductions: tuple[Any, ...]
    schedule: Any
    num_microbatches: int
    line: str
    leaves: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[Ref, ...]:
        return self.invariants + self.batch

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(r for r in self.inputs if isinstance(r, int))

    def body_inputs(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return the body's ids of the invariants, of the microbatch's leaves, and of the index."""
        n = len(self.invariants)
        ids = self.body.inputs
        return ids[:n], ids[n:-1], ids[-1]


@dataclass(frozen=True, eq=False)
class Flat:
    """A function body that computes its outputs from its inputs through `ops`, in program order."""

    inputs: tuple[int, ...]
    ops: tuple[Op | Loop, ...]
    outputs: tuple[Ref, ...]


class _SizeCache(dict[int, int]):
    """Bytes of one whole copy of each value, computed at first use, since some values (`float0`) have no
    size."""

    def __init__(self, types: dict[int, ValueType]) -> None:
        self._types = types

    def __missing__(self, value_id: int) -> int:
        size = self[value_id] = self._types[value_id].aval.size_bytes
        return size


class Types:
    """The type of every value id, growing while a step is compiled.

    Attributes:
        sizes: bytes of one whole copy of a value, by id.
    """

    def __init__(self) -> None:
        self._types: dict[int, ValueType] = {}
        self.sizes = _SizeCache(self._types)

    def new(self, value_type: ValueType) -> int:
        value_id = len(self._types)
        self._types[value_id] = value_type
        return value_id

    def __getitem__(self, value_id: int) -> ValueType:
        return self._types[value_id]

    def items(self) -> Iterable[tuple[int, ValueType]]:
        return self._types.items()


@dataclass(frozen=True, eq=False)
class Captured:
    """A large array that the user's function closes over: a hidden step argument, put on the actors once."""

    value: Any
    value_id: int


@dataclass(frozen=True, slots=True)
class PrintOperand:
    """The source of a print's operand.

    Args:
        ref: a value of the step outside its loops, or a constant; None: the microbatch's index.
        per_microbatch: `ref` has an entry for each microbatch.
    """

    ref: Ref | None
    per_microbatch: bool = False


@dataclass(frozen=True, eq=False)
class Print:
    """Host code (`jax.debug.print`, `jax.debug.callback`) that the controller calls once the step is over.

    Args:
        call: takes the operands and returns nothing.
        operands: in the order of `call`'s.
        line: `file:line` of the user.
    """

    call: Callable[[Sequence[Any]], None]
    operands: tuple[PrintOperand, ...]
    line: str


@dataclass(frozen=True, eq=False)
class LoopPrints:
    """The prints of a loop's body, in program order; the controller calls them microbatch by microbatch."""

    prints: tuple[Print, ...]
    num_microbatches: int


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced step function.

    Args:
        flat: its operations; inputs are the arguments' leaves, then the captured arrays.
        types: of every value id.
        arg_names: one a leaf, such as `"state['w']"`.
        arg_of: the argument number of each leaf.
        captured: hidden arguments.
        out_names: one a result leaf.
        prints: host code to call when the step is over, in program order. The printed values are hidden
            results: `flat.outputs` has them behind the result leaves.
    """

    flat: Flat
    types: Types
    arg_names: tuple[str, ...]
    arg_of: tuple[int, ...]
    captured: tuple[Captured, ...]
    out_names: tuple[str, ...]
    in_tree: Any
    out_tree: Any
    prints: tuple[Print | LoopPrints, ...] = ()

    @property
    def shown(self) -> tuple[Ref, ...]:
        """Return the hidden results."""
        return self.flat.outputs[len(self.out_names) :]

    def result_name(self, result: int) -> str:
        """Return the name of a result, hidden ones too, for reports and errors."""
        return self.out_names[result] if result < len(self.out_names) else "a printed value"


def used_ids(ops: Iterable[Op | Loop], outputs: Iterable[Ref]) -> set[int]:
    """Collect the ids that `ops` read or `outputs` return."""
    used = {r for r in outputs if isinstance(r, int)}
    for op in ops:
        used.update(op.reads)
    return used


def renamed(op: Op, names: KeysView[int], name: Callable[[Ref], Ref]) -> Op:
    """Copy an operation, and the operations inside it, with other operands.

    Args:
        op: the operation; its results stay.
        names: the ids of the operands that are replaced.
        name: takes an operand and returns its replacement.
    """
    if names.isdisjoint(op.reads):
        return op
    if (inside := op.expand) is None:
        return replace(op, inputs=tuple(map(name, op.inputs)))

    def expand() -> tuple[tuple[Op, ...], tuple[Ref, ...]]:
        ops, results = inside()
        return tuple(renamed(inner, names, name) for inner in ops), tuple(map(name, results))

    return replace(op, inputs=tuple(map(name, op.inputs)), expand=expand)


# ---------------------------------------------------------------- recipes of executables


@dataclass(frozen=True, eq=False)
class Accumulate:
    """An update of an accumulator: `result = reduction.step(accumulator, value, index)`."""

    accumulator: int
    value: Ref
    reduction: Any
    result: int


@dataclass(frozen=True, eq=False)
class AccumulatorStart:
    """A new accumulator: `result` is that of `reduction` over values of `aval`, before the first
    microbatch."""

    aval: Aval
    reduction: Any
    num_microbatches: int
    result: int


@dataclass(frozen=True, eq=False)
class Recipe:
    """The computation of one executable.

    Args:
        name: such as `"fwd0"`, for profiles and dumps.
        inputs: value ids, one an argument.
        outputs: value ids (or constants), one a result.
        ops: in program order.
        slices: (whole batch leaf, one microbatch of it) pairs, cut by `index` before `ops` run.
        index: id of the microbatch index among `inputs`, if needed.
        literals: ids that stand for constants.
        starts: accumulators to make.
        accumulates: accumulators to update, after `ops`.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[Ref, ...]
    ops: tuple[Op, ...] = ()
    slices: tuple[tuple[Ref, int], ...] = ()
    index: int | None = None
    literals: dict[int, Lit] = field(default_factory=dict)
    starts: tuple[AccumulatorStart, ...] = ()
    accumulates: tuple[Accumulate, ...] = ()

    @property
    def stem(self) -> str:
        """Return the name without the stage, such as `"fwd"`, so that identical stages become one
        executable."""
        return self.name.rstrip("0123456789")


def outside_reads(ops: Sequence[Op], returned: Sequence[Ref]) -> list[int]:
    """List the values that `ops` (and `returned`) read and `ops` do not make, in order of first use."""
    made = {o for op in ops for o in op.outputs if o >= 0}
    reads = [r for op in ops for r in op.reads] + [r for r in returned if isinstance(r, int)]
    return [r for r in dict.fromkeys(reads) if r not in made]


def literal_type(lit: Lit) -> ValueType:
    """Return the type of a constant."""
    value = lit.value
    return ValueType(
        Aval(tuple(getattr(value, "shape", ())), str(getattr(value, "dtype", type(value).__name__)))
    )
