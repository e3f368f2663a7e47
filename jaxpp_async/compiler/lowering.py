"""Lower a `TaskGraph` to one `ActorProgram` an actor.

There are three passes, each a function to a new frozen value, and `lower` runs them:

    TaskGraph -insert_transfers-> programs -donate_buffers-> programs -delete_buffers-> programs

A lowered program has, in order of issue:

* `Input`s by argument, then `Send`s of arguments that live here and are needed elsewhere;
* for each node: the `Recv`s due here, the `Run`, the `Send`s of what it made, the `Delete`s of what nothing
  needs now;
* `Output`s at the end: a step that fails half-way then has no half of its results in the actor's store.

Slots are assigned once and count from zero in order of definition. Tags count from zero over all programs of
the step in the order of the graph, so between two actors they rise in both programs.

`peak_plan` finds the most bytes that an actor's buffer table holds while it runs its program.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress

from jaxpp_async.base.frozen import frozen
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import (
    ActorId,
    Aval,
    BufferId,
    Delete,
    ExecutableId,
    Input,
    Instruction,
    Node,
    Output,
    Recv,
    Run,
    Send,
    Tag,
    TaskGraph,
    ValueId,
    avals_of,
    buffers_made,
    kinds_of,
    runs,
)

Programs = tuple[ActorProgram, ...]

RECEIVES_AHEAD = 2
"""How many runs ahead of its reader a receive is posted.

