"""Represent a traced step as flat lists of operations over integer value ids, and its executables as recipes.

A recipe describes the computation of one executable: `task_graph` writes it and `export` turns it into
StableHLO. A node of the task graph has the same inputs as its recipe, in the same order. The function that
runs an operation (`Op.run`) is opaque to the passes, so partition and placement see only an operation's data,
such as its name, inputs and outputs. Value ids count from zero over the whole step, loop bodies included. An
`OuterStep` is the part of a step outside its microbatch loops; placement replaces and removes operations of
this part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from msgspec import structs

from jaxpp_async.program.instructions import ActorId, Aval
from jaxpp_async.program.leaf_parts import Parts, part_positions
from jaxpp_async.schedules.cut import Cut

Actors: TypeAlias = frozenset[ActorId]
"""The actors that run an operation or hold a value."""


@dataclass(frozen=True, slots=True, eq=False)
class Lit:
    """A small constant that is an operand of an operation or a result of a body."""

    value: Any


Ref: TypeAlias = int | Lit


@dataclass(frozen=True, slots=True)
class ValueType:
    """The type of a value: shape and dtype of the array that is sent, and further JAX properties.

    Args:
        aval: shape and dtype of the array that is sent; an array of PRNG keys is sent as its uint32 data.
        key_impl: the PRNG implementation of a key array; None for other arrays.
        weak: whether JAX's type is weak.
        sharding: the sharding in JAX's type of the value, on a mesh with explicit axes; else None.
        on_host: whether the value is in host memory, which is allowed only for values used within one task.
    """

    aval: Aval
    key_impl: str | None = None
    weak: bool = False
    sharding: Any = None
    on_host: bool = False


def stacked_type(element: ValueType, length: int) -> ValueType:
    """Return the type of `length` values stacked along a new leading axis that no mesh axis splits."""
    known = element.sharding
    sharding = known and known.update(spec=known.spec.update(partitions=(None, *known.spec.partitions)))
    aval = structs.replace(element.aval, shape=(length, *element.aval.shape))
    return ValueType(aval, element.key_impl, sharding=sharding)


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """An operation of a step.

    Args:
        name: the name of the JAX primitive, or of an operation of the compiler's own such as
            `"reduction_end"`.
        inputs: the operands: value ids and constants.
        outputs: the ids of the values that it makes; -1 for a result that is not used.
        run: a function that takes the operands' arrays and returns the results, called under a JAX trace.
        line: `file:line` of the user's code.
        transposed: whether reverse-mode differentiation made the operation.
        params: properties that partitioning reads, such as whether a stage marker marks tangents or
            cotangents.
        expand: for an operation that wraps others (such as a checkpoint), a function that returns the wrapped
            operations, with new value ids, and the values that are their results.
        split: for an operation that can be split in two (a scan), a function that takes the operation and the
            positions of the results that are wanted first. The function returns two operations: the first
            makes the wanted results and the values that the second needs from it; the second makes the other
            results. The function returns None if the operation cannot be split in this way.
        branches: the branches of a `cond` outside the loops; else None.
        body: for a `scan` outside the loops, a function that returns its body; else None.

    Attributes:
        reads: the value ids among `inputs`, without the constants.
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
    body: Callable[[], Flat] | None = None
    reads: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        inputs: tuple[Any, ...] = self.inputs
        reads = tuple([r for r in inputs if isinstance(r, int)]) if Lit in map(type, inputs) else inputs
        object.__setattr__(self, "reads", reads)


@dataclass(frozen=True, eq=False)
class Branches:
    """The branches of a `cond`, and functions that build other conds from them.

    The first operand of the cond is the index of the branch to run; the others are the branches' inputs.

    Args:
        bodies: one body per branch, each over value ids of its own.
        choose: a function that takes bodies (reduced or reordered versions of `bodies`) and returns the
            `Op.run` of a cond with these branches.
        select: the `Op.run` of an operation that takes the index and one value per branch, and returns the
            value of the chosen branch.
        terminates: whether every branch is certain to end, so that all branches may be computed before one is
            selected. False if a branch has a `while`, which might run forever when the cond chooses another
            branch.
        whole: the cond that this cond is a part of (see `cond_split`). Parts of one cond that are placed on
            the same actor are merged again. None for a cond that is not a part.
    """

    bodies: tuple[Flat, ...]
    choose: Callable[[Sequence[Flat]], Callable[[Sequence[Any]], Sequence[Any]]]
    select: Callable[[Sequence[Any]], Sequence[Any]]
    terminates: bool = True
    whole: Op | None = None


