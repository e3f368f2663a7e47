"""The doctor: what is found out about hosts becomes findings with remedies; its command prints them, and says
by its exit status whether a run would work.

Findings are pure, and most tests are a table of them. Hosts over ssh: `launch/test_ssh.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from jaxpp_async.doctor import gather, protocol
from jaxpp_async.doctor.examine import host_command
from jaxpp_async.doctor.facts import (
    SECTIONS,
    UNLIMITED,
    ClockDifference,
    Driver,
    Examination,
    Gpu,
    HostFacts,
    HostReport,
    IbPort,
    JaxStart,
    LinkReport,
    RequestedRun,
    Ucx,
    UcxResource,
    error,
)
from jaxpp_async.doctor.judge import judge, would_work
from jaxpp_async.doctor.show import as_flags, print_findings
from jaxpp_async.launch.login_errors import Explanation
from jaxpp_async.transport.ucx.context import resources

GIB = 1 << 30

# ---------------------------------------------------------------- findings

TCP = (UcxResource("self", "memory"), UcxResource("tcp", "eth0"), UcxResource("posix", "memory"))
CUDA = (UcxResource("cuda_copy", "cuda"), UcxResource("cuda_ipc", "cuda"))
RC = (UcxResource("rc_mlx5", "mlx5_0:1"),)
WHEEL = "/venv/lib/python3.11/site-packages/libucx/lib/libucp.so"
PORT = IbPort("mlx5_0", 1, "ACTIVE", 400.0, "InfiniBand")

CPU_HOST = HostFacts(
    hostname="n",
    executable="/venv/bin/python",
    python="3.11.7",
    system="Linux",
    packages={"jaxpp-async": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2", "ucxx-cu13": "0.52.0"},
    num_cpus=16,
    memory_bytes=64 * GIB,
    shm_bytes=32 * GIB,
    memlock_bytes=UNLIMITED,
    ucx=Ucx("1.21.0", WHEEL, TCP),
    jax=JaxStart("cpu", 1, "cpu"),
)
GPU_HOST = replace(
    CPU_HOST,
    packages={
        **CPU_HOST.packages,
        "jax-cuda13-plugin": "0.10.2.1",
        "cupy-cuda13x": "14.2.0",
        "nvidia-nccl-cu13": "2.32.3",
        "nccl4py": "0.6.0",
    },
    driver=Driver("580.65.06", (13, 0), has_peer_memory=True),
    gpus=tuple(Gpu(i, "NVIDIA H100", f"GPU-{i}", 80 * GIB, GIB) for i in range(2)),
    ucx=Ucx("1.21.0", "/opt/ucx/lib/libucp.so.0", TCP + CUDA + RC),
    ib_ports=(PORT,),
    verbs_devices=1,
    jax=JaxStart("gpu", 2, "NVIDIA H100"),
)
CPU, GPU, NCCL = RequestedRun(), RequestedRun("cuda"), RequestedRun("cuda", "nccl")


def on_one(asked: RequestedRun, facts: HostFacts, **report: Any) -> Examination:
    here = HostReport("n1", facts=facts, clock=ClockDifference(0.0, 0.0), **report)
    return Examination(asked, here, (here,), (LinkReport("n1", "n1", "ucx", 2e-5, 5e9),))


def on_two(
    asked: RequestedRun,
    first: HostFacts | None,
    second: HostFacts | None,
    link: LinkReport | None = None,
    **report: Any,
) -> Examination:
    """`report`: of the second host."""
    here = HostReport("this machine", facts=CPU_HOST, clock=ClockDifference(0.0, 0.0))
    one = HostReport("n1", 2, first, clock=ClockDifference(0.1, 0.01), calls_back="")
    two = HostReport(
        "n2", facts=second, **{"slots": 2, "clock": ClockDifference(0.0, 0.01), "calls_back": "", **report}
    )
    return Examination(asked, here, (one, two), (link or LinkReport("n1", "n2", "ucx", 5e-6, 40e9),))


def on_slots(
    actors: int | None, devices: int, slots: tuple[int, ...], *, names: str = "", **asked: Any
) -> Examination:
    """Hosts of that many slots, with a GPU for each; of tasks, with as many as an actor has devices."""
    here = HostReport("this machine", facts=CPU_HOST, clock=ClockDifference(0.0, 0.0))
    wanted = replace(GPU, num_actors=actors, devices_per_actor=devices, **asked)
    reports: list[HostReport] = []
    for index, slot in enumerate(slots):
        gpus = range(devices if wanted.slots_are_processes else slot)
        facts = replace(
            GPU_HOST, gpus=tuple(replace(GPU_HOST.gpus[0], index=i, uuid=f"GPU-{i}") for i in gpus)
        )
        facts = seeing(facts, names) if names else facts
        report = HostReport(
            f"n{index}", slot, facts, clock=ClockDifference(0.0, 0.01), calls_back="", names_gpus=bool(names)
        )
        reports.append(report)
    links = tuple(LinkReport(a.name, b.name, "ucx", 5e-6, 4e10) for a, b in itertools.pairwise(reports))
    return Examination(wanted, here, tuple(reports), links)


def seeing(facts: HostFacts, visible: str) -> HostFacts:
    return replace(facts, settings={"CUDA_VISIBLE_DEVICES": visible})


def without(facts: HostFacts, *packages: str) -> HostFacts:
    return replace(facts, packages={k: v for k, v in facts.packages.items() if k not in packages})


def having(facts: HostFacts, **packages: str) -> HostFacts:
    return replace(facts, packages=facts.packages | {k.replace("_", "-"): v for k, v in packages.items()})


OLD_DRIVER = replace(GPU_HOST, driver=Driver("550.54", (12, 4), has_peer_memory=True))
NO_GPU = replace(
    GPU_HOST, gpus=(), driver=None, gpu_error="NVML Shared Library Not Found", jax=None, jax_error="x"
)
OLD_NCCL = having(GPU_HOST, nvidia_nccl_cu13="2.31.1")
SYSTEM = {"RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY": "true"}
DOWN = replace(PORT, state="DOWN")
ETHERNET = replace(DOWN, link_layer="Ethernet")
NO_RC = replace(GPU_HOST, ucx=Ucx("1.21.0", WHEEL, TCP + CUDA))
SHARED = replace(GPU_HOST, gpus=GPU_HOST.gpus[:1])
EXCLUSIVE = replace(SHARED, gpus=(replace(SHARED.gpus[0], mode="exclusive"),))

OPEN_CACHE = JaxStart(
    "cpu", 1, "cpu", "the compilation cache /c may hold code of others: x; `chmod go-w /c` if"
)

WELL = [
    ("CPUs, one machine", on_one(CPU, CPU_HOST)),
    ("CPUs, two hosts", on_two(CPU, CPU_HOST, CPU_HOST)),
    ("CPUs, though one host has GPUs", on_two(CPU, CPU_HOST, GPU_HOST)),
    ("GPUs", on_one(GPU, GPU_HOST)),
    ("GPUs, two hosts, NCCL", on_two(NCCL, GPU_HOST, GPU_HOST)),
    ("an older NCCL that nobody uses", on_one(GPU, OLD_NCCL)),
    ("two GPUs an actor", on_one(replace(GPU, devices_per_actor=2), GPU_HOST)),
    ("several devices an actor: a slot is a device", on_slots(4, 2, (4, 4), names="0,1,2,3")),
    ("actors larger than a host", on_slots(2, 16, (8, 8, 8, 8))),
    ("as many actors as fit", on_slots(None, 16, (8, 8, 8, 8))),
    ("a task a process", on_slots(2, 4, (1, 1), names="0,1,2,3", slots_are_processes=True)),
    ("CUDA 12", on_one(GPU, having(without(OLD_DRIVER, "jax-cuda13-plugin", "cupy-cuda13x", "ucxx-cu13"),
                                   jax_cuda12_plugin="0.10.2", cupy_cuda12x="14", ucxx_cu12="0.52"))),
    ("a port is down that nobody asked for", on_one(CPU, replace(CPU_HOST, ib_ports=(DOWN,)))),
    ("some variables are set", on_one(CPU, replace(CPU_HOST, settings={"UCX_LOG_LEVEL": "info"}))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "found"), WELL, ids=[name for name, _ in WELL])
def test_what_is_well_is_said_to_be(name, found):
    findings = judge(found)
    assert [f for f in findings if f.level in ("warning", "error")] == []
    assert would_work(findings) and {f.section for f in findings} <= set(SECTIONS)


# Name, examination, then of the one finding: its level, section and host, and what stands in it and in its
# remedy.
WRONG = [
    ("no ucxx", on_one(CPU, replace(without(CPU_HOST, "ucxx-cu13"), ucx=None, ucx_error="no module")),
     "error", "ucx", "n1", "ucxx is not installed", "pip install 'jaxpp-async[cpu]'"),
    ("ucxx without its libraries",
     on_one(CPU, replace(CPU_HOST, ucx=None, ucx_error="libucp.so.0: cannot open")),
     "error", "ucx", "n1", "does not start: libucp.so.0", ""),
    ("the system's UCX is too old",
     on_one(CPU, replace(CPU_HOST, ucx=None, ucx_error="UCX 1.13.1", settings=SYSTEM)),
     "error", "ucx", "n1", "does not start: UCX 1.13.1",
     "LD_LIBRARY_PATH lead to a UCX that ucxx takes, or unset"),
    ("the system's UCX is not found", on_one(CPU, replace(CPU_HOST, settings=SYSTEM)),
     "warning", "ucx", "n1", "pip's, though RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY is set", "LD_LIBRARY_PATH"),
    ("UCX may use nothing",
     on_one(CPU, replace(CPU_HOST, ucx=Ucx("1", WHEEL, TCP[:1]), settings={"UCX_TLS": "self"})),
     "error", "ucx", "n1", "no way to other", "UCX_TLS=self leaves them out"),
    ("no JAX", on_one(CPU, replace(without(CPU_HOST, "jax"), jax=None, jax_error="No module named 'jax'")),
     "error", "packages", "n1", "jax is not installed", "/venv/bin/python -m pip install 'jaxpp-async[cpu]'"),
    ("JAX does not start", on_one(CPU, replace(CPU_HOST, jax=None, jax_error="RuntimeError: no")),
     "error", "jax", "n1", "does not start on cpu: RuntimeError: no",
     "JAX_PLATFORMS=cpu /venv/bin/python -c"),
    ("a compilation cache that others can write", on_one(CPU, replace(CPU_HOST, jax=OPEN_CACHE)),
     "error", "jax", "n1", "the compilation cache /c may hold code of others", "`chmod go-w /c` if"),
    ("an old Python", on_one(CPU, replace(CPU_HOST, python="3.10.1")),
     "error", "python", "n1", "3.10.1 is too old", "python="),
    ("a small /dev/shm", on_one(CPU, replace(CPU_HOST, shm_bytes=1 << 24)),
     "warning", "memory", "n1", "16 MiB free", "--shm-size"),
    ("another JAX there", on_two(CPU, CPU_HOST, having(CPU_HOST, jax="0.10.1")),
     "error", "versions", "n2", "has jax 0.10.1, this machine has 0.10.2", "pip install 'jax==0.10.2'"),
    ("another of this package", on_two(CPU, CPU_HOST, having(CPU_HOST, jaxpp_async="0.0.9")),
     "error", "versions", "n2", "has jaxpp-async 0.0.9, this machine has 0.1.0",
     "pip install this machine's clone"),
    ("another UCX there", on_two(CPU, CPU_HOST, replace(CPU_HOST, ucx=Ucx("1.16.0", "", TCP))),
     "warning", "versions", "all hosts", "1.21.0 on this machine, n1; 1.16.0 on n2", "the same on all"),
    ("a clock that is off", on_two(CPU, CPU_HOST, CPU_HOST, clock=ClockDifference(-7.5, 0.1)),
     "warning", "clock", "n2", "-7.500 s", "NTP"),
    ("no way back", on_two(CPU, CPU_HOST, CPU_HOST, calls_back="10.0.0.1: timed out"),
     "error", "control", "n2", "does not reach this machine at 10.0.0.1: timed out", "control_address="),
    ("more actors than slots", on_two(replace(CPU, num_actors=5), CPU_HOST, CPU_HOST),
     "error", "hosts", "all hosts", "5 actors do not fit 4 slots on 2 hosts", "at most 4"),
    ("nothing travels", on_two(CPU, CPU_HOST, CPU_HOST, LinkReport("n1", "n2", "ucx", error="unreachable")),
     "error", "transfer", "n1 to n2", "no data over ucx: unreachable", "ports="),
    ("a host that is not there",
     on_two(CPU, CPU_HOST, None, trouble=Explanation("its name is unknown", "x y")),
     "error", "hosts", "n2", "its name is unknown", "x y"),
    ("no CUDA JAX", on_one(GPU, without(GPU_HOST, "jax-cuda13-plugin")),
     "error", "jax", "n1", "JAX is without CUDA", "'jaxpp-async[cuda13]'"),
    ("no CUDA JAX, an old driver", on_one(GPU, without(OLD_DRIVER, "jax-cuda13-plugin")),
     "error", "jax", "n1", "JAX is without CUDA", "'jaxpp-async[cuda12]'"),
    ("two CUDA JAXs", on_one(GPU, having(GPU_HOST, jax_cuda12_plugin="0.10.2")),
     "error", "jax", "n1", "jax-cuda13-plugin and jax-cuda12-plugin", "pip uninstall jax-cuda12-plugin"),
    ("a plugin of another JAX", on_one(GPU, having(GPU_HOST, jax_cuda13_plugin="0.10.1")),
     "error", "jax", "n1", "jax-cuda13-plugin is 0.10.1, jaxlib 0.10.2", "cuda13"),
    ("a driver too old for CUDA 13", on_one(GPU, OLD_DRIVER),
     "error", "gpu", "n1", "driver 550.54 runs CUDA 12.4 at most",
     "driver 580 or newer, or take CUDA 12: /venv"),
    ("no driver", on_one(GPU, NO_GPU),
     "error", "gpu", "n1", "no NVIDIA driver answers (NVML Shared Library Not Found)", "--gpus all"),
    ("no GPU", on_one(GPU, replace(GPU_HOST, gpus=())),
     "error", "gpu", "n1", "but no GPU", "container"),
    ("no CuPy", on_one(GPU, without(GPU_HOST, "cupy-cuda13x")),
     "error", "gpu", "n1", "CuPy is not installed", "'jaxpp-async[cuda13]'"),
    ("CuPy of another CUDA", on_one(GPU, having(without(GPU_HOST, "cupy-cuda13x"), cupy_cuda12x="14")),
     "warning", "gpu", "n1", "cupy-cuda12x 14 is for another CUDA", "cuda13"),
    ("ucxx of another CUDA", on_one(GPU, having(without(GPU_HOST, "ucxx-cu13"), ucxx_cu12="0.52")),
     "warning", "ucx", "n1", "ucxx-cu12 is for CUDA 12, JAX for CUDA 13",
     "pip uninstall ucxx-cu12 libucx-cu12"),
    ("no NCCL", on_one(NCCL, without(GPU_HOST, "nvidia-nccl-cu13")),
     "error", "nccl", "n1", "NCCL not installed", "cuda13"),
    ("no nccl4py", on_one(NCCL, without(GPU_HOST, "nccl4py")),
     "error", "nccl", "n1", "nccl4py not installed", "cuda13"),
    ("an NCCL that hangs", on_one(NCCL, OLD_NCCL),
     "warning", "nccl", "n1", "before 2.31.2 NCCL's grouped transfers may hang",
     "'nvidia-nccl-cu13>=2.31.2'"),
    ("an NCCL that hangs in an actor's collectives", on_one(replace(GPU, devices_per_actor=2), OLD_NCCL),
     "warning", "nccl", "n1", "nvidia-nccl-cu13 2.31.1", "'nvidia-nccl-cu13>=2.31.2'"),
    ("another NCCL there", on_two(NCCL, GPU_HOST, having(GPU_HOST, nvidia_nccl_cu13="2.33.0")),
     "error", "versions", "all hosts", "NCCL differs: nvidia-nccl-cu13 2.32.3, nccl4py 0.6.0 on n1",
     "the same on all"),
    ("NCCL without GPUs", on_one(replace(CPU, transport="nccl"), CPU_HOST),
     "error", "nccl", "all hosts", "NCCL moves GPU memory", "--platform cuda"),
    ("UCX without cuda_copy", on_one(GPU, replace(GPU_HOST, ucx=Ucx("1", WHEEL, TCP + RC))),
     "error", "ucx", "n1", "cannot take GPU memory", "UCX with CUDA"),
    ("another UCX, without cuda",
     on_one(GPU, replace(GPU_HOST, ucx=Ucx("1", "/opt/ucx/libucp.so.0", TCP + RC))),
     "error", "ucx", "n1", "cannot take GPU memory", "/opt/ucx/libucp.so.0 is built without it"),
    ("UCX_TLS without cuda",
     on_one(GPU, replace(GPU_HOST, ucx=Ucx("1", WHEEL, TCP + RC), settings={"UCX_TLS": "rc"})),
     "error", "ucx", "n1", "cannot take GPU memory", "UCX_TLS=rc leaves them out: add cuda"),
    ("UCX without cuda_ipc", on_one(GPU, replace(GPU_HOST, ucx=Ucx("1", WHEEL, TCP + RC + CUDA[:1]))),
     "warning", "ucx", "n1", "no cuda_ipc", "--ipc=host"),
    ("UCX without rc, of the wheel", on_one(GPU, NO_RC),
     "warning", "infiniband", "n1", "UCX has no rc", "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true"),
    ("no access to verbs", on_one(GPU, replace(GPU_HOST, verbs_devices=0)),
     "warning", "infiniband", "n1", "uverbs", "--device=/dev/infiniband"),
    ("little to lock", on_one(GPU, replace(GPU_HOST, memlock_bytes=1 << 16)),
     "warning", "infiniband", "n1", "lock 64 KiB only", "ulimit -l"),
    ("no GPUDirect", on_one(GPU, replace(GPU_HOST, driver=Driver("580", (13, 0)))),
     "warning", "infiniband", "n1", "cannot read GPU memory", "nvidia_peermem"),
    ("the port that was named is down",
     on_one(CPU, replace(CPU_HOST, ib_ports=(DOWN,), settings={"UCX_NET_DEVICES": "mlx5_0:1"})),
     "error", "infiniband", "n1", "mlx5_0:1: DOWN", "subnet manager"),
    ("the RoCE port that was named is down",
     on_one(CPU, replace(CPU_HOST, ib_ports=(ETHERNET,), settings={"UCX_NET_DEVICES": "eth0,mlx5_0"})),
     "error", "infiniband", "n1", "Ethernet", "ip link"),
    ("data that did not go by InfiniBand",
     on_two(GPU, GPU_HOST, GPU_HOST, LinkReport("n1", "n2", "ucx", 5e-5, 1.2e9)),
     "warning", "transfer", "n1 to n2", "1.20 GB/s over ucx, host memory, where ports could do 50.0",
     "UCX_LOG_LEVEL"),
    ("a GPU in use", on_one(GPU, replace(GPU_HOST, gpus=(replace(GPU_HOST.gpus[0], used_bytes=60 * GIB),))),
     "warning", "gpu", "n1", "60.0 GiB of it are in use", "nvidia-smi"),
    ("a GPU that nobody may use",
     on_one(GPU, replace(GPU_HOST, gpus=(replace(GPU_HOST.gpus[0], mode="prohibited"),))),
     "error", "gpu", "n1", "nobody may compute", "nvidia-smi -i 0 -c DEFAULT"),
    ("actors that share a GPU", on_one(GPU, SHARED, slots=2),
     "warning", "gpu", "n1", "2 actors with 1 GPU each share 1 GPU, and", "start at most 1 actor"),
    ("actors that share a GPU that takes one", on_one(GPU, EXCLUSIVE, slots=2),
     "error", "gpu", "n1", "GPU 0 takes one process only", "fewer actors"),
    ("actors that set more aside than there is",
     on_one(GPU, replace(SHARED, settings={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.75"}), slots=2),
     "error", "gpu", "n1", "2 processes share GPU 0, and each is to take 0.75 of its memory",
     "set at most 0.50"),
    ("a fraction that is none", on_one(GPU, replace(GPU_HOST, settings={"XLA_CLIENT_MEM_FRACTION": "most"})),
     "error", "gpu", "n1", "XLA_CLIENT_MEM_FRACTION='most' is no part of a GPU's memory", "give a number"),
    ("several instances of GPUs for a process",
     on_one(replace(GPU, devices_per_actor=2), seeing(GPU_HOST, "MIG-a,mig-b"), names_gpus=True),
     "error", "gpu", "n1", "instances of GPUs (MIG) for them, MIG-a, mig-b", "make spmd_mesh smaller"),
    ("NCCL between actors on one GPU", on_one(NCCL, SHARED, slots=2),
     "error", "gpu", "n1", "actor 0, actor 1 share GPU 0 of host n1, and both ends",
     "NCCL_MULTI_RANK_GPU_ENABLE"),
    ("NCCL between actors on one GPU, which it has been told to allow",
     on_one(NCCL, replace(SHARED, settings={"NCCL_MULTI_RANK_GPU_ENABLE": "1"}), slots=2),
     "warning", "gpu", "n1", "2 actors with 1 GPU each share 1 GPU, and", "start at most 1 actor"),
    ("NCCL between actors on one GPU of several", on_one(NCCL, GPU_HOST, slots=4),
     "warning", "gpu", "n1", "4 actors with 1 GPU each share 2 GPUs, and", "start at most 2 actors"),
    ("an actor larger than its host", on_one(replace(GPU, devices_per_actor=4), GPU_HOST),
     "error", "gpu", "n1", "an actor needs 4 GPUs, the host gives 2 GPUs", "spmd_mesh smaller"),
    ("actors that share several GPUs", on_two(replace(GPU, devices_per_actor=2), GPU_HOST, GPU_HOST, slots=4),
     "warning", "gpu", "n2", "2 actors with 2 GPUs each share 2 GPUs, and", "slots=2"),
    ("actors that do not fit, as a slot is a device", on_slots(8, 2, (4, 4)),
     "error", "hosts", "all hosts", "8 actors of 2 devices do not fit 8 slots on 2 hosts",
     "a slot is a device"),
    ("tasks that share GPUs", on_slots(None, 4, (2,), slots_are_processes=True),
     "error", "gpu", "n0", "2 actors with 4 GPUs each share 4 GPUs, each with 0.9", "--ntasks-per-node=1"),
    ("two processes of one actor on a GPU",
     on_one(replace(GPU, devices_per_actor=2, processes_per_actor=2), SHARED),
     "error", "gpu", "n1", "processes of one actor with 1 GPU each cannot share 1 GPU", "spmd_mesh smaller"),
    ("tasks with more than devices= has", on_slots(None, 4, (2,), names="0,1,2,3", slots_are_processes=True),
     "error", "gpu", "n0", "2 actors with 4 GPUs each share 4 GPUs of devices=", "--ntasks-per-node=1"),
    ("processes larger than their host", on_slots(1, 4, (1, 2), processes_per_actor=2),
     "error", "hosts", "all hosts", "1 actor of 4 devices in 2 processes of 2 each do not fit 3 slots",
     "add hosts"),
    ("devices= of what is not there", on_one(GPU, seeing(GPU_HOST, "0,1,2,3"), names_gpus=True),
     "error", "gpu", "n1", "=0,1,2,3 names GPU 2, which is none here (there are 2)", "correct devices="),
    ("CUDA_VISIBLE_DEVICES of what is not there", on_one(GPU, seeing(GPU_HOST, "GPU-0,GPU-7")),
     "warning", "gpu", "n1", "names GPU GPU-7, which is none here (there are 2), or not only one: CUDA",
     "correct it"),
    ("devices= with a GPU twice",
     on_one(replace(GPU, devices_per_actor=2), seeing(GPU_HOST, "1,1"), names_gpus=True),
     "error", "gpu", "n1", "an actor needs 2 GPUs, the host gives 1 GPU", "spmd_mesh smaller"),
    ("CUDA_VISIBLE_DEVICES hides one",
     on_one(replace(GPU, devices_per_actor=2), seeing(GPU_HOST, "1")),
     "error", "gpu", "n1", "the host gives 1 GPU", ""),
    ("another GPU there",
     on_two(GPU, GPU_HOST, replace(GPU_HOST, gpus=(Gpu(0, "NVIDIA A100", "", 80 * GIB, 0),) * 2)),
     "warning", "gpu", "all hosts", "NVIDIA H100 on n1; NVIDIA A100 on n2", "slowest"),
]  # fmt: skip


def test_what_the_loader_reads_is_there_when_a_hosts_program_starts():
    program = ["py", "-P", "-m", "jaxpp_async.doctor.host"]
    assert host_command(program, {"UCX_TLS": "tcp"}) == program
    found = host_command(program, {"LD_LIBRARY_PATH": "/opt/ucx/lib"})
    assert found == ["env", "LD_LIBRARY_PATH=/opt/ucx/lib", *program]


@pytest.mark.parametrize(("found", "level", "section", "host", "what", "remedy"), [row[1:] for row in WRONG],
                         ids=[row[0] for row in WRONG])  # fmt: skip
def test_what_is_wrong_is_said_once_and_with_a_remedy(found, level, section, host, what, remedy):
    findings = judge(found)
    wrong = [f for f in findings if f.level in ("warning", "error")]
    assert [(f.level, f.section, f.host) for f in wrong] == [(level, section, host)], wrong
    assert what in wrong[0].what and remedy in wrong[0].remedy
    assert would_work(findings) == (level == "warning")


def test_several_things_are_wrong_at_once():
    """Hosts of mixed kinds, and different CUDAs: each is said where it is, and what they have to have in
    common."""
    other = having(without(OLD_DRIVER, "jax-cuda13-plugin", "cupy-cuda13x", "ucxx-cu13"),
    jax_cuda12_plugin="0.10.2",
                   cupy_cuda12x="14", ucxx_cu12="0.52")  # fmt: skip
    assert errors(on_two(GPU, GPU_HOST, other)) == {("versions", "all hosts")}
    assert errors(on_two(GPU, GPU_HOST, CPU_HOST)) == {("gpu", "all hosts"), ("gpu", "n2"), ("jax", "n2")}
    mixed = next(
        f for f in judge(on_two(GPU, GPU_HOST, CPU_HOST)) if f.host == "all hosts" and f.level == "error"
    )
    assert mixed.what.startswith("n1 has GPUs, n2 none") and mixed.remedy.startswith("leave n2 out")


def errors(found: Examination) -> set[tuple[str, str]]:
    return {(f.section, f.host) for f in judge(found) if f.level == "error"}


# ---------------------------------------------------------------- facts


def test_facts_travel_whole_and_nothing_else_passes_for_them():
    record = protocol.Facts(GPU_HOST)
    line = protocol.write_record(record).decode()
    assert protocol.read_record(line) == record and protocol.read_record("Welcome!\n") is None
    order = protocol.Measure(1, b"a", True)
    assert (
        protocol.read_order(b"..." + protocol.write_order(order)) == order
        and protocol.read_order(b"...\n") is None
    )
    for broken in ('["Facts", 1]', '["Nobody"]', '["ClockIs", "noon"]', "[", '{"ClockIs": 1}'):
        with pytest.raises(ValueError, match="no message of the doctor"):
            protocol.read_record(f"\x1e{broken}")


def test_rdma_ports_are_read_from_the_kernels_files(tmp_path):
    files = {
        "mlx5_0/ports/1": {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"},
        "mlx5_1/ports/1": {"state": "1: DOWN", "rate": "2.5 Gb/sec (1X SDR)", "link_layer": "Ethernet"},
    }
    for folder, contents in files.items():
        (tmp_path / folder).mkdir(parents=True)
        for name, text in contents.items():
            (tmp_path / folder / name).write_text(text + "\n")
    assert gather.read_ib_ports(tmp_path) == (PORT, IbPort("mlx5_1", 1, "DOWN", 2.5, "Ethernet"))
    assert gather.read_ib_ports(tmp_path / "nothing") == ()


def test_transports_are_read_from_ucxs_words():
    text = (
        "#            md 0  :  component 0  self \n"
        "#      resource 0  :  md 0  dev 0  flags -- self/memory\n"
        "#      resource 12 :  md 4  dev 3  flags -- rc_mlx5/mlx5_0:1\n"
    )
    assert resources(text) == [("self", "memory"), ("rc_mlx5", "mlx5_0:1")]


class FakeNvml:
    """NVIDIA's library on a host with two GPUs."""

    NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, NVML_COMPUTEMODE_PROHIBITED = 3, 2

    class NVMLError(Exception): ...

    Memory = dataclasses.make_dataclass("Memory", ["total", "used"])

    nvmlInit = nvmlShutdown = staticmethod(lambda: None)
    nvmlSystemGetDriverVersion = staticmethod(lambda: "580.65.06")
    nvmlSystemGetCudaDriverVersion_v2 = staticmethod(lambda: 13010)
    nvmlDeviceGetCount = staticmethod(lambda: 2)
    nvmlDeviceGetHandleByIndex = staticmethod(lambda index: index)
    nvmlDeviceGetMemoryInfo = staticmethod(lambda handle: FakeNvml.Memory(80 * GIB, handle * GIB))
    nvmlDeviceGetComputeMode = staticmethod(lambda handle: 3 * handle)
    nvmlDeviceGetName = staticmethod(lambda handle: b"NVIDIA H100")
    nvmlDeviceGetUUID = staticmethod(lambda handle: f"GPU-{handle}")

    @staticmethod
    def nvmlDeviceGetMigMode(handle: int) -> list[int]:
        if handle:
            return [1, 1]
        raise FakeNvml.NVMLError("Not Supported")


