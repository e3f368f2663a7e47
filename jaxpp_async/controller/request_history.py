"""Remember the requests of a mesh, and decide which of them a restart has to make again.

The arrays of an actor follow from the requests that it was sent, in their order. In a restart every actor
returns to a replica (a copy of its arrays) and then gets two kinds of the requests that were made after that
replica: all that change which arrays an actor has, answered or not, and all that have no answer yet. The
rules of each request type (`protocol.messages.Rules`) say what it is. The code is pure: it sends nothing and
waits for nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from jaxpp_async.program.instructions import ProcessId
from jaxpp_async.protocol.messages import Request

if TYPE_CHECKING:
    from jaxpp_async.controller.requests import Waiter

PRUNE_AFTER = 256
"""The number of remembered requests above which those that no restart needs are forgotten."""


StartTransfers: TypeAlias = Callable[[], None]
"""A function that starts the data transfers that go with a request. Their tags have the mesh's epoch at the
time of the call.
"""


@dataclass(slots=True, eq=False)
class OutgoingRequest:
    """A request to one process, with all that is needed to send it now, and to send it again in a restart.

    Args:
        process: the process.
        message: the request. When a step is sent again, it gets the present epoch.
        waiter: receives the reply.
        transfers: starts the data transfers of the request; called each time that the request has been sent.
            None: there are no transfers.
        size_bytes: the size in bytes of the host arrays that this object keeps in memory, since `transfers`
            refers to them.
        serial: the request's place in the order of all requests, which its `RequestHistory` sets.
    """

    process: ProcessId
    message: Request
    waiter: Waiter
    transfers: StartTransfers | None = None
    size_bytes: int = 0
    serial: int = -1

    @property
    def is_answered(self) -> bool:
        """Whether the request has ended: it was answered, or its caller has been given an error."""
        return self.waiter.done

    @property
    def is_refused(self) -> bool:
        """Whether the request has ended because it failed on the actor, so that it had no effect."""
        return self.waiter.is_refused


class RequestHistory:
    """The requests to the actors of one mesh that a restart may have to make again, in their order.

    Attributes:
        size_bytes: the bytes of host memory that the remembered requests keep alive.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self._serials = itertools.count()
        self._requests: list[OutgoingRequest] = []
        self._prune_at = PRUNE_AFTER

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: OutgoingRequest) -> None:
        """Remember a request, as the last one."""
        request.serial = next(self._serials)
        self._requests.append(request)
        self.size_bytes += request.size_bytes
        # Requests that no restart needs use memory: for example, a fetch keeps the fetched arrays alive.
        if len(self._requests) > self._prune_at:
            self._keep(self.needed())
            self._prune_at = 2 * len(self._requests) + PRUNE_AFTER

    def new_mark(self) -> int:
        """Return a number that separates the requests made so far from later ones."""
        return next(self._serials)

    def unanswered(self, mark: int) -> list[OutgoingRequest]:
        """Return the requests from before a mark that have no answer yet."""
        return [request for request in self._requests if request.serial < mark and not request.is_answered]

    def needed(self) -> list[OutgoingRequest]:
        """Return the requests that a restart has to make again, in their order.

        A request whose effect has been ended by another one (`Rules.ended_by`) is left out. If it has no
        answer yet, it is made again all the same, and so is the request that ends its effect.
        """
        enders: dict[tuple[int, type[Request], object], OutgoingRequest] = {}
        needed: set[int] = set()
        for request in reversed(self._requests):
            message, rules = request.message, request.message.rules
            ender = enders.get((request.process, rules.ended_by, message.scope)) if rules.ended_by else None
            if not request.is_answered:
                needed.add(request.serial)
                if ender is not None:
                    needed.add(ender.serial)
            else:
                enders[request.process, type(message), message.scope] = request
                if rules.changes_state and not request.is_refused and ender is None:
                    needed.add(request.serial)
        return [request for request in self._requests if request.serial in needed]

    @property
    def blocks_replicas(self) -> bool:
        """Whether a request has an effect that no replica contains, so that none may be taken.

        During a save, for example, the actors keep arrays that a replica would not contain.
        """
        return any(request.message.rules.ended_by is not None for request in self.needed())

    @property
    def needs_files(self) -> bool:
        """Whether a restart would read files again, so that the files must not be deleted yet."""
        return any(request.message.rules.reads_files for request in self.needed())

    def forget_before(self, mark: int) -> None:
        """Forget all requests from before a mark, because a replica as of that mark is whole."""
        self._keep([request for request in self.needed() if request.serial > mark])

    def take_again(self) -> list[OutgoingRequest]:
        """Return the requests that a restart makes again now, and remember them as if they were new.

        The requests come after every mark so far, since no replica contains their effects any more.
        """
        self._keep(self.needed())
        for request in self._requests:
            request.serial = next(self._serials)
        return list(self._requests)

    def clear(self) -> None:
        """Forget all requests, because the mesh has ended."""
        self._keep([])

    def _keep(self, requests: Iterable[OutgoingRequest]) -> None:
        self._requests = list(requests)
        self.size_bytes = sum(request.size_bytes for request in self._requests)
