"""Remember the requests of a mesh, and decide which of them a restart has to make again.

The arrays of an actor follow from the requests that it was sent, in their order. In a restart every actor
returns to a replica (a copy of its arrays) and then gets two kinds of the requests that were made after that
replica: all that change which arrays an actor has, answered or not, and all that have no answer yet. The
rules of each request type (`protocol.messages.Rules`) say what it is. The code is pure: it sends nothing and
waits for nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Protocol

from jaxpp_async.protocol.messages import Request

PRUNE_AFTER = 256
"""The number of remembered requests above which those that no restart needs are forgotten."""


class RememberedRequest(Protocol):
    """A request to one process, as a `RequestHistory` sees it.

    Attributes:
        process: the number of the process.
        message: the request.
        serial: the request's place in the order of all requests; the history sets it.
        size_bytes: the bytes of host memory that remembering this request keeps alive.
    """

    process: int
    message: Request
    serial: int
    size_bytes: int

    @property
    def is_answered(self) -> bool:
        """Whether the request has ended: it was answered, or its caller has been given an error."""
        ...

    @property
    def is_refused(self) -> bool:
        """Whether the request has ended because it failed on the actor, so that it had no effect."""
        ...


class RequestHistory:
    """The requests to the actors of one mesh that a restart may have to make again, in their order.

    Attributes:
        size_bytes: the bytes of host memory that the remembered requests keep alive.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self._serials = itertools.count()
        self._requests: list[RememberedRequest] = []
        self._prune_at = PRUNE_AFTER

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: RememberedRequest) -> None:
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

    def unanswered(self, mark: int) -> list[RememberedRequest]:
        """Return the requests from before a mark that have no answer yet."""
        return [request for request in self._requests if request.serial < mark and not request.is_answered]

    def needed(self) -> list[RememberedRequest]:
        """Return the requests that a restart has to make again, in their order.

        A request whose effect has been ended by another one (`Rules.ended_by`) is left out. If it has no
        answer yet, it is made again all the same, and so is the request that ends its effect.
        """
        enders: dict[tuple[int, type[Request], object], RememberedRequest] = {}
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

    def take_again(self) -> list[RememberedRequest]:
        """Return the requests that a restart makes again now, and remember them as if they were new.

        They come after every mark so far, since no replica contains their effects any more.
        """
        self._keep(self.needed())
        for request in self._requests:
            request.serial = next(self._serials)
        return list(self._requests)

    def clear(self) -> None:
        """Forget all requests, because the mesh has ended."""
        self._keep([])

    def _keep(self, requests: Iterable[RememberedRequest]) -> None:
        self._requests = list(requests)
        self.size_bytes = sum(request.size_bytes for request in self._requests)
