"""Answer the controller's requests: load programs, run steps, move host values, save and restore.

`Actor` connects the modules of this package. The code that owns the control channel calls `Actor.handle` with
each message, in order of arrival, and transmits each reply that the actor passes to its `send` function. A
request that fails is answered by a `Failed` reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax

from jaxpp_async.actors.array_store import ArrayStore, StoredArray, wait_all
from jaxpp_async.actors.cuda import CudaDevices, open_cuda
from jaxpp_async.actors.device_step_run import DeviceStepRun
from jaxpp_async.actors.execution_plan import BindInput, ExecutionPlan, PostRecv, StartSend
from jaxpp_async.actors.jax_runtime import reserve_port
from jaxpp_async.actors.loaded_program import LoadedProgram, load_program
from jaxpp_async.actors.process_group import DroppedStep, TaskCount, catch_up
from jaxpp_async.actors.profiling import ProfileRequests
from jaxpp_async.actors.server import Handler, SendMessage, failed_reply, handlers_of, handles
from jaxpp_async.actors.setup import ActorResources, make_resources
from jaxpp_async.actors.shards import count_memory
from jaxpp_async.actors.step_queue import StepQueue
from jaxpp_async.actors.step_run import StepEnd, StepRun
from jaxpp_async.base.descriptors import num_descriptors
from jaxpp_async.errors import MeshError, ProtocolError, StepAbortedError
from jaxpp_async.layout.state_replicas import ReplicaStore
from jaxpp_async.program.instructions import CONTROLLER, ActorId, Input, ProcessId, Recv, Send
from jaxpp_async.protocol import messages as m
from jaxpp_async.protocol.actor_info import NoteProgress, ProcessRank, ignore_progress
from jaxpp_async.protocol.messages import OpenTransfer, Reported
from jaxpp_async.protocol.task_group import OwnedTasks
from jaxpp_async.transport.base import Transport
from jaxpp_async.transport.nccl.order import NcclLink
from jaxpp_async.transport.network import Network


class Actor:
    """The component of one actor process that carries out the controller's requests. (An actor may have
    several processes.)

    Args:
        process_id: the number of the process in the mesh; the transport uses the same number.
        make_transport: makes the transport of a given name on a given network.
        send: transmits a reply to the controller, with the request's number; called on the event loop.
        inline: whether the actor runs in the controller's process and shares its JAX.
        note_progress: records the position of a step in its program; called at every instruction.
        open_devices: takes JAX devices and the name of a transport. Returns an interface to the devices if
            these compute asynchronously and the transport uses their memory; otherwise None. Tests pass a
            fake.
    """

    def __init__(
        self,
        process_id: ProcessId,
        *,
        make_transport: Callable[[str, Network], Transport],
        send: SendMessage,
        inline: bool = False,
        note_progress: NoteProgress = ignore_progress,
        open_devices: Callable[[Sequence[Any], str], CudaDevices | None] = open_cuda,
    ):
        self._process_rank = ProcessRank(process_id)  # until `Configure` says how many processes an actor has
        self._cluster: m.Cluster | None = None
        self._task_count = TaskCount()
        self._port: socket.socket | None = None
        self._send = send
        self._workers = ThreadPoolExecutor(
            max(2, os.cpu_count() or 1), thread_name_prefix=f"jaxpp-actor-{process_id}"
        )
        self._store, self._replica_store = ArrayStore(), ReplicaStore()
        self._tasks, self._shared_cache = OwnedTasks(), contextlib.ExitStack()
        self._make_resources = partial(
            make_resources,
            store=self._store,
            replica_store=self._replica_store,
            workers=self._workers,
            spawn=self._spawn,
            make_transport=make_transport,
            open_devices=open_devices,
            note_progress=note_progress,
            shared_cache=self._shared_cache,
            inline=inline,
        )
        self._resources_or_none: ActorResources | None = None
        self._programs: dict[int, LoadedProgram] = {}
        self._steps = StepQueue(
            self.actor_id,
            self._programs,
            prepare=self._prepare_step,
            on_turn=self._begin_transfers,
            complete=self._complete_step,
            send=send,
        )
        self._profile_requests = ProfileRequests(self._workers)
        # those of other components follow when they are made
        self._handlers = handlers_of(self) | handlers_of(self._profile_requests)
        self._closed = False

    def handle(self, message: m.Message, number: int) -> None:
        """Start to carry out one request. Long work continues after this method returns, and its reply
        follows later.

        Args:
            message: the request.
            number: the number of the request, which goes with its reply.
        """
        try:
            if type(message) is m.Step:  # by far the most frequent request
                self._steps.request(message, number)
                return
            reply = self._handler(message)(message)
            if isinstance(reply, Coroutine):
                task = self._spawn(type(message).__name__, self._answer(number, reply))
                # if the actor closes before the task begins, Python would warn of the coroutine
                task.add_done_callback(lambda _: reply.close())
            else:
                self._send(reply, number)
        except Exception as error:  # the request fails, but the actor continues
            self._send(failed_reply(error, step=getattr(message, "step", None)), number)

    @property
    def actor_id(self) -> ActorId:
        """The id of the actor to which this process belongs."""
        return self._process_rank.actor

    @property
    def current_step(self) -> int | None:
        """The number of the user's step that is under way, or None. Any thread may read it."""
        run = self._steps.current
        return m.step_number(run.message.step) if run is not None else None

    async def aclose(self) -> None:
        """Cancel every task and transfer, and close the transport and the threads. A second call does
        nothing."""
        if self._closed:
            return
        self._closed = True
        self._shared_cache.close()
        self._steps.close()
        await self._profile_requests.aclose()
        if self._resources_or_none is not None:
            self._resources_or_none.checkpoints.stop_all()
        await self._tasks.aclose()
        if self._resources_or_none is not None:
            await self._resources_or_none.aclose()
        self._workers.shutdown(wait=False, cancel_futures=True)
        if self._port is not None:
            self._port.close()
        self._store.forget_all()
        self._programs.clear()

    # ------------------------------------------------------------ requests

    def _handler(self, message: m.Message) -> Handler:
        kind = type(message)
        if issubclass(kind, m.Request):
            if kind.rules.ordered and kind.rules.repeated:
                self._steps.check_goes_on()
            if kind in self._handlers:
                return self._handlers[kind]
            if self._resources_or_none is None:
                raise self._unconfigured()
        raise ProtocolError(f"{kind.__name__} is not a request", actor=self.actor_id)

    @handles(m.Reserve)
    def _reserve(self, message: m.Reserve) -> m.Reserved:
        self._port = reserve_port()
        return m.Reserved(self._port.getsockname()[1])

    @handles(m.Configure)
    async def _configure(self, message: m.Configure) -> m.Ready:
        if self._resources_or_none is not None:
            raise ProtocolError("the actor is configured already", actor=self.actor_id)
        if message.cluster is not None:
            self._cluster = message.cluster
            self._process_rank = ProcessRank(self._process_rank.process, message.cluster.size)
            self._steps.actor_id = self.actor_id
        may_begin = self._task_count.begin if message.cluster is not None else None
        self._resources_or_none, ready = await self._make_resources(
            message, self._process_rank, may_begin=may_begin
        )
        self._steps.epoch = message.epoch
        resources = self._resources_or_none
        self._handlers |= handlers_of(resources.checkpoints) | handlers_of(resources.replica_requests)
        return ready

    @handles(m.Admit)
    def _admit(self, message: m.Admit) -> m.Done:
        self._resources.transports.admit(message.addresses)
        return m.Done()

    @handles(m.Store)
    def _store_values(self, message: m.Store) -> Coroutine[Any, Any, m.Done]:
        entries = self._resources.host_values.store_puts(message.puts, self._steps.epoch)
        self._free(message.frees)
        return wait_all(entries)

    @handles(m.Fetch)
    def _fetch(self, message: m.Fetch) -> Coroutine[Any, Any, m.Fetched]:
        return self._resources.host_values.fetch(message, self._steps.epoch)

    @handles(m.TakeReplica)
    def _take_replica(self, message: m.TakeReplica) -> Coroutine[Any, Any, m.ReplicaTaken]:
        return self._resources.replica_requests.take_replica(message, self._steps.arrays_to_free())

    @handles(m.Connect)
    async def _connect(self, message: m.Connect) -> m.Connected:
        self._steps.epoch = message.epoch
        peers = {
            peer: address for peer, address in message.addresses.items() if peer != self._process_rank.process
        }
        await self._resources.transports.connect(peers)
        step_resources, routes = self._resources.step_resources, {}
        if step_resources.device_work is not None:
            routes = {peer: step_resources.transport.routes(peer) for peer in peers if peer != CONTROLLER}
        return m.Connected(routes)

    @handles(m.OfferLinks)
    async def _offer_links(self, message: m.OfferLinks) -> m.LinksOffered:
        transport, loop = self._resources.transports.required_ordered, asyncio.get_running_loop()
        ids = [await loop.run_in_executor(self._workers, transport.make_id) for _ in range(message.num_ids)]
        return m.LinksOffered(transport.address, tuple(ids))

    @handles(m.JoinLinks)
    async def _join_links(self, message: m.JoinLinks) -> m.Done:
        transport = self._resources.transports.required_ordered
        transport.name = lambda process: str(ProcessRank(process, self._process_rank.size))
        for peer, address in message.addresses.items():
            if not transport.is_connected(peer):
                await transport.connect(peer, address)
        for link in message.links:
            # one after the other, in the order of the message: all processes make links in the same order
            await transport.join(
                NcclLink(link.sender, link.receiver, link.from_device, link.to_device), link.unique_id
            )
        return m.Done()

    @handles(m.Load)
    async def _load(self, message: m.Load) -> m.Loaded:
        step_resources = self._resources.step_resources
        program, reply = await load_program(
            message,
            self._resources.executables,
            step_resources.layouts,
            step_resources.pool,
            self._workers,
            self._process_rank,
            partial(self._report_compiled, message.program_id),
        )
        self._programs[message.program_id] = program
        return reply

    def _report_compiled(self, program_id: int, done: int, total: int, cached: int) -> None:
        if not self._closed:
            self._send(m.CompileProgress(program_id, done, total, cached))

    @handles(m.Abort)
    def _abort(self, message: m.Abort) -> Coroutine[Any, Any, m.Done]:
        """Fail all steps that have not finished, and all arrays that are not available yet.

        Returns:
            A coroutine that ends the transfers of these steps and returns the reply.
        """
        self._task_count.stop()
        cause = StepAbortedError(f"aborted: {message.cause}", actor=self.actor_id)
        dropped = self._steps.abort(cause, message.epoch)
        self._store.fail_pending(cause)
        if self._resources_or_none is not None:
            self._resources_or_none.checkpoints.stop_all()
        return self._end_transfers(message, dropped)

    async def _end_transfers(self, message: m.Abort, dropped: Sequence[DroppedStep]) -> m.Done:
        if self._resources_or_none is not None:
            ends = [self._resources_or_none.transports.abort()]
            if self._cluster is not None:
                # Both at the same time: ending a communicator may wait for all work on its device
                # (`cudaFree`), including a task that waits for another process to catch up.
                compute = self._resources_or_none.step_resources.compute
                name = f"epoch {message.epoch}"
                ends.append(catch_up(name, dropped, self._task_count, self._cluster, compute, self._workers))
            outcomes = await asyncio.gather(*ends, return_exceptions=True)
            if failed_ends := [outcome for outcome in outcomes if isinstance(outcome, BaseException)]:
                raise failed_ends[0]
        self._steps.resume()
        return m.Done()

    @handles(m.ResetTransport)
    async def _reset_transport(self, message: m.ResetTransport) -> m.TransportReset:
        await self._resources.transports.aclose()
        resources = self._resources_or_none = self._resources.with_new_transports(self._steps.epoch)
        return m.TransportReset(resources.transports.host.address)

    @handles(m.SendReplica)
    async def _send_replica(self, message: m.SendReplica) -> m.Done:
        await self._replica_store.send(self._resources.transports.host, message)
        return m.Done()

    @handles(m.ReceiveReplica)
    async def _receive_replica(self, message: m.ReceiveReplica) -> m.Done:
        await self._replica_store.receive(self._resources.transports.host, message)
        return m.Done()

    @handles(m.DropReplicas)
    def _drop_replicas(self, message: m.DropReplicas) -> m.Done:
        self._replica_store.keep_only(message.generation)
        return m.Done()

    @handles(m.Report)
    def _report(self, message: m.Report) -> m.Reported:
        return report(self._steps.current)

    # ------------------------------------------------------------ steps

    def _prepare_step(self, message: m.Step, on_end: StepEnd) -> StepRun:
        """Create the `StepRun` of a requested step, with all arrays that the step names as they are at this
        moment.

        If later requests free or replace these arrays, this step is not affected. The arrays that the step
        donates are removed from the actor's array store, and entries for the step's results are added to the
        store.

        Args:
            message: the controller's request.
            on_end: called when the step has finished or failed.
        """
        resources, program = self._resources, self._programs.get(message.program_id)
        if message.frees:
            self._free(message.frees)
        if message.puts:
            resources.host_values.store_puts(message.puts, message.epoch)
        if program is None:
            number = m.step_number(message.step)
            raise ProtocolError(
                f"program {message.program_id} is not loaded", actor=self.actor_id, step=number
            )
        bound, donated = self._bind(program.plan, message)
        for array_id in donated:
            self._store.remove(array_id)
        results: dict[int, StoredArray] = {}
        for command in program.plan.keeps:
            if command.result in message.outputs:
                aval = program.plan.avals[command.buffer]
                results[command.result] = self._store.expect(message.outputs[command.result], aval)
        kind = StepRun if resources.step_resources.device_work is None else DeviceStepRun
        return kind(message, program, resources.step_resources, bound, results, on_end)

    def _bind(self, plan: ExecutionPlan, message: m.Step) -> tuple[dict[int, StoredArray], list[int]]:
        """Look up the arrays that are the arguments of a step, and check their avals.

        Returns:
            A dictionary and a list. The keys of the dictionary are the numbers of the arguments that the
            program uses, and its values are the array store's entries for these arguments. The list contains
            the ids of the arrays that the step donates.
        """
        bound: dict[int, StoredArray] = {}
        donated: list[int] = []
        for command in plan.binds:
            if command.arg not in message.inputs:
                raise ProtocolError(f"step argument {command.arg} names no array", actor=self.actor_id)
            array_id = message.inputs[command.arg]
            entry = bound[command.arg] = self._store.get(array_id)
            wanted = plan.avals[command.buffer]
            layouts = self._resources.step_resources.layouts
            if entry.aval != wanted and not layouts.same(entry.aval, wanted):
                raise ProtocolError(
                    f"step argument {command.arg} is {entry.aval}, the program takes {wanted}",
                    actor=self.actor_id,
                )
            if command.donated:
                donated.append(array_id)
        return bound, donated

    def _begin_transfers(self, run: StepRun) -> None:
        """If the transport must know the order of messages in advance, as NCCL does, give it the order of the
        step's messages."""
        ordered = self._resources.transports.ordered
        if ordered is not None:
            ordered.begin(run.program.order)

    def _complete_step(self, run: StepRun) -> m.StepDone:
        if run.message.frees_after:
            self._free(run.message.frees_after)
        return m.StepDone(run.message.step, run.stats(len(self._store)))

    # ------------------------------------------------------------ helpers

    @property
    def _resources(self) -> ActorResources:
        if self._resources_or_none is None:
            raise self._unconfigured()
        return self._resources_or_none

    def _unconfigured(self) -> MeshError:
        return MeshError(f"actor {self.actor_id} is not configured")

    def _free(self, array_ids: tuple[m.ArrayId, ...]) -> None:
        for array_id in array_ids:
            self._store.remove(array_id)

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.start(f"actor {self.actor_id}: {name}", work)

    async def _answer(self, number: int, work: Coroutine[Any, Any, m.Reply]) -> None:
        try:
            reply = await work
        except Exception as error:  # the request fails, but the actor continues
            if self._closed:
                return
            reply = failed_reply(error)
            # The frames refer to arrays, and to futures that refer to the error. Without this only the
            # garbage collector would free them.
            traceback.clear_frames(error.__traceback__)
        self._send(reply, number)

    @handles(m.Inspect)
    def _count_resources(self, message: m.Inspect) -> m.Inspected:
        """Return what the actor stores and has done.

        Returns:
            A reply with a dictionary. Its keys are names; its values are counts or sizes in bytes.
        """
        resources, run = self._resources, self._steps.current
        live_arrays, live_bytes = count_memory(jax.live_arrays())
        numbers = {
            "live_arrays": live_arrays,
            "live_bytes": live_bytes,
            "store_arrays": len(self._store),
            "store_bytes": self._store.size_bytes,
            "table_bytes": run.executor.table_bytes if run else 0,
            "pending_bytes": run.executor.pending_bytes if run else 0,
            "copied_bytes": self._replica_store.size_bytes,
            "free_receive_buffers": resources.step_resources.pool.free_buffers,
            "free_receive_bytes": resources.step_resources.pool.free_bytes,
            "file_descriptors": num_descriptors(),
            "compilations": resources.executables.compilations,
            "tasks": len(self._tasks),
        }
        return m.Inspected(numbers)


