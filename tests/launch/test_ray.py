"""Ray: actors in a cluster of Ray's own making, on this machine. Needs `pip install '.[ray]'`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import psutil
import pytest
from fake_actor import scripted, start_fakes

import jaxpp_async as jpp
from jaxpp_async.controller.controller import Controller
from jaxpp_async.controller.deploy import LoadableProgram
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.errors import ActorDiedError, InstallError, LaunchError, MeshError
from jaxpp_async.launch import ray as ray_module
from jaxpp_async.launch.hosts import Settings
from jaxpp_async.launch.ray import RayLauncher
from tests.launch.test_local import HERE, is_running


async def test_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    mesh = jpp.RemoteMesh(2, launcher="ray")
    with pytest.raises(InstallError, match=r"needs the package ray, .* pip install .*\[ray\]'"):
        await mesh.__aenter__()


@pytest.fixture(scope="module")
def ray():
    module = pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")
    module.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield module
    module.shutdown()


def launcher(num_actors: int = 2, **options) -> RayLauncher:
    settings = Settings(
        python=options.pop("python", None), env={"PYTHONPATH": str(HERE), "TOKEN": "swordfish"}
    )
    return RayLauncher(num_actors, actor="fake_actor:FakeActor", settings=settings, **options)


async def start(made: RayLauncher, num_actors: int = 2) -> Controller:
    await made.prepare()
    return await start_fakes(num_actors, made)


async def all_back(ray) -> None:
    """Every CPU that was set aside is free again."""
    async with asyncio.timeout(10):
        while ray.available_resources().get("CPU", 0) != 2:  # noqa: ASYNC110 (Ray tells nobody)
            await asyncio.sleep(0.05)


async def test_actors_run_and_end_in_a_cluster(ray):
    controller = await start(launcher())
    actors = [psutil.Process(info.pid) for info in controller.actors]
    words = [word for p in psutil.process_iter(["cmdline"]) for word in p.info["cmdline"] or ()]
    assert actors[0].environ()["TOKEN"] == "swordfish" and not any("swordfish" in word for word in words)
    program, _ = await controller.load(LoadableProgram(scripted("hang")))
    step = controller.start_step(SubmittedStep(program), {}, {})
    os.kill(actors[1].pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError, match="was killed by SIGKILL"):
        await step
    await controller.aclose()
    assert not any(map(is_running, actors))
    await all_back(ray)


async def test_a_blocked_event_loop_keeps_the_lease(ray):
    controller = await start(launcher(lease_s=1.0))
    time.sleep(1.5)  # noqa: ASYNC251 (blocks it on purpose)
    await asyncio.sleep(0.2)
    assert controller.cause is None
    await controller.aclose()


async def test_a_cluster_without_room(ray, monkeypatch):
    monkeypatch.setattr(ray_module, "PLACEMENT_TIMEOUT_S", 1.0)
    with pytest.raises(MeshError, match=r"no room for 3 processes of {'CPU': 1} within 1 s; free now: CPU 2"):
        await launcher(3).prepare()
    await all_back(ray)


async def test_no_python_there(ray):
    with pytest.raises(LaunchError, match="No such file or directory: '/no/python'"):
        await start(launcher(python="/no/python"))
    await all_back(ray)
