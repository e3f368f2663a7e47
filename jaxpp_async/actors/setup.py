"""configuring: `Configure` in; JAX, the transport and what works on them out. Once in a process's life.

machine: what an actor's steps run on, all of it in one value. Does nothing itself.

compute: calls in, results on the event loop out. One thread, in order; knows nothing of programs or arrays.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from jaxpp_async.actors.array_store import ArrayStore
from jaxpp_async.actors.checkpoint_requests import CheckpointRequests
from jaxpp_async.actors.cuda import CudaDevice, DeviceWork
from jaxpp_async.actors.executables import Executables
from jaxpp_async.actors.host_values import HostValues
from jaxpp_async.actors.jax_runtime import (
    INLINE_DEVICES,
    Devices,
    package_versions,
    plain_hardware,
    start_devices,
)
from jaxpp_async.actors.receive_buffers import ReceivePool
from jaxpp_async.actors.rollback import Rollbacks
from jaxpp_async.actors.shards import Layouts
from jaxpp_async.layout.state_replicas import ReplicaStore
from jaxpp_async.protocol.actor_info import NoteProgress, ProcessRank, no_progress
from jaxpp_async.protocol.messages import Configure, Ready
from jaxpp_async.transport.base import Transport
from jaxpp_async.transport.nccl.order import ranks_may_share
from jaxpp_async.transport.network import Network, network_by
from jaxpp_async.transport.registry import ActorTransports, open_transports


@dataclass(frozen=True, slots=True)
class ActorResources:
    """What `Configure` makes.

    Args:
        transport_kind, network: for `Renew`.
    """

    executables: Executables
    host_values: HostValues
    machine: StepResources
    snapshots: CheckpointRequests
    rollbacks: Rollbacks
    transports: ActorTransports
    transport_kind: str
    network: Network


async def equip(
    message: Configure,
    process_rank: ProcessRank,
    store: ArrayStore,
    replica_store: ReplicaStore,
    workers: ThreadPoolExecutor,
    *,
    spawn: Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[None]],
    make_transport: Callable[[str, Network], Transport],
    make_door: Callable[[Sequence[Any], str], CudaDevice | None],
    note_progress: NoteProgress,
    may_begin: Callable[[CountedStep], bool] | None,
    inline: bool,
) -> tuple[ActorResources, Ready]:
    """Start JAX and the transport.

    Args:
        message: how. seat: whose they are. store, shelf: its arrays, and its copies of arrays.
        workers: threads for what takes long. spawn: starts an asyncio task that the actor owns, under a name.
        make_transport, make_door, note_progress, inline: see `Actor`. may_begin: see `StepResources`.

    Returns:
        What was made, and the answer to `message`.
    """
    loop = asyncio.get_running_loop()
    devices: Devices = await loop.run_in_executor(workers, partial(start_devices, message, inline=inline))
    door = await loop.run_in_executor(workers, make_door, devices.devices, message.transport)
    if door is not None:
        door.enter()  # on this thread, and before UCX begins: it keeps to the context that it finds
    network = network_by(message.address)
    transports = open_transports(message.transport, message.epoch, network, make_transport)
    if not devices.is_cpu:
        transports.programs.check_device_memory()
    layouts = Layouts(devices)
    shared = inline and len(devices.devices) > 1
    name = f"jaxpp-actor-{process_rank.process}"
    machine = StepResources(
        transport=transports.programs,
        compute=ComputeThread(f"{name}-compute", loop),
        pool=ReceivePool(layouts, on_devices=door is not None),
        layouts=layouts,
        device_lock=INLINE_DEVICES if shared else None,
        note_progress=note_progress,
        may_begin=may_begin,
        device=None if door is None else DeviceWork(door, name, loop),
    )
    resources = ActorResources(
        executables=Executables(devices, workers),
        host_values=HostValues(store, layouts, transports.host, workers, spawn, process_rank),
        machine=machine,
        snapshots=CheckpointRequests(store, layouts, workers),
        rollbacks=Rollbacks(process_rank.process, store, layouts, replica_store, workers),
        transports=transports,
        transport_kind=message.transport,
        network=network,
    )
    names = tuple(f"{device.platform}:{device.id}" for device in devices.devices)
    hardware = plain_hardware(devices) if door is None else door.hardware()
    if (ordered := transports.ordered) is not None:
        shares = ranks_may_share(ordered.version, os.environ)
        hardware = replace(hardware, nccl=ordered.version, nccl_shares=shares)
    return resources, Ready(message.request, transports.host.address, names, package_versions(), hardware)


# ---------------------------------------------------------------- machine


class CountedStep(Protocol):
    """A step that counts its tasks."""

    begun: int


@dataclass(frozen=True, slots=True)
class StepResources:
    """What steps run on.

    Args:
        device_lock: held while executing, where several actors share the devices.
        note_progress: told of every instruction that is taken up or waited at.
        device: tells of the end of work on devices whose memory the transport reads and writes; None: arrays lie in
            host memory, or pass through it.
        may_begin: asked before each task of an actor of several processes, from any thread; False: the step is over.
    """

    transport: Transport
    compute: ComputeThread
    pool: ReceivePool
    layouts: Layouts
    device_lock: threading.Lock | None = None
    note_progress: NoteProgress = no_progress
    device: DeviceWork | None = None
    may_begin: Callable[[CountedStep], bool] | None = None


# ---------------------------------------------------------------- compute

Job = Callable[[], Callable[[], None] | None]
"""Runs on the compute thread and returns what to call on the event loop afterwards, if anything. Must not raise."""


class ComputeThread:
    """Runs jobs one after the other off the event loop. A finished job wakes the loop once.

    Args:
        name: of the thread.
        loop: where results go.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop):
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._loop = loop
        # A daemon: a computation that never returns must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Run `job` after those submitted before it."""
        self._jobs.put(job)

    async def aclose(self, timeout_s: float = 5.0) -> None:
        """End the thread after the jobs submitted so far; leave one behind that does not end in time."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            after = job()
            if after is None:
                del job
                continue
            try:
                self._loop.call_soon_threadsafe(after)
            except RuntimeError:  # the loop has closed: nobody waits for the result any more
                return
            del job, after  # they hold arrays, and the next job may be long in coming
            # Where the loop shares this thread's core, what just ended is sent now, and not a time slice later.
            os.sched_yield()
