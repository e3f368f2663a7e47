"""Describe a step as it looks from outside its loops, and replace operations there."""

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
    """A step whose loops are cut, ready to be placed.

    Args:
        inputs: ids of the step's inputs (arguments, captured arrays).
        items: operations and loops in program order.
        outputs: the step's results.
        loop_needs: for each loop (by position in `items`) the actors that need each outer value that it
            reads.
        loop_makes: for each loop, the outer values that it makes and the actor of each.
        continues: result position to the input position that it continues (the new and the old leaf of a
            state).
        num_actors: actors of the mesh.
        result_homes: where results have to be, for those that the caller says; others follow from the
            program.
        num_results: how many of `outputs` are the user's; the others are shown by prints. None: all.
        untouched: result position to the input that the result is; only inputs that are one result and
            nothing else.
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
    """Choose the actor that gives a value to `wanted`: itself where it is among `actors`, else the lowest.

    `lowering.plan_transfers` sends from there.
    """
    return wanted if wanted in actors else min(actors)


def replaced(step: OuterStep, others: Mapping[int, Sequence[Op]], removed: Collection[int] = ()) -> OuterStep:
    """Replace the operations at some positions of a step by others, or remove them.

    Args:
        step: the step; what is known of its loops stays.
        others: the new operations, by position in `items`.
        removed: positions.
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
    """Remove the operations whose results nothing needs."""
    needed = {r for r in step.outputs if isinstance(r, int)}
    dead: set[int] = set()
    for i in reversed(range(len(step.items))):
        item = step.items[i]
        if isinstance(item, Loop) or any(o in needed for o in item.outputs):
            needed.update(item.reads if isinstance(item, Op) else step.loop_needs[i])
        else:
            dead.add(i)
    return replaced(step, {}, dead) if dead else step
