"""Check task graphs and the actors' programs for errors that a compiler pass could make, and for deadlocks.

`verify_graph` runs before lowering. Each pass of lowering is followed by checks of the rules that it could
break; `verify_programs` runs all of these checks. A broken rule is a bug of this package (`InternalError`),
except for a deadlock, which a user's schedule can cause (`ScheduleError`). All checks take time linear in the
number of instructions.

Nine tenths of a program are operands of `Run` and `Delete` instructions, which are almost always correct. So
a check tests a whole set of operands first, and only if this fails looks for the wrong operand.

`find_blocked_actors` runs all programs of a step together, without data and without times, to find deadlocks.
The executor's rules apply: each actor issues its instructions in order; `Recv` and `Send` never block; a
`Run` blocks until its inputs have arrived. The transport is assumed to be the strictest one: a transfer
completes only when its receive is posted (rendezvous) and every earlier transfer between the same two actors
in the same direction has completed (as in NCCL). Programs that end under these rules end with any transport.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias, TypeVar

import msgspec

from jaxpp_async.errors import ScheduleError
from jaxpp_async.program.actor_program import ActorProgram, format_instruction
from jaxpp_async.program.instructions import (
    ActorId,
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

_T = TypeVar("_T")


class InternalError(AssertionError):
    """An error that reports an invalid task graph or program, due to a bug in a compiler pass.

    The user's step is never the cause of this error.
    """


def _fail(message: str, module: str = "lowering") -> NoReturn:
    raise InternalError(f"{message}; this is a bug in jaxpp_async.compiler.{module}")


def _fail_graph(message: str) -> NoReturn:
    _fail(f"task graph: {message}", "placement")


def _fail_transfer(tag: Tag, message: str) -> NoReturn:
    _fail(f"transfer with tag {tag}: {message}")


def verify_programs(programs: Sequence[ActorProgram]) -> None:
    """Check all programs of a step, each by itself and all of them together.

    Args:
        programs: one program per actor.

    Raises:
        InternalError: a program is invalid, or the programs do not fit together.
        ScheduleError: the programs deadlock; the message says which actor waits for which.
    """
    verify_alone(programs)
    verify_together(programs)


def verify_alone(programs: Sequence[ActorProgram]) -> None:
    """Check each program of a step by itself; see `verify_program`.

    Args:
        programs: one program per actor.

    Raises:
        InternalError: a program is invalid; the message names the actor and the instruction.
    """
    for actor, p in enumerate(programs):
        if p.actor != actor:
            _fail(f"program {actor} is actor {p.actor}'s")
        verify_program(p)


def verify_together(programs: Sequence[ActorProgram]) -> None:
    """Check the programs of a step together.

    Transfers must match, all calls of an executable must have the same shapes and dtypes, and the programs
    must not deadlock.

    Args:
        programs: one program per actor.

    Raises:
        InternalError: transfers do not match, or calls of an executable differ.
        ScheduleError: the programs deadlock; the message says which actor waits for which.
    """
    verify_transfers(programs)
    verify_signatures(programs)
    check_deadlock(programs)


def verify_only_deletes(before: Sequence[ActorProgram], after: Sequence[ActorProgram]) -> None:
    """Check that a compiler pass changed programs only by inserting `Delete` instructions.

    If this is so, `verify_together` need not check the programs again after the pass.

    Args:
        before: one program per actor, before the pass.
        after: one program per actor, after the pass.

    Raises:
        InternalError: another instruction was added, removed or moved.
    """
    for old, new in zip(before, after, strict=True):
        if [i for i in new.instructions if not isinstance(i, Delete)] != list(old.instructions):
            _fail(f"actor {new.actor}: more than Deletes changed")


# ---------------------------------------------------------------- task graph


def verify_graph(graph: TaskGraph) -> None:
    """Check that each value of a task graph is assigned once, before it is read, and that indices are valid.

    Args:
        graph: the task graph that placement made.

    Raises:
        InternalError: the graph is invalid.
    """
    num_values = len(graph.values)
    made = AssignedIds(num_values)

    def make(value: int, where: str) -> None:
        if not 0 <= value < num_values:
            _fail_graph(f"{where} makes value {value} of {num_values}")
        if value in made:
            _fail_graph(f"{where} makes {graph.values[value].label!r}, which exists already")
        made.add(value)

    for i in graph.inputs:
        if i.actors:
            make(i.value, f"argument {i.arg}")
        _verify_homes("argument", i.arg, i.actors, graph.num_actors)
    for node in graph.nodes:
        if not 0 <= node.actor < graph.num_actors:
            _fail_graph(f"{node.label} runs on actor {node.actor} of {graph.num_actors}")
        if node.donatable and not (min(node.donatable) >= 0 and max(node.donatable) < len(node.inputs)):
            _fail_graph(f"{node.label} donates {node.donatable}")
        if not made.has(node.inputs):
            v = next(v for v in node.inputs if v not in made)
            label = graph.values[v].label if 0 <= v < num_values else v
            _fail_graph(f"{node.label} reads {label!r} before it is made")
        if not made.extend(node.outputs):
            for v in node.outputs:
                make(v, node.label)
    for o in graph.outputs:
        if o.value not in made:
            _fail_graph(f"result {o.result} is value {o.value}, which nothing makes")
        _verify_homes("result", o.result, o.actors, graph.num_actors)
    if (arg := _find_repeated([i.arg for i in graph.inputs])) is not None:
        _fail_graph(f"argument {arg} appears twice")
    # A scalar that every actor computes for itself is one result made of several values, one per actor.
    if (at := _find_repeated([(o.result, a) for o in graph.outputs for a in o.actors])) is not None:
        _fail_graph(f"result {at[0]} on actor {at[1]} appears twice")


def _verify_homes(what: str, number: int, homes: Sequence[ActorId], num_actors: int) -> None:
    """Check that the actors that hold an argument or a result exist, and that none is named twice.

    Args:
        what: "argument" or "result", for the error message.
        number: the position of the argument or result.
        homes: the actors that hold the argument or result.
        num_actors: the number of actors in the mesh.
    """
    if homes and not (min(homes) >= 0 and max(homes) < num_actors):
        _fail_graph(f"{what} {number} lives on actors {homes}")
    if len(homes) > 1 and len(set(homes)) != len(homes):
        _fail_graph(f"{what} {number} names an actor twice: {homes}")


def _find_repeated(things: Sequence[_T]) -> _T | None:
    """Return the first of `things` that occurs more than once, or None if all are different."""
    if len(set(things)) == len(things):
        return None
    return next((thing for thing, times in Counter(things).items() if times > 1), None)


class AssignedIds:
    """A set of the ids that were assigned so far.

    Ids are mostly assigned in ascending order. So the set consists of a number `upto`, below which all ids
    are assigned, and a Python set of the assigned ids above it.

    Args:
        size: the number of valid ids, which count from 0.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.upto = 0
        self.beyond: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return 0 <= number < self.upto or number in self.beyond

    def has(self, numbers: Sequence[int]) -> bool:
        """Return whether all of `numbers` were assigned."""
        in_order = not numbers or (max(numbers) < self.upto and min(numbers) >= 0)
        return in_order or all(n in self for n in numbers)

    def add(self, number: int) -> None:
        """Mark an id as assigned; the id must be valid and not assigned yet."""
        if number != self.upto:
            self.beyond.add(number)
            return
        self.upto += 1
        while self.beyond and self.upto in self.beyond:
            self.beyond.remove(self.upto)
            self.upto += 1

    def extend(self, numbers: Sequence[int]) -> bool:
        """Mark ids as assigned if they are exactly the next ones in ascending order.

        Returns:
            True if all of the ids were marked; False if none was.
        """
        after = self.upto + len(numbers)
        if self.beyond or after > self.size or tuple(numbers) != tuple(range(self.upto, after)):
            return False
        self.upto = after
        return True


