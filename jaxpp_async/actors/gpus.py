"""gpus: which of a host's GPUs an actor's process gets, and how much of their memory. In: what its host has, how many
processes run there. Out: environment variables. Starts nothing, and does not touch CUDA.

Neighbouring GPUs go to one process. Where there are fewer than asked for, processes share them, and their memory: JAX
takes three quarters of a GPU unless it is told otherwise, which two processes cannot both have.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxpp_async.errors import MeshError

MEMORY_FRACTION = 0.9
"""Of a GPU's memory, for all processes on it together; the rest is for contexts, libraries, UCX and NCCL."""

JAX_FRACTION = "0.75"
"""What JAX takes of a GPU's memory if nobody says otherwise."""

_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_FRACTIONS = (_FRACTION, "XLA_CLIENT_MEM_FRACTION")
_VISIBLE, _ORDER, _PREALLOCATE = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "XLA_PYTHON_CLIENT_PREALLOCATE"


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
        there = f"{len(devices)} GPU{'s' * (len(devices) != 1)}" + (f" ({', '.join(devices)})" if devices else "")
        raise MeshError(
            f"an actor's process needs {each} GPU{'s' * (each != 1)} and this host has {there} for it; make spmd_mesh "
            "smaller, name more with devices=, or use platform='cpu'"
        )
    if count * each <= len(devices):
        bounds = index * len(devices) // count, (index + 1) * len(devices) // count
        return GpuShare(tuple(devices[slice(*bounds)]), 1)
    groups = len(devices) // each
    group = index % groups
    return GpuShare(tuple(devices[group * each : (group + 1) * each]), len(range(group, count, groups)))


def gpu_environment(given: GpuShare, user: Mapping[str, str]) -> dict[str, str]:
    """The variables that make a process keep to its part.

    Args:
        user: what the user has set, in the process's environment or for it.

    Raises:
        MeshError: the user's fraction of the memory, taken by every process on a GPU, is more than all of it.
    """
    env = {_VISIBLE: ",".join(given.devices), _ORDER: user.get(_ORDER, "PCI_BUS_ID")}
    fraction = next((user[name] for name in _FRACTIONS if user.get(name)), None)
    if fraction is None:
        return env | {_FRACTION: f"{MEMORY_FRACTION / given.sharers:.3f}"}
    takes_all = user.get(_PREALLOCATE, "").lower() not in ("false", "0")
    if takes_all and _number(fraction) * given.sharers > 1:
        raise MeshError(
            f"{given.sharers} processes share GPU {env[_VISIBLE]}, and each is to take {fraction} of its memory "
            f"({_FRACTION}); set at most {1 / given.sharers:.2f}, or leave it out"
        )
    return env


def memory_fraction(environ: Mapping[str, str]) -> float:
    """How much of a GPU's memory JAX takes beforehand, in a process of this environment."""
    if environ.get(_PREALLOCATE, "").lower() in ("false", "0"):
        return 0.0
    return _number(next((environ[name] for name in _FRACTIONS if environ.get(name)), JAX_FRACTION))


def host_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that a process of this host may use: those that `CUDA_VISIBLE_DEVICES` names, else all."""
    visible = environ.get(_VISIBLE)
    if visible is not None:
        return tuple(name for name in visible.split(",") if name and name != "-1")
    return tuple(map(str, range(_count())))


def _count() -> int:
    """How many GPUs NVIDIA's driver has here."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        pynvml = None
    if pynvml is not None:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            try:
                return pynvml.nvmlDeviceGetCount()
            finally:
                pynvml.nvmlShutdown()
    with contextlib.suppress(OSError):
        return sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir("/dev"))
    return 0


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise MeshError(f"{_FRACTION}={text!r} is no number; it is a part of a GPU's memory, such as 0.4") from None
