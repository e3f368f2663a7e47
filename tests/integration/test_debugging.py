"""What a user sees who looks for a mistake: NaNs, options of JAX, arrays that are not here, warnings,
retraces."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import operator
import pickle
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planning import f32, plan_step

import jaxpp_async as jpp
from jaxpp_async.base import install_hints
from jaxpp_async.controller.error_messages import ActorInfo, died_error, launch_error, remote_error
from jaxpp_async.errors import ArrayError, MeshClosedError, ProtocolError, RemoteError, TransferError
from jaxpp_async.launch.process_supervisor import Death
from jaxpp_async.protocol.actor_info import ProcessRank
from jaxpp_async.protocol.messages import Failed, step_id
from jaxpp_async.testing import assert_close

W = np.eye(4, dtype=np.float32)
X = np.arange(1, 25, dtype=np.float32).reshape(3, 2, 4) / 10


def loss_fn(ws, x):
    h = jpp.pipeline_yield(jnp.tanh(x @ ws[0]))
    return jnp.sum(jnp.log(h @ ws[1]))


def train(ws, batch, count=0, *, schedule=jpp.Std1F1B(2)):  # noqa: B008  # a frozen value
    def of_one(x):
        value, grads = jax.value_and_grad(loss_fn)(ws, x)
        return grads, value, value

    grads, losses, worst = jpp.accumulate_grads(
        of_one, schedule, reduce=(jpp.Mean(), jpp.Stack(), jpp.Max())
    )(batch)
    return jax.tree.map(lambda w, g: w - 0.001 * g, ws, grads), losses, worst, count + 1


def line_of(fn, text):
    """`file:line` of the line of a function that has this text."""
    lines, first = inspect.getsourcelines(fn)
    (found,) = [first + k for k, line in enumerate(lines) if text in line]
    return f"{__file__}:{found}"


@pytest.fixture
async def mesh(remote_mesh):
    return await remote_mesh(2, launcher="inline")


@pytest.fixture
def config():
    """`config(name, value)` sets an option of JAX for one test."""
    before = {}

    def update(name, value):
        before.setdefault(name, getattr(jax.config, name))
        jax.config.update(name, value)

    yield update
    for name, value in before.items():
        jax.config.update(name, value)


# ---------------------------------------------------------------- options of JAX


async def test_debug_nans_names_actor_microbatch_and_step(remote_mesh, config):
    config("jax_debug_nans", True)
    mesh = await remote_mesh(2, launcher="inline", max_inflight=1)  # the failure closes it
    step = mesh.distributed(train, donate_argnums=0)
    state, *_ = await mesh.run(step, [W, W], X)  # JAX itself checks the first call of an executable only
    poisoned = X.copy()
    poisoned[2] *= -1
    with pytest.raises(RemoteError) as error:
        await mesh.run(step, state, poisoned)
    first, second, *_ = str(error.value).splitlines()
    assert (
        first.startswith("actor 1 (")
        and ", step 1, fwd" in first
        and "(stage 1, mb 2): FloatingPointError" in first
    )
    assert first.endswith(
        f"{line_of(loss_fn, 'jnp.log')}: invalid value (nan) encountered in log; jax_debug_nans is on"
    )
    assert second.startswith("  at #")
    assert (error.value.actor, error.value.step) == (1, 1)
    # What was donated to it says where it went.
    with pytest.raises(ArrayError, match=r"it was donated to step 'train', which failed: actor 1 .*nan"):
        await state[0]
    with pytest.raises(MeshClosedError):
        await mesh.run(step, [W, W], X)


POISONED = np.concatenate([X[:2], -X[2:]])  # the logarithm of the last microbatch


@pytest.mark.parametrize("run", [train, jax.jit(train)], ids=["eager", "jit"])
def test_plain_jax_names_the_operation_and_the_microbatch_of_a_nan(run, config):
    config("jax_debug_nans", True)
    line = loss_fn.__code__.co_firstlineno + 2
    with pytest.raises(
        FloatingPointError, match=rf"integration/test_debugging.py:{line}: .*\(nan\).* in log, microbatch 2"
    ):
        run([W, W], POISONED)


def of_values(value):
    """A step whose loop adds up the gradients of `value(w, x)`."""

    def step(w, batch):
        grads, values = jpp.accumulate_grads(
            lambda x: jax.value_and_grad(lambda w: jnp.sum(value(w, x)))(w)[::-1], jpp.Std1F1B(2)
        )(batch)
        return w - 0.1 * grads, values

    return step


def in_a_scan(w, x):
    def layer(h, _):
        h = h - 1.5
        return jnp.sqrt(h), h

    h, _ = jax.lax.scan(layer, jpp.pipeline_yield(x @ w) + 15.6, None, length=3)
    return h


@jax.checkpoint
def block(h):
    h = jnp.tanh(h)
    return jnp.log(h)


def in_a_checkpoint(w, x):
    return block(jpp.pipeline_yield(x @ w))


def backward_alone(w, x):
    """The square root of zero is finite, its slope is not."""
    h = jpp.pipeline_yield(x @ w)
    return jnp.sqrt(h * jnp.maximum(jnp.sign(h), 0))


def in_stage_0(w, x):
    h = jnp.arccosh(x @ w + 1)
    return jpp.pipeline_yield(h)


def after_the_loop(w, batch):
    losses = jpp.accumulate_grads(
        lambda x: jnp.sum(jpp.pipeline_yield(x @ w)), jpp.GPipe(2), reduce=jpp.Stack()
    )(batch)
    total = losses.min()
    return jnp.sqrt(total), losses


SIGNS = np.concatenate([np.abs(X[:2]), -np.abs(X[2:])])
"""The last microbatch is negative."""

NANS = {
    "in a scan": (of_values(in_a_scan), SIGNS, in_a_scan, "jnp.sqrt", "sqrt", "(stage 1, mb 2)"),
    "in a checkpoint": (of_values(in_a_checkpoint), SIGNS, block, "jnp.log", "log", "(stage 1, mb 2)"),
    "in a backward": (of_values(backward_alone), SIGNS, backward_alone, "jnp.sqrt", "mul", "(stage 1, mb 2)"),
    "in the first stage": (
        of_values(in_stage_0),
        SIGNS,
        in_stage_0,
        "jnp.arccosh",
        "acosh",
        "(stage 0, mb 2)",
    ),
    "after the loop": (after_the_loop, SIGNS, after_the_loop, "jnp.sqrt", "sqrt", "outer("),
}


@pytest.mark.parametrize("name", NANS)
async def test_a_nan_on_a_mesh_is_named_with_operation_and_line(name, remote_mesh, config):
    step, batch, fn, text, operation, task = NANS[name]
    config("jax_debug_nans", True)
    mesh = await remote_mesh(2, launcher="inline", max_inflight=1)
    distributed = mesh.distributed(step, donate_argnums=0 if "after" not in name else ())
    await mesh.run(distributed, W, np.abs(X))
    with pytest.raises(RemoteError) as error:
        await mesh.run(distributed, W, batch)
    first = str(error.value).splitlines()[0]
    assert f"{line_of(fn, text)}: invalid value (nan) encountered in {operation};" in first, first
    assert task in first and error.value.step, first


@pytest.mark.parametrize("name", [name for name in NANS if name != "after the loop"])
def test_a_nan_in_plain_jax_is_named_with_operation_and_line(name, config):
    step, batch, fn, text, operation, _ = NANS[name]
    config("jax_debug_nans", True)
    says = re.escape(f"{line_of(fn, text)}: invalid value (nan) encountered in {operation}, microbatch 2")
    with pytest.raises(FloatingPointError, match=says):
        jax.jit(step)(W, batch)


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("put", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_a_nan_of_the_batch_is_of_its_microbatch_in_plain_jax(wrap, put, config):
    batch = X.copy()
    batch[2, 0, 1] = np.nan
    batch = {"x": put(batch), "y": put(X)}
    config("jax_debug_nans", True)
    step = of_values(lambda w, mb: jpp.pipeline_yield(mb["x"] @ w) + mb["y"])
    with pytest.raises(
        FloatingPointError, match=r"in dot_general, microbatch 2; batch\['x'\] had one already"
    ):
        wrap(step)(W, batch)
    with pytest.raises(
        FloatingPointError, match=r"microbatch 0; a value that the loop's function closes over had"
    ):
        wrap(step)(W * np.nan, {"x": X, "y": X})


@pytest.mark.parametrize("options", [{}, {"spmd_mesh": {"data": 2}}], ids=["one device", "two devices"])
async def test_a_nan_that_comes_with_an_argument_is_said_to(options, remote_mesh, config):
    config("jax_debug_nans", True)
    mesh = await remote_mesh(2, launcher="inline", max_inflight=1, **options)

    def value(w, mb):
        h = mb["x"] @ w["a"]
        return jpp.pipeline_yield(h) @ w["b"]

    def step(w, batch):
        return jpp.accumulate_grads(lambda mb: jnp.sum(value(w, mb)), jpp.GPipe(2))(batch)

    batch = {"x": X.copy()}
    batch["x"][1, 0, 0] = np.nan
    with pytest.raises(RemoteError) as error:
        await mesh.run(mesh.distributed(step), {"a": W, "b": W}, batch)
    first = str(error.value).splitlines()[0]
    assert "fwd(stage 0, mb 1)" in first
    assert (
        f"{line_of(value, 'h = mb')}: invalid value (nan) encountered in dot_general; batch['x'] had" in first
    )


async def test_an_infinity_is_named_with_operation_and_line(remote_mesh, config):
    config("jax_debug_infs", True)
    mesh = await remote_mesh(2, launcher="inline", max_inflight=1)

    def step(w, batch):
        def scaled(x):
            return jnp.max((jpp.pipeline_yield(x @ w) + 1) / x[0, 0])

        return jpp.accumulate_grads(scaled, jpp.GPipe(2), reduce=jpp.Max())(batch)

    distributed = mesh.distributed(step)
    assert await (await mesh.run(distributed, W, X)) == jax.jit(step)(W, X)
    batch = X.copy()
    batch[1, 0, 0] = 0
    where = line_of(step, "return jnp.max")
    with pytest.raises(RemoteError, match=rf"mb 1\): .*{where}: invalid value \(inf\) .* in div;"):
        await mesh.run(distributed, W, batch)


async def test_processes_name_the_operation_of_a_nan_too(remote_mesh, config):
    config("jax_debug_nans", True)
    mesh = await remote_mesh(2, launcher="local", max_inflight=1)
    with pytest.raises(RemoteError) as error:
        await mesh.run(mesh.distributed(train, donate_argnums=0), [W, W], POISONED)
    first = str(error.value).splitlines()[0]
    assert (
        f"{line_of(loss_fn, 'jnp.log')}: invalid value (nan) encountered in log" in first and "mb 2)" in first
    )


def test_without_jit_jax_stops_at_a_nan():
    # For this thread: JAX's own context managers may have left a value of the thread's behind, which wins.
    with (
        jax.debug_nans(True),
        jax.disable_jit(),
        pytest.raises(FloatingPointError, match="encountered in log") as caught,
    ):
        jax.jit(train)([W, W], POISONED)
    assert any(frame.name == "loss_fn" for frame in caught.traceback)


def test_without_jit_the_loop_has_values_and_the_same_results(config):
    """A debugger sees arrays; every operator and keys are joined as in the scan."""
    seen = []

    def step(w, batch):
        def of_one(mb, i):
            value, grads = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(jpp.pipeline_yield(mb["x"] @ w))))(w)
            seen.append(mb["x"])
            return grads, {"loss": value, "key": mb["key"]}, mb["x"], i, value > 0, 1.0

        reduce = (jpp.Sum(), jpp.Stack(), jpp.Concat(axis=1), jpp.Max(), jpp.Min(), jpp.Mean())
        return jpp.accumulate_grads(of_one, jpp.GPipe(2), reduce=reduce, pass_index=True)(batch)

    batch = {"x": X, "key": jax.random.split(jax.random.key(0), 3)}
    want = jax.jit(step)(W, batch)
    seen.clear()
    config("jax_debug_infs", True)
    with jax.disable_jit():
        got = step(W, batch)
    assert [float(x[0, 0]) for x in seen] == [float(x[0, 0]) for x in X]

    def data(tree):
        return jax.tree.map(lambda x: jax.random.key_data(x) if x.dtype == batch["key"].dtype else x, tree)

    assert_close(data(got), jax.device_get(data(want)))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), got) == jax.tree.map(lambda x: (x.shape, x.dtype), want)


async def test_debug_infs_looks_at_results_and_not_at_the_start_of_a_maximum(mesh, config):
    config("jax_debug_infs", True)
    _, losses, _, _ = await mesh.run(mesh.distributed(train), [W, W], X)
    assert np.isfinite(await losses).all()


async def test_x64_from_end_to_end(mesh, config):
    config("jax_enable_x64", True)
    args = ([W.astype(np.float64), W.astype(np.float64)], X.astype(np.float64), np.int64(2**40))
    got = await mesh.fetch(await mesh.run(mesh.distributed(train), *args))
    assert_close(got, jax.device_get(jax.jit(train)(*args)), rtol=1e-12)
    assert got[0][0].dtype == np.float64 and got[3] == 2**40 + 1


async def test_strict_promotion_precision_and_disabled_jit(mesh, config):
    config("jax_numpy_dtype_promotion", "strict")
    config("jax_default_matmul_precision", "highest")
    args = ([W, W], X, np.int32(3))
    want = jax.device_get(jax.jit(train)(*args))
    with jax.disable_jit():
        got = await mesh.fetch(await mesh.run(mesh.distributed(train), *args))
    assert_close(got, want)


# ---------------------------------------------------------------- arrays that are not here


MISUSES = {
    "float()": float,
    "int()": int,
    "bool()": bool,
    "len()": len,
    "iteration": list,
    "indexing": lambda a: a[0],
    "conversion to numpy": np.asarray,
    "conversion to numpy (by jax)": jnp.asarray,
    "`+`": lambda a: a + 1,
    "`-`": lambda a: 1 - a,
    "`*`": lambda a: a * a,
    "`@`": lambda a: operator.matmul(a, W),
    "`<`": lambda a: a < 1,
    "`==`": lambda a: a == 3,
    "the format '.3f'": lambda a: f"{a:.3f}",
    "conversion to numpy (of arithmetic)": lambda a: np.ones(3) + a,
    "copy.copy()": copy.copy,
    "copy.deepcopy()": copy.deepcopy,
    "pickling": pickle.dumps,
}


@pytest.mark.parametrize("what", MISUSES)
async def test_a_value_that_is_not_here(what, mesh):
    array = await mesh.put(X)
    with pytest.raises(TypeError) as error:
        MISUSES[what](array)
    assert str(error.value).startswith(
        what.partition(" (")[0] + " needs the value of RemoteArray(float32[3, 2, 4]"
    )
    assert "`await` the array first" in str(error.value) and "inside a step" in str(error.value)
    assert f"{array}" == str(array) == repr(array)


OF_JAX = {
    "mean": jnp.mean,
    "jit": jax.jit(lambda tree: tree["a"] + 1),
    "grad": jax.grad(jnp.sum),
    "vmap": jax.vmap(jnp.sum),
    "jvp": lambda a: jax.jvp(jnp.sin, (a,), (a,)),
    "two of them": lambda a: jnp.add(a, a),
    "where": lambda a: jnp.where(True, a, a),
    "scan": lambda a: jax.lax.scan(lambda c, x: (c, x), 0.0, a),
    "stack": lambda a: jnp.stack([a, a]),
}


@pytest.mark.parametrize("name", OF_JAX)
async def test_functions_of_jax_say_that_its_value_is_not_here(name, mesh):
    array = await mesh.put(X)
    with pytest.raises(
        ArrayError, match=r"function of JAX needs the value of RemoteArray\(.*`await` the array first"
    ):
        OF_JAX[name]({"a": array} if name == "jit" else array)


async def test_its_type_is_there_for_whoever_asks_for_no_value(mesh, capfd):
    """Nor does C++, which asks for the same attribute, print anything."""
    array = await mesh.put(X)
    assert jax.eval_shape(jnp.mean, array).shape == () and jnp.shape(array) == X.shape
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of JAX: it is no array
        assert (jnp.size(array), jnp.size(array, 0)) == (X.size, X.shape[0])  # counts of parameters
    assert jax.make_jaxpr(jnp.sin)(array).in_avals[0].shape == X.shape
    assert not hasattr(array, "__jax_array__")
    for fn in (jax.device_put, jax.lax.sin):
        with pytest.raises(TypeError, match="RemoteArray"):
            fn(array)
    assert "ignored" not in capfd.readouterr().err


@pytest.mark.parametrize("name", ["item", "mean", "T", "tolist", "block_until_ready", "at"])
async def test_an_attribute_of_arrays_that_are_here(name, mesh):
    array = await mesh.put(X)
    with pytest.raises(AttributeError, match=f"no attribute '{name}': .* `await` the array first"):
        getattr(array, name)
    assert (
        not hasattr(array, "grad") and array.size == X.size and array == array and array != await mesh.put(X)
    )


# ---------------------------------------------------------------- what is said without an error


def test_a_marker_outside_every_loop_warns_with_its_line(recwarn):
    def step(w, x):
        return jpp.pipeline_yield(x @ w).sum()

    plan_step(step, f32(4, 4), f32(2, 4))
    (warning,) = recwarn.list
    assert (warning.filename, warning.lineno) == (__file__, step.__code__.co_firstlineno + 1)
    assert "ends no stage: this part of the step is not pipelined" in str(warning.message)
    plan_step(train, [f32(4, 4), f32(4, 4)], f32(3, 2, 4), f32())
    assert len(recwarn) == 1


async def test_idle_actors_are_named(remote_mesh, caplog):
    caplog.set_level(logging.WARNING, "jaxpp_async")
    mesh = await remote_mesh(3, launcher="inline")
    await mesh.distributed(train).compile([W, W], X)
    assert "step 'train' leaves actors [2] of 3 idle" in caplog.text
    caplog.clear()
    await mesh.distributed(lambda w: w + 1).compile(W)
    assert not caplog.text


async def test_compiling_says_how_many_microbatches_there_are_and_their_shapes(mesh, caplog):
    """A batch that was not cut into microbatches shows at once, before it has run as 64 of them."""
    caplog.set_level(logging.INFO, "jaxpp_async")

    def step(w, batch):
        def loss(mb):
            return jnp.sum(jpp.pipeline_yield(mb["x"] @ w)) * mb["n"]

        return jpp.accumulate_grads(loss, jpp.GPipe(2))(batch)

    d = mesh.distributed(step)
    for _ in range(2):  # once a compiled form
        await mesh.run(d, W, {"x": X, "n": np.ones(3, np.int32)})
    (said,) = [r.getMessage() for r in caplog.records if "microbatches" in r.getMessage()]
    assert said.startswith("step 'step': 3 microbatches of batch['n'] int32[], batch['x'] float32[2,4] (")
    assert said.endswith(f"({line_of(step, 'return jpp')})")
    await d.compile(W, {"x": X[:1], "n": np.ones(1, np.int32)})
    assert "1 microbatch of batch['n']" in caplog.text


def shrinking(state, batch):
    return {"w": (state["w"] @ batch).astype(jnp.bfloat16), "n": state["n"] + 1}, batch.sum()


STATE = {"w": W, "n": np.int32(0)}
DONATIONS = {
    "a state of another type": (
        shrinking, (STATE, W), ["state['w'] float32[4, 4] as result[0]['w'] bfloat16[4, 4]"], ["'n'"]
    ),
    "an array that grows": (
        lambda w, x: (jnp.stack([w, w]), x.sum()), (W, X),
        ["w float32[4, 4] as result[0] float32[2, 4, 4]"], []
    ),
    "alone": (lambda w: w[0], (W,), ["w float32[4, 4] as result float32[4]"], []),
    "elsewhere in the result": (
        lambda state: (1.0, {"new": shrinking(state, W)[0]}), (STATE,),
        ["state['w'] f", "result[1]['new']['w']"], []
    ),
    "as it was": (lambda state, x: (x.sum(), state), (STATE, X), [], []),
    "handed back elsewhere": (
        lambda state: {"w": state["n"], "n": state["w"]}, ({"w": W, "n": W[0]},), [], []
    ),
    "a batch in whose place the loss stands": (lambda batch, w: (batch.sum(), w + 1), (X, W), [], []),
    "no result continues it": (lambda w, state: ({"loss": w.sum()}, state), (W, STATE), [], []),
}  # fmt: skip


@pytest.mark.parametrize("name", DONATIONS)
async def test_a_donated_argument_that_comes_back_as_another_warns(name, mesh, recwarn):
    fn, args, says, not_said = DONATIONS[name]
    step = mesh.distributed(fn, donate_argnums=0)
    for _ in range(2):
        await mesh.run(step, *args)
    told = [w for w in recwarn if "Some donated buffers were not usable" in str(w.message)]
    assert len(told) == bool(says), "once, when it is compiled"
    for text in says:
        assert text in str(told[0].message) and told[0].filename == __file__
    assert not any(text in str(told[0].message) for text in not_said)


# ---------------------------------------------------------------- failures: the first line tells the cause


ACTOR = ActorInfo(1, "node", 77, ("cpu:0",), "ready")
LAST_WORDS = (
    "Traceback (most recent call last):",
    '  File "x.py", line 1',
    "ModuleNotFoundError: No module named 'x'",
)
NO_MODULE = "ModuleNotFoundError: No module named 'x'"
RUN = '#12 run    "fwd(stage 1, mb 2)" exe 2 (b10) -> (b14)'
FIRST_LINES = [
    (
        launch_error(ProcessRank(1), "exited with code 1", LAST_WORDS),
        f"actor 1 exited with code 1: {NO_MODULE}",
    ),
    (
        died_error(ACTOR, Death(1, LAST_WORDS), step_id(3)),
        f"actor 1 .* exited with code 1 .*during step 3: {NO_MODULE}",
    ),
    (launch_error(ProcessRank(1), "did not start", ("hello",)), "actor 1 did not start"),
    (
        remote_error(ACTOR, Failed("ValueError", "no", "Traceback ...", step_id(3), RUN)),
        r"actor 1 \(host node, pid 77\), step 3, fwd\(stage 1, mb 2\): ValueError: no",
    ),
]


def test_what_fails_a_step_without_being_anyones_code_keeps_its_class():
    for cls in (ProtocolError, TransferError):
        name = f"jaxpp_async.errors.{cls.__name__}"
        assert type(remote_error(ACTOR, Failed(name, "no", "Traceback ...", step_id(3), RUN))) is cls
        assert type(remote_error(ACTOR, Failed(name, "no", "Traceback ..."))) is RemoteError  # a request's


@pytest.mark.parametrize(
    ("kind", "message", "said"),
    [
        ("jax.errors.JaxRuntimeError", "RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.", True),
        ("MemoryError", "", True),
        ("ValueError", "no", False),
    ],
)
def test_an_actor_without_memory_is_told_in_plain_words(kind, message, said):
    assert ("the actor ran out of memory; `" in str(remote_error(ACTOR, Failed(kind, message, "")))) == said


@pytest.mark.parametrize(("error", "first"), FIRST_LINES)
def test_the_first_line_tells_the_cause(error, first):
    lines = str(error).splitlines()
    assert re.fullmatch(first, lines[0]) and len(lines) > 1


# ---------------------------------------------------------------- tests of users


async def test_a_mesh_of_the_session_on_another_loop(remote_mesh):
    def elsewhere():
        with pytest.raises(RuntimeError, match='asyncio_default_test_loop_scope = "session"'):
            asyncio.run(remote_mesh(2, launcher="inline"))

    await asyncio.to_thread(elsewhere)


def test_assert_close_shows_the_line_of_the_test():
    with pytest.raises(AssertionError, match="differs by 1") as error:
        assert_close({"a": 1.0}, {"a": 2.0})
    *_, last = error.traceback
    assert last.name == "assert_close" and last.ishidden(error)
    with pytest.raises(AssertionError) as error:
        assert_close({"a": 1.0, "b": 2.0, "c": [3.0] * 8}, {"a": 2.0, "b": 2.0, "c": [1.0] * 8})
    first, *others, last = str(error.value).splitlines()
    assert first == "['a']: differs by 1, allowed 2e-05" and len(others) == 4
    assert last == "9 of 10 leaves differ"


# ---------------------------------------------------------------- compiled forms


async def test_what_is_traced_again(mesh):
    """A new shape, dtype or static value traces; everything else finds what was compiled."""
    traced = []

    def step(ws, batch, scale):
        traced.append((batch.shape, str(batch.dtype), scale))
        losses = jpp.accumulate_grads(lambda x: scale * jpp.pipeline_yield(x @ ws[0]).sum(), jpp.GPipe(2))(
            batch
        )
        return losses

    d = mesh.distributed(step, static_argnums=2)
    half = X.astype(jnp.bfloat16)
    for batch, scale, fresh in [
        (X, 2, True), (X + 1, 2, False), (X, 3, True), (X[:2], 2, True), (half, 2, True), (X, 2, False),
        (half, 2, False), (await mesh.put(X + 1), 2, False), (jnp.asarray(X), 3, False),
    ]:  # fmt: skip
        known = len(traced)
        got = await (await mesh.run(d, [W, W], batch, scale))
        assert (len(traced) > known) == fresh
        host = np.asarray(await mesh.fetch(batch), np.float32)
        np.testing.assert_allclose(got, scale * host.sum(), rtol=1e-2)


async def test_train_and_evaluate_place_one_state_in_two_ways(mesh, caplog):
    """The weight moves to where a step takes it, once and said; a report says where each step has it."""
    caplog.set_level(logging.INFO, "jaxpp_async")

    def evaluate(ws, batch):
        return jpp.accumulate_grads(lambda x: jnp.sum(x @ ws[0] @ ws[1]), jpp.GPipe(1))(batch)

    step, check = mesh.distributed(train), mesh.distributed(evaluate)
    state = [W, W]
    for moves in (1, 2):
        state, *_ = await mesh.run(step, state, X)
        want = jax.jit(evaluate)(await mesh.fetch(state), X)
        for _ in range(2):
            assert_close(await (await mesh.run(check, state, X)), jax.device_get(want))
        assert caplog.text.count("moving ws[1] (64 bytes) from actor 1 to [0]") == moves
    places = [
        {p.name: p.actors for p in (await s.compile(state, X)).report().inputs if p.name.startswith("ws")}
        for s in (step, check)
    ]
    assert places == [{"ws[0]": (0,), "ws[1]": (1,)}, {"ws[0]": (0,), "ws[1]": (0,)}]


def test_messages_name_a_page_where_it_lies(monkeypatch, tmp_path):
    """A project of one's own has no docs/ beside it."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "restarts.md").touch()
    for source in (str(tmp_path), f"-e {tmp_path}"):
        monkeypatch.setattr(install_hints, "pip_source", lambda source=source: source)
        assert install_hints.page("restarts.md") == f"{tmp_path}/docs/restarts.md"
    for source in ("jaxpp-async", f"gone: {tmp_path}", "jaxpp-async @ git+https://example.com/x@1"):
        monkeypatch.setattr(install_hints, "pip_source", lambda source=source: source)
        assert install_hints.page("restarts.md") == "docs/restarts.md in jaxpp-async's repository"
