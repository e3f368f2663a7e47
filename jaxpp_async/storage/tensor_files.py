"""Write numpy arrays to safetensors files and read them back, each array with its SHA-256.

The format is safetensors (https://github.com/huggingface/safetensors), so that any reader of that format
opens the files. This module implements the format itself for two reasons. The library's `serialize_file` can
neither be stopped half-way nor report how much of an array it has processed. The library's reader keeps the
GIL for the whole of an array, although an actor must answer messages meanwhile.

Files are read and written in blocks, and each block is hashed when it is read or written. A file to read may
come from anywhere, so the entries in its header are compared with the arrays that the caller wants and with
the file's length before they are used.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, BinaryIO, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta, Raw

from jaxpp_async.base.printable import shown
from jaxpp_async.errors import CheckpointError
from jaxpp_async.layout.array_parts import numpy_dtype

PARTIAL = ".partial"
"""The suffix of the name of a file that is being written."""

_BLOCK_BYTES = 4 << 20
_MAX_HEADER_BYTES = 100_000_000
"""The greatest size in bytes that the format allows for a header."""

_Size: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]

_FORMAT_NAMES = {
    "bool": "BOOL",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""The format's names for the dtypes that every reader of the format knows. Arrays of other dtypes are stored
as U8 with one more axis, for the bytes of each element."""

Index: TypeAlias = tuple[slice, ...]
"""A part of an array, as one slice per axis."""


