"""compiler.weak: arguments that are weakly typed at the first step only. In: a step and its arguments' types. Out: its
trace, with such arguments taken as what they are from the second step on.

`jnp.full(shape, 0.1)` is weakly typed, `p - lr * grad` is not: a state made of the first comes back as the second, and
the step would be compiled twice. Where the weak type changes nothing in the computation, one compiled form serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxpp_async.compiler.ir import Flat, Loop, Traced, Types


def trace_settled(
    trace: Callable[[Sequence[Any]], Traced],
    args: Sequence[Any],
    static_argnums: Sequence[int],
    continued: Callable[[Traced], Mapping[int, int]],
) -> tuple[Traced, frozenset[int]]:
    """Trace a step with settled weak types.

    Args:
        trace: arguments to a traced step.
        args: leaves are `jax.ShapeDtypeStruct`s; static arguments as they are.
        continued: result leaf to the argument leaf it continues.

    Returns:
        The traced step, and the argument leaves that it takes weak as well as strong.
    """
    first = now = trace(args)
    if not any(first.types[v].weak for v in first.flat.inputs):
        return first, frozenset()
    settled: set[int] = set()
    while lost := _lost(now, continued(now)):
        settled |= lost
        now = trace(_strong(args, static_argnums, settled))
    if settled and list(_shape_of(first.flat, first.types)) == list(_shape_of(now.flat, now.types)):
        return now, frozenset(settled)
    return first, frozenset()


def _lost(traced: Traced, continues: Mapping[int, int]) -> set[int]:
    """Argument leaves that are weak and whose next value is not."""
    lost = set()
    for result, arg in continues.items():
        ref = traced.flat.outputs[result]
        if traced.types[traced.flat.inputs[arg]].weak and not (isinstance(ref, int) and traced.types[ref].weak):
            lost.add(arg)
    return lost


def _strong(args: Sequence[Any], static_argnums: Sequence[int], leaves: set[int]) -> list[Any]:
    dynamic = [i for i in range(len(args)) if i not in static_argnums]
    flat, tree = jax.tree.flatten([args[i] for i in dynamic])
    for k in leaves:
        flat[k] = jax.ShapeDtypeStruct(flat[k].shape, flat[k].dtype, sharding=flat[k].sharding)
    strong = list(args)
    for i, arg in zip(dynamic, jax.tree.unflatten(tree, flat), strict=True):
        strong[i] = arg
    return strong


def _shape_of(flat: Flat, types: Types) -> Iterator[tuple]:
    """What is computed, without conversions that only take a weak type away."""
    for op in flat.ops:
        avals = tuple(types[o].aval for o in op.outputs if o >= 0)
        if isinstance(op, Loop):
            yield ("loop", avals, op.reductions, tuple(_shape_of(op.body, types)))
        elif op.name != "convert_element_type" or not _same_aval(op.inputs[0], op.outputs[0], types):
            yield (op.name, avals)
    yield ("return", *(types[r].aval if isinstance(r, int) else None for r in flat.outputs))


def _same_aval(ref: Any, output: int, types: Types) -> bool:
    return isinstance(ref, int) and output >= 0 and types[ref].aval == types[output].aval
