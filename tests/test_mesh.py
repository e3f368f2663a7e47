"""RemoteMesh as a user meets it: the README's way of training, on inline actors and on processes."""

import logging
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxpp_async as jpp
from jaxpp_async.errors import PlanError
from jaxpp_async.testing import assert_close


def loss_fn(params, mb):
    x = jnp.tanh(mb["x"] @ params[0])
    x = jpp.pipeline_yield(x)
    return jnp.mean((x @ params[1] - mb["y"]) ** 2)


def train_step(params, batch):
    def grads_of(mb):
        loss, grads = jax.value_and_grad(loss_fn)(params, mb)
        return grads, loss

    grads, losses = jpp.accumulate_grads(grads_of, jpp.Std1F1B(2))(batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), losses


def costs():
    return jpp.CostModel.for_machine(jpp.Machine(2, device="h100-sxm"))


def problem():
    keys = jax.random.split(jax.random.key(0), 4)
    params = [jax.random.normal(keys[0], (4, 8)), jax.random.normal(keys[1], (8, 2))]
    batch = {"x": jax.random.normal(keys[2], (4, 3, 4)), "y": jax.random.normal(keys[3], (4, 3, 2))}
    return params, batch


@pytest.mark.parametrize("launcher", ["inline", "local"])
async def test_five_steps_equal_jit(remote_mesh, launcher):
    mesh = await remote_mesh(2, launcher=launcher)
    params, batch = problem()
    step = mesh.distributed(train_step, donate_argnums=0)
    plain, remote = params, params
    for _ in range(5):
        plain, plain_losses = jax.jit(train_step)(plain, batch)
        remote, losses = await mesh.run(step, remote, batch)
        assert_close(await losses, plain_losses)
    assert_close(await mesh.fetch(remote), plain)


async def test_a_plan_is_given_as_it_is_or_as_the_path_of_its_file(remote_mesh, tmp_path):
    mesh = await remote_mesh(2, launcher="inline")
    plan = jpp.plan(train_step, problem(), machine=jpp.Machine(2), costs=costs(), iterations=10)
    plan.save(tmp_path / "plan.json")
    for path in (tmp_path / "plan.json", str(tmp_path / "plan.json")):
        assert mesh.distributed(train_step, plan=path).plan == plan
    with pytest.raises(
        TypeError, match=r"plan is \{'step': 1\}; pass what `mesh.plan` .* returned, or the path"
    ):
        mesh.distributed(train_step, plan={"step": 1})  # pyright: ignore[reportArgumentType]
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(PlanError, match="no file of kind 'jaxpp_async plan'; plan again"):
        mesh.distributed(train_step, plan=tmp_path / "plan.json")


async def test_planning_tells_of_itself(caplog, monkeypatch):
    monkeypatch.delenv("JAXPP_ASYNC_PROGRESS", raising=False)
    caplog.set_level(logging.INFO, "jaxpp_async")
    async with jpp.RemoteMesh(2, launcher="inline") as mesh:
        step = mesh.distributed(train_step)
        await mesh.plan(step, *problem(), costs=costs(), iterations=10)
    said = [record.getMessage() for record in caplog.records]
    begin = said.index("planning train_step")
    assert said[begin + 1].startswith("planning train_step, in ")


def test_a_mesh_in_a_global_is_silent_at_the_end_of_python():
    """Python empties modules at its end, and this package's before it deletes the mesh."""
    code = "import jaxpp_async; mesh = jaxpp_async.RemoteMesh(1, launcher='inline')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stderr == ""
