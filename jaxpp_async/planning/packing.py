"""Prove that stages cannot be divided among actors so that all are done by some time.

The stages of a cut are pieces of work that an actor has as a whole. An actor is idle until the first of its
pieces can start, and then has all of its pieces to do for every microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_NODES = 20_000
"""The number of partial divisions that are looked at; then the step proven so far has to do."""

PRECISION = 1e-4
"""The share of a step by which the result may be below the least one."""


class _Unanswered(Exception):
    """`MAX_NODES` partial divisions do not answer whether the pieces can be divided."""


def packed_s(works: Sequence[float], leads: Sequence[float], num_actors: int, count: int) -> float:
    """Return a time before which the actors cannot have done all pieces, however these are divided.

    Proof. An actor whose first piece is k is idle during the lead of k and then runs each of its pieces
    `count` times, so in a step of T seconds its pieces have at most (T - lead k) / count seconds of work.
    `_Division` looks for a division in which this holds for every actor. Where there is none, a step takes
    longer. T is bisected between the time of perfect balance and that of one division.

    Args:
        works: the work of each piece for one microbatch, in seconds, in order of the pieces.
        leads: the idle time before each piece, in seconds, ascending.
        num_actors: the number of actors.
        count: the number of microbatches.
    """
    division = _Division(works, leads, num_actors, count)
    low, high = count * sum(works) / num_actors, division.greedy_s()
    try:
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            low, high = (low, middle) if division.exists(middle) else (middle, high)
    except _Unanswered:
        pass
    return low * (1 - 1e-9)


class _Division:
    """The search for a division of pieces among actors; its arguments are those of `packed_s`.

    The actors are filled one after the other, each from the earliest piece that is left. Sets of pieces are
    the bits of an int.
    """

    def __init__(self, works: Sequence[float], leads: Sequence[float], num_actors: int, count: int) -> None:
        self.works, self.leads, self.num_actors, self.count = works, leads, num_actors, count
        self.every = range(len(works))
        # The largest first; of equal ones the latest first, since pieces that are left should be early ones.
        self.largest_first = sorted(self.every, key=lambda k: (-works[k], -k))
        self.tolerance = 1e-9 * sum(works)
        self.nodes_left = MAX_NODES

    def greedy_s(self) -> float:
        """Return the step where each piece, the largest first, goes to the actor with the least work."""
        loads = [0.0] * self.num_actors
        ends = [0.0] * self.num_actors
        first_leads = [max(self.leads)] * self.num_actors
        for k in self.largest_first:
            actor = loads.index(min(loads))
            loads[actor] += self.works[k]
            first_leads[actor] = min(first_leads[actor], self.leads[k])
            ends[actor] = first_leads[actor] + self.count * loads[actor]
        return max(ends)

    def exists(self, step_s: float) -> bool:
        """Return whether all pieces can be done in a step.

        Raises:
            _Unanswered: that would take too long to find out.
        """
        self.space = [(step_s - lead) / self.count + self.tolerance for lead in self.leads]
        self.failed: set[tuple[int, int]] = set()
        return self._fill(sum(1 << k for k in self.every), self.num_actors)

    def _fill(self, pieces: int, num_actors: int) -> bool:
        """Return whether `num_actors` actors can have the pieces in the set `pieces`."""
        if not pieces:
            return True
        left = [k for k in self.every if pieces >> k & 1]
        # The first piece of the n-th of the actors is the n-th of those left, or a later one.
        spaces = sum(max(0.0, self.space[k]) for k in left[:num_actors])
        slack = spaces - sum(self.works[k] for k in left) + self.tolerance
        first = left[0]
        capacity = self.space[first] - self.works[first]
        if slack < 0 or capacity < 0 or (pieces, num_actors) in self.failed:
            return False
        rest = pieces & ~(1 << first)
        others = [k for k in self.largest_first if rest >> k & 1]
        if self._add(others, 0, sum(self.works[k] for k in others), capacity, slack, rest, num_actors):
            return True
        self.failed.add((pieces, num_actors))
        return False

    def _add(
        self,
        others: list[int],
        position: int,
        behind: float,
        capacity: float,
        slack: float,
        rest: int,
        num_actors: int,
    ) -> bool:
        """Return whether the actor that is being filled can take some more pieces, and others all the rest.

        Args:
            others: the pieces that it may take, the largest first.
            position: the first of them that is not decided.
            behind: the work of those from there on.
            capacity: the work that the actor may still take.
            slack: the most of its space that the actor may leave empty, if the others are to have the rest.
            rest: the set of pieces that nobody has.
            num_actors: the number of actors, with this one, that have no pieces but those.
        """
        self.nodes_left -= 1
        if self.nodes_left < 0:
            raise _Unanswered
        while position < len(others) and capacity - behind <= slack:
            piece = others[position]
            work = self.works[piece]
            behind -= work
            position += 1
            if work <= capacity:
                if self._add(
                    others, position, behind, capacity - work, slack, rest & ~(1 << piece), num_actors
                ):
                    return True
                while position < len(others) and self.works[others[position]] == work:  # as good as this one
                    behind -= work
                    position += 1
        return capacity - behind <= slack and capacity <= slack and self._fill(rest, num_actors - 1)
