"""Direct tests of how steps are compiled once, admitted in order and counted, on an inline mesh."""

from __future__ import annotations

import asyncio

import jax.numpy as jnp
import pytest

import jaxpp_async as jpp
from jaxpp_async.errors import MeshError
from jaxpp_async.session.step_runner import StepRunner


@pytest.fixture(scope="module")
async def mesh():
    async with jpp.RemoteMesh(1, launcher="inline", max_inflight=2) as mesh:
        yield mesh


def runner(mesh: jpp.RemoteMesh) -> StepRunner:
    found = mesh._runner
    assert isinstance(found, StepRunner)
    return found


async def test_calls_at_once_compile_a_step_once(mesh):
    traces = []

    def step(x):
        traces.append(x)
        return x + 1

    distributed = mesh.distributed(step)
    args = (jnp.zeros(2),)
    compiled = await asyncio.gather(*(runner(mesh).compile(distributed, args) for _ in range(3)))
    assert len(traces) == 1
    assert len({id(one) for one in compiled}) == 1


async def test_other_types_are_another_form_and_alike_ones_are_not(mesh):
    distributed = mesh.distributed(lambda x: x * 2)
    first = await runner(mesh).compile(distributed, (jnp.zeros(2),))
    assert await runner(mesh).compile(distributed, (jnp.ones(2),)) is first
    assert await runner(mesh).compile(distributed, (jnp.zeros(3),)) is not first


async def test_a_run_and_a_submitted_step_are_the_last_that_finished(mesh):
    distributed = mesh.distributed(lambda x: x + 1)
    assert float(await (await runner(mesh).run(distributed, (jnp.float32(1),)))) == 2.0
    before = runner(mesh).last
    future = await runner(mesh).submit(distributed, (jnp.float32(2),))
    assert float(await (await future)) == 3.0
    assert runner(mesh).last is not before


async def test_checks_of_this_thread_that_actors_do_not_make_are_refused(mesh, monkeypatch):
    from jaxpp_async.jax_bridge import jax_config

    monkeypatch.setattr(jax_config, "thread_checks", lambda: {"jax_debug_nans": True})
    distributed = mesh.distributed(lambda x: x - 1)
    with pytest.raises(MeshError, match=r"jax_debug_nans is True here and .* on the actors"):
        await runner(mesh).compile(distributed, (jnp.zeros(2),))
