"""What an actor does to a JAX that is its own, seen from a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import asyncio, json, os, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from jaxpp_async.protocol import messages as m
from jaxpp_async.actors.actor import Actor
from jaxpp_async.transport.memory import MemoryNetwork, MemoryTransport

async def main():
    replies = asyncio.Queue()
    network = MemoryNetwork()
    send = lambda reply, number=None: number is None or replies.put_nowait(reply)
    actor = Actor(0, make_transport=lambda name, _: MemoryTransport(network, 0), send=send)
    actor.handle(m.Configure(
        spmd_mesh=(("data", 2), ("model", 2)), axis_types=("auto", "auto"), platform="cpu",
        jax_config={"jax_enable_x64": True}, cache_dir=sys.argv[1] + "/cache", setup="hook:prepare",
        setup_folder=None, transport="memory", epoch=1), 1)
    ready = await replies.get()
    assert isinstance(ready, m.Ready), ready.traceback

    import jax
    from jax import export
    from jaxpp_async.program.actor_program import ActorProgram
    from jaxpp_async.program.instructions import Aval, Input, Output, Run
    aval = Aval((4,), "float64", ("data",))
    mesh = actor._resources.step_resources.layouts.devices.mesh
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    double = jax.jit(lambda x: (x * 2,), in_shardings=spec, out_shardings=spec)
    blob = bytes(export.export(double)(jax.ShapeDtypeStruct((4,), "float64")).serialize())
    program = ActorProgram(0, (Input(0, 0), Run("f", 0, (0,), (1,)), Output(1, 0)), (aval, aval))
    actor.handle(m.Load(0, program, {0: "f"}, {"f": blob}), 2)
    loaded = await replies.get()
    assert isinstance(loaded, m.Loaded), loaded.traceback
    put = m.Put(1, aval, np.arange(4.0).tobytes())
    actor.handle(m.Step(1, 0, 0, {0: 1}, {0: 2}, puts=(put,), frees_after=(1,)), 3)
    done = await replies.get()
    actor.handle(m.Fetch((2,), (1,)), 4)
    fetched = await replies.get()
    await actor.aclose()
    print(json.dumps({
        "devices": ready.devices, "versions": sorted(ready.versions), "live_buffers": done.stats.live_buffers,
        "values": np.frombuffer(fetched.arrays[0][2]).tolist(),
        "cached": len(os.listdir(sys.argv[1] + "/cache")),
        "hook": os.environ.get("HOOK"),
    }))

asyncio.run(main())
"""

HOOK = """
import os
from jax._src import xla_bridge
def prepare():
    os.environ["HOOK"] = "before JAX" if not xla_bridge.backends_are_initialized() else "too late"
"""


def test_an_actor_process_configures_its_own_jax(tmp_path):
    (tmp_path / "hook.py").write_text(HOOK)
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert out.returncode == 0, out.stderr
    found = json.loads(out.stdout)
    assert found.pop("cached") > 0, "small executables are not in the compilation cache"
    assert found == {
        "devices": ["cpu:0", "cpu:1", "cpu:2", "cpu:3"],
        "versions": ["jax", "jaxlib"],
        "live_buffers": 1,
        "values": [0.0, 2.0, 4.0, 6.0],
        "hook": "before JAX",
    }
