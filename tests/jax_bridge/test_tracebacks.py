"""What a user sees of a traceback: the user's own lines and the message, and none of what lies between."""

from __future__ import annotations

import asyncio
import dataclasses
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
from jaxpp_async.jax_bridge.tracebacks import HiddenFrames

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
async def test_an_error_of_this_package_has_none_of_its_frames(
    remote_mesh, loss, schedule, batch, kind, inner
):
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


async def test_mistakes_that_are_errors_of_pythons_types(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    step, array = mesh.distributed(step_of()), await mesh.put(W)

    async def plain_with():
        with mesh:
            pass

    cases = {
        "too few": lambda: step([W, W]),
        "a str": lambda: mesh.run(step, [W, "w"], X),
        "no number of an argument": lambda: _called(mesh.distributed, step_of(), donate_argnums=5),
        "no option": lambda: _called(mesh.distributed, step_of(), donate=5),
        "no option of a mesh": lambda: _called(jpp.RemoteMesh, 2, launchr="inline"),
        "no path": lambda: mesh.save(tree=W),
        "no like": lambda: mesh.restore("a"),
        "too many": lambda: mesh.fetch(W, W),
        "no option of save": lambda: mesh.save("a", W, on_progres=print),
        "by name": lambda: mesh.run(step, [W, W], batch=X),
        "no step": mesh.run,
        "too few of init": lambda: step.init(0),
        "float": lambda: _called(float, array),
        "numpy": lambda: _called(np.asarray, array),
        "put": lambda: mesh.put("text"),
        "plain with": plain_with,
    }
    for name, call in cases.items():
        seen = places(await caught(Exception, call))
        assert all(file == __file__ for file, _ in seen), (name, seen)


async def _called(fn, *args, **kwargs):
    return fn(*args, **kwargs)


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
    monkeypatch.setattr(mesh._runner.values, "new_arrays", None)
    seen = places(await caught(TypeError, lambda: mesh.run(mesh.distributed(step_of()), [W, W], X)))
    assert [file for file, _ in seen if file.startswith(PACKAGE)][-1] == f"{PACKAGE}session/step_runner.py"


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

    with pytest.raises(ScheduleError) as info, HiddenFrames():
        schedules.resolve(Bad(), num_stages=2, num_microbatches=2, num_actors=2, where="here")
    cause = info.value.__cause__
    assert isinstance(cause, KeyError)
    assert [f.name for f in traceback.extract_tb(cause.__traceback__)] == ["tasks"]


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Refuses `error.__traceback__ = ...`."""

    code: int


def frozen_cause(ws, x):
    try:
        raise Frozen(7)
    except Frozen as error:
        raise ValueError("bad layer") from error


def frozen_context(ws, x):
    try:
        raise Frozen(7)
    except Frozen:
        raise ValueError("bad layer")  # noqa: B904


class Secretive(Exception):
    """Fails where anybody looks at it."""

    def __getattribute__(self, name):
        raise RuntimeError("no looking")


@pytest.mark.parametrize("loss", [frozen_cause, frozen_context])
async def test_exceptions_that_cannot_be_written_to_keep_nothing_from_being_told(remote_mesh, loss):
    mesh = await remote_mesh(2, launcher="inline")
    error = await caught(ValueError, lambda: mesh.run(mesh.distributed(step_of(loss)), [W, W], X))
    assert isinstance(error.__context__, Frozen)
    for each in (error, error.__context__):
        assert traceback.extract_tb(each.__traceback__)[-1].name == loss.__name__
    assert not any(file.startswith(PACKAGE) for file, _ in places(error))


def test_what_fails_while_an_error_is_shortened_does_not_stand_in_its_place():
    with pytest.raises(ValueError, match="mine"), HiddenFrames():
        raise ValueError("mine") from Secretive()


def test_what_the_caller_was_handling_keeps_its_traceback():
    def schedule_of_none():
        return jpp.GPipe(0)  # its traceback has frames of this package, and none of this call's business

    with pytest.raises(ScheduleError) as info:
        schedule_of_none()
    first = info.value
    before = [entry.tb_lineno for entry in _entries(first)]
    with pytest.raises(StageError) as later:
        try:
            raise first
        except ScheduleError:
            jpp.pipeline_yield(jnp.arange(3))
    assert later.value.__context__ is first
    assert [entry.tb_lineno for entry in _entries(first)][-len(before) :] == before


def _entries(error):
    entry = error.__traceback__
    while entry is not None:
        yield entry
        entry = entry.tb_next


@pytest.mark.parametrize("file", ["<stdin>", "<string>", "model.py", "/home/me/importlib-models/model.py"])
def test_frames_of_the_users_stay_wherever_they_are(file, monkeypatch):
    monkeypatch.chdir(PACKAGE)  # names without a folder are of none
    code = compile(
        "def loss(ws, x):\n    raise ValueError('where am I')\n\ndef mark(x):\n    mark_it(x)", file, "exec"
    )
    names = {"mark_it": jpp.pipeline_yield}
    exec(code, names)
    with pytest.raises(ValueError) as info:
        jax.jit(step_of(names["loss"]))([W, W], X)
    frames = [(f.filename, f.name) for f in traceback.extract_tb(info.value.__traceback__)]
    assert frames[-1] == (file, "loss")
    assert not any(name.startswith(PACKAGE) for name, _ in frames), frames
    with pytest.raises(StageError, match=f"^{file}:5: "):
        names["mark"](jnp.arange(3))


@pytest.mark.parametrize(
    "call",
    [
        lambda: jax.jit(jpp.pipeline_yield)(jnp.arange(3)),
        lambda: jpp.pipeline_yield(jnp.arange(3)),
        lambda: jpp.shard(jnp.ones(3), ("a", "b")),
    ],
    ids=["marker, jit", "marker", "shard"],
)
def test_marks_leave_none_of_their_frames(call):
    with pytest.raises(Exception, match="test_tracebacks") as info:
        call()
    seen = places(info.value)
    assert not any(file.startswith(PACKAGE) for file, _ in seen), seen


async def test_a_timeout_around_a_run_has_none_either(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    step = mesh.distributed(step_of())
    await mesh.run(step, [W, W], X)
    with pytest.raises(TimeoutError) as info:
        async with asyncio.timeout(0):
            await mesh.run(step, [W, W], X)
    cause = info.value.__cause__
    assert isinstance(cause, asyncio.CancelledError)
    seen = places(cause)
    assert not any(file.startswith(PACKAGE) for file, _ in seen), seen
