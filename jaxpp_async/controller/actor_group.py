"""crew: the actors of one mesh as they are now: processes, control connections and the data plane among them. Starts,
connects, replaces and ends them.

Knows neither programs nor steps, and does not decide what a failure means.
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
    bounded,
    check_agreement,
    wait_all_dead,
)
from jaxpp_async.errors import TransferError
from jaxpp_async.launch import ActorHandle, Launcher, LaunchSpec
from jaxpp_async.launch.hosts import address_towards, addresses_of_hosts
from jaxpp_async.layout.array_parts import Scattering
from jaxpp_async.program.instructions import CONTROLLER, ActorId, ProcessId
from jaxpp_async.protocol.actor_info import ActorInfo, Topology, of_actor
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
"""What actors may take to end when asked, when signalled, and to be reaped when killed."""


PROCESS_DESCRIPTORS = 8
"""How many of the driver's descriptors one actor process takes: 6 for its pipes, connections and progress, 2 more for
TCP's data plane."""


class ActorGroup:
    """The actors of one mesh.

    Args:
        launcher: starts them; belongs to the crew from here on.
        processes: how many actors, of how many processes each.
        number: gives out request numbers.
        say: told what is going on.
        on_transfer_error: told of transfers between actors and controller that failed.
        on_routes: told by which ways a process with devices of its own reaches the others, once it is connected.

    Attributes:
        processes: as given.
        links: the processes by number; a replaced one has another link.
        epoch: of all tags and steps; another one after every abort.
        gate: where they come in.
        plane: the controller's end of the data plane, once started.
        hardware: each process's devices, as it told.
        scattering: how arrays lie on actors' processes.
    """

    def __init__(
        self,
        launcher: Launcher,
        processes: Topology,
        options: ControllerOptions,
        *,
        number: Callable[[], int],
        say: Callable[[str], None],
        on_transfer_error: Callable[[TransferError], None],
        on_routes: Callable[[ActorInfo, Mapping[ProcessId, tuple[str, ...]]], None],
    ):
        self.links: dict[ProcessId, ActorLink] = {}
        self.epoch = 0
        self.processes, self._launcher, self._options = processes, launcher, options
        self._number, self._say = number, say
        self._on_transfer_error, self._on_routes = on_transfer_error, on_routes
        self._secret = secrets.token_bytes(SECRET_BYTES)
        version, longest = jaxpp_async.__version__, options.max_frame_bytes
        self.gate = ControlListener(self._secret, version=version, max_frame_bytes=longest)
        self._startup = Startup(launcher, self.gate, timeout_s=options.launch_timeout_s, say=say)
        self._address: tuple[str, int] | None = None
        self._plane: HostTransfers | None = None
        self._incarnations: dict[ProcessId, int] = {}
        self.hardware: dict[ProcessId, Hardware] = {}
        self.scattering = Scattering(options.actors.spmd_mesh, processes.per_actor)

    @property
    def plane(self) -> HostTransfers:
        assert self._plane is not None  # `start` has made it
        return self._plane

    @property
    def handles(self) -> dict[ProcessId, ActorHandle]:
        """Every process started last under its number."""
        return self._startup.handles

    @property
    def actors(self) -> range:
        """All actors, in order."""
        return range(self.processes.num_actors)

    @property
    def infos(self) -> tuple[ActorInfo, ...]:
        """Where each actor is and how it does, in order of id; those of which no process has come are left out."""
        return tuple(self.info(actor) for actor in self.actors if self._links_of(actor))

    def info(self, actor: ActorId) -> ActorInfo:
        """Where an actor is and how it does."""
        return of_actor([link.info for link in self._links_of(actor)])

    def set_state(self, actor: ActorId, state: str) -> None:
        """Note how an actor does."""
        for link in self._links_of(actor):
            link.info = replace(link.info, state=state)

    def _links_of(self, actor: ActorId) -> list[ActorLink]:
        return [self.links[process] for process in self.processes.of(actor) if process in self.links]

    # ------------------------------------------------------------ starting

    async def start(self) -> None:
        """Start every actor. They are connected by `connect`.

        Raises:
            LaunchError: an actor did not come up; has the end of its output. HandshakeError: one runs other versions.
            MeshError: their devices do not go together; this process may not open enough descriptors.
        """
        count, each = self.processes.num_actors, self.processes.per_actor
        if self._launcher.listen_host is not None:
            needed = START_DESCRIPTORS + self.processes.count * PROCESS_DESCRIPTORS
            check_descriptors(needed, f"a mesh of {self.processes.count} processes")
            self._address = await self.gate.listen(self._launcher.listen_host)
        of_several = f" of {each} processes each" if each > 1 else ""
        self._say(f"starting {count} actor{'s' if count != 1 else ''}{of_several}")
        await all_of({actor: self.bring_up(actor) for actor in self.actors}, "start")
        self.check_devices()
        self._plane = HostTransfers(
            self._make_transport(),
            self.epoch,
            lambda process: self.links[process].info,
            self._on_transfer_error,
            scattering=self.scattering,
            copies=self._options.restarts,
            patience_s=self._options.deadlines.progress_s,
        )

    def check_devices(self) -> None:
        """Once all are up, and again when some have been replaced.

        Raises:
            MeshError: their devices do not go together.
        """
        if self.has_hearts:  # inline actors have one JAX and one set of devices
            check_agreement([self._member(process) for process in sorted(self.links)])

    def _member(self, process: ProcessId) -> ProcessDevices:
        info, has = self.links[process].info, self.hardware[process]
        share, nccl = has.memory_fraction, (has.nccl, has.nccl_shares)
        return ProcessDevices(str(info), info.id, info.host, has.cuda, has.gpus, share, *nccl)

    async def bring_up(self, actor: ActorId) -> list[ActorLink]:
        """Start one actor, or its successor, up to its JAX and transport.

        Returns:
            Its processes, in order of rank.

        Raises:
            LaunchError, HandshakeError: as `start`.
        """
        processes = self.processes.of(actor)
        links = await all_of({process: self._start(process) for process in processes}, "start")
        clusters = await self._clusters(list(links.values()))
        await all_of(
            {p: self._configure(links[p], c) for p, c in zip(processes, clusters, strict=True)}, "configure"
        )
        return list(links.values())

    async def _start(self, process: ProcessId) -> ActorLink:
        options = self._options
        incarnation = self._incarnations[process] = self._incarnations.get(process, -1) + 1
        spec = LaunchSpec(
            process,
            self.processes.count,
            incarnation,
            self._secret,
            self._address,
            options.actors.platform,
            options.actors.env,
            options.max_frame_bytes,
            self.processes.per_actor,
            options.actors.num_devices // self.processes.per_actor
            if options.actors.platform == "cuda"
            else 0,
            options.actors.defaults,
        )
        link = self.links[process] = await self._startup.start(spec)
        return link

    async def _clusters(self, links: Sequence[ActorLink]) -> list[Cluster | None]:
        """How the processes of one actor find each other."""
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
        """By which the other processes reach a process; loopback, if all are here; None: not known."""
        if self._address is None:
            return None
        theirs, _ = link.connection.ends
        # An actor of this machine may have come by its loopback, while others come from elsewhere.
        return theirs if is_loopback(self._address[0]) or not is_loopback(theirs) else None

    async def connect(self) -> None:
        """Connect everyone with those whom he exchanges anything with, in this epoch.

        Raises:
            RemoteError, TransferError: a link could not be made.
        """
        addresses = {process: link.address for process, link in self.links.items()}
        addresses[CONTROLLER] = self.plane.transport.address
        await self._admit(addresses)
        for process in sorted(self.links):
            await self.plane.transport.connect(process, addresses[process])

        def connect(process: ProcessId) -> Connect:
            peers = {CONTROLLER, *self.processes.peers_of(process)}
            return Connect(
                self._number(), self.epoch, {peer: a for peer, a in addresses.items() if peer in peers}
            )

        connects = {process: connect(process) for process in sorted(self.links)}
        found = await self.ask_each(connects, Connected, "connect")
        for process, connected in sorted(found.items()):
            self._on_routes(self.links[process].info, connected.routes)

    async def _admit(self, addresses: Mapping[ProcessId, bytes]) -> None:
        """Let everyone in where he will connect, before anyone does: who is not let in yet is not answered."""
        if not leave_machine(host for address in addresses.values() for host in hosts_of(address)):
            return
        everyone = tuple(addresses.values())
        self.plane.transport.admit(everyone)
        await self.ask_each({p: Admit(self._number(), everyone) for p in sorted(self.links)}, Done, "admit")

    # ------------------------------------------------------------ going on after a failure

    def begin_epoch(self) -> None:
        """What is under way from before is of no interest any more."""
        self.epoch += 1
        if self._plane is not None:
            self._plane.epoch = self.epoch

    def abort(self, process: ProcessId, cause: str) -> asyncio.Future[Done]:
        """Tell a process to drop everything and to enter this epoch."""
        call = PendingRequest(Done, awaited=False)
        self.links[process].request(Abort(self._number(), self.epoch, cause), call)
        return call.future

    @property
    def has_hearts(self) -> bool:
        """Actors are processes, which beat."""
        return self._launcher.listen_host is not None

    def ask_where(self, process: ProcessId) -> asyncio.Future[Reported]:
        """Ask a process where it is; past the outbox, since that is not to be asked again."""
        call = PendingRequest(Reported, awaited=False)
        self.links[process].request(Report(self._number()), call)
        return call.future

    async def renew(self, process: ProcessId) -> None:
        """Have a process make a new end of the data plane, which none of the dead ever touched.

        Raises:
            RemoteError: it could not.
        """
        link = self.links[process]
        renewed: TransportReset = await link.call(ResetTransport(self._number()), TransportReset)
        link.address = renewed.address

    async def renew_plane(self) -> None:
        """The same for the controller."""
        await self.plane.transport.aclose()
        self.plane.renew(self._make_transport(), self.epoch)

    async def ask_each(
        self, requests: Mapping[ProcessId, Request], expected: type, what: str
    ) -> dict[ProcessId, Any]:
        """A request to each of some processes; the first failure is raised."""
        return await all_of(
            {p: self.links[p].call(request, expected) for p, request in requests.items()}, what
        )

    async def remove(self, actor: ActorId) -> None:
        """End an actor's processes, if they have not ended, and let go of their connections."""
        handles: dict[int, ActorHandle] = {}
        for process in reversed(self.processes.of(actor)):  # the others end loudly when they miss the first
            if process in self.links:
                self.let_go(self.links[process])
            if process in self.handles:
                handles[process] = self.handles[process]
                handles[process].kill()
        if not await wait_all_dead(handles, KILL_S):
            _LOG.warning("actor %d could not be reaped; it is left behind", actor)

    def let_go(self, link: ActorLink) -> None:
        """Whatever comes of this link is of no interest any more."""
        link.let_go()
        link.connection.abort()

    def _make_transport(self) -> Transport:
        kind = kind_of(self.transport_kind).host_transport or self.transport_kind
        own = self._options.make_transport
        transport = own(kind) if own is not None else self._launcher.make_transport(kind, self._network())
        transport.epoch = self.epoch
        return transport

    def _network(self) -> Network:
        """Where the controller listens: on the way to where actors do."""
        hosts = {host for link in self.links.values() for host in hosts_of(link.address)}
        if not hosts:  # nobody listens: shared memory, or another fabric, and the way of the control channel
            ends = (
                {link.connection.ends for link in self.links.values()} if self._address is not None else set()
            )
            hosts = {theirs for theirs, _ in ends if not is_loopback(theirs)}
        ways = [address_towards(host) for host in sorted(hosts)]
        return Network(None if None in ways else tuple(dict.fromkeys(filter(None, ways))))

    @property
    def transport_kind(self) -> str:
        """How programs transfer."""
        return self._options.actors.transport or self._launcher.transports[0]

    # ------------------------------------------------------------ ending

    async def shut_down(self) -> None:
        """Ask every actor to end, then make it."""
        for link in self.links.values():
            link.let_go()
        # The others end loudly when they miss the first of an actor's processes, which therefore goes last.
        others = [process for process in self.handles if self.processes.rank_of(process) > 0]
        firsts = [process for process in self.handles if process not in others]
        if not (await self._asked_to_end(others) and await self._asked_to_end(firsts)):
            for handle in self.handles.values():
                handle.terminate()
            if not await wait_all_dead(self.handles, TERMINATE_S):
                _LOG.warning("actors did not end when asked to; killing them")
        await self.kill_all()

    async def _asked_to_end(self, processes: Sequence[ProcessId]) -> bool:
        for process in processes:
            link, handle = self.links.get(process), self.handles[process]
            if link is None or link.handle is not handle or not link.connection.is_open:
                handle.kill()  # it cannot be asked: it is being started or replaced
            else:
                link.connection.send(Shutdown(self._number()))
        handles = {process: self.handles[process] for process in processes}
        return not processes or await wait_all_dead(
            handles, SHUTDOWN_S / (2 if self.processes.per_actor > 1 else 1)
        )

    def kill(self) -> None:
        """End every process, without waiting for it."""
        for _, handle in sorted(self.handles.items(), key=lambda item: -self.processes.rank_of(item[0])):
            handle.kill()

    async def kill_all(self) -> None:
        """The end of the end, also of a launch that failed: nothing that was started is left."""
        self.kill()
        if not await wait_all_dead(self.handles, KILL_S):
            _LOG.warning("an actor's process could not be reaped")
        for link in self.links.values():
            self.let_go(link)
            link.info = replace(link.info, state="closed")
        await self.gate.aclose()
        if self._plane is not None:
            self._plane.close()
            await bounded(
                self._plane.transport.aclose(),
                KILL_S,
                "the data plane did not close in time; it closes when its medium lets go of memory",
            )
        await bounded(self._launcher.aclose(), KILL_S, "the launcher did not close in time")
