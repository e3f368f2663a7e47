"""Define the contract that every transport keeps: transfers, tags, memory, and addresses that can be checked.

A transport moves plain buffers between peers, without knowing of programs, steps or arrays.

A buffer is checked and never copied (`memory_of`): numpy arrays of any dtype (bfloat16 and the like too), and
device arrays with `__cuda_array_interface__`. An array that is not C-contiguous, or is read-only where bytes
will arrive, is
refused: UCX would take it and write over other memory.

A medium's raw address goes into code that trusts it: one garbage byte in a UCX worker address ends the
process. So it travels sealed (`seal`): with its medium, its owner, its epoch, and a SHA-256 of all of that.
This finds damage, mix-ups and addresses that are out of date. Who made it, the control channel guarantees:
its frames carry a MAC, and addresses come by no other way.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import math
import struct
from collections.abc import Callable, Container, Iterable
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from jaxpp_async.errors import ProtocolError, TransferError
from jaxpp_async.transport.shared_memory import SharedBlock

Peer: TypeAlias = int
"""A process's number in the mesh, or `program.CONTROLLER`."""

OnEnd: TypeAlias = Callable[[Exception | None], object]
"""Is called with the outcome of a posted transfer: None, or the error that a future would raise. Must not
raise."""

Post: TypeAlias = "Callable[[Memory, Peer, int, OnEnd], bool]"
"""`Transport.post_send` or `Transport.post_recv`."""

EPOCH_BITS, SENDER_BITS, CHANNEL_BITS, SEQUENCE_BITS = 16, 16, 8, 24

PROGRAM_CHANNEL, HOST_CHANNEL, COPY_CHANNEL = 1, 2, 3
"""The channels of a program's transfers, of values between controller and actors, and of replicas for
restarts."""


def make_tag(epoch: int, channel: int, sequence: int) -> int:
    """Pack a 64-bit tag: epoch 16, sender 16 (left zero), channel 8, sequence 24 bits.

    `epoch` changes at every restart and abort, so that a late message of an old life never matches. The
    sender's bits belong to the transport: a medium that matches by tag alone (UCX) tells its peers apart with
    them.

    Raises:
        ValueError: a part does not fit its bits.
    """
    for name, part, bits in (
        ("epoch", epoch, EPOCH_BITS),
        ("channel", channel, CHANNEL_BITS),
        ("sequence", sequence, SEQUENCE_BITS),
    ):
        if not 0 <= part < 1 << bits:
            raise ValueError(f"{name} {part} does not fit {bits} bits of a tag")
    return epoch << EPOCH_SHIFT | channel << SEQUENCE_BITS | sequence


SENDER_SHIFT = CHANNEL_BITS + SEQUENCE_BITS
EPOCH_SHIFT = SENDER_BITS + SENDER_SHIFT
MISPLACED_TAG_BITS = ~((1 << EPOCH_SHIFT + EPOCH_BITS) - 1) | ((1 << SENDER_BITS) - 1) << SENDER_SHIFT
"""Bits that no tag of `make_tag` has (all of them in a negative number)."""


def check_tag(tag: int) -> None:
    """Raise ValueError for a tag that `make_tag` cannot have made."""
    if tag & MISPLACED_TAG_BITS:
        raise ValueError(f"tag {tag:#x} has bits outside epoch, channel and sequence; make it with make_tag")


