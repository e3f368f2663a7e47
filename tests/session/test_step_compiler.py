"""Direct tests of how steps are compiled once and told to be compiled again, on an inline mesh."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jaxpp_async as jpp
from jaxpp_async.errors import MeshError
from jaxpp_async.session.step_compiler import MeshStepCompiler, modelled_seconds


@pytest.fixture(scope="module")
async def mesh():
    async with jpp.RemoteMesh(1, launcher="inline") as mesh:
        yield mesh


def compiler(mesh: jpp.RemoteMesh) -> MeshStepCompiler:
    found = mesh._runner.compiler
    assert isinstance(found, MeshStepCompiler)
    return found


async def test_calls_at_once_compile_a_step_once(mesh):
    traces = []

    def step(x):
        traces.append(x)
        return x + 1

    distributed = mesh.distributed(step)
    args = (jnp.zeros(2),)
    compiled = await asyncio.gather(*(compiler(mesh).compile(distributed, args) for _ in range(3)))
    assert len(traces) == 1
    assert len({id(one) for one in compiled}) == 1


async def test_other_types_are_another_form_and_alike_ones_are_not(mesh):
    distributed = mesh.distributed(lambda x: x * 2)
    first = await compiler(mesh).compile(distributed, (jnp.zeros(2),))
    assert await compiler(mesh).compile(distributed, (jnp.ones(2),)) is first
    assert await compiler(mesh).compile(distributed, (jnp.zeros(3),)) is not first


async def test_a_step_that_is_compiled_again_warns_once_and_is_logged_afterwards(mesh, caplog):
    distributed = mesh.distributed(lambda x: x * 2, name="double")
    with caplog.at_level(logging.INFO, "jaxpp_async"):
        for size in (2, 3, 4):
            await compiler(mesh).compile(distributed, (jnp.zeros(size),))
    told = [record for record in caplog.records if "compiled again" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.WARNING, logging.INFO]


async def test_checks_of_this_thread_that_actors_do_not_make_are_refused(mesh, monkeypatch):
    from jaxpp_async.jax_bridge import jax_config

    monkeypatch.setattr(jax_config, "thread_checks", lambda: {"jax_debug_nans": True})
    distributed = mesh.distributed(lambda x: x - 1)
    with pytest.raises(MeshError, match=r"jax_debug_nans is True here and .* on the actors"):
        await compiler(mesh).compile(distributed, (jnp.zeros(2),))


async def test_settings_that_change_while_a_step_waits_for_its_turn_are_refused(mesh):
    distributed = mesh.distributed(lambda x: x - 2)
    async with compiler(mesh)._compile_lock:
        with jax.enable_x64(True):
            waiting = asyncio.ensure_future(compiler(mesh).compile(distributed, (jnp.zeros(2),)))
            await asyncio.sleep(0)
    with pytest.raises(MeshError, match="other settings of JAX than hold now"):
        await waiting


def compiled(*names: str) -> SimpleNamespace:
    """A compiled step of these executables: the first needs one FLOP, the second two, and so on."""
    recipes = [SimpleNamespace(name=name) for name in names]
    works = [SimpleNamespace(flops=1.0 + k) for k in range(len(names))]
    return SimpleNamespace(placed=SimpleNamespace(recipes=recipes), works=works)


def test_a_device_model_says_how_long_executables_last_and_those_of_no_time_are_left_out():
    model = SimpleNamespace(task_s=lambda work: work.flops - 1)
    assert modelled_seconds(model, compiled("fwd", "bwd", "update"), "train") == {1: 1.0, 2: 2.0}


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), True, "long", None])
def test_a_device_model_that_returns_no_time_is_refused(seconds):
    model = SimpleNamespace(task_s=lambda work: seconds)
    with pytest.raises(MeshError, match=r"^step 'train': device_model.task_s of 'fwd' \(1 FLOPs\) returned"):
        modelled_seconds(model, compiled("fwd"), "train")


def test_a_device_model_that_raises_is_named():
    def task_s(work):
        raise KeyError("fwd")

    with pytest.raises(MeshError, match=r"of 'fwd' .* raised KeyError: 'fwd'; let it return seconds"):
        modelled_seconds(SimpleNamespace(task_s=task_s), compiled("fwd"), "train")
