"""Describe the part of a step that is outside its microbatch loops, and replace or remove its operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from jaxpp_async.compiler.ir import Loop, Op, Ref
from jaxpp_async.program.instructions import ActorId

Actors: TypeAlias = frozenset[ActorId]


@dataclass(frozen=True, eq=False)
class OuterStep:
    """The input of placement: a step as it looks from outside its microbatch loops, each an opaque item.

    Args:
        inputs: the ids of the step's inputs (argument leaves, then captured arrays).
        items: the operations outside the loops and the loops themselves, in program order.
        outputs: the ids (or constants) of the step's results.
        loop_needs: for each loop (by its position in `items`), a map from the id of each value that it reads
            from outside to the actors that need that value.
        loop_makes: for each loop (by its position in `items`), a map from the id of each value that it leaves
            for operations outside to the actor that makes that value.
        continues: a map from the position of a result to the position of the input that it continues (the new
            and the old leaf of a state).
        num_actors: the number of actors in the mesh.
        result_homes: a map from the position of a result to the actors that must hold it, for the results
            where the caller asks for that. Placement chooses the actors of the other results.
        num_results: the number of leading `outputs` that are the user's results; the others are values that
            `jax.debug.print` shows. None if all of them are the user's.
        untouched: a map from the position of a result that is an unchanged input to the id of that input.
            Only inputs that are returned as exactly one result appear.
    """

    inputs: tuple[int, ...]
    items: tuple[Op | Loop, ...]
    outputs: tuple[Ref, ...]
    loop_needs: dict[int, dict[int, Actors]]
    loop_makes: dict[int, dict[int, ActorId]]
    continues: dict[int, int]
    num_actors: int
    result_homes: dict[int, Actors] = field(default_factory=dict)
    num_results: int | None = None
    untouched: dict[int, int] = field(default_factory=dict)


def source_actor(actors: Collection[ActorId], wanted: ActorId) -> ActorId:
    """Return the actor from which the actor `wanted` gets a value that is made on each of `actors`.

    This is `wanted` itself if it makes the value, else the lowest of `actors`, from which
    `lowering.plan_transfers` sends it.
    """
    return wanted if wanted in actors else min(actors)


def replaced(step: OuterStep, others: Mapping[int, Sequence[Op]], removed: Collection[int] = ()) -> OuterStep:
    """Return a copy of a step with the operations at some positions replaced or removed.

    Args:
        step: the step; what it says about its loops is kept, under their new positions.
        others: a map from the position in `items` of each operation to replace to the operations to put in
            its place.
        removed: the positions in `items` of the operations to remove.
    """
    items: list[Op | Loop] = []
    renumbered: dict[int, int] = {}
    for i, item in enumerate(step.items):
        if i in others:
            items += others[i]
        elif i not in removed:
            renumbered[i] = len(items)
            items.append(item)
    return dataclasses.replace(
        step,
        items=tuple(items),
        loop_needs={renumbered[i]: needs for i, needs in step.loop_needs.items()},
        loop_makes={renumbered[i]: makes for i, makes in step.loop_makes.items()},
    )


def without_dead(step: OuterStep) -> OuterStep:
    """Return a step without the operations outside its loops whose results nothing needs."""
    needed = {r for r in step.outputs if isinstance(r, int)}
    dead: set[int] = set()
    for i in reversed(range(len(step.items))):
        item = step.items[i]
        if isinstance(item, Loop) or any(o in needed for o in item.outputs):
            needed.update(item.reads if isinstance(item, Op) else step.loop_needs[i])
        else:
            dead.add(i)
    return replaced(step, {}, dead) if dead else step
