"""talk: what the doctor and a host say to each other, as lines (`actors.protocol.line_protocol`). Sans-I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from jaxpp_async.doctor.facts import HostFacts
from jaxpp_async.protocol.line_protocol import LineProtocol


@dataclass(frozen=True, slots=True)
class Prepare:
    """Set these environment variables, before anything else. Answer: `Completed`."""

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
    """Connect to the doctor's machine and send the token. Answer: `Completed`."""

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
class Completed:
    """It was done."""


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """It could not be done."""

    error: str


Order: TypeAlias = Prepare | AskFacts | AskClock | CallBack | OpenEnd | Measure
Record: TypeAlias = Up | Facts | ClockIs | End | Measured | Completed | ProbeFailed

_LINES: Final = LineProtocol[Order, Record]("the doctor", Order, Record)
write_order, read_order = _LINES.write_order, _LINES.read_order
write_record, read_record = _LINES.write_record, _LINES.read_record
