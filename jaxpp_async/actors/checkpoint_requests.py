"""snapshots: an actor's part in saving and restoring: carries out `BeginSnapshot`, `WriteFile`, `CheckFiles`, `Sweep` and
`ReadFile`.

Arrays are taken hold of in order with the steps, and written by a thread while later steps run. Decides neither what
goes where nor when a checkpoint is whole.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxpp_async.actors.array_store import ArrayStore, StoredArray, fill
from jaxpp_async.actors.host_values import HostCopy
from jaxpp_async.actors.shards import Layout, Layouts, hold_pieces, join_pieces, place
from jaxpp_async.base.printable import shown
from jaxpp_async.errors import CheckpointError
from jaxpp_async.protocol.messages import (
    ArrayId,
    BeginSnapshot,
    CheckFiles,
    Done,
    FilePart,
    ReadFile,
    Sweep,
    WriteFile,
    Written,
)
from jaxpp_async.storage import checkpoint_folder, tensor_files


class CheckpointRequests:
    """The saves and restores of one actor.

    Args:
        store: where arrays come from and go.
        workers: threads for files and copies.
    """

    def __init__(self, store: ArrayStore, layouts: Layouts, workers: ThreadPoolExecutor):
        self._store, self._layouts, self._workers = store, layouts, workers
        self._saves: dict[bytes, _Save] = {}
        self._stopped: list[asyncio.Future[Any]] = []

    def take(self, message: BeginSnapshot) -> Coroutine[Any, Any, Done]:
        """Take hold of the arrays, now; what is returned waits until they are there.

        Raises:
            ArrayError: an array is not here. CheckpointError: a save is under way in this folder.
        """
        if message.folder in self._saves:
            raise CheckpointError(f"{shown(message.folder)}: another save is writing there")
        entries = {array_id: self._store.get(array_id) for array_id in message.array_ids}
        loop, read = asyncio.get_running_loop(), hold_pieces(self._layouts.devices)
        looks: dict[ArrayId, HostCopy] = {}
        for array_id, entry in entries.items():
            look = looks[array_id] = HostCopy(self._layouts.of(entry.aval), loop.create_future(), read)
            entry.when_done(look.take)
        save = self._saves[message.folder] = _Save(looks)
        return save.taken(message.request)

    def write(self, message: WriteFile) -> Coroutine[Any, Any, Written]:
        """Find what is to be written, now; what is returned writes one file of a save.

        Raises:
            CheckpointError: it cannot be written; nothing of it is left.
        """
        save = self._saves.get(message.folder)
        if save is None:
            raise CheckpointError(f"{shown(message.folder)}: no save is under way there")
        looks = {name: (save.looks[array_id], part) for array_id, name, part in message.arrays}
        for array_id, _, _ in message.arrays:
            save.looks.pop(array_id, None)  # one array may have two names
        return self._written(message, save, looks)

    async def _written(
        self, message: WriteFile, save: _Save, looks: dict[str, tuple[HostCopy, int]]
    ) -> Written:
        await asyncio.gather(*(look.pieces for look, _ in looks.values()))
        await self._until_stopped()
        save.check_going_on()
        path = os.path.join(os.fsdecode(message.folder), message.file)
        loop = asyncio.get_running_loop()
        save.writing = loop.run_in_executor(
            self._workers, _write, path, looks, message.metadata, save.stopped
        )
        del looks  # the thread lets go of the arrays
        size, digests = await save.writing
        return Written(message.request, size, tuple(digests[name] for _, name, _ in message.arrays))

    async def check(self, message: CheckFiles) -> Done:
        """Look whether files are still there and whole.

        Raises:
            CheckpointError: one is not.
        """
        check, folder = checkpoint_folder.check_files, os.fsdecode(message.folder)
        await asyncio.get_running_loop().run_in_executor(self._workers, check, folder, dict(message.files))
        return Done(message.request)

    def sweep(self, message: Sweep) -> Coroutine[Any, Any, Done]:
        """End the save in a folder, now, so that the next may begin behind this; what is returned removes files.

        Raises:
            CheckpointError: a file cannot be removed.
        """
        save = self._saves.pop(message.folder, None)
        if save is not None:
            save.stop()
        return self._swept(message, save)

    async def _swept(self, message: Sweep, save: _Save | None) -> Done:
        if save is not None:
            await save.end()
        await self._until_stopped()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._workers, _sweep, message)
        return Done(message.request)

    def read(self, message: ReadFile) -> Coroutine[Any, Any, Done]:
        """Make places for the arrays, now, so that steps behind this may name them; what is returned fills them."""
        entries = [self._store.expect(part.array_id, part.aval) for part in message.parts]
        return self._read(message, entries)

    async def _read(self, message: ReadFile, entries: Sequence[StoredArray]) -> Done:
        async def making() -> list[jax.Array]:
            layouts = [self._layouts.of(part.aval) for part in message.parts]
            return await asyncio.get_running_loop().run_in_executor(
                self._workers, _read_and_place, message, layouts
            )

        await fill(entries, making())
        return Done(message.request)

    def stop_all(self) -> None:
        """Let go of every array and tell the threads to stop; each removes the file it is at.

        They may take a while: a thread that waits for a disk cannot be stopped. Later requests that touch files wait
        for them, since they may use the same names.
        """
        for save in self._saves.values():
            save.stop()
        self._stopped += [save.writing for save in self._saves.values() if save.writing is not None]
        self._saves.clear()

    async def _until_stopped(self) -> None:
        stopped, self._stopped = self._stopped, []
        if stopped:
            await asyncio.wait(stopped)


class _Save:
    """A save under way.

    Attributes:
        looks: arrays not yet written.
        stopped: tells the writing thread to end.
        writing: the file that is being written.
    """

    def __init__(self, looks: dict[ArrayId, HostCopy]):
        self.looks, self.stopped = looks, threading.Event()
        self.writing: asyncio.Future[Any] | None = None
        self._waiting = [look.pieces for look in looks.values()]

    async def taken(self, request: int) -> Done:
        """Wait until the arrays are there."""
        waiting, self._waiting = self._waiting, []
        await asyncio.gather(*waiting)
        return Done(request)

    def check_going_on(self) -> None:
        """Raises:
        CheckpointError: it was stopped.
        """
        if self.stopped.is_set():
            raise CheckpointError("the save was stopped")

    def stop(self) -> None:
        """Let go of what is not written."""
        self.stopped.set()
        for look in self.looks.values():
            if not look.pieces.done():
                look.pieces.set_exception(CheckpointError("the save was stopped"))
                look.pieces.exception()  # perhaps nobody waits for it any more, and asyncio would complain
        self.looks.clear()

    async def end(self) -> None:
        """Stop, and wait until the thread has."""
        self.stop()
        if self.writing is not None:
            await asyncio.wait([self.writing])


def _write(
    path: str,
    looks: Mapping[str, tuple[HostCopy, int]],
    metadata: Mapping[str, str],
    stopped: threading.Event,
) -> tuple[int, dict[str, str]]:
    """Runs in a thread."""
    arrays = {
        name: _part_of([np.asarray(piece) for piece in look.pieces.result()], look.layout, part)
        for name, (look, part) in looks.items()
    }
    try:
        checkpoint_folder.make(os.path.dirname(path))
        return tensor_files.write(path, arrays, metadata, stopped.is_set)
    except InterruptedError:
        raise
    except OSError as error:
        raise CheckpointError(f"{shown(path)}: {error.strerror or error}") from error


def _part_of(pieces: Sequence[np.ndarray], layout: Layout, part: int) -> np.ndarray:
    """What is to be written of an array: all of it (-1), or one of its parts."""
    if part < 0:
        return join_pieces(pieces, layout)
    return next(
        piece for piece, shard in zip(pieces, layout.shards, strict=True) if shard.part.number == part
    )


def _sweep(message: Sweep) -> None:
    """Runs in a thread."""
    folder = os.fsdecode(message.folder)
    try:
        checkpoint_folder.remove_files(folder, message.files)
    except OSError as error:
        raise CheckpointError(f"{shown(folder)}: {error.strerror or error}") from error
    if message.remove_folder:
        checkpoint_folder.remove_empty(folder)


def _read_and_place(message: ReadFile, layouts: Sequence[Layout]) -> list[jax.Array]:
    """Runs in a thread."""
    wanted = [_wanted(part) for part in message.parts if not part.pieces]
    whole = iter(tensor_files.read(os.fsdecode(message.path), wanted)) if wanted else iter(())
    hosts = [
        _put_together(part, layout) if part.pieces else next(whole)
        for part, layout in zip(message.parts, layouts, strict=True)
    ]
    return [place(host, layout) for host, layout in zip(hosts, layouts, strict=True)]


def _wanted(part: FilePart) -> tensor_files.WantedArray:
    return tensor_files.WantedArray(part.name, part.aval.dtype, part.aval.shape, part.sha256)


def _put_together(part: FilePart, layout: Layout) -> np.ndarray:
    """As much of an array in several pieces as this process is to hold."""
    aval = part.aval
    pieces = [
        (os.fsdecode(p.path), p.start, tensor_files.WantedArray(p.name, aval.dtype, p.shape, p.sha256))
        for p in part.pieces
    ]
    return tensor_files.read_pieces(aval.shape, aval.dtype, pieces, [shard.index for shard in layout.shards])
