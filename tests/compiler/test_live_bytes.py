"""The estimate of temporaries, on operations by hand: what is stored, what is fused, what is freed."""

from __future__ import annotations

import pytest

from jaxpp_async.compiler.live_bytes import Operation, peak_live_bytes

SIZES = {"small": 1.0}


def op(kind, reads, makes, inside=0.0):
    return Operation(kind, reads.split(), makes.split(), inside)


def peak(*operations, outside="x y out"):
    return peak_live_bytes(operations, outside.split(), lambda x: SIZES.get(x, 10.0))


@pytest.mark.parametrize(
    ("operations", "expected"),
    [
        ([], 0),
        ([op("kernel", "x y", "out")], 0),
        ([op("kernel", "x y", "a"), op("kernel", "a y", "out")], 10),
        # While the second product runs, its operand and its result are there.
        (
            [
                op("kernel", "x", "a"),
                op("kernel", "a", "b"),
                op("kernel", "b", "c"),
                op("kernel", "c", "out"),
            ],
            20,
        ),
        # An elementwise result that a product reads is stored, in the memory of its operand.
        ([op("kernel", "x", "a"), op("fused", "a", "b"), op("kernel", "b", "out")], 10),
        # It cannot be if its operand is read again.
        (
            [
                op("kernel", "x", "a"),
                op("fused", "a", "b"),
                op("kernel", "b", "c"),
                op("fused", "a c", "out"),
            ],
            30,
        ),
        # Elementwise results that only elementwise operations read are not stored; their sources are.
        ([op("kernel", "x", "a"), op("fused", "a", "b"), op("fused", "b", "c"), op("fused", "c", "out")], 10),
        (
            [
                op("kernel", "x", "a"),
                op("fused", "a", "b"),
                op("kernel", "y", "c"),
                op("fused", "b c", "out"),
            ],
            20,
        ),
        # One that several operations read is stored.
        (
            [
                op("fused", "x", "a"),
                op("fused", "a", "b"),
                op("kernel", "y", "c"),
                op("fused", "a b c", "out"),
            ],
            20,
        ),
        # A softmax: the exponentials are read twice, so that they take the memory of the scores.
        (
            [
                op("kernel", "x", "scores"),
                op("fused", "scores", "e"),
                op("reduction", "e", "small"),
                op("fused", "e small", "p"),
                op("kernel", "p", "out"),
            ],
            11,
        ),
        # Another name takes no memory, but keeps the array.
        (
            [
                op("kernel", "x", "a"),
                op("alias", "a", "b"),
                op("kernel", "y", "c"),
                op("kernel", "b c", "out"),
            ],
            20,
        ),
        ([op("kernel", "x", "a"), op("alias", "a", "out")], 0),
        ([op("alias", "x", "b"), op("fused", "b", "out")], 0),
        # A loop needs memory inside, while it runs.
        ([op("kernel", "x", "a"), op("kernel", "a", "b", 100), op("kernel", "b", "out")], 120),
        # Nobody reads the result.
        ([op("kernel", "x", "a"), op("kernel", "y", "out")], 0),
    ],
)
def test_the_most_that_is_live_by_hand(operations, expected):
    assert peak(*operations) == expected
