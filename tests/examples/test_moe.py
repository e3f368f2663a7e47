"""The mixture of experts: it equals plain `jax.jit`, no weight moves, and tokens travel between devices."""

from __future__ import annotations

import inspect
import re
import runpy
from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from moe import train as moe
from on_devices import run_on_devices

import jaxpp_async as jpp
from jaxpp_async.errors import ShardingError
from jaxpp_async.testing import assert_close

SMALL = moe.Config(num_layers=4, dim=8, num_heads=2, hidden=16, seq_len=8, capacity=0.75)
"""Little room, so that tokens are dropped."""

MESH = {"spmd_mesh": moe.SPMD_MESH, "axis_rules": moe.AXIS_RULES}
DUAL_PIPE = jpp.DualPipeV(4, stages=[0, 1, 2])


@pytest.fixture(scope="module")
def data():
    return moe.batches(SMALL, 2)


@pytest.fixture(scope="module")
def expected(data):
    return jax.device_get(moe.train_with_jit(SMALL, DUAL_PIPE, data))


def assert_equal(got, expected):
    """The states and losses are close; what was counted is equal."""
    assert_close(got[0]["params"], expected[0]["params"], atol=1e-5)
    for metrics, other in zip(got[1], expected[1], strict=True):
        assert_close(metrics["loss"], other["loss"])
        assert int(metrics["dropped"]) == int(other["dropped"]) > 0
        for counts, others in zip(metrics["counts"], other["counts"], strict=True):
            assert np.array_equal(counts, others)
    for bias, other in zip(got[0]["bias"], expected[0]["bias"], strict=True):
        assert np.array_equal(bias, other) and np.any(bias)


@pytest.mark.parametrize(
    ("schedule", "launcher"),
    [(jpp.Std1F1B(2, stages=[1]), "inline"), (DUAL_PIPE, "local")],
    ids=["Std1F1B", "DualPipeV across processes"],
)
async def test_equals_plain_jit(schedule, launcher, data, expected, remote_mesh):
    mesh = await remote_mesh(2, launcher=launcher, **MESH)
    state, metrics = await moe.train(mesh, SMALL, schedule, data)
    assert state["params"]["layers"][0]["up"].sharding.spec == P("expert")
    assert_equal((await mesh.fetch(state), metrics), expected)


async def test_losses_of_every_stage_travel_as_scalars_and_no_weight_moves(data, remote_mesh):
    mesh = await remote_mesh(2, **MESH)
    step = mesh.distributed(moe.make_train_step(SMALL, DUAL_PIPE))
    state = jax.eval_shape(partial(moe.init, config=SMALL), jax.random.key(0))
    report = (await step.compile(state, data[0])).report()
    activation = moe.MICROBATCH_SIZE * SMALL.seq_len * SMALL.dim * 4
    in_the_loop = {t.size_bytes for t in report.transfers if t.in_loop}
    assert in_the_loop == {activation, 4}
    assert {t.size_bytes for t in report.transfers if not t.in_loop} <= {activation, 4, 1}
    homes = {place.name: place.actors for place in report.inputs}
    for layer, actor in enumerate([0, 1, 1, 0]):  # the fold of DualPipeV
        assert homes[f"state['bias'][{layer}]"] == (actor,)
        assert homes[f"state['params']['layers'][{layer}]['up']"] == (actor,)


@pytest.mark.parametrize("axes", [{"expert": 2, "data": 1}, {"expert": 2, "data": 2}], ids=str)
def test_tokens_travel_to_experts_and_back(axes, data):
    """Devices exchange tokens, and gradients of what is whole; never a weight of an expert."""
    two = moe.Config(num_layers=2, dim=8, num_heads=2, hidden=16, seq_len=8)
    state = jax.jit(partial(moe.init, config=two))(jax.random.key(0))
    ran = run_on_devices(
        moe.make_train_step(two, jpp.Std1F1B(2, stages=[0])),
        state,
        data[0],
        axes=axes,
        axis_rules=moe.AXIS_RULES,
        in_shardings=(moe.shardings(state), P(None, ("data", "expert"))),
    )
    for task in ("fwd0", "fwd_bwd1", "bwd0"):
        assert any(found.startswith("all-to-all") for found in ran.collectives[task])
        gathered = {found for found in ran.collectives[task] if found.startswith("all-gather")}
        assert gathered <= {"all-gather 4x4x8"}  # the routers' choice: (batch, seq, experts)


