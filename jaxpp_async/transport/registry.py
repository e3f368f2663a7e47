"""Name every transport with its capabilities, and make the transports of one process from such a name.

A new transport is a module with a factory, and one line in `TRANSPORTS`. A transport's module is imported
when the transport is first made: a process without a GPU needs no NCCL.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

from jaxpp_async.errors import MeshError, ProtocolError
from jaxpp_async.transport.base import Peer, Transport
from jaxpp_async.transport.nccl.order import ENVIRONMENT as NCCL_ENVIRONMENT
from jaxpp_async.transport.nccl.order import NcclLink, StepOrder
from jaxpp_async.transport.network import Network

Factory: TypeAlias = Callable[[Peer, Network | None, MutableMapping[str, Any]], Transport]
"""Makes the transport of a process: its id; the network on which it listens (None: as the environment says,
and everybody may connect); a dict that all transports of one inline mesh share."""


@dataclass(frozen=True, slots=True)
class TransportKind:
    """The capabilities of a transport that the rest of the package has to know before it is made.

    Args:
        factory: `module:function`, a `Factory`.
        within_process: it joins actors of one process only (`launcher="inline"`); else it joins processes
            only.
        device_memory: it moves GPU memory itself; else arrays of GPUs go through host memory.
        ordered: it is an `OrderedTransport`, and moves GPU memory only.
        host_transport: the name of the transport that carries host values and replicas beside it; None: it
            carries them itself. The controller has only this one.
        environment: variables that actors have before CUDA starts, unless their host or their user says
            otherwise.
    """

    factory: str
    within_process: bool = False
    device_memory: bool = True
    ordered: bool = False
    host_transport: str | None = None
    environment: Mapping[str, str] | None = None

    def make(self, peer_id: Peer, network: Network | None, shared: MutableMapping[str, Any]) -> Transport:
        """Import the transport's module and make one; see `Factory`."""
        module, _, function = self.factory.partition(":")
        factory: Factory = getattr(importlib.import_module(module), function)
        return factory(peer_id, network, shared)


TRANSPORTS: dict[str, TransportKind] = {
    "ucx": TransportKind("jaxpp_async.transport.ucx.transport:make_transport"),
    "nccl": TransportKind(
        "jaxpp_async.transport.nccl.transport:make_transport",
        ordered=True,
        host_transport="ucx",
        environment=NCCL_ENVIRONMENT,
    ),
    "memory": TransportKind(
        "jaxpp_async.transport.memory:make_transport", within_process=True, device_memory=False
    ),
}
"""All transports by name; the first that fits a launcher is its default."""

_OWN_KIND = TransportKind("")


def kind_of(name: str) -> TransportKind:
    """The capabilities of a transport. A launcher may have a transport of its own, which is not in the
    registry: programs then use it for everything."""
    return TRANSPORTS.get(name, _OWN_KIND)


def transport_names(*, within_process: bool) -> tuple[str, ...]:
    """The names of the transports that join actors of one process, or of those that join processes."""
    return tuple(name for name, kind in TRANSPORTS.items() if kind.within_process == within_process)


def make_process_transport(name: str, peer_id: Peer, network: Network | None = None) -> Transport:
    """Make a process's end of a transport that joins processes.

    Args:
        name: of `TRANSPORTS`. peer_id: the process's number, or `CONTROLLER`.
        network: where it listens; None: as the environment says, and everybody may connect.

    Raises:
        InstallError: a package that it needs is missing.
        MeshError: there is no such transport, it does not leave the process, or it lacks something that it
        needs.
    """
    between = transport_names(within_process=False)
    if name not in TRANSPORTS:
        raise MeshError(f"unknown transport {name!r}: choose {_listed(between)}")
    if TRANSPORTS[name].within_process:
        raise MeshError(
            f'transport "{name}" does not leave a process: use it with launcher="inline", '
            f'or "{between[0]}" here'
        )
    return TRANSPORTS[name].make(peer_id, network, {})


