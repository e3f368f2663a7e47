"""Tests of the findings about GPUs, packages for CUDA, and NCCL."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from jaxpp_async.doctor.facts import (
    UNLIMITED,
    Driver,
    Examination,
    Gpu,
    HostFacts,
    HostReport,
    ProcessSlots,
    RequestedRun,
)
from jaxpp_async.doctor.judge_gpu import explains_jax, judge_gpus, judge_gpus_together, judge_process_slots

GIB = 1 << 30
PACKAGES = {
    "jaxlib": "0.10.2",
    "jax-cuda13-plugin": "0.10.2.1",
    "cupy-cuda13x": "14.2.0",
    "nvidia-nccl-cu13": "2.32.3",
    "nccl4py": "0.6.0",
}
GPUS = tuple(Gpu(index, "H100", f"GPU-{index}", 80 * GIB, GIB) for index in range(2))
FACTS = HostFacts(
    hostname="n", executable="/py", python="3.11.7", system="Linux", packages=PACKAGES, num_cpus=1,
    memory_bytes=GIB, shm_bytes=GIB, memlock_bytes=UNLIMITED, driver=Driver("580.1", (13, 0)), gpus=GPUS,
)  # fmt: skip
NAMED_WRONGLY = "CUDA_VISIBLE_DEVICES=0,7 names GPU 7, which is none here (there are 2), or not only one"
CUDA, NCCL = RequestedRun("cuda"), RequestedRun("cuda", "nccl")


def having(**packages: str | None) -> HostFacts:
    """Facts with other packages; None: not installed."""
    changed = {**PACKAGES, **{name.replace("_", "-"): version for name, version in packages.items()}}
    there = {name: version for name, version in changed.items() if version is not None}
    return replace(FACTS, packages=there)


def wrong(facts: HostFacts, asked: RequestedRun = CUDA) -> list[tuple[str, str, str]]:
    """What is not well."""
    found = judge_gpus(HostReport("n1", facts=facts), facts, asked)
    return [(finding.level, finding.section, finding.what) for finding in found if finding.level != "ok"]


def test_a_host_that_has_everything_is_well():
    assert wrong(FACTS, NCCL) == []


def test_on_cpus_gpus_are_left_alone():
    found = list(judge_gpus(HostReport("n1"), FACTS, RequestedRun()))
    assert [(finding.level, finding.what) for finding in found] == [
        ("ok", "2, which a run on CPUs leaves alone"),
        ("ok", "nvidia-nccl-cu13 2.32.3, nccl4py 0.6.0"),
    ]


@pytest.mark.parametrize(
    ("facts", "level", "section", "what"),
    [
        (
            replace(FACTS, driver=None, gpus=(), gpu_error="no NVML"),
            "error",
            "gpu",
            "no NVIDIA driver answers (no NVML)",
        ),
        (replace(FACTS, gpus=()), "error", "gpu", "the NVIDIA driver is there, but no GPU"),
        (
            replace(FACTS, gpus=(replace(GPUS[0], mode="prohibited"),)),
            "error",
            "gpu",
            "0: H100, 80.0 GiB, driver 580.1 (CUDA 13.0): nobody may compute on it",
        ),
        (
            replace(FACTS, gpus=(replace(GPUS[0], used_bytes=9 * GIB),)),
            "warning",
            "gpu",
            "0: H100, 80.0 GiB, driver 580.1 (CUDA 13.0): 9.0 GiB of it are in use",
        ),
        (replace(FACTS, gpus=(replace(GPUS[0], mig=True),)), "note", "gpu", "0 is cut into instances (MIG)"),
        (having(jax_cuda13_plugin=None, cupy_cuda13x="1"), "error", "jax", "JAX is without CUDA"),
        (
            having(jax_cuda13_plugin="0.9.1"),
            "error",
            "jax",
            "jax-cuda13-plugin is 0.9.1, jaxlib 0.10.2: it does not load",
        ),
        (
            replace(FACTS, driver=Driver("550.54", (12, 4))),
            "error",
            "gpu",
            "driver 550.54 runs CUDA 12.4 at most, JAX is for CUDA 13",
        ),
        (
            having(cupy_cuda13x=None),
            "error",
            "gpu",
            "CuPy is not installed: it says when values are computed",
        ),
        (
            having(cupy_cuda13x=None, cupy_cuda12x="13"),
            "warning",
            "gpu",
            "cupy-cuda12x 13 is for another CUDA than JAX (CUDA 13)",
        ),
        (having(cupy_cuda12x="13"), "error", "gpu", "CuPy is there twice: cupy-cuda13x, cupy-cuda12x"),
        (having(ucxx_cu12="0.5"), "warning", "ucx", "ucxx-cu12 is for CUDA 12, JAX for CUDA 13"),
    ],
)
def test_what_is_wrong_with_a_host_is_said_once(facts, level, section, what):
    assert wrong(facts) == [(level, section, what)]


def test_without_nccl_a_run_over_it_cannot_be_and_an_old_one_may_hang():
    bare = having(nvidia_nccl_cu13=None, nccl4py=None)
    assert wrong(bare) == []
    assert wrong(bare, NCCL) == [("error", "nccl", "NCCL and nccl4py not installed")]
    old = having(nvidia_nccl_cu13="2.31.1")
    assert wrong(old) == []
    (found,) = wrong(old, NCCL)
    assert found[:2] == ("warning", "nccl")
    assert wrong(old, replace(CUDA, devices_per_actor=2)) == [found]


@pytest.mark.parametrize(
    ("facts", "asked", "explains"),
    [
        (FACTS, CUDA, False),
        (replace(FACTS, gpus=()), CUDA, True),
        (replace(FACTS, gpus=()), RequestedRun(), False),
        (having(jax_cuda12_plugin="0.10.2"), CUDA, True),
        (replace(FACTS, driver=Driver("550", (12, 4))), CUDA, True),
    ],
)
def test_what_is_said_of_gpus_may_be_why_jax_does_not_start(facts, asked, explains):
    assert explains_jax(facts, asked) is explains


def together(*facts: HostFacts, asked: RequestedRun = CUDA) -> list[tuple[str, str]]:
    hosts = tuple(HostReport(f"n{k}", facts=each) for k, each in enumerate(facts))
    return [
        (finding.level, finding.what) for finding in judge_gpus_together(Examination(asked, hosts[0], hosts))
    ]


def test_hosts_have_to_agree_on_cuda_on_nccl_and_on_whether_they_have_gpus():
    other = having(jax_cuda13_plugin=None, jax_cuda12_plugin="0.10.2")
    assert together(FACTS, FACTS) == []
    assert together(FACTS, other) == [("error", "JAX is for different CUDAs: CUDA 13 on n0; CUDA 12 on n1")]
    assert together(FACTS, having(nvidia_nccl_cu13="2.33"), asked=NCCL)[0][0] == "error"
    assert together(FACTS, replace(FACTS, gpus=())) == [
        ("error", "n0 has GPUs, n1 none: the actors of a mesh are all on GPUs or all on CPUs")
    ]
    assert together(FACTS, replace(FACTS, gpus=(replace(GPUS[0], name="A100"),))) == [
        ("warning", "they differ: H100 on n0; A100 on n1")
    ]
    assert together(FACTS, asked=RequestedRun("cpu", "nccl")) == [
        ("error", "NCCL moves GPU memory, and a run on CPUs has none")
    ]


@pytest.mark.parametrize(
    ("facts", "slots", "said"),
    [
        (FACTS, ProcessSlots((2,), 1, 1), []),
        (FACTS, ProcessSlots((1,), 1, 4), [("error", "an actor needs 4 GPUs, the host gives 2 GPUs")]),
        (
            FACTS,
            ProcessSlots((4,), 1, 1),
            [("warning", "4 actors with 1 GPU each share 2 GPUs, and the memory there")],
        ),
        (
            replace(FACTS, gpus=(replace(GPUS[0], mode="exclusive"),)),
            ProcessSlots((2,), 1, 1),
            [("error", "2 actors with 1 GPU each share 1 GPU, and GPU 0 takes one process only")],
        ),
        (
            replace(FACTS, gpus=GPUS[:1]),
            ProcessSlots((2,), 2, 1),
            [("error", "processes of one actor with 1 GPU each cannot share 1 GPU")],
        ),
        (
            replace(FACTS, settings={"CUDA_VISIBLE_DEVICES": "0,7"}),
            ProcessSlots((1,), 1, 1),
            [("warning", NAMED_WRONGLY)],
        ),
    ],
    ids=["enough", "too few", "shared", "exclusive", "one actor", "named wrongly"],
)
def test_processes_are_judged_by_the_gpus_that_they_find(facts, slots, said):
    report = HostReport("n1", facts=facts)
    found = judge_process_slots(Examination(CUDA, report, (report,)), slots)
    assert [(one.level, one.what.removesuffix(": CUDA reads no further")) for one in found] == said
