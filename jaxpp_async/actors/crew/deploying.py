"""deploying: one program's parts onto their actors: loaded, compiled, and linked where NCCL carries its transfers.

In: programs and serialized executables. Out: what the actors say of them. Decides nothing about failures: whoever asks
gets them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from jaxpp_async.actors.crew.bringup import all_of
from jaxpp_async.actors.crew.crew import Crew
from jaxpp_async.actors.crew.linking import Linking
from jaxpp_async.actors.crew.outbox import Outbox, Post
from jaxpp_async.actors.crew.programs import Programs
from jaxpp_async.actors.crew.rpc import Call
from jaxpp_async.actors.messages import Loaded
from jaxpp_async.errors import ActorError, MeshError
from jaxpp_async.program import ActorId, ActorProgram, ProcessId


class Deploying:
    """Of the programs of one mesh.

    Args:
        crew, outbox, programs, linking: the mesh's.
        paused: while this is entered no step is stuck, for actors compile.
        tell: told what goes on, a line at a time.
    """

    def __init__(
        self,
        crew: Crew,
        outbox: Outbox,
        programs: Programs,
        linking: Linking,
        *,
        paused: Callable[[], AbstractContextManager[None]],
        tell: Callable[[str], None],
    ):
        self._crew, self._outbox, self._programs, self._linking = crew, outbox, programs, linking
        self._paused, self._tell = paused, tell

    async def deploy(
        self,
        program_id: int,
        parts: Mapping[ActorId, ActorProgram],
        executables: Mapping[ActorId, Mapping[int, str]],
        blobs: Mapping[str, bytes],
        names: Mapping[int, str],
    ) -> dict[ActorId, Loaded]:
        """See `Controller.load`. A program that fails, or that nobody waits for any more, is forgotten."""
        self._programs.add(program_id, parts, executables, blobs, names)
        self._tell(f"compiling on {len(parts)} actor{'s' if len(parts) != 1 else ''}")
        processes = self._crew.processes
        try:
            with self._paused():
                loading = {process: self._load(program_id, process) for process in processes.of_all(parts)}
                loaded = await all_of(loading, "load")
                await self._linking.link(program_id)
        except BaseException:  # also a cancellation: nobody will ask for it
            self._programs.remove(program_id)
            raise
        self._programs.note_loaded(program_id)
        return {actor: loaded[processes.process(actor, 0)] for actor in sorted(parts)}

    async def _load(self, program_id: int, process: ProcessId) -> Loaded:
        known = self._crew.links[process].known_blobs
        actor = self._crew.processes.actor_of(process)
        message = self._programs.load_message(self._outbox.number(), program_id, actor, known)
        call = Call(Loaded)
        try:
            self._outbox.post(Post(process, message, call))
            await self._outbox.drain(process)
            return await call.future
        except (ActorError, MeshError):
            known -= set(message.blobs)  # what the actor has of them, if anything, is unknown: send them again
            raise
