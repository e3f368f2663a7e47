"""Ask actors on other machines what their clocks show, to know how these differ from this process's clock.

A heartbeat says which clock its actor has. If that is another clock than ours, the actor is asked with each
heartbeat, as soon as it has answered the last question: two small messages every half second, without a timer
or an asyncio task.
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
"""Seconds after which a question may be repeated without an answer: a restart may have dropped it."""


class ClockWatch:
    """The clocks of one mesh's actors.

    Args:
        ask: sends `Report` to an actor; gives the reply, to come. May raise `ActorError`.
        own: the name of this process's clock; tests choose one.
    """

    def __init__(self, ask: Callable[[ActorId], asyncio.Future[Reported]], own: str | None = None):
        self._ask = ask
        self._clocks = Clocks(clock_name() if own is None else own)
        self._asked: dict[ActorId, float] = {}

    def begin(self, actor: ActorId) -> None:
        """Begin with an actor that has come; the actor that had its id before is forgotten."""
        self._clocks.forget(actor)
        self._asked.pop(actor, None)

    def record_heartbeat(self, identity: Identity, beat: Beat) -> None:
        """Take a heartbeat (`ControlListener.on_beat`), and ask for the actor's time if that is of use."""
        actor, now = identity.process_id, time.monotonic()
        self._clocks.name(actor, beat.clock)
        if self._clocks.clock_of(actor).is_ours or now - self._asked.get(actor, -math.inf) < FORGET_S:
            return
        try:
            answer = self._ask(actor)
        except ActorError:  # the mesh is over, or the actor is
            return
        self._asked[actor] = now
        answer.add_done_callback(lambda future: self._note_answer(actor, now, future))

    def clock_of(self, actor: ActorId) -> Clock:
        """Give the clock of the process that is this actor now, which later answers keep up to date."""
        return self._clocks.clock_of(actor)

    def _note_answer(self, actor: ActorId, sent_s: float, answer: asyncio.Future[Reported]) -> None:
        if self._asked.get(actor) != sent_s:
            return  # its predecessor was asked
        del self._asked[actor]
        if answer.cancelled() or answer.exception() is not None or (there_s := answer.result().now_s) is None:
            return
        self._clocks.note(actor, sent_s, there_s, time.monotonic())
