"""memory: `ActorProgram` in, the most bytes its buffer table holds out. Never touches a device."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpp_async.program import ActorProgram, BufferId, Delete, Input, Instruction, Output, Recv, Run


@dataclass(frozen=True, slots=True)
class PeakPlan:
    """What an actor's buffer table holds at most during a step.

    Args:
        peak_bytes: bytes at the peak. A sharded array counts as one whole copy (`Aval.size_bytes`), however many
            devices the actor has; XLA's temporaries inside a run and sends under way are not in it.
        instruction: index of the first instruction that reaches it; 0 for a program that holds nothing.
    """

    peak_bytes: int
    instruction: int


def _gained(instruction: Instruction) -> tuple[BufferId, ...]:
    if isinstance(instruction, Run):
        return instruction.outputs
    return (instruction.buffer,) if isinstance(instruction, Input | Recv) else ()


def _lost(instruction: Instruction) -> tuple[BufferId, ...]:
    if isinstance(instruction, Run):
        return tuple(instruction.inputs[p] for p in instruction.donated)
    return (instruction.buffer,) if isinstance(instruction, Delete | Output) else ()


def peak_plan(program: ActorProgram) -> PeakPlan:
    """Walk the stream and find the peak.

    A receive counts from the moment it is posted. A run's results come and its donated inputs go at the same moment;
    its other inputs stay until their `Delete`. An `Output` hands its buffer over and so ends its counting. Slots in
    `ActorProgram.uncounted` never count.

    Args:
        program: valid in the sense of `verify.verify_program`.

    Returns:
        The peak and where it is reached. The executor measures the same number.
    """
    # By identity: hashing an aval costs more than this whole walk, and equal ones are mostly one object.
    by_id = {id(a): a.size_bytes for a in {id(a): a for a in program.avals}.values()}
    sizes = [by_id[id(a)] for a in program.avals]
    held: dict[BufferId, int] = {}
    now, peak, at = 0, 0, 0
    for index, instruction in enumerate(program.instructions):
        for b in _lost(instruction):
            # A buffer may be two results: its second Output finds it gone.
            now -= held.pop(b, 0)
        for b in _gained(instruction):
            if b not in program.uncounted:
                held[b] = sizes[b]
                now += held[b]
        if now > peak:
            peak, at = now, index
    return PeakPlan(peak, at)
