"""Count the bytes that an actor's buffer table holds while the actor runs its program.

The count follows from the program alone, before anything runs; the executor measures the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import BufferId, Delete, Instruction, Output, Run, buffers_made


@dataclass(frozen=True, slots=True)
class PeakPlan:
    """The peak memory of an actor's buffer table during a step, as planned from its program.

    Args:
        peak_bytes: the bytes at the peak. A sharded array counts as one whole array (`Aval.size_bytes`),
            however many devices the actor has. XLA's temporaries inside a run and unfinished sends do not
            count.
        instruction: the index of the first instruction at which the peak occurs; 0 for a program without
            buffers.
    """

    peak_bytes: int
    instruction: int


def peak_plan(program: ActorProgram) -> PeakPlan:
    """Find the peak memory of a program's buffer table; see `held_bytes` for what counts."""
    held = held_bytes(program)
    peak = max(held, default=0)
    return PeakPlan(peak, held.index(peak) if peak else 0)


def held_bytes(program: ActorProgram) -> list[int]:
    """Return the bytes that the buffer table holds at each instruction of a program.

    A receive counts from the moment it is posted. At a `Run`, the run's results are added and its donated
    inputs are removed at the same moment. Other inputs count until their `Delete`. A buffer counts until its
    `Output`, which passes it to the caller. Slots in `ActorProgram.uncounted` never count.

    Args:
        program: a program that is valid in the sense of `verify.verify_program`.
    """
    sizes = buffer_sizes(program)
    held: dict[BufferId, int] = {}
    now, found = 0, []
    for instruction in program.instructions:
        for b in _buffers_freed(instruction):
            # A buffer may be two results; it stops counting at the first `Output`.
            now -= held.pop(b, 0)
        for b in buffers_made(instruction):
            if b not in program.uncounted:
                held[b] = sizes[b]
                now += held[b]
        found.append(now)
    return found


def buffer_sizes(program: ActorProgram) -> list[int]:
    """Return the bytes of each buffer of a program."""
    # Avals are looked up by identity: hashing one costs more than this whole walk, and equal avals are mostly
    # the same object.
    by_id = {id(a): a.size_bytes for a in {id(a): a for a in program.avals}.values()}
    return [by_id[id(a)] for a in program.avals]


def _buffers_freed(instruction: Instruction) -> tuple[BufferId, ...]:
    if isinstance(instruction, Run):
        return tuple(instruction.inputs[p] for p in instruction.donated)
    return (instruction.buffer,) if isinstance(instruction, Delete | Output) else ()
