"""moves: small programs that carry an array from where it is to where a step needs it. Builds; runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from jaxpp_async.compiler import lowering, verify
from jaxpp_async.compiler.emit import Emitted, Target, emit
from jaxpp_async.compiler.ir import Types, ValueType
from jaxpp_async.compiler.recipes import Recipe
from jaxpp_async.pages import page
from jaxpp_async.program import ActorId, ActorProgram, GraphInput, GraphOutput, Node, SpecEntry, TaskGraph, Value


@dataclass(frozen=True)
class Move:
    """What has to be moved: an array of `type` (with its sharding) from `source`, to be held with `spec` by `to`."""

    type: ValueType
    source: ActorId
    to: tuple[ActorId, ...]
    spec: tuple[SpecEntry, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """An argument that was carried to other actors before a step, or given another sharding there.

    Args:
        name: of the argument, such as `"state['w']"`.
        size_bytes: of one copy.
        from_actor, to: one copy went to each of `to`.
        resharded: its sharding was another one before.
    """

    name: str
    size_bytes: int
    from_actor: ActorId
    to: tuple[ActorId, ...]
    resharded: bool = False


WARN_BYTES = 1 << 20
"""Moves of more than this before a step are worth a warning."""


def carried_bytes(moved: Sequence[Moved]) -> int:
    """Bytes that went from one actor to another."""
    return sum(m.size_bytes * len({*m.to} - {m.from_actor}) for m in moved)


def warning(moved: Sequence[Moved], step_name: str, why: Callable[[str], str]) -> str:
    """Warn of moves that a user may not expect, and may not want at every call.

    Args:
        why: an argument's name to the reason why the step takes it where it takes it.
    """
    carried = [m for m in moved if carried_bytes([m])]
    largest = max(carried, key=lambda m: m.size_bytes)
    to = ", ".join(str(a) for a in largest.to)
    count = "1 array" if len(carried) == 1 else f"{len(carried)} arrays"
    return (
        f"step {step_name!r}: {count} ({carried_bytes(carried) / 1e6:.1f} MB) had to be carried to other actors; "
        f"the largest, {largest.name} ({largest.size_bytes / 1e6:.1f} MB), lies on actor {largest.from_actor}, and "
        f"the step computes with it on actor {to} ({why(largest.name)}). An array that is new at every call is "
        "carried at every call: give this step the same stages on the same actors as the step that makes the array, "
        "have the array made or put where this step takes it (step.init, mesh.put(..., like=(step, argnum))), or "
        f"leave it out of the computation; see {page('placement.md')}"
    )


def summary(moved: Sequence[Moved], step_name: str) -> str:
    """One line about everything that was moved for a step."""
    total = sum(m.size_bytes * len(m.to) for m in moved)
    count = "1 array" if len(moved) == 1 else f"{len(moved)} arrays"
    return f"moved {count}, {total} bytes, before step {step_name!r}, which keeps them elsewhere"


@dataclass(frozen=True, eq=False)
class MoveProgram:
    """One program an actor (empty where it has no part), and the executable that changes the sharding, if any."""

    programs: tuple[ActorProgram, ...]
    executables: tuple[Emitted, ...]


def build(move: Move, num_actors: int, target: Target) -> MoveProgram:
    """The programs of one move: send as it is, change the sharding on arrival."""
    there = replace(move.type.aval, spec=move.spec)
    values = [Value(move.type.aval, "moved", "temp")]
    nodes, outputs, executables = [], [], ()
    if there.spec == move.type.aval.spec:
        outputs.append(GraphOutput(0, 0, move.to))
    else:
        executables = (_reshard(move, target),)
        for actor in move.to:
            values.append(Value(there, "resharded"))
            nodes.append(Node(f"reshard(actor {actor})", actor, 0, (0,), (len(values) - 1,)))
            outputs.append(GraphOutput(len(values) - 1, 0, (actor,)))
    graph = TaskGraph(num_actors, tuple(values), tuple(nodes), (GraphInput(0, 0, (move.source,)),), tuple(outputs))
    programs = tuple(lowering.lower(graph))
    verify.verify_programs(programs)
    return MoveProgram(programs, executables)


Copied: TypeAlias = tuple[tuple[ValueType, tuple[ActorId, ...]], ...]
"""Arrays to be copied where they lie: the type of each, and the actors that hold it."""


def build_copies(copied: Copied, num_actors: int) -> tuple[ActorProgram, ...]:
    """Programs that make a copy of each array wherever it lies: the caller keeps the arrays."""
    values = [Value(value_type.aval, f"copied[{k}]", "input") for k, (value_type, _) in enumerate(copied)]
    inputs = [GraphInput(k, k, actors) for k, (_, actors) in enumerate(copied)]
    outputs = [GraphOutput(k, k, actors) for k, (_, actors) in enumerate(copied)]
    programs = tuple(lowering.lower(TaskGraph(num_actors, tuple(values), (), tuple(inputs), tuple(outputs))))
    verify.verify_programs(programs)
    return programs


def _reshard(move: Move, target: Target) -> Emitted:
    types = Types()
    array = types.new(ValueType(move.type.aval))
    recipe = Recipe("reshard", inputs=(array,), outputs=(array,))
    return emit(recipe, types, {array: move.type.aval.spec}, target, out_specs=(move.spec,))
