"""compiler.ir: a traced step as flat lists of operations over integer values. Plain data, no jax.

The payload that runs an operation is opaque here (`Op.run`), so that partition and placement work on structure alone.
Value ids count from zero over the whole step, loop bodies included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, KeysView, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
    """What travels for one value.

    Args:
        aval: of the array as it travels; a key array stands as its uint32 data.
        key_impl: PRNG implementation, for key arrays.
        weak: JAX's weak type.
        sharding: what stands in the value's type on a mesh with explicit axes (see `explicit`), else None.
        on_host: it lies in host memory, which only values inside a task may.
    """

    aval: Aval
    key_impl: str | None = None
    weak: bool = False
    sharding: Any = None
    on_host: bool = False


def stacked_type(element: ValueType, length: int) -> ValueType:
    """The type of `length` values of a type along a new leading axis, which no mesh axis splits."""
    known = element.sharding
    sharding = known and known.update(spec=known.spec.update(partitions=(None, *known.spec.partitions)))
    aval = replace(element.aval, shape=(length, *element.aval.shape))
    return ValueType(aval, element.key_impl, sharding=sharding)


@frozen(eq=False)
class Op:
    """One operation.

    Args:
        name: of the JAX primitive, or of a step of ours such as `"reduction_end"`.
        inputs: value ids and constants.
        outputs: ids of the values it makes; -1 where a result is not used.
        run: operand arrays to results, under a JAX trace.
        line: `file:line` of the user.
        transposed: made by reverse-mode differentiation.
        params: what partitioning looks at (a marker's name and side).
        expand: for an operation that wraps others (a checkpoint): those, over new value ids, and its results.
        split: for one that can be cut in two (a scan): itself and the positions of the results that are wanted first to
            the operation that makes them, with whatever the other needs of it, and the operation that makes the rest.
        branches: for a `cond` outside the loops, what it chooses from.

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
    """What a `cond` chooses from; its first operand is the position of the branch, the others are the branches' inputs.

    Args:
        bodies: one a branch, each over value ids of its own.
        choose: the payload of a `cond` of these bodies, which may be others than those above: reduced, reordered.
        select: the payload of an operation that takes the position and a value a branch, and returns that branch's.
        ends: no branch has a `while`, which may never end on values that it was not meant for.
        whole: the cond that this one is a part of, for parts that meet again on one actor.
    """

    bodies: tuple[Flat, ...]
    choose: Callable[[Sequence[Flat]], Callable[[Sequence[Any]], Sequence[Any]]]
    select: Callable[[Sequence[Any]], Sequence[Any]]
    ends: bool = True
    whole: Op | None = None


@dataclass(frozen=True, eq=False)
class Loop:
    """An accumulate loop. `Flat` is its body: inputs are invariants, one microbatch's leaves, the index.

    Args:
        leaves: name and type of each leaf of a microbatch, as the user wrote it, such as `"batch['x'] float32[2,4]"`.
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
        """Body ids of the invariants, of the microbatch's leaves, of the index."""
        n = len(self.invariants)
        ids = self.body.inputs
        return ids[:n], ids[n:-1], ids[-1]


@dataclass(frozen=True, eq=False)
class Flat:
    """A function body: inputs to outputs through `ops`, in program order."""

    inputs: tuple[int, ...]
    ops: tuple[Op | Loop, ...]
    outputs: tuple[Ref, ...]


class _Sizes(dict[int, int]):
    """Bytes of one whole copy of each value, found when first asked for: some values have none (`float0`)."""

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
        self.sizes = _Sizes(self._types)

    def new(self, value_type: ValueType) -> int:
        value_id = len(self._types)
        self._types[value_id] = value_type
        return value_id

    def __getitem__(self, value_id: int) -> ValueType:
        return self._types[value_id]

    def size_bytes(self, value_id: int) -> int:
        """Bytes of one whole copy of a value."""
        return self.sizes[value_id]

    def items(self) -> Iterable[tuple[int, ValueType]]:
        return self._types.items()


@dataclass(frozen=True, eq=False)
class Captured:
    """A large array the user's function closes over: a hidden step argument, put on the actors once."""

    value: Any
    value_id: int


@dataclass(frozen=True, slots=True)
class PrintOperand:
    """Where an operand of a print comes from.

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
        call: operands to nothing.
        operands: in the order of `call`'s.
        line: `file:line` of the user.
    """

    call: Callable[[Sequence[Any]], None]
    operands: tuple[PrintOperand, ...]
    line: str


@dataclass(frozen=True, eq=False)
class LoopPrints:
    """The prints of a loop's body, in program order; called microbatch by microbatch."""

    prints: tuple[Print, ...]
    num_microbatches: int


@dataclass(frozen=True, eq=False)
class Traced:
    """A step function, traced.

    Args:
        flat: its operations; inputs are the arguments' leaves, then the captured arrays.
        types: of every value id.
        arg_names: one a leaf, such as `"state['w']"`.
        arg_of: the argument number of each leaf.
        captured: hidden arguments.
        out_names: one a result leaf.
        prints: host code to call when the step is over, in program order. The values it shows are hidden results:
            `flat.outputs` has them behind the result leaves.
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
        """The hidden results."""
        return self.flat.outputs[len(self.out_names) :]

    def result_name(self, result: int) -> str:
        """What reports and errors call a result, hidden ones too."""
        return self.out_names[result] if result < len(self.out_names) else "a printed value"


def used_ids(ops: Iterable[Op | Loop], outputs: Iterable[Ref]) -> set[int]:
    """Ids that `ops` read or `outputs` return."""
    used = {r for r in outputs if isinstance(r, int)}
    for op in ops:
        used.update(op.reads)
    return used


def renamed(op: Op, names: KeysView[int], name: Callable[[Ref], Ref]) -> Op:
    """The operation, with other operands, also inside.

    Args:
        op: the operation; its results stay.
        names: the operands that get another name.
        name: an operand to what stands in its place.
    """
    if names.isdisjoint(op.reads):
        return op
    expand = None if op.expand is None else partial(_renamed_inside, op.expand, names, name)
    return replace(op, inputs=tuple(map(name, op.inputs)), expand=expand)


def _renamed_inside(expand: Callable, names: KeysView[int], name: Callable[[Ref], Ref]) -> tuple:
    ops, results = expand()
    return tuple(renamed(op, names, name) for op in ops), tuple(map(name, results))
