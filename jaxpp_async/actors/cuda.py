"""Use CUDA beside JAX: learn when arrays are computed, copy between devices, and describe the devices.

`CudaDevices` calls CUDA through CuPy, which is imported only on actors that have GPUs. Tests run the same
code on CPUs with a stand-in for `CudaDevices`. This module allocates no device memory of its own.

JAX does not give access to its streams. `array.__dlpack__(stream=s)` makes stream `s` wait until the array is
computed, so an event that is recorded on `s` afterwards happens as soon as the array is computed. The capsule
that the call returns is dropped immediately, because JAX does not donate an array while such a capsule of the
array exists.

A GPU still computes after the call of an executable has returned. `DeviceWork` neither polls the device nor
blocks the event loop: a thread sleeps until an event happens, and then wakes the loop once. Executables and
copies have separate threads and streams, so that the end of a copy is reported without waiting for
executables that were called earlier.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import jax

from jaxpp_async.base.gpu_inventory import VISIBLE, is_mig_instance, memory_fraction, read_visible
from jaxpp_async.base.install_hints import cuda_install, jax_cuda_majors
from jaxpp_async.errors import InstallError
from jaxpp_async.protocol.messages import Hardware
from jaxpp_async.transport.registry import kind_of

if TYPE_CHECKING:
    from jaxpp_async.actors.setup import Job, JobThread

_NO_DLPACK = ("float8", "float4", "float6", "int2", "int4", "uint2", "uint4")
"""The types that not every JAX can export through DLPack; JAX itself waits for arrays of these types."""


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """A request to copy bytes within one device or between two devices of this process.

    Args:
        target, source: the addresses to copy to and from.
        target_device, source_device: the JAX devices on which these addresses are.
        size_bytes: the number of bytes.
    """

    target: int
    target_device: Any
    source: int
    source_device: Any
    size_bytes: int


def open_cuda(devices: Sequence[Any], transport: str) -> CudaDevices | None:
    """If the transport moves GPU memory directly, open a process's GPUs for `DeviceWork`.

    Args:
        devices: the JAX devices of the process.
        transport: the name of the transport; `"memory"` moves host memory only, even for actors with GPUs.

    Returns:
        The devices, or None if arrays pass through host memory on their way to other actors, as on CPUs.

    Raises:
        InstallError: CuPy is not installed.
    """
    if devices[0].platform not in ("gpu", "cuda") or not kind_of(transport).device_memory:
        return None
    return CudaDevices(devices)


class CudaDevices:
    """The devices of one actor process, with the CUDA operations that the actor needs and JAX does not offer.

    Args:
        devices: the JAX devices of the process.

    Raises:
        InstallError: CuPy is not installed.
    """

    def __init__(self, devices: Sequence[Any]):
        self._cuda = _import_cupy().cuda
        self._devices = tuple(devices)

    def enter(self) -> None:
        """Make the CUDA context of the first device current in the calling thread.

        UCX uses the context that is current when it starts.
        """
        self._cuda.Device(_ordinal(self._devices[0])).use()
        self._cuda.runtime.free(0)  # creates the context, which `use` may not have done

    def make_stream(self) -> CudaStream:
        """Return a new `CudaStream`, which consists of one CUDA stream per device."""
        return CudaStream(self._cuda, self._devices)

    def hardware(self) -> Hardware:
        """Return a description of the devices: their kind, number and memory, and the versions of CUDA and of
        the driver."""
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


class CudaStream:
    """A queue of work on all devices of the actor process, independent of other streams: one CUDA stream per
    device. Only one thread at a time may use it."""

    def __init__(self, cuda: Any, devices: Sequence[Any]):
        self._cuda = cuda
        self._streams: dict[int, Any] = {}
        for ordinal in map(_ordinal, devices):
            with cuda.Device(ordinal):
                self._streams[ordinal] = cuda.Stream(non_blocking=True)

    def record(self, arrays: Sequence[jax.Array]) -> CudaEvent:
        """Return an event that happens once the given arrays are computed. The arrays may be donated after
        this call.

        The call blocks only for arrays of types that DLPack does not support, and where JAX uses its TFRT
        client.
        """
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
        """Start copies, and return an event that happens once all of them have completed.

        The caller must keep the memory alive until then. If a device refuses a copy, the event reports the
        failure, and copies that were started earlier may still be under way.
        """
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
            # the event reports the error, which ends the step, after the copies that were started
            return self._record(ordinals, error)
        return self._record(ordinals)

    def _record(self, ordinals: Iterable[int], failure: Exception | None = None) -> CudaEvent:
        events = []
        for ordinal in ordinals:
            with self._cuda.Device(ordinal):
                # `block` makes the waiting thread sleep. A thread that polls would occupy a core that the
                # event loop may need.
                event = self._cuda.Event(block=True, disable_timing=True)
                event.record(self._streams[ordinal])
                events.append(event)
        return CudaEvent(events, failure)


class CudaEvent:
    """A point in the devices' work that a thread can wait for: one CUDA event per device, and the exception
    of work that could not be started."""

    def __init__(self, events: Sequence[Any], failure: Exception | None):
        self._events, self._failure = events, failure

    def wait(self) -> None:
        """Block the calling thread, without holding the GIL, until the devices have reached this point of
        their work.

        Raises:
            RuntimeError (or a subclass): the device failed.
        """
        for event in self._events:
            event.synchronize()
        if self._failure is not None:
            raise self._failure


def supports_dlpack(array: jax.Array) -> bool:
    """Return whether a CUDA stream can wait for this array; for other arrays a thread has to wait."""
    return not array.dtype.name.startswith(_NO_DLPACK)


def _parts(arrays: Sequence[jax.Array]) -> Iterable[Any]:
    """Yield the part of each array on each device of this process, as a single-device array."""
    for array in arrays:
        if len(array.sharding.device_set) == 1:
            yield array
        else:
            yield from (shard.data for shard in array.addressable_shards)


def _ordinal(device: Any) -> int:
    """Return CUDA's number for a JAX device in this process."""
    return device.local_hardware_id