@dataclass(frozen=True, slots=True)
class WantedArray:
    """The description of an array to read from a file.

    Args:
        name: the array's name in the file.
        dtype, shape: the dtype and the shape that the array in the file must have.
        sha256: the checksum of the array's bytes, in hexadecimal digits.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


class _Entry(msgspec.Struct, frozen=True):
    """The entry of one array in a file's header.

    Args:
        dtype, shape: the format's name of the dtype, and the shape.
        data_offsets: where the array's bytes begin and end, counted from the end of the header.
    """

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


def is_stored_as_bytes(dtype: str) -> bool:
    """Return whether arrays of a dtype are stored as bytes (dtype U8), because the file format has no name
    for the dtype."""
    return dtype not in _FORMAT_NAMES


@contextlib.contextmanager
def checkpoint_errors(path: str) -> Iterator[None]:
    """Turn an `OSError` that is raised within a `with` block into a `CheckpointError`, whose message names a
    path and the reason. An `InterruptedError`, with which a stopped `write` ends, stays as it is.

    Args:
        path: the path of the file or folder on which the block works.
    """
    try:
        yield
    except InterruptedError:
        raise
    except OSError as error:
        raise CheckpointError(f"{shown(path)}: {error.strerror or error}") from error


def write(
    path: str, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str], is_stopped: Callable[[], bool]
) -> tuple[int, dict[str, str]]:
    """Write arrays to a file atomically: until all its bytes are on the disk, the file has a temporary name.

    Args:
        path: the file's path.
        arrays: the arrays by name; little-endian, each of a dtype that `numpy_dtype` knows by its name.
        metadata: texts to store in the file's header. For each array that is stored as bytes, this function
            adds an entry with the array's dtype.
        is_stopped: a function that is called before each block of bytes; if it returns True, writing stops.

    Returns:
        The file's size in bytes, and a dictionary. Its keys are the names of the arrays, and its values are
        the SHA-256 of each array's bytes in C order, in hexadecimal digits.

    Raises:
        OSError: the file cannot be written, for example because the disk is full.
        InterruptedError: `is_stopped` returned True.
    """
    # Wide elements come first, as in files of the safetensors library, so that each array starts at a
    # multiple of its element's size.
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header = _header(names, arrays, metadata)
    partial = path + PARTIAL
    try:
        with open(partial, "wb", buffering=0) as file:
            _write_all(file, memoryview(header), is_stopped)
            digests = {name: _write_array(file, arrays[name], is_stopped) for name in names}
            os.fsync(file.fileno())
            size = file.tell()
        os.replace(partial, path)
    except BaseException:  # whatever ended the writing, a partial file is useless
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    sync_folder(os.path.dirname(path))
    return size, digests


def read(path: str, wanted: Sequence[WantedArray]) -> list[np.ndarray]:
    """Read some of a file's arrays, check their bytes, and return them in the order of `wanted`.

    Raises:
        CheckpointError: the file is missing, cut off or damaged, or an array in it is not the wanted one; the
            message names the file.
    """
    with checkpoint_errors(path):
        try:
            file = _open_to_read(path)
        except FileNotFoundError:
            raise CheckpointError(f"{shown(path)}: the file is missing") from None
        with file:
            entries, start = _read_header(file, path)
            return [_read_array(file, path, entries, start, one) for one in wanted]


ReadOne: TypeAlias = Callable[[str, WantedArray], np.ndarray]
"""A function that reads one array from the file at a path."""


def read_shared(pieces: Iterable[tuple[str, WantedArray]]) -> ReadOne:
    """Return a function that reads pieces, and reads a piece once that several arrays are parts of.

    Args:
        pieces: the path and the description of each piece that will be read, in this order, as often as it
            will be.
    """
    left = Counter((path, wanted.name) for path, wanted in pieces)
    kept: dict[tuple[str, str], np.ndarray] = {}

    def read_one(path: str, wanted: WantedArray) -> np.ndarray:
        key = path, wanted.name
        left[key] -= 1
        found = kept[key] if key in kept else read(path, [wanted])[0]
        if left[key] > 0:
            kept[key] = found
        else:
            kept.pop(key, None)
        return found

    return read_one


def read_pieces(
    shape: Sequence[int],
    dtype: str,
    pieces: Iterable[tuple[str, Sequence[int], WantedArray]],
    needed: Sequence[Index] = (),
    read_one: ReadOne | None = None,
) -> np.ndarray:
    """Read an array that is stored in pieces in several files, or a part of such an array.

    Args:
        shape: the shape of the array to read.
        dtype: the array's dtype.
        pieces: for each piece, a tuple of three: the path of its file, the position of its first element in
            the array to read, and its description in the file. Elements beyond that array are left out.
        needed: the index ranges of the array that the caller needs. A piece that overlaps none of these
            ranges is not read, and its elements are zero in the result. If `needed` is empty, the whole array
            is read.
        read_one: a function that reads one piece; None for one that reads it from its file.

    Raises:
        CheckpointError: a file is missing, cut off or damaged, or an array in it is not the wanted one.
    """
    whole = np.zeros(tuple(shape), numpy_dtype(dtype))
    for path, start, wanted in pieces:
        index = tuple(
            slice(max(first, 0), min(first + size, length))
            for first, size, length in zip(start, wanted.shape, shape, strict=True)
        )
        if any(one.start >= one.stop for one in index):
            continue
        if not needed or any(_overlap(index, other, shape) for other in needed):
            piece = read(path, [wanted])[0] if read_one is None else read_one(path, wanted)
            whole[index] = piece[
                tuple(slice(i.start - first, i.stop - first) for i, first in zip(index, start, strict=True))
            ]
    return whole


def _overlap(one: Index, other: Index, shape: Sequence[int]) -> bool:
    for a, b, size in zip(one, other, shape, strict=True):
        (a_start, a_stop, _), (b_start, b_stop, _) = a.indices(size), b.indices(size)
        if max(a_start, b_start) >= min(a_stop, b_stop):
            return False
    return True


def read_whole(path: str, at_most: int) -> bytes:
    """Return a small file's content.

    Args:
        path: the file's path.
        at_most: the largest size that is accepted, in bytes.

    Raises:
        CheckpointError: the file is larger, was cut off while it was read, or is not a regular file.
        OSError: the file cannot be read.
    """
    with _open_to_read(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > at_most:
            raise CheckpointError(
                f"{shown(path)}: has {size_bytes} bytes, which is more than {at_most >> 20} MiB"
            )
        return _exactly(file, path, size_bytes)


def sync_folder(folder: str) -> None:
    """Make sure that the names of the files in a folder survive a crash of the machine, as `fsync` does for
    the contents of one file."""
    descriptor = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- writing


def _header(names: Sequence[str], arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    described = dict(metadata)
    entries: dict[str, _Entry] = {}
    offset = 0
    for name in names:
        array = arrays[name]
        dtype, shape = _as_stored(array.dtype.name, array.shape)
        if is_stored_as_bytes(array.dtype.name):
            described[f"dtype:{name}"] = array.dtype.name
        entries[name] = _Entry(dtype, shape, (offset, offset + array.nbytes))
        offset += array.nbytes
    text = msgspec.json.encode({"__metadata__": described, **entries})
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _as_stored(dtype: str, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and the shape that a file's header gives for an array of this dtype and shape. The
    result differs from the arguments if the array is stored as bytes."""
    if is_stored_as_bytes(dtype):
        return "U8", (*shape, numpy_dtype(dtype).itemsize)
    return _FORMAT_NAMES[dtype], tuple(shape)


def _write_array(file: BinaryIO, array: np.ndarray, is_stopped: Callable[[], bool]) -> str:
    return _write_all(file, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, is_stopped)


