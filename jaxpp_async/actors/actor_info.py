"""actor_info: where an actor is and how it does. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """Where an actor is.

    Args:
        state: `"starting"`, `"ready"`, `"failed"` or `"closed"`; while lost actors are replaced these are
            `"restarting"` and the others `"waiting"`.
        devices: one text a device, such as `"cpu:0"`.
    """

    id: int
    host: str
    pid: int
    devices: tuple[str, ...]
    state: str

    def __str__(self) -> str:
        return f"actor {self.id} (host {self.host}, pid {self.pid})"
