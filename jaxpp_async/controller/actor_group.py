"""Start, connect, replace and end the actors of one mesh.

`ActorGroup` owns the actors' current processes, their control connections, and the controller's end of the
data plane. `failure_policy` decides what a failure means, `deploy` loads programs, and `controller` runs
steps.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import jaxpp_async
from jaxpp_async.base.descriptors import check_descriptors
from jaxpp_async.controller.device_checks import ProcessDevices, check_agreement
from jaxpp_async.controller.host_values import HostTransfers
from jaxpp_async.controller.listener import ControlListener
from jaxpp_async.controller.options import ControllerOptions
from jaxpp_async.controller.recovery import Recovery
from jaxpp_async.controller.requests import ActorLink, PendingRequest, Requests
from jaxpp_async.controller.startup import Startup
from jaxpp_async.errors import TransferError
from jaxpp_async.launch import ActorHandle, Launcher, LaunchSpec
from jaxpp_async.launch.hosts import address_towards, addresses_of_hosts
from jaxpp_async.layout.array_parts import Scattering
from jaxpp_async.program.instructions import CONTROLLER, ActorId, ProcessId
from jaxpp_async.protocol import messages as m
from jaxpp_async.protocol.actor_info import ActorInfo, Topology, merge_processes
from jaxpp_async.protocol.frames import SECRET_BYTES
from jaxpp_async.protocol.task_group import all_of, run_bounded
from jaxpp_async.transport.base import Transport, hosts_of
from jaxpp_async.transport.network import Network, is_loopback, leave_machine
from jaxpp_async.transport.registry import kind_of
from jaxpp_async.transport.ucx.context import START_DESCRIPTORS

_LOG = logging.getLogger("jaxpp_async")

SHUTDOWN_S, TERMINATE_S, KILL_S = 4.0, 1.5, 1.5
"""The most seconds that actors may take to end after a request, to end after SIGTERM, and to be gone after
SIGKILL.
"""

PROCESS_DESCRIPTORS = 8
"""The number of this process's file descriptors that one actor process takes: 6 for its pipes, connections
and progress page, and 2 more for a data plane over TCP.
"""


class ActorGroup:
    """The owner of all actor processes of one mesh and of their connections.

    Args:
        launcher: starts the processes; owned by this object, which also closes it.
        processes: the numbering of the mesh's processes, by actor and rank.
        options: the options of the mesh's controller.
        links: a dictionary that this object fills with the `ActorLink` of each process (the controller's
            handle and connection), by process number. A replaced process gets a new link.
        requests: sends requests to the processes.
        recovery: tells the present epoch.
        on_progress: called with a line of text at each stage of the start.
        on_transfer_error: called with the error of a transfer between an actor and the controller.
        on_routes: called for each connected process with its `ActorInfo` and, for each of its peers, the
            names of the transports that UCX uses towards that peer.

    Attributes:
        processes, links: the arguments of the same names.
        actors: the ids of all actors, in order.
        has_processes: whether actors run in separate processes, which send heartbeats; False for inline
            actors, which run in this process.
        transport_kind: the name of the transport that programs use to transfer arrays between actors.
        handles: the handle of each process, by process number. If a process was replaced, this is the handle
            of the process that replaced it last.
        listener: accepts the control connections that actors open.
        hardware: the devices of each process, as the process reported them.
        scattering: how arrays are split over the processes of one actor.
    """

    def __init__(
        self,
        launcher: Launcher,
        processes: Topology,
        options: ControllerOptions,
        links: dict[ProcessId, ActorLink],
        requests: Requests,
        recovery: Recovery,
        *,
        on_progress: Callable[[str], None],
        on_transfer_error: Callable[[TransferError], None],
        on_routes: Callable[[ActorInfo, Mapping[ProcessId, tuple[str, ...]]], None],
    ):
        self.processes, self.links, self.actors = processes, links, range(processes.num_actors)
        self.has_processes = launcher.listen_host is not None
        self.transport_kind = options.actors.transport or launcher.transports[0]
        self._launcher, self._options = launcher, options
        self._requests, self._recovery, self._on_progress = requests, recovery, on_progress
        self._on_transfer_error, self._on_routes = on_transfer_error, on_routes
        self._secret = secrets.token_bytes(SECRET_BYTES)
        version, longest = jaxpp_async.__version__, options.max_frame_bytes
        self.listener = ControlListener(self._secret, version=version, max_frame_bytes=longest)
        timeout_s = options.launch_timeout_s
        self._startup = Startup(
            launcher, self.listener, requests, timeout_s=timeout_s, on_progress=self._note_ready
        )
        self.handles = self._startup.handles
        self._address: tuple[str, int] | None = None
        self._host_transfers: HostTransfers | None = None
        self._incarnations: dict[ProcessId, int] = {}
        self._num_ready = 0
        self.hardware: dict[ProcessId, m.Hardware] = {}
        self.scattering = Scattering(options.actors.spmd_mesh, processes.per_actor)

    @property
    def host_transfers(self) -> HostTransfers:
        """The controller's end of the data plane, which transfers large arrays; available once `start` has
        returned.
        """
        assert self._host_transfers is not None  # `start` has made it
        return self._host_transfers

    @property
    def epoch(self) -> int:
        """The present epoch of the mesh."""
        return self._recovery.epoch

    @property
    def is_on_this_machine(self) -> bool:
        """Whether all processes of the mesh run on this machine, as far as the launcher knows."""
        return self._address is None or is_loopback(self._address[0])

    @property
    def infos(self) -> tuple[ActorInfo, ...]:
        """The host, processes, devices and state of each actor, in order of id, without actors that have not
        connected yet.
        """
        return tuple(self.info(actor) for actor in self.actors if self._links_of(actor))

    def info(self, actor: ActorId) -> ActorInfo:
        """Return an actor's host, processes, devices and state."""
        return merge_processes([link.info for link in self._links_of(actor)])

    def set_state(self, actor: ActorId, state: str) -> None:
        """Record the state of an actor, such as `"ready"` or `"failed"`, for users who look at
        `ActorInfo.state`.
        """
        for link in self._links_of(actor):
            link.info = replace(link.info, state=state)

    def _links_of(self, actor: ActorId) -> list[ActorLink]:
        return [
            self.links[process] for process in self.processes.processes_of(actor) if process in self.links
        ]

    # ------------------------------------------------------------ starting

    async def start(self) -> None:
        """Start the processes of every actor and check their devices. The caller then calls `connect`, which
        connects their data plane.

        Raises:
            LaunchError: an actor did not start; the error has the end of the actor's output.
            HandshakeError: an actor runs other versions of the package or of JAX.
            MeshError: the devices of the actors cannot be used together, or this process may not open enough
                file descriptors.
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
            self._recovery,
            lambda process: self.links[process].info,
            self._on_transfer_error,
            self.scattering,
            self._options,
        )

    def _note_ready(self, text: str) -> None:
        """Report that a process is ready, and at the start of the mesh also how many are."""
        if not self._recovery.is_restarting:
            self._num_ready += 1
            text = f"{text} ({self._num_ready} of {self.processes.count})"
        self._on_progress(text)

    def check_devices(self) -> None:
        """Check that the devices of all actors can be used together.

        This is called when the mesh has started, and when a restart has replaced actors.

        Raises:
            MeshError: the devices cannot be used together.
        """
        if self.has_processes:  # inline actors have one JAX and one set of devices
            check_agreement([self._member(process) for process in sorted(self.links)])

    def _member(self, process: ProcessId) -> ProcessDevices:
        info, has = self.links[process].info, self.hardware[process]
        share, nccl = has.memory_fraction, (has.nccl, has.nccl_shares)
        return ProcessDevices(str(info), info.id, info.host, has.cuda, has.gpus, share, *nccl)

    async def start_actor(self, actor: ActorId) -> list[ActorLink]:
        """Start the processes of one actor, and wait until their JAX and transport are ready.

        This is used at the start of the mesh, and in a restart to replace the actor's processes.

        Returns:
            The links of the actor's processes, in order of rank.

        Raises:
            LaunchError: a process did not start; the error has the end of its output.
            HandshakeError: a process runs other versions of the package or of JAX.
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
        link = await self._startup.start(spec)
        if self._recovery.is_restarting:
            link.info = replace(link.info, state="restarting")
        self.links[process] = link
        return link

    async def _clusters(self, links: Sequence[ActorLink]) -> list[m.Cluster | None]:
        """Return, for each process of one actor, the data with which it joins the others in JAX's distributed
        runtime.

        The list has one `Cluster` per link, in the same order. If the actor has only one process, there is
        nothing to join, and the entry is None.
        """
        if len(links) == 1:
            return [None]
        port = await self._startup.reserve(links[0])
        addresses = addresses_of_hosts([link.connection.ends for link in links])
        coordinator = f"{addresses[0]}:{port}"
        return [m.Cluster(coordinator, tuple(addresses), rank) for rank in range(len(links))]

    async def _configure(self, link: ActorLink, cluster: m.Cluster | None) -> None:
        message = self._options.actors.message(
            self.transport_kind, self.epoch, cluster, self._host_address(link)
        )
        self.hardware[link.info.process] = (await self._startup.configure(link, message)).hardware

    def _host_address(self, link: ActorLink) -> str | None:
        """Return the address at which other processes can connect to the host of one process, or None if it
        is not known.

        If the whole mesh runs on this machine, the result is the loopback address.

        Args:
            link: the link of the process.
        """
        if self._address is None:
            return None
        theirs, _ = link.connection.ends
        # An actor on this machine may have connected through loopback, which other hosts cannot use.
        return theirs if is_loopback(self._address[0]) or not is_loopback(theirs) else None

    async def connect(self) -> None:
        """Connect the data plane (the transport for arrays) of every process with those of its peers and of
        the controller.

        The connections belong to the present epoch of the mesh.

        Raises:
            RemoteError: an actor could not make a connection.
            TransferError: the controller could not make a connection.
        """
        addresses = {process: link.address for process, link in self.links.items()}
        addresses[CONTROLLER] = self.host_transfers.transport.address
        await self._admit(addresses)
        for process in sorted(self.links):
            await self.host_transfers.transport.connect(process, addresses[process])
        connects: dict[ProcessId, m.Request] = {}
        for process in sorted(self.links):
            peers = {CONTROLLER, *self.processes.peers_of(process)}
            known = {peer: address for peer, address in addresses.items() if peer in peers}
            connects[process] = m.Connect(self.epoch, known)
        found: dict[ProcessId, m.Connected] = await self._requests.call_each(connects, "connect")
        for process, connected in sorted(found.items()):
            self._on_routes(self.links[process].info, connected.routes)

    async def _admit(self, addresses: Mapping[ProcessId, bytes]) -> None:
        """Tell every process to admit connections from all other processes, before any process connects.

        Transports that listen on a network do not answer peers that they have not been told to admit. If all
        processes are on this machine, this does nothing.

        Args:
            addresses: the data-plane address of every process and of the controller.
        """
        if not leave_machine(host for address in addresses.values() for host in hosts_of(address)):
            return
        everyone = tuple(addresses.values())
        self.host_transfers.transport.admit(everyone)
        await self._requests.call_each(dict.fromkeys(sorted(self.links), m.Admit(everyone)), "admit")

    def _make_transport(self) -> Transport:
        kind = kind_of(self.transport_kind).host_transport or self.transport_kind
        own = self._options.make_transport
        transport = own(kind) if own is not None else self._launcher.make_transport(kind, self._network())
        transport.epoch = self.epoch
        return transport

    def _network(self) -> Network:
        """Return the local addresses at which the controller's transport listens, so that actors can connect
        to it.

        These are the addresses of the network interfaces over which this machine reaches the actors. If one
        of them cannot be determined, the result has None instead of addresses, and the transport chooses
        where to listen.
        """
        hosts = {host for link in self.links.values() for host in hosts_of(link.address)}
        if not hosts and self._address is not None:
            # No actor's transport has an IP address (it is shared memory, or another fabric): use the
            # interfaces of the control connections.
            ends = {link.connection.ends for link in self.links.values()}
            hosts = {theirs for theirs, _ in ends if not is_loopback(theirs)}
        ways = [address_towards(host) for host in sorted(hosts)]
        return Network(None if None in ways else tuple(dict.fromkeys(filter(None, ways))))

    # ------------------------------------------------------------ going on after a failure

    def abort(self, process: ProcessId, cause: str) -> PendingRequest:
        """Tell a process to drop all its work and to enter the present epoch of the mesh.

        Args:
            process: the process.
            cause: a text that says what happened, for the errors of the steps that the process drops.

        Returns:
            The request, which can be awaited.
        """
        return self._requests.send(process, m.Abort(self.epoch, cause))

    def request_report(self, process: ProcessId) -> asyncio.Future[m.Reported]:
        """Ask a process for its position in its program and for its open transfers; return the future reply.

        If a restart (the replacement of lost actors) begins before the reply, the request is not sent again.
        """
        return self._requests.send(process, m.Report(), awaited=False).future

    async def reset_transport(self, process: ProcessId) -> None:
        """Have a process replace its end of the data plane (the transport for arrays), and record the new
        address.

        This is needed after another process has died, since a new end has no connection to the dead process.

        Raises:
            RemoteError: the process could not make a new end.
        """
        reset: m.TransportReset = await self._requests.call(process, m.ResetTransport())
        self.links[process].address = reset.address

    async def reset_host_transport(self) -> None:
        """Replace the controller's end of the data plane (the transport for arrays) by a new one."""
        await self.host_transfers.transport.aclose()
        self.host_transfers.transport = self._make_transport()

    async def remove(self, actor: ActorId) -> None:
        """Kill all processes of one actor, close their control connections, and wait until the processes have
        ended.
        """
        handles: dict[int, ActorHandle] = {}
        # From the last to the first, since JAX aborts the other processes of an actor if the first one ends.
        for process in reversed(self.processes.processes_of(actor)):
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
        """Ask every actor process to end, terminate and then kill the processes that do not end in time, and
        close all connections, the listener, the controller's transport and the launcher.
        """
        for link in self.links.values():
            link.detach()
        # JAX aborts the other processes of an actor if its first one ends, which therefore ends last.
        others = [process for process in self.handles if self.processes.rank_of(process) > 0]
        firsts = [process for process in self.handles if process not in others]
        if not (await self._ask_to_end(others) and await self._ask_to_end(firsts)):
            for handle in self.handles.values():
                handle.terminate()
            if not await wait_all_dead(self.handles, TERMINATE_S):
                _LOG.warning("actors did not end when asked to; killing them")
        await self.kill_all()

    async def _ask_to_end(self, processes: Sequence[ProcessId]) -> bool:
        """Ask some processes to end, and return whether all of them ended within the time limit. A process
        without a control connection cannot be asked and is killed.
        """
        handles = {process: self.handles[process] for process in processes}
        for process, handle in handles.items():
            link = self.links.get(process)
            if link is None or link.handle is not handle or not link.connection.is_open:
                handle.kill()  # it cannot be asked: it is being started or replaced
            else:
                self._requests.send(process, m.Shutdown(), awaited=False)
        return await wait_all_dead(handles, SHUTDOWN_S / (2 if self.processes.per_actor > 1 else 1))

    def kill(self) -> None:
        """Kill every process, without waiting until it has ended."""
        for _, handle in sorted(self.handles.items(), key=lambda item: -self.processes.rank_of(item[0])):
            handle.kill()

    async def kill_all(self) -> None:
        """Kill every process and close all connections, the listener, the controller's transport and the
        launcher.
        """
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


async def wait_all_dead(handles: Mapping[ProcessId, ActorHandle], timeout_s: float) -> bool:
    """Wait until every process has ended, and return True; return False if one still runs after `timeout_s`
    seconds.
    """
    loop = asyncio.get_running_loop()
    waits = [
        loop.create_task(handle.wait_dead(), name=f"wait for the end of process {process}")
        for process, handle in handles.items()
    ]
    if not waits:
        return True
    try:
        _, pending = await asyncio.wait(waits, timeout=timeout_s)
    finally:
        for wait in waits:
            wait.cancel()
    return not pending
