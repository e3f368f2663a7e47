"""light: actors that execute nothing, for benchmarks of the controller. Any number of them in one process,
each with a control connection of its own. They answer every request at once; no JAX, no data plane, no
heartbeats.

    RemoteMesh(64, launcher=LightLauncher())      # steps are compiled here as ever; the actors take them as
    text
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Callable
from typing import Any

from jaxpp_async.actors.server import SendMessage, serve
from jaxpp_async.launch import LaunchSpec
from jaxpp_async.launch.process_supervisor import Death
from jaxpp_async.protocol import messages as m
from jaxpp_async.protocol.connection import connect_tcp
from jaxpp_async.protocol.frames import Identity

_STATS = m.StepStats(0.0, 0.0, 0.0, 0, 0)


class NoTransport:
    """A data plane on which nothing travels."""

    address = b"none"
    epoch = 0

    async def connect(self, peer: int, address: bytes) -> None: ...
    async def abort(self, peer: int | None = None) -> None: ...
    async def aclose(self) -> None: ...


class LightActor:
    """Answers requests; its steps are done when they arrive."""

    current_step = None

    def __init__(self, actor_id: int, *, send: SendMessage, **_: Any):
        self._send = send

    def handle(self, message: m.Request, number: int) -> None:
        match message:
            case m.Step():
                self._send(m.StepDone(message.step, _STATS), number)
            case m.Configure():
                self._send(m.Ready(NoTransport.address, ("light:0",), {}, m.Hardware("light", 1)), number)
            case m.Connect():
                self._send(m.Connected({}), number)
            case m.Load():
                self._send(m.Loaded(0.0, {}), number)
            case _:
                self._send(m.Done(), number)

    async def aclose(self) -> None: ...


class _Handle:
    """One light actor: dead when the process of all of them is."""

    def __init__(self, process: asyncio.subprocess.Process):
        self.host, self.pid, self._process = socket.gethostname(), process.pid, process

    async def wait_dead(self) -> Death:
        return Death(await self._process.wait(), ())

    def terminate(self) -> None:
        self.kill()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    def output_tail(self) -> tuple[str, ...]:
        return ()

    def progress(self) -> None:
        return None


class LightLauncher:
    """Starts light actors, all in one process beside this one."""

    listen_host = "127.0.0.1"
    transports = ("ucx",)

    def __init__(self) -> None:
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None

    def make_transport(self, kind: str, network: Any) -> Any:
        return NoTransport()

    async def start(self, spec: LaunchSpec, adopt: Callable[[socket.socket], None]) -> _Handle:
        if self._starting is None:
            command = asyncio.create_subprocess_exec(sys.executable, __file__, stdin=asyncio.subprocess.PIPE)
            self._starting = asyncio.get_running_loop().create_task(command, name="start the light actors")
        process = await asyncio.shield(self._starting)
        assert process.stdin is not None
        process.stdin.write(
            json.dumps({**spec.config(), "num_processes": spec.num_processes}).encode() + b"\n"
        )
        return _Handle(process)

    async def aclose(self) -> None:
        if self._starting is not None:
            process = await self._starting
            self._starting = None
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _serve_all() -> None:
    """Each line of stdin is one actor. Ends with the last of them, or with stdin."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    serving: list[asyncio.Task[Any]] = []
    while line := await reader.readline():
        config = json.loads(line)
        serving.append(asyncio.create_task(_serve_one(config), name=f"light actor {config['process_id']}"))
        if len(serving) == config["num_processes"]:
            break
    await asyncio.gather(*serving)


async def _serve_one(config: dict[str, Any]) -> None:
    await serve(
        Identity(config["process_id"], config["incarnation"]),
        bytes.fromhex(config["secret"]),
        connect=lambda connection: connect_tcp(connection, *config["controller"]),
        make_actor=LightActor,
        make_transport=lambda kind, network: NoTransport(),
        max_frame_bytes=config["max_frame_bytes"],
    )


if __name__ == "__main__":
    asyncio.run(_serve_all())
