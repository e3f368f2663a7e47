"""Gather the facts about this host from which the doctor (the command that checks whether a run would work)
makes its findings.

The facts come from files, devices, and the output of short child programs. UCX and JAX are started in child
processes only, because either of them may end the process in which it starts. Gathering the facts changes
nothing on the host, except that the folder of the compilation cache is made as an actor would make it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform as system_platform
import re
import resource
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from jaxpp_async.base import gpu_inventory
from jaxpp_async.base.install_hints import pip_source
from jaxpp_async.doctor.facts import UNLIMITED, Driver, Gpu, HostFacts, IbPort, JaxStart, Ucx
from jaxpp_async.launch.run_module import command_here, inherited_environment

PACKAGES = (
    "jaxpp-async", "jax", "jaxlib", "numpy", "ml_dtypes", "msgspec", "flatbuffers", "uvloop",
    "jax-cuda12-plugin", "jax-cuda13-plugin", "ucxx-cu12", "ucxx-cu13", "libucx-cu12", "libucx-cu13",
    "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nccl4py", "nvidia-ml-py",
)  # fmt: skip
"""The names of the Python distributions whose versions matter to a run."""

CHILD_S = 45.0
"""The longest time in seconds that starting JAX or UCX may take. JAX with eight GPUs takes ten seconds."""

T = TypeVar("T")

_SETTINGS = re.compile(r"(UCX|NCCL|XLA|JAX|CUDA|RAPIDS_LIBUCX)_\w+|LD_LIBRARY_PATH")
_SECRETS = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")


async def gather(platform: str) -> HostFacts:
    """Gather the facts about this host that show whether actors can run on this host.

    Args:
        platform: the platform on which JAX is to start, `"cpu"` or `"cuda"`.
    """
    ucx, jax = await asyncio.gather(
        run_child(Ucx, "jaxpp_async.doctor.probe_programs", "ucx"),
        run_child(JaxStart, "jaxpp_async.doctor.probe_programs", "jax", platform),
    )
    driver, found_gpus, gpu_error = find_gpus()
    return HostFacts(
        hostname=socket.gethostname(),
        executable=sys.executable,
        source=pip_source(),
        python=system_platform.python_version(),
        system=f"{system_platform.system()} {system_platform.release()} {system_platform.machine()}",
        packages=find_packages(),
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        shm_bytes=_read_free_bytes("/dev/shm"),
        memlock_bytes=_read_memlock_bytes(),
        driver=driver,
        gpus=found_gpus,
        gpu_error=gpu_error,
        ucx=ucx if isinstance(ucx, Ucx) else None,
        ucx_error=ucx if isinstance(ucx, str) else "",
        ib_ports=read_ib_ports(),
        verbs_devices=_count_verbs_devices(),
        jax=jax if isinstance(jax, JaxStart) else None,
        jax_error=jax if isinstance(jax, str) else "",
        settings=_read_settings(),
    )


def find_packages() -> dict[str, str]:
    """Return the versions of the installed packages that matter to a run.

    Returns:
        A dictionary. Its keys are the names of those distributions in `PACKAGES` that are installed; its
        values are their versions.
    """
    found: dict[str, str] = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


async def run_child(kind: type[T], module: str, *arguments: str) -> T | str:
    """Run one of the doctor's short programs, and stop it after `CHILD_S` seconds.

    Args:
        kind: the type of the program's result.
        module: the dotted name of the program's module.
        arguments: the command-line arguments for the program.

    Returns:
        The result, which the program printed as JSON in its last line, or a sentence that says why there is
        none.
    """
    process = await asyncio.create_subprocess_exec(
        *command_here(module, *arguments),
        env=inherited_environment(),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(CHILD_S):
            output, errors = await process.communicate()
    except TimeoutError:
        return f"did not start within {CHILD_S:g} s"
    finally:  # also after a cancellation: do not leave the child running
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = output.decode(errors="replace").strip().splitlines()
    with contextlib.suppress(ValueError, IndexError):
        return msgspec.convert(json.loads(lines[-1]), kind | str)
    said = errors.decode(errors="replace").strip().splitlines() or lines
    return said[-1][:500] if said else f"ended with code {process.returncode}"


# ---------------------------------------------------------------- GPUs


def find_gpus() -> tuple[Driver | None, tuple[Gpu, ...], str]:
    """Find the NVIDIA driver and the GPUs of this host with NVIDIA's management library (NVML).

    Returns:
        Three parts: the driver, or None if no driver answers; the host's GPUs; and the reason why no driver
        answers, which is empty if one answers.
    """
    try:
        with gpu_inventory.library() as nvml:
            cuda: int = nvml.nvmlSystemGetCudaDriverVersion_v2()  # 13000 means 13.0
            version = _to_text(nvml.nvmlSystemGetDriverVersion())
            driver = Driver(version, (cuda // 1000, cuda % 1000 // 10), _has_peer_memory())
            return driver, tuple(_describe_gpu(nvml, i) for i in range(nvml.nvmlDeviceGetCount())), ""
    except gpu_inventory.NvmlFailure as error:
        return None, (), str(error)


def _describe_gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    modes = {
        nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive",
        nvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
    }
    mig = False
    with contextlib.suppress(nvml.NVMLError):  # most GPUs have no MIG
        mig = bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    return Gpu(
        index=index,
        name=_to_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_to_text(nvml.nvmlDeviceGetUUID(handle)),
        memory_bytes=int(memory.total),
        used_bytes=int(memory.used),
        mode=modes.get(nvml.nvmlDeviceGetComputeMode(handle), "default"),
        mig=mig,
    )


def _has_peer_memory() -> bool:
    """Return whether RDMA devices may read GPU memory, either through the kernel module nvidia_peermem or
    through the open kernel modules of the NVIDIA driver.
    """
    if os.path.isdir("/sys/module/nvidia_peermem"):
        return True
    with contextlib.suppress(OSError):
        return "Open Kernel Module" in Path("/proc/driver/nvidia/version").read_text()
    return False


def _to_text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


# ---------------------------------------------------------------- networks


def read_ib_ports(root: Path = Path("/sys/class/infiniband")) -> tuple[IbPort, ...]:
    """Read the states and rates of the ports of RDMA devices (InfiniBand, RoCE) from the kernel's files under
    `root`.
    """
    found: list[IbPort] = []
    for folder in sorted(root.glob("*/ports/*")):
        rate = re.match(r"[\d.]+", _read_line(folder / "rate"))
        found.append(
            IbPort(
                device=folder.parent.parent.name,
                port=int(folder.name),
                state=_read_line(folder / "state").rpartition(":")[2].strip(),
                rate_gbits=float(rate[0]) if rate else 0.0,
                link_layer=_read_line(folder / "link_layer"),
            )
        )
    return tuple(found)


def _count_verbs_devices(root: Path = Path("/dev/infiniband")) -> int:
    return sum(os.access(path, os.R_OK | os.W_OK) for path in root.glob("uverbs*"))


def _read_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# ---------------------------------------------------------------- limits and settings


def _read_free_bytes(folder: str) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def _read_memlock_bytes() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _read_settings() -> dict[str, str]:
    return {k: v for k, v in sorted(os.environ.items()) if _SETTINGS.fullmatch(k) and not _SECRETS.search(k)}
