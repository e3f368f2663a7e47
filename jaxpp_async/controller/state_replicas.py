"""backups: when copies of all actors' arrays are taken, who holds them, and the way back to them. For the controller.

A copy is whole once every actor has its own, its holder has it too, and nothing from before it is under way: only then
the one before it is dropped, and the requests before it forgotten. Restarts processes, and replays, not itself.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxpp_async.controller.actor_group import ActorGroup
from jaxpp_async.controller.requests import PendingRequest, RequestLog
from jaxpp_async.controller.stall_detector import PROGRESS_S, SLOW_BYTES_PER_S
from jaxpp_async.controller.startup import all_of
from jaxpp_async.errors import ActorError, ActorUnresponsiveError, RemoteError, StateLostError, TransferError
from jaxpp_async.layout.state_replicas import ReplicaStore, holders
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

_ATTEMPTS, _LOOK_AGAIN_S = 10, 0.1

ROLLBACK_S = 30.0
"""How long going back may take; more by a second for each 50 MB."""

MAX_REMEMBERED_BYTES = 1 << 30
"""With this much host data in remembered requests a copy is taken before it is due."""


class StateReplication:
    """Copies of the state of one mesh, in the memory of its actors.

    Args:
        every: how many steps lie between two copies.
        on_error: told of a copy that does not arrive: a hint that its link is broken.
        patience_s: how long copies may be on their way; more by a second for each 50 MB.
    """

    def __init__(
        self,
        actor_group: ActorGroup,
        request_log: RequestLog,
        *,
        every: int,
        on_error: Callable[[TransferError], None],
        patience_s: float = PROGRESS_S,
    ):
        self._actor_group, self._request_log, self._every = actor_group, request_log, every
        self._on_error, self._patience_s = on_error, patience_s
        self._since = every - 1  # the first one soon: until then all that was ever put is remembered
        self._generations = itertools.count()
        self._generation: int | None = None
        self._contents: Mapping[ProcessId, tuple[ReplicaArray, ...]] = {}
        self._replica_store = ReplicaStore()
        self._tasks = OwnedTasks()
        self._task: asyncio.Task[None] | None = None

    def note_step(self) -> None:
        """A step was just sent. Takes a copy behind it if one is due."""
        self._since += 1
        self.take_if_due()

    def take_if_due(self) -> None:
        """Take a copy now if enough has happened since the last. To be called also ahead of each save: until it is
        over there will be none, and the next save may follow at once."""
        is_due = self._since >= self._every or self._request_log.size_bytes > MAX_REMEMBERED_BYTES
        if is_due and self._task is None and self._request_log.is_open and not self._request_log.has_snapshot:
            self.take()

    def take(self) -> asyncio.Task[None]:
        """Take a copy of everything as it is behind the requests made so far, while later ones go on.

        Returns:
            Done when the copy is whole, or could not be taken.
        """
        self._since = 0
        generation, mark = next(self._generations), self._request_log.mark
        asked = {
            p: self._ask(p, TakeReplica(self._request_log.number(), generation), ReplicaTaken)
            for p in self._actor_group.links
        }
        work = self._unless_it_fails(generation, mark, asked)
        task = self._task = self._tasks.start(f"copy {generation} of the state", work)
        task.add_done_callback(self._ended)
        return task

    async def secure(self) -> None:
        """Wait until a copy has what was read from files: from then on they may go."""
        attempts = 0
        while self._request_log.needs_files:
            await self._request_log.wait_open()
            if self._request_log.has_snapshot:
                await asyncio.sleep(_LOOK_AGAIN_S)  # a save is under way: there is no event for its end
            elif attempts < _ATTEMPTS:
                attempts += 1
                await asyncio.wait([self._task or self.take()])
            else:
                _LOG.warning("no copy has what was restored: keep the files, a restart would read them again")
                return

    def give_up(self) -> None:
        """Ask for nothing more of the copy that is being taken, if there is one."""
        if self._task is not None:
            self._task.cancel()

    async def stop(self) -> None:
        """Give up the copy that is being taken, and wait until that is done."""
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def roll_back(self, lost: Collection[ActorId]) -> None:
        """Have all actors hold what they held at the last whole copy.

        Args:
            lost: actors whose successors have nothing.

        Raises:
            StateLostError: an actor was lost together with the holder of its copy.
            TransferError: a copy does not arrive. ActorUnresponsiveError: an actor does not go back.
        """
        generation, everyone = self._generation, sorted(self._actor_group.links)
        if generation is not None:
            await self._ask_each(everyone, lambda: DropReplicas(self._request_log.number(), generation))
            await self._bring_back(generation, lost)
            # What the lost ones held for others; until it is there again, one more loss would be one too many.
            gone = self._actor_group.processes.of_all(lost)
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

    async def aclose(self) -> None:
        """End whatever is under way."""
        await self._tasks.aclose()

    # ------------------------------------------------------------ taking

    async def _unless_it_fails(
        self, generation: int, mark: int, asked: Mapping[ProcessId, asyncio.Future[Any]]
    ) -> None:
        try:
            await self._finish(generation, mark, asked)
        except TransferError as error:
            self._on_error(error)
        except RemoteError as error:  # such as too little memory; the copy before it still stands
            _LOG.warning(
                "no copy of the state could be taken, the next is tried in %d steps: %s", self._every, error
            )
        except ActorError:  # the mesh has ended, and says why to whoever asks it for something
            _LOG.debug("copy %d of the state was not finished", generation)

    async def _finish(
        self, generation: int, mark: int, asked: Mapping[ProcessId, asyncio.Future[Any]]
    ) -> None:
        kept = {process: (await reply).arrays for process, reply in asked.items()}
        await self._hand_over(generation, kept)
        for reply_handler in self._request_log.unanswered(mark):
            await asyncio.wait([reply_handler.future])
        self._generation, self._contents = generation, kept
        self._request_log.forget_before(mark)
        self._replica_store.forget(generation)
        await self._ask_each(sorted(kept), lambda: DropReplicas(self._request_log.number(), generation))
        _LOG.debug("copy %d of the state is whole", generation)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None

    async def _hand_over(self, generation: int, arrays: Mapping[ProcessId, tuple[ReplicaArray, ...]]) -> None:
        """From processes to their holders."""
        ways = {process: (process, self._holder_of(process)) for process in arrays}
        await self._carry(generation, arrays, ways)

    async def _bring_back(self, generation: int, lost: Collection[ActorId]) -> None:
        """From the holders to the successors of the lost."""
        processes = self._actor_group.processes
        for process in processes.of_all(lost):
            holder, actor = self._holder_of(process), processes.actor_of(process)
            if holder != CONTROLLER and (other := processes.actor_of(holder)) in lost:
                raise StateLostError(
                    f"actors {actor} and {other} were lost together, and with them both copies of actor {actor}'s "
                    "arrays; start again from a checkpoint (mesh.restore)",
                    actor=actor,
                    host=self._actor_group.links[process].info.host,
                )
        ways = {process: (self._holder_of(process), process) for process in processes.of_all(lost)}
        await self._carry(generation, self._contents, ways)

    async def _carry(
        self,
        generation: int,
        arrays: Mapping[ProcessId, tuple[ReplicaArray, ...]],
        ways: Mapping[ProcessId, tuple[ProcessId, ProcessId]],
    ) -> None:
        """Carry copies, all at once.

        Args:
            arrays: what each process's copy has.
            ways: whose copies, each from where to where.

        Raises:
            TransferError: one does not arrive.
        """
        size_bytes = sum(n for of in ways for array in arrays[of] for n in array.shard_bytes)
        arrived: set[ProcessId] = set()

        async def one(of: ProcessId, source: ProcessId, to: ProcessId) -> None:
            number, epoch = self._request_log.number, self._actor_group.epoch
            hold = ReceiveReplica(number(), epoch, generation, of, source, arrays[of])
            lend = SendReplica(number(), epoch, generation, of, to)
            await all_of(
                {to: self._hold(to, hold), source: self._lend(source, lend)},
                f"carry the copy of process {of}",
            )
            arrived.add(of)

        try:
            async with awake_timeout(self._patience_s + size_bytes / SLOW_BYTES_PER_S):
                await all_of({of: one(of, source, to) for of, (source, to) in ways.items()}, "carry copies")
        except TimeoutError:
            of = next(of for of in ways if of not in arrived)
            source, to = ways[of]
            of_actor, *ends = (self._actor_group.processes.actor_of(process) for process in (of, source, to))
            link = (
                "with the controller"
                if CONTROLLER in (source, to)
                else f"between actors {ends[0]} and {ends[1]}"
            )
            what = f"the copy of actor {of_actor}'s arrays does not arrive: the link {link} is broken"
            raise TransferError(
                f"{what}, or slower than 50 MB/s (progress_timeout_s)", actor=ends[1]
            ) from None

    async def _hold(self, process: ProcessId, message: ReceiveReplica) -> None:
        if process == CONTROLLER:
            await self._replica_store.receive(self._actor_group.plane.transport, message)
        else:
            await self._ask(process, message, Done)

    async def _lend(self, process: ProcessId, message: SendReplica) -> None:
        if process == CONTROLLER:
            await self._replica_store.send(self._actor_group.plane.transport, message)
        else:
            await self._ask(process, message, Done)

    def _holder_of(self, process: ProcessId) -> ProcessId:
        """The process of equal rank of another actor."""
        processes = self._actor_group.processes
        if processes.num_actors == 1:
            return CONTROLLER
        hosts = [
            [self._actor_group.links[p].info.host for p in processes.of(actor)]
            for actor in self._actor_group.actors
        ]
        return processes.process(holders(hosts)[processes.actor_of(process)], processes.rank_of(process))

    # ------------------------------------------------------------ asking

    def _ask(self, process: ProcessId, message: Request, expected: type) -> asyncio.Future[Any]:
        """Past the outbox: none of this is to be made again."""
        call = PendingRequest(expected, awaited=False)
        self._actor_group.links[process].request(message, call)
        return call.future

    async def _ask_each(self, processes: Collection[ProcessId], make: Callable[[], Request]) -> None:
        replies = [self._ask(process, make(), Done) for process in processes]
        for reply in replies:
            await reply
