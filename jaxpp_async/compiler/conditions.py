"""compiler.conditions: takes conds and calls outside the loops apart, so that each part can run where its data lives.

In: one operation that carries its branches (or what it wraps). Out: operations that compute the same. Where things run
is decided in `placement`, which says what is to be taken apart. No jax: payloads come with the operation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from jaxpp_async.compiler.ir import Branches, Flat, Loop, Op, Ref, Types, used_ids

# Up to this size a value is a scalar or nearly one: computed again, or sent, at no cost that matters.
SMALL_BYTES = 64

# They only lay out what they are given: made again from a small operand rather than sent.
LAYOUT = frozenset(("broadcast_in_dim", "convert_element_type", "copy", "iota", "reshape", "squeeze", "expand_dims"))


def repeatable(op: Op, types: Types) -> bool:
    """Whether computing `op` again costs less than it would to share its result."""
    if any(types[r].aval.size_bytes > SMALL_BYTES for r in op.reads):
        return False
    return op.name in LAYOUT or all(types[o].aval.size_bytes <= SMALL_BYTES for o in op.outputs if o >= 0)


# ---------------------------------------------------------------- one cond into several


def split(op: Op, used: set[int], types: Types) -> list[Op]:
    """A cond as one cond for each group of results that share no computed array.

    Scalars and what is laid out from them count for nothing here: each group computes its own.

    Args:
        op: with `branches`.
        used: the value ids that anything needs; other results are dropped.
    """
    assert op.branches is not None
    wanted = [k for k, o in enumerate(op.outputs) if o in used]
    bodies = [_reduced(_split_inside(body, types), wanted) for body in op.branches.bodies]
    return [_part(op, op.branches, bodies, group) for group in _groups(bodies, wanted, types)]


def _split_inside(body: Flat, types: Types) -> Flat:
    ops: list[Op | Loop] = []
    used = used_ids(body.ops, body.outputs)
    for op in body.ops:
        ops += split(op, used, types) if isinstance(op, Op) and op.branches is not None else [op]
    return Flat(body.inputs, tuple(ops), body.outputs)


def _reduced(body: Flat, results: Sequence[int]) -> Flat:
    """A body with what only these results need; the others keep their positions."""
    needed = {r for k in results if isinstance(r := body.outputs[k], int)}
    kept = []
    for op in reversed(body.ops):
        if any(o in needed for o in op.outputs):
            kept.append(op)
            needed.update(op.reads)
    return Flat(body.inputs, tuple(reversed(kept)), body.outputs)


def _groups(bodies: Sequence[Flat], wanted: Sequence[int], types: Types) -> list[list[int]]:
    """Results that share a computed array in some branch, directly or through others; small ones form one group."""
    sets = _Sets()
    small = [k for k in wanted if all(_is_small(body.outputs[k], types) for body in bodies)]
    computed: set[int] = set()  # results that need more than what is computed anew
    for b, body in enumerate(bodies):
        made_by: dict[int, tuple[int, int]] = {}
        for n, op in enumerate(body.ops):
            sources = [made_by[r] for r in op.reads if r in made_by]
            if not sources and isinstance(op, Op) and repeatable(op, types):
                continue
            for source in sources:
                sets.join((b, n), source)
            made_by.update((o, (b, n)) for o in op.outputs)
        for k in wanted:
            ref = body.outputs[k]
            if isinstance(ref, int) and ref in made_by:
                sets.join((-1, k), made_by[ref])
                computed.add(k)
    scalars = [k for k in small if k not in computed]
    for k in scalars:
        sets.join((-1, k), (-1, scalars[0]))
    groups: dict[tuple[int, int], list[int]] = {}
    for k in wanted:
        groups.setdefault(sets.find((-1, k)), []).append(k)
    return list(groups.values())


def _is_small(ref: Ref, types: Types) -> bool:
    return not isinstance(ref, int) or types[ref].aval.size_bytes <= SMALL_BYTES


class _Sets:
    """Disjoint sets."""

    def __init__(self) -> None:
        self._parent: dict[tuple[int, int], tuple[int, int]] = {}

    def find(self, x: tuple[int, int]) -> tuple[int, int]:
        root = x
        while (parent := self._parent.get(root, root)) != root:
            root = parent
        while x != root:
            self._parent[x], x = root, self._parent.get(x, x)
        return root

    def join(self, x: tuple[int, int], y: tuple[int, int]) -> None:
        self._parent[self.find(x)] = self.find(y)


def _part(op: Op, branches: Branches, bodies: Sequence[Flat], results: Sequence[int]) -> Op:
    """The cond of some results only."""
    outputs = tuple(op.outputs[k] for k in results)
    reduced = [_reduced(body, results) for body in bodies]
    chosen = [Flat(b.inputs, b.ops, tuple(b.outputs[k] for k in results)) for b in reduced]
    used = [used_ids(b.ops, b.outputs) for b in chosen]
    kept = [p for p in range(len(op.inputs) - 1) if any(b.inputs[p] in u for b, u in zip(chosen, used, strict=True))]
    chosen = [Flat(tuple(b.inputs[p] for p in kept), b.ops, b.outputs) for b in chosen]
    operands = tuple(op.inputs[p + 1] for p in kept)
    if len(results) == 1 and not any(b.ops for b in chosen):
        cases = [_at(b.outputs[0], dict(zip(b.inputs, operands, strict=True))) for b in chosen]
        return _selected(op, branches, cases, outputs[0])
    made = dataclasses.replace(branches, bodies=tuple(chosen))
    return dataclasses.replace(
        op, inputs=(op.inputs[0], *operands), outputs=outputs, run=branches.choose(chosen), branches=made
    )


def _selected(op: Op, branches: Branches, cases: Sequence[Ref], output: int) -> Op:
    """`output` as one of `cases`, all of which are there."""
    if all(isinstance(c, int) and c == cases[0] for c in cases):
        return Op("copy", (cases[0],), (output,), list, op.line, op.transposed)
    return Op("select_n", (op.inputs[0], *cases), (output,), branches.select, op.line, op.transposed)


# ---------------------------------------------------------------- an operation into what is inside it


def can_open(op: Op) -> bool:
    """Whether `opened` may be asked for `op`."""
    return op.expand is not None or (op.branches is not None and op.branches.ends)


def opened(op: Op, types: Types) -> list[Op]:
    """What is inside an operation, in its place. Of a cond every branch is computed, and its results are selected."""
    made: list[Op] = []
    if op.expand is not None:
        ops, results = op.expand()
        mapping: dict[int, Ref] = {}
        _copy(ops, mapping, made, types)
        made += [
            Op("copy", (_at(r, mapping),), (o,), list, op.line, op.transposed)
            for r, o in zip(results, op.outputs, strict=True)
            if o >= 0
        ]
        return made
    assert op.branches is not None
    cases: list[list[Ref]] = []
    for body in op.branches.bodies:
        mapping = dict(zip(body.inputs, op.inputs[1:], strict=True))
        _copy((o for o in body.ops if isinstance(o, Op)), mapping, made, types)
        cases.append([_at(r, mapping) for r in body.outputs])
    for output, of_branches in zip(op.outputs, zip(*cases, strict=True), strict=True):
        if output >= 0:
            made.append(_selected(op, op.branches, of_branches, output))
    return made


def _at(ref: Ref, mapping: dict[int, Ref]) -> Ref:
    return mapping.get(ref, ref) if isinstance(ref, int) else ref


def _copy(ops: Iterable[Op], mapping: dict[int, Ref], made: list[Op], types: Types) -> None:
    """Append `ops` to `made` over new value ids, which `mapping` learns."""
    for op in ops:
        inputs = tuple(_at(r, mapping) for r in op.inputs)
        # What is inside a call names values of the body it stands in.
        expand = _moved(op, mapping, types) if op.expand is not None else None
        outputs = tuple(o if o < 0 else types.new(types[o]) for o in op.outputs)
        mapping.update((o, new) for o, new in zip(op.outputs, outputs, strict=True) if o >= 0)
        made.append(dataclasses.replace(op, inputs=inputs, outputs=outputs, expand=expand))


def _moved(op: Op, mapping: dict[int, Ref], types: Types) -> Callable[[], tuple[tuple[Op, ...], tuple[Ref, ...]]]:
    """`op.expand` with the values it stands among now."""
    here = {r: mapping[r] for r in op.reads if r in mapping}

    def expand() -> tuple[tuple[Op, ...], tuple[Ref, ...]]:
        assert op.expand is not None
        ops, results = op.expand()
        inner, made = dict(here), []
        _copy(ops, inner, made, types)
        return tuple(made), tuple(_at(r, inner) for r in results)

    return expand
