"""nccl_library: the few calls of NCCL and CUDA that the transport makes, as a Protocol, and the real ones. The only
importer of NCCL's bindings.

In: ids, device memory. Out: communicators of two, and marks that tell how far one's stream has come. It keeps no order,
decides nothing and awaits nothing: that is the transport's, and tests give it a library without a GPU.

Communicators are made and aborted through nccl4py, NVIDIA's own binding, which knows NCCL's configuration (CuPy's
binding has no non-blocking communicators, so a peer that never comes would hold the caller for ever). `ncclSend` and
`ncclRecv` are called by their C names, as in the public header: nccl4py looks a buffer over each time, which takes
longer than the call. Both let go of Python's lock. Streams and events are CuPy's.

Whether a transfer is done is asked of an event, by a thread that sleeps in `cudaEventSynchronize`. A host function on
the stream would hold that stream up until it has Python's lock (CuPy's runs Python), and is never called once the CUDA
context has failed.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

from jaxpp_async.errors import InstallError, JaxppAsyncError
from jaxpp_async.transport.buffers import Memory
from jaxpp_async.transport.nccl_plan import MAX_CTAS

WORD_BYTES = 8


class NcclFailure(JaxppAsyncError):
    """NCCL or CUDA refused a call, or lost a peer; says which and why."""


class Mark(Protocol):
    """A place in a stream."""

    def wait(self) -> None:
        """Sleep until everything before it is done. Called on threads that have nothing else to do.

        Raises:
            NcclFailure: the device has failed.
        """
        ...


class Channel(Protocol):
    """One end of a communicator of two, with a stream of its own. No call waits for the peer, except `abort`."""

    def is_ready(self) -> bool:
        """False: NCCL is still busy with the last call, and must not be given another.

        Raises:
            NcclFailure: the communicator has failed; all that is left to do is to abort it.
        """
        ...

    def send(self, memory: Memory) -> None:
        """Send to the other rank, behind what the stream has, and once the value in `memory` is there.

        Raises:
            NcclFailure: NCCL refused it.
        """
        ...

    def recv(self, memory: Memory) -> None:
        """Receive from the other rank, behind what the stream has.

        Raises:
            NcclFailure: NCCL refused it.
        """
        ...

    def mark(self) -> Mark:
        """Mark where the stream ends now."""
        ...

    def abort(self) -> None:
        """End everything and free the communicator; nothing of it may be called afterwards. May take seconds: call it
        on a thread. Marks made before come to their end."""
        ...


class NcclLibrary(Protocol):
    """NCCL as one process sees it."""

    @property
    def version(self) -> str:
        """Such as `"2.32.3"`; both ends of a communicator need the same."""
        ...

    def make_id(self) -> bytes:
        """An id for one communicator. Whoever makes it has to take part."""
        ...

    def join(self, unique_id: bytes, rank: int, device: int) -> Channel:
        """Begin to make a communicator of two; `is_ready` says when the other has come. Call it on a thread.

        Args:
            rank: 0 or 1. device: position among this process's devices.

        Raises:
            NcclFailure: NCCL refused.
        """
        ...

    def word(self, device: int, value: int) -> Memory:
        """Eight bytes on a device that hold `value`. Call it on a thread."""
        ...

    def read_word(self, word: Memory) -> int:
        """What `word` holds now. Call it on a thread."""
        ...


# ---------------------------------------------------------------- the real one


_NCCL_UINT8 = 1


def load_library() -> NcclLibrary:
    """NCCL on this machine's GPUs.

    Raises:
        InstallError: a package or NCCL itself is missing; names the extra that brings it.
        NcclFailure: there is no GPU, or its driver does not do.
    """
    try:
        import cupy  # pyright: ignore[reportMissingImports]
        import nccl.core as core  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InstallError(
            f"transport 'nccl' needs the packages nccl4py and cupy, which do not import here ({error}); install them "
            "with: pip install 'jaxpp-async[cuda13]'  (or '[cuda12]'), or leave transport= out for UCX"
        ) from error
    found = core.get_version().libnccl
    if found is None or found.path is None:
        raise InstallError(
            "transport 'nccl' needs NCCL's library, libnccl.so.2, which is not found here; JAX's CUDA wheels bring it: "
            "pip install 'jaxpp-async[cuda13]'  (or '[cuda12]')"
        )
    try:
        num_devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise NcclFailure(f"transport 'nccl' moves GPU memory, and this process sees no GPU: {error}") from error
    return _Nccl(cupy, core, str(found.path), str(found.version), num_devices)


class _Nccl:
    """`NcclLibrary` through nccl4py, CuPy and libnccl."""

    def __init__(self, cupy: Any, core: Any, path: str, version: str, num_devices: int):
        self._cupy, self._core, self._version, self._num_devices = cupy, core, version, num_devices
        library = ctypes.CDLL(path)  # the one that nccl4py and XLA have loaded: a library is there once a process
        arguments = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        library.ncclSend.argtypes = library.ncclRecv.argtypes = arguments
        self._calls = library

    @property
    def version(self) -> str:
        return self._version

    def make_id(self) -> bytes:
        return self._core.get_unique_id().as_bytes

    def join(self, unique_id: bytes, rank: int, device: int) -> Channel:
        if device >= self._num_devices:
            raise NcclFailure(f"device {device} of this process is asked for, which sees {self._num_devices} GPUs")
        config = self._core.NCCLConfig(blocking=False, max_ctas=MAX_CTAS)
        with self._cupy.cuda.Device(device):
            try:
                identity = self._core.UniqueId.from_bytes(unique_id)
                communicator = self._core.Communicator.init(2, rank, identity, config)
            except Exception as error:  # its errors have no common base that is public
                raise NcclFailure(_init_failed(error)) from error
            stream = self._cupy.cuda.Stream(non_blocking=True)
        return _Channel(self._cupy, self._calls, communicator, stream, 1 - rank, device)

    def word(self, device: int, value: int) -> Memory:
        with self._cupy.cuda.Device(device):
            array = self._cupy.full(1, value, self._cupy.uint64)
            self._cupy.cuda.Stream.null.synchronize()
        return Memory(array.data.ptr, WORD_BYTES, array)

    def read_word(self, word: Memory) -> int:
        with word.owner.device:
            return int(word.owner.get()[0])


class _Channel:
    """`Channel` on a non-blocking communicator."""

    def __init__(self, cupy: Any, calls: Any, communicator: Any, stream: Any, other: int, device: int):
        self._cupy, self._calls, self._communicator, self._other = cupy, calls, communicator, other
        self._stream, self._device = stream, cupy.cuda.Device(device)
        self._handle = communicator.ptr

    def is_ready(self) -> bool:
        try:
            result = self._communicator.get_async_error()
        except Exception as error:  # as in `join`
            raise NcclFailure(str(error)) from error
        if result == _SUCCESS:
            return True
        if result == _IN_PROGRESS:
            return False
        raise NcclFailure(f"{result!r}: {self._communicator.get_last_error() or 'NCCL_DEBUG=INFO says more'}")

    def send(self, memory: Memory) -> None:
        self._wait_for(memory.owner)
        self._call(self._calls.ncclSend, memory)

    def recv(self, memory: Memory) -> None:
        self._call(self._calls.ncclRecv, memory)

    def _wait_for(self, owner: Any) -> None:
        """Make the stream wait for the value of a device array, and nobody else."""
        if getattr(owner, "__dlpack_device__", None) is None or owner.__dlpack_device__()[0] != _DLPACK_CUDA:
            return
        try:
            owner.__dlpack__(stream=self._stream.ptr)  # the capsule itself is of no use here
        except Exception as error:  # JAX's: a type that DLPack does not know, or a computation that failed
            raise NcclFailure(f"the stream cannot wait for {type(owner).__name__} {owner.dtype}: {error}") from error

    def _call(self, function: Any, memory: Memory) -> None:
        with self._device:
            result = function(
                memory.address, memory.size_bytes, _NCCL_UINT8, self._other, self._handle, self._stream.ptr
            )
        if result not in (_SUCCESS, _IN_PROGRESS):
            raise NcclFailure(f"{function.__name__} returned {result}: {self._communicator.get_last_error()}")

    def mark(self) -> Mark:
        with self._device:
            event = self._cupy.cuda.Event(block=True, disable_timing=True)  # block: it sleeps, and keeps no core busy
            event.record(self._stream)
        return _Event(event)

    def abort(self) -> None:
        with self._device:
            self._communicator.abort()


class _Event:
    """`Mark` on a CUDA event."""

    __slots__ = ("_event",)

    def __init__(self, event: Any):
        self._event = event

    def wait(self) -> None:
        try:
            self._event.synchronize()
        except Exception as error:  # CUDA's, of whatever kind: the device is lost, and the waiter must say so
            raise NcclFailure(str(error)) from error


_SUCCESS, _IN_PROGRESS = 0, 7
"""`ncclSuccess` and `ncclInProgress`."""

_DLPACK_CUDA = 2
"""`kDLCUDA`."""


def _init_failed(error: Exception) -> str:
    text = str(error)
    if "InvalidUsage" in text:
        text += (
            "; are both ends on one GPU? NCCL allows that from 2.30 on with NCCL_MULTI_RANK_GPU_ENABLE=1 in the "
            "actors' environment (env=), for two actors a GPU"
        )
    return text
