"""verify: checks what must hold after each stage of lowering; makes nothing, changes nothing.

`verify_graph` before lowering; after each of its stages the rules that the stage could break (`verify_programs`: all of
them). What they find is a bug of this package (`InternalError`), except a deadlock, which a schedule can ask for
(`ScheduleError`). Everything is linear in the number of instructions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from jaxpp_async.compiler.simulate import check_deadlock
from jaxpp_async.program import (
    ActorId,
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
    Tag,
    TaskGraph,
)
from jaxpp_async.program_text import format_instruction


class InternalError(AssertionError):
    """A stage of the compiler broke a rule. A bug of this package, never of the user's step."""


# ---------------------------------------------------------------- task graph


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InternalError(f"task graph: {message}; this is a bug in jaxpp_async.compiler.placement")


def verify_graph(graph: TaskGraph) -> None:
    """Check that values are assigned once, before they are read, and that every index is in range.

    Args:
        graph: what placement made.

    Raises:
        InternalError: a rule is broken.
    """
    actors, num_values = range(graph.num_actors), len(graph.values)
    made: set[int] = set()
    unmade = set(range(num_values))

    def make(value: int, where: str) -> None:
        _require(0 <= value < num_values, f"{where} makes value {value} of {num_values}")
        if value in made:
            _require(False, f"{where} makes {graph.values[value].label!r}, which exists already")
        made.add(value)
        unmade.discard(value)

    for i in graph.inputs:
        make(i.value, f"argument {i.arg}")
        _require(bool(i.actors), f"argument {i.arg} lives on no actor")
        _require(all(a in actors for a in i.actors), f"argument {i.arg} lives on actors {i.actors}")
        _require(len(set(i.actors)) == len(i.actors), f"argument {i.arg} names an actor twice: {i.actors}")
    for node in graph.nodes:
        _require(node.actor in actors, f"{node.label} runs on actor {node.actor} of {graph.num_actors}")
        _require(all(0 <= p < len(node.inputs) for p in node.donatable), f"{node.label} donates {node.donatable}")
        if not made.issuperset(node.inputs):
            v = next(v for v in node.inputs if v not in made)
            label = graph.values[v].label if 0 <= v < num_values else v
            _require(False, f"{node.label} reads {label!r} before it is made")
        new = set(node.outputs)
        if len(new) < len(node.outputs) or not unmade.issuperset(new):
            for v in node.outputs:
                make(v, node.label)
        unmade -= new
        made |= new
    for o in graph.outputs:
        _require(o.value in made, f"result {o.result} is value {o.value}, which nothing makes")
        _require(all(a in actors for a in o.actors), f"result {o.result} lives on actors {o.actors}")
        _require(len(set(o.actors)) == len(o.actors), f"result {o.result} names an actor twice: {o.actors}")
    # A scalar that every actor computes for itself is one result made of several values, one an actor.
    results = [f"result {o.result} on actor {a}" for o in graph.outputs for a in o.actors]
    for name, times in Counter([f"argument {i.arg}" for i in graph.inputs] + results).items():
        _require(times == 1, f"{name} appears twice")


# ---------------------------------------------------------------- one program


