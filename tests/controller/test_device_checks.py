"""Direct tests of the comparison of actors' devices, which comes before anything is compiled."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import fake_actor
import pytest
from paths import SUPPORT

from jaxpp_async.controller.actor_group import ActorGroup
from jaxpp_async.controller.deploy import LoadableProgram
from jaxpp_async.controller.device_checks import ProcessDevices, check_agreement
from jaxpp_async.controller.options import ActorConfig
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.errors import LaunchError, MeshError
from jaxpp_async.launch import LocalLauncher
from jaxpp_async.protocol.actor_info import ActorInfo
from jaxpp_async.protocol.messages import Hardware


def cpu(name: str) -> ProcessDevices:
    return ProcessDevices(name, ord(name[0]), f"host {name}")


def gpu(
    name: str, uuid: str = "", *, host: str = "n1", fraction: float = 0.75, cuda: str = "13.0"
) -> ProcessDevices:
    """Its actor is its name's first character."""
    return ProcessDevices(name, ord(name[0]), host, cuda, (uuid or f"GPU-{name}",), fraction)


def nccl(
    name: str, uuid: str = "", version: str = "2.32.3", *, shares: bool = False, fraction: float = 0.4
) -> ProcessDevices:
    return replace(gpu(name, uuid, fraction=fraction), nccl=version, nccl_shares=shares)


BUS = "0000:01:00.0"
"""What tells a GPU apart on its machine only."""

AGREED = [
    [cpu("a"), cpu("b")],
    [gpu("a"), gpu("b")],
    [gpu("a"), gpu("b", host="n2")],
    [gpu("a", cuda="13.0"), gpu("b", cuda="13.1")],
    [gpu("a", "GPU-0", fraction=0.45), gpu("b", "GPU-0", fraction=0.45)],
    [gpu("a", "GPU-0", fraction=0.0), gpu("b", "GPU-0", fraction=0.0)],
    [gpu(str(i), "GPU-0", fraction=1 / 3) for i in range(3)],
    [gpu("a", BUS, host="n1"), gpu("b", BUS, host="n2")],
    [gpu("a0", "GPU-0"), gpu("a1", "GPU-1")],
    [gpu("a0", BUS), gpu("a1", BUS, host="n2")],
    [gpu("a", "MIG-0", fraction=0.4), gpu("b", "MIG-0", host="n1.cluster", fraction=0.4)],
    [gpu(name, f"GPU-{name[1]}", fraction=0.45) for name in ("a0", "a1", "b0", "b1")],
    [nccl("a"), nccl("b")],
    [nccl(name, "GPU-0", shares=True) for name in "ab"],
    # no two that follow each other share one
    [nccl("a", "GPU-0"), nccl("b", "GPU-1"), nccl("c", "GPU-0"), nccl("d", "GPU-1")],
]


@pytest.mark.parametrize("members", AGREED)
def test_what_can_work_together(members):
    check_agreement(members)


REFUSED = [
    *(
        (
            [gpu("a0", "GPU-0", fraction=fraction), gpu("a1", "GPU-0", fraction=fraction)],
            "^a0, a1 have GPU GPU-0, but actor 97 wants a GPU for each device; make spmd_mesh smaller",
        )
        for fraction in (0.45, 0.0)
    ),
    ([gpu("a"), gpu("b", cuda="12.9")], r"CUDA 13: a; CUDA 12: b.*\[cuda12\]'"),
    (
        [gpu("a"), *(gpu(str(i), cuda="12.9") for i in range(6))],
        "CUDA 12: 0, 1, 2, 3 and 2 more",
    ),
    (
        [gpu("a", "GPU-0"), gpu("b", "GPU-0")],
        "a, b share GPU GPU-0, and set aside 0.75, 0.75 of its memory, 1.5 together.*'0.45'",
    ),
    ([gpu("a", BUS), gpu("b", BUS)], f"a, b share GPU {BUS} of host n1, and set aside"),
    *(  # one machine under two names
        ([gpu("a", uuid), gpu("b", uuid, host="n1.cluster")], f"a, b share GPU {uuid}, and set aside")
        for uuid in ("GPU-0", "MIG-0")
    ),
    (
        [gpu("a0", "GPU-0"), gpu("a1", "GPU-0", host="n1.cluster")],
        "a0, a1 have GPU GPU-0, but actor 97 wants",
    ),
    ([nccl("a"), nccl("b", version="2.30.1")], r"NCCL 2.32.3: a; NCCL 2.30.1: b\); install the same version"),
    *(
        (
            [nccl("a", "GPU-0", shares=one), nccl("b", "GPU-0", shares=other)],
            "a, b share GPU GPU-0, and both ends are",
        )
        for one, other in ((False, False), (True, False))
    ),
    (
        [nccl("a0", "GPU-0"), nccl("c0", "GPU-0"), nccl("b0", "GPU-0")],
        "^a0, b0 share.*'NCCL_MULTI_RANK_GPU_ENABLE'",
    ),
]


@pytest.mark.parametrize(("members", "says"), REFUSED)
def test_what_cannot_work_together_is_refused_with_a_remedy(members, says):
    with pytest.raises(MeshError, match=says):
        check_agreement(members)


def test_processes_of_one_actor_are_known_as_such():
    info = ActorInfo(1, "n1", 7, (), "ready", 1, 2)
    hardware = {
        3: Hardware(
            "g", 1, cuda="13.0", gpus=("GPU-0",), memory_fraction=0.4, nccl="2.32.3", nccl_shares=True
        )
    }
    actor_group: Any = SimpleNamespace(links={3: SimpleNamespace(info=info)}, hardware=hardware)
    assert ActorGroup._member(actor_group, 3) == ProcessDevices(
        str(info), 1, "n1", "13.0", ("GPU-0",), 0.4, "2.32.3", True
    )


async def test_a_mesh_compares_what_its_actors_tell_before_anything_is_loaded():
    """Actors without JAX, which tell of a GPU that they have in common."""
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    config = ActorConfig(env={"PYTHONPATH": path, fake_actor.GPUS: "GPU-0"})
    launcher = LocalLauncher(actor="fake_actor:FakeActor")
    said = (
        r"^actor 0 \(host .*\), actor 1 \(host .*\) share GPU GPU-0, and set aside 0.75, 0.75 of its memory"
    )
    with pytest.raises(MeshError, match=said):
        await fake_actor.start_fakes(2, launcher, config)


async def test_who_replaces_another_is_compared_as_well():
    """A GPU of which two actors have a part each; the successor of one sets aside more than is left."""
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    config = ActorConfig(
        env={"PYTHONPATH": path, fake_actor.GPUS: "GPU-0", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4"}
    )
    launcher = LocalLauncher(actor="fake_actor:FakeActor", forward=lambda line: None)
    controller = await fake_actor.start_fakes(2, launcher, config, max_restarts=3)
    try:
        config.env["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.75"
        await controller.load(LoadableProgram(fake_actor.scripted("0:hang 1:exit")))
        async with asyncio.timeout(30):
            with pytest.raises(
                LaunchError, match=r"be replaced: actor 0.*, actor 1.* set aside 0.4, 0.75 of"
            ):
                await controller.start_step(SubmittedStep(0), {}, {})
    finally:
        await controller.aclose()
