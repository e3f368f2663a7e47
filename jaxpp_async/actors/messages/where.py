"""where: where an actor is, how it does and what it says of itself. Plain frozen data, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from jaxpp_async.actors.messages.steps import StepId
from jaxpp_async.program import ActorId, BufferId, Tag


@dataclass(frozen=True, slots=True)
class Inspect:
    """Ask for numbers about the actor. Answer: `Inspected`."""

    request: int


@dataclass(frozen=True, slots=True)
class Report:
    """Ask where the actor is and what it waits for, when its step does not go on. Answer: `Reported`."""

    request: int


@dataclass(frozen=True, slots=True)
class Inspected:
    """Numbers such as `live_arrays`, `store_arrays`, `file_descriptors`, `compilations`."""

    request: int
    numbers: dict[str, int]


@dataclass(frozen=True, slots=True)
class OpenTransfer:
    """Data of a step that is not there yet, or that has not left.

    Args:
        kind: `"receive"`, `"send"`, or `"argument"`: a value from the controller (`peer`), without a tag (-1).
        buffer: the program's slot.
        posted: whether the transport has it; a send of data that is not there is not.
        needed: whether the actor cannot go on without it.
    """

    kind: Literal["receive", "send", "argument"]
    buffer: BufferId
    peer: ActorId
    tag: Tag
    size_bytes: int
    posted: bool
    needed: bool


@dataclass(frozen=True, slots=True)
class Reported:
    """Where the actor is.

    Args:
        step: the id of the step under way; None: there is none, and what follows says nothing.
        at: text of the instruction.
        running: whether it executes a task.
        transfers_done: of this step, so far.
        now_s: what its clock shows (`clocks`).
    """

    request: int
    step: StepId | None
    program_id: int = 0
    instruction: int = 0
    at: str = ""
    running: bool = False
    transfers_done: int = 0
    transfers: tuple[OpenTransfer, ...] = ()
    now_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Log:
    """A line for the controller's `logging`. `step`: the number of the user's step under way."""

    level: int
    logger: str
    message: str
    step: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life, over a connection of its own.

    Args:
        position: where the actor is, as `progress.Position`'s fields; None before its first instruction.
        clock: which clock it stamps with (`clocks.clock_name`).
    """

    position: tuple[int, int, int, bool, bool] | None
    clock: str = ""