# ---------------------------------------------------------------- a step that does not go on


def report(run: StepRun | None) -> Reported:
    """Return the position of a step in its program, and the transfers of the step that are incomplete, for
    the controller's stall detector.

    Args:
        run: the step under way, or None.

    Returns:
        The reply. If no step is under way, its `step` is None, and it names no transfers.
    """
    if run is None or run.ended:
        return Reported(None, now_s=time.monotonic())
    executor = run.executor
    return Reported(
        step=run.message.step,
        program_id=run.message.program_id,
        instruction=executor.at,
        at=executor.position(),
        running=not executor.starved and not executor.draining,
        transfers_done=run.transfers[1],
        transfers=tuple(_open_transfers(run)),
        now_s=time.monotonic(),
    )


def _open_transfers(run: StepRun) -> list[OpenTransfer]:
    executor, plan, under_way = run.executor, run.program.plan, run.transfers[0]
    unsent = {command.instruction for command in executor.unsent}
    found: list[OpenTransfer] = []
    for command in plan.commands[: executor.at]:
        if isinstance(command, BindInput) and not executor.is_available(command.buffer):
            kind, peer, tag, posted = "argument", CONTROLLER, -1, True
        elif isinstance(command, PostRecv) and command.instruction in under_way:
            kind, peer, tag, posted = "receive", command.from_actor, command.tag, True
        elif isinstance(command, StartSend) and command.instruction in under_way | unsent:
            kind, peer, tag, posted = "send", command.to_actor, command.tag, command.instruction not in unsent
        else:
            continue
        instruction = plan.program.instructions[command.instruction]
        assert isinstance(instruction, Input | Recv | Send)
        needed = executor.draining or command.buffer in executor.awaited
        size_bytes = plan.avals[command.buffer].size_bytes
        found.append(OpenTransfer(kind, instruction.buffer, peer, tag, size_bytes, posted, needed))
    return found
