"""host_requests: the controller's values to actors, and theirs to it. Numpy arrays in and out, each over the frames or
the data plane. No jax, and no word on whether the mesh may be asked at all: that is the controller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpp_async.actors.crew.bringup import all_of
from jaxpp_async.actors.crew.crew import Crew
from jaxpp_async.actors.crew.frees import FreeList
from jaxpp_async.actors.crew.host_data import HostValue, Sending
from jaxpp_async.actors.crew.outbox import Outbox, Post
from jaxpp_async.actors.crew.rpc import Call
from jaxpp_async.actors.crew.step_handle import StepHandle
from jaxpp_async.actors.messages import ArrayId, Done, Step, Store
from jaxpp_async.actors.values.scattering import Gathering
from jaxpp_async.errors import MeshError
from jaxpp_async.program import ActorId, Aval, ProcessId


class HostRequests:
    """Requests that carry host values, and those that free arrays, of one mesh.

    Args:
        crew: the actors, and the controller's end of the data plane. outbox: takes the requests.
        frees: arrays to free; they go with the next request.
    """

    def __init__(self, crew: Crew, outbox: Outbox, frees: FreeList):
        self._crew, self._outbox, self._frees = crew, outbox, frees

    async def put(self, values: Mapping[ActorId, Sequence[HostValue]]) -> None:
        """Keep host values on actors, outside a step. Returns when they are there.

        Raises:
            ActorError: an actor or the mesh failed.
        """
        frees, calls, posts = self._frees.take(), dict[ProcessId, Call](), list[Post]()
        for actor in sorted(set(values) | set(frees)):
            small, large = self._crew.plane.prepare(actor, values.get(actor, ()))
            for process in self._crew.processes.of(actor):
                calls[process] = Call(Done)
                message = Store(self._outbox.number(), small, frees.get(actor, ()))
                posts.append(self.with_values(process, message, calls[process], large.get(process, ()), []))
        try:
            self._outbox.post(*posts)
        except MeshError:  # one of them cannot be encoded: nothing was sent
            self._frees.give_back(frees)
            raise

        async def stored(process: ProcessId) -> None:
            await self._outbox.drain(process)
            await calls[process].future

        await all_of({process: stored(process) for process in calls}, "put")

    async def fetch(self, wanted: Sequence[tuple[ActorId, ArrayId, Aval]]) -> list[np.ndarray[Any, Any]]:
        """Bring whole arrays to the controller.

        Args:
            wanted: actor, array and its aval, one an array; keys come as their `uint32` data.

        Raises:
            RemoteError: an actor does not have the array; the mesh goes on. ActorError: the mesh failed.
        """
        self.send_frees()
        gathering = Gathering(wanted, self._crew.scattering)
        fetches = {process: self._fetch_one(process, asked) for process, asked in gathering.asked.items()}
        return gathering.arrays(await all_of(fetches, "fetch"))

    def with_values(
        self,
        process: ProcessId,
        message: Step | Store,
        waiter: Call | StepHandle,
        large: Sequence[Sending],
        sends: list[asyncio.Future[None]],
    ) -> Post:
        """A request to be posted with the host values that take the data plane; `sends` gets their transfers."""
        if not large:
            return Post(process, message, waiter)
        size_bytes = sum(data.nbytes for _, data in large)
        return Post(process, message, waiter, lambda: sends.extend(self._crew.plane.send(process, large)), size_bytes)

    def send_frees(self) -> None:
        """Free what is to be freed, now."""
        for actor, array_ids in self._frees.take().items():
            for process in self._crew.processes.of(actor):
                message = Store(self._outbox.number(), (), array_ids)
                self._outbox.post(Post(process, message, Call(Done, awaited=False)))

    def _fetch_one(
        self, process: ProcessId, wanted: Sequence[tuple[ArrayId, Aval]]
    ) -> Coroutine[Any, Any, list[np.ndarray[Any, Any]]]:
        """The request leaves with the call, ahead of any later step that is given the arrays."""
        message, fetching = self._crew.plane.fetch(self._outbox.number(), process, wanted)
        self._outbox.post(Post(process, message, fetching, fetching.start))

        async def fetched() -> list[np.ndarray[Any, Any]]:
            await self._outbox.drain(process)
            return await fetching.future

        return fetched()
