"""Name the files in a checkpoint's folder, replace the folder's manifest atomically, and remove files.

A folder contains one checkpoint, which consists of the files that the folder's manifest names. The files of
each save have names that no other save uses, so that a save overwrites neither an older checkpoint in the
same folder nor the files that another save is writing. Only the manifest is shared by all saves. At its end,
a save replaces the manifest that it found when it began, and from that moment on the folder contains the new
checkpoint. A save that fails removes its own files. A save that succeeds removes the files that the replaced
manifest named. No save removes other files, so a file that the current manifest names is never removed,
however many saves there are.

Only `read_manifest` and `commit` have to be atomic. On an object store that cannot rename files, a
conditional put can implement them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from typing import TypeAlias

from jaxpp_async.base.printable import shown
from jaxpp_async.errors import CheckpointError
from jaxpp_async.storage.tensor_files import PARTIAL, read_whole, sync_folder

CheckpointPath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]

MANIFEST = "manifest.json"
LOCK = f"{MANIFEST}.lock"
"""The name of the empty file that a process locks while it puts a manifest in place or removes one. If the
process ends, the lock ends too."""

MAX_MANIFEST_BYTES = 256 << 20
"""The greatest size in bytes of a manifest that `read_manifest` reads, which is enough for a million
arrays."""

LOCK_WAIT_S, LOCK_LOOK_S = 30.0, 0.02
"""The longest time in seconds that a process waits for the lock, which others hold for a few file operations,
and the interval in seconds at which it tries to get the lock."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""The error codes of file systems that do not support locks."""

_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
"""The error codes for a file that does not exist or cannot exist."""

NUMBER_DIGITS = 8
NUMBER = re.compile(rf"\d{{{NUMBER_DIGITS},}}")
"""The name of a folder that `Checkpoints` gives to a checkpoint, and the least number of its digits."""

_SAVE_ID = "[0-9a-f]{16}"
_FILE = re.compile(rf"{_SAVE_ID}-(actor-\d+|controller)-\d+\.safetensors")
_PARTIAL = re.compile(rf"({_FILE.pattern}|{re.escape(MANIFEST)}\.{_SAVE_ID}){re.escape(PARTIAL)}")


def new_save_id() -> str:
    """Return a random id for a save. No other save has the same id."""
    return secrets.token_hex(8)


def file_name(save_id: str, actor: int | None, index: int) -> str:
    """Return the name of one file of a save.

    Args:
        save_id: the save's id.
        actor: the actor that writes the file; None if the controller writes it.
        index: the file's number among the files that the same writer writes in this save.
    """
    writer = "controller" if actor is None else f"actor-{actor}"
    return f"{save_id}-{writer}-{index}.safetensors"


def absolute(folder: CheckpointPath) -> str:
    """Return a folder's absolute path, so that processes with other working directories can use it.

    Raises:
        CheckpointError: no folder can have this name.
    """
    try:
        name = os.fsencode(folder)
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{shown(folder)}: no folder can have this name: it cannot be encoded"
        ) from error
    if not name:
        raise CheckpointError(
            "the path of a checkpoint is empty; name a folder ('.' is the working directory)"
        )
    if b"\0" in name:
        raise CheckpointError(f"{shown(folder)}: no folder can have this name: there is a NUL byte in it")
    return os.path.abspath(os.fsdecode(name))


