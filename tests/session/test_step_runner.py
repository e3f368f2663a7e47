"""Direct tests of how steps are run in order and counted, on an inline mesh."""

from __future__ import annotations

import asyncio

import jax.numpy as jnp
import pytest

import jaxpp_async as jpp
from jaxpp_async.errors import ArrayError
from jaxpp_async.session.step_runner import StepRunner


@pytest.fixture(scope="module")
async def mesh():
    async with jpp.RemoteMesh(1, launcher="inline", max_inflight=2) as mesh:
        yield mesh


def runner(mesh: jpp.RemoteMesh) -> StepRunner:
    found = mesh._runner
    assert isinstance(found, StepRunner)
    return found


async def test_a_run_and_a_submitted_step_are_the_last_that_finished(mesh):
    distributed = mesh.distributed(lambda x: x + 1)
    assert float(await (await runner(mesh).run(distributed, (jnp.float32(1),)))) == 2.0
    before = runner(mesh).last
    future = await runner(mesh).submit(distributed, (jnp.float32(2),))
    assert float(await (await future)) == 3.0
    assert runner(mesh).last is not before


async def test_steps_are_compiled_while_another_is_started(mesh):
    distributed = mesh.distributed(lambda x: x * 3)
    async with runner(mesh)._start_lock:
        run = asyncio.create_task(runner(mesh).run(distributed, (jnp.float32(2),)))
        await runner(mesh).compiler.compile(mesh.distributed(lambda x: x - 3), (jnp.float32(2),))
        assert not run.done()
    assert float(await (await run)) == 6.0


async def test_wrong_arguments_are_refused_before_their_turn(mesh):
    distributed = mesh.distributed(lambda x: x * 4)
    x = await runner(mesh).run(distributed, (jnp.float32(2),))
    await x.delete()
    async with runner(mesh)._start_lock:
        with pytest.raises(ArrayError, match="was deleted"):
            await runner(mesh).run(distributed, (x,))


async def test_an_argument_is_made_by_another_function(mesh):
    distributed = mesh.distributed(lambda w, x: w * x)
    await runner(mesh).compiler.compile(distributed, (jnp.zeros(2), jnp.float32(1)))
    w = await runner(mesh).init(distributed, 0, lambda: jnp.full(2, 5.0), ())
    assert (await w).tolist() == [5.0, 5.0]
    assert (await (await runner(mesh).run(distributed, (w, jnp.float32(2))))).tolist() == [10.0, 10.0]
