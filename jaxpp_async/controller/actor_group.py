"""Start, connect, replace and end the actors of one mesh.

`ActorGroup` has the actors as they are now: their processes, control connections and data plane.
`failure_policy` decides what a failure means; programs and steps are in `deploy` and `controller`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jaxpp_async
from jaxpp_async.base.descriptors import check_descriptors
from jaxpp_async.controller.host_values import HostTransfers
from jaxpp_async.controller.listener import ControlListener
from jaxpp_async.controller.options import ControllerOptions
from jaxpp_async.controller.requests import ActorLink, PendingRequest
from jaxpp_async.controller.startup import (
    ProcessDevices,
    Startup,
    all_of,
    check_agreement,
    run_bounded,
    wait_all_dead,
)
from jaxpp_async.errors import TransferError
from jaxpp_async.launch import ActorHandle, Launcher, LaunchSpec
from jaxpp_async.launch.hosts import address_towards, addresses_of_hosts
from jaxpp_async.layout.array_parts import Scattering
from jaxpp_async.program.instructions import CONTROLLER, ActorId, ProcessId
from jaxpp_async.protocol.actor_info import ActorInfo, Topology, merge_processes
from jaxpp_async.protocol.frames import SECRET_BYTES
from jaxpp_async.protocol.messages import (
    Abort,
    Admit,
    Cluster,
    Connect,
    Connected,
    Done,
    Hardware,
    Report,
    Reported,
    Request,
    Reserve,
    ResetTransport,
    Shutdown,
    TransportReset,
)
from jaxpp_async.transport.base import Transport, hosts_of
from jaxpp_async.transport.network import Network, is_loopback, leave_machine
from jaxpp_async.transport.registry import kind_of
from jaxpp_async.transport.ucx.context import START_DESCRIPTORS

_LOG = logging.getLogger("jaxpp_async")

SHUTDOWN_S, TERMINATE_S, KILL_S = 4.0, 1.5, 1.5
"""How long actors may take to end when asked, to end when signalled, and to be reaped when killed."""

PROCESS_DESCRIPTORS = 8
"""How many of the driver's descriptors one actor process takes: 6 for its pipes, connections and progress, 2
more for TCP's data plane."""


