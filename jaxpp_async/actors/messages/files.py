"""files: what actors write to checkpoints and read of them. Plain frozen data, no I/O."""

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
    folder: str
    array_ids: tuple[ArrayId, ...]


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Write held arrays to one file, which is then on the disk, and hold them no longer. Answer: `Written`.

    Args:
        arrays: array, its name in the file, and which of its `parts` this is, or -1: all of it.
        metadata: for the file's header.
    """

    request: int
    folder: str
    file: str
    arrays: tuple[tuple[ArrayId, str, int], ...]
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class Sweep:
    """End the save in this folder, if there is one, and remove the files of saves there but for `keep`. Answer: `Done`.

    Args:
        save_id: only that save's files; empty: every save's.
        remove_folder: the folder too, should it then be empty.
    """

    request: int
    folder: str
    keep: tuple[str, ...] = ()
    save_id: str = ""
    remove_folder: bool = False


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A piece of an array that was written by several processes: its file and its name there, where it begins in the
    array, its shape, and the SHA-256 of its bytes."""

    path: str
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
    path: str
    parts: tuple[FilePart, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """A file's size, and the SHA-256 of each of its arrays' bytes, in the order in which they were asked for."""

    request: int
    size_bytes: int
    sha256: tuple[str, ...]
