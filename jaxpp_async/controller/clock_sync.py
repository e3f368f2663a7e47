"""clock_watch: asks actors on other machines what their clocks show. Beats in, `Clocks` kept up to date.

An actor's beat says which clock it has. If it is not ours, the actor is asked with each beat, as soon as it has
answered the last time: two small messages every half second. No timer, no asyncio task.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from jaxpp_async.errors import ActorError
from jaxpp_async.program.instructions import ActorId
from jaxpp_async.protocol.clocks import Clock, Clocks, clock_name
from jaxpp_async.protocol.frames import Identity
from jaxpp_async.protocol.messages import Beat, Reported

FORGET_S = 5.0
"""After this an answer is not waited for any more: the question may have been dropped with a restart."""


class ClockWatch:
    """Keeps the clocks of one mesh's actors.

    Args:
        ask: sends `Report` to an actor; gives the reply, to come. May raise `ActorError`.
        own: this process's clock; for tests.
    """

    def __init__(self, ask: Callable[[ActorId], asyncio.Future[Reported]], own: str | None = None):
        self._ask = ask
        self._clocks = Clocks(clock_name() if own is None else own)
        self._asked: dict[ActorId, float] = {}

    def begin(self, actor: ActorId) -> None:
        """An actor has come; whoever had its id before is forgotten."""
        self._clocks.forget(actor)
        self._asked.pop(actor, None)

    def record_heartbeat(self, identity: Identity, beat: Beat) -> None:
        """Take a sign of life (`Gate.on_beat`)."""
        actor, now = identity.process_id, time.monotonic()
        self._clocks.name(actor, beat.clock)
        if self._clocks.clock_of(actor).is_ours or now - self._asked.get(actor, -math.inf) < FORGET_S:
            return
        try:
            answer = self._ask(actor)
        except ActorError:  # the mesh is over, or the actor is
            return
        self._asked[actor] = now
        answer.add_done_callback(lambda future: self._take(actor, now, future))

    def of(self, actor: ActorId) -> Clock:
        """What is known, and will be, of the clock of the process that is this actor now."""
        return self._clocks.clock_of(actor)

    def _take(self, actor: ActorId, sent_s: float, answer: asyncio.Future[Reported]) -> None:
        if self._asked.get(actor) != sent_s:
            return  # another life of it was asked
        del self._asked[actor]
        if answer.cancelled() or answer.exception() is not None or (there_s := answer.result().now_s) is None:
            return
        self._clocks.note(actor, sent_s, there_s, time.monotonic())
