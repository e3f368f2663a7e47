"""`jax.debug.print` and `jax.debug.callback` in a step: printed here, what plain `jax.jit` prints and in its order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planning import f32, plan_step, sent

import jaxpp_async as jpp
from jaxpp_async.testing import assert_close

W = np.eye(4, dtype=np.float32) * 0.5
X = np.arange(3 * 2 * 4, dtype=np.float32).reshape(3, 2, 4) / 10
BIG = np.arange(400, dtype=np.float32)  # large enough to be a hidden argument


def note(*args, **kwargs):
    """A host function with what it got in full: values, types, shapes."""
    print("note", args, {k: (type(v).__name__, str(v)) for k, v in kwargs.items()})


def step_of(loss, *, before=lambda ws: None, after=lambda grads, losses: None):
    """A training step of two stages over `loss(ws, x, index)`."""

    def step(ws, batch):
        before(ws)

        def of_one(x, index):
            value, grads = jax.value_and_grad(loss)(ws, x, index)
            return grads, value

        grads, losses = jpp.accumulate_grads(of_one, jpp.GPipe(2), pass_index=True)(batch)
        after(grads, losses)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), losses

    return step


def plain_loss(ws, x, index):
    return jnp.sum(jpp.pipeline_yield(jnp.tanh(x @ ws[0])) @ ws[1])


# ---------------------------------------------------------------- the same text as plain JAX


def everything(ws, x, index):
    jax.debug.print("no operand")
    h = jnp.tanh(x @ ws[0])
    jax.debug.print("{:.3f} {index} {h}", x[0, 0], index=index, h=h, ordered=True)
    h = jpp.pipeline_yield(h)
    jax.debug.print("{} {} {} {w:}", h > 0, index.astype("int8"), BIG[3], w=ws[1])
    jax.debug.callback(note, h.shape, "text", 1.5, k=jax.random.fold_in(jax.random.key(3), index), i=2)
    return jnp.sum(h @ ws[1])


def wrapped(ws, x, index):
    """Around the prints: jit, custom_jvp, vmap, checkpoint (which prints twice: it computes twice)."""

    @jax.jit
    def first(x, w):
        jax.debug.print("jit {}", x.sum())
        return jnp.tanh(x @ w)

    @jax.custom_jvp
    def twice(x):
        jax.debug.print("custom_jvp {}", x[0, 0])
        return 2 * x

    twice.defjvp(lambda primals, tangents: (twice(*primals), 2 * tangents[0]))

    def row(x, w):
        jax.debug.print("vmap {} {}", x.max(), 3)
        return x @ w

    @jax.checkpoint
    def second(h, w):
        y = jax.jit(jnp.sin)(h)
        jax.debug.print("checkpoint {}", y[0])
        return jax.checkpoint(jax.jit(lambda y: (jax.debug.print("inner {}", y[1]), y**2)[1]))(y) @ w

    h = jpp.pipeline_yield(twice(first(x, ws[0])))
    return jnp.sum(second(jax.vmap(row, (0, None))(h, ws[1]), ws[1]))


PROGRAMS = {
    "everything": step_of(
        everything,
        before=lambda ws: jax.debug.print("before {} {}", ws[0][0], jnp.sum(ws[1])),
        after=lambda grads, losses: jax.debug.print("after {losses} {}", jnp.sum(grads[0]), losses=losses),
    ),
    "wrapped": step_of(wrapped),
}


def captured(capsys):
    jax.effects_barrier()
    return capsys.readouterr().out


@pytest.fixture
async def mesh(remote_mesh):
    return await remote_mesh(2, launcher="inline")


async def test_prints_what_plain_jax_prints(mesh, capsys):
    program = PROGRAMS["everything"]
    expected = jax.jit(program)([W, W], X)
    text = captured(capsys)
    step = mesh.distributed(program, donate_argnums=0)
    for schedule in (jpp.GPipe(2), jpp.Std1F1B(2)):
        got = await mesh.run(step.with_schedule(schedule), await mesh.put([W, W]), X)
        assert captured(capsys) == text
        assert_close(await mesh.fetch(got), jax.device_get(expected))


async def test_prints_inside_calls_and_checkpoints(mesh, capsys):
    jax.jit(PROGRAMS["wrapped"])([W, W], X)
    text = captured(capsys)
    assert len(text.splitlines()) == 3 * (2 + 2 + 2 + 3)  # XLA leaves their order open
    await mesh.run(mesh.distributed(PROGRAMS["wrapped"]), [W, W], X)
    assert sorted(captured(capsys).splitlines()) == sorted(text.splitlines())


async def test_a_loop_whose_results_nobody_uses_prints(mesh, capsys):
    def step(ws, batch):
        def of_one(x):
            h = jpp.pipeline_yield(x @ ws[0])
            jax.debug.print("{} {}", h.sum(), ws[1][0, 0])

        jpp.accumulate_grads(of_one, jpp.GPipe(2))(batch)
        return ()

    jax.jit(step)([W, W], X)
    text = captured(capsys)
    assert await mesh.run(mesh.distributed(step), [W, W], X) == ()
    assert captured(capsys) == text and len(text.splitlines()) == 3


async def test_init_prints_and_states_keep_their_types(mesh, capsys):
    """A print changes neither trees nor weak types: the second step runs what the first compiled."""

    def init():
        state = {"w": [jnp.full((4, 4), 0.1), jnp.full((4, 4), 0.2)]}
        jax.debug.print("init {}", state["w"][1][0])
        return state

    def step(state, batch):
        grads = jpp.accumulate_grads(
            lambda x: jax.grad(lambda ws: plain_loss(ws, x, 0))(state["w"]), jpp.GPipe(2), reduce=jpp.Sum()
        )(batch)
        jax.debug.print("w {}", state["w"][0][0])
        return {"w": jax.tree.map(lambda w, g: w - 0.1 * g, state["w"], grads)}

    d = mesh.distributed(step, donate_argnums=0)
    await d.compile(jax.eval_shape(init), X)
    state, plain = await d.init(0, init), init()
    assert captured(capsys) == "init [0.2 0.2 0.2 0.2]\n" * 2
    for _ in range(2):
        state, plain = await mesh.run(d, state, X), jax.jit(step)(plain, X)
        assert_close(await mesh.fetch(state), jax.device_get(plain))
        lines = captured(capsys).splitlines()
        assert len(lines) == 2 and lines[0] == lines[1]
    assert len({id(c) for c in d._compiled.values()}) == 1


async def test_on_actors_of_two_devices_the_whole_value_is_printed_once(remote_mesh, capsys):
    mesh = await remote_mesh(2, launcher="inline", spmd_mesh={"data": 2})

    def step(ws, batch):
        def of_one(x):
            h = jpp.pipeline_yield(x @ ws[0])
            jax.debug.print("{}", h[:, 0])
            return h.sum()

        return jpp.accumulate_grads(of_one, jpp.GPipe(2))(batch)

    await mesh.run(
        mesh.distributed(step, in_shardings=(None, jax.sharding.PartitionSpec(None, "data"))), [W, W], X
    )
    assert captured(capsys).splitlines() == [str(x[:, 0]) for x in X @ W]


# ---------------------------------------------------------------- when


PRINTS_LOSS = step_of(plain_loss, after=lambda grads, losses: jax.debug.print("loss {}", losses.sum()))


async def test_steps_under_way_print_in_order_before_they_are_done(mesh, capsys):
    step = mesh.distributed(PRINTS_LOSS)
    first = await mesh.submit(step, [W, W], X)
    second = await mesh.submit(step, first.outputs[0], X)
    await second
    assert second.done() and first.done()
    texts = [f"loss {losses.sum()}" for losses in await mesh.fetch([first.outputs[1], second.outputs[1]])]
    assert captured(capsys).splitlines() == texts


async def test_a_callback_that_raises_fails_the_run_and_nothing_else(mesh, capsys):
    def refuse(value):
        raise KeyError(f"no {value}")

    step = mesh.distributed(step_of(plain_loss, after=lambda grads, losses: jax.debug.callback(refuse, 7)))
    with pytest.raises(KeyError, match="no 7"):
        await mesh.run(step, [W, W], X)
    await mesh.run(mesh.distributed(PRINTS_LOSS), [W, W], X)
    assert captured(capsys).startswith("loss ")


# ---------------------------------------------------------------- where


def shows(kind):
    """A step that prints one thing, or nothing."""

    def loss(ws, x, index):
        h = jpp.pipeline_yield(jnp.tanh(x @ ws[0]))
        if kind == "stage 1, a value of stage 0":
            jax.debug.print("{}", h)
        if kind == "stage 1, its weight":
            jax.debug.print("{}", ws[1])
        if kind == "stage 1, the batch":
            jax.debug.print("{}", x)
        if kind == "stage 1, a value of its own":
            jax.debug.print("{}", jnp.sin(h))
        return jnp.sum(h @ ws[1])

    def before(ws):
        if kind == "a weight before the loop":
            jax.debug.print("{}", ws[1])
        if kind == "a norm before the loop":
            jax.debug.print("{}", jnp.linalg.norm(ws[1]))

    def after(grads, losses):
        if kind == "a gradient":
            jax.debug.print("{} {}", grads[1], grads[0].sum())

    train = step_of(loss, before=before, after=after)

    def step(ws, batch, count):
        rate = 0.1 / (1 + count)
        if kind == "a learning rate":
            jax.debug.print("{}", rate)
        ws, losses = train(ws, batch)
        return jax.tree.map(lambda w: w * rate, ws), losses, count + 1

    return step


def plan_shows(kind):
    args = ([f32(32, 32), f32(32, 32)], f32(3, 2, 32), jax.ShapeDtypeStruct((), "int32"))
    return plan_step(shows(kind), *args, donate=(0,), schedule=jpp.Std1F1B(2))


@pytest.mark.parametrize(
    ("kind", "actors"),
    [
        ("stage 1, a value of stage 0", [(0,)]),
        ("stage 1, its weight", [(1,)]),
        ("stage 1, the batch", [(0,)]),
        ("stage 1, a value of its own", [(1,)]),
        ("a weight before the loop", [(1,)]),
        ("a norm before the loop", [(1,)]),
        ("a learning rate", [(0,), (1,)]),
        ("a gradient", [(1,), (0,)]),
    ],
)
def test_what_is_printed_stays_on_its_actor(kind, actors):
    without, done = plan_shows("nothing"), plan_shows(kind)
    assert [o.actors for o in done.placed.graph.outputs if o.result >= 4] == actors
    assert sorted(sent(done)) == sorted(sent(without))
    assert [i.actors for i in done.placed.graph.inputs] == [i.actors for i in without.placed.graph.inputs]


async def test_host_code_does_not_travel(mesh):
    """What actors are sent is exported code and text, and no executable calls the host."""
    compiled = await mesh.distributed(PROGRAMS["everything"]).compile([W, W], X)
    blobs = [
        e.blob.replace(b"test_debug_callbacks", b"") for e in compiled.compiled.executables
    ]  # source lines
    assert not any(b"callback" in blob for blob in blobs)
    assert "a printed value" in str(compiled.report())
