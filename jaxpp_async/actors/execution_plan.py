"""plan: one ActorProgram in, an ExecutionPlan and its commands out. Pure data; no jax, no I/O.

Slots of a program may be used again after a `Delete`. The plan gives every definition (an `Input`, a `Recv`, an output
of a `Run`) a number of its own, so that whoever executes never mistakes a new buffer for an old one in the same slot.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias, final

from jaxpp_async.program.actor_program import ActorProgram, format_instruction
from jaxpp_async.program.instructions import (
    ActorId,
    Aval,
    Delete,
    Input,
    Instruction,
    Output,
    Recv,
    Run,
    Send,
    Tag,
)

BufferKey: TypeAlias = int
"""Numbers one definition of a buffer within one step, from zero."""


@final
@dataclass(frozen=True, slots=True)
class BindInput:
    """Find step argument `arg`; answer with `Executor.arrived`. A donated one is the step's to consume."""

    instruction: int
    buffer: BufferKey
    arg: int
    donated: bool


@final
@dataclass(frozen=True, slots=True)
class PostRecv:
    """Post a receive; answer with `Executor.arrived`.

    A `private` buffer outlives the step or is donated: its array must not alias memory that is received into again.
    """

    instruction: int
    buffer: BufferKey
    from_actor: ActorId
    tag: Tag
    aval: Aval
    private: bool


@final
@dataclass(frozen=True, slots=True)
class Execute:
    """Call an executable; answer with `Executor.ran`. `donated` are the buffers that the call consumes."""

    instruction: int
    executable: int
    inputs: tuple[BufferKey, ...]
    outputs: tuple[BufferKey, ...]
    donated: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class StartSend:
    """Start a send; answer with `Executor.sent`."""

    instruction: int
    buffer: BufferKey
    to_actor: ActorId
    tag: Tag


@final
@dataclass(frozen=True, slots=True)
class Drop:
    """Free the buffer: nothing reads it any more."""

    buffer: BufferKey


@final
@dataclass(frozen=True, slots=True)
class KeepOutput:
    """The buffer is step result `result`. With `copy` somebody else keeps the same buffer: make another one."""

    buffer: BufferKey
    result: int
    copy: bool


@final
@dataclass(frozen=True, slots=True)
class Finish:
    """Every instruction is done and every transfer has completed."""


Command: TypeAlias = BindInput | PostRecv | Execute | StartSend | Drop | KeepOutput | Finish


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """A program made ready to execute.

    Args:
        program: what it was made of.
        commands: one an instruction (for a `Delete` the `Drop` it ends in).
        avals: one a buffer key.
        counted_bytes: for each buffer key, what it adds to the buffer table while it is held, in bytes: its aval's
            size, or 0 where the program does not count it. Loading checks that executables keep to the avals.
        next_run: for each `Run` instruction, the next one, or None where that one must not be issued before the
            instructions between the two are done.
        max_receives: for each aval, the most receive buffers that the program holds at once.
        binds: the commands that bind step arguments.
        keeps: the commands that make step results.
    """

    program: ActorProgram
    commands: tuple[Command, ...]
    avals: tuple[Aval, ...]
    counted_bytes: tuple[int, ...]
    next_run: dict[int, int | None]
    max_receives: dict[Aval, int]
    binds: tuple[BindInput, ...]
    keeps: tuple[KeepOutput, ...]

    def text(self, instruction: int) -> str:
        """The instruction as a user reads it, with its position."""
        return f"#{instruction} {format_instruction(self.program.instructions[instruction])}"


def make_plan(program: ActorProgram) -> ExecutionPlan:
    """Number the definitions of a program and look up what the executor asks for at each step.

    Raises:
        ValueError: an instruction names a buffer that does not exist there, or defines one that does.
    """
    return _Planner(program).plan()


