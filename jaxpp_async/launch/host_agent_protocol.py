"""Define the messages between a launcher and a host agent, which travel as lines (`line_protocol`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from jaxpp_async.launch.spawn import ActorRequest
from jaxpp_async.protocol.actor_info import Position
from jaxpp_async.protocol.line_protocol import LineProtocol

TEXT_CHARS = 600
"""Longest piece of an actor's line in a record: in JSON escapes it is still a line that a pipe
carries whole.
"""


@dataclass(frozen=True, slots=True)
class StartActor:
    """The order to start an actor process.

    Args:
        key: names the process from here on.
        request: describes it.
        folder: to work in, where it exists.
    """

    key: str
    request: ActorRequest = field(repr=False)
    folder: str


@dataclass(frozen=True, slots=True)
class SignalActor:
    """The order to signal an actor process and all that it started."""

    key: str
    signum: int

    def __post_init__(self) -> None:
        if not 0 < self.signum < 65:
            raise ValueError(f"{self.signum} is no signal")


@dataclass(frozen=True, slots=True)
class Close:
    """The order to kill what is left, and end."""


@dataclass(frozen=True, slots=True)
class AgentHello:
    """The record that the agent has started.

    Args:
        host, pid: of the agent.
        python: its interpreter.
        versions: of packages that have to agree; None for missing ones.
    """

    host: str
    pid: int
    python: str
    versions: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class ActorStarted:
    """The record that an actor process exists."""

    key: str
    pid: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The record that an actor process could not be started."""

    key: str
    error: str


@dataclass(frozen=True, slots=True)
class OutputLine:
    """The record of a line that an actor printed, or a piece of a long one."""

    key: str
    text: str


@dataclass(frozen=True, slots=True)
class ActorEnded:
    """The record that an actor process has ended.

    Args:
        position: its last position in its program, as the fields of `actor_info.Position`; None: not known.
    """

    key: str
    returncode: int
    position: tuple[int, int, int, bool, bool] | None

    def progress(self) -> Position | None:
        """Give its last position in its program."""
        return Position(*self.position) if self.position is not None else None


Order: TypeAlias = StartActor | SignalActor | Close
Record: TypeAlias = AgentHello | ActorStarted | StartFailed | OutputLine | ActorEnded

_LINES: Final = LineProtocol[Order, Record]("a host agent", Order, Record)
write_order, read_order = _LINES.write_order, _LINES.read_order
write_record, read_record = _LINES.write_record, _LINES.read_record
