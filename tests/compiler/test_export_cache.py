"""Recipes that compute the same are exported once; what cannot be compared is exported for itself."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType

from jaxpp_async.compiler.export import Target, emit
from jaxpp_async.compiler.export_cache import ExportCache
from jaxpp_async.compiler.ir import Accumulate, AccumulatorStart, Lit, Op, Recipe, Types, ValueType
from jaxpp_async.compiler.trace import trace
from jaxpp_async.markers.reductions import Max, Sum
from jaxpp_async.program.instructions import Aval

CPU = Target(None, "cpu", {})
F2 = ValueType(Aval((2,), "float32"))


def traced_recipe(fn, *shapes, name="fwd0", types=None):
    """A recipe of what JAX traced of a function."""
    traced = trace(fn, [jax.ShapeDtypeStruct(s, "float32") for s in shapes])
    return Recipe(name, traced.flat.inputs, traced.flat.outputs, traced.flat.ops), traced.types


def count(pairs, specs=({}, {}), targets=(CPU, CPU)) -> int:
    """How many exports two recipes cost, one after the other; each must be what `emit` makes."""
    exports = ExportCache()
    for (recipe, types), spec, target in zip(pairs, specs, targets, strict=True):
        (found,) = exports.emit([recipe], types, spec, target)
        assert found == emit(recipe, types, spec, target)
    return exports.count


def sine(x):
    return jnp.sin(x) * 2


def scaled(x, by):
    return jnp.sin(x) * by


def test_equal_recipes_of_one_step_are_exported_once_and_keep_their_names():
    types = Types()
    a, b, c, d = (types.new(F2) for _ in range(4))
    recipe, _ = traced_recipe(sine, (2,))
    run = recipe.ops[0].run
    first = Recipe("fwd0", (a,), (b,), (Op("sin", (a,), (b,), run, "l"),))
    second = Recipe("fwd1", (c,), (d,), (Op("sin", (c,), (d,), run, "another line"),))
    exports = ExportCache()
    found = exports.emit([first, second], types, {}, CPU)
    assert exports.count == 1
    assert [e.name for e in found] == ["fwd0", "fwd1"] and found[0].blob is found[1].blob


def test_recipes_are_returned_in_their_order():
    pairs = [traced_recipe(functools.partial(scaled, by=2.0), (n,), name=f"fwd{n}") for n in (3, 4)]
    exports = ExportCache()
    for recipe, types in pairs:
        other = Recipe("bwd0", recipe.inputs, recipe.inputs)
        found = exports.emit([other, recipe, other], types, {}, CPU)
        assert [e.name for e in found] == ["bwd0", recipe.name, "bwd0"]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        pytest.param(sine, sine, 1, id="one function traced twice"),
        pytest.param(
            functools.partial(scaled, by=2.0), functools.partial(scaled, by=3.0), 2, id="other constants"
        ),
        pytest.param(
            functools.partial(scaled, by=0.0), functools.partial(scaled, by=-0.0), 2, id="zeros' signs"
        ),
        pytest.param(jnp.sin, jnp.cos, 2, id="other operations"),
        pytest.param(jnp.sum, jnp.max, 2, id="other reductions"),
        pytest.param(lambda x: x[:1], lambda x: x[1:], 2, id="other parameters"),
    ],
)
def test_what_computes_the_same_is_exported_once(first, second, expected):
    assert count([traced_recipe(first, (2,)), traced_recipe(second, (2,))]) == expected


def test_what_stands_on_another_line_is_another_executable():
    def one(x):
        return jnp.sin(x)

    def two(x):
        return jnp.sin(x)

    # Its bytes name the user's line.
    assert count([traced_recipe(one, (2,)), traced_recipe(two, (2,))]) == 2


def test_shapes_stems_shardings_and_platforms_tell_recipes_apart():
    def named(name):
        return traced_recipe(sine, (2,), name=name)

    assert count([named("fwd0"), named("fwd1")]) == 1
    assert count([named("fwd0"), named("bwd0")]) == 2
    assert count([named("fwd0"), traced_recipe(sine, (3,))]) == 2
    mesh = Target(AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,)), "cpu", {})
    pair = [named("fwd0"), named("fwd0")]
    (argument,) = pair[0][0].inputs
    assert count(pair, ({}, {argument: ("x",)}), (mesh, mesh)) == 2
    assert count(pair, ({argument: ("x",)}, {argument: ("x",)}), (mesh, mesh)) == 1
    assert count(pair, targets=(CPU, mesh)) == 2


def test_one_step_under_two_input_shardings_is_two_executables_of_one_cache():
    recipe, types = traced_recipe(sine, (2,))
    mesh = Target(AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,)), "cpu", {})
    split = {recipe.inputs[0]: ("x",)}
    exports, counts = ExportCache(), []
    # The first executable gets its key, of its own shardings and mesh, only when the second one is asked for.
    for specs, target in ((split, mesh), ({}, mesh), (split, mesh), ({}, CPU), ({}, mesh)):
        assert exports.emit([recipe], types, specs, target) == (emit(recipe, types, specs, target),)
        counts.append(exports.count)
    assert counts == [1, 2, 2, 3, 3]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_step_on_another_mesh_is_exported_for_that_mesh(swapped):
    recipe, types = traced_recipe(sine, (2,))
    targets = [Target(AbstractMesh((n,), ("x",), axis_types=(AxisType.Auto,)), "cpu", {}) for n in (1, 2)]
    exports = ExportCache()
    for target in reversed(targets) if swapped else targets:
        assert exports.emit([recipe], types, {}, target) == (emit(recipe, types, {}, target),)
    assert exports.count == 2


def test_options_of_jax_tell_recipes_apart():
    exports = ExportCache()
    recipe, types = traced_recipe(lambda x: x @ x, (2, 2))
    exports.emit([recipe], types, {}, CPU)
    with jax.default_matmul_precision("highest"):
        exports.emit([recipe], types, {}, CPU)
    assert exports.count == 2
    exports.emit([recipe], types, {}, CPU)
    assert exports.count == 2


@pytest.mark.parametrize(("length", "expected"), [(3, 1), (4, 2)])
def test_nested_jaxprs_are_compared(length, expected):
    def body(c, _):
        return jnp.sin(c), None

    def loop(x, length):
        return lax.scan(body, x, None, length=length)[0]

    pair = [traced_recipe(functools.partial(loop, length=n), (2,)) for n in (3, length)]
    assert count(pair) == expected


def accumulating(reduction, literal):
    types = Types()
    old, new, c = (types.new(F2) for _ in range(3))
    adds = (Accumulate(old, c, reduction, new),)
    return Recipe("bwd0", (old,), (new,), literals={c: Lit(literal)}, accumulates=adds), types


def starting(reduction, count):
    types = Types()
    made = types.new(F2)
    return Recipe(
        "start_bwd0", (), (made,), starts=(AccumulatorStart(F2.aval, reduction, count, made),)
    ), types


ONES, TWOS = np.ones(2, "float32"), np.full(2, 2, "float32")


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        pytest.param([accumulating(Sum(), ONES), accumulating(Sum(), ONES.copy())], 1, id="equal constants"),
        pytest.param([accumulating(Sum(), ONES), accumulating(Sum(), TWOS)], 2, id="other constants"),
        pytest.param([accumulating(Sum(), ONES), accumulating(Max(), ONES)], 2, id="other reductions"),
        pytest.param([starting(Sum(), 2), starting(Sum(), 2)], 1, id="equal starts"),
        pytest.param([starting(Sum(), 2), starting(Max(), 2)], 2, id="starts of other reductions"),
        pytest.param([starting(Sum(), 2), starting(Sum(), 3)], 2, id="other microbatches"),
    ],
)
def test_constants_reductions_and_starts_are_compared(pair, expected):
    assert count(pair) == expected


def payload(make):
    types = Types()
    a, b = types.new(F2), types.new(F2)
    return Recipe("fwd0", (a,), (b,), (Op("f", (a,), (b,), make, "l"),)), types


def times(factor):
    def run(xs):
        return [xs[0] * factor]

    return run


class Callable:
    """A payload that cannot be compared."""

    def __call__(self, xs):
        return [xs[0] * 2]


SAME = Callable()


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        pytest.param(times(2), times(2), 1, id="equal closures"),
        pytest.param(times(2), times(3), 2, id="closures over other values"),
        pytest.param(times(2), times(2.0), 2, id="closures over another type"),
        pytest.param(times(0.0), times(-0.0), 2, id="closures over two zeros"),
        pytest.param(
            functools.partial(lambda k, xs: xs, 1), functools.partial(lambda k, xs: xs, 1), 2, id="two codes"
        ),
        pytest.param(SAME, SAME, 1, id="one object"),
        pytest.param(Callable(), Callable(), 2, id="two objects that do not say when they are equal"),
    ],
)
def test_payloads_are_equal_by_code_and_closure_or_by_identity(first, second, expected):
    assert count([payload(first), payload(second)]) == expected


def test_a_function_that_closes_over_itself_can_be_compared():
    def make(n):
        def run(xs, depth=n):
            return run(xs, depth - 1) if depth else [xs[0] * 2]

        return run

    assert count([payload(make(1)), payload(make(1))]) == 1
    assert count([payload(make(1)), payload(make(2))]) == 2
