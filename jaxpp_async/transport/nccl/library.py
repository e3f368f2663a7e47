"""Make the few NCCL and CUDA calls that the transport needs.

This is the only module that imports NCCL's bindings; tests give the transport a library that needs no GPU.
The transport decides which calls are made, and in which order. Any call may take long, so none may be made on
the event loop's thread.

Communicators are made and aborted through nccl4py, NVIDIA's own binding, which supports NCCL's configuration
(CuPy's binding has no non-blocking communicators, so that a caller would wait for ever if its peer never
joins). `ncclSend` and `ncclRecv` are called directly as C functions of the public header, because nccl4py
inspects the buffer in each call, which takes longer than the call itself. Both functions release Python's
lock (the GIL) while they run. Streams and events are CuPy's.

A thread finds out that a transfer has ended by sleeping in `cudaEventSynchronize` on an event. A host
function that CUDA calls from the stream would be worse for two reasons: it would block the stream until it
gets Python's lock, and it would never be called once the CUDA context has failed.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy

from jaxpp_async.base.install_hints import cuda_install
from jaxpp_async.errors import InstallError, JaxppAsyncError
from jaxpp_async.transport.base import Memory
from jaxpp_async.transport.nccl.order import MAX_CTAS, ONE_GPU

WORD_BYTES = 8


class NcclFailure(JaxppAsyncError):
    """The error for a failure of NCCL or CUDA, such as a refused call, a lost peer or a missing GPU. The
    message gives the reason."""


_NCCL_UINT8 = 1


def load_library() -> NcclLibrary:
    """Load NCCL for this machine's GPUs, and return an object that makes NCCL's calls.

    Raises:
        InstallError: a package or NCCL itself is missing; the message names the extra that installs it.
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
    return NcclLibrary(cupy, core, str(found.path), str(found.version))


class NcclLibrary:
    """The calls of NCCL and CUDA in one process, made through nccl4py, CuPy and libnccl: communicators, and
    the device memory for their first messages.

    Attributes:
        version: the version of NCCL, such as `"2.32.3"`; both ends of a communicator need the same one.
    """

    def __init__(self, cupy: Any, core: Any, path: str, version: str):
        self._cupy, self._core, self.version = cupy, core, version
        # the same library that nccl4py and XLA have loaded: a process loads it once
        library = ctypes.CDLL(path)
        pointer, number = ctypes.c_void_p, ctypes.c_int
        arguments = [pointer, ctypes.c_size_t, number, number, pointer, pointer]
        library.ncclSend.argtypes = library.ncclRecv.argtypes = arguments
        self._calls = library

    def make_id(self) -> bytes:
        """Make an id, with which two processes can make one communicator together. The process that makes the
        id must be one of the communicator's two ranks."""
        with _failures():
            return self._core.get_unique_id().as_bytes

    def join(self, unique_id: bytes, rank: int, device: int) -> Channel:
        """Begin to make a communicator of two ranks, and return this process's end. `Channel.is_ready` says
        when the other end has joined. The call may take seconds.

        Args:
            unique_id: the communicator's id.
            rank: this process's rank, 0 or 1.
            device: the index, among this process's devices, of the device to use.

        Raises:
            NcclFailure: NCCL refused the call.
        """
        config = self._core.NCCLConfig(blocking=False, max_ctas=MAX_CTAS)
        with _failures(), self._cupy.cuda.Device(device):
            identity = self._core.UniqueId.from_bytes(unique_id)
            communicator = self._core.Communicator.init(2, rank, identity, config)
            stream = self._cupy.cuda.Stream(non_blocking=True)
        return Channel(self._cupy, self._calls, communicator, stream, 1 - rank, device)

    def word(self, device: int, value: int) -> Memory:
        """Allocate eight bytes on a device, store the integer `value` in them, and return their memory. The
        first message of a communicator is sent from, or received into, such memory."""
        with _failures(), self._cupy.cuda.Device(device):
            # copied from the host, because a computation on the device would be compiled first
            array = self._cupy.asarray(numpy.array([value], numpy.uint64))
            self._cupy.cuda.get_current_stream().synchronize()
        return Memory(array.data.ptr, WORD_BYTES, array)

    def read_word(self, word: Memory) -> int:
        """Return the integer that is now stored in device memory that `NcclLibrary.word` allocated."""
        with _failures(), word.owner.device:
            return int(word.owner.get()[0])


class Channel:
    """One end of a non-blocking NCCL communicator of two ranks, with its own CUDA stream. Only one thread may
    call the methods, and no method waits for the peer."""

    def __init__(self, cupy: Any, calls: Any, communicator: Any, stream: Any, other: int, device: int):
        self._cupy, self._calls, self._communicator, self._other = cupy, calls, communicator, other
        self._stream, self._device = stream, cupy.cuda.Device(device)
        self._handle: int = communicator.ptr

    def is_ready(self) -> bool:
        """Return whether NCCL has finished the last call. Until then, no other call may be made.

        Raises:
            NcclFailure: the communicator has failed, and can only be aborted.
        """
        with _failures():
            result = self._communicator.get_async_error()
        if result == _SUCCESS:
            return True
        if result == _IN_PROGRESS:
            return False
        raise NcclFailure(_with_remedy(f"{result!r}: {self._last_error()}"))

    def send(self, memory: Memory) -> None:
        """Enqueue a send to the other rank, after all work in the stream. `memory` must already contain the
        value to send.

        Raises:
            NcclFailure: NCCL refused the send.
        """
        self._call(self._calls.ncclSend, memory)

    def recv(self, memory: Memory) -> None:
        """Enqueue a receive from the other rank, after all work in the stream.

        Raises:
            NcclFailure: NCCL refused the receive.
        """
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
        """Record an event after all work that is in the stream now, and return it."""
        with _failures(), self._device:
            # block: a thread that waits for the event sleeps, instead of keeping a core busy
            event = self._cupy.cuda.Event(block=True, disable_timing=True)
            event.record(self._stream)
        return CompletionEvent(event)

    def abort(self) -> None:
        """End all work and free the communicator, which may take seconds; no other method may be called
        afterwards. This also completes the events that were recorded earlier."""
        with _failures(), self._device:
            self._communicator.abort()


class CompletionEvent:
    """A CUDA event that was recorded in a stream. A thread can wait for it, and so for all earlier work in
    the stream."""

    __slots__ = ("_event",)

    def __init__(self, event: Any):
        self._event = event

    def wait(self) -> None:
        """Sleep until all work that was given to the stream before this event has finished. This blocks the
        calling thread.

        Raises:
            NcclFailure: the device has failed.
        """
        with _failures():
            self._event.synchronize()


_SUCCESS, _IN_PROGRESS = 0, 7
"""The values of `ncclSuccess` and `ncclInProgress`."""


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Turn the errors that CUDA, CuPy and nccl4py raise within the `with` block into `NcclFailure`."""
    try:
        yield
    except Exception as error:  # they have no common base class, and each means that the call was refused
        raise NcclFailure(_with_remedy(str(error))) from error


_REFUSALS = ("Duplicate GPU detected", "Multiple Ranks are using the same GPU")
"""The texts of NCCL's errors for two ranks on one GPU: the first up to version 2.29, the second since
2.30."""


def _with_remedy(text: str) -> str:
    if not any(words in text for words in _REFUSALS):
        return text
    return (
        f"{text} ({ONE_GPU}: NCCL allows that from 2.30 on with NCCL_MULTI_RANK_GPU_ENABLE=1 in the actors' "
        "environment, env=, for two actors a GPU)"
    )
