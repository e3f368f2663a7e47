"""A scan in every iteration of which all parts are computed is a scan for each part."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from dividing import division_of, in_parts, values
from jax import lax

from jaxpp_async.compiler.divide import divide
from jaxpp_async.compiler.divided_scan import Carry, Collected, DividedScan
from jaxpp_async.compiler.ir import Op
from jaxpp_async.compiler.trace import trace
from jaxpp_async.program.leaf_parts import Parts

ROWS = 6
X = (ROWS, 4, 3)
THREE = Parts(0, (0, 1, 4, ROWS))


def newton_schulz(x: jax.Array) -> jax.Array:
    def iteration(_: int, x: jax.Array) -> jax.Array:
        gram = jnp.einsum("lij,lkj->lik", x, x)
        return 1.5 * x - 0.5 * jnp.einsum("lik,lkj->lij", gram, x)

    return lax.fori_loop(0, 3, iteration, x / jnp.linalg.norm(x, axis=(1, 2), keepdims=True))


def momentum(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    def iteration(carry: tuple, rate: jax.Array) -> tuple[tuple, jax.Array]:
        v, total = carry
        v = 0.9 * v + rate * x
        return (v, total + rate), v * 2

    (v, total), all_v = lax.scan(iteration, (jnp.zeros_like(x), 0.0), jnp.arange(3.0), reverse=True)
    return v + total, all_v


APART: dict[str, tuple[Callable, list[Parts | None]]] = {
    "iterations of each layer": (newton_schulz, [THREE]),
    "with a counter and a stack": (momentum, [THREE, Parts(1, THREE.bounds)]),
    "over an array of another axis": (
        lambda x: lax.scan(lambda c, row: (c + row, None), jnp.zeros((ROWS, 3)), jnp.moveaxis(x, 1, 0))[0],
        [THREE],
    ),
    "two carries that change places": (
        lambda x: lax.fori_loop(0, 3, lambda _, c: (c[1] * 0.5, c[0]), (x, jnp.sin(x)))[0],
        [THREE],
    ),
}


def num_scans(fn: Callable) -> int:
    traced = trace(fn, values(X))
    done = divide(traced, division_of(traced, 0, (1, 4)), {})
    return sum(op.name == "scan" for op in done.flat.ops)


@pytest.mark.parametrize("name", APART)
def test_each_part_has_a_scan_of_its_own(name):
    fn, parts = APART[name]
    assert in_parts(fn, values(X)) == parts
    assert num_scans(fn) in (3, 4)  # and one for what is not divided


def test_parts_that_need_each_other_stay_in_one_scan():
    def fn(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 3, lambda _, x: x / (1 + jnp.sum(x**2)), x)

    assert in_parts(fn, values(X)) == [THREE]
    assert num_scans(fn) == 1


def test_a_result_that_is_needed_whole_is_joined():
    assert in_parts(lambda x: jnp.sort(newton_schulz(x), axis=0), values(X)) == [None]


def test_a_scan_inside_a_scan():
    def fn(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 2, lambda _, x: newton_schulz(x) + 0.1 * x, x)

    assert in_parts(fn, values(X)) == [THREE]


def test_what_a_part_does_not_need_is_not_in_its_scan():
    carries = [Carry(10, 20, 1, 30, 0), Carry(11, 21, 2, 31, 1), Carry(12, 22, 3, -1, None)]
    ops = [
        Op("neg", (10,), (20,), lambda xs: [-xs[0]], ""),
        Op("add", (11, 12), (21,), lambda xs: [xs[0] + xs[1]], ""),
        Op("mul", (12, 13), (22,), lambda xs: [xs[0] * xs[1]], ""),
    ]
    looped = DividedScan([(13, 4)], carries, [], [Collected(21, -1, 1)], ops, 3, False)
    first, second = looped.scans_by_part()
    assert (first.inputs, first.outputs) == ((1,), (30,))
    assert (second.inputs, second.outputs) == ((4, 2, 3), (31, -1))
    one, other = jnp.float32(2), jnp.float32(3)
    assert first.scan.run([one]) == [-2.0]
    assert second.scan.run([other, one, one]) == [2 + 2 + 6 + 18, 54]
