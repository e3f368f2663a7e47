"""Direct tests of copies of arrays in host memory, and of the tags under which they travel."""

from __future__ import annotations

import numpy as np

from jaxpp_async.layout.state_replicas import StateReplica
from jaxpp_async.program.instructions import Aval
from jaxpp_async.protocol.messages import ReplicaArray


def replica(num_shards: int) -> StateReplica:
    shards = tuple(np.zeros(8, np.uint8) for _ in range(num_shards))
    return StateReplica((ReplicaArray(5, Aval((2,), "float32"), (8,) * num_shards),), (shards,))


def tags(num_shards: int, epoch: int, generation: int) -> list[int]:
    return [tag for _, tag in replica(num_shards).shards_with_tags(epoch, generation)]


def test_what_is_left_of_one_replica_is_never_taken_for_the_next():
    """A move may have failed at one end only: the bytes of the other end wait until the next epoch."""
    seen: set[int] = set()
    for epoch, generation in ((0, 0), (0, 1), (0, 2), (1, 2), (1, 1000)):
        new = tags(5, epoch, generation)
        assert len(set(new)) == 5 and not seen & set(new)
        seen.update(new)


def test_an_empty_shard_does_not_travel():
    empty = StateReplica((ReplicaArray(5, Aval((0,), "float32"), (0,)),), ((np.zeros(0, np.uint8),),))
    assert empty.shards_with_tags(0, 0) == []
