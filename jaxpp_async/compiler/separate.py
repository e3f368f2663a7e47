"""compiler.separate: a traced step and the user's shardings in; out: the same, every result with one sharding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from jaxpp_async.compiler.ir import Flat, Op, Traced


def separate_results(
    traced: Traced, in_specs: Sequence[Sequence[Any] | None], out_specs: Sequence[Sequence[Any] | None]
) -> Traced:
    """Copy a value that is asked for in several shardings, so that each result is a value of its own.

    Args:
        in_specs, out_specs: the user's, one an argument and one a result leaf.
    """
    asked = {v: _plain(s) for v, s in zip(traced.flat.inputs, in_specs, strict=False) if s is not None}
    ops, outputs = list(traced.flat.ops), list(traced.flat.outputs)
    for k, spec in enumerate(out_specs):
        ref = outputs[k]
        if spec is None or not isinstance(ref, int) or asked.setdefault(ref, _plain(spec)) == _plain(spec):
            continue
        outputs[k] = copy = traced.types.new(traced.types[ref])
        ops.append(Op("copy", (ref,), (copy,), lambda xs: xs, "a result in another sharding"))
    return dataclasses.replace(traced, flat=Flat(traced.flat.inputs, tuple(ops), tuple(outputs)))


def _plain(spec: Sequence[Any]) -> PartitionSpec:
    """Without trailing Nones, and equal if it means the same."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
