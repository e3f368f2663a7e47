"""Pair a step's results with the arguments that they continue, as a state from step to step.

Placement keeps such a pair on the same actors, donation reuses the argument's memory, and a donated argument
of an interrupted `run` stands for its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax import tree_util

from jaxpp_async.compiler.ir import Loop, Traced, literal_type
from jaxpp_async.program.instructions import Aval


def result_positions(traced: Traced) -> Any:
    """Return the tree of results with each one's position; None where a result is known by its type
    (`float0`)."""
    tree = tree_util.tree_unflatten(traced.out_tree, list(range(len(traced.out_names))))
    return tree_util.tree_map(lambda k: k if isinstance(k, int) else None, tree)


def continued_arguments(traced: Traced) -> dict[int, int]:
    """Map result leaves to the argument leaves they continue, where a whole subtree of the result has the
    structure and types of an argument.

    Of arguments that are alike each is continued by the result that is made of it in the fewest operations:
    `p - 0.1 * m` continues `p` and not `m`. Where that tells nothing, their order decides. An argument most
    of whose leaves keep their types (beside its parameters a cache grows) is continued in those leaves. A
    result that is wholly another argument, handed back as it came, continues that argument alone.
    """
    out = result_positions(traced)
    flat = [tree_util.tree_flatten(arg) for arg in _argument_positions(traced)]
    trees = [(leaves, treedef) for leaves, treedef in flat if len(leaves) > 1]
    # Single arrays come last, since they fit in many places.
    single = [(leaves, treedef) for leaves, treedef in flat if len(leaves) == 1]
    came_as = {v: traced.arg_of[arg] for arg, v in enumerate(traced.flat.inputs[: len(traced.arg_of)])}
    found: dict[int, int] = {}
    taken: set[int] = set()

    def handed_back_arguments(candidate: list[int]) -> set[int]:
        """Return the arguments that the candidate wholly consists of, as they came; none if it is made of
        other values."""
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


_LOOP_STEPS, _FAR = 1 << 10, 1 << 20
"""The number of operations that a loop counts for, and the distance of a result that is not made of an
argument."""

_LOOKED_AT = 3
"""The number of a tree's leaves whose distance from a result is measured."""


def _nearest_first(
    traced: Traced, pairs: Sequence[tuple[list[int], list[int]]]
) -> Sequence[tuple[list[int], list[int]]]:
    """Sort pairs of an argument and a result that may continue it by the number of operations between the
    two."""
    if len(pairs) < 2:
        return pairs
    sources = sorted({leaf for leaves, _ in pairs for leaf in leaves[:_LOOKED_AT]})
    made = {leaf: _operations_from(traced, traced.flat.inputs[leaf]) for leaf in sources}

    def distance(pair: tuple[list[int], list[int]]) -> int:
        near = list(zip(*pair, strict=True))[:_LOOKED_AT]
        return sum(made[leaf].get(traced.flat.outputs[result], _FAR) for leaf, result in near)

    return sorted(pairs, key=distance)


def _operations_from(traced: Traced, value: int) -> dict[Any, int]:
    """Count the operations on the shortest way from `value` to each value that is made of it."""
    steps: dict[Any, int] = {value: 0}
    for op in traced.flat.ops:
        if reached := [steps[r] for r in op.reads if r in steps]:
            away = min(reached) + (_LOOP_STEPS if isinstance(op, Loop) else 1)
            steps.update((v, away) for v in op.outputs if v not in steps)
    return steps


def changed_arguments(traced: Traced, donated: Sequence[int], continues: Mapping[int, int]) -> list[str]:
    """Describe the donated arguments whose memory no result takes over, though a result of another shape or
    dtype stands in their place.

    An argument that is itself a result, elsewhere, is left out, and so is one in whose place a scalar stands:
    that is a loss beside a batch.

    Args:
        donated: argument numbers.
        continues: as of `continued_arguments`.

    Returns:
        One text for each such leaf, with its result.
    """
    out = result_positions(traced)
    several = type(out) is tuple
    handed_back = {ref for ref in traced.flat.outputs if isinstance(ref, int)}
    found: list[str] = []
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
            was, now = _type_text(traced, value), _type_text(traced, ref)
            if was != now and value not in handed_back and not is_loss:
                found.append(f"{traced.arg_names[leaf]} {was} as {traced.out_names[result]} {now}")
    return found


def _argument_positions(traced: Traced) -> Any:
    return tree_util.tree_unflatten(traced.in_tree, list(range(len(traced.arg_names))))


def _holds_for_most(flags: Sequence[bool]) -> bool:
    return 2 * sum(flags) > len(flags)


def _type_text(traced: Traced, ref: Any) -> str:
    aval = _aval(traced, ref)
    return f"{aval.dtype}{list(aval.shape)}"


def _aval(traced: Traced, ref: Any) -> Aval:
    return traced.types[ref].aval if isinstance(ref, int) else literal_type(ref).aval


def _find_subtree(tree: Any, treedef: Any, fits: Callable[[list[int]], bool]) -> list[int] | None:
    return next((leaves for leaves in _subtrees(tree, treedef) if fits(leaves)), None)


def _subtrees(tree: Any, treedef: Any) -> Iterator[list[int]]:
    """Return the leaves of each part of a tree that has this structure."""
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
