"""Start actor processes until they are connected and configured, check their devices, and wait for their
ends.

`Startup` starts the processes of one mesh's actors, and later those that replace lost ones. All actors start
in parallel. The first failure ends the launch, and the caller stops the processes that have been started.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import pairwise
from typing import Any, Final, TypeVar

from jaxpp_async.base.install_hints import pip_install
from jaxpp_async.controller.error_messages import describe_end, launch_error, location, remote_error
from jaxpp_async.controller.listener import ControlListener
from jaxpp_async.controller.requests import ActorLink
from jaxpp_async.errors import (
    ActorError,
    HandshakeError,
    InstallError,
    JaxppAsyncError,
    LaunchError,
    MeshError,
    RemoteError,
)
from jaxpp_async.launch import ActorHandle, Launcher, LaunchSpec
from jaxpp_async.program.instructions import ActorId, ProcessId
from jaxpp_async.protocol.actor_info import ActorInfo, ProcessRank
from jaxpp_async.protocol.connection import Connection
from jaxpp_async.protocol.frames import Identity
from jaxpp_async.protocol.messages import Configure, Ready, Request, Reserve, Reserved
from jaxpp_async.protocol.parent_watch import ExitCode
from jaxpp_async.transport.nccl.order import MULTI_RANK, ONE_GPU

_LOG = logging.getLogger("jaxpp_async")
_VERSIONED = ("jax", "jaxlib")
_LATE_REPORT_S = 0.3
"""How long a process's last message and its death may lie apart: they come by different ways."""

_PLAIN: Final[dict[str, type[JaxppAsyncError]]] = {"InstallError": InstallError, "MeshError": MeshError}
"""Errors of an actor whose text tells a user everything: the user gets the same error without a traceback."""

T = TypeVar("T")


