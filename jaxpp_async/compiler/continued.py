"""compiler.continued: pair a step's results with the arguments that they continue, as a state from step to step.

Placement keeps such a pair on the same actors, donation reuses the argument's memory, and a donated argument of an
interrupted `run` stands for its result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import tree_util

from jaxpp_async.compiler.ir import Traced
from jaxpp_async.compiler.recipes import literal_type


def result_positions(traced: Traced) -> Any:
    """The tree of results, with each one's position; None where a result is known by its type (`float0`)."""
    tree = tree_util.tree_unflatten(traced.out_tree, list(range(len(traced.out_names))))
    return tree_util.tree_map(lambda k: k if isinstance(k, int) else None, tree)


def continued_arguments(traced: Traced) -> dict[int, int]:
    """Result leaf to argument leaf, where a whole subtree of the result has the structure and types of an argument.

    Arguments that are alike are continued in their order. An argument most of whose leaves keep their types (beside its
    parameters a cache grows) is continued in those. A result that is wholly another argument, handed back as it came,
    continues that one alone.
    """
    out = result_positions(traced)
    flat = [tree_util.tree_flatten(arg) for arg in _argument_positions(traced)]
    trees = [(leaves, treedef) for leaves, treedef in flat if len(leaves) > 1]
    single = [(leaves, treedef) for leaves, treedef in flat if len(leaves) == 1]  # last: they fit in many a place
    came_as = {v: traced.arg_of[arg] for arg, v in enumerate(traced.flat.inputs[: len(traced.arg_of)])}
    found: dict[int, int] = {}
    taken: set[int] = set()

    def is_another(candidate: list[int], argument: int) -> bool:
        refs = (traced.flat.outputs[k] for k in candidate)
        came = {came_as.get(ref) if isinstance(ref, int) else None for ref in refs}
        return bool(came) and None not in came and argument not in came

    for some, is_enough in ((trees, all), (trees, _are_most), (single, all)):
        for leaves, treedef in some:

            def fits(candidate: list[int], leaves: list[int] = leaves, is_enough: Callable = is_enough) -> bool:
                pairs = zip(candidate, leaves, strict=True)
                return (
                    taken.isdisjoint(candidate)
                    and is_enough([_same_type(traced, *pair) for pair in pairs])
                    and not is_another(candidate, traced.arg_of[leaves[0]])
                )

            if found.keys().isdisjoint(leaves) and (match := _find_subtree(out, treedef, fits)) is not None:
                taken.update(match)
                pairs = zip(match, leaves, strict=True)
                found.update({arg: result for result, arg in pairs if _same_type(traced, result, arg)})
    return {result: arg for arg, result in found.items()}


def changed_arguments(traced: Traced, donated: Sequence[int], continues: Mapping[int, int]) -> list[str]:
    """Of the donated arguments whose memory no result takes over, though one of another shape or dtype stands in their
    place: each such leaf and that result, as words.

    Args:
        donated: argument numbers.
        continues: as of `continued_arguments`.
    """
    out = result_positions(traced)
    handed_back = {ref for ref in traced.flat.outputs if isinstance(ref, int)}
    several = type(out) is tuple
    found: list[str] = []
    for position, arg in enumerate(_argument_positions(traced)):
        leaves, treedef = tree_util.tree_flatten(arg)
        if not leaves or traced.arg_of[leaves[0]] not in donated or set(leaves) & set(continues.values()):
            continue
        # In the same place among the results, or, unless it is a single array, wherever its tree is.
        place = out if not several and position == 0 else out[position] if several and position < len(out) else None
        match = [place] if isinstance(place, int) and isinstance(arg, int) else None
        if not isinstance(arg, int):
            match = _find_subtree(place, treedef, lambda _: True) or _find_subtree(
                out, treedef, lambda candidate: not set(candidate) & continues.keys()
            )
        for leaf, result in zip(leaves, match or (), strict=False):
            was, now = (_described(traced, ref) for ref in (traced.flat.inputs[leaf], traced.flat.outputs[result]))
            if was != now and traced.flat.inputs[leaf] not in handed_back:
                found.append(f"{traced.arg_names[leaf]} {was} as {traced.out_names[result]} {now}")
    return found


def _argument_positions(traced: Traced) -> Any:
    return tree_util.tree_unflatten(traced.in_tree, list(range(len(traced.arg_names))))


def _are_most(flags: Sequence[bool]) -> bool:
    return 2 * sum(flags) > len(flags)


def _described(traced: Traced, ref: Any) -> str:
    aval = traced.types[ref].aval if isinstance(ref, int) else literal_type(ref).aval
    return f"{aval.dtype}{list(aval.shape)}"


def _find_subtree(tree: Any, treedef: Any, fits: Callable[[list[int]], bool]) -> list[int] | None:
    leaves, found = tree_util.tree_flatten(tree)
    if found == treedef and fits(leaves):
        return leaves
    if tree_util.all_leaves([tree]):
        return None
    children = tree_util.default_registry.flatten_one_level(tree)
    for child in children[0] if children else ():
        if (match := _find_subtree(child, treedef, fits)) is not None:
            return match
    return None


def _same_type(traced: Traced, result: int, arg: int) -> bool:
    ref, argument = traced.flat.outputs[result], traced.types[traced.flat.inputs[arg]]
    if isinstance(ref, int):
        return traced.types[ref].aval == argument.aval and traced.types[ref].key_impl == argument.key_impl
    shape, dtype = getattr(ref.value, "shape", ()), str(getattr(ref.value, "dtype", ""))
    return (tuple(shape), dtype) == (argument.aval.shape, argument.aval.dtype)
