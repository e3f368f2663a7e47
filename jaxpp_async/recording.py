"""recording: a step that has been sent in; its timeline out, once it has finished. Keeps what that takes, and reads it
when somebody asks: a step that nobody asks about costs a few references here.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpp_async.actors.controller import Controller
from jaxpp_async.actors.crew.step_handle import StepHandle
from jaxpp_async.actors.messages import step_number, step_text
from jaxpp_async.actors.processes.actor_info import ActorInfo
from jaxpp_async.actors.watching.clocks import Clock, Readings
from jaxpp_async.errors import MeshError
from jaxpp_async.program import ActorId, ActorProgram
from jaxpp_async.timeline import Recorded, Timeline, make_timeline


class Recording:
    """A step under way, or finished.

    Args:
        name: the step function's.
        handle: knows what the actors answered, and when.
        programs: what they ran.
        controller: knows who the actors are, and their clocks.
    """

    __slots__ = ("_controller", "_processes", "handle", "name", "programs")

    def __init__(self, name: str, handle: StepHandle, programs: Sequence[ActorProgram], controller: Controller):
        self.name, self.handle, self.programs = name, handle, programs
        self._controller: Controller | None = controller
        self._processes: dict[ActorId, tuple[ActorInfo, Clock, Readings]] = {}
        handle.when_done(self._keep)

    @property
    def what(self) -> str:
        """Which step it is, such as `"step 7 ('train_step')"`."""
        return f"{step_text(self.handle.step)} ({self.name!r})"

    def timeline(self) -> Timeline:
        """What each actor did, and when.

        Raises:
            MeshError: the step has not finished, or failed.
        """
        if not self.handle.done:
            raise MeshError("a step has a timeline once it has finished; await it first")
        if (error := self.handle.error) is not None:
            raise MeshError(f"{self.what} failed, so it has no timeline: {first_line(error)}")
        by_actor = {p.actor: p for p in self.programs}
        recorded = {a: self._recorded(by_actor[a], stats.stamps) for a, stats in self.handle.result().items()}
        return make_timeline(step_number(self.handle.step), self.name, self.handle.sent_s, recorded)

    def _keep(self) -> None:
        """The step has ended: keep who ran it. After a restart its actors may be other processes, with other clocks."""
        controller, self._controller = self._controller, None
        if controller is None or self.handle.error is not None:
            return
        for actor in self.handle.heard_s:
            clock = controller.clock(actor)
            first = controller.processes.process(actor, 0)
            self._processes[actor] = controller.outbox.info(first), clock, clock.readings

    def _recorded(self, program: ActorProgram, stamps: bytes) -> Recorded:
        info, clock, readings = self._processes[program.actor]
        heard_s = self.handle.heard_s[program.actor]
        offset = clock.offset(heard_s, readings)
        return Recorded(
            program=program,
            stamps=stamps,
            heard_s=heard_s,
            offset_s=offset.offset_s if offset is not None else 0.0,
            error_s=offset.error_s if offset is not None else None,
            host=info.host,
            pid=info.pid,
        )


def first_line(error: Exception) -> str:
    """The first line of what an error says, or its type."""
    return next(iter(str(error).splitlines()), type(error).__name__)
