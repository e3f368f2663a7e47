"""Prepare a program for execution: turn its instructions into commands whose buffers have unique numbers.

A program may use a slot (the program's number of a buffer) again after a `Delete`. The plan gives each
definition of a buffer (by an `Input`, a `Recv`, or an output of a `Run`) a number of its own, the buffer key,
so that the executor never mistakes a new buffer for an earlier one in the same slot.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TypeAlias, final

from msgspec import structs

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
"""The number of one definition of a buffer within one step, from zero."""


@final
@dataclass(frozen=True, slots=True)
class BindInput:
    """A command to store a step argument as a buffer. Once the argument is available, `Executor.arrived` must
    be called.

    Args:
        instruction: the index of the `Input` instruction.
        buffer: the key of the buffer.
        arg: the number of the step argument.
        donated: whether the step may consume the argument.
    """

    instruction: int
    buffer: BufferKey
    arg: int
    donated: bool


@final
@dataclass(frozen=True, slots=True)
class PostRecv:
    """A command to post a receive into a buffer. Once the data has arrived, `Executor.arrived` must be
    called.

    Args:
        instruction: the index of the `Recv` instruction.
        buffer: the key of the buffer.
        from_actor: the actor that sends the data.
        tag: the tag of the transfer.
        aval: the aval of the received array.
        private: whether the array becomes a result of the step or is donated. If so, the array must not share
            memory with a buffer into which later receives write.
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
    """A command to call an executable. Once it has computed its results, `Executor.ran` must be called.

    Args:
        instruction: the index of the `Run` instruction.
        executable: the number of the executable in the program.
        inputs: the keys of the buffers that are the arguments.
        outputs: the keys of the buffers that store the results.
        donated: the positions in `inputs` of the buffers that the call consumes.
    """

    instruction: int
    executable: int
    inputs: tuple[BufferKey, ...]
    outputs: tuple[BufferKey, ...]
    donated: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class StartSend:
    """A command to start sending a buffer. Once the data has been sent, `Executor.sent` must be called.

    Args:
        instruction: the index of the `Send` instruction.
        buffer: the key of the buffer.
        to_actor: the actor that receives the data.
        tag: the tag of the transfer.
    """

    instruction: int
    buffer: BufferKey
    to_actor: ActorId
    tag: Tag


@final
@dataclass(frozen=True, slots=True)
class Drop:
    """A command to free a buffer that nothing reads any more."""

    buffer: BufferKey


@final
@dataclass(frozen=True, slots=True)
class KeepOutput:
    """A command to make a buffer a result of the step.

    Args:
        buffer: the key of the buffer.
        result: the number of the step result.
        copy: whether the result must be a copy, because the buffer is also an argument or another result.
    """

    buffer: BufferKey
    result: int
    copy: bool


@final
@dataclass(frozen=True, slots=True)
class Finish:
    """The command that ends the step. The executor returns this command once all instructions have been
    executed and all transfers have completed."""


