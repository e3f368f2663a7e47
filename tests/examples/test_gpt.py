"""The model and steps of examples/train_gpt.py under plain `jax.jit`, and what its report prints."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from planning import plan_step

import jaxpp_async as jpp
from gpt import data, report, steps
from gpt.model import ModelConfig, forward, init_params, sample, state_specs

SHAPE = (4, 2, 16)
TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog; " * 40, np.uint8)


def config(**changes: Any) -> ModelConfig:
    return ModelConfig(**{"num_layers": 2, "dim": 16, "num_heads": 2, "seq_len": 16} | changes)


def train(config: ModelConfig, num_steps: int) -> tuple[Any, list[float]]:
    optimizer = steps.make_optimizer(num_steps)
    step = steps.make_train_step(config, optimizer, jpp.Std1F1B(2, stages="balanced"))
    state = jax.jit(steps.make_init(config, optimizer))(jax.random.key(0))
    return steps.run_plain(step, state, islice(data.train_batches(TEXT, SHAPE, seed=0), num_steps))


def cut_at(step: Any, *args: Any, actors: int) -> tuple[int, ...]:
    (loop,) = plan_step(step, *args, actors=actors).placed.loops.values()
    assert loop.staged.loop.cut is not None
    return loop.staged.loop.cut.boundaries


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [(4, 1, ()), (4, 2, (1,)), (5, 2, (2,)), (4, 3, (1, 2)), (5, 3, (1, 3)), (4, 4, (0, 1, 2))],
)
def test_stages_end_after_these_layers(num_layers: int, num_stages: int, expected: tuple, tied: bool):
    """The last stage, with projection and loss, is not the larger one; evaluation has the same cut."""
    sizes = config(num_layers=num_layers, tie_embedding=tied, dim=128, num_heads=4, seq_len=128)
    schedule, optimizer = jpp.Std1F1B(num_stages, stages="balanced"), steps.make_optimizer(10)
    state = jax.eval_shape(steps.make_init(sizes, optimizer), jax.random.key(0))
    batch = dict.fromkeys(("tokens", "labels"), jax.ShapeDtypeStruct((8, 2, 128), "int32"))
    train_step = steps.make_train_step(sizes, optimizer, schedule)
    assert cut_at(train_step, state, batch, actors=num_stages) == expected
    eval_step = steps.make_eval_step(sizes, schedule)
    assert cut_at(eval_step, state["params"], batch, actors=num_stages) == expected


def random_params() -> Any:
    return jax.jit(init_params, static_argnums=1)(jax.random.key(0), config())


def test_no_byte_sees_the_future():
    params = random_params()
    tokens = np.arange(16)[None]
    changed = tokens.copy()
    changed[0, 10] = 99
    logits = jax.jit(forward, static_argnums=2)
    before, after = (np.asarray(logits(params, t, config())) for t in (tokens, changed))
    assert np.array_equal(before[0, :10], after[0, :10])
    assert not np.allclose(before[0, 10:], after[0, 10:])


@pytest.fixture(scope="module")
def trained() -> tuple[Any, list[float]]:
    return train(config(), num_steps=30)


def test_training_learns(trained: tuple[Any, list[float]]):
    _, losses = trained
    assert losses[-1] < losses[0] - 0.5


def test_tied_embedding_learns_without_a_head():
    state, losses = train(config(tie_embedding=True), num_steps=30)
    assert losses[-1] < losses[0] - 0.5 and "head" not in state["params"]


def test_evaluation_is_the_mean_over_microbatches():
    params = random_params()
    batch = next(data.train_batches(TEXT, SHAPE, seed=3))
    loss = jax.jit(steps.make_eval_step(config(), jpp.Std1F1B(2)))(params, batch)
    logits = jax.jit(forward, static_argnums=2)(params, batch["tokens"].reshape(-1, 16), config())
    log_probs = jax.nn.log_softmax(logits)
    expected = -np.take_along_axis(np.asarray(log_probs), batch["labels"].reshape(-1, 16, 1), axis=-1).mean()
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)


def test_optimizer_moments_are_split_as_their_parameters():
    state = jax.eval_shape(steps.make_init(config(), steps.make_optimizer(10)), jax.random.key(0))
    specs = jax.tree.leaves_with_path(state_specs(state))
    by_name = {jax.tree_util.keystr(path): spec for path, spec in specs}
    split = {path: spec for path, spec in by_name.items() if spec != PartitionSpec()}
    assert by_name["['params']['blocks'][0]['up']"] == PartitionSpec(None, "model")
    assert len(split) == 3 * 2 * 4  # (parameter, two moments) x layers x (qkv, out, up, down)
    for path, leaf in jax.tree.leaves_with_path(state):
        assert len(by_name[jax.tree_util.keystr(path)]) in (0, leaf.ndim)


def test_sample_continues_the_prompt_past_the_context():
    params = random_params()
    text = sample(params, config(), b"def ", 20, seed=0)
    assert text.startswith(b"def ") and len(text) == 24
    assert text == sample(params, config(), b"def ", 20, seed=0)


@pytest.mark.parametrize(
    ("got", "expected", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.1], [1.0, 2.0], 0.05),
        ([0.0], [0.0], 0.0),
        ([0.1, -4.0], [0.0, -4.0], 0.025),
    ],
)
def test_relative_difference_is_to_the_leaf_s_largest_magnitude(got: list, expected: list, difference: float):
    tree, expected_tree = {"a": np.array(got), "b": np.ones(1)}, {"a": np.array(expected), "b": np.ones(1)}
    assert steps.largest_relative_difference(tree, expected_tree) == pytest.approx(difference)


# ---------------------------------------------------------------- report


def test_last_lines_have_their_exact_form():
    assert report.validation_line(1.2344, 2.3451, 3.4561) == (
        "validation loss 1.234 (bigram 2.345, unigram 3.456) nats/byte"
    )
    assert report.verify_lines(1.1e-7, 2.2e-6) == [
        "largest relative difference of loss: 1.1e-07",
        "largest relative difference of parameters: 2.2e-06",
    ]


def test_sample_cannot_command_the_terminal():
    assert (
        report.printable(b"a\x1b[2Jb\n\xffc\td")
        == "a\N{REPLACEMENT CHARACTER}[2Jb\n\N{REPLACEMENT CHARACTER}c    d"
    )


def test_actor_table_shares_out_the_wall_time():
    lines = report.actor_table([report.ActorTime(6.0, 3.0, 2**20)], wall_s=10.0)
    assert re.fullmatch(r"actor 0 +60% +30% +10% +1\.0 MiB", lines[1])


def test_without_a_terminal_progress_is_plain_lines(capsys: pytest.CaptureFixture[str]):
    with report.Reporter().training(num_steps=40, tokens_per_step=100) as progress:
        for step in range(40):
            progress.advance(loss=float(step))
    lines = capsys.readouterr().out.splitlines()
    assert (
        len(lines) == 21
        and lines[0].startswith("step  1/40  loss 0.000")
        and lines[-1].startswith("step 40/40")
    )
    assert not any("\x1b" in line for line in lines)
