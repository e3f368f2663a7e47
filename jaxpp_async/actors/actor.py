"""actor: requests in, replies out; the asyncio shell around executor, devices, store and transport.

Knows nothing of frames or sockets: whoever owns the control channel calls `handle` with each message, in order, and
carries what `send` is given. A request's failure is a `Failed` reply, never an exception here.

numbers: what an actor holds and has done, counted, for whoever asks (`Inspect`). Reads only.

failed_reply: an exception in, the `Failed` reply that tells the controller of it out. No I/O.

stuck_report: the step that an actor is at in, `Reported` out: where it is and which of its data is not there. Reads
only; it is asked when a step does not go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax

from jaxpp_async.actors.array_store import ArrayStore, StoredArray, wait_all
from jaxpp_async.actors.cuda import CudaDevice, open_door
from jaxpp_async.actors.execution_plan import BindInput, ExecutionPlan, PostRecv, StartSend
from jaxpp_async.actors.executor import Executor
from jaxpp_async.actors.jax_runtime import reserve_port, share_cache
from jaxpp_async.actors.loaded_program import LoadedProgram, load_program
from jaxpp_async.actors.process_group import DroppedStep, TaskCount, catch_up
from jaxpp_async.actors.server import failed
from jaxpp_async.actors.setup import ActorResources, equip
from jaxpp_async.actors.shards import memory_held
from jaxpp_async.actors.step_run import DeviceStepRun, StepFailure, StepRun
from jaxpp_async.base.descriptors import num_descriptors
from jaxpp_async.errors import MeshError, ProtocolError, StepAbortedError
from jaxpp_async.layout.state_replicas import ReplicaStore
from jaxpp_async.program.instructions import CONTROLLER, ActorId, Input, ProcessId, Recv, Send
from jaxpp_async.protocol import messages as m
from jaxpp_async.protocol.actor_info import NoteProgress, ProcessRank, no_progress
from jaxpp_async.protocol.messages import OpenTransfer, Reported
from jaxpp_async.protocol.task_group import OwnedTasks
from jaxpp_async.transport.base import Transport
from jaxpp_async.transport.nccl.order import NcclLink
from jaxpp_async.transport.network import Network
from jaxpp_async.transport.registry import open_transports

REPLIES_KEPT = 16
"""How many steps' replies are kept for requests that come twice."""

StepKey = tuple[int, int]


