"""Decide how a mesh recovers from the loss of actors, or of connections between actors.

In a restart the lost actors are replaced, all actors return to the last whole replica (a copy of all arrays),
and the requests that were made since that replica are made again. Actors that were not lost keep their
processes and their compiled programs. A caller that awaits a step only waits longer, and gets the same arrays
as without a failure, since the same programs run on the same values in the same order.

A failure may follow during a restart. Then another attempt begins from the start, and replaces the actors of
both failures. Each attempt begins an epoch (see `protocol.messages`).

`Recovery` is a pure state machine: `handle` takes an event and the time, and returns commands. Two tables at
the end of this module are its whole course: `COURSE` says what each state of a restart begins with and which
state follows, and `REACTIONS` says what is done about each event in each state. `request_history` decides
which requests are made again, and `state_replicas` which replica is whole. `recovery_driver` carries the
commands out and reports their outcomes as events.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

from jaxpp_async.base.printable import first_line
from jaxpp_async.controller.error_messages import abandoned
from jaxpp_async.controller.failure_policy import FailureFound
from jaxpp_async.controller.request_history import OutgoingRequest, RequestHistory
from jaxpp_async.controller.state_replicas import CourseRow, DropOthers, ReplicaCommand, StateReplicas
from jaxpp_async.errors import (
    ActorDiedError,
    ActorError,
    ActorUnresponsiveError,
    HandshakeError,
    LaunchError,
    MeshClosedError,
    MeshError,
    ProtocolError,
    RemoteError,
    RestartBudgetExceeded,
    StateLostError,
    TransferError,
)
from jaxpp_async.program.instructions import ActorId, ProcessId
from jaxpp_async.protocol.actor_info import Topology

WINDOW_S = 600.0
"""The length in seconds of the time window within which at most `max_restarts` restarts are allowed."""

FREE_STARTS = 2
"""The number of failed starts of actors in a row that are not counted as restarts, since this process may
have been blocked.
"""

GRACE_S, MAX_PAUSE_S = 1.0, 30.0
"""The seconds between a failed transfer in a restart and the next attempt, and the most seconds between a
failed start of an actor and the next attempt.
"""

STORY_LINES = 60
"""The number of latest lines of a restart's story that are kept."""


class State(Enum):
    """The states of the machine: the mesh starts, runs steps, is in one phase of a restart, or has ended."""

    STARTING = "starting"  # the actors start for the first time
    RUNNING = "running"  # requests are sent at once
    STOPPING = "stopping"  # work that is still under way is cancelled
    REAPING = "reaping"  # all processes of lost actors are ended
    RENEWING = "renewing"  # successors start, and the living processes make new transports
    CONNECTING = "connecting"  # all transports are connected
    LOADING = "loading"  # successors load their predecessors' programs
    LINKING = "linking"  # NCCL links are made again
    RESTORING = "restoring"  # successors get their own parts of the replica
    HANDING_OVER = "handing over"  # successors get the parts that their predecessors kept for others
    ROLLING_BACK = "rolling back"  # all processes replace their arrays by those of the replica
    PAUSING = "pausing"  # an attempt has failed, and the next one has not begun
    ENDED = "ended"  # the mesh is closed or has failed


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class MeshStarted:
    """All actors have started and are connected."""


@dataclass(frozen=True, slots=True)
class CarriedOut:
    """A command was carried out: actors were reaped, a successor is up, transports are renewed, and so on.

    Args:
        epoch: the epoch in which the command was given.
        command: the command.
        result: the command's result, if it has one.
    """

    epoch: int
    command: Command
    result: object = None


@dataclass(frozen=True, slots=True)
class NotCarriedOut:
    """A command failed.

    Args:
        epoch: the epoch in which the command was given.
        command: the command.
        error: the failure.
    """

    epoch: int
    command: Command
    error: Exception


@dataclass(frozen=True, slots=True)
class StepSent:
    """A step was sent to the actors, so that a replica may be due."""


@dataclass(frozen=True, slots=True)
class ReplicaWanted:
    """A caller asks for a replica now, between two steps.

    Args:
        if_due: whether to make the replica only if it is due, because enough steps or bytes were sent since
            the last one; if False, it is made in any case.
    """

    if_due: bool = False


@dataclass(frozen=True, slots=True)
class MeshClosed:
    """The mesh is being closed, or has failed for a reason that no restart undoes."""


