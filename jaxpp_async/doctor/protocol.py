"""Define the orders and records that the doctor and its program on a host exchange as lines of JSON.

`protocol.line_protocol` writes and reads the lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from jaxpp_async.doctor.facts import HostFacts
from jaxpp_async.protocol.line_protocol import LineProtocol


@dataclass(frozen=True, slots=True)
class Prepare:
    """Order a host to set environment variables, before anything else. The answer is `Completed`."""

    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class AskFacts:
    """Order a host to gather its facts, with JAX on this platform. The answer is `Facts`."""

    platform: str


@dataclass(frozen=True, slots=True)
class AskClock:
    """Order a host to read its wall clock. The answer is `ClockIs`."""


@dataclass(frozen=True, slots=True)
class CallBack:
    """Order a host to connect to the doctor's machine and send the token. The answer is `Completed`."""

    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True)
class OpenEnd:
    """Order a host to open an end of the data plane as peer `peer`. The answer is `End`."""

    peer: int


@dataclass(frozen=True, slots=True)
class Measure:
    """Order a host to connect its end to another host's and to measure. Both ends answer `Measured`."""

    peer: int
    address: str
    leads: bool


@dataclass(frozen=True, slots=True)
class Up:
    """The first record of a host, which tells that Python and the package have started there."""

    version: str


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about a host."""

    facts: HostFacts


@dataclass(frozen=True, slots=True)
class ClockIs:
    """The wall clock of a host, in seconds since 1970."""

    wall_s: float


@dataclass(frozen=True, slots=True)
class End:
    """The address of an end of the data plane, as base64."""

    address: str


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of a `facts.LinkReport`; zeros from the end that did not lead."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Completed:
    """The answer to an order that was carried out and has no result."""


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """The answer to an order that could not be carried out."""

    error: str


Order: TypeAlias = Prepare | AskFacts | AskClock | CallBack | OpenEnd | Measure
Record: TypeAlias = Up | Facts | ClockIs | End | Measured | Completed | ProbeFailed

_LINES: Final = LineProtocol[Order, Record]("the doctor", Order, Record)
write_order, read_order = _LINES.write_order, _LINES.read_order
write_record, read_record = _LINES.write_record, _LINES.read_record
