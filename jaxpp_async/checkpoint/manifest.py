"""Convert the description of a checkpoint to JSON and back, and choose which actor writes each array.

The description says what the checkpoint contains, and is called the manifest. The functions of this module
are pure: they read and write no file. The parsing functions trust no field, because the checkpoint may come
from an untrusted source.

A path names a leaf as `jax.tree_util.keystr(path, simple=True, separator="/")` does, for example
`params/blocks/0/w`. A `/` or `~` inside a key is written `~1` or `~0`, as in JSON pointers (RFC 6901). If the
whole tree is one leaf, the path of this leaf is `.`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, TypeAlias, TypeVar

import ml_dtypes
import msgspec
import numpy as np
from msgspec import Meta

from jaxpp_async.base.printable import printable
from jaxpp_async.errors import CheckpointError

FORMAT = "jaxpp-async checkpoint"
VERSION = 1
T = TypeVar("T")

ROOT = "."
"""The path of a tree that is itself a leaf."""

PlainValue: TypeAlias = bool | int | float | complex | str
"""The types of leaves whose values are stored in the manifest itself, and not in a file of arrays."""

PLAIN_TYPES: tuple[type, ...] = (bool, int, float, complex, str)

_LIMIT = 1 << 63
_MAX_ITEM_BYTES = 32
"""The most bytes of one element of a numpy array. The array has fewer than `_LIMIT` bytes."""

Size: TypeAlias = Annotated[int, Meta(ge=0, le=_LIMIT - 1)]
Sizes: TypeAlias = Annotated[tuple[Size, ...], Meta(max_length=64)]
"""One size or position for each axis of an array; numpy allows 64 axes."""

Text: TypeAlias = Annotated[str, Meta(pattern=r"^[^\ud800-\udfff]*$")]
"""A string that UTF-8 can encode; a string from JSON may contain lone surrogates, which it cannot."""

_OF_ML_DTYPES = [t for t in vars(ml_dtypes).values() if isinstance(t, type) and issubclass(t, np.generic)]
_DTYPES = frozenset(
    np.dtype(kind).name
    for kind in (*"?", *np.typecodes["AllInteger"], *np.typecodes["AllFloat"], *_OF_ML_DTYPES)
)
"""The names of the dtypes that a manifest may name: all of them are types of numbers. Bytes from a file that
were read as another type, such as `object`, could be taken for pointers.
"""

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
"""The pattern of a file's name in a manifest, so that no manifest names a file outside of its folder."""


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The base class of descriptions that a manifest stores as JSON objects, by the names of their fields."""


class File(_Entry, frozen=True):
    """The description of one file of arrays in a checkpoint.

    Args:
        size_bytes: size of the file.
        written_by: text that names the process that wrote the file, and that process's host, for a person who
            looks for the file.
    """

    size_bytes: Size
    written_by: Text


class Piece(_Entry, frozen=True):
    """The description of one piece of an array.

    If an array is sharded over several processes, each of these processes writes its own pieces; if it lives
    in parts on several actors, each of these actors writes its own.

    Args:
        file: name of the file that contains the piece.
        name: name of the piece in that file.
        start: index in the array of the piece's first element, one number per axis.
        shape: shape of the piece.
        sha256: digest of the piece's C-order little-endian bytes.
    """

    file: str
    name: Text
    start: Sizes
    shape: Sizes
    sha256: Text


class Array(_Entry, frozen=True):
    """The description of one stored array, which is either whole in one file or in several pieces.

    Args:
        file: name of the file that contains the array; for an array in pieces, the file of its first piece.
        dtype: numpy or ml_dtypes name of the stored type; PRNG keys are stored as their `uint32` data.
        shape: shape of the stored array; for PRNG keys, the shape of their `uint32` data.
        sha256: digest of the array's C-order little-endian bytes; empty for an array in pieces.
        key_impl: name of the PRNG implementation, for PRNG keys; None for other arrays.
        pieces: the pieces that together make up the array, sorted by `start`; empty for an array that is
            stored whole.
    """

    file: str
    dtype: str
    shape: Sizes
    sha256: Text
    key_impl: Text | None = None
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a checkpoint's whole content, which is stored as a file beside the arrays.

    Args:
        files: descriptions of the files, by name.
        arrays: descriptions of the arrays, by the path of their leaf.
        values: the leaves that are plain Python values, by path.
    """

    files: Mapping[str, File]
    arrays: Mapping[str, Array]
    values: Mapping[str, PlainValue]

    @property
    def paths(self) -> list[str]:
        """The paths of all leaves in the checkpoint: first those of arrays, then those of plain values."""
        return [*self.arrays, *self.values]

    @property
    def size_bytes(self) -> int:
        """The size of all files together, in bytes."""
        return sum(file.size_bytes for file in self.files.values())


