"""Arguments that a step does not use are not sent or moved; they are returned or freed where they lie."""

from __future__ import annotations

import gc
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from planning import f32, plan_step
from waiting import until

import jaxpp_async as jpp
from jaxpp_async.controller.controller import Controller
from jaxpp_async.errors import ArrayError
from jaxpp_async.session import report
from jaxpp_async.testing import assert_close

D, MB = 4, 4
ADAM = optax.adam(1e-2)


def start(seed=0, width=D):
    rng = np.random.default_rng(seed)
    params = [rng.normal(size=(width, width)).astype("float32") / width for _ in range(2)]
    return {"params": params, "opt": jax.device_get(ADAM.init(params))}


def batch(width=D):
    return np.random.default_rng(9).normal(size=(MB, 2, width)).astype("float32")


def loss(params, x, end_stage=jpp.pipeline_yield):
    return jnp.mean(jnp.square(end_stage(jnp.tanh(x @ params[0])) @ params[1] - x))


def train(schedule):
    def step(state, x):
        def one(x):
            value, grads = jax.value_and_grad(loss)(state["params"], x)
            return grads, value

        grads, losses = jpp.accumulate_grads(one, schedule)(x)
        updates, opt = ADAM.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, losses

    return step


def evaluate(state, x):
    """On one actor."""
    return loss(state["params"], x, end_stage=jnp.asarray)


def pipelined(schedule):
    return lambda state, x: jpp.accumulate_grads(lambda x: loss(state["params"], x), schedule)(x)


