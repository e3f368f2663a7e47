"""Define the interface that every transport implements, and its parts: tags, memory, and sealed addresses.

A transport moves plain buffers between peers (the processes of a mesh). Transports know nothing of programs,
steps or arrays.

Buffers are checked and never copied (see `memory_of`). A buffer is a numpy array of any dtype (also types
such as bfloat16), or a device array with `__cuda_array_interface__`. Two kinds of arrays are refused: an
array that is not C-contiguous, and a read-only array to receive into, because UCX would accept either and
write over other memory.

A medium such as UCX gives each transport a raw address. The code to which peers later pass that address
trusts it, and one garbage byte in a UCX worker address ends the process. Raw addresses are therefore sealed
before they are sent (see `seal`): the medium, the owner, the epoch (the number of aborts of the whole mesh so
far) and a SHA-256 of all these are added. The seal detects addresses that are damaged, mixed up or out of
date, but does not prove who made an address. The proof is that processes receive addresses only over the
control channel, whose frames carry a message authentication code (MAC).
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import math
import struct
from collections.abc import Callable, Container, Iterable
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from jaxpp_async.errors import ProtocolError, TransferError
from jaxpp_async.transport.shared_memory import SharedBlock

Peer: TypeAlias = int
"""The number of a process in the mesh, or `program.CONTROLLER`."""

OnEnd: TypeAlias = Callable[[Exception | None], object]
"""A function that is called with the outcome of a posted transfer: None, or the error that a future would
raise. The function must not raise an exception."""

Post: TypeAlias = "Callable[[Memory, Peer, int, OnEnd], bool]"
"""The type of `Transport.post_send` and `Transport.post_recv`."""

EPOCH_BITS, SENDER_BITS, CHANNEL_BITS, SEQUENCE_BITS = 16, 16, 8, 24

PROGRAM_CHANNEL, HOST_CHANNEL, COPY_CHANNEL = 1, 2, 3
"""The channels of tags for the transfers of a program, for values between the controller and actors, and for
replicas (copies of the state kept for restarts)."""


def make_tag(epoch: int, channel: int, sequence: int) -> int:
    """Pack a 64-bit tag for a message. From the highest bit on, a tag contains the epoch (16 bits), the
    sender (16 bits, zero here), the channel (8 bits) and the sequence number (24 bits).

    If a medium, such as UCX, matches messages by tag alone, its transport puts the sender's id into the
    sender's bits.

    Args:
        epoch: the mesh's epoch, which changes at every restart and abort of the mesh. A message that was sent
            before such a change therefore never matches a later receive.
        channel: the kind of transfer, such as `PROGRAM_CHANNEL`.
        sequence: the number that tells the messages of one channel apart.

    Raises:
        ValueError: an argument does not fit its bits.
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
"""The bits that no tag made by `make_tag` has; in a negative number all of them are set."""


def check_tag(tag: int) -> None:
    """Check that a tag is one that `make_tag` can return.

    Raises:
        ValueError: the tag has bits that `make_tag` never sets.
    """
    if tag & MISPLACED_TAG_BITS:
        raise ValueError(f"tag {tag:#x} has bits outside epoch, channel and sequence; make it with make_tag")