class Transport(Protocol):
    """Awaitable point-to-point transfers on one event loop.

    Every method is called on the loop's thread. Buffers are C-contiguous numpy arrays (or device arrays with
    `__cuda_array_interface__` where the transport can take them); a receive's must be writable. A buffer
    belongs to the transport until the transfer has ended, also after its future was cancelled: a cancelled
    receive stays posted and takes its message, and only `abort` and `aclose` end it early. A misused call (a
    read-only or strided buffer, a malformed tag) raises ValueError at once; everything that happens later is
    raised on the future.

    `send` and `recv` are `post_send` and `post_recv` with a future made for each. Whoever moves thousands of
    messages a second posts: a future costs more than a small message does, and its callbacks run a pass of
    the loop later.

    Attributes:
        epoch: of the mesh, 0 at first. Whoever made the transport sets it before `address` is read and
            `connect` is
            called: an address is good in its epoch only, so that one of a transport that is gone is never
                taken.

    Messages of one (peer, tag) pair arrive in the order they were sent and match receives in the order they
    were posted. A completed send means "the buffer may be reused", not "delivered".
    """

    epoch: int

    @property
    def address(self) -> bytes:
        """The opaque address by which a peer connects to this transport."""
        ...

    def admit(self, addresses: Iterable[bytes]) -> None:
        """Let the peers of these addresses connect here, and nobody else, before any of them connects.

        Raises:
            TransferError: the system does not allow it.
        """
        ...

    def check_device_memory(self) -> None:
        """Check that this transport can take the memory of this process's GPUs, before it is given any.

        Raises:
            MeshError: the medium was built or set without.
        """
        ...

    async def connect(self, peer: Peer, address: bytes) -> None:
        """Make `peer` reachable. Both sides connect before either sends.

        Raises:
            ValueError: `peer` is this transport itself, or is connected already.
            ProtocolError: `address` is damaged, of another kind of transport, another peer's, or of another
            epoch. TransferError: the medium could not make the link, or the transport has closed.
        """
        ...

    def routes(self, peer: Peer) -> tuple[str, ...]:
        """List the ways that the medium has chosen for messages to and from a connected peer, by its own
        names (`"posix"`, `"cuda_ipc"`, `"rc_mlx5"`, `"tcp"`), sorted; none if it has but one, or does not
        say."""
        ...

    def send(self, buffer: Any, peer: Peer, tag: int) -> asyncio.Future[None]:
        """Start sending the whole of `buffer`.

        Raises (on the future):
            TransferError: the link failed or was aborted. ProtocolError: the receiver expected another size,
            where
                the medium tells the sender so (UCX does not: there only the receive fails).
        """
        ...

    def recv(self, buffer: Any, peer: Peer, tag: int) -> asyncio.Future[None]:
        """Post a receive of exactly `buffer`'s size.

        Raises (on the future):
            TransferError: the link failed or was aborted. ProtocolError: another size arrived.
        """
        ...

    def post_send(self, memory: Memory, peer: Peer, tag: int, done: OnEnd) -> bool:
        """Start sending the whole of `memory`, without a future.

        Args:
            memory: of `memory_of`; it belongs to the transport until the transfer has ended.
            done: called exactly once, with None or with the error that `send` would raise on its future, and
                only where the result is False: on the loop's thread, from the transport's own progress or its
                `abort`, never inside a post call. It may post, and may not wait.

        Returns:
            True: the send has completed already, and `done` is never called.

        Raises:
            TransferError: `peer` is not connected, its link has failed, or the medium refuses. ValueError: a
            malformed
                tag. `done` is not called then, and the memory is the caller's.
        """
        ...

    def post_recv(self, memory: Memory, peer: Peer, tag: int, done: OnEnd) -> bool:
        """Post a receive of exactly `memory`'s size, without a future.

        Args:
            memory: of `memory_of(..., writable=True)`.
            done: as for `post_send`; its error may be a ProtocolError, where another size arrived.

        Returns:
            True: the data has arrived already, and `done` is never called.

        Raises:
            TransferError, ValueError: as `post_send`.
        """
        ...

    def hurry(self, on: bool) -> None:
        """Say whether the caller has nothing to compute and waits for transfers only. A hint, off at first.

        While it is on, the transport may look for messages for up to a millisecond before the loop sleeps,
        where that has helped lately. And it may hold a large send back for as long, with all sends that
        follow under its tag, if the send is faster once the peer has posted the receive. The core is offered
        to other processes meanwhile, and the loop's other work does not wait.
        """
        ...

    async def abort(self, peer: Peer | None = None) -> None:
        """End every open transfer with `peer` (with all peers: None) with `TransferError`, and forget the
        peer.

        When it returns, no buffer of those transfers belongs to the transport any more. Memory that another
        transfer of this process has as well, with whichever peer, may be waited for until that ends (UCX does
        so). `connect` works again afterwards, with a new epoch in every tag. After a peer's death, close and
        make a new transport instead: a process that is killed may leave what it shared with this one (UCX's
        shared-memory queues) beyond repair.

        Raises:
            TransferError: the medium still holds buffers after 5 s. Leave the process; do not reuse the
            buffers.
        """
        ...

    async def aclose(self) -> None:
        """Abort everything and give back descriptors and memory. A second call does nothing."""
        ...


def post_future(
    loop: asyncio.AbstractEventLoop, post: Post, memory: Memory, peer: Peer, tag: int
) -> asyncio.Future[None]:
    """Post a transfer and return a future of it, for a transport's `send` and `recv`.

    Every TransferError, also that the peer is not connected, is raised on the future.
    """
    future: asyncio.Future[None] = loop.create_future()

    def done(error: Exception | None) -> None:
        if future.done():  # its await was cancelled
            return
        if error is None:
            future.set_result(None)
            return
        future.set_exception(error)
        if isinstance(error, TransferError):
            # Marks it as seen: a failed link ends many transfers, most of which nobody awaits.
            future.exception()

    try:
        if post(memory, peer, tag, done):
            future.set_result(None)
    except TransferError as error:
        done(error.with_traceback(None))  # the traceback has this frame, which holds future and memory
    return future