def _jax_cuda(device: Any) -> str:
    """Return the version of CUDA that JAX's plugin was built for, such as `"13.0"`.

    This may differ from the CUDA that CuPy uses. If JAX's plugin reports a line such as `cuda 13000`, the
    version is taken from that line; otherwise the major version is taken from the name of the plugin's
    package.
    """
    reported = re.search(r"(?m)^cuda (\d{4,5})$", getattr(device.client, "platform_version", ""))
    if reported is not None:
        return _version(int(reported[1]))
    return "".join(map(str, jax_cuda_majors()[:1]))


def _uuid(runtime: Any, ordinal: int) -> str:
    """Return the UUID of a GPU, or of a part of one, as `nvidia-smi -L` shows it.

    For a part of a GPU (MIG) CUDA returns the UUID of the whole GPU. The UUID of the part is therefore read
    from the environment variable that assigned the part to the process. If CUDA reports no UUID, the PCI bus
    id is returned.

    Args:
        runtime: CuPy's CUDA runtime module.
        ordinal: CUDA's number for the device in this process.
    """
    named = read_visible(os.environ.get(VISIBLE, ""), ()).names[ordinal : ordinal + 1]
    if named and is_mig_instance(named[0]):
        return f"MIG-{named[0][4:].lower()}"  # spelled as NVIDIA's tools do, whatever the user wrote
    found = runtime.getDeviceProperties(ordinal).get("uuid", b"")
    if len(found) != 16:
        return runtime.deviceGetPCIBusId(ordinal)
    return f"GPU-{uuid.UUID(bytes=bytes(found))}"


def _version(number: int) -> str:
    """Return the text of a version that CUDA encodes as a number: 13000 is `"13.0"`."""
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
"""A function that is called on the event loop when a device has reached an event, with the time
(`time.monotonic`) at which it did and the device's exception or None."""


class DeviceWork:
    """A service that calls functions on the event loop when the devices of one process have finished pieces
    of work.

    Args:
        devices: the devices.
        run_thread: the thread that waits for executables. This object owns it.
        copy_thread: the thread that waits for copies. This object owns it.
    """

    def __init__(self, devices: CudaDevices, run_thread: JobThread, copy_thread: JobThread):
        self._runs, self._copies, self._device_copies = (devices.make_stream() for _ in range(3))
        self._run_thread, self._copy_thread = run_thread, copy_thread

    def after_run(self, outputs: Sequence[jax.Array], on_reached: OnReached) -> None:
        """Call `on_reached` on the event loop once an executable has computed its results.

        This must be called on the thread that called the executable, before that thread calls another
        executable.

        Args:
            outputs: the results of the executable, which all become ready at the same time.
            on_reached: takes the time at which the results were ready, and the device's exception or None.
        """
        self._run_thread.submit(_when_reached(self._runs.record(_last_to_wait_for(outputs)), on_reached))

    def after_copy(self, arrays: Sequence[jax.Array], on_reached: OnReached) -> None:
        """Call `on_reached` on the event loop once the given arrays are available.

        This is for arrays that are not results of the latest executable, such as copies and step arguments.
        Must be called on the thread on which `after_run` is called.
        """
        self._copy_thread.submit(_when_reached(self._copies.record(arrays), on_reached))

    def copy_between_devices(self, copies: Sequence[DeviceCopy], on_reached: OnReached) -> None:
        """Copy bytes between devices, and call `on_reached` once all copies are complete. Must be called on
        the event loop."""
        self._copy_thread.submit(_when_reached(self._device_copies.copy(copies), on_reached))

    async def aclose(self, timeout_s: float = 1.0) -> None:
        """End the threads. A thread that still waits for its device after `timeout_s` seconds is
        abandoned."""
        await asyncio.gather(self._run_thread.aclose(timeout_s), self._copy_thread.aclose(timeout_s))


def _when_reached(event: CudaEvent, on_reached: OnReached) -> Job:
    """Return a job that waits for a CUDA event and then has the event loop call `on_reached`."""

    def wait() -> Callable[[], object]:
        failure: Exception | None = None
        try:
            event.wait()
        except Exception as error:
            # every error of the device or its driver ends the step, with its own message
            failure = error
        return partial(on_reached, time.monotonic(), failure)

    return wait


def _last_to_wait_for(outputs: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Choose one result of an executable to wait for, and return it in a sequence; the sequence is empty if
    there are no results.

    All results of an executable are computed together, so one of them is enough. The choice is the last
    result that has elements and for which a stream can wait (`supports_dlpack`), so that this thread does not
    block. If there is no such result, the choice is the last result that has elements. If no result has
    elements, the choice is the last result.
    """
    held = [array for array in reversed(outputs) if array.size]
    return [*filter(supports_dlpack, held), *held, *outputs[-1:]][:1]
