"""Carry buffers between transports of one process and one event loop, through an object instead of a network.

This transport is deterministic: messages arrive immediately, in the order in which they are sent. Like UCX,
this transport completes a small send immediately and a larger send only when a receive matches it, and never
writes to a buffer that the receiver has not posted. The module starts no thread and keeps no module state.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from jaxpp_async.errors import ProtocolError, TransferError
from jaxpp_async.transport.base import Memory, OnEnd, Peer, Transport, check_tag
from jaxpp_async.transport.network import Network

EAGER_BYTES = 8192
"""The size up to which a send completes immediately; a larger send completes when a receive matches it."""


class MemoryNetwork:
    """The medium that joins `MemoryTransport`s. Tests have a subclass that delays and loses messages."""

    def __init__(self) -> None:
        self._transports: dict[bytes, MemoryTransport] = {}
        self._num_addresses = 0

    def is_eager(self, size_bytes: int) -> bool:
        """Return whether the send of a message of this size completes immediately."""
        return size_bytes <= EAGER_BYTES

    def carry(self, receiver: MemoryTransport, sender: Peer, tag: int, message: MemoryMessage) -> None:
        """Bring a message to its receiver."""
        receiver.accept(sender, tag, message)

    def join(self, transport: MemoryTransport) -> bytes:
        """Register `transport`, and return a new address for it that was never used before."""
        self._num_addresses += 1
        address = b"memory:%d:%d" % (transport.peer_id, self._num_addresses)
        self._transports[address] = transport
        return address

    def leave(self, address: bytes) -> None:
        """Remove an address and its transport from the network."""
        self._transports.pop(address, None)

    def find(self, address: bytes) -> MemoryTransport | None:
        """Return the transport at `address`; None if that transport has closed."""
        return self._transports.get(address)


@dataclass(slots=True, eq=False)
class _Transfer:
    """A send or receive that was posted, and its outcome once it has ended."""

    memory: Memory
    done: OnEnd
    what: str
    ended: bool = False
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class MemoryMessage:
    """A message that was sent and has not been received yet. A small message has a copy of its bytes. A large
    one refers to the sender's memory, and to the sender's transfer, which stays open until the message is
    received."""

    size_bytes: int
    bytes: bytes | Memory
    sending: _Transfer | None
    withdrawn: bool = False


@dataclass(slots=True)
class _Stream:
    """The messages that one peer sent with one tag, and the receives that were posted for them. Each queue is
    in the order of the calls."""

    messages: deque[MemoryMessage] = field(default_factory=deque)
    receives: deque[_Transfer] = field(default_factory=deque)


@dataclass(slots=True)
class _Link:
    """The state of the connection to one peer, with the sends to that peer that are still open."""

    remote: MemoryTransport
    failure: str | None = None
    sends: dict[_Transfer, MemoryMessage] = field(default_factory=dict)


class MemoryTransport(Transport):
    """A transport between peers in one process, on the running event loop; see `Transport` for the interface.

    Args:
        network: the medium, shared with the peers.
        peer_id: the transport's own id.
    """

    def __init__(self, network: MemoryNetwork, peer_id: Peer):
        super().__init__(peer_id)
        self._network = network
        self._links: dict[Peer, _Link] = {}
        self._streams: dict[tuple[Peer, int], _Stream] = {}
        self._ended: list[_Transfer] = []  # transfers whose `done` has not been called yet
        self._closed = False
        self._address = network.join(self)

    @property
    def address(self) -> bytes:
        return b"%s:epoch %d" % (self._address, self.epoch)

    async def connect(self, peer: Peer, address: bytes) -> None:
        self._check_connectable(peer, self._closed, self._links)
        place, _, epoch = address.partition(b":epoch ")
        if not place.startswith(b"memory:%d:" % peer):
            raise ProtocolError(f"{len(address)} bytes are no memory address of peer {peer}")
        if epoch != b"%d" % self.epoch:
            raise ProtocolError(f"{address[:80]!r} is of another epoch than {self.epoch}: out of date")
        remote = self._network.find(place)
        if remote is None:
            raise TransferError(f"peer {self.peer_id} cannot reach peer {peer}: nobody is at {place[:80]!r}")
        if remote._loop is not self._loop:
            raise TransferError(
                f"peers {self.peer_id} and {peer} run on two event loops; use transport 'ucx'"
            )
        self._links[peer] = _Link(remote)

    def post_send(self, memory: Memory, peer: Peer, tag: int, done: OnEnd) -> bool:
        _check_call(memory, tag)
        transfer = _Transfer(memory, done, f"transfer from peer {self.peer_id} to peer {peer}, tag {tag:#x}")
        link = self._usable_link(peer, transfer)
        if link.remote._closed:
            raise TransferError(f"{transfer.what} failed: the peer has closed")
        return self._post_message(link, transfer, tag)

    def post_recv(self, memory: Memory, peer: Peer, tag: int, done: OnEnd) -> bool:
        _check_call(memory, tag)
        transfer = _Transfer(memory, done, f"transfer from peer {peer} to peer {self.peer_id}, tag {tag:#x}")
        self._usable_link(peer, transfer)
        self._streams.setdefault((peer, tag), _Stream()).receives.append(transfer)
        self._match((peer, tag))
        return self._ended_already(transfer)

    async def abort(self, peer: Peer | None = None) -> None:
        for other in [p for p in self._links if peer is None or p == peer]:
            self._end_transfers(other, self._links[other].failure or "aborted")
            del self._links[other]
        self._report_ended()

    async def aclose(self) -> None:
        self._closed = True
        await self.abort()
        self._network.leave(self._address)

    def _end_transfers(self, peer: Peer, cause: str) -> None:
        for transfer, message in self._links[peer].sends.items():
            message.withdrawn = True
            self._end(transfer, TransferError(f"{transfer.what} failed: {cause}"))
        self._links[peer].sends.clear()
        for key in [key for key in self._streams if key[0] == peer]:
            # Messages that arrived without a receive are discarded with their epoch.
            for transfer in self._streams.pop(key).receives:
                self._end(transfer, TransferError(f"{transfer.what} failed: {cause}"))

    # ------------------------------------------------------------ ends of transfers

    def _end(self, transfer: _Transfer, error: Exception | None = None) -> None:
        """Record that a transfer has ended, with its error if it failed. Its `done` callback is called in the
        loop's next pass, because this method may run inside a post call."""
        if not self._ended:
            self._loop.call_soon(self._report_ended)
        transfer.ended, transfer.error = True, error
        self._ended.append(transfer)

    def _ended_already(self, transfer: _Transfer) -> bool:
        """Return whether a transfer has ended successfully within its own post call, and if so cancel the
        call of its `done`."""
        if not transfer.ended or transfer.error is not None:
            return False
        self._ended.remove(transfer)
        return True

    def _report_ended(self) -> None:
        ended, self._ended = self._ended, []
        for transfer in ended:
            try:
                transfer.done(transfer.error)
            except Exception as failure:  # an error of the caller's code; go on with the others
                self._loop.call_exception_handler(
                    {"message": f"{transfer.done} failed", "exception": failure}
                )

    # ------------------------------------------------------------ sending

    def _usable_link(self, peer: Peer, transfer: _Transfer) -> _Link:
        link = self._links.get(peer)
        if link is not None and link.failure is None:
            return link
        why = "the transport has closed" if self._closed else "not connected; call connect first"
        raise TransferError(f"{transfer.what} failed: {(link and link.failure) or why}")

    def _post_message(self, link: _Link, transfer: _Transfer, tag: int) -> bool:
        memory = transfer.memory
        eager = self._network.is_eager(memory.size_bytes)
        content, sending = (_copy(memory), None) if eager else (memory, transfer)
        message = MemoryMessage(memory.size_bytes, content, sending)
        if not eager:
            link.sends[transfer] = message
        self._network.carry(link.remote, self.peer_id, tag, message)
        return eager or self._ended_already(transfer)

    # ------------------------------------------------------------ receiving

    def accept(self, sender: Peer, tag: int, message: MemoryMessage) -> None:
        """Take in a message that has arrived; the network calls this in the order in which the messages of
        one sender and tag were sent."""
        self._streams.setdefault((sender, tag), _Stream()).messages.append(message)
        self._match((sender, tag))

    def _match(self, key: tuple[Peer, int]) -> None:
        stream = self._streams.get(key)
        if stream is None:
            return
        messages, receives = stream.messages, stream.receives
        while messages and (messages[0].withdrawn or receives):
            message = messages.popleft()
            if not message.withdrawn:
                self._deliver(key[0], message, receives.popleft())
        if not messages and not receives:
            del self._streams[key]

    def _deliver(self, sender: Peer, message: MemoryMessage, receive: _Transfer) -> None:
        source, expected, got = message.bytes, receive.memory.size_bytes, message.size_bytes
        if expected == got:
            ctypes.memmove(
                receive.memory.address, source.address if isinstance(source, Memory) else source, got
            )
            self._end(receive)
        else:
            self._end(receive, ProtocolError(f"{receive.what}: expected {expected} bytes, got {got}"))
        if message.sending is not None:
            self._links[sender].remote._sent(self.peer_id, message.sending)

    def _sent(self, peer: Peer, transfer: _Transfer) -> None:
        self._links[peer].sends.pop(transfer, None)
        self._end(transfer)


def make_transport(
    peer_id: Peer, network: Network | None, shared: MutableMapping[str, Any]
) -> MemoryTransport:
    """Make a transport on the mesh's `MemoryNetwork`, of which each mesh has one. If `shared` does not
    contain that network yet, make the network too. This is a `registry.Factory`."""
    return MemoryTransport(shared.setdefault("memory", MemoryNetwork()), peer_id)


def _check_call(memory: Memory, tag: int) -> None:
    check_tag(tag)
    if memory.on_device:
        raise ValueError("transport 'memory' moves host memory only; use transport 'ucx' for device arrays")


def _copy(memory: Memory) -> bytes:
    return ctypes.string_at(memory.address, memory.size_bytes)