class _Walk:
    """One pass over a program: what is live, and what each slot has been through."""

    def __init__(self, program: ActorProgram):
        self.program = program
        self.index = 0
        self.unmade = set(range(len(program.avals)))
        self.instruction: Instruction | None = None
        self.live: set[BufferId] = set()
        self.fate: dict[BufferId, str] = {}
        self.received: set[BufferId] = set()
        self.kept: set[BufferId] = set()
        self.sent: set[BufferId] = set()
        self.args: set[int] = set()
        self.results: set[int] = set()

    def fail(self, message: str) -> NoReturn:
        text = f" {format_instruction(self.instruction)!r}" if self.instruction else ""
        raise InternalError(
            f"actor {self.program.actor}, instruction {self.index}{text}: {message}; "
            "this is a bug in jaxpp_async.compiler.lowering"
        )

    def define(self, buffer: BufferId, aval: Aval | None = None) -> None:
        if not 0 <= buffer < len(self.program.avals):
            self.fail(f"b{buffer} is out of range, the program has {len(self.program.avals)} slots")
        if buffer not in self.unmade:
            self.fail(f"b{buffer} is assigned twice")
        if aval is not None and aval != self.program.avals[buffer]:
            self.fail(f"b{buffer} is declared {self.program.avals[buffer]}")
        self.unmade.discard(buffer)
        self.live.add(buffer)

    def read(self, buffer: BufferId) -> None:
        if buffer not in self.live:
            self.fail(f"b{buffer} {self.fate.get(buffer, 'is read before it is made')}")

    def end(self, buffer: BufferId, fate: str) -> None:
        self.live.discard(buffer)
        self.fate[buffer] = fate

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
        # Whole sets first: a program has a hundred thousand buffers, and mostly nothing is wrong with any.
        if not self.live.issuperset(i.inputs):
            for b in i.inputs:
                self.read(b)
        if i.donated:
            if len(set(i.donated)) != len(i.donated) or not all(0 <= p < len(i.inputs) for p in i.donated):
                self.fail(f"donated positions {i.donated} of {len(i.inputs)} inputs")
            times = Counter(i.inputs)
            for p in i.donated:
                self.donate(i.inputs[p], times[i.inputs[p]])
        new = set(i.outputs)
        if len(new) < len(i.outputs) or not self.unmade.issuperset(new):
            for b in i.outputs:
                self.define(b)
        self.unmade -= new
        self.live |= new

    def donate(self, b: BufferId, times: int) -> None:
        for slots, why in (
            (self.kept, "is an argument that the caller keeps"),
            (self.received, "lies in the transport's memory"),
            (self.sent, "may still be on its way to another actor"),
        ):
            if b in slots:
                self.fail(f"b{b} is donated, but {why}")
        if times > 1:
            self.fail(f"b{b} is donated and read twice by the same run")
        self.end(b, "was donated before")

    def delete(self, i: Delete) -> None:
        if i.buffer not in self.live:
            self.read(i.buffer)
        if i.buffer in self.kept:
            self.fail(f"b{i.buffer} is an argument that the caller keeps")
        self.live.discard(i.buffer)
        self.fate[i.buffer] = "was deleted before"

    def give(self, i: Output) -> None:
        if self.fate.get(i.buffer) != "has left the program":
            self.read(i.buffer)
        if i.result in self.results:
            self.fail(f"result {i.result} is made twice")
        self.results.add(i.result)
        self.end(i.buffer, "has left the program")


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
    donations: dict[ExecutableId, tuple[int, ...]] = {}
    for walk.index, instruction in enumerate(program.instructions):
        walk.instruction = instruction
        _STEPS[type(instruction)](walk, instruction)
        if isinstance(instruction, Run):
            first = donations.setdefault(instruction.executable, instruction.donated)
            if first != instruction.donated:
                walk.fail(f"executable {instruction.executable} donated {first} in an earlier run")
    walk.instruction = None
    if complete and (left := walk.live - walk.kept):
        walk.fail(f"b{min(left)} is still held at the end")
    if not all(0 <= b < len(program.avals) for b in program.uncounted):
        walk.fail(f"uncounted slots {sorted(program.uncounted)} of {len(program.avals)}")


# ---------------------------------------------------------------- programs together


@dataclass(frozen=True, slots=True)
class _End:
    """One side of a transfer."""

    actor: ActorId
    peer: ActorId
    aval: Aval


def _fail_transfer(tag: Tag, message: str) -> NoReturn:
    raise InternalError(f"transfer with tag {tag}: {message}; this is a bug in jaxpp_async.compiler.lowering")


def _add_end(ends: dict[Tag, _End], tag: Tag, end: _End, verb: str) -> None:
    if tag in ends:
        _fail_transfer(tag, f"actor {end.actor} {verb} it, and so does actor {ends[tag].actor}")
    ends[tag] = end


