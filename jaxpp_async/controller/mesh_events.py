"""Report what happens to the actors of a mesh, in the log and as events that its user can read.

If reporting fails, the reported operation continues all the same. `staged` finds the peers to which arrays in
device memory can only be sent through host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from jaxpp_async.base.events import EventLog
from jaxpp_async.base.install_hints import page
from jaxpp_async.controller.error_messages import describe_silence, location
from jaxpp_async.errors import ActorDiedError, ActorError, ActorUnresponsiveError
from jaxpp_async.program.instructions import ProcessId
from jaxpp_async.protocol.actor_info import ActorInfo
from jaxpp_async.protocol.messages import StepId, step_number, step_text

_LOG = logging.getLogger("jaxpp_async")


class MeshEvents:
    """The publisher of one mesh's events: each method reports one kind of event, with a text for the user.

    Args:
        log: the log to which events are added; None: they are dropped.
    """

    def __init__(self, log: EventLog | None = None):
        self._emit = (log or EventLog()).emit

    def started(self, info: ActorInfo) -> None:
        """Report that an actor process is ready, when the mesh starts or when the process replaces another
        one.
        """
        text = f"{info} is ready: {', '.join(info.devices)}"
        self._emit("started", text, **location(info), devices=info.devices)

    def connected(self, info: ActorInfo, routes: Mapping[ProcessId, tuple[str, ...]]) -> None:
        """Warn the user if a process can send arrays on its GPUs to some peers only through host memory.
        Otherwise do nothing.

        Args:
            info: the process, which has just been connected with its peers.
            routes: for each peer, the names of the transports that UCX uses towards it; empty if not known.
        """
        slow = staged(routes)
        if not slow:
            return
        ways = sorted({way for each in slow.values() for way in each})
        text = (
            f"{info} sends device memory to peers {', '.join(map(str, sorted(slow)))} through host "
            f"memory: UCX has {', '.join(ways)} to them, and neither cuda_ipc nor rc; see {page('gpu.md')}"
        )
        _LOG.warning("%s", text)
        self._emit("staged", text, **location(info), peers=tuple(sorted(slow)), routes=ways)

    def compiled(self, name: str, seconds: float, num_tasks: int) -> None:
        """Report that the actors have compiled a step.

        Args:
            name: the name of the step function.
            seconds: how long compiling took.
            num_tasks: the number of tasks in the step's programs.
        """
        text = f"compiled {name} in {seconds:.1f} s: {num_tasks} tasks"
        self._emit("compiled", text, name=name, seconds=seconds, num_tasks=num_tasks)

    def waiting(self, name: str, ahead: StepId) -> None:
        """Report that a step has waited for some time for an earlier step, which still runs although its
        caller was cancelled.

        Args:
            name: the name of the function of the waiting step.
            ahead: the id of the earlier step.
        """
        what = f"waits for {step_text(ahead)}, cancelled by its caller, to end: a step that was sent runs on"
        text = f"step {name!r} {what}"
        _LOG.warning("%s", text)
        self._emit("waiting", text, step=step_number(ahead), name=name)

    def suspect(self, info: ActorInfo, silence_s: float, at: str | None, dead_s: float) -> None:
        """Warn the user that a process has been silent for some time.

        Args:
            info: the process.
            silence_s: the seconds since its last heartbeat.
            at: the text of the process's last known position in its program, or None.
            dead_s: the seconds of silence after which the process is given up.
        """
        said = describe_silence(info, silence_s, at)
        _LOG.warning("%s; it is given up after %g s", said, dead_s, extra=_log_fields(info))
        text = f"{info} has not been heard of for {silence_s:.1f} s"
        self._emit("suspect", text, **location(info), silence_s=silence_s)

    def recovered(self, info: ActorInfo, silence_s: float) -> None:
        """Report that a process that was suspect sends heartbeats again, after a silence of `silence_s`
        seconds.
        """
        text = f"{info} is heard again, after {silence_s:.1f} s"
        _LOG.warning("%s", text, extra=_log_fields(info))
        self._emit("recovered", text, **location(info), silence_s=silence_s)

    def failed(self, error: ActorError) -> None:
        """Report that an actor has died or does not respond; do nothing for other failures."""
        if isinstance(error, ActorDiedError | ActorUnresponsiveError):
            what = {"host": error.host, "pid": error.pid, "error": type(error).__name__}
            self._emit("died", str(error), actor=error.actor, step=error.step, **what)

    def restarted(self, infos: Sequence[ActorInfo], num_steps: int, seconds: float) -> None:
        """Report that all actors work again after a restart.

        Args:
            infos: the actors that were replaced; empty if only a connection broke and no actor had to be
                replaced.
            num_steps: the number of steps that had already finished and are run again.
            seconds: the seconds since the failure was reported.
        """
        what = f"is at work again after {seconds:.1f} s; steps that are run again: {num_steps}"
        details = {"num_steps": num_steps, "seconds": seconds}
        for info in infos:
            self._emit("restarted", f"{info} {what}", **location(info), **details)
        if not infos:
            self._emit("restarted", f"the mesh {what}", **details)

    def closed(self, cause: BaseException | None) -> None:
        """Report that the mesh is closed.

        Args:
            cause: the failure that ended the mesh, or None if the user closed it.
        """
        why = "" if cause is None else f": {cause}" if str(cause) else f": {type(cause).__name__}"
        self._emit(
            "closed", f"the mesh is closed{why}", error=None if cause is None else type(cause).__name__
        )


def _log_fields(info: ActorInfo) -> dict[str, object]:
    """Return the extra fields of a log record about an actor: its id and host."""
    return {"actor": info.id, "host": info.host}


# ---------------------------------------------------------------- routes

_READ_DEVICE_MEMORY = ("rc", "dc", "gga")
"""The beginnings of UCX's names of those transports between hosts (such as `rc_mlx5`, `dc_mlx5`) that can
access GPU memory directly. These transports also need a driver for that (docs/gpu.md), and UCX does not say
whether the driver is there.
"""


def staged(routes: Mapping[ProcessId, tuple[str, ...]]) -> dict[ProcessId, tuple[str, ...]]:
    """Return the peers to which arrays in device memory can only be sent through host memory.

    Args:
        routes: for each peer, the names of the transports that UCX uses towards it; empty if not known.

    Returns:
        A dictionary. Its keys are these peers; its values are the transports towards them. Peers whose
        transports are not known are left out.
    """
    return {peer: ways for peer, ways in routes.items() if ways and not any(map(_is_direct, ways))}


def _is_direct(way: str) -> bool:
    return way == "cuda_ipc" or way.partition("_")[0] in _READ_DEVICE_MEMORY