@dataclass(frozen=True, eq=False)
class Loop:
    """An accumulate loop: a body that runs once per microbatch, with a reduction for each of its results.

    The inputs of its `body` are the invariants, one microbatch's leaves and the microbatch's index.

    Args:
        body: the operations of one microbatch.
        invariants: the values outside the loop that are the same for every microbatch.
        batch: the leaves of the batch, which are sliced along their leading axis.
        outputs: the ids of the loop's results.
        reductions: for each result, how the microbatches' values are combined.
        schedule: the schedule that the user passed; once the loop is cut, the one that is used.
        num_microbatches: the number of microbatches.
        line: `file:line` of the user's code.
        leaves: the name and type of each leaf of a microbatch, named after the user's argument, such as
            `"batch['x'] float32[2,4]"`.
        cut: the marks that the schedule named as stage boundaries; None if every mark of the body is one.
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
    cut: Cut | None = None

    @property
    def inputs(self) -> tuple[Ref, ...]:
        return self.invariants + self.batch

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(r for r in self.inputs if isinstance(r, int))

    def body_inputs(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return the body's ids of the invariants, the microbatch's leaves and the microbatch's index."""
        n = len(self.invariants)
        ids = self.body.inputs
        return ids[:n], ids[n:-1], ids[-1]


@dataclass(frozen=True, eq=False)
class Flat:
    """A function body that computes its outputs from its inputs by running `ops` in program order."""

    inputs: tuple[int, ...]
    ops: tuple[Op | Loop, ...]
    outputs: tuple[Ref, ...]


class _SizeCache(dict[int, int]):
    """A cache of the size of each value in bytes, by value id.

    A sharded or replicated array counts as one whole array. A size is computed when it is first used, since
    some values (`float0`) have no size.
    """

    def __init__(self, types: dict[int, ValueType]) -> None:
        self._types = types

    def __missing__(self, value_id: int) -> int:
        size = self[value_id] = self._types[value_id].aval.size_bytes
        return size


class _OriginSizes(dict[int, int]):
    """The sizes of origins in bytes, by value id, filled when they are first read."""

    def __init__(self, types: Types) -> None:
        self._types = types

    def __missing__(self, value_id: int) -> int:
        size = self[value_id] = self._types.sizes[self._types.origin(value_id)]
        return size


class Types:
    """A table of the type of every value id; types of new values are added while a step is compiled.

    Attributes:
        sizes: the size of each value in bytes, by value id. A sharded or replicated array counts as one whole
            array.
        origin_sizes: the size of each value's origin in bytes; of a part of a divided array that of the whole
            array.
    """

    def __init__(self) -> None:
        self._types: dict[int, ValueType] = {}
        self._origins: dict[int, int] = {}
        self.sizes = _SizeCache(self._types)
        self.origin_sizes = _OriginSizes(self)

    def new(self, value_type: ValueType, *, like: int | None = None) -> int:
        """Add a value and return its id.

        Args:
            value_type: the type of the value.
            like: the id of a value with whose sharding the new one is passed between executables, such as the
                value that it recomputes; None if there is no such.
        """
        value_id = len(self._types)
        self._types[value_id] = value_type
        if like is not None:
            self._origins[value_id] = self.origin(like)
        return value_id

    def origin(self, value_id: int) -> int:
        """Return the first value whose sharding this one has; this one if there is no other."""
        return self._origins.get(value_id, value_id)

    def __getitem__(self, value_id: int) -> ValueType:
        return self._types[value_id]

    def __len__(self) -> int:
        return len(self._types)

    def items(self) -> Iterable[tuple[int, ValueType]]:
        return self._types.items()


@dataclass(frozen=True, eq=False)
class Captured:
    """A large array that the user's function closes over.

    The array becomes a hidden argument of the step and is sent to the actors once.
    """

    value: Any
    value_id: int


@dataclass(frozen=True, slots=True)
class PrintOperand:
    """A description of where the controller finds an operand of a debug print.

    Args:
        ref: a value of the step outside its loops, or a constant; None for the microbatch's index.
        per_microbatch: whether `ref` has one entry per microbatch along its leading axis; if so, each call of
            the print gets the entry of its microbatch.
    """

    ref: Ref | None
    per_microbatch: bool = False


@dataclass(frozen=True, eq=False)
class Print:
    """A call of host code (`jax.debug.print`, `jax.debug.callback`) that the controller makes after the step.

    Args:
        call: the host code; it takes the operands and returns nothing.
        operands: descriptions of the values to pass to `call`, in order.
        line: `file:line` of the user's code.
    """

    call: Callable[[Sequence[Any]], None]
    operands: tuple[PrintOperand, ...]
    line: str


@dataclass(frozen=True, eq=False)
class LoopPrints:
    """The prints in a loop's body, in program order; the controller calls all of them once per microbatch."""

    prints: tuple[Print, ...]
    num_microbatches: int


