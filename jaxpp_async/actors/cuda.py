"""Use CUDA beside JAX: learn when arrays are computed, copy between devices, and describe the devices.

`CudaDevices` is the interface, which `CupyDevices` implements; CuPy is imported only where an actor has GPUs.
Tests run the same code with a fake implementation on CPUs. This module allocates no device memory of its own.

JAX does not hand out its streams. `array.__dlpack__(stream=s)` makes stream `s` wait until the array is
computed, and an event recorded on `s` afterwards happens then. The returned capsule is dropped at once: JAX
donates no array that has one.

A GPU computes after a call has returned. `DeviceWork` neither polls the device nor lets the event loop wait:
a thread sleeps until an event happens, and wakes the loop once. Runs and copies have a thread and a stream
each, so that the end of a copy is not reported only after a run that was called before it.
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
"""The types that not every JAX can export through DLPack; JAX itself waits for arrays of these types."""


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """Bytes to copy, within a device or between two devices of this process.

    Args:
        target, source: addresses.
        target_device, source_device: JAX devices.
        size_bytes: how many bytes.
    """

    target: int
    target_device: Any
    source: int
    source_device: Any
    size_bytes: int


class CudaEvent(Protocol):
    """A point in the devices' work."""

    def wait(self) -> None:
        """Block this thread, without the GIL, until the devices have reached this point.

        Raises:
            RuntimeError (or a subclass): the device failed.
        """
        ...


class CudaStream(Protocol):
    """A sequence of events over all of the actor's devices, independent of other streams. One thread at a
    time uses it."""

    def record(self, arrays: Sequence[jax.Array]) -> CudaEvent:
        """Return the event that happens when these arrays are computed. They may be donated once this has
        returned.

        Waits only for arrays of types that DLPack does not know, and where JAX runs its TFRT client.
        """
        ...

    def copy(self, copies: Sequence[DeviceCopy]) -> CudaEvent:
        """Begin copies; return the event that happens when they are done. The caller keeps the memory alive
        until then.

        Copies that a device refuses make the event fail: copies begun before them may still be under way.
        """
        ...


class CudaDevices(Protocol):
    """The devices of one actor process, as far as the actor needs them beyond JAX."""

    def enter(self) -> None:
        """Make the first device's context the calling thread's. UCX uses the context that is current as it
        starts."""
        ...

    def make_stream(self) -> CudaStream:
        """Return a new stream over all of the devices."""
        ...

    def hardware(self) -> Hardware:
        """Describe the devices."""
        ...


def open_cuda(devices: Sequence[Any], transport: str) -> CudaDevices | None:
    """Open a process's devices for `DeviceWork`.

    Args:
        devices: the process's JAX devices.
        transport: the transport's name; `"memory"` moves host memory only, also for actors with GPUs.

    Returns:
        None where arrays go through host memory, as they do on CPUs.

    Raises:
        InstallError: CuPy is missing.
    """
    if devices[0].platform not in ("gpu", "cuda") or not kind_of(transport).device_memory:
        return None
    return CupyDevices(devices)


class CupyDevices:
    """`CudaDevices` through CuPy.

    Args:
        devices: the process's JAX devices.

    Raises:
        InstallError: CuPy is missing.
    """

    def __init__(self, devices: Sequence[Any]):
        self._cuda = _import_cupy().cuda
        self._devices = tuple(devices)

    def enter(self) -> None:
        self._cuda.Device(_ordinal(self._devices[0])).use()
        self._cuda.runtime.free(0)  # makes the context, which the first call of a process may not do

    def make_stream(self) -> CudaStream:
        return _CupyStream(self._cuda, self._devices)

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


class _CupyStream:
    """A `CudaStream` with one CUDA stream for each device."""

    def __init__(self, cuda: Any, devices: Sequence[Any]):
        self._cuda = cuda
        self._streams: dict[int, Any] = {}
        for ordinal in map(_ordinal, devices):
            with cuda.Device(ordinal):
                self._streams[ordinal] = cuda.Stream(non_blocking=True)

    def record(self, arrays: Sequence[jax.Array]) -> CudaEvent:
        ordinals: dict[int, None] = {}
        for part in _parts(arrays):
            if not supports_dlpack(part):
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
            # CUDA's error ends the step; the caller keeps the memory until the other copies are done
            return self._record(ordinals, error)
        return self._record(ordinals)

    def _record(self, ordinals: Iterable[int], failure: Exception | None = None) -> CudaEvent:
        events = []
        for ordinal in ordinals:
            with self._cuda.Device(ordinal):
                # `block`: the waiting thread sleeps; a thread that polls would take a core from the event
                # loop.
                event = self._cuda.Event(block=True, disable_timing=True)
                event.record(self._streams[ordinal])
                events.append(event)
        return _CupyEvent(events, failure)


class _CupyEvent:
    """CUDA events on several devices, and the failure of work begun after them."""

    def __init__(self, events: Sequence[Any], failure: Exception | None):
        self._events, self._failure = events, failure

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()
        if self._failure is not None:
            raise self._failure


