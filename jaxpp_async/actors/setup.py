"""Set up an actor process when its `Configure` request arrives: start JAX and the transport, and make the
objects that use them.

`make_resources` does this once in the life of a process, and returns the objects as `ActorResources`. The
objects that steps use are in its `StepResources`. `JobThread` is a thread that runs long tasks, or
waits for devices.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from msgspec import structs

from jaxpp_async.actors.array_store import ArrayStore
from jaxpp_async.actors.checkpoint_requests import CheckpointRequests
from jaxpp_async.actors.cuda import CudaDevices, DeviceWork
from jaxpp_async.actors.executables import Executables
from jaxpp_async.actors.host_values import HostValues
from jaxpp_async.actors.jax_runtime import (
    INLINE_DEVICES,
    Devices,
    package_versions,
    plain_hardware,
    share_cache,
    start_devices,
)
from jaxpp_async.actors.receive_buffers import ReceivePool
from jaxpp_async.actors.rollback import ReplicaRequests
from jaxpp_async.actors.shards import Layouts
from jaxpp_async.layout.state_replicas import ReplicaStore
from jaxpp_async.protocol.actor_info import NoteProgress, ProcessRank, ignore_progress
from jaxpp_async.protocol.messages import Configure, Ready
from jaxpp_async.transport.base import Transport
from jaxpp_async.transport.nccl.order import ranks_may_share
from jaxpp_async.transport.network import Network, network_by
from jaxpp_async.transport.registry import ActorTransports, open_transports


@dataclass(frozen=True, slots=True)
class ActorResources:
    """The objects that an actor needs once it is configured.

    Args:
        executables: the compiled tasks.
        host_values: stores values from the controller, and returns arrays to it.
        step_resources: the transport, devices and thread that steps use.
        checkpoints: saves arrays to files and restores them.
        replica_requests: copies arrays for restarts and restores them from a copy.
        transports: the transports of programs and of host values.
        open_transports: opens new transports for a given epoch (the mesh's count of aborts).
    """

    executables: Executables
    host_values: HostValues
    step_resources: StepResources
    checkpoints: CheckpointRequests
    replica_requests: ReplicaRequests
    transports: ActorTransports
    open_transports: Callable[[int], ActorTransports]

    def with_new_transports(self, epoch: int) -> ActorResources:
        """Return the same resources with newly opened transports. The old transports must have been closed.

        Args:
            epoch: the mesh's epoch (it counts aborts), to which the new transports belong.
        """
        transports = self.open_transports(epoch)
        self.host_values.transport = transports.host
        step_resources = replace(self.step_resources, transport=transports.programs)
        return replace(self, step_resources=step_resources, transports=transports)

    async def aclose(self) -> None:
        """End every transfer, and close the transports and the threads."""
        await self.transports.aclose()
        await self.step_resources.compute.aclose()
        if self.step_resources.device_work is not None:
            await self.step_resources.device_work.aclose()


async def make_resources(
    message: Configure,
    process_rank: ProcessRank,
    store: ArrayStore,
    replica_store: ReplicaStore,
    workers: ThreadPoolExecutor,
    *,
    spawn: Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[None]],
    make_transport: Callable[[str, Network], Transport],
    open_devices: Callable[[Sequence[Any], str], CudaDevices | None],
    note_progress: NoteProgress,
    may_begin: Callable[[CountedStep], bool] | None,
    shared_cache: contextlib.ExitStack,
    inline: bool,
) -> tuple[ActorResources, Ready]:
    """Start JAX and the transport, and make the objects that an actor needs once it is configured.

    Args:
        message: the controller's options.
        process_rank: the number of this process, and its rank in its actor.
        store: the arrays of the process.
        replica_store: the copies of arrays that the process keeps for restarts.
        workers: threads for long work.
        spawn: takes a name and a coroutine; starts an asyncio task that the actor owns.
        make_transport: makes the transport of a given name on a given network.
        open_devices: opens the devices if they compute asynchronously and the transport uses their memory;
            returns None otherwise.
        note_progress: records the position of a step in its program; called at every instruction.
        may_begin: called before each task in an actor of several processes; False stops the step. None in an
            actor of one process.
        shared_cache: the stack to which this function adds the use of a compilation cache that inline actors
            share with the controller. The caller closes the stack when the actor closes.
        inline: whether the actor runs in the controller's process and shares its JAX.

    Returns:
        The resources, and the reply to `message`.
    """
    loop = asyncio.get_running_loop()
    if inline:
        shared_cache.enter_context(share_cache(message))
    devices: Devices = await loop.run_in_executor(workers, partial(start_devices, message, inline=inline))
    cuda = await loop.run_in_executor(workers, open_devices, devices.devices, message.transport)
    if cuda is not None:
        cuda.enter()  # before UCX starts on this thread, since UCX keeps the current context
    open_anew = partial(
        open_transports, message.transport, network=network_by(message.address), make_transport=make_transport
    )
    transports = open_anew(message.epoch)
    if not devices.is_cpu:
        transports.programs.check_device_memory()
    layouts = Layouts(devices)
    shared = inline and len(devices.devices) > 1

    def start_thread(work: str) -> JobThread:
        return JobThread(f"jaxpp-actor-{process_rank.process}-{work}", loop)

    step_resources = StepResources(
        transport=transports.programs,
        compute=start_thread("compute"),
        pool=ReceivePool(layouts, on_devices=cuda is not None),
        layouts=layouts,
        device_lock=INLINE_DEVICES if shared else None,
        note_progress=note_progress,
        may_begin=may_begin,
        device_work=None if cuda is None else DeviceWork(cuda, start_thread("runs"), start_thread("copies")),
    )
    resources = ActorResources(
        executables=Executables(devices, workers),
        host_values=HostValues(store, layouts, transports.host, workers, spawn, process_rank),
        step_resources=step_resources,
        checkpoints=CheckpointRequests(store, layouts, workers),
        replica_requests=ReplicaRequests(process_rank.process, store, layouts, replica_store, workers),
        transports=transports,
        open_transports=open_anew,
    )
    names = tuple(f"{device.platform}:{device.id}" for device in devices.devices)
    hardware = plain_hardware(devices) if cuda is None else cuda.hardware()
    if (ordered := transports.ordered) is not None:
        shares = ranks_may_share(ordered.version, os.environ)
        hardware = structs.replace(hardware, nccl=ordered.version, nccl_shares=shares)
    return resources, Ready(transports.host.address, names, package_versions(), hardware)


class CountedStep(Protocol):
    """The interface of a step that counts how many of its tasks have begun."""

    begun: int


@dataclass(frozen=True, slots=True)
class StepResources:
    """The transport, devices and thread that steps use.

    Args:
        transport: carries the messages of programs.
        compute: the thread that runs tasks off the event loop.
        pool: the source of receive buffers.
        layouts: the distributions of arrays over this process's devices.
        device_lock: if several actors share the devices, a lock to hold while an executable runs; otherwise
            None.
        note_progress: records the position of a step in its program; called at every instruction that a step
            begins or waits at.
        device_work: reports the end of asynchronous work on devices whose memory the transport reads and
            writes. None where arrays are in host memory or pass through it.
        may_begin: called before each task in an actor of several processes, from any thread; False stops the
            step. None in an actor of one process.
    """

    transport: Transport
    compute: JobThread
    pool: ReceivePool
    layouts: Layouts
    device_lock: threading.Lock | None = None
    note_progress: NoteProgress = ignore_progress
    device_work: DeviceWork | None = None
    may_begin: Callable[[CountedStep], bool] | None = None


Job = Callable[[], Callable[[], object] | None]
"""A function that runs on a `JobThread` and returns the function to call on the event loop afterwards, or
None. A job must not raise an exception."""


class JobThread:
    """A thread that runs jobs one after the other. If a job returns a function, the event loop then calls
    that function.

    Args:
        name: the name of the thread.
        loop: the event loop.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop):
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._loop = loop
        # A daemon: a computation that never returns must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Have the thread run `job` after all jobs that were submitted before."""
        self._jobs.put(job)

    async def aclose(self, timeout_s: float = 5.0) -> None:
        """End the thread after the jobs submitted so far. If it does not end within `timeout_s` seconds, it
        is abandoned."""
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
            except RuntimeError:  # the loop has closed: nothing waits for the result any more
                return
            del job, after  # they refer to arrays, and the next job may come much later
            # If the event loop shares this thread's core, it can now send the results without waiting for the
            # end of the thread's time slice.
            os.sched_yield()
