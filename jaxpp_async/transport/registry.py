"""List every transport with its name and capabilities, and make a process's transports from their names.

To add a transport, write a module with a factory and add one line to `TRANSPORTS`. A transport's module is
imported when the transport is first made, so that a process without a GPU does not need NCCL.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from jaxpp_async.errors import MeshError, ProtocolError
from jaxpp_async.transport.base import Peer, Transport
from jaxpp_async.transport.nccl.order import ENVIRONMENT as NCCL_ENVIRONMENT
from jaxpp_async.transport.network import Network

if TYPE_CHECKING:
    from jaxpp_async.transport.nccl.transport import NcclTransport

Factory: TypeAlias = Callable[[Peer, Network | None, MutableMapping[str, Any]], Transport]
"""A function that makes the transport of a process, given the process's id, the network on which to listen
(None: the environment decides where, and everybody may connect), and a dict that all transports of one inline
mesh share."""


@dataclass(frozen=True, slots=True)
class TransportKind:
    """The capabilities of one kind of transport, which the rest of the package has to know before a transport
    is made.

    Args:
        factory: the `Factory` that makes the transport, as text: `module:function`.
        within_process: True if the transport connects only actors that share one process
            (`launcher="inline"`); False if it connects only separate processes.
        device_memory: whether the transport itself moves GPU memory. If not, arrays on GPUs are copied to
            host memory and moved from there.
        ordered: whether the transport has to know the order of a program's transfers before each step, as
            `NcclTransport` does. If so, it moves GPU memory only.
        host_transport: the name of the other transport that carries host values and replicas (copies of the
            state kept for restarts). The controller then has only that other transport. None: one transport
            carries everything.
        environment: environment variables that each actor gets before CUDA starts, unless the actor's host or
            the user sets them otherwise.
    """

    factory: str
    within_process: bool = False
    device_memory: bool = True
    ordered: bool = False
    host_transport: str | None = None
    environment: Mapping[str, str] | None = None

    def make(self, peer_id: Peer, network: Network | None, shared: MutableMapping[str, Any]) -> Transport:
        """Import the transport's module and make a transport with its factory.

        Args:
            peer_id: the id of the process that the transport is for.
            network: the network on which the transport listens. None: environment variables choose the
                network, and everybody may connect.
            shared: a dict that all transports of one inline mesh share.
        """
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
    """Return the capabilities of the transport with this name.

    A launcher may provide a transport whose name is not in `TRANSPORTS`. For an unknown name, this function
    therefore returns the default capabilities, which say that one transport carries everything.
    """
    return TRANSPORTS.get(name, _OWN_KIND)


def transport_names(*, within_process: bool) -> tuple[str, ...]:
    """Return the names of the transports that connect actors within one process, or the names of those that
    connect separate processes.

    Args:
        within_process: True for the transports within one process; False for those between processes.
    """
    return tuple(name for name, kind in TRANSPORTS.items() if kind.within_process == within_process)


def make_process_transport(name: str, peer_id: Peer, network: Network | None = None) -> Transport:
    """Make one process's transport, for a mesh whose actors are processes of their own.

    Args:
        name: the transport's name in `TRANSPORTS`.
        peer_id: the process's number, or `CONTROLLER`.
        network: the network on which the transport listens. None: environment variables choose the network,
            and everybody may connect.

    Raises:
        InstallError: a package that the transport needs is missing.
        MeshError: there is no transport of this name, the transport works only within one process, or
            something that the transport needs is missing.
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
    """Make one actor's transport, or the controller's, for a mesh whose actors all run in one process.

    Args:
        name: the transport's name in `TRANSPORTS`.
        peer_id: the actor's process number, or `CONTROLLER`.
        shared: a dict that belongs to the mesh and is the same for all of its transports.

    Raises:
        MeshError: there is no transport of this name, or the transport connects only separate processes.
    """
    within = transport_names(within_process=True)
    if name not in within:
        raise MeshError(
            f'transport {name!r} does not work inline: use {_listed(within)}, or launcher="local"'
        )
    return TRANSPORTS[name].make(peer_id, None, shared)


def _listed(names: Iterable[str]) -> str:
    return " or ".join(f'"{name}"' for name in names)


@dataclass(frozen=True, slots=True)
class ActorTransports:
    """The transports of one actor's process.

    Args:
        programs: the transport for `Send` and `Recv` instructions.
        host: the transport for host values to and from the controller, and for replicas (copies of the state
            kept for restarts); it may be the same as `programs`.
        ordered: the transport `programs` again, if it has to know the order of transfers before each step;
            otherwise None.
    """

    programs: Transport
    host: Transport
    ordered: NcclTransport | None = None

    @property
    def required_ordered(self) -> NcclTransport:
        """The transport `programs`, for requests about links, which only an ordered transport has.

        Raises:
            ProtocolError: the transport is not an ordered one.
        """
        if self.ordered is None:
            raise ProtocolError("links are asked for, but this actor's transport has none")
        return self.ordered

    def admit(self, addresses: Iterable[bytes]) -> None:
        """Allow connections from the processes with these addresses and from nobody else.

        Raises:
            TransferError: as for `Transport.admit`.
        """
        self.host.admit(addresses)
        if self.host is not self.programs:
            self.programs.admit(addresses)

    async def connect(self, addresses: Mapping[Peer, bytes]) -> None:
        """Connect the transport `host` to peers. If `programs` is the same transport, programs can then use
        these connections too.

        Args:
            addresses: a dictionary. Its keys are the ids of the peers, and its values are the addresses of
                their host transports.

        Raises:
            ValueError: as for `Transport.connect`.
            ProtocolError: as for `Transport.connect`.
            TransferError: as for `Transport.connect`.
        """
        await asyncio.gather(*(self.host.connect(peer, address) for peer, address in addresses.items()))

    async def abort(self) -> None:
        """End every transfer of both transports.

        Raises:
            TransferError: the medium of a transport does not release the buffers.
        """
        try:
            await self.programs.abort()
        finally:
            if self.host is not self.programs:
                await self.host.abort()

    async def aclose(self) -> None:
        """Close both transports."""
        try:
            await self.programs.aclose()
        finally:
            if self.host is not self.programs:
                await self.host.aclose()


def open_transports(
    name: str, epoch: int, network: Network, make_transport: Callable[[str, Network], Transport]
) -> ActorTransports:
    """Make the transports of an actor's process, and set their epoch.

    Args:
        name: the name of the transport that programs use.
        epoch: the mesh's epoch, which counts aborts of the whole mesh.
        network: the network on which the transports listen.
        make_transport: a function that makes a transport from a name and a network.

    Raises:
        InstallError: raised by `make_transport`.
        MeshError: raised by `make_transport`.
    """
    kind = kind_of(name)
    programs = make_transport(name, network)
    host = programs if kind.host_transport is None else make_transport(kind.host_transport, network)
    programs.epoch = host.epoch = epoch
    return ActorTransports(programs, host, cast("NcclTransport", programs) if kind.ordered else None)
