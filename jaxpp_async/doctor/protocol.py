"""Define the messages that the doctor (the command that checks whether a run would work) and its program on a
host exchange as lines of JSON.

The doctor sends orders, and the program answers each of them with a record. `protocol.line_protocol` writes
and reads the lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from jaxpp_async.doctor.facts import HostFacts
from jaxpp_async.protocol.line_protocol import LineProtocol


@dataclass(frozen=True, slots=True)
class Prepare:
    """An order to a host to set environment variables, before any other order. The answer is `Completed`."""

    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class AskFacts:
    """An order to a host to gather its facts, for which JAX is started on the given platform. The answer is
    `Facts`.
    """

    platform: str


@dataclass(frozen=True, slots=True)
class AskClock:
    """An order to a host to read its wall clock. The answer is `ClockIs`."""


@dataclass(frozen=True, slots=True)
class CallBack:
    """An order to a host to connect to the doctor's machine, as an actor would, and to send a token. The
    answer is `Completed`.

    Args:
        host: the address of the doctor's machine.
        port: the TCP port on which the doctor listens.
        token: the text to send, by which the doctor recognizes the host.
    """

    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True)
class OpenEnd:
    """An order to a host to open an end of the data plane for a measurement. The answer is `EndOpened`.

    Args:
        peer: the number of this end; the two ends of a link have the numbers 0 and 1.
    """

    peer: int


@dataclass(frozen=True, slots=True)
class Measure:
    """An order to a host to connect its end of the data plane to the other end, and to measure the link. The
    answer is `Measured`.

    Args:
        peer: the number of the other end.
        address: the address of the other end, as base64.
        leads: whether this end sends and measures, while the other end replies.
    """

    peer: int
    address: str
    leads: bool


@dataclass(frozen=True, slots=True)
class Started:
    """The first record of the doctor's program on a host, which tells that Python and this package have
    started.
    """

    version: str


@dataclass(frozen=True, slots=True)
class Facts:
    """The answer to `AskFacts`, with the facts about a host."""

    facts: HostFacts


@dataclass(frozen=True, slots=True)
class ClockIs:
    """The answer to `AskClock`, with the wall clock of a host in seconds since 1970."""

    wall_s: float


@dataclass(frozen=True, slots=True)
class EndOpened:
    """The answer to `OpenEnd`, with the address, as base64, of the end of the data plane that was opened."""

    address: str


@dataclass(frozen=True, slots=True)
class Measured:
    """The answer to `Measure`, with the figures of a `facts.LinkReport`; they are zeros from the end that did
    not lead.
    """

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Completed:
    """The answer to an order that was carried out and has no result."""


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """The answer to an order that could not be carried out, with the reason in words."""

    error: str


Order: TypeAlias = Prepare | AskFacts | AskClock | CallBack | OpenEnd | Measure
Record: TypeAlias = Started | Facts | ClockIs | EndOpened | Measured | Completed | ProbeFailed

_LINES: Final = LineProtocol[Order, Record]("the doctor", Order, Record)
write_order, read_order = _LINES.write_order, _LINES.read_order
write_record, read_record = _LINES.write_record, _LINES.read_record
