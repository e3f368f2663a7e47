"""compiler.columns: the values of a task graph by columns, and the columns of values that are given one by one. No jax.

A step has a hundred thousand values; hardly any is ever looked at but for its type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import overload

from jaxpp_async.program import Aval, Value, ValueId, ValueKind


class ValueTable(Sequence[Value]):
    """A `Value` for each row, made when it is asked for.

    Args:
        avals, kinds: a column each.
        label: row to label.
    """

    def __init__(self, avals: Sequence[Aval], kinds: Sequence[ValueKind], label: Callable[[ValueId], str]) -> None:
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
        """The same values with other types."""
        return ValueTable(avals, self.kinds, self.label)


def avals_of(values: Sequence[Value]) -> Sequence[Aval]:
    """The type of each value."""
    return values.avals if isinstance(values, ValueTable) else [v.aval for v in values]


def kinds_of(values: Sequence[Value]) -> Sequence[ValueKind]:
    """The kind of each value."""
    return values.kinds if isinstance(values, ValueTable) else [v.kind for v in values]
