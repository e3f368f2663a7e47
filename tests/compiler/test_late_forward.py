"""Which forward operations run in the later stage that uses their results."""

from __future__ import annotations

import pytest
from compiler_inputs import Body

from jaxpp_async.compiler.ir import Loop
from jaxpp_async.compiler.late_forward import ForwardOps, choose_late_forwards
from jaxpp_async.compiler.stage_assignment import StageAssignment
from jaxpp_async.program.instructions import Aval

WEIGHTS = {name: (5, 5) for name in ("w", "k", "l", "v", "u")}


def stages_of(*lines: str, outputs: str = "loss", **weights: tuple[int, ...]) -> dict[str, int | None]:
    """The stage of each operation by its first result, of a body that has `m` and `n` in stage 0."""
    body = Body(**(WEIGHTS | weights), x=(4, 5), i=Aval((), "int32"))
    body.add("m = dot_general x w", "n = dot_general m w", *lines)
    loop: Loop = body.loop(outputs)
    found = StageAssignment(loop, body.types)
    return {body.name(op.outputs[0]): s for op, s in zip(found.ops, found.stage, strict=True)}


MARK, LOSS = "y t[0] = pipeline_yield n", "loss[] = reduce_sum z"
KEYS = ("a = dot_general m k", "b = dot_general m l")


def test_projections_of_an_earlier_value_live_with_their_reader():
    found = stages_of(MARK, *KEYS, "c = dot_general y a", "z = dot_general c b", LOSS)
    assert (found["a"], found["b"]) == (1, 1)


def test_what_only_a_backward_reads_follows():
    found = stages_of(
        MARK,
        *KEYS,
        "r = tanh a",
        "q = dot_general r r",
        "c = dot_general y r",
        "z = dot_general c b",
        LOSS,
        "dq = dot_general q z '",
        outputs="loss dq",
    )
    assert {found[name] for name in ("a", "b", "r", "q")} == {1}


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        pytest.param((MARK, KEYS[0], "z = dot_general y a", LOSS), "as many bytes", id="one projection"),
        pytest.param(
            (MARK, "a[4,1] = dot_general m k", "b[4,1] = dot_general m l", "z = dot_general a b", LOSS),
            "fewer bytes",
            id="smaller results",
        ),
        pytest.param(
            (*KEYS, MARK, "c = dot_general y a", "z = dot_general c b", LOSS), "the cut", id="written before"
        ),
        pytest.param(
            (
                MARK,
                "a = dot_general m w",
                "b = dot_general n w",
                "c = dot_general y a",
                "z = dot_general c b",
                LOSS,
            ),
            "one home for a weight",
            id="a weight of the earlier stage",
        ),
    ],
)
def test_otherwise_it_stays_with_its_operands(lines, why):
    assert stages_of(*lines)["a"] == 0, why


def test_a_value_that_is_sent_anyway_costs_nothing():
    found = stages_of(
        MARK,
        "q = dot_general m v",
        KEYS[0],
        "c = dot_general y m",
        "d = dot_general c q",
        "z = dot_general d a",
        LOSS,
    )
    assert (found["q"], found["a"]) == (1, 1)


def test_each_of_several_stages_has_its_own():
    found = stages_of(
        MARK,
        *KEYS,
        "c = dot_general y a",
        "d = dot_general c b",
        "y2 t2[0] = pipeline_yield d",
        "e = dot_general m v",
        "f = dot_general m u",
        "g = dot_general y2 e",
        "z = dot_general g f",
        LOSS,
    )
    assert {name: found[name] for name in "abef"} == {"a": 1, "b": 1, "e": 2, "f": 2}


@pytest.mark.parametrize(("size", "expected"), [(3, {1: 1, 2: 1}), (8, {}), (9, {})])
def test_the_cheaper_of_operand_and_results_is_sent(size, expected):
    """0 makes the operand of 1 and 2, whose results 3 reads in stage 1."""
    readers = {10: [1, 2], 11: [3], 12: [3], 13: []}
    ops = ForwardOps(
        stage={0: 0, 1: 0, 2: 0, 3: 1},
        written_in={1: 1, 2: 1, 3: 1},
        reads={0: [], 1: [10], 2: [10], 3: [11, 12]},
        makes={0: [10], 1: [11], 2: [12], 3: [13]},
        users=readers.__getitem__,
        weights={i: () for i in range(4)},
        sizes={10: size, 11: 4, 12: 4, 13: 4},
    )
    assert choose_late_forwards(ops) == expected
