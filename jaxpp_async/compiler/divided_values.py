"""Name the parts of a step's divided values, and make the parts or the whole of a value from what a body has.

`PartIds` has the ids of all parts of a step. `BodyValues` adds the operations to a body that join parts, cut
them out of a whole value, or assemble rows anew. `divide` rewrites the operations of the body itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from msgspec import structs

from jaxpp_async.compiler.ir import Captured, Lit, Loop, Op, Ref, Types, literal_type
from jaxpp_async.program.leaf_parts import Parts


class PartIds:
    """The ids of the parts of all divided values.

    Args:
        types: the type of each value; the types of parts are added to it.
        parts: the parts of each divided value.
    """

    def __init__(self, types: Types, parts: Mapping[int, Parts]) -> None:
        self.types, self.parts = types, parts
        self._ids: dict[int, tuple[int, ...]] = {}
        self.zeros: set[int] = set()  # parts that are known to be zero

    def ids(self, value: int) -> tuple[int, ...]:
        """Return the ids of the parts of a divided value."""
        if value not in self._ids:
            shapes = self.parts[value].shapes(self.types[value].aval.shape)
            self._ids[value] = tuple(self.resized(value, shape) for shape in shapes)
        return self._ids[value]

    def rename(self, value: int, part: int, made: int) -> None:
        """Let a part be another value of the same type."""
        ids = list(self.ids(value))
        ids[part] = made
        self._ids[value] = tuple(ids)

    def resized(self, value: int, shape: Sequence[int]) -> int:
        """Return the id of a new value that is like another one but for its shape."""
        known = self.types[value]
        return self.types.new(
            replace(known, aval=structs.replace(known.aval, shape=tuple(shape))), like=value
        )

    def in_parts(self, values: Sequence[int]) -> tuple[int, ...]:
        """Return ids of values with those of its parts in the place of each divided one."""
        return tuple(i for v in values for i in (self.ids(v) if v in self.parts else (v,)))

    def captured_parts(self, captured: Captured) -> Sequence[Captured]:
        """Return the parts of an array that the user's function closes over."""
        if captured.value_id not in self.parts:
            return (captured,)
        slices = self.parts[captured.value_id].slices
        pairs = zip(slices, self.ids(captured.value_id), strict=True)
        return [Captured(captured.value[index], value_id) for index, value_id in pairs]


class BodyValues:
    """The values of one body: the step, a loop's body, a branch of a cond; and its rewritten operations.

    Args:
        divider: the ids of parts.
    """

    def __init__(self, divider: PartIds) -> None:
        self.divider, self.types, self.parts = divider, divider.types, divider.parts
        self.ops: list[Op | Loop] = []
        self.renamed: dict[int, Ref] = {}  # undivided values that are another value
        self._joined: set[int] = set()

    def is_divided(self, ref: Ref) -> bool:
        return isinstance(ref, int) and ref in self.parts

    def whole(self, ref: Ref) -> Ref:
        """Return a value undivided; join its parts if that has not been done in this body."""
        if not isinstance(ref, int):
            return ref
        if ref in self.parts and ref not in self._joined:
            self._joined.add(ref)
            axis = self.parts[ref].axis
            self.ops.append(
                Op("concatenate", self.divider.ids(ref), (ref,), partial(concatenate, axis), "parts")
            )
        return self.renamed.get(ref, ref)

    def results(self, refs: Sequence[Ref]) -> list[Ref]:
        """Return results of the body with the parts of each divided one in its place."""
        return [part for ref in refs for part in self._in_place(ref)]

    def _in_place(self, ref: Ref) -> Sequence[Ref]:
        return self.divider.ids(ref) if isinstance(ref, int) and ref in self.parts else (self.whole(ref),)

    def result(self, ref: Ref, parts: Parts | None) -> Sequence[Ref]:
        """Return a result of the step in the given parts, of which it may have others so far."""
        if parts is None or (isinstance(ref, int) and self.parts.get(ref) == parts):
            return self._in_place(ref)
        found = list[Ref]()
        for start, stop in parts.ranges:
            rows = self.rows(ref, parts.axis, start, stop, "stacked layers")
            if len(rows) > 1 and isinstance(ref, int):
                shape = list(self.types[ref].aval.shape)
                shape[parts.axis] = stop - start
                joined = self.divider.resized(ref, shape)
                run = partial(concatenate, parts.axis)
                self.ops.append(Op("concatenate", tuple(rows), (joined,), run, "stacked layers"))
                rows = [joined]
            found += rows
        return found

    def slice_whole(self, value: int, line: str) -> None:
        """Make the parts of a divided value that is there as a whole."""
        if value in self.parts:
            self._joined.add(value)
            axis, ids = self.parts[value].axis, self.divider.ids(value)
            for (start, stop), part in zip(self.parts[value].ranges, ids, strict=True):
                self.cut(value, axis, start, stop, part, line)

    def enter(self, operands: Sequence[Ref], inputs: Sequence[int], line: str) -> tuple[int, ...]:
        """Return the inputs of this body, and make the parts of those whose operands are not divided.

        Args:
            operands: the operands that the body is applied to.
            inputs: the inputs of the body before it was rewritten.
            line: `file:line` of the loop or cond.
        """
        found: list[int] = []
        for ref, value in zip(operands, inputs, strict=True):
            if self.is_divided(ref):
                found += self.divider.in_parts((value,))
            else:
                found.append(value)
                self.slice_whole(value, line)
        return tuple(found)

    def rows(self, ref: Ref, axis: int, start: int, stop: int, line: str) -> list[Ref]:
        """Return rows of a value as a list of values that have them one after the other."""
        if not isinstance(ref, int):
            if np.shape(ref.value)[axis] == stop - start:
                return [ref]
            made = self.types.new(literal_type(Lit(np.asarray(ref.value).take(range(start, stop), axis))))
            return [self.cut(ref, axis, start, stop, made, line)]
        held = [(ref, 0, self.types[ref].aval.shape[axis])]
        if ref in self.parts:
            pairs = zip(self.divider.ids(ref), self.parts[ref].ranges, strict=True)
            held = [(part, *rows) for part, rows in pairs]
        found: list[Ref] = []
        for part, first, last in held:
            low, high = max(first, start), min(last, stop)
            if (low, high) == (first, last):
                found.append(self.whole(part))
            elif low < high:
                shape = list(self.types[part].aval.shape)
                shape[axis] = high - low
                made = self.divider.resized(part, shape)
                found.append(self.cut(part, axis, low - first, high - first, made, line))
        return found

    def cut(self, ref: Ref, axis: int, start: int, stop: int, made: int, line: str) -> int:
        run = partial(_slice_rows, axis, start, stop)
        self.ops.append(Op("slice", (self.whole(ref),), (made,), run, line))
        return made


# ---------------------------------------------------------------- functions of arrays


def concatenate(axis: int, xs: Sequence[Any]) -> list[Any]:
    return [lax.concatenate([jnp.asarray(x) for x in xs], axis)]


def _slice_rows(axis: int, start: int, stop: int, xs: Sequence[Any]) -> list[Any]:
    return [lax.slice_in_dim(jnp.asarray(xs[0]), start, stop, axis=axis)]
