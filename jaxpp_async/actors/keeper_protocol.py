"""keeper_protocol: what a launcher and a keeper say to each other, as lines. Sans-I/O: text in, frozen values out.

Launcher to keeper, one JSON object a line; dots before one are signs of life and mean nothing else. Keeper to launcher,
`RECORD` and one JSON object a line; whatever else comes (a login banner, a warning of a shell) is no record. Both sides
check every field for its type: a host may be broken, or not what it seems.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, TypeAlias

from jaxpp_async.actors import codec
from jaxpp_async.actors.actor_request import ActorRequest
from jaxpp_async.actors.progress import Position
from jaxpp_async.errors import ProtocolError

RECORD = "\x1e"
TEXT_CHARS = 600
"""Longest piece of an actor's line in a record: written as JSON escapes it is still a line that pipes carry whole."""

SIGN_OF_LIFE = b"."


@dataclass(frozen=True, slots=True)
class Start:
    """Start an actor, known by `key` from here on. `folder`: to work in, where it exists."""

    key: str
    request: ActorRequest = field(repr=False)
    folder: str


@dataclass(frozen=True, slots=True)
class Signal:
    """Signal an actor and what it started."""

    key: str
    signum: int

    def __post_init__(self) -> None:
        if not 0 < self.signum < 65:
            raise ValueError(f"{self.signum} is no signal")


@dataclass(frozen=True, slots=True)
class Close:
    """Kill what is left, and end."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The keeper is up. `versions`: of packages that have to agree, None for missing ones."""

    host: str
    pid: int
    python: str
    versions: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Started:
    """An actor's process exists."""

    key: str
    pid: int


@dataclass(frozen=True, slots=True)
class Failed:
    """An actor could not be started."""

    key: str
    error: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line that an actor printed, or a piece of a long one."""

    key: str
    text: str


@dataclass(frozen=True, slots=True)
class Dead:
    """An actor has ended. `position`: where it was in its program, as `progress.Position`'s fields."""

    key: str
    returncode: int
    position: tuple[int, int, int, bool, bool] | None

    def progress(self) -> Position | None:
        """Where it was in its program."""
        return Position(*self.position) if self.position is not None else None


Order: TypeAlias = Start | Signal | Close
Record: TypeAlias = Hello | Started | Failed | Line | Dead

_ORDERS: dict[str, Any] = {cls.__name__: cls for cls in (Start, Signal, Close)}
_RECORDS: dict[str, Any] = {cls.__name__: cls for cls in (Hello, Started, Failed, Line, Dead)}


def write_order(order: Order) -> bytes:
    """An order as a line."""
    return json.dumps([type(order).__name__, asdict(order)]).encode() + b"\n"


def read_order(line: bytes) -> Order | None:
    """The order in a line; None for signs of life alone.

    Raises:
        ValueError: anything else. The message does not quote the line, which may hold a secret.
    """
    text = line.lstrip(SIGN_OF_LIFE).strip()
    if not text:
        return None
    return _read(text.decode(), _ORDERS)


def write_record(record: Record) -> bytes:
    """A record as a line."""
    return f"{RECORD}{json.dumps([type(record).__name__, asdict(record)])}\n".encode()


def read_record(line: str) -> Record | None:
    """The record in a line; None if it is none, such as a line of a login banner.

    Raises:
        ValueError: it begins like one, but is not.
    """
    before, mark, text = line.partition(RECORD)
    if not mark or before:
        return None
    return _read(text, _RECORDS)


def _read(text: str, known: Mapping[str, Any]) -> Any:
    try:
        name, values = json.loads(text)
        return codec.build(known[name], _in_order(known[name], values))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ProtocolError) as error:
        raise ValueError(f"no message of a keeper ({type(error).__name__})") from None


def _in_order(cls: Any, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """A JSON object as the tuple of fields that `codec.build` takes."""
    hints = typing.get_type_hints(cls)
    if values.keys() != hints.keys():
        raise ValueError("missing or extra fields")
    return tuple(
        _in_order(hint, values[name]) if is_dataclass(hint) else _with_tuples(values[name])
        for name, hint in hints.items()
    )


def _with_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_with_tuples, value))
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return value