class TransportBase:
    """The parts of the `Transport` contract that are the same for most media, for transports to inherit.

    Args:
        peer_id: this side's id.
    """

    def __init__(self, peer_id: Peer):
        self.peer_id, self.epoch = peer_id, 0
        self._loop = asyncio.get_running_loop()

    def admit(self, addresses: Iterable[bytes]) -> None:
        """See `Transport`: for a medium to which strangers cannot connect, or that opens its sockets
        itself."""

    def check_device_memory(self) -> None:
        """See `Transport`: for a medium that takes all device memory, or is never given any."""

    def hurry(self, on: bool) -> None:
        """See `Transport`: for a medium that never looks for messages."""

    def routes(self, peer: Peer) -> tuple[str, ...]:
        """See `Transport`: for a medium that has but one way, or does not say which it takes."""
        return ()

    def send(self, buffer: Any, peer: Peer, tag: int) -> asyncio.Future[None]:
        return post_future(self._loop, self.post_send, memory_of(buffer, writable=False), peer, tag)

    def recv(self, buffer: Any, peer: Peer, tag: int) -> asyncio.Future[None]:
        return post_future(self._loop, self.post_recv, memory_of(buffer, writable=True), peer, tag)

    def post_send(self, memory: Memory, peer: Peer, tag: int, done: OnEnd) -> bool:
        raise NotImplementedError

    def post_recv(self, memory: Memory, peer: Peer, tag: int, done: OnEnd) -> bool:
        raise NotImplementedError

    def _check_connectable(self, peer: Peer, is_closed: bool, connected: Container[Peer]) -> None:
        """Raise what `connect` raises where this transport has closed, or may not connect to a peer."""
        if is_closed:
            raise TransferError(f"peer {self.peer_id}: the transport has closed")
        if peer == self.peer_id:
            raise ValueError(f"peer {peer} cannot connect to itself")
        if peer in connected:
            raise ValueError(f"peer {peer} is connected already; abort it before connecting anew")


# ---------------------------------------------------------------- memory

_Start = ctypes.c_char * 0
"""An array of no bytes: enough to read where a buffer starts, whatever its size."""


class Memory(NamedTuple):
    """Bytes that a transport may read or, if they were checked for it, write. `memory_of` makes it.

    A caller that uses one buffer again and again keeps its `Memory`: checking costs more than posting.

    Args:
        address: of the first byte, on the host or on a device.
        size_bytes: how many bytes.
        owner: keeps the bytes alive; the transport holds it for as long as it holds the memory.
        on_device: the bytes are in a GPU's memory, which the CPU cannot read or write.
    """

    address: int
    size_bytes: int
    owner: Any
    on_device: bool = False


def memory_of(buffer: Any, *, writable: bool) -> Memory:
    """Check a numpy array, a device array or a shared block, and return its memory.

    Args:
        buffer: C-contiguous, of any dtype without references.
        writable: the memory will receive.

    Raises:
        ValueError: as `locate`.
    """
    if type(buffer) is SharedBlock:
        return Memory(buffer.address, buffer.size_bytes, buffer)
    address, size_bytes = locate(buffer, writable=writable)
    return Memory(address, size_bytes, buffer, not isinstance(buffer, np.ndarray))


def locate(buffer: Any, *, writable: bool) -> tuple[int, int]:
    """Check a numpy or device array. Returns: its address, and its size in bytes.

    Raises:
        ValueError: neither of the two, not C-contiguous, or read-only though `writable` is asked.
    """
    if type(buffer) is np.ndarray and not buffer.dtype.hasobject:
        try:
            # A third of the cost of __array_interface__; takes only contiguous, writable arrays of plain
            # dtypes.
            return ctypes.addressof(_Start.from_buffer(buffer)), buffer.nbytes  # pyright: ignore[reportArgumentType]
        except (TypeError, ValueError, BufferError):
            pass
    elif (interface := getattr(buffer, "__cuda_array_interface__", None)) is not None:
        return _locate_on_device(interface, writable)
    _check_array(buffer, writable)
    return buffer.__array_interface__["data"][0], buffer.nbytes


def _check_array(buffer: Any, writable: bool) -> None:
    if not isinstance(buffer, np.ndarray):
        raise ValueError(
            f"a transfer takes numpy or device arrays, not {type(buffer).__name__}; use numpy.asarray"
        )
    if buffer.dtype.hasobject:
        raise ValueError(f"an array of {buffer.dtype} holds references, which mean nothing to a peer")
    if not buffer.flags.c_contiguous:
        raise ValueError(f"{_describe(buffer)} is not C-contiguous; copy it with numpy.ascontiguousarray")
    if writable and not buffer.flags.writeable:
        raise ValueError(
            f"{_describe(buffer)} is read-only and cannot receive; pass an array that owns its memory"
        )


