"""keeper_protocol: what a launcher and a keeper say to each other, as lines (`line_protocol`). Sans-I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from jaxpp_async.launch.spawn import ActorRequest
from jaxpp_async.protocol.actor_info import Position
from jaxpp_async.protocol.line_protocol import LineProtocol

TEXT_CHARS = 600
"""Longest piece of an actor's line in a record: written as JSON escapes it is still a line that pipes carry whole."""


@dataclass(frozen=True, slots=True)
class StartActor:
    """Start an actor, known by `key` from here on. `folder`: to work in, where it exists."""

    key: str
    request: ActorRequest = field(repr=False)
    folder: str


@dataclass(frozen=True, slots=True)
class SignalActor:
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
class AgentHello:
    """The keeper is up. `versions`: of packages that have to agree, None for missing ones."""

    host: str
    pid: int
    python: str
    versions: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class ActorStarted:
    """An actor's process exists."""

    key: str
    pid: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """An actor could not be started."""

    key: str
    error: str


@dataclass(frozen=True, slots=True)
class OutputLine:
    """A line that an actor printed, or a piece of a long one."""

    key: str
    text: str


@dataclass(frozen=True, slots=True)
class ActorEnded:
    """An actor has ended. `position`: where it was in its program, as `progress.Position`'s fields."""

    key: str
    returncode: int
    position: tuple[int, int, int, bool, bool] | None

    def progress(self) -> Position | None:
        """Where it was in its program."""
        return Position(*self.position) if self.position is not None else None


Order: TypeAlias = StartActor | SignalActor | Close
Record: TypeAlias = AgentHello | ActorStarted | StartFailed | OutputLine | ActorEnded

_LINES: Final = LineProtocol[Order, Record]("a keeper", Order, Record)
write_order, read_order = _LINES.write_order, _LINES.read_order
write_record, read_record = _LINES.write_record, _LINES.read_record
