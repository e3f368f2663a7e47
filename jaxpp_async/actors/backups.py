"""backups: when copies of all actors' arrays are taken, who holds them, and the way back to them. For the controller.

A copy is whole once every actor has its own, its holder has it too, and nothing from before it is under way: only then
the one before it is dropped, and the requests before it forgotten. Restarts processes, and replays, not itself.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxpp_async.actors.bringup import all_of
from jaxpp_async.actors.copies import Shelf, holders
from jaxpp_async.actors.crew import Crew
from jaxpp_async.actors.messages import Done, Forget, Hold, Keep, Kept, KeptArray, Lend, Request, Rollback
from jaxpp_async.actors.outbox import Outbox
from jaxpp_async.actors.owned_tasks import OwnedTasks
from jaxpp_async.actors.rpc import Call
from jaxpp_async.errors import ActorDiedError, RemoteError
from jaxpp_async.program import CONTROLLER, ActorId

_LOG = logging.getLogger("jaxpp_async")

_ATTEMPTS = 10

MAX_REMEMBERED_BYTES = 1 << 30
"""With this much host data in remembered requests a copy is taken before it is due."""


class Backups:
    """Copies of the state of one mesh, in the memory of its actors.

    Args:
        every: how many steps lie between two copies.
    """

    def __init__(self, crew: Crew, outbox: Outbox, *, every: int):
        self._crew, self._outbox, self._every = crew, outbox, every
        self._since = every - 1  # the first one soon: until then all that was ever put is remembered
        self._generations = itertools.count()
        self._generation: int | None = None
        self._contents: Mapping[ActorId, tuple[KeptArray, ...]] = {}
        self._shelf = Shelf()
        self._tasks = OwnedTasks()
        self._task: asyncio.Task[None] | None = None

    def note_step(self) -> None:
        """A step was just sent. Takes a copy behind it if one is due."""
        self._since += 1
        is_due = self._since >= self._every or self._outbox.size_bytes > MAX_REMEMBERED_BYTES
        if is_due and self._task is None and not self._outbox.has_snapshot:
            self.take()

    def take(self) -> asyncio.Task[None]:
        """Take a copy of everything as it is behind the requests made so far, while later ones go on.

        Returns:
            Done when the copy is whole, or could not be taken.
        """
        self._since = 0
        generation, mark = next(self._generations), self._outbox.mark
        asked = {actor: self._ask(actor, Keep(self._outbox.number(), generation), Kept) for actor in self._crew.links}
        work = self._unless_it_fails(generation, mark, asked)
        task = self._task = self._tasks.start(f"copy {generation} of the state", work)
        task.add_done_callback(self._ended)
        return task

    async def secure(self) -> None:
        """Wait until a copy has what was read from files: from then on they may go."""
        for _ in range(_ATTEMPTS):
            await self._outbox.wait_open()
            if not self._outbox.needs_files or self._outbox.has_snapshot:
                return
            await asyncio.wait([self._task or self.take()])

    async def stop(self) -> None:
        """Give up the copy that is being taken, if there is one."""
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def roll_back(self, lost: Collection[ActorId]) -> None:
        """Have all actors hold what they held at the last whole copy.

        Args:
            lost: actors whose successors have nothing.

        Raises:
            ActorDiedError: an actor was lost together with the holder of its copy.
        """
        generation, everyone = self._generation, sorted(self._crew.links)
        if generation is not None:
            await self._ask_each(everyone, lambda: Forget(self._outbox.number(), generation))
            await all_of({actor: self._bring_back(actor, generation, lost) for actor in sorted(lost)}, "bring back")
            # What the lost ones held for others; until it is there again, one more loss would be one too many.
            orphans = [actor for actor in everyone if self._holder_of(actor) in lost]
            contents = self._contents
            await all_of({a: self._hand_over(a, generation, contents[a]) for a in orphans}, "hand over copies")
        await self._ask_each(everyone, lambda: Rollback(self._outbox.number(), generation))

    async def aclose(self) -> None:
        """End whatever is under way."""
        await self._tasks.aclose()

    # ------------------------------------------------------------ taking

    async def _unless_it_fails(self, generation: int, mark: int, asked: Mapping[ActorId, asyncio.Future[Any]]) -> None:
        try:
            await self._finish(generation, mark, asked)
        except RemoteError as error:  # such as too little memory; the copy before it still stands
            _LOG.warning("no copy of the state could be taken, the next is tried in %d steps: %s", self._every, error)

    async def _finish(self, generation: int, mark: int, asked: Mapping[ActorId, asyncio.Future[Any]]) -> None:
        kept = {actor: (await reply).arrays for actor, reply in asked.items()}
        copies = {actor: self._hand_over(actor, generation, arrays) for actor, arrays in kept.items()}
        await all_of(copies, "hand over copies")
        for waiter in self._outbox.unanswered(mark):
            await asyncio.wait([waiter.future])
        self._generation, self._contents = generation, kept
        self._outbox.forget_before(mark)
        self._shelf.forget(generation)
        await self._ask_each(sorted(kept), lambda: Forget(self._outbox.number(), generation))
        _LOG.debug("copy %d of the state is whole", generation)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None

    async def _hand_over(self, of: ActorId, generation: int, arrays: tuple[KeptArray, ...]) -> None:
        """From an actor to its holder."""
        await self._carry(of, generation, arrays, of, self._holder_of(of))

    async def _bring_back(self, actor: ActorId, generation: int, lost: Collection[ActorId]) -> None:
        """From the holder to the actor's successor."""
        holder = self._holder_of(actor)
        if holder in lost:
            info = self._crew.links[actor].info
            raise ActorDiedError(
                f"actors {actor} and {holder} were lost together, and with them both copies of actor {actor}'s arrays; "
                "start again from a checkpoint (mesh.restore)",
                actor=actor,
                host=info.host,
            )
        await self._carry(actor, generation, self._contents[actor], holder, actor)

    async def _carry(
        self, of: ActorId, generation: int, arrays: tuple[KeptArray, ...], source: ActorId, to: ActorId
    ) -> None:
        number, epoch = self._outbox.number, self._crew.epoch
        hold, lend = Hold(number(), epoch, generation, of, source, arrays), Lend(number(), epoch, generation, of, to)
        await all_of({to: self._hold(to, hold), source: self._lend(source, lend)}, f"carry the copy of actor {of}")

    async def _hold(self, actor: ActorId, message: Hold) -> None:
        if actor == CONTROLLER:
            await self._shelf.hold(self._crew.plane.transport, message)
        else:
            await self._ask(actor, message, Done)

    async def _lend(self, actor: ActorId, message: Lend) -> None:
        if actor == CONTROLLER:
            await self._shelf.lend(self._crew.plane.transport, message)
        else:
            await self._ask(actor, message, Done)

    def _holder_of(self, actor: ActorId) -> ActorId:
        infos = self._crew.infos
        return holders([info.host for info in infos])[actor] if len(infos) > 1 else CONTROLLER

    # ------------------------------------------------------------ asking

    def _ask(self, actor: ActorId, message: Request, expected: type) -> asyncio.Future[Any]:
        """Past the outbox: none of this is to be made again."""
        call = Call(expected, awaited=False)
        self._crew.links[actor].request(message, call)
        return call.future

    async def _ask_each(self, actors: Collection[ActorId], make: Callable[[], Request]) -> None:
        replies = [self._ask(actor, make(), Done) for actor in actors]
        for reply in replies:
            await reply