class Transport:
    """The base class of every transport, which makes point-to-point transfers on one event loop.

    Every method is called on the loop's thread. Buffers are C-contiguous numpy arrays, or device arrays with
    `__cuda_array_interface__` where the transport supports them; the buffer of a receive must be writable. A
    buffer belongs to the transport until the transfer has ended. Cancelling the future does not end the
    transfer: a cancelled receive stays posted and consumes its message. Only `abort` and `aclose` end
    transfers early. An invalid argument (a read-only or strided buffer, a malformed tag) raises ValueError
    immediately; every later error is raised on the future.

    `send` and `recv` call `post_send` and `post_recv` and make a future for each transfer. Callers that move
    thousands of messages a second use the post methods directly: a future takes more time than sending a
    small message, and its callbacks run one pass of the loop later.

    Messages of one (peer, tag) pair arrive in the order they were sent and match receives in the order they
    were posted. A completed send means that the buffer may be reused, not that the message was delivered.

    Some methods have a default here that suits most media; every transport defines the others.

    Args:
        peer_id: the transport's own id.

    Attributes:
        epoch: the mesh's epoch, which counts aborts of the whole mesh; 0 at first. The code that makes the
            transport sets `epoch` before it reads `address` or calls `connect`. An address is valid in one
            epoch only, so that the address of a transport that no longer exists is never used.
    """

    def __init__(self, peer_id: Peer):
        self.peer_id, self.epoch = peer_id, 0
        self._loop = asyncio.get_running_loop()

    @property
    def address(self) -> bytes:
        """The opaque address by which a peer connects to this transport."""
        raise NotImplementedError

    def admit(self, addresses: Iterable[bytes]) -> None:
        """Allow connections from the peers with these addresses and from nobody else. Call this before any
        peer connects.

        The default does nothing, which suits a medium to which strangers cannot connect, or whose library
        opens the sockets itself.

        Raises:
            TransferError: the operating system does not allow the change.
        """

    def check_device_memory(self) -> None:
        """Check that this transport can transfer memory of this process's GPUs, before any is passed to it.

        The default does nothing, which suits a medium that supports all device memory, and a medium that is
        never given device memory.

        Raises:
            MeshError: the medium was built or configured without support for GPU memory.
        """

    async def connect(self, peer: Peer, address: bytes) -> None:
        """Connect to `peer`, so that transfers with it can be posted. Each of the two peers must connect to
        the other before either sends.

        Args:
            peer: the peer's id.
            address: the `address` of the peer's own transport.

        Raises:
            ValueError: `peer` is this transport itself, or is connected already.
            ProtocolError: `address` is damaged, or belongs to another kind of transport, another peer or
                another epoch.
            TransferError: the medium could not make the link, or the transport has closed.
        """
        raise NotImplementedError

    def routes(self, peer: Peer) -> tuple[str, ...]:
        """Return the sorted names of the routes that the medium uses for messages to and from a connected
        peer, such as `"posix"`, `"cuda_ipc"`, `"rc_mlx5"` or `"tcp"`; empty, as by default, if the medium has
        only one route or does not report it."""
        return ()

    def send(self, buffer: Any, peer: Peer, tag: int) -> asyncio.Future[None]:
        """Start sending the whole of `buffer`, and return a future that is done when the buffer may be
        reused.

        Raises (on the future):
            TransferError: the link failed or was aborted.
            ProtocolError: the receiver expected another size, and the medium reports that to the sender. (UCX
                does not, so that over UCX only the receive fails.)
        """
        return post_future(self._loop, self.post_send, memory_of(buffer, writable=False), peer, tag)

    def recv(self, buffer: Any, peer: Peer, tag: int) -> asyncio.Future[None]:
        """Post a receive of exactly `buffer`'s size, and return a future that is done when the data has
        arrived.

        Raises (on the future):
            TransferError: the link failed or was aborted.
            ProtocolError: a message of another size arrived.
        """
        return post_future(self._loop, self.post_recv, memory_of(buffer, writable=True), peer, tag)

    def post_send(self, memory: Memory, peer: Peer, tag: int, done: OnEnd) -> bool:
        """Start sending the whole of `memory`, without a future.

        Args:
            memory: the memory to send, made by `memory_of`; it belongs to the transport until the transfer
                has ended.
            peer: the id of the receiving peer.
            tag: the message's tag, made by `make_tag`.
            done: the callback for the outcome. If this method returns False, `done` is called exactly once,
                with None or with the error that `send` would raise on its future. The call is made on the
                loop's thread, from the transport's own progress or its `abort`, never inside a post call. The
                callback may post transfers, and must not block.

        Returns:
            True if the send has completed already; `done` is then never called.

        Raises:
            TransferError: `peer` is not connected, its link has failed, or the medium refuses the send. Then
                `done` is not called, and the memory belongs to the caller again.
            ValueError: the tag is malformed; `done` is not called either.
        """
        raise NotImplementedError

    def post_recv(self, memory: Memory, peer: Peer, tag: int, done: OnEnd) -> bool:
        """Post a receive of exactly `memory`'s size, without a future.

        Args:
            memory: the memory to receive into, made by `memory_of(..., writable=True)`.
            peer: the id of the sending peer.
            tag: the message's tag, made by `make_tag`.
            done: the callback for the outcome, called as for `post_send`; its error may also be a
                ProtocolError, if a message of another size arrived.

        Returns:
            True if the data has arrived already; `done` is then never called.

        Raises:
            TransferError: as for `post_send`.
            ValueError: as for `post_send`.
        """
        raise NotImplementedError

    def hurry(self, on: bool) -> None:
        """Tell the transport whether the caller has nothing to compute and only waits for transfers.

        This is a hint, which is off at first. While the hint is on, the transport may poll for messages for
        up to a millisecond before the loop sleeps, if polling has helped recently. If a large send is faster
        once the peer has posted the receive, the transport may also hold back that send, and all later sends
        with the same tag, for up to a millisecond. Meanwhile other processes may use the CPU core, and the
        loop's other work is not delayed. The default does nothing, which suits a medium that never polls.

        Args:
            on: True if the caller only waits for transfers from now on; False if it has other work.
        """

    async def abort(self, peer: Peer | None = None) -> None:
        """End every open transfer with `peer` (with all peers if None) with `TransferError`, and forget the
        peer.

        When this method returns, the transport no longer uses the buffers of those transfers. If a transfer
        with another peer uses the same memory too, `abort` may wait until that transfer has ended as well
        (UCX does so). Afterwards `connect` may be called again, and all later tags must have a new epoch. If
        the peer's process has died, close this transport and make a new one instead, because a killed process
        may leave memory that it shared with this process (UCX's shared-memory queues) in an unusable state.

        Raises:
            TransferError: the medium still uses buffers after 5 s, and they must not be reused.
        """
        raise NotImplementedError

    async def aclose(self) -> None:
        """Abort all transfers and release descriptors and memory. A second call does nothing."""
        raise NotImplementedError

    def _check_connectable(self, peer: Peer, is_closed: bool, connected: Container[Peer]) -> None:
        """Raise the errors of `connect` that do not depend on the address or the medium.

        Args:
            peer: the peer to connect to.
            is_closed: whether this transport has closed.
            connected: the peers that are connected already.

        Raises:
            TransferError: the transport has closed.
            ValueError: the peer is this transport itself, or is connected already.
        """
        if is_closed:
            raise TransferError(f"peer {self.peer_id}: the transport has closed")
        if peer == self.peer_id:
            raise ValueError(f"peer {peer} cannot connect to itself")
        if peer in connected:
            raise ValueError(f"peer {peer} is connected already; abort it before connecting anew")


