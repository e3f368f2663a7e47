"""supervision: what happens to the actors of one mesh in, which failure is the cause out.

A death, a lost connection and a failed transfer are often one event seen three times, in any order: what looks like a
consequence waits a moment for its cause. Decides which error it is, not what is done about it.
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
from jaxpp_async.controller.options import Deadlines
from jaxpp_async.controller.requests import ActorLink, StepHandle
from jaxpp_async.errors import ActorError, ProtocolError
from jaxpp_async.program.instructions import ProcessId
from jaxpp_async.protocol.frames import Identity
from jaxpp_async.protocol.messages import Beat
from jaxpp_async.protocol.task_group import OwnedTasks

GRACE_S = 1.0
"""How long a failure that looks like a consequence waits for its cause to be noticed."""


class FailurePolicy:
    """Watches the actors of one mesh.

    Args:
        under_way: the steps that have not ended, by number.
        on_failure: told of each failure and of the process that is gone with it, if any.

    Attributes:
        hearts: who lives. clocks: what their clocks show.
    """

    def __init__(
        self,
        actor_group: ActorGroup,
        programs: LoadedPrograms,
        under_way: dict[int, StepHandle],
        on_failure: Callable[[ActorError, ProcessId | None], None],
        is_recovering: Callable[[], bool],
        mesh_events: MeshEvents,
        deadlines: Deadlines,
    ):
        self._actor_group, self._programs, self._under_way, self._on_failure = (
            actor_group,
            programs,
            under_way,
            on_failure,
        )
        self._mesh_events = mesh_events
        self._suspicion: asyncio.TimerHandle | None = None
        self._tasks = OwnedTasks()
        self.hearts = HealthMonitor(
            program_of=programs.part,
            under_way=under_way,
            info=lambda process: actor_group.links[process].info,
            ask=actor_group.ask_where,
            look=lambda process: actor_group.links[process].handle.progress(),
            fail=self.report,
            is_busy=is_recovering,
            tell=lambda verdict: mesh_events.judged(actor_group.links[verdict.process].info, verdict),
            deadlines=deadlines,
            processes=actor_group.processes,
        )
        self.clocks = ClockWatch(actor_group.ask_where)
        actor_group.gate.on_beat = self._on_beat

    def watch(self, link: ActorLink) -> None:
        """From here on a death, a lost connection or a failure of this process is the mesh's."""
        link.connection.on_message = partial(self._on_message, link)
        link.connection.on_closed = partial(self._on_lost, link)
        self._mesh_events.started(link.info)
        process = link.info.process
        self._tasks.start(f"watch {link.info}", self._watch(link))
        self.clocks.begin(process)
        if self._actor_group.has_hearts:
            self.hearts.watch(process)
        if not link.connection.is_open:
            self._on_lost(link, None)

    def suspect(self, error: ActorError) -> None:
        """Take `error` as the cause unless a better one is noticed within `GRACE_S`."""
        if self._suspicion is None:
            self._suspicion = asyncio.get_running_loop().call_later(GRACE_S, self.report, error)

    def report(self, error: ActorError, dead: ProcessId | None = None) -> None:
        """Take `error` as the cause."""
        self.calm_down()
        self._on_failure(error, dead)

    def calm_down(self) -> None:
        """What was suspected so far has been seen to."""
        if self._suspicion is not None:
            self._suspicion.cancel()
            self._suspicion = None

    def step_of(self, process: ProcessId) -> int | None:
        """The step that a process is running: the oldest that it has not finished."""
        return next((s for s, h in self._under_way.items() if h.waits_for(process)), None)

    async def aclose(self) -> None:
        """Stop watching."""
        self.calm_down()
        await self.hearts.aclose()
        await self._tasks.aclose()

    # ------------------------------------------------------------ what is noticed

    def _on_beat(self, identity: Identity, beat: Beat) -> None:
        self.hearts.record_heartbeat(identity, beat)
        self.clocks.record_heartbeat(identity, beat)

    def _is_current(self, link: ActorLink) -> bool:
        """It has not been replaced, and nobody has seen to its end already."""
        return self._actor_group.links.get(link.info.process) is link and not link.is_let_go

    def _on_message(self, link: ActorLink, message: Any) -> None:
        try:
            failed = link.settle(message)
        except ProtocolError as error:
            self.report(error)
            return
        if failed is not None:
            error = remote_error(link.info, failed, ends_mesh=True)
            of_several = self._actor_group.processes.per_actor > 1
            self.suspect(error) if is_consequence(failed, of_several=of_several) else self.report(error)

    async def _watch(self, link: ActorLink) -> None:
        death = await link.handle.wait_dead()
        if self._is_current(link):
            process = link.info.process
            self.hearts.unwatch(process)
            step = self.step_of(process)
            error = died_error(link.info, death, step, self._instruction_of(link, step))
            self.suspect(error) if is_echo(link.info, death) else self.report(error, process)

    def _on_lost(self, link: ActorLink, error: Exception | None) -> None:
        """The connection ended; if the process did as well, its death says more."""
        if self._is_current(link):
            self.suspect(
                lost_error(link.info, error, link.handle.output_tail(), self.step_of(link.info.process))
            )

    def _instruction_of(self, link: ActorLink, step: int | None) -> str | None:
        """Text of the instruction that a dead actor was at in `step`, if it left word."""
        at = link.handle.progress()
        return self._programs.instruction_at(link.info.id, at) if at is not None and at.step == step else None
