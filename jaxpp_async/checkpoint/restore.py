"""Restore a tree of arrays from a checkpoint's folder; each actor reads only the arrays that it will hold."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpp_async.base.printable import listed, shown
from jaxpp_async.checkpoint import manifest as m
from jaxpp_async.checkpoint import trees
from jaxpp_async.checkpoint.save import checkpoint_failure
from jaxpp_async.checkpoint.trees import RestoreTarget
from jaxpp_async.controller.controller import Controller
from jaxpp_async.errors import ActorError, CheckpointError
from jaxpp_async.program.instructions import ProcessId
from jaxpp_async.protocol.messages import FilePart, FilePiece, ReadFile
from jaxpp_async.protocol.task_group import all_of
from jaxpp_async.session.host_transfers import RemoteValues
from jaxpp_async.session.remote_array import DELETED, RemoteArray
from jaxpp_async.storage import checkpoint_folder, tensor_files
from jaxpp_async.storage.checkpoint_folder import CheckpointPath

_SHOWN = 5
"""The most other checkpoints that an error names."""

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
            self._read_here, [path for path in here if path in self._manifest.arrays]
        )
        return {path: self._finished(target, hosts.get(path), path) for path, target in here.items()}

    def _ask_for(
        self, path: str, array: RemoteArray, by_process: dict[ProcessId, dict[str, list[FilePart]]]
    ) -> None:
        stored = self._manifest.arrays[path]
        pieces = tuple(
            FilePiece(self._encoded(p.file), p.name, p.start, p.shape, p.sha256) for p in stored.pieces
        )
        part = FilePart(path, stored.sha256, array.array_id, array.value_type.aval, pieces)
        for process in self._controller.processes.processes_of_all(array.actors):
            by_process.setdefault(process, {}).setdefault(stored.file, []).append(part)

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

    def _read_here(self, paths: Sequence[str]) -> dict[str, np.ndarray]:
        """Read the arrays that are to stay in this process, and return them by path; called in a thread."""
        by_file: dict[str, list[str]] = {}
        found: dict[str, np.ndarray] = {}
        for path in paths:
            array = self._manifest.arrays[path]
            if not array.pieces:
                by_file.setdefault(array.file, []).append(path)
                continue
            pieces = [
                (
                    os.path.join(self._folder, p.file),
                    p.start,
                    tensor_files.WantedArray(p.name, array.dtype, p.shape, p.sha256),
                )
                for p in array.pieces
            ]
            found[path] = tensor_files.read_pieces(array.shape, array.dtype, pieces)
        for name, members in by_file.items():
            stored = [(path, self._manifest.arrays[path]) for path in members]
            wanted = [tensor_files.WantedArray(path, a.dtype, a.shape, a.sha256) for path, a in stored]
            found |= zip(members, tensor_files.read(os.path.join(self._folder, name), wanted), strict=True)
        return found

    def _finished(self, target: RestoreTarget, array: np.ndarray | None, path: str) -> Any:
        value = trees.to_user_value(target, self._manifest.values[path] if array is None else array)
        if target.like is not None or target.value_type is None:
            return value
        return RemoteArray(self._values, self._controller.new_array_id(), target.value_type, (), host=value)


# ---------------------------------------------------------------- reading the manifest


def load_manifest(folder: str) -> m.Manifest:
    """Read and check the manifest (the description of the content) of the checkpoint in a folder.

    Raises:
        CheckpointError: the folder has no manifest, or a corrupt one. The message names the file and the
            problem.
    """
    path = os.path.join(folder, checkpoint_folder.MANIFEST)
    try:
        data = checkpoint_folder.read_manifest(folder)
        if data is None:
            raise CheckpointError(f"{shown(folder)}: there is no checkpoint: {_found_instead(folder)}")
        text = data.decode()
    except NotADirectoryError:
        raise CheckpointError(f"{shown(folder)}: there is no checkpoint: {_found_instead(folder)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{shown(path)}: {getattr(error, 'strerror', None) or error}") from error
    try:
        return m.parse(text)
    except CheckpointError as error:
        raise CheckpointError(f"{shown(path)}: {error}") from None


def _found_instead(folder: str) -> str:
    """Return text for an error message that says what is at a path instead of a checkpoint, and what to do.

    Args:
        folder: the path at which the user expects a checkpoint.
    """
    parent = os.path.dirname(folder)
    if inside := _checkpoints_in(folder):
        one = shown(os.path.join(folder, inside[0]))
        is_numbered = any(map(checkpoint_folder.NUMBER.fullmatch, inside))
        newest = ", or restore the newest with jpp.Checkpoints(mesh, path).restore(like)" * is_numbered
        return f"it is a folder of checkpoints, {_some(inside)}; give one of them ({one}){newest}"
    if os.path.exists(folder) and not os.path.isdir(folder):
        is_part_of_one = os.path.isfile(os.path.join(parent, checkpoint_folder.MANIFEST))
        return "it is a file" + (
            f"; give the folder that it is in: {shown(parent)}" if is_part_of_one else ""
        )
    beside = _checkpoints_in(parent)
    return _nothing_but(folder) + (
        f"; in {shown(parent)} there are {_some(beside)}"
        if beside
        else "; nor is there one in it or beside it"
    )


def _nothing_but(folder: str) -> str:
    """Return text for an error message that says what is at a path where there is no manifest.

    Args:
        folder: the path at which the user expects a checkpoint.
    """
    if not os.path.isdir(folder):
        return "there is no such folder"
    names = sorted(os.listdir(folder))
    if checkpoint_folder.written_by_saves(names):
        return f"{checkpoint_folder.MANIFEST} is missing: a save was broken off here, or is still writing"
    return (
        f"{checkpoint_folder.MANIFEST} is missing: {'in it are ' + _some(names) if names else 'it is empty'}"
    )


def _checkpoints_in(directory: str) -> list[str]:
    """Return the names of the checkpoints (folders with a manifest) in a directory, in descending order.

    Numbered checkpoints are thus sorted from the newest to the oldest. The list is empty if the directory
    cannot be read.
    """
    try:
        names = sorted(os.listdir(directory), reverse=True)
    except OSError:
        return []
    return [n for n in names if os.path.isfile(os.path.join(directory, n, checkpoint_folder.MANIFEST))]


def _some(names: Sequence[str]) -> str:
    return listed([shown(name) for name in names], _SHOWN)
