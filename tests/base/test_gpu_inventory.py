"""Which GPUs an actor's process gets, what the compiler makes for actors with GPUs from here, where there is
none, and what is said to who asks for what cannot be."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import one_gpu
import pytest
from jax import export
from jax.sharding import PartitionSpec as P
from planning import plan_step

import jaxpp_async as jpp
from jaxpp_async.actors import cuda, setup
from jaxpp_async.base import gpu_inventory
from jaxpp_async.base.gpu_inventory import (
    GpuShare,
    Visible,
    choose_gpus,
    gpu_environment,
    host_gpus,
    memory_fraction,
    read_visible,
)
from jaxpp_async.compiler.export import emit
from jaxpp_async.errors import ActorError, LaunchError, MeshError, UnsupportedError
from jaxpp_async.jax_bridge import private_api
from jaxpp_async.launch import LocalLauncher
from jaxpp_async.launch.hosts import KEEP_MEMORY, Settings, defaults
from jaxpp_async.launch.launcher import LaunchSpec
from jaxpp_async.launch.spawn import ActorRequest
from jaxpp_async.protocol.actor_info import ActorInfo, merge_processes
from jaxpp_async.session import mesh_options
from jaxpp_async.transport.nccl import library as nccl_library
from jaxpp_async.transport.ucx import context as ucx_context

FOUR = ("0", "1", "2", "3")


@pytest.mark.parametrize(
    "devices, count, each, shares",
    [
        (FOUR, 4, 1, ["0", "1", "2", "3"]),
        (FOUR, 2, 2, ["0 1", "2 3"]),
        (FOUR, 2, 1, ["0 1", "2 3"]),  # those left over are shared out too; JAX takes the first it needs
        (FOUR, 3, 1, ["0", "1", "2 3"]),
        (("0",), 4, 1, ["0 /4"] * 4),
        (("0", "1"), 4, 1, ["0 /2", "1 /2", "0 /2", "1 /2"]),
        (("0", "1"), 3, 1, ["0 /2", "1 /1", "0 /2"]),
        (FOUR, 3, 2, ["0 1 /2", "2 3 /1", "0 1 /2"]),
        (("GPU-8f", "GPU-b2"), 2, 1, ["GPU-8f", "GPU-b2"]),
    ],
)
def test_gpus_are_shared_out_in_consecutive_runs(devices, count, each, shares):
    found = [choose_gpus(devices, index, count, each) for index in range(count)]
    wanted = [text.partition(" /") for text in shares]
    assert found == [GpuShare(tuple(names.split()), int(number or 1)) for names, _, number in wanted]


def test_a_process_gets_one_instance_of_a_gpu_and_no_more():
    parts = ("MIG-a", "mig-b", "MIG-c", "MIG-d")
    assert [choose_gpus(parts, index, 2, 1).devices for index in range(2)] == [("MIG-a",), ("MIG-c",)]
    assert gpu_environment(choose_gpus(parts, 1, 4, 1), {})["CUDA_VISIBLE_DEVICES"] == "mig-b"
    for given in (choose_gpus(parts, 0, 2, 2), GpuShare(("mig-a", "mig-b"), 1)):
        # of a host's; of its own, from a cluster
        with pytest.raises(
            MeshError, match=r"needs 2 GPUs .* \(MIG\) for them, .*; CUDA .*make spmd_mesh smaller"
        ):
            gpu_environment(given, {})


def test_more_gpus_than_there_are():
    with pytest.raises(
        MeshError, match=r"needs 4 GPUs and this host has 2 GPUs \(0, 1\) for it; make spmd_mesh"
    ):
        choose_gpus(("0", "1"), 0, 1, 4)
    with pytest.raises(MeshError, match=r"needs 1 GPU and this host has 0 GPUs for it; .* platform='cpu'"):
        choose_gpus((), 0, 2, 1)


@pytest.mark.parametrize(
    "sharers, user, fraction",
    [
        (1, {}, "0.900"),
        (2, {}, "0.450"),
        (4, {}, "0.225"),
        (2, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}, None),
        (2, {"XLA_CLIENT_MEM_FRACTION": "0.5"}, None),
        (2, {"XLA_CLIENT_MEM_FRACTION": "0.8", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, None),
        (
            2,
            {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.75"},
            r"2 processes share GPU 0, .* take 0.75 .* at most 0.50",
        ),
        (
            3,
            {"XLA_CLIENT_MEM_FRACTION": "0.4"},
            r"3 processes share GPU 0, .*\(XLA_CLIENT_MEM_FRACTION\); .* 0.33,",
        ),
        (2, {"XLA_CLIENT_MEM_FRACTION": "0.9", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, None),
        *(
            (
                sharers,
                {"XLA_PYTHON_CLIENT_MEM_FRACTION": text},
                f"FRACTION='{text}' is no part of a GPU's memory",
            )
            for text in ("a lot", "nan", "inf", "-1", "0", "7")
            for sharers in (1, 2)
        ),
    ],
)
def test_memory_of_a_shared_gpu(sharers, user, fraction):
    if fraction is not None and " " in fraction:
        with pytest.raises(MeshError, match=fraction):
            gpu_environment(GpuShare(("0",), sharers), user)
        return
    env = gpu_environment(GpuShare(("0",), sharers), user)
    assert env["CUDA_VISIBLE_DEVICES"] == "0" and env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert env.get("XLA_PYTHON_CLIENT_MEM_FRACTION") == fraction


@pytest.mark.parametrize(
    "environ, fraction",
    [
        ({}, 0.75),
        ({"XLA_CLIENT_MEM_FRACTION": "0.4"}, 0.4),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, 0.0),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, 0.0),
    ],
)
def test_what_jax_takes_beforehand(environ, fraction):
    assert memory_fraction(environ) == fraction


@pytest.mark.parametrize(
    "visible, there, names, stopped_at",
    [
        (None, "", "", ""),
        (None, "GPU-8f GPU-8a", "0 1", ""),
        ("", "GPU-8f GPU-8a", "", ""),
        ("-1", "GPU-8f GPU-8a", "", ""),
        ("1,-1,0", "GPU-8f GPU-8a", "1", ""),
        ("1,,0", "GPU-8f GPU-8a", "1", ""),
        (" 1, 0,1", "GPU-8f GPU-8a", "1 0", ""),
        ("1,2,0", "GPU-8f GPU-8a", "1", "2"),
        ("0,all", "GPU-8f GPU-8a", "0", "all"),
        ("0,²", "GPU-8f GPU-8a", "0", "²"),
        ("²", "GPU-8f GPU-8a", "", "²"),
        ("GPU-8f,gpu-8A", "GPU-8f11 GPU-8a22", "GPU-8f gpu-8A", ""),
        ("GPU-8f,GPU-8f11", "GPU-8f11 GPU-8a22", "GPU-8f", ""),
        ("GPU-8a,GPU-8", "GPU-8f11 GPU-8a22", "GPU-8a", "GPU-8"),
        ("GPU-9c", "GPU-8f11 GPU-8a22", "", "GPU-9c"),
        ("GPU-8f,1", "GPU-8f11 GPU-8a22", "GPU-8f", "1"),
        ("0,GPU-8a", "GPU-8f11 GPU-8a22", "0", "GPU-8a"),
        ("MIG-a,MIG-b,MIG-a", "GPU-8f", "MIG-a MIG-b", ""),
        ("MIG-GPU-8f/7/0,0", "GPU-8f", "MIG-GPU-8f/7/0", "0"),
        ("7,GPU-8f", "", "7", "GPU-8f"),  # nobody knows what is there: names are believed
        ("GPU-8f,GPU-9c", "", "GPU-8f GPU-9c", ""),
        ("GPU-8f,GPU-9c", "? ?", "GPU-8f GPU-9c", ""),  # how many is known, and nothing else
        ("1,2", "? ?", "1", "2"),
    ],
)
def test_the_gpus_that_a_user_names_are_read_as_cuda_reads_them(visible, there, names, stopped_at):
    uuids = tuple(uuid.strip("?") for uuid in there.split())
    assert read_visible(visible, uuids) == Visible(tuple(names.split()), stopped_at)


class FakeNvml:
    """NVIDIA's library with two GPUs, or one that fails."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, fails=False):
        self._fails, self.open = fails, 0

    def nvmlInit(self):
        if self._fails:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}f"


