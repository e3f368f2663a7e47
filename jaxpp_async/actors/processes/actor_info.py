"""actor_info: where an actor, or one of its processes, is and how it does. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxpp_async.actors.processes.seats import process_of
from jaxpp_async.program import ProcessId

_WORST_FIRST = ("failed", "restarting", "starting", "waiting", "closed", "ready")


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """Where an actor, or one of its processes, is.

    Args:
        host, pid: of an actor of several processes: those of the first.
        state: `"starting"`, `"ready"`, `"failed"` or `"closed"`; while lost actors are replaced these are
            `"restarting"` and the others `"waiting"`.
        devices: one text a device, such as `"cpu:0"`.
        rank, size: of one of several processes: which, and of how many.
        processes: of an actor: each of its processes, in order of rank; of a process: none.
        gpus: the UUIDs of its GPUs, or of parts of one (MIG), as `nvidia-smi -L` lists them; empty without GPUs.
    """

    id: int
    host: str
    pid: int
    devices: tuple[str, ...]
    state: str
    rank: int = 0
    size: int = 1
    processes: tuple[ActorInfo, ...] = ()
    gpus: tuple[str, ...] = ()

    @property
    def process(self) -> ProcessId:
        """The process's number in the mesh."""
        return process_of(self.id, self.rank, self.size)

    def __str__(self) -> str:
        if self.size == 1:
            return f"actor {self.id} (host {self.host}, pid {self.pid})"
        return f"actor {self.id} (process {self.rank} of {self.size}: host {self.host}, pid {self.pid})"

    def __repr__(self) -> str:
        devices = "".join(f" {device}" for device in self.devices)
        if len(self.processes) < 2:  # an actor of one process has itself as that
            return f"<{self}: {self.state}{devices}>"
        processes = ", ".join(f"host {p.host} pid {p.pid} {p.state}" for p in self.processes)
        return f"<actor {self.id}: {self.state}{devices}; {len(self.processes)} processes: {processes}>"


def of_actor(processes: Sequence[ActorInfo]) -> ActorInfo:
    """What is known of an actor, from what is known of its processes, in order of rank."""
    first = processes[0]
    if len(processes) == 1:
        return replace(first, processes=(first,))
    state = min((p.state for p in processes), key=_WORST_FIRST.index)
    devices = tuple(device for p in processes for device in p.devices)
    gpus = tuple(gpu for p in processes for gpu in p.gpus)
    return ActorInfo(first.id, first.host, first.pid, devices, state, processes=tuple(processes), gpus=gpus)
