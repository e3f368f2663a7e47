"""checkpoint_folder: the names in a checkpoint's folder, and what makes a set of files a checkpoint, or none.

A save's files have names of their own, so an older checkpoint in the same folder stays whole beside them; renaming the
manifest into place is the one moment at which the new one takes over. Nothing here knows what is in the files.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Collection

from jaxpp_async.actors.files.tensor_files import PARTIAL, sync_folder

MANIFEST = "manifest.json"

_SAVE_ID = "[0-9a-f]{16}"
_OURS = re.compile(
    rf"{_SAVE_ID}-(actor-\d+|controller)-\d+\.safetensors({re.escape(PARTIAL)})?"
    rf"|{re.escape(MANIFEST)}\.{_SAVE_ID}{re.escape(PARTIAL)}"
)


def new_save_id() -> str:
    """A name that no other save has."""
    return secrets.token_hex(8)


def file_name(save_id: str, actor: int | None, index: int) -> str:
    """The name of one file of a save: the `index`-th of an actor, or of the controller (None)."""
    writer = "controller" if actor is None else f"actor-{actor}"
    return f"{save_id}-{writer}-{index}.safetensors"


def leftovers(names: Collection[str], keep: Collection[str] = (), save_id: str = "") -> list[str]:
    """Those of a folder's names that saves (or the one of this id) have left there; `keep` is left out, and what others
    put there."""
    return sorted(name for name in names if name not in keep and _OURS.fullmatch(name) and save_id in name)


def absolute(folder: str | os.PathLike[str]) -> str:
    """A folder's name for processes with other working directories."""
    return os.path.abspath(os.fspath(folder))


def make(folder: str) -> list[str]:
    """Make a folder and what is missing above it, durably.

    Returns:
        The folders made, outermost first.

    Raises:
        OSError: it cannot be made; none of those above it is left then.
    """
    missing: list[str] = []
    path = os.path.abspath(folder)
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    try:
        os.makedirs(folder, exist_ok=True)
        for made in missing:
            sync_folder(os.path.dirname(made))
    except OSError:
        for made in missing:
            remove_empty(made)
        raise
    return missing[::-1]


def commit(folder: str, save_id: str, manifest: str) -> None:
    """Rename the manifest into place: from here on the folder holds this save.

    Raises:
        OSError: it does not, and holds what it held before.
    """
    path = os.path.join(folder, MANIFEST)
    partial = f"{path}.{save_id}{PARTIAL}"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(manifest)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_folder(folder)


def sweep(folder: str, keep: Collection[str] = (), save_id: str = "") -> None:
    """Remove the `leftovers` in a folder; no folder is no error.

    Raises:
        OSError: a file cannot be removed.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    for name in leftovers(names, keep, save_id):
        with contextlib.suppress(FileNotFoundError):  # actors on one filesystem sweep the same folder
            os.unlink(os.path.join(folder, name))


def remove(folder: str) -> None:
    """Remove a checkpoint, its manifest first, so that it is never half there; then the folder, if it is empty.

    Raises:
        OSError: a file cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, MANIFEST))
        sync_folder(folder)
    sweep(folder)
    remove_empty(folder)


def remove_empty(folder: str) -> None:
    """Remove a folder if there is nothing in it."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)
