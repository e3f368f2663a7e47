"""What `report()` says: where everything lives and why, what is sent, when, how often and for whom."""

from __future__ import annotations

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from planning import f32, plan_step

import jaxpp_async as jpp
from jaxpp_async.session import report
from jaxpp_async.testing import assert_close

D, MB = 8, 4
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def loss(params, x):
    """One table at both ends of three stages."""
    x = jpp.pipeline_yield(jnp.tanh(x @ params["table"]))
    x = jpp.pipeline_yield(jnp.tanh(x @ params["w"]))
    return jnp.mean(jnp.square(x @ params["table"].T))


def train(state, batch, scale, unused):
    def of_one(x):
        value, grads = jax.value_and_grad(lambda p: loss(p, x) * scale)(state["params"])
        return grads, value

    grads, losses = jpp.accumulate_grads(of_one, jpp.Std1F1B(3), reduce=(jpp.Mean(), jpp.Stack()))(batch)
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt}, {"losses": losses, "scale": scale}


@pytest.fixture(scope="module")
def made():
    params = {"table": f32(D, D), "w": f32(D, D)}
    state = {"params": params, "opt": jax.eval_shape(OPTIMIZER.init, params)}
    plan = plan_step(train, state, f32(MB, 2, D), f32(), f32(3), actors=3, donate=(0,))
    return report.make(plan, {0: {0: 64}}, {0: 0.25})


# name, actors, bytes on each, why
ARGUMENTS = [
    ("state['params']['w']", (1,), 256, "used by fwd(stage 1), bwd(stage 1), after the loop"),
    (
        "state['params']['table']",
        (0, 2),
        256,
        "actor 0: used by fwd(stage 0), after the loop; actor 2: used by fwd_bwd(stage 2)",
    ),
    ("state['opt'][1][0].mu['w']", (1,), 256, "used after the loop"),
    ("state['opt'][1][0].count", (0, 1), 4, "used after the loop"),
    ("batch", (0,), 256, "used by fwd(stage 0), bwd(stage 0)"),
    ("scale", (2,), 4, "used by fwd_bwd(stage 2)"),
    ("unused", (), 12, "not used: stays where it is"),
    ("microbatch indices 0 to 3", (0, 2), 16, "put there once, and kept"),
]

RESULTS = [
    ("result[0]['params']['w']", (1,), 256, "continues state['params']['w']"),
    ("result[0]['params']['table']", (0, 2), 256, "continues state['params']['table']"),
    ("result[1]['losses']", (2,), 16, "made there: collected by fwd_bwd(stage 2)"),
    ("result[1]['scale']", (2,), 4, "continues scale"),
]


@pytest.mark.parametrize(("which", "rows"), [("inputs", ARGUMENTS), ("outputs", RESULTS)])
def test_where_things_live_and_why(made, which, rows):
    lines = {p.name: (p.name, p.actors, p.size_bytes, p.why) for p in getattr(made, which)}
    assert [lines[name] for name, *_ in rows] == rows


def test_what_is_sent_in_the_loop(made):
    inside = [t for t in made.transfers if t.when == "in the loop"]
    assert made.transfers[: len(inside)] == tuple(inside), "they come first"
    assert {(t.from_actor, t.to_actor, t.what, t.why) for t in inside} == {
        (0, 1, "float32[2, 8] of fwd(stage 0)", "for fwd(stage 1), bwd(stage 1)"),
        (1, 2, "float32[2, 8] of fwd(stage 1)", "for fwd_bwd(stage 2)"),
        (2, 1, "float32[2, 8] of fwd_bwd(stage 2)", "for bwd(stage 1)"),
        (1, 0, "float32[2, 8] of bwd(stage 1)", "for bwd(stage 0)"),
    }
    assert {(t.count, t.per_microbatch, t.size_bytes, t.total_bytes) for t in inside} == {
        (MB, 1, 64, MB * 64)
    }


def test_what_is_sent_outside_the_loop(made):
    outside = [t for t in made.transfers if t.when != "in the loop"]
    assert {(t.when, t.count > 0, t.per_microbatch) for t in outside} == {("after the loop", True, 0)}
    large = [(t.from_actor, t.to_actor, t.why) for t in outside if t.size_bytes > 64]
    assert sorted(large) == [
        (0, 2, "as result[0]['params']['table'], which lives there"),
        (2, 0, next(t.why for t in outside if t.from_actor == 2)),
    ]
    assert all(re.search(r" at \S+\.py:\d+$", t.what) for t in outside if t.size_bytes <= 64), (
        "the user's line"
    )


