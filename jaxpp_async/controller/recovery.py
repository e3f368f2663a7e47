"""recovery: after a failure that is not the program's own: the lost actors are replaced, all go back to the last whole
copy of their arrays, and what was asked since is asked again.

The others keep their processes, their JAX and what they have compiled. Whoever awaits a step waits a little longer: its
arrays come out as they would have, since the same programs run on the same values in the same order. Decides neither
what a failure is (`supervision`) nor what is remembered (`outbox`, `backups`).
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
from jaxpp_async.controller.error_messages import abandoned
from jaxpp_async.controller.failure_policy import GRACE_S
from jaxpp_async.controller.requests import ActorLink, RequestLog
from jaxpp_async.controller.startup import all_of
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
from jaxpp_async.protocol.messages import Loaded
from jaxpp_async.protocol.task_group import OwnedTasks, awake_timeout

_LOG = logging.getLogger("jaxpp_async")

WINDOW_S = 600.0
"""In how long a time the restarts are counted."""

FREE_STARTS = 2
"""How many attempts to start an actor may fail without being counted: this process may have been blocked meanwhile."""

MAX_PAUSE_S = 30.0
"""How long the next attempt waits, at most, when an actor could not be started."""

ABORT_S, CONNECT_S = 10.0, 30.0
"""What a living actor may take to drop what it does and to make a new end of the data plane, and what all may take to
connect them."""


@dataclass(slots=True)
class Budget:
    """How many restarts are left.

    Args:
        limit: how many there may be within `window_s` seconds.
    """

    limit: int
    window_s: float = WINDOW_S
    _times: deque[float] = field(default_factory=deque)

    def take(self, now: float) -> bool:
        """Use one, at the time `now` in seconds; False if there is none left."""
        while self._times and now - self._times[0] > self.window_s:
            self._times.popleft()
        if len(self._times) >= self.limit:
            return False
        self._times.append(now)
        return True


class Recovery:
    """The restarts of one mesh.

    Args:
        max_restarts: how many there may be in ten minutes.
        watch, unwatch: begin to supervise a process's successor; listen for a process no longer.
        end: ends the mesh.
        on_restarted: told when all is as it was: which actors were replaced, and how many steps are run again.
    """

    def __init__(
        self,
        actor_group: ActorGroup,
        request_log: RequestLog,
        programs: LoadedPrograms,
        replication: StateReplication,
        linking: LinkSetup,
        *,
        max_restarts: int,
        watch: Callable[[ActorLink], None],
        unwatch: Callable[[ProcessId], None],
        end: Callable[[ActorError], None],
        on_restarted: Callable[[list[ActorId], int], None],
    ):
        self._actor_group, self._request_log, self._programs, self._replication = (
            actor_group,
            request_log,
            programs,
            replication,
        )
        self._linking = linking
        self._budget, self._watch, self._unwatch = Budget(max_restarts), watch, unwatch
        self._end, self._on_restarted = end, on_restarted
        self._tasks = OwnedTasks()
        self._task: asyncio.Task[None] | None = None
        self._lost: set[ActorId] = set()
        self._is_new_epoch = False  # what fails to travel before belongs to what is being mended
        self._replaced: set[ActorId] = set()
        self._late_starts = 0

    @property
    def is_under_way(self) -> bool:
        """Actors are being replaced; requests wait."""
        return self._task is not None

    def can_mend(self, error: ActorError) -> bool:
        """Whether the same requests may well succeed with fresh actors: it is not the user's code that failed."""
        if isinstance(error, HandshakeError | RestartBudgetExceeded | MeshClosedError | StateLostError):
            return False
        if isinstance(error, RemoteError):
            return error.exception_type.rpartition(".")[2] in ("TransferError", "StepAbortedError")
        if isinstance(error, ProtocolError) and error.instruction is not None:
            return False  # a transfer of the wrong size: it would come again
        return isinstance(
            error, ActorDiedError | ActorUnresponsiveError | TransferError | ProtocolError | LaunchError
        )

    def begin(self, error: ActorError) -> None:
        """Start because of `error`; in the middle of a recovery: start over, unless this is what it is about."""
        is_known = error.actor in self._lost - self._replaced or (
            isinstance(error, TransferError | RemoteError) and not self._is_new_epoch
        )
        if self.is_under_way and is_known:
            return
        # Actors of one host die together: that is one restart, not one each.
        is_an_end = isinstance(error, ActorDiedError | ActorUnresponsiveError)
        is_more_of_it = self.is_under_way and is_an_end and error.actor not in self._replaced
        self._begin(error, counts=not is_more_of_it)

    def _begin(self, error: ActorError, *, counts: bool) -> None:
        if counts and not self._budget.take(time.monotonic()):
            text = f"more than {self._budget.limit} restarts within {WINDOW_S / 60:g} minutes (max_restarts): the last"
            where = {"actor": error.actor, "host": error.host, "pid": error.pid, "step": error.step}
            first_line = str(error).partition("\n")[0]
            text = f"{text} failure was: {first_line}; start again from a checkpoint"
            self._end(abandoned(error, text, RestartBudgetExceeded, **where))
            return
        if error.actor is not None and not isinstance(error, TransferError | RemoteError):
            self._lost.add(error.actor)
            for process in self._actor_group.processes.processes_of(error.actor):
                self._unwatch(process)
        where = {"actor": error.actor, "host": error.host, "step": error.step}
        _LOG.warning("restarting because of a failure: %s", error, extra=where)
        self._request_log.hold_back()
        # These ask past the outbox: what they asked from here on would fail with the abort, as a failure of its own.
        self._replication.give_up()
        self._linking.give_up()
        for actor in self._actor_group.actors:
            self._actor_group.set_state(actor, "restarting" if actor in self._lost else "waiting")
        before, self._task = self._task, None
        if before is not None:
            before.cancel()
        self._task = self._tasks.start("restart", self._run(before, error))

    async def aclose(self) -> None:
        """End a recovery under way."""
        self._task = None
        await self._tasks.aclose()

    # ------------------------------------------------------------ one attempt

    async def _run(self, before: asyncio.Task[None] | None, cause: ActorError) -> None:
        if before is not None:
            await asyncio.wait([before])
        await self._replication.stop()
        await self._linking.stop()
        me = asyncio.current_task()
        try:
            await self._attempt(cause)
        except StateLostError as error:
            first = str(cause).partition("\n")[0]
            where = {"actor": error.actor, "host": error.host, "step": cause.step}
            self._end(abandoned(cause, f"{error}; the last failure was: {first}", StateLostError, **where))
        except ActorError as error:
            if isinstance(error, TransferError | RemoteError):
                await asyncio.sleep(GRACE_S)  # a death that explains it starts over, and ends this
            if isinstance(error, LaunchError):
                self._late_starts += 1
                await asyncio.sleep(min(2**self._late_starts, MAX_PAUSE_S))  # a host may be starting up again
            if self._task is me:
                counts = not isinstance(error, LaunchError) or self._late_starts > FREE_STARTS
                self._begin(error, counts=counts) if self.can_mend(error) else self._end(error)
        except MeshError as error:
            # successors have other devices, or another NCCL: the next ones would as well
            self._end(abandoned(cause, f"lost actors could not be replaced: {error}", LaunchError))
        except Exception as error:
            # a defect, or a launcher's own error: the mesh must not hang between two lives
            _LOG.exception("a restart failed")
            self._end(abandoned(cause, f"the restart failed: {error!r}; its cause: {cause}", ActorDiedError))

    async def _attempt(self, cause: ActorError) -> None:
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
        await all_of({process: self._load(process) for process in actor_group.processes.processes_of_all(lost)}, "load")
        await self._linking.link_again()
        await self._replication.roll_back(lost)
        self._lost.clear()
        self._task, self._late_starts = None, 0
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
        """New processes for the lost, new ends of the data plane for the living."""
        replacing = {actor: self._replace(actor) for actor in lost}
        settling = {actor: self._settle_all(actor, cause) for actor in living}
        await all_of({**replacing, **settling, CONTROLLER: self._actor_group.renew_plane()}, "prepare")

    async def _settle_all(self, actor: ActorId, cause: str) -> None:
        processes = self._actor_group.processes.processes_of(actor)
        await all_of({process: self._settle(process, cause) for process in processes}, "settle")

    async def _settle(self, process: ProcessId, cause: str) -> None:
        """Have a living process drop what it does, and make a new end of the data plane."""
        try:
            async with awake_timeout(ABORT_S):
                await self._actor_group.abort(process, cause)
                await self._actor_group.renew(process)
        except (TimeoutError, RemoteError) as error:
            info = self._actor_group.links[process].info
            what = f"{info} did not drop its work within {ABORT_S:g} s of a failure elsewhere: {error or 'no answer'}"
            raise ActorUnresponsiveError(what, actor=info.id, host=info.host, pid=info.pid) from error

    async def _connect(self) -> None:
        try:
            async with awake_timeout(CONNECT_S):
                await self._actor_group.connect()
        except TimeoutError:
            raise TransferError(
                f"the data plane could not be connected anew within {CONNECT_S:g} s"
            ) from None

    async def _replace(self, actor: ActorId) -> None:
        for link in await self._actor_group.bring_up(actor):
            self._watch(link)
        self._replaced.add(actor)

    async def _load(self, process: ProcessId) -> None:
        """All programs that its predecessor had, or was loading."""
        link = self._actor_group.links[process]
        actor = link.info.id
        for program_id in self._programs.of(actor):
            message = self._programs.load_message(
                self._request_log.number(), program_id, actor, link.known_blobs
            )
            await link.call(message, Loaded)