# ---------------------------------------------------------------- one program


def verify_program(program: ActorProgram) -> None:
    """Check one actor's program by itself.

    The rules are: each buffer slot is assigned once; a buffer is read only after it was made and before it is
    deleted, donated or returned; only buffers that belong to the program are donated or deleted; all `Run`
    instructions of an executable donate the same positions; by the end every buffer is deleted, donated or
    returned, except for arguments that the caller keeps.

    Args:
        program: the program of one actor, with its deletions.

    Raises:
        InternalError: the program is invalid; the message names the actor and the instruction.
    """
    check = _ProgramCheck(program)
    check.run()
    if left := check.live - check.kept:
        check.fail(f"b{min(left)} is still held at the end")
    if not all(0 <= b < len(program.avals) for b in program.uncounted):
        check.fail(f"uncounted slots {sorted(program.uncounted)} of {len(program.avals)}")


class _ProgramCheck:
    """A check of one program, which follows the state of each slot (buffer) over the instructions."""

    def __init__(self, program: ActorProgram):
        self.program = program
        self.index = 0
        self.instruction: Instruction | None = None
        self.made = AssignedIds(len(program.avals))
        self.live: set[BufferId] = set()
        self.received: set[BufferId] = set()
        self.kept: set[BufferId] = set()
        self.sent: set[BufferId] = set()
        self.given: set[BufferId] = set()
        self.args: set[int] = set()
        self.results: set[int] = set()
        self.donations: dict[ExecutableId, tuple[int, ...]] = {}

    def run(self) -> None:
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
        _CHECKS[type(self.instruction)](self, self.instruction)

    def delete_all(self, indices: range) -> None:
        """Check consecutive `Delete` instructions: all together, and if that fails one by one.

        Args:
            indices: the positions of the instructions in the program.
        """
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
        text = f" {format_instruction(self.program, self.index)!r}" if self.instruction else ""
        _fail(f"actor {self.program.actor}, instruction {self.index}{text}: {message}")

    def define(self, buffer: BufferId) -> None:
        if not 0 <= buffer < len(self.program.avals):
            self.fail(f"b{buffer} is out of range, the program has {len(self.program.avals)} slots")
        if buffer in self.made:
            self.fail(f"b{buffer} is assigned twice")
        self.made.add(buffer)
        self.live.add(buffer)

    def read(self, buffer: BufferId) -> None:
        if buffer not in self.live:
            self.fail(f"b{buffer} {self.explain_dead(buffer)}")

    def explain_dead(self, buffer: BufferId) -> str:
        """Return the reason, for an error message, why the current instruction may not read a buffer."""
        if buffer in self.given:
            return "has left the program"
        for i in self.program.instructions[: self.index]:
            if isinstance(i, Delete) and i.buffer == buffer:
                return "was deleted before"
            if isinstance(i, Run) and any(i.inputs[p] == buffer for p in i.donated if 0 <= p < len(i.inputs)):
                return "was donated before"
        return "is read before it is made"

    def check_input(self, i: Input) -> None:
        self.define(i.buffer)
        if i.arg in self.args:
            self.fail(f"argument {i.arg} is bound twice")
        self.args.add(i.arg)
        if not i.donated:
            self.kept.add(i.buffer)

    def check_recv(self, i: Recv) -> None:
        self.define(i.buffer)
        self.received.add(i.buffer)

    def check_send(self, i: Send) -> None:
        self.read(i.buffer)
        if i.buffer in self.received:
            self.fail(f"b{i.buffer} was received; a value is sent by the actor that makes it")
        self.sent.add(i.buffer)

    def check_run(self, i: Run) -> None:
        if not self.live.issuperset(i.inputs):
            for b in i.inputs:
                self.read(b)
        if i.donated:
            self.check_donation(i)
        if not self.made.extend(i.outputs):
            for b in i.outputs:
                self.define(b)
        self.live.update(i.outputs)
        first = self.donations.setdefault(i.executable, i.donated)
        if first != i.donated:
            self.fail(f"executable {i.executable} donated {first} in an earlier run")

    def check_donation(self, i: Run) -> None:
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

    def check_delete(self, i: Delete) -> None:
        self.read(i.buffer)
        if i.buffer in self.kept:
            self.fail(f"b{i.buffer} is an argument that the caller keeps")
        self.live.remove(i.buffer)

    def check_output(self, i: Output) -> None:
        if i.buffer not in self.given:
            self.read(i.buffer)
        if i.result in self.results:
            self.fail(f"result {i.result} is made twice")
        self.results.add(i.result)
        self.live.discard(i.buffer)
        self.given.add(i.buffer)


