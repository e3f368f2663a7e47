"""A stand-in for GPUs on a machine without: devices whose work is done some time after the call that asked
for it.

Arrays are those of JAX's CPU devices. What a real device does late, this one does late: a copy between
devices is made when its event happens, and an event happens after a random moment, or when a test says so.
The order of buffers, events and messages is that of a GPU; only the memory is the host's.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpp_async.actors.actor import Actor
from jaxpp_async.actors.cuda import DeviceCopy
from jaxpp_async.protocol.messages import Hardware
from jaxpp_async.transport.memory import MemoryTransport

LONGEST_S = 0.002


class FakeEvent:
    """A `CudaEvent` that happens after `moment()`, which blocks."""

    def __init__(self, arrays: Sequence[jax.Array], copies: Sequence[DeviceCopy], moment: Callable[[], None]):
        self.arrays, self._copies, self._moment = arrays, copies, moment

    def wait(self) -> None:
        self._moment()
        for copy in self._copies:
            ctypes.memmove(copy.target, copy.source, copy.size_bytes)


class FakeDevices:
    """A `CudaDevices`.

    Args:
        moment: called on the watching thread before an event happens; may raise what the device would.

    Attributes:
        entered: the threads that made the first device's context theirs.
        marked: what events were asked for, in order: numbers of arrays, and of copies as negative ones.
        refuses: what asking for a copy, or for an event, raises; None: they are begun.
    """

    refuses: Exception | None = None

    def __init__(self, devices: Sequence[Any], moment: Callable[[], None] | None = None):
        self.devices, self._moment = devices, moment or _a_moment
        self.entered: list[int] = []
        self.marked: list[int] = []

    def enter(self) -> None:
        self.entered.append(threading.get_ident())

    def make_stream(self) -> FakeStream:
        return FakeStream(self)

    def hardware(self) -> Hardware:
        return Hardware("a fake GPU", len(self.devices), 80 << 30, "13.0", "13.1")


class FakeStream:
    """A `CudaStream`."""

    def __init__(self, devices: FakeDevices):
        self._devices = devices

    def record(self, arrays: Sequence[jax.Array]) -> FakeEvent:
        self._refuse()
        for array in arrays:
            assert not array.is_deleted(), "an event after the array was given away"
            array.block_until_ready()  # here, for it may be given away before the event happens
        self._devices.marked.append(len(arrays))
        return FakeEvent(arrays, (), self._devices._moment)

    def copy(self, copies: Sequence[DeviceCopy]) -> FakeEvent:
        self._refuse()
        self._devices.marked.append(-len(copies))
        return FakeEvent((), tuple(copies), self._devices._moment)

    def _refuse(self) -> None:
        if self._devices.refuses is not None:
            raise self._devices.refuses


def _a_moment() -> None:
    time.sleep(random.random() * LONGEST_S)


def open_fake_devices(devices: Sequence[Any], transport: str) -> FakeDevices:
    """For `Actor(open_devices=)`."""
    return FakeDevices(devices)


class DeviceActor(Actor):
    """An actor whose devices compute on their own; for launchers, as `"fake_device:DeviceActor"`."""

    def __init__(self, process_id: int, **seams: Any):
        super().__init__(process_id, open_devices=open_fake_devices, **seams)


class FakeDeviceTransport(MemoryTransport):
    """A transport that takes the memory of fake devices, which is the host's."""

    def post_send(self, memory, peer, tag, done):
        return super().post_send(memory._replace(on_device=False), peer, tag, done)

    def post_recv(self, memory, peer, tag, done):
        return super().post_recv(memory._replace(on_device=False), peer, tag, done)
