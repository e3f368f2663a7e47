"""store: the actor's arrays by id, some of them still on their way. Never transfers; `fill` and `wait_all` wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

import jax

from jaxpp_async.errors import ArrayError
from jaxpp_async.program.instructions import Aval
from jaxpp_async.protocol.messages import ArrayId


class StoredArray:
    """One array, or the place of one that a put or a step is still making.

    Unlike an `asyncio.Future` it calls back at once and in order: a fetch that came before a step that donates the
    array must have seen it before the step takes it.

    Attributes:
        aval: shape, dtype and sharding.
        array: the array, or None.
        error: why there will be none, or None.
        traceback: that of the error when the entry heard of it.
    """

    __slots__ = ("_waiting", "array", "aval", "error", "traceback")

    def __init__(self, aval: Aval):
        self.aval = aval
        self.array: jax.Array | None = None
        self.error: BaseException | None = None
        self.traceback: TracebackType | None = None
        self._waiting: list[Callable[[StoredArray], None]] = []

    @property
    def done(self) -> bool:
        """Whether `array` or `error` is there."""
        return self.array is not None or self.error is not None

    def resolve(self, array: jax.Array) -> None:
        """The array is there."""
        if not self.done:
            self.array = array
            self._call_back()

    def fail(self, error: BaseException) -> None:
        """There will be no array. Does nothing where there is one."""
        if not self.done:
            self.error, self.traceback = error, error.__traceback__
            self._call_back()

    def when_done(self, callback: Callable[[StoredArray], None]) -> None:
        """Call `callback(entry)` once `array` or `error` is there: now, if it is."""
        if self.done:
            callback(self)
        else:
            self._waiting.append(callback)

    def _call_back(self) -> None:
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback(self)


async def fill(entries: Sequence[StoredArray], making: Awaitable[Sequence[jax.Array]]) -> None:
    """Let the arrays that `making` gives be those of the entries, in order.

    Raises:
        Whatever `making` does; the entries have then failed of it.
    """
    try:
        arrays = await making
    except BaseException as error:  # also a cancellation: steps that wait for the arrays must hear of it
        for entry in entries:
            entry.fail(error)
        raise
    for entry, array in zip(entries, arrays, strict=True):
        entry.resolve(array)


async def wait_all(entries: Sequence[StoredArray]) -> None:
    """Wait until all of them are there, or will not be.

    Raises:
        The error of the first in order that has one.
    """
    there = asyncio.get_running_loop().create_future()
    left = len(entries)

    def one_done(_: StoredArray) -> None:
        nonlocal left
        left -= 1
        if not left and not there.done():
            there.set_result(None)

    for entry in entries:
        entry.when_done(one_done)
    if entries:
        await there
    for entry in entries:
        if entry.error is not None:
            # each time anew: it would grow with every waiter
            raise entry.error.with_traceback(entry.traceback)


class ArrayStore:
    """Entries by array id."""

    def __init__(self) -> None:
        self._entries: dict[ArrayId, StoredArray] = {}

    def expect(self, array_id: ArrayId, aval: Aval) -> StoredArray:
        """Make the entry of an array that is on its way."""
        entry = self._entries[array_id] = StoredArray(aval)
        return entry

    def get(self, array_id: ArrayId) -> StoredArray:
        """The entry of an array.

        Raises:
            ArrayError: there is none: it never was here, was freed, or a step was given it to consume.
        """
        if array_id not in self._entries:
            raise ArrayError(
                f"array {array_id} is not on this actor: it was freed, donated, or made elsewhere"
            )
        return self._entries[array_id]

    def entries(self) -> dict[ArrayId, StoredArray]:
        """All entries as they are now, also of arrays on their way."""
        return dict(self._entries)

    def remove(self, array_id: ArrayId) -> None:
        """Forget an array. Whoever holds its entry keeps it alive; an unknown id is no error."""
        self._entries.pop(array_id, None)

    def fail_pending(self, error: BaseException) -> None:
        """Fail every array that is still on its way, and forget it and those that failed before."""
        for array_id, entry in list(self._entries.items()):
            if entry.array is None:
                del self._entries[array_id]
                entry.fail(error)

    def forget_all(self) -> None:
        """Forget every array."""
        self._entries.clear()

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays that are there."""
        return sum(entry.aval.size_bytes for entry in self._entries.values() if entry.array is not None)

    def __len__(self) -> int:
        """How many arrays are there, those on their way left out."""
        return len([None for entry in self._entries.values() if entry.array is not None])
