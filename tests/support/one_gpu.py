"""one_gpu: what tests do to be on one GPU, and where NCCL does not take several ranks there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import pytest

from jaxpp_async.base.gpu_inventory import GpuShare, gpu_environment, host_gpus
from jaxpp_async.errors import JaxppAsyncError
from jaxpp_async.transport.nccl.order import ONE_GPU


def first_gpu(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that leave one GPU of those that this process may use: actors would have one each, where
    there are several, and the tests are about actors that share one."""
    named = host_gpus(environ)[:1]
    env = gpu_environment(GpuShare(named, 1), environ) if named else {}
    return {name: value for name, value in env.items() if name.startswith("CUDA_")}


@contextlib.contextmanager
def skipped_where_nccl_wants_a_gpu_each() -> Iterator[None]:
    """Skips the test on that refusal, whenever it comes; whatever else fails, fails it."""
    try:
        yield
    except JaxppAsyncError as error:
        if ONE_GPU not in str(error):
            raise
        pytest.skip(f"NCCL does not take several ranks on this GPU: {error}")
