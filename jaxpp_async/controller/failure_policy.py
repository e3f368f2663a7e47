"""Decide which error a failure of an actor is, and tell which failure is the cause of others.

A death, a lost connection and a failed transfer are often one event seen three times, in any order. So a
failure that looks like a consequence waits a moment for its cause. `controller` decides what is done about
the error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from jaxpp_async.controller.actor_group import ActorGroup
from jaxpp_async.controller.clock_sync import ClockWatch
from jaxpp_async.controller.deploy import LoadedPrograms
from jaxpp_async.controller.error_messages import (
    died_error,
    is_consequence,
    is_echo,
    lost_error,
    remote_error,
)
from jaxpp_async.controller.health_monitor import HealthMonitor
from jaxpp_async.controller.mesh_events import MeshEvents
from jaxpp_async.controller.options import ControllerOptions
from jaxpp_async.controller.requests import ActorLink, StepHandle
from jaxpp_async.errors import ActorError, ProtocolError
from jaxpp_async.program.instructions import ProcessId
from jaxpp_async.protocol.frames import Identity
from jaxpp_async.protocol.messages import Beat
from jaxpp_async.protocol.task_group import OwnedTasks

GRACE_S = 1.0
"""How long a failure that looks like a consequence waits for its cause to be noticed."""


class FailurePolicy:
    """The one place that learns of all failures of one mesh's actors.

    Args:
        under_way: the steps that have not ended, by number.
        on_failure: called with each failure and with the process that is gone with it, if any.
        is_recovering: whether actors are being replaced.

    Attributes:
        health_monitor: finds actors that are silent and steps that stand still.
        clocks: the clocks of the actors.
    """

    def __init__(
        self,
        actor_group: ActorGroup,
        programs: LoadedPrograms,
        under_way: dict[int, StepHandle],
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
        """Treat a death, a lost connection or a failure of this process as the mesh's, from here on."""
        link.connection.on_message = partial(self._on_message, link)
        link.connection.on_closed = partial(self._on_lost, link)
        self._mesh_events.started(link.info)
        process = link.info.process
        self._tasks.start(f"watch {link.info}", self._watch_death(link))
        self.clocks.begin(process)
        if self._actor_group.has_processes:
            self.health_monitor.watch(process)
        if not link.connection.is_open:
            self._on_lost(link, None)

    def unwatch(self, process: ProcessId) -> None:
        """Stop expecting heartbeats of a process, which is dead or will be killed."""
        self.health_monitor.unwatch(process)

    def suspect(self, error: ActorError) -> None:
        """Report `error` as the cause unless a better one is reported within `GRACE_S`."""
        if self._suspicion is None:
            self._suspicion = asyncio.get_running_loop().call_later(GRACE_S, self.report, error)

    def report(self, error: ActorError, dead: ProcessId | None = None) -> None:
        """Report `error` as the cause.

        Args:
            dead: the process that is gone, if one is.
        """
        self.drop_suspicion()
        self._on_failure(error, dead)

    def drop_suspicion(self) -> None:
        """Forget the suspected error, because it has been taken care of."""
        if self._suspicion is not None:
            self._suspicion.cancel()
            self._suspicion = None

    async def aclose(self) -> None:
        """Stop watching."""
        self.drop_suspicion()
        await self.health_monitor.aclose()
        await self._tasks.aclose()

    # ------------------------------------------------------------ heartbeats and failures

    def _on_beat(self, identity: Identity, beat: Beat) -> None:
        self.health_monitor.record_heartbeat(identity, beat)
        self.clocks.record_heartbeat(identity, beat)

    def _is_current(self, link: ActorLink) -> bool:
        """Whether the process has not been replaced, and its end is not expected."""
        return self._actor_group.links.get(link.info.process) is link and not link.is_detached

    def _on_message(self, link: ActorLink, message: Any) -> None:
        try:
            failed = link.handle_reply(message)
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
            self.suspect(error) if is_echo(link.info, death) else self.report(error, process)

    def _on_lost(self, link: ActorLink, error: Exception | None) -> None:
        """Suspect a lost connection; if its process ended as well, the process's death says more."""
        if self._is_current(link):
            step = self._step_of(link.info.process)
            self.suspect(lost_error(link.info, error, link.handle.output_tail(), step))

    def _step_of(self, process: ProcessId) -> int | None:
        """Find the step that a process is running: the oldest that it has not finished."""
        return next((s for s, h in self._under_way.items() if h.waits_for(process)), None)

    def _instruction_of(self, link: ActorLink, step: int | None) -> str | None:
        """Give the text of the instruction that a dead actor was at in `step`, if its progress page says."""
        at = link.handle.progress()
        return self._programs.instruction_at(link.info.id, at) if at is not None and at.step == step else None
