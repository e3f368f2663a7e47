"""A few rounds of the transport fuzzer, on either loop and with either ring; `make fuzz-transport` has more
of them."""

from __future__ import annotations

import ctypes
import importlib.util
from collections import Counter
from dataclasses import astuple

import pytest
from performing import perform, round_of
from trio import Broken

from jaxpp_async.transport.ucx.one_copy import MIN_ONE_COPY_BYTES

if importlib.util.find_spec("ucxx") is None:
    pytest.skip("UCX tests need the package ucxx", allow_module_level=True)


def quiet(number: int, tally: Counter[str]) -> None:
    """Print nothing, where the command prints its progress."""


def test_rounds_deliver_offer_refuse_cancel_and_abort():
    tally = Counter()
    for seed in range(4):
        tally += perform(seed, range(3), quiet)
    assert tally["rounds"] == 12
    for what in ("received", "received where they were offered", "of a wrong size", "cancelled", "aborted"):
        assert tally[what], what


def test_a_seed_has_the_same_rounds_each_time():
    assert [round_of(5, number) for number in range(5)] == [round_of(5, number) for number in range(5)]
    assert len({astuple(round_of(5, number)) for number in range(50)}) == 50


def test_a_message_that_lacks_bytes_is_found_and_named(monkeypatch):
    move = ctypes.memmove
    monkeypatch.setattr(
        ctypes, "memmove", lambda to, of, size: move(to, of, max(size - MIN_ONE_COPY_BYTES // 2, 0))
    )
    with pytest.raises(Broken, match=r"seed 0, round \d+: a message of \d+ bytes has come with other bytes"):
        perform(0, range(6), quiet)
