"""Build the programs that divide an array into parts, join its parts, or divide it anew.

An array that stacks layers lives in parts where a step divides it so (see `leaf_division`). If another step
takes it whole, or in other parts, a small program makes these first: each actor cuts the rows that others
need out of what it holds, they are sent, and each receiver joins what it got and what it has. The functions
of this module send nothing: `redivider` runs the programs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
from jax.sharding import PartitionSpec
from msgspec import structs

from jaxpp_async.compiler import lowering, verify
from jaxpp_async.compiler.export import Emitted, Target, emit
from jaxpp_async.compiler.ir import Op, Recipe, Types, ValueType
from jaxpp_async.markers import logical_axes
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import (
    ActorId,
    Aval,
    GraphInput,
    GraphOutput,
    Node,
    SpecEntry,
    TaskGraph,
    Value,
    ValueId,
)
from jaxpp_async.program.leaf_parts import Parts

Box: TypeAlias = tuple[tuple[int, int], ...]
"""The elements of an array that have an index between two numbers along each axis."""

_Place: TypeAlias = tuple[tuple[ActorId, ...], tuple[SpecEntry, ...]]


@dataclass(frozen=True)
class Held:
    """Where an array lies, whole or in parts.

    Args:
        parts: the parts; None for a whole array.
        actors: the actors of each part; of a whole array, one entry.
        specs: the sharding of each part; of a whole array, one entry.
    """

    parts: Parts | None
    actors: tuple[tuple[ActorId, ...], ...]
    specs: tuple[tuple[SpecEntry, ...], ...]

    @property
    def axis(self) -> int:
        """The axis along which the parts are divided; 0 for a whole array."""
        return 0 if self.parts is None else self.parts.axis

    def boxes(self, shape: Sequence[int]) -> tuple[Box, ...]:
        """Return which elements of an array of this shape each part has."""
        whole = tuple((0, size) for size in shape)
        if self.parts is None:
            return (whole,)
        axis = self.parts.axis
        return tuple((*whole[:axis], rows, *whole[axis + 1 :]) for rows in self.parts.ranges)


@dataclass(frozen=True)
class Redivision:
    """A kind of change of the parts in which an array lives. Equal ones share one loaded program.

    Args:
        type: the type of the whole array.
        source: where the array lies.
        wanted: where it is to lie.
    """

    type: ValueType
    source: Held
    wanted: Held

    def kept(self) -> dict[int, int]:
        """Return the wanted parts that exist already.

        These parts may lie on other actors, or in another sharding, than is wanted.

        Returns:
            A dictionary. Its keys are positions of wanted parts; its values are positions of parts that the
            array has.
        """
        shape = self.type.aval.shape
        have = {box: k for k, box in enumerate(self.source.boxes(shape))}
        return {k: have[box] for k, box in enumerate(self.wanted.boxes(shape)) if box in have}

    def senders(self, wanted: int) -> dict[tuple[ActorId, tuple[ActorId, ...]], int]:
        """Return from where the rows of a wanted part come.

        Args:
            wanted: the position of the part.

        Returns:
            A dictionary. Its keys are pairs of an actor that has some of the rows, and the actors that get
            them; its values are the bytes of these rows. If nobody gets them, because the actors of the part
            have them already, the second is the first.
        """
        shape, size = self.type.aval.shape, self.type.aval.size_bytes
        box, to = self.wanted.boxes(shape)[wanted], self.wanted.actors[wanted]
        found: dict[tuple[ActorId, tuple[ActorId, ...]], int] = defaultdict(int)
        for other, actors in zip(self.source.boxes(shape), self.source.actors, strict=True):
            common = _overlap(box, other)
            if common is not None:
                here = next((actor for actor in actors if actor in to), actors[0])
                missing = tuple(actor for actor in to if actor not in actors)
                found[here, missing or (here,)] += size * _size(common) // max(1, math.prod(shape))
        return found


def build_redivision(
    change: Redivision, num_actors: int, target: Target
) -> tuple[tuple[ActorProgram, ...], tuple[Emitted, ...]]:
    """Build the programs that make the wanted parts of an array that do not exist yet.

    Each row is sent once to each actor that needs it and does not have it.

    Args:
        change: the change; its wanted parts are the results of the programs, by their positions, and the
            parts that the array has are the arguments. Parts of `change.kept()` are not made.
        num_actors: number of actors.
        target: the devices of one actor.

    Returns:
        The programs, one per actor, and the executables that they run.
    """
    return _Builder(change, num_actors, target).build()


class _Builder:
    """Builds the task graph of one redivision."""

    def __init__(self, change: Redivision, num_actors: int, target: Target):
        self._change, self._num_actors, self._target = change, num_actors, target
        self._aval, self._shape = change.type.aval, change.type.aval.shape
        self._values: list[Value] = []
        self._nodes: list[Node] = []
        self._outputs: list[GraphOutput] = []
        self._executables: dict[Any, tuple[int, Emitted]] = {}
        self._cut: dict[tuple[int, Box, ActorId], ValueId] = {}

    def build(self) -> tuple[tuple[ActorProgram, ...], tuple[Emitted, ...]]:
        source, wanted = self._change.source, self._change.wanted
        self._boxes = source.boxes(self._shape)
        for box, spec in zip(self._boxes, source.specs, strict=True):
            self._add_value(box, spec, "moved")
        for k, box in enumerate(wanted.boxes(self._shape)):
            if k not in self._change.kept():
                self._make(k, box, wanted.actors[k], wanted.specs[k])
        inputs = [GraphInput(k, k, actors) for k, actors in enumerate(source.actors)]
        graph = TaskGraph(
            self._num_actors, tuple(self._values), tuple(self._nodes), tuple(inputs), tuple(self._outputs)
        )
        programs = tuple(lowering.lower(graph))
        verify.verify_programs(programs)
        return programs, tuple(executable for _, executable in self._executables.values())

    def _make(self, result: int, box: Box, actors: Sequence[ActorId], spec: tuple[SpecEntry, ...]) -> None:
        """Add the nodes that make one wanted part on each of its actors."""
        source = self._change.source
        common = [(k, cut) for k, other in enumerate(self._boxes) if (cut := _overlap(box, other))]
        for actor in actors:
            operands = []
            for k, cut in common:
                have = source.actors[k]
                if actor in have or cut == self._boxes[k]:
                    operands.append((k, _within(cut, self._boxes[k])))
                else:
                    operands.append((self._cut_out(k, cut, have[0], box, spec), None))
            value, index = operands[0]
            if len(operands) > 1 or index is not None or self._values[value].aval.spec != spec:
                value = self._join(operands, actor, box, spec)
            self._outputs.append(GraphOutput(value, result, (actor,)))

    def _cut_out(
        self, source: int, cut: Box, actor: ActorId, box: Box, spec: tuple[SpecEntry, ...]
    ) -> ValueId:
        """Return the value of some rows of a part, which the actor that has the part cuts out.

        Args:
            source: the position of the part.
            cut: the rows.
            actor: the actor that has the part.
            box: the wanted part that needs the rows.
            spec: the sharding of the wanted part.
        """
        key = (source, cut, actor)
        if key not in self._cut:
            there = spec if cut == box else _without(self._values[source].aval.spec, cut, self._boxes[source])
            operand = (source, _within(cut, self._boxes[source]))
            self._cut[key] = self._join([operand], actor, cut, there)
        return self._cut[key]

    def _join(
        self,
        operands: Sequence[tuple[ValueId, tuple[slice, ...] | None]],
        actor: ActorId,
        box: Box,
        spec: tuple[SpecEntry, ...],
    ) -> ValueId:
        """Add a node that cuts rows out of each operand and joins them, and return its value.

        Args:
            operands: values, and which of their elements to take; None for all.
            actor: the actor of the node.
            box: the elements of the whole array that the node makes.
            spec: the sharding of its result.
        """
        avals = tuple(self._values[value].aval for value, _ in operands)
        indices = tuple(index for _, index in operands)
        axis = self._change.source.axis
        key = (avals, tuple(map(_plain, indices)), spec)
        if key not in self._executables:
            executable = _emit_join(avals, indices, axis, _shape(box), spec, self._target)
            self._executables[key] = len(self._executables), executable
        value = self._add_value(box, spec, "divided")
        inputs = tuple(value for value, _ in operands)
        label = f"divide({len(self._nodes)}, actor {actor})"
        self._nodes.append(Node(label, actor, self._executables[key][0], inputs, (value,)))
        return value

    def _add_value(self, box: Box, spec: tuple[SpecEntry, ...], label: str) -> ValueId:
        aval = structs.replace(self._aval, shape=_shape(box), spec=spec)
        self._values.append(Value(aval, label, "temp"))
        return len(self._values) - 1


def _emit_join(
    avals: Sequence[Aval],
    indices: Sequence[tuple[slice, ...] | None],
    axis: int,
    shape: tuple[int, ...],
    spec: tuple[SpecEntry, ...],
    target: Target,
) -> Emitted:
    types = Types()
    operands = tuple(types.new(ValueType(aval)) for aval in avals)
    result = types.new(ValueType(structs.replace(avals[0], shape=shape, spec=spec)))
    specs = {operand: aval.spec for operand, aval in zip(operands, avals, strict=True)} | {result: spec}
    if len(avals) == 1 and indices[0] is None:
        recipe = Recipe("divide", operands, operands)
    else:
        join = partial(_join, tuple(indices), axis)
        if logical_axes.has_explicit_axes(target.mesh):
            # There JAX refuses to cut and to join rows along an axis that is divided over devices.
            join = jax.sharding.auto_axes(join, out_sharding=PartitionSpec(*spec))
        op = Op("divide", operands, (result,), lambda xs: [join(*xs)], "a divided array")
        recipe = Recipe("divide", operands, (result,), (op,))
    return emit(recipe, types, specs, target, out_specs=(spec,))


def _join(indices: Sequence[tuple[slice, ...] | None], axis: int, *arrays: jax.Array) -> jax.Array:
    cut = [x if index is None else x[index] for x, index in zip(arrays, indices, strict=True)]
    return cut[0] if len(cut) == 1 else jax.lax.concatenate(cut, axis)


# ---------------------------------------------------------------- boxes


def _overlap(one: Box, other: Box) -> Box | None:
    """Return the elements that are in both boxes; None if there are none."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    empty = ((0, 0), (0, 0))  # along an axis of length 0
    overlaps = (
        start < stop or pair == empty
        for (start, stop), pair in zip(both, zip(one, other, strict=True), strict=True)
    )
    return both if all(overlaps) else None


def _within(box: Box, outer: Box) -> tuple[slice, ...] | None:
    """Return the index of the elements `box` in an array that has the elements `outer`; None if it is all."""
    if box == outer:
        return None
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))


def _without(spec: tuple[SpecEntry, ...], cut: Box, box: Box) -> tuple[SpecEntry, ...]:
    """Return a sharding for rows that are cut out of an array: that of the array along the axes that stay
    whole.
    """
    return tuple(entry if cut[axis] == box[axis] else None for axis, entry in enumerate(spec))


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _size(box: Box) -> int:
    return math.prod(_shape(box))


def _plain(index: tuple[slice, ...] | None) -> tuple[tuple[int, int], ...] | None:
    """Return an index in a form that can be hashed in Python 3.11."""
    return None if index is None else tuple((one.start, one.stop) for one in index)
