"""Carry buffers between processes over UCX, on the event loop.

UCX makes progress on the event loop (`progress.py`), without threads. This package copies no data itself
except large messages within a host (`one_copy.py`). While the caller only waits for transfers, the transport
may poll for messages before the loop sleeps, and may hold such a large message back until it can be written
into the receiver's memory. Every endpoint has error handling switched on, so that a large send can be ended;
`abort` force-closes the endpoint and lets UCX make progress until UCX has released every buffer.

No buffer that UCX may still use is freed or reused. The size of each received message is checked. UCX is
never given an address that was damaged, mixed up or is out of date, because one garbage byte in a worker
address would end the process.

After a peer was killed, call `abort`, close this transport, and make a new transport, which has a new
address. If a process dies while it writes into this worker's shared-memory queue, the entry that it was
writing stays incomplete, and UCX waits for that entry for ever. The worker would never receive from any peer
again. This happened in about one of five kills in the middle of a transfer. If this worker was also sending
to that process, whose queue nobody empties any more, transfers do not even end when the endpoint is closed
(nearly always, if both sides send large messages). `abort` then gives up the worker.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import logging
import os
from collections.abc import Callable, Iterable, MutableMapping
from time import monotonic
from typing import Any

from jaxpp_async.base.descriptors import keep_accepted_from_children, keeping_new_from_children
from jaxpp_async.errors import MeshError, TransferError
from jaxpp_async.transport.base import (
    EPOCH_SHIFT,
    MISPLACED_TAG_BITS,
    SENDER_BITS,
    SENDER_SHIFT,
    Memory,
    OnEnd,
    Peer,
    Transport,
    check_tag,
    hosts_of,
    seal,
    unseal,
)
from jaxpp_async.transport.network import AddressFilter, ListeningSocket, Network, listening_sockets
from jaxpp_async.transport.ucx.context import (
    START_DESCRIPTORS,
    Context,
    check_takes_gpu_memory,
    describe_limits,
    open_context,
    resources,
    shares_memory,
)
from jaxpp_async.transport.ucx.links import SENDING, UcxLink, UcxTransfer, sender_bits_of
from jaxpp_async.transport.ucx.one_copy import MIN_ONE_COPY_BYTES, RTS_BYTES, OneCopyMessages
from jaxpp_async.transport.ucx.progress import Progress
from jaxpp_async.transport.ucx.tag_api import STATUS_CANCELED, STATUS_OK, TagPort, is_error

_LOG = logging.getLogger("jaxpp_async")

RELEASE_TIMEOUT_S = 5.0
"""The longest time in seconds that `abort` waits for UCX to stop using the buffers of transfers.
Force-closing has taken less than 1 ms."""

GIVE_UP_S = 0.25
"""The time in seconds for which a worker is stalled before `abort` gives it up, if it does not release all
buffers. A peer that still lives stalls this worker for microseconds, or longer on a busy host."""

_RETRY_S = 1.0
"""The interval in seconds at which a transport that could not close checks whether UCX has stopped using its
buffers, and the time in seconds from the first message of a link until its second connection is looked
for."""

_OPEN_TRIES = 3
"""The greatest number of workers that are made, one after the other, if strangers connect to a worker's
sockets before the sockets refuse them."""

MEDIUM = "ucx"
"""The name of this transport in its addresses."""


ERROR_HANDLING = "JAXPP_UCX_ERROR_HANDLING"
"""An environment variable: the value `n` switches UCX's error handling off for this process and for the
actors that it starts on this host; see `UCXTransport`."""


class UCXTransport(Transport):
    """A transport over UCX, on the running event loop (asyncio's own or uvloop); see `Transport` for the
    interface.

    Args:
        peer_id: the transport's own id, from -1 (the controller) to 65534; peers use it in `send` and `recv`.
        network: the network on which to listen. Only admitted peers (see `admit`) can then connect to a
            socket that other machines can reach. None: environment variables choose the network, and
            everybody may connect.
        error_handling: whether UCX notices that a peer has died and can end transfers in progress. Without
            it, nothing ends a large transfer that has begun, and an actor cannot survive an abort, so False
            is for measurements only. All peers need the same value.

    Raises:
        InstallError: ucxx is not installed.
        TransferError: this process was forked after UCX had started.
        MeshError: a network device that `UCX_NET_DEVICES` names does not exist, no port of the range is free,
            UCX lacks descriptors or shared memory, or strangers keep connecting.
    """

    def __init__(self, peer_id: Peer, *, network: Network | None = None, error_handling: bool = True):
        super().__init__(peer_id)
        self._own_bits, self._error_handling = sender_bits_of(peer_id), error_handling
        self._context: Context | None
        with keeping_new_from_children():
            self._context, self._listening, self._filter = _open(network)
        self._ucxx = self._context.ucxx
        self._worker: Any = self._context.worker
        self._port = TagPort(self._worker.handle)
        self._raw_address: bytes = self._worker.address.tobytes()
        self._links: dict[Peer, UcxLink] = {}
        self._open: dict[int, UcxTransfer] = {}
        self._discarding: dict[int, int] = {}  # UCX's requests of messages that are discarded
        self._identities = itertools.count(1)
        self._failed: list[UcxLink] = []
        self._past_epochs: dict[Peer, int] = {}
        self._is_hurried = False
        self._one_copy = OneCopyMessages(self, self._loop, self._own_bits)
        self._closing: asyncio.Task[None] | None = None
        self._closing_late: asyncio.TimerHandle | None = None
        self._progress = Progress(
            self._worker,
            self._ucxx.UCXError,
            self._ucxx.UCXConnectionResetError,
            self._port.completed,
            finish_ended=self._finish_ended,
            may_spin=self._may_spin,
            on_broken=self._on_broken,
        )
        self._schedule_run = self._progress.schedule_run

    def __repr__(self) -> str:
        counts = f"{len(self._links)} links, {len(self._open)} open transfers"
        return f"<UCXTransport of peer {self.peer_id}: {counts}>"

    @property
    def _is_closed(self) -> bool:
        return self._closing is not None or self._worker is None

    @property
    def address(self) -> bytes:
        ticket = self._one_copy.ticket if shares_memory() else b""
        raw = bytes([len(ticket)]) + ticket + self._raw_address
        return seal(MEDIUM, raw, self.peer_id, self.epoch, (one.address for one in self._listening))

    def check_device_memory(self) -> None:
        if self._context is not None:
            check_takes_gpu_memory(resources(self._context.ucp.info))

    def admit(self, addresses: Iterable[bytes]) -> None:
        if self._filter is not None:
            own = {one.address for one in self._listening}
            try:
                self._filter.admit(own.union(*map(hosts_of, addresses)))
            except OSError as error:
                raise TransferError(f"peer {self.peer_id} cannot let its peers in: {error}") from error

    async def connect(self, peer: Peer, address: bytes) -> None:
        self._check_connectable(peer, self._is_closed, self._links)
        raw = unseal(MEDIUM, address, peer, self.epoch)
        ticket, target = raw[1 : 1 + raw[0]], raw[1 + raw[0] :]
        if peer in self._past_epochs:
            self._discard_unexpected(sender_bits_of(peer), self._past_epochs.pop(peer))
        try:
            with keeping_new_from_children():
                endpoint = self._worker.create_endpoint_from_worker_address(
                    self._ucxx.UCXAddress.create_from_buffer(target), self._error_handling
                )
        except self._ucxx.UCXError as error:
            alone = (
                ""
                if self._listening
                else "; processes that share no memory (containers) need UCX_NET_DEVICES=lo"
            )
            raise TransferError(
                f"peer {self.peer_id} cannot reach peer {peer}: {error} ({describe_limits()}){alone}"
            ) from error
        link = UcxLink(
            peer,
            endpoint,
            self._one_copy.find_local_peer(ticket) if shares_memory() else None,
            self._own_bits,
            self._port.routes(endpoint.handle),
        )
        # The callback runs inside UCX's progress: it only records the link, and _finish_ended fails it.
        failed = self._failed
        endpoint.set_close_callback(lambda: failed.append(link))
        self._links[peer] = link
        self._schedule_run()

    def routes(self, peer: Peer) -> tuple[str, ...]:
        link = self._links.get(peer)
        return () if link is None else self._port.routes(link.handle)

    def post_send(self, memory: Memory, peer: Peer, tag: int, done: OnEnd) -> bool:
        if tag & MISPLACED_TAG_BITS:
            check_tag(tag)
        link = self._links.get(peer)
        if link is None or link.failure is not None:
            raise self._why_unusable(peer, link)
        link.epoch = tag >> EPOCH_SHIFT
        offers = link.offers
        number = offers.sent.next(tag) if offers is not None else None
        if (
            offers is not None
            and (memory.size_bytes >= MIN_ONE_COPY_BYTES or self._one_copy.sender.holds_back)
            and self._one_copy.sender.send(
                UcxTransfer(link, memory, SENDING, tag, done, number), self._is_hurried
            )
        ):
            return False
        if link.failure is not None:  # UCX has just refused a message of the one-copy protocol
            raise self._why_unusable(peer, link)
        identity = next(self._identities)
        result = self._port.send(
            link.handle, memory.address, memory.size_bytes, tag | self._own_bits, identity
        )
        if result:
            self._track(UcxTransfer(link, memory, SENDING, tag, done, number), identity, result)
        return result == 0  # 0: UCX has taken over the message, and needs no progress

    def post_recv(self, memory: Memory, peer: Peer, tag: int, done: OnEnd) -> bool:
        if tag & MISPLACED_TAG_BITS:
            check_tag(tag)
        link = self._links.get(peer)
        if link is None or link.failure is not None:
            raise self._why_unusable(peer, link)
        link.epoch = tag >> EPOCH_SHIFT
        number = link.offers.received.next(tag) if link.offers is not None else None
        identity = next(self._identities)
        size_bytes = memory.size_bytes
        if size_bytes >= MIN_ONE_COPY_BYTES and number is not None:
            self._one_copy.receiver.share_block(memory)
        result = self._port.recv(memory.address, size_bytes, tag | link.sender_bits, identity)
        completed = self._port.completed
        if completed and completed[-1] == (identity, STATUS_OK, size_bytes) and size_bytes != RTS_BYTES:
            completed.pop()  # the message had arrived before the receive
            self._port.free(result)
            self._note_received(link)
            self._schedule_run()
            return True
        transfer = UcxTransfer(link, memory, size_bytes, tag, done, number)
        self._track(transfer, identity, result)
        if size_bytes >= MIN_ONE_COPY_BYTES and number is not None:
            self._one_copy.receiver.offer(transfer)
        return False

    def hurry(self, on: bool) -> None:
        self._is_hurried = on
        if not on:
            self._progress.adaptive_spin.cancel_wait()
        elif self._open:
            self._schedule_run()

    async def abort(self, peer: Peer | None = None) -> None:
        for link in [link for link in self._links.values() if peer is None or link.peer == peer]:
            del self._links[link.peer]
            if link.epoch is not None:
                self._past_epochs[link.peer] = link.epoch
            self._close_link(link)
        await self._wait_released(peer)

    async def aclose(self) -> None:
        """Abort all transfers and close; see `Transport.aclose`. If that fails because UCX still uses
        buffers, a second call tries again, and the transport itself tries again regularly until UCX has
        released them."""
        if self._closing is None or (self._closing.done() and self._worker is not None):
            # A task of its own, so that everything is released even if this await is cancelled.
            self._closing = self._loop.create_task(
                self._close(), name=f"close UCX transport of peer {self.peer_id}"
            )
        await asyncio.shield(self._closing)

    # ------------------------------------------------------------ ends of transfers

    def _on_broken(self, cause: str) -> None:
        """Fail every transfer now, because the worker is broken. The buffers are kept alive, since UCX may
        still use them."""
        self._progress.unwatch()
        for link in self._links.values():
            self._fail_link(link, cause)
        self._finish_ended()
        for link in self._links.values():
            self._one_copy.drop(link)
        for transfer in list(self._open.values()):
            self.finish(transfer, STATUS_CANCELED, 0)

    def _may_spin(self) -> bool:
        """Return whether to poll for messages before the loop sleeps. The result is True if the caller only
        waits, transfers are open, and no large message is being held back or copied within this host, because
        a copy takes far longer than polling should."""
        return self._is_hurried and bool(self._open) and not self._one_copy.busy

    def _finish_ended(self) -> bool:
        """Fail the links that UCX has closed, and finish the operations that have ended.

        Returns:
            Whether any operations had ended.
        """
        if self._failed:
            failed = [link for link in self._failed if self._links.get(link.peer) is link]
            self._failed.clear()
            for link in failed:
                self._fail_link(link, link.endpoint_error(self._ucxx.UCXError))
        completed = self._port.completed
        if not completed:
            return False
        if self._is_hurried:
            self._progress.adaptive_spin.record_message(monotonic())
        # A transfer's `done` may post, which may append to this list during the loop.
        for identity, status, length in completed:
            transfer = self._open.pop(identity, None)
            if transfer is not None:
                # None: the message was discarded, or finished in an earlier call that was interrupted
                if transfer.request:  # 0: UCX has refused it
                    self._port.free(transfer.request)
                self.finish(transfer, status, length)
            elif request := self._discarding.pop(identity, 0):
                self._port.free(request)
        completed.clear()
        return True

    def _track(self, transfer: UcxTransfer, identity: int, result: int) -> None:
        """Remember an operation that has been posted and has not ended.

        Args:
            transfer: the operation.
            identity: the number that identifies the operation in `TagPort.completed`.
            result: UCX's result of posting the operation: a request's handle, or the status with which UCX
                refused the operation.

        Raises:
            TransferError: UCX refused the operation.
        """
        self._schedule_run()
        if is_error(result):
            offers = transfer.link.offers
            if offers is not None and transfer.number is not None:
                (offers.sent if transfer.size_bytes == SENDING else offers.received).undo_last(transfer.tag)
            raise transfer.failed(self.peer_id, result, self._port.status_text)
        transfer.request = result
        self._open[identity] = transfer

    def finish(self, transfer: UcxTransfer, status: int, length: int) -> None:
        """Tell the caller of a transfer how the transfer has ended, unless that was done before; see
        `one_copy.Carrier.finish`."""
        done = transfer.done
        if done is None:  # a message of the one-copy protocol, or finished already
            then, transfer.then = transfer.then, None
            if then is not None:
                then(status, length)
            elif transfer.size_bytes == SENDING and status != STATUS_OK:
                self._fail_link_of(transfer, self._port.status_text(status))
            return
        expected = transfer.size_bytes
        if expected != SENDING and (status != STATUS_OK or length != expected or length == RTS_BYTES):
            interpreted = self._one_copy.receiver.interpret(transfer, status, length)
            if interpreted is None:
                return  # the transfer has not ended yet
            status, length = interpreted
        transfer.done = None
        if expected != SENDING:
            self._note_received(transfer.link)
        error: Exception | None = None
        if status != STATUS_OK or (expected != length and expected != SENDING):
            error = transfer.error(self.peer_id, status, length, self._port.status_text)
            if expected == SENDING:
                self._fail_link_of(transfer, str(error))
        try:
            done(error)
        except Exception as failure:
            # An error of the caller's code: the other transfers have to be finished all the same.
            self._loop.call_exception_handler({"message": f"{done} failed", "exception": failure})

    def _note_received(self, link: UcxLink) -> None:
        """Record that a peer's first message has arrived, and make sure that child processes do not inherit
        the peer's connection, which UCX must have accepted by now.

        If both peers connected to each other at the same time, UCX may accept a second connection a moment
        later, so this is repeated after a delay.
        """
        if not link.has_received:
            link.has_received = True
            keep_accepted_from_children()
            self._loop.call_later(_RETRY_S, keep_accepted_from_children)

    def _fail_link_of(self, transfer: UcxTransfer, cause: str) -> None:
        """Fail the link of a message that was posted but will never arrive. Without this, the peer would wait
        for the message for ever, or would take the next message with the same tag for the lost one.

        Args:
            transfer: the message's transfer.
            cause: the reason, for error messages.
        """
        if transfer.link.failure is None:
            self._fail_link(transfer.link, cause)
            self._schedule_run()

    def _why_unusable(self, peer: Peer, link: UcxLink | None) -> TransferError:
        why = "the transport has closed" if self._closing else "not connected; call connect first"
        return TransferError(f"peer {self.peer_id}, link to peer {peer}: {(link and link.failure) or why}")

    # ------------------------------------------------------------ messages of the one-copy protocol

    def post_own_send(self, link: UcxLink, memory: Memory, tag: int, transfer: UcxTransfer | None) -> bool:
        """Send a message of the one-copy protocol; see `one_copy.Carrier.post_own_send`."""
        if link.failure is not None:
            result = STATUS_CANCELED
        else:
            identity = next(self._identities)
            result = self._port.send(
                link.handle, memory.address, memory.size_bytes, tag | self._own_bits, identity
            )
            self._schedule_run()
            if result and not is_error(result):
                own = transfer or UcxTransfer(link, memory, SENDING, tag, None)
                own.request, self._open[identity] = result, own
                return True
        if transfer is not None or is_error(result):
            self.finish(transfer or UcxTransfer(link, memory, SENDING, tag, None), result, 0)
        return not is_error(result)

    def post_own_recv(
        self, link: UcxLink, memory: Memory, tag: int, then: Callable[[int, int], None] | UcxTransfer
    ) -> None:
        """Receive a message of the one-copy protocol; see `one_copy.Carrier.post_own_recv`."""
        if isinstance(then, UcxTransfer):
            own = then
        else:
            own = UcxTransfer(link, memory, memory.size_bytes, tag, None)
            own.then = then
        result, identity = STATUS_CANCELED, next(self._identities)
        if link.failure is None:
            result = self._port.recv(memory.address, memory.size_bytes, tag | link.sender_bits, identity)
        self._schedule_run()
        if is_error(result):  # _finish_ended reports it later, because this may be inside a post call
            self._fail_link_of(own, self._port.status_text(result))
            self._port.completed.append((identity, result, 0))
            result = 0
        own.request, self._open[identity] = result, own

    # ------------------------------------------------------------ ending

    def _fail_link(self, link: UcxLink, cause: str) -> None:
        """Mark a link as lost, and cancel its receives that no message has matched yet, because UCX does not
        end them itself."""
        link.failure = f"link lost ({cause})"
        self._cancel_receives(link)

    def _close_link(self, link: UcxLink) -> None:
        endpoint, link.endpoint = link.endpoint, None
        endpoint.remove_close_callback()
        link.failure = link.failure or "aborted"
        self._one_copy.drop(link)
        link.local_peer = link.offers = None
        self._cancel_receives(link)
        if endpoint.alive:
            endpoint.close_blocking()
        else:
            # The endpoint has failed: ucxx considers it closed and will not close it, but UCX has it open.
            self._port.close_endpoint(link.handle)

    def _cancel_receives(self, link: UcxLink) -> None:
        ended = {identity for identity, _, _ in self._port.completed}
        for identity, transfer in self._open.items():
            if transfer.link is link and transfer.size_bytes != SENDING and identity not in ended:
                self._port.cancel(transfer.request)

    async def _wait_released(self, peer: Peer | None) -> None:
        deadline_s = self._loop.time() + RELEASE_TIMEOUT_S
        epochs = {p: e for p, e in self._past_epochs.items() if peer is None or p == peer}
        for sender, epoch in epochs.items():
            self._discard_unexpected(sender_bits_of(sender), epoch)
        while True:
            self._progress.run()
            if any(self._is_ending(t, peer) for t in self._one_copy.receiver.exposed):
                raise TransferError(
                    f"peer {self.peer_id}: a peer may still write into the memory of a receive, and there is "
                    "none to put in its place; it is never used again"
                )
            held = [t for t in self._open.values() if self._is_ending(t, peer)]
            if not held:
                return
            if peer is None and self._progress.stalled_s > GIVE_UP_S:
                self._give_up_worker()
                return
            if self._loop.time() > deadline_s:
                raise TransferError(
                    f"{held[0].describe(self.peer_id)}: UCX still holds {len(held)} buffers "
                    f"{RELEASE_TIMEOUT_S:.0f} s after the abort; their memory is kept until it lets go"
                )
            await asyncio.sleep(0.0005)

    def _give_up_worker(self) -> None:
        """Give up a stalled worker, which UCX would never let release its buffers, and end all transfers.

        The worker is kept until this process ends, since destroying it might wait for the transfers for ever.
        A worker that is kept makes no progress any more, and so copies nothing. The memory of transfers that
        a network adapter or a GPU carries is kept as well.
        """
        transfers = list(self._open.values())
        held = [transfer.memory for transfer in transfers if not transfer.link.is_moved_by_cpu]
        _LOG.log(
            logging.WARNING if held else logging.INFO,
            "peer %d gives up its end of the data plane, which a process that was lost has left unusable; %d "
            "bytes of memory and some %d descriptors stay in use until this process ends",
            self.peer_id,
            sum(memory.size_bytes for memory in held),
            START_DESCRIPTORS,
        )
        self._progress.end()
        kept = (self._worker, self._context, self._port, held)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # at the end of Python, too
        self._worker = self._context = None
        self._open.clear()
        self._discarding.clear()
        for transfer in transfers:
            self.finish(transfer, STATUS_CANCELED, 0)

    def _is_ending(self, transfer: UcxTransfer, peer: Peer | None) -> bool:
        link = transfer.link
        if peer is not None and link.peer != peer:
            return False
        return self._links.get(link.peer) is not link

    def _discard_unexpected(self, sender_bits: int, epoch: int) -> None:
        """Discard the messages that a peer sent in a past epoch and that no receive has matched. UCX keeps
        such messages in a queue.

        Args:
            sender_bits: the peer's id as it is stored in tags.
            epoch: the past epoch (the number of aborts of the whole mesh so far).
        """
        if self._worker is None:
            return
        tag = epoch << EPOCH_SHIFT | sender_bits
        mask = ((1 << 64) - 1) >> EPOCH_SHIFT << EPOCH_SHIFT | ((1 << SENDER_BITS) - 1) << SENDER_SHIFT
        while (
            result := self._port.discard_unexpected(tag, mask, identity := next(self._identities))
        ) is not None:
            if result and not is_error(result):
                self._discarding[identity] = result

    async def _close(self) -> None:
        if self._closing_late is not None:
            self._closing_late.cancel()
        try:
            await self.abort()
        except Exception:  # any error: UCX may still use memory, so keep it alive and try again
            self._closing_late = self._loop.call_later(_RETRY_S, self._close_late)
            raise
        self._progress.end()
        self._worker = self._context = None
        self._one_copy.close()
        self._failed.clear()
        # uvloop releases its handle of the descriptor in its next pass.
        await asyncio.sleep(0)

    def _close_late(self) -> None:
        """Close the transport in the background if UCX has released all buffers by now; otherwise try again
        after a delay."""
        self._progress.run()
        if self._open or self._one_copy.receiver.exposed:
            self._closing_late = self._loop.call_later(_RETRY_S, self._close_late)
            return
        self._closing = self._loop.create_task(
            self._close(), name=f"close UCX transport of peer {self.peer_id} late"
        )
        self._closing.add_done_callback(lambda task: task.cancelled() or task.exception())


def make_transport(peer_id: Peer, network: Network | None, shared: MutableMapping[str, Any]) -> UCXTransport:
    """Make a process's UCX transport, with error handling unless the environment variable
    `JAXPP_UCX_ERROR_HANDLING` is `n`; this is a `registry.Factory`."""
    return UCXTransport(peer_id, network=network, error_handling=os.environ.get(ERROR_HANDLING, "y") != "n")


def _open(network: Network | None) -> tuple[Context, tuple[ListeningSocket, ...], AddressFilter | None]:
    """Open a UCX context to which nobody has connected yet.

    Returns:
        The context, the sockets on which it listens, and their address filter, which lets nobody connect yet.
        The filter is None if everybody may connect.

    Raises:
        MeshError: strangers connect to each new context as soon as it listens; or a reason that
            `open_context` names.
        InstallError: as for `open_context`.
        TransferError: as for `open_context`.
    """
    for _ in range(_OPEN_TRIES):
        before = listening_sockets()
        context = open_context(network)
        sockets = tuple(sorted(listening_sockets() - before))
        own = AddressFilter.for_reachable(sockets) if network is not None else None
        if own is None or not own.has_connections():
            return context, sockets, own
        del context
    raise MeshError(
        "strangers connect to the data plane of this process as soon as it listens; use another network"
    )
