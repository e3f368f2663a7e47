"""What actors have for devices is compared before anything is compiled; what is missing on an actor is said
plainly."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_actor
import pytest
from paths import SUPPORT

import jaxpp_async as jpp
from jaxpp_async.base import install_hints
from jaxpp_async.base.install_hints import cuda_error, extra_of, pip_install
from jaxpp_async.controller.actor_group import ActorGroup
from jaxpp_async.controller.device_checks import ProcessDevices, check_agreement
from jaxpp_async.controller.options import ActorConfig
from jaxpp_async.controller.startup import unready_error
from jaxpp_async.errors import InstallError, LaunchError, MeshError, RemoteError
from jaxpp_async.launch import LocalLauncher
from jaxpp_async.protocol.actor_info import ActorInfo
from jaxpp_async.protocol.messages import Hardware
from jaxpp_async.transport.nccl.order import MULTI_RANK, ranks_may_share

ROOT = Path(jpp.__file__).parents[1]


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


@pytest.mark.parametrize(
    ("version", "value", "expected"),
    [("2.32.3", "1", True), ("2.30.1", "1", True), ("2.29.7", "1", False), ("2.32.3", None, False),
     ("2.32.3", "0", False), ("2.32.3", "", False), ("3.0", "1", True)],
)  # fmt: skip
def test_two_ranks_a_gpu_need_a_new_nccl_and_a_variable(version, value, expected):
    assert ranks_may_share(version, {} if value is None else {MULTI_RANK: value}) == expected


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
        texts: Any = {0: "hang", 1: "exit"}
        await controller.load(0, texts, {}, {})
        async with asyncio.timeout(30):
            with pytest.raises(
                LaunchError, match=r"be replaced: actor 0.*, actor 1.* set aside 0.4, 0.75 of"
            ):
                await controller.start_step(0, {}, {})
    finally:
        await controller.aclose()


ACTOR = ActorInfo(1, "n2", 7, (), "starting")

UNREADY = [
    (
        "jaxpp_async.errors.InstallError",
        "no JAX for GPUs",
        InstallError,
        r"^actor 1 \(host n2, pid 7\): no JAX for GPUs$",
    ),
    ("jaxpp_async.errors.MeshError", "too few", MeshError, r"^actor 1 \(host n2, pid 7\): too few$"),
    (
        "jaxpp_async.errors.LaunchError",
        "setup='m:f' raised OSError: x",
        LaunchError,
        r"(?s)^actor 1 \(host n2, pid 7\): setup='m:f' raised OSError: x\n\nTraceback.*line 1",
    ),
    (
        "ValueError",
        "own",
        LaunchError,
        r"(?s)^could not start JAX and the transport on actor 1.*own.*Traceback.*line 1",
    ),
]


@pytest.mark.parametrize(("kind", "message", "error", "says"), UNREADY)
def test_what_an_actor_lacks_is_no_traceback(kind, message, error, says):
    text = f"{ACTOR}: {kind}: {message}\n\nTraceback on the actor:\n  line 1"
    with pytest.raises(error, match=says) as raised:
        raise unready_error(ACTOR, RemoteError(text, exception_type=kind))
    assert ("Traceback" in str(raised.value)) == (error is LaunchError)


@pytest.mark.parametrize(
    ("platform", "cuda", "extra"),
    [("cpu", None, "cpu"), ("cuda", None, "cuda13"), ("cuda", (13, 1), "cuda13"), ("cuda", (12, 4), "cuda12"),
     ("cuda", (11, 8), "cuda12")],
)  # fmt: skip
def test_the_extra_that_a_driver_can_run(platform, cuda, extra):
    assert extra_of(platform, cuda) == extra


def test_a_jax_without_cuda_is_told_with_the_extra(monkeypatch):
    installed: Any = SimpleNamespace(read_text=lambda name: '{"url": "file:///a%20b/clone"}')
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: installed)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    missing = cuda_error("platform='cuda'")
    assert (
        missing is not None and "pip install '/a b/clone[cuda13]'" in str(missing) and "580" in str(missing)
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "jax_cuda12_plugin" or None)
    assert cuda_error("platform='cuda'") is None


GIT = '{"url": "https://host/a/clone", "vcs_info": {"vcs": "git", "commit_id": "ab12"}}'


@pytest.mark.parametrize(
    ("direct_url", "says"),
    [
        ('{"url": "file://HERE", "dir_info": {}}', "pip install 'HERE[cpu]'"),
        ('{"url": "file://HERE", "dir_info": {"editable": true}}', "pip install -e 'HERE[cpu]'"),
        ('{"url": "file://localhostHERE", "dir_info": {}}', "pip install 'HERE[cpu]'"),
        (
            '{"url": "file:///gone/a.whl", "archive_info": {}}',
            "pip install '/gone/a.whl[cpu]'  (there is no source of this package at /gone/a.whl any more",
        ),
        (
            '{"url": "file:///a%27b", "dir_info": {}}',
            """pip install '/a'"'"'b[cpu]'  (there is no source of this package at /a'b any""",
        ),
        (GIT, "pip install 'jaxpp-async[cpu] @ git+https://host/a/clone@ab12'"),
        (
            GIT[:-1] + ', "subdirectory": "x"}',
            "'jaxpp-async[cpu] @ git+https://host/a/clone@ab12#subdirectory=x'",
        ),
        (
            '{"url": "https://host/a.whl", "archive_info": {}}',
            "pip install 'jaxpp-async[cpu] @ https://host/a.whl'",
        ),
        (None, f"pip install -e '{ROOT}[cpu]'"),  # a clone on the path
        ("[]", f"pip install -e '{ROOT}[cpu]'"),
        ('{"url": null}', f"pip install -e '{ROOT}[cpu]'"),
        ('{"url": "file://other/a"}', f"pip install -e '{ROOT}[cpu]'"),
    ],
)
def test_what_is_missing_comes_from_where_the_package_came_from(direct_url, says, monkeypatch, tmp_path):
    here = tmp_path / "a b"
    here.mkdir()
    text = direct_url and direct_url.replace("HERE", str(here).replace(" ", "%20"))
    installed: Any = SimpleNamespace(read_text=lambda name: text)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: installed)
    assert says.replace("HERE", str(here)) in pip_install("cpu")


