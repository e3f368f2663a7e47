"""Give each transfer of the fuzzer memory that shares no page with any other.

Two transports of one process whose transfers are in the same region of UCX's registration cache hold each
other's aborts up (DESIGN.md, 9). Between processes, as actors are, there is nothing of that: so what is tried
here has memory of its own for each transfer, or for each two peers.
"""

from __future__ import annotations

import mmap
from collections import defaultdict

import numpy as np

from jaxpp_async.transport.shared_memory import SharedBlock

_MOST_KEPT = 4
"""Buffers of one kind that wait for their next use. More are let go of, as actors let go of theirs."""


def apart(size_bytes: int) -> np.ndarray:
    """Memory on pages of its own, as flat uint8."""
    return np.frombuffer(mmap.mmap(-1, max(size_bytes, 1)), np.uint8)[:size_bytes]


class Buffer:
    """Memory for one transfer.

    Attributes:
        array: flat uint8. memory: what a transport is given for it: the array, or the block that it is in.
    """

    def __init__(self, size_bytes: int, in_block: bool):
        block = SharedBlock(size_bytes) if in_block and size_bytes else None
        self.array: np.ndarray = apart(size_bytes) if block is None else block.array
        self.memory: np.ndarray | SharedBlock = self.array if block is None else block

    @property
    def kind(self) -> tuple[int, bool]:
        """Size and whether it is a block: buffers of one kind serve alike."""
        return self.array.size, isinstance(self.memory, SharedBlock)

    @property
    def was_offered(self) -> bool:
        """Whether its sender wrote into it without asking."""
        return isinstance(self.memory, SharedBlock) and self.memory.mark.value != 0


class Pool:
    """Buffers that are used again, as an actor's are: registered with UCX, mapped by senders, retired by
    aborts."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple[int, bool], list[Buffer]] = defaultdict(list)

    def take(self, size_bytes: int, in_block: bool) -> Buffer:
        """A buffer that nobody else has."""
        free = self._free[size_bytes, in_block and size_bytes > 0]
        return free.pop() if free else Buffer(size_bytes, in_block)

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back; no transport has it any more."""
        free = self._free[buffer.kind]
        if len(free) < _MOST_KEPT:
            free.append(buffer)
