"""Find which result of a step is the next value of which argument; the result then continues the argument.

For example, the new state that a training step returns continues its state argument. Placement puts the
result on the same actors as the argument, and donation reuses the argument's memory for the result. After an
interrupted `run`, a donated argument refers to the result that continues the argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax import tree_util

from jaxpp_async.compiler.ir import Loop, Traced, literal_type
from jaxpp_async.program.instructions import Aval
from jaxpp_async.program.leaf_parts import Parts, leaf_names, part_positions


def result_positions(traced: Traced) -> Any:
    """Return the step's result tree with each leaf replaced by its position among the traced results.

    The position of a leaf that is divided is that of its first part. A leaf is None if the result has dtype
    `float0`, since no value is traced for such a result.
    """
    tree = tree_util.tree_unflatten(traced.out_tree, traced.result_positions)
    return tree_util.tree_map(lambda k: k if isinstance(k, int) else None, tree)


def continued_arguments(traced: Traced) -> dict[int, int]:
    """Find the result leaves that are the next value of an argument leaf.

    A result continues an argument if it is the argument's next value, such as the new state of a training
    step. An argument is continued by a subtree of the results that has the argument's tree structure and
    types. If several arguments have the same structure and types, each is continued by the result that is
    computed from this argument in the fewest operations. For example, `p - 0.1 * m` continues `p` and not
    `m`. If that leaves several choices, the order of arguments and results decides. If most leaves of an
    argument keep their types, but not all (for example parameters with a cache that grows), only the leaves
    that keep their types are continued. A result that is an argument returned unchanged continues only this
    argument.

    Returns:
        A dictionary. Its keys are positions of result leaves; its values are the positions of the argument
        leaves that they continue.
    """
    out = result_positions(traced)
    flat = [tree_util.tree_flatten(arg) for arg in _argument_positions(traced)]
    trees = [(leaves, treedef) for leaves, treedef in flat if len(leaves) > 1]
    # Arguments that are single arrays come last, since many results have their type.
    single = [(leaves, treedef) for leaves, treedef in flat if len(leaves) == 1]
    came_as = {v: traced.arg_of[arg] for arg, v in enumerate(traced.flat.inputs[: len(traced.arg_of)])}
    found: dict[int, int] = {}
    taken: set[int] = set()

    def handed_back_arguments(candidate: list[int]) -> set[int]:
        """Return the arguments whose leaves a result consists of, if the result has only unchanged argument
        leaves.

        Args:
            candidate: the positions of the result's leaves.

        Returns:
            The numbers of these arguments. The set is empty if some leaf of the result is not an unchanged
            argument leaf.
        """
        refs = (traced.flat.outputs[k] for k in candidate)
        came = {came_as.get(ref) if isinstance(ref, int) else None for ref in refs}
        return set() if None in came else {argument for argument in came if argument is not None}

    structures = {treedef for _, treedef in flat}
    parts = {
        treedef: [(p, handed_back_arguments(p)) for p in _subtrees(out, treedef)] for treedef in structures
    }
    for some, is_enough in ((trees, all), (trees, _holds_for_most), (single, all)):
        pairs: list[tuple[list[int], list[int]]] = []
        for leaves, treedef in some:
            if not found.keys().isdisjoint(leaves):
                continue
            for candidate, came in parts[treedef]:
                if not taken.isdisjoint(candidate) or (came and traced.arg_of[leaves[0]] not in came):
                    continue
                if is_enough([_same_type(traced, *pair) for pair in zip(candidate, leaves, strict=True)]):
                    pairs.append((leaves, candidate))
        for leaves, match in _nearest_first(traced, pairs):
            if found.keys().isdisjoint(leaves) and taken.isdisjoint(match):
                taken.update(match)
                matched = zip(match, leaves, strict=True)
                found.update({arg: result for result, arg in matched if _same_type(traced, result, arg)})
    return {result: arg for arg, result in found.items()}


_LOOP_DISTANCE, _UNRELATED = 1 << 10, 1 << 20
"""The number of operations that a microbatch loop counts as in a distance, and the distance between an
argument and a result that does not depend on it."""

_NUM_MEASURED_LEAVES = 3
"""The number of leaves of an argument, from the first, whose distance to a result is measured."""


def _nearest_first(
    traced: Traced, pairs: Sequence[tuple[list[int], list[int]]]
) -> Sequence[tuple[list[int], list[int]]]:
    """Sort pairs (an argument, a result that may be its next value) by distance, the closest pair first.

    The distance is the number of operations on the shortest path from the argument to the result, summed over
    their first few leaves.

    Args:
        traced: the step.
        pairs: pairs (leaves of an argument, leaves of a result). A leaf is given by its position.
    """
    if len(pairs) < 2:
        return pairs
    sources = sorted({leaf for leaves, _ in pairs for leaf in leaves[:_NUM_MEASURED_LEAVES]})
    made = {leaf: _operations_from(traced, traced.flat.inputs[leaf]) for leaf in sources}

    def distance(pair: tuple[list[int], list[int]]) -> int:
        near = list(zip(*pair, strict=True))[:_NUM_MEASURED_LEAVES]
        return sum(made[leaf].get(traced.flat.outputs[result], _UNRELATED) for leaf, result in near)

    return sorted(pairs, key=distance)


def _operations_from(traced: Traced, value: int) -> dict[Any, int]:
    """Return, for each value computed from `value`, the number of operations on the shortest path from
    `value`."""
    steps: dict[Any, int] = {value: 0}
    for op in traced.flat.ops:
        if reached := [steps[r] for r in op.reads if r in steps]:
            away = min(reached) + (_LOOP_DISTANCE if isinstance(op, Loop) else 1)
            steps.update((v, away) for v in op.outputs if v not in steps)
    return steps


def changed_arguments(traced: Traced, donated: Sequence[int], continues: Mapping[int, int]) -> list[str]:
    """Describe donated arguments whose memory cannot be reused because their new value has another type.

    Only arguments that no result continues are examined. The new value of such an argument is taken to be the
    result at the same position or, for a pytree, another result with the same tree structure. Two kinds of
    argument leaves are left out: leaves that are also returned unchanged, and arrays whose new value would be
    a scalar, since this scalar is probably the loss, returned at the position of a batch.

    Args:
        traced: the step.
        donated: the numbers of the donated arguments.
        continues: the dictionary that `continued_arguments` returned.

    Returns:
        One text per changed leaf, with the name and type of the argument leaf and of its new value.
    """
    out = result_positions(traced)
    several = type(out) is tuple
    handed_back = {ref for ref in traced.flat.outputs if isinstance(ref, int)}
    found: list[str] = []
    argument_names, argument_parts = _by_position(traced.arg_names, traced.argument_parts)
    result_names, result_parts = _by_position(traced.out_names, traced.result_parts)
    for position, arg in enumerate(_argument_positions(traced)):
        leaves, treedef = tree_util.tree_flatten(arg)
        if not leaves or traced.arg_of[leaves[0]] not in donated or set(leaves) & set(continues.values()):
            continue
        # The result in the same place, or, unless the argument is a single array, a result of its tree's
        # structure.
        places = out if several else (out,)
        place = places[position] if position < len(places) else None
        match = [place] if isinstance(place, int) and isinstance(arg, int) else None
        if not isinstance(arg, int):
            match = _find_subtree(place, treedef, lambda _: True) or _find_subtree(
                out, treedef, lambda candidate: not set(candidate) & continues.keys()
            )
        for leaf, result in zip(leaves, match or (), strict=False):
            value, ref = traced.flat.inputs[leaf], traced.flat.outputs[result]
            is_loss = _aval(traced, value).shape != () == _aval(traced, ref).shape
            was, now = (
                _type_text(traced, value, argument_parts[leaf]),
                _type_text(traced, ref, result_parts[result]),
            )
            if was != now and value not in handed_back and not is_loss:
                found.append(f"{argument_names[leaf]} {was} as {result_names[result]} {now}")
    return found


def _argument_positions(traced: Traced) -> Any:
    return tree_util.tree_unflatten(traced.in_tree, traced.argument_positions)


def _holds_for_most(flags: Sequence[bool]) -> bool:
    return 2 * sum(flags) > len(flags)


def _by_position(
    names: Sequence[str], leaves: Sequence[Parts | None]
) -> tuple[dict[int, str], dict[int, Parts | None]]:
    """Return the name and the parts of each leaf, by its position or that of its first part."""
    leaves = leaves or (None,) * len(names)
    firsts = [positions[0] for positions in part_positions(leaves)]
    return dict(zip(firsts, leaf_names(names, leaves), strict=True)), dict(zip(firsts, leaves, strict=True))


def _type_text(traced: Traced, ref: Any, parts: Parts | None) -> str:
    aval = _aval(traced, ref)
    return f"{aval.dtype}{list(aval.shape if parts is None else parts.whole_shape(aval.shape))}"


def _aval(traced: Traced, ref: Any) -> Aval:
    return traced.types[ref].aval if isinstance(ref, int) else literal_type(ref).aval


def _find_subtree(tree: Any, treedef: Any, fits: Callable[[list[int]], bool]) -> list[int] | None:
    return next((leaves for leaves in _subtrees(tree, treedef) if fits(leaves)), None)


def _subtrees(tree: Any, treedef: Any) -> Iterator[list[int]]:
    """Yield, for each subtree of `tree` that has the structure `treedef`, the list of its leaves."""
    leaves, found = tree_util.tree_flatten(tree)
    if found == treedef:
        yield leaves
    elif not tree_util.all_leaves([tree]):
        children = tree_util.default_registry.flatten_one_level(tree)
        for child in children[0] if children else ():
            yield from _subtrees(child, treedef)


def _same_type(traced: Traced, result: int, arg: int) -> bool:
    ref, argument = traced.flat.outputs[result], traced.types[traced.flat.inputs[arg]]
    if isinstance(ref, int):
        return traced.types[ref].aval == argument.aval and traced.types[ref].key_impl == argument.key_impl
    shape, dtype = getattr(ref.value, "shape", ()), str(getattr(ref.value, "dtype", ""))
    return (tuple(shape), dtype) == (argument.aval.shape, argument.aval.dtype)