@dataclass(frozen=True, slots=True)
class KeptWhole:
    """An array that stacks layers of several stages and is not divided, with the reason.

    Args:
        leaf: the position of the argument leaf; None for an array that the step computes.
        aval: the type of the array.
        why: text that says what stands against its parts, with `file:line` if that is an operation.
        instead: text that says what to write instead.
    """

    leaf: int | None
    aval: Aval
    why: str
    instead: str


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced step function.

    Args:
        flat: the step's operations; its inputs are the arguments' leaves, then the captured arrays. A leaf
            that is divided (see `argument_parts`) is as many inputs as it has parts, one after the other.
        types: the type of every value id.
        arg_names: one name per input that is an argument leaf, such as `"state['w']"`, or a part of one, such
            as `"state['w'][0:4]"`.
        arg_of: the argument number of each of these inputs.
        captured: the large arrays that the function closes over, which are hidden arguments.
        out_names: one name per result leaf or part of one.
        in_tree: the tree structure of the arguments.
        out_tree: the tree structure of the results.
        prints: the host code to call when the step is over, in program order. The printed values are hidden
            results: `flat.outputs` has them after the result leaves.
        argument_parts: for each argument leaf of `in_tree`, its parts, or None for an undivided leaf; empty
            if no leaf is divided.
        result_parts: the same for each result leaf of `out_tree`.
        kept_whole: the stacked arrays that could not be divided.
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
    argument_parts: tuple[Parts | None, ...] = ()
    result_parts: tuple[Parts | None, ...] = ()
    kept_whole: tuple[KeptWhole, ...] = ()

    @property
    def hidden_results(self) -> tuple[Ref, ...]:
        """The hidden results: the values that debug prints show."""
        return self.flat.outputs[len(self.out_names) :]

    @property
    def argument_positions(self) -> tuple[int, ...]:
        """For each argument leaf of `in_tree`, the position of its input, or of its first part."""
        leaves = self.argument_parts or (None,) * len(self.arg_names)
        return tuple(positions[0] for positions in part_positions(leaves))

    @property
    def result_positions(self) -> tuple[int, ...]:
        """For each result leaf of `out_tree`, the position of its result, or of its first part."""
        leaves = self.result_parts or (None,) * len(self.out_names)
        return tuple(positions[0] for positions in part_positions(leaves))

    def result_name(self, result: int) -> str:
        """Return the name of a result, hidden ones included, for reports and errors."""
        return self.out_names[result] if result < len(self.out_names) else "a printed value"


def used_ids(ops: Iterable[Op | Loop], outputs: Iterable[Ref]) -> set[int]:
    """Return the value ids that `ops` read or that are among `outputs`."""
    used = {r for r in outputs if isinstance(r, int)}
    for op in ops:
        used.update(op.reads)
    return used


def renamed(op: Op, ids: KeysView[int], replacement: Callable[[Ref], Ref]) -> Op:
    """Return a copy of an operation with some operands replaced, also in the operations inside it.

    Args:
        op: the operation; its results keep their ids.
        ids: the ids of the operands that are replaced.
        replacement: a function that takes an operand and returns its replacement.
    """
    if ids.isdisjoint(op.reads):
        return op
    if (inside := op.expand) is None:
        return replace(op, inputs=tuple(map(replacement, op.inputs)))

    def expand() -> tuple[tuple[Op, ...], tuple[Ref, ...]]:
        ops, results = inside()
        return tuple(renamed(inner, ids, replacement) for inner in ops), tuple(map(replacement, results))

    return replace(op, inputs=tuple(map(replacement, op.inputs)), expand=expand)


# ---------------------------------------------------------------- a step outside its loops


@dataclass(frozen=True, eq=False)
class OuterStep:
    """The input of placement: a step in which each microbatch loop is a single item.

    Args:
        inputs: the ids of the step's inputs (argument leaves, then captured arrays).
        items: the operations outside the loops and the loops themselves, in program order.
        outputs: the ids (or constants) of the step's results.
        loop_needs: for each loop (by its position in `items`), a dictionary. Its keys are the ids of the
            outside values that the loop reads; its values are the actors that need these values.
        loop_makes: for each loop (by its position in `items`), a dictionary. Its keys are the ids of the
            values that the loop makes for operations outside; its values are the actors that make these
            values.
        continues: a dictionary. Its keys are the positions of results that are new leaves of a state; its
            values are the positions of the inputs that are the old leaves.
        num_actors: the number of actors in the mesh.
        result_homes: a dictionary. Its keys are positions of results; its values are the actors on which the
            caller wants these results. Placement chooses the actors of the other results.
        num_results: the number of leading `outputs` that are the user's results; the others are values that
            `jax.debug.print` shows. None if all of them are the user's.
        untouched: a dictionary. Its keys are the positions of the results that are unchanged inputs; its
            values are the ids of these inputs. An input that is returned as several results is left out.
    """

    inputs: tuple[int, ...]
    items: tuple[Op | Loop, ...]
    outputs: tuple[Ref, ...]
    loop_needs: dict[int, dict[int, Actors]]
    loop_makes: dict[int, dict[int, ActorId]]
    continues: dict[int, int]
    num_actors: int
    result_homes: dict[int, Actors] = field(default_factory=dict)
    num_results: int | None = None
    untouched: dict[int, int] = field(default_factory=dict)


