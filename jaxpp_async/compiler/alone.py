"""compiler.alone: checks of one program by itself, and what keeps count of what is assigned. Makes nothing.

Nine tenths of a program are runs' operands and deletions, and mostly nothing is wrong with any: whole sets are looked
at first, and what is wrong is looked for once something is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

from jaxpp_async.program import (
    ActorProgram,
    Aval,
    BufferId,
    Delete,
    ExecutableId,
    Input,
    Instruction,
    Output,
    Recv,
    Run,
    Send,
)
from jaxpp_async.program_text import format_instruction


class InternalError(AssertionError):
    """A stage of the compiler broke a rule. A bug of this package, never of the user's step."""


class Made:
    """Numbers that were assigned, of `size`. Mostly they come in order: then one number says which they are.

    Args:
        size: numbers from 0 to below this are valid.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.upto = 0
        self.beyond: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return 0 <= number < self.upto or number in self.beyond

    def has(self, numbers: Sequence[int]) -> bool:
        """Whether all of them were assigned."""
        in_order = not numbers or (max(numbers) < self.upto and min(numbers) >= 0)
        return in_order or all(n in self for n in numbers)

    def add(self, number: int) -> None:
        """Assign a number that is valid and new."""
        if number != self.upto:
            self.beyond.add(number)
            return
        self.upto += 1
        while self.beyond and self.upto in self.beyond:
            self.beyond.remove(self.upto)
            self.upto += 1

    def extend(self, numbers: Sequence[int]) -> bool:
        """Assign the next numbers. False, and nothing happens, where these are others or not valid."""
        after = self.upto + len(numbers)
        if self.beyond or after > self.size or tuple(numbers) != tuple(range(self.upto, after)):
            return False
        self.upto = after
        return True


class _Walk:
    """One pass over a program: what is live, and what each slot has been through."""

    def __init__(self, program: ActorProgram):
        self.program = program
        self.index = 0
        self.instruction: Instruction | None = None
        self.made = Made(len(program.avals))
        self.live: set[BufferId] = set()
        self.received: set[BufferId] = set()
        self.kept: set[BufferId] = set()
        self.sent: set[BufferId] = set()
        self.given: set[BufferId] = set()
        self.args: set[int] = set()
        self.results: set[int] = set()
        self.donations: dict[ExecutableId, tuple[int, ...]] = {}

    def walk(self) -> None:
        instructions, after = self.program.instructions, 0
        for index in [k for k, i in enumerate(instructions) if not isinstance(i, Delete)]:
            if after < index:
                self.delete_all(range(after, index))
            self.step(index)
            after = index + 1
        self.delete_all(range(after, len(instructions)))
        self.instruction = None

    def step(self, index: int) -> None:
        self.index, self.instruction = index, self.program.instructions[index]
        _STEPS[type(self.instruction)](self, self.instruction)

    def delete_all(self, indices: range) -> None:
        """The `Delete`s at these positions."""
        deletes = self.program.instructions[indices.start : indices.stop]
        buffers = [i.buffer for i in deletes if isinstance(i, Delete)]
        held = len(self.live)
        if self.live.issuperset(buffers) and self.kept.isdisjoint(buffers):
            self.live.difference_update(buffers)
            if len(self.live) == held - len(buffers):
                return
            self.live.update(buffers)
        for index in indices:
            self.step(index)

    def fail(self, message: str) -> NoReturn:
        text = f" {format_instruction(self.instruction)!r}" if self.instruction else ""
        raise InternalError(
            f"actor {self.program.actor}, instruction {self.index}{text}: {message}; "
            "this is a bug in jaxpp_async.compiler.lowering"
        )

    def define(self, buffer: BufferId, aval: Aval | None = None) -> None:
        if not 0 <= buffer < len(self.program.avals):
            self.fail(f"b{buffer} is out of range, the program has {len(self.program.avals)} slots")
        if buffer in self.made:
            self.fail(f"b{buffer} is assigned twice")
        if aval is not None and aval is not (known := self.program.avals[buffer]) and aval != known:
            self.fail(f"b{buffer} is declared {known}")
        self.made.add(buffer)
        self.live.add(buffer)

    def read(self, buffer: BufferId) -> None:
        if buffer not in self.live:
            self.fail(f"b{buffer} {self.fate(buffer)}")

    def fate(self, buffer: BufferId) -> str:
        """Why a buffer is not live."""
        if buffer in self.given:
            return "has left the program"
        for i in self.program.instructions[: self.index + 1]:
            if isinstance(i, Delete) and i.buffer == buffer:
                return "was deleted before"
            if isinstance(i, Run) and any(i.inputs[p] == buffer for p in i.donated if 0 <= p < len(i.inputs)):
                return "was donated before"
        return "is read before it is made"

    def bind(self, i: Input) -> None:
        self.define(i.buffer, i.aval)
        if i.arg in self.args:
            self.fail(f"argument {i.arg} is bound twice")
        self.args.add(i.arg)
        if not i.donated:
            self.kept.add(i.buffer)

    def receive(self, i: Recv) -> None:
        self.define(i.buffer, i.aval)
        self.received.add(i.buffer)

    def send(self, i: Send) -> None:
        self.read(i.buffer)
        if i.buffer in self.received:
            self.fail(f"b{i.buffer} was received; a value is sent by the actor that makes it")
        self.sent.add(i.buffer)

    def run(self, i: Run) -> None:
        if not self.live.issuperset(i.inputs):
            for b in i.inputs:
                self.read(b)
        if i.donated:
            self.donate(i)
        if not self.made.extend(i.outputs):
            for b in i.outputs:
                self.define(b)
        self.live.update(i.outputs)
        first = self.donations.setdefault(i.executable, i.donated)
        if first != i.donated:
            self.fail(f"executable {i.executable} donated {first} in an earlier run")

    def donate(self, i: Run) -> None:
        if len(set(i.donated)) != len(i.donated) or min(i.donated) < 0 or max(i.donated) >= len(i.inputs):
            self.fail(f"donated positions {i.donated} of {len(i.inputs)} inputs")
        buffers = [i.inputs[p] for p in i.donated]
        for slots, why in (
            (self.kept, "is an argument that the caller keeps"),
            (self.received, "lies in the transport's memory"),
            (self.sent, "may still be on its way to another actor"),
        ):
            if not slots.isdisjoint(buffers):
                self.fail(f"b{next(b for b in buffers if b in slots)} is donated, but {why}")
        if len(set(i.inputs)) != len(i.inputs):
            times = Counter(i.inputs)
            for b in buffers:
                if times[b] > 1:
                    self.fail(f"b{b} is donated and read twice by the same run")
        self.live.difference_update(buffers)

    def delete(self, i: Delete) -> None:
        self.read(i.buffer)
        if i.buffer in self.kept:
            self.fail(f"b{i.buffer} is an argument that the caller keeps")
        self.live.remove(i.buffer)

    def give(self, i: Output) -> None:
        if i.buffer not in self.given:
            self.read(i.buffer)
        if i.result in self.results:
            self.fail(f"result {i.result} is made twice")
        self.results.add(i.result)
        self.live.discard(i.buffer)
        self.given.add(i.buffer)


_STEPS = {
    Input: _Walk.bind,
    Recv: _Walk.receive,
    Send: _Walk.send,
    Run: _Walk.run,
    Delete: _Walk.delete,
    Output: _Walk.give,
}


def verify_program(program: ActorProgram, *, complete: bool = True) -> None:
    """Check one program alone.

    Single assignment; every buffer read is live; nothing is used after it was deleted, donated or returned; only
    buffers that are the program's own are donated or deleted; all runs of an executable donate the same positions.

    Args:
        program: one actor's program.
        complete: whether every slot must be gone at the end, save outputs and arguments that the caller keeps. False
            before `lowering.delete_buffers`.

    Raises:
        InternalError: a rule is broken; names the actor and the instruction.
    """
    walk = _Walk(program)
    walk.walk()
    if complete and (left := walk.live - walk.kept):
        walk.fail(f"b{min(left)} is still held at the end")
    if not all(0 <= b < len(program.avals) for b in program.uncounted):
        walk.fail(f"uncounted slots {sorted(program.uncounted)} of {len(program.avals)}")
