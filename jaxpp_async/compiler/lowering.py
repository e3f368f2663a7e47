"""Lower a `TaskGraph` to one `ActorProgram` per actor.

There are three passes, each a function that returns a new frozen value, and `lower` runs them:

    TaskGraph -insert_transfers-> programs -donate_buffers-> programs -delete_buffers-> programs

A lowered program has, in order of issue:

* the `Input`s by argument number, then the `Send`s of arguments that this actor has and other actors need;
* for each node: the `Recv`s that are posted before it, its `Run`, the `Send`s of values that it made, and the
  `Delete`s of buffers that no later instruction needs;
* the `Output`s, so that a step that fails half-way leaves none of its results in the actor's store of arrays.

Slots (the numbers of buffers in a program) are assigned once and count from zero in order of definition. Tags
(the numbers of transfers) count from zero over all programs of the step in the order of the graph, so the
tags between two actors rise in both of their programs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import compress

import msgspec
from msgspec.structs import replace

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
    kinds_of,
    runs,
)

Programs = tuple[ActorProgram, ...]

RECEIVES_AHEAD = 2
"""The number of `Run` instructions by which a receive is posted before the run that reads the received value.

With 2, where forwards and backwards alternate, a transfer may take as long as one forward and one backward
together. With 1 a transfer had only the time of the shorter of the two, and a link on which a transfer takes
as long as a forward delayed every task a little.
"""


def lower(graph: TaskGraph, *, receives_ahead: int = RECEIVES_AHEAD) -> Programs:
    """Lower a task graph to one program per actor.

    Args:
        graph: a graph that is valid in the sense of `verify.verify_graph`.
        receives_ahead: the number of `Run` instructions between posting a receive and the first run that
            reads the received value. 0 posts a receive right before this run. A larger number hides latency
            and costs memory.

    Returns:
        Programs of actors 0 to `num_actors - 1`, valid in the sense of `verify.verify_programs`.

    Raises:
        ValueError: `receives_ahead` is below zero.
    """
    programs = insert_transfers(graph, receives_ahead=receives_ahead)
    programs = donate_buffers(graph, programs)
    return delete_buffers(programs)


# ---------------------------------------------------------------- transfers


class PlannedTransfer(msgspec.Struct, frozen=True, gc=False):
    """The transfer of one value to an actor that needs it.

    The sender is the actor that makes the value or has it as an argument.

    Args:
        value: the value.
        from_actor, to_actor: the sender and the receiver.
        tag: the transfer's number in the step.
        node: the index of the node after which the value is sent; -1 for a step argument.
        needed: the index of the receiver's first node that reads the value. If only a result of the step
            needs the value, the number of nodes in the graph.
    """

    value: ValueId
    from_actor: ActorId
    to_actor: ActorId
    tag: Tag
    node: int
    needed: int


def _find_missing(graph: TaskGraph) -> list[tuple[ValueId, ActorId, int]]:
    """Find every value that an actor needs but neither makes nor has as an argument.

    Returns:
        Tuples (value, actor, index of the actor's first node that reads the value). If only a result of the
        step needs the value, the index is the number of nodes.
    """
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
    """Plan every transfer of the step, and return them in order of their tags.

    Each actor that needs a value but does not have it gets the value exactly once. The sender is the actor
    that makes the value; for an argument, the first actor that has it. Values that are sent after the same
    node are sent in the order in which they are needed.
    """
    missing = _find_missing(graph)
    wanted_values = {v for v, _, _ in missing}
    source: dict[ValueId, tuple[int, int, ActorId]] = {}  # (node, position in its outputs, actor)
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
    """Choose, for each receive of an actor, the `Run` instruction before which the receive is posted.

    Args:
        transfers: the transfers to this actor, by tag.
        position_of: a dictionary. Its keys are indices of nodes in the graph; its values are positions in
            this actor's sequence of `Run` instructions.
        num_runs: the number of this actor's `Run` instructions.
        ahead: the number of runs between posting a receive and the first run that reads the received value.
            If a later receive from the same sender is posted earlier than this, the receive is posted just
            before that one, since receives keep the order of the sends.

    Returns:
        A dictionary. Its keys are positions in the sequence of runs; its values are the receives to post
        before the run at this position. Position `num_runs` is after the last run.
    """
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
    """A program that is under construction: its instructions and the slot (buffer number) of each value."""

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
            sent, received: the transfers from and to the actor, by tag.
            receives_ahead: the number of `Run` instructions between posting a receive and its first use; see
                `lower`.
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
                self.instructions.append(Input(slot, i.arg, i.donated))

    def add_sends(self, transfers: Iterable[PlannedTransfer]) -> None:
        slots = self.slots
        self.instructions += [Send(slots[t.value], t.to_actor, t.tag) for t in transfers]

    def add_receives(self, transfers: Iterable[PlannedTransfer]) -> None:
        define = self.define_slot
        self.instructions += [Recv(define(t.value), t.from_actor, t.tag) for t in transfers]

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
        """Return the finished program.

        Args:
            uncounted: the values that the program's planned peak of memory does not include.
        """
        slots = self.slots
        uncounted_slots = frozenset([slots[v] for v in uncounted & slots.keys()])
        avals = tuple(map(self.avals.__getitem__, slots))
        return ActorProgram(self.actor, tuple(self.instructions), avals, uncounted_slots)


def insert_transfers(graph: TaskGraph, *, receives_ahead: int = RECEIVES_AHEAD) -> Programs:
    """Make programs that have all `Run` instructions and transfers, but no donations and deletions yet.

    Args:
        graph: a graph that is valid in the sense of `verify.verify_graph`.
        receives_ahead: the number of runs between posting a receive and its first use; see `lower`.

    Returns:
        One program per actor.

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
    """Return the slots (buffer numbers) whose buffers no `Run` instruction may overwrite.

    Four kinds of buffers are not overwritten: a received buffer is in the transport's memory; a sent buffer
    may still be in use by its send; an output is passed to the caller; an argument that the user did not
    donate stays in the actor's store of arrays.
    """
    return {
        i.buffer
        for i in instructions
        if isinstance(i, (Recv, Send, Output)) or (isinstance(i, Input) and not i.donated)
    }


def _choose_donations(nodes: Sequence[Node], program: ActorProgram) -> dict[ExecutableId, tuple[int, ...]]:
    """Choose for each executable the inputs that all its `Run` instructions on an actor can donate.

    Args:
        nodes: the actor's nodes, in order.
        program: the actor's program.

    Returns:
        A dictionary. Its keys are executables; its values are the positions of the inputs to donate.
    """
    # The walk goes back from the end of the program; slots that later instructions read are added here.
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
        # An executable is compiled once per actor, so all its runs there donate the same inputs.
        common[run.executable] = common.get(run.executable, free) & free
    return {executable: tuple(sorted(positions)) for executable, positions in common.items()}


def donate_buffers(graph: TaskGraph, programs: Programs) -> Programs:
    """Let `Run` instructions donate the inputs that no later instruction needs.

    The choice is made once per actor and executable, for each input position listed in `Node.donatable`. A
    position is donated if, in every run of the executable, the buffer at this position is read for the last
    time and appears only once among the inputs. A buffer that is received, sent or returned, or an argument
    that the caller keeps, cannot be donated.

    Args:
        graph: the graph that `programs` were made from.
        programs: the programs that `insert_transfers` made.

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
    """Return the slots (buffer numbers) that need no `Delete` instruction.

    These are outputs, arguments that the caller keeps, and donated buffers.
    """
    instructions = program.instructions
    left = {
        i.buffer for i in instructions if isinstance(i, Output) or (isinstance(i, Input) and not i.donated)
    }
    return left.union([run.inputs[p] for run in runs(instructions) if run.donated for p in run.donated])


def _find_last_uses(program: ActorProgram) -> list[Sequence[BufferId]]:
    """Return, for each instruction, the slots (buffer numbers) to delete after the instruction.

    These are slots that no later instruction uses, in the order in which the instruction names them.
    """
    needed = _find_not_deleted(program)  # slots that later instructions use are added below
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
        # Sends go first, since a peer waits for them. Deletes go before receives and runs, which allocate
        # memory.
        if due and not isinstance(instruction, (Input, Send)):
            found += map(deletes.__getitem__, due)
            due.clear()
        found.append(instruction)
        if ended:
            due += ended
    found += map(deletes.__getitem__, due)
    return tuple(found)


def delete_buffers(programs: Programs) -> Programs:
    """Insert `Delete`s so that each buffer is freed right after its last use.

    A donated buffer needs no `Delete`, since the run that it is donated to consumes it. Outputs, and
    arguments that the caller keeps, are not freed by the program. The `Delete` of a sent buffer follows its
    `Send`; the executor keeps the buffer until the send completes.

    Args:
        programs: the programs that `donate_buffers` made.

    Returns:
        The same programs with `Delete`s.
    """
    # One `Delete` per slot is shared by all actors.
    deletes = list(map(Delete, range(max((len(p.avals) for p in programs), default=0))))
    return tuple(replace(p, instructions=_insert_deletes(p, deletes)) for p in programs)
