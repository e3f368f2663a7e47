"""cuda: the one door to CUDA beside JAX's own: when values are computed, copies between devices, what devices are.

In: arrays of one actor. Out: marks, which can be waited for, and a `Hardware`. It allocates no memory, and imports CuPy
only where an actor has GPUs. `CudaDevice` says what is needed; tests walk the same paths through a fake one, on CPUs.

JAX does not give its streams away. `array.__dlpack__(stream=s)` makes stream `s` wait until the array is computed, and
an event recorded on `s` after it happens then. A capsule is dropped at once: JAX donates no array that has one.

device_work: what was given to devices in, calls on the event loop when it has been done out. Decides nothing.

A GPU computes after a call has returned. Nobody asks it again and again, and the event loop never waits: a thread
sleeps until a mark is reached, and wakes the loop once. Runs and copies have a thread and a lane each, since a copy
must not be heard of only after a run that was called before it.
"""

from __future__ import annotations

import asyncio
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import jax

from jaxpp_async.base.gpu_inventory import VISIBLE, is_part, memory_fraction, read_visible
from jaxpp_async.base.install_hints import cuda_install, jax_cuda_majors
from jaxpp_async.errors import InstallError
from jaxpp_async.protocol.messages import Hardware
from jaxpp_async.transport.registry import kind_of

_NO_DLPACK = ("float8", "float4", "float6", "int2", "int4", "uint2", "uint4")
"""Types that not every JAX can say to others; such an array is waited for by JAX itself."""


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """Bytes to copy, within a device or between two of this process.

    Args:
        target, source: addresses.
        target_device, source_device: as JAX knows them.
    """

    target: int
    target_device: Any
    source: int
    source_device: Any
    size_bytes: int


class CudaEvent(Protocol):
    """A point in the devices' work."""

    def wait(self) -> None:
        """Block this thread, without the GIL, until all that came before has happened.

        Raises:
            RuntimeError (or a subclass): the device failed.
        """
        ...


class CudaStream(Protocol):
    """A place in which marks stand one after the other; what is in one lane does not wait for what is in another. One
    thread at a time puts marks into a lane."""

    def mark(self, arrays: Sequence[jax.Array]) -> CudaEvent:
        """The point at which these arrays are computed. They may be donated as soon as this has returned.

        Does not wait, but for arrays of types that DLPack does not know, and where JAX runs its TFRT client.
        """
        ...

    def copy(self, copies: Sequence[DeviceCopy]) -> CudaEvent:
        """Begin copies; the point at which they are done. Whoever calls keeps the memory alive until then.

        Copies that the device refuses are its mark's failure: those begun before them may still be under way.
        """
        ...


class CudaDevice(Protocol):
    """What an actor with devices needs of them, beyond JAX."""

    def enter(self) -> None:
        """Make the first device's context the calling thread's. UCX takes what is current when it begins."""
        ...

    def lane(self) -> CudaStream:
        """A new lane, over all of the actor's devices."""
        ...

    def hardware(self) -> Hardware:
        """What the devices are."""
        ...


def open_door(devices: Sequence[Any], transport: str) -> CudaDevice | None:
    """The door to an actor's devices.

    Args:
        transport: the name of the transport of programs, which may move host memory only, also for actors with GPUs.

    Returns:
        None: arrays go through host memory, as they do on CPUs.

    Raises:
        InstallError: CuPy is missing.
    """
    if devices[0].platform not in ("gpu", "cuda") or not kind_of(transport).device_memory:
        return None
    return CupyDevice(devices)


