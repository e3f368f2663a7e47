"""Find a minimum cut of a directed graph: the cheapest set of edges that separates its end from its start."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

INFINITE = 2**30
"""A capacity that is more than any sum of costs."""

START, END = 0, 1
"""The numbers of the nodes that a cut separates."""


def cost_scale(total: int) -> int:
    """Return by what to divide costs, rounding up, so that their sum is less than `INFINITE`."""
    return 1 + total // (INFINITE // 2)


def end_side(
    size: int, heads: Sequence[int] | np.ndarray, tails: Sequence[int] | np.ndarray, costs: Sequence[int]
) -> set[int]:
    """Return the nodes on the end's side of a minimum cut.

    Of several minimum cuts the one nearest to the end is chosen, so that the fewest nodes are on its side.

    Args:
        size: the number of nodes.
        heads, tails: for each edge, the node that it leaves and the node that it enters. No two edges have
            both in common.
        costs: the cost of cutting each edge, at most `INFINITE`.
    """
    graph = csr_array((np.array(costs, np.int32), (np.asarray(heads), np.asarray(tails))), shape=(size, size))
    left = graph - maximum_flow(graph, START, END).flow
    left.eliminate_zeros()
    return set(breadth_first_order(csr_array(left.T), END, return_predecessors=False).tolist())
