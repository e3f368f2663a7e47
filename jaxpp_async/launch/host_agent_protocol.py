"""Define the messages between a launcher and a host agent, the program that starts and ends the actors of
another host.

The launcher sends orders (requests), and the agent sends records (reports). Each of them is a line of text
(see `protocol.line_protocol`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from jaxpp_async.launch.spawn import ActorRequest
from jaxpp_async.protocol.actor_info import Position
from jaxpp_async.protocol.line_protocol import LineProtocol
from jaxpp_async.protocol.messages import Message

TEXT_CHARS = 600
"""The greatest number of characters of an actor's line that one record contains. Even with JSON escapes, a
record of this size is a line that a pipe transfers as a whole.
"""


class StartActor(Message):
    """A message that tells a host agent to start an actor process.

    Args:
        key: the name by which later messages refer to the process.
        request: the description of the process.
        folder: the working directory for the process, which is used if it exists on the agent's host.
    """

    key: str
    request: ActorRequest
    folder: str

    def __repr__(self) -> str:
        # without the request, which may contain secrets
        return f"StartActor(key={self.key!r}, folder={self.folder!r})"


class SignalActor(Message):
    """A message that tells a host agent to send a signal to an actor process and to all processes that it
    started.
    """

    key: str
    signum: int

    def __post_init__(self) -> None:
        if not 0 < self.signum < 65:
            raise ValueError(f"{self.signum} is no signal")


class Close(Message):
    """A message that tells a host agent to kill the actors that still run, and then to exit."""


class AgentHello(Message):
    """The greeting of a host agent: the first message that the agent sends, once it has started.

    Args:
        host: the name of the agent's host.
        pid: the agent's process id.
        python: the path of the agent's interpreter.
        versions: a dictionary. Its keys are the packages that must have the same version on the controller's
            host; its values are their versions on the agent's host, None for a package that is missing.
    """

    host: str
    pid: int
    python: str
    versions: Mapping[str, str | None]


class ActorStarted(Message):
    """The message with which a host agent reports that it has started an actor process."""

    key: str
    pid: int


class StartFailed(Message):
    """The message with which a host agent reports that an actor process could not be started, and why."""

    key: str
    error: str


class OutputLine(Message):
    """The message with which a host agent passes on a line that an actor printed. A line that is too long for
    one message is sent in several pieces.
    """

    key: str
    text: str


class ActorEnded(Message):
    """The message with which a host agent reports that an actor process has ended.

    Args:
        key: the name of the process.
        returncode: the exit status of the process, negative for a signal.
        position: the process's last position in its program (the instruction that it had reached); None if
            the position is not known.
    """

    key: str
    returncode: int
    position: Position | None


Order: TypeAlias = StartActor | SignalActor | Close
Record: TypeAlias = AgentHello | ActorStarted | StartFailed | OutputLine | ActorEnded

_LINES: Final = LineProtocol[Order, Record]("a host agent", Order, Record)
write_order, read_order = _LINES.write_order, _LINES.read_order
write_record, read_record = _LINES.write_record, _LINES.read_record
