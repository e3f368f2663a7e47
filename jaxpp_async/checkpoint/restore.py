"""Restore a tree of arrays from a checkpoint's folder; each actor reads only the arrays that it will hold."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from operator import sub
from typing import Any

import numpy as np

from jaxpp_async.base.printable import shown
from jaxpp_async.checkpoint import manifest as m
from jaxpp_async.checkpoint import trees
from jaxpp_async.checkpoint.save import checkpoint_failure
from jaxpp_async.checkpoint.stored import load_manifest, read_arrays
from jaxpp_async.checkpoint.trees import RestoreTarget
from jaxpp_async.controller.controller import Controller
from jaxpp_async.errors import ActorError, CheckpointError
from jaxpp_async.program.instructions import ProcessId
from jaxpp_async.protocol.messages import FilePart, FilePiece, ReadFile
from jaxpp_async.protocol.task_group import all_of
from jaxpp_async.session.host_transfers import RemoteValues
from jaxpp_async.session.remote_array import DELETED, RemoteArray
from jaxpp_async.storage import checkpoint_folder
from jaxpp_async.storage.checkpoint_folder import CheckpointPath

_ATTEMPTS = 10
"""The most attempts at one restore; there is another attempt each time a save has replaced the checkpoint
while it was being read.
"""


async def restore(controller: Controller, values: RemoteValues, path: CheckpointPath, like: Any) -> Any:
    """Restore a checkpoint as a tree that has the structure of `like`; see `RemoteMesh.restore`.

    Args:
        controller: the mesh's controller.
        values: the part of the mesh that creates arrays on actors and fills them.
        path: the checkpoint's folder.
        like: a tree whose leaves say with which type and on which actors each saved leaf is restored.
    """
    folder = checkpoint_folder.absolute(path)
    values.check_like(like, "mesh.restore")
    wanted, structure = trees.targets(like)
    manifest = await asyncio.to_thread(load_manifest, folder)
    attempts_left = _ATTEMPTS
    while True:
        try:
            found = await _Reading(controller, values, folder, manifest).read(wanted)
            return structure.unflatten([found[path] for path in wanted])
        except CheckpointError:
            attempts_left -= 1
            newer = await asyncio.to_thread(_newer, folder, manifest)
            if newer is None or not attempts_left:
                raise
            manifest = newer


def _newer(folder: str, than: m.Manifest) -> m.Manifest | None:
    """Return the manifest (the description of a checkpoint) in a folder if it differs from `than`.

    If the manifest differs, a save has replaced the checkpoint while it was being read.

    Args:
        folder: the checkpoint's folder.
        than: the manifest that was read before.

    Returns:
        The new manifest; None if the manifest is still `than`, or cannot be read.
    """
    try:
        found = load_manifest(folder)
    except CheckpointError:
        return None
    return found if found != than else None


class _Reading:
    """One attempt to restore a checkpoint from the files that its manifest names.

    The manifest is the description of the checkpoint.
    """

    def __init__(self, controller: Controller, values: RemoteValues, folder: str, manifest: m.Manifest):
        self._controller, self._values, self._folder, self._manifest = controller, values, folder, manifest

    async def read(self, wanted: dict[str, RestoreTarget]) -> dict[str, Any]:
        """Restore every leaf, and return the leaves by path.

        If that fails, the arrays that were already created on actors are freed.

        Args:
            wanted: for each path, the type of the restored leaf and the actors that are to hold it.

        Raises:
            CheckpointError: the checkpoint has other leaves than `wanted`, or cannot be read.
        """
        try:
            trees.check_matches(wanted, self._manifest)
        except CheckpointError as error:
            raise CheckpointError(f"{shown(self._folder)}: {error}") from None
        remote = {
            path: self._values.new_array(target.value_type, target.actors)
            if target.divided is None
            else self._values.new_array_in_parts(target.value_type, target.divided)
            for path, target in wanted.items()
            if target.value_type is not None and target.actors
        }
        try:
            return remote | await self._fill(wanted, remote)
        except BaseException as error:  # also a cancellation: the actors do not keep what nobody gets
            for array in remote.values():
                array.retire(DELETED, "its restore failed")
                self._values.release(array)
            if isinstance(error, ActorError):
                what = "could not be restored; it is as it was"
                error = checkpoint_failure(self._folder, what, error, self._controller.cause)
            raise error

    async def _fill(self, wanted: dict[str, RestoreTarget], remote: dict[str, RemoteArray]) -> dict[str, Any]:
        """Fill the new arrays on actors from the checkpoint, and read the leaves that stay in this process.

        Args:
            wanted: for each path, the type of the restored leaf and the actors that are to hold it.
            remote: the new arrays on actors, by path.

        Returns:
            The leaves that stay in this process, by path.
        """
        here = {path: target for path, target in wanted.items() if path not in remote}
        by_process: dict[ProcessId, dict[str, list[FilePart]]] = {}
        for path, array in remote.items():
            if path in self._manifest.arrays:
                self._ask_for(path, array, by_process)
        await all_of(
            {process: self._read_on(process, files) for process, files in by_process.items()}, "restore"
        )
        await self._controller.secure()
        await self._values.fill(
            [(remote[p], self._plain(p, remote[p])) for p in remote if p in self._manifest.values]
        )
        hosts = await asyncio.to_thread(
            read_arrays,
            self._folder,
            self._manifest,
            [path for path in here if path in self._manifest.arrays],
        )
        return {path: self._finished(target, hosts.get(path), path) for path, target in here.items()}

    def _ask_for(
        self, path: str, array: RemoteArray, by_process: dict[ProcessId, dict[str, list[FilePart]]]
    ) -> None:
        """Add a leaf, or each of its parts, to what the processes of its actors are asked to read.

        The parts in which a leaf is to live need not be the pieces in which it was saved.

        Args:
            path: the path of the leaf.
            array: its new array.
            by_process: for each process and file, the arrays to read.
        """
        stored = self._manifest.arrays[path]
        for wanted, start in zip(array.pieces, array.starts, strict=True):
            aval, pieces = wanted.value_type.aval, stored.pieces
            if array.division is not None and not pieces:  # one piece, of which this is a part
                whole = m.Piece(stored.file, path, (0,) * len(stored.shape), stored.shape, stored.sha256)
                pieces = (whole,)
            needed = [p for p in pieces if _overlaps(p, start, aval.shape)] or pieces[:1]
            found = tuple(
                FilePiece(self._encoded(p.file), p.name, tuple(map(sub, p.start, start)), p.shape, p.sha256)
                for p in needed
            )
            part = FilePart(path, stored.sha256, wanted.array_id, aval, found)
            file = needed[0].file if needed else stored.file
            for process in self._controller.processes.processes_of_all(wanted.actors):
                by_process.setdefault(process, {}).setdefault(file, []).append(part)

    async def _read_on(self, process: ProcessId, files: dict[str, list[FilePart]]) -> None:
        """Have an actor's process read its arrays from files, one file after the other.

        This limits the host memory that the process needs to the arrays of one file.

        Args:
            process: the process.
            files: for each file name, the arrays to read from it.
        """
        for name, parts in files.items():
            message = ReadFile(self._encoded(name), tuple(parts))
            await self._controller.requests.send(process, message)

    def _encoded(self, file: str) -> bytes:
        """Return the full path of a checkpoint's file, encoded as bytes for messages to actors."""
        return os.fsencode(os.path.join(self._folder, file))

    def _plain(self, path: str, array: RemoteArray) -> np.ndarray:
        return np.asarray(self._manifest.values[path], array.value_type.aval.dtype)

    def _finished(self, target: RestoreTarget, array: np.ndarray | None, path: str) -> Any:
        value = trees.to_user_value(target, self._manifest.values[path] if array is None else array)
        if target.like is not None or target.value_type is None:
            return value
        return RemoteArray(self._values, self._controller.new_array_id(), target.value_type, (), host=value)


def _overlaps(piece: m.Piece, start: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a stored piece has an element of the part of a leaf that begins at `start`."""
    return all(
        max(a, b) < min(a + n, b + k)
        for a, n, b, k in zip(piece.start, piece.shape, start, shape, strict=True)
    )