Where forwards and backwards alternate, a transfer may then take as long as both of them. One run ahead
gave it the shorter of the two, and a link that is as slow as a forward delayed every task a little.
"""


def lower(graph: TaskGraph, *, receives_ahead: int = RECEIVES_AHEAD) -> Programs:
    """Lower a graph to one program an actor.

    Args:
        graph: valid in the sense of `verify.verify_graph`.
        receives_ahead: a receive is posted before the run that is so many runs ahead of its first consumer on
            that actor. 0 posts right before the consumer; more hides latency and costs memory.

    Returns:
        Programs of actors 0 to `num_actors - 1`, valid in the sense of `verify.verify_programs`.

    Raises:
        ValueError: `receives_ahead` is below zero.
    """
    programs = insert_transfers(graph, receives_ahead=receives_ahead)
    programs = donate_buffers(graph, programs)
    return delete_buffers(programs)


# ---------------------------------------------------------------- transfers


@frozen()
class PlannedTransfer:
    """One value that goes from the actor that makes or holds it to one that needs it.

    Args:
        value: the value.
        from_actor, to_actor: the two actors.
        tag: the transfer's number in the step.
        node: index of the node after which it is sent; -1 for a step argument.
        needed: index of the first node that reads it there; the number of nodes for a result.
    """

    value: ValueId
    from_actor: ActorId
    to_actor: ActorId
    tag: Tag
    node: int
    needed: int


def _find_missing(graph: TaskGraph) -> list[tuple[ValueId, ActorId, int]]:
    """Find every value that an actor needs and neither makes nor holds, and its first node that reads it."""
    held: list[set[ValueId]] = [set() for _ in range(graph.num_actors)]
    for i in graph.inputs:
        for actor in i.actors:
            held[actor].add(i.value)
    found: list[tuple[ValueId, ActorId, int]] = []

    def need(actor: ActorId, values: Iterable[ValueId], index: int) -> None:
        here = held[actor]
        missing = [v for v in values if v not in here]
        for v in dict.fromkeys(missing) if len(missing) > 1 else missing:
            here.add(v)
            found.append((v, actor, index))

    for index, node in enumerate(graph.nodes):
        here = held[node.actor]
        if not here.issuperset(node.inputs):
            need(node.actor, node.inputs, index)
        here.update(node.outputs)
    for output in graph.outputs:
        for actor in output.actors:
            need(actor, (output.value,), len(graph.nodes))
    return found


def plan_transfers(graph: TaskGraph) -> tuple[PlannedTransfer, ...]:
    """Plan every transfer of the step, by tag.

    A value goes exactly once to each actor that needs and lacks it, from the actor that makes it; an argument
    from the first actor that holds it. Values that are sent at one point are sent in the order in which they
    are needed.
    """
    missing = _find_missing(graph)
    wanted_values = {v for v, _, _ in missing}
    source: dict[ValueId, tuple[int, int, ActorId]] = {}  # node, position among what it makes, actor
    for position, i in enumerate(graph.inputs):
        if i.actors:
            source[i.value] = -1, position, i.actors[0]
    for index, node in enumerate(graph.nodes):
        for v in wanted_values.intersection(node.outputs):
            source[v] = index, node.outputs.index(v), node.actor
    wanted = [(source[v][0], needed, source[v][1], v, source[v][2], actor) for v, actor, needed in missing]
    wanted.sort(key=lambda w: w[:3])
    return tuple(
        PlannedTransfer(value, from_actor, to_actor, tag, index, needed)
        for tag, (index, needed, _, value, from_actor, to_actor) in enumerate(wanted)
    )


def _receive_positions(
    transfers: Sequence[PlannedTransfer], position_of: dict[int, int], num_runs: int, ahead: int
) -> dict[int, list[PlannedTransfer]]:
    """Choose the run before which each receive of this actor is posted; `num_runs` is the end."""
    # Between two actors receives are posted in the order of the sends (NCCL pairs them by order alone), so a
    # receive moves up to the earliest one that follows it on its link.
    link_limit: dict[ActorId, int] = {}
    positions: dict[int, list[PlannedTransfer]] = defaultdict(list)
    for t in reversed(transfers):
        own = max(0, position_of.get(t.needed, num_runs) - ahead)
        position = link_limit[t.from_actor] = min(own, link_limit.get(t.from_actor, own))
        positions[position].append(t)
    for posted in positions.values():
        posted.reverse()
    return positions


class _ProgramBuilder:
    """A program that is under construction: its instructions and the slot of each value."""

    def __init__(self, graph: TaskGraph, avals: Sequence[Aval], actor: ActorId):
        self.graph, self.avals, self.actor = graph, avals, actor
        self.slots: dict[ValueId, BufferId] = {}
        self.instructions: list[Instruction] = []

    def add_all(
        self,
        nodes: Sequence[tuple[int, Node]],
        sent: Iterable[PlannedTransfer],
        received: Sequence[PlannedTransfer],
        receives_ahead: int,
    ) -> None:
        """Add all instructions of the actor, in order of issue.

        Args:
            nodes: the actor's nodes, each with its index in the graph.
            sent, received: the actor's transfers, by tag.
            receives_ahead: see `lower`.
        """
        position_of = {index: position for position, (index, _) in enumerate(nodes)}
        due = _receive_positions(received, position_of, len(nodes), receives_ahead)
        sends: dict[int, list[PlannedTransfer]] = defaultdict(list)
        for t in sent:
            sends[t.node].append(t)
        self.add_inputs()
        self.add_sends(sends[-1])
        for position, (index, node) in enumerate(nodes):
            if position in due:
                self.add_receives(due[position])
            self.add_run(node)
            if index in sends:
                self.add_sends(sends[index])
        self.add_receives(due.get(len(nodes), ()))
        self.add_outputs()

    def add_inputs(self) -> None:
        for i in sorted(self.graph.inputs, key=lambda i: i.arg):
            if self.actor in i.actors:
                slot = self.define_slot(i.value)
                self.instructions.append(Input(slot, i.arg, self.avals[i.value], i.donated))

    def add_sends(self, transfers: Iterable[PlannedTransfer]) -> None:
        slots = self.slots
        self.instructions += [Send(slots[t.value], t.to_actor, t.tag) for t in transfers]

    def add_receives(self, transfers: Iterable[PlannedTransfer]) -> None:
        avals, define = self.avals, self.define_slot
        self.instructions += [Recv(define(t.value), t.from_actor, t.tag, avals[t.value]) for t in transfers]

    def add_run(self, node: Node) -> None:
        slots = self.slots
        inputs = tuple(map(slots.__getitem__, node.inputs))
        first, count = len(slots), len(node.outputs)
        outputs = tuple(range(first, first + count))
        slots.update(zip(node.outputs, outputs, strict=True))
        assert len(slots) == first + count, f"actor {self.actor}: {node.label} makes a value that exists"
        self.instructions.append(Run(node.label, node.executable, inputs, outputs))

    def add_outputs(self) -> None:
        for o in sorted(self.graph.outputs, key=lambda o: o.result):
            if self.actor in o.actors:
                self.instructions.append(Output(self.slots[o.value], o.result))

    def define_slot(self, value: ValueId) -> BufferId:
        slots = self.slots
        assert value not in slots, f"actor {self.actor}: {self.graph.values[value].label} is made twice"
        slot = slots[value] = len(slots)
        return slot

    def program(self, uncounted: frozenset[ValueId]) -> ActorProgram:
        """Return the program; `uncounted` are the values that peak bytes leave out."""
        slots = self.slots
        uncounted_slots = frozenset([slots[v] for v in uncounted & slots.keys()])
        avals = tuple(map(self.avals.__getitem__, slots))
        return ActorProgram(self.actor, tuple(self.instructions), avals, uncounted_slots)


def insert_transfers(graph: TaskGraph, *, receives_ahead: int = RECEIVES_AHEAD) -> Programs:
    """Write programs that compute and move everything, without donation and deletion.

    Args:
        graph: valid in the sense of `verify.verify_graph`.
        receives_ahead: see `lower`.

    Returns:
        One program an actor.

    Raises:
        ValueError: `receives_ahead` is below zero.
    """
    if receives_ahead < 0:
        raise ValueError(f"receives_ahead is {receives_ahead}; it counts runs and is at least 0")
    avals, kinds = avals_of(graph.values), kinds_of(graph.values)
    uncounted = frozenset(compress(range(len(kinds)), map({"input", "result"}.__contains__, kinds)))
    nodes, sent, received = (defaultdict(list) for _ in range(3))
    for index, node in enumerate(graph.nodes):
        nodes[node.actor].append((index, node))
    for t in plan_transfers(graph):
        sent[t.from_actor].append(t)
        received[t.to_actor].append(t)
    programs = []
    for actor in range(graph.num_actors):
        builder = _ProgramBuilder(graph, avals, actor)
        builder.add_all(nodes[actor], sent[actor], received[actor], receives_ahead)
        programs.append(builder.program(uncounted))
    return tuple(programs)


# ---------------------------------------------------------------- donation


def _find_never_donated(instructions: Iterable[Instruction]) -> set[BufferId]:
    """Find the slots that a run must not overwrite.

    A received one lies in the transport's memory, a sent one may still be under way, an output leaves the
    program, and an argument that was not donated stays in the store.
    """
    return {
        i.buffer
        for i in instructions
        if isinstance(i, (Recv, Send, Output)) or (isinstance(i, Input) and not i.donated)
    }


def _choose_donations(nodes: Sequence[Node], program: ActorProgram) -> dict[ExecutableId, tuple[int, ...]]:
    """Choose the positions that every run of an executable on this actor can donate.

    Args:
        nodes: of this actor, in order.
        program: of this actor.
    """
    # To these come, from the end of the program back, the slots that are still read.
    taken = _find_never_donated(program.instructions)
    remaining = reversed(nodes)
    common: dict[ExecutableId, set[int]] = {}
    for run in reversed(program.instructions):
        if not isinstance(run, Run):
            continue
        inputs = run.inputs
        free = {p for p in next(remaining).donatable if inputs[p] not in taken}
        if free and len(set(inputs)) != len(inputs):
            times = Counter(inputs)
            free = {p for p in free if times[inputs[p]] == 1}
        taken.update(inputs)
        # One executable is compiled once an actor, so all its runs donate alike.
        common[run.executable] = common.get(run.executable, free) & free
    return {executable: tuple(sorted(positions)) for executable, positions in common.items()}


def donate_buffers(graph: TaskGraph, programs: Programs) -> Programs:
    """Let runs consume the inputs that nothing needs afterwards.

    A position listed in `Node.donatable` is donated when, at every run of that executable on that actor, the
    buffer is read for the last time, appears once among the inputs, and is none of: received, sent, returned,
    or an argument that the caller keeps.

    Args:
        graph: the graph that `programs` came from.
        programs: what `insert_transfers` made.

    Returns:
        The same programs with `Run.donated` set.
    """

    nodes: dict[ActorId, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        nodes[node.actor].append(node)

    def donate(program: ActorProgram) -> ActorProgram:
        donations = _choose_donations(nodes[program.actor], program)
        instructions = tuple(
            # `replace` would do the same, and costs more than all the rest of this pass.
            Run(i.label, i.executable, i.inputs, i.outputs, donations[i.executable])
            if isinstance(i, Run)
            else i
            for i in program.instructions
        )
        return replace(program, instructions=instructions)

    return tuple(map(donate, programs))


# ---------------------------------------------------------------- deletion


def _find_not_deleted(program: ActorProgram) -> set[BufferId]:
    """Find the slots that the program does not free by a `Delete`."""
    instructions = program.instructions
    left = {
        i.buffer for i in instructions if isinstance(i, Output) or (isinstance(i, Input) and not i.donated)
    }
    return left.union([run.inputs[p] for run in runs(instructions) if run.donated for p in run.donated])


def _find_last_uses(program: ActorProgram) -> list[Sequence[BufferId]]:
    """Find for each instruction the slots that are deleted behind it, in the order in which it names them."""
    needed = _find_not_deleted(program)  # to these come the slots that later instructions use
    ends: list[Sequence[BufferId]] = []
    for i in reversed(program.instructions):
        if not isinstance(i, Run):  # reads or makes one slot
            ended = () if i.buffer in needed else (i.buffer,)
        else:
            ended = [b for b in i.inputs if b not in needed]
            if not needed.issuperset(i.outputs):
                ended += [b for b in i.outputs if b not in needed]
            if len(ended) > 1:
                ended = tuple(dict.fromkeys(ended))
        if ended:
            needed.update(ended)
        ends.append(ended)
    ends.reverse()
    return ends


def _insert_deletes(program: ActorProgram, deletes: Sequence[Delete]) -> tuple[Instruction, ...]:
    found: list[Instruction] = []
    due: list[BufferId] = []
    for instruction, ended in zip(program.instructions, _find_last_uses(program), strict=True):
        # Sends go first, since a peer waits for them; deletes go before receives and runs, which take memory.
        if due and not isinstance(instruction, (Input, Send)):
            found += map(deletes.__getitem__, due)
            due.clear()
        found.append(instruction)
        if ended:
            due += ended
    found += map(deletes.__getitem__, due)
    return tuple(found)


def delete_buffers(programs: Programs) -> Programs:
    """Free each buffer right after its last use.

    Donated buffers are gone already; outputs and arguments that the caller keeps are not the program's to
    free. A sent buffer is deleted behind its send: the executor keeps it until the send completes.

    Args:
        programs: what `donate_buffers` made.

    Returns:
        The same programs with `Delete`s.
    """
    # One `Delete` a slot serves all actors.
    deletes = list(map(Delete, range(max((len(p.avals) for p in programs), default=0))))
    return tuple(replace(p, instructions=_insert_deletes(p, deletes)) for p in programs)


# ---------------------------------------------------------------- memory


@dataclass(frozen=True, slots=True)
class PeakPlan:
    """The most that an actor's buffer table holds during a step.

    Args:
        peak_bytes: bytes at the peak. A sharded array counts as one whole copy (`Aval.size_bytes`), however
            many devices the actor has; XLA's temporaries inside a run and sends under way are not in it.
        instruction: index of the first instruction that reaches the peak; 0 for a program that holds nothing.
    """

    peak_bytes: int
    instruction: int


def _buffers_freed(instruction: Instruction) -> tuple[BufferId, ...]:
    if isinstance(instruction, Run):
        return tuple(instruction.inputs[p] for p in instruction.donated)
    return (instruction.buffer,) if isinstance(instruction, Delete | Output) else ()


def peak_plan(program: ActorProgram) -> PeakPlan:
    """Find the peak of a program's buffer table, instruction by instruction.

    A receive counts from the moment it is posted. A run's results come and its donated inputs go at the same
    moment; its other inputs stay until their `Delete`. An `Output` hands its buffer over and so ends its
    counting. Slots in `ActorProgram.uncounted` never count.

    Args:
        program: valid in the sense of `verify.verify_program`.

    Returns:
        The peak and where it is reached. The executor measures the same number.
    """
    # Avals are looked up by identity: hashing one costs more than this whole walk, and equal ones are mostly
    # one object.
    by_id = {id(a): a.size_bytes for a in {id(a): a for a in program.avals}.values()}
    sizes = [by_id[id(a)] for a in program.avals]
    held: dict[BufferId, int] = {}
    now, peak, at = 0, 0, 0
    for index, instruction in enumerate(program.instructions):
        for b in _buffers_freed(instruction):
            # A buffer may be two results: its second Output finds it gone.
            now -= held.pop(b, 0)
        for b in buffers_made(instruction):
            if b not in program.uncounted:
                held[b] = sizes[b]
                now += held[b]
        if now > peak:
            peak, at = now, index
    return PeakPlan(peak, at)
