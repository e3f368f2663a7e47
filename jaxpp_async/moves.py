"""moves: small programs that carry an array from where it is to where a step needs it. Builds; runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxpp_async.compiler import lowering, verify
from jaxpp_async.compiler.emit import Emitted, Target, emit
from jaxpp_async.compiler.ir import Types, ValueType
from jaxpp_async.compiler.recipes import Recipe
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


def _reshard(move: Move, target: Target) -> Emitted:
    types = Types()
    array = types.new(ValueType(move.type.aval))
    recipe = Recipe("reshard", inputs=(array,), outputs=(array,))
    return emit(recipe, types, {array: move.type.aval.spec}, target, out_specs=(move.spec,))
