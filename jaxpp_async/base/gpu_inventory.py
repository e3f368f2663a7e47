"""gpus: which of a host's GPUs an actor's process gets, and how much of their memory. In: what its host has
(`nvml` knows), how many processes run there. Out: environment variables. Starts nothing, and does not touch CUDA.

Neighbouring GPUs go to one process. Where there are fewer than asked for, processes share them, and their memory: JAX
takes three quarters of a GPU unless it is told otherwise, which two processes cannot both have.

nvml: the one door to NVIDIA's management library, which knows a host's GPUs without starting CUDA. In: nothing. Out:
what there is, or why nobody can be asked. Needs no tool in PATH, and no parsing.
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
"""Of a GPU's memory, for all processes on it together; the rest is for contexts, libraries, UCX and NCCL."""

JAX_FRACTION = "0.75"
"""What JAX takes of a GPU's memory if nobody says otherwise."""

_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_FRACTIONS = (_FRACTION, "XLA_CLIENT_MEM_FRACTION")
VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
_PART = "MIG-"
_PREALLOCATE, _ALLOCATOR = "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"


@dataclass(frozen=True, slots=True)
class GpuShare:
    """What one process gets.

    Args:
        devices: as `CUDA_VISIBLE_DEVICES` names them.
        sharers: how many processes have these, itself among them.
    """

    devices: tuple[str, ...]
    sharers: int


def share(devices: Sequence[str], index: int, count: int, each: int) -> GpuShare:
    """The part of the `index`-th of `count` processes on a host.

    Args:
        devices: what there is.
        each: how many devices a process needs.

    Raises:
        MeshError: not even one process has enough.
    """
    if each > len(devices):
        there = f"{len(devices)} GPU{'s' * (len(devices) != 1)}" + (
            f" ({', '.join(devices)})" if devices else ""
        )
        raise MeshError(
            f"an actor's process needs {each} GPU{'s' * (each != 1)} and this host has {there} for it; make spmd_mesh "
            "smaller, have an actor be of several processes (processes_per_actor=), name more with devices=, or use "
            "platform='cpu'"
        )
    if count * each <= len(devices):
        first, end = index * len(devices) // count, (index + 1) * len(devices) // count
        return GpuShare(tuple(devices[first : first + each if is_part(devices[first]) else end]), 1)
    groups = len(devices) // each
    group = index % groups
    return GpuShare(tuple(devices[group * each : (group + 1) * each]), len(range(group, count, groups)))


def gpu_environment(given: GpuShare, user: Mapping[str, str]) -> dict[str, str]:
    """The variables that make a process keep to its part.

    Args:
        user: what the user has set, in the process's environment or for it.

    Raises:
        MeshError: the user's fraction of the memory is none, or taken by every process on a GPU is more than all of it;
            or the part is of several instances of GPUs (MIG).
    """
    if len(given.devices) > 1 and any(map(is_part, given.devices)):
        raise MeshError(
            f"an actor's process needs {len(given.devices)} GPUs and would have instances of GPUs (MIG) for them, "
            f"{', '.join(given.devices)}; CUDA shows a process one, or several without peer access to each other: "
            "make spmd_mesh smaller, or use whole GPUs"
        )
    env = {VISIBLE: ",".join(given.devices)}
    if not any(map(_is_number, _names(user.get(VISIBLE, "")))):
        env[ORDER] = user.get(ORDER, "PCI_BUS_ID")  # as NVIDIA's tools count; what the user counted stays so
    name = next((name for name in _FRACTIONS if user.get(name)), None)
    if name is None:
        return env | {_FRACTION: f"{MEMORY_FRACTION / given.sharers:.3f}"}
    fraction = user[name]
    if _fraction(name, fraction) * given.sharers > 1 and _sets_aside(user):
        raise MeshError(
            f"{given.sharers} processes share GPU {env[VISIBLE]}, and each is to take {fraction} of its memory "
            f"({name}); set at most {math.floor(100 / given.sharers) / 100:.2f}, or leave it out"
        )
    return env


