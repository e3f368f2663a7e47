"""A library that stands in for NCCL: ranks are threads or transports of one process, memory is the host's.

It keeps NCCL's rules and takes down whoever breaks them (`FakeNccl.violations`): an id is joined once by each
of two ranks; what one end is given runs in that order, sends and receives alike; the n-th send meets the n-th
receive, and they have one size; nothing is called while a call is in progress, and nothing after `abort`.
Where NCCL would look for data for ever, this hangs too: a peer that is gone, a mismatch, both ends receiving.
Only `abort` ends that.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from jaxpp_async.transport.base import Memory, memory_of
from jaxpp_async.transport.nccl.library import NcclFailure


@dataclass(eq=False)
class _Operation:
    """One kernel: `sends` or receives; `done` is set when it has ended, well or by an abort."""

    sends: bool
    memory: Memory
    done: threading.Event = field(default_factory=threading.Event)


class FakeMark:
    def __init__(self, last: _Operation | None, channel: FakeChannel):
        self._last, self._channel = last, channel

    def wait(self) -> None:
        if self._last is not None:
            self._last.done.wait()
        if self._channel.device_lost:
            raise NcclFailure("the device is lost (injected)")


class FakeChannel:
    """One end of a communicator.

    Attributes:
        error: what `is_ready` raises, as NCCL tells of a peer that a network lost.
        device_lost: marks fail, as they do once a CUDA context has failed.
    """

    def __init__(self, network: FakeNccl, communicator: _Communicator, rank: int):
        self._network, self._communicator, self.rank = network, communicator, rank
        self.operations: deque[_Operation] = deque()
        self.last: _Operation | None = None
        self.is_aborted = False
        self.error: str | None = None
        self.device_lost = False
        self._busy_polls = 0

    def is_ready(self) -> bool:
        with self._network.lock:
            self._check_alive("is_ready")
            if self.error is not None:
                raise NcclFailure(self.error)
            if len(self._communicator.channels) < 2:
                return False
            self._busy_polls -= self._busy_polls > 0
            return self._busy_polls == 0

    def send(self, memory: Memory) -> None:
        self._start(True, memory)

    def recv(self, memory: Memory) -> None:
        self._start(False, memory)

    def mark(self) -> FakeMark:
        with self._network.lock:
            self._check_alive("mark")
            self._check_idle("mark")
            return FakeMark(self.last, self)

    def abort(self) -> None:
        self._network.abort_may_go_on.wait()
        with self._network.lock:
            self._check_alive("abort")
            self.is_aborted = True
            self._network.num_aborted += 1
            operations, self.operations = list(self.operations), deque()
            for operation in operations:
                operation.done.set()

    def _start(self, sends: bool, memory: Memory) -> None:
        with self._network.lock:
            self._check_alive("send" if sends else "recv")
            self._check_idle("send" if sends else "recv")
            self.last = _Operation(sends, memory)
            self._busy_polls = self._network.busy_polls
            if memory.size_bytes == 0:
                self.last.done.set()  # NCCL launches nothing for it
                return
            self.operations.append(self.last)
            self._communicator.run()

    def _check_alive(self, call: str) -> None:
        if self.is_aborted:
            self._network.violate(f"{call} after abort")

    def _check_idle(self, call: str) -> None:
        if self._busy_polls or len(self._communicator.channels) < 2:
            self._network.violate(f"{call} while a call is in progress")


class _Communicator:
    def __init__(self, network: FakeNccl):
        self.network = network
        self.channels: dict[int, FakeChannel] = {}

    def run(self) -> None:
        """Run what is first at both ends, as long as that belongs together."""
        if len(self.channels) < 2 or self.network.stalled:
            return
        one, other = self.channels.values()
        while one.operations and other.operations and not (one.is_aborted or other.is_aborted):
            ours, theirs = one.operations[0], other.operations[0]
            if ours.sends == theirs.sends:
                return  # each waits for the other to do the opposite
            sent, got = (ours, theirs) if ours.sends else (theirs, ours)
            if sent.memory.size_bytes != got.memory.size_bytes:
                self.network.violate(
                    f"a send of {sent.memory.size_bytes} bytes meets {got.memory.size_bytes}"
                )
                return
            ctypes.memmove(got.memory.address, sent.memory.address, got.memory.size_bytes)
            self.network.num_messages += 1
            for channel in (one, other):
                channel.operations.popleft().done.set()


class FakeNccl:
    """The medium, and the library of every process on it (`NcclLibrary`).

    Attributes:
        busy_polls: after each send and receive, how many times NCCL says that it is still busy.
        stalled: nothing moves, as when links are slow.
        abort_may_go_on: cleared, aborts hang.
        violations: rules that were broken.
        num_messages, num_aborted, num_joined: what there has been.
        made: every communicator, by id.
    """

    def __init__(self, *, version: str = "2.32.3", busy_polls: int = 0):
        self.version, self.busy_polls, self.stalled = version, busy_polls, False
        self.lock = threading.RLock()
        self.abort_may_go_on = threading.Event()
        self.abort_may_go_on.set()
        self.violations: list[str] = []
        self.num_messages = self.num_aborted = self.num_joined = 0
        self.made: dict[bytes, _Communicator] = {}
        self._ids = itertools.count()

    def violate(self, what: str) -> None:
        self.violations.append(what)

    def make_id(self) -> bytes:
        with self.lock:
            unique_id = b"%128d" % next(self._ids)
            self.made[unique_id] = _Communicator(self)
            return unique_id

    def join(self, unique_id: bytes, rank: int, device: int) -> FakeChannel:
        with self.lock:
            communicator = self.made[unique_id]
            if rank in communicator.channels:
                self.violate(f"rank {rank} joins twice")
            channel = communicator.channels[rank] = FakeChannel(self, communicator, rank)
            self.num_joined += 1
            return channel

    def word(self, device: int, value: int) -> Memory:
        return memory_of(np.array([value], np.uint64), writable=True)

    def read_word(self, word: Memory) -> int:
        return int(word.owner[0])

    def go_on(self) -> None:
        """Stalled no longer."""
        with self.lock:
            self.stalled = False
            for communicator in self.made.values():
                communicator.run()

    @property
    def num_pending(self) -> int:
        """Operations that have not ended."""
        channels = [channel for made in self.made.values() for channel in made.channels.values()]
        return sum(len(channel.operations) for channel in channels)
