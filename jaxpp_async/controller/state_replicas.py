"""Take copies of all actors' arrays, keep each in another actor's memory, and bring actors back to the last.

A copy is whole once every actor has its own, its holder has it too, and no request from before it is under
way. Only then the copy before it is dropped, and the requests before it are forgotten. `recovery` restarts
processes and sends requests again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Mapping

from jaxpp_async.controller.actor_group import ActorGroup
from jaxpp_async.controller.options import ControllerOptions
from jaxpp_async.controller.requests import PendingRequest, RequestLog
from jaxpp_async.controller.stall_detector import SLOW_BYTES_PER_S
from jaxpp_async.controller.startup import all_of
from jaxpp_async.errors import ActorError, ActorUnresponsiveError, RemoteError, StateLostError, TransferError
from jaxpp_async.layout.state_replicas import ReplicaStore, choose_holders
from jaxpp_async.program.instructions import CONTROLLER, ActorId, ProcessId
from jaxpp_async.protocol.messages import (
    Done,
    DropReplicas,
    ReceiveReplica,
    ReplicaArray,
    ReplicaTaken,
    Request,
    Rollback,
    SendReplica,
    TakeReplica,
)
from jaxpp_async.protocol.task_group import OwnedTasks, awake_timeout

_LOG = logging.getLogger("jaxpp_async")

_SECURE_ATTEMPTS, _SAVE_POLL_S = 10, 0.1

ROLLBACK_S = 30.0
"""How long going back may take; a second more for each 50 MB."""

MAX_REMEMBERED_BYTES = 1 << 30
"""With this much host data in remembered requests a copy is taken before it is due."""


class StateReplication:
    """The copies of one mesh's state, in the memory of its actors.

    A copy may be on its way for `progress_s` seconds, and a second more for each 50 MB.

    Args:
        on_error: called with the error of a copy that does not arrive: a hint that its link is broken.
    """

    def __init__(
        self,
        actor_group: ActorGroup,
        request_log: RequestLog,
        options: ControllerOptions,
        on_error: Callable[[TransferError], None],
    ):
        self._actor_group, self._request_log, self._on_error = actor_group, request_log, on_error
        self._every, self._patience_s = options.backup_every, options.progress_s
        self._steps_since = (
            self._every - 1
        )  # the first copy soon: until then all that was ever put is remembered
        self._generations = itertools.count()
        self._generation: int | None = None
        self._contents: Mapping[ProcessId, tuple[ReplicaArray, ...]] = {}
        self._replica_store = ReplicaStore()
        self._tasks = OwnedTasks()
        self._task: asyncio.Task[None] | None = None

    def note_step(self) -> None:
        """Count a step that was just sent, and take a copy behind it if one is due."""
        self._steps_since += 1
        self.take_if_due()

    def take_if_due(self) -> None:
        """Take a copy now if enough has happened since the last.

        To be called also before each save: no copy is taken during a save, and the next save may follow at
            once.
        """
        is_due = self._steps_since >= self._every or self._request_log.size_bytes > MAX_REMEMBERED_BYTES
        if is_due and self._task is None and self._request_log.is_open and not self._request_log.has_snapshot:
            self.take()

    def take(self) -> asyncio.Task[None]:
        """Take a copy of everything as it is behind the requests made so far, while later ones go on.

        Returns:
            Done when the copy is whole, or could not be taken.
        """
        self._steps_since = 0
        generation, mark = next(self._generations), self._request_log.mark
        asked = {
            process: link.ask(TakeReplica(self._request_log.number(), generation), ReplicaTaken)
            for process, link in self._actor_group.links.items()
        }
        work = self._complete_or_report(generation, mark, asked)
        task = self._task = self._tasks.start(f"copy {generation} of the state", work)
        task.add_done_callback(self._on_ended)
        return task

    async def secure(self) -> None:
        """Wait until a copy has the arrays that were read from files, so that the files may go."""
        attempts = 0
        while self._request_log.needs_files:
            await self._request_log.wait_open()
            if self._request_log.has_snapshot:
                await asyncio.sleep(_SAVE_POLL_S)  # a save is under way: there is no event for its end
            elif attempts < _SECURE_ATTEMPTS:
                attempts += 1
                await asyncio.wait([self._task or self.take()])
            else:
                _LOG.warning("no copy has what was restored: keep the files, a restart would read them again")
                return

    def cancel(self) -> None:
        """Make no further request for the copy that is being taken, if there is one."""
        if self._task is not None:
            self._task.cancel()

    async def aclose(self) -> None:
        """Cancel the copy that is being taken, and wait for that. Another copy may be taken afterwards."""
        await self._tasks.aclose()

    async def roll_back(self, lost: Collection[ActorId]) -> None:
        """Have all actors hold what they held at the last whole copy.

        Args:
            lost: actors whose successors hold nothing.

        Raises:
            StateLostError: an actor was lost together with the holder of its copy.
            TransferError: a copy does not arrive. ActorUnresponsiveError: an actor does not go back.
        """
        generation, everyone = self._generation, sorted(self._actor_group.links)
        if generation is not None:
            await self._ask_each(everyone, lambda: DropReplicas(self._request_log.number(), generation))
            await self._bring_back(generation, lost)
            # The copies that the lost actors held for others; until they are there again, one more loss would
            # be one too many.
            gone = self._actor_group.processes.processes_of_all(lost)
            orphans = {p: self._contents[p] for p in everyone if self._holder_of(p) in gone}
            await self._hand_over(generation, orphans)
        size_bytes = sum(n for kept in self._contents.values() for array in kept for n in array.shard_bytes)
        try:
            async with awake_timeout(ROLLBACK_S + size_bytes / SLOW_BYTES_PER_S):
                await self._ask_each(everyone, lambda: Rollback(self._request_log.number(), generation))
        except TimeoutError:
            raise ActorUnresponsiveError(
                "actors did not go back to the last copy of their arrays in time"
            ) from None

    # ------------------------------------------------------------ taking

    async def _complete_or_report(
        self, generation: int, mark: int, asked: Mapping[ProcessId, PendingRequest]
    ) -> None:
        try:
            await self._complete(generation, mark, asked)
        except TransferError as error:
            self._on_error(error)
        except RemoteError as error:  # such as too little memory; the copy before it still stands
            _LOG.warning(
                "no copy of the state could be taken, the next is tried in %d steps: %s", self._every, error
            )
        except ActorError:  # the mesh has ended, and says why to whoever asks it for something
            _LOG.debug("copy %d of the state was not finished", generation)

    async def _complete(self, generation: int, mark: int, asked: Mapping[ProcessId, PendingRequest]) -> None:
        """Wait until a copy is whole, then drop the copy and the requests before it.

        Args:
            mark: the point in the request log at which the copy is taken.
            asked: the request to each process to take its copy.
        """
        kept = {process: (await reply).arrays for process, reply in asked.items()}
        await self._hand_over(generation, kept)
        for reply_handler in self._request_log.unanswered(mark):
            answered = asyncio.Event()
            reply_handler.when_done(answered.set)
            await answered.wait()
        self._generation, self._contents = generation, kept
        self._request_log.forget_before(mark)
        self._replica_store.keep_only(generation)
        await self._ask_each(sorted(kept), lambda: DropReplicas(self._request_log.number(), generation))
        _LOG.debug("copy %d of the state is whole", generation)

    def _on_ended(self, _: asyncio.Task[None]) -> None:
        self._task = None

    # ------------------------------------------------------------ moving copies

    async def _hand_over(self, generation: int, arrays: Mapping[ProcessId, tuple[ReplicaArray, ...]]) -> None:
        """Move copies from their processes to the holders."""
        routes = {process: (process, self._holder_of(process)) for process in arrays}
        await self._move(generation, arrays, routes)

    async def _bring_back(self, generation: int, lost: Collection[ActorId]) -> None:
        """Move copies from the holders to the successors of the lost actors."""
        processes = self._actor_group.processes
        for process in processes.processes_of_all(lost):
            holder, actor = self._holder_of(process), processes.actor_of(process)
            if holder != CONTROLLER and (other := processes.actor_of(holder)) in lost:
                raise StateLostError(
                    f"actors {actor} and {other} were lost together, and with them both copies "
                    f"of actor {actor}'s arrays; start again from a checkpoint (mesh.restore)",
                    actor=actor,
                    host=self._actor_group.links[process].info.host,
                )
        routes = {
            process: (self._holder_of(process), process) for process in processes.processes_of_all(lost)
        }
        await self._move(generation, self._contents, routes)

    async def _move(
        self,
        generation: int,
        arrays: Mapping[ProcessId, tuple[ReplicaArray, ...]],
        routes: Mapping[ProcessId, tuple[ProcessId, ProcessId]],
    ) -> None:
        """Move copies between processes, all at once.

        Args:
            arrays: the arrays in each process's copy.
            routes: for each process whose copy moves, from where and to where.

        Raises:
            TransferError: a copy does not arrive.
        """
        size_bytes = sum(n for of in routes for array in arrays[of] for n in array.shard_bytes)
        arrived: set[ProcessId] = set()

        async def move(of: ProcessId, source: ProcessId, to: ProcessId) -> None:
            number, epoch = self._request_log.number, self._actor_group.epoch
            receive = ReceiveReplica(number(), epoch, generation, of, source, arrays[of])
            send = SendReplica(number(), epoch, generation, of, to)
            halves = {to: self._run_half(to, receive), source: self._run_half(source, send)}
            await all_of(halves, f"carry the copy of process {of}")
            arrived.add(of)

        try:
            async with awake_timeout(self._patience_s + size_bytes / SLOW_BYTES_PER_S):
                await all_of({of: move(of, *route) for of, route in routes.items()}, "carry copies")
        except TimeoutError:
            of = next(of for of in routes if of not in arrived)
            source, to = routes[of]
            owner, *ends = (self._actor_group.processes.actor_of(process) for process in (of, source, to))
            link = (
                "with the controller"
                if CONTROLLER in (source, to)
                else f"between actors {ends[0]} and {ends[1]}"
            )
            what = f"the copy of actor {owner}'s arrays does not arrive: the link {link} is broken"
            raise TransferError(
                f"{what}, or slower than 50 MB/s (progress_timeout_s)", actor=ends[1]
            ) from None

    async def _run_half(self, process: ProcessId, message: ReceiveReplica | SendReplica) -> None:
        """Run one end of a move, on an actor or in this process."""
        if process != CONTROLLER:
            await self._actor_group.links[process].ask(message, Done)
        elif isinstance(message, ReceiveReplica):
            await self._replica_store.receive(self._actor_group.host_transfers.transport, message)
        else:
            await self._replica_store.send(self._actor_group.host_transfers.transport, message)

    def _holder_of(self, process: ProcessId) -> ProcessId:
        """Find who holds the copy of a process: the process of equal rank of another actor."""
        processes = self._actor_group.processes
        if processes.num_actors == 1:
            return CONTROLLER
        hosts = [
            [self._actor_group.links[p].info.host for p in processes.processes_of(actor)]
            for actor in self._actor_group.actors
        ]
        return processes.process(
            choose_holders(hosts)[processes.actor_of(process)], processes.rank_of(process)
        )

    async def _ask_each(self, processes: Collection[ProcessId], make: Callable[[], Request]) -> None:
        for pending in [self._actor_group.links[process].ask(make(), Done) for process in processes]:
            await pending