def memory_fraction(environ: Mapping[str, str]) -> float:
    """How much of a GPU's memory JAX takes beforehand, in a process of this environment.

    Raises:
        MeshError: the environment has a fraction that is none.
    """
    if not _sets_aside(environ):
        return 0.0
    name = next((name for name in _FRACTIONS if environ.get(name)), _FRACTION)
    return _fraction(name, environ.get(name) or JAX_FRACTION)


@dataclass(frozen=True, slots=True)
class Visible:
    """The GPUs that a process may use.

    Args:
        names: as `CUDA_VISIBLE_DEVICES` has them, each GPU once.
        stopped_at: a name in there that is none here, at which CUDA reads no further; empty: there was none.
    """

    names: tuple[str, ...]
    stopped_at: str = ""


def read_visible(text: str | None, uuids: Sequence[str]) -> Visible:
    """What CUDA makes of `CUDA_VISIBLE_DEVICES`: numbers, or UUIDs of GPUs (or as much of them as tells them apart), or
    names of parts of GPUs (MIG); the first one says which. It reads no further at a name that is none, such as -1. A
    GPU that is named twice counts once here; to CUDA there would be none at all.

    Args:
        text: its value; None: it is not set.
        uuids: of all GPUs here, as NVIDIA's tools count them, each empty where it is not known. Without any, names are
            believed. Parts of GPUs are always believed.
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
    """The GPUs that a process of this host may use: those that `CUDA_VISIBLE_DEVICES` names, else all."""
    return read_visible(environ.get(VISIBLE), uuids())


def host_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The names of `visible_gpus`."""
    return visible_gpus(environ).names


def is_part(name: str) -> bool:
    """Whether this names an instance of a GPU (MIG)."""
    return _kind(name) == _PART


def _names(text: str) -> list[str]:
    """The names in a value of `CUDA_VISIBLE_DEVICES`."""
    return [name.strip() for name in text.split(",")]


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal()


def _kind(name: str) -> str:
    """What a name is of: a number, a GPU's UUID, or that of a part of one."""
    return "number" if _is_number(name) else name[:4].upper()


def _gpu_called(name: str, uuids: Sequence[str]) -> int | str | None:
    """What tells the GPU of this name from others; None: there is none, or more than one."""
    kind = _kind(name)
    if kind == "number":
        return int(name) if not uuids or int(name) < len(uuids) else None
    if kind == _PART or (kind == "GPU-" and not any(uuids)):
        return name.lower()
    called = [
        index for index, uuid in enumerate(uuids) if kind == "GPU-" and uuid.lower().startswith(name.lower())
    ]
    return called[0] if len(called) == 1 else None


def _sets_aside(environ: Mapping[str, str]) -> bool:
    """Whether JAX takes its part beforehand: its `platform` allocator asks CUDA for each array."""
    if environ.get(_ALLOCATOR, "").lower() == "platform":
        return False
    return environ.get(_PREALLOCATE, "").lower() not in ("false", "0")


def _fraction(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= 1:  # NaN is neither
        raise MeshError(
            f"{name}={text!r} is no part of a GPU's memory; give a number above 0 and up to 1, such as 0.4"
        )
    return number


# ---------------------------------------------------------------- nvml


class NvmlFailure(Exception):
    """The library is not installed, or the driver does not answer: in its words."""


@contextlib.contextmanager
def library() -> Iterator[Any]:
    """NVIDIA's library (nvidia-ml-py, which ucxx brings), started, and ended behind the block.

    Raises:
        NvmlFailure: there is none, or a call in the block failed.
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
    """The GPUs that NVIDIA's driver has here, by UUID; empty ones where only their number is known."""
    with contextlib.suppress(NvmlFailure), library() as nvml:
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return tuple(str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles)
    with contextlib.suppress(OSError):
        return ("",) * sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir("/dev"))
    return ()
