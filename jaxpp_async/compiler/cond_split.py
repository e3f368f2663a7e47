"""Split conds and calls outside the loops, so that each piece can run on the actor that holds its data.

`split_cond` splits one cond into several, `merge_parts` merges several conds of this kind into one again, and
`expand_op` replaces a call or a cond by the operations inside it. None of these functions changes the values
that are computed. `compiler.placement` decides which operations are split or expanded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from jaxpp_async.compiler.ir import Flat, Lit, Loop, Op, Ref, Types, used_ids
from jaxpp_async.compiler.primitives import ENLARGING

# Sending a value of up to this size in bytes costs next to nothing, so the actor that has it need not run its
# users.
SMALL_BYTES = 64

# A value of up to this size in bytes (a scalar, a key) is computed again rather than shared between the parts
# of a cond.
SCALAR_BYTES = 16


def is_repeatable(op: Op, types: Types) -> bool:
    """Return whether each part of a split cond should compute an operation again instead of sharing its
    result.

    This is so if all operands are at most `SCALAR_BYTES` large, and either all results are too or the
    operation only makes a large array from a small one, such as a broadcast.
    """
    if any(types.sizes[r] > SCALAR_BYTES for r in op.reads):
        return False
    return op.name in ENLARGING or all(types.sizes[o] <= SCALAR_BYTES for o in op.outputs if o >= 0)


# ---------------------------------------------------------------- one cond into several


def split_cond(op: Op, used: set[int], types: Types) -> list[Op]:
    """Split a cond into several, so that results in different conds share no computed array.

    If two results are computed from the same array in some branch, one cond makes both. This rule does not
    apply to scalars, nor to arrays made from scalars by layout operations such as broadcasts, since each cond
    computes these again.

    Args:
        op: a cond, that is an operation with `branches`.
        used: the value ids that later operations need; results with other ids are dropped.
        types: the type of every value id.

    Returns:
        The new conds. If `op` is already a part of a split cond, a list with only `op`.
    """
    assert op.branches is not None
    if op.branches.whole is not None:
        return [op]
    wanted = [k for k, o in enumerate(op.outputs) if o in used]
    bodies = tuple(_split_inside(body, wanted, types) for body in op.branches.bodies)
    whole = _WholeCond(dataclasses.replace(op, branches=dataclasses.replace(op.branches, bodies=bodies)))
    return [whole.part(group) for group in _groups(bodies, wanted, types)]


def merge_parts(parts: Sequence[Op]) -> Op:
    """Merge several parts of one split cond into one operation, since every cond costs time on a device."""
    assert parts[0].branches is not None and parts[0].branches.whole is not None
    whole = parts[0].branches.whole
    asked = {o for part in parts for o in part.outputs}
    return _WholeCond(whole).part([k for k, o in enumerate(whole.outputs) if o in asked])


def _merge_inside(body: Flat) -> Flat:
    """Return a copy of a body in which the parts of each cond that `split_cond` split are merged again."""
    groups: dict[int, list[Op]] = {}
    for op in body.ops:
        if isinstance(op, Op) and op.branches is not None and op.branches.whole is not None:
            groups.setdefault(id(op.branches.whole), []).append(op)
    replacements = {id(group[0]): merge_parts(group) for group in groups.values() if len(group) > 1}
    dropped = {id(op) for group in groups.values() for op in group[1:]}
    return Flat(
        body.inputs,
        tuple(replacements.get(id(op), op) for op in body.ops if id(op) not in dropped),
        body.outputs,
    )


def _split_inside(body: Flat, wanted: Sequence[int], types: Types) -> Flat:
    """Split the conds inside a branch's body, and drop the operations that no wanted result needs.

    Args:
        body: the branch's body.
        wanted: the positions of the branch's results that are used.
        types: the type of every value id.
    """
    ops: list[Op | Loop] = []
    needed = {r for k in wanted if isinstance(r := body.outputs[k], int)}
    for op in reversed(body.ops):
        if any(o in needed for o in op.outputs):
            parts = split_cond(op, needed, types) if isinstance(op, Op) and op.branches is not None else [op]
            ops += reversed(parts)
            needed.update(r for part in parts for r in part.reads)
    return Flat(body.inputs, tuple(reversed(ops)), body.outputs)


def _groups(bodies: Sequence[Flat], wanted: Sequence[int], types: Types) -> list[list[int]]:
    """Group a cond's results, so that two results that share a computed array in some branch are in one
    group.

    Args:
        bodies: one body per branch.
        wanted: the positions of the results to group.
        types: the type of every value id.

    Returns:
        The groups, each a list of result positions.
    """
    sets = _DisjointSets()
    for b, body in enumerate(bodies):
        made_by: dict[int, tuple[int, int]] = {}
        for n, op in enumerate(body.ops):
            sources = [made_by[r] for r in op.reads if r in made_by]
            if not sources and isinstance(op, Op) and is_repeatable(op, types):
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


class _DisjointSets:
    """A union-find structure over the operations and results of a cond.

    An operation is identified by (branch, position in the branch's body), and a result by (-1, position).
    """

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


class _WholeCond:
    """A cond from which smaller conds can be made, each with only some of the whole cond's results.

    Making a part takes time in proportion to the part, not to the whole cond.
    """

    def __init__(self, op: Op) -> None:
        assert op.branches is not None
        self.op, self.branches = op, op.branches
        self.makers = [
            {o: n for n, inner in enumerate(b.ops) for o in inner.outputs} for b in self.branches.bodies
        ]
        self.positions = [{v: p for p, v in enumerate(b.inputs)} for b in self.branches.bodies]

    def part(self, results: Sequence[int]) -> Op:
        """Return a cond that computes only the given results.

        Args:
            results: positions among the whole cond's results.

        Returns:
            A cond with only the operands that its branches use. If a single result is asked for, and every
            branch returns an operand or a constant for this result, an operation `copy` or `select_n`
            instead.
        """
        op, bodies = self.op, [self._reduced(b, results) for b in range(len(self.branches.bodies))]
        used = [used_ids(b.ops, b.outputs) for b in bodies]
        kept = sorted({at[v] for at, u in zip(self.positions, used, strict=True) for v in u if v in at})
        wholes = zip(bodies, self.branches.bodies, strict=True)
        bodies = [Flat(tuple(whole.inputs[p] for p in kept), b.ops, b.outputs) for b, whole in wholes]
        operands, outputs = tuple(op.inputs[p + 1] for p in kept), tuple(op.outputs[k] for k in results)
        if len(results) == 1 and not any(b.ops for b in bodies):
            cases = [_mapped(b.outputs[0], dict(zip(b.inputs, operands, strict=True))) for b in bodies]
            return _select_one(op, cases, outputs[0])
        branches = dataclasses.replace(self.branches, bodies=tuple(bodies), whole=op)
        run = branches.choose(bodies)
        return dataclasses.replace(
            op, inputs=(op.inputs[0], *operands), outputs=outputs, run=run, branches=branches
        )

    def _reduced(self, branch: int, results: Sequence[int]) -> Flat:
        """Return a branch's body with only the operations that the given results need.

        If conds in the body are parts of one split cond, they are merged into one.

        Args:
            branch: the branch's index.
            results: the positions of the results to keep among the cond's results.
        """
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


def _select_one(op: Op, cases: Sequence[Ref], output: int) -> Op:
    """Make the operation that selects one of several values, all of which are already computed.

    Args:
        op: the cond that is replaced; its first input chooses the case.
        cases: one value per branch.
        output: the id of the selected value.

    Returns:
        An operation `copy` if all cases are the same value, else a `select_n`.
    """
    if len(cases) == 1 or all(isinstance(c, int) and c == cases[0] for c in cases):
        return Op("copy", (cases[0],), (output,), list, op.line, op.transposed)
    assert op.branches is not None
    select = op.branches.select
    return Op("select_n", (op.inputs[0], *cases), (output,), select, op.line, op.transposed)


# ---------------------------------------------------------------- an operation replaced by those inside it


def can_expand(op: Op) -> bool:
    """Return whether `op` is a call or cond that `expand_op` can replace by the operations inside it."""
    return op.expand is not None or (op.branches is not None and op.branches.terminates)


def has_constant_choice(op: Op) -> bool:
    """Return whether `op` is a cond whose branch is chosen by a constant."""
    return op.branches is not None and isinstance(op.inputs[0], Lit)


def expand_op(op: Op, types: Types) -> list[Op]:
    """Return operations that replace a call or a cond and compute its results under the same value ids.

    A call is replaced by the operations inside it. A cond is replaced by the operations of all its branches,
    and by operations that select the results of the chosen branch. If a constant chooses the branch, only the
    operations of that branch are used.
    """
    made: list[Op] = []
    if op.expand is not None:
        ops, results = op.expand()
        mapping: dict[int, Ref] = {}
        _append_copies(ops, mapping, made, types)
        cases = [[_mapped(r, mapping) for r in results]]
    else:
        assert op.branches is not None
        cases, choice, bodies = [], op.inputs[0], op.branches.bodies
        for body in [bodies[int(choice.value)]] if isinstance(choice, Lit) else bodies:
            mapping = dict(zip(body.inputs, op.inputs[1:], strict=True))
            _append_copies((o for o in body.ops if isinstance(o, Op)), mapping, made, types)
            cases.append([_mapped(r, mapping) for r in body.outputs])
    results_of = zip(op.outputs, zip(*cases, strict=True), strict=True)
    return made + [_select_one(op, refs, output) for output, refs in results_of if output >= 0]


def _mapped(ref: Ref, mapping: dict[int, Ref]) -> Ref:
    return mapping.get(ref, ref) if isinstance(ref, int) else ref


def _append_copies(ops: Iterable[Op], mapping: dict[int, Ref], made: list[Op], types: Types) -> None:
    """Append copies of `ops` to `made` with new value ids.

    Args:
        ops: the operations to copy, in program order.
        mapping: a dictionary. Its keys are old value ids; its values are the values that replace them.
            Entries for the results of the copied operations are added.
        made: the list that the copies are appended to.
        types: the type of every value id; new ids are added to it.
    """
    copies = []
    for op in ops:
        inputs = tuple(_mapped(r, mapping) for r in op.inputs)
        # The operations inside a call read values of the body around the call.
        expand = _rebased_expand(op, mapping, types) if op.expand is not None else None
        outputs = tuple(o if o < 0 else types.new(types[o], like=o) for o in op.outputs)
        mapping.update((o, new) for o, new in zip(op.outputs, outputs, strict=True) if o >= 0)
        copies.append(dataclasses.replace(op, inputs=inputs, outputs=outputs, expand=expand))
    wholes: dict[int, Op] = {}
    made += [_with_whole_renamed(op, mapping, wholes) for op in copies]


def _with_whole_renamed(op: Op, mapping: dict[int, Ref], wholes: dict[int, Op]) -> Op:
    """Replace the value ids in the whole cond that a part of a split cond refers to, and return the part.

    The whole cond is `op.branches.whole`.

    Args:
        op: an operation whose inputs and outputs are replaced already. If the operation is not a part of a
            split cond, it is returned unchanged.
        mapping: a dictionary. Its keys are old value ids; its values are the values that replace them.
        wholes: a cache of the whole conds with replaced ids, so that all parts of a cond refer to the same
            one. Its keys are the `id()`s of the original conds.
    """
    if op.branches is None or (whole := op.branches.whole) is None:
        return op
    if id(whole) not in wholes:
        outputs = [_mapped(o, mapping) for o in whole.outputs]
        wholes[id(whole)] = dataclasses.replace(
            whole,
            inputs=tuple(_mapped(r, mapping) for r in whole.inputs),
            outputs=tuple(o if isinstance(o, int) else -1 for o in outputs),
        )
    return dataclasses.replace(op, branches=dataclasses.replace(op.branches, whole=wholes[id(whole)]))


def _rebased_expand(
    op: Op, mapping: dict[int, Ref], types: Types
) -> Callable[[], tuple[tuple[Op, ...], tuple[Ref, ...]]]:
    """Return the function `expand` for a copy of a call that reads other operands than the original call.

    Args:
        op: the original call. Its `op.expand` is the function that returns the operations inside the call.
        mapping: a dictionary. Its keys are ids of the original operands; its values are the values to read
            instead.
        types: the type of every value id; types of new values are added to it.

    Returns:
        A function that returns the operations inside the copied call, with new value ids, and the values that
        are the call's results.
    """
    here = {r: mapping[r] for r in op.reads if r in mapping}

    def expand() -> tuple[tuple[Op, ...], tuple[Ref, ...]]:
        assert op.expand is not None
        ops, results = op.expand()
        inner, made = dict(here), []
        _append_copies(ops, inner, made, types)
        return tuple(made), tuple(_mapped(r, inner) for r in results)

    return expand