class CupyDevice:
    """A `CudaDevice` through CuPy.

    Args:
        devices: the actor's, as JAX knows them.

    Raises:
        InstallError: CuPy is missing.
    """

    def __init__(self, devices: Sequence[Any]):
        self._cuda = _import_cupy().cuda
        self._devices = tuple(devices)

    def enter(self) -> None:
        self._cuda.Device(_ordinal(self._devices[0])).use()
        self._cuda.runtime.free(0)  # makes the context, where the first call of a process does not yet

    def lane(self) -> CudaStream:
        return _CupyLane(self._cuda, self._devices)

    def hardware(self) -> Hardware:
        runtime, first = self._cuda.runtime, self._devices[0]
        with self._cuda.Device(_ordinal(first)):
            _, memory_bytes = runtime.memGetInfo()
        return Hardware(
            kind=first.device_kind,
            count=len(self._devices),
            memory_bytes=memory_bytes,
            cuda=_jax_cuda(first),
            driver=_version(runtime.driverGetVersion()),
            gpus=tuple(_uuid(runtime, _ordinal(device)) for device in self._devices),
            memory_fraction=memory_fraction(os.environ),
        )


class _CupyLane:
    """A stream a device."""

    def __init__(self, cuda: Any, devices: Sequence[Any]):
        self._cuda = cuda
        self._streams: dict[int, Any] = {}
        for ordinal in map(_ordinal, devices):
            with cuda.Device(ordinal):
                self._streams[ordinal] = cuda.Stream(non_blocking=True)

    def mark(self, arrays: Sequence[jax.Array]) -> CudaEvent:
        ordinals: dict[int, None] = {}
        for part in _parts(arrays):
            if not waits_elsewhere(part):
                part.block_until_ready()
                continue
            (device,) = part.devices()
            ordinal = _ordinal(device)
            part.__dlpack__(stream=self._streams[ordinal].ptr)
            ordinals[ordinal] = None
        return self._record(ordinals)

    def copy(self, copies: Sequence[DeviceCopy]) -> CudaEvent:
        ordinals: dict[int, None] = {}
        try:
            for c in copies:
                target, source = _ordinal(c.target_device), _ordinal(c.source_device)
                stream = self._streams[target]
                with self._cuda.Device(target):
                    self._cuda.runtime.memcpyPeerAsync(
                        c.target, target, c.source, source, c.size_bytes, stream.ptr
                    )
                ordinals[target] = None
        except Exception as error:
            # whatever CUDA says ends the step; the memory is kept until the others are done
            return self._record(ordinals, error)
        return self._record(ordinals)

    def _record(self, ordinals: Iterable[int], failure: Exception | None = None) -> CudaEvent:
        events = []
        for ordinal in ordinals:
            with self._cuda.Device(ordinal):
                # `block`: whoever waits sleeps; a thread that looks all the time would take a core from the event loop.
                event = self._cuda.Event(block=True, disable_timing=True)
                event.record(self._streams[ordinal])
                events.append(event)
        return _EventMark(events, failure)


class _EventMark:
    """The end of some events, and what failed after them."""

    def __init__(self, events: Sequence[Any], failure: Exception | None):
        self._events, self._failure = events, failure

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()
        if self._failure is not None:
            raise self._failure


def waits_elsewhere(array: jax.Array) -> bool:
    """Whether a stream can be told to wait for this array, so that no thread has to."""
    return not array.dtype.name.startswith(_NO_DLPACK)


def _parts(arrays: Sequence[jax.Array]) -> Iterable[Any]:
    """Each array's part on each device."""
    for array in arrays:
        if len(array.sharding.device_set) == 1:
            yield array
        else:
            yield from (shard.data for shard in array.addressable_shards)


def _ordinal(device: Any) -> int:
    """CUDA's number of a device in this process."""
    return device.local_hardware_id


def _jax_cuda(device: Any) -> str:
    """Version of the CUDA that JAX's plugin was built for: by its own word (a line such as `cuda 13000`), else by the
    plugin's name. CuPy's, which is another package, may differ."""
    said = re.search(r"(?m)^cuda (\d{4,5})$", getattr(device.client, "platform_version", ""))
    if said is not None:
        return _version(int(said[1]))
    return "".join(map(str, jax_cuda_majors()[:1]))


