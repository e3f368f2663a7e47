"""planes: one actor's two ways to its peers: programs' transfers, and everything else. In: a transport's name. Out:
transports, started and ended together.

NCCL moves device memory in a program's order. What has no order (host values to and from the controller, which has no
GPU; copies for restarts) takes a plane of its own. With every other transport both are one.

joining: a transport's name in, this process's end of the data plane out. It connects to nobody, and reads one
variable of the environment.

UCX and NCCL are imported once they are named: a process without a GPU needs no NCCL.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from jaxpp_async.errors import MeshError, ProtocolError
from jaxpp_async.transport.base import Peer, Transport
from jaxpp_async.transport.nccl.transport import MEDIUM, NcclTransport
from jaxpp_async.transport.network import Network

HOST_PLANE = "ucx"
"""What carries host values beside NCCL."""


def host_kind(kind: str) -> str:
    """The transport that carries host values where programs use `kind`; the controller has only this one."""
    return HOST_PLANE if kind == MEDIUM else kind


def is_ordered(kind: str) -> bool:
    """Whether programs transfer in an order that both ends have to know, over links made before."""
    return kind == MEDIUM


@dataclass(frozen=True, slots=True)
class ActorTransports:
    """An actor's transports.

    Args:
        programs: for `Send` and `Recv`.
        host: for everything else; may be the same.
    """

    programs: Transport
    host: Transport

    @property
    def ordered(self) -> NcclTransport | None:
        """The programs' plane, where it needs to know the order of transfers before they are posted."""
        return self.programs if isinstance(self.programs, NcclTransport) else None

    @property
    def with_links(self) -> NcclTransport:
        """The programs' plane, which must be one of links.

        Raises:
            ProtocolError: it is not.
        """
        if self.ordered is None:
            raise ProtocolError("links are asked for, but this actor's transport has none")
        return self.ordered

    def admit(self, addresses: Iterable[bytes]) -> None:
        """Let these peers connect, and nobody else.

        Raises:
            TransferError: as `Transport.admit`.
        """
        self.host.admit(addresses)
        if self.host is not self.programs:
            self.programs.admit(addresses)

    async def connect(self, addresses: Mapping[Peer, bytes]) -> None:
        """Make peers reachable for host values; for programs too, if that is the same plane.

        Raises:
            As `Transport.connect`.
        """
        await asyncio.gather(*(self.host.connect(peer, address) for peer, address in addresses.items()))

    async def abort(self) -> None:
        """End every transfer, of both.

        Raises:
            TransferError: a medium does not let go of its buffers.
        """
        try:
            await self.programs.abort()
        finally:
            if self.host is not self.programs:
                await self.host.abort()

    async def aclose(self) -> None:
        """Close both."""
        try:
            await self.programs.aclose()
        finally:
            if self.host is not self.programs:
                await self.host.aclose()


def open_planes(
    kind: str, epoch: int, network: Network, make_transport: Callable[[str, Network], Transport]
) -> ActorTransports:
    """An actor's transports.

    Args:
        kind: `"ucx"`, `"memory"` or `"nccl"`. epoch: of the mesh.
        network: where its ends listen.
        make_transport: from such a name, and a network, to a transport.

    Raises:
        InstallError, MeshError: as `make_transport`.
    """
    programs = make_transport(kind, network)
    programs.epoch = epoch
    if host_kind(kind) == kind:
        return ActorTransports(programs, programs)
    host = make_transport(host_kind(kind), network)
    host.epoch = epoch
    return ActorTransports(programs, host)


# ---------------------------------------------------------------- joining

ERROR_HANDLING = "JAXPP_UCX_ERROR_HANDLING"
"""`n` switches UCX's error handling off, for this process and the actors it starts here; see `UCXTransport`."""


def make_process_transport(kind: str, peer_id: int, network: Network | None = None) -> Transport:
    """The end of a data plane that joins processes.

    Args:
        network: where it listens; None: as the environment says, and everybody may connect.

    Raises:
        MeshError: a data plane that does not exist, does not leave the process, or lacks what it needs.
    """
    if kind == "ucx":
        from jaxpp_async.transport.ucx.transport import UCXTransport

        return UCXTransport(
            peer_id, network=network, error_handling=os.environ.get(ERROR_HANDLING, "y") != "n"
        )
    if kind == "nccl":
        from jaxpp_async.transport.nccl.library import load_library
        from jaxpp_async.transport.nccl.transport import NcclTransport

        return NcclTransport(peer_id, load_library())
    if kind == "memory":
        raise MeshError(
            'transport "memory" does not leave a process: use it with launcher="inline", or "ucx" here'
        )
    raise MeshError(f'unknown transport {kind!r}: choose "ucx" or "nccl"')