_CHECKS = {
    Input: _ProgramCheck.check_input,
    Recv: _ProgramCheck.check_recv,
    Send: _ProgramCheck.check_send,
    Run: _ProgramCheck.check_run,
    Delete: _ProgramCheck.check_delete,
    Output: _ProgramCheck.check_output,
}


# ---------------------------------------------------------------- programs together


class _TransferEnd(msgspec.Struct, frozen=True, gc=False):
    """One end of a transfer: the actor that sends or receives, its peer, and the aval of the array."""

    actor: ActorId
    peer: ActorId
    aval: Aval


def _record_end(ends: dict[Tag, _TransferEnd], tag: Tag, end: _TransferEnd, verb: str) -> None:
    if tag in ends:
        _fail_transfer(tag, f"actor {end.actor} {verb} it, and so does actor {ends[tag].actor}")
    ends[tag] = end


def verify_transfers(programs: Sequence[ActorProgram]) -> None:
    """Check that every send has exactly one matching receive.

    The sends from one actor to another must also be in the same order as their receives.

    Args:
        programs: one program per actor.

    Raises:
        InternalError: a send or a receive has no counterpart or differs from it. The message names the tag
            and the actors.
    """
    sends: dict[Tag, _TransferEnd] = {}
    recvs: dict[Tag, _TransferEnd] = {}
    sent_on, received_on = defaultdict(list), defaultdict(list)
    for p in programs:
        for i in p.instructions:
            if isinstance(i, Send):
                _record_end(sends, i.tag, _TransferEnd(p.actor, i.to_actor, p.avals[i.buffer]), "sends")
                sent_on[p.actor, i.to_actor].append(i.tag)
            elif isinstance(i, Recv):
                _record_end(recvs, i.tag, _TransferEnd(p.actor, i.from_actor, p.avals[i.buffer]), "receives")
                received_on[i.from_actor, p.actor].append(i.tag)
    for tag in sends.keys() ^ recvs.keys():
        end, verb = (sends[tag], "sends") if tag in sends else (recvs[tag], "receives")
        _fail_transfer(tag, f"actor {end.actor} {verb} it, but actor {end.peer} has no part in it")
    for tag, s in sends.items():
        r = recvs[tag]
        if (s.actor, s.peer) != (r.peer, r.actor) or s.actor == s.peer:
            _fail_transfer(tag, f"sent {s.actor} -> {s.peer}, received {r.peer} -> {r.actor}")
        if s.aval is not r.aval and s.aval != r.aval:
            _fail_transfer(tag, f"actor {s.actor} sends {s.aval}, actor {r.actor} receives {r.aval}")
    for (a, b), tags in sent_on.items():
        for sent, received in zip(tags, received_on[a, b], strict=True):
            if sent != received:
                _fail_transfer(
                    sent, f"actor {a} sends it to actor {b}, which posts tag {received} in its place"
                )


