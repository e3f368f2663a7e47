"""Decide in which order a program's transfers go on each NCCL communicator, and in which order the
communicators are made.

NCCL has no tags: on each communicator, the n-th send is matched with the n-th receive. All transfers of a
program are known before the program runs, so both ends know which transfer is the n-th. A transfer that is
posted before its turn waits in a `TurnQueue`.

Each communicator carries data in one direction only (and is called a link). NCCL runs the kernels of a
communicator one after the other, even if they are given to different streams (see `ncclLaunchPrepare` in
NCCL's source), and a receive occupies the communicator until the data arrives. If both directions shared one
communicator, a receive that was posted early could block the very send on which its data depends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from jaxpp_async.errors import ProtocolError
from jaxpp_async.program.instructions import ProcessId

T = TypeVar("T")

ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        # Otherwise streams share eight hardware queues, and a receive that waits would delay computation
        # that is queued after it.
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        # Otherwise a kernel is loaded at its first launch and waits for the device, where a receive may wait.
        "CUDA_MODULE_LOADING": "EAGER",
    }
)
"""Environment variables that actors get before CUDA starts, unless their host or their user sets them."""

MAX_CTAS = 8
"""The greatest number of thread blocks of one NCCL kernel. A receive that waits keeps as many multiprocessors
busy with polling for data. `NCCL_MAX_CTAS` in the environment overrides this number."""


MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
"""The environment variable that lets both ends of a communicator be on one GPU."""

ONE_GPU = "both ends are on one GPU"
"""A phrase of the error message for two ranks that share a GPU and that NCCL therefore refuses."""

_MULTI_RANK_FROM = (2, 30)


def ranks_may_share(version: str, environ: Mapping[str, str]) -> bool:
    """Return whether NCCL allows two ranks on one GPU.

    Args:
        version: the version of NCCL, such as `"2.32.3"`.
        environ: the process's environment variables.
    """
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return numbers >= _MULTI_RANK_FROM and environ.get(MULTI_RANK, "").strip() not in ("", "0")


class NcclLink(NamedTuple):
    """A communicator for one direction between a device of one process and a device of another.

    Args:
        sender, receiver: the numbers of the two processes.
        from_device: the index, among the sender's devices, of the device that sends.
        to_device: the index, among the receiver's devices, of the device that receives.
    """

    sender: ProcessId
    receiver: ProcessId
    from_device: int = 0
    to_device: int = 0

    def peer_of(self, here: ProcessId) -> ProcessId:
        """Return the process at the other end of the link from process `here`."""
        return self.receiver if here == self.sender else self.sender

    def rank_of(self, here: ProcessId) -> int:
        """Return the rank of process `here` in the communicator: 0 for the sender, 1 for the receiver."""
        return 0 if here == self.sender else 1

    def device_of(self, here: ProcessId) -> int:
        """Return the index, among the devices of process `here`, of the device that the link uses."""
        return self.from_device if here == self.sender else self.to_device

    @property
    def maker(self) -> ProcessId:
        """The process that makes the communicator's id. This is the process with the lower number of the
        two."""
        return min(self.sender, self.receiver)

    def __str__(self) -> str:
        return self.text("peer {}".format)

    def text(self, name: Callable[[ProcessId], str]) -> str:
        """Return a description of the link for error messages; `name` is a function that returns the name of
        a process."""
        devices = f"device {self.from_device}"
        if self.to_device != self.from_device:
            devices += f" to device {self.to_device}"
        return f"communicator from {name(self.sender)} to {name(self.receiver)}, {devices}"


class OrderedMessage(NamedTuple):
    """A message of a program: the sequence number in its tag, and the link on which it is sent."""

    sequence: int
    link: NcclLink


class TransferDirection(NamedTuple):
    """One direction of a process's transfers: its sends to a peer, or its receives from that peer.

    Args:
        peer: the peer.
        sends: True for the sends to the peer; False for the receives from the peer.
    """

    peer: ProcessId
    sends: bool


@dataclass(frozen=True, slots=True)
class LinkOrder:
    """The order of one step's transfers on one link.

    Args:
        sequences: the sequence numbers in the transfers' tags, in order.
        places: a dictionary. Its keys are the sequence numbers, and its values are their indices in
            `sequences`.
    """

    sequences: tuple[int, ...]
    places: Mapping[int, int]


NO_TRANSFERS = LinkOrder((), {})
"""The order of a link on which a step transfers nothing."""


@dataclass(frozen=True, slots=True)
class StepOrder:
    """The order of one process's transfers in one step of a program.

    Args:
        orders: a dictionary. Its keys are the links that the step uses, and its values are the orders of the
            transfers on them.
        links: a dictionary. Its keys are directions. Each value is a dictionary from the sequence numbers in
            the tags of the direction's transfers to the links that carry these transfers.
    """

    orders: Mapping[NcclLink, LinkOrder]
    links: Mapping[TransferDirection, Mapping[int, NcclLink]]


def order_of(here: ProcessId, messages: Iterable[OrderedMessage]) -> StepOrder:
    """Build the order of one process's transfers from its messages.

    Args:
        here: the process.
        messages: the messages that the process sends or receives. The messages of one link are in the
            program's order.

    Raises:
        ValueError: two messages between the same two processes, in the same direction, have the same sequence
            number.
    """
    sequences: dict[NcclLink, list[int]] = {}
    links: dict[TransferDirection, dict[int, NcclLink]] = {}
    for sequence, link in messages:
        of_direction = links.setdefault(TransferDirection(link.peer_of(here), link.sender == here), {})
        if sequence in of_direction:
            raise ValueError(
                f"sequence {sequence} stands twice between two peers; both take it for one message"
            )
        of_direction[sequence] = link
        sequences.setdefault(link, []).append(sequence)
    return StepOrder(
        {
            key: LinkOrder(tuple(found), {s: i for i, s in enumerate(found)})
            for key, found in sequences.items()
        },
        links,
    )


class TurnQueue(Generic[T]):
    """A queue of posted transfers at one end of a link. Each transfer leaves the queue when its turn in the
    order of the current step has come. A transfer that does not belong to the current step is refused."""

    __slots__ = ("_held", "_next", "_order")

    def __init__(self) -> None:
        self._order = NO_TRANSFERS
        self._next = 0
        self._held: dict[int, T] = {}

    def begin(self, order: LinkOrder) -> None:
        """Begin a step, whose transfers go in the given order.

        Raises:
            ProtocolError: not all transfers of the previous step have been posted.
        """
        if self._next < len(self._order.sequences):
            left = len(self._order.sequences) - self._next
            raise ProtocolError(
                f"a step begins while {left} transfers of the one before are still to be posted, the first "
                f"of them with sequence {self._order.sequences[self._next]}"
            )
        self._order, self._next = order, 0

    def offer(self, sequence: int, item: T) -> list[T]:
        """Add a transfer that was posted, and return the transfers whose turn has come.

        Args:
            sequence: the sequence number in the transfer's tag.
            item: the transfer.

        Returns:
            The transfers to pass on now, in order: the given transfer, and the later transfers that waited
            for it. Empty if earlier transfers of the step have not been posted yet.

        Raises:
            ProtocolError: the current step has no transfer with this sequence number on this link, or the
                transfer was posted already.
        """
        order = self._order
        place = order.places.get(sequence)
        if place is None or place < self._next or sequence in self._held:
            what = "not one of the program's here" if place is None else "posted twice"
            raise ProtocolError(
                f"a transfer with sequence {sequence} is {what}; NCCL would match it with another"
            )
        if place > self._next:
            self._held[sequence] = item
            return []
        going = [item]
        self._next += 1
        while self._next < len(order.sequences) and order.sequences[self._next] in self._held:
            going.append(self._held.pop(order.sequences[self._next]))
            self._next += 1
        return going

    def clear(self) -> list[T]:
        """Remove the transfers that wait for their turn, and return them."""
        held, self._held = list(self._held.values()), {}
        return held


def rounds(links: Iterable[NcclLink]) -> list[list[NcclLink]]:
    """Divide new links into rounds. The links of one round are made at the same time, and the rounds follow
    one another.

    To make a link, each of its two processes waits for the other. Because all processes follow the same
    rounds, they never wait for one another in a circle. No process waits long either, because each process
    has at most one link in a round, and the number of rounds is close to the least possible. (If the links
    were made in ascending order, the last process of a pipeline would wait until all earlier processes had
    made their links.)

    Returns:
        The links of each round.
    """
    found: list[list[NcclLink]] = []
    taken: dict[ProcessId, set[int]] = {}
    for link in sorted(set(links)):
        ends = [taken.setdefault(end, set()) for end in (link.sender, link.receiver)]
        at = next(k for k in count() if not any(k in of_end for of_end in ends))
        for of_end in ends:
            of_end.add(at)
        found += [[]] * (at == len(found))
        found[at] = [*found[at], link]
    return found


def links_by_maker(links: Iterable[NcclLink]) -> dict[ProcessId, list[NcclLink]]:
    """Group links by the process that makes their ids.

    Returns:
        A dictionary. Its keys are the processes that make ids, and its values are the links whose ids they
        make, in ascending order.
    """
    made: dict[ProcessId, list[NcclLink]] = {}
    for link in sorted(set(links)):
        made.setdefault(link.maker, []).append(link)
    return made
