"""launch: starts and stops actors. A launcher gets one actor's `LaunchSpec` and gives an `ActorHandle`.

`LocalLauncher` runs one process an actor on this machine, `InlineLauncher` (in `actors.inline`) runs actors inside this
process. Both have the actor talk to the controller through the same protocol. A launcher knows nothing of programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxpp_async.actors.lifeline import BEAT_S, LEASE_S
from jaxpp_async.actors.progress import Position, ProgressPage, make_page
from jaxpp_async.actors.protocol import DEFAULT_MAX_FRAME_BYTES
from jaxpp_async.actors.warden import Death, Process, Warden
from jaxpp_async.errors import MeshError
from jaxpp_async.program import CONTROLLER
from jaxpp_async.transport.base import Transport

DEFAULT_ACTOR = "jaxpp_async.actors.actor:Actor"


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What a launcher needs to start one actor.

    Args:
        actor_id: counted from 0. num_actors: of the whole mesh, for sharing out cores.
        incarnation: which life of the actor this is.
        secret: the mesh's 32 bytes.
        controller: host and port to connect to, or None if the launcher does without (`Launcher.listen_host`).
        platform: `"cpu"` or `"cuda"`.
        env: environment variables to add.
        max_frame_bytes: the longest control frame.
    """

    actor_id: int
    num_actors: int
    incarnation: int
    secret: bytes = field(repr=False)
    controller: tuple[str, int] | None
    platform: str = "cpu"
    env: Mapping[str, str] = field(default_factory=dict)
    max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES


class ActorHandle(Protocol):
    """One started actor."""

    @property
    def host(self) -> str:
        """Name of the machine it runs on."""
        ...

    @property
    def pid(self) -> int:
        """Its process id there."""
        ...

    async def wait_dead(self) -> Death:
        """Wait until it has ended; may be awaited any number of times, and cancelled."""
        ...

    def terminate(self) -> None:
        """Ask it and what it started to end (SIGTERM). Nothing happens if it is dead."""
        ...

    def kill(self) -> None:
        """End it and what it started (SIGKILL). Nothing happens if it is dead."""
        ...

    def output_tail(self) -> tuple[str, ...]:
        """The last lines that it printed."""
        ...

    def progress(self) -> Position | None:
        """Where it was last in its program, also after its death; None if that is not known."""
        ...


class Launcher(Protocol):
    """Starts actors. One launcher serves one mesh at a time, and may serve another after `aclose`."""

    @property
    def listen_host(self) -> str | None:
        """The interface on which the controller must listen, or None if sockets are handed over instead."""
        ...

    @property
    def transports(self) -> tuple[str, ...]:
        """The data planes that its actors can use; the first is the default."""
        ...

    def make_transport(self, kind: str) -> Transport:
        """The controller's own end of the data plane."""
        ...

    async def start(self, spec: LaunchSpec, adopt: Callable[[socket.socket], None]) -> ActorHandle:
        """Start one actor; returns when it exists, before it has connected.

        Args:
            adopt: takes a connected socket, for launchers that need no listening controller.

        Raises:
            OSError: it could not be started.
        """
        ...

    async def aclose(self) -> None:
        """Kill what is left and give back threads and descriptors. A second call does nothing."""
        ...


