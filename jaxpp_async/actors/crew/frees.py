"""frees: arrays that nobody needs any more, collected from any thread until the next request to their actor."""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque

from jaxpp_async.actors.messages import ArrayId
from jaxpp_async.program import ActorId


class FreeList:
    """Arrays to free.

    `add` takes no lock: garbage collection may call it on any thread at any point, also inside `take`.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[ActorId, ArrayId]] = deque()

    def add(self, actor: ActorId, array_id: ArrayId) -> None:
        """Free this array sometime. Any thread may call this."""
        self._pending.append((actor, array_id))

    def take(self) -> dict[ActorId, tuple[ArrayId, ...]]:
        """All that was added, by actor; the caller sees to it."""
        if not self._pending:
            return {}
        frees: dict[ActorId, list[ArrayId]] = defaultdict(list)
        with contextlib.suppress(IndexError):  # empty
            while True:
                actor, array_id = self._pending.popleft()
                frees[actor].append(array_id)
        return {actor: tuple(array_ids) for actor, array_ids in frees.items()}

    def give_back(self, frees: dict[ActorId, tuple[ArrayId, ...]]) -> None:
        """What `take` gave and no request took along."""
        for actor, array_ids in frees.items():
            self._pending.extend((actor, array_id) for array_id in array_ids)