def make_inline_transport(name: str, peer_id: Peer, shared: MutableMapping[str, Any]) -> Transport:
    """Make an actor's end, or the controller's, of a transport that joins actors of one process.

    Args:
        name: of `TRANSPORTS`. peer_id: the actor's process number, or `CONTROLLER`.
        shared: a dict of the mesh's, the same for all its ends.

    Raises:
        MeshError: there is no such transport, or it joins processes.
    """
    within = transport_names(within_process=True)
    if name not in within:
        raise MeshError(
            f'transport {name!r} does not work inline: use {_listed(within)}, or launcher="local"'
        )
    return TRANSPORTS[name].make(peer_id, None, shared)


def _listed(names: Iterable[str]) -> str:
    return " or ".join(f'"{name}"' for name in names)


class OrderedTransport(Transport, Protocol):
    """A transport that has to know the order of a program's transfers before a step, over links that are made
    before.

    Attributes:
        name: says what to call a process where a link to it cannot be made.
    """

    name: Callable[[Peer], str]

    @property
    def version(self) -> str:
        """The version of its library, such as `"2.32.3"`; all ends need the same one."""
        ...

    def is_connected(self, peer: Peer) -> bool:
        """Whether `connect` has been called for a peer."""
        ...

    def make_id(self) -> bytes:
        """Make an id for a link whose `maker` this process is. It may block: call it on a thread."""
        ...

    async def join(self, link: NcclLink, unique_id: bytes) -> None:
        """Make this process's end of a link; the other end does the same meanwhile."""
        ...

    def begin(self, order: StepOrder) -> None:
        """Begin a step: on each link, transfers go in this order from here on, whenever they are posted."""
        ...


@dataclass(frozen=True, slots=True)
class ActorTransports:
    """The transports of one actor's process.

    Args:
        programs: for `Send` and `Recv`.
        host: for host values to and from the controller, and for replicas; may be the same.
        ordered: `programs`, if it is an `OrderedTransport`.
    """

    programs: Transport
    host: Transport
    ordered: OrderedTransport | None = None

    @property
    def required_ordered(self) -> OrderedTransport:
        """The transport of programs, where a message asks for links.

        Raises:
            ProtocolError: it has no links.
        """
        if self.ordered is None:
            raise ProtocolError("links are asked for, but this actor's transport has none")
        return self.ordered

    def admit(self, addresses: Iterable[bytes]) -> None:
        """Let the processes of these addresses connect, and nobody else.

        Raises:
            TransferError: as `Transport.admit`.
        """
        self.host.admit(addresses)
        if self.host is not self.programs:
            self.programs.admit(addresses)

    async def connect(self, addresses: Mapping[Peer, bytes]) -> None:
        """Make peers reachable for host values; for programs too, if one transport carries both.

        Raises:
            As `Transport.connect`.
        """
        await asyncio.gather(*(self.host.connect(peer, address) for peer, address in addresses.items()))

    async def abort(self) -> None:
        """End every transfer of each transport.

        Raises:
            TransferError: a medium does not let go of its buffers.
        """
        try:
            await self.programs.abort()
        finally:
            if self.host is not self.programs:
                await self.host.abort()

    async def aclose(self) -> None:
        """Close each transport."""
        try:
            await self.programs.aclose()
        finally:
            if self.host is not self.programs:
                await self.host.aclose()


def open_transports(
    name: str, epoch: int, network: Network, make_transport: Callable[[str, Network], Transport]
) -> ActorTransports:
    """Make the transports of an actor's process.

    Args:
        name: of the transport of programs.
        epoch: of the mesh.
        network: where they listen.
        make_transport: makes a transport from a name and a network.

    Raises:
        InstallError, MeshError: as `make_transport`.
    """
    kind = kind_of(name)
    programs = make_transport(name, network)
    host = programs if kind.host_transport is None else make_transport(kind.host_transport, network)
    programs.epoch = host.epoch = epoch
    return ActorTransports(programs, host, cast(OrderedTransport, programs) if kind.ordered else None)
