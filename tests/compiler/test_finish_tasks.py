"""Which operations on gradients wait in a finish for an earlier stage, and when finishes run."""

from __future__ import annotations

import pytest
from compiler_inputs import Body, scheduled

import jaxpp_async as jpp
from jaxpp_async.compiler.finish_tasks import BackwardOps, choose_finishes
from jaxpp_async.compiler.partition import partition
from jaxpp_async.compiler.stage_assignment import StageAssignment
from jaxpp_async.program.instructions import Aval


def stages_of(*lines: str, outputs: str) -> dict[str, str]:
    """The task of each value, of a body whose gradients are `a` in stage 1 and `b` in stage 0."""
    body = clipped_body(*lines)
    stages = StageAssignment(body.loop(outputs), body.types)
    names = [body.name(o) for op in stages.ops for o in op.outputs]
    tasks = {name: stages.task_of(body.ref(name)) for name in names}
    return {name: f"{task[0]}{task[1]}" for name, task in tasks.items() if task is not None}


def clipped_body(*lines: str) -> Body:
    body = Body(w=(5, 5), v=(5, 5), x=(2, 5), i=Aval((), "int32"))
    body.add("h[2,5] = dot_general x w", "y t[0] = pipeline_yield h", "z = dot_general y v")
    body.add("loss[] = reduce_sum z", "a[5,5] = dot_general y z '", "dy[2,5] = dot_general z v '")
    body.add("dh = pipeline_yield_side t dy '", side="cotangent")
    body.add("b[5,5] = dot_general x dh '", "p[] = reduce_sum a", "q[] = reduce_sum b", "n = add p q")
    if lines:
        body.add(*lines)
    return body


def test_a_gradient_is_scaled_where_it_is():
    found = stages_of("ca = mul a n", "cb = mul b n", outputs="ca cb")
    assert (found["p"], found["q"], found["n"]) == ("bwd1", "bwd0", "bwd0")
    assert (found["ca"], found["cb"]) == ("finish1", "bwd0")


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(["f[5,5] = broadcast_in_dim n", "ca = mul a f"], id="an array that a scalar fills"),
        pytest.param(["d = mul a n", "ca = mul d #2.0"], id="several operations"),
        pytest.param(["d = mul a n", "ca = add d v"], id="a weight is added"),
        pytest.param(["m:bool[] = gt n #1.0", "ca:float32[5,5] = select_n m a a"], id="a choice"),
    ],
)
def test_all_that_is_done_to_it_waits(lines):
    assert stages_of(*lines, outputs="ca")["ca"] == "finish1"


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(["ca = mul a b"], id="a gradient of another stage"),
        pytest.param(
            ["d = mul a n", "s[] = reduce_sum d", "t2 = tanh s", "ca = mul b t2"], id="read by an earlier"
        ),
        pytest.param(["d = mul a n", "ca = add d b"], id="joined with an earlier one"),
    ],
)
def test_otherwise_it_is_done_in_the_earlier_stage(lines):
    found = stages_of(*lines, outputs="ca")
    assert not any(task.startswith("finish") for task in found.values())


def test_a_filled_array_is_made_in_each_finish():
    body = clipped_body("f[5,5] = broadcast_in_dim n", "ca = mul a f", "cb = mul b f")
    staged = partition(body.loop("ca cb"), body.types)
    finish = staged.tasks["finish", 1]
    assert body.show(finish.ops) == ["f = broadcast_in_dim n", "ca = mul a f"]
    assert body.names(staged.takes(finish)) == "n a"


def test_an_operation_that_is_refused_takes_its_readers_along():
    """0 and 1 make gradients in stages 2 and 0; 2 changes the first of them, and 3 reads both."""
    made = {0: 0, 1: 1, 2: 2, 3: 3}
    readers = {0: [2], 1: [3], 2: [3], 3: []}
    ops = BackwardOps(
        stage={0: 2, 1: 0, 2: 0, 3: 0},
        gradients={0: [], 1: [], 2: [0], 3: [1, 2]},
        fits=dict.fromkeys(range(4), True),
        maker=made.__getitem__,
        users=readers.__getitem__,
    )
    assert choose_finishes(ops) == {}


@pytest.mark.parametrize("schedule", [jpp.GPipe(2), jpp.Std1F1B(2), jpp.ZeroBubbleH1(2)])
def test_a_finish_comes_after_what_it_reads_and_in_the_order_of_microbatches(schedule):
    body = clipped_body("ca = mul a n", "cb = mul b n")
    loop = scheduled(body.loop("ca cb", microbatches=6), body.types, schedule, 2)
    keys = [(key[0], task.stage, task.i) for _, task, key in loop.order]
    finishes = [k for k in keys if k[0] == "finish"]
    assert finishes == [("finish", 1, i) for i in range(6)]
    for i in range(6):
        before = keys[: keys.index(("finish", 1, i))]
        assert any(k[1:] == (0, i) and k[0].startswith("bwd") for k in before)
    # Two tasks of its actor go by first, while there are any.
    own = [key for key, (actor, *_) in zip(keys, loop.order, strict=True) if actor == 1]
    assert any(key[1:] == (1, 1) for key in own[: own.index(("finish", 1, 0))])
