"""files: what actors write to checkpoints and read of them. Plain frozen data, no I/O.

Paths travel as the bytes that the file system has, so that every name it allows is one here; they are absolute.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxpp_async.actors.messages.steps import ArrayId
from jaxpp_async.program import Aval


@dataclass(frozen=True, slots=True)
class Take:
    """Hold arrays for a save as they are between the steps before and after this. Answer: `Done`, once the steps before
    have made them; they are held until they are written or swept away.

    Args:
        folder: where the save's files go; there is one save at a time in a folder.
    """

    request: int
    folder: bytes
    array_ids: tuple[ArrayId, ...]


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Write held arrays to one file, which is then on the disk, and hold them no longer. Answer: `Written`.

    Args:
        arrays: array, its name in the file, and which of its `parts` this is, or -1: all of it.
        metadata: for the file's header.
    """

    request: int
    folder: bytes
    file: str
    arrays: tuple[tuple[ArrayId, str, int], ...]
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class CheckFiles:
    """Look whether files that this process has written are still there and whole. Answer: `Done`.

    Args:
        files: of each its name and its size in bytes.
    """

    request: int
    folder: bytes
    files: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Sweep:
    """End the save in this folder, if there is one, and remove these files, whole or not. Answer: `Done`.

    Args:
        files: names of files of saves; there may be none of them here.
        remove_folder: the folder too, should it then be empty.
    """

    request: int
    folder: bytes
    files: tuple[str, ...] = ()
    remove_folder: bool = False


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A piece of an array that was written by several processes: its file and its name there, where it begins in the
    array, its shape, and the SHA-256 of its bytes."""

    path: bytes
    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class FilePart:
    """An array to read: its name in the file, the SHA-256 of its bytes there, the id to keep it under, and its type; or
    the pieces of which it is made, in whatever files."""

    name: str
    sha256: str
    array_id: ArrayId
    aval: Aval
    pieces: tuple[FilePiece, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadFile:
    """Read arrays of one file, check them, and keep them. Answer: `Done`, once they are on the devices."""

    request: int
    path: bytes
    parts: tuple[FilePart, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """A file's size, and the SHA-256 of each of its arrays' bytes, in the order in which they were asked for."""

    request: int
    size_bytes: int
    sha256: tuple[str, ...]
