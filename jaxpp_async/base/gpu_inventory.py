"""Find the GPUs of a host and divide them and their memory among the processes that run there.

A process gets adjacent GPUs. If a host has fewer GPUs than its processes ask for, processes share GPUs and
their memory: JAX takes three quarters of a GPU's memory unless it is told otherwise, and two processes cannot
both have that. The result is environment variables for each process; CUDA is not started.

GPUs are found with NVIDIA's management library (NVML), which lists them without starting CUDA. No other
module imports that library, no tool in PATH is needed, and no output is parsed.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpp_async.errors import MeshError

MEMORY_FRACTION = 0.9
"""The fraction of a GPU's memory that all processes on it may have together. Contexts, libraries, UCX and
NCCL need the rest.
"""

JAX_FRACTION = "0.75"
"""The fraction of a GPU's memory that JAX reserves unless a variable sets another one."""

_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_FRACTIONS = (_FRACTION, "XLA_CLIENT_MEM_FRACTION")
VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
_PART = "MIG-"
_PREALLOCATE, _ALLOCATOR = "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"


@dataclass(frozen=True, slots=True)
class GpuShare:
    """The GPUs that one process gets.

    Args:
        devices: the names of the GPUs, in the form of `CUDA_VISIBLE_DEVICES`.
        sharers: how many processes use these GPUs, including this one.
    """

    devices: tuple[str, ...]
    sharers: int


def choose_gpus(devices: Sequence[str], index: int, count: int, each: int) -> GpuShare:
    """Choose the GPUs of one of the processes that run on a host.

    If the host has enough GPUs, each process gets GPUs that no other process gets, perhaps more than it
    needs. Otherwise processes share GPUs.

    Args:
        devices: the names of all GPUs of the host that may be used.
        index: the number of the process on this host, counted from 0.
        count: the number of processes on this host.
        each: the number of GPUs that a process needs.

    Raises:
        MeshError: the host has fewer GPUs than a single process needs.
    """
    if each > len(devices):
        there = f"{len(devices)} GPU{'s' * (len(devices) != 1)}" + (
            f" ({', '.join(devices)})" if devices else ""
        )
        raise MeshError(
            f"an actor's process needs {each} GPU{'s' * (each != 1)} and this host has {there} for it; "
            "make spmd_mesh "
            "smaller, have an actor be of several processes (processes_per_actor=), name more with "
            "devices=, or use platform='cpu'"
        )
    if count * each <= len(devices):
        first, end = index * len(devices) // count, (index + 1) * len(devices) // count
        return GpuShare(tuple(devices[first : first + each if is_mig_instance(devices[first]) else end]), 1)
    groups = len(devices) // each
    group = index % groups
    return GpuShare(tuple(devices[group * each : (group + 1) * each]), len(range(group, count, groups)))


