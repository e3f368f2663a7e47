"""Decide which error describes an actor's failure, and which of several failures caused the others.

When an actor dies, the controller often notices three failures, in any order: the death, a lost connection
and a failed transfer. Therefore a failure that looks like a consequence of another failure is reported only
if no cause is noticed within `GRACE_S` seconds. The module `controller` decides what to do about a reported
error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from jaxpp_async.controller.actor_group import ActorGroup
from jaxpp_async.controller.deploy import LoadedPrograms
from jaxpp_async.controller.error_messages import (
    died_error,
    follows_first_process,
    is_consequence,
    lost_error,
    remote_error,
)
from jaxpp_async.controller.health_monitor import ClockWatch, HealthMonitor
from jaxpp_async.controller.mesh_events import MeshEvents
from jaxpp_async.controller.options import ControllerOptions
from jaxpp_async.controller.requests import ActorLink
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.errors import ActorError, ProtocolError
from jaxpp_async.program.instructions import ProcessId
from jaxpp_async.protocol.frames import Identity
from jaxpp_async.protocol.messages import Beat
from jaxpp_async.protocol.task_group import OwnedTasks

GRACE_S = 1.0
"""The seconds for which the report of a failure that looks like a consequence is delayed, so that its cause
can be noticed.
"""


class FailurePolicy:
    """A filter for the failures of one mesh's actors, which reports causes and drops their consequences.

    A failure that looks like a consequence of another failure is reported only if no other failure is noticed
    within `GRACE_S` seconds.

    Args:
        actor_group: the actors' processes.
        programs: the loaded programs, which give the text of the instruction at which an actor died.
        under_way: the steps that have not ended, by step id.
        on_failure: called for each failure that counts as a cause, with the error and with the process that
            died (None if no process died).
        is_recovering: returns whether actors are being replaced.
        mesh_events: gets the events that users read.
        options: the deadlines of the mesh.

    Attributes:
        health_monitor: detects silent actors and steps that make no progress.
        clocks: estimates of the actors' clocks.
    """

    def __init__(
        self,
        actor_group: ActorGroup,
        programs: LoadedPrograms,
        under_way: dict[int, SubmittedStep],
        on_failure: Callable[[ActorError, ProcessId | None], None],
        is_recovering: Callable[[], bool],
        mesh_events: MeshEvents,
        options: ControllerOptions,
    ):
        self._actor_group, self._programs, self._under_way = actor_group, programs, under_way
        self._on_failure, self._mesh_events = on_failure, mesh_events
        self._suspicion: asyncio.TimerHandle | None = None
        self._tasks = OwnedTasks()
        links = actor_group.links
        self.health_monitor = HealthMonitor(
            program_of=programs.part,
            under_way=under_way,
            info=lambda process: links[process].info,
            ask=actor_group.request_report,
            read_progress=lambda process: links[process].handle.progress(),
            fail=self.report,
            is_busy=is_recovering,
            on_verdict=lambda verdict: mesh_events.judged(links[verdict.process].info, verdict),
            options=options,
        )
        self.clocks = ClockWatch(actor_group.request_report)
        actor_group.listener.on_beat = self._on_beat

    def watch(self, link: ActorLink) -> None:
        """Start to watch a process, and report its death, the loss of its connection and the failures that it
        sends.
        """
        link.connection.on_message = partial(self._on_message, link)
        link.connection.on_closed = partial(self._on_connection_lost, link)
        self._mesh_events.started(link.info)
        process = link.info.process
        self._tasks.start(f"watch {link.info}", self._watch_death(link))
        self.clocks.begin(process)
        if self._actor_group.has_processes:
            self.health_monitor.watch(process)
        if not link.connection.is_open:
            self._on_connection_lost(link, None)

    def unwatch(self, process: ProcessId) -> None:
        """Stop expecting heartbeats of a process that is dead or will be killed."""
        self.health_monitor.unwatch(process)

    def suspect(self, error: ActorError) -> None:
        """Report `error` in `GRACE_S` seconds as the cause of the failure, unless another error is reported
        before.

        While one error waits to be reported in this way, further errors that are passed to this method are
        ignored.
        """
        if self._suspicion is None:
            self._suspicion = asyncio.get_running_loop().call_later(GRACE_S, self.report, error)

    def report(self, error: ActorError, dead: ProcessId | None = None) -> None:
        """Report `error` as the cause of the failure, and drop a suspected error (see `suspect`).

        Args:
            error: the failure.
            dead: the process that died, or None.
        """
        self.drop_suspicion()
        self._on_failure(error, dead)

    def drop_suspicion(self) -> None:
        """Drop the suspected error (see `suspect`), if any, because a failure that explains it has been
        handled.
        """
        if self._suspicion is not None:
            self._suspicion.cancel()
            self._suspicion = None

    async def aclose(self) -> None:
        """Stop watching all processes."""
        self.drop_suspicion()
        await self.health_monitor.aclose()
        await self._tasks.aclose()

    # ------------------------------------------------------------ heartbeats and failures

    def _on_beat(self, identity: Identity, beat: Beat) -> None:
        self.health_monitor.record_heartbeat(identity, beat)
        self.clocks.record_heartbeat(identity, beat)

    def _is_current(self, link: ActorLink) -> bool:
        """Return whether a process is expected to run. This is False if the process was replaced or told to
        end.
        """
        return self._actor_group.links.get(link.info.process) is link and not link.is_detached

    def _on_message(self, link: ActorLink, message: Any, number: int | None) -> None:
        try:
            failed = link.handle_reply(message, number)
        except ProtocolError as error:
            self.report(error)
            return
        if failed is not None:
            error = remote_error(link.info, failed, ends_mesh=True)
            of_several = self._actor_group.processes.per_actor > 1
            self.suspect(error) if is_consequence(failed, of_several=of_several) else self.report(error)

    async def _watch_death(self, link: ActorLink) -> None:
        death = await link.handle.wait_dead()
        if self._is_current(link):
            process = link.info.process
            self.unwatch(process)
            step = self._step_of(process)
            error = died_error(link.info, death, step, self._instruction_of(link, step))
            self.suspect(error) if follows_first_process(link.info, death) else self.report(error, process)

    def _on_connection_lost(self, link: ActorLink, error: Exception | None) -> None:
        """Report a lost control connection as a failure, unless another failure is noticed within `GRACE_S`
        seconds.

        For example, if the process died, the error about its death tells more than the lost connection.

        Args:
            link: the link of the process.
            error: the error with which the connection ended, or None.
        """
        if self._is_current(link):
            step = self._step_of(link.info.process)
            self.suspect(lost_error(link.info, error, link.handle.output_tail(), step))

    def _step_of(self, process: ProcessId) -> int | None:
        """Return the id of the oldest step that a process has not finished, or None if the process has
        finished all steps.
        """
        return next((s for s, h in self._under_way.items() if h.waits_for(process)), None)

    def _instruction_of(self, link: ActorLink, step: int | None) -> str | None:
        """Return the text of the instruction at which a process died in `step`, or None if that is not known.

        The process's position in its program is read with `ActorHandle.progress`, which also works after the
        death.
        """
        at = link.handle.progress()
        return self._programs.instruction_at(link.info.id, at) if at is not None and at.step == step else None
