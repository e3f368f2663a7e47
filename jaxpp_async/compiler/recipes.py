"""Describe the computation of each executable of a step as plain data.

`compiler.task_graph` writes recipes, `compiler.export` turns them into StableHLO. A node's inputs and its
recipe's inputs agree position by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpp_async.compiler.ir import Lit, Op, Ref, ValueType
from jaxpp_async.program.instructions import Aval


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