def test_actors(made):
    first = made.actors[0]
    assert (first.temp_bytes, first.compile_s) == (64, 0.25)
    assert first.argument_bytes == sum(p.size_bytes for p in made.inputs if 0 in p.actors)
    sent = {a: sum(t.total_bytes for t in made.transfers if t.from_actor == a) for a in range(3)}
    assert {a.actor: a.sent_bytes for a in made.actors} == sent
    places = r"(recv tag \d+ for )?(fwd|bwd|fwd_bwd|outer|start)\(.*\)"
    assert all(re.fullmatch(places, a.peak_at) for a in made.actors), [a.peak_at for a in made.actors]
    assert "microbatch indices" not in str(made)


def test_it_prints_as_aligned_columns(made):
    lines = str(made).splitlines()
    starts = [lines.index(title) for title in ("transfers in one step", "arguments", "results")]
    for start in starts:
        header, rows = lines[start + 1], lines[start + 2 :]
        rows = rows[: rows.index("")] if "" in rows else rows
        last = header.index("why")
        assert all(row[last - 1] == " " and row[last] != " " for row in rows), "the last column is aligned"
    assert any(line.startswith("start: ") for line in lines)
    assert any(line.startswith("outer: ") for line in lines)
    assert not any(line.endswith(" ") for line in lines)


def test_the_same_every_time(made):
    params = {"table": f32(D, D), "w": f32(D, D)}
    state = {"params": params, "opt": jax.eval_shape(OPTIMIZER.init, params)}
    plan = plan_step(train, state, f32(MB, 2, D), f32(), f32(3), actors=3, donate=(0,))
    assert report.make(plan, {0: {0: 64}}, {0: 0.25}) == made


def test_before_the_loop_and_between_two():
    def step(params, batch):
        params = jax.tree.map(lambda p: p / jnp.sum(params["w"]), params)
        grads = jpp.accumulate_grads(lambda x: jax.grad(loss)(params, x), jpp.Std1F1B(3))(batch)
        norm = optax.global_norm(grads)
        params = jax.tree.map(lambda p, g: p - g / norm, params, grads)
        after = jpp.accumulate_grads(lambda x: loss(params, x), jpp.GPipe(3), reduce=jpp.Stack())(batch)
        return params, after

    plan = plan_step(step, {"table": f32(D, D), "w": f32(D, D)}, f32(MB, 2, D), actors=3)
    scalars = {t.when for t in report.make(plan, {}, {}).transfers if t.size_bytes == 4}
    assert scalars == {"before loop 1", "before loop 2"}


def test_the_stage_that_uses_a_cast_argument_is_named():
    def step(params, batch):
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        grads = jpp.accumulate_grads(lambda x: jax.grad(loss)(half, x), jpp.GPipe(3))(batch)
        return jax.tree.map(lambda p, g: p - g, params, grads)

    plan = plan_step(step, {"table": f32(D, D), "w": f32(D, D)}, f32(MB, 2, D), actors=3)
    why = {p.name: p.why for p in report.make(plan, {}, {}).inputs}
    assert why["params['w']"] == "used before the loop for fwd(stage 1), bwd(stage 1), after the loop"


def test_a_step_on_one_actor_sends_nothing():
    plan = plan_step(lambda x: x @ x, f32(D, D))
    text = str(report.make(plan, {}, {}))
    assert "no transfers between actors" in text
    assert "used in the step" in text


async def test_arrays_that_a_step_keeps_elsewhere_are_reported(remote_mesh, caplog):
    mesh = await remote_mesh(2, launcher="inline")
    params = {"a": np.ones((4, 4), "float32"), "b": np.ones((4, 4), "float32")}

    def pipelined(params, batch):
        def one(x):
            return jnp.sum(jpp.pipeline_yield(x @ params["a"]) @ params["b"])

        return params, jpp.accumulate_grads(one, jpp.GPipe(2), reduce=jpp.Stack())(batch)

    placed, _ = await mesh.distributed(pipelined)(params, np.ones((2, 3, 4), "float32"))
    norm = mesh.distributed(optax.global_norm)
    with caplog.at_level(logging.INFO, logger="jaxpp_async"):
        future = await mesh.submit(norm, placed)
        assert_close(await mesh.fetch(await future), np.float32(np.sqrt(32)))
    (moved,) = future.moves
    assert (moved.name, moved.size_bytes, moved.from_actor, moved.to) == ("updates['b']", 64, 1, (0,))
    assert "moved 1 array, 64 bytes, before step 'global_norm'" in caplog.text
