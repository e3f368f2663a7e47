"""Carry buffers between transports of one process and one event loop, through an object instead of a network.

This transport is deterministic: messages without a delay arrive immediately, in the order in which they are
sent. Like UCX, this transport completes a small send immediately and a larger send only when a receive
matches it, and never writes to a buffer that the receiver has not posted. Tests set delays and faults on the
`MemoryNetwork`. The module starts no thread and keeps no module state.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jaxpp_async.errors import ProtocolError, TransferError
from jaxpp_async.transport.base import Memory, OnEnd, Peer, Transport, check_tag
from jaxpp_async.transport.network import Network

Rule: TypeAlias = Callable[[Peer, Peer, int, int], float]
"""A function that returns a delay in seconds for a message, given its sender, receiver, tag and size in
bytes."""

Choice: TypeAlias = Callable[[Peer, Peer, int, int], bool]
"""A function that returns whether a message is lost, given its sender, receiver, tag and size in bytes."""


class MemoryNetwork:
    """The medium that joins `MemoryTransport`s; tests may set its attributes at any time.

    Attributes:
        eager_bytes: the size up to which a send completes immediately; a larger send completes when a receive
            matches it. None: every send completes immediately.
        delay: a rule that gives each message's delay in seconds; None: no delay. Messages of one (peer, tag)
            pair keep their order even if their delays differ.
        drop: a rule that chooses which messages are lost. The send of a lost message still completes if the
            message has at most `eager_bytes`, and otherwise stays open. None: no message is lost.
    """

    def __init__(
        self, *, eager_bytes: int | None = 8192, delay: Rule | None = None, drop: Choice | None = None
    ):
        self.eager_bytes, self.delay, self.drop = eager_bytes, delay, drop
        self._transports: dict[bytes, MemoryTransport] = {}
        self._num_addresses = 0

    def fail_link(self, one: Peer, other: Peer) -> None:
        """End every transfer between two peers with `TransferError`; later transfers fail too until both
        peers have aborted and connected again. Tests call this method."""
        for transport in self._transports.values():
            for here, there in ((one, other), (other, one)):
                if transport.peer_id == here:
                    transport.fail_link(there, "link lost (injected)")

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
class _Message:
    """A message that was sent and has not been received yet. A small message has a copy of its bytes. A large
    one refers to the sender's memory, and to the sender's transfer, which stays open until the message is
    received."""

    bytes: bytes | Memory
    sending: _Transfer | None
    arrived: bool = False
    withdrawn: bool = False


@dataclass(slots=True)
class _Stream:
    """The messages that one peer sent with one tag, and the receives that were posted for them. Each queue is
    in the order of the calls."""

    messages: deque[_Message] = field(default_factory=deque)
    receives: deque[_Transfer] = field(default_factory=deque)


@dataclass(slots=True)
class _Link:
    """The state of the connection to one peer, with the sends to that peer that are still open."""

    remote: MemoryTransport
    failure: str | None = None
    sends: dict[_Transfer, _Message] = field(default_factory=dict)


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
        return self._post_message(link, transfer, peer, tag)

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

    def fail_link(self, peer: Peer, cause: str) -> None:
        """End the transfers with `peer` as if the medium had lost the connection. Tests cause this by
        `MemoryNetwork.fail_link`."""
        if peer in self._links:
            self._links[peer].failure = cause
            self._end_transfers(peer, cause)

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

    def _post_message(self, link: _Link, transfer: _Transfer, peer: Peer, tag: int) -> bool:
        network, memory = self._network, transfer.memory
        eager = network.eager_bytes is None or memory.size_bytes <= network.eager_bytes
        message = _Message(_copy(memory), None) if eager else _Message(memory, transfer)
        if not eager:
            link.sends[transfer] = message
        where = (self.peer_id, peer, tag, memory.size_bytes)
        if network.drop is None or not network.drop(*where):
            delay_s = network.delay(*where) if network.delay is not None else 0.0
            link.remote._accept((self.peer_id, tag), message, delay_s)
        return eager or self._ended_already(transfer)

    # ------------------------------------------------------------ receiving

    def _accept(self, key: tuple[Peer, int], message: _Message, delay_s: float) -> None:
        """Add a message to its stream (the messages from one peer with one tag), and let it be received
        `delay_s` seconds later.

        The message is added immediately, so that the order of messages is kept.

        Args:
            key: the sender and the tag.
            message: the message.
            delay_s: the delay in seconds.
        """
        self._streams.setdefault(key, _Stream()).messages.append(message)
        if delay_s > 0:
            self._loop.call_later(delay_s, self._arrive, key, message)
        else:
            self._arrive(key, message)

    def _arrive(self, key: tuple[Peer, int], message: _Message) -> None:
        message.arrived = True
        self._match(key)

    def _match(self, key: tuple[Peer, int]) -> None:
        stream = self._streams.get(key)
        if stream is None:
            return
        messages, receives = stream.messages, stream.receives
        while messages and (messages[0].withdrawn or (messages[0].arrived and receives)):
            message = messages.popleft()
            if not message.withdrawn:
                self._deliver(key[0], message, receives.popleft())
        if not messages and not receives:
            del self._streams[key]

    def _deliver(self, sender: Peer, message: _Message, receive: _Transfer) -> None:
        source = message.bytes
        expected, got = (
            receive.memory.size_bytes,
            source.size_bytes if isinstance(source, Memory) else len(source),
        )
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
