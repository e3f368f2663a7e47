"""Declare the few calls of NCCL and CUDA that the transport makes, as protocols, and make the real ones.

This is the only module that imports NCCL's bindings; tests give the transport a library without a GPU. Order
and policy are the transport's. Any of the calls may take long: none is for the event loop's thread.

Communicators are made and aborted through nccl4py, NVIDIA's own binding, which knows NCCL's configuration
(CuPy's binding has no non-blocking communicators, so a peer that never comes would hold the caller for ever).
`ncclSend` and `ncclRecv` are called by their C names, as in the public header: nccl4py inspects a buffer each
time, which takes longer than the call. Both release Python's lock. Streams and events are CuPy's.

Whether a transfer is done is asked of an event, by a thread that sleeps in `cudaEventSynchronize`. A host
function on the stream would hold that stream up until it has Python's lock (CuPy's runs Python), and is never
called once the CUDA context has failed.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any, Protocol

import numpy

from jaxpp_async.base.install_hints import cuda_install
from jaxpp_async.errors import InstallError, JaxppAsyncError
from jaxpp_async.transport.base import Memory
from jaxpp_async.transport.nccl.order import MAX_CTAS, ONE_GPU

WORD_BYTES = 8


class NcclFailure(JaxppAsyncError):
    """NCCL or CUDA refused a call, or lost a peer; the message says which and why."""


class CompletionEvent(Protocol):
    """An event that was recorded in a stream."""

    def wait(self) -> None:
        """Sleep until everything before it is done. Called on threads that have nothing else to do.

        Raises:
            NcclFailure: the device has failed.
        """
        ...


class Channel(Protocol):
    """One end of a communicator of two, with a stream of its own. One thread makes all calls; none waits for
    a peer."""

    def is_ready(self) -> bool:
        """Whether NCCL is done with the last call; before, it must not be given another.

        Raises:
            NcclFailure: the communicator has failed; all that is left to do is to abort it.
        """
        ...

    def send(self, memory: Memory) -> None:
        """Send to the other rank, behind all that the stream has. `memory` holds its value already.

        Raises:
            NcclFailure: NCCL refused it.
        """
        ...

    def recv(self, memory: Memory) -> None:
        """Receive from the other rank, behind all that the stream has.

        Raises:
            NcclFailure: NCCL refused it.
        """
        ...

    def mark(self) -> CompletionEvent:
        """Record an event at the stream's present end."""
        ...

    def abort(self) -> None:
        """End everything and free the communicator; nothing of it may be called afterwards. It may take
        seconds. Events that were recorded before complete."""
        ...


class NcclLibrary(Protocol):
    """The calls of NCCL in one process."""

    @property
    def version(self) -> str:
        """The version, such as `"2.32.3"`; both ends of a communicator need the same one."""
        ...

    def make_id(self) -> bytes:
        """Make an id for one communicator. The process that makes it has to take part."""
        ...

    def join(self, unique_id: bytes, rank: int, device: int) -> Channel:
        """Begin to make a communicator of two; `is_ready` says when the other end has come. It may take
        seconds.

        Args:
            unique_id: of the communicator. rank: 0 or 1.
            device: position among this process's devices.

        Raises:
            NcclFailure: NCCL refused.
        """
        ...

    def word(self, device: int, value: int) -> Memory:
        """Allocate eight bytes on a device that hold `value`."""
        ...

    def read_word(self, word: Memory) -> int:
        """Read the value that `word` holds now."""
        ...


# ---------------------------------------------------------------- the real one


_NCCL_UINT8 = 1


def load_library() -> NcclLibrary:
    """Load NCCL for this machine's GPUs.

    Raises:
        InstallError: a package or NCCL itself is missing; names the extra that brings it.
        NcclFailure: there is no GPU, or its driver does not work.
    """
    try:
        import cupy  # pyright: ignore[reportMissingImports]
        import nccl.core as core  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InstallError(
            f"transport 'nccl' needs the packages nccl4py and cupy, which do not import here ({error}); "
            f"install them with: {cuda_install()}, or leave transport= out for UCX"
        ) from error
    found = core.get_version().libnccl
    if found is None or found.path is None:
        raise InstallError(
            "transport 'nccl' needs NCCL's library, libnccl.so.2, which is not found here; JAX's CUDA wheels "
            f"bring it: {cuda_install()}"
        )
    try:
        num_devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise NcclFailure(
            f"transport 'nccl' moves GPU memory, and this process sees no GPU: {error}"
        ) from error
    if not num_devices:
        raise NcclFailure("transport 'nccl' moves GPU memory, and this process sees no GPU")
    return _Nccl(cupy, core, str(found.path), str(found.version))