def to_text(manifest: Manifest) -> str:
    """Return a manifest (the description of a checkpoint) as JSON text with a checksum; `parse` reads it."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "files": msgspec.to_builtins(manifest.files),
        "arrays": msgspec.to_builtins(manifest.arrays),
        "values": {path: _value_fields(value) for path, value in manifest.values.items()},
    }
    return (
        json.dumps({**content, "sha256": _checksum(content)}, indent=1, ensure_ascii=False, allow_nan=False)
        + "\n"
    )


def parse(text: str) -> Manifest:
    """Return the manifest (the description of a checkpoint) from its JSON text, after checking every field.

    Raises:
        CheckpointError: the text is not a manifest, or is corrupt. The message does not name the file; the
            caller puts the file's name before it.
    """
    try:
        content = json.loads(text, object_pairs_hook=_mapping, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is no JSON, or was cut off: {printable(str(error))}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"is not the manifest of a checkpoint: it does not say format: {FORMAT!r}")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"is of version {_short(content.get('version'))}; this package reads version {VERSION}"
        )
    try:
        if content.pop("sha256", None) != _checksum(content):
            raise CheckpointError("is corrupt: its checksum is not the one that it states")
        files = {name: _read(File, name, fields) for name, fields in content["files"].items()}
        arrays = {path: _read(Array, path, fields) for path, fields in content["arrays"].items()}
        values = {path: _value(fields) for path, fields in content["values"].items()}
        if wrong := [name for name in files if not _FILE_NAME.fullmatch(name)]:
            raise ValueError(f"{wrong[0][:80]!r} is no name of a file in this folder")
        for array in arrays.values():
            _check_array(array, files)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        # The checksum is right, so another program than this package must have written the text.
        raise CheckpointError(f"has a field that cannot be read: {printable(str(error))}") from None
    return Manifest(files, arrays, values)


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dictionary, from the pairs of key and value that `json.loads` passes.

    Raises:
        ValueError: a key occurs twice. JSON readers differ in which of the two values they use.
    """
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return mapping


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _short(value: Any, at_most: int = 80) -> str:
    """Return a short text that shows a value in an error message; the value may be of any type and size.

    For a container, the text has only its type.

    Args:
        value: the value.
        at_most: the most characters of the text for a value that is no container.
    """
    if isinstance(value, str | int | float | bool | None):
        return printable(f"{value!r:.{at_most}}")
    return f"a {type(value).__name__}"


def _read(kind: type[T], name: str, fields: Any) -> T:
    """Return the description of a file or an array from its JSON fields.

    Args:
        kind: the type of the description.
        name: the name of the file or the path of the array, for the error message.
        fields: the JSON object.

    Raises:
        ValueError: a field is missing, unknown, or of a wrong type.
    """
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name[:80]!r}: {error}") from None


def _check_array(array: Array, files: Mapping[str, File]) -> None:
    """Check that the fields of an array's description agree with each other and with the files.

    Raises:
        ValueError: there can be no such array, or its pieces do not make up the array.
    """
    shape = list(array.shape)
    if array.dtype not in _DTYPES:
        raise ValueError(f"{_short(array.dtype)} is no dtype of a stored array")
    if math.prod(max(n, 1) for n in shape) > _LIMIT // _MAX_ITEM_BYTES:
        raise ValueError(f"no array can be as large as {shape!r:.80}")
    if missing := [file for file in (array.file, *(p.file for p in array.pieces)) if file not in files]:
        raise ValueError(f"{_short(missing[0])} is none of its files")
    for piece in array.pieces:
        if not len(piece.start) == len(piece.shape) == len(shape) or any(
            first + size > most for first, size, most in zip(piece.start, piece.shape, shape, strict=True)
        ):
            raise ValueError(
                f"a piece {list(piece.shape)!r:.80} at {list(piece.start)!r:.80} lies outside of an array "
                f"{shape!r:.80}"
            )
    num_elements = sum(math.prod(piece.shape) for piece in array.pieces)
    if array.pieces and num_elements != math.prod(shape):
        raise ValueError(f"pieces of {num_elements} elements are no array {shape!r:.80}")
    # If the pieces have as many elements as the array, and none twice, then together they are all of it.
    if not _are_grid_cells(array.pieces) and not any(
        len(slabs) > 1 and all(map(_are_grid_cells, slabs)) for slabs in _slabs(array.pieces)
    ):
        raise ValueError(f"pieces of an array {shape!r:.80} overlap, or are no grid, nor grids side by side")