def places(tree):
    return {
        jax.tree_util.keystr(path): leaf.actors
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


SCHEDULES = [jpp.GPipe(2), jpp.Std1F1B(2), jpp.ZeroBubbleH1(2)]


async def trained(mesh, schedule=SCHEDULES[1], width=D):
    """A state on two actors, and what plain JAX makes of it."""
    state, want = start(width=width), start(width=width)
    step = mesh.distributed(train(schedule), donate_argnums=0)
    state, _ = await mesh.run(step, state, batch(width))
    want, _ = jax.jit(train(schedule))(want, batch(width))
    return state, want


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("how", ["one actor", "pipelined"])
async def test_evaluation_leaves_the_optimizer_where_it_is(remote_mesh, schedule, how):
    mesh = await remote_mesh(2, launcher="inline")
    state, want = await trained(mesh, schedule)
    before = places(state["opt"])
    assert {(0,), (1,)} <= set(before.values())
    fn = evaluate if how == "one actor" else pipelined(schedule)
    step = mesh.distributed(fn)
    for _ in range(2):
        future = await mesh.submit(step, state, batch())
        assert_close(await (await future), jax.jit(fn)(want, batch()))
        assert places(state["opt"]) == before
        assert all("opt" not in m.name for m in future.moves)
    assert not future.moves  # the one weight that was moved stays
    lines = {p.name: p for p in (await step.compile(state, batch())).report().inputs}
    mu = lines["state['opt'][0].mu[1]"]
    assert (mu.actors, mu.why) == ((), "not used: stays where it is")
    assert_close(await mesh.fetch(state), jax.device_get(want))


async def test_by_processes(remote_mesh):
    mesh = await remote_mesh(2)
    state, want = await trained(mesh)
    before = places(state["opt"])
    future = await mesh.submit(mesh.distributed(lambda s, x: (s["opt"], evaluate(s, x))), state, batch())
    opt, value = await future
    assert places(state["opt"]) == places(opt) == before
    assert_close(
        await mesh.fetch((opt, value)), jax.device_get((want["opt"], jax.jit(evaluate)(want, batch())))
    )
    assert [m.name for m in future.moves] == ["s['params'][1]"]


@pytest.fixture
def sent(monkeypatch):
    """Host values that steps send along: (actor, shape)."""
    found = []
    real = Controller.start_step

    def start_step(self, *args, **options):
        puts = options.get("puts") or {}
        found.extend((actor, value.value.shape) for actor, values in puts.items() for value in values)
        return real(self, *args, **options)

    monkeypatch.setattr(Controller, "start_step", start_step)
    return found


async def test_a_host_value_that_is_not_used_is_not_sent(remote_mesh, sent):
    mesh = await remote_mesh(2, launcher="inline")
    waiting = await mesh.put(np.ones(7, "float32"))
    shaped = np.ones((3, 5), "float32")
    step = mesh.distributed(
        lambda used, unused, waiting, shaped: used * shaped.shape[0] + jnp.zeros_like(shaped)[0, 0]
    )
    for unused in (np.ones(11, "float32"), jax.random.key(0), 3.5):
        assert_close(
            await (await mesh.run(step, np.ones(2, "float32"), unused, waiting, shaped)),
            np.full(2, 3.0, "f4"),
        )
    assert waiting.actors == ()
    assert {shape for _, shape in sent} == {(2,)}
    assert_close(await waiting, np.ones(7, "float32"))


async def test_what_is_handed_back_is_an_array_of_its_own(remote_mesh):
    """As under jax.jit: either may be donated or deleted, and the other lives on."""
    mesh = await remote_mesh(2, launcher="inline")
    state, want = await trained(mesh)
    keep = mesh.distributed(lambda state, x: (state, jnp.sum(x)))
    before = places(state)
    same, _ = await mesh.run(keep, state, batch())
    assert places(same) == places(state) == before
    step = mesh.distributed(train(SCHEDULES[1]), donate_argnums=0)
    await mesh.run(step, state, batch())
    assert_close(await mesh.fetch(same), jax.device_get(want))
    again, _ = await mesh.run(keep, same, batch())
    for leaf in jax.tree.leaves(same):
        await leaf.delete()
    assert_close(await mesh.fetch(again), jax.device_get(want))


async def test_what_is_donated_and_handed_back_is_the_same_buffers(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    state, want = await trained(mesh)
    before, ids = places(state), [x.array_id for x in jax.tree.leaves(state)]
    keep = mesh.distributed(lambda state, x: (state, jnp.sum(x)), donate_argnums=0, name="keep")
    future = await mesh.submit(keep, state, batch())
    same, total = await future
    assert places(same) == before and [x.array_id for x in jax.tree.leaves(same)] == ids and not future.moves
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    with pytest.raises(ArrayError, match="was donated to step 'keep'"):
        await mesh.run(keep, state, batch())
    del state
    gc.collect()
    await mesh.run(keep, await mesh.put({}), batch())  # frees would go with it
    assert_close(await mesh.fetch((same, total)), jax.device_get((want, jnp.sum(batch()))))
    next_state, _ = await mesh.run(mesh.distributed(train(SCHEDULES[1])), same, batch())
    assert_close(
        await mesh.fetch(next_state),
        jax.device_get(jax.jit(train(SCHEDULES[1]))(want, batch())[0]),
        rtol=1e-4,
    )


async def test_what_is_donated_and_unused_is_freed_where_it_lies(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    state, _ = await trained(mesh)
    idle = mesh.distributed(pipelined(SCHEDULES[0]), donate_argnums=0)

    async def held():
        future = await mesh.submit(idle, start(), batch())
        await future
        return [stats.live_buffers for stats in future.stats]

    await held()
    gc.collect()
    full = await held()
    arrays = [sum(a in leaf.actors for leaf in jax.tree.leaves(state)) for a in range(2)]
    future = await mesh.submit(idle, state, batch())
    await future
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert [stats.live_buffers for stats in future.stats] == [
        n - a for n, a in zip(full, arrays, strict=True)
    ]


async def test_host_values_that_are_handed_back_wait_here(remote_mesh, sent, tmp_path):
    mesh = await remote_mesh(2, launcher="inline")
    tree = {
        "a": np.arange(6, dtype="float64").reshape(2, 3),
        "k": jax.random.key(3),
        "s": 2.5,
        "w": await mesh.put(1),
    }
    expected = {
        "a": np.arange(6, dtype="float32").reshape(2, 3),
        "k": tree["k"],
        "s": np.float32(2.5),
        "w": np.int32(1),
    }
    same = await mesh.run(mesh.distributed(lambda tree: tree), tree)
    tree["a"][:] = 0  # the caller's own
    assert not sent and set(places(same).values()) == {()}
    assert [x.weak_type for x in jax.tree.leaves(same)] == [False, False, True, True]
    assert_close(await mesh.fetch(same), expected)
    await mesh.save(tmp_path / "a", same)
    assert_close(await mesh.fetch(await mesh.restore(tmp_path / "a", same)), expected)
    used = await mesh.run(mesh.distributed(lambda tree: tree["a"] * tree["s"]), same)
    assert_close(await used, expected["a"] * 2.5)


async def test_an_array_may_be_twice_among_arguments_and_results(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    state, want = await trained(mesh)
    mu = state["opt"][0].mu[1]
    assert mu.actors == (1,)
    twice = mesh.distributed(lambda a, b: (a, a, b, b + 1))
    for _ in range(2):
        results = await mesh.run(twice, mu, mu)
        expected = want["opt"][0].mu[1]
        assert_close(await mesh.fetch(results), jax.device_get((expected, expected, expected, expected + 1)))
    swap = mesh.distributed(lambda t: {"a": t["b"], "b": t["a"]}, donate_argnums=0)
    swapped = await mesh.run(swap, {"a": await mesh.put(np.float32(1)), "b": mu})
    assert places(swapped) == {"['a']": (0, 1), "['b']": ()}  # `b + 1` took it to actor 0 as well
    assert_close(await swapped["a"], jax.device_get(expected))
    with pytest.raises(ArrayError, match="is donated and passed twice"):
        await mesh.run(mesh.distributed(lambda a, b: b, donate_argnums=0), swapped["a"], swapped["a"])


def test_an_argument_that_is_only_replaced_is_not_needed_and_made_where_its_result_is():
    def step(state, x):
        grads = jpp.accumulate_grads(lambda x: jax.grad(loss)(state["w"], x), jpp.GPipe(2))(x)
        return {"w": state["w"], "grads": grads, "kept": state["kept"]}

    weights = [f32(D, D)] * 2
    plan = plan_step(step, {"w": weights, "grads": weights, "kept": f32(3)}, f32(MB, 2, D), donate=(0,))
    lines = report.make(plan, {}, {})
    where = {p.name: (p.actors, p.why) for p in (*lines.inputs, *lines.outputs)}
    assert where["state['grads'][1]"] == ((), "not used: stays where it is; result['grads'][1] replaces it")
    assert where["result['grads'][1]"] == ((1,), "continues state['grads'][1]")
    assert where["state['kept']"] == ((), "not used: stays where it is, and is handed back as result['kept']")
    assert where["result['kept']"] == ((), "is state['kept'], handed back where it lies")
    assert where["state['w'][1]"][0] == where["result['w'][1]"][0] == (1,)


async def test_init_put_and_restore_for_a_step_that_does_not_use_all(remote_mesh, tmp_path):
    mesh = await remote_mesh(2, launcher="inline")

    def step(state, x):
        grads = jpp.accumulate_grads(lambda x: jax.grad(loss)(state["w"], x), jpp.GPipe(2))(x)
        return {"w": state["w"], "grads": grads, "kept": state["kept"]}

    first = {
        "w": start()["params"],
        "grads": [np.zeros((D, D), "float32")] * 2,
        "kept": np.ones(3, "float32"),
    }
    stepped = mesh.distributed(step, donate_argnums=0)
    await stepped.compile(first, batch())
    put = await mesh.put(first, like=(stepped, 0))
    made = await stepped.init(0, lambda: jax.tree.map(jnp.asarray, first))
    await mesh.save(tmp_path / "a", put)
    back = await mesh.restore(tmp_path / "a", (stepped, 0))
    for state in (put, made, back):
        where = places(state)
        assert [where[f"['grads'][{k}]"] for k in (0, 1)] == [(0,), (1,)]
        assert where["['kept']"] == ((0,) if state is made else ())
        future = await mesh.submit(stepped, state, batch())
        assert_close(await mesh.fetch(await future), jax.device_get(jax.jit(step)(first, batch())))
        assert not future.moves


async def test_shardings_of_what_is_not_used(remote_mesh):
    """What is handed back is given the sharding that is asked for, where it lies; else everything stays as it
    is."""
    mesh = await remote_mesh(2, launcher="inline", spmd_mesh={"data": 2})
    w = np.arange(16, dtype="float32").reshape(4, 4)

    def two(state, x):
        return jpp.accumulate_grads(
            lambda x: jnp.sum(jpp.pipeline_yield(x @ state[0]) @ state[1]), jpp.GPipe(2)
        )(x)

    lay = mesh.distributed(two, in_shardings=(P("data"), None))
    await lay.compile([w, w], batch())
    a, b = await mesh.put([w, w], like=(lay, 0))
    assert (b.actors, b.spec) == ((1,), ("data",))
    unused = mesh.distributed(lambda a, b: jnp.sum(a), in_shardings=(P(), P(None, "data")))
    back = mesh.distributed(lambda a, b: (jnp.sum(a), b))
    asked = mesh.distributed(lambda a, b: (jnp.sum(a), b), out_shardings=(P(), P(None, "data")))
    future = await mesh.submit(unused, a, b)
    await future
    assert [m.name for m in future.moves] == ["a"] and b.spec == ("data",)
    _, same = await mesh.run(back, a, b)
    assert (same.actors, same.spec) == ((1,), ("data",))
    for leaf in (same, w, await mesh.put(w)):
        _, resharded = await mesh.run(asked, a, leaf)
        assert resharded.spec == (None, "data")
        assert resharded.actors == ((1,) if leaf is same else ())
        assert_close(await mesh.fetch(resharded), w)
        assert_close(await (await mesh.run(mesh.distributed(lambda x: x + 1), resharded)), w + 1)


async def test_a_large_move_is_a_warning_once(remote_mesh, caplog):
    mesh = await remote_mesh(2, launcher="inline")
    width = 520  # 1.08 MB a matrix
    state, _ = await trained(mesh, width=width)
    step = mesh.distributed(evaluate, name="eval")
    train_step = mesh.distributed(train(SCHEDULES[1]), donate_argnums=0)
    for _ in range(3):
        await mesh.run(step, state, batch(width))
        state, _ = await mesh.run(train_step, state, batch(width))
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    text = record.getMessage()
    assert text.startswith("step 'eval': 1 array (1.1 MB) had to be carried to other actors; the largest, ")
    assert (
        "state['params'][1] (1.1 MB), lies on actor 1, "
        "and the step computes with it on actor 0 (used in the step)" in text
    )
    assert "step.init, mesh.put(..., like=(step, argnum))" in text and "placement.md" in text


async def test_after_a_restart(tmp_path):
    """What a step does not touch is brought back with the rest, and handed on."""
    async with jpp.RemoteMesh(2, launcher="inline", max_restarts=9, backup_every=2) as mesh:
        state, want = await trained(mesh)
        keep = mesh.distributed(lambda state, x: (state, jnp.sum(x)), donate_argnums=0)
        copy = mesh.distributed(lambda state, x: (state["opt"], jnp.sum(x)))
        for actor in (0, 1, 1):
            state, _ = await mesh.run(keep, state, batch())
            opt, total = await mesh.run(copy, state, batch())
            controller = mesh._running()
            before = controller._actor_group.handles[actor]
            before.kill()
            state, _ = await mesh.run(keep, state, batch())
            assert_close(await mesh.fetch((opt, total)), jax.device_get((want["opt"], jnp.sum(batch()))))
            await until(lambda: controller._actor_group.handles[actor] is not before)  # noqa: B023 - awaited here
        assert_close(await mesh.fetch(state), jax.device_get(want))
        await mesh.save(tmp_path / "a", state)
        assert_close(await mesh.fetch(await mesh.restore(tmp_path / "a", state)), jax.device_get(want))
