"""Read programs and avals back from their text, so that tests can write programs as text, and can show that
different programs have different texts."""

from __future__ import annotations

import json
import re

from jaxpp_async.program.actor_program import ActorProgram, format_aval
from jaxpp_async.program.instructions import (
    Aval,
    Delete,
    Input,
    Instruction,
    Output,
    Recv,
    Run,
    Send,
    SpecEntry,
)

_STRING = r'"(?:[^"\\]|\\.)*"'
_NAME = rf"(?:[A-Za-z_]\w*|{_STRING})"
_AVAL = rf'[A-Za-z_]\w*\[[\d,]*\](?:\{{(?:[^"{{}}]|{_STRING})*\}})?'

_HEADER = re.compile(r"actor (-?\d+): (\d+) slots")
_SLOT_RANGE = re.compile(r"b(\d+)(?:-b(\d+))?")
_TYPED = re.compile(rf"b(\d+)(?: ({_AVAL}))?")
_SLOT = rf"b\d+(?: {_AVAL})?"
_LINES = {
    "slot": re.compile(rf"slot +b(\d+) ({_AVAL})"),
    "input": re.compile(rf"input +b(\d+) = arg (\d+)(?: ({_AVAL}))?( donated)?"),
    "recv": re.compile(rf"recv +b(\d+) from (-?\d+) tag (\d+)(?: ({_AVAL}))?"),
    "run": re.compile(
        rf"run +({_STRING}) exe (\d+) \(([b\d, ]*)\) -> \(((?:{_SLOT}(?:, )?)*)\)"
        r"(?: donate \(([\d, ]*)\))?"
    ),
    "send": re.compile(r"send +b(\d+) to (-?\d+) tag (\d+)"),
    "delete": re.compile(r"delete +b(\d+)"),
    "output": re.compile(r"output +b(\d+) = result (\d+)"),
}

_AVAL_PARTS = re.compile(r"(\w+)\[([\d,]*)\](?:\{(.*)\})?", re.DOTALL)
_ENTRY = re.compile(rf"(\((?:{_NAME}(?:\+{_NAME})*)?\)|{_NAME}|)(,|$)")
_UNREDUCED = re.compile(rf"\|({_NAME}(?:\+{_NAME})*)$")
_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32")
_DTYPES += ("float64", "bfloat16", "complex64", "complex128")
_LONG = {format_aval(Aval((), dtype)).removesuffix("[]"): dtype for dtype in _DTYPES}


def parse_program(text: str) -> ActorProgram:
    """Return the program with a given text, as `format_program` writes it.

    Raises:
        ValueError: the text is no program's.
    """
    header, *lines = text.splitlines()
    actor, num_slots = map(int, _match(_HEADER, header))
    avals: dict[int, Aval] = {}
    uncounted: set[int] = set()
    instructions: list[Instruction] = []

    def typed(buffer: str, aval: str | None) -> int:
        if aval:
            avals[int(buffer)] = parse_aval(aval)
        return int(buffer)

    for line in lines:
        opcode, _, rest = line.partition(" ")
        if opcode == "uncounted":
            for word in rest.split():
                first, last = _match(_SLOT_RANGE, word)
                uncounted.update(range(int(first), int(last or first) + 1))
            continue
        match opcode, *_match(_LINES[opcode], line):
            case "slot", buffer, aval:
                typed(buffer, aval)
            case "input", buffer, arg, aval, donated:
                instructions.append(Input(typed(buffer, aval), int(arg), donated is not None))
            case "recv", buffer, peer, tag, aval:
                instructions.append(Recv(typed(buffer, aval), int(peer), int(tag)))
            case "run", label, executable, inputs, outputs, donated:
                read = tuple(int(b) for b, _ in _TYPED.findall(inputs))
                made = tuple(typed(*found) for found in _TYPED.findall(outputs))
                positions = tuple(map(int, donated.split(", "))) if donated else ()
                instructions.append(Run(json.loads(label), int(executable), read, made, positions))
            case "send", *numbers:
                instructions.append(Send(*map(int, numbers)))
            case "delete", buffer:
                instructions.append(Delete(int(buffer)))
            case "output", *numbers:
                instructions.append(Output(*map(int, numbers)))
    slots = tuple(avals[b] for b in range(num_slots))
    return ActorProgram(actor, tuple(instructions), slots, frozenset(uncounted))


def parse_aval(text: str) -> Aval:
    """Return the aval with a given text, as `format_aval` writes it.

    Raises:
        ValueError: the text is no aval's.
    """
    dtype, shape, spec = _match(_AVAL_PARTS, text)
    dims = tuple(map(int, shape.split(","))) if shape else ()
    if spec is None:
        return Aval(dims, _LONG.get(dtype, dtype))
    bar = _UNREDUCED.search(spec)
    unreduced = _axes(bar[1]) if bar else ()
    split = spec[: bar.start()] if bar else spec
    return Aval(dims, _LONG.get(dtype, dtype), _parse_spec(split) if split or not bar else (), unreduced)


def _match(pattern: re.Pattern[str], text: str) -> tuple[str, ...]:
    if not (match := pattern.fullmatch(text)):
        raise ValueError(f"not of the form {pattern.pattern}: {text!r}")
    return match.groups()


def _axes(text: str) -> tuple[str, ...]:
    return tuple(json.loads(name) if name[0] == '"' else name for name in re.findall(_NAME, text))


def _parse_spec(text: str) -> tuple[SpecEntry, ...]:
    entries: list[SpecEntry] = []
    position, comma = 0, ","
    while comma:
        match = _ENTRY.match(text, position)
        if not match:
            raise ValueError(f"bad sharding {{{text}}}")
        entry, comma = match.groups()
        axes = _axes(entry)
        entries.append(axes if entry.startswith("(") else axes[0] if axes else None)
        position = match.end()
    return tuple(entries)
