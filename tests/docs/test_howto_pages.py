"""Run the code of the how-to pages."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from docs_code import doc_code
from paths import ROOT

import jaxpp_async as jpp
from jaxpp_async.testing import assert_close

SCHEDULE = jpp.Std1F1B(2)


def loss_fn(params, microbatch):
    hidden = jpp.pipeline_yield(jnp.tanh(microbatch["x"] @ params["first"]))
    return jnp.mean((hidden @ params["second"] - microbatch["y"]) ** 2)


def train_step(params, batch):
    def microbatch_grads(microbatch):
        loss, grads = jax.value_and_grad(loss_fn)(params, microbatch)
        return grads, loss

    grads, losses = jpp.accumulate_grads(microbatch_grads, SCHEDULE)(batch)
    return jax.tree.map(lambda p, g: p - 0.02 * g, params, grads), losses.mean()


def make_params():
    keys = jax.random.split(jax.random.key(0))
    return {"first": jax.random.normal(keys[0], (4, 8)), "second": jax.random.normal(keys[1], (8, 1))}


def make_batch(number):
    x = np.random.default_rng(number).normal(size=(4, 2, 4)).astype(np.float32)
    return {"x": x, "y": x.sum(axis=-1, keepdims=True)}


def trained(num_steps):
    """The parameters and losses of a training without a mesh."""
    params, losses = make_params(), []
    for number in range(num_steps):
        params, loss = jax.jit(train_step)(params, make_batch(number))
        losses.append(float(loss))
    return params, losses


async def test_an_evaluation_leaves_training_alone(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    train_and_evaluate = doc_code("howto/evaluation.md")["train_and_evaluate"]
    batches, held_out = [make_batch(k) for k in range(4)], [make_batch(100), make_batch(101)]
    params, results = await train_and_evaluate(
        mesh, train_step, loss_fn, SCHEDULE, make_params(), batches, held_out, every=2
    )
    expected, _ = trained(4)
    assert_close(await mesh.fetch(params), expected)
    losses = [jax.vmap(loss_fn, (None, 0))(expected, batch) for batch in held_out]
    assert len(results) == 2
    assert_close(results[-1], np.mean(losses))


@pytest.fixture
def grain_page():
    pytest.importorskip("grain", reason="grain is not installed")
    return doc_code("howto/data_grain.md")


def examples():
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    return [{"x": row, "y": row.sum(keepdims=True)} for row in x]


async def test_batches_of_grain_are_trained_on_and_resumed(grain_page, remote_mesh, tmp_path):
    mesh = await remote_mesh(2, launcher="inline")
    step = mesh.distributed(train_step, donate_argnums=0)
    batches = iter(grain_page["make_batches"](examples(), num_microbatches=4, microbatch_size=2))
    params, losses = await grain_page["train"](mesh, step, make_params(), batches, 3)
    async with jpp.Checkpoints(mesh, tmp_path) as checkpoints:
        await grain_page["save"](checkpoints, 3, params, batches)
        _, expected = await grain_page["train"](
            mesh, step, params, batches, 12
        )  # beyond one epoch of 8 batches

        again = iter(grain_page["make_batches"](examples(), num_microbatches=4, microbatch_size=2))
        params, done = await grain_page["resume"](checkpoints, step, again)
        assert done == 3
        _, resumed = await grain_page["train"](mesh, step, params, again, 12)
    assert len(losses) == 3 and resumed == expected


async def test_learning_curves_reach_tensorboard_and_wandb(tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    sent = []
    run = types.SimpleNamespace(log=lambda values, step: sent.append((step, values)))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: run))
    page = doc_code("howto/learning_curves.md")
    loggers = [page["TensorBoard"](tmp_path), page["WandB"](project="test")]
    params = await page["train"](train_step, make_params(), [make_batch(k) for k in range(3)], loggers)
    loggers[0].writer.close()
    expected, losses = trained(3)
    assert_close(params, expected)
    assert [step for step, _ in sent] == [0, 1, 2]
    assert_close([values["loss"] for _, values in sent], losses)
    (file,) = tmp_path.iterdir()
    assert b"learning_rate" in file.read_bytes() and file.name.startswith("events.out.tfevents")


def test_a_step_time_is_logged():
    logged = {}
    bill = types.SimpleNamespace(schedule_s=0.5)
    mesh = types.SimpleNamespace(
        last_step_timeline=lambda: types.SimpleNamespace(duration_s=2.0, bill=bill), log=logged.__setitem__
    )
    doc_code("howto/learning_curves.md")["log_step_time"](mesh, 7)
    assert logged == {7: {"step time, s": 2.0, "bubble": 0.25}}


async def test_the_peaks_of_schedules_are_known_before_they_run(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    step = mesh.distributed(train_step)
    peaks = doc_code("howto/make_it_fit.md")["peaks"]
    found = await peaks(step, jax.eval_shape(make_params), make_batch(0), [jpp.GPipe(2), jpp.Std1F1B(2)])
    assert list(found) == ["GPipe(num_stages=2)", "Std1F1B(num_stages=2)"]
    assert found["GPipe(num_stages=2)"] > found["Std1F1B(num_stages=2)"] > 0


async def test_sigterm_saves_what_is_computed(remote_mesh, tmp_path):
    mesh = await remote_mesh(2, launcher="inline")
    step = mesh.distributed(train_step, donate_argnums=0)
    train, folder = doc_code("howto/sigterm.md")["train"], tmp_path / "stopped"

    def batches():
        for number in range(100):
            if number == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            yield make_batch(number)

    before = signal.getsignal(signal.SIGTERM)
    task = asyncio.create_task(train(mesh, step, make_params(), batches(), folder))
    try:
        with pytest.raises(asyncio.CancelledError):
            await task
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)
    saved = await mesh.fetch(await mesh.restore(folder, jax.eval_shape(make_params)))
    assert any(
        _equal(saved, trained(count)[0]) for count in (3, 4)
    )  # of the step under way: whole, or not begun


def _equal(tree, other):
    return all(
        np.allclose(a, b, rtol=1e-5) for a, b in zip(*map(jax.tree.leaves, (tree, other)), strict=True)
    )


async def test_a_job_resumes_where_it_was_stopped(remote_mesh, tmp_path):
    mesh = await remote_mesh(2, launcher="inline")
    train = doc_code("howto/requeue.md")["train"]
    starts = []
    for num_steps in (2, 3, 5):  # three runs of one job; the second is stopped before it saves
        state, done = await train(
            mesh, train_step, make_params, make_batch, tmp_path, num_steps, save_every=2
        )
        starts.append(done)
    assert starts == [0, 2, 2]
    assert_close(await mesh.fetch(state), trained(5)[0])


async def test_the_script_for_slurm_is_that_for_a_laptop():
    assert await doc_code("howto/slurm.md")["main"](launcher="inline", num_actors=2) == 12.0


def test_the_llama_page_shows_what_the_scripts_are():
    """Each diff on the page is one of the two scripts."""
    page = (ROOT / "docs" / "howto" / "llama.md").read_text()
    before, after = ((ROOT / "examples" / "llama" / name).read_text() for name in ("plain.py", "train.py"))
    hunks = re.findall(r"^```diff\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(hunks) == 10
    for hunk in hunks:
        lines = hunk.splitlines()
        removed, added = ("\n".join(x[1:] for x in lines if x[0] != sign) for sign in "+-")
        assert removed in before and added in after


@pytest.mark.parametrize("size", ["tiny", "8b"])
def test_a_llama_is_compiled_for_a_machine_that_is_not_there(size):
    pytest.importorskip("grain", reason="grain is not installed")
    page = doc_code("howto/llama.md")
    report = page["report"](jpp.Machine(4, device="h100-sxm"), *page["arguments"](size, 4, 8))
    assert len(report.actors) == 4
    assert ("[0:1] 0; [1:2] 1; [2:3] 2; [3:4] 3" if size == "tiny" else "in parts") in str(report)
