"""one_gpu: what tests do where NCCL does not take several ranks on one GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from jaxpp_async.errors import JaxppAsyncError
from jaxpp_async.transport.nccl_library import ONE_GPU


@contextlib.contextmanager
def skipped_where_nccl_wants_a_gpu_each() -> Iterator[None]:
    """Skips the test on that refusal, whenever it comes; whatever else fails, fails it."""
    try:
        yield
    except JaxppAsyncError as error:
        if ONE_GPU not in str(error):
            raise
        pytest.skip(f"NCCL does not take several ranks on this GPU: {error}")
