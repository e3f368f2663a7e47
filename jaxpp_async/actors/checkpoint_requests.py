"""Save an actor's arrays to files and restore them, as the controller requests.

The request `BeginSnapshot` keeps the arrays to save as they are between two steps. A `WriteFile` request then
has a thread write these arrays to a file while later steps run. The controller decides which process writes
which array to which file, and when a checkpoint is complete.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxpp_async.actors.array_store import ArrayStore, fill
from jaxpp_async.actors.host_values import HostCopy, copy_when_available
from jaxpp_async.actors.server import handles
from jaxpp_async.actors.shards import Layout, Layouts, join_on_host, place
from jaxpp_async.base.printable import shown
from jaxpp_async.errors import CheckpointError
from jaxpp_async.protocol import messages as m
from jaxpp_async.storage import checkpoint_folder, tensor_files


class CheckpointRequests:
    """The component of an actor process that saves its arrays to checkpoint files and restores them.

    Args:
        store: the array store. Saves read arrays from it, and restores add arrays to it.
        layouts: the distributions of arrays over this process's devices.
        workers: threads for reading, writing and copying.
    """

    def __init__(self, store: ArrayStore, layouts: Layouts, workers: ThreadPoolExecutor):
        self._store, self._layouts, self._workers = store, layouts, workers
        self._saves: dict[bytes, _Save] = {}
        self._stopped: list[asyncio.Future[Any]] = []

    @handles(m.BeginSnapshot)
    def begin(self, message: m.BeginSnapshot) -> Coroutine[Any, Any, m.Done]:
        """Start a save: keep the arrays to save as they are at this moment, so that later steps cannot change
        them.

        Returns:
            A coroutine that waits until the arrays are available, and returns the reply.

        Raises:
            ArrayError: an array is not on this actor.
            CheckpointError: another save to this folder is under way.
        """
        if message.folder in self._saves:
            raise CheckpointError(f"{shown(message.folder)}: another save is writing there")
        entries = {array_id: self._store.get(array_id) for array_id in message.array_ids}
        copies = {array_id: copy_when_available(entry, self._layouts) for array_id, entry in entries.items()}
        save = self._saves[message.folder] = _Save(copies)
        return save.begun()

    @handles(m.WriteFile)
    def write(self, message: m.WriteFile) -> Coroutine[Any, Any, m.Written]:
        """Write one file of a save. The arrays to write are looked up before this method returns.

        Returns:
            A coroutine that writes the file and returns the reply. If the file cannot be written, the
            coroutine raises `CheckpointError` and leaves no part of the file behind.

        Raises:
            CheckpointError: no save to this folder is under way.
        """
        save = self._saves.get(message.folder)
        if save is None:
            raise CheckpointError(f"{shown(message.folder)}: no save is under way there")
        copies = {name: (save.copies[array_id], part) for array_id, name, part in message.arrays}
        for array_id, _, _ in message.arrays:
            save.copies.pop(array_id, None)  # one array may have two names
        return self._written(message, save, copies)

    async def _written(
        self, message: m.WriteFile, save: _Save, copies: dict[str, tuple[HostCopy, int]]
    ) -> m.Written:
        await asyncio.gather(*(copy.shards for copy, _ in copies.values()))
        await self._wait_stopped()
        if save.stopped.is_set():
            raise CheckpointError("the save was stopped")
        path = os.path.join(os.fsdecode(message.folder), message.file)
        loop = asyncio.get_running_loop()
        save.writing = loop.run_in_executor(
            self._workers, _write, path, copies, message.metadata, save.stopped
        )
        del copies  # only the thread refers to the arrays now
        size, digests = await save.writing
        return m.Written(size, tuple(digests[name] for _, name, _ in message.arrays))

    @handles(m.CheckFiles)
    async def check(self, message: m.CheckFiles) -> m.Done:
        """Check that the files of a save still exist and have the sizes with which they were written.

        Raises:
            CheckpointError: a file is missing or has another size.
        """
        check, folder = checkpoint_folder.check_files, os.fsdecode(message.folder)
        await asyncio.get_running_loop().run_in_executor(self._workers, check, folder, dict(message.files))
        return m.Done()

    @handles(m.Sweep)
    def sweep(self, message: m.Sweep) -> Coroutine[Any, Any, m.Done]:
        """End the save to a folder, if one is under way, so that another save may begin, and remove the files
        that the request names.

        Returns:
            A coroutine that removes the files, and returns the reply. The coroutine raises `CheckpointError`
            if a file cannot be removed.
        """
        save = self._saves.pop(message.folder, None)
        if save is not None:
            save.stop()
        return self._swept(message, save)

    async def _swept(self, message: m.Sweep, save: _Save | None) -> m.Done:
        if save is not None:
            await save.wait_written()
        await self._wait_stopped()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._workers, _sweep, message)
        return m.Done()

    @handles(m.ReadFile)
    def read(self, message: m.ReadFile) -> Coroutine[Any, Any, m.Done]:
        """Restore arrays from files. Entries for the arrays are added to the array store before this method
        returns, so that later steps may use the arrays.

        Returns:
            A coroutine that reads the arrays, makes them available in the store, and returns the reply.
        """
        entries = [self._store.expect(part.array_id, part.aval) for part in message.parts]
        return fill(entries, partial(_read_and_place, message, self._layouts), self._workers)

    def stop_all(self) -> None:
        """Stop all saves: release their arrays, and tell the threads to stop and to remove the files that
        they are writing.

        A thread may continue for a while, since a thread that waits for a disk cannot be stopped. Later
        requests that write or remove files wait for these threads, because both may use the same file names.
        """
        for save in self._saves.values():
            save.stop()
        self._stopped += [save.writing for save in self._saves.values() if save.writing is not None]
        self._saves.clear()

    async def _wait_stopped(self) -> None:
        stopped, self._stopped = self._stopped, []
        if stopped:
            await asyncio.wait(stopped)


class _Save:
    """The state of one checkpoint save that is under way.

    Attributes:
        copies: the arrays that are still to be written, by id, as copies on the host.
        stopped: an event that tells the writing thread to stop.
        writing: a future that is done once the thread has written its current file; None before the first
            file.
    """

    def __init__(self, copies: dict[m.ArrayId, HostCopy]):
        self.copies, self.stopped = copies, threading.Event()
        self.writing: asyncio.Future[Any] | None = None
        self._waiting = [copy.shards for copy in copies.values()]

    async def begun(self) -> m.Done:
        """Wait until all arrays of the save are available, and return the reply to `BeginSnapshot`."""
        waiting, self._waiting = self._waiting, []
        await asyncio.gather(*waiting)
        return m.Done()

    def stop(self) -> None:
        """Tell the writing thread to stop, and release the arrays that are still to be written."""
        self.stopped.set()
        for copy in self.copies.values():
            if not copy.shards.done():
                copy.shards.set_exception(CheckpointError("the save was stopped"))
                copy.shards.exception()  # marks it as retrieved, since perhaps no coroutine awaits it
        self.copies.clear()

    async def wait_written(self) -> None:
        """Wait until the thread has finished its current file, if there is one."""
        if self.writing is not None:
            await asyncio.wait([self.writing])


def _write(
    path: str,
    copies: Mapping[str, tuple[HostCopy, int]],
    metadata: Mapping[str, str],
    stopped: threading.Event,
) -> tuple[int, dict[str, str]]:
    """Write one file of a save. This is called in a worker thread, since it waits for arrays that are being
    copied from a device.

    Args:
        path: the path of the file.
        copies: a dictionary. Its keys are the names of the arrays in the file; each value is a pair of the
            array's copy on the host and the number of the part (distinct slice) to write. The number -1 means
            the whole array.
        metadata: the entries of the file's header.
        stopped: an event that makes the thread stop and remove the file.

    Returns:
        The size of the file in bytes, and a dictionary. Its keys are the names of the arrays in the file; its
        values are the SHA-256 hashes of the written bytes.

    Raises:
        CheckpointError: the file cannot be written.
        InterruptedError: `stopped` was set.
    """
    arrays = {
        name: _part_of([np.asarray(data) for data in copy.shards.result()], copy.layout, part)
        for name, (copy, part) in copies.items()
    }
    with tensor_files.checkpoint_errors(path):
        checkpoint_folder.make(os.path.dirname(path))
        return tensor_files.write(path, arrays, metadata, stopped.is_set)


def _part_of(shards: Sequence[np.ndarray], layout: Layout, part: int) -> np.ndarray:
    """Return one part (a distinct slice) of an array, or the whole array.

    Args:
        shards: the array's distinct shards on this process.
        layout: the distribution of the array over the devices.
        part: the number of the part, or -1 for the whole array.
    """
    if part < 0:
        return join_on_host(shards, layout)
    return next(data for data, shard in zip(shards, layout.shards, strict=True) if shard.part.number == part)


def _sweep(message: m.Sweep) -> None:
    """Remove the files that a request names, and the folder if the request asks for it and the folder is then
    empty.

    This is called in a worker thread.

    Raises:
        CheckpointError: a file cannot be removed.
    """
    folder = os.fsdecode(message.folder)
    with tensor_files.checkpoint_errors(folder):
        checkpoint_folder.remove_files(folder, message.files)
    if message.remove_folder:
        checkpoint_folder.remove_empty(folder)


def _read_and_place(message: m.ReadFile, layouts: Layouts) -> list[jax.Array]:
    """Read arrays from files and put them on the devices; called in a worker thread.

    Returns:
        The arrays, in the order of the request's `parts`.
    """
    wanted = [
        tensor_files.WantedArray(part.name, part.aval.dtype, part.aval.shape, part.sha256)
        for part in message.parts
        if not part.pieces
    ]
    whole = iter(tensor_files.read(os.fsdecode(message.path), wanted)) if wanted else iter(())
    placing = [layouts.of(part.aval) for part in message.parts]
    pieces = [piece for part in message.parts for piece in _pieces(part)]
    read_one = tensor_files.read_shared([(path, wanted) for path, _, wanted in pieces])
    hosts = [
        _read_pieces(part, layout, read_one) if part.pieces else next(whole)
        for part, layout in zip(message.parts, placing, strict=True)
    ]
    return [place(host, layout) for host, layout in zip(hosts, placing, strict=True)]


def _read_pieces(part: m.FilePart, layout: Layout, read_one: tensor_files.ReadOne) -> np.ndarray:
    """Read those pieces of an array that this process needs; the array is stored in pieces.

    Args:
        part: the array, and the file and the position of each piece.
        layout: the distribution of the array over this process's devices.
        read_one: a function that reads one piece.

    Returns:
        A host array of the whole array's shape. Pieces that overlap no shard of this process are not read,
        and are zero in the array.
    """
    aval, needed = part.aval, [shard.part.index for shard in layout.shards]
    return tensor_files.read_pieces(aval.shape, aval.dtype, _pieces(part), needed, read_one)


def _pieces(part: m.FilePart) -> list[tuple[str, tuple[int, ...], tensor_files.WantedArray]]:
    """Return the path, the position and the description of each piece of an array."""
    return [
        (os.fsdecode(p.path), p.start, tensor_files.WantedArray(p.name, part.aval.dtype, p.shape, p.sha256))
        for p in part.pieces
    ]
