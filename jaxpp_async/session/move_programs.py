"""Build the programs that move and copy arrays, and describe the moves of a step's arguments to the user.

A move is a small program that runs before a step and sends an array from one actor to others, or gives it
another sharding. `Move` is a kind of move, `Moved` records one move, and `summary` and `warning` describe
moves in the log. The functions of this module send nothing: `array_moves` carries moves out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from msgspec import structs

from jaxpp_async.base.install_hints import page
from jaxpp_async.compiler import lowering, verify
from jaxpp_async.compiler.export import Emitted, Target, emit
from jaxpp_async.compiler.ir import Recipe, Types, ValueType
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import (
    ActorId,
    GraphInput,
    GraphOutput,
    Node,
    SpecEntry,
    TaskGraph,
    Value,
)


@dataclass(frozen=True)
class Move:
    """A kind of move: actor `source` sends an array of type `type` to the actors in `to`.

    The actors in `to` then hold the array with the sharding `spec`. Equal moves share one loaded program.
    """

    type: ValueType
    source: ActorId
    to: tuple[ActorId, ...]
    spec: tuple[SpecEntry, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """The record of an argument that was moved to other actors before a step, or given another sharding.

    Args:
        name: name of the argument, such as `"state['w']"`.
        size_bytes: size of one copy.
        from_actor: the actor that sent the argument.
        to: the actors that each received one copy.
        resharded: whether the argument was given another sharding.
        redivided: whether the argument, or the part of it that `name` says, was made of a whole array or of
            other parts. `size_bytes` is then the size of the rows that `from_actor` had.
    """

    name: str
    size_bytes: int
    from_actor: ActorId
    to: tuple[ActorId, ...]
    resharded: bool = False
    redivided: bool = False


WARN_BYTES = 1 << 20
"""The number of bytes above which the moves of arrays before a step cause a warning."""


def carried_bytes(moved: Sequence[Moved]) -> int:
    """Return how many bytes were sent between actors; an array that was sent to two actors counts twice.

    Args:
        moved: the moves whose bytes are added up.
    """
    return sum(m.size_bytes * len({*m.to} - {m.from_actor}) for m in moved)


def warning(moved: Sequence[Moved], step_name: str, why: Callable[[str], str]) -> str:
    """Return the text of a warning that arguments of a step had to be sent from one actor to others.

    Users may not expect these moves, or not want them at every call of the step.

    Args:
        moved: all arguments that were moved or resharded before the step.
        step_name: name of the step.
        why: a function that takes an argument's name, and returns the reason why the step needs that argument
            on the actors to which it was sent.
    """
    carried = [m for m in moved if carried_bytes([m])]
    largest = max(carried, key=lambda m: m.size_bytes)
    to = ", ".join(str(a) for a in largest.to)
    count = "1 array" if len(carried) == 1 else f"{len(carried)} arrays"
    return (
        f"step {step_name!r}: {count} ({carried_bytes(carried) / 1e6:.1f} MB) had to be carried to other "
        f"actors; the largest, {largest.name} ({largest.size_bytes / 1e6:.1f} MB), lies on actor "
        f"{largest.from_actor}, and the step computes with it on actor {to} ({why(largest.name)}). An array "
        "that is new at every call is carried at every call: give this step the same stages on the same "
        "actors as the step that makes the array, have the array made or put where this step takes it "
        "(step.init, mesh.put(..., like=(step, argnum))), or leave it out of the computation; see "
        f"{page('placement.md')}"
    )


def summary(moved: Sequence[Moved], step_name: str) -> str:
    """Return a log line with the number and bytes of the arguments that were moved before a step."""
    total = sum(m.size_bytes * len(m.to) for m in moved)
    count = "1 array" if len(moved) == 1 else f"{len(moved)} arrays"
    return f"moved {count}, {total} bytes, before step {step_name!r}, which keeps them elsewhere"


def build(
    move: Move, num_actors: int, target: Target
) -> tuple[tuple[ActorProgram, ...], tuple[Emitted, ...]]:
    """Build the programs of one move: an actor sends the array, and the receivers reshard it if needed.

    Returns:
        The programs, one per actor (empty for an actor that has no part in the move), and the executables
        that they run: one that reshards, or none if the sharding stays the same.
    """
    there = structs.replace(move.type.aval, spec=move.spec)
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
    graph = TaskGraph(
        num_actors, tuple(values), tuple(nodes), (GraphInput(0, 0, (move.source,)),), tuple(outputs)
    )
    programs = tuple(lowering.lower(graph))
    verify.verify_programs(programs)
    return programs, executables


Copied: TypeAlias = tuple[tuple[ValueType, tuple[ActorId, ...]], ...]
"""The arrays that each of their actors copies in its own memory: the type and the actors of each array."""


def build_copies(copied: Copied, num_actors: int) -> tuple[ActorProgram, ...]:
    """Build programs, one per actor, that copy each array on every actor that holds it.

    The originals stay, because the caller goes on using them.

    Args:
        copied: for each array, its type and the actors that hold it.
        num_actors: number of actors.
    """
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