def test_what_is_there_is_asked_of_the_driver_else_of_the_kernel(monkeypatch):
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert host_gpus({}) == ("0", "1") and nvml.open == 0
    assert gpu_inventory.visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}) == Visible(("GPU-1",), "GPU-2")
    monkeypatch.setattr(os, "listdir", lambda folder: ["nvidia0", "nvidia1", "nvidia2", "nvidiactl", "null"])
    for broken in (FakeNvml(fails=True), None):
        monkeypatch.setitem(sys.modules, "pynvml", broken)
        assert host_gpus({}) == ("0", "1", "2")


@pytest.mark.parametrize(
    "user, order",
    [
        ({}, "PCI_BUS_ID"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f"}, "PCI_BUS_ID"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, None),  # counted as CUDA counts, unless the user says otherwise
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f,1"}, None),
        ({"CUDA_VISIBLE_DEVICES": " 1"}, None),
        ({"CUDA_VISIBLE_DEVICES": "²"}, "PCI_BUS_ID"),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "FASTEST_FIRST"),
    ],
)
def test_numbers_of_gpus_keep_the_order_in_which_the_user_counted(user, order):
    assert gpu_environment(GpuShare(("1",), 1), user).get("CUDA_DEVICE_ORDER") == order


def test_devices_counts_as_nvidias_tools_do():
    assert defaults(Settings(devices=("1",)))["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "CUDA_DEVICE_ORDER" not in defaults(Settings())


def test_a_launcher_sends_the_defaults_along(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    spec = LaunchSpec(0, 1, 0, b"", ("127.0.0.1", 1), platform="cuda", gpus=1)
    request = LocalLauncher(settings=Settings(devices=("1",)))._request(spec)
    assert (
        request.defaults == defaults(Settings(devices=("1",)))
        and request.defaults.items() >= KEEP_MEMORY.items()
    )
    found = request.environment()
    assert (found["CUDA_VISIBLE_DEVICES"], found["CUDA_DEVICE_ORDER"]) == ("1", "PCI_BUS_ID")


def test_what_an_actors_process_gets(monkeypatch):
    def visible(index, count=2, *, own=False, env=None, gpus=1):
        request = ActorRequest("py", env or {}, {}, index, count, gpus=gpus, gpus_are_its_own=own)
        found = request.environment()
        return found.get("CUDA_VISIBLE_DEVICES"), found.get("XLA_PYTHON_CLIENT_MEM_FRACTION")

    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert [visible(i) for i in range(2)] == [("2", "0.900"), ("5", "0.900")]
    assert visible(1, env={"CUDA_VISIBLE_DEVICES": "7"}) == ("7", "0.450")  # devices=, or the user's env=
    assert visible(0, gpus=0) == ("2,5", None), "an actor without GPUs is left alone"
    assert visible(1, 8, own=True, gpus=2) == ("2,5", "0.900"), "a cluster gave them to this process"
    assert visible(1, 8, own=True)[1] == "0.225", "or to all that run there"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert host_gpus(os.environ) == ()
    with pytest.raises(MeshError, match="this host has 0 GPUs"):
        visible(0)
    monkeypatch.setattr(gpu_inventory, "uuids", lambda: ("GPU-8f", "GPU-8a"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert [visible(i)[0] for i in range(2)] == ["0", "1"], "how a host is set up: CUDA reads up to there"
    with pytest.raises(MeshError, match=r"devices= .* is '1,3', and this host has no GPU 3, .*nvidia-smi -L"):
        visible(0, env={"CUDA_VISIBLE_DEVICES": "1,3"})


async def test_a_host_without_gpus_says_so_before_anything_is_compiled(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(mesh_options, "cuda_error", lambda what: None)  # as with a JAX for GPUs
    with pytest.raises(MeshError, match="needs 1 GPU and this host has 0 GPUs for it"):
        async with jpp.RemoteMesh(2, platform="cuda"):
            pass


# ---------------------------------------------------------------- what is compiled here for actors with GPUs


def attention_step(implementation):
    def loss(params, mb):
        x = mb["x"] @ params["in"]
        x = jpp.pipeline_yield(x)
        q = x.reshape(*x.shape[:2], 2, 32).astype(jnp.bfloat16)
        mixed = jax.nn.dot_product_attention(q, q, q, implementation=implementation, is_causal=True)
        return jnp.mean(jnp.square(mixed.astype(jnp.float32).reshape(x.shape) @ params["out"]))

    def step(params, batch):
        def grads(mb):
            value, grad = jax.value_and_grad(loss)(params, mb)
            return grad, value

        return jpp.accumulate_grads(grads, jpp.Std1F1B(2))(batch)

    shapes = {
        "in": jax.ShapeDtypeStruct((16, 64), "float32"),
        "out": jax.ShapeDtypeStruct((64, 16), "float32"),
    }
    return step, shapes, {"x": jax.ShapeDtypeStruct((4, 2, 8, 16), "float32")}


@pytest.mark.parametrize("spmd_mesh", [{}, {"data": 2, "model": 2}], ids=["one device", "four"])
def test_everything_is_lowered_for_the_actors_platform(spmd_mesh):
    step, params, batch = attention_step("xla")
    options = {"in_shardings": (None, P(None, "data"))} if spmd_mesh else {}
    on = {
        platform: plan_step(step, params, batch, spmd_mesh=spmd_mesh, platform=platform, **options)
        for platform in ("cpu", "cuda")
    }
    assert on["cpu"].specs == on["cuda"].specs, "shardings are the program's, not the platform's"
    for platform, plan in on.items():
        target = mesh_options.make_target(
            spmd_mesh, mesh_options.check_axis_types({}, spmd_mesh), {}, platform
        )
        for recipe in plan.placed.recipes:
            exported = export.deserialize(bytearray(emit(recipe, plan.traced.types, plan.specs, target).blob))
            assert exported.platforms == (platform,)


def test_what_needs_a_gpu_here_is_an_error_that_names_the_line():
    with pytest.raises(
        UnsupportedError,
        match=r"base/test_gpu_inventory.py:\d+: the step needs a GPU in this process .*'xla'",
    ):
        plan_step(*attention_step("cudnn"), platform="cuda")


@pytest.mark.parametrize(
    "says", ["No GPU budget given", "this model needs a GPU id", "Unknown backend 'gpu-tiles'"]
)
def test_the_users_own_errors_may_speak_of_gpus(says):
    def step(params, batch):
        raise ValueError(says)

    with pytest.raises(ValueError, match=says):
        plan_step(step, jnp.zeros(2), jnp.zeros(2))


@pytest.mark.parametrize("platform", ["gpu", "cuda"])
def test_jaxs_error_of_a_backend_that_is_not_here_is_known(platform):
    with pytest.raises(RuntimeError) as raised:
        jax.devices(platform)
    assert private_api.is_missing_gpu_error(raised.value)


# ---------------------------------------------------------------- this process's own JAX


SPARING = """
import json, os, sys
sys.modules["pynvml"] = None
from jaxpp_async.jax_bridge import jax_config
from jaxpp_async.session import mesh_options
import jax
chosen = mesh_options.choose_platform(None)
found = [chosen, jax_config.spare_gpus(), jax.config.jax_pjrt_client_create_options]
jax.devices()
print(json.dumps([*found, jax_config.spare_gpus(), os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE")]))
"""


@pytest.mark.parametrize(
    "env, says",
    [
        ({}, ["cpu", True, {"preallocate": False}, True, None]),
        ({"JAX_PLATFORMS": "cpu"}, ["cpu", True, {"preallocate": False}, True, None]),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, ["cpu", False, None, False, "true"]),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, ["cpu", True, None, True, "false"]),
    ],
)
def test_the_controller_leaves_the_actors_their_memory(env, says):
    clean = {
        k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE")
    }
    command = [sys.executable, "-c", SPARING]
    done = subprocess.run(command, check=False, env=clean | env, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout.splitlines()[-1]) == says, done.stderr


def test_inline_actors_without_gpus():
    with pytest.raises(
        MeshError, match="JAX in this process, which inline actors share, has no cuda devices"
    ):
        jpp.RemoteMesh(1, launcher="inline", platform="cuda")


# ---------------------------------------------------------------- the door, with nothing behind it


class FakeCuda:
    """CuPy's `cuda`, as far as the door goes: notes what it is asked."""

    def __init__(self):
        self.calls, self.current, self.refuses = [], None, None
        self.runtime = self

    class Device:
        def __init__(self, cuda, ordinal):
            self._cuda, self._ordinal = cuda, ordinal

        def use(self):
            self._cuda.calls.append(f"use {self._ordinal}")

        def __enter__(self):
            self._cuda.current = self._ordinal

        def __exit__(self, *_):
            self._cuda.current = None

    def __getattribute__(self, name):
        if name == "Device":
            return lambda ordinal: FakeCuda.Device(self, ordinal)
        return object.__getattribute__(self, name)

    def Stream(self, non_blocking):
        return SimpleNamespace(ptr=100 + self.current)

    def Event(self, block, disable_timing):
        where, calls = self.current, self.calls
        return SimpleNamespace(
            record=lambda stream: calls.append(f"record on {where}, stream {stream.ptr}"),
            synchronize=lambda: calls.append(f"wait on {where}"),
        )

    def free(self, address):
        self.calls.append("context")

    def memcpyPeerAsync(self, *arguments):
        if arguments[0] == self.refuses:
            raise RuntimeError("cudaErrorInvalidValue")
        self.calls.append(("copy", self.current, *arguments))


class FakeArray:
    def __init__(self, ordinal, calls, dtype="float32"):
        self.device = SimpleNamespace(local_hardware_id=ordinal)
        self.sharding, self.dtype, self._calls = (
            SimpleNamespace(device_set=[self.device]),
            jnp.dtype(dtype),
            calls,
        )

    def devices(self):
        return [self.device]

    def __dlpack__(self, *, stream):
        self._calls.append(f"stream {stream} waits")

    def block_until_ready(self):
        self._calls.append("JAX waits")


def test_gpus_are_told_apart_as_nvidias_tools_do_and_parts_of_one_too(monkeypatch):
    properties = [{"uuid": bytes(range(16))}, {"uuid": b""}, {}]
    runtime = SimpleNamespace(
        getDeviceProperties=properties.__getitem__, deviceGetPCIBusId="0000:1{}:00.0".format
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    named = [cuda._uuid(runtime, ordinal) for ordinal in range(3)]
    assert named == ["GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", "0000:11:00.0", "0000:12:00.0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-b")
    assert cuda._uuid(runtime, 0) == "MIG-b"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "mig-B")
    assert cuda._uuid(runtime, 0) == "MIG-b", "two names of one are one"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert cuda._uuid(runtime, 0) == named[0]


@pytest.mark.parametrize(
    "said, plugins, cuda_version",
    [
        ("PJRT C API\ncuda 13010", (12,), "13.1"),
        ("PJRT C API\ncuda 12090", (), "12.9"),
        ("cuda 9", (13,), "13"),
        ("", (12, 13), "13"),  # the preferred one
        ("", (), ""),
    ],
)
def test_the_cuda_that_hosts_agree_on_is_the_one_that_jax_is_for(monkeypatch, said, plugins, cuda_version):
    """And not that of CuPy, which is another package."""
    there = {f"jax_cuda{major}_plugin" for major in plugins}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in there or None)
    device = SimpleNamespace(client=SimpleNamespace(platform_version=said))
    assert cuda._jax_cuda(device) == cuda_version


@pytest.mark.parametrize(
    "names, environ, says",
    [
        (("tcp/eth0", "cuda_copy/cuda"), {}, None),
        ((), {}, None),  # in words that are not known
        (("tcp/eth0",), {"UCX_TLS": "rc,tcp"}, "UCX_TLS=rc,tcp leaves it out: add cuda"),
        (
            ("tcp/eth0",),
            {"RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY": "true"},
            "built with CUDA, or pip's: unset RAPIDS",
        ),
        (("tcp/eth0",), {}, "doctor --platform cuda"),
    ],
)
def test_a_ucx_that_would_take_gpu_memory_for_the_hosts_is_an_error(monkeypatch, names, environ, says):
    lines = [f"#         resource {i:2} :  md {i}  dev {i}  flags -- {name}" for i, name in enumerate(names)]
    found = ucx_context.resources("\n".join(["#", *lines]))
    for name in ("UCX_TLS", "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if says is None:
        ucx_context.check_takes_gpu_memory(found)
        return
    with pytest.raises(MeshError, match=f"cannot take GPU memory, it has no cuda_copy; .*{re.escape(says)}"):
        ucx_context.check_takes_gpu_memory(found)


async def test_an_actor_on_gpus_does_not_start_with_such_a_ucx(monkeypatch):
    check = partial(ucx_context.check_takes_gpu_memory, [("tcp", "eth0")])
    plane = SimpleNamespace(check_device_memory=check)
    monkeypatch.setattr(setup, "start_devices", lambda *_, **__: SimpleNamespace(devices=(), is_cpu=False))
    monkeypatch.setattr(setup, "open_transports", lambda *_, **__: SimpleNamespace(programs=plane))
    message = SimpleNamespace(transport="ucx", epoch=0, address=None)
    functions = dict.fromkeys(("spawn", "make_transport", "note_progress", "may_begin", "shared_cache"))
    with (
        ThreadPoolExecutor(1) as workers,
        pytest.raises(MeshError, match="it has no cuda_copy"),
    ):
        await setup.make_resources(
            message, None, None, None, workers, open_devices=lambda *_: None, inline=False, **functions
        )


def test_a_run_is_waited_for_by_a_result_that_stops_no_thread():
    wide, narrow, empty = (
        jnp.zeros(n, dtype) for n, dtype in ((2, "float32"), (2, "float8_e4m3fn"), (0, "float32"))
    )
    for outputs, sign in (
        ([wide, narrow, empty], wide),
        ([narrow, empty], narrow),
        ([empty], empty),
        ([narrow, wide, wide], wide),
    ):
        assert cuda._last_to_wait_for(outputs)[0] is sign
    assert list(cuda._last_to_wait_for([])) == []


def test_an_actor_tells_which_gpus_it_has():
    processes = [
        ActorInfo(0, "n1", 7 + k, (f"cuda:{k}",), "ready", k, 2, gpus=(f"GPU-{k}",)) for k in range(2)
    ]
    assert merge_processes(processes).gpus == ("GPU-0", "GPU-1")
    assert [process.gpus for process in merge_processes(processes).processes] == [("GPU-0",), ("GPU-1",)]


def test_a_cuda_stream_waits_for_arrays_and_records_an_event_behind_them(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(cuda, "_import_cupy", lambda: SimpleNamespace(cuda=fake))
    devices = [SimpleNamespace(local_hardware_id=k, platform="gpu") for k in (2, 3)]
    assert cuda.open_cuda(devices, "memory") is None and cuda.open_cuda(jax.local_devices(), "ucx") is None
    opened = cuda.open_cuda(devices, "ucx")
    opened.enter()
    stream = opened.make_stream()
    assert fake.calls == ["use 2", "context"]
    fake.calls.clear()
    event = stream.record([FakeArray(2, fake.calls), FakeArray(3, fake.calls)])
    assert fake.calls == [
        "stream 102 waits",
        "stream 103 waits",
        "record on 2, stream 102",
        "record on 3, stream 103",
    ]
    fake.calls.clear()
    event.wait()
    assert fake.calls == ["wait on 2", "wait on 3"]
    fake.calls.clear()
    stream.record([FakeArray(2, fake.calls, "float8_e4m3fn")]).wait()
    assert fake.calls == ["JAX waits"]
    fake.calls.clear()
    stream.copy([cuda.DeviceCopy(10, devices[1], 20, devices[0], 64)])
    assert fake.calls == [("copy", 3, 10, 3, 20, 2, 64, 103), "record on 3, stream 103"]
    fake.calls.clear()
    fake.refuses = 11
    copies = [cuda.DeviceCopy(target, devices[1], 20, devices[0], 64) for target in (10, 11, 12)]
    event = stream.copy(copies)
    assert fake.calls.pop() == "record on 3, stream 103" and len(fake.calls) == 1
    with pytest.raises(RuntimeError, match="cudaErrorInvalidValue"):
        event.wait()
    assert fake.calls[-1] == "wait on 3", "the copy that had begun is waited for: its memory is in use"


# ---------------------------------------------------------------- tests that want a GPU, where there is none


@pytest.mark.parametrize(
    "environ, there, env",
    [
        ({}, "GPU-8f GPU-8a", {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, "GPU-8f GPU-8a", {"CUDA_VISIBLE_DEVICES": "1"}),
        ({}, "", {}),
    ],
)
def test_they_have_one_gpu_of_those_that_are_there(monkeypatch, environ, there, env):
    monkeypatch.setattr(gpu_inventory, "uuids", lambda: tuple(there.split()))
    assert one_gpu.first_gpu(environ) == env


@pytest.mark.parametrize("late", [False, True], ids=["as it starts", "as links are made"])
def test_only_nccls_refusal_of_ranks_on_one_gpu_skips_a_test(late):
    said = (
        "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000",
        "Multiple Ranks are using the same GPU",
    )
    refusal = nccl_library._with_remedy(f"InvalidUsage: {said[late]}")
    error = ActorError if late else LaunchError
    skipped = pytest.raises(pytest.skip.Exception, match="NCCL_MULTI_RANK_GPU_ENABLE")
    with skipped, one_gpu.skipped_where_nccl_wants_a_gpu_each():
        raise error(f"actor 1: {refusal}")
    with pytest.raises(error, match="no luck"), one_gpu.skipped_where_nccl_wants_a_gpu_each():
        raise error(
            nccl_library._with_remedy(
                "actor 1: no luck with NCCL: InvalidUsage: invalid usage of CommInitRank"
            )
        )
