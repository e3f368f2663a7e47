"""recording: a step that has been sent in; its timeline out, once it has finished. Keeps what that takes, and reads it
when somebody asks: a step that nobody asks about costs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxpp_async.actors.controller import Controller
from jaxpp_async.actors.rpc import StepHandle
from jaxpp_async.errors import MeshError
from jaxpp_async.program import ActorProgram
from jaxpp_async.timeline import Recorded, Timeline, make_timeline


@dataclass(frozen=True, slots=True)
class Recording:
    """A step under way, or finished.

    Args:
        name: the step function's.
        handle: knows what the actors answered, and when.
        programs: what they ran.
        controller: gives the mesh's controller, which knows their clocks.
    """

    name: str
    handle: StepHandle
    programs: Sequence[ActorProgram]
    controller: Callable[[], Controller]

    def timeline(self) -> Timeline:
        """What each actor did, and when.

        Raises:
            MeshError: the step has not finished, or failed.
        """
        if not self.handle.done or self.handle.error is not None:
            raise MeshError("a step has a timeline once it has finished; await it first")
        by_actor = {p.actor: p for p in self.programs}
        recorded = {a: self._recorded(by_actor[a], stats.stamps) for a, stats in self.handle.result().items()}
        return make_timeline(self.handle.step, self.name, self.handle.sent_s, recorded)

    def _recorded(self, program: ActorProgram, stamps: bytes) -> Recorded:
        controller, actor = self.controller(), program.actor
        info = controller.actors[actor]
        offset = controller.clock_offset(actor, self.handle.heard_s[actor])
        return Recorded(
            program=program,
            stamps=stamps,
            heard_s=self.handle.heard_s[actor],
            offset_s=offset.offset_s if offset is not None else 0.0,
            error_s=offset.error_s if offset is not None else None,
            host=info.host,
            pid=info.pid,
        )
