"""The library of `fake_nccl` for ranks in processes of their own: a communicator is a socket between two of
them.

The same rules: what an end is given runs in order; a send waits for its receive; sizes agree; a peer that is
    gone is
looked for until `abort`. What breaks a rule is written to the file that the variable `VIOLATIONS` names. And
an actor whose programs take it, on the devices of `fake_device`; for launchers, as
`"nccl_over_sockets:NcclActor"`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from fake_device import DeviceActor

from jaxpp_async.transport.base import Memory, memory_of
from jaxpp_async.transport.nccl.library import NcclFailure
from jaxpp_async.transport.nccl.transport import NcclTransport

VIOLATIONS = "JAXPP_TEST_NCCL_VIOLATIONS"
VERSIONS = "JAXPP_TEST_NCCL_VERSIONS"
"""Of the library, in one process after the other."""

_SIZE = struct.Struct("<q")


class SocketMark:
    """Reached when the channel has come so far."""

    def __init__(self, reached: threading.Event):
        self._reached = reached

    def wait(self) -> None:
        self._reached.wait()


class SocketChannel:
    """One end of a communicator. A thread of its own is its stream."""

    def __init__(self, name: bytes, rank: int):
        self._socket, self._rank = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), rank
        self._address = b"\0jaxpp-test-nccl-" + name
        self._listening = rank == 0
        self._operations: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._last = threading.Event()
        self._last.set()
        self._aborted = threading.Event()
        self._is_open = False
        if self._listening:
            self._socket.bind(self._address)
            self._socket.listen(1)
        self._socket.setblocking(False)

    def is_ready(self) -> bool:
        if self._aborted.is_set():
            violate("is_ready after abort")
        if not self._is_open:
            with contextlib.suppress(BlockingIOError, ConnectionRefusedError):  # the other has not come yet
                self._open()
        return self._is_open

    def _open(self) -> None:
        if self._listening:
            listener, (self._socket, _) = self._socket, self._socket.accept()
            listener.close()
        else:
            self._socket.connect(self._address)
        self._socket.setblocking(True)
        self._is_open = True
        threading.Thread(target=self._run, name="NCCL's stream", daemon=True).start()

    def send(self, memory: Memory) -> None:
        self._start(lambda: self._send(memory))

    def recv(self, memory: Memory) -> None:
        self._start(lambda: self._receive(memory))

    def mark(self) -> SocketMark:
        return SocketMark(self._last)

    def abort(self) -> None:
        self._aborted.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._is_open:
            done = self._last
            self._operations.put(self._end)
            done.wait()
        self._socket.close()

    def _start(self, operation: Callable[[], None]) -> None:
        if self._aborted.is_set() or not self._is_open:
            violate("a transfer where there is no communicator")
        done = self._last = threading.Event()

        def run() -> None:
            try:
                operation()
            except (OSError, EOFError):
                # a peer that is gone: NCCL looks for its data until it is told not to
                self._aborted.wait()
            done.set()

        self._operations.put(run)

    def _run(self) -> None:
        with contextlib.suppress(StopIteration):
            while True:
                self._operations.get()()

    def _end(self) -> None:
        raise StopIteration

    def _send(self, memory: Memory) -> None:
        self._socket.sendall(
            _SIZE.pack(memory.size_bytes) + ctypes.string_at(memory.address, memory.size_bytes)
        )
        self._exactly(1)  # that it was received: rendezvous

    def _receive(self, memory: Memory) -> None:
        (size_bytes,) = _SIZE.unpack(self._exactly(_SIZE.size))
        if size_bytes != memory.size_bytes:
            violate(f"a send of {size_bytes} bytes meets {memory.size_bytes}")
        ctypes.memmove(memory.address, self._exactly(size_bytes), size_bytes)
        self._socket.sendall(b".")

    def _exactly(self, size_bytes: int) -> bytes:
        found = self._socket.recv(size_bytes, socket.MSG_WAITALL) if size_bytes else b""
        if len(found) != size_bytes:
            raise EOFError
        return found


class SocketNccl:
    """`NcclLibrary` of one process."""

    def __init__(self, version: str) -> None:
        self.version = version
        self._made: set[bytes] = set()

    def make_id(self) -> bytes:
        return secrets.token_hex(64).encode("ascii")

    def join(self, unique_id: bytes, rank: int, device: int) -> SocketChannel:
        if len(unique_id) != 128 or unique_id in self._made:
            violate(f"rank {rank} joins a communicator twice, or one that is none")
        self._made.add(unique_id)
        try:
            return SocketChannel(unique_id[:32], rank)
        except OSError as error:
            raise NcclFailure(str(error)) from error

    def word(self, device: int, value: int) -> Memory:
        return memory_of(np.array([value], np.uint64), writable=True)

    def read_word(self, word: Memory) -> int:
        return int(word.owner[0])


def violate(what: str) -> None:
    """Note that a rule was broken."""
    with open(os.environ[VIOLATIONS], "a") as file:
        file.write(f"{os.getpid()}: {what}\n")


class NcclActor(DeviceActor):
    """An actor on late devices, whose programs transfer over sockets in the program's order."""

    def __init__(self, process_id: int, *, make_transport: Callable[[str, Any], Any], **seams: Any):
        versions = os.environ.get(VERSIONS, "2.32.3").split()
        library = SocketNccl(versions[process_id % len(versions)])

        def make(kind: str, network: Any) -> Any:
            return NcclTransport(process_id, library) if kind == "nccl" else make_transport(kind, network)

        super().__init__(process_id, make_transport=make, **seams)