@pytest.mark.parametrize(
    ("direct_url", "says"),
    [
        (None, "pip install 'jaxpp-async[cpu]'"),  # by its name, from an index
        ("[", "pip install '/site[cpu]'  (there is no source of this package at /site any"),
        ("none", "pip install '/site[cpu]'  (there is no source of this package at /site any"),
    ],
)
def test_the_name_alone_is_suggested_only_where_pip_had_it_by_name(direct_url, says, monkeypatch):
    def distribution(name):
        if direct_url == "none":
            raise importlib.metadata.PackageNotFoundError
        return SimpleNamespace(read_text=lambda name: direct_url)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(install_hints, "__file__", "/site/jaxpp_async/base/install_hints.py")
    assert pip_install("cpu").startswith(says)


def test_no_text_names_an_extra_in_another_way():
    texts = {path: path.read_text() for path in (ROOT / "jaxpp_async").rglob("*.py")}
    assert not [str(path) for path, text in texts.items() if re.search(r"jaxpp-async\[", text)]


@pytest.mark.skipif(cuda_error("") is None, reason="JAX for GPUs is installed here")
async def test_a_mesh_on_gpus_without_jax_for_gpus_says_which_extra_to_install():
    with pytest.raises(
        InstallError,
        match=r"^platform='cuda' needs JAX with CUDA.*cuda13",  # no actor had to start to say so
    ) as raised:
        async with jpp.RemoteMesh(1, platform="cuda"):
            raise AssertionError("it has started")
    assert "Traceback" not in str(raised.value)