class ActorGroup:
    """The actors of one mesh.

    Args:
        launcher: starts them; belongs to this object from here on.
        links: filled with the link of each process, by number; a replaced process gets another link.
        number: gives request numbers.
        on_progress: called with a line of text at each stage.
        on_transfer_error: called with the error of a transfer between actors and controller.
        on_routes: called with a connected process and its routes to the others: UCX's transports, by peer.

    Attributes:
        processes, links: as given.
        epoch: the epoch of all tags and steps; every abort begins another one.
        listener: accepts the actors' control connections.
        hardware: each process's devices, as it reported them.
        scattering: how arrays lie on actors' processes.
    """

    def __init__(
        self,
        launcher: Launcher,
        processes: Topology,
        options: ControllerOptions,
        links: dict[ProcessId, ActorLink],
        *,
        number: Callable[[], int],
        on_progress: Callable[[str], None],
        on_transfer_error: Callable[[TransferError], None],
        on_routes: Callable[[ActorInfo, Mapping[ProcessId, tuple[str, ...]]], None],
    ):
        self.processes, self.links, self.epoch = processes, links, 0
        self._launcher, self._options = launcher, options
        self._number, self._on_progress = number, on_progress
        self._on_transfer_error, self._on_routes = on_transfer_error, on_routes
        self._secret = secrets.token_bytes(SECRET_BYTES)
        version, longest = jaxpp_async.__version__, options.max_frame_bytes
        self.listener = ControlListener(self._secret, version=version, max_frame_bytes=longest)
        timeout_s = options.launch_timeout_s
        self._startup = Startup(launcher, self.listener, timeout_s=timeout_s, on_progress=on_progress)
        self._address: tuple[str, int] | None = None
        self._host_transfers: HostTransfers | None = None
        self._incarnations: dict[ProcessId, int] = {}
        self.hardware: dict[ProcessId, Hardware] = {}
        self.scattering = Scattering(options.actors.spmd_mesh, processes.per_actor)

    @property
    def host_transfers(self) -> HostTransfers:
        """The controller's end of the data plane, once started."""
        assert self._host_transfers is not None  # `start` has made it
        return self._host_transfers

    @property
    def handles(self) -> dict[ProcessId, ActorHandle]:
        """The process that was started last under each number."""
        return self._startup.handles

    @property
    def has_processes(self) -> bool:
        """Whether actors are processes, which send heartbeats; inline actors run in this process."""
        return self._launcher.listen_host is not None

    @property
    def transport_kind(self) -> str:
        """The transport of programs' transfers."""
        return self._options.actors.transport or self._launcher.transports[0]

    @property
    def actors(self) -> range:
        """All actors, in order."""
        return range(self.processes.num_actors)

    @property
    def infos(self) -> tuple[ActorInfo, ...]:
        """Where each actor is and how it does, in order of id, without actors that have not come yet."""
        return tuple(self.info(actor) for actor in self.actors if self._links_of(actor))

    def info(self, actor: ActorId) -> ActorInfo:
        """Say where an actor is and how it does."""
        return merge_processes([link.info for link in self._links_of(actor)])

    def set_state(self, actor: ActorId, state: str) -> None:
        """Note how an actor does."""
        for link in self._links_of(actor):
            link.info = replace(link.info, state=state)

    def _links_of(self, actor: ActorId) -> list[ActorLink]:
        return [
            self.links[process] for process in self.processes.processes_of(actor) if process in self.links
        ]

    # ------------------------------------------------------------ starting

    async def start(self) -> None:
        """Start every actor; `connect` connects them.

        Raises:
            LaunchError: an actor did not come up; has the end of its output.
            HandshakeError: an actor runs other versions.
            MeshError: their devices do not go together, or this process may not open enough descriptors.
        """
        count, each = self.processes.num_actors, self.processes.per_actor
        if self._launcher.listen_host is not None:
            needed = START_DESCRIPTORS + self.processes.count * PROCESS_DESCRIPTORS
            check_descriptors(needed, f"a mesh of {self.processes.count} processes")
            self._address = await self.listener.listen(self._launcher.listen_host)
        of_several = f" of {each} processes each" if each > 1 else ""
        self._on_progress(f"starting {count} actor{'s' if count != 1 else ''}{of_several}")
        await all_of({actor: self.start_actor(actor) for actor in self.actors}, "start")
        self.check_devices()
        self._host_transfers = HostTransfers(
            self._make_transport(),
            self.epoch,
            lambda process: self.links[process].info,
            self._on_transfer_error,
            self.scattering,
            self._options,
        )

    def check_devices(self) -> None:
        """Check all actors' devices together: once all are up, and again when some have been replaced.

        Raises:
            MeshError: their devices do not go together.
        """
        if self.has_processes:  # inline actors have one JAX and one set of devices
            check_agreement([self._member(process) for process in sorted(self.links)])

    def _member(self, process: ProcessId) -> ProcessDevices:
        info, has = self.links[process].info, self.hardware[process]
        share, nccl = has.memory_fraction, (has.nccl, has.nccl_shares)
        return ProcessDevices(str(info), info.id, info.host, has.cuda, has.gpus, share, *nccl)

    async def start_actor(self, actor: ActorId) -> list[ActorLink]:
        """Start one actor, or its successor, up to its JAX and transport.

        Returns:
            Its processes, in order of rank.

        Raises:
            LaunchError, HandshakeError: as `start`.
        """
        processes = self.processes.processes_of(actor)
        links = await all_of({process: self._start_process(process) for process in processes}, "start")
        clusters = await self._clusters(list(links.values()))
        await all_of(
            {p: self._configure(links[p], c) for p, c in zip(processes, clusters, strict=True)}, "configure"
        )
        return list(links.values())

    async def _start_process(self, process: ProcessId) -> ActorLink:
        actors, per_actor = self._options.actors, self.processes.per_actor
        incarnation = self._incarnations[process] = self._incarnations.get(process, -1) + 1
        spec = LaunchSpec(
            process,
            self.processes.count,
            incarnation,
            self._secret,
            self._address,
            actors.platform,
            actors.env,
            self._options.max_frame_bytes,
            per_actor,
            actors.num_devices // per_actor if actors.platform == "cuda" else 0,
            actors.defaults,
        )
        link = self.links[process] = await self._startup.start(spec)
        return link

    async def _clusters(self, links: Sequence[ActorLink]) -> list[Cluster | None]:
        """Decide how the processes of one actor find each other; None for each if there is one process."""
        if len(links) == 1:
            return [None]
        port = await self._startup.reserve(links[0], Reserve(self._number()))
        addresses = addresses_of_hosts([link.connection.ends for link in links])
        coordinator = f"{addresses[0]}:{port}"
        return [Cluster(coordinator, tuple(addresses), rank) for rank in range(len(links))]

    async def _configure(self, link: ActorLink, cluster: Cluster | None) -> None:
        message = self._options.actors.message(
            self._number(), self.transport_kind, self.epoch, cluster, self._host_address(link)
        )
        self.hardware[link.info.process] = (await self._startup.configure(link, message)).hardware

    def _host_address(self, link: ActorLink) -> str | None:
        """Find the address by which others reach a process: loopback if all are here; None: not known."""
        if self._address is None:
            return None
        theirs, _ = link.connection.ends
        # An actor of this machine may have connected by its loopback, while others connect from elsewhere.
        return theirs if is_loopback(self._address[0]) or not is_loopback(theirs) else None

    async def connect(self) -> None:
        """Connect every process with all processes with which it exchanges anything, in this epoch.

        Raises:
            RemoteError, TransferError: a link could not be made.
        """
        addresses = {process: link.address for process, link in self.links.items()}
        addresses[CONTROLLER] = self.host_transfers.transport.address
        await self._admit(addresses)
        for process in sorted(self.links):
            await self.host_transfers.transport.connect(process, addresses[process])
        connects: dict[ProcessId, Request] = {}
        for process in sorted(self.links):
            peers = {CONTROLLER, *self.processes.peers_of(process)}
            known = {peer: address for peer, address in addresses.items() if peer in peers}
            connects[process] = Connect(self._number(), self.epoch, known)
        found = await self.ask_each(connects, Connected, "connect")
        for process, connected in sorted(found.items()):
            self._on_routes(self.links[process].info, connected.routes)

    async def _admit(self, addresses: Mapping[ProcessId, bytes]) -> None:
        """Have each process admit all others before any connects, since strangers get no answer."""
        if not leave_machine(host for address in addresses.values() for host in hosts_of(address)):
            return
        everyone = tuple(addresses.values())
        self.host_transfers.transport.admit(everyone)
        await self.ask_each({p: Admit(self._number(), everyone) for p in sorted(self.links)}, Done, "admit")

    def _make_transport(self) -> Transport:
        kind = kind_of(self.transport_kind).host_transport or self.transport_kind
        own = self._options.make_transport
        transport = own(kind) if own is not None else self._launcher.make_transport(kind, self._network())
        transport.epoch = self.epoch
        return transport

    def _network(self) -> Network:
        """Choose where the controller listens: on the way to where actors listen."""
        hosts = {host for link in self.links.values() for host in hosts_of(link.address)}
        if not hosts and self._address is not None:
            # Nobody listens on an address (shared memory, or another fabric): take the control connections'
            # way.
            ends = {link.connection.ends for link in self.links.values()}
            hosts = {theirs for theirs, _ in ends if not is_loopback(theirs)}
        ways = [address_towards(host) for host in sorted(hosts)]
        return Network(None if None in ways else tuple(dict.fromkeys(filter(None, ways))))

    # ------------------------------------------------------------ going on after a failure

    def begin_epoch(self) -> None:
        """Begin another epoch, so that whatever is under way from before is ignored."""
        self.epoch += 1
        if self._host_transfers is not None:
            self._host_transfers.epoch = self.epoch

    def abort(self, process: ProcessId, cause: str) -> PendingRequest:
        """Tell a process to drop everything and to enter this epoch."""
        return self.links[process].ask(Abort(self._number(), self.epoch, cause), Done)

    def request_report(self, process: ProcessId) -> asyncio.Future[Reported]:
        """Ask a process where it is. A restart does not ask again."""
        return self.links[process].ask(Report(self._number()), Reported).future

    async def reset_transport(self, process: ProcessId) -> None:
        """Have a process make a new end of the data plane, with which no dead process ever had a connection.

        Raises:
            RemoteError: it could not.
        """
        link = self.links[process]
        reset: TransportReset = await link.call(ResetTransport(self._number()), TransportReset)
        link.address = reset.address

    async def reset_host_transport(self) -> None:
        """Make a new end of the data plane for the controller."""
        await self.host_transfers.transport.aclose()
        self.host_transfers.transport = self._make_transport()

    async def ask_each(
        self, requests: Mapping[ProcessId, Request], expected: type, what: str
    ) -> dict[ProcessId, Any]:
        """Send a request to each of some processes and wait for all replies; the first failure is raised."""
        return await all_of(
            {p: self.links[p].call(request, expected) for p, request in requests.items()}, what
        )

    async def remove(self, actor: ActorId) -> None:
        """Kill an actor's processes, if they have not ended, and drop their connections."""
        handles: dict[int, ActorHandle] = {}
        for process in reversed(
            self.processes.processes_of(actor)
        ):  # the others end loudly when they miss the first
            if process in self.links:
                self._drop(self.links[process])
            if process in self.handles:
                handles[process] = self.handles[process]
                handles[process].kill()
        if not await wait_all_dead(handles, KILL_S):
            _LOG.warning("actor %d could not be reaped; it is left behind", actor)

    def _drop(self, link: ActorLink) -> None:
        link.detach()
        link.connection.abort()

    # ------------------------------------------------------------ ending

    async def shut_down(self) -> None:
        """Ask every actor to end, then make it."""
        for link in self.links.values():
            link.detach()
        # The others end loudly when they miss the first of an actor's processes, which therefore goes last.
        others = [process for process in self.handles if self.processes.rank_of(process) > 0]
        firsts = [process for process in self.handles if process not in others]
        if not (await self._ask_to_end(others) and await self._ask_to_end(firsts)):
            for handle in self.handles.values():
                handle.terminate()
            if not await wait_all_dead(self.handles, TERMINATE_S):
                _LOG.warning("actors did not end when asked to; killing them")
        await self.kill_all()

    async def _ask_to_end(self, processes: Sequence[ProcessId]) -> bool:
        """Ask some processes to end; returns whether they have in time."""
        handles = {process: self.handles[process] for process in processes}
        for process, handle in handles.items():
            link = self.links.get(process)
            if link is None or link.handle is not handle or not link.connection.is_open:
                handle.kill()  # it cannot be asked: it is being started or replaced
            else:
                link.connection.send(Shutdown(self._number()))
        return await wait_all_dead(handles, SHUTDOWN_S / (2 if self.processes.per_actor > 1 else 1))

    def kill(self) -> None:
        """Kill every process, without waiting for its end."""
        for _, handle in sorted(self.handles.items(), key=lambda item: -self.processes.rank_of(item[0])):
            handle.kill()

    async def kill_all(self) -> None:
        """Kill every process and close everything, so that nothing that was started is left."""
        self.kill()
        if not await wait_all_dead(self.handles, KILL_S):
            _LOG.warning("an actor's process could not be reaped")
        for link in self.links.values():
            self._drop(link)
            link.info = replace(link.info, state="closed")
        await self.listener.aclose()
        if self._host_transfers is not None:
            self._host_transfers.close()
            await run_bounded(
                self._host_transfers.transport.aclose(),
                KILL_S,
                "the data plane did not close in time; it closes when its medium lets go of memory",
            )
        await run_bounded(self._launcher.aclose(), KILL_S, "the launcher did not close in time")
