"""Save a value as a JSON file of a kind and a version, and load it only if both are right."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")


class _Header(msgspec.Struct):
    kind: str = ""
    version: int = 0


class _File(_Header, forbid_unknown_fields=True, kw_only=True):
    value: msgspec.Raw


def save_versioned(path: str | os.PathLike[str], kind: str, version: int, value: Any) -> None:
    """Write a value to a file, which is replaced as a whole if it exists.

    Args:
        path: the file to write.
        kind: the kind of file, such as `"jaxpp_async plan"`.
        version: the version of the kind.
        value: a value that msgspec can encode.

    Raises:
        OSError: the file cannot be written.
    """
    raw = msgspec.Raw(msgspec.json.encode(value))
    text = msgspec.json.format(msgspec.json.encode(_File(kind=kind, version=version, value=raw)), indent=1)
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(text)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def load_versioned(
    path: str | os.PathLike[str],
    kind: str,
    version: int,
    value_type: type[_T],
    error: type[Exception],
    instead: str,
) -> _T:
    """Read a value that `save_versioned` wrote.

    Args:
        path: the file to read.
        kind: the kind that the file must be of.
        version: the version that it must have.
        value_type: the type of the value.
        error: the type of errors about the file's contents.
        instead: advice for files that cannot be used, such as `"plan again"`.

    Raises:
        error: the file is of another kind or version, or it is damaged.
        OSError: the file cannot be read.
    """
    data, name = Path(path).read_bytes(), repr(os.fspath(path))
    try:
        header = msgspec.json.decode(data, type=_Header)
        if header.kind != kind:
            other = f", but of {header.kind!r}" if header.kind else ""
            raise error(f"{name} is no file of kind {kind!r}{other}; {instead}")
        if header.version != version:
            raise error(
                f"{name} has version {header.version}, and this version of jaxpp_async reads {kind!r} of "
                f"version {version}; {instead}"
            )
        return msgspec.json.decode(msgspec.json.decode(data, type=_File).value, type=value_type)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as damage:
        raise error(f"{name} is no file of kind {kind!r}, or it is damaged: {damage}; {instead}") from damage
