"""A launcher of one's own: each actor is a subprocess of this machine.

    python examples/own_launcher.py

To start actors somewhere else, change `start`, and how the handle sees and ends the process.
docs/launching.md lists what a launcher has to do.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

import jax
import jax.numpy as jnp

import jaxpp_async as jpp
from jaxpp_async.launch import (
    CONTROLLER,
    ActorRequest,
    Death,
    LaunchSpec,
    make_process_transport,
)


class SubprocessHandle:
    """An `ActorHandle`: one actor's exit, its output, and its end."""

    host = "this machine"

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process
        self._lines: list[str] = []
        self._reading = asyncio.create_task(self._read())
        self._feeding = asyncio.create_task(self._feed())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_dead(self) -> Death:
        await asyncio.shield(self._reading)  # a wait that is cancelled leaves the task alone
        return Death(await self._process.wait(), self.output_tail())

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def output_tail(self) -> tuple[str, ...]:
        return tuple(self._lines[-50:])

    def progress(self) -> None:
        return None  # shares no page of memory with the actor

    async def aclose(self) -> None:
        self.kill()
        self._feeding.cancel()
        await asyncio.gather(self._reading, self._feeding, return_exceptions=True)

    def _signal(self, signum: int) -> None:
        if self._process.returncode is None:
            os.killpg(self.pid, signum)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self._lines.append(line.decode(errors="replace").rstrip())
            print(self._lines[-1])
        await self._process.wait()

    async def _feed(self) -> None:
        """Tell the actor every second that this process lives; a thread would also while the loop is busy."""
        assert self._process.stdin is not None
        while True:
            await asyncio.sleep(1.0)
            self._process.stdin.write(b".")


class SubprocessLauncher:
    """A `Launcher` that starts each actor as a subprocess.

    Args:
        config: entries that replace those of `LaunchSpec.config`, such as `lease_s`.
    """

    listen_host = "127.0.0.1"  # where the controller listens: this machine only
    transports = ("ucx",)

    def __init__(self, **config: Any):
        self._config = config
        self._handles: list[SubprocessHandle] = []

    def make_transport(self, kind: str, network: Any) -> Any:
        return make_process_transport(kind, CONTROLLER, network)

    async def start(self, spec: LaunchSpec, adopt: Any) -> SubprocessHandle:
        env = {"JAX_PLATFORMS": spec.platform, **spec.env}
        here = (spec.process_id, spec.num_processes)  # which of this machine's processes, of how many
        request = ActorRequest(sys.executable, env, {}, *here, gpus=spec.gpus, defaults=spec.defaults)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "jaxpp_async.actors"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env=request.environment(),
        )
        config = spec.config(**self._config)  # contains the mesh's secret: through the pipe only
        assert process.stdin is not None
        process.stdin.write(json.dumps(config).encode() + b"\n")
        self._handles.append(SubprocessHandle(process))
        return self._handles[-1]

    async def aclose(self) -> None:
        handles, self._handles = self._handles, []
        await asyncio.gather(*(handle.aclose() for handle in handles))


def train_step(weights, batch):
    """One step of gradient descent over two stages."""

    def loss_fn(weights, microbatch):
        hidden = jpp.pipeline_yield(jnp.tanh(microbatch @ weights[0]))
        return jnp.mean((hidden @ weights[1]) ** 2)

    grads, loss = jpp.accumulate_grads(
        lambda microbatch: jax.value_and_grad(loss_fn)(weights, microbatch)[::-1],
        jpp.Std1F1B(num_stages=2),
        reduce=(jpp.Sum(), jpp.Mean()),
    )(batch)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss


async def main() -> list[float]:
    weights, batch = [jnp.full((8, 8), 0.1), jnp.full((8, 8), 0.2)], jnp.ones((4, 2, 8))
    losses = []
    async with jpp.RemoteMesh(2, launcher=SubprocessLauncher()) as mesh:
        step = mesh.distributed(train_step, donate_argnums=0)
        for _ in range(3):
            weights, loss = await mesh.run(step, weights, batch)
            losses.append(float(await loss))
    print("losses", losses)
    return losses


if __name__ == "__main__":
    asyncio.run(main())
