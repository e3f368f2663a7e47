"""A leaf that stacks layers lives in parts, and is one array in all that a user does with it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from resources import inspect_actors
from stacked import (
    LAYERS,
    WIDTH,
    evaluate,
    init_fn,
    make_batch,
    make_state,
    marked_loss,
    median,
    reference,
    train_step,
)
from waiting import until

import jaxpp_async as jpp
from jaxpp_async.checkpoint.stored import find_damage, load_manifest
from jaxpp_async.compiler import stage_cuts
from jaxpp_async.errors import ActorDiedError, ArrayError, CheckpointError
from jaxpp_async.session.remote_array import RemoteArray
from jaxpp_async.testing import assert_close

TWO, FOUR = jpp.Std1F1B(2), jpp.Interleaved1F1B(4)
HALVES = {(0, 4): (0,), (4, 8): (1,)}
QUARTERS = {(0, 2): (0,), (2, 4): (1,), (4, 6): (0,), (6, 8): (1,)}
BATCHES = [make_batch(seed) for seed in range(4)]


@pytest.fixture
async def inline(remote_mesh):
    return await remote_mesh(2, launcher="inline")


@pytest.fixture
async def local(remote_mesh):
    """For a few tests of what crosses between processes: training, other parts, checkpoints."""
    return await remote_mesh(2)


def places(array: RemoteArray) -> dict[tuple[int, int], tuple[int, ...]] | tuple[int, ...]:
    """Where the rows of an array lie, neighbours of one place together; of a whole array, where it lies."""
    if array.division is None:
        return array.actors
    parts, actors = array.division.parts, [part.actors for part in array.division.arrays]
    joined = parts.joined(actors)
    return {(start, stop): actors[parts.bounds.index(start)] for start, stop in joined.ranges}


async def stored(mesh: jpp.RemoteMesh) -> int:
    """How many arrays the actors hold between steps."""
    gc.collect()
    await inspect_actors(mesh._running())  # sends what is to be freed
    numbers = await inspect_actors(mesh._running())
    return sum(each["store_arrays"] for each in numbers.values())


# ---------------------------------------------------------------- training


@pytest.mark.parametrize(("schedule", "parts"), [(TWO, HALVES), (FOUR, QUARTERS)], ids=["halves", "quarters"])
@pytest.mark.parametrize("donate", [(), 0], ids=["kept", "donated"])
async def test_training_gives_the_numbers_of_plain_jax(inline, schedule, parts, donate):
    await check_training(inline, schedule, parts, donate)


async def test_training_across_processes(local):
    await check_training(local, FOUR, QUARTERS, 0)


async def check_training(mesh: jpp.RemoteMesh, schedule: Any, parts: Any, donate: Any) -> None:
    step = mesh.distributed(train_step(schedule), donate_argnums=donate)
    state: Any = make_state()
    for batch in BATCHES:
        state, losses = await mesh.run(step, state, batch)
    assert places(state[0]["w"]) == places(state[1][0].mu["w"]) == parts
    assert_close(await mesh.fetch(state), reference(make_state(), *BATCHES))
    assert (await losses).shape == (4,)


async def test_an_array_in_parts_is_one_array(inline):
    step = inline.distributed(train_step(TWO))
    (params, _), _ = await inline.run(step, make_state(), BATCHES[0])
    w = params["w"]
    assert (w.shape, w.dtype, w.ndim, w.size) == ((LAYERS, WIDTH, WIDTH), np.float32, 3, 128)
    assert (w.nbytes, w.actors, w.weak_type, w.is_deleted()) == (512, (0, 1), False, False)
    assert w.sharding.spec == P()
    assert repr(w) == "RemoteArray(float32[8, 4, 4], [0:4] actors=[0], [4:8] actors=[1])"
    assert "[0:4] actor 0, [4:8] actor 1" in w._repr_html_()
    np.testing.assert_array_equal(await w, (await inline.fetch({"w": w}))["w"])
    with pytest.raises(TypeError, match=r"len\(\) needs the value of RemoteArray\(.*, \[0:4\]"):
        len(w)


async def test_a_step_of_the_same_parts_moves_nothing_and_is_recalled(inline, monkeypatch):
    step = inline.distributed(train_step(TWO), donate_argnums=0)
    state, _ = await inline.run(step, make_state(), BATCHES[0])
    state, _ = await inline.run(step, state, BATCHES[0])

    def refuse(*_: Any) -> Any:
        raise AssertionError("this call is like the one before")

    monkeypatch.setattr("jaxpp_async.session.step_request.leaf_type", refuse)
    monkeypatch.setattr("jaxpp_async.session.step_runner.StepRunner._prepare_arguments", refuse)
    future = await inline.submit(step, state, BATCHES[0])
    assert future.moves == ()
    await future


async def test_nothing_stays_on_the_actors(inline):
    step = inline.distributed(train_step(TWO), donate_argnums=0)
    other = inline.distributed(train_step(FOUR), donate_argnums=0)
    state, _ = await inline.run(step, make_state(), BATCHES[0])
    state, _ = await inline.run(other, state, BATCHES[0])  # places the indices of microbatches
    del state
    before = await stored(inline)
    state, _ = await inline.run(step, await inline.put(make_state()), BATCHES[0])
    in_halves = await stored(inline)
    state, _ = await inline.run(other, state, BATCHES[0])
    assert await stored(inline) - in_halves == 3 * (4 - 2)  # of `w` and both of its moments
    del state
    assert await stored(inline) == before


# ---------------------------------------------------------------- other parts


def carried(moves: Any) -> dict[tuple[str, int, tuple[int, ...]], int]:
    return {(m.name, m.from_actor, m.to): m.size_bytes for m in moves if m.to != (m.from_actor,)}


async def test_a_step_of_another_cut_gets_the_rows_that_it_lacks_and_no_others(local):
    halves, quarters = (local.distributed(train_step(s)) for s in (TWO, FOUR))
    first, _ = await local.run(halves, make_state(), BATCHES[0])
    future = await local.submit(quarters, first, BATCHES[1])
    second, _ = await future
    names = ("state[0]['w']", "state[1][0].mu['w']", "state[1][0].nu['w']")
    assert carried(future.moves) == {
        (f"{name}[{rows}]", source, (to,)): 128
        for name in names
        for rows, source, to in (("2:4", 0, 1), ("4:6", 1, 0))
    }
    assert places(first[0]["w"]) == places(second[0]["w"]) == QUARTERS
    assert_close(await local.fetch(first), reference(make_state(), BATCHES[0]))
    third, _ = await local.run(halves, second, BATCHES[2])
    assert places(third[0]["w"]) == HALVES
    assert_close(await local.fetch(third), reference(make_state(), *BATCHES[:3]))


async def test_a_step_that_takes_a_leaf_whole_gets_it_whole(inline):
    step, whole = inline.distributed(train_step(TWO), donate_argnums=0), inline.distributed(median)
    state, _ = await inline.run(step, make_state(), BATCHES[0])
    future = await inline.submit(whole, state, BATCHES[0])
    (home,) = places(state[0]["w"])
    assert carried(future.moves) == {("state[0]['w']", 1 - home, (home,)): 256}
    assert places(state[1][0].mu["w"]) == HALVES  # the step does not use it
    expected = reference(make_state(), BATCHES[0])
    np.testing.assert_allclose(await (await future), np.median(expected[0]["w"]), rtol=1e-5)
    future = await inline.submit(step, state, BATCHES[1])
    assert set(carried(future.moves).values()) == {256}
    state, _ = await future
    assert_close(await inline.fetch(state), reference(make_state(), *BATCHES[:2]))


def two_layers(w: Any, x: Any) -> Any:
    """Return a loss that reads one layer in each of two stages."""
    return jnp.sum(jnp.tanh(jpp.pipeline_yield(jnp.tanh(x @ w[0])) @ w[1]))


async def test_large_moves_into_other_parts_are_a_warning(inline, caplog):
    def step(w: Any, batch: Any) -> Any:
        return w - jpp.accumulate_grads(lambda x: jax.grad(two_layers)(w, x), TWO)(batch)

    width = 600  # more than 1 MiB a layer
    batch = np.ones((2, 1, width), np.float32)
    train = inline.distributed(step)
    w = await inline.run(train, np.zeros((2, width, width), np.float32), batch)
    assert places(w) == {(0, 1): (0,), (1, 2): (1,)}
    await inline.run(inline.distributed(lambda w: jnp.sort(w, axis=0)), w)
    (home,) = places(w)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "jaxpp_async"):
        future = await inline.submit(train, w, batch)
        await future
    assert sum(carried(future.moves).values()) == 4 * width * width
    (warning,) = [r.getMessage() for r in caplog.records if "had to be carried" in r.getMessage()]
    assert warning.startswith(
        f"step 'step': 1 array (1.4 MB) had to be carried to other actors; the largest, "
        f"w[{1 - home}:{2 - home}] (1.4 MB), lies on actor {home}, and the step computes with it on actor "
        f"{1 - home} (used by "
    )


async def test_meshes_of_several_devices(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline", spmd_mesh={"model": 2})
    shardings = (({"head": P(), "w": P(None, None, "model")}, None), None)
    halves, quarters = (mesh.distributed(train_step(s), in_shardings=shardings) for s in (TWO, FOUR))
    state: Any = make_state()
    for k, step in enumerate((halves, quarters, halves)):
        state, _ = await mesh.run(step, state, BATCHES[k])
        assert state[0]["w"].spec == (None, None, "model")
    assert places(state[0]["w"]) == HALVES
    value = await mesh.run(mesh.distributed(median), state, BATCHES[0])
    expected = reference(make_state(), *BATCHES[:3])
    np.testing.assert_allclose(await value, np.median(expected[0]["w"]), rtol=1e-5)
    assert_close(await mesh.fetch(state), expected)


async def test_meshes_with_explicit_axes(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline", spmd_mesh={"model": 2}, axis_types={"model": "explicit"})

    def loss(w: Any, x: Any, num_stages: int) -> Any:
        for k, layer in enumerate(range(len(w))):
            x = jnp.tanh(x * w[layer] + jnp.sin(x))
            if (k + 1) % (len(w) // num_stages) == 0 and k + 1 < len(w):
                x = jpp.pipeline_yield(x)
        return jnp.mean(x**2)

    def train(schedule: Any) -> Any:
        def step(w: Any, batch: Any) -> Any:
            grads = jpp.accumulate_grads(lambda x: jax.grad(loss)(w, x, schedule.num_stages), schedule)
            return w - 0.1 * grads(batch)

        return step

    shardings = (P(None, "model"), P(None, None, "model"))
    halves, quarters = (mesh.distributed(train(s), in_shardings=shardings) for s in (TWO, FOUR))
    batch = np.random.default_rng(0).normal(size=(4, 2, 4)).astype("float32")
    w = expected = np.random.default_rng(1).normal(size=(8, 4)).astype("float32")
    for step in (halves, quarters, halves):
        w = await mesh.run(step, w, batch)
        expected = jax.jit(train(TWO))(expected, batch)
        assert w.spec == (None, "model") and w.division is not None
    whole = await mesh.run(mesh.distributed(lambda w: jnp.sort(w, axis=0)), w)
    assert (whole.spec, w.division) == ((None, "model"), None)
    assert_close(await mesh.fetch([w, whole]), jax.device_get([expected, jnp.sort(expected, axis=0)]))


# ---------------------------------------------------------------- layers that are taken one at a time

MARKED_TWO = train_step(jpp.Std1F1B(2, stages=[3]), marked_loss)
MARKED_FOUR = train_step(jpp.Interleaved1F1B(4, stages=[1, 3, 5]), marked_loss)
ROWS = tuple(range(LAYERS + 1))


@pytest.fixture
def single_rows(monkeypatch):
    """Layers that are taken one at a time are parts of their own, though these are small."""
    monkeypatch.setattr(stage_cuts, "SMALL_ROW_BYTES", 0)


async def check_layers_one_at_a_time(mesh: jpp.RemoteMesh) -> None:
    """Each layer is a part, under any cut: another cut moves the layers that change their actor."""
    halves, quarters = (mesh.distributed(each, donate_argnums=0) for each in (MARKED_TWO, MARKED_FOUR))
    await halves.compile(make_state(), BATCHES[0])
    state = await halves.init(0, init_fn, 0)
    for k, (step, homes) in enumerate([(halves, HALVES), (quarters, QUARTERS), (halves, HALVES)]):
        future = await mesh.submit(step, state, BATCHES[k])
        state, _ = await future
        ways = {0: {}, 1: {"2:4": (0, (1,)), "4:6": (1, (0,))}, 2: {"2:4": (1, (0,)), "4:6": (0, (1,))}}[k]
        moved = {m.name: (m.from_actor, m.to) for m in future.moves if m.name.startswith("state[0]['w']")}
        assert moved == {f"state[0]['w'][{rows}]": way for rows, way in ways.items()}
        w, mu = state[0]["w"], state[1][0].mu["w"]
        assert w.division.parts.bounds == mu.division.parts.bounds == ROWS
        assert places(w) == places(mu) == homes
    assert_close(await mesh.fetch(state), reference(make_state(), *BATCHES[:3]))


async def test_layers_one_at_a_time(inline, single_rows):
    await check_layers_one_at_a_time(inline)


async def test_layers_one_at_a_time_across_processes(local, single_rows):
    await check_layers_one_at_a_time(local)


async def test_a_step_that_takes_layers_together_joins_those_of_a_step_that_takes_them_singly(
    inline, single_rows
):
    singly = inline.distributed(MARKED_TWO, donate_argnums=0)
    together = inline.distributed(train_step(FOUR), donate_argnums=0)
    state: Any = make_state()
    for k, (step, homes) in enumerate([(singly, HALVES), (together, QUARTERS), (singly, HALVES)]):
        state, _ = await inline.run(step, state, BATCHES[k])
        assert places(state[0]["w"]) == homes
        assert state[0]["w"].division.parts.bounds == (ROWS if step is singly else ROWS[::2])
    assert_close(await inline.fetch(state), reference(make_state(), *BATCHES[:3]))


async def test_a_checkpoint_of_single_layers_is_one_leaf(inline, tmp_path, single_rows):
    singly, together = inline.distributed(MARKED_TWO), inline.distributed(train_step(FOUR))
    first, _ = await inline.run(singly, make_state(), BATCHES[0])
    second, _ = await inline.run(together, first, BATCHES[1])
    for name, state, other in (("singly", first, together), ("together", second, singly)):
        folder = tmp_path / name
        await inline.save(folder, state)
        back = await inline.restore(folder, (other, 0))
        assert places(back[0]["w"]) == (QUARTERS if other is together else HALVES)
        assert_close(await inline.fetch(back), await inline.fetch(state))
        future = await inline.submit(other, back, BATCHES[2])
        assert future.moves == ()
        await future


# ---------------------------------------------------------------- arguments that a step does not use


@pytest.mark.parametrize("donate", [(), 0], ids=["kept", "donated"])
async def test_what_a_step_does_not_use_comes_back_as_it_came(inline, donate):
    train = inline.distributed(train_step(TWO))
    step = inline.distributed(lambda state, x: (state, x + 1), donate_argnums=donate)
    state, _ = await inline.run(train, make_state(), BATCHES[0])
    back, _ = await inline.run(step, state, 1.0)
    assert places(back[0]["w"]) == HALVES
    assert state[0]["w"].is_deleted() == (donate == 0)
    expected = reference(make_state(), BATCHES[0])
    assert_close(await inline.fetch(back), expected)
    if donate == ():
        await back[0]["w"].delete()
        assert_close(await inline.fetch(state), expected)


async def test_an_evaluation_of_the_same_stages_moves_nothing_and_hands_the_state_back(inline):
    train = inline.distributed(train_step(TWO), donate_argnums=0)
    test = inline.distributed(evaluate(TWO), donate_argnums=0)
    state, _ = await inline.run(train, make_state(), BATCHES[0])
    future = await inline.submit(test, state, BATCHES[1])
    state, losses = await future
    assert future.moves == ()
    expected = reference(make_state(), BATCHES[0])
    assert_close(await inline.fetch(state), expected)
    assert_close(await losses, jax.jit(evaluate(TWO))(expected, BATCHES[1])[1])


async def test_layers_that_a_step_does_not_use_lie_with_one_that_it_uses(inline):
    def some(w: Any, batch: Any) -> Any:
        return jpp.accumulate_grads(lambda x: (jnp.zeros(()), two_layers(w, x)), TWO)(batch)[1]

    value = np.random.default_rng(0).normal(size=(4, 3, 3)).astype("float32")
    batch = np.ones((2, 2, 3), np.float32)
    step = inline.distributed(some)
    expected = jax.jit(some)(value, batch)
    for w in (value, await inline.put(value)):
        assert_close(await (await inline.run(step, w, batch)), expected)
        assert_close(await (await inline.run(step, w, batch)), expected)
    assert places(w) == {(0, 1): (0,), (1, 4): (1,)}
    np.testing.assert_array_equal(await w, value)


# ---------------------------------------------------------------- making and putting


async def test_each_actor_makes_and_gets_its_own_parts(inline):
    step = inline.distributed(train_step(TWO))
    await step.compile(make_state(), BATCHES[0])
    made = await step.init(0, init_fn, 5)
    put = await inline.put(make_state(5), like=(step, 0))
    again = await inline.put(make_state(5), like=made)
    for state in (made, put, again):
        assert places(state[0]["w"]) == places(state[1][0].nu["w"]) == HALVES
        assert_close(await inline.fetch(state), make_state(5))
        future = await inline.submit(step, state, BATCHES[0])
        assert future.moves == ()
        after, _ = await future
        assert_close(await inline.fetch(after), reference(make_state(5), BATCHES[0]))


async def test_a_state_that_is_split_over_devices_is_made_without_an_argument(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline", spmd_mesh={"model": 2})
    split = {"head": P(), "w": P(None, None, "model")}
    step = mesh.distributed(train_step(TWO), in_shardings=((split, None), None))
    await step.compile(make_state(), BATCHES[0])
    made = await step.init(0, lambda: init_fn(5))
    assert places(made[0]["w"]) == HALVES and made[0]["w"].spec == (None, None, "model")
    assert_close(await mesh.fetch(made), make_state(5))


async def test_a_value_of_other_length_cannot_be_put_there(inline):
    step = inline.distributed(train_step(TWO))
    state, _ = await inline.run(step, make_state(), BATCHES[0])
    with pytest.raises(ArrayError, match=r"parts of 8 rows together, along axis 0, and .* shape \(6, 4, 4\)"):
        await inline.put(np.zeros((6, 4, 4), np.float32), like=state[0]["w"])


# ---------------------------------------------------------------- donation, deletion, failure


async def test_an_array_that_was_donated_or_deleted_is_named_as_the_user_knows_it(inline):
    step = inline.distributed(train_step(TWO), donate_argnums=0)
    state, _ = await inline.run(step, make_state(), BATCHES[0])
    after, _ = await inline.run(step, state, BATCHES[0])
    assert state[0]["w"].is_deleted()
    assert repr(state[0]["w"]).endswith("donated)")
    with pytest.raises(ArrayError, match=r"^state\[0\]\['head'\] cannot be used: it was donated"):
        await inline.run(step, state, BATCHES[0])
    await after[0]["w"].delete()
    await after[0]["w"].delete()
    with pytest.raises(ArrayError, match=r"^state\[0\]\['w'\] cannot be used: it was deleted"):
        await inline.run(step, after, BATCHES[0])
    with pytest.raises(ArrayError, match=r"^the array cannot be used: it was deleted"):
        await after[0]["w"]


async def test_one_array_cannot_be_taken_in_two_ways(inline):
    def step(w: Any, v: Any, batch: Any) -> Any:
        losses = jpp.accumulate_grads(lambda x: (jnp.zeros(()), two_layers(w, x)), TWO)(batch)[1]
        return losses + jnp.median(v)

    w = await inline.put(np.ones((2, 3, 3), np.float32))
    both = inline.distributed(step)
    with pytest.raises(ArrayError, match=r"w and v are one array, .* \(\[0:1\], \[1:2\] and not at all\)"):
        await inline.run(both, w, w, np.ones((2, 2, 3), np.float32))


async def test_after_a_cancelled_run_the_donated_state_is_the_new_one(inline):
    step = inline.distributed(train_step(TWO), donate_argnums=0)
    state, _ = await inline.run(step, make_state(), BATCHES[0])
    before = await stored(inline)
    running = asyncio.ensure_future(inline.run(step, state, BATCHES[1]))
    await until(state[0]["w"].is_deleted, every_s=0)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert not state[0]["w"].is_deleted()
    assert_close(await inline.fetch(state), reference(make_state(), *BATCHES[:2]))
    assert await stored(inline) == before
    state, _ = await inline.run(step, state, BATCHES[2])
    assert_close(await inline.fetch(state), reference(make_state(), *BATCHES[:3]))


async def test_a_failed_step_takes_all_parts_along():
    async with jpp.RemoteMesh(2, launcher="inline") as mesh:
        step = mesh.distributed(train_step(TWO))
        state, _ = await mesh.run(step, make_state(), BATCHES[0])
        future = await mesh.submit(step, state, BATCHES[0])
        mesh._running()._actor_group.handles[1].kill()
        with pytest.raises(ActorDiedError):
            await future
        w = future.outputs[0][0]["w"]
        assert w.is_deleted()
        assert repr(w).endswith("failed)")


async def test_a_restart_brings_the_parts_back():
    """From a backup of the parts of another cut: the steps since then divide them again."""
    async with jpp.RemoteMesh(2, max_restarts=1, backup_every=2) as mesh:
        step = mesh.distributed(train_step(TWO), donate_argnums=0)
        other = mesh.distributed(train_step(FOUR), donate_argnums=0)
        state: Any = make_state()
        for k, each in enumerate((step, step, other, step)):
            state, _ = await mesh.run(each, state, BATCHES[k])
            if k == 2:
                mesh._running()._actor_group.handles[1].kill()
        assert places(state[0]["w"]) == HALVES
        assert_close(await mesh.fetch(state), reference(make_state(), *BATCHES))


async def test_an_actor_may_die_while_arrays_are_divided():
    async with jpp.RemoteMesh(2, launcher="inline", max_restarts=100, backup_every=3) as mesh:
        halves, quarters = (mesh.distributed(train_step(s), donate_argnums=0) for s in (TWO, FOUR))
        expected = reference(make_state(), *BATCHES)

        killed_in: set[str] = set()
        for number, turns in enumerate((0, 1, 3, 8, 21)):  # of the event loop, since the call
            state: Any = make_state()
            for k, step in enumerate((halves, quarters, halves, quarters)):
                running = asyncio.ensure_future(mesh.run(step, state, BATCHES[k]))
                if k == 1 + number % 3:
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    killed_in |= {step.kind for step in mesh._running()._under_way.values()}
                    mesh._running()._actor_group.handles[number % 2].kill()
                state, _ = await running
            assert_close(await mesh.fetch(state), expected)
        assert "move" in killed_in, "no actor died while a move ran: other turns are needed"


# ---------------------------------------------------------------- checkpoints


async def test_a_checkpoint_has_one_leaf_and_restores_anywhere(local, tmp_path):
    halves, quarters = (local.distributed(train_step(s)) for s in (TWO, FOUR))
    whole = local.distributed(median)
    state, _ = await local.run(halves, make_state(), BATCHES[0])
    other, _ = await local.run(quarters, make_state(), BATCHES[0])
    await whole.compile(state, BATCHES[0])
    expected = reference(make_state(), BATCHES[0])
    shapes = jax.eval_shape(init_fn, 0)
    likes = {
        "same": (state, HALVES),
        "step": ((halves, 0), HALVES),
        "other": ((quarters, 0), QUARTERS),
        "whole": ((whole, 0), None),
        "host": (make_state(), None),
        "later": (shapes, ()),
    }
    for name, tree in (("halves", state), ("quarters", other), ("here", expected)):
        await local.save(tmp_path / name, tree)
        for like, parts in likes.values():
            found = await local.restore(tmp_path / name, like)
            if parts is not None:
                assert places(found[0]["w"]) == parts
            assert_close(await local.fetch(found), expected)
    pieces = load_manifest(str(tmp_path / "quarters")).arrays["0/w"].pieces
    assert [piece.start for piece in pieces] == [(0, 0, 0), (2, 0, 0), (4, 0, 0), (6, 0, 0)]
    assert len({piece.file for piece in pieces}) == 2  # one an actor


async def test_training_goes_on_from_a_checkpoint_of_another_cut(inline, tmp_path):
    halves, quarters = (inline.distributed(train_step(s)) for s in (TWO, FOUR))
    state, _ = await inline.run(halves, make_state(), BATCHES[0])
    await inline.save(tmp_path, state)
    await quarters.compile(make_state(), BATCHES[0])
    state = await inline.restore(tmp_path, (quarters, 0))
    future = await inline.submit(quarters, state, BATCHES[1])
    assert future.moves == ()
    state, _ = await future
    assert_close(await inline.fetch(state), reference(make_state(), *BATCHES[:2]))


async def test_a_checkpoint_of_another_shape_is_refused_by_the_name_of_the_leaf(inline, tmp_path):
    step = inline.distributed(train_step(TWO))
    state, _ = await inline.run(step, make_state(), BATCHES[0])
    await inline.save(tmp_path, {"w": np.zeros((6, 4, 4), np.float32)})
    with pytest.raises(CheckpointError, match=r"'w' is float32\[6, 4, 4\] .* but float32\[8, 4, 4\] in"):
        await inline.restore(tmp_path, {"w": state[0]["w"]})


async def test_a_part_that_waits_here_is_saved_too(inline, tmp_path):
    step = inline.distributed(train_step(TWO))
    state, _ = await inline.run(step, make_state(), BATCHES[0])
    w = state[0]["w"]
    value = await w
    first, second = w.division.arrays
    here = inline._values.new_host_array(second.value_type, value[4:])
    mixed = w.with_pieces([first, here])
    assert mixed.host is None
    await inline.save(tmp_path, {"w": mixed})
    found = await inline.restore(tmp_path, {"w": np.zeros((8, 4, 4), np.float32)})
    np.testing.assert_array_equal(found["w"], value)
    np.testing.assert_array_equal(await mixed, value)
    await inline.run(inline.distributed(median), [{"w": mixed}], 0)
    np.testing.assert_array_equal(await mixed, value)


async def test_actors_of_several_processes(remote_mesh, tmp_path):
    mesh = await remote_mesh(2, spmd_mesh={"model": 2}, processes_per_actor=2)
    shardings = (({"head": P(), "w": P(None, None, "model")}, None), None)
    halves, quarters = (mesh.distributed(train_step(s), in_shardings=shardings) for s in (TWO, FOUR))
    state, _ = await mesh.run(halves, make_state(), BATCHES[0])
    state, _ = await mesh.run(quarters, state, BATCHES[1])
    expected = reference(make_state(), *BATCHES[:2])
    await mesh.save(tmp_path, state)
    pieces = load_manifest(str(tmp_path)).arrays["0/w"].pieces
    assert [(p.start, p.shape) for p in pieces] == [
        ((row, 0, column), (2, 4, 2)) for row in (0, 2, 4, 6) for column in (0, 2)
    ]
    assert find_damage(str(tmp_path), load_manifest(str(tmp_path))) == {}
    for like in ((halves, 0), state):
        assert_close(await mesh.fetch(await mesh.restore(tmp_path, like)), expected)


# ---------------------------------------------------------------- reports


async def test_a_report_has_one_line_a_leaf_with_its_parts(inline):
    step = inline.distributed(train_step(TWO))
    report = (await step.compile(make_state(), BATCHES[0])).report()
    lines = {line.name: line for line in (*report.inputs, *report.outputs)}
    w = lines["state[0]['w']"]
    assert (w.type, w.actors, w.size_bytes) == ("float32[8, 4, 4]", (0, 1), 512)
    assert [(p.name, p.actors, p.size_bytes) for p in w.parts] == [
        ("state[0]['w'][0:4]", (0,), 256),
        ("state[0]['w'][4:8]", (1,), 256),
    ]
    assert [w.bytes_on(actor) for actor in (0, 1, 2)] == [256, 256, 0]
    assert lines["state[0]['head']"].bytes_on(1) == 64
    assert lines["result[0][0]['w']"].why == "continues state[0]['w']"
    (text,) = [line for line in str(report).splitlines() if line.startswith("state[0]['w']")]
    assert text.split("  ", 1)[1].strip().startswith("float32[8, 4, 4]  512 in parts  [0:4] 0; [4:8] 1 ")
    assert text.endswith("  each used by its own stage (forward and backward), after the loop")
