"""What a user sees of a traceback: the user's own lines and the message, and none of what lies between."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp_async as jpp
from jaxpp_async.errors import ArrayError, MeshError, ScheduleError, StageError, UnsupportedError
from jaxpp_async.tracebacks import hidden_frames

W = np.eye(4, dtype=np.float32)
X = np.ones((4, 2, 4), np.float32)
PACKAGE = os.path.dirname(inspect.getsourcefile(jpp) or "") + os.sep


def good_loss(ws, x):
    return jnp.sum(jpp.pipeline_yield(jnp.tanh(x @ ws[0])) @ ws[1])


def no_float(ws, x):
    return jpp.pipeline_yield(jnp.arange(3)).sum()


def in_a_cond(ws, x):
    return jax.lax.cond(x.sum() > 0, jpp.pipeline_yield, jnp.tanh, x @ ws[0]).sum()


def wrong_shapes(ws, x):
    return jnp.sum(jpp.pipeline_yield(jnp.tanh(x @ ws[0])) @ ws[1][:3])


def step_of(loss=good_loss, schedule=None):
    def step(ws, batch):
        def of_one(x):
            return jax.grad(loss)(ws, x)

        return jpp.accumulate_grads(of_one, schedule or jpp.GPipe(2))(batch)

    return step


def places(error: BaseException) -> list[tuple[str, str]]:
    """File and function of each frame from this file on."""
    frames = [(f.filename, f.name) for f in traceback.extract_tb(error.__traceback__)]
    return frames[next(k for k, (file, _) in enumerate(frames) if file == __file__) :]


async def caught(kind: type[Exception], call: Callable) -> Exception:
    with pytest.raises(kind) as info:
        await call()
    return info.value


@pytest.mark.parametrize(
    "loss, schedule, batch, kind, inner",
    [
        (good_loss, jpp.GPipe(3), X, ScheduleError, []),  # found by a pass, far from the user's function
        (in_a_cond, None, X, UnsupportedError, []),
        (good_loss, None, np.float32(1), StageError, ["step"]),  # found in the user's call
        (no_float, None, X, StageError, ["step", "of_one", "no_float"]),
    ],
    ids=["schedule", "marker in a cond", "batch", "nothing to mark"],
)
async def test_an_error_of_this_package_has_none_of_its_frames(remote_mesh, loss, schedule, batch, kind, inner):
    mesh = await remote_mesh(2, launcher="inline")
    step = mesh.distributed(step_of(loss, schedule))
    calls = {
        "run": lambda: mesh.run(step, [W, W], batch),
        "submit": lambda: mesh.submit(step, [W, W], batch),
        "call": lambda: _awaited(step([W, W], batch)),
        "compile": lambda: step.compile([W, W], batch),
    }
    for name, call in calls.items():
        error = await caught(kind, call)
        seen = places(error)
        assert all(file == __file__ for file, _ in seen), (name, seen)
        assert [function for _, function in seen][-len(inner) :] == inner or not inner, (name, seen)


async def _awaited(awaitable):
    return await awaitable


async def test_options_arrays_and_values(remote_mesh):
    async def made():
        jpp.RemoteMesh(2, launcher="sssh")  # type: ignore[arg-type]

    mesh = await remote_mesh(2, launcher="inline")
    array = await mesh.put(W)
    await array.delete()
    cases = [
        (MeshError, made),
        (ArrayError, lambda: _awaited(array)),
        (ArrayError, lambda: mesh.fetch([array])),
        (ArrayError, lambda: mesh.put(W, like=3)),
    ]
    for kind, call in cases:
        seen = places(await caught(kind, call))
        assert all(file == __file__ for file, _ in seen), seen


async def test_an_error_of_the_users_own_keeps_its_line_and_what_jax_says_of_it(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    error = await caught(TypeError, lambda: mesh.run(mesh.distributed(step_of(wrong_shapes)), [W, W], X))
    seen = places(error)
    assert not any(file.startswith(PACKAGE) for file, _ in seen), seen
    mine = [function for file, function in seen if file == __file__]
    assert mine[-3:] == ["step", "of_one", "wrong_shapes"]
    assert seen[-1][0] != __file__  # the frames in which JAX found it, as under plain `jax.jit`


def test_without_a_mesh_the_loop_leaves_none_of_its_frames():
    with pytest.raises(TypeError) as info:
        jax.jit(step_of(wrong_shapes))([W, W], X)
    seen = places(info.value)
    assert not any(file.startswith(PACKAGE) for file, _ in seen), seen


async def test_a_bug_of_this_package_is_shown_from_the_users_line_on(remote_mesh, monkeypatch):
    mesh = await remote_mesh(2, launcher="inline")
    monkeypatch.setattr(mesh._runner._values, "new_arrays", None)
    seen = places(await caught(TypeError, lambda: mesh.run(mesh.distributed(step_of()), [W, W], X)))
    assert [file for file, _ in seen if file.startswith(PACKAGE)][-1] == f"{PACKAGE}running.py"


async def test_jax_s_switch_shows_everything(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    jax.config.update("jax_traceback_filtering", "off")
    try:
        error = await caught(
            ScheduleError, lambda: mesh.run(mesh.distributed(step_of(schedule=jpp.GPipe(3))), [W, W], X)
        )
    finally:
        jax.config.update("jax_traceback_filtering", "auto")
    assert sum(file.startswith(PACKAGE) for file, _ in places(error)) > 5


def test_causes_stay_and_are_shortened_too():
    class Bad:
        num_stages = 2

        def tasks(self, num_microbatches, num_actors):
            return {}["missing"]

    from jaxpp_async import schedules

    with pytest.raises(ScheduleError) as info, hidden_frames:
        schedules.resolve(Bad(), num_stages=2, num_microbatches=2, num_actors=2, where="here")
    cause = info.value.__cause__
    assert isinstance(cause, KeyError)
    assert [f.name for f in traceback.extract_tb(cause.__traceback__)] == ["tasks"]