class Startup:
    """A starter of one mesh's actor processes, whose errors tell which stage failed and why.

    Args:
        launcher: starts the processes.
        listener: accepts their control connections.
        timeout_s: the limit in seconds for each stage of a start.
        on_progress: called with a line of text when a process is ready.

    Attributes:
        handles: the handle of each process by process number, for callers that have to stop the processes. A
            replaced process has the handle of its latest successor.
    """

    def __init__(
        self,
        launcher: Launcher,
        listener: ControlListener,
        *,
        timeout_s: float,
        on_progress: Callable[[str], None],
    ):
        self._launcher, self._listener = launcher, listener
        self._timeout_s, self._on_progress = timeout_s, on_progress
        self.handles: dict[ProcessId, ActorHandle] = {}

    async def start(self, spec: LaunchSpec) -> ActorLink:
        """Start one process, wait until it has connected, and return its link.

        Args:
            spec: describes the process to start.

        Raises:
            LaunchError: the process did not start, died, or did not connect in time.
            HandshakeError: the process runs another version of this package.
        """
        arrival = self._listener.expect(Identity(spec.process_id, spec.incarnation))
        process_rank, remedy = spec.process_rank, _connection_remedy(spec.controller)
        try:
            async with asyncio.timeout(self._timeout_s):
                handle = await self._launcher.start(spec, self._listener.adopt)
                self.handles[spec.process_id] = handle
                connection = await self._unless_dead(process_rank, arrival, remedy)
        except TimeoutError:
            raise self._late(process_rank, "did not connect", remedy) from None
        except OSError as error:
            raise launch_error(process_rank, f"could not be started: {error}") from error
        return make_link(process_rank, handle, connection)

    async def reserve(self, link: ActorLink, message: Reserve) -> int:
        """Have a process find a free port, at which the other processes of its actor can join it; return the
        port.

        Raises:
            LaunchError: the process found none, died or did not answer in time.
        """
        reserved: Reserved = await self._call(
            link, message, Reserved, "connected but did not find a free port"
        )
        return reserved.port

    async def configure(self, link: ActorLink, message: Configure) -> Ready:
        """Have one process start JAX and its transport, and return its reply, which describes its devices.

        The link gets the process's devices and its address on the data plane.

        Raises:
            LaunchError: the process failed, died or did not answer in time.
            HandshakeError: the process has another version of JAX.
            InstallError, MeshError: the process lacks a package, or devices.
        """
        ready: Ready = await self._call(
            link, message, Ready, "connected but did not start JAX and the transport"
        )
        check_library_versions(link.info, ready.versions)
        link.info = replace(link.info, devices=ready.devices, gpus=ready.hardware.gpus, state="ready")
        link.address = ready.address
        self._on_progress(f"{link.info} is ready: {', '.join(ready.devices)}")
        return ready

    async def _call(self, link: ActorLink, message: Request, expected: type, late: str) -> Any:
        """Send a request to a process that is still being started, and return its reply.

        Args:
            link: the process.
            message: the request.
            expected: the type of the reply.
            late: a clause for the error about a missed deadline, which says what the process did not do.

        Raises:
            LaunchError: the process died or did not answer in time.
            JaxppAsyncError: the request failed; see `unready_error`.
        """
        process_rank = ProcessRank(link.info.process, link.info.size)
        task = asyncio.get_running_loop().create_task(
            link.call(message, expected), name=f"configure {process_rank}"
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._unless_dead(process_rank, task)
        except TimeoutError:
            raise self._late(process_rank, late) from None
        except RemoteError as error:
            raise unready_error(link.info, error) from None
        finally:
            task.cancel()

    async def _unless_dead(
        self, process_rank: ProcessRank, wanted: asyncio.Future[T], unconnected: str = ""
    ) -> T:
        """Wait for `wanted` and return its result, or raise an error if the process dies before.

        Args:
            process_rank: the process.
            wanted: a future that depends on the process, such as its connection or its reply.
            unconnected: text to append to the error if the process could not connect to the controller.

        Raises:
            LaunchError: the process died before `wanted` was done.
        """
        handle = self.handles[process_rank.process]
        dead = asyncio.get_running_loop().create_task(
            handle.wait_dead(), name=f"watch the start of {process_rank}"
        )
        try:
            await asyncio.wait([wanted, dead], return_when=asyncio.FIRST_COMPLETED)
            if not wanted.done():
                await asyncio.wait([wanted], timeout=_LATE_REPORT_S)
            elif not wanted.cancelled() and isinstance(wanted.exception(), LaunchError):
                await asyncio.wait([dead], timeout=_LATE_REPORT_S)
            if dead.done() and not _has_answer(wanted):
                death = dead.result()
                remedy = unconnected if death.returncode == ExitCode.CONNECTION_LOST else ""
                what = f"{describe_end(death.returncode, death.output_tail)} before it was ready{remedy}"
                raise launch_error(process_rank, what, death.output_tail)
            return await wanted
        finally:
            dead.cancel()

    def _late(self, process_rank: ProcessRank, what: str, remedy: str = "") -> ActorError:
        handle = self.handles.get(process_rank.process)
        tail = handle.output_tail() if handle is not None else ()
        return launch_error(
            process_rank, f"{what} within {self._timeout_s:g} s (launch_timeout_s){remedy}", tail
        )


def unready_error(actor: ActorInfo, error: RemoteError) -> JaxppAsyncError:
    """Return the error for an actor that could not be configured.

    If the user can mend the cause, such as a missing package, the error has the actor's text without a
    traceback.

    Args:
        actor: the process.
        error: the failure that the process reported, with its traceback.
    """
    text, _, _ = str(error).partition("\n\nTraceback on the actor")
    plain = _PLAIN.get(error.exception_type.rpartition(".")[2])
    if plain is not None:
        return plain(text.replace(f"{error.exception_type}: ", "", 1))
    where = location(actor)
    if error.exception_type.rpartition(".")[2] == LaunchError.__name__:
        # The text of the error says what failed, and its traceback says where.
        return LaunchError(str(error).replace(f"{error.exception_type}: ", "", 1), **where)
    return LaunchError(f"could not start JAX and the transport on {error}", **where)


def _connection_remedy(controller: tuple[str, int] | None) -> str:
    """Return what to check when an actor on another host was started but did not connect.

    Args:
        controller: the host and port to which actors connect. If it is a loopback address or None, the result
            is empty.
    """
    if controller is None or controller[0].startswith("127."):
        return ""
    return (
        f"; its host has to reach this machine at {controller[0]}, on any port: is a firewall between? "
        "choose another address with control_address="
    )


def make_link(process_rank: ProcessRank, handle: ActorHandle, connection: Connection) -> ActorLink:
    """Return the `ActorLink` of a process that has just connected, with the state `"starting"`.

    Args:
        process_rank: the process.
        handle: the handle to the process, from its launcher.
        connection: its control connection, whose messages are passed to the link from now on.
    """
    info = ActorInfo(
        process_rank.actor, handle.host, handle.pid, (), "starting", process_rank.rank, process_rank.size
    )
    link = ActorLink(info, handle, connection)
    connection.on_message = lambda message: _on_message(link, message)
    connection.on_closed = lambda error: _on_closed(link, error)
    return link


def _has_answer(wanted: asyncio.Future[Any]) -> bool:
    """Return whether a future has a result, or an error other than a cancellation or a `LaunchError`.

    A cancellation or `LaunchError` may be a consequence of the process's death, which then explains more.
    """
    return wanted.done() and not wanted.cancelled() and not isinstance(wanted.exception(), LaunchError)


def _on_message(link: ActorLink, message: Any) -> None:
    failed = link.handle_reply(message)
    if failed is not None:  # the actor itself failed: all its requests fail with the reason
        for reply_handler in link.reply_handlers.values():
            reply_handler.fail(remote_error(link.info, failed))


def _on_closed(link: ActorLink, error: Exception | None) -> None:
    process_rank = ProcessRank(link.info.process, link.info.size)
    what = f"closed its control connection before it was ready: {error}"
    for reply_handler in link.reply_handlers.values():
        reply_handler.fail(launch_error(process_rank, what))


def check_library_versions(actor: ActorInfo, versions: Mapping[str, str]) -> None:
    """Check that an actor has the same versions of jax and jaxlib as the controller, which exports programs.

    Args:
        actor: the process.
        versions: the version of each library that the process reported.

    Raises:
        HandshakeError: the actor has another version.
    """
    for name in _VERSIONED:
        theirs = versions.get(name)
        ours = metadata.version(name) if theirs is not None else None
        if theirs != ours:
            raise HandshakeError(
                f"{actor} runs {name} {theirs}, the controller {ours}; install the same version on both",
                **location(actor),
            )


async def all_of(coroutines: Mapping[int, Coroutine[Any, Any, T]], what: str) -> dict[int, T]:
    """Run coroutines concurrently, and return their results by actor or process number.

    The first error cancels the others and is raised.

    Args:
        coroutines: the coroutines by number of their actor or process.
        what: a phrase that names the asyncio tasks, for debugging.
    """
    loop = asyncio.get_running_loop()
    tasks = {number: loop.create_task(c, name=f"{what} {number}") for number, c in coroutines.items()}
    if not tasks:
        return {}
    try:
        done, _ = await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        return {number: task.result() for number, task in tasks.items()}
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


# ---------------------------------------------------------------- waiting for ends


async def wait_all_dead(handles: Mapping[ActorId, ActorHandle], timeout_s: float) -> bool:
    """Wait until every process has ended; return False if one of them has not within `timeout_s` seconds."""
    loop = asyncio.get_running_loop()
    waits = [
        loop.create_task(handle.wait_dead(), name=f"wait for the end of actor {actor}")
        for actor, handle in handles.items()
    ]
    if not waits:
        return True
    try:
        _, pending = await asyncio.wait(waits, timeout=timeout_s)
    finally:
        for wait in waits:
            wait.cancel()
    return not pending


async def run_bounded(work: Coroutine[Any, Any, None], timeout_s: float, complaint: str) -> None:
    """Await `work` for at most `timeout_s` seconds, and log any error instead of raising it.

    This is for closing a mesh, which must continue when a part of it fails.

    Args:
        work: the coroutine.
        timeout_s: the limit in seconds.
        complaint: the beginning of the log line in case of an error.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await work
    except Exception as error:  # closing goes on, and the log says so
        _LOG.warning("%s: %r", complaint, error)


async def wait_uninterrupted(task: asyncio.Task[None], on_cancel: Callable[[], None]) -> None:
    """Wait until a task of bounded length has ended, even if the caller is cancelled, once or several times.

    A close that stopped half way would leave processes and sockets that nobody owns any more.

    Args:
        task: the task.
        on_cancel: called whenever the caller is cancelled, to shorten the rest of the task.

    Raises:
        CancelledError: the caller was cancelled meanwhile.
        BaseException: the error of the task, if the caller was not cancelled.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
            on_cancel()
    if cancelled is not None:
        raise cancelled
    task.result()


# ---------------------------------------------------------------- agreement of devices
#
# These checks run once all actors have started, before anything is compiled. By then each host has checked
# what it can see alone (such as a missing GPU, or GPU memory that is allocated twice by actors that were
# started together). The checks in this section need the facts of all hosts.

MOST = 1.0
"""The most to which shares of one GPU's memory may add up."""

_SLACK = 1e-6  # a third may have been written as .333333

_UNIQUE = ("GPU-", "MIG-")
"""Beginnings of names that no two GPUs in the world share."""


@dataclass(frozen=True, slots=True)
class ProcessDevices:
    """The devices of one process, for checks of all processes together.

    Args:
        who: the process's name in errors, such as `"actor 1 (host n2, pid 7)"`.
        actor: the id of the actor that the process belongs to.
        host: the name of the machine on which the process runs.
        cuda: the version of CUDA for which its JAX was built, such as `"13.0"`; empty without GPUs.
        gpus: the UUIDs of its GPUs, or other names that are unique on its host; empty if not known.
        memory_fraction: the fraction of each GPU's memory that the process allocates in advance; 0: none.
        nccl: the version of the NCCL that programs use for transfers; empty with other transports.
        nccl_shares: whether this NCCL allows two ranks on one GPU.
    """

    who: str
    actor: int
    host: str
    cuda: str = ""
    gpus: tuple[str, ...] = ()
    memory_fraction: float = 0.0
    nccl: str = ""
    nccl_shares: bool = False

    @property
    def named_gpus(self) -> list[str]:
        """The names of the process's GPUs, chosen so that equal names of two processes mean the same GPU.

        A UUID is used alone, because one machine may be known by several host names. To any other name the
        host's name is added.
        """
        return [gpu if gpu.startswith(_UNIQUE) else f"{gpu} of host {self.host}" for gpu in self.gpus]


def check_agreement(members: Sequence[ProcessDevices]) -> None:
    """Check that the processes of a mesh can work together with the devices and libraries that they have.

    Args:
        members: the devices of every process of the mesh.

    Raises:
        MeshError: the processes cannot work together, for one of these reasons: their JAXs are for different
            CUDAs; their NCCLs have different versions; two processes of one actor have the same GPU; two
            actors share a GPU and NCCL refuses to send between them; or more than the whole memory of a GPU
            is allocated in advance. The error names the processes and says what to do.
    """
    for why in (
        _cuda_conflict(members),
        _nccl_conflict(members),
        _gpu_twice_in_actor(members),
        _gpu_of_neighbours(members),
        _memory_conflict(members),
    ):
        if why is not None:
            raise MeshError(why)


def _cuda_conflict(members: Sequence[ProcessDevices]) -> str | None:
    by_cuda = _grouped((member.cuda.partition(".")[0], member.who) for member in members if member.cuda)
    if len(by_cuda) < 2:
        return None
    said = "; ".join(f"CUDA {major}: {_names(who)}" for major, who in by_cuda.items())
    return (
        f"JAX is for different CUDAs ({said}); install the same extra on all hosts, "
        f"{pip_install('cuda13')} or {pip_install('cuda12')}"
    )


def _nccl_conflict(members: Sequence[ProcessDevices]) -> str | None:
    """Return an error text if processes have different versions of NCCL, or None.

    Both ends of a communicator need the same version.
    """
    by_nccl = _grouped((member.nccl, member.who) for member in members if member.nccl)
    if len(by_nccl) < 2:
        return None
    said = "; ".join(f"NCCL {version}: {_names(who)}" for version, who in by_nccl.items())
    return (
        f"programs transfer over NCCL, of which there are different versions ({said}); install "
        "the same version (nvidia-nccl-cu13 or -cu12) on all hosts"
    )


def _gpu_twice_in_actor(members: Sequence[ProcessDevices]) -> str | None:
    """Return an error text if one GPU serves as two devices of the same actor, or None.

    XLA's collectives run between different GPUs only.
    """
    by_gpu = _grouped(((gpu, member.actor), member.who) for member in members for gpu in member.named_gpus)
    for (gpu, actor), who in by_gpu.items():
        if len(who) > 1:
            return (
                f"{_names(who)} have GPU {gpu}, but actor {actor} wants a GPU for each device; "
                "make spmd_mesh smaller, name more GPUs with devices=, or give it more hosts"
            )
    return None


def _gpu_of_neighbours(members: Sequence[ProcessDevices]) -> str | None:
    """Return an error text if two actors with consecutive ids share a GPU though NCCL does not allow that.

    Such neighbours send to each other. Whether other actors send to each other depends on the program, so for
    those the error comes when their link is made. The result is None if there is no such pair.
    """
    by_gpu = _grouped((gpu, member) for member in members for gpu in member.named_gpus if member.nccl)
    for gpu, sharing in by_gpu.items():
        for one, other in pairwise(sorted(sharing, key=lambda member: member.actor)):
            if other.actor - one.actor == 1 and not (one.nccl_shares and other.nccl_shares):
                return (
                    f"{_names([one.who, other.who])} share GPU {gpu}, and {ONE_GPU} where they send to "
                    f"each other over NCCL {one.nccl}, which refuses that; give each actor a GPU of its own "
                    "(devices=), leave transport= out for UCX, or, with NCCL 2.30 or later, "
                    f"try env={{'{MULTI_RANK}': '1'}}"
                )
    return None


def _memory_conflict(members: Sequence[ProcessDevices]) -> str | None:
    by_gpu = _grouped((gpu, member) for member in members for gpu in member.named_gpus)
    for gpu, sharing in by_gpu.items():
        total = sum(member.memory_fraction for member in sharing)
        if len(sharing) > 1 and total > MOST + _SLACK:
            each = ", ".join(f"{member.memory_fraction:.3g}" for member in sharing)
            part = f"env={{'XLA_PYTHON_CLIENT_MEM_FRACTION': '{0.9 / len(sharing):.2f}'}}"
            return (
                f"{_names([member.who for member in sharing])} share GPU {gpu}, and set aside {each} of "
                f"its memory, {total:.3g} together; give each its part, such as {part}, "
                "or each actor a GPU: devices="
            )
    return None


def _grouped(pairs: Iterable[tuple]) -> Mapping:
    found: dict = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def _names(who: Sequence[str]) -> str:
    """Return a text with the first four names and the number of the others."""
    shown = ", ".join(who[:4])
    return shown if len(who) <= 4 else f"{shown} and {len(who) - 4} more"
