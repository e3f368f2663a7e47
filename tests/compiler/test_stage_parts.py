"""What is added to the tasks so that each stage makes its own part of a gradient."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from compiler_inputs import Body, two_stages

from jaxpp_async.compiler.gradient_expressions import Expr, LayoutExpr, LeafExpr, SumExpr, leaves
from jaxpp_async.compiler.ir import Lit
from jaxpp_async.compiler.stage_assignment import StageAssignment
from jaxpp_async.compiler.stage_parts import StageOps

DROPPED = frozenset({7})


class Given:
    """A body of two stages with some more lines, and the sum of the gradients of its two stages."""

    def __init__(self, *lines: str) -> None:
        self.body = two_stages()
        self.body.add("s = add_any a b '")
        self.op = self.body.add(*lines)
        self.ops = StageOps(StageAssignment(self.body.loop("loss"), self.body.types), self.body.types)
        self.sum = SumExpr((self.leaf("a"), self.leaf("b")), DROPPED)

    def leaf(self, name: str) -> LeafExpr:
        value = self.body.ref(name)
        return LeafExpr(value, self.ops.stages.task_of(value))

    def operand(self, name: str) -> Expr:
        return self.sum if name == "s" else self.leaf(name)

    def added(self) -> dict[str, list[str]]:
        return {f"{kind}{stage}": self.body.show(ops) for (kind, stage), ops in self.ops.added.items()}


def parts(body: Body, expr: Expr) -> list[str]:
    return [f"{body.name(e.value)} of {e.place[0]}{e.place[1]}" for e in leaves(expr)]


@pytest.mark.parametrize(
    ("line", "of_a", "of_b"),
    [
        pytest.param("g = mul s #0.5 '", "mul a #0.5 '", "mul b #0.5 '", id="a scaling"),
        pytest.param("g = mul #0.5 s '", "mul #0.5 a '", "mul #0.5 b '", id="the other way around"),
        pytest.param("g = div s #2.0 '", "div a #2.0 '", "div b #2.0 '", id="a division"),
        pytest.param(
            "g:float64 = convert_element_type s",
            "convert_element_type a",
            "convert_element_type b",
            id="a widening cast",
        ),
        pytest.param("g[] = reduce_sum s", "reduce_sum a", "reduce_sum b", id="a sum of elements"),
    ],
)
def test_a_linear_operation_is_applied_to_each_part(line, of_a, of_b):
    given = Given(line)
    operands = [given.sum if r == given.body.ref("s") else LeafExpr(r, None) for r in given.op.inputs]
    found = given.ops.move_into_stages(given.op, operands, frozenset({9}))
    assert isinstance(found, SumExpr) and found.dropped == {9}
    assert parts(given.body, found) == ["v1 of bwd1", "v2 of bwd0"]
    assert given.added() == {"bwd1": [f"v1 = {of_a}"], "bwd0": [f"v2 = {of_b}"]}


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("g:bfloat16 = convert_element_type s", id="a narrowing cast"),
        pytest.param("g:int32 = convert_element_type s", id="a cast to integers"),
        pytest.param("g = div #1.0 s", id="a division by the sum"),
        pytest.param("g = mul s s", id="a square"),
        pytest.param("g = mul s z", id="a large factor of one stage"),
        pytest.param("g[2,3,3] = mul s #0.5", id="a product of another shape"),
    ],
)
def test_an_operation_that_is_not_linear_in_each_part_stays(line):
    given = Given(line)
    operands: list[Expr] = []
    for r in given.op.inputs:
        name = given.body.name(r)
        operands.append(LeafExpr(r, None) if isinstance(r, Lit) else given.operand(name))
    assert given.ops.move_into_stages(given.op, operands, DROPPED) is None
    assert given.added() == {}


@pytest.mark.parametrize(
    ("line", "moves"),
    [("g[6,3] = mul c #0.5", True), ("g[6,3] = mul c u", False), ("g[] = reduce_sum c", False)],
)
def test_only_scalars_fit_each_part_of_a_layout(line, moves):
    given = Given("u[6,3] = iota", "c[6,3] = concatenate a b", line)
    stacked = LayoutExpr(given.body.ops[-2], given.sum.terms, DROPPED)
    others = [LeafExpr(r, None) for r in given.op.inputs[1:]]
    assert (given.ops.move_into_stages(given.op, [stacked, *others], DROPPED) is not None) == moves


def test_a_scalar_is_filled_in_where_a_part_has_another_shape():
    given = Given("f[] = reduce_max z", "k[3,3] = broadcast_in_dim f", "g = mul s k '")
    product = dataclasses.replace(given.op, run=list)  # the operands, as the product would get them
    assert given.ops.move_into_stages(product, [given.sum, given.leaf("k")], DROPPED) is not None
    assert given.added() == {"bwd1": ["v1 = mul a f '"], "bwd0": ["v2 = mul b f '"]}
    part, filled = given.ops.added["bwd", 1][0].run([np.array([5.0, np.inf]), np.array(3.0)])
    assert (part.tolist(), filled.tolist()) == ([5.0, np.inf], [3.0, 3.0])


def test_each_stage_negates_its_own_part():
    given = Given("n = sub z s '")
    found = given.ops.negated(given.sum, given.op)
    assert isinstance(found, SumExpr) and found.dropped == DROPPED
    assert given.added() == {"bwd1": ["v1 = neg a '"], "bwd0": ["v2 = neg b '"]}


def test_each_stage_replaces_what_is_not_chosen_of_its_part_by_zeros():
    given = Given("m:bool[] = gt loss #1.0", "g:float32[3,3] = select_n m a b '")
    found = given.ops.chosen(given.op, [given.leaf(n) for n in ("m", "a", "b")], DROPPED)
    assert found is not None and parts(given.body, found) == ["v1 of bwd1", "v2 of bwd0"]
    assert given.added() == {"bwd1": ["v1 = select_n m a '"], "bwd0": ["v2 = select_n m b '"]}


@pytest.mark.parametrize(
    "names", [pytest.param("m w b", id="a weight"), pytest.param("m a a", id="parts of one stage")]
)
def test_a_choice_that_several_stages_cannot_share_stays(names):
    given = Given("m:bool[] = gt loss #1.0", f"g:float32[3,3] = select_n {names} '")
    operands = [given.leaf(n) for n in names.split()]
    assert given.ops.chosen(given.op, operands, DROPPED) is None


def test_the_terms_of_one_task_are_added_there():
    given = Given("k = mul w #2.0")
    a, b = given.sum.terms
    found = given.ops.merge_terms(SumExpr((a, b, a, LeafExpr(given.body.ref("k"), None)), DROPPED))
    assert parts(given.body, found) == ["v1 of bwd1", "b of bwd0"]
    assert given.added() == {"bwd1": ["v2 = add_any a a", "v1 = add_any v2 k"]}


def test_a_constant_becomes_a_value_of_its_task():
    given = Given("g = neg s")
    found = given.ops.with_id(LeafExpr(Lit(np.float32(1)), ("bwd", 1)))
    assert (given.body.name(found), given.added()) == ("v1", {"bwd1": ["v1 = constant #1.0"]})
    assert given.ops.with_id(given.leaf("a")) == given.body.ref("a")
