"""Many steps in a row: what actors and the driver hold at the end is what they held near the beginning."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import psutil
import pytest
from models import grads_step, mlp
from resources import differences, everything, no_new_shared_memory, shared_memory

import jaxpp_async as jpp

MODEL = mlp(2)
STEP = grads_step(MODEL, jpp.Std1F1B(2))
RESIDENT_GROWTH_BYTES = 8 << 20


def resident(mesh: jpp.RemoteMesh) -> np.ndarray:
    """Resident bytes of the driver and of each actor."""
    pids = {psutil.Process().pid, *(a.pid for a in mesh.actors)}
    return np.array([psutil.Process(pid).memory_info().rss for pid in sorted(pids)])


@pytest.mark.parametrize("launcher", ["inline", "local"])
async def test_200_steps_leave_nothing_behind(remote_mesh, launcher):
    mesh = await remote_mesh(2, launcher=launcher)
    step = mesh.distributed(STEP, donate_argnums=0)
    state, batch = MODEL.init(0), MODEL.batch(0, 4)
    batch["x"] = np.resize(batch["x"], (4, 512, 8))  # larger than what rides in control frames
    batch["y"] = np.resize(batch["y"], (4, 512, 3))
    early: dict[str, Any] = {}
    early_resident, files = resident(mesh), shared_memory()
    for number in range(1, 201):
        state, _, losses = await mesh.run(step, state, batch)
        if number % 20 == 0:
            assert np.isfinite(await losses).all()
        if number == 10:
            early = await everything(mesh)
        if number == 50:
            early_resident = resident(mesh)  # allocators have warmed up
    assert differences(early, await everything(mesh)) == {}
    assert (resident(mesh) - early_resident).max() < RESIDENT_GROWTH_BYTES
    await no_new_shared_memory(files)


@pytest.mark.parametrize("launcher", ["inline", "local"])
async def test_two_steps_in_flight_with_fetches_leave_nothing_behind(remote_mesh, launcher):
    mesh = await remote_mesh(2, launcher=launcher)
    step = mesh.distributed(STEP, donate_argnums=0)
    state, batch = MODEL.init(0), MODEL.batch(0, 4)
    early: dict[str, Any] = {}
    for number in range(1, 41):
        future = await mesh.submit(step, state, batch)
        state, grads, losses = future.outputs
        match number % 4:
            case 0:
                await future
            case 1:
                await losses
            case 2:
                await mesh.fetch(grads)
            case 3:
                fetching = asyncio.ensure_future(mesh.fetch([grads, losses]))
                await asyncio.sleep(0)
                fetching.cancel()  # a fetch that nobody waits for any more
                del fetching
        if number == 8:
            await future
            early = await everything(mesh)
    await future
    assert differences(early, await everything(mesh)) == {}


async def test_arrays_are_freed_wherever_the_last_reference_goes(remote_mesh):
    mesh = await remote_mesh(2)
    step = mesh.distributed(STEP)
    batch = MODEL.batch(0, 4)
    params, _, _ = await mesh.run(step, MODEL.init(0), batch)
    before = await everything(mesh)

    kept = [await mesh.run(step, params, batch) for _ in range(3)]
    kept.append(await mesh.put(batch, like=(step, 1)))
    assert (await everything(mesh))["actor 1: store_arrays"] > before["actor 1: store_arrays"]

    cycle: list[Any] = [kept.pop()]
    cycle.append(cycle)  # for the garbage collector
    del cycle
    await kept[0][2].delete()
    await kept[0][2].delete()
    thread = threading.Thread(target=kept.clear)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert differences(before, await everything(mesh)) == {}