Event: TypeAlias = (
    MeshStarted | FailureFound | CarriedOut | NotCarriedOut | StepSent | ReplicaWanted | MeshClosed
)


# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class HoldBack:
    """A command to hold back all requests and to ignore the replies to earlier ones, because a restart
    begins.

    Args:
        error: the failure.
        lost: the actors to replace.
    """

    error: ActorError
    lost: frozenset[ActorId]


@dataclass(frozen=True, slots=True)
class StopWork:
    """A command to cancel all work that is under way for earlier commands, for replicas and for new NCCL
    links, and to wait until it has stopped.
    """


@dataclass(frozen=True, slots=True)
class Reap:
    """A command to end all processes of a lost actor, and to wait until they have ended."""

    actor: ActorId


@dataclass(frozen=True, slots=True)
class StartSuccessor:
    """A command to start new processes for a lost actor."""

    actor: ActorId


@dataclass(frozen=True, slots=True)
class RenewTransport:
    """A command to have a living process drop its work, enter the present epoch and make a new, unconnected
    end of the data plane (the transport for arrays).

    Args:
        process: the process; None for the controller's own end.
        cause: a text that says what happened, for the errors of the steps that the process drops.
    """

    process: ProcessId | None
    cause: str


@dataclass(frozen=True, slots=True)
class ConnectAll:
    """A command to check the devices of all actors, and to connect all ends of the data plane."""


@dataclass(frozen=True, slots=True)
class LoadPrograms:
    """A command to load all programs of its actor into a new process."""

    process: ProcessId


@dataclass(frozen=True, slots=True)
class MakeLinks:
    """A command to make the NCCL links of all programs again."""


@dataclass(frozen=True, slots=True)
class RollBack:
    """A command to have all processes replace their arrays by those of a replica.

    Args:
        generation: the number of the replica; None to drop all arrays.
        size_bytes: the size of the replica in bytes.
    """

    generation: int | None
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Resume:
    """A command to make requests again, and to send new requests from now on.

    Args:
        requests: the requests, in their order.
        replaced: the actors that were replaced.
        took_s: how long the restart took, in seconds.
    """

    requests: tuple[OutgoingRequest, ...]
    replaced: tuple[ActorId, ...]
    took_s: float


@dataclass(frozen=True, slots=True)
class WakeUp:
    """A command to wait for some seconds.

    Args:
        after_s: the seconds.
        note: a text about the failed start before the pause, which is logged at once; may be empty.
    """

    after_s: float
    note: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class GiveUpReplica:
    """A command to report why the replica that was being made is given up. The replica before it stays valid.
    A failed transfer is reported to the failure policy, since its cause may be a lost actor; any other reason
    is only logged.

    Args:
        error: the reason.
    """

    error: Exception


@dataclass(frozen=True, slots=True)
class EndMesh:
    """A command to end the mesh with an error, which every caller gets.

    Args:
        error: the error.
        dead: the process that died, or None.
    """

    error: ActorError
    dead: ProcessId | None = None


RestartCommand: TypeAlias = (
    StopWork | Reap | StartSuccessor | RenewTransport | ConnectAll | LoadPrograms | MakeLinks | RollBack
)
Command: TypeAlias = RestartCommand | ReplicaCommand | HoldBack | Resume | WakeUp | GiveUpReplica | EndMesh


# ---------------------------------------------------------------- the machine


class Meaning(Enum):
    """The meanings of events: each event has one of them, which depends on the machine when it arrives."""

    STARTED = "the mesh has started"
    LOSS = "a failure that a restart can undo"
    FINAL = "a failure that no restart can undo"
    PART = "a command was carried out, others of its state are open"
    ALL = "the last command of its state was carried out"
    FAULT = "a command failed, and another attempt may succeed"
    RETRY = "the pause before another attempt is over"
    REPLICA = "a replica is due or wanted, or one of its commands has an outcome"
    CLOSE = "the mesh is closed"
    ECHO = "a consequence of what the restart undoes already"
    NOTHING = "an outcome from an earlier epoch, or a replica that is not due"


