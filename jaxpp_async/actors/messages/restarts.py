"""restarts: aborts, and the copies from which actors go on after one. Plain frozen data, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpp_async.actors.messages.steps import ArrayId
from jaxpp_async.program import Aval, ProcessId


@dataclass(frozen=True, slots=True)
class Abort:
    """Another actor failed: drop every step under way, end all transfers, enter `epoch`. Answer: `Done`."""

    request: int
    epoch: int
    cause: str


@dataclass(frozen=True, slots=True)
class Renew:
    """After an `Abort`: give up the transport and make another, which no peer has ever seen. Answer: `Renewed`."""

    request: int


@dataclass(frozen=True, slots=True)
class KeptArray:
    """An array of a copy: its id, its type, and the bytes of each of its distinct shards."""

    array_id: ArrayId
    aval: Aval
    shard_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Keep:
    """Take a copy, in host memory, of every array as it is between the requests before and after this. Answer: `Kept`,
    once the steps before have made them.

    Args:
        generation: names the copy; counts up.
    """

    request: int
    generation: int


@dataclass(frozen=True, slots=True)
class Lend:
    """Send a copy to a peer. Answer: `Done`, once all of it has left.

    Args:
        of: whose arrays: this process's own, or another's whose copy it holds.
        to: the peer, which has been told to `Hold` it.
    """

    request: int
    epoch: int
    generation: int
    of: ProcessId
    to: ProcessId


@dataclass(frozen=True, slots=True)
class Hold:
    """Receive a copy of `of`'s arrays from a peer and keep it in host memory. Answer: `Done`, once all is here."""

    request: int
    epoch: int
    generation: int
    of: ProcessId
    source: ProcessId
    arrays: tuple[KeptArray, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop all copies but this generation's. Answer: `Done`."""

    request: int
    generation: int


@dataclass(frozen=True, slots=True)
class Rollback:
    """After an `Abort`: forget every array, and have those of a copy again, under their ids. Answer: `Done`.

    Args:
        generation: of which copy; None: have none.
    """

    request: int
    generation: int | None


@dataclass(frozen=True, slots=True)
class Renewed:
    """The new transport's address."""

    request: int
    address: bytes


@dataclass(frozen=True, slots=True)
class Kept:
    """What the copy has, in the order in which `Lend` sends it."""

    request: int
    arrays: tuple[KeptArray, ...]
