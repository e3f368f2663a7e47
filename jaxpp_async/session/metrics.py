"""Keep what a user logs, and give it to loggers in order.

`Metrics` takes the values of `mesh.log`. Arrays of the mesh are fetched in the background.
`session.logger_delivery` calls the loggers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxpp_async.base.printable import first_line
from jaxpp_async.errors import MeshClosedError, MeshError
from jaxpp_async.protocol.task_group import OwnedTasks, retrieve
from jaxpp_async.session.host_transfers import RemoteValues
from jaxpp_async.session.logger_delivery import QUEUED, LoggerState, make_delivery
from jaxpp_async.session.metric_log import (
    MOST_NAMES,
    Logged,
    LoggedValue,
    MetricHistory,
    check_step,
    check_values,
)
from jaxpp_async.session.remote_array import RemoteArray
from jaxpp_async.view.history import History

_LOG = logging.getLogger("jaxpp_async")

FLUSH_S = 5.0
"""The longest time in seconds for which the close of a mesh waits for values and for loggers, each."""


class _Entry(NamedTuple):
    """One call of `mesh.log`.

    Args:
        step: the number of the step.
        values: the values by name.
        fetched: the future value of each array, by name.
    """

    step: int
    values: dict[str, LoggedValue]
    fetched: dict[str, asyncio.Future[Any]]


class Metrics:
    """The numbers that a user logs on one mesh: the histories of the names, and the loggers that get them.

    All methods are called on the mesh's event loop.

    Args:
        values: the part of the mesh that fetches arrays.
        loggers: objects with a method `log(step, values)`; see `mesh_options.check_loggers`.
    """

    def __init__(self, values: RemoteValues, loggers: Sequence[Any]):
        self._remote = values
        self._deliveries = [
            make_delivery(logger, name) for logger, name in zip(loggers, _names_of(loggers), strict=True)
        ]
        self._histories = MetricHistory()
        self._waiting: deque[_Entry] = deque()
        self._tasks = OwnedTasks()
        self._resolving: asyncio.Task[None] | None = None
        self._num_lost, self._is_closed = 0, False
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names that were logged, in the order in which they came first; see `metric_log.MOST_NAMES`."""
        return self._histories.names

    def loggers(self) -> tuple[LoggerState, ...]:
        """Return how each logger does, in the order in which the mesh was given them."""
        return tuple(delivery.state() for delivery in self._deliveries)

    def latest(self) -> dict[str, Logged]:
        """Return the latest value of each name, and the step for which it was logged."""
        return self._histories.latest()

    def history(self, name: str) -> History:
        """Return the history of a name, whose `buckets()` are the latest values and groups of older ones.

        Args:
            name: the name; the history of a name that was not logged is empty.
        """
        return self._histories.history(name)

    def on_started(self) -> None:
        """Note that the mesh has started, on the event loop that runs."""
        self._loop = asyncio.get_running_loop()

    def log(self, step: Any, values: Any) -> None:
        """Record values and give them to the loggers; see `RemoteMesh.log`.

        Args:
            step: the number of the step.
            values: the values by name.
        """
        if self._is_closed:
            raise MeshClosedError("mesh.log: the mesh is closed; log before it closes")
        self._check_thread()
        number, checked = check_step(step), check_values(values)
        entry = _Entry(number, checked, self._start_fetches(checked))
        if not entry.fetched and not self._waiting:
            self._deliver(entry)
            return
        if len(self._waiting) == QUEUED:
            self._deliver(self._waiting.popleft())  # without the arrays that are not here
        self._waiting.append(entry)
        if self._resolving is None:
            self._resolving = self._tasks.start("resolve logged values", self._resolve())

    def _check_thread(self) -> None:
        """Check that this is called on the mesh's event loop.

        Raises:
            MeshError: this thread runs no event loop, or another one.
        """
        loop = None
        with contextlib.suppress(RuntimeError):  # none runs
            loop = asyncio.get_running_loop()
        if loop is None or loop is not (self._loop or loop):
            raise MeshError(
                "mesh.log was called outside of the mesh's event loop; from another thread write "
                "`loop.call_soon_threadsafe(mesh.log, step, values)` with the loop of the mesh"
            )

    def _start_fetches(self, values: Mapping[str, LoggedValue]) -> dict[str, asyncio.Future[Any]]:
        """Start to fetch the arrays among logged values, all of the mesh's in one request an actor."""
        fetched: dict[str, asyncio.Future[Any]] = {}
        remote: dict[str, RemoteArray] = {}
        for name, value in values.items():
            if isinstance(value, jax.Array):
                fetched[name] = asyncio.ensure_future(asyncio.to_thread(float, value))
            elif isinstance(value, RemoteArray):
                value.check_usable(f"mesh.log: {name!r}", self._remote)
                if value.host is None:
                    remote[name] = value
                else:
                    fetched[name] = asyncio.get_running_loop().create_future()
                    fetched[name].set_result(value.host)
        if remote:
            coroutine = self._remote.start_fetch(list(remote.values()), "mesh.log: a value")
            whole = asyncio.ensure_future(coroutine)
            whole.add_done_callback(retrieve)
            fetched |= {name: asyncio.ensure_future(_item(whole, k)) for k, name in enumerate(remote)}
        for future in fetched.values():
            future.add_done_callback(retrieve)
        return fetched

    async def _resolve(self) -> None:
        """Deliver waiting entries in their order, each as soon as its arrays are here."""
        try:
            while self._waiting:
                entry = self._waiting[0]
                if entry.fetched:
                    await asyncio.wait(entry.fetched.values())
                # the entry may have been dropped meanwhile, because too many waited
                if self._waiting and self._waiting[0] is entry:
                    self._waiting.popleft()
                    self._deliver(entry)
        finally:
            self._resolving = None

    def _deliver(self, entry: _Entry) -> None:
        """Add the values of an entry to the histories, and queue them for the loggers."""
        numbers: dict[str, float] = {}
        for name, value in entry.values.items():
            future = entry.fetched.get(name)
            if future is None:
                assert isinstance(value, float)
                numbers[name] = value
            elif not future.done():
                self._note_lost(entry.step, name, "the array was not here in time")
            else:
                try:
                    numbers[name] = float(future.result())
                except (Exception, asyncio.CancelledError) as error:
                    self._note_lost(entry.step, name, first_line(error))
        num_dropped = self._histories.num_dropped
        self._histories.add(entry.step, numbers)
        if self._histories.num_dropped and not num_dropped:
            _LOG.warning(
                "mesh.log got more than %d names; the histories of later ones are not kept, while loggers "
                "get them all: log one name for all steps, not one name a step",
                MOST_NAMES,
            )
        if numbers:
            for delivery in self._deliveries:
                delivery.put(entry.step, dict(numbers))

    def _note_lost(self, step: int, name: str, why: str) -> None:
        self._num_lost += 1
        if self._num_lost == 1:
            _LOG.warning("mesh.log: %r of step %d is lost: %s", name, step, why)

    # ---------------------------------------------------------------- end

    def abandon(self) -> None:
        """Let the loggers end once they have got everything, and do not wait; any thread may call this."""
        self._is_closed = True
        for delivery in self._deliveries:
            delivery.end()

    async def aclose(self) -> None:
        """Wait until the loggers have got everything, for `FLUSH_S` seconds each for arrays and for loggers.

        Call this while the actors still run. Logging is refused from now on. A second call does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._resolving is not None:
                await asyncio.wait([self._resolving], timeout=FLUSH_S)
            while self._waiting:
                self._deliver(self._waiting.popleft())
        finally:
            for delivery in self._deliveries:
                delivery.end()
            await self._tasks.aclose()
        if self._num_lost > 1:
            _LOG.warning("mesh.log: %d values were lost in all", self._num_lost)
        await asyncio.gather(*(delivery.wait_ended(FLUSH_S) for delivery in self._deliveries))


def _names_of(loggers: Sequence[Any]) -> list[str]:
    """Return a name for each logger: its class, with a number from the second of a class on."""
    names: list[str] = []
    for logger in loggers:
        kind = type(logger).__name__
        again = sum(type(other).__name__ == kind for other in loggers[: len(names)])
        names.append(f"{kind} {again + 1}" if again else kind)
    return names


async def _item(whole: asyncio.Future[list[Any]], position: int) -> Any:
    return (await asyncio.shield(whole))[position]