def gpu_environment(given: GpuShare, user: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that restrict a process to its GPUs and to its part of their memory.

    Args:
        given: the GPUs that the process gets.
        user: the other environment variables of the process, which include the user's settings. If these
            variables set a fraction of the memory or an order of devices, that setting is kept.

    Raises:
        MeshError: the user's fraction of the memory is not a number above 0 and up to 1, all processes on a
            GPU together would take more than the GPU's memory, or the process would get several parts of GPUs
            (MIG instances).
    """
    if len(given.devices) > 1 and any(map(is_mig_instance, given.devices)):
        raise MeshError(
            f"an actor's process needs {len(given.devices)} GPUs and would have instances of GPUs (MIG) "
            "for them, "
            f"{', '.join(given.devices)}; CUDA shows a process one, or several without peer access to each "
            "other: make spmd_mesh smaller, or use whole GPUs"
        )
    env = {VISIBLE: ",".join(given.devices)}
    if not any(map(_is_number, _names(user.get(VISIBLE, "")))):
        env[ORDER] = user.get(ORDER, "PCI_BUS_ID")  # the order of NVIDIA's tools, if the user chose none
    name = next((name for name in _FRACTIONS if user.get(name)), None)
    if name is None:
        return env | {_FRACTION: f"{MEMORY_FRACTION / given.sharers:.3f}"}
    fraction = user[name]
    if _fraction(name, fraction) * given.sharers > 1 and _preallocates(user):
        raise MeshError(
            f"{given.sharers} processes share GPU {env[VISIBLE]}, and each is to take {fraction} of its "
            f"memory ({name}); set at most {math.floor(100 / given.sharers) / 100:.2f}, or leave it out"
        )
    return env


def memory_fraction(environ: Mapping[str, str]) -> float:
    """Return the fraction of a GPU's memory that JAX reserves when it starts, given a process's environment
    variables; 0.0 if it reserves none.

    Raises:
        MeshError: the environment sets the fraction to something that is not a number above 0 and up to 1.
    """
    if not _preallocates(environ):
        return 0.0
    name = next((name for name in _FRACTIONS if environ.get(name)), _FRACTION)
    return _fraction(name, environ.get(name) or JAX_FRACTION)


@dataclass(frozen=True, slots=True)
class Visible:
    """The GPUs that a process may use.

    Args:
        names: the names of the GPUs in the form of `CUDA_VISIBLE_DEVICES`, each GPU once.
        stopped_at: the first name in the variable that matches no GPU of this host; CUDA ignores this name
            and all later ones. Empty if every name matches a GPU, or if the user ended the list on purpose
            (by an empty name or by a negative number such as -1).
    """

    names: tuple[str, ...]
    stopped_at: str = ""


def read_visible(text: str | None, uuids: Sequence[str]) -> Visible:
    """Return the GPUs that a value of `CUDA_VISIBLE_DEVICES` names, read as CUDA does.

    The value lists numbers, or UUIDs of GPUs (or beginnings of UUIDs that are unique), or names of parts of
    GPUs (MIG); the first name decides which of the three. CUDA stops reading at a name that matches no GPU,
    such as -1. A GPU that is named twice counts once in this function; CUDA would see no GPU at all.

    Args:
        text: the value of the variable; None if it is not set, which means all GPUs.
        uuids: the UUID of each GPU of this host, in the order of NVIDIA's tools; an empty text for an unknown
            UUID. If all of them are unknown, every UUID in `text` is assumed to exist. If `uuids` has no
            entries, every number in `text` is assumed to exist, too. Parts of GPUs are always assumed to
            exist.
    """
    if text is None:
        return Visible(tuple(map(str, range(len(uuids)))))
    found: dict[int | str, str] = {}
    first = ""
    for name in _names(text):
        first = first or name
        gpu = _gpu_called(name, uuids) if _kind(name) == _kind(first) else None
        if gpu is None:
            return Visible(tuple(found.values()), "" if not name or re.fullmatch(r"-\d+", name) else name)
        found.setdefault(gpu, name)
    return Visible(tuple(found.values()))


def visible_gpus(environ: Mapping[str, str]) -> Visible:
    """Find the GPUs that a process on this host may use: those that `CUDA_VISIBLE_DEVICES` names in the
    process's environment, or all GPUs if it is not set.
    """
    return read_visible(environ.get(VISIBLE), uuids())


def host_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the GPUs that a process on this host may use, given its environment; see
    `visible_gpus`.
    """
    return visible_gpus(environ).names


def is_mig_instance(name: str) -> bool:
    """Return whether a name in `CUDA_VISIBLE_DEVICES` names a part of a GPU (a MIG instance)."""
    return _kind(name) == _PART


def _names(text: str) -> list[str]:
    """Split a value of `CUDA_VISIBLE_DEVICES` into the names that it lists."""
    return [name.strip() for name in text.split(",")]


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal()


def _kind(name: str) -> str:
    """Return the kind of a name in `CUDA_VISIBLE_DEVICES`: `"number"`, or the first four characters of a UUID
    in upper case, which are `"GPU-"` for a GPU and `"MIG-"` for a part of one.
    """
    return "number" if _is_number(name) else name[:4].upper()


def _gpu_called(name: str, uuids: Sequence[str]) -> int | str | None:
    """Return a key that identifies the GPU with a given name, so that two names of one GPU have the same key.

    Args:
        name: a name in `CUDA_VISIBLE_DEVICES`.
        uuids: the UUID of each GPU of this host; an empty text for an unknown UUID.

    Returns:
        The GPU's index; the name in lower case if the index is not known; None if no GPU, or more than one,
        has this name.
    """
    kind = _kind(name)
    if kind == "number":
        return int(name) if not uuids or int(name) < len(uuids) else None
    if kind == _PART or (kind == "GPU-" and not any(uuids)):
        return name.lower()
    called = [
        index for index, uuid in enumerate(uuids) if kind == "GPU-" and uuid.lower().startswith(name.lower())
    ]
    return called[0] if len(called) == 1 else None


def _preallocates(environ: Mapping[str, str]) -> bool:
    """Return whether JAX reserves its part of a GPU's memory when it starts, given a process's environment
    variables. JAX reserves no memory with the allocator `platform`, which asks CUDA for the memory of each
    array.
    """
    if environ.get(_ALLOCATOR, "").lower() == "platform":
        return False
    return environ.get(_PREALLOCATE, "").lower() not in ("false", "0")


def _fraction(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= 1:  # this also refuses NaN
        raise MeshError(
            f"{name}={text!r} is no part of a GPU's memory; give a number above 0 and up to 1, such as 0.4"
        )
    return number


# ---------------------------------------------------------------- the management library


class NvmlFailure(Exception):
    """NVIDIA's management library (NVML) is not installed, or the driver does not answer. The message quotes
    the library.
    """


@contextlib.contextmanager
def library() -> Iterator[Any]:
    """Start NVIDIA's management library (NVML) for the length of a `with` block, and yield its Python module
    `pynvml` (of nvidia-ml-py, which ucxx installs).

    Raises:
        NvmlFailure: the library is missing, or a call in the block failed.
    """
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise NvmlFailure("nvidia-ml-py is not installed, so nobody can be asked for GPUs") from None
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise NvmlFailure(str(error)) from error


def uuids() -> tuple[str, ...]:
    """Return the UUID of each GPU of this host, in the order of NVIDIA's tools; an empty tuple if no GPU is
    found. If NVML is not available and only the number of GPUs is known, each UUID is empty.
    """
    with contextlib.suppress(NvmlFailure), library() as nvml:
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return tuple(str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles)
    with contextlib.suppress(OSError):
        return ("",) * sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir("/dev"))
    return ()