def verify_signatures(programs: Sequence[ActorProgram]) -> None:
    """Check that all `Run` instructions of an executable have the same shapes and dtypes.

    Args:
        programs: one program per actor.

    Raises:
        InternalError: two `Run` instructions of an executable have different shapes or dtypes.
    """
    first: dict[ExecutableId, tuple[Run, tuple, tuple]] = {}
    for p in programs:
        aval = p.avals.__getitem__
        for i in p.instructions:
            if not isinstance(i, Run):
                continue
            operands, results = tuple(map(aval, i.inputs)), tuple(map(aval, i.outputs))
            known = first.setdefault(i.executable, (i, operands, results))
            if known[1] == operands and known[2] == results:  # mostly the same objects, which is quickly seen
                continue
            wanted, found = _shapes_and_dtypes(*known[1:]), _shapes_and_dtypes(operands, results)
            if wanted != found:
                calls = f"{i.label!r} calls executable {i.executable} with {found}"
                _fail(f"actor {p.actor}: {calls}, {known[0].label!r} with {wanted}", "placement")


def _shapes_and_dtypes(operands: Sequence[Aval], results: Sequence[Aval]) -> tuple[list, list]:
    """Return the shape and dtype of each operand and of each result of one `Run` instruction.

    Sharding specs are left out, since ("data",) and ("data", None) differ as tuples but mean the same.
    """
    return [(a.shape, a.dtype) for a in operands], [(a.shape, a.dtype) for a in results]


# ---------------------------------------------------------------- deadlocks


@dataclass(frozen=True, slots=True)
class BlockedActor:
    """An actor that cannot continue in a step without data, and the transfer for which it waits.

    Args:
        actor: the actor that waits.
        at: the text of the instruction at which the actor waits, or "the end of the step".
        tag: the number of the transfer for which the actor waits.
        peer: the other actor of that transfer.
        sends: whether the waiting actor is the transfer's sender.
    """

    actor: ActorId
    at: str
    tag: Tag
    peer: ActorId
    sends: bool = False

    def __str__(self) -> str:
        what = (
            f"actor {self.peer} to receive tag {self.tag}"
            if self.sends
            else f"tag {self.tag} from actor {self.peer}"
        )
        return f"actor {self.actor} waits at {self.at} for {what}"


_Link: TypeAlias = tuple[ActorId, ActorId]
"""The sender and the receiver of transfers that complete in order."""


