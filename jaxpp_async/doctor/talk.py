"""talk: what the doctor and a host say to each other, as lines. Sans-I/O: text in, frozen values out.

Doctor to host, one JSON array a line; dots before one are signs of life and mean nothing else. Host to doctor, `RECORD`
and one JSON array a line; whatever else comes (a login banner, a warning of a shell) is no record. Both sides check
every field for its type: a host may be broken, or not what it seems.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from jaxpp_async.actors import codec
from jaxpp_async.actors.keeper_protocol import RECORD, SIGN_OF_LIFE
from jaxpp_async.doctor.facts import HostFacts
from jaxpp_async.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Prepare:
    """Set these environment variables, before anything else. Answer: `Done`."""

    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class AskFacts:
    """Tell all about this host, with JAX on this platform. Answer: `Facts`."""

    platform: str


@dataclass(frozen=True, slots=True)
class AskClock:
    """Answer: `ClockIs`."""


@dataclass(frozen=True, slots=True)
class CallBack:
    """Connect to the doctor's machine and send the token. Answer: `Done`."""

    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True)
class OpenEnd:
    """Make an end of the data plane, as peer `peer`. Answer: `End`."""

    peer: int


@dataclass(frozen=True, slots=True)
class Measure:
    """Connect this end to another host's and measure. Answer: `Measured`, also from the one that does not lead."""

    peer: int
    address: str
    leads: bool


@dataclass(frozen=True, slots=True)
class Up:
    """The first word of a host: Python and the package are there."""

    version: str


@dataclass(frozen=True, slots=True)
class Facts:
    facts: HostFacts


@dataclass(frozen=True, slots=True)
class ClockIs:
    """The wall clock, in seconds since 1970."""

    wall_s: float


@dataclass(frozen=True, slots=True)
class End:
    """An end's address, as base64."""

    address: str


@dataclass(frozen=True, slots=True)
class Measured:
    """See `facts.LinkReport`; zeros from the one that did not lead."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """It was done."""


@dataclass(frozen=True, slots=True)
class Failed:
    """It could not be done."""

    error: str


Order: TypeAlias = Prepare | AskFacts | AskClock | CallBack | OpenEnd | Measure
Record: TypeAlias = Up | Facts | ClockIs | End | Measured | Done | Failed

_ORDERS: dict[str, Any] = {cls.__name__: cls for cls in (Prepare, AskFacts, AskClock, CallBack, OpenEnd, Measure)}
_RECORDS: dict[str, Any] = {cls.__name__: cls for cls in (Up, Facts, ClockIs, End, Measured, Done, Failed)}


def write_order(order: Order) -> bytes:
    """An order as a line."""
    return _write(order) + b"\n"


def read_order(line: bytes) -> Order | None:
    """The order in a line; None for signs of life alone.

    Raises:
        ValueError: anything else.
    """
    text = line.lstrip(SIGN_OF_LIFE).strip()
    return _read(text.decode(), _ORDERS) if text else None


def write_record(record: Record) -> bytes:
    """A record as a line."""
    return RECORD.encode() + _write(record) + b"\n"


def read_record(line: str) -> Record | None:
    """The record in a line; None if it is none, such as a line of a login banner.

    Raises:
        ValueError: it begins like one, but is not.
    """
    before, mark, text = line.partition(RECORD)
    return _read(text, _RECORDS) if mark and not before else None


def _write(message: Any) -> bytes:
    return json.dumps([type(message).__name__, _plain(message)]).encode()


def _plain(value: Any) -> Any:
    """Dataclasses as arrays of their fields, in order."""
    if dataclasses.is_dataclass(value):
        return [_plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _read(text: str, known: Mapping[str, Any]) -> Any:
    try:
        name, values = json.loads(text)
        return codec.build(known[name], _with_tuples(values))
    except (ValueError, KeyError, TypeError, RecursionError, ProtocolError) as error:
        raise ValueError(f"no message of the doctor ({type(error).__name__})") from None


def _with_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_with_tuples, value))
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return value
