"""Copy all actors' arrays regularly, store each copy in another actor's memory, and restore arrays from it.

A restart needs such a copy: all actors return to it. A copy is complete once every actor has made its own
part, another actor (the holder) has that part as well, and all earlier requests have been answered. Only then
are the previous copy and the requests from before the new one forgotten. `recovery` replaces processes and
sends requests again.
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
from jaxpp_async.protocol.task_group import OwnedTasks, all_of, awake_timeout

_LOG = logging.getLogger("jaxpp_async")

_SECURE_ATTEMPTS, _SAVE_POLL_S = 10, 0.1

ROLLBACK_S = 30.0
"""How long going back may take; a second more for each 50 MB."""

MAX_REMEMBERED_BYTES = 1 << 30
"""With this much host data in remembered requests a copy is taken before it is due."""


class StateReplication:
    """The maker of regular copies of one mesh's state (all arrays of its actors), which restarts need.

    Each process's arrays are copied to its own host memory and to that of another actor. With a single actor,
    the controller stores the second copy. A transfer of copies may take `progress_s` seconds, and a second
    more for each 50 MB.

    Args:
        actor_group: the actors' processes.
        request_log: the log of requests, which are forgotten once a later copy is complete.
        options: the number of steps between copies, and `progress_s`.
        on_error: called with the error of a copy that does not arrive: a hint that a connection is broken.
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
        # The first copy is made after one step, since until then all host values are remembered.
        self._steps_since = self._every - 1
        self._generations = itertools.count()
        self._generation: int | None = None
        self._contents: Mapping[ProcessId, tuple[ReplicaArray, ...]] = {}
        self._replica_store = ReplicaStore()
        self._tasks = OwnedTasks()
        self._task: asyncio.Task[None] | None = None

    def note_step(self) -> None:
        """Count a step that has just been sent, and start a copy of the state after it if one is due."""
        self._steps_since += 1
        self.take_if_due()

    def take_if_due(self) -> None:
        """Start a copy of the state if enough steps or bytes of host data were sent since the last one.

        Call this before each save as well: no copy is made during a save, and the next save may follow
        immediately.
        """
        is_due = self._steps_since >= self._every or self._request_log.size_bytes > MAX_REMEMBERED_BYTES
        if is_due and self._task is None and self._request_log.is_open and not self._request_log.has_snapshot:
            self.take()

    def take(self) -> asyncio.Task[None]:
        """Start a copy of the state as it is after all requests made so far. Later requests do not wait for
        it.

        Returns:
            A task that ends when the copy is complete or has failed; it logs or reports a failure itself.
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
        """Wait until a complete copy has all arrays that were read from files, so that the files may be
        deleted.

        If several attempts fail, this logs a warning and returns.
        """
        attempts = 0
        while self._request_log.needs_files:
            await self._request_log.wait_open()
            if self._request_log.has_snapshot:
                await asyncio.sleep(_SAVE_POLL_S)  # the end of a save has no event to wait for
            elif attempts < _SECURE_ATTEMPTS:
                attempts += 1
                await asyncio.wait([self._task or self.take()])
            else:
                _LOG.warning("no copy has what was restored: keep the files, a restart would read them again")
                return

    def cancel(self) -> None:
        """Cancel the copy that is being made, if any, so that it sends no further requests."""
        if self._task is not None:
            self._task.cancel()

    async def aclose(self) -> None:
        """Cancel the copy that is being made, and wait until it has stopped. Another may be started later."""
        await self._tasks.aclose()

    async def roll_back(self, lost: Collection[ActorId]) -> None:
        """Restore the arrays of all actors from the last complete copy.

        If there is no copy yet, all actors drop their arrays.

        Args:
            lost: the actors that have been replaced, whose new processes have no arrays and no copies.

        Raises:
            StateLostError: an actor was lost together with the actor that held its second copy.
            TransferError: a copy does not arrive.
            ActorUnresponsiveError: actors did not restore their arrays in time.
        """
        generation, everyone = self._generation, sorted(self._actor_group.links)
        if generation is not None:
            await self._ask_each(everyone, lambda: DropReplicas(self._request_log.number(), generation))
            await self._bring_back(generation, lost)
            # Restore the second copies that the lost actors stored for others. Until that is done, the loss
            # of one more actor could lose its state.
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
        except RemoteError as error:  # such as too little memory; the previous copy is still valid
            _LOG.warning(
                "no copy of the state could be taken, the next is tried in %d steps: %s", self._every, error
            )
        except ActorError:  # the mesh has ended, and later calls raise the reason
            _LOG.debug("copy %d of the state was not finished", generation)

    async def _complete(self, generation: int, mark: int, asked: Mapping[ProcessId, PendingRequest]) -> None:
        """Wait until a copy is complete, then drop the previous copy and the requests from before the new
        one.

        Args:
            generation: the number of the copy; each copy has the next one.
            mark: the point in the request log at which the copy is made; see `RequestLog.mark`.
            asked: the request to each process to copy its arrays.
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
        """Send each process's copy of its arrays to its holder, the process that stores the second copy.

        Args:
            generation: the number of the copy.
            arrays: the arrays in the copy of each process whose copy is to be sent.
        """
        routes = {process: (process, self._holder_of(process)) for process in arrays}
        await self._move(generation, arrays, routes)

    async def _bring_back(self, generation: int, lost: Collection[ActorId]) -> None:
        """Send the lost actors' arrays from the processes that hold their second copies to the new processes.

        Args:
            generation: the number of the copy.
            lost: the actors that have been replaced.

        Raises:
            StateLostError: an actor was lost together with the actor that held its second copy.
        """
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
        """Send copies of arrays from process to process, all at the same time.

        Args:
            generation: the number of the copy.
            arrays: the arrays in each process's copy.
            routes: for each process whose copy is to be sent, the process that sends it and the one that
                receives it.

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
        """Run the sending or the receiving half of one transfer of a copy, on an actor or in the controller.

        Args:
            process: the process that runs this half.
            message: the request for this half.
        """
        if process != CONTROLLER:
            await self._actor_group.links[process].ask(message, Done)
        elif isinstance(message, ReceiveReplica):
            await self._replica_store.receive(self._actor_group.host_transfers.transport, message)
        else:
            await self._replica_store.send(self._actor_group.host_transfers.transport, message)

    def _holder_of(self, process: ProcessId) -> ProcessId:
        """Return the process that holds the second copy of a process's arrays.

        That is the process of the same rank in another actor, or the controller if there is only one actor.
        """
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
