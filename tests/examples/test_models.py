"""The small examples (flax.nnx, flax.linen, equinox, an encoder-decoder) equal plain JAX, and they train."""

from __future__ import annotations

from itertools import repeat
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import train_encoder_decoder
import train_equinox
import train_linen
import train_nnx
from eager import run_eagerly
from interpret import run_plan
from planning import plan_step

import jaxpp_async as jpp
import training
from gpt.data import train_batches
from jaxpp_async.testing import assert_close

EXAMPLES = (train_nnx, train_linen, train_equinox, train_encoder_decoder)
SIZES = {"dim": 4, "num_layers": 2}
SCHEDULES = (jpp.Std1F1B(2, stages="balanced"), jpp.GPipe(2), jpp.ZeroBubbleH1(2, stages=[0]))

examples = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.__name__)


@pytest.fixture(scope="module")
def batch():
    """Two microbatches of two sequences of this file."""
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8)
    return next(train_batches(text, (2, 2, 6), seed=0))


def drawn(shapes):
    """A state of these shapes. Drawn by numpy: the models' own initializers would be compiled."""
    rng = np.random.default_rng(0)

    def leaf(shape):
        if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            return jax.random.key(5)
        if jnp.issubdtype(shape.dtype, np.floating):
            # a variance is not negative
            return np.abs(rng.normal(size=shape.shape) * 0.3).astype(shape.dtype)
        return np.zeros(shape.shape, shape.dtype)

    return jax.tree.map(leaf, shapes)


@examples
def test_equals_plain_jax(example, batch):
    program = example.make_program(SCHEDULES[0], optax.sgd(0.1), **SIZES)
    state = drawn(jax.eval_shape(program.init, jax.random.key(0)))
    expected = run_eagerly(program.train_step, state, batch)
    assert expected[1] > 0
    for schedule in SCHEDULES:
        plan = plan_step(program.train_step, state, batch, schedule=schedule)
        assert_close(run_plan(plan, state, batch), expected, atol=1e-6)


@pytest.fixture
def quick_compiles():
    """Compiling is what `test_trains` costs, and LLVM's optimizations are half of it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@examples
async def test_trains(example, batch, remote_mesh, quick_compiles):
    """On real executables. One initializer and one AdamW stand for all: they are half of a test's cost."""
    if example is train_linen:
        program = example.make_program(SCHEDULES[0], **SIZES)
    else:
        program = example.make_program(SCHEDULES[0], optax.sgd(0.1), **SIZES)
        state = drawn(jax.eval_shape(program.init, jax.random.key(0)))
        program = training.Program(lambda key: jax.tree.map(jnp.asarray, state), program.train_step)
    mesh = await remote_mesh(2, launcher="inline")
    losses, _ = await training.train(mesh, program, jax.random.key(0), repeat(batch, 12))
    assert np.all(np.isfinite(losses))
    assert np.mean(losses[-3:]) < np.mean(losses[:3])  # of three: dropout makes single ones jump


def test_command_line(monkeypatch, capsys):
    """Options reach the program; the comparison with plain JAX is printed."""

    def make_program(schedule):
        def loss(w, microbatch):
            x = w["first"][microbatch["tokens"][..., :2]]
            for _ in range(schedule.num_stages - 1):
                x = jpp.pipeline_yield(2 * x)
            return jnp.mean((x - w["last"]) ** 2)

        def train_step(w, batch):
            grads, loss_sum = jpp.accumulate_grads(
                lambda mb: jax.value_and_grad(loss)(w, mb)[::-1], schedule, reduce=jpp.Mean()
            )(batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), loss_sum

        return training.Program(lambda key: {"first": jnp.ones(256), "last": jnp.zeros(())}, train_step)

    options = ["--steps", "2", "--verify", "1", "--launcher", "inline", "--schedule", "interleaved1f1b"]
    monkeypatch.setattr("sys.argv", ["example", *options, "--data", __file__])
    with pytest.raises(SystemExit) as ended:
        training.main(make_program)
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0
    assert lines[0] == "step    1  loss 64.000"
    assert lines[1].startswith("step    2  loss ")  # the last one; its loss depends on this file's text
    assert lines[2] == "largest relative difference of loss: 0.0e+00"
    assert float(lines[-1].split()[-1]) < 1e-6