def post_future(
    loop: asyncio.AbstractEventLoop, post: Post, memory: Memory, peer: Peer, tag: int
) -> asyncio.Future[None]:
    """Post a transfer, and return a future that is done when the transfer has ended. A transport's `send` and
    `recv` use this function.

    Every TransferError is raised on the future, including the one that says that the peer is not connected.

    Args:
        loop: the event loop of the future.
        post: the transport's `post_send` or `post_recv`.
        memory: the memory to send or to receive into.
        peer: the peer's id.
        tag: the message's tag.
    """
    future: asyncio.Future[None] = loop.create_future()

    def done(error: Exception | None) -> None:
        if future.done():  # the future was cancelled
            return
        if error is None:
            future.set_result(None)
            return
        future.set_exception(error)
        if isinstance(error, TransferError):
            # Marks the error as retrieved: a failed link ends many transfers, most of which nobody awaits.
            future.exception()

    try:
        if post(memory, peer, tag, done):
            future.set_result(None)
    except TransferError as error:
        done(error.with_traceback(None))  # the traceback refers to this frame, and so to future and memory
    return future


# ---------------------------------------------------------------- memory

_Start = ctypes.c_char * 0
"""The type of an array without elements, by which the address of a buffer of any size can be read."""


class Memory(NamedTuple):
    """A range of bytes that a transport may read; made by `memory_of`. If `memory_of` was called with
    `writable=True`, the transport may also write the bytes.

    If a caller uses one buffer repeatedly, it keeps the buffer's `Memory`, because checking a buffer takes
    longer than posting a transfer.

    Args:
        address: the address of the first byte, on the host or on a device.
        size_bytes: the number of bytes.
        owner: an object that keeps the bytes alive; a transport keeps a reference to it as long as it uses
            the memory.
        on_device: whether the bytes are in a GPU's memory, which the CPU cannot read or write.
    """

    address: int
    size_bytes: int
    owner: Any
    on_device: bool = False


