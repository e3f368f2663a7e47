"""Define the messages that the doctor (the command that checks whether a run would work) and its program on a
host exchange. Each message is a line of JSON.

The doctor sends orders (requests), and the program answers each of them with a record.
`protocol.line_protocol` writes and reads the lines.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from jaxpp_async.doctor.facts import HostFacts
from jaxpp_async.protocol.line_protocol import LineProtocol
from jaxpp_async.protocol.messages import Message


class Prepare(Message):
    """A message that tells the doctor's program on a host to set environment variables, sent before all other
    messages. The answer is `Completed`.
    """

    env: dict[str, str]


class AskFacts(Message):
    """A message that tells the doctor's program on a host to gather the facts about the host, among them
    whether JAX starts on the given platform. The answer is `Facts`.
    """

    platform: str


class AskClock(Message):
    """A message that tells the doctor's program on a host to read the host's wall clock. The answer is
    `ClockIs`.
    """


class CallBack(Message):
    """A message that tells the doctor's program on a host to connect to the doctor's machine, as an actor
    would, and to send a token. The answer is `Completed`.

    Args:
        host: the address of the doctor's machine.
        port: the TCP port on which the doctor listens.
        token: the text to send, by which the doctor recognizes the host.
    """

    host: str
    port: int
    token: str


class OpenEnd(Message):
    """A message that tells the doctor's program on a host to open one end of a link that is to be measured.
    The answer is `EndOpened`.

    Args:
        peer: the number of this end; the two ends of a link have the numbers 0 and 1.
    """

    peer: int


class Measure(Message):
    """A message that tells the doctor's program on a host to connect its end of a link to the other end, and
    to measure the link. The answer is `Measured`.

    Args:
        peer: the number of the other end.
        address: the address of the other end.
        leads: whether this end sends and measures; otherwise this end replies. Exactly one end leads.
    """

    peer: int
    address: bytes
    leads: bool


class Started(Message):
    """The first message of the doctor's program on a host, which shows that Python and this package have
    started there.
    """

    version: str


class Facts(Message):
    """The answer to `AskFacts`, with the facts about a host."""

    facts: HostFacts


class ClockIs(Message):
    """The answer to `AskClock`, with the wall clock of a host in seconds since 1970."""

    wall_s: float


class EndOpened(Message):
    """The answer to `OpenEnd`, with the address of the opened end of the link."""

    address: bytes


class Measured(Message):
    """The answer to `Measure`, with the measured latency in seconds and the rate in bytes per second. Both
    are 0 if this end of the link did not lead the measurement.
    """

    latency_s: float
    bytes_per_s: float


class Completed(Message):
    """The answer to a request that was carried out and has no result."""


class ProbeFailed(Message):
    """The answer to a request that could not be carried out, with the reason in words."""

    error: str


Order: TypeAlias = Prepare | AskFacts | AskClock | CallBack | OpenEnd | Measure
Record: TypeAlias = Started | Facts | ClockIs | EndOpened | Measured | Completed | ProbeFailed

_LINES: Final = LineProtocol[Order, Record]("the doctor", Order, Record)
write_order, read_order = _LINES.write_order, _LINES.read_order
write_record, read_record = _LINES.write_record, _LINES.read_record
