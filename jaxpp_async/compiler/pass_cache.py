"""Keep what compilations of one step under several schedules share: traces, shardings, and the work of tasks.

A planner compiles one step many times. Tracing it, and inferring the shardings of its values, take most of a
compilation without lowering, and depend on neither the schedule nor the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Any, TypeAlias

from jax.sharding import AbstractMesh

from jaxpp_async.compiler.ir import Flat, Loop, Ref, Traced, Types, ValueType
from jaxpp_async.program.instructions import SpecEntry
from jaxpp_async.program.work import TaskWork

TraceResult: TypeAlias = tuple[Traced, frozenset[int]]
Specs: TypeAlias = dict[int, tuple[SpecEntry, ...]]


class KnownSpecs:
    """The shardings of a traced step's values that were inferred so far.

    Inferring looks at the whole step, so that a value has the same sharding under every schedule and cut. A
    value that a later pass makes has the sharding of the one that it stands for (`Types.origin`).

    Args:
        num_values: the number of values that tracing made. A later one that stands for none is not known.
    """

    def __init__(self, num_values: int = 0) -> None:
        self._num_values = num_values
        self._specs: Specs = {}

    def find(self, types: Types, values: Collection[int]) -> Specs | None:
        """Return the sharding of each value; None if one of them is not known."""
        origins = {v: types.origin(v) for v in values}
        if not all(origin in self._specs for origin in origins.values()):
            return None
        return {v: self._specs[origin] for v, origin in origins.items()}

    def add(self, types: Types, specs: Specs) -> None:
        """Add shardings that were inferred."""
        for v, spec in sorted(specs.items()):  # values come before their copies
            if (origin := types.origin(v)) < self._num_values:
                self._specs.setdefault(origin, spec)


class PassCache:
    """The results of passes that compilations of one step function share.

    Use one cache for one function with one choice of static arguments and shardings. The arguments' shapes,
    the machine and the schedule may differ.

    Attributes:
        works: the work of recipes that have been counted, by their keys.
    """

    def __init__(self) -> None:
        self._traces: dict[Hashable, TraceResult] = {}
        self._specs: list[tuple[AbstractMesh | None, Traced, KnownSpecs]] = []
        self.works: dict[Hashable, TaskWork] = {}

    def trace(self, key: Hashable, make: Callable[[], TraceResult]) -> TraceResult:
        """Return a traced step. Compilations add values to its table of types.

        Args:
            key: the types of the arguments, and all else on which a trace depends.
            make: a function that traces the step.
        """
        if key not in self._traces:
            self._traces[key] = make()
        return self._traces[key]

    def specs(self, traced: Traced, mesh: AbstractMesh | None) -> KnownSpecs:
        """Return the known shardings of a traced step's values, to which the caller adds what it infers.

        Traces that differ in the number of microbatches alone have the same shardings.

        Args:
            traced: the traced step, before any pass has changed it.
            mesh: the devices of each actor; None for one device.
        """
        for other_mesh, other, known in self._specs:
            if mesh == other_mesh and _are_alike(traced, other):
                return known
        self._specs.append((mesh, traced, KnownSpecs(len(traced.types))))
        return self._specs[-1][2]


def _are_alike(one: Traced, other: Traced) -> bool:
    """Return whether two traces have the same operations on the same values, but for the microbatches."""
    if _outline(one.flat) != _outline(other.flat):
        return False
    inner = {v for item in one.flat.ops if isinstance(item, Loop) for v in _values(item.body)}
    return all(_same_type(one.types[v], other.types[v], v in inner) for v in _values(one.flat) | inner)


def _outline(flat: Flat) -> list[Any]:
    def ids(refs: tuple[Ref, ...]) -> tuple[int, ...]:
        return tuple(r if isinstance(r, int) else -1 for r in refs)

    return [
        (_outline(item.body), ids(item.inputs), item.outputs)
        if isinstance(item, Loop)
        else (item.name, ids(item.inputs), item.outputs)
        for item in flat.ops
    ]


def _values(flat: Flat) -> set[int]:
    return {*flat.inputs, *(v for item in flat.ops for v in item.outputs if v >= 0)}


def _same_type(one: ValueType, other: ValueType, exactly: bool) -> bool:
    if exactly or one == other:
        return one == other
    a, b = one.aval, other.aval
    return len(a.shape) == len(b.shape) and a.shape[1:] == b.shape[1:] and a.dtype == b.dtype
