"""compiler.conditions: takes conds and calls outside the loops apart, so that each part can run where its data lives.

In: one operation that carries its branches (or what it wraps). Out: operations that compute the same. Where things run
is decided in `placement`, which says what is to be taken apart. No jax: payloads come with the operation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from jaxpp_async.compiler.ir import Branches, Flat, Lit, Loop, Op, Ref, Types, used_ids
from jaxpp_async.compiler.primitives import LAID_OUT

# Up to this size a value is sent at no cost that matters, and says nothing about where its users should run.
SMALL_BYTES = 64

# Up to this size (a scalar, a key) it is computed again rather than shared between the parts of a cond.
SCALAR_BYTES = 16


def repeatable(op: Op, types: Types) -> bool:
    """Whether computing `op` again costs less than it would to share its result."""
    if any(types.sizes[r] > SCALAR_BYTES for r in op.reads):
        return False
    return op.name in LAID_OUT or all(types.sizes[o] <= SCALAR_BYTES for o in op.outputs if o >= 0)


# ---------------------------------------------------------------- one cond into several


def split(op: Op, used: set[int], types: Types) -> list[Op]:
    """A cond as one cond for each group of results that share no computed array.

    Scalars and what is laid out from them count for nothing here: each group computes its own.

    Args:
        op: with `branches`.
        used: the value ids that anything needs; other results are dropped.
    """
    assert op.branches is not None
    if op.branches.whole is not None:
        return [op]
    wanted = [k for k, o in enumerate(op.outputs) if o in used]
    bodies = tuple(_split_inside(body, wanted, types) for body in op.branches.bodies)
    whole = _Whole(dataclasses.replace(op, branches=dataclasses.replace(op.branches, bodies=bodies)))
    return [whole.part(group) for group in _groups(bodies, wanted, types)]


def merged(parts: Sequence[Op]) -> Op:
    """Parts of one cond as one operation again: choosing costs time on a device."""
    assert parts[0].branches is not None and parts[0].branches.whole is not None
    whole = parts[0].branches.whole
    asked = {o for part in parts for o in part.outputs}
    return _Whole(whole).part([k for k, o in enumerate(whole.outputs) if o in asked])


def _merge_inside(body: Flat) -> Flat:
    """The parts of conds inside a body, as one each."""
    groups: dict[int, list[Op]] = {}
    for op in body.ops:
        if isinstance(op, Op) and op.branches is not None and op.branches.whole is not None:
            groups.setdefault(id(op.branches.whole), []).append(op)
    others = {id(group[0]): merged(group) for group in groups.values() if len(group) > 1}
    dropped = {id(op) for group in groups.values() for op in group[1:]}
    return Flat(
        body.inputs, tuple(others.get(id(op), op) for op in body.ops if id(op) not in dropped), body.outputs
    )


def _split_inside(body: Flat, wanted: Sequence[int], types: Types) -> Flat:
    """A branch's body with the conds in it split, without what no wanted result needs."""
    ops: list[Op | Loop] = []
    needed = {r for k in wanted if isinstance(r := body.outputs[k], int)}
    for op in reversed(body.ops):
        if any(o in needed for o in op.outputs):
            parts = split(op, needed, types) if isinstance(op, Op) and op.branches is not None else [op]
            ops += reversed(parts)
            needed.update(r for part in parts for r in part.reads)
    return Flat(body.inputs, tuple(reversed(ops)), body.outputs)


def _groups(bodies: Sequence[Flat], wanted: Sequence[int], types: Types) -> list[list[int]]:
    """Results that share a computed array in some branch, directly or through others."""
    sets = _Sets()
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
    groups: dict[tuple[int, int], list[int]] = {}
    for k in wanted:
        groups.setdefault(sets.find((-1, k)), []).append(k)
    return list(groups.values())


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


