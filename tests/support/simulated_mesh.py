"""Run the state machine of restarts on a simulated mesh, with failures at any moment, and check invariants.

The simulation has no event loop, sockets or clock. A random generator chooses what happens next: a request is
made, a message arrives at a process, a reply or the outcome of a command arrives at the controller, an actor
dies or is given up while it lives, a transfer or any other command fails, the mesh is closed. The state of a
simulated process is the list of the numbers of the requests that have changed it, so that a request that is
lost, repeated or out of order shows at once.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxpp_async.controller import recovery as r
from jaxpp_async.controller import state_replicas as s
from jaxpp_async.errors import (
    ActorDiedError,
    ActorError,
    ActorUnresponsiveError,
    LaunchError,
    MeshClosedError,
    RemoteError,
    TransferError,
)
from jaxpp_async.program.instructions import CONTROLLER
from jaxpp_async.protocol.actor_info import Topology
from jaxpp_async.protocol.messages import Rules


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Question:
    """A request that changes nothing, such as a fetch."""

    rules: ClassVar = Rules(reply=object, ordered=True, repeated=True)  # type: ignore[arg-type]
    scope: object = None


@dataclass(frozen=True)
class Change:
    """A request that changes the arrays of its process, such as a step."""

    rules: ClassVar = Rules(reply=object, ordered=True, repeated=True, changes_state=True)  # type: ignore[arg-type]
    scope: object = None


@dataclass(frozen=True)
class Release:
    """A request that ends the effect of `Hold`."""

    rules: ClassVar = Rules(reply=object, ordered=True, repeated=True)  # type: ignore[arg-type]
    scope: object = None


@dataclass(frozen=True)
class Hold:
    """A request whose effect no replica contains, such as the beginning of a save."""

    rules: ClassVar = Rules(  # type: ignore[call-arg]
        reply=object, ordered=True, repeated=True, changes_state=True, ended_by=Release
    )
    scope: object = None


@dataclass(eq=False)
class SimulatedRequest:
    """A request to one simulated process, as the history remembers it.

    Args:
        number: its place in the order in which requests were made.
        fails: whether the process refuses it, each time.
        before: how many requests that change the process were made before.
    """

    number: int
    process: int
    message: Any
    fails: bool
    before: int
    serial: int = -1
    size_bytes: int = 0
    is_answered: bool = False
    is_refused: bool = False


@dataclass(eq=False)
class SimulatedProcess:
    """A process of an actor: its arrays, its copies for restarts, and the messages on their way to it."""

    epoch: int
    is_loaded: bool
    is_watched: bool = True
    is_alive: bool = True
    state: list[int] = field(default_factory=list)
    held: set[object] = field(default_factory=set)
    copies: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    inbox: deque[tuple[Any, ...]] = field(default_factory=deque)


FAULTS: dict[type, Callable[[int], ActorError]] = {
    r.Reap: lambda actor: ActorUnresponsiveError("cannot be killed", actor=actor),
    r.RenewTransport: lambda actor: ActorUnresponsiveError("no answer", actor=actor),
    r.LoadPrograms: lambda actor: ActorDiedError("died while it compiled", actor=actor),
    r.MakeLinks: lambda actor: TransferError("no link", actor=actor),
    s.CopyState: lambda actor: RemoteError("no memory", actor=actor),
    r.RollBack: lambda _: ActorUnresponsiveError("not in time"),
}
"""The error of a command that fails in the simulation, by the command and a random actor."""


class SimulatedMesh:
    """A controller's state machine and simulated actors, driven by a random generator.

    Args:
        seed: of the random generator.
        num_actors, per_actor: the numbers of actors and of processes of each actor.
        num_requests: how many requests are made.
        num_failures: how many actors die or links break at most.
        fails_late: whether failures come one after the other, when a replica is whole and all is at rest.
        faults: the share of commands that fail.
        closes: whether the mesh is closed while something happens.
        max_restarts, replica_every: the options of the machine.
    """

    def __init__(
        self,
        seed: int,
        *,
        num_actors: int = 3,
        per_actor: int = 1,
        num_requests: int = 12,
        num_failures: int = 2,
        fails_late: bool = False,
        faults: float = 0.0,
        closes: bool = False,
        max_restarts: int = 100,
        replica_every: int = 3,
    ):
        self.rng = random.Random(seed)
        self.topology = Topology(num_actors, per_actor)
        self.machine = r.Recovery(self.topology, max_restarts=max_restarts, replica_every=replica_every)
        self.processes = [SimulatedProcess(0, True) for _ in range(self.topology.count)]
        self.controller = SimulatedProcess(0, True)  # only its copies
        self.requests: list[SimulatedRequest] = []
        self.changes: list[list[int]] = [[] for _ in self.processes]  # those that count, in order, by process
        self.holding: dict[int, int] = {}
        self.open: dict[int, SimulatedRequest] = {}
        self.outcomes: list[Any] = []  # functions that report something to the machine
        self.marks: list[tuple[int, s.AwaitAnswers]] = []
        self.error: ActorError | None = None
        self.now, self.num_sent = 0.0, 0
        self.requests_left, self.failures_left = num_requests, num_failures
        self.fails_late, self.faults, self.closes = fails_late, faults, closes
        self.meanings: set[tuple[r.State, r.Meaning]] = set()
        self.tell(r.MeshStarted())

    # ------------------------------------------------------------ running

    def run(self) -> None:
        """Let things happen at random, then let everything come to rest, and check the invariants."""
        self.let_things_happen()
        self.come_to_rest()
        self.check_end()

    def let_things_happen(self) -> None:
        """Make requests and let failures happen until none are left."""
        rng = self.rng
        while self.error is None and (self.requests_left or self.failures_left):
            if self.closes and rng.random() < 0.02:
                self.close()
                return
            choice = rng.random()
            if choice < 0.25 and self.requests_left:
                self.requests_left -= 1
                self.make_request()
            elif self.fails_at_any_time and choice < (
                0.30 if self.machine.state is r.State.RUNNING else 0.35
            ):
                self.failures_left -= 1
                self.fail()
            elif not self.happen() and not self.requests_left:
                if self.machine.replicas.whole is None or not self.failures_left:
                    return
                self.failures_left -= 1
                self.fail()

    @property
    def fails_at_any_time(self) -> bool:
        """Whether an actor may die now, or a link break, whatever happens beside it."""
        return self.failures_left > 0 and not self.fails_late

    def happen(self) -> bool:
        """Let one message or outcome arrive; return whether there was one."""
        busy = [p for p in self.processes if p.inbox and p.is_alive]
        index = self.rng.randrange(len(busy) + len(self.outcomes)) if busy or self.outcomes else -1
        if index < 0:
            return False
        if index < len(busy):
            process = busy[index]
            self.receive(process, *process.inbox.popleft())
        else:
            self.outcomes.pop(index - len(busy))()
        return True

    def come_to_rest(self) -> None:
        """Let all messages and outcomes arrive."""
        for _ in range(5000):
            if not self.happen():
                return
        raise Violation("the mesh does not come to rest")

    def check_end(self) -> None:
        """Check what must hold when nothing is under way any more."""
        machine = self.machine
        if self.error is None:
            if machine.state is not r.State.RUNNING:
                raise Violation(f"the restart hangs: {machine.state}, {machine._open}")
            for number, (process, changes) in enumerate(zip(self.processes, self.changes, strict=True)):
                if process.state != changes:
                    raise Violation(f"process {number} has {process.state}, expected {changes}")
            if any(not request.is_answered for request in self.requests):
                raise Violation("a waiter was never answered")
            if not self.holding:
                for _ in range(20):  # a replica may fail
                    self.tell(r.ReplicaWanted())
                    self.come_to_rest()
                if len(machine.history) or machine.replicas.stage is not s.Stage.IDLE:
                    raise Violation(f"{len(machine.history)} requests are remembered for ever")
        else:
            if machine.state is not r.State.ENDED or len(machine.history):
                raise Violation("an ended mesh remembers requests")
        if machine._open or len(machine.story) > r.STORY_LINES:
            raise Violation("commands or a story are remembered for ever")

    def tell(self, event: r.Event) -> None:
        """Report an event to the machine, and carry out the commands that follow."""
        machine = self.machine
        if isinstance(event, r.FailureFound | r.CarriedOut | r.NotCarriedOut):
            self.meanings.add((machine.state, machine._meaning(event)))
        for command in machine.handle(event, self.now):
            if self.error is not None:
                raise Violation(f"{command} after the end")
            self.carry_out(command)

    # ------------------------------------------------------------ what users and failures do

    def make_request(self) -> None:
        """Make a request of a random kind to a random process, or a step to all."""
        rng, kind = self.rng, self.rng.choice((Change, Change, Change, Question, Question, Hold))
        process = rng.randrange(len(self.processes))
        if kind is Change and rng.random() < 0.6:
            for number in range(len(self.processes)):
                self.post(number, Change(), fails=False)
            self.tell(r.StepSent())
        elif kind is Hold and process in self.holding:
            self.post(process, Release(self.holding.pop(process)), fails=False)
        elif kind is Hold:
            self.holding[process] = len(self.requests)
            self.post(process, Hold(len(self.requests)), fails=False)
        else:
            self.post(process, kind(), fails=rng.random() < 0.15)
        if rng.random() < 0.1:
            self.tell(r.ReplicaWanted(if_due=rng.random() < 0.5))

    def post(self, process: int, message: Any, *, fails: bool) -> None:
        request = SimulatedRequest(len(self.requests), process, message, fails, len(self.changes[process]))
        self.requests.append(request)
        if isinstance(message, Change) and not fails:
            self.changes[process].append(request.number)
        self.machine.history.add(request)
        if self.machine.is_running:
            self.send(request)

    def send(self, request: SimulatedRequest) -> None:
        if request.is_answered and isinstance(request.message, Question):
            raise Violation(f"request {request.number} is answered and asked again")
        self.num_sent += 1
        self.open[self.num_sent] = request
        self.put(request.process, "request", request, self.machine.epoch, self.num_sent)

    def put(self, process: int, *message: Any) -> None:
        if self.processes[process].is_alive:
            self.processes[process].inbox.append(message)

    def fail(self) -> None:
        """Kill an actor, or break a link."""
        if self.rng.random() < 0.2:
            self.later(lambda: self.tell(r.FailureFound(TransferError("a link broke"))))
            return
        actor = self.rng.randrange(self.topology.num_actors)
        victims = [self.processes[p] for p in self.topology.processes_of(actor)]
        cls = self.rng.choice((ActorDiedError, ActorUnresponsiveError))
        if cls is ActorDiedError or self.rng.random() < 0.5:  # one that is given up may still work
            for process in victims:
                self.kill(process)
        self.later(lambda: self.notice(actor, victims[0], cls("lost", actor=actor)))
        if self.rng.random() < 0.3:
            self.later(lambda: self.tell(r.FailureFound(TransferError("broken by a death"))))

    def notice(self, actor: int, victim: SimulatedProcess, error: ActorError) -> None:
        if self.processes[self.topology.process(actor, 0)] is not victim:
            return  # it has been replaced
        if victim.is_watched:
            self.tell(r.FailureFound(error))
        else:
            self.later(lambda: self.notice(actor, victim, error))

    def kill(self, process: SimulatedProcess) -> None:
        process.is_alive = False
        process.inbox.clear()

    def close(self) -> None:
        """Close the mesh."""
        self.tell(r.MeshClosed())
        self.error = MeshClosedError("closed")
        self.outcomes.clear()

    def later(self, report: Any) -> None:
        self.outcomes.append(report)

    # ------------------------------------------------------------ what processes do

    def receive(self, process: SimulatedProcess, kind: str, *fields: Any) -> None:
        getattr(self, f"on_{kind}")(process, *fields)

    def on_request(
        self, process: SimulatedProcess, request: SimulatedRequest, epoch: int, number: int
    ) -> None:
        expected = self.changes[request.process]
        if process.epoch != epoch:
            raise Violation(f"a request of epoch {epoch} runs in epoch {process.epoch}")
        if not process.is_loaded:
            raise Violation("a request reaches a process without programs")
        if process.state != expected[: request.before]:
            raise Violation(
                f"request {request.number} runs on {process.state}, expected {request.before} of {expected}"
            )
        if isinstance(request.message, Change) and not request.fails:
            process.state.append(request.number)
        elif isinstance(request.message, Hold):
            if request.message.scope in process.held:
                raise Violation("a request has an effect twice")
            process.held.add(request.message.scope)
        elif isinstance(request.message, Release):
            process.held.discard(request.message.scope)
        self.later(lambda: self.answer(request, number))

    def answer(self, request: SimulatedRequest, number: int) -> None:
        if self.open.pop(number, None) is None or request.is_answered:
            return  # an answer from before a restart, or the second one
        request.is_answered, request.is_refused = True, request.fails
        self.check_marks()

    def check_marks(self) -> None:
        for mark in list(self.marks):
            epoch, command = mark
            if not self.machine.history.unanswered(command.mark):
                self.marks.remove(mark)
                self.later(lambda: self.tell(r.CarriedOut(epoch, command)))  # noqa: B023

    def on_copy(self, process: SimulatedProcess, command: s.CopyState, epoch: int) -> None:
        if process.held:
            raise Violation("a replica is made while an effect lasts that it does not contain")
        process.copies[command.generation, command.process] = tuple(process.state)
        copy = s.StateCopy((), f"n{command.process}")
        self.later(lambda: self.tell(r.CarriedOut(epoch, command, copy)))

    def on_renew(self, process: SimulatedProcess, command: r.RenewTransport, epoch: int) -> None:
        process.epoch = epoch
        self.later(lambda: self.tell(r.CarriedOut(epoch, command)))

    def on_drop(self, process: SimulatedProcess, generation: int) -> None:
        process.copies = {key: copy for key, copy in process.copies.items() if key[0] == generation}

    def on_rollback(
        self, process: SimulatedProcess, number: int, command: r.RollBack, epoch: int, waiting: set[int]
    ) -> None:
        if process.epoch != epoch:
            raise Violation("a process is rolled back in another epoch")
        if command.generation is not None and (command.generation, number) not in process.copies:
            raise Violation(f"process {number} does not have replica {command.generation}")
        copy = () if command.generation is None else process.copies[command.generation, number]
        process.state, process.held = list(copy), set()
        waiting.discard(number)
        if not waiting:
            self.later(lambda: self.tell(r.CarriedOut(epoch, command)))

    # ------------------------------------------------------------ what commands do

    def carry_out(self, command: r.Command) -> None:
        fault = FAULTS.get(type(command))
        if fault is not None and self.rng.random() < self.faults:
            self.not_done(command, fault(self.rng.randrange(self.topology.num_actors)))
            return
        getattr(self, f"do_{type(command).__name__}")(command)

    def done(self, command: r.Command) -> None:
        epoch = self.machine.epoch
        self.later(lambda: self.tell(r.CarriedOut(epoch, command)))

    def not_done(self, command: r.Command, error: Exception) -> None:
        epoch = self.machine.epoch
        self.later(lambda: self.tell(r.NotCarriedOut(epoch, command, error)))

    def do_HoldBack(self, command: r.HoldBack) -> None:
        self.open.clear()

    def do_StopWork(self, command: r.StopWork) -> None:
        self.marks.clear()
        self.done(command)

    def do_Reap(self, command: r.Reap) -> None:
        for number in self.topology.processes_of(command.actor):
            self.kill(self.processes[number])
        self.done(command)

    def do_StartSuccessor(self, command: r.StartSuccessor) -> None:
        if self.rng.random() < 0.1:
            self.not_done(command, LaunchError("no host", actor=command.actor))
            return
        for number in self.topology.processes_of(command.actor):
            if self.processes[number].is_alive:
                raise Violation("a living process is replaced")
            self.processes[number] = SimulatedProcess(self.machine.epoch, False, is_watched=False)
        epoch = self.machine.epoch
        self.later(lambda: self.started(command, epoch))

    def started(self, command: r.StartSuccessor, epoch: int) -> None:
        self.tell(r.CarriedOut(epoch, command))
        for number in self.topology.processes_of(command.actor):
            self.processes[number].is_watched = True

    def do_RenewTransport(self, command: r.RenewTransport) -> None:
        if command.process is None:
            self.done(command)
        else:
            self.put(command.process, "renew", command, self.machine.epoch)

    def do_ConnectAll(self, command: r.ConnectAll) -> None:
        if all(process.is_alive for process in self.processes):
            self.done(command)
        elif self.rng.random() < 0.5:
            self.not_done(command, TransferError("cannot connect"))

    def do_LoadPrograms(self, command: r.LoadPrograms) -> None:
        self.processes[command.process].is_loaded = True
        self.done(command)

    def do_MakeLinks(self, command: r.MakeLinks) -> None:
        self.done(command)

    def do_CopyState(self, command: s.CopyState) -> None:
        self.put(command.process, "copy", command, self.machine.epoch)

    def do_MovePart(self, command: s.MovePart) -> None:
        epoch, choice = self.machine.epoch, self.rng.random()
        if choice < 0.04:
            error = RemoteError("no memory") if choice < 0.02 else TransferError("slow")
            self.not_done(command, error)
        else:
            self.later(lambda: self.move(command, epoch))

    def move(self, command: s.MovePart, epoch: int) -> None:
        source, to = (
            self.controller if number == CONTROLLER else self.processes[number]
            for number in (command.source, command.to)
        )
        if not (source.is_alive and to.is_alive) or epoch != self.machine.epoch:
            return
        key = command.generation, command.owner
        if key not in source.copies:
            raise Violation(f"part {key} is not where it should be")
        to.copies[key] = source.copies[key]
        self.tell(r.CarriedOut(epoch, command))

    def do_AwaitAnswers(self, command: s.AwaitAnswers) -> None:
        self.marks.append((self.machine.epoch, command))
        self.check_marks()

    def do_DropOthers(self, command: s.DropOthers) -> None:
        self.on_drop(self.controller, command.generation)
        for number in range(len(self.processes)):
            self.put(number, "drop", command.generation)

    def do_RollBack(self, command: r.RollBack) -> None:
        waiting = set(range(len(self.processes)))
        for number in sorted(waiting):
            self.put(number, "rollback", number, command, self.machine.epoch, waiting)

    def do_Resume(self, command: r.Resume) -> None:
        for process in self.processes:
            if process.is_alive and process.epoch != self.machine.epoch:
                raise Violation(f"a process is in epoch {process.epoch}, the mesh in {self.machine.epoch}")
        for request in command.requests:
            self.send(request)  # type: ignore[arg-type]

    def do_WakeUp(self, command: r.WakeUp) -> None:
        epoch = self.machine.epoch

        def wake() -> None:
            self.now += command.after_s
            self.tell(r.CarriedOut(epoch, command))

        self.later(wake)

    def do_GiveUpReplica(self, command: r.GiveUpReplica) -> None:
        error = command.error
        if isinstance(error, TransferError):
            self.later(lambda: self.tell(r.FailureFound(error)))

    def do_EndMesh(self, command: r.EndMesh) -> None:
        self.error = command.error
        self.outcomes.clear()
