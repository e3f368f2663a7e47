"""Make replicas of the state regularly, store each of them twice, and restore the actors' arrays from them.

A replica of the state is a copy of all actors' arrays in host memory. In a restart, all actors return to the
last replica. Each process copies its own arrays, which are its part of the replica, and sends the part to
another actor (the holder), which stores it as well. The replica is complete once each part has been stored
twice, and all earlier requests have been answered. Only then are the previous replica and the requests from
before the new one forgotten. `recovery` replaces processes and sends requests again.
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
    DropReplicas,
    ReceiveReplica,
    ReplicaArray,
    Request,
    Rollback,
    SendReplica,
    TakeReplica,
)
from jaxpp_async.protocol.task_group import OwnedTasks, all_of, awake_timeout

_LOG = logging.getLogger("jaxpp_async")

_SECURE_ATTEMPTS, _SAVE_POLL_S = 10, 0.1

ROLLBACK_S = 30.0
"""The seconds within which all actors have to restore their arrays; each 50 MB of arrays add a second."""

MAX_REMEMBERED_BYTES = 1 << 30
"""The bytes of host data in remembered requests above which a replica is made before it is due."""


class StateReplication:
    """The component that regularly makes replicas (copies) of all arrays of a mesh's actors, which restarts
    need.

    Each process copies its arrays to its host memory and to the host memory of another actor. If the mesh has
    only one actor, the controller stores the second copy. The time limit of the transfers is `progress_s`
    seconds, and a second more for each 50 MB.

    Args:
        actor_group: the actors' processes.
        request_log: the log of requests, which are forgotten once a later replica is complete.
        options: the number of steps between replicas, and `progress_s`.
        on_error: called with an error if a replica does not arrive, probably because a connection is broken.
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
        # The first replica is made after one step, since until then all host values are remembered.
        self._steps_since = self._every - 1
        self._generations = itertools.count()
        self._generation: int | None = None
        self._contents: Mapping[ProcessId, tuple[ReplicaArray, ...]] = {}
        self._replica_store = ReplicaStore()
        self._tasks = OwnedTasks()
        self._task: asyncio.Task[None] | None = None

    def note_step(self) -> None:
        """Count a step that has been sent; start a replica (copy of the actors' arrays) if one is due."""
        self._steps_since += 1
        self.take_if_due()

    def take_if_due(self) -> None:
        """Start a replica (copy of the actors' arrays) if enough steps or bytes were sent since the last one.

        This must also be called before each save of a checkpoint. Because no replica can start during a save,
        frequent saves could otherwise prevent all replicas.
        """
        is_due = self._steps_since >= self._every or self._request_log.size_bytes > MAX_REMEMBERED_BYTES
        if is_due and self._task is None and self._request_log.is_open and not self._request_log.has_snapshot:
            self.take()

    def take(self) -> asyncio.Task[None]:
        """Start to make a replica (copy of the actors' arrays, kept for restarts), which contains the effects
        of all requests made so far.

        Later requests do not wait for the replica.

        Returns:
            A task that ends when the replica is complete or has failed. The task does not raise a failure;
            the failure is logged or passed to `on_error`.
        """
        self._steps_since = 0
        generation, mark = next(self._generations), self._request_log.new_mark()
        asked = {
            process: link.ask(TakeReplica(generation)) for process, link in self._actor_group.links.items()
        }
        work = self._complete_or_report(generation, mark, asked)
        task = self._task = self._tasks.start(f"replica {generation} of the state", work)
        task.add_done_callback(self._on_ended)
        return task

    async def secure(self) -> None:
        """Wait until a complete replica contains all arrays that were read from files, so that the files may
        be deleted.

        A replica is a copy of the actors' arrays, kept for restarts; without one, a restart would read the
        files again.

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
                _LOG.warning(
                    "no replica has the restored arrays: keep the files, a restart would read them again"
                )
                return

    def cancel(self) -> None:
        """Stop making a replica (copy of the actors' arrays), if that is in progress, so that no more
        requests are sent.
        """
        if self._task is not None:
            self._task.cancel()

    async def aclose(self) -> None:
        """Stop making a replica (copy of the actors' arrays), if that is in progress, and wait until it has
        stopped.

        Another replica may be started later.
        """
        await self._tasks.aclose()

    async def roll_back(self, lost: Collection[ActorId]) -> None:
        """Restore the arrays of all actors from the last complete replica (copy of these arrays), in a
        restart.

        If there is no replica yet, all actors drop their arrays, because the restart then sends again all
        requests since the start.

        Args:
            lost: the actors that have been replaced. Their new processes have neither arrays nor replicas.

        Raises:
            StateLostError: an actor was lost together with the actor that stored the second copy of its
                arrays.
            TransferError: a part of the replica does not arrive.
            ActorUnresponsiveError: actors did not restore their arrays in time.
        """
        generation, everyone = self._generation, sorted(self._actor_group.links)
        if generation is not None:
            await self._ask_each(everyone, DropReplicas(generation))
            await self._send_to_replaced(generation, lost)
            # Restore the second copies that the lost actors stored for others. Until that is done, the loss
            # of one more actor could lose its state.
            gone = self._actor_group.processes.processes_of_all(lost)
            orphans = {p: self._contents[p] for p in everyone if self._holder_of(p) in gone}
            await self._send_to_holders(generation, orphans)
        size_bytes = sum(n for kept in self._contents.values() for array in kept for n in array.shard_bytes)
        try:
            async with awake_timeout(ROLLBACK_S + size_bytes / SLOW_BYTES_PER_S):
                await self._ask_each(everyone, Rollback(generation))
        except TimeoutError:
            raise ActorUnresponsiveError(
                "actors did not go back to the last replica of their arrays in time"
            ) from None

    # ------------------------------------------------------------ making replicas

    async def _complete_or_report(
        self, generation: int, mark: int, asked: Mapping[ProcessId, PendingRequest]
    ) -> None:
        try:
            await self._complete(generation, mark, asked)
        except TransferError as error:
            self._on_error(error)
        except RemoteError as error:  # such as too little memory; the previous replica is still valid
            _LOG.warning(
                "no replica of the state could be made, the next is tried in %d steps: %s", self._every, error
            )
        except ActorError:  # the mesh has ended, and later calls raise the reason
            _LOG.debug("replica %d of the state was not finished", generation)

    async def _complete(self, generation: int, mark: int, asked: Mapping[ProcessId, PendingRequest]) -> None:
        """Wait until a replica of the actors' arrays is complete, then drop the previous replica.

        The requests from before the new replica are forgotten as well.

        Args:
            generation: the number of the replica; each replica has the next number.
            mark: the number that separates the requests before the replica from later ones; see
                `RequestLog.new_mark`.
            asked: for each process, the request that told it to copy its arrays.
        """
        kept = {process: (await reply).arrays for process, reply in asked.items()}
        await self._send_to_holders(generation, kept)
        for reply_handler in self._request_log.unanswered(mark):
            answered = asyncio.Event()
            reply_handler.when_done(answered.set)
            await answered.wait()
        self._generation, self._contents = generation, kept
        self._request_log.forget_before(mark)
        self._replica_store.keep_only(generation)
        await self._ask_each(sorted(kept), DropReplicas(generation))
        _LOG.debug("replica %d of the state is complete", generation)

    def _on_ended(self, _: asyncio.Task[None]) -> None:
        self._task = None

    # ------------------------------------------------------------ moving replicas

    async def _send_to_holders(
        self, generation: int, arrays: Mapping[ProcessId, tuple[ReplicaArray, ...]]
    ) -> None:
        """Send each process's part of a replica to its holder, which is the process that stores a second copy
        of that part.

        Args:
            generation: the number of the replica.
            arrays: the arrays of each process whose part is to be sent.
        """
        routes = {process: (process, self._holder_of(process)) for process in arrays}
        await self._move(generation, arrays, routes)

    async def _send_to_replaced(self, generation: int, lost: Collection[ActorId]) -> None:
        """Send the lost actors' arrays to the new processes of these actors, from the processes that store
        second copies of the arrays.

        Args:
            generation: the number of the replica.
            lost: the actors that have been replaced.

        Raises:
            StateLostError: an actor was lost together with the actor that stored the second copy of its
                arrays.
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
        """Send parts of a replica from process to process, all at the same time.

        Args:
            generation: the number of the replica.
            arrays: the arrays of each process's part.
            routes: a dictionary. Its keys are the processes whose parts are to be sent; each value is a pair
                of the process that sends the part and the process that receives it.

        Raises:
            TransferError: a part does not arrive.
        """
        size_bytes = sum(n for of in routes for array in arrays[of] for n in array.shard_bytes)
        arrived: set[ProcessId] = set()

        async def move(of: ProcessId, source: ProcessId, to: ProcessId) -> None:
            epoch = self._actor_group.epoch
            receive = ReceiveReplica(epoch, generation, of, source, arrays[of])
            send = SendReplica(epoch, generation, of, to)
            ends = {to: self._run_one_end(to, receive), source: self._run_one_end(source, send)}
            await all_of(ends, f"move the replica of process {of}")
            arrived.add(of)

        try:
            async with awake_timeout(self._patience_s + size_bytes / SLOW_BYTES_PER_S):
                await all_of({of: move(of, *route) for of, route in routes.items()}, "move replicas")
        except TimeoutError:
            of = next(of for of in routes if of not in arrived)
            source, to = routes[of]
            owner, *ends = (self._actor_group.processes.actor_of(process) for process in (of, source, to))
            link = (
                "with the controller"
                if CONTROLLER in (source, to)
                else f"between actors {ends[0]} and {ends[1]}"
            )
            what = f"the replica of actor {owner}'s arrays does not arrive: the link {link} is broken"
            raise TransferError(
                f"{what}, or slower than 50 MB/s (progress_timeout_s)", actor=ends[1]
            ) from None

    async def _run_one_end(self, process: ProcessId, message: ReceiveReplica | SendReplica) -> None:
        """Have a process send or receive one part of a replica (copy of the actors' arrays), and wait until
        this is done.

        Args:
            process: the process that sends or receives: an actor process or the controller.
            message: the part and the process at the other end.
        """
        if process != CONTROLLER:
            await self._actor_group.links[process].ask(message)
        elif isinstance(message, ReceiveReplica):
            await self._replica_store.receive(self._actor_group.host_transfers.transport, message)
        else:
            await self._replica_store.send(self._actor_group.host_transfers.transport, message)

    def _holder_of(self, process: ProcessId) -> ProcessId:
        """Return the process that holds the second copy of a process's arrays.

        This is the process of the same rank in another actor, or the controller if there is only one actor.
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

    async def _ask_each(self, processes: Collection[ProcessId], message: Request) -> None:
        for pending in [self._actor_group.links[process].ask(message) for process in processes]:
            await pending
