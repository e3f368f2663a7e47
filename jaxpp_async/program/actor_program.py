"""Define the program of one actor, write it as text with one instruction per line, and parse it back.

The text reads like an assembly listing, and is also the form in which a program is sent to its actor:

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
number after `exe` is the index of an executable. `parse_program(format_program(p)) == p` for every program,
also for one that breaks the rules that `compiler.verify` checks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence

import msgspec

from jaxpp_async.errors import ProtocolError
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
    texts = _AvalTexts()
    lines = [f"actor {program.actor}: {len(program.avals)} slots"]
    if program.uncounted:
        lines.append(f"uncounted {_format_ranges(program.uncounted)}")
    lines += [f"slot   b{b} {texts[program.avals[b]]}" for b in _find_undefined_slots(program)]
    lines += [_format_instruction(i, program.avals, texts) for i in program.instructions]
    return "\n".join(lines) + "\n"


def parse_program(text: str) -> ActorProgram:
    """Parse the text of a program. Empty lines and those that begin with `#` are skipped.

    Args:
        text: a text as `format_program` returns it.

    Returns:
        The program; only its syntax has been checked (see `compiler.verify` for other checks).

    Raises:
        ProtocolError: the text is malformed; the message has the number and the text of the line.
    """
    parser = _Parser()
    instructions: list[Instruction] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line or line[0] == "#":
            continue
        try:
            instruction = _parse_line(parser, line)
        except ValueError as e:
            shown = line if len(line) <= 120 else line[:117] + "..."
            raise ProtocolError(f"program text, line {number}: {e}: {shown!r}") from e
        if instruction is not None:
            instructions.append(instruction)
    try:
        return parser.program(instructions)
    except ValueError as e:
        raise ProtocolError(f"program text, at its end: {e}") from e


# ---------------------------------------------------------------- format

_SHORT = {
    f"{long}{bits}": f"{short}{bits}"
    for long, short in (("int", "i"), ("uint", "u"))
    for bits in (8, 16, 32, 64)
}
_SHORT |= {f"float{bits}": f"f{bits}" for bits in (16, 32, 64)}
_SHORT |= {"bfloat16": "bf16", "complex64": "c64", "complex128": "c128"}
_LONG = {short: long for long, short in _SHORT.items()}

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _format_name(text: str) -> str:
    return text if _IDENTIFIER.fullmatch(text) else json.dumps(text)


def _format_spec_entry(entry: SpecEntry) -> str:
    if entry is None:
        return ""
    return _format_name(entry) if isinstance(entry, str) else f"({'+'.join(map(_format_name, entry))})"


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
    if aval.dtype in _LONG or not _IDENTIFIER.fullmatch(aval.dtype):
        raise ValueError(
            f"{aval.dtype!r} is not the name of a dtype; use names such as 'float32' or 'bfloat16'"
        )
    spec = ",".join(map(_format_spec_entry, aval.spec))
    if aval.unreduced:
        spec += f"|{'+'.join(map(_format_name, aval.unreduced))}"
    spec = f"{{{spec}}}" if aval.spec or aval.unreduced else ""
    return f"{_SHORT.get(aval.dtype, aval.dtype)}[{','.join(map(str, aval.shape))}]{spec}"


class _AvalTexts(dict[Aval, str]):
    """A cache of avals' texts, since a program's text repeats the same few avals many times."""

    def __missing__(self, aval: Aval) -> str:
        return self.setdefault(aval, format_aval(aval))


def _format_run(run: Run, avals: tuple[Aval, ...], texts: _AvalTexts) -> str:
    outputs = (f"b{b} {texts[avals[b]]}" if b < len(avals) else f"b{b}" for b in run.outputs)
    donate = f" donate ({', '.join(map(str, run.donated))})" if run.donated else ""
    inputs = ", ".join([f"b{b}" for b in run.inputs])
    return f"run    {json.dumps(run.label)} exe {run.executable} ({inputs}) -> ({', '.join(outputs)}){donate}"


def _format_instruction(instruction: Instruction, avals: tuple[Aval, ...], texts: _AvalTexts) -> str:
    match instruction:
        case Run():
            return _format_run(instruction, avals, texts)
        case Send(buffer, to_actor, tag):
            return f"send   b{buffer} to {to_actor} tag {tag}"
        case Recv(buffer, from_actor, tag, aval):
            return f"recv   b{buffer} from {from_actor} tag {tag} {texts[aval]}"
        case Delete(buffer):
            return f"delete b{buffer}"
        case Input(buffer, arg, aval, donated):
            return f"input  b{buffer} = arg {arg} {texts[aval]}{' donated' if donated else ''}"
        case Output(buffer, result):
            return f"output b{buffer} = result {result}"


def format_instruction(instruction: Instruction) -> str:
    """Return one instruction as text for error messages.

    The text is the instruction's line in the program's text, but without the avals of a `Run`'s outputs.
    """
    return _format_instruction(instruction, (), _AvalTexts())


def format_instructions(program: ActorProgram) -> list[str]:
    """Return one line of text per instruction of a program, as in the result of `format_program`."""
    texts = _AvalTexts()
    return [_format_instruction(i, program.avals, texts) for i in program.instructions]


def _find_undefined_slots(program: ActorProgram) -> Iterable[BufferId]:
    """Return the buffer slots that need a `slot` line in a program's text, which tells their aval.

    These are the slots that no instruction defines, and the slots whose first defining instruction has
    another aval than `program.avals`.
    """
    known: dict[BufferId, Aval] = {}
    for instruction in program.instructions:
        if isinstance(instruction, Run):
            for b in instruction.outputs:
                if b < len(program.avals):
                    known.setdefault(b, program.avals[b])
        elif isinstance(instruction, Input | Recv):
            known.setdefault(instruction.buffer, instruction.aval)
    return (b for b, aval in enumerate(program.avals) if known.get(b) != aval)


def _format_ranges(buffers: frozenset[BufferId]) -> str:
    """Write a set of buffer slots as ranges, such as `b0-b2 b5` for `{0, 1, 2, 5}`."""
    ranges: list[list[int]] = []
    for b in sorted(buffers):
        if ranges and b == ranges[-1][1] + 1:
            ranges[-1][1] = b
        else:
            ranges.append([b, b])
    return " ".join(f"b{first}" if first == last else f"b{first}-b{last}" for first, last in ranges)


# ---------------------------------------------------------------- parse

# Every number is bounded, so that no text makes Python refuse (or take long over) an `int`.
_INT = r"\d{1,18}"
_STRING = r'"(?:[^"\\]|\\.)*"'
_AVAL = rf'[A-Za-z_]\w*\[[\d,]*\](?:\{{(?:[^"{{}}]|{_STRING})*\}})?'

_HEADER = re.compile(rf"actor (-?{_INT}): ({_INT}) slots", re.ASCII)
_SLOT_RANGE = re.compile(rf"b({_INT})(?:-b({_INT}))?", re.ASCII)
_RUN = re.compile(
    rf"run +({_STRING}) exe ({_INT}) \((|b{_INT}(?:, b{_INT})*)\) -> "
    rf"\((|b{_INT}(?: {_AVAL})?(?:, b{_INT}(?: {_AVAL})?)*)\)(?: donate \(({_INT}(?:, {_INT})*)\))?",
    re.ASCII,
)
_DEFINITION = re.compile(rf"b({_INT})(?: ({_AVAL}))?(?:, |$)", re.ASCII)
_SEND = re.compile(rf"send +b({_INT}) to (-?{_INT}) tag ({_INT})", re.ASCII)
_RECV = re.compile(rf"recv +b({_INT}) from (-?{_INT}) tag ({_INT}) ({_AVAL})", re.ASCII)
_DELETE = re.compile(rf"delete +b({_INT})", re.ASCII)
_INPUT = re.compile(rf"input +b({_INT}) = arg ({_INT}) ({_AVAL})( donated)?", re.ASCII)
_OUTPUT = re.compile(rf"output +b({_INT}) = result ({_INT})", re.ASCII)
_SLOT = re.compile(rf"slot +b({_INT}) ({_AVAL})", re.ASCII)

_AVAL_PARTS = re.compile(rf"([A-Za-z_]\w*)\[((?:{_INT}(?:,{_INT})*)?)\](?:\{{(.*)\}})?", re.DOTALL | re.ASCII)
_NAME = rf"(?:[A-Za-z_]\w*|{_STRING})"
_ENTRY = re.compile(rf"(\((?:{_NAME}(?:\+{_NAME})*)?\)|{_NAME}|)(?:(,)|$)", re.ASCII)
_AXIS = re.compile(_NAME, re.ASCII)
_UNREDUCED = re.compile(rf"\|({_NAME}(?:\+{_NAME})*)$", re.ASCII)

_MAX_UNCOUNTED = 1 << 24
_NO_HEADER = "a program begins with 'actor A: N slots'"


def _parse_axis(text: str) -> str:
    return json.loads(text) if text[0] == '"' else text


def _parse_spec(text: str) -> tuple[SpecEntry, ...]:
    entries: list[SpecEntry] = []
    position, more = 0, True
    while more:
        match = _ENTRY.match(text, position)
        if not match:
            raise ValueError(f"bad sharding {{{text}}}")
        entry, comma = match.groups()
        if entry.startswith("("):
            entries.append(tuple(_parse_axis(a) for a in _AXIS.findall(entry)))
        else:
            entries.append(_parse_axis(entry) if entry else None)
        position, more = match.end(), comma is not None
    return tuple(entries)


def parse_aval(text: str) -> Aval:
    """Parse an aval from its text, as `format_aval` returns it.

    Raises:
        ValueError: the text is not an aval.
    """
    match = _AVAL_PARTS.fullmatch(text)
    if not match:
        raise ValueError(f"bad aval {text!r}")
    dtype, shape, spec = match.groups()
    dims = tuple(map(int, shape.split(","))) if shape else ()
    if spec is None:
        return Aval(dims, _LONG.get(dtype, dtype))
    match = _UNREDUCED.search(spec)
    unreduced = tuple(map(_parse_axis, _AXIS.findall(match[1]))) if match else ()
    split = spec[: match.start()] if match else spec
    return Aval(dims, _LONG.get(dtype, dtype), _parse_spec(split) if split or not match else (), unreduced)


class _Avals(dict[str, Aval]):
    def __missing__(self, text: str) -> Aval:
        return self.setdefault(text, parse_aval(text))


class _Parser:
    """The state of `parse_program`, with one method per opcode that parses a line with this opcode."""

    def __init__(self) -> None:
        self.actor: ActorId | None = None  # None: the header has not been read
        self.num_slots = 0
        self.avals = _Avals()
        self.slots: dict[BufferId, Aval] = {}
        self.pinned: dict[BufferId, Aval] = {}
        self.uncounted: frozenset[BufferId] = frozenset()

    def header(self, line: str) -> None:
        match = _HEADER.fullmatch(line)
        if not match:
            raise ValueError(_NO_HEADER)
        self.actor, self.num_slots = int(match[1]), int(match[2])

    def define(self, buffer: BufferId, aval: Aval) -> None:
        if buffer < self.num_slots:
            self.slots.setdefault(buffer, aval)

    def uncounted_slots(self, line: str) -> None:
        buffers: set[BufferId] = set()
        for word in line.split()[1:]:
            match = _SLOT_RANGE.fullmatch(word)
            if not match:
                raise ValueError(f"bad slots {word!r}")
            first, last = int(match[1]), int(match[2] or match[1])
            if last - first >= _MAX_UNCOUNTED:
                raise ValueError(f"too many slots in {word!r}")
            buffers.update(range(first, last + 1))
        self.uncounted = frozenset(buffers)

    def slot(self, m: re.Match[str]) -> None:
        buffer = int(m[1])
        if buffer >= self.num_slots:
            raise ValueError(f"slot b{buffer}, but the program has {self.num_slots} slots")
        self.pinned[buffer] = self.avals[m[2]]

    def run(self, m: re.Match[str]) -> Run:
        label, executable, inputs, outputs, donated = m.groups()
        made = []
        for buffer, aval in _DEFINITION.findall(outputs):
            made.append(int(buffer))
            if aval:
                self.define(made[-1], self.avals[aval])
        return Run(
            json.loads(label),
            int(executable),
            tuple([int(b[1:]) for b in inputs.split(", ")]) if inputs else (),
            tuple(made),
            tuple([int(p) for p in donated.split(", ")]) if donated else (),
        )

    def send(self, m: re.Match[str]) -> Send:
        return Send(int(m[1]), int(m[2]), int(m[3]))

    def recv(self, m: re.Match[str]) -> Recv:
        recv = Recv(int(m[1]), int(m[2]), int(m[3]), self.avals[m[4]])
        self.define(recv.buffer, recv.aval)
        return recv

    def delete(self, m: re.Match[str]) -> Delete:
        return Delete(int(m[1]))

    def input(self, m: re.Match[str]) -> Input:
        bound = Input(int(m[1]), int(m[2]), self.avals[m[3]], m[4] is not None)
        self.define(bound.buffer, bound.aval)
        return bound

    def output(self, m: re.Match[str]) -> Output:
        return Output(int(m[1]), int(m[2]))

    def program(self, instructions: Sequence[Instruction]) -> ActorProgram:
        if self.actor is None:
            raise ValueError(_NO_HEADER)
        known = self.slots | self.pinned
        if len(known) != self.num_slots:
            # Not `range(num_slots)`: a text may claim any number of slots.
            missing = next(b for b in range(len(known) + 1) if b not in known)
            raise ValueError(
                f"nothing tells the aval of slot b{missing}; add a line such as 'slot b{missing} f32[]'"
            )
        avals = tuple([known[b] for b in range(self.num_slots)])
        return ActorProgram(self.actor, tuple(instructions), avals, self.uncounted)


_OPCODES: dict[str, tuple[re.Pattern[str], Callable[[_Parser, re.Match[str]], Instruction | None]]] = {
    "run": (_RUN, _Parser.run),
    "send": (_SEND, _Parser.send),
    "recv": (_RECV, _Parser.recv),
    "delete": (_DELETE, _Parser.delete),
    "input": (_INPUT, _Parser.input),
    "output": (_OUTPUT, _Parser.output),
    "slot": (_SLOT, _Parser.slot),
}


def _parse_line(parser: _Parser, line: str) -> Instruction | None:
    if parser.actor is None:
        return parser.header(line)
    opcode = line.partition(" ")[0]
    if opcode == "uncounted":
        return parser.uncounted_slots(line)
    if opcode not in _OPCODES:
        raise ValueError(f"unknown instruction {opcode!r}; known are {', '.join(_OPCODES)}")
    pattern, make = _OPCODES[opcode]
    match = pattern.fullmatch(line)
    if not match:
        raise ValueError(f"malformed {opcode!r}")
    return make(parser, match)
