"""launch: a contender: how long two actors take to start, from entering the mesh to being inside it. A "step"
is one start; the mesh is closed again outside the time. Nothing runs between measurements."""

from __future__ import annotations

import asyncio
import time

import jax
from contender import Channel

import jaxpp_async as jpp


async def launches(times: int) -> list[float]:
    """Start and end so many meshes; ms of each start."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        async with jpp.RemoteMesh(2):
            found.append((time.perf_counter() - start) * 1e3)
    return found


async def main(channel: Channel) -> None:
    await channel.serve_async(launches, jax=jax.__version__)


if __name__ == "__main__":
    asyncio.run(main(Channel()))
