"""nvml: the one door to NVIDIA's management library, which knows a host's GPUs without starting CUDA. In: nothing. Out:
what there is, or why nobody can be asked. Needs no tool in PATH, and no parsing.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any


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