def _slabs(pieces: Sequence[Piece]) -> Iterator[list[list[Piece]]]:
    """Yield, for each axis, the pieces in groups that have no index along this axis in common.

    An array that lives in parts along an axis has one such group for each part, or more.
    """
    pieces = [piece for piece in pieces if 0 not in piece.shape]
    for axis in range(len(pieces[0].shape) if pieces else 0):
        slabs: list[list[Piece]] = []
        end = 0
        for piece in sorted(pieces, key=lambda piece: piece.start[axis]):
            if not slabs or piece.start[axis] >= end:
                slabs.append([])
            slabs[-1].append(piece)
            end = max(end, piece.start[axis] + piece.shape[axis])
        yield slabs


def _are_grid_cells(pieces: Sequence[Piece]) -> bool:
    """Return whether an array's pieces are cells of one grid, as in a sharded array, and none overlap."""
    pieces = [piece for piece in pieces if 0 not in piece.shape]
    if len({piece.start for piece in pieces}) < len(pieces):
        return False
    for places in zip(*(zip(piece.start, piece.shape, strict=True) for piece in pieces), strict=True):
        spans = sorted({(start, start + size) for start, size in places})
        if any(end > start for (_, end), (start, _) in pairwise(spans)):
            return False
    return True


def _value_fields(value: PlainValue) -> dict[str, Any]:
    """Return a plain value as JSON fields: the name of its type, and the value.

    JSON has no complex numbers, NaN or infinities, so these values are stored as their `repr`, a string.
    """
    kind = type(value).__name__
    is_json = isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
    return {"type": kind, "value": value if is_json else repr(value)}


def _value(fields: Mapping[str, Any]) -> PlainValue:
    kind, value = fields["type"], fields["value"]
    types: dict[str, Any] = {cls.__name__: cls for cls in PLAIN_TYPES}
    if type(value).__name__ != kind and not (kind in ("float", "complex") and isinstance(value, str)):
        raise ValueError(f"{_short(value)} is no {_short(kind)}")
    return types[kind](value)


def _checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


# ---------------------------------------------------------------- which actor writes which array


def assign_writers(sizes: Mapping[Any, int], holders: Mapping[Any, tuple[int, ...]]) -> dict[int, list[Any]]:
    """Choose an actor to write each array, such that all actors write about equally many bytes.

    Args:
        sizes: the size in bytes of each array; the keys are values of any type that identify the arrays.
        holders: for each array, the actors that hold it; at least one actor per array.

    Returns:
        A dictionary. Its keys are the actors that write at least one array; its values are lists of the keys
        of the arrays that the actor writes, in the order of `sizes`.
    """
    load: dict[int, int] = {}
    writer: dict[Any, int] = {}
    # Arrays with one holder come first, then the largest: the last arrays even out the loads.
    for array in sorted(sizes, key=lambda a: (len(holders[a]) > 1, -sizes[a])):
        actor = min(holders[array], key=lambda a: (load.get(a, 0), a))
        load[actor] = load.get(actor, 0) + sizes[array]
        writer[array] = actor
    shares: dict[int, list[Any]] = {}
    for array in sizes:
        shares.setdefault(writer[array], []).append(array)
    return shares


def split_into_files(arrays: list[Any], sizes: Mapping[Any, int], file_bytes: int) -> list[list[Any]]:
    """Divide the arrays that one actor writes into groups, one for each file that the actor writes.

    The arrays stay in the given order. No array is split, so an array that is larger than `file_bytes` gets a
    file to itself.

    Args:
        arrays: the keys of the arrays in `sizes`.
        sizes: for each array, its size in bytes.
        file_bytes: the most bytes in a file with several arrays.

    Returns:
        One list of keys per file.
    """
    files: list[list[Any]] = []
    left_bytes = 0
    for array in arrays:
        if not files or sizes[array] > left_bytes:
            files.append([])
            left_bytes = file_bytes
        files[-1].append(array)
        left_bytes -= sizes[array]
    return files
