"""slow_link: an actor whose links to other actors are slow: a message takes `SLOW_LINK_MS`, one after the
other.

The receiver is told of a message when such a link would have delivered it; the sender's buffer is free as
soon as the real transport has taken the bytes. What comes from the controller is not held up.

    RemoteMesh(2, launcher=LocalLauncher(actor="slow_link:SlowActor"), env={"SLOW_LINK_MS": "5"})
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from jaxpp_async.actors.actor import Actor
from jaxpp_async.errors import TransferError
from jaxpp_async.program.instructions import CONTROLLER
from jaxpp_async.transport.base import OnEnd, Transport, memory_of, post_future


class SlowActor(Actor):
    """An actor on slow links."""

    def __init__(self, actor_id: int, *, make_transport: Callable[[str, Any], Transport], **seams: Any):
        delay_s = float(os.environ["SLOW_LINK_MS"]) / 1e3

        def make(kind: str, network: Any) -> Transport:
            return SlowTransport(make_transport(kind, network), delay_s)

        super().__init__(actor_id, make_transport=make, **seams)


class SlowTransport:
    """A transport whose receives from other actors complete late; all else is the transport's own.

    Args:
        inner: what moves the bytes.
        delay_s: how long each message occupies the link from its sender.
    """

    def __init__(self, inner: Transport, delay_s: float):
        self._inner, self._delay_s = inner, delay_s
        self._loop = asyncio.get_running_loop()
        self._free_at: dict[int, float] = {}
        self._held: dict[asyncio.TimerHandle, OnEnd] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def epoch(self) -> int:
        """See `Transport`."""
        return self._inner.epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._inner.epoch = value

    def post_recv(self, memory: Any, peer: int, tag: int, done: OnEnd) -> bool:
        """See `Transport.post_recv`."""
        if peer == CONTROLLER:
            return self._inner.post_recv(memory, peer, tag, done)
        if self._inner.post_recv(memory, peer, tag, lambda error: self._arrived(peer, error, done)):
            self._arrived(peer, None, done)
        return False

    def recv(self, buffer: Any, peer: int, tag: int) -> asyncio.Future[None]:
        """See `Transport.recv`."""
        if peer == CONTROLLER:
            return self._inner.recv(buffer, peer, tag)
        return post_future(self._loop, self.post_recv, memory_of(buffer, writable=True), peer, tag)

    async def abort(self, peer: int | None = None) -> None:
        """See `Transport.abort`."""
        await self._inner.abort(peer)
        self._end_held()

    async def aclose(self) -> None:
        """See `Transport.aclose`."""
        await self._inner.aclose()
        self._end_held()

    def _arrived(self, peer: int, error: Exception | None, done: OnEnd) -> None:
        if error is not None:
            done(error)
            return
        at = self._free_at[peer] = max(self._free_at.get(peer, 0.0), self._loop.time()) + self._delay_s
        handle: asyncio.TimerHandle | None = None

        def tell() -> None:
            assert handle is not None
            del self._held[handle]
            done(None)

        handle = self._loop.call_at(at, tell)
        self._held[handle] = done

    def _end_held(self) -> None:
        held, self._held = self._held, {}
        for handle, done in held.items():
            handle.cancel()
            done(TransferError("aborted"))
