"""Direct tests of which versions of NCCL let several ranks use one GPU."""

from __future__ import annotations

import pytest

from jaxpp_async.transport.nccl.order import MULTI_RANK, ranks_may_share


@pytest.mark.parametrize(
    ("version", "value", "expected"),
    [("2.32.3", "1", True), ("2.30.1", "1", True), ("2.29.7", "1", False), ("2.32.3", None, False),
     ("2.32.3", "0", False), ("2.32.3", "", False), ("3.0", "1", True)],
)  # fmt: skip
def test_two_ranks_a_gpu_need_a_new_nccl_and_a_variable(version, value, expected):
    assert ranks_may_share(version, {} if value is None else {MULTI_RANK: value}) == expected
