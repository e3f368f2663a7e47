"""A `run` that is cancelled or interrupted loses nothing: donated arguments stand for the results that
continue them (case 26 of `docs/failures.md`). Training that is interrupted goes on like training that never
was, bit for bit."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interrupting import WAYS, Point, interrupted
from models import mlp
from resources import inspect_actors

import jaxpp_async as jpp
from jaxpp_async.actors.step_run import StepRun
from jaxpp_async.compiler.continued_arguments import continued_arguments
from jaxpp_async.compiler.trace import trace
from jaxpp_async.errors import ArrayError, MeshClosedError, RemoteError
from jaxpp_async.testing import assert_close

MODEL = mlp(2)
NUM_STEPS = 18
X = np.arange(4, dtype=np.float32)


def train_step(schedule: Any) -> Callable:
    """Parameters and momentum are trees of one structure: each has to be continued by its own."""

    def step(params, momentum, count, batch):
        def microbatch_grads(mb):
            loss, grads = jax.value_and_grad(MODEL.loss)(params, mb)
            return grads, loss

        grads, losses = jpp.accumulate_grads(microbatch_grads, schedule)(batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda p, m: p - 0.01 * m, params, momentum), momentum, count + 1, losses

    return step


def start() -> tuple[Any, Any, Any]:
    params = MODEL.init(0)
    return params, jax.tree.map(np.zeros_like, params), np.int32(0)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
async def inline() -> AsyncIterator[jpp.RemoteMesh]:
    async with jpp.RemoteMesh(2, launcher="inline") as mesh:
        yield mesh


async def sent(call: Any) -> asyncio.Task[Any]:
    """A task of this call, which has just sent its step."""
    task = asyncio.get_running_loop().create_task(call)
    for _ in range(2):
        await asyncio.sleep(0)
    assert not task.done()
    return task


async def cancelled(call: Any) -> None:
    """Cancel a call that has just sent its step."""
    task = await sent(call)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


# ---------------------------------------------------------------- training goes on


@pytest.mark.parametrize("launcher", ["inline", "local"])
@pytest.mark.parametrize("schedule", [jpp.Std1F1B(2), jpp.Eager1F1B(2)], ids=["Std1F1B", "Eager1F1B"])
async def test_training_interrupted_at_many_moments_goes_on_bit_for_bit(
    remote_mesh, launcher, schedule, tmp_path
):
    mesh = await remote_mesh(2, launcher=launcher)
    step = mesh.distributed(train_step(schedule), donate_argnums=(0, 1, 2))
    batches = [MODEL.batch(seed, 4) for seed in range(NUM_STEPS)]
    state, states, plain = start(), [], start()
    for batch in batches:
        *state, losses = await mesh.run(step, *state, batch)
        *plain, expected = jax.jit(train_step(schedule))(*plain, batch)
        states.append(bits(await mesh.fetch(state)))
    assert_close(await losses, expected)
    assert_close(await mesh.fetch(state), plain)

    params, momentum, count, _ = await mesh.run(step, *start(), batches[0])
    counted = 0

    async def one() -> None:  # as in the README
        nonlocal params, momentum, count
        params, momentum, count, _ = await mesh.run(step, params, momentum, count, batches[number])

    for number in range(1, NUM_STEPS):
        before = params
        point = Point(0, (0, 1, 2, 3, 5, 8, 13, 21, 34)[number % 9], WAYS[number % len(WAYS)])
        assert await interrupted(one, point), "it has to wait for its step"
        counted += params is before
        kept = number % 3  # used at once, saved while the step may be under way, or fetched
        if kept == 1:
            await mesh.save(tmp_path / "saved", (params, momentum, count))
        elif kept == 2:
            assert bits(await mesh.fetch((params, momentum, count))) == states[number], str(point)
    assert counted > NUM_STEPS // 4, "most of these were to be cut short"
    assert bits(await mesh.fetch((params, momentum, count))) == states[-1]
    like = ((step, 0), (step, 1), (step, 2))
    assert bits(await mesh.fetch(await mesh.restore(tmp_path / "saved", like))) == states[NUM_STEPS - 2]


async def test_what_an_interrupted_run_leaves_is_freed_with_its_handles(inline):
    step = inline.distributed(lambda x: (x + 1, x * 2), donate_argnums=0)
    x, rest = await inline.run(step, X)

    async def live() -> int:
        gc.collect()
        await inspect_actors(inline._running())  # sends what is to be freed
        return sum(numbers["store_arrays"] for numbers in (await inspect_actors(inline._running())).values())

    before = await live()
    for _ in range(2):
        await cancelled(inline.run(step, x))
    assert (await x == X + 3).all() and await live() == before
    del x, rest
    assert await live() == before - 2


async def test_the_next_steps_do_not_wait_for_one_that_was_cancelled(inline):
    long = inline.distributed(lambda x: jax.lax.fori_loop(0, 40, lambda _, y: y @ x, x), donate_argnums=0)
    x = await inline.run(long, np.eye(300, dtype=np.float32) * 0.9)
    other = x
    await cancelled(inline.run(long, x))
    await cancelled(inline.run(long, x))  # behind the first, which is under way
    assert inline._running()._under_way and not x.is_deleted()
    future = await inline.submit(long, x)
    assert inline._running()._under_way and x.is_deleted() and other.is_deleted()
    expected = np.eye(300) * 0.9
    for _ in range(4):
        expected = np.eye(300) * np.diag(expected) ** 41
    assert_close(await future.outputs, expected.astype(np.float32))


# ---------------------------------------------------------------- every way to be cut short


async def _closed(call: Any) -> None:
    call.send(None)
    call.close()


async def _interrupted(call: Any) -> None:
    call.send(None)
    with pytest.raises(KeyboardInterrupt):
        call.throw(KeyboardInterrupt())


async def _dropped(call: Any) -> None:
    call.send(None)
    del call


WAYS_TO_GO = {"cancelled": cancelled, "closed": _closed, "interrupted": _interrupted, "dropped": _dropped}


@pytest.mark.parametrize("way", WAYS_TO_GO)
@pytest.mark.parametrize("call", ["run", "await step", "submit"])
async def test_however_its_caller_goes(inline, way, call, caplog):
    step = inline.distributed(lambda x, y: (y.sum(), {"x": x + 1}), donate_argnums=0, name="give")
    x = (await inline.run(step, {"x": X}["x"], np.ones((128, 128), np.float32)))[1]["x"]
    y = np.ones((128, 128), np.float32)  # large: sending it is waited for
    caplog.clear()
    calls = {"run": inline.run, "submit": inline.submit, "await step": lambda step, *args: step(*args)}
    await WAYS_TO_GO[way](calls[call](step, x, y))
    gc.collect()
    [said] = warnings(caplog)
    assert re.match(
        r"step \d+ \('give'\) runs on, though its `(run|submit)` ended by \w+: x stands for result\[1\]", said
    )
    assert "to give it the same batch again trains on it twice" in said
    assert (await x == X + 2).all()


async def test_a_print_that_raises_does_not_take_the_state_along(inline):
    def refuse(_: Any) -> None:
        raise ValueError("not printed")

    def noisy(x):
        jax.debug.callback(refuse, x[0])
        return x + 1

    step = inline.distributed(noisy, donate_argnums=0)
    x = await inline.run(inline.distributed(lambda x: x + 1), X)
    with pytest.raises(Exception, match="not printed"):
        await inline.run(step, x)
    assert (await x == X + 2).all()


async def test_a_future_that_was_submitted_keeps_its_results(inline):
    step = inline.distributed(lambda x: x + 1, donate_argnums=0)
    x = await inline.run(step, X)
    future = await inline.submit(step, x)
    await cancelled(asyncio.wait_for(future, None))
    with pytest.raises(ArrayError, match=r"it was donated to step .*; use the step's result"):
        await x
    assert (await (await future) == X + 2).all()


async def test_nothing_was_sent_and_nothing_has_changed(inline, caplog):
    step = inline.distributed(lambda x: x + 1, donate_argnums=0)
    x = await inline.run(step, X)
    caplog.clear()
    async with inline._runner._start_lock:  # its turn has not come
        await cancelled(inline.run(step, x))
    fresh = inline.distributed(lambda x: x - 1, donate_argnums=0)
    await cancelled(inline.run(fresh, x))  # it compiles
    assert warnings(caplog) == [] and (await x == X + 1).all()


# ---------------------------------------------------------------- what stands for what


async def test_two_results_that_are_one_array_and_one_that_only_passes_through(inline):
    step = inline.distributed(lambda x, kept: ((y := x * 2), y, kept), donate_argnums=(0, 1))
    x, _, kept = await inline.run(step, X, X[:2])
    await cancelled(inline.run(step, x, kept))
    assert (await x == 4 * X).all() and (await kept == X[:2]).all()
    x, same, kept = await inline.run(step, x, kept)
    assert (await x == 8 * X).all() and (await same == 8 * X).all() and (await kept == X[:2]).all()


async def test_an_argument_that_no_result_continues_says_so(inline, caplog):
    step = inline.distributed(
        lambda state, spent: {
            "w": state["w"] + 1,
            "b": state["b"] + 1,
            "cache": jnp.append(state["cache"], spent.sum()),
        },
        donate_argnums=(0, 1),
        name="grow",
    )
    copy = inline.distributed(lambda tree: tree)
    state, spent = await inline.run(copy, ({"w": X, "b": X, "cache": X[:2]}, X[:3]))
    await step.compile(state, spent)
    await cancelled(inline.run(step, state, spent))
    assert (await state["w"] == X + 1).all() and (await state["b"] == X + 1).all()
    for gone in (state["cache"], spent):
        with pytest.raises(
            ArrayError, match=r"'grow', whose caller was cancelled, and no result continues it.*make it anew"
        ):
            await gone
    said = "state stands for result; no result continues state['cache'], spent, "
    said += "which cannot be used any more; to give"
    assert said in warnings(caplog)[-1]


async def test_host_values_stay_what_they_were(inline, caplog):
    step = inline.distributed(
        lambda state: {"w": state["w"] + state["n"], "n": state["n"] + 1}, donate_argnums=0
    )
    state = {"w": X.copy(), "n": np.float32(1)}
    await step.compile(state)
    await cancelled(inline.run(step, state))
    assert (state["w"] == X).all() and warnings(caplog)[-1].endswith(
        "host values are what they were: state['n'], state['w']"
    )
    state = await inline.run(step, state)
    state["n"] = np.float32(5)
    await inline.run(inline.distributed(lambda s: s["n"]), state)
    await cancelled(inline.run(step, state))
    assert (
        "state stands for result; host values are what they were: state['n']; to give" in warnings(caplog)[-1]
    )
    assert (await state["w"] == X + 1 + 5).all() and state["n"] == 5


F, INT = jax.ShapeDtypeStruct((3,), "float32"), jax.ShapeDtypeStruct((), "int32")
PAIR = {"w": F, "b": F}
CONTINUED = {
    "a state": (lambda s, x: (s, x.sum()), (PAIR, F), "s['b']=result[0]['b'] s['w']=result[0]['w']"),
    "somewhere inside": (lambda s: {"loss": 1.0, "new": (s,)}, (F,), "s=result['new'][0]"),
    "each by its own, in order": (lambda p, m: (1, p * m, m * p), (F, F), "p=result[1] m=result[2]"),
    "each by itself, handed back": (lambda p, m: (1, m, p), (F, F), "p=result[2] m=result[1]"),
    "each by its own, in another order": (
        lambda m, p: (p - 0.1 * (new := 0.9 * m + jnp.sum(p * p)), new),
        (F, F),
        "m=result[1] p=result[0]",
    ),
    "not by one that is made of others": (lambda x, y: (x.sum(), y + 1), (F, F), "y=result[1]"),
    "not by what is computed of it as well": (lambda x: (jnp.tanh(x * 2) + 1, x + 1), (F,), "x=result[1]"),
    "anew": (lambda p, last, i: (p + 1, jnp.full(3, i * 2.0)), (F, F, INT), "p=result[0] last=result[1]"),
    "of gradients and parameters the parameters": (
        lambda g, p: jax.tree.map(lambda p, g: p - 0.1 * (g * 0.9), p, g),
        (PAIR, PAIR),
        "p['b']=result['b'] p['w']=result['w']",
    ),
    "trees before leaves": (
        lambda x, s: (s["w"] + x, s),
        (F, PAIR),
        "x=result[0] s['b']=result[1]['b'] s['w']=result[1]['w']",
    ),
    "most of it": (
        lambda s: {**s, "c": jnp.append(s["c"], 0)},
        ({**PAIR, "c": F},),
        "s['b']=result['b'] s['w']=result['w']",
    ),
    "too little of it": (lambda s: {"w": s["w"], "b": 1}, (PAIR,), ""),
    "another type": (lambda i: i + 1.0, (INT,), ""),
}


@pytest.mark.parametrize("case", CONTINUED)
def test_which_result_continues_which_argument(case):
    fn, args, expected = CONTINUED[case]
    traced = trace(fn, args, argument_names=tuple(inspect.signature(fn).parameters))
    found = {
        traced.arg_names[arg]: traced.out_names[result] for result, arg in continued_arguments(traced).items()
    }
    assert found == dict(pair.split("=") for pair in expected.split())


# ---------------------------------------------------------------- failures and restarts


async def test_should_the_step_fail_its_arguments_are_those_of_a_failed_step(monkeypatch):
    async with jpp.RemoteMesh(2, launcher="inline") as mesh:
        step = mesh.distributed(lambda x: x + 1, donate_argnums=0, name="fails")
        x = await mesh.run(step, X)
        monkeypatch.setattr(StepRun, "start", lambda run: run.fail(ValueError("boom")))
        await cancelled(mesh.run(step, x))
        with contextlib.suppress(RemoteError, MeshClosedError):
            await mesh.run(step, x)
        with pytest.raises(ArrayError, match=r"cannot be used: .* failed: .*ValueError: boom"):
            await x


async def test_a_restart_makes_what_the_arguments_stand_for(caplog):
    async with jpp.RemoteMesh(2, launcher="inline", max_restarts=3) as mesh:
        step = mesh.distributed(train_step(jpp.Std1F1B(2)), donate_argnums=(0, 1, 2))
        batches = [MODEL.batch(seed, 4) for seed in range(3)]
        expected = start()
        for batch in batches:
            *expected, _ = await mesh.run(step, *expected, batch)
        *state, _ = await mesh.run(step, *start(), batches[0])
        for batch in batches[1:]:
            await cancelled(mesh.run(step, *state, batch))
            mesh._running()._actor_group.handles[1].kill()
        assert bits(await mesh.fetch(state)) == bits(await mesh.fetch(expected))
        assert [e.kind for e in mesh._events._kept].count("restarted") >= 1
