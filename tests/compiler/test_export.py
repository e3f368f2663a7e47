"""Recipes as serialized StableHLO, and errors for what cannot be one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiler_inputs import Body, placed_step
from jax import export
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from planning import f32

import jaxpp_async as jpp
from jaxpp_async.compiler.export import Target, emit, explained, lowering_context, refuse_host_memory
from jaxpp_async.compiler.ir import Op, Recipe
from jaxpp_async.errors import ScheduleError, UnsupportedError
from jaxpp_async.jax_bridge import private_api

CPU = Target(None, "cpu", {})
MESH = Target(AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,)), "cpu", {"rows": "x"})


def recipe_of(*lines: str, name: str = "fwd0", outputs: str = "y") -> tuple[Body, Recipe]:
    body = Body(a=(4,), b=(4,))
    body.add(*lines)
    return body, Recipe(name, body.inputs, body.refs(outputs), tuple(body.ops))


def test_an_executable_computes_its_recipe():
    body, recipe = recipe_of("y = mul a b", outputs="y a")
    found = export.deserialize(bytearray(emit(recipe, body.types, {}, CPU).blob))
    assert [a.shape for a in found.in_avals] == [(4,), (4,)]
    a, b = jnp.arange(4.0), jnp.ones(4) * 3
    for got, want in zip(found.call(a, b), (a * b, a), strict=True):
        np.testing.assert_array_equal(got, want)


def test_an_argument_that_is_not_used_stays_one():
    body, recipe = recipe_of("y = neg a")
    found = export.deserialize(bytearray(emit(recipe, body.types, {}, CPU).blob))
    assert (len(found.in_avals), found.module_kept_var_idx) == (2, (0, 1))


def test_the_key_of_an_executable_follows_from_what_it_computes_and_not_from_its_stage():
    makes = [
        (("y = mul a b",), "fwd0"),
        (("y = mul a b",), "fwd17"),
        (("y = mul b a",), "fwd0"),
        (("y = mul a b",), "bwd0"),
    ]
    found = [emit(r, body.types, {}, CPU) for body, r in (recipe_of(*lines, name=n) for lines, n in makes)]
    assert [e.name for e in found] == ["fwd0", "fwd17", "fwd0", "bwd0"]
    assert found[0].key == found[1].key and found[0].blob == found[1].blob
    assert len({e.key for e in found}) == 3
    assert all(len(e.key) == 32 for e in found)


def test_arguments_and_results_have_the_given_shardings_and_others_are_replicated():
    body, recipe = recipe_of("y = mul a b", outputs="y b")
    specs = {body.ref("a"): ("x",), body.ref("y"): ("x",)}
    found = export.deserialize(bytearray(emit(recipe, body.types, specs, MESH).blob))
    assert found.nr_devices == 2
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    ins = [s.spec for s in found.in_shardings_jax(mesh)]
    outs = [s.spec for s in found.out_shardings_jax(mesh)]
    assert [ins, outs] == [[PartitionSpec("x"), PartitionSpec()]] * 2


def test_results_may_have_other_shardings_than_their_values():
    body, recipe = recipe_of("y = mul a b")
    found = emit(recipe, body.types, {body.ref("y"): ("x",)}, MESH, out_specs=[()])
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    (sharding,) = export.deserialize(bytearray(found.blob)).out_shardings_jax(mesh)
    assert sharding.spec == PartitionSpec()


def test_an_executable_that_looks_for_nans_has_one_more_result():
    body, recipe = recipe_of("y = mul a b")
    with jax.debug_nans(True):
        found = export.deserialize(bytearray(emit(recipe, body.types, {}, CPU).blob))
    assert [a.shape for a in found.out_avals] == [(4,), (3,)]  # two arguments and one result are looked at
    only_moves = Recipe("move0", body.inputs, body.inputs)
    with jax.debug_nans(True):
        found = export.deserialize(bytearray(emit(only_moves, body.types, {}, CPU).blob))
    assert len(found.out_avals) == 2


def test_a_target_knows_its_axes_and_brings_its_mesh_and_rules():
    assert (CPU.axes, MESH.axes) == ({}, {"x": 2})
    for target, shape in ((CPU, {}), (MESH, {"x": 2})):
        with lowering_context(target):
            assert dict(jax.sharding.get_abstract_mesh().shape) == shape


# ---------------------------------------------------------------- what cannot be lowered


def failing(error: str, *, kind: type[Exception] = ValueError) -> tuple[Body, list[Recipe]]:
    """Two tasks; an operation of the second one cannot be lowered."""
    body = Body(a=(4,))

    def run(xs):
        raise kind(error)

    body.add("y = neg a", "z = mul y y")
    body.add("bad[4] = magic z", run=run)
    body.add("u = neg bad")
    return body, [
        Recipe("fwd0", body.refs("a"), body.refs("y"), tuple(body.ops[:1])),
        Recipe("fwd1", body.refs("y"), body.refs("u"), tuple(body.ops[1:])),
    ]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        pytest.param(
            "MLIR translation rule for primitive 'magic' not found for platform cpu",
            "model.py:3: `magic` in task fwd1 has no lowering for the actors' platform; register one "
            "(`jax.interpreters.mlir.register_lowering`), or write it with JAX's own operations",
            id="no rule",
        ),
        pytest.param(
            "MLIR translation rule for primitive 'other' not found for platform cpu",
            "model.py:3: `other` (inside `magic`) in task fwd1 has no lowering for the actors' platform; "
            "register one (`jax.interpreters.mlir.register_lowering`), or write it with JAX's own operations",
            id="no rule for what is inside",
        ),
        pytest.param(
            "Cannot serialize code with custom calls: stablehlo.custom_call @my_kernel(%0)",
            "model.py:3: `magic` in task fwd1 calls foreign code, 'my_kernel', which cannot be exported to "
            "the actors; write it with JAX's own operations",
            id="foreign code",
        ),
        pytest.param(
            "Unknown backend: 'cuda' requested, but no platforms are present.\nmore",
            "model.py:3: `magic` in task fwd1 needs a GPU in this process to be lowered (Unknown backend: "
            "'cuda' requested, but no platforms are present.); start it where there is one, or use an "
            "implementation that can do without",
            id="a GPU",
        ),
        pytest.param(
            "first line\nsecond line",
            "model.py:3: `magic` in task fwd1 cannot be exported to the actors: first line; write it with "
            "other operations",
            id="anything",
        ),
        pytest.param(
            "",
            "model.py:3: `magic` in task fwd1 cannot be exported to the actors: ValueError; write it with "
            "other operations",
            id="an error without words",
        ),
    ],
)
def test_the_operation_to_blame_is_found_and_named_with_its_task_and_line(error, message):
    body, recipes = failing(error)
    with pytest.raises(UnsupportedError) as caught, explained(recipes, body.types, CPU):
        raise KeyError("whatever JAX raises")
    assert str(caught.value) == message
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_error_that_no_operation_is_to_blame_for_passes_as_it_is():
    body, recipe = recipe_of("y = neg a")
    with pytest.raises(KeyError, match="mine"), explained([recipe], body.types, CPU):
        raise KeyError("mine")


def test_an_error_of_this_package_passes_as_it_is_and_nothing_is_tried():
    body, recipes = failing("x")
    with pytest.raises(ScheduleError, match="mine"), explained(recipes, body.types, CPU):
        raise ScheduleError("mine")


def test_operations_of_one_line_and_name_are_tried_once():
    body, tried = Body(a=(4,)), []

    def run(xs):
        tried.append(len(xs))
        return [-xs[0]]

    op = body.add("y = neg a", run=run)
    again = dataclasses.replace(op, inputs=op.outputs, outputs=(body.value("z", (4,)),))
    with pytest.raises(KeyError), explained([Recipe("r", (0,), (2,), (op, again))], body.types, CPU):
        raise KeyError
    assert len(tried) == 1


def test_an_array_in_host_memory_that_leaves_its_task_is_refused():
    def step(x):
        return jax.device_put(jnp.sin(x), jax.memory.Space.Host)

    _, placed = placed_step(step, f32(3), actors=1)
    with pytest.raises(UnsupportedError) as caught:
        refuse_host_memory(placed)
    assert "test_export.py:" in str(caught.value)
    assert str(caught.value).partition(": ")[2] == (
        "`device_put` in task outer0_actor0 puts an array into host memory, and another task, or the step's "
        "caller, gets it; actors keep such arrays in their devices' memory alone. For a checkpoint write a "
        "policy that saves or recomputes (save_only_these_names, nothing_saveable) in place of one that "
        "offloads; leave jax.device_put(..., jax.memory.Space.Host) out of a state"
    )


def test_an_array_in_host_memory_that_stays_in_its_task_is_not():
    def step(x):
        host = jax.device_put(jnp.sin(x), jax.memory.Space.Host)
        return jax.device_put(host, jax.memory.Space.Device) * 2

    _, placed = placed_step(step, f32(3), actors=1)
    assert any(placed.types[o].on_host for op in placed.recipes[0].ops for o in op.outputs)
    refuse_host_memory(placed)


def test_bound_equations_keep_their_line_in_the_executable():
    def model(a):
        return jnp.sin(a)

    closed = jax.make_jaxpr(model)(jnp.ones(4))
    (eqn,) = private_api.open_jaxpr(closed)[0].eqns
    body = Body(a=(4,))
    body.add("y = sin a")
    op = Op("sin", body.refs("a"), body.refs("y"), lambda xs: private_api.bind_eqn(eqn, xs), "l")
    blob = emit(Recipe("fwd0", body.inputs, body.refs("y"), (op,)), body.types, {}, CPU).blob
    assert "test_export.py" in export.deserialize(bytearray(blob)).mlir_module()


@pytest.mark.parametrize("device", ["cpu", "h100-sxm"])
def test_a_ragged_all_to_all_of_tokens_is_exported(device):
    """Experts that drop no token need one. XLA runs it on GPUs alone, so it is only compiled here."""

    def send(rows):
        me, half = jax.lax.axis_index("expert"), rows.shape[0] // 2
        halves, starts = jnp.full(2, half), jnp.array([0, half])
        return jax.lax.ragged_all_to_all(
            rows, jnp.zeros_like(rows), starts, halves, jnp.full(2, me * half), halves, axis_name="expert"
        )

    def loss(weights, x):
        x = jax.shard_map(send, in_specs=PartitionSpec("expert"), out_specs=PartitionSpec("expert"))(
            x @ weights[0]
        )
        return jnp.mean((jpp.pipeline_yield(x) @ weights[1]) ** 2)

    def step(weights, batch):
        return jpp.accumulate_grads(lambda mb: jax.grad(loss)(weights, mb), jpp.Std1F1B(2))(batch)

    machine = jpp.Machine(2, {"expert": 2}, device)
    done = jpp.compile_for(machine, step, ([f32(4, 4), f32(4, 4)], f32(4, 8, 4)), lower=True)
    assert "fwd0" in done.passes["emit"] and "bwd0" in done.passes["emit"]