class Actor:
    """One actor, or one of the processes that are it.

    Args:
        process_id: its number in the mesh, also as a peer of the transport.
        make_transport: from a transport's name, and a network, to a transport.
        send: takes replies; called on the event loop.
        inline: the actor shares the controller's process and its JAX.
        note_progress: told of every instruction.
        make_door: (devices, transport name) to the door to devices that compute on their own; for tests.
    """

    def __init__(
        self,
        process_id: ProcessId,
        *,
        make_transport: Callable[[str, Network], Transport],
        send: Callable[[m.Message], None],
        inline: bool = False,
        note_progress: NoteProgress = no_progress,
        make_door: Callable[[Sequence[Any], str], CudaDevice | None] = open_door,
    ):
        self._process_rank = ProcessRank(process_id)  # until `Configure` tells of others
        self._cluster: m.Cluster | None = None
        self._tally = TaskCount()
        self._failed: StepRun | None = None  # and the programs of steps that were refused since
        self._refused: list[LoadedProgram] = []
        self._port: socket.socket | None = None
        self._make_transport, self._send, self._inline = make_transport, send, inline
        self._note_progress, self._make_door = note_progress, make_door
        self._workers = ThreadPoolExecutor(
            max(2, os.cpu_count() or 1), thread_name_prefix=f"jaxpp-actor-{process_id}"
        )
        self._equipment_or_none: ActorResources | None = None
        self._store, self._replica_store = ArrayStore(), ReplicaStore()
        self._programs: dict[int, LoadedProgram] = {}
        self._tasks, self._shared = OwnedTasks(), contextlib.ExitStack()
        self._epoch = 0
        self._last_step = -1
        self._broken: str | None = None
        self._queue: deque[StepRun] = deque()
        self._current: StepRun | None = None
        self._replies: OrderedDict[StepKey, m.StepDone | m.Failed] = OrderedDict()
        self._under_way: dict[StepKey, list[int]] = {}
        self._closed = False

    def handle(self, message: m.Message) -> None:
        """Take up one request. Returns before long work is done; that replies later."""
        try:
            self._take_up(message)
        except Exception as error:  # a request that cannot be taken up fails; the actor goes on
            self._send(failed(getattr(message, "request", None), error, step=getattr(message, "step", None)))

    @property
    def actor_id(self) -> ActorId:
        """Which actor it is, or is a part of."""
        return self._process_rank.actor

    @property
    def current_step(self) -> int | None:
        """The number of the user's step under way. Any thread may ask."""
        run = self._current
        return m.step_number(run.message.step) if run is not None else None

    async def aclose(self) -> None:
        """End every task and transfer, the transport and the threads. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._shared.close()
        if self._equipment_or_none is not None:
            self._equipment_or_none.snapshots.stop_all()
        await self._tasks.aclose()
        self._queue.clear()
        if self._current is not None:
            self._current.ended = True
        if self._equipment_or_none is not None:
            await self._equipment_or_none.transports.aclose()
            await self._equipment_or_none.machine.compute.aclose()
            if (device := self._equipment_or_none.machine.device) is not None:
                await device.aclose()
        self._workers.shutdown(wait=False, cancel_futures=True)
        if self._port is not None:
            self._port.close()
        self._store.forget_all()
        self._programs.clear()

    # ------------------------------------------------------------ requests

    def _take_up(self, message: m.Message) -> None:
        match message:
            case m.Step():  # first: nothing else comes as often
                self._step(message)
            case m.Reserve():
                self._port = reserve_port()
                self._send(m.Reserved(message.request, self._port.getsockname()[1]))
            case m.Configure():
                self._answer("configure", message.request, self._configure(message))
            case m.Admit():
                self._answer("admit", message.request, self._admit(message))
            case m.Connect():
                self._answer("connect", message.request, self._connect(message))
            case m.OfferLinks():
                self._answer("offer links", message.request, self._offer_links(message))
            case m.JoinLinks():
                self._answer("join links", message.request, self._join_links(message))
            case m.Load():
                self._answer("load", message.request, self._load(message))
            case m.Store():
                entries = self._resources.host_values.take(message.puts, self._epoch)
                self._free(message.frees)
                self._answer("store", message.request, self._stored(message.request, entries))
            case m.Fetch():
                looks = self._resources.host_values.look_at(message)
                self._answer(
                    "fetch", message.request, self._resources.host_values.fetch(message, looks, self._epoch)
                )
            case m.BeginSnapshot():
                self._answer("take", message.request, self._resources.snapshots.take(message))
            case m.WriteFile():
                self._answer("write", message.request, self._resources.snapshots.write(message))
            case m.CheckFiles():
                self._answer("check", message.request, self._resources.snapshots.check(message))
            case m.Sweep():
                self._answer("sweep", message.request, self._resources.snapshots.sweep(message))
            case m.ReadFile():
                self._answer("read", message.request, self._resources.snapshots.read(message))
            case m.Abort():
                self._abort(message)
            case m.ResetTransport():
                self._answer("renew", message.request, self._renew(message))
            case m.TakeReplica():
                self._answer(
                    "keep", message.request, self._resources.rollbacks.keep(message, self._leaving())
                )
            case m.SendReplica():
                self._answer("lend", message.request, self._lend(message))
            case m.ReceiveReplica():
                self._answer("hold", message.request, self._hold(message))
            case m.DropReplicas():
                self._replica_store.forget(message.generation)
                self._send(m.Done(message.request))
            case m.Rollback():
                self._answer("roll back", message.request, self._resources.rollbacks.roll_back(message))
            case m.Inspect():
                self._send(m.Inspected(message.request, self._numbers()))
            case m.Report():
                self._send(report(message.request, self._current))
            case m.Shutdown():
                self._answer("shutdown", message.request, self._shutdown(message))
            case _:
                raise ProtocolError(f"{type(message).__name__} is not a request", actor=self.actor_id)

    async def _configure(self, message: m.Configure) -> m.Ready:
        if self._equipment_or_none is not None:
            raise ProtocolError("the actor is configured already", actor=self.actor_id)
        if message.cluster is not None:
            self._cluster, self._process_rank = (
                message.cluster,
                ProcessRank(self._process_rank.process, message.cluster.size),
            )
        if self._inline:
            self._shared.enter_context(share_cache(message))
        self._equipment_or_none, ready = await equip(
            message,
            self._process_rank,
            self._store,
            self._replica_store,
            self._workers,
            spawn=self._spawn,
            make_transport=self._make_transport,
            make_door=self._make_door,
            note_progress=self._note_progress,
            may_begin=self._tally.begin if message.cluster is not None else None,
            inline=self._inline,
        )
        self._epoch = message.epoch
        return ready

    async def _stored(self, request: int, entries: Sequence[StoredArray]) -> m.Done:
        await wait_all(entries)
        return m.Done(request)

    async def _admit(self, message: m.Admit) -> m.Done:
        self._resources.transports.admit(message.addresses)
        return m.Done(message.request)

    async def _connect(self, message: m.Connect) -> m.Connected:
        self._epoch = message.epoch
        peers = {
            peer: address for peer, address in message.addresses.items() if peer != self._process_rank.process
        }
        await self._resources.transports.connect(peers)
        machine, routes = self._resources.machine, {}
        if machine.device is not None:
            routes = {peer: machine.transport.routes(peer) for peer in peers if peer != CONTROLLER}
        return m.Connected(message.request, routes)

    async def _offer_links(self, message: m.OfferLinks) -> m.LinksOffered:
        plane, loop = self._resources.transports.required_ordered, asyncio.get_running_loop()
        ids = [await loop.run_in_executor(self._workers, plane.make_id) for _ in range(message.num_ids)]
        return m.LinksOffered(message.request, plane.address, tuple(ids))

    async def _join_links(self, message: m.JoinLinks) -> m.Done:
        plane = self._resources.transports.required_ordered
        plane.name = lambda process: str(ProcessRank(process, self._process_rank.size))
        for peer, address in message.addresses.items():
            if not plane.is_connected(peer):
                await plane.connect(peer, address)
        for link in message.links:
            # one by one, in the order of the message: everyone makes links in the same order
            await plane.join(
                NcclLink(link.sender, link.receiver, link.from_device, link.to_device), link.unique_id
            )
        return m.Done(message.request)

    async def _load(self, message: m.Load) -> m.Loaded:
        machine = self._resources.machine
        program, reply = await load_program(
            message,
            self._resources.executables,
            machine.layouts,
            machine.pool,
            self._workers,
            self._process_rank,
        )
        self._programs[message.program_id] = program
        return reply

    async def _shutdown(self, message: m.Shutdown) -> m.Done:
        await self.aclose()
        return m.Done(message.request)

    # ------------------------------------------------------------ steps

    def _step(self, message: m.Step) -> None:
        key = (message.epoch, message.step)
        if key in self._replies:
            self._send(replace(self._replies[key], request=message.request))
            return
        if key in self._under_way:
            self._under_way[key].append(message.request)
            return
        self._refuse_wrong(message)
        self._last_step = message.step
        self._under_way[key] = [message.request]
        try:
            run = self._prepare(message)
        except Exception as error:  # the step cannot start: that is its outcome
            self._conclude(message, failed(message.request, error, step=message.step))
            return
        self._queue.append(run)
        self._next_step()

    def _refuse_wrong(self, message: m.Step) -> None:
        if message.epoch == self._epoch and message.step > self._last_step and self._broken is None:
            return
        where: dict[str, Any] = {"actor": self.actor_id, "step": m.step_number(message.step)}
        what = m.step_text(message.step)
        if message.epoch != self._epoch:
            raise ProtocolError(f"{what} is of epoch {message.epoch}, the actor is in {self._epoch}", **where)
        if message.step <= self._last_step:
            last = m.step_text(self._last_step)
            raise ProtocolError(f"{what} comes after {last} and its reply is no longer kept", **where)
        if self._broken is not None:
            if message.program_id in self._programs:
                self._refused.append(self._programs[message.program_id])
            raise StepAbortedError(f"not started: {self._broken}", **where)

    def _prepare(self, message: m.Step) -> StepRun:
        """Take hold of everything the step names, as things stand now: later requests may free it."""
        resources, program = self._resources, self._programs.get(message.program_id)
        if message.frees:
            self._free(message.frees)
        if message.puts:
            resources.host_values.take(message.puts, message.epoch)
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
        kind = StepRun if resources.machine.device is None else DeviceStepRun
        return kind(message, program, resources.machine, bound, results, self._step_ended)

    def _bind(self, plan: ExecutionPlan, message: m.Step) -> tuple[dict[int, StoredArray], list[int]]:
        bound: dict[int, StoredArray] = {}
        donated: list[int] = []
        for command in plan.binds:
            if command.arg not in message.inputs:
                raise ProtocolError(f"step argument {command.arg} names no array", actor=self.actor_id)
            array_id = message.inputs[command.arg]
            entry = bound[command.arg] = self._store.get(array_id)
            wanted = plan.avals[command.buffer]
            if entry.aval != wanted and not self._resources.machine.layouts.same(entry.aval, wanted):
                raise ProtocolError(
                    f"step argument {command.arg} is {entry.aval}, the program takes {wanted}",
                    actor=self.actor_id,
                )
            if command.donated:
                donated.append(array_id)
        return bound, donated

    def _next_step(self) -> None:
        while self._current is None and self._queue and self._broken is None:
            self._current = run = self._queue.popleft()
            ordered = self._resources.transports.ordered
            try:
                if ordered is not None:
                    ordered.begin(run.program.order)
            except Exception as error:  # the step cannot transfer: that is its outcome
                run.fail(error)
                continue
            run.start()

    def _step_ended(self, run: StepRun, failure: StepFailure | None) -> None:
        message = run.message
        if failure is not None:
            # Transfers stay open until the controller's Abort: ending them here would fail the peers' steps with
            # transfer errors that could reach the controller before their cause.
            if self._broken is None:
                self._broken = f"{m.step_text(message.step)} failed on actor {self.actor_id}"
                self._failed = run
            reply = failed(message.request, failure.error, step=message.step, instruction=failure.instruction)
        else:
            if message.frees_after:
                self._free(message.frees_after)
            reply = m.StepDone(message.request, message.step, run.stats(len(self._store)))
        if run is self._current:
            self._current = None
        if self._queue:
            # A step of nothing but local instructions can end inside `start`; the loop there goes on with the next.
            # Asked for before the reply, behind which an actor without a step stays awake.
            asyncio.get_running_loop().call_soon(self._next_step)
        self._conclude(message, reply)

    def _conclude(self, message: m.Step, reply: m.StepDone | m.Failed) -> None:
        key = (message.epoch, message.step)
        try:
            for request in self._under_way.pop(key, ()):
                if not self._closed:  # what ends because the actor does is no failure of its own
                    self._send(reply if request == reply.request else replace(reply, request=request))
        finally:  # behind the reply, for which somebody waits
            self._replies[key] = reply
            if len(self._replies) > REPLIES_KEPT:
                self._replies.popitem(last=False)

    def _abort(self, message: m.Abort) -> None:
        self._tally.stop()
        self._broken = f"aborted: {message.cause}"
        dropped = [self._current] if self._current is not None else []
        dropped += self._queue
        self._queue.clear()
        begun = [self._failed, *dropped] if self._failed is not None else dropped
        steps = [DroppedStep(run.program, run.begun) for run in begun] + [
            DroppedStep(p, 0) for p in self._refused
        ]
        cause = StepAbortedError(self._broken, actor=self.actor_id)
        for run in dropped:
            run.fail(cause)
        self._store.fail_pending(cause)
        if self._equipment_or_none is not None:
            self._equipment_or_none.snapshots.stop_all()
        self._epoch, self._last_step = message.epoch, -1
        self._answer("abort", message.request, self._end_transfers(message, steps))

    async def _end_transfers(self, message: m.Abort, dropped: Sequence[DroppedStep]) -> m.Done:
        if self._equipment_or_none is not None:
            ends = [self._equipment_or_none.transports.abort()]
            if self._cluster is not None:
                # Side by side: ending a communicator may wait for all that its device does (`cudaFree`), among which
                # may be a task that waits for another process to catch up.
                compute = self._equipment_or_none.machine.compute
                name = f"epoch {message.epoch}"
                ends.append(catch_up(name, dropped, self._tally, self._cluster, compute, self._workers))
            outcomes = await asyncio.gather(*ends, return_exceptions=True)
            if failed_ends := [outcome for outcome in outcomes if isinstance(outcome, BaseException)]:
                raise failed_ends[0]
        self._failed, self._refused = None, []
        self._broken = None
        return m.Done(message.request)

    async def _renew(self, message: m.ResetTransport) -> m.TransportReset:
        resources = self._resources
        await resources.transports.aclose()
        transports = open_transports(
            resources.transport_kind, self._epoch, resources.network, self._make_transport
        )
        resources.host_values.transport = transports.host
        machine = replace(resources.machine, transport=transports.programs)
        self._equipment_or_none = replace(resources, machine=machine, transports=transports)
        return m.TransportReset(message.request, transports.host.address)

    async def _lend(self, message: m.SendReplica) -> m.Done:
        await self._replica_store.lend(self._resources.transports.host, message)
        return m.Done(message.request)

    async def _hold(self, message: m.ReceiveReplica) -> m.Done:
        await self._replica_store.hold(self._resources.transports.host, message)
        return m.Done(message.request)

    # ------------------------------------------------------------ the rest

    def _leaving(self) -> set[m.ArrayId]:
        """Arrays that go when the steps under way are done."""
        runs = [*self._queue, *([self._current] if self._current is not None else [])]
        return {array_id for run in runs for array_id in run.message.frees_after}

    @property
    def _resources(self) -> ActorResources:
        if self._equipment_or_none is None:
            raise MeshError(f"actor {self.actor_id} is not configured")
        return self._equipment_or_none

    def _free(self, array_ids: tuple[m.ArrayId, ...]) -> None:
        for array_id in array_ids:
            self._store.remove(array_id)

    def _numbers(self) -> dict[str, int]:
        executor = self._current.executor if self._current else None
        return numbers(
            self._resources, self._store, self._replica_store, executor, num_tasks=len(self._tasks)
        )

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.start(f"actor {self.actor_id}: {name}", work)

    def _answer(self, name: str, request: int, work: Coroutine[Any, Any, m.Reply]) -> None:
        task = self._spawn(name, self._reply(request, work))
        # not begun if the actor closes at once: Python would warn
        task.add_done_callback(lambda _: work.close())

    async def _reply(self, request: int, work: Coroutine[Any, Any, m.Reply]) -> None:
        try:
            reply = await work
        except Exception as error:  # a request's failure is its reply
            if self._closed:
                return
            reply = failed(request, error)
        self._send(reply)


# ---------------------------------------------------------------- numbers


def numbers(
    resources: ActorResources,
    store: ArrayStore,
    replica_store: ReplicaStore,
    executor: Executor | None,
    *,
    num_tasks: int,
) -> dict[str, int]:
    """Counts, and sizes in bytes, by name.

    Args:
        equipment, store, shelf: what the actor has. executor: of the step under way.
        num_tasks: how many asyncio tasks the actor owns.
    """
    live_arrays, live_bytes = memory_held(jax.live_arrays())
    return {
        "live_arrays": live_arrays,
        "live_bytes": live_bytes,
        "store_arrays": len(store),
        "store_bytes": store.size_bytes,
        "table_bytes": executor.table_bytes if executor else 0,
        "pending_bytes": executor.pending_bytes if executor else 0,
        "copied_bytes": replica_store.size_bytes,
        "free_receive_buffers": resources.machine.pool.free_buffers,
        "free_receive_bytes": resources.machine.pool.free_bytes,
        "file_descriptors": num_descriptors(),
        "compilations": resources.executables.compilations,
        "tasks": num_tasks,
    }


# ---------------------------------------------------------------- stuck report


def report(request: int, run: StepRun | None) -> Reported:
    """The answer to `Report`.

    Args:
        run: the step under way, if there is one.
    """
    if run is None or run.ended:
        return Reported(request, None, now_s=time.monotonic())
    executor = run.executor
    return Reported(
        request=request,
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
    executor, plan, under_way = run.executor, run.plan, run.transfers[0]
    unsent = {command.instruction for command in executor.unsent}
    found: list[OpenTransfer] = []
    for command in plan.commands[: executor.at]:
        if isinstance(command, BindInput) and not executor.is_here(command.buffer):
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
