"""Choose the operations on a stage's gradients that wait for a scalar of an earlier stage's backward.

Clipping each microbatch's gradients by their norm over all stages scales every gradient by a scalar that is
known only when the backward of the first stage has run. Such an operation runs in a task of its own, the
stage's finish, where the gradient is: the scalar is sent, and no gradient. One microbatch's gradients of the
stage stay in memory until the scalar comes. Results of a finish are only accumulated; no task waits for one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class BackwardOps:
    """The backward operations of a loop's body, by their position in it, markers left out.

    Args:
        stage: the stage of each operation.
        gradients: for each operation, the large values of other backward operations that it reads, without
            values that are only filled with a small one.
        fits: for each operation, whether everything else that it reads is small, is filled with a small
            value, or can be made in every task.
        maker: a function from a value's id to the position of the operation that makes it.
        users: a function from the position of an operation to the positions of the operations that read its
            results; None if other things than operations and the loop's results read them.
    """

    stage: Mapping[int, int]
    gradients: Mapping[int, Sequence[int]]
    fits: Mapping[int, bool]
    maker: Callable[[int], int]
    users: Callable[[int], Collection[int] | None]


def choose_finishes(ops: BackwardOps) -> dict[int, int]:
    """Return the operations that run in the finish of a later stage than their operands ask for.

    Returns:
        A dictionary. Its keys are positions of operations; its values are the stages where their gradients
        are.
    """
    pinned: set[int] = set()
    while True:
        homes = _homes(ops, pinned)
        refused = set(_refused(ops, homes))
        if not refused:
            return homes
        pinned |= refused


def _homes(ops: BackwardOps, pinned: Collection[int]) -> dict[int, int]:
    """Return the stage of the gradient that each operation changes, if the operation waits for an earlier
    stage.

    Args:
        ops: the backward operations.
        pinned: the positions of operations that stay in the backward of their stage.
    """
    found: dict[int, int] = {}
    for i in sorted(ops.stage):
        if i in pinned or not ops.fits[i] or not ops.gradients[i]:
            continue
        makers = [ops.maker(v) for v in ops.gradients[i]]
        homes = {found.get(m, ops.stage[m]) for m in makers}
        if len(homes) == 1 and (home := homes.pop()) > ops.stage[i]:
            found[i] = home
    return found


def _refused(ops: BackwardOps, homes: Mapping[int, int]) -> Iterable[int]:
    """Yield the operations whose results are read elsewhere than in the finish of their stage."""
    allowed: dict[int, int] = {}
    for i in sorted(homes, reverse=True):
        users = ops.users(i)
        if users is None or any(allowed.get(u) != homes[i] for u in users):
            yield i
        else:
            allowed[i] = homes[i]