def _uuid(runtime: Any, ordinal: int) -> str:
    """What `nvidia-smi -L` calls a device. CUDA tells of a part of a GPU (MIG) what its GPU is called, so that its own
    name is the one by which the process was given it."""
    named = read_visible(os.environ.get(VISIBLE, ""), ()).names[ordinal : ordinal + 1]
    if named and is_part(named[0]):
        return f"MIG-{named[0][4:].lower()}"  # as the tools write it, whatever the user wrote
    found = runtime.getDeviceProperties(ordinal).get("uuid", b"")
    if len(found) != 16:
        return runtime.deviceGetPCIBusId(ordinal)
    return f"GPU-{uuid.UUID(bytes=bytes(found))}"


def _version(number: int) -> str:
    """`"13.0"` of 13000, as CUDA writes versions."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _import_cupy() -> Any:
    try:
        import cupy  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InstallError(
            f"actors with GPUs need the package cupy, which does not import here ({error}); "
            f"install it with: {cuda_install()}"
        ) from error
    return cupy


# ---------------------------------------------------------------- device work

Then: TypeAlias = Callable[[float, Exception | None], object]
"""Called on the event loop with the time (`time.monotonic`) at which a mark was reached, and why it was not."""


class DeviceWork:
    """Tells of the end of what one actor's devices do.

    Args:
        door: to the devices.
        name: of the threads.
        loop: where it tells.
    """

    def __init__(self, door: CudaDevice, name: str, loop: asyncio.AbstractEventLoop):
        self._runs, self._copies, self._spreads = door.lane(), door.lane(), door.lane()
        self._run_watcher = _Watcher(f"{name}-runs", loop)
        self._copy_watcher = _Watcher(f"{name}-copies", loop)

    def after_run(self, outputs: Sequence[jax.Array], then: Then) -> None:
        """Tell when a run has computed; on the thread that called its executable, before it calls another.

        Args:
            outputs: of one executable: they are there together.
        """
        self._run_watcher.watch(self._runs.mark(_sign_of(outputs)), then)

    def after_copy(self, arrays: Sequence[jax.Array], then: Then) -> None:
        """Tell when arrays are there that no run has made; on the thread of `after_run`."""
        self._copy_watcher.watch(self._copies.mark(arrays), then)

    def spread(self, copies: Sequence[DeviceCopy], then: Then) -> None:
        """Copy between devices, and tell when it is done; on the event loop."""
        self._copy_watcher.watch(self._spreads.copy(copies), then)

    async def aclose(self, timeout_s: float = 1.0) -> None:
        """End the threads; leave those behind that wait for a device which does not answer."""
        await asyncio.gather(self._run_watcher.aclose(timeout_s), self._copy_watcher.aclose(timeout_s))


class _Watcher:
    """Waits for marks, one after the other."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop):
        self._marks: queue.SimpleQueue[tuple[CudaEvent, Then] | None] = queue.SimpleQueue()
        self._loop = loop
        # A daemon: a device that never answers must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def watch(self, mark: CudaEvent, then: Then) -> None:
        self._marks.put((mark, then))

    async def aclose(self, timeout_s: float) -> None:
        self._marks.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s)

    def _work(self) -> None:
        while (watched := self._marks.get()) is not None:
            mark, then = watched
            failure: Exception | None = None
            try:
                mark.wait()
            except Exception as error:
                # whatever the device or its driver raises ends the step, with its words
                failure = error
            try:
                self._loop.call_soon_threadsafe(partial(then, time.monotonic(), failure))
            except RuntimeError:  # the loop has closed: nobody waits for it any more
                return
            del watched, mark, then  # they hold arrays, and the next may be long in coming


def _sign_of(outputs: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """One of a run's results, to tell by when it has computed: the last that holds anything, and of a type that can be
    waited for without stopping this thread, if there is one."""
    held = [array for array in reversed(outputs) if array.size]
    return [*filter(waits_elsewhere, held), *held, *outputs[-1:]][:1]
