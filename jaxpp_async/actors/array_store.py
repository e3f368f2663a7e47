"""Store the arrays of an actor by id, also those that a put, a restore or a step is still making."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from jaxpp_async.base.printable import ErrorInWords, in_words
from jaxpp_async.errors import ArrayError
from jaxpp_async.program.instructions import Aval
from jaxpp_async.protocol.messages import ArrayId


class StoredArray:
    """The store's entry of one array, which may still be in the making.

    Unlike an `asyncio.Future` the entry calls back at once and in order: a fetch that came before a step that
    donates the array must have read the array before the step consumes it.

    Attributes:
        aval: shape, dtype and sharding.
        array: the array; None before it is there.
        error: why there will be no array; None if it may still come.
    """

    __slots__ = ("_waiting", "array", "aval", "error")

    def __init__(self, aval: Aval):
        self.aval = aval
        self.array: jax.Array | None = None
        self.error: ErrorInWords | None = None
        self._waiting: list[Callable[[StoredArray], None]] = []

    @property
    def done(self) -> bool:
        """Whether the entry has its array or its error."""
        return self.array is not None or self.error is not None

    def resolve(self, array: jax.Array) -> None:
        """Set the array. Does nothing if the entry is done."""
        if not self.done:
            self.array = array
            self._call_back()

    def fail(self, error: BaseException) -> None:
        """Set the error. Does nothing if the entry is done."""
        if not self.done:
            self.error = in_words(error)
            self._call_back()

    def when_done(self, callback: Callable[[StoredArray], None]) -> None:
        """Call `callback(entry)` when the entry is done: now, if it is."""
        if self.done:
            callback(self)
        else:
            self._waiting.append(callback)

    def _call_back(self) -> None:
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback(self)


async def fill(
    entries: Sequence[StoredArray], make: Callable[[], Sequence[jax.Array]], workers: ThreadPoolExecutor
) -> None:
    """Give entries the arrays that `make`, called in one of the threads, returns in their order.

    Raises:
        Exception: `make` raised it; the entries have then failed with it.
    """
    try:
        arrays = await asyncio.get_running_loop().run_in_executor(workers, make)
    except BaseException as error:  # also a cancellation: it must end the steps that wait for the arrays
        words = in_words(error)
        for entry in entries:
            entry.fail(words)
        raise
    for entry, array in zip(entries, arrays, strict=True):
        entry.resolve(array)


async def wait_all(entries: Sequence[StoredArray]) -> None:
    """Wait until all entries are done.

    Raises:
        BaseException: the error of the first entry, in order, that has one.
    """
    all_done = asyncio.get_running_loop().create_future()
    left = len(entries)

    def count_done(_: StoredArray) -> None:
        nonlocal left
        left -= 1
        if not left and not all_done.done():
            all_done.set_result(None)

    for entry in entries:
        entry.when_done(count_done)
    if entries:
        await all_done
    for entry in entries:
        if entry.error is not None:
            raise entry.error.with_traceback(None)  # each time anew: it would grow with every waiter


class ArrayStore:
    """The arrays of one actor, by id."""

    def __init__(self) -> None:
        self._entries: dict[ArrayId, StoredArray] = {}

    def expect(self, array_id: ArrayId, aval: Aval) -> StoredArray:
        """Make the entry of an array that is in the making."""
        entry = self._entries[array_id] = StoredArray(aval)
        return entry

    def get(self, array_id: ArrayId) -> StoredArray:
        """Return the entry of an array.

        Raises:
            ArrayError: there is no entry: the array was made elsewhere, was freed, or a step has consumed it.
        """
        if array_id not in self._entries:
            raise ArrayError(
                f"array {array_id} is not on this actor: it was freed, donated, or made elsewhere"
            )
        return self._entries[array_id]

    def entries(self) -> dict[ArrayId, StoredArray]:
        """Return all entries as they are now, also of arrays in the making."""
        return dict(self._entries)

    def remove(self, array_id: ArrayId) -> None:
        """Remove an array's entry. References to the entry keep the array alive; an unknown id is no
        error."""
        self._entries.pop(array_id, None)

    def fail_pending(self, error: BaseException) -> None:
        """Fail every entry that is not done, and remove it together with those that failed before."""
        for array_id, entry in list(self._entries.items()):
            if entry.array is None:
                del self._entries[array_id]
                entry.fail(error)

    def forget_all(self) -> None:
        """Remove every entry."""
        self._entries.clear()

    @property
    def size_bytes(self) -> int:
        """The bytes of the arrays that are there."""
        return sum(entry.aval.size_bytes for entry in self._entries.values() if entry.array is not None)

    def __len__(self) -> int:
        """Count the arrays that are there; those in the making are left out."""
        return len([None for entry in self._entries.values() if entry.array is not None])
