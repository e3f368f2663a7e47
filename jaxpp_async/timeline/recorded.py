"""recorded: what is known of one actor's part in a step: its program, its stamps, its clock. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpp_async.program import ActorProgram


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is known of one actor's part in a step.

    Args:
        program: what it ran.
        stamps: `StepStats.stamps`, in seconds of the actor's own clock.
        heard_s: when the controller had its reply, by the controller's clock.
        offset_s: what the actor's clock was ahead of the controller's.
        error_s: by how much that may be wrong; None: nothing is known of its clock.
    """

    program: ActorProgram
    stamps: bytes
    heard_s: float
    offset_s: float = 0.0
    error_s: float | None = 0.0
    host: str = ""
    pid: int = 0