class LocalLauncher:
    """One process an actor, on this machine.

    Args:
        pin_cores: share this process's CPU cores out among the actors.
        python: the interpreter; default this one.
        actor: `module:name` of the actor class, for tests of the control plane.
        forward: called with each line that an actor prints, prefixed; default: to `sys.stderr`.
        beat_s, lease_s: seconds between two signs of life on stdin, and how long an actor waits for one.
    """

    listen_host = "127.0.0.1"
    transports = ("ucx",)

    def __init__(
        self,
        *,
        pin_cores: bool = True,
        python: str | None = None,
        actor: str = DEFAULT_ACTOR,
        forward: Callable[[str], None] | None = None,
        beat_s: float = BEAT_S,
        lease_s: float = LEASE_S,
    ):
        self._pin_cores, self._python, self._actor = pin_cores, python or sys.executable, actor
        self._forward = forward or _print_to_stderr
        self._beat_s, self._lease_s = beat_s, lease_s
        self._warden: Warden | None = None
        self._pages: list[ProgressPage] = []

    def make_transport(self, kind: str) -> Transport:
        """The controller's UCX end."""
        return make_process_transport(kind, CONTROLLER)

    async def start(self, spec: LaunchSpec, adopt: Callable[[socket.socket], None]) -> ActorHandle:
        """Spawn `python -m jaxpp_async.actors`; see `Launcher.start`."""
        if self._warden is None:
            self._warden = Warden(self._beat_s)
        prefix = f"[actor {spec.actor_id}] "
        page = make_page()
        try:
            spawned = self._warden.spawn(
                [self._python, "-m", "jaxpp_async.actors"],
                self._environment(spec),
                self._first_line(spec, page),
                lambda line: self._forward(prefix + line),
                descriptors=(page,),
            )
            process = await asyncio.wrap_future(spawned)
        except BaseException:  # also a cancellation: the descriptor is nobody else's
            os.close(page)
            raise
        self._pages.append(ProgressPage(page))
        return _LocalHandle(process, self._pages[-1])

    async def aclose(self) -> None:
        """See `Launcher.aclose`."""
        warden, self._warden = self._warden, None
        if warden is not None:
            await asyncio.wrap_future(warden.close())
        for page in self._pages:
            page.close()
        self._pages.clear()

    def _first_line(self, spec: LaunchSpec, progress_page: int | None = None) -> bytes:
        """Configuration and secret, as one line of JSON: stdin is the one channel that no other user can read."""
        assert spec.controller is not None
        cores = sorted(os.sched_getaffinity(0)) if self._pin_cores else []
        config = {
            "actor_id": spec.actor_id,
            "incarnation": spec.incarnation,
            "secret": spec.secret.hex(),
            "controller": list(spec.controller),
            "parent_pid": os.getpid(),
            "cores": share_cores(cores, spec.num_actors)[spec.actor_id] if cores else [],
            "lease_s": self._lease_s,
            "actor": self._actor,
            "max_frame_bytes": spec.max_frame_bytes,
            "progress_page": progress_page,
        }
        return json.dumps(config).encode() + b"\n"

    def _environment(self, spec: LaunchSpec) -> dict[str, str]:
        env = dict(os.environ)
        env["JAX_PLATFORMS"] = spec.platform
        env["PYTHONUNBUFFERED"] = "1"  # what it prints is seen when it is printed, also when it is killed next
        env.update(spec.env)
        return env


class _LocalHandle:
    """An `ActorHandle` on a process of the warden."""

    def __init__(self, process: Process, page: ProgressPage):
        self._process, self.host, self.pid = process, socket.gethostname(), process.pid
        self.progress = page.read
        self._dead = asyncio.wrap_future(process.dead)

    async def wait_dead(self) -> Death:
        return await asyncio.shield(self._dead)

    def terminate(self) -> None:
        self._process.signal_group(15)

    def kill(self) -> None:
        self._process.signal_group(9)

    def output_tail(self) -> tuple[str, ...]:
        return self._process.output_tail()


def share_cores(cores: Sequence[int], num_actors: int) -> list[list[int]]:
    """Divide cores among actors: neighbouring ones for each, or round-robin when there are more actors than cores."""
    if num_actors > len(cores):
        return [[cores[i % len(cores)]] for i in range(num_actors)]
    bounds = [i * len(cores) // num_actors for i in range(num_actors + 1)]
    return [list(cores[bounds[i] : bounds[i + 1]]) for i in range(num_actors)]


def make_process_transport(kind: str, peer_id: int) -> Transport:
    """The end of a data plane that joins processes.

    Raises:
        MeshError: a data plane that does not exist, or does not leave the process.
    """
    if kind == "ucx":
        from jaxpp_async.transport.ucx import UCXTransport

        return UCXTransport(peer_id)
    if kind == "memory":
        raise MeshError('transport "memory" does not leave a process: use it with launcher="inline", or "ucx" here')
    raise MeshError(f'unknown transport {kind!r}: choose "ucx"')


def _print_to_stderr(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr is closed: the tail still has the line
        print(line, file=sys.stderr, flush=True)