def test_gpus_are_told_by_nvidias_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml)
    driver, gpus, error = gather.find_gpus()
    assert driver is not None and (driver.version, driver.cuda, error) == ("580.65.06", (13, 1), "")
    assert gpus == (
        Gpu(0, "NVIDIA H100", "GPU-0", 80 * GIB, 0),
        Gpu(1, "NVIDIA H100", "GPU-1", 80 * GIB, GIB, "exclusive", True),
    )
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gather.find_gpus() == (None, (), "nvidia-ml-py is not installed, so nobody can be asked for GPUs")


# ---------------------------------------------------------------- the command


def doctor(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Args: path: a folder whose commands come first."""
    env = {**os.environ, "COLUMNS": "160"}
    if path is not None:
        env["PATH"] = f"{path}:{env['PATH']}"
    command = [sys.executable, "-m", "jaxpp_async", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=env, check=False)


def test_this_machine_would_run_actors_on_its_cpus():
    done = doctor("--actors", "2")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    local = [title for key, title in SECTIONS.items() if key not in ("versions", "control")]
    assert [line for line in done.stdout.splitlines() if line in SECTIONS.values()] == local
    assert "A run on cpu over ucx, on this machine, would work." in done.stdout
    assert "GB/s over ucx, host memory, between two processes" in done.stdout


def test_a_default_cache_that_an_actor_would_refuse_is_found(monkeypatch):
    for name in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with tempfile.TemporaryDirectory() as folder:
        # not below pytest's own, which nobody else gets into anyway
        os.chmod(folder, 0o755)
        (cache := Path(folder, "home", ".cache")).mkdir(parents=True)
        cache.chmod(0o777)
        monkeypatch.setenv("HOME", str(cache.parent))
        done = doctor("--no-transfers")
        assert done.returncode == 1 and re.search(
            rf"(?m)^ERROR .*compilation cache {cache}.*others", done.stdout
        )
        assert f"-> `chmod go-w {cache}`" in done.stdout and "would not work: 1 error" in done.stdout
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache / "named"))
        assert doctor("--no-transfers").returncode == 0


def test_where_no_terminal_is_a_finding_is_a_line_however_long(capsys):
    findings = [error("ucx", "n1", "it has " + "eth0 " * 60 + "[not markup]", "correct it")]
    print_findings(on_one(CPU, CPU_HOST), findings, Console())
    title, line, remedy, *_ = capsys.readouterr().out.splitlines()
    assert title == SECTIONS["ucx"] and line == f"ERROR    n1  {findings[0].what}"
    assert remedy.lstrip() == "-> correct it" and remedy.index("->") == line.index("it has")


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("correct interface= (or UCX_NET_DEVICES)", "correct --interface (or UCX_NET_DEVICES)"),
        ("python='/x' is none, give control_address=", "--python '/x' is none, give --control-address"),
        (
            "name them with devices= (MIG-<UUID>), user= too",
            "name them with --devices (MIG-<UUID>), user= too",
        ),
        ("hosts= has no effect with launcher='slurm', which", "--hosts has no effect with --slurm, which"),
        (
            "device of an actor (spmd_mesh); give spmd_mesh a product that is a multiple of 2, "
            "for example {'data': 2}",
            "device of an actor (--devices-per-actor); give --devices-per-actor a multiple of 2",
        ),
        (
            "control_address= has no effect with launcher='local', whose actors run on this machine; "
            "leave it out",
            "--control-address has no effect on this machine alone (without --hosts and --slurm); "
            "leave it out",
        ),
        ("--devices=0,1 of /envs/python=3.11", "--devices=0,1 of /envs/python=3.11"),
    ],
)
def test_options_are_named_as_they_are_typed(said, shown):
    assert as_flags(said) == shown


@pytest.mark.parametrize(
    ("actors", "each", "devices", "level", "what"),
    [
        (2, 1, 1, "ok", "2 actors x 1 process x 1 device = 2 processes on 2 CPUs"),
        (2, 2, 2, "warning", "2 actors x 2 processes x 1 device = 4 processes on 2 CPUs"),
    ],
)
def test_what_was_asked_of_one_machine_stands_beside_its_cpus(actors, each, devices, level, what):
    asked = replace(CPU, num_actors=actors, processes_per_actor=each, devices_per_actor=devices)
    found = on_one(asked, replace(CPU_HOST, num_cpus=2))
    here = replace(found.here, slots=actors)
    told = judge(replace(found, here=here, hosts=(here,)))
    assert [(f.level, f.section) for f in told if f.what == what] == [(level, "hosts")] and would_work(told)


def test_one_host_is_no_hosts(capsys):
    found = replace(on_two(CPU, CPU_HOST, CPU_HOST), links=())
    print_findings(replace(found, hosts=found.hosts[:1]), [], Console())
    assert "on 1 host, would work." in capsys.readouterr().out


def fake_ssh(folder: Path, said: str) -> Path:
    """A folder with an `ssh` that fails."""
    folder.mkdir()
    (folder / "ssh").write_text(f"#!/bin/sh\n[ \"$1\" = -G ] && exit 1\necho '{said}' >&2\nexit 255\n")
    (folder / "ssh").chmod(0o755)
    return folder


def test_a_host_that_is_not_there_is_named_with_a_remedy_as_json_too(tmp_path):
    (tmp_path / "hosts").write_text("nowhere slots=2\n")
    ssh = fake_ssh(tmp_path / "bin", "ssh: Could not resolve hostname nowhere: Name or service not known")
    done = doctor("--hosts", str(tmp_path / "hosts"), "--json", path=ssh)
    assert (done.returncode, done.stderr) == (1, "")
    told = json.loads(done.stdout)
    wrong = [finding for finding in told["findings"] if finding["level"] == "error"]
    assert [(f["section"], f["host"], f["what"]) for f in wrong] == [
        ("hosts", "nowhere", "its name cannot be looked up")
    ]
    assert "hostfile" in wrong[0]["remedy"] and told["would_work"] is False
    assert (
        told["here"]["facts"]["packages"]["jax"] and told["hosts"][0]["facts"] is None and told["links"] == []
    )


WRONG_USES = [
    (("--hosts", "no-such-file"), "hostfile no-such-file does not exist"),
    (("--slurm",), "SLURM_JOB_ID"),
    (("--ports", "47100-47000"), "the first is larger than the last"),
    (("--ports", "1"), "--ports '1'"),
    (
        ("--devices-per-actor", "4", "--processes-per-actor", "3"),
        "--processes-per-actor 3 does not divide the 4",
    ),
    (("--control-address", "10.0.0.1"), "--control-address has no effect"),
    (("--python", "/no/such/python"), "--python '/no/such/python' is no program of this machine"),
]


@pytest.mark.parametrize(("arguments", "says"), WRONG_USES)
def test_wrong_options_are_told_from_what_is_wrong_with_hosts(monkeypatch, arguments, says):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    done = doctor(*arguments)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
