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
from jaxpp_async.actors.crew.outbox import Outbox
from jaxpp_async.actors.crew.rpc import Call
from jaxpp_async.actors.crew.step_handle import StepHandle
from jaxpp_async.actors.messages import ArrayId, Done, Step, Store
from jaxpp_async.actors.values.scattering import Gathering
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
        frees = self._frees.take()

        async def put_one(actor: ActorId) -> None:
            small, large = self._crew.plane.prepare(actor, values.get(actor, ()))
            calls: list[Call] = []
            for process in self._crew.processes.of(actor):
                calls.append(call := Call(Done))
                message = Store(self._outbox.number(), small, frees.get(actor, ()))
                self.post_with(process, message, call, large.get(process, ()), [])
            for process, call in zip(self._crew.processes.of(actor), calls, strict=True):
                await self._outbox.drain(process)
                await call.future

        actors = sorted(set(values) | set(frees))
        await all_of({actor: put_one(actor) for actor in actors}, "put")

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

    def post_with(
        self,
        process: ProcessId,
        message: Step | Store,
        waiter: Call | StepHandle,
        large: Sequence[Sending],
        sends: list[asyncio.Future[None]],
    ) -> None:
        """Post a request and the host values that take the data plane; `sends` gets their transfers."""
        transfers = (lambda: sends.extend(self._crew.plane.send(process, large))) if large else None
        self._outbox.post(process, message, waiter, transfers, sum(data.nbytes for _, data in large))

    def send_frees(self) -> None:
        """Free what is to be freed, now."""
        for actor, array_ids in self._frees.take().items():
            for process in self._crew.processes.of(actor):
                self._outbox.post(process, Store(self._outbox.number(), (), array_ids), Call(Done, awaited=False))

    def _fetch_one(
        self, process: ProcessId, wanted: Sequence[tuple[ArrayId, Aval]]
    ) -> Coroutine[Any, Any, list[np.ndarray[Any, Any]]]:
        """The request leaves with the call, ahead of any later step that is given the arrays."""
        message, fetching = self._crew.plane.fetch(self._outbox.number(), process, wanted)
        self._outbox.post(process, message, fetching, fetching.start)

        async def fetched() -> list[np.ndarray[Any, Any]]:
            await self._outbox.drain(process)
            return await fetching.future

        return fetched()
