"""Arguments that are weakly typed at the first call of a step only are traced as strong."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpp_async.compiler.trace import trace_ignoring_weak_types


def leaf(*shape, weak=False, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)


def settled(fn, *args, static=()):
    """Settle the arguments of `fn`.

    Returns:
        Which arguments of the settled step are weak, the leaves that it takes weak as well as strong, and for
        each trace of `fn` which leaves were weak (a static leaf: the leaf itself).
    """
    seen = []

    def recorded(*now):
        seen.append([getattr(x, "weak_type", x) for x in jax.tree.leaves(now)])
        return fn(*now)

    found, leaves = trace_ignoring_weak_types(recorded, args, static_argnums=static, argument_names=())
    return [found.types[v].weak for v in found.flat.inputs], sorted(leaves), seen


def sgd(p, g):
    return p - 0.5 * g, jnp.sum(p)


def test_a_state_that_comes_back_strong_is_taken_as_strong():
    weak, leaves, seen = settled(sgd, leaf(3, weak=True), leaf(3))
    assert (weak, leaves) == ([False, False], [0])
    assert seen == [[True, False], [False, False]]


def test_a_step_without_weak_arguments_is_traced_once():
    weak, leaves, seen = settled(sgd, leaf(3), leaf(3))
    assert (weak, leaves, len(seen)) == ([False, False], [], 1)


def test_an_argument_that_comes_back_weak_stays_weak():
    weak, leaves, _ = settled(lambda p: (p * 2.0, jnp.sum(p)), leaf(3, weak=True))
    assert (weak, leaves) == ([True], [])


def test_a_weak_argument_that_nothing_continues_stays_weak():
    weak, leaves, _ = settled(lambda p, g: g * p, leaf(weak=True), leaf(3))
    assert (weak, leaves) == ([True, False], [])


def test_a_weak_type_that_changes_what_is_computed_stays():
    def step(p, g):
        return p + g.astype("float32"), (p * g).sum()  # in bfloat16 only while p is weak

    weak, leaves, seen = settled(step, leaf(weak=True), leaf(dtype="bfloat16"))
    assert (weak, leaves) == ([True, False], [])
    assert len(seen) == 2


def test_what_one_leaf_settles_may_unsettle_the_next():
    def step(state):
        a, b = state
        return a * jnp.ones(3), a * b

    weak, leaves, seen = settled(step, (leaf(3, weak=True), leaf(3, weak=True)))
    assert (weak, leaves) == ([False, False], [0, 1])
    assert seen == [[True, True], [False, True], [False, False]]


def test_static_arguments_are_left_as_they_are():
    weak, leaves, seen = settled(
        lambda kind, p, g: sgd(p, g), "kind", leaf(3, weak=True), leaf(3), static=(0,)
    )
    assert (weak, leaves) == ([False, False], [0])
    assert seen[1][0] == "kind"