class _Planner:
    def __init__(self, program: ActorProgram):
        self.program = program
        self.current: dict[int, BufferKey] = {}
        self.avals: list[Aval] = []
        self.counted_bytes: list[int] = []
        self.shared: set[BufferKey] = set()
        self.kept: set[BufferKey] = set()
        self.position = 0

    def plan(self) -> ExecutionPlan:
        commands: list[Command] = []
        for position, instruction in enumerate(self.program.instructions):
            self.position = position
            commands.append(self._command(instruction))
        private = self.kept | {
            c.inputs[position] for c in commands if isinstance(c, Execute) for position in c.donated
        }
        commands = [_private(c) if isinstance(c, PostRecv) and c.buffer in private else c for c in commands]
        return ExecutionPlan(
            program=self.program,
            commands=tuple(commands),
            avals=tuple(self.avals),
            counted_bytes=tuple(self.counted_bytes),
            next_run=_next_runs(commands),
            max_receives=_max_receives(commands),
            binds=tuple(c for c in commands if isinstance(c, BindInput)),
            keeps=tuple(c for c in commands if isinstance(c, KeepOutput)),
        )

    def _command(self, instruction: Instruction) -> Command:
        at = self.position
        match instruction:
            case Input(buffer=slot, arg=arg, donated=donated):
                key = self._define(slot)
                if not donated:
                    self.shared.add(key)
                return BindInput(at, key, arg, donated)
            case Recv(buffer=slot, from_actor=peer, tag=tag, aval=aval):
                return PostRecv(at, self._define(slot), peer, tag, aval, False)
            case Run(executable=executable, donated=donated):
                inputs = tuple(self._use(slot) for slot in instruction.inputs)
                for position in donated:
                    self._end(instruction.inputs[position])
                outputs = tuple(self._define(slot) for slot in instruction.outputs)
                return Execute(at, executable, inputs, outputs, donated)
            case Send(buffer=slot, to_actor=peer, tag=tag):
                return StartSend(at, self._use(slot), peer, tag)
            case Delete(buffer=slot):
                return Drop(self._end(slot))
            case Output(buffer=slot, result=result):
                key = self._use(slot)
                copy = key in self.shared
                self.shared.add(key)
                self.kept.add(key)
                return KeepOutput(key, result, copy)

    def _define(self, slot: int) -> BufferKey:
        if slot in self.current and self.current[slot] not in self.kept:
            raise ValueError(self._fault(slot, "is defined while it holds a buffer"))
        key = self.current[slot] = len(self.avals)
        aval = self.program.avals[slot]
        self.avals.append(aval)
        self.counted_bytes.append(0 if slot in self.program.uncounted else aval.size_bytes)
        return key

    def _use(self, slot: int) -> BufferKey:
        if slot not in self.current:
            raise ValueError(self._fault(slot, "holds no buffer"))
        return self.current[slot]

    def _end(self, slot: int) -> BufferKey:
        key = self._use(slot)
        if key in self.kept:
            raise ValueError(self._fault(slot, "has left the program as a result"))
        del self.current[slot]
        return key

    def _fault(self, slot: int, what: str) -> str:
        instruction = format_instruction(self.program.instructions[self.position])
        return f"program of actor {self.program.actor}, instruction #{self.position} ({instruction}): slot {slot} {what}"


def _private(command: PostRecv) -> PostRecv:
    return PostRecv(
        command.instruction, command.buffer, command.from_actor, command.tag, command.aval, private=True
    )


def _next_runs(commands: list[Command]) -> dict[int, int | None]:
    """A run must not be issued early past a send of a buffer that it consumes."""
    result: dict[int, int | None] = {}
    previous: Execute | None = None
    sent: set[BufferKey] = set()
    for command in commands:
        if isinstance(command, StartSend):
            sent.add(command.buffer)
        elif isinstance(command, Execute):
            consumed = {command.inputs[position] for position in command.donated}
            if previous is not None:
                result[previous.instruction] = None if consumed & sent else command.instruction
            previous, sent = command, set()
    if previous is not None:
        result[previous.instruction] = None
    return result


def _max_receives(commands: list[Command]) -> dict[Aval, int]:
    held: dict[BufferKey, Aval] = {}
    now: Counter[Aval] = Counter()
    most: Counter[Aval] = Counter()
    for command in commands:
        if isinstance(command, PostRecv):
            held[command.buffer] = command.aval
            now[command.aval] += 1
            most[command.aval] = max(most[command.aval], now[command.aval])
        ended = (
            [command.inputs[position] for position in command.donated]
            if isinstance(command, Execute)
            else [command.buffer]
            if isinstance(command, Drop | KeepOutput)
            else []
        )
        for key in ended:
            if key in held:
                now[held.pop(key)] -= 1
    return dict(most)
