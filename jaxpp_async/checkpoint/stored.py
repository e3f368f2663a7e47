"""Read a checkpoint's folder without a mesh: what is in it, whether it is whole, and its arrays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpp_async.base.printable import listed, shown
from jaxpp_async.checkpoint import manifest as m
from jaxpp_async.errors import CheckpointError
from jaxpp_async.storage import checkpoint_folder, tensor_files

_SHOWN = 5
"""The most other checkpoints that an error names."""


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
    if inside := checkpoints_in(folder):
        one = shown(os.path.join(folder, inside[0]))
        is_numbered = any(map(checkpoint_folder.NUMBER.fullmatch, inside))
        newest = ", or restore the newest with jpp.Checkpoints(mesh, path).restore(like)" * is_numbered
        return f"it is a folder of checkpoints, {_some(inside)}; give one of them ({one}){newest}"
    if os.path.exists(folder) and not os.path.isdir(folder):
        is_part_of_one = os.path.isfile(os.path.join(parent, checkpoint_folder.MANIFEST))
        return "it is a file" + (
            f"; give the folder that it is in: {shown(parent)}" if is_part_of_one else ""
        )
    beside = checkpoints_in(parent)
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


def checkpoints_in(directory: str) -> list[str]:
    """Return the names of the checkpoints (folders with a manifest) in a directory, in descending order.

    Numbered checkpoints are thus sorted from the newest to the oldest. The list is empty if the directory
    cannot be read.
    """
    try:
        names = sorted(os.listdir(directory), reverse=True)
    except OSError:
        return []
    return [n for n in names if os.path.isfile(os.path.join(directory, n, checkpoint_folder.MANIFEST))]


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint in a folder, in a few words.

    Args:
        name: the name of its folder.
        saved_s: when it was saved, in seconds since 1970.
        size_bytes: the bytes of all arrays together; 0 if it cannot be read.
        num_leaves: the number of leaves; 0 if it cannot be read.
        error: why it cannot be read; `""` if it can.
    """

    name: str
    saved_s: float
    size_bytes: int = 0
    num_leaves: int = 0
    error: str = ""

    @property
    def saved(self) -> str:
        """When it was saved, as text in local time."""
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.saved_s))


def describe(directory: str, name: str) -> StoredCheckpoint:
    """Return what a checkpoint is, by its manifest.

    Args:
        directory: the folder in which the checkpoint's folder is.
        name: the name of the checkpoint's folder.

    Raises:
        OSError: there is no checkpoint.
    """
    folder = os.path.join(directory, name)
    saved_s = os.path.getmtime(os.path.join(folder, checkpoint_folder.MANIFEST))
    try:
        manifest = load_manifest(folder)
    except CheckpointError as error:
        return StoredCheckpoint(name, saved_s, error=str(error))
    return StoredCheckpoint(name, saved_s, manifest.size_bytes, len(manifest.paths))


def _some(names: Sequence[str]) -> str:
    return listed([shown(name) for name in names], _SHOWN)


# ---------------------------------------------------------------- arrays


def read_arrays(folder: str, manifest: m.Manifest, paths: Sequence[str]) -> dict[str, np.ndarray]:
    """Read some of a checkpoint's arrays, and return them by path; their bytes are checked.

    Args:
        folder: the checkpoint's folder.
        manifest: the description of the checkpoint.
        paths: the paths of the arrays.

    Raises:
        CheckpointError: a file is missing, cut off or damaged; the message names it.
    """
    by_file: dict[str, list[str]] = {}
    found: dict[str, np.ndarray] = {}
    for path in paths:
        array = manifest.arrays[path]
        if not array.pieces:
            by_file.setdefault(array.file, []).append(path)
            continue
        pieces = [
            (
                os.path.join(folder, p.file),
                p.start,
                tensor_files.WantedArray(p.name, array.dtype, p.shape, p.sha256),
            )
            for p in array.pieces
        ]
        found[path] = tensor_files.read_pieces(array.shape, array.dtype, pieces)
    for name, members in by_file.items():
        stored = [(path, manifest.arrays[path]) for path in members]
        wanted = [tensor_files.WantedArray(path, a.dtype, a.shape, a.sha256) for path, a in stored]
        found |= zip(members, tensor_files.read(os.path.join(folder, name), wanted), strict=True)
    return found


def find_damage(
    folder: str, manifest: m.Manifest, on_progress: Callable[[int], None] = lambda count: None
) -> dict[str, str]:
    """Read every array of a checkpoint and check its bytes.

    Args:
        folder: the checkpoint's folder.
        manifest: the description of the checkpoint.
        on_progress: called with the number of arrays that have been read, each time that there is one more.

    Returns:
        What is wrong with each array that cannot be read, by path; empty if the checkpoint is whole.
    """
    damage = {}
    for count, path in enumerate(manifest.arrays, start=1):
        try:
            read_arrays(folder, manifest, [path])
        except CheckpointError as error:
            damage[path] = str(error)
        on_progress(count)
    return damage