def make(folder: str) -> list[str]:
    """Make a folder and all missing folders above it, and make sure that they survive a crash of the machine.

    Returns:
        The folders that were made, outermost first.

    Raises:
        OSError: the folder cannot be made; the folders that were made above it are removed again.
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


# ---------------------------------------------------------------- the manifest


def read_manifest(folder: str) -> bytes | None:
    """Return the content of a folder's current manifest; None if there is none.

    Raises:
        OSError: the manifest cannot be read.
        CheckpointError: the manifest is not a regular file, or is too long to be a manifest.
    """
    try:
        return read_whole(os.path.join(folder, MANIFEST), MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return None


def files_of(manifest: bytes | None) -> tuple[str, ...]:
    """Return the names of the save files that a manifest lists.

    Args:
        manifest: the content of the manifest, or None.

    Returns:
        The names, except those that do not have the form of a save's file names; () if the manifest is None
        or cannot be parsed.
    """
    try:
        files = json.loads(manifest or b"{}")["files"]
        return tuple(name for name in files if isinstance(name, str) and _FILE.fullmatch(name))
    except (ValueError, TypeError, KeyError, RecursionError):
        return ()


def written_by_saves(names: Collection[str]) -> list[str]:
    """Return those of `names` that have the form of a name that saves give to files of arrays or to partial
    files. The name of the manifest itself is not among them."""
    return [name for name in names if _FILE.fullmatch(name) or _PARTIAL.fullmatch(name)]


def commit(
    folder: str, save_id: str, manifest: bytes, replaces: bytes | None, files: Mapping[str, int]
) -> None:
    """Replace a folder's manifest atomically: from then on the folder contains this save's checkpoint.

    Args:
        folder: the checkpoint's folder.
        save_id: the save's id.
        manifest: the content of the new manifest.
        replaces: the content of the manifest to replace, as `read_manifest` returned it when the save began;
            None if there was none.
        files: a dictionary. Its keys are the names of the save's files, and its values are their sizes in
            bytes. A file that does not exist on this host is not checked, because other hosts may write to
            other file systems.

    Raises:
        CheckpointError: another process has replaced or removed the manifest since the save began, or a file
            of this save was removed or has another size. The folder's manifest is left unchanged.
        OSError: writing failed. The manifest may nevertheless have been replaced; if so, `read_manifest`
            returns the new manifest.
    """
    path = os.path.join(folder, MANIFEST)
    partial = f"{path}.{save_id}{PARTIAL}"
    try:
        with open(partial, "wb") as file:
            file.write(manifest)
            file.flush()
            os.fsync(file.fileno())
        seen = {name: size for name, size in files.items() if os.path.exists(os.path.join(folder, name))}
        with _locked(folder):
            if read_manifest(folder) != replaces:
                raise CheckpointError(
                    f"{shown(folder)}: another save has put a checkpoint there, or removed the one that was "
                    "there, while this one wrote; it stays as that save left it: give each run "
                    "a folder of its own"
                )
            check_files(folder, seen)
            os.replace(partial, path)
            sync_folder(folder)
    except BaseException:  # whatever ended the commit, remove the partial file
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def check_files(folder: str, files: Mapping[str, int]) -> None:
    """Check that files exist and are as long as they were when they were written.

    Args:
        folder: the checkpoint's folder.
        files: a dictionary. Its keys are the names of the files, and its values are their expected sizes in
            bytes.

    Raises:
        CheckpointError: a file is missing or has another size.
    """
    for name, size_bytes in files.items():
        path = os.path.join(folder, name)
        try:
            found = os.stat(path).st_size
        except OSError as error:
            raise CheckpointError(
                f"{shown(path)}: {error.strerror}: it was written, and somebody has removed it since"
            ) from error
        if found != size_bytes:
            raise CheckpointError(
                f"{shown(path)}: has {found} bytes, but had {size_bytes} when it was written"
            )


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Lock a folder's manifest for the duration of a `with` block, so that no other process can replace it
    meanwhile.

    On a file system without locks, other processes cannot be kept out, and two saves may both replace the
    same checkpoint. The checkpoint of the second save is then complete, and the files of the first save
    remain in the folder.

    Raises:
        CheckpointError: another process has kept the lock for longer than `LOCK_WAIT_S`.
        OSError: no file can be made in the folder.
    """
    path = os.path.join(folder, LOCK)
    until_s = time.monotonic() + LOCK_WAIT_S
    while (descriptor := _try_to_lock(path)) is None:
        if time.monotonic() > until_s:
            raise CheckpointError(
                f"{shown(path)}: another save has held this lock for {LOCK_WAIT_S:g} s; a process that was "
                "stopped there (SIGSTOP, a frozen container) has to go on or to be killed first"
            )
        time.sleep(LOCK_LOOK_S)  # on a worker thread; nothing signals that the lock is free
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked process may have this descriptor as well
        os.close(descriptor)


def _try_to_lock(path: str) -> int | None:
    """Try once to lock a manifest's lock file.

    Args:
        path: the path of the lock file, which is created if it does not exist.

    Returns:
        The descriptor that has the lock; None if another process has locked the file. On a file system
        without locks, this process always gets a descriptor.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The process that had the lock may have removed the file since.
        is_locked = os.path.samestat(os.fstat(descriptor), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        is_locked = False
    except OSError as error:
        is_locked = error.errno in _NO_LOCKS
        if not is_locked:
            os.close(descriptor)
            raise
    if not is_locked:
        os.close(descriptor)
        return None
    return descriptor


# ---------------------------------------------------------------- removing


def remove_files(folder: str, names: Collection[str]) -> None:
    """Remove the given files of saves, and the partial files that belong to them.

    Files that do not exist are ignored, and so are names that do not have the form of a save's file names.

    Args:
        folder: the checkpoint's folder.
        names: the names of the files.

    Raises:
        OSError: a file cannot be removed.
    """
    for name in names:
        if _FILE.fullmatch(name):  # a name may have come from a manifest
            for found in (name, name + PARTIAL):
                try:
                    os.unlink(os.path.join(folder, found))
                except OSError as error:  # actors on one file system remove the same files
                    if error.errno not in _NOTHING_THERE:
                        raise


def remove(folder: str) -> tuple[str, ...]:
    """Remove a checkpoint, and the folder if it is then empty.

    The manifest is removed first, so that no manifest ever names missing files.

    Returns:
        The names of the files that the manifest listed, some of which may be on other hosts and still exist.
        () if the folder does not exist.

    Raises:
        OSError: a file cannot be removed.
        CheckpointError: the manifest is invalid (see `read_manifest`), or another process has kept the
            manifest's lock for too long.
    """
    try:
        with _locked(folder):
            names = files_of(read_manifest(folder))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, MANIFEST))
            sync_folder(folder)
    except FileNotFoundError:  # there is no such folder
        return ()
    remove_files(folder, names)
    remove_empty(folder)
    return names


def remove_leftovers(folder: str) -> list[str]:
    """Remove every file of a save that the current manifest does not name. If the folder is then empty,
    remove the folder too.

    Returns:
        The names of the removed files.

    Raises:
        OSError: a file cannot be removed.
        CheckpointError: the manifest is invalid (see `read_manifest`), or another process has kept the
            manifest's lock for too long.
    """
    with _locked(folder):
        kept = files_of(read_manifest(folder))
        removed = sorted(name for name in written_by_saves(os.listdir(folder)) if name not in kept)
        for name in removed:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))
    remove_empty(folder)
    return removed


def remove_empty(folder: str) -> None:
    """Remove a folder if it is empty; ignore every failure."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)
