"""Calls of a step: arguments that change meanwhile or cannot be read, and how everybody hears of the end."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from docs_code import doc_code
from sent_steps import sent_step

import jaxpp_async as jpp
from jaxpp_async.actors.array_store import StoredArray, wait_all
from jaxpp_async.base.printable import ErrorInWords
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.errors import ActorError, ArrayError, MeshError
from jaxpp_async.program.instructions import Aval
from jaxpp_async.protocol.messages import step_id


def scaled(params, batch, by=1):
    def loss(x):
        h = jpp.pipeline_yield(jnp.tanh(x @ params["a"]))
        return jnp.sum(h @ params["b"]) * by

    return jpp.accumulate_grads(loss, jpp.GPipe(2))(batch["x"])


def shifted(params, bias, x):
    def loss(mb):
        h = jpp.pipeline_yield(jnp.tanh(mb @ params["a"]) + bias)
        return jnp.sum(h @ params["b"])

    return jpp.accumulate_grads(loss, jpp.GPipe(2))(x)


def problem() -> tuple[dict[str, Any], dict[str, Any]]:
    params = {name: np.ones((4, 4), np.float32) for name in "ab"}
    return params, {"x": np.linspace(0, 1, 24, dtype=np.float32).reshape(2, 3, 4)}


# ---------------------------------------------------------------- arguments that change


@pytest.mark.parametrize(
    "later",
    [lambda x: np.ones((2, 5, 4), np.float32), lambda x: x.view(np.int32), lambda x: -x, lambda x: {"y": x}],
    ids=["shape", "dtype", "values", "tree"],
)
async def test_a_call_is_what_its_arguments_were_when_it_was_made(remote_mesh, later: Callable[[Any], Any]):
    """A first call waits for the compiler; its caller may go on meanwhile, and fill the same dict anew."""
    mesh = await remote_mesh(2, launcher="inline")
    step = mesh.distributed(scaled)
    params, batch = problem()
    expected = jax.jit(scaled)(params, dict(batch))
    running = asyncio.ensure_future(mesh.run(step, params, batch))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not running.done()
    changed = later(batch["x"])
    batch["x"] = changed
    np.testing.assert_allclose(await (await running), expected, rtol=1e-5)
    if not isinstance(changed, dict):
        np.testing.assert_allclose(
            await (await mesh.run(step, params, batch)), jax.jit(scaled)(params, batch), rtol=1e-5
        )
    assert not mesh.is_closed


async def test_a_call_that_waits_for_the_compiler_is_what_its_arguments_were(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    first, second = mesh.distributed(scaled), mesh.distributed(scaled)
    params, batch = problem()
    expected = jax.jit(scaled)(params, dict(batch))
    running = [asyncio.ensure_future(mesh.run(step, params, batch)) for step in (first, second)]
    for _ in range(3):
        await asyncio.sleep(0)
    batch["x"] = np.ones((2, 5, 4), np.float32)
    for each in running:
        np.testing.assert_allclose(await (await each), expected, rtol=1e-5)
    again = mesh.run(second, params, problem()[1])
    np.testing.assert_allclose(await (await again), expected, rtol=1e-5)


# users may still
@pytest.mark.filterwarnings("ignore:Setting the (shape|dtype) on a NumPy array:DeprecationWarning")
@pytest.mark.parametrize("change", ["shape", "dtype"])
async def test_a_host_array_that_was_made_another_is_refused(remote_mesh, change):
    """Of as many bytes as before; it would be read as something else."""
    mesh = await remote_mesh(2, launcher="inline")
    step = mesh.distributed(scaled)
    params, batch = problem()
    running = asyncio.ensure_future(mesh.run(step, params, batch))
    for _ in range(3):
        await asyncio.sleep(0)
    setattr(batch["x"], change, (4, 3, 2) if change == "shape" else np.int32)
    with pytest.raises(
        ArrayError, match=r"batch\['x'\] is .* now, but was float32\[2, 3, 4\] when the step was called"
    ):
        await running
    params, batch = problem()
    np.testing.assert_allclose(
        await (await mesh.run(step, params, batch)), jax.jit(scaled)(params, batch), rtol=1e-5
    )


# ---------------------------------------------------------------- static arguments, unreadable ones


@pytest.mark.parametrize(
    "by", [np.array([1, 2]), np.array([2]), [2], {2: 2}], ids=["array", "one", "list", "dict"]
)
async def test_a_static_argument_without_a_hash_is_named_in_later_calls_too(remote_mesh, by):
    mesh = await remote_mesh(2, launcher="inline")
    step = mesh.distributed(scaled, static_argnums=2)
    await mesh.run(step, *problem(), 2)
    with pytest.raises(TypeError, match=r"argument by is static and a .*, which has no hash"):
        await mesh.run(step, *problem(), by)
    with pytest.raises(TypeError, match=r"argument by is static and a .*, which has no hash"):
        await mesh.distributed(scaled, static_argnums=2)(*problem(), by)


async def test_a_put_array_still_waits_here_after_a_call_that_could_not_be_made(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    step = mesh.distributed(shifted)
    params, batch = problem()
    expected = await (await mesh.run(step, params, np.float32(1), batch["x"]))
    put = await mesh.put(params)
    gone = jnp.float32(1)
    gone.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        await mesh.run(step, put, gone, batch["x"])
    np.testing.assert_array_equal((await mesh.fetch(put))["a"], params["a"])
    np.testing.assert_array_equal(await (await mesh.run(step, put, np.float32(1), batch["x"])), expected)
    assert put["a"].actors and put["a"].host is None
    np.testing.assert_array_equal((await mesh.fetch(put))["b"], params["b"])


async def test_a_put_array_that_is_two_arguments_goes_once(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    step = mesh.distributed(scaled)
    params, batch = problem()
    one = await mesh.put(params["a"])
    found = await mesh.run(step, {"a": one, "b": one}, batch)
    np.testing.assert_allclose(await found, jax.jit(scaled)(params, batch), rtol=1e-5)
    assert one.actors == (0, 1)


# ---------------------------------------------------------------- the end of a step


@pytest.mark.parametrize("error", [None, RuntimeError("lost")], ids=["finished", "failed"])
async def test_a_callback_that_raises_keeps_nobody_from_hearing_of_the_end(error):
    step, told, reported = sent_step(step_id(3)), [], []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: reported.append(context))
    try:
        step.when_done(lambda: 1 / 0)
        step.when_done(lambda: told.append("next"))
        waiting = asyncio.ensure_future(asyncio.wait_for(_result(step), 5))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        step.finish() if error is None else step.fail(error)
        step.when_done(lambda: 1 / 0)
        assert await waiting is error
        assert told == ["next"]
    finally:
        loop.set_exception_handler(None)
    assert [type(context["exception"]) for context in reported] == [ZeroDivisionError] * 2
    assert "step 3" in reported[0]["message"]


async def _result(step: SubmittedStep) -> Exception | None:
    try:
        await step
    except RuntimeError as error:
        return error
    return None


async def test_a_future_says_which_step_it_is_and_how_it_is(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    step = mesh.distributed(scaled)
    future = await mesh.submit(step, *problem())
    with pytest.raises(MeshError, match="await it first"):
        _ = future.stats
    assert repr(future).startswith("<StepFuture: step ") and repr(future).endswith(" ('scaled'), under way>")
    await future
    number = future.timeline().step
    assert repr(future) == f"<StepFuture: step {number} ('scaled'), finished>"
    future._step.error = RuntimeError("lost\nand more")
    assert repr(future) == f"<StepFuture: step {number} ('scaled'), failed: lost>"
    with pytest.raises(MeshError, match=rf"step {number} \('scaled'\) failed, so it has no stats: lost$"):
        _ = future.stats


async def test_the_page_shows_the_timeline_of_a_certain_step():
    async with jpp.RemoteMesh(2, launcher="inline") as mesh:
        timelines = [
            await doc_code("timeline.md")["of_this_step"](mesh, mesh.distributed(scaled), *problem())
            for _ in range(2)
        ]
    assert [timeline.step for timeline in timelines] == [0, 1]


async def test_an_error_that_is_raised_again_has_the_same_traceback_again():
    step, entry = sent_step(step_id(3)), StoredArray(Aval((), "float32"))
    try:
        raise ActorError("gone")
    except ActorError as error:
        step.fail(error)
        entry.fail(error)
    for call, kind in ((lambda: step, ActorError), (lambda: wait_all([entry]), ErrorInWords)):
        lengths = set()
        for _ in range(3):
            with pytest.raises(kind, match=r"^gone$") as info:
                await call()
            lengths.add(len(traceback.extract_tb(info.value.__traceback__)))
        assert len(lengths) == 1
