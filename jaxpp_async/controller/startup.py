"""Start actor processes, and wait until each one is connected and has started JAX and its transport.

`Startup` starts the processes of one mesh's actors, and later those that replace lost ones. All actors start
in parallel. The first failure ends the launch, and the caller stops the processes that have been started.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, TypeVar

from jaxpp_async.controller.device_checks import check_library_versions
from jaxpp_async.controller.error_messages import describe_end, launch_error, location, remote_error
from jaxpp_async.controller.listener import ControlListener
from jaxpp_async.controller.requests import ActorLink, Requests
from jaxpp_async.errors import (
    ActorError,
    InstallError,
    JaxppAsyncError,
    LaunchError,
    MeshError,
    ProtocolError,
    RemoteError,
)
from jaxpp_async.launch import ActorHandle, Launcher, LaunchSpec
from jaxpp_async.program.instructions import ProcessId
from jaxpp_async.protocol.actor_info import ActorInfo, ExitCode, ProcessRank
from jaxpp_async.protocol.connection import Connection
from jaxpp_async.protocol.frames import Identity
from jaxpp_async.protocol.messages import Configure, Failed, Ready, Request, Reserve, Reserved

_LOG = logging.getLogger("jaxpp_async")
_LATE_REPORT_S = 0.3
"""The most seconds between the arrival of a process's last message and the report of its death, which
reach this process independently of each other.
"""

_PLAIN: Final[dict[str, type[JaxppAsyncError]]] = {"InstallError": InstallError, "MeshError": MeshError}
"""The errors of an actor whose text tells a user everything, by class name. The user gets an error of the
same class without a traceback.
"""

T = TypeVar("T")


class Startup:
    """A starter of one mesh's actor processes. If a start fails, the error says which stage failed and why.

    Args:
        launcher: starts the processes.
        listener: accepts their control connections.
        requests: sends requests to the processes.
        timeout_s: the time limit in seconds for each stage of a start.
        on_progress: called with a line of text when a process is ready.

    Attributes:
        handles: the handle of each process by process number, for callers that have to stop the processes. If
            a process was replaced, the handle is that of the process that replaced it last.
    """

    def __init__(
        self,
        launcher: Launcher,
        listener: ControlListener,
        requests: Requests,
        *,
        timeout_s: float,
        on_progress: Callable[[str], None],
    ):
        self._launcher, self._listener, self._requests = launcher, listener, requests
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
                if not hasattr(handle, "wait_dead"):  # a launcher of the user's own
                    start = f"{type(self._launcher).__name__}.start"
                    raise launch_error(process_rank, f"{start} returned {handle!r}, which is no ActorHandle")
                self.handles[spec.process_id] = handle
                connection = await self._unless_dead(process_rank, arrival, remedy)
        except TimeoutError:
            raise self._timeout_error(process_rank, "did not connect", remedy) from None
        except OSError as error:
            raise launch_error(process_rank, f"could not be started: {error}") from error
        return make_link(process_rank, handle, connection)

    async def reserve(self, link: ActorLink) -> int:
        """Tell a process to find a free port, at which the other processes of its actor can connect to it,
        and return the port.

        Raises:
            LaunchError: the process found no port, died or did not answer in time.
        """
        reserved: Reserved = await self._call(link, Reserve(), "connected but did not find a free port")
        return reserved.port

    async def configure(self, link: ActorLink, message: Configure) -> Ready:
        """Have one process start JAX and its transport, and return its reply, which describes its devices.

        The process's devices, and its address for the transport of arrays, are stored in `link`. The state of
        a process that a restart has started stays `"restarting"`.

        Raises:
            LaunchError: the process failed, died or did not answer in time.
            HandshakeError: the process has another version of JAX.
            InstallError: the process lacks a package.
            MeshError: the process lacks devices.
        """
        ready: Ready = await self._call(link, message, "connected but did not start JAX and the transport")
        check_library_versions(link.info, ready.versions)
        state = link.info.state if link.info.state == "restarting" else "ready"
        link.info = replace(link.info, devices=ready.devices, gpus=ready.hardware.gpus, state=state)
        link.address = ready.address
        self._on_progress(f"{link.info} is ready: {', '.join(ready.devices)}")
        return ready

    async def _call(self, link: ActorLink, message: Request, late: str) -> Any:
        """Send a request to a process that is still being started, and return its reply.

        Args:
            link: the process.
            message: the request.
            late: a clause that says what the process did not do in time, such as `"connected but did not find
                a free port"`, for the error about a missed deadline.

        Raises:
            LaunchError: the process died or did not answer in time.
            JaxppAsyncError: the request failed; `unready_error` chooses the class of the error.
        """
        process_rank = ProcessRank(link.info.process, link.info.size)
        task = asyncio.get_running_loop().create_task(
            self._requests.call(link.info.process, message), name=f"configure {process_rank}"
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._unless_dead(process_rank, task)
        except TimeoutError:
            raise self._timeout_error(process_rank, late) from None
        except RemoteError as error:
            raise unready_error(link.info, error) from None
        finally:
            task.cancel()

    async def _unless_dead(
        self, process_rank: ProcessRank, wanted: asyncio.Future[T], unconnected: str = ""
    ) -> T:
        """Wait for the future `wanted` and return its result. If the process dies first, raise an error.

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
                raise launch_error(process_rank, what, death.output_tail, handle=handle)
            return await wanted
        finally:
            dead.cancel()

    def _timeout_error(self, process_rank: ProcessRank, what: str, remedy: str = "") -> ActorError:
        handle = self.handles.get(process_rank.process)
        tail = handle.output_tail() if handle is not None else ()
        late = f"{what} within {self._timeout_s:g} s (launch_timeout_s){remedy}"
        return launch_error(process_rank, late, tail, handle=handle)


def unready_error(actor: ActorInfo, error: RemoteError) -> JaxppAsyncError:
    """Return the error for an actor that could not be configured.

    If the failure is an `InstallError` or `MeshError`, which the user can fix, the result has the same class
    and text, without the actor's traceback. Otherwise the result is a `LaunchError`.

    Args:
        actor: the actor process.
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
    """Return advice for the user, to be appended to an error that says that an actor was started but did not
    connect.

    Args:
        controller: the host and port to which actors connect, or None. If the host is a loopback address, or
            `controller` is None, the result is empty.
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
        connection: the control connection of the process, whose messages are passed to the link from now on.
    """
    info = ActorInfo(
        process_rank.actor, handle.host, handle.pid, (), "starting", process_rank.rank, process_rank.size
    )
    link = ActorLink(info, handle, connection)
    link.listen(_on_failed, _on_closed)
    return link


def _has_answer(wanted: asyncio.Future[Any]) -> bool:
    """Return whether a future has a result, or an error other than a cancellation or a `LaunchError`.

    A cancellation or `LaunchError` may be a consequence of the process's death; the error about the death
    then explains more.
    """
    return wanted.done() and not wanted.cancelled() and not isinstance(wanted.exception(), LaunchError)


def _on_failed(link: ActorLink, failed: Failed | ProtocolError) -> None:
    if isinstance(failed, ProtocolError):
        raise failed  # the connection ends with this error
    for request in link.open.values():  # the actor itself failed, and so do all its requests
        request.waiter.fail(remote_error(link.info, failed))


def _on_closed(link: ActorLink, error: Exception | None) -> None:
    process_rank = ProcessRank(link.info.process, link.info.size)
    what = f"closed its control connection before it was ready: {error}"
    for request in link.open.values():
        request.waiter.fail(launch_error(process_rank, what))