Command: TypeAlias = BindInput | PostRecv | Execute | StartSend | Drop | KeepOutput | Finish


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """A program prepared for execution by an `Executor`.

    Args:
        program: the program.
        commands: one command per instruction, in program order; a `Delete` instruction becomes a `Drop`.
        avals: the aval of each buffer, by buffer key.
        counted_bytes: for each buffer key, the bytes that the buffer adds to the count of memory in use: the
            size of its aval, or 0 if the program does not count the buffer. The avals can be trusted here,
            since executables are compared with them when a program is loaded.
        next_run: a dictionary. Its keys are the indices of all `Run` instructions. Each value is the index of
            the next `Run`, if that one may be issued before the instructions between the two. Otherwise, and
            for the last `Run`, the value is None.
        max_receives: for each aval, the greatest number of receive buffers that the program uses at the same
            time.
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
        """Return the text of an instruction with its index, as error messages show it."""
        return f"#{instruction} {format_instruction(self.program, instruction)}"


def make_plan(program: ActorProgram) -> ExecutionPlan:
    """Prepare a program for execution: number its buffers, and compute what an `Executor` needs in every
    step.

    The program may be one that was decoded from a message, which checks the types of its fields and nothing
    else.

    Raises:
        ValueError: an instruction uses a buffer that does not exist at that point, or defines one that
            exists; or a number is out of its range.
    """
    # A decoded program has an object for each slot, and few distinct avals.
    one_of_each: dict[Aval, Aval] = {}
    avals = tuple([one_of_each.setdefault(aval, aval) for aval in program.avals])
    return _Planner(structs.replace(program, avals=avals)).plan()


_COUNTED_FIELDS: dict[type[Instruction], tuple[str, ...]] = {
    Input: ("arg",),
    Run: ("executable",),
    Send: ("tag",),
    Recv: ("tag",),
    Delete: (),
    Output: ("result",),
}
"""The fields of each instruction that count something from 0, besides the slots."""


class _Planner:
    """A translator of a program's instructions into commands, which tracks which buffer is in each slot (the
    program's number of a buffer)."""

    def __init__(self, program: ActorProgram):
        self.program = program
        self.current: dict[int, BufferKey] = {}
        self.avals: list[Aval] = []
        self.counted_bytes: list[int] = []
        self.shared: set[BufferKey] = set()
        self.kept: set[BufferKey] = set()
        self.position = 0

    def plan(self) -> ExecutionPlan:
        self._check_slots()
        commands: list[Command] = []
        for position, instruction in enumerate(self.program.instructions):
            self.position = position
            commands.append(self._command(instruction))
        private = self.kept | {
            c.inputs[position] for c in commands if isinstance(c, Execute) for position in c.donated
        }
        commands = [
            replace(c, private=True) if isinstance(c, PostRecv) and c.buffer in private else c
            for c in commands
        ]
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

    def _check_slots(self) -> None:
        program = self.program
        for aval in dict.fromkeys(program.avals):
            if min(aval.shape, default=0) < 0:
                raise ValueError(f"program of actor {program.actor}: {aval} has a negative dimension")
        for slot in program.uncounted:
            if not 0 <= slot < len(program.avals):
                text = f"slot {slot} of {len(program.avals)} cannot be left out of the count"
                raise ValueError(f"program of actor {program.actor}: {text}")

    def _command(self, instruction: Instruction) -> Command:
        at = self.position
        for name in _COUNTED_FIELDS[type(instruction)]:
            if (number := getattr(instruction, name)) < 0:
                raise self._error(f"{name} {number} is negative")
        match instruction:
            case Input(buffer=slot, arg=arg, donated=donated):
                key = self._define(slot)
                if not donated:
                    self.shared.add(key)
                return BindInput(at, key, arg, donated)
            case Recv(buffer=slot, from_actor=peer, tag=tag):
                key = self._define(slot)
                return PostRecv(at, key, peer, tag, self.avals[key], False)
            case Run(executable=executable, donated=donated):
                inputs = tuple(self._use(slot) for slot in instruction.inputs)
                for position in donated:
                    if not 0 <= position < len(inputs):
                        raise self._error(f"position {position} of {len(inputs)} inputs cannot be donated")
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
        if not 0 <= slot < len(self.program.avals):
            raise self._error(f"slot {slot} does not exist; the program has {len(self.program.avals)} slots")
        if slot in self.current and self.current[slot] not in self.kept:
            raise self._error(f"slot {slot} is defined while it holds a buffer")
        key = self.current[slot] = len(self.avals)
        aval = self.program.avals[slot]
        self.avals.append(aval)
        self.counted_bytes.append(0 if slot in self.program.uncounted else aval.size_bytes)
        return key

    def _use(self, slot: int) -> BufferKey:
        if slot not in self.current:
            raise self._error(f"slot {slot} holds no buffer")
        return self.current[slot]

    def _end(self, slot: int) -> BufferKey:
        key = self._use(slot)
        if key in self.kept:
            raise self._error(f"slot {slot} has left the program as a result")
        del self.current[slot]
        return key

    def _error(self, text: str) -> ValueError:
        instruction = format_instruction(self.program, self.position)
        where = f"program of actor {self.program.actor}, instruction #{self.position} ({instruction})"
        return ValueError(f"{where}: {text}")


def _next_runs(commands: list[Command]) -> dict[int, int | None]:
    """Find, for each `Run` instruction, the next `Run`, and decide whether that one may be issued before the
    instructions between the two.

    Returns:
        A dictionary. Its keys are the indices of all `Run` instructions. Each value is the index of the next
        `Run`. The value is None if there is no next `Run`, or if the next `Run` must wait because it consumes
        a buffer that a send between the two reads.
    """
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
    """Return, for each aval, the greatest number of receive buffers that a program uses at the same time."""
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