class _Nccl:
    """`NcclLibrary` through nccl4py, CuPy and libnccl."""

    def __init__(self, cupy: Any, core: Any, path: str, version: str):
        self._cupy, self._core, self._version = cupy, core, version
        # the one that nccl4py and XLA have loaded: a library is there once a process
        library = ctypes.CDLL(path)
        arguments = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        library.ncclSend.argtypes = library.ncclRecv.argtypes = arguments
        self._calls = library

    @property
    def version(self) -> str:
        return self._version

    def make_id(self) -> bytes:
        with _failures():
            return self._core.get_unique_id().as_bytes

    def join(self, unique_id: bytes, rank: int, device: int) -> Channel:
        config = self._core.NCCLConfig(blocking=False, max_ctas=MAX_CTAS)
        with _failures(), self._cupy.cuda.Device(device):
            identity = self._core.UniqueId.from_bytes(unique_id)
            communicator = self._core.Communicator.init(2, rank, identity, config)
            stream = self._cupy.cuda.Stream(non_blocking=True)
        return _Channel(self._cupy, self._calls, communicator, stream, 1 - rank, device)

    def word(self, device: int, value: int) -> Memory:
        with _failures(), self._cupy.cuda.Device(device):
            # a copy: what is computed is compiled first
            array = self._cupy.asarray(numpy.array([value], numpy.uint64))
            self._cupy.cuda.get_current_stream().synchronize()
        return Memory(array.data.ptr, WORD_BYTES, array)

    def read_word(self, word: Memory) -> int:
        with _failures(), word.owner.device:
            return int(word.owner.get()[0])


class _Channel:
    """`Channel` on a non-blocking communicator."""

    def __init__(self, cupy: Any, calls: Any, communicator: Any, stream: Any, other: int, device: int):
        self._cupy, self._calls, self._communicator, self._other = cupy, calls, communicator, other
        self._stream, self._device = stream, cupy.cuda.Device(device)
        self._handle: int = communicator.ptr

    def is_ready(self) -> bool:
        with _failures():
            result = self._communicator.get_async_error()
        if result == _SUCCESS:
            return True
        if result == _IN_PROGRESS:
            return False
        raise NcclFailure(_with_remedy(f"{result!r}: {self._last_error()}"))

    def send(self, memory: Memory) -> None:
        self._call(self._calls.ncclSend, memory)

    def recv(self, memory: Memory) -> None:
        self._call(self._calls.ncclRecv, memory)

    def _call(self, function: Any, memory: Memory) -> None:
        with _failures(), self._device:
            result = function(
                memory.address, memory.size_bytes, _NCCL_UINT8, self._other, self._handle, self._stream.ptr
            )
        if result not in (_SUCCESS, _IN_PROGRESS):
            raise NcclFailure(f"{function.__name__} returned {result}: {self._last_error()}")

    def _last_error(self) -> str:
        with _failures():
            return self._communicator.get_last_error() or "NCCL_DEBUG=INFO says more"

    def mark(self) -> CompletionEvent:
        with _failures(), self._device:
            # block: it sleeps, and keeps no core busy
            event = self._cupy.cuda.Event(block=True, disable_timing=True)
            event.record(self._stream)
        return _Event(event)

    def abort(self) -> None:
        with _failures(), self._device:
            self._communicator.abort()


class _Event:
    """`CompletionEvent` on a CUDA event."""

    __slots__ = ("_event",)

    def __init__(self, event: Any):
        self._event = event

    def wait(self) -> None:
        with _failures():
            self._event.synchronize()


_SUCCESS, _IN_PROGRESS = 0, 7
"""`ncclSuccess` and `ncclInProgress`."""


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Raise the errors of CUDA, CuPy and nccl4py as `NcclFailure`."""
    try:
        yield
    except Exception as error:  # theirs have no common base, and each means that the call was refused
        raise NcclFailure(_with_remedy(str(error))) from error


_REFUSALS = ("Duplicate GPU detected", "Multiple Ranks are using the same GPU")
"""NCCL's words for two ranks on one GPU: up to 2.29, and from 2.30 on."""


def _with_remedy(text: str) -> str:
    if not any(words in text for words in _REFUSALS):
        return text
    return (
        f"{text} ({ONE_GPU}: NCCL allows that from 2.30 on with NCCL_MULTI_RANK_GPU_ENABLE=1 in the actors' "
        "environment, env=, for two actors a GPU)"
    )
