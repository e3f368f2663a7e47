"""Direct tests of what `step.init` compiles: where its results go, and which functions it refuses."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import jaxpp_async as jpp
from jaxpp_async.errors import ArrayError, MeshError
from jaxpp_async.session.step_init import init_request


@pytest.fixture(scope="module")
async def mesh():
    async with jpp.RemoteMesh(1, launcher="inline") as mesh:
        yield mesh


STATE = {"b": jnp.zeros(3), "w": jnp.zeros((2, 3))}


@pytest.fixture(scope="module")
async def step(mesh):
    """A compiled step of a state and a batch."""
    step = mesh.distributed(lambda state, x: x @ state["w"] + state["b"])
    await step.compile(STATE, jnp.zeros((4, 2)))
    return step


async def made(step, fn, *args):
    maker, request = init_request(step, 0, fn, args)
    return await step.runner.compiler.load(request, maker)


async def test_the_results_go_to_the_actors_that_take_them(step):
    maker, request = init_request(step, 0, lambda: STATE, ())
    assert (maker.runner, maker.fn is not step.fn) == (step.runner, True)
    assert request.result_homes == {0: frozenset({0}), 1: frozenset({0})}
    assert not request.result_parts
    compiled = await made(step, lambda: STATE)
    assert [slot.actors for slot in compiled.outputs] == [(0,), (0,)]


async def test_a_step_that_is_not_compiled_has_no_argument_to_make(mesh):
    with pytest.raises(MeshError, match=r"step\.init"):
        init_request(mesh.distributed(lambda x: x), 0, lambda: jnp.zeros(2), ())


async def test_an_argument_that_the_step_does_not_have_is_refused(step):
    with pytest.raises(ArrayError, match=r"^step\.init: step .* has no argument 2"):
        init_request(step, 2, lambda: STATE, ())


@pytest.mark.parametrize(
    ("makes", "told"),
    [
        ({**STATE, "w": jnp.zeros((2, 4))}, r"result\['w'\] is float32\[2, 4\], but .* is float32\[2, 3\]"),
        ({"w": STATE["w"]}, r"it has no .*\['b'\] \(float32\[3\]\)"),
        ({**STATE, "v": jnp.zeros(1)}, r"the argument has no result\['v'\] \(float32\[1\]\)"),
        ({**STATE, "b": 0}, r"result\['b'\] is int32\[\], but .* is float32\[3\]"),
    ],
)
async def test_a_function_that_makes_other_leaves_is_refused_with_the_leaf(step, makes, told):
    with pytest.raises(ArrayError, match=rf"^step\.init: <lambda> does not make argument 0 of .*: {told}"):
        await made(step, lambda: makes)