class Recovery:
    """The state machine that decides about the restarts of one mesh.

    Args:
        topology: the numbering of the mesh's processes.
        max_restarts: how many restarts are allowed within `WINDOW_S` seconds; with 0, every failure ends the
            mesh, and no request is remembered.
        replica_every: the number of steps from one replica of the state to the next.

    Attributes:
        state: what the mesh does.
        epoch: the present epoch of the mesh (see `protocol.messages`).
        is_enabled: whether restarts are allowed at all.
        history: the requests that a restart may have to make again.
        replicas: the replicas of the state.
    """

    def __init__(self, topology: Topology, *, max_restarts: int, replica_every: int):
        self._topology = topology
        self.state, self.epoch = State.STARTING, 0
        self.history = RequestHistory()
        self.replicas = StateReplicas(topology, self.history, replica_every)
        self.is_enabled = max_restarts > 0
        self._budget = Budget(max_restarts)
        self._lost: set[ActorId] = set()
        self._up: set[ActorId] = set()  # the lost actors whose successors have started in this attempt
        self._open: set[Command] = set()
        self._cause: ActorError | None = None
        self._undone = ""  # the text of the failure that the last restart undid
        self._failed_starts = 0
        self._now = self._began_s = 0.0  # the time of the last event, and of the first of this restart
        self._story: deque[str] = deque(maxlen=STORY_LINES)

    @property
    def is_running(self) -> bool:
        """Whether requests are sent at once; if not, they are remembered until the restart ends."""
        return self.state in (State.STARTING, State.RUNNING)

    @property
    def is_restarting(self) -> bool:
        """Whether a restart is under way."""
        return self.state not in (State.STARTING, State.RUNNING, State.ENDED)

    @property
    def story(self) -> tuple[str, ...]:
        """The story of the present or last restart: one line for each change of state, with the seconds since
        its first failure.
        """
        return tuple(self._story)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take an event, and return the commands that follow, in their order.

        Args:
            event: what happened.
            now: the time in seconds.
        """
        self._now = now
        if isinstance(event, StepSent):
            self.replicas.count_step()
        meaning = self._meaning(event)
        before, commands = self.state, REACTIONS[self.state][meaning](self, event)
        if self.state is not before or meaning is Meaning.LOSS:
            self._tell(before, event)
        return commands

    # ------------------------------------------------------------ what an event means

    def _meaning(self, event: Event) -> Meaning:
        match event:
            case MeshStarted():
                return Meaning.STARTED
            case MeshClosed():
                return Meaning.CLOSE
            case FailureFound(error, _):
                if self.is_restarting and self._is_echo(error):
                    return Meaning.ECHO
                return Meaning.LOSS if self._last_error(event) is None else Meaning.FINAL
            case StepSent() | ReplicaWanted(if_due=True) if not self.replicas.is_due:
                return Meaning.NOTHING
            case StepSent() | ReplicaWanted():
                return Meaning.REPLICA if self.is_enabled else Meaning.NOTHING
            case CarriedOut(epoch) | NotCarriedOut(epoch) if epoch != self.epoch:
                return Meaning.NOTHING
            case CarriedOut(_, command) | NotCarriedOut(_, command) if self.replicas.waits_for(command):
                return Meaning.REPLICA
            case CarriedOut(_, WakeUp() as command) if command in self._open:
                return Meaning.RETRY if self._last_error(event) is None else Meaning.FINAL
            case CarriedOut(_, command) if command in self._open:
                return Meaning.PART if len(self._open) > 1 else Meaning.ALL
            case NotCarriedOut(_, command, LaunchError()) if command in self._open:
                return Meaning.FAULT if self._last_error(event) is None else Meaning.FINAL
            case NotCarriedOut(_, command, error) if command in self._open:
                return Meaning.FAULT if isinstance(error, ActorError) else Meaning.FINAL
            case NotCarriedOut(_, HoldBack() | Resume()):
                return Meaning.FINAL
            case _:
                return Meaning.NOTHING

    def _is_echo(self, error: ActorError) -> bool:
        """Return whether a failure follows from those that the present attempt undoes already.

        That is so for a lost actor whose successor has not started yet. Until the lost actors are reaped, it
        is also so for failed transfers.
        """
        is_transfer = isinstance(error, TransferError | RemoteError)
        is_known = error.actor in self._lost - self._up
        is_early = is_transfer and self.state in (State.STOPPING, State.REAPING)
        return can_be_undone(error) and (is_known or is_early)

    def _counts(self, error: ActorError) -> bool:
        """Return whether a failure counts as a restart of its own. Actors on one host may die together, which
        counts as one restart.
        """
        is_loss = isinstance(error, ActorDiedError | ActorUnresponsiveError)
        return not (self.is_restarting and is_loss and error.actor not in self._up)

    @property
    def _retry_counts(self) -> bool:
        """Whether the attempt after a pause counts as a restart of its own. After a failed start it does so
        only if more than `FREE_STARTS` starts have failed in a row.
        """
        return not isinstance(self._cause, LaunchError) or self._failed_starts > FREE_STARTS

    @property
    def _pause_s(self) -> float:
        """The seconds to wait if another start fails."""
        return min(2.0 ** (self._failed_starts + 1), MAX_PAUSE_S)

    def _last_error(self, event: Event) -> ActorError | None:
        """Return the error with which the mesh has to end because of an event, or None if it can go on."""
        match event:
            case FailureFound(error, _):
                return self._refusal(error, counts=self._counts(error))
            case CarriedOut() if self._cause is not None:  # the pause is over
                return self._refusal(self._cause, counts=self._retry_counts)
            case NotCarriedOut(_, command, LaunchError() as error) if command in self._open:
                # Whether the attempt after the pause is allowed is known now, so nobody waits for nothing.
                counts = self._failed_starts >= FREE_STARTS
                return self._refusal(error, counts=counts, at_s=self._now + self._pause_s)
            case NotCarriedOut(_, _, error):
                cause = self._cause or ActorDiedError(self._undone)
                if isinstance(error, MeshError) and self._cause is not None:
                    # The new processes have other devices or another NCCL, and so would further ones.
                    return abandoned(cause, f"lost actors could not be replaced: {error}", LaunchError)
                # This is a bug or a launcher's own error. The mesh must not hang in the middle of a restart.
                text = f"the restart failed: {error!r}; its cause: {cause}"
                return abandoned(cause, text, ActorDiedError)
            case _:
                return None

    def _refusal(self, error: ActorError, *, counts: bool, at_s: float | None = None) -> ActorError | None:
        """Return the error that tells why no restart undoes a failure, or None if one may.

        Args:
            error: the failure, which is returned itself if no restart could help.
            counts: whether the restart counts as one of the allowed ones.
            at_s: the time at which the restart would begin, in seconds; None: now.
        """
        if not self.is_enabled or self.state is State.STARTING or not can_be_undone(error):
            return error
        if counts and not self._budget.allows(self._now if at_s is None else at_s):
            limit = self._budget.limit
            text = (
                f"max_restarts={limit} allows {limit} restart{'s' * (limit != 1)} within {WINDOW_S / 60:g} "
                f"minutes, and one more would be needed: {first_line(error)}; start a new mesh from a "
                "checkpoint (mesh.restore), with a higher max_restarts if failures are to be expected"
            )
            where = {"actor": error.actor, "host": error.host, "pid": error.pid, "step": error.step}
            return abandoned(error, text, RestartBudgetExceeded, **where)
        together = self.replicas.lost_together(self._lost | _lost_by(error))
        if together is None:
            return None
        text = (
            f"actors {together.owner} and {together.holder} were lost together, and with them both copies "
            f"of actor {together.owner}'s arrays; start again from a checkpoint (mesh.restore); the last "
            f"failure was: {first_line(error)}"
        )
        where = {"actor": together.owner, "host": together.host, "step": error.step}
        return abandoned(error, text, StateLostError, **where)

    # ------------------------------------------------------------ reactions

    def _run(self, event: Event) -> list[Command]:
        self.state = State.RUNNING
        return []

    def _ignore(self, event: Event) -> list[Command]:
        return []

    def _begin(self, event: Event) -> list[Command]:
        """Begin an attempt to undo a failure, or begin it anew because of another failure."""
        assert isinstance(event, FailureFound)
        return self._attempt(event.error, counts=self._counts(event.error))

    def _retry(self, event: Event) -> list[Command]:
        """Begin another attempt after the pause."""
        assert self._cause is not None
        return self._attempt(self._cause, counts=self._retry_counts)

    def _attempt(self, error: ActorError, *, counts: bool) -> list[Command]:
        """Begin an attempt, and with it a new epoch.

        Args:
            error: the failure that it undoes, besides those that are not undone yet.
            counts: whether the attempt counts as one of the allowed restarts.
        """
        if not self.is_restarting:
            self._story.clear()
            self._began_s = self._now
        if counts:
            self._budget.take(self._now)
        self._lost |= _lost_by(error)
        self._cause = error
        self.epoch += 1
        self._up.clear()
        self.replicas.cancel()
        return [HoldBack(error, frozenset(self._lost)), *self._enter(State.STOPPING)]

    def _wait(self, event: Event) -> list[Command]:
        """Take note that one command of the present state was carried out."""
        assert isinstance(event, CarriedOut)
        self._open.remove(event.command)
        if isinstance(event.command, StartSuccessor):
            self._up.add(event.command.actor)
        return []

    def _advance(self, event: Event) -> list[Command]:
        """Go on to the next state, since all commands of the present one were carried out."""
        self._wait(event)
        return self._enter(COURSE[self.state].then)

    def _enter(self, state: State) -> list[Command]:
        """Enter a state, or the next one that has something to wait for, and return the commands."""
        given: list[Command] = []
        while True:
            self.state = state
            commands = COURSE[state].commands(self)
            given += commands
            self._open = {command for command in commands if not isinstance(command, DropOthers | Resume)}
            if self._open or COURSE[state].then is None:
                return given
            state = COURSE[state].then

    def _pause(self, event: Event) -> list[Command]:
        """Wait before the next attempt, so that the cause of the failure can be noticed, or so that a host
        can start again.
        """
        assert isinstance(event, NotCarriedOut) and isinstance(event.error, ActorError)
        self.state, self._cause = State.PAUSING, event.error
        if isinstance(error := event.error, LaunchError):
            used = f"{self._budget.used(self._now)} of {self._budget.limit} restarts (max_restarts) are used"
            where = f" (host {error.host}, pid {error.pid})" * (error.pid is not None)
            note = f"a start failed: {first_line(error)}{where}; the next begins in {self._pause_s:g} s"
            pause = WakeUp(self._pause_s, f"{note}; {used}")
            self._failed_starts += 1
        else:
            pause = WakeUp(GRACE_S if isinstance(error, TransferError | RemoteError) else 0.0)
        self._open = {pause}
        return [StopWork(), pause]

    def _replicate(self, event: Event) -> list[Command]:
        """Begin to make a replica, go on with it, or give it up."""
        if isinstance(event, CarriedOut):
            return [*self.replicas.carried_out(event.command, event.result)]  # type: ignore[arg-type]
        if not isinstance(event, NotCarriedOut):
            return [*self.replicas.begin()]
        self.replicas.cancel()
        return [GiveUpReplica(event.error)]

    def _end(self, event: Event) -> list[Command]:
        """End the mesh with the error that tells why no restart helps."""
        error = self._last_error(event)
        assert error is not None  # the event means that the mesh ends
        if self.is_restarting or isinstance(event, NotCarriedOut):
            self._tell(self.state, event, State.ENDED)
            story = "\n".join(f"  {line}" for line in self._story)
            error.args = (f"{error}\nThe story of the restart:\n{story}",)
        self._close(event)
        return [EndMesh(error, event.dead if isinstance(event, FailureFound) else None)]

    def _close(self, event: Event) -> list[Command]:
        self.state, self._cause = State.ENDED, None
        self.epoch += 1  # what processes still send belongs to an earlier epoch
        self._open.clear()
        self.replicas.cancel()
        self.history.clear()
        return []

    def _tell(self, before: State, event: Event, after: State | None = None) -> None:
        after = after or self.state
        line = f"{before.value}: {_describe(event)} -> {after.value}"
        self._story.append(f"{self._now - self._began_s:6.1f} s  {line}")

    # ------------------------------------------------------------ what some states of a restart begin with

    def _renew(self) -> list[Command]:
        assert self._cause is not None
        cause = first_line(self._cause)
        living = sorted(set(self._topology.everyone).difference(self._new_processes))
        return [
            *(StartSuccessor(actor) for actor in sorted(self._lost)),
            *(RenewTransport(process, cause) for process in (*living, None)),
        ]

    @property
    def _new_processes(self) -> list[ProcessId]:
        return self._topology.processes_of_all(self._lost)

    def _roll_back(self) -> list[Command]:
        whole = self.replicas.whole
        return [RollBack(None, 0) if whole is None else RollBack(whole.generation, whole.size_bytes)]

    def _resume(self) -> list[Command]:
        replaced = tuple(sorted(self._lost))
        self._lost.clear()
        self._up.clear()
        self._undone, self._cause, self._failed_starts = str(self._cause), None, 0
        return [Resume(tuple(self.history.take_again()), replaced, self._now - self._began_s)]


def can_be_undone(error: ActorError) -> bool:
    """Return whether replaced actors may succeed with the requests that were made before a failure.

    This is False in particular for failures of user code, which would fail again.
    """
    if isinstance(error, HandshakeError | RestartBudgetExceeded | MeshClosedError | StateLostError):
        return False
    if isinstance(error, RemoteError):
        return error.exception_type.rpartition(".")[2] in ("TransferError", "StepAbortedError")
    if isinstance(error, ProtocolError) and error.instruction is not None:
        return False  # a transfer with the wrong size would have it again
    return isinstance(
        error, ActorDiedError | ActorUnresponsiveError | TransferError | ProtocolError | LaunchError
    )


def _lost_by(error: ActorError) -> set[ActorId]:
    """Return the actor that has to be replaced because of a failure, as a set; empty if there is none."""
    is_transfer = isinstance(error, TransferError | RemoteError)
    return set() if error.actor is None or is_transfer else {error.actor}


def _describe(event: Event) -> str:
    """Return an event as text for the story of a restart."""
    match event:
        case FailureFound(error, _):
            return first_line(error)
        case CarriedOut(_, command):
            return f"{type(command).__name__} done"
        case NotCarriedOut(_, command, error):
            return f"{type(command).__name__} failed: {first_line(error)}"
        case _:
            return type(event).__name__


@dataclass(slots=True)
class Budget:
    """A counter of restarts, which limits their number within a time window.

    Args:
        limit: the number of restarts that are allowed within `window_s` seconds.
        window_s: the length of the window in seconds.
    """

    limit: int
    window_s: float = WINDOW_S
    _times: list[float] = field(default_factory=list)

    def allows(self, now: float) -> bool:
        """Return whether one more restart is allowed at the time `now`, in seconds."""
        return self.used(now) < self.limit

    def used(self, now: float) -> int:
        """Return how many restarts were counted within the window that ends at the time `now`, in seconds."""
        return sum(now - time <= self.window_s for time in self._times)

    def take(self, now: float) -> None:
        """Count one restart at the time `now`, in seconds."""
        self._times = [time for time in self._times if now - time <= self.window_s] + [now]


# ---------------------------------------------------------------- the tables


COURSE: Final[dict[State, CourseRow]] = {
    # state, the commands at its begin, and the state when they are carried out
    State.STOPPING: CourseRow(lambda _: [StopWork()], State.REAPING),
    State.REAPING: CourseRow(lambda self: [Reap(actor) for actor in sorted(self._lost)], State.RENEWING),
    State.RENEWING: CourseRow(Recovery._renew, State.CONNECTING),
    State.CONNECTING: CourseRow(lambda _: [ConnectAll()], State.LOADING),
    State.LOADING: CourseRow(lambda self: [LoadPrograms(p) for p in self._new_processes], State.LINKING),
    State.LINKING: CourseRow(lambda _: [MakeLinks()], State.RESTORING),
    State.RESTORING: CourseRow(lambda self: self.replicas.restore(self._lost), State.HANDING_OVER),
    State.HANDING_OVER: CourseRow(lambda self: self.replicas.hand_over(self._lost), State.ROLLING_BACK),
    State.ROLLING_BACK: CourseRow(Recovery._roll_back, State.RUNNING),
    State.RUNNING: CourseRow(Recovery._resume),
}
"""The course of a restart."""

_no, _run, _begin, _retry = Recovery._ignore, Recovery._run, Recovery._begin, Recovery._retry
_wait, _next, _pause = Recovery._wait, Recovery._advance, Recovery._pause
_copy, _end, _close = Recovery._replicate, Recovery._end, Recovery._close

_REACTIONS: Final = {
    # state           STARTED LOSS    FINAL PART   ALL    FAULT   RETRY   REPLICA CLOSE
    State.STARTING:   (_run,  _no,    _end, _no,   _no,   _no,    _no,    _no,    _close),
    State.RUNNING:    (_no,   _begin, _end, _no,   _no,   _no,    _no,    _copy,  _close),
    **dict.fromkeys(COURSE.keys() - {State.RUNNING},
                      (_no,   _begin, _end, _wait, _next, _pause, _no,    _no,    _close)),
    State.PAUSING:    (_no,   _begin, _end, _no,   _no,   _no,    _retry, _no,    _close),
    State.ENDED:      (_no,   _no,    _no,  _no,   _no,   _no,    _no,    _no,    _no),
}  # fmt: skip

REACTIONS: Final = {
    state: dict(zip(Meaning, (*row, _no, _no), strict=True)) for state, row in _REACTIONS.items()
}
"""The reaction to each meaning of an event, in each state. `ECHO` and `NOTHING` have none in any state."""