def _describe(buffer: np.ndarray) -> str:
    return f"array {buffer.dtype}{list(buffer.shape)}"


def _locate_on_device(interface: dict[str, Any], writable: bool) -> tuple[int, int]:
    address, read_only = interface["data"]
    shape, itemsize = interface["shape"], np.dtype(interface["typestr"]).itemsize
    strides = interface.get("strides")
    if strides is not None and tuple(strides) != _c_strides(shape, itemsize):
        raise ValueError(
            f"device array {interface['typestr']}{list(shape)} is not C-contiguous; copy it first"
        )
    if writable and read_only:
        raise ValueError(f"device array {interface['typestr']}{list(shape)} is read-only and cannot receive")
    return address, math.prod(shape) * itemsize


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = []
    for length in reversed(shape):
        strides.append(itemsize)
        itemsize *= length
    return tuple(reversed(strides))


# ---------------------------------------------------------------- addresses

MAX_RAW_BYTES: Final = 1 << 16
_MAGIC: Final = b"JXA"
_VERSION: Final = 2
# magic, version, medium, peer, epoch, how long the list of hosts is
_HEADER: Final = struct.Struct(">3sB8siIH")
_DIGEST_BYTES: Final = hashlib.sha256().digest_size


def seal(medium: str, raw: bytes, peer: Peer, epoch: int, hosts: Iterable[str] = ()) -> bytes:
    """Seal a raw address, so that `unseal` can check it.

    Args:
        medium: the name of the transport, at most 8 ASCII letters.
        raw: the address as the medium gave it.
        peer: its owner.
        epoch: of the mesh, in which it is good.
        hosts: IP addresses on which the owner's TCP sockets listen, and from which it connects to others.
    """
    listed = ",".join(sorted(set(hosts))).encode("ascii")
    header = _HEADER.pack(_MAGIC, _VERSION, medium.encode("ascii"), peer, epoch, len(listed))
    return header + _digest(header, listed + raw) + listed + raw


def hosts_of(address: bytes) -> tuple[str, ...]:
    """List the IP addresses of a sealed address; none if it is not sealed, for which `unseal` raises."""
    start = _HEADER.size + _DIGEST_BYTES
    if len(address) < start or address[:4] != _MAGIC + bytes([_VERSION]):
        return ()
    *_, length = _HEADER.unpack(address[: _HEADER.size])
    listed = address[start : start + length].decode("ascii", "replace")
    return tuple(listed.split(",")) if listed else ()


def unseal(medium: str, address: bytes, peer: Peer, epoch: int) -> bytes:
    """Check that a sealed address is `peer`'s and of `epoch`, and return the raw address.

    Raises:
        ProtocolError: it is damaged, of another kind, somebody else's, or out of date.
    """
    data = bytes(address)
    start = _HEADER.size + _DIGEST_BYTES
    if len(data) < start or not data.startswith(_MAGIC):
        raise ProtocolError(
            f"{len(data)} bytes are no address of peer {peer}; do both sides use transport {medium!r}?"
        )
    header, digest, raw = data[: _HEADER.size], data[_HEADER.size : start], data[start:]
    _, version, kind, owner, made, num_listed = _HEADER.unpack(header)
    if version != _VERSION:
        raise ProtocolError(
            f"peer {peer}'s address has layout {version}, here {_VERSION}: install the same version"
        )
    if digest != _digest(header, raw):
        raise ProtocolError(f"peer {peer}'s {medium} address of {len(data)} bytes is damaged (checksum)")
    if kind.rstrip(b"\0") != medium.encode("ascii"):
        raise ProtocolError(
            f"peer {peer}'s address is of transport {kind.rstrip(bytes(1))!r}, expected {medium!r}"
        )
    if owner != peer:
        raise ProtocolError(f"expected the {medium} address of peer {peer}, got that of peer {owner}")
    if made != epoch:
        raise ProtocolError(
            f"peer {peer}'s {medium} address is of epoch {made}, but this is epoch {epoch}: out of date"
        )
    if not 0 < len(raw) - num_listed <= MAX_RAW_BYTES:
        raise ProtocolError(f"peer {peer}'s {medium} address has {len(raw)} bytes, which is not plausible")
    return raw[num_listed:]


def _digest(header: bytes, raw: bytes) -> bytes:
    return hashlib.sha256(header + raw).digest()
