"""configuring: `Configure` in; JAX, the transport and what works on them out. Once in a process's life."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxpp_async.actors.devices.compute import ComputeThread
from jaxpp_async.actors.devices.cuda import DeviceDoor
from jaxpp_async.actors.devices.device_work import DeviceWork
from jaxpp_async.actors.devices.starting import INLINE_DEVICES, Devices, package_versions, plain_hardware, start_devices
from jaxpp_async.actors.files.snapshots import Snapshots
from jaxpp_async.actors.messages import Configure, Ready
from jaxpp_async.actors.processes.progress import NoteProgress
from jaxpp_async.actors.processes.seats import Seat
from jaxpp_async.actors.restarts.copies import Shelf
from jaxpp_async.actors.restarts.rollback import Rollbacks
from jaxpp_async.actors.steps.executables import Executables
from jaxpp_async.actors.steps.machine import Begins, Machine
from jaxpp_async.actors.store import Store
from jaxpp_async.actors.values.host_values import HostValues
from jaxpp_async.actors.values.receive_pool import ReceivePool
from jaxpp_async.actors.values.shards import Layouts
from jaxpp_async.transport.base import Transport
from jaxpp_async.transport.nccl.plan import ranks_may_share
from jaxpp_async.transport.network import Network, network_by
from jaxpp_async.transport.planes import Planes, open_planes
from jaxpp_async.transport.ucx.context import check_takes_gpu_memory
from jaxpp_async.transport.ucx.transport import UCXTransport


@dataclass(frozen=True, slots=True)
class Equipment:
    """What `Configure` makes.

    Args:
        transport_kind, network: for `Renew`.
    """

    executables: Executables
    host_values: HostValues
    machine: Machine
    snapshots: Snapshots
    rollbacks: Rollbacks
    planes: Planes
    transport_kind: str
    network: Network


async def equip(
    message: Configure,
    seat: Seat,
    store: Store,
    shelf: Shelf,
    workers: ThreadPoolExecutor,
    *,
    spawn: Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[None]],
    make_transport: Callable[[str, Network], Transport],
    make_door: Callable[[Sequence[Any], str], DeviceDoor | None],
    note_progress: NoteProgress,
    may_begin: Callable[[Begins], bool] | None,
    inline: bool,
) -> tuple[Equipment, Ready]:
    """Start JAX and the transport.

    Args:
        message: how. seat: whose they are. store, shelf: its arrays, and its copies of arrays.
        workers: threads for what takes long. spawn: starts an asyncio task that the actor owns, under a name.
        make_transport, make_door, note_progress, inline: see `Actor`. may_begin: see `Machine`.

    Returns:
        What was made, and the answer to `message`.
    """
    loop = asyncio.get_running_loop()
    devices: Devices = await loop.run_in_executor(workers, partial(start_devices, message, inline=inline))
    door = await loop.run_in_executor(workers, make_door, devices.devices, message.transport)
    if door is not None:
        door.enter()  # on this thread, and before UCX begins: it keeps to the context that it finds
    network = network_by(message.address)
    planes = open_planes(message.transport, message.epoch, network, make_transport)
    if not devices.is_cpu and isinstance(planes.programs, UCXTransport):
        check_takes_gpu_memory(planes.programs.resources)
    layouts = Layouts(devices)
    shared = inline and len(devices.devices) > 1
    name = f"jaxpp-actor-{seat.process}"
    machine = Machine(
        transport=planes.programs,
        compute=ComputeThread(f"{name}-compute", loop),
        pool=ReceivePool(layouts, on_devices=door is not None),
        layouts=layouts,
        device_lock=INLINE_DEVICES if shared else None,
        note_progress=note_progress,
        may_begin=may_begin,
        device=None if door is None else DeviceWork(door, name, loop),
    )
    equipment = Equipment(
        executables=Executables(devices, workers),
        host_values=HostValues(store, layouts, planes.host, workers, spawn, seat),
        machine=machine,
        snapshots=Snapshots(store, layouts, workers),
        rollbacks=Rollbacks(seat.process, store, layouts, shelf, workers),
        planes=planes,
        transport_kind=message.transport,
        network=network,
    )
    names = tuple(f"{device.platform}:{device.id}" for device in devices.devices)
    hardware = plain_hardware(devices) if door is None else door.hardware()
    if (ordered := planes.ordered) is not None:
        shares = ranks_may_share(ordered.version, os.environ)
        hardware = replace(hardware, nccl=ordered.version, nccl_shares=shares)
    return equipment, Ready(message.request, planes.host.address, names, package_versions(), hardware)
