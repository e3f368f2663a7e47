"""compiler.levels: in which task outside the loops each placed operation runs. In: operations with their actors. Out: a
level for each, a level ending where data has to cross actors. No jax.

One pass up and one down, linear in operations and their operands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from jaxpp_async.compiler.ir import Op
from jaxpp_async.compiler.outer import Actors, OuterStep, giver
from jaxpp_async.program import ActorId


@dataclass(frozen=True, eq=False)
class Levels:
    """Levels count from 0.

    Args:
        of_ops: (position, actor) to level.
        of_loops: position to level.
        depth: how many levels there are.
    """

    of_ops: dict[tuple[int, ActorId], int]
    of_loops: dict[int, int]
    depth: int


def levels(
    step: OuterStep, actors: Mapping[int, Actors], producer: Mapping[int, int], users: Mapping[int, list[int]]
) -> Levels:
    """Group operations by how many times data has to cross actors first.

    Each runs as late as possible, since an early result is a buffer to keep.

    Args:
        actors: of each operation, by position.
        producer: value id to the position of the operation that makes it.
        users: value id to the positions of the operations that read it.
    """
    early, loops = _earliest(step, actors, producer)
    last = max([*early.values(), *(n + 1 for n in loops.values())], default=0)
    return Levels(_latest(step, actors, users, loops, last), loops, last + 1)


def _earliest(
    step: OuterStep, actors: Mapping[int, Actors], producer: Mapping[int, int]
) -> tuple[dict[tuple[int, ActorId], int], dict[int, int]]:
    early: dict[tuple[int, ActorId], int] = {}
    loops: dict[int, int] = {}
    made_in: dict[int, int] = {}
    last_loop = -1

    def available(value: int, actor: ActorId) -> int:
        """The first level at which an operation on `actor` can read `value`."""
        i = producer.get(value)
        if i is None:
            return made_in.get(value, -1) + 1
        if actor in actors[i]:
            return early[i, actor]
        return early[i, giver(actors[i], actor)] + 1

    for i, op in enumerate(step.items):
        if isinstance(op, Op):
            for a in actors[i]:
                first = 0
                for r in op.reads:
                    if r in producer and (made := early.get((producer[r], a))) is not None:
                        level = made
                    else:
                        level = available(r, a)
                    if level > first:
                        first = level
                early[i, a] = first
            continue
        before = [
            # An operation's result enters the loop one level after the operation, on any actor.
            max((available(v, a) for a in needing), default=0) + (1 if v in producer else 0)
            for v, needing in step.loop_needs[i].items()
        ]
        loops[i] = last_loop = max([last_loop + 1, *before])
        for v in step.loop_makes[i]:
            made_in[v] = last_loop
    return early, loops


def _latest(
    step: OuterStep,
    actors: Mapping[int, Actors],
    users: Mapping[int, list[int]],
    loops: Mapping[int, int],
    last: int,
) -> dict[tuple[int, ActorId], int]:
    late: dict[tuple[int, ActorId], int] = {}
    in_loops: dict[int, dict[ActorId, int]] = defaultdict(dict)  # the latest level for each actor of a loop
    for i, needs in step.loop_needs.items():
        for value, needing in needs.items():
            for a in needing:
                in_loops[value][a] = min(in_loops[value].get(a, last), loops[i] - 1)
    for i in reversed(range(len(step.items))):
        op = step.items[i]
        if not isinstance(op, Op):
            continue
        here = actors[i]
        limits = dict.fromkeys(here, last)
        for o in op.outputs:
            for u in users.get(o, ()):
                for b in actors[u]:
                    if b in here:
                        a, limit = b, late[u, b]
                    else:
                        a, limit = giver(here, b), late[u, b] - 1
                    if limit < limits[a]:
                        limits[a] = limit
            if o in in_loops:
                for b, limit in in_loops[o].items():
                    a = giver(here, b)
                    limits[a] = min(limits[a], limit)
        for a, limit in limits.items():
            late[i, a] = limit
    return late
