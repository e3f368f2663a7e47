"""The list of passes, the collector while they run, and results that have one sharding each."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from planning import f32

import jaxpp_async as jpp
from jaxpp_async.compiler.export import Target
from jaxpp_async.compiler.pipeline import StepRequest, _separate_results, compile_step, gc_paused, plan
from jaxpp_async.compiler.trace import trace
from jaxpp_async.errors import ScheduleError
from jaxpp_async.program.instructions import Input

PASSES = ["trace", "hoist", "partition", "schedule", "place", "shard", "transfer", "donate", "delete"]


def train(w, batch):
    def of_one(x):
        value, grad = jax.value_and_grad(lambda w: jnp.sum(jpp.pipeline_yield(x @ w) @ w))(w)
        return grad, value

    grad, losses = jpp.accumulate_grads(of_one, jpp.GPipe(2))(batch)
    return w - grad, losses


ARGS = (f32(4, 4), f32(2, 3, 4))


def request(fn=train, *, target=None, specs=None, **more) -> StepRequest:
    return StepRequest(
        fn=fn,
        args=ARGS,
        argument_names=("w", "batch"),
        static_argnums=(),
        donated=(0,),
        in_specs=lambda traced: specs or [None] * len(traced.arg_names),
        out_specs=lambda traced: [None] * len(traced.out_names),
        num_actors=2,
        target=target or Target(None, "cpu", {}),
        **more,
    )


def test_a_plan_has_the_text_of_every_pass_in_order_and_one_program_an_actor():
    done = plan(request())
    assert list(done.passes) == PASSES
    assert [p.actor for p in done.programs] == [0, 1]
    assert done.passes["delete"] == "\n\n".join(map(str, done.programs))
    assert done.passes["partition"].startswith("loop of 2 stages, 2 microbatches\n")
    assert (done.continues, done.weak_or_strong, done.specs) == ({0: 0}, frozenset(), {})
    assert done.passes["transfer"] != done.passes["donate"] != done.passes["delete"]


def test_a_compiled_step_has_an_executable_for_each_recipe():
    done = compile_step(request())
    assert [e.name for e in done.executables] == [r.name for r in done.placed.recipes]
    assert list(done.passes) == [*PASSES, "emit"]
    assert done.passes["emit"].splitlines()[0].startswith("exe 0 fwd0 ")


def test_another_schedule_replaces_that_of_the_step():
    assert "fwd_bwd stage 1" in plan(request(schedule=jpp.Std1F1B(2))).passes["schedule"]
    assert "fwd_bwd stage 1" not in plan(request()).passes["schedule"]
    with pytest.raises(ScheduleError, match="2"):
        plan(request(schedule=jpp.GPipe(3)))


def test_shardings_are_part_of_the_graph_and_its_programs():
    target = Target(AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,)), "cpu", {})
    done = plan(request(target=target, specs=[(None, "x"), None]))
    (w,) = [v for v in done.placed.graph.values if v.label == "w"]
    assert w.aval.spec == (None, "x")
    for program in done.programs:
        (bound,) = [i for i in program.instructions if isinstance(i, Input) and i.arg == 0]
        assert program.avals[bound.buffer].spec == (None, "x")


def test_an_unused_argument_may_lie_in_any_sharding_unless_it_is_handed_back_in_a_given_one():
    def step(w, batch):
        return w, batch * 2

    free = [plan(request(step, specs=specs)).any_sharding for specs in (None, [(), None])]
    assert free == [frozenset((0,)), frozenset()]


# ---------------------------------------------------------------- the collector


def test_no_cycles_are_collected_within_also_where_uses_nest_and_after_it_they_are():
    assert gc.isenabled()
    with gc_paused():
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), gc_paused():
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_the_user_turned_off_stays_off():
    gc.disable()
    try:
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


# ---------------------------------------------------------------- one sharding a result


def separated(in_specs, out_specs, fn=lambda x, y: (x, x * 2, x)):
    traced = trace(fn, [f32(4), f32(4)])
    found = _separate_results(traced, in_specs, out_specs)
    added = found.flat.ops[len(traced.flat.ops) :]
    copied = {found.flat.outputs.index(op.outputs[0]): op.inputs[0] for op in added}
    assert all(op.name == "copy" for op in added)
    same = [k for k, (a, b) in enumerate(zip(traced.flat.outputs, found.flat.outputs, strict=True)) if a == b]
    assert set(same) | set(copied) == set(range(len(found.flat.outputs)))
    return copied


@pytest.mark.parametrize(
    ("in_specs", "out_specs", "copied"),
    [
        pytest.param([None, None], [None, None, None], [], id="nothing asked for"),
        pytest.param([None, None], [("x",), None, ("x",)], [], id="the same twice"),
        pytest.param([None, None], [("x",), None, ()], [2], id="two shardings of one value"),
        pytest.param([("x",), None], [(), ("y",), ("x",)], [0], id="another than the argument's"),
        pytest.param([("x",), None], [("x", None), None, (("x",), None)], [], id="written in another way"),
        pytest.param([(), None], [("x",), None, ("y",)], [0, 2], id="two others than the argument's"),
    ],
)
def test_a_value_that_is_asked_for_in_several_shardings_is_copied(in_specs, out_specs, copied):
    assert sorted(separated(in_specs, out_specs)) == copied


def test_a_constant_result_is_not_copied():
    assert separated([("x",), None], [("y",), None], lambda x, y: (1.0, x)) == {}
