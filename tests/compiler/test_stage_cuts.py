"""Where the stages of a loop cut an array of layers: rows taken one at a time, and rows taken together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp_async as jpp
from jaxpp_async.compiler import stage_cuts as module
from jaxpp_async.compiler.cut import cut_loops
from jaxpp_async.compiler.ir import Loop
from jaxpp_async.compiler.partition import partition
from jaxpp_async.compiler.stage_cuts import stage_cuts
from jaxpp_async.compiler.trace import trace

LAYERS, WIDTH = 6, 3


@pytest.fixture(autouse=True)
def _rows_are_large(monkeypatch):
    monkeypatch.setattr(module, "SMALL_ROW_BYTES", 0)


def cuts_of(loss: Callable, stages: Sequence[int], axis: int = 0) -> list[tuple[int, tuple[int, ...]]]:
    """The axis and the cuts of the argument, and of its gradient, for stages that end behind these marks."""

    def step(w: Any, batch: Any) -> Any:
        schedule = jpp.Interleaved1F1B(len(stages) + 1, stages=list(stages))
        return jpp.accumulate_grads(lambda x: jax.grad(loss)(w, x), schedule)(batch)

    w = np.ones(np.insert([WIDTH, WIDTH], axis, LAYERS), np.float32)
    traced = trace(step, (w, np.ones((2, 2, WIDTH), np.float32)))
    cut = cut_loops(traced, None, 2)
    loop = next(item for item in cut.flat.ops if isinstance(item, Loop))
    return [(axis, cuts) for _, axis, cuts in stage_cuts(partition(loop, cut.types), cut.types)]


def scanned(w: Any, x: Any) -> Any:
    x, _ = jax.lax.scan(lambda x, layer: (jpp.pipeline_yield(jnp.tanh(x @ layer)), None), x, w)
    return jnp.sum(x)


def pairs(w: Any, x: Any) -> Any:
    """Each scan takes two layers."""
    for k in range(0, LAYERS, 2):
        x, _ = jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, w[k : k + 2])
        x = jpp.pipeline_yield(x)
    return jnp.sum(x)


def first_together(w: Any, x: Any) -> Any:
    """The first stage takes three layers together, the second three, one at a time."""
    x, _ = jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, w[:3])
    x = jpp.pipeline_yield(x)
    for k in range(3, LAYERS):
        x = jnp.tanh(x @ w[k])
    return jnp.sum(x)


def shared(w: Any, x: Any) -> Any:
    """Both stages take all layers, one at a time."""
    for _ in range(2):
        for k in range(LAYERS):
            x = jnp.tanh(x @ w[k])
        x = jpp.pipeline_yield(x)
    return jnp.sum(x)


def every_other(w: Any, x: Any) -> Any:
    """The first stage takes layers 0 and 2 together, and layer 1; the second takes the others singly."""
    x, _ = jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, w[0:4:2])
    x = jpp.pipeline_yield(jnp.tanh(x @ w[1]))
    for k in range(3, LAYERS):
        x = jnp.tanh(x @ w[k])
    return jnp.sum(x)


def columns(w: Any, x: Any) -> Any:
    """Layers on the last axis."""
    for k in range(LAYERS):
        x = jpp.pipeline_yield(jnp.tanh(x @ w[..., k]))
    return jnp.sum(x)


@pytest.mark.parametrize(
    ("loss", "stages", "axis", "cuts"),
    [
        (scanned, [2], 0, (1, 2, 3, 4, 5)),
        (pairs, [0], 0, (2, 4)),
        (first_together, [0], 0, (3, 4, 5)),
        (every_other, [0], 0, (3, 4, 5)),
        (columns, [1], 2, (1, 2, 3, 4, 5)),
    ],
    ids=["one at a time", "two and two", "both", "every other", "on another axis"],
)
def test_an_array_is_cut_between_stages_and_between_rows_that_are_not_taken_together(
    loss, stages, axis, cuts
):
    found = cuts_of(loss, stages, axis)
    assert found and set(found) == {(axis, cuts)}


@pytest.mark.parametrize(("loss", "stages"), [(scanned, []), (shared, [0])], ids=["one stage", "all rows"])
def test_an_array_whose_rows_all_stages_take_is_not_cut(loss, stages):
    assert cuts_of(loss, stages) == []


def test_of_very_many_rows_not_each_becomes_a_part(monkeypatch):
    monkeypatch.setattr(module, "MOST_ROWS", LAYERS - 1)
    assert set(cuts_of(scanned, [2])) == {(0, (3,))}
    monkeypatch.setattr(module, "MOST_ROWS", LAYERS)
    assert set(cuts_of(scanned, [2])) == {(0, (1, 2, 3, 4, 5))}


def test_small_rows_are_cut_between_stages_only(monkeypatch):
    monkeypatch.setattr(module, "SMALL_ROW_BYTES", 4 * WIDTH * WIDTH)
    assert set(cuts_of(scanned, [2])) == {(0, (1, 2, 3, 4, 5))}
    monkeypatch.setattr(module, "SMALL_ROW_BYTES", 4 * WIDTH * WIDTH + 1)
    assert set(cuts_of(scanned, [2])) == {(0, (3,))}
