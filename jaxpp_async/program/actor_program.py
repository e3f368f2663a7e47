"""Define the program of one actor, and write it as text for people, with one instruction per line.

An actor gets its program as a message, in the same form in which the compiler made it. The text reads like an
assembly listing:

    actor 1: 6 slots
    uncounted b0
    input  b0 = arg 3 f32[16,16]
    recv   b1 from 0 tag 0 f32[8,16]{data,}
    run    "fwd(stage 1, mb 0)" exe 2 (b0, b1) -> (b2 f32[8,16]{data,}, b3 f32[])
    send   b2 to 0 tag 1
    delete b2
    output b3 = result 0

Slots (`b0`, `b1`) are numbered places for buffers. The instruction that defines a slot tells the aval (shape,
dtype and sharding) of the slot. A slot that no instruction defines gets a line such as `slot b5 f32[3]`. The
number after `exe` is the index of an executable. Different programs have different texts.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence

import msgspec

from jaxpp_async.program.instructions import (
    ActorId,
    Aval,
    BufferId,
    Delete,
    Input,
    Instruction,
    Output,
    Recv,
    Run,
    Send,
    SpecEntry,
    buffers_made,
)


class ActorProgram(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The instructions that one actor runs in one step, over numbered buffer slots.

    Args:
        actor: the actor that runs the program.
        instructions: the instructions in order of issue.
        avals: the shape, dtype and sharding of the array in each buffer slot; slots count from 0.
        uncounted: the slots that do not count in the reported peak of memory. These hold inputs of the step,
            and stacked and concatenated results.
    """

    actor: ActorId
    instructions: tuple[Instruction, ...]
    avals: tuple[Aval, ...]
    uncounted: frozenset[BufferId] = frozenset()

    def __str__(self) -> str:
        return format_program(self)


def format_program(program: ActorProgram) -> str:
    """Return a program as text, in the format that the module's docstring describes.

    Args:
        program: the program, which need not be valid.

    Returns:
        ASCII text, in which every line ends with a newline.

    Raises:
        ValueError: a dtype's name is not one of numpy's or ml_dtypes'.
    """
    lines = [f"actor {program.actor}: {len(program.avals)} slots"]
    if program.uncounted:
        lines.append(f"uncounted {_format_ranges(program.uncounted)}")
    defined = {b for instruction in program.instructions for b in buffers_made(instruction)}
    lines += [f"slot   b{b}{_typed(program.avals, b)}" for b in range(len(program.avals)) if b not in defined]
    return "\n".join([*lines, *format_instructions(program)]) + "\n"


def format_instructions(program: ActorProgram) -> list[str]:
    """Return one line of text per instruction of a program, as in the result of `format_program`."""
    return [_format_instruction(i, program.avals) for i in program.instructions]


def format_instruction(program: ActorProgram, index: int) -> str:
    """Return one instruction of a program as text for error messages.

    The text is the instruction's line in the program's text, but without the avals of a `Run`'s outputs.

    Args:
        program: the program, which need not be valid.
        index: the position of the instruction in the program.
    """
    instruction = program.instructions[index]
    return _format_instruction(instruction, () if isinstance(instruction, Run) else program.avals)


# ---------------------------------------------------------------- format

_SHORT = {
    f"{long}{bits}": f"{short}{bits}"
    for long, short in (("int", "i"), ("uint", "u"))
    for bits in (8, 16, 32, 64)
}
_SHORT |= {f"float{bits}": f"f{bits}" for bits in (16, 32, 64)}
_SHORT |= {"bfloat16": "bf16", "complex64": "c64", "complex128": "c128"}

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _format_name(text: str) -> str:
    return text if _IDENTIFIER.fullmatch(text) else json.dumps(text)


def _format_spec_entry(entry: SpecEntry) -> str:
    if entry is None:
        return ""
    return _format_name(entry) if isinstance(entry, str) else f"({'+'.join(map(_format_name, entry))})"


@functools.lru_cache(maxsize=1024)  # a program's text repeats the same few avals many times
def format_aval(aval: Aval) -> str:
    """Write an aval as text, such as `f32[8,16]{data,}`: dtype, shape and, unless it is empty, sharding spec.

    An empty entry of the spec means None. Mesh axes over which the array is unreduced (each device has one
    summand) follow a bar: `f32[8,16]{data,|model}`.

    Args:
        aval: the array's shape, dtype and sharding.

    Returns:
        The text.

    Raises:
        ValueError: the dtype's name is not one of numpy's or ml_dtypes'.
    """
    if aval.dtype in _SHORT.values() or not _IDENTIFIER.fullmatch(aval.dtype):
        raise ValueError(
            f"{aval.dtype!r} is not the name of a dtype; use names such as 'float32' or 'bfloat16'"
        )
    spec = ",".join(map(_format_spec_entry, aval.spec))
    if aval.unreduced:
        spec += f"|{'+'.join(map(_format_name, aval.unreduced))}"
    spec = f"{{{spec}}}" if aval.spec or aval.unreduced else ""
    return f"{_SHORT.get(aval.dtype, aval.dtype)}[{','.join(map(str, aval.shape))}]{spec}"


def _typed(avals: Sequence[Aval], buffer: BufferId) -> str:
    """Return the aval of a slot as text after a space, or nothing if there is no such slot."""
    return f" {format_aval(avals[buffer])}" if 0 <= buffer < len(avals) else ""


def _format_instruction(instruction: Instruction, avals: Sequence[Aval]) -> str:
    match instruction:
        case Run(label, executable, inputs, outputs, donated):
            read = ", ".join([f"b{b}" for b in inputs])
            made = ", ".join([f"b{b}{_typed(avals, b)}" for b in outputs])
            donate = f" donate ({', '.join(map(str, donated))})" if donated else ""
            return f"run    {json.dumps(label)} exe {executable} ({read}) -> ({made}){donate}"
        case Send(buffer, to_actor, tag):
            return f"send   b{buffer} to {to_actor} tag {tag}"
        case Recv(buffer, from_actor, tag):
            return f"recv   b{buffer} from {from_actor} tag {tag}{_typed(avals, buffer)}"
        case Delete(buffer):
            return f"delete b{buffer}"
        case Input(buffer, arg, donated):
            return f"input  b{buffer} = arg {arg}{_typed(avals, buffer)}{' donated' if donated else ''}"
        case Output(buffer, result):
            return f"output b{buffer} = result {result}"


def _format_ranges(buffers: frozenset[BufferId]) -> str:
    """Write a set of buffer slots as ranges, such as `b0-b2 b5` for `{0, 1, 2, 5}`."""
    ranges: list[list[int]] = []
    for b in sorted(buffers):
        if ranges and b == ranges[-1][1] + 1:
            ranges[-1][1] = b
        else:
            ranges.append([b, b])
    return " ".join(f"b{first}" if first == last else f"b{first}-b{last}" for first, last in ranges)