class _Whole:
    """A cond from which parts are taken, each at the cost of its own size."""

    def __init__(self, op: Op) -> None:
        assert op.branches is not None
        self.op, self.branches = op, op.branches
        self.makers = [
            {o: n for n, inner in enumerate(b.ops) for o in inner.outputs} for b in self.branches.bodies
        ]
        self.positions = [{v: p for p, v in enumerate(b.inputs)} for b in self.branches.bodies]

    def part(self, results: Sequence[int]) -> Op:
        """The cond of some results only."""
        op, bodies = self.op, [self._reduced(b, results) for b in range(len(self.branches.bodies))]
        used = [used_ids(b.ops, b.outputs) for b in bodies]
        kept = sorted({at[v] for at, u in zip(self.positions, used, strict=True) for v in u if v in at})
        bodies = [
            Flat(tuple(all_of.inputs[p] for p in kept), b.ops, b.outputs)
            for b, all_of in zip(bodies, self.branches.bodies, strict=True)
        ]
        operands, outputs = tuple(op.inputs[p + 1] for p in kept), tuple(op.outputs[k] for k in results)
        if len(results) == 1 and not any(b.ops for b in bodies):
            cases = [_at(b.outputs[0], dict(zip(b.inputs, operands, strict=True))) for b in bodies]
            return _selected(op, self.branches, cases, outputs[0])
        branches = dataclasses.replace(self.branches, bodies=tuple(bodies), whole=op)
        run = branches.choose(bodies)
        return dataclasses.replace(
            op, inputs=(op.inputs[0], *operands), outputs=outputs, run=run, branches=branches
        )

    def _reduced(self, branch: int, results: Sequence[int]) -> Flat:
        """A branch's body with what only these results need, conds in it whole again where it has several "
        "parts."""
        body, makers = self.branches.bodies[branch], self.makers[branch]
        outputs = tuple(body.outputs[k] for k in results)
        kept: set[int] = set()
        stack = [r for r in outputs if isinstance(r, int)]
        while stack:
            n = makers.get(stack.pop())
            if n is not None and n not in kept:
                kept.add(n)
                stack += body.ops[n].reads
        return _merge_inside(Flat(body.inputs, tuple(body.ops[n] for n in sorted(kept)), outputs))


def _selected(op: Op, branches: Branches, cases: Sequence[Ref], output: int) -> Op:
    """`output` as one of `cases`, all of which are there."""
    if len(cases) == 1 or all(isinstance(c, int) and c == cases[0] for c in cases):
        return Op("copy", (cases[0],), (output,), list, op.line, op.transposed)
    return Op("select_n", (op.inputs[0], *cases), (output,), branches.select, op.line, op.transposed)


# ---------------------------------------------------------------- an operation into what is inside it


def can_open(op: Op) -> bool:
    """Whether `opened` may be asked for `op`."""
    return op.expand is not None or (op.branches is not None and op.branches.ends)


def is_decided(op: Op) -> bool:
    """Whether `op` is a cond whose choice is known."""
    return op.branches is not None and isinstance(op.inputs[0], Lit)


def opened(op: Op, types: Types) -> list[Op]:
    """What is inside an operation, in its place.

    Of a cond every branch is computed, and its results are selected; of one that is decided, that branch.
    """
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
    choice = op.inputs[0]
    bodies = op.branches.bodies
    for body in [bodies[int(choice.value)]] if isinstance(choice, Lit) else bodies:
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
    copies = []
    for op in ops:
        inputs = tuple(_at(r, mapping) for r in op.inputs)
        # What is inside a call names values of the body it stands in.
        expand = _moved(op, mapping, types) if op.expand is not None else None
        outputs = tuple(o if o < 0 else types.new(types[o]) for o in op.outputs)
        mapping.update((o, new) for o, new in zip(op.outputs, outputs, strict=True) if o >= 0)
        copies.append(dataclasses.replace(op, inputs=inputs, outputs=outputs, expand=expand))
    wholes: dict[int, Op] = {}
    made += [_among(op, mapping, wholes) for op in copies]


def _among(op: Op, mapping: dict[int, Ref], wholes: dict[int, Op]) -> Op:
    """A part of a cond, with the cond over new value ids too; the same one (in `wholes`) for all its "
    "parts."""
    if op.branches is None or (whole := op.branches.whole) is None:
        return op
    if id(whole) not in wholes:
        outputs = [_at(o, mapping) for o in whole.outputs]
        wholes[id(whole)] = dataclasses.replace(
            whole,
            inputs=tuple(_at(r, mapping) for r in whole.inputs),
            outputs=tuple(o if isinstance(o, int) else -1 for o in outputs),
        )
    return dataclasses.replace(op, branches=dataclasses.replace(op.branches, whole=wholes[id(whole)]))


def _moved(
    op: Op, mapping: dict[int, Ref], types: Types
) -> Callable[[], tuple[tuple[Op, ...], tuple[Ref, ...]]]:
    """`op.expand` with the values it stands among now."""
    here = {r: mapping[r] for r in op.reads if r in mapping}

    def expand() -> tuple[tuple[Op, ...], tuple[Ref, ...]]:
        assert op.expand is not None
        ops, results = op.expand()
        inner, made = dict(here), []
        _copy(ops, inner, made, types)
        return tuple(made), tuple(_at(r, inner) for r in results)

    return expand
