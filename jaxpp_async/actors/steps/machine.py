"""machine: what an actor's steps run on, all of it in one value. Does nothing itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from jaxpp_async.actors.devices.compute import ComputeThread
from jaxpp_async.actors.devices.device_work import DeviceWork
from jaxpp_async.actors.processes.progress import NoteProgress, no_progress
from jaxpp_async.actors.values.receive_pool import ReceivePool
from jaxpp_async.actors.values.shards import Layouts
from jaxpp_async.transport.base import Transport


class Begins(Protocol):
    """A step that counts its tasks."""

    begun: int


@dataclass(frozen=True, slots=True)
class Machine:
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
    may_begin: Callable[[Begins], bool] | None = None
