"""Recover from the loss of actors, or of connections between actors, by a restart.

In a restart the lost actors are replaced, all actors return to the last complete replica (copy) of their
arrays, and the requests that were made since that replica are sent again.

Actors that were not lost keep their processes and their compiled programs. A caller that awaits a step only
waits longer, and gets the same arrays as without a failure, since the same programs run on the same values in
the same order. After a failure of user code there is no restart. `failure_policy` decides which error
describes a failure. `requests` remembers the requests and `state_replicas` keeps the replicas that a restart
needs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxpp_async.controller.actor_group import ActorGroup
from jaxpp_async.controller.deploy import LinkSetup, LoadedPrograms
from jaxpp_async.controller.error_messages import abandoned, location
from jaxpp_async.controller.failure_policy import GRACE_S, FailurePolicy
from jaxpp_async.controller.options import ControllerOptions
from jaxpp_async.controller.requests import RequestLog
from jaxpp_async.controller.state_replicas import StateReplication
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
from jaxpp_async.program.instructions import CONTROLLER, ActorId, ProcessId
from jaxpp_async.protocol.task_group import OwnedTasks, all_of, awake_timeout

_LOG = logging.getLogger("jaxpp_async")

WINDOW_S = 600.0
"""The length in seconds of the time window within which at most `max_restarts` restarts are allowed."""

FREE_STARTS = 2
"""The number of failed starts of actors in a row that are not counted as restarts, since this process may
have been blocked.
"""

MAX_PAUSE_S = 30.0
"""The most seconds between a start of an actor that failed and the next attempt."""

ABORT_S, CONNECT_S = 10.0, 30.0
"""The most seconds that a living actor may take to drop its work and to make a new end of the data plane, and
the most seconds that all actors may take to connect these ends."""


class Recovery:
    """The component that carries out the restarts of one mesh, each of which replaces lost actors.

    Args:
        actor_group: the actors' processes.
        request_log: remembers the requests that a restart sends again.
        programs: the programs that replaced actors have to load again.
        linking: makes the NCCL links between actors again.
        failure_policy: watches the processes that are started.
        options: the number of allowed restarts, and the number of steps between replicas (copies of the
            actors' arrays).
        end: called with an error to end the mesh.
        on_restarted: called when a restart has succeeded, with the replaced actors, and with the number of
            steps that had already finished and are run again.
        on_replica_error: called with an error if a replica cannot be transferred between actors.

    Attributes:
        replication: makes the replicas.
    """

    def __init__(
        self,
        actor_group: ActorGroup,
        request_log: RequestLog,
        programs: LoadedPrograms,
        linking: LinkSetup,
        failure_policy: FailurePolicy,
        options: ControllerOptions,
        *,
        end: Callable[[ActorError], None],
        on_restarted: Callable[[list[ActorId], int], None],
        on_replica_error: Callable[[TransferError], None],
    ):
        self._actor_group, self._request_log, self._programs = actor_group, request_log, programs
        self._linking, self._failure_policy = linking, failure_policy
        self.replication = StateReplication(actor_group, request_log, options, on_replica_error)
        self._budget, self._end, self._on_restarted = Budget(options.max_restarts), end, on_restarted
        self._tasks = OwnedTasks()
        self._task: asyncio.Task[None] | None = None
        self._lost: set[ActorId] = set()
        # Until the restart has begun a new epoch, a failed transfer is a consequence of the failure that it
        # recovers from.
        self._is_new_epoch = False
        self._replaced: set[ActorId] = set()
        self._failed_starts = 0

    @property
    def is_under_way(self) -> bool:
        """Whether a restart is in progress. Until its end, new requests are remembered but not sent."""
        return self._task is not None

    def can_recover_from(self, error: ActorError) -> bool:
        """Return whether replaced actors may succeed with the requests that were made before `error`.

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

    def begin(self, error: ActorError) -> None:
        """Begin a restart because of `error`.

        If a restart is already in progress, there are two cases. If `error` only results from a failure that
        the restart already handles, `error` is ignored. Otherwise the restart starts over.
        """
        is_known = error.actor in self._lost - self._replaced or (
            isinstance(error, TransferError | RemoteError) and not self._is_new_epoch
        )
        if self.is_under_way and is_known:
            return
        # Actors on one host may die together, which counts as one restart.
        is_an_end = isinstance(error, ActorDiedError | ActorUnresponsiveError)
        is_same_restart = self.is_under_way and is_an_end and error.actor not in self._replaced
        self._begin_attempt(error, counts=not is_same_restart)

    def _begin_attempt(self, error: ActorError, *, counts: bool) -> None:
        if counts and not self._budget.take(time.monotonic()):
            first_line = str(error).partition("\n")[0]
            text = (
                f"more than {self._budget.limit} restarts within {WINDOW_S / 60:g} minutes (max_restarts): "
                f"the last failure was: {first_line}; start again from a checkpoint"
            )
            where = {"actor": error.actor, "host": error.host, "pid": error.pid, "step": error.step}
            self._end(abandoned(error, text, RestartBudgetExceeded, **where))
            return
        if error.actor is not None and not isinstance(error, TransferError | RemoteError):
            self._lost.add(error.actor)
            for process in self._actor_group.processes.processes_of(error.actor):
                self._failure_policy.unwatch(process)
        where = {"actor": error.actor, "host": error.host, "step": error.step}
        _LOG.warning("restarting because of a failure: %s", error, extra=where)
        self._request_log.hold_back()
        # These two send requests that a restart does not repeat. If they sent one now, the abort would fail
        # it, and that would count as another failure.
        self.replication.cancel()
        self._linking.cancel()
        for actor in self._actor_group.actors:
            self._actor_group.set_state(actor, "restarting" if actor in self._lost else "waiting")
        before, self._task = self._task, None
        if before is not None:
            before.cancel()
        self._task = self._tasks.start("restart", self._run(before, error))

    async def aclose(self) -> None:
        """Cancel a restart that is in progress, and stop making replicas (copies of the actors' arrays, kept
        for restarts).
        """
        self._task = None
        await self._tasks.aclose()
        await self.replication.aclose()

    # ------------------------------------------------------------ one attempt

    async def _run(self, before: asyncio.Task[None] | None, cause: ActorError) -> None:
        """Attempt a restart; if it fails, begin another attempt or end the mesh.

        Args:
            before: the task of the previous attempt, which has been cancelled and must end first; None for
                the first attempt.
            cause: the failure to recover from.
        """
        if before is not None:
            await asyncio.wait([before])
        await self.replication.aclose()
        await self._linking.aclose()
        me = asyncio.current_task()
        try:
            await self._attempt(cause)
        except StateLostError as error:
            first = str(cause).partition("\n")[0]
            where = {"actor": error.actor, "host": error.host, "step": cause.step}
            self._end(abandoned(cause, f"{error}; the last failure was: {first}", StateLostError, **where))
        except ActorError as error:
            if isinstance(error, TransferError | RemoteError):
                # If a death explains the error, its report begins a new attempt and cancels this one.
                await asyncio.sleep(GRACE_S)
            if isinstance(error, LaunchError):
                self._failed_starts += 1
                # A host may need time to start again.
                await asyncio.sleep(min(2**self._failed_starts, MAX_PAUSE_S))
            if self._task is me:
                counts = not isinstance(error, LaunchError) or self._failed_starts > FREE_STARTS
                if self.can_recover_from(error):
                    self._begin_attempt(error, counts=counts)
                else:
                    self._end(error)
        except MeshError as error:
            # The new processes have other devices or another NCCL, and so would those of a further attempt.
            self._end(abandoned(cause, f"lost actors could not be replaced: {error}", LaunchError))
        except Exception as error:
            # This is a bug or a launcher's own error. The mesh must not hang in the middle of a restart.
            _LOG.exception("a restart failed")
            self._end(abandoned(cause, f"the restart failed: {error!r}; its cause: {cause}", ActorDiedError))

    async def _attempt(self, cause: ActorError) -> None:
        """Replace the lost actors, restore the arrays of all actors, and send again the requests that were
        made since these arrays were copied.

        Args:
            cause: the failure to recover from.
        """
        start_s = time.monotonic()
        actor_group, lost = self._actor_group, sorted(self._lost)
        self._replaced.clear()
        self._is_new_epoch = False
        await all_of({actor: actor_group.remove(actor) for actor in lost}, "remove")
        actor_group.begin_epoch()
        self._is_new_epoch = True
        living = [actor for actor in actor_group.actors if actor not in self._lost]
        await self._prepare(living, lost, str(cause).partition("\n")[0])
        actor_group.check_devices()
        await self._connect()
        await all_of(
            {process: self._load(process) for process in actor_group.processes.processes_of_all(lost)}, "load"
        )
        await self._linking.link_again()
        await self.replication.roll_back(lost)
        self._lost.clear()
        self._task, self._failed_starts = None, 0
        for actor in actor_group.actors:
            actor_group.set_state(actor, "ready")
        steps = self._request_log.replay(actor_group.epoch)
        _LOG.warning(
            "replaced actors %s in %.1f s; %d step%s run again",
            lost,
            time.monotonic() - start_s,
            steps,
            "s" * (steps != 1),
        )
        self._on_restarted(lost, steps)

    async def _prepare(self, living: list[ActorId], lost: list[ActorId], cause: str) -> None:
        """Start new processes for the lost actors, and have all other actors make new ends of the data plane
        (the transport for arrays).

        Args:
            living: the actors whose processes still run.
            lost: the actors to replace.
            cause: the first line of the failure, for the errors of the steps that the living actors drop.
        """
        processes = self._actor_group.processes
        replacing = {processes.process(actor, 0): self._replace(actor) for actor in lost}
        resetting = {
            process: self._abort_and_reset(process, cause) for process in processes.processes_of_all(living)
        }
        host = self._actor_group.reset_host_transport()
        await all_of({**replacing, **resetting, CONTROLLER: host}, "prepare")

    async def _abort_and_reset(self, process: ProcessId, cause: str) -> None:
        """Tell a process that still runs to drop its work and to replace its end of the data plane (the
        transport for arrays), and wait until this is done.

        Args:
            process: the process.
            cause: a text that says what happened, for the errors of the steps that the process drops.

        Raises:
            ActorUnresponsiveError: the process failed to do this, or did not answer in time.
        """
        try:
            async with awake_timeout(ABORT_S):
                await self._actor_group.abort(process, cause)
                await self._actor_group.reset_transport(process)
        except (TimeoutError, RemoteError) as error:
            info = self._actor_group.links[process].info
            why = error or "no answer"
            what = f"{info} did not drop its work within {ABORT_S:g} s of a failure elsewhere: {why}"
            raise ActorUnresponsiveError(what, **location(info)) from error

    async def _connect(self) -> None:
        try:
            async with awake_timeout(CONNECT_S):
                await self._actor_group.connect()
        except TimeoutError:
            raise TransferError(
                f"the data plane could not be connected anew within {CONNECT_S:g} s"
            ) from None

    async def _replace(self, actor: ActorId) -> None:
        for link in await self._actor_group.start_actor(actor):
            self._failure_policy.watch(link)
        self._replaced.add(actor)

    async def _load(self, process: ProcessId) -> None:
        """Load all programs of an actor into a new process of the actor."""
        link = self._actor_group.links[process]
        actor = link.info.id
        for program_id in self._programs.programs_of(actor):
            message = self._programs.load_message(program_id, actor, link.known_blobs)
            await link.call(message)


@dataclass(slots=True)
class Budget:
    """A counter of restarts, which limits their number within a time window.

    Args:
        limit: the number of restarts that are allowed within `window_s` seconds.
        window_s: the length of the window in seconds.
    """

    limit: int
    window_s: float = WINDOW_S
    _times: deque[float] = field(default_factory=deque)

    def take(self, now: float) -> bool:
        """Count one restart and return True; if the limit is reached, return False instead.

        Args:
            now: the time in seconds.
        """
        while self._times and now - self._times[0] > self.window_s:
            self._times.popleft()
        if len(self._times) >= self.limit:
            return False
        self._times.append(now)
        return True