def source_actor(actors: Collection[ActorId], wanted: ActorId) -> ActorId:
    """Return the actor from which `wanted` gets a value.

    Args:
        actors: the actors that make the value.
        wanted: the actor that needs the value.

    Returns:
        `wanted` if this actor makes the value. Otherwise the lowest of `actors`, from which
        `lowering.plan_transfers` sends the value.
    """
    return wanted if wanted in actors else min(actors)


def replaced(step: OuterStep, others: Mapping[int, Sequence[Op]], removed: Collection[int] = ()) -> OuterStep:
    """Return a copy of a step with the operations at some positions replaced or removed.

    Args:
        step: the step. The copy has the same loops, at their new positions.
        others: a dictionary. Its keys are the positions in `step.items` of the operations to replace; its
            values are the operations to put in their place.
        removed: the positions in `step.items` of the operations to remove.
    """
    items: list[Op | Loop] = []
    renumbered: dict[int, int] = {}
    for i, item in enumerate(step.items):
        if i in others:
            items += others[i]
        elif i not in removed:
            renumbered[i] = len(items)
            items.append(item)
    return replace(
        step,
        items=tuple(items),
        loop_needs={renumbered[i]: needs for i, needs in step.loop_needs.items()},
        loop_makes={renumbered[i]: makes for i, makes in step.loop_makes.items()},
    )


def without_dead(step: OuterStep) -> OuterStep:
    """Return a copy of a step without the operations outside its loops whose results are not needed."""
    needed = {r for r in step.outputs if isinstance(r, int)}
    dead: set[int] = set()
    for i in reversed(range(len(step.items))):
        item = step.items[i]
        if isinstance(item, Loop) or any(o in needed for o in item.outputs):
            needed.update(item.reads if isinstance(item, Op) else step.loop_needs[i])
        else:
            dead.add(i)
    return replaced(step, {}, dead) if dead else step


# ---------------------------------------------------------------- recipes of executables


@dataclass(frozen=True, eq=False)
class Accumulate:
    """One update of an accumulator in a recipe (the operations of one executable).

    The update computes `result = reduction.step(accumulator, value, index)`.
    """

    accumulator: int
    value: Ref
    reduction: Any
    result: int


@dataclass(frozen=True, eq=False)
class AccumulatorStart:
    """The creation of an accumulator of a loop, as a part of a recipe (the operations of one executable).

    The accumulator gets the value that it has before the first microbatch, such as zeros for a sum.

    Args:
        aval: shape and dtype of one microbatch's value.
        reduction: how the microbatches' values are combined.
        num_microbatches: the number of microbatches of the loop.
        result: the value id of the new accumulator.
    """

    aval: Aval
    reduction: Any
    num_microbatches: int
    result: int


@dataclass(frozen=True, eq=False)
class Recipe:
    """The computation of one executable.

    Args:
        name: the name for profiles and dumps, such as `"fwd0"`.
        inputs: the value ids of the executable's arguments.
        outputs: the value ids (or constants) of the executable's results.
        ops: the operations, in program order.
        slices: pairs (whole batch leaf, one microbatch of this leaf). The microbatch is sliced at `index`
            before `ops` run.
        index: the id of the microbatch's index among `inputs`; None if it is not needed.
        literals: a dictionary. Its keys are the ids of values that are constants; its values are these
            constants.
        starts: the accumulators to create, before `ops` run.
        accumulates: the accumulators to update, after `ops` have run.
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
        """The recipe's name without the stage number, such as `"fwd"`.

        The exported function gets this name, so that identical stages share one executable.
        """
        return self.name.rstrip("0123456789")


def outside_reads(ops: Sequence[Op], returned: Sequence[Ref]) -> list[int]:
    """List the values that `ops` read or that are in `returned`, but that `ops` do not make, in order of
    first use."""
    made = {o for op in ops for o in op.outputs if o >= 0}
    reads = [r for op in ops for r in op.reads] + [r for r in returned if isinstance(r, int)]
    return [r for r in dict.fromkeys(reads) if r not in made]


def literal_type(lit: Lit) -> ValueType:
    """Return the type of a constant."""
    value = lit.value
    return ValueType(
        Aval(tuple(getattr(value, "shape", ())), str(getattr(value, "dtype", type(value).__name__)))
    )
