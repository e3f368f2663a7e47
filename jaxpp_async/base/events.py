"""Record what happens to a mesh and let any number of async iterators read it.

The log never waits for a reader, starts no task, and keeps a bounded number of events. All calls are made on
the mesh's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias

Kind: TypeAlias = Literal[
    "started",
    "staged",
    "compiled",
    "waiting",
    "suspect",
    "recovered",
    "died",
    "restarted",
    "checkpointed",
    "closed",
    "lost",
]
"""The kinds of events. An iterator alone makes `lost` events, in the place of events that it was too slow to
read.
"""

KEPT = 1000
"""The number of events that a mesh remembers, for readers that subscribe late or read slowly."""

_LOG = logging.getLogger("jaxpp_async.events")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a mesh.

    Args:
        kind: the kind of the event.
        actor: the id of the actor to which it happened; None for the whole mesh.
        step: the number of the user's step that was under way; None for an event that concerns no step.
        text: a one-line description, for people.
        time_s: the time of the event by `time.monotonic()` of this process, in seconds, from which durations
            can be computed.
        at: the time of day in UTC, for people. This clock jumps when the host's time is set, so do not
            compute durations from it.
        details: further facts, such as `seconds`, `path`, `host`, `pid`; docs/operations.md lists them for
            each kind.
    """

    kind: Kind
    actor: int | None
    step: int | None
    text: str
    time_s: float
    at: datetime
    details: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.at:%H:%M:%S} {self.kind}: {self.text}"

    def as_dict(self) -> dict[str, Any]:
        """Return the event as plain data that `json.dumps` accepts."""
        plain = {"at": self.at.isoformat(), "details": dict(self.details)}
        return {field.name: getattr(self, field.name) for field in fields(self)} | plain


class Emit(Protocol):
    """The type of `EventLog.emit`, for code that reports events and does not read them."""

    def __call__(
        self, kind: Kind, text: str, *, actor: int | None = None, step: int | None = None, **details: Any
    ) -> None: ...


class EventLog:
    """A log of the latest events of one mesh, which any number of readers follow. The last event is `closed`.

    Args:
        kept: how many events are remembered; older events are dropped.
    """

    def __init__(self, kept: int = KEPT):
        self._kept: deque[Event] = deque(maxlen=kept)
        self._num_emitted = 0
        self._is_closed = False
        self._waiting: set[asyncio.Future[None]] = set()
        self._listener: Callable[[Event], object] | None = None

    def listen(self, listener: Callable[[Event], object]) -> None:
        """Call a function with each event at once, as the mesh's own page needs it. There is one listener.

        Args:
            listener: the function. If it raises, the log says so, and the mesh goes on.
        """
        self._listener = listener

    def emit(
        self, kind: Kind, text: str, *, actor: int | None = None, step: int | None = None, **details: Any
    ) -> None:
        """Report an event to all readers and to the logger `jaxpp_async.events`; do nothing after the event
        `closed`.

        The log record has level `ERROR` for the death of an actor, otherwise `DEBUG`, because the code that
        notices an event also logs the details of the event.

        Args:
            kind: the kind of the event.
            text: a description, of which only the first line is kept.
            actor, step: the actor and the user's step that the event concerns, as in `Event`.
            details: further facts, as plain data.
        """
        if self._is_closed:
            return
        event = _make(kind, text.partition("\n")[0], actor, step, details)
        self._kept.append(event)
        self._num_emitted += 1
        self._is_closed = kind == "closed"
        extra = {"actor": actor, "step": step, "host": details.get("host")}
        _LOG.log(logging.ERROR if kind == "died" else logging.DEBUG, "%s: %s", kind, event.text, extra=extra)
        if self._listener is not None:
            try:
                self._listener(event)
            except Exception:  # the user's listener may raise anything, and the run goes on
                _LOG.exception("a listener of events failed at %s", event)
        for waiting in self._waiting:
            if not waiting.done():  # the future of a cancelled reader is done
                waiting.set_result(None)

    def subscribe(self, *, history: bool = True) -> Events:
        """Return a new iterator over the events. Reading from one iterator does not affect the others.

        Args:
            history: whether to begin with the oldest event that is remembered; if False, begin with the next
                event that is reported.
        """
        return Events(self, 0 if history else self._num_emitted)

    def _at(self, position: int) -> tuple[Event | None, int]:
        """Look up the event at a position in the log.

        Args:
            position: the number of the event, counted from 0 since the mesh started.

        Returns:
            A pair of the event and the position to read next. If the event has not happened yet, the pair is
            (None, `position`). If the event is no longer remembered, the pair has a `lost` event, which tells
            how many events were missed, and the position of the oldest remembered event.

        Raises:
            StopAsyncIteration: the log is closed and has no event at this position.
        """
        first = self._num_emitted - len(self._kept)
        if position < first:
            lost = first - position
            return _make(
                "lost", f"{lost} events were forgotten before they were read", None, None, {"count": lost}
            ), first
        if position < self._num_emitted:
            return self._kept[position - first], position + 1
        if self._is_closed:
            raise StopAsyncIteration
        return None, position

    async def _wait(self) -> None:
        """Wait until the next event is reported."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            await waiting
        finally:
            self._waiting.discard(waiting)


class Events(AsyncIterator[Event]):
    """An async iterator over events that ends after the event `closed`. An iterator has no resources and need
    not be closed.
    """

    def __init__(self, log: EventLog, position: int):
        self._log, self._position = log, position

    async def __anext__(self) -> Event:
        # Nothing is awaited between finding an event and returning it, so a cancelled reader loses no event.
        while True:
            event, self._position = self._log._at(self._position)
            if event is not None:
                return event
            await self._log._wait()


def _make(kind: Kind, text: str, actor: int | None, step: int | None, details: Mapping[str, Any]) -> Event:
    now = datetime.now(UTC)
    return Event(kind, actor, step, text, time.monotonic(), now, MappingProxyType(dict(details)))