def memory_of(buffer: Any, *, writable: bool) -> Memory:
    """Check a numpy array, a device array or a shared block (`SharedBlock`), and return its `Memory` for
    transfers.

    Args:
        buffer: the array or block; an array must be C-contiguous, and its dtype must hold no Python
            references.
        writable: whether data will be received into the buffer; if so, a read-only array is refused.

    Raises:
        ValueError: `buffer` is none of these, is not C-contiguous, has elements that are Python references,
            or is read-only although `writable` is True.
    """
    if type(buffer) is SharedBlock:
        return Memory(buffer.address, buffer.size_bytes, buffer)
    if type(buffer) is np.ndarray and not buffer.dtype.hasobject:
        try:
            # This costs a third of __array_interface__, but accepts only contiguous, writable arrays of
            # plain dtypes.
            start = _Start.from_buffer(buffer)  # pyright: ignore[reportArgumentType]
            return Memory(ctypes.addressof(start), buffer.nbytes, buffer)
        except (TypeError, ValueError, BufferError):
            pass
    elif (interface := getattr(buffer, "__cuda_array_interface__", None)) is not None:
        return Memory(*_locate_on_device(interface, writable), buffer, on_device=True)
    _check_array(buffer, writable)
    return Memory(buffer.__array_interface__["data"][0], buffer.nbytes, buffer)


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
# magic, version, medium, peer, epoch, length of the list of hosts
_HEADER: Final = struct.Struct(">3sB8siIH")
_DIGEST_BYTES: Final = hashlib.sha256().digest_size


def seal(medium: str, raw: bytes, peer: Peer, epoch: int, hosts: Iterable[str] = ()) -> bytes:
    """Add the medium, the owner, the epoch and a checksum to a raw address, so that `unseal` can check the
    address.

    Args:
        medium: the name of the transport, at most 8 ASCII letters.
        raw: the address that the medium (such as UCX) returned.
        peer: the id of the address's owner.
        epoch: the epoch of the mesh (the number of aborts of the whole mesh so far) in which the address is
            valid.
        hosts: the IP addresses on which the owner's TCP sockets listen, and from which the owner connects to
            others.
    """
    listed = ",".join(sorted(set(hosts))).encode("ascii")
    header = _HEADER.pack(_MAGIC, _VERSION, medium.encode("ascii"), peer, epoch, len(listed))
    return header + _digest(header, listed + raw) + listed + raw


def hosts_of(address: bytes) -> tuple[str, ...]:
    """Return the IP addresses that a sealed address contains (the `hosts` that its owner passed to `seal`).

    Returns:
        The IP addresses. Empty if the owner gave none, or if `seal` did not make the address (in that case
        `unseal` raises an error).
    """
    start = _HEADER.size + _DIGEST_BYTES
    if len(address) < start or address[:4] != _MAGIC + bytes([_VERSION]):
        return ()
    *_, length = _HEADER.unpack(address[: _HEADER.size])
    listed = address[start : start + length].decode("ascii", "replace")
    return tuple(listed.split(",")) if listed else ()


def unseal(medium: str, address: bytes, peer: Peer, epoch: int) -> bytes:
    """Check that a sealed address is of this medium, of `peer` and of `epoch`, and return the raw address.

    Raises:
        ProtocolError: the address is damaged, of another kind of transport, of another peer, or of another
            epoch.
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
