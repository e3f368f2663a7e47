"""Store the arrays of an actor by id, including arrays that are still being received, restored or
computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from jaxpp_async.base.printable import ErrorInWords, in_words
from jaxpp_async.errors import ArrayError
from jaxpp_async.program.instructions import Aval
from jaxpp_async.protocol.messages import ArrayId, Done


class StoredArray:
    """The store's entry for one array, which may not be available yet.

    When the array becomes available or fails, the entry calls its callbacks directly, in the order in which
    they were added; an `asyncio.Future` would call them later, from the event loop. A fetch that is requested
    before a step that donates the array therefore reads the array before the step consumes it.

    Attributes:
        aval: the shape, the dtype and the sharding of the array.
        array: the array, or None until it is available.
        error: the exception because of which the array will never be available; None for any other array.
    """

    __slots__ = ("_waiting", "array", "aval", "error")

    def __init__(self, aval: Aval):
        self.aval = aval
        self.array: jax.Array | None = None
        self.error: ErrorInWords | None = None
        self._waiting: list[Callable[[StoredArray], None]] = []

    @property
    def done(self) -> bool:
        """True once the array is available or has failed."""
        return self.array is not None or self.error is not None

    def resolve(self, array: jax.Array) -> None:
        """Make the array available and call the callbacks. Does nothing if the entry has its array or its
        error already."""
        if not self.done:
            self.array = array
            self._call_back()

    def fail(self, error: BaseException) -> None:
        """Record the error because of which the array will never be available, and call the callbacks. Does
        nothing if the entry has its array or its error already."""
        if not self.done:
            self.error = in_words(error)
            self._call_back()

    def when_done(self, callback: Callable[[StoredArray], None]) -> None:
        """Call `callback(entry)` once the array is available or has failed, or immediately if that has
        already happened."""
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
) -> Done:
    """Compute arrays in a thread, and make them available in the array store.

    Args:
        entries: the store's entry for each array.
        make: computes the arrays, in the order of `entries`; called in one of the threads.
        workers: the threads.

    Returns:
        The reply to the request for the arrays.

    Raises:
        Exception: the exception that `make` raised; all entries fail with the same exception.
    """
    try:
        arrays = await asyncio.get_running_loop().run_in_executor(workers, make)
    except BaseException as error:  # a cancellation too must fail the steps that wait
        words = in_words(error)
        for entry in entries:
            entry.fail(words)
        raise
    for entry, array in zip(entries, arrays, strict=True):
        entry.resolve(array)
    return Done()


async def wait_all(entries: Sequence[StoredArray]) -> Done:
    """Wait until the array of each of these store entries is available or has failed.

    Returns:
        The reply to the request for the arrays.

    Raises:
        BaseException: the error of the first entry, in the given order, that has one.
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
            raise entry.error.with_traceback(None)  # otherwise it would grow with each waiter
    return Done()


class ArrayStore:
    """A store of the arrays of one actor process, by id."""

    def __init__(self) -> None:
        self._entries: dict[ArrayId, StoredArray] = {}

    def expect(self, array_id: ArrayId, aval: Aval) -> StoredArray:
        """Add an entry to the store for an array that will be available later, and return the entry."""
        entry = self._entries[array_id] = StoredArray(aval)
        return entry

    def get(self, array_id: ArrayId) -> StoredArray:
        """Return the entry of an array.

        Raises:
            ArrayError: there is no entry, because the array was made on another actor, was freed, or was
                donated to a step.
        """
        if array_id not in self._entries:
            raise ArrayError(
                f"array {array_id} is not on this actor: it was freed, donated, or made elsewhere"
            )
        return self._entries[array_id]

    def entries(self) -> dict[ArrayId, StoredArray]:
        """Return a copy of the mapping from ids to entries, including entries whose arrays are not available
        yet."""
        return dict(self._entries)

    def remove(self, array_id: ArrayId) -> None:
        """Remove the entry of an array from the store; do nothing if there is none. The array stays alive
        while other code refers to the entry."""
        self._entries.pop(array_id, None)

    def fail_pending(self, error: BaseException) -> None:
        """Remove every entry whose array is not available. Each removed entry fails with `error`, unless the
        entry has already failed."""
        for array_id, entry in list(self._entries.items()):
            if entry.array is None:
                del self._entries[array_id]
                entry.fail(error)

    def forget_all(self) -> None:
        """Remove every entry."""
        self._entries.clear()

    @property
    def size_bytes(self) -> int:
        """The total size in bytes of the arrays that are available."""
        return sum(entry.aval.size_bytes for entry in self._entries.values() if entry.array is not None)

    def __len__(self) -> int:
        """Return the number of arrays that are available; entries that have no array yet are not counted."""
        return len([None for entry in self._entries.values() if entry.array is not None])
