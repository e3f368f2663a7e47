"""telling: what happens to actors in, events of their mesh out. Decides nothing, and never fails what it tells of.

routes: by which ways a transport reaches its peers in, which of them make device memory go through the host's out.
Plain data.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from jaxpp_async.base.events import EventLog
from jaxpp_async.base.install_hints import page
from jaxpp_async.controller.failure_detector import Recovered, Suspect
from jaxpp_async.errors import ActorDiedError, ActorError, ActorUnresponsiveError
from jaxpp_async.program.instructions import ProcessId
from jaxpp_async.protocol.actor_info import ActorInfo
from jaxpp_async.protocol.messages import StepId, step_number, step_text

_LOG = logging.getLogger("jaxpp_async")


class MeshEvents:
    """Puts the events of one mesh into words.

    Args:
        log: where they go; None: into the log alone.
    """

    def __init__(self, log: EventLog | None = None):
        self._emit = (log or EventLog()).emit

    def started(self, info: ActorInfo) -> None:
        """An actor, or its successor, is ready."""
        text = f"{info} is ready: {', '.join(info.devices)}"
        self._emit("started", text, actor=info.id, host=info.host, pid=info.pid, devices=info.devices)

    def connected(self, info: ActorInfo, routes: Mapping[ProcessId, tuple[str, ...]]) -> None:
        """An actor whose arrays lie on GPUs has been connected; told if they go through host memory on the way."""
        slow = staged(routes)
        if not slow:
            return
        ways = sorted({way for each in slow.values() for way in each})
        text = (
            f"{info} sends device memory to peers {', '.join(map(str, sorted(slow)))} through host memory: UCX has "
            f"{', '.join(ways)} to them, and neither cuda_ipc nor rc; see {page('gpu.md')}"
        )
        _LOG.warning("%s", text)
        self._emit(
            "staged",
            text,
            actor=info.id,
            host=info.host,
            pid=info.pid,
            peers=tuple(sorted(slow)),
            routes=ways,
        )

    def compiled(self, name: str, seconds: float, num_tasks: int) -> None:
        """A step is on the actors."""
        text = f"compiled {name} in {seconds:.1f} s: {num_tasks} tasks"
        self._emit("compiled", text, name=name, seconds=seconds, num_tasks=num_tasks)

    def waiting(self, name: str, ahead: StepId) -> None:
        """A step waits behind one that nobody awaits any more, and has for a while."""
        text = f"step {name!r} waits for {step_text(ahead)}, cancelled by its caller, to end: a step that was sent runs on"
        _LOG.warning("%s", text)
        self._emit("waiting", text, step=step_number(ahead), name=name)

    def judged(self, info: ActorInfo, verdict: Suspect | Recovered) -> None:
        """An actor is silent, or is heard again."""
        silence_s = verdict.silence_s
        if isinstance(verdict, Suspect):
            text = f"{info} has not been heard of for {silence_s:.1f} s"
            self._emit("suspect", text, actor=info.id, host=info.host, pid=info.pid, silence_s=silence_s)
        else:
            text = f"{info} is heard again, after {silence_s:.1f} s"
            self._emit("recovered", text, actor=info.id, host=info.host, pid=info.pid, silence_s=silence_s)

    def failed(self, error: ActorError) -> None:
        """Something is the cause of a failure; told if it is that an actor is gone."""
        if isinstance(error, ActorDiedError | ActorUnresponsiveError):
            what = {"host": error.host, "pid": error.pid, "error": type(error).__name__}
            self._emit("died", str(error), actor=error.actor, step=error.step, **what)

    def restarted(self, infos: Sequence[ActorInfo], num_steps: int) -> None:
        """All are at work again.

        Args:
            infos: those that were replaced; none, if a link broke and nobody had to be.
            num_steps: how many are run again.
        """
        what = f"is at work again; steps that are run again: {num_steps}"
        for info in infos:
            where = {"host": info.host, "pid": info.pid}
            self._emit("restarted", f"{info} {what}", actor=info.id, num_steps=num_steps, **where)
        if not infos:
            self._emit("restarted", f"the mesh {what}", num_steps=num_steps)

    def closed(self, cause: BaseException | None) -> None:
        """The mesh is over. A second call tells nothing."""
        why = "" if cause is None else f": {cause}" if str(cause) else f": {type(cause).__name__}"
        self._emit(
            "closed", f"the mesh is closed{why}", error=None if cause is None else type(cause).__name__
        )


# ---------------------------------------------------------------- routes

_READ_DEVICE_MEMORY = ("rc", "dc", "gga")
"""Beginnings of UCX's names of transports between hosts (`rc_mlx5`, `dc_mlx5`) that can read and write device memory
where it lies. That they do also takes a driver (docs/gpu.md), and UCX does not tell."""


def staged(routes: Mapping[ProcessId, tuple[str, ...]]) -> dict[ProcessId, tuple[str, ...]]:
    """The peers that device memory reaches only by copies in host memory, with the ways to them. A peer whose ways are
    not known is none of them."""
    return {peer: ways for peer, ways in routes.items() if ways and not any(map(_is_direct, ways))}


def _is_direct(way: str) -> bool:
    return way == "cuda_ipc" or way.partition("_")[0] in _READ_DEVICE_MEMORY