def verify_transfers(programs: Sequence[ActorProgram]) -> None:
    """Check that every send has exactly one matching receive, in the same order between each pair of actors.

    Args:
        programs: one an actor.

    Raises:
        InternalError: a rule is broken; names the tag and the actors.
    """
    sends: dict[Tag, _End] = {}
    recvs: dict[Tag, _End] = {}
    sent_on, received_on = defaultdict(list), defaultdict(list)
    for p in programs:
        for i in p.instructions:
            if isinstance(i, Send):
                _add_end(sends, i.tag, _End(p.actor, i.to_actor, p.avals[i.buffer]), "sends")
                sent_on[p.actor, i.to_actor].append(i.tag)
            elif isinstance(i, Recv):
                _add_end(recvs, i.tag, _End(p.actor, i.from_actor, i.aval), "receives")
                received_on[i.from_actor, p.actor].append(i.tag)
    for tag in sends.keys() ^ recvs.keys():
        end, verb = (sends[tag], "sends") if tag in sends else (recvs[tag], "receives")
        _fail_transfer(tag, f"actor {end.actor} {verb} it, but actor {end.peer} has no part in it")
    for tag, s in sends.items():
        r = recvs[tag]
        if (s.actor, s.peer) != (r.peer, r.actor) or s.actor == s.peer:
            _fail_transfer(tag, f"sent {s.actor} -> {s.peer}, received {r.peer} -> {r.actor}")
        if s.aval != r.aval:
            _fail_transfer(tag, f"actor {s.actor} sends {s.aval}, actor {r.actor} receives {r.aval}")
    for (a, b), tags in sent_on.items():
        for sent, received in zip(tags, received_on[a, b], strict=True):
            if sent != received:
                _fail_transfer(sent, f"actor {a} sends it to actor {b}, which posts tag {received} in its place")


def verify_signatures(programs: Sequence[ActorProgram]) -> None:
    """Check that every run of an executable has operands and results of the same shapes and dtypes.

    Args:
        programs: one an actor.

    Raises:
        InternalError: an executable is called in two ways.
    """
    first: dict[ExecutableId, tuple[Run, list, list]] = {}
    known_kinds: dict[tuple, tuple] = {}  # one object a kind: lists of them compare fast
    for p in programs:
        # Not the spec: ("data",) and ("data", None) say the same.
        kinds = [known_kinds.setdefault((a.shape, a.dtype), (a.shape, a.dtype)) for a in p.avals]
        for i in p.instructions:
            if not isinstance(i, Run):
                continue
            operands, results = [kinds[b] for b in i.inputs], [kinds[b] for b in i.outputs]
            known = first.setdefault(i.executable, (i, operands, results))
            if known[1] != operands or known[2] != results:
                raise InternalError(
                    f"actor {p.actor}: {i.label!r} calls executable {i.executable} with {operands} -> {results}, "
                    f"{known[0].label!r} with {known[1]} -> {known[2]}; "
                    "this is a bug in jaxpp_async.compiler.placement"
                )


def verify_alone(programs: Sequence[ActorProgram], *, complete: bool = True) -> None:
    """Check each program of a step by itself: `verify_program`.

    Args:
        programs: one an actor.
        complete: see `verify_program`.

    Raises:
        InternalError: a rule is broken.
    """
    for actor, p in enumerate(programs):
        if p.actor != actor:
            raise InternalError(f"program {actor} is actor {p.actor}'s; this is a bug in jaxpp_async.compiler.lowering")
        verify_program(p, complete=complete)


def verify_together(programs: Sequence[ActorProgram]) -> None:
    """Check what holds between the programs of a step: transfers, executables, progress.

    Args:
        programs: one an actor.

    Raises:
        InternalError: a rule is broken.
        ScheduleError: the programs deadlock; the message says who waits for whom.
    """
    verify_transfers(programs)
    verify_signatures(programs)
    check_deadlock(programs)


def verify_only_deletes(before: Sequence[ActorProgram], after: Sequence[ActorProgram]) -> None:
    """Check that `Delete`s are all that programs gained: what held for them together then still holds.

    Args:
        before, after: one an actor.

    Raises:
        InternalError: another instruction came, went or moved.
    """
    for old, new in zip(before, after, strict=True):
        if [i for i in new.instructions if not isinstance(i, Delete)] != list(old.instructions):
            raise InternalError(
                f"actor {new.actor}: more than Deletes changed; this is a bug in jaxpp_async.compiler.lowering"
            )


def verify_programs(programs: Sequence[ActorProgram], *, complete: bool = True) -> None:
    """Check all programs of a step, each alone and together.

    Args:
        programs: one an actor.
        complete: see `verify_program`.

    Raises:
        InternalError: a rule is broken.
        ScheduleError: the programs deadlock; the message says who waits for whom.
    """
    verify_alone(programs, complete=complete)
    verify_together(programs)