class _RunWithoutData:
    """The state of `find_blocked_actors`: each actor's program counter, and the transfers under way.

    Args:
        programs: one program per actor.
    """

    def __init__(self, programs: Sequence[ActorProgram]):
        self.programs = {p.actor: p for p in programs}
        self.streams = {p.actor: p.instructions for p in programs}
        self.counter = dict.fromkeys(self.streams, 0)
        self.blocked: dict[ActorId, BufferId] = {}
        self.pending: dict[ActorId, dict[BufferId, Recv]] = {a: {} for a in self.streams}
        self.sent: dict[_Link, deque[Tag]] = defaultdict(deque)
        self.posted: dict[_Link, deque[tuple[Tag, BufferId]]] = defaultdict(deque)
        self.ready = deque(self.streams)

    def run(self) -> None:
        while self.ready:
            self.advance(self.ready.popleft())

    def advance(self, actor: ActorId) -> None:
        """Issue instructions of an actor until one blocks or its program ends."""
        stream, pending = self.streams[actor], self.pending[actor]
        index = self.counter[actor]
        while index < len(stream):
            instruction = stream[index]
            if isinstance(instruction, Run):
                missing = next((b for b in instruction.inputs if b in pending), None) if pending else None
                if missing is not None:
                    self.blocked[actor] = missing
                    break
            elif isinstance(instruction, Send):
                link = actor, instruction.to_actor
                self.sent[link].append(instruction.tag)
                if self.posted[link]:
                    self.match(link)
            elif isinstance(instruction, Recv):
                pending[instruction.buffer] = instruction
                link = instruction.from_actor, actor
                self.posted[link].append((instruction.tag, instruction.buffer))
                if self.sent[link]:
                    self.match(link)
            index += 1
        self.counter[actor] = index

    def match(self, link: _Link) -> None:
        """Complete, in order, the transfers of a link whose send and receive were both issued."""
        sent, posted = self.sent[link], self.posted[link]
        while sent and posted and sent[0] == posted[0][0]:
            sent.popleft()
            self.arrive(link[1], posted.popleft()[1])

    def arrive(self, actor: ActorId, buffer: BufferId) -> None:
        self.pending[actor].pop(buffer, None)
        if self.blocked.get(actor) == buffer:
            del self.blocked[actor]
            self.ready.append(actor)

    def blocked_actors(self) -> list[BlockedActor]:
        """Return the unfinished actors, each with the transfer for which it waits, sorted by actor."""
        found: dict[ActorId, BlockedActor] = {}
        for actor, buffer in self.blocked.items():
            recv = self.pending[actor][buffer]
            at = format_instruction(self.programs[actor], self.counter[actor])
            found[actor] = BlockedActor(actor, at, recv.tag, recv.from_actor)
        end = "the end of the step"
        for actor, pending in self.pending.items():
            for recv in pending.values():
                found.setdefault(actor, BlockedActor(actor, end, recv.tag, recv.from_actor))
        for (sender, receiver), tags in self.sent.items():
            for tag in tags:
                found.setdefault(sender, BlockedActor(sender, end, tag, receiver, sends=True))
        return [found[a] for a in sorted(found)]


def find_blocked_actors(programs: Sequence[ActorProgram]) -> list[BlockedActor]:
    """Run all programs of a step together, without data, to find out whether they deadlock.

    Args:
        programs: one program per actor.

    Returns:
        The actors that cannot continue; empty if all programs end.
    """
    state = _RunWithoutData(programs)
    state.run()
    return state.blocked_actors()


def _find_cycle(waits: list[BlockedActor]) -> list[BlockedActor]:
    """Return a cycle of actors that wait for each other.

    The search begins at the first blocked actor, and goes from each actor to the actor that it waits for. If
    there is no cycle, return the actors that the search visited, in order.

    Args:
        waits: the blocked actors, at least one.
    """
    by_actor = {w.actor: w for w in waits}
    chain: list[BlockedActor] = []
    actor = waits[0].actor
    while actor in by_actor and by_actor[actor] not in chain:
        chain.append(by_actor[actor])
        actor = chain[-1].peer
    return chain[chain.index(by_actor[actor]) :] if actor in by_actor else chain


def check_deadlock(programs: Sequence[ActorProgram]) -> None:
    """Check that the programs of a step do not deadlock.

    Args:
        programs: one program per actor.

    Raises:
        ScheduleError: the programs deadlock; the message says which actor waits for which.
    """
    waits = find_blocked_actors(programs)
    if waits:
        cycle = _find_cycle(waits)
        lines = "".join(f"\n  {w}" for w in cycle)
        raise ScheduleError(
            f"the schedule deadlocks: {len(waits)} of {len(programs)} actors cannot go on. Who waits for "
            f"whom:{lines}\n"
            "Order the tasks of these actors so that each comes after what it needs from the others."
        )