def test_room_is_given_to_first_choices_first_and_in_order():
    """Tokens that are sent and dropped, counted one by one."""
    config = moe.Config(num_layers=1, dim=8, hidden=16, seq_len=12, capacity=0.75)
    init = jax.jit(partial(moe.init, config=config))
    layer = jax.device_get(init(jax.random.key(0))["params"]["layers"][0])
    x = np.random.default_rng(1).normal(size=(3, 12, 8)).astype(np.float32)
    bias = np.array([0.3, 0.0, 0.0, -0.3], np.float32)
    y, router = jax.jit(partial(moe.experts, config=config))(layer, bias, x)
    room, dropped, expected = int(0.75 * 2 * 12 / 4), 0, np.zeros(x.shape, np.float32)
    probs = np.exp(x @ layer["router"])
    probs /= probs.sum(axis=-1, keepdims=True)
    made_by = np.einsum("bsd,edh->bseh", x, layer["up"])
    made_by = np.einsum("bseh,ehd->bsed", np.asarray(jax.nn.gelu(made_by)), layer["down"])
    chosen = np.argsort(-(probs + bias), axis=-1, kind="stable")[..., :2]
    for sequence in range(3):
        free = [room] * 4
        for choice in range(2):
            for token in range(12):
                expert = chosen[sequence, token, choice]
                free[expert] -= 1
                if free[expert] < 0:
                    dropped += 1
                    continue
                weights = probs[sequence, token, chosen[sequence, token]]
                made = made_by[sequence, token, expert]
                expected[sequence, token] += probs[sequence, token, expert] / weights.sum() * made
    assert dropped == int(router["dropped"]) > 0
    assert np.array_equal(router["counts"], np.bincount(chosen.ravel(), minlength=4))
    assert_close(y, expected)


def test_biases_move_towards_experts_with_few_tokens(expected):
    state, metrics = expected
    for layer, bias in enumerate(state["bias"]):
        counts = [of_step["counts"][layer] for of_step in metrics]
        moved = sum(np.sign(c.mean() - c) for c in counts)
        assert_close(bias, np.float32(moe.BIAS_RATE * moved))


def test_every_stage_adds_to_the_loss(data):
    """Each layer's router has a gradient from its own losses alone."""
    state = jax.jit(partial(moe.init, config=SMALL))(jax.random.key(0))

    def balance(params):
        microbatch = jax.tree.map(lambda leaf: leaf[0], data[0])
        loss, routers = moe.loss_fn(params, state["bias"], microbatch, SMALL)
        layers = sum(moe.BALANCE_WEIGHT * r["balance"] + moe.Z_WEIGHT * r["z"] for r in routers)
        return layers, loss

    (layers, loss), grads = jax.jit(jax.value_and_grad(balance, has_aux=True))(state["params"])
    assert 0 < layers < loss
    assert all(np.any(layer["router"]) for layer in grads["layers"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"spmd_mesh": {"data": 2}, "axis_rules": moe.AXIS_RULES},
            r"axis_rules\['batch'\] names the axis 'expert', but spmd_mesh has \['data'\]; give spmd_mesh ",
        ),
        (
            {"spmd_mesh": {"data": 2}},
            r"train.py:\d+: in_shardings of .*\['down'\] names the axis 'expert', but the mesh has "
            r"\['data'\]; give spmd_mesh that axis or correct the sharding",
        ),
        (
            {"spmd_mesh": {"data": 1, "expert": 2}, "axis_rules": {"batch": "data"}},
            r"train.py:\d+: shard names 'expert', an axis of the mesh, but axis_rules has no entry for it; ",
        ),
    ],
    ids=["rules", "in_shardings", "no rule"],
)
async def test_an_expert_axis_that_is_not_in_the_mesh(options, message, data, remote_mesh):
    with pytest.raises(ShardingError, match=message):
        mesh = await remote_mesh(2, launcher="inline", **options)
        await moe.train(mesh, SMALL, DUAL_PIPE, data)


def test_no_steps_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train.py", "--steps", "0"])
    with pytest.raises(SystemExit):
        runpy.run_path(moe.__file__, run_name="__main__")
    assert "--steps 0: train at least one step" in capsys.readouterr().err


def test_porting_from_jit_takes_at_most_thirty_lines():
    """Lines that a script for `jax.jit` would not have."""
    ours = re.compile(r"jpp|mesh|async |await|spec|shard|AXIS_RULES|NUM_ACTORS|\bP\(", re.IGNORECASE)
    code = re.sub(r'"""[\s\S]*?"""', "", inspect.getsource(moe))
    lines = [line for line in code.splitlines() if ours.search(line) and not line.strip().startswith("#")]
    assert len(lines) <= 30, "\n".join(lines)