def supports_dlpack(array: jax.Array) -> bool:
    """Say whether a stream can wait for this array, so that no thread has to."""
    return not array.dtype.name.startswith(_NO_DLPACK)


def _parts(arrays: Sequence[jax.Array]) -> Iterable[Any]:
    """Yield each array's part on each device."""
    for array in arrays:
        if len(array.sharding.device_set) == 1:
            yield array
        else:
            yield from (shard.data for shard in array.addressable_shards)


def _ordinal(device: Any) -> int:
    """Return CUDA's number of a JAX device in this process."""
    return device.local_hardware_id


def _jax_cuda(device: Any) -> str:
    """Return the version of the CUDA that JAX's plugin was built for; CuPy, another package, may use a
    different one.

    The plugin reports a line such as `cuda 13000`; without such a line the plugin's name has the major
    version.
    """
    reported = re.search(r"(?m)^cuda (\d{4,5})$", getattr(device.client, "platform_version", ""))
    if reported is not None:
        return _version(int(reported[1]))
    return "".join(map(str, jax_cuda_majors()[:1]))


def _uuid(runtime: Any, ordinal: int) -> str:
    """Return the name that `nvidia-smi -L` has for a device.

    For a part of a GPU (MIG) CUDA returns the UUID of the whole GPU; the part's own UUID stands in the
    environment variable that gave the process this part.
    """
    named = read_visible(os.environ.get(VISIBLE, ""), ()).names[ordinal : ordinal + 1]
    if named and is_part(named[0]):
        return f"MIG-{named[0][4:].lower()}"  # in the tools' spelling, whatever the user's is
    found = runtime.getDeviceProperties(ordinal).get("uuid", b"")
    if len(found) != 16:
        return runtime.deviceGetPCIBusId(ordinal)
    return f"GPU-{uuid.UUID(bytes=bytes(found))}"


def _version(number: int) -> str:
    """Format a version as CUDA encodes it: 13000 is `"13.0"`."""
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


# ---------------------------------------------------------------- callbacks for the devices' work

OnReached: TypeAlias = Callable[[float, Exception | None], object]
"""Called on the event loop with the time (`time.monotonic`) at which an event was reached, and with its
failure."""


class DeviceWork:
    """Calls back on the event loop when one actor's devices have done a piece of work.

    Args:
        devices: the devices.
        name: the beginning of the threads' names.
        loop: the event loop.
    """

    def __init__(self, devices: CudaDevices, name: str, loop: asyncio.AbstractEventLoop):
        self._runs, self._copies, self._spreads = (devices.make_stream() for _ in range(3))
        self._run_watcher = _Watcher(f"{name}-runs", loop)
        self._copy_watcher = _Watcher(f"{name}-copies", loop)

    def after_run(self, outputs: Sequence[jax.Array], on_reached: OnReached) -> None:
        """Call back when a run has computed. To be called on the thread that called the executable, before it
        calls another.

        Args:
            outputs: the results of one executable, which are computed together.
            on_reached: the callback.
        """
        self._run_watcher.watch(self._runs.record(_last_to_wait_for(outputs)), on_reached)

    def after_copy(self, arrays: Sequence[jax.Array], on_reached: OnReached) -> None:
        """Call back when arrays are there that no run has made. To be called on the thread of `after_run`."""
        self._copy_watcher.watch(self._copies.record(arrays), on_reached)

    def spread(self, copies: Sequence[DeviceCopy], on_reached: OnReached) -> None:
        """Copy between devices, and call back when that is done. To be called on the event loop."""
        self._copy_watcher.watch(self._spreads.copy(copies), on_reached)

    async def aclose(self, timeout_s: float = 1.0) -> None:
        """End the threads; abandon those that wait for a device which does not answer."""
        await asyncio.gather(self._run_watcher.aclose(timeout_s), self._copy_watcher.aclose(timeout_s))


class _Watcher:
    """A thread that waits for events, one after the other, and calls back on the event loop."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop):
        self._events: queue.SimpleQueue[tuple[CudaEvent, OnReached] | None] = queue.SimpleQueue()
        self._loop = loop
        # A daemon: a device that never answers must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def watch(self, event: CudaEvent, on_reached: OnReached) -> None:
        self._events.put((event, on_reached))

    async def aclose(self, timeout_s: float) -> None:
        self._events.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s)

    def _work(self) -> None:
        while (watched := self._events.get()) is not None:
            event, on_reached = watched
            failure: Exception | None = None
            try:
                event.wait()
            except Exception as error:
                # every error of the device or its driver ends the step, with its own message
                failure = error
            try:
                self._loop.call_soon_threadsafe(partial(on_reached, time.monotonic(), failure))
            except RuntimeError:  # the loop has closed: nothing waits for the event any more
                return
            del watched, event, on_reached  # they refer to arrays, and the next event may be long in coming


def _last_to_wait_for(outputs: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Choose one of a run's results, which are computed together, to wait for.

    The last one that has elements and is of a type for which this thread does not stop, if there is one.
    """
    held = [array for array in reversed(outputs) if array.size]
    return [*filter(supports_dlpack, held), *held, *outputs[-1:]][:1]
