import pytest

from jaxpp_async.base.byte_counts import parse_bytes
from jaxpp_async.errors import PlanError


def test_bytes_as_text():
    texts = [7, "7", "70GB", "1.5 MiB", "2kb", "64GiB", "3T"]
    found = [7, 7, 70 * 10**9, 3 * 2**19, 2000, 64 * 2**30, 3 * 10**12]
    assert list(map(parse_bytes, texts)) == found


WRONG = ["lots", "", "0", 0, -5, True, "5 XB", None, 1.5, 10**400, float("nan")]


@pytest.mark.parametrize("wrong", [*WRONG, "1.5", "0.1B", "0.0001", "10\nGB", "9" * 400])
def test_no_number_of_bytes(wrong):
    with pytest.raises(PlanError, match="write bytes, or text such as '70GB' or '64GiB'"):
        parse_bytes(wrong)