def _write_all(file: BinaryIO, data: memoryview, is_stopped: Callable[[], bool]) -> str:
    """Write bytes to a file in blocks, and return their SHA-256 in hexadecimal digits.

    Args:
        file: the file, unbuffered.
        data: the bytes.
        is_stopped: a function that is called before each block; if it returns True, writing stops.

    Raises:
        InterruptedError: `is_stopped` returned True.
    """
    digest = hashlib.sha256()
    while len(data):
        if is_stopped():
            raise InterruptedError("the save was stopped")
        # An unbuffered write may write less than it was given, for example shortly before a disk is full.
        count = file.write(data[:_BLOCK_BYTES])
        digest.update(data[:count])
        data = data[count:]
    return digest.hexdigest()


# ---------------------------------------------------------------- reading


def _open_to_read(path: str) -> BinaryIO:
    """Open a file for reading, unbuffered.

    Raises:
        CheckpointError: the file is not a regular one (for example a pipe or a device), so that reading might
            never end.
        OSError: the file cannot be opened.
    """
    # O_NONBLOCK: otherwise opening a pipe would block until another process writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{shown(path)}: is no regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def _read_header(file: BinaryIO, path: str) -> tuple[dict[str, Raw], int]:
    """Return the entries of a file's header, not decoded yet, and where in the file the arrays' data begins.

    Raises:
        CheckpointError: the header is damaged or cut off.
    """
    length = int.from_bytes(_exactly(file, path, 8), "little")
    if length > min(_MAX_HEADER_BYTES, os.fstat(file.fileno()).st_size):
        raise CheckpointError(
            f"{shown(path)}: is no safetensors file, or was cut off: its header would be {length} bytes long"
        )
    try:
        return msgspec.json.decode(_exactly(file, path, length), type=dict[str, Raw]), 8 + length
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{shown(path)}: its header cannot be read: {error}") from None


def _read_array(
    file: BinaryIO, path: str, entries: Mapping[str, Raw], start: int, wanted: WantedArray
) -> np.ndarray:
    dtype = numpy_dtype(wanted.dtype)
    size_bytes = math.prod(wanted.shape) * dtype.itemsize
    begin = start + _offset(path, entries, wanted, size_bytes)
    missing = begin + size_bytes - os.fstat(file.fileno()).st_size
    if missing > 0:  # checked before memory is allocated for the array
        raise _cut_off(path, wanted, missing)
    file.seek(begin)
    memory = np.empty(size_bytes, np.uint8)
    digest, view = hashlib.sha256(), memory.data
    while len(view):
        count = file.readinto(view[:_BLOCK_BYTES])  # pyright: ignore[reportAttributeAccessIssue]
        if not count:
            raise _cut_off(path, wanted, len(view))
        digest.update(view[:count])
        view = view[count:]
    if digest.hexdigest() != wanted.sha256:
        raise CheckpointError(
            f"{shown(path)}: {wanted.name!r} is corrupt: its SHA-256 is not the one in the manifest"
        )
    return memory.view(dtype).reshape(wanted.shape)


def _cut_off(path: str, wanted: WantedArray, missing: int) -> CheckpointError:
    return CheckpointError(
        f"{shown(path)}: the file was cut off: {missing} bytes of {wanted.name!r} are missing"
    )


def _offset(path: str, entries: Mapping[str, Raw], wanted: WantedArray, size_bytes: int) -> int:
    """Check that a file's header agrees with a wanted array, and return the offset of the array's bytes.

    Args:
        path: the file's path, for error messages.
        entries: the entries of the header.
        wanted: the array to read.
        size_bytes: the size of the array in bytes.

    Returns:
        The offset in bytes from the beginning of the file's data, which follows the header.

    Raises:
        CheckpointError: the file does not contain the array, or the array has another dtype, shape or size.
    """
    dtype, shape = _as_stored(wanted.dtype, wanted.shape)
    try:
        found = msgspec.json.decode(entries[wanted.name], type=_Entry)
    except (KeyError, ValueError, RecursionError):
        raise CheckpointError(f"{shown(path)}: it has no array {wanted.name!r}") from None
    begin, end = found.data_offsets
    if (found.dtype, found.shape, end - begin) == (dtype, shape, size_bytes):
        return begin
    raise CheckpointError(
        f"{shown(path)}: {wanted.name!r} is {found.dtype!r:.40} {list(found.shape)!r:.80} there, but {dtype} "
        f"{list(shape)} by the manifest"
    )


def _exactly(file: BinaryIO, path: str, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = file.read(count - len(data))
        if not more:
            raise CheckpointError(f"{shown(path)}: the file was cut off after {file.tell()} bytes")
        data += more
    return data
