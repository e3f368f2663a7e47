"""Every mistake a user can make, and what the error says: where, what, and what to do next.

Each is raised before anything reaches an actor, and leaves the mesh as it was: a good step runs after it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp_async as jpp
from jaxpp_async import Task
from jaxpp_async.errors import (
    ArrayError,
    MeshClosedError,
    MeshError,
    ScheduleError,
    ShardingError,
    StageError,
)
from jaxpp_async.errors import UnsupportedError as Unsupported

W = np.eye(4, dtype=np.float32)
X = np.ones((4, 2, 4), np.float32)


def loss_fn(ws, x):
    return jnp.sum(jnp.square(jpp.pipeline_yield(jnp.tanh(x @ ws[0]), name="middle") @ ws[1]))


def step_of(loss=loss_fn, schedule: Any = None, **options):
    def step(ws, batch):
        def of_one(x):
            value, grads = jax.value_and_grad(loss)(ws, x)
            return grads, value

        grads, losses = jpp.accumulate_grads(of_one, schedule or jpp.GPipe(2), **options)(batch)
        return jax.tree.map(lambda w, g: w - g, ws, grads), losses

    return step


def loop_over(fn, num_stages=2, **options):
    """A step that only runs `fn(ws, microbatch)` over the batch."""

    def step(ws, batch):
        return jpp.accumulate_grads(lambda mb: fn(ws, mb), jpp.GPipe(num_stages), **options)(batch)

    return step


LOOP_LINE = (step_of, "jpp.accumulate_grads(")
OTHER_LOOP_LINE = (loop_over, "jpp.accumulate_grads(")


def line_of(where: tuple[Callable, str]) -> str:
    """`file:line` of the line of a function that has this text."""
    fn, text = where
    lines, first = inspect.getsourcelines(fn)
    (found,) = [first + k for k, line in enumerate(lines) if text in line]
    return f"{inspect.getsourcefile(fn)}:{found}"


@dataclass
class Case:
    """A step, its arguments, and what its error must say.

    Args:
        says: pieces of the message, as regular expressions, in order.
        at: a function and the text of one of its lines: the user's line, with which the message begins.
        mesh: `"plain"`, or `"data"` for actors of two devices.
    """

    step: Any
    error: type[Exception]
    says: list[str]
    at: tuple[Callable, str] | None = None
    args: tuple[Any, ...] = ([W, W], X)
    options: Any = None
    mesh: str = "plain"


def check(error: BaseException, case: Case) -> None:
    assert isinstance(error, case.error)
    message = str(error)
    if case.at is not None:
        assert message.startswith(line_of(case.at) + ":"), message
    assert re.search(".*".join(case.says), message, re.DOTALL), message


@pytest.fixture
async def meshes(remote_mesh):
    return {
        "plain": await remote_mesh(2, launcher="inline"),
        "data": await remote_mesh(2, launcher="inline", spmd_mesh={"data": 2}),
    }


GOOD = step_of()


class Untouched:
    """Within this context nothing may be loaded on an actor or run there; after it, a good step runs."""

    good_steps: dict[Any, Any] = {}  # noqa: RUF012  # one a mesh, compiled once for all tests

    def __init__(self, mesh, monkeypatch):
        self.mesh, self.monkeypatch = mesh, monkeypatch

    async def __aenter__(self):
        def refuse(*args, **options):
            raise AssertionError("the error came too late: an actor was asked")

        for name in ("load", "start_step", "put"):
            self.monkeypatch.setattr(self.mesh._controller, name, refuse)

    async def __aexit__(self, *exc):
        self.monkeypatch.undo()
        step = self.good_steps.setdefault(self.mesh, self.mesh.distributed(GOOD))
        _, losses = await self.mesh.run(step, [W, W], X)
        assert np.isfinite(await losses).all()


# ---------------------------------------------------------------- the loop's batch and results

BATCHES = {
    "no microbatch axis": Case(
        GOOD, StageError,
        ["batch is a scalar and has no microbatch axis", r"every leaf .* is \(num_microbatches, "],
        LOOP_LINE, ([W, W], np.float32(3)),
    ),
    "one leaf without": Case(
        loop_over(lambda ws, mb: mb["x"].sum(), 1), StageError,
        [r"batch\['n'\] is a scalar", "close over values"],
        OTHER_LOOP_LINE, ([W], {"x": X, "n": 3}),
    ),
    "unequal leading sizes": Case(
        loop_over(lambda ws, mb: mb["x"].sum() + mb["y"].sum(), 1), StageError,
        ["unequal numbers of microbatches", r"batch\['x'\]: 4, batch\['y'\]: 2", "close over"],
        OTHER_LOOP_LINE, ([W], {"x": X, "y": X[:2]}),
    ),
    "no leaves": Case(
        loop_over(lambda ws, mb: ws[0].sum(), 1), StageError, ["without arrays", r"pass leaves \(num_microb"],
        OTHER_LOOP_LINE, ([W], {}),
    ),
    "no microbatches": Case(
        GOOD, StageError, [r"batch has shape \(0, 2, 4\)", "at least one"], LOOP_LINE, ([W, W], X[:0])
    ),
    "the loss first": Case(
        loop_over(jax.value_and_grad(loss_fn)), TypeError,
        ["the function returns the loss first", r"gradients such as result\[1\]\[0\] \(float32\[4, 4\]\)",
         r"  return grads, loss\n",
         r"  loss, grads = accumulate_grads\(..., reduce=\(Stack\(\), Sum\(\)\)\)\(batch\)"],
        OTHER_LOOP_LINE,
    ),
    "the loss and more first": Case(
        loop_over(jax.value_and_grad(lambda *a: (loss_fn(*a), a[1]), has_aux=True)), TypeError,
        ["the function returns the loss first", r"  \(loss, aux\), grads = jax.val",
         r"return grads, \(loss, aux\)"],
        OTHER_LOOP_LINE,
    ),
    "a batch that is not cut": Case(
        step_of(num_microbatches=2), StageError,
        [r"batch has shape \(8, 4\), which is 8 micro.*, but num_microbatches is 2",
         r"`batch.reshape\(2, 4, 4\)`"],
        LOOP_LINE, ([W, W], X.reshape(8, 4)),
    ),
    "a batch that cannot be cut": Case(
        step_of(num_microbatches=3), StageError,
        ["its leading axis of 8 cannot be split into 3 of equal size"],
        LOOP_LINE, ([W, W], X.reshape(8, 4)),
    ),
    "a transposed batch": Case(
        loop_over(lambda ws, mb: loss_fn(ws, mb["x"]), num_microbatches=2), StageError,
        [r"batch\['x'\] has shape \(4, 2, 4\), which is 4",
         r"`jnp.moveaxis\(batch\['x'\], 1, 0\)` has that number"],
        OTHER_LOOP_LINE, ([W, W], {"x": X}),
    ),
    "no number of microbatches": Case(
        step_of(num_microbatches=True), TypeError, ["num_microbatches is True; give an integer"]
    ),
    "a number below one": Case(
        step_of(num_microbatches=0), ValueError, ["num_microbatches is 0; give a number of at least 1"]
    ),
    "reduce of another tree": Case(
        step_of(reduce=(jpp.Sum(), jpp.Sum(), jpp.Sum())), TypeError,
        ["reduce is not a tree prefix", r"\(\[\*, \*\], \*\)", r"\(Sum\(\), Sum\(\), Sum\(\)\)"], LOOP_LINE,
    ),
    "reduce that is no operator": Case(
        step_of(reduce=(sum, jpp.Stack())), TypeError,
        ["reduce has <built-in function sum>", r"use Sum\(\)"], LOOP_LINE
    ),
    "reduce that is a class": Case(
        step_of(reduce=(jpp.Sum(), jpp.Mean)), TypeError,
        ["reduce has the class Mean; write Mean\\(\\)"], LOOP_LINE
    ),
    "reduce that misses a key": Case(
        loop_over(lambda ws, x: {"a": x.sum(), "b": x.sum()}, 1, reduce={"a": jpp.Sum()}), TypeError,
        [r"reduce is not a tree prefix of the function's result \{'a': \*, 'b': \*\}"], OTHER_LOOP_LINE,
    ),
    "mean of integers": Case(
        loop_over(lambda ws, x: x.astype(int), 1, reduce=jpp.Mean()), TypeError,
        ["result: ", "not int32", r"cast first, or use Sum\(\)"], OTHER_LOOP_LINE,
    ),
    "sum of booleans": Case(
        loop_over(lambda ws, x: {"a": x > 0}, 1), TypeError,
        [r"result\['a'\]", "cast to int32", r"Max\(\) \(any\)"],
        OTHER_LOOP_LINE,
    ),
    "concat of scalars": Case(
        loop_over(lambda ws, x: x.sum(), 1, reduce=jpp.Concat()), TypeError,
        [r"Concat\(axis=0\)", r"use Stack\(\)"],
        OTHER_LOOP_LINE,
    ),
}  # fmt: skip

# ---------------------------------------------------------------- schedules


def both(i, stage):
    return [Task(i, "fwd", stage), Task(i, "bwd", stage)]


ONE = ([W, W], X[:1])
TWO = ([W, W], X[:2])

SCHEDULES = {
    "too many stages": Case(
        step_of(schedule=jpp.GPipe(3)), ScheduleError,
        [r"GPipe\(num_stages=3\)", r"3 stages and the loop body 2 stages \(1 pipeline_yield\)",
         "make a schedule of 2"],
        LOOP_LINE,
    ),
    "stages of two forwards": Case(
        step_of(lambda ws, x: loss_fn(ws, x) + loss_fn(ws, -x)), ScheduleError,
        [r"2 stages and the loop body 3 stages \(2 pipeline_yields\)",
         "every call in the loop body ends a stage",
         r"integration/test_user_errors.py:\d+ 'middle' \(2 calls\)"],
        LOOP_LINE,
    ),
    "too few stages": Case(
        step_of(schedule=jpp.Std1F1B(1)), ScheduleError,
        ["1 stage and the loop body 2 stages", "make a schedule of 2"],
        LOOP_LINE,
    ),
    "a task twice": Case(
        step_of(schedule=[both(0, 0) + both(0, 0), both(0, 1)]), ScheduleError,
        [r"actor 0, step 2: fwd\(stage 0, mb 0\) is there twice \(first at actor 0, step 0\)",
         "run every task once",
         r"\[0F0\]"],
        LOOP_LINE, ONE,
    ),
    "a task missing": Case(
        step_of(schedule=[both(0, 0), [Task(0, "fwd", 1)]]), ScheduleError,
        [r"bwd\(stage 1, mb 0\) is missing", "every stage's fwd and bwd", "actor 1  1F0"], LOOP_LINE, ONE,
    ),
    "a task too early": Case(
        step_of(schedule=[both(0, 0)[::-1], both(0, 1)]), ScheduleError,
        [r"actor 0, step 0: bwd\(stage 0, mb 0\) runs before fwd\(stage 0, mb 0\) \(step 1\)",
         "move .* ahead of it",
         r"\[0B0\]  \[0F0\]"],
        LOOP_LINE, ONE,
    ),
    "a deadlock": Case(
        step_of(schedule=[both(0, 0) + both(1, 0), both(1, 1) + both(0, 1)]), ScheduleError,
        ["it deadlocks: 2 actors wait for one another", "change the order",
         r"actor 0, step 1: bwd\(stage 0, mb 0\) waits for bwd\(stage 1, mb 0\) on actor 1",
         r"actor 1, step 0: fwd\(stage 1, mb 1\) waits for fwd\(stage 0, mb 1\) on actor 0", r"\[0B0\]"],
        LOOP_LINE, TWO,
    ),
    "a list for another mesh": Case(
        step_of(schedule=[both(0, 0) + both(0, 1)]), ScheduleError,
        ["1 list of tasks for 2 actors", "give every actor"], LOOP_LINE, ONE,
    ),
    "a microbatch too many": Case(
        step_of(schedule=[both(0, 0) + both(1, 0), both(0, 1) + both(1, 1)]), ScheduleError,
        [r"fwd\(stage 0, mb 1\) is out of range", "0 to 0"], LOOP_LINE, ONE,
    ),
    "no schedule": Case(
        step_of(schedule=3), ScheduleError,
        ["this is not a schedule", r"such as Std1F1B\(num_stages=2\)"], LOOP_LINE
    ),
    "its class": Case(
        step_of(schedule=jpp.Std1F1B), ScheduleError,
        ["a class, not a schedule", r"write Std1F1B\(num_stages=2\)"],
        LOOP_LINE,
    ),
}  # fmt: skip

# ---------------------------------------------------------------- programs that cannot be pipelined


def later_stage(ws, x):
    grad = jax.grad(lambda w: jnp.sum(jpp.pipeline_yield(jnp.tanh(x @ w)) @ ws[1]))(ws[0])  # made by stage 1
    return jnp.sum(jpp.pipeline_yield(x @ grad) @ ws[1])


def yield_in_cond(ws, x):
    def yes(x):
        return jpp.pipeline_yield(x @ ws[0])

    return jnp.sum(jax.lax.cond(x[0, 0] > 0, yes, lambda x: x, x) @ ws[1])


def yield_in_while(ws, x):
    def body(carry):
        return carry[0] + 1, jpp.pipeline_yield(carry[1] @ ws[0])

    return jnp.sum(jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))[1])


def loop_in_scan(ws, batch):
    def outer(ws, _):
        return jpp.accumulate_grads(lambda x: jax.tree.map(lambda w: w * x.sum(), ws), jpp.GPipe(1))(
            batch
        ), None

    return jax.lax.scan(outer, ws, None, length=2)[0]


def loop_in_loop(ws, x):
    return jpp.accumulate_grads(lambda row: jnp.sum(row @ ws[0]), jpp.GPipe(1))(x)


def prints_in_a_scan(ws, x):
    def body(x, _):
        jax.debug.print("{}", x[0, 0])
        return x + 1, None

    return loss_fn(ws, jax.checkpoint(lambda x: jax.lax.scan(body, x, None, length=2)[0])(x))


def prints_in_a_cond(ws, x):
    def yes(x):
        jax.debug.callback(print, x)
        return x

    return loss_fn(ws, jax.lax.cond(x[0, 0] > 0, yes, lambda x: x, x))


def calls_back(ws, x):
    x = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return loss_fn(ws, x)


def calls_back_in_a_scan(ws, x):
    def body(x, _):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x), None

    return loss_fn(ws, jax.lax.scan(body, x, None, length=2)[0])


line_search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=3)


def searches_a_line(ws, batch):
    def total(ws):
        return jpp.accumulate_grads(lambda x: loss_fn(ws, x), jpp.GPipe(2))(batch)

    grads, losses = step_of()(ws, batch)
    state = line_search.init(ws)
    updates, _ = line_search.update(grads, state, ws, value=losses.sum(), grad=grads, value_fn=total)
    return updates


def adversarial(ws, x):
    slope = jax.grad(loss_fn, argnums=1)(ws, x)
    return loss_fn(ws, x + 0.1 * jnp.sign(slope))


nobody_p = jex.core.Primitive("nobody_lowers")
nobody_p.def_abstract_eval(lambda x: x)


def no_lowering(ws, x):
    x = jnp.sin(nobody_p.bind(jpp.pipeline_yield(x @ ws[0])))
    return jnp.sum(x)


def foreign_code(ws, x):
    x = jax.ffi.ffi_call("their_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    return loss_fn(ws, x)


PROGRAMS = {
    "a later stage's value": Case(
        step_of(later_stage, jpp.GPipe(3)), StageError,
        ["stage 1 needs the gradient of pipeline_yield", "backward pass of a later stage",
         "take this gradient"],
        (later_stage, "made by stage 1"),
    ),
    "pipeline_yield in a cond": Case(
        step_of(yield_in_cond), Unsupported, ["pipeline_yield inside `cond`", "in Python"],
        (yield_in_cond, "jax.lax.cond("),
    ),
    "pipeline_yield in a while": Case(
        loop_over(yield_in_while), Unsupported, ["pipeline_yield inside `while`", "in Python"],
        (yield_in_while, "jax.lax.while_loop("),
    ),
    "accumulate_grads in a scan": Case(
        loop_in_scan, Unsupported,
        ["accumulate_grads inside `scan`", "in Python"], (loop_in_scan, "jax.lax.scan(")
    ),
    "accumulate_grads in itself": Case(
        loop_over(loop_in_loop), Unsupported,
        ["inside another accumulate_grads", "inner one as a Python loop"],
        (loop_in_loop, "jpp.accumulate_grads("),
    ),
    "a print in a scan": Case(
        step_of(prints_in_a_scan), Unsupported,
        ["`debug_print` inside `scan` in stage 0", "return the values from its body"],
        (prints_in_a_scan, "jax.debug.print"),
    ),
    "a callback in a cond": Case(
        loop_over(prints_in_a_cond), Unsupported, ["`debug_callback` inside `cond`", "before or after it"],
        (prints_in_a_cond, "jax.debug.callback"),
    ),
    "a line search": Case(
        searches_a_line, Unsupported, ["^[^\n]*accumulate_grads inside `while` cannot be pipelined"],
        (searches_a_line, "line_search.update("),
    ),
    "adversarial inputs": Case(
        step_of(adversarial, jpp.GPipe(3)), StageError,
        ["later stage in the same microbatch", "or make it in an accumulate_grads loop of its own first"],
        (loss_fn, "jpp.pipeline_yield"),
    ),
    "no lowering": Case(
        loop_over(no_lowering), Unsupported, ["`nobody_lowers` in task fwd1 has no lowering", "register one"],
        (no_lowering, "nobody_p.bind("),
    ),
    "foreign code": Case(
        loop_over(foreign_code), Unsupported,
        ["`ffi_call` in task fwd0 calls foreign code, 'their_kernel'", "JAX's own operations"],
        (foreign_code, "jax.ffi.ffi_call("),
    ),
    "a callback": Case(
        loop_over(calls_back), Unsupported,
        ["`pure_callback` in stage 0 runs Python on the host", "jax.debug.print"],
        (calls_back, "jax.pure_callback("),
    ),
    "a pure callback in a scan": Case(
        loop_over(calls_back_in_a_scan), Unsupported, ["`pure_callback` inside `scan` in stage 0"],
        (calls_back_in_a_scan, "jax.pure_callback("),
    ),
}  # fmt: skip

# ---------------------------------------------------------------- shardings


def constrained(ws, x):
    x = jax.lax.with_sharding_constraint(x, P("model"))
    return loss_fn(ws, x)


def shard_too_long(ws, x):
    x = jpp.shard(x, ("batch", None, "mlp"))
    return loss_fn(ws, x)


async def run_case(mesh, case):
    return await mesh.run(mesh.distributed(case.step, **(case.options or {})), *case.args)


DISTRIBUTED_LINE = (run_case, "mesh.distributed(")

SHARDINGS = {
    "in_shardings with an unknown axis": Case(
        GOOD, ShardingError,
        [r"in_shardings of ws\[0\] names the axis 'model'", r"the mesh has \['data'\]", "correct"],
        DISTRIBUTED_LINE, options={"in_shardings": (P("model"), None)}, mesh="data",
    ),
    "out_shardings with an unknown axis": Case(
        GOOD, ShardingError,
        [r"out_shardings of result\[0\]\[1\] names the axis 'model'", "give spmd_mesh that axis"],
        DISTRIBUTED_LINE, options={"out_shardings": ([None, P("model")], None)}, mesh="data",
    ),
    "in_shardings on a mesh without axes": Case(
        GOOD, ShardingError, [r"in_shardings of ws\[0\]", "the mesh has no axes"],
        DISTRIBUTED_LINE, options={"in_shardings": (P("data"), None)},
    ),
    "in_shardings of another tree": Case(
        GOOD, ShardingError, ["in_shardings is not a tree prefix", "length 3"],
        DISTRIBUTED_LINE, options={"in_shardings": (None, P("data"), None)}, mesh="data",
    ),
    "in_shardings of junk": Case(
        GOOD, ShardingError, [r"in_shardings of ws\[0\]: 3 is no PartitionSpec"],
        DISTRIBUTED_LINE, options={"in_shardings": (3, None)}, mesh="data",
    ),
    "in_shardings that do not divide": Case(
        GOOD, ShardingError,
        [r"in_shardings of batch: dimension 0 of shape \(3, 2, 4\) is not divisible by 2"],
        DISTRIBUTED_LINE, ([W, W], X[:3]), options={"in_shardings": (None, P("data"))}, mesh="data",
    ),
    "in_shardings that split the microbatches": Case(
        GOOD, ShardingError,
        [r"in_shardings of batch: \w+\('data',\) splits dimension 0, the microbatches",
         r"write \w+\(None, 'data'\)"],
        DISTRIBUTED_LINE, options={"in_shardings": (None, P("data"))}, mesh="data",
    ),
    "in_shardings of too many dimensions": Case(
        GOOD, ShardingError, [r"in_shardings of ws\[0\]", r"3 entries for an array of shape \(4, 4\)"],
        DISTRIBUTED_LINE, options={"in_shardings": (P(None, None, "data"), None)}, mesh="data",
    ),
    "a constraint with an unknown axis": Case(
        step_of(constrained), ShardingError, [r"axes are \['data'\]", "model", "give spmd_mesh that axis"],
        (constrained, "with_sharding_constraint("), mesh="data",
    ),
    "a constraint on a mesh without axes": Case(
        step_of(constrained), ShardingError, ["axes are none", "give RemoteMesh an spmd_mesh"],
        (constrained, "with_sharding_constraint("),
    ),
    "shard with too many names": Case(
        step_of(shard_too_long), ShardingError,
        ["3 names", "2 dimensions"], (shard_too_long, "jpp.shard("), mesh="data"
    ),
}  # fmt: skip

# ---------------------------------------------------------------- arguments


ARGUMENTS = {
    "a ShapeDtypeStruct": Case(
        GOOD, ArrayError, [r"ws\[1\] is a ShapeDtypeStruct, which has no values", "pass an array"],
        args=([W, jax.ShapeDtypeStruct((4, 4), "float32")], X),
    ),
    "text": Case(GOOD, TypeError, [r"step 'step': ws\[1\] is a str", "make the argument static"],
                 args=([W, "w"], X)),
    "a function in a model": Case(
        GOOD, TypeError, [r"step 'step': ws\[1\] is a function, which JAX .*; pass a model's arrays only"],
        args=([W, inspect.getsource], X),
    ),
    "an array of objects": Case(
        GOOD, TypeError, [r"'step': ws\[0\] is a ndarray of dtype object", "static or leave"],
        args=([np.array([None, 1]), W], X),
    ),
    "too few": Case(
        GOOD, TypeError,
        [r"'step', called with 1: missing a required argument: 'batch'; it is step\(ws, batch\)"],
        args=([W, W],),
    ),
    "too many": Case(
        GOOD, TypeError, [r"'step', called with 3: too many positional arguments; it is step\(ws, batch\)"],
        args=([W, W], X, X),
    ),
    "a static one without a hash": Case(
        lambda config, x: x, TypeError, ["argument config is static and a list", "hashable"], args=([1], X),
        options={"static_argnums": 0},
    ),
    "donating one that is not there": Case(
        lambda *args: args[0], ValueError,
        ["'<lambda>' got 2 arguments, but donate_argnums names argument 5"],
        options={"donate_argnums": 5},
    ),
    "counting from the end": Case(
        GOOD, ValueError, ["donate_argnums is -1", "counted from 0"], options={"donate_argnums": -1}
    ),
    "a step that is no function": Case(3, TypeError, ["mesh.distributed takes a step function; got 3"]),
}  # fmt: skip


ALL = {**BATCHES, **SCHEDULES, **PROGRAMS, **SHARDINGS, **ARGUMENTS}


@pytest.mark.parametrize("name", ALL)
async def test_error_says(name, meshes, monkeypatch):
    case = ALL[name]
    mesh = meshes[case.mesh]
    async with Untouched(mesh, monkeypatch):
        if name == "a ShapeDtypeStruct":
            monkeypatch.undo()  # it stands for an array while a step is compiled; only a run needs values
        with pytest.raises(case.error) as caught:
            await run_case(mesh, case)
    check(caught.value, case)


def broken_model(ws, x):
    return x @ jnp.ones((3, 3))  # shapes that do not fit


async def test_the_users_own_error_keeps_its_type_and_its_line(meshes, monkeypatch):
    async with Untouched(meshes["plain"], monkeypatch):
        with pytest.raises(TypeError, match="contracting dimensions") as caught:
            await run_case(meshes["plain"], Case(step_of(broken_model), TypeError, []))
    frames = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(caught.value.__traceback__)]
    assert line_of((broken_model, "jnp.ones((3, 3))")) in frames


async def test_branching_on_a_value_names_the_users_function_and_argument(meshes, monkeypatch):
    def branches(ws, batch):
        return ws if batch[0, 0, 0] > 0 else batch

    async with Untouched(meshes["plain"], monkeypatch):
        with pytest.raises(
            jax.errors.TracerBoolConversionError, match=r"(?s)branches at .*test_user_errors.*batch"
        ):
            await run_case(meshes["plain"], Case(branches, TypeError, []))


async def test_a_wrapper_may_take_more_arguments_than_what_it_wraps(meshes):
    @functools.wraps(GOOD)
    def scaled(ws, batch, by):
        return GOOD(ws, batch * by)

    for fn, args in ((scaled, ([W, W], X, 2)), (jax.jit(scaled), ([W, W], X, 2))):
        ws, _ = await meshes["plain"].distributed(fn)(*args)
        assert ws[0].shape == (4, 4)


async def test_branching_in_the_loss_names_the_users_function_and_argument(meshes, monkeypatch):
    def loss(ws, microbatch):
        return jnp.sum(ws[0]) if microbatch["x"][0, 0] > 0 else jnp.sum(ws[1])

    def of_index(microbatch, number):
        return number if number > 0 else number + 1

    cases = [
        (step_of(loss), {}, r"of_one at .*test_user_errors.* the argument x\['x'\]"),
        (
            lambda ws, batch: jpp.accumulate_grads(of_index, jpp.GPipe(1), pass_index=True)(batch),
            {},
            r"of_index at .*test_user_errors.* the argument number\.",
        ),
    ]
    for step, options, says in cases:
        async with Untouched(meshes["plain"], monkeypatch):
            with pytest.raises(jax.errors.TracerBoolConversionError, match=f"(?s){says}"):
                await run_case(
                    meshes["plain"], Case(step, TypeError, [], args=([W, W], {"x": X}), options=options)
                )


async def test_adversarial_inputs_made_in_a_loop_of_their_own_equal_jit(meshes):
    """As the error of `adversarial` advises."""

    def step(ws, batch):
        def perturbed(x):
            return x + 0.1 * jnp.sign(jax.grad(loss_fn, argnums=1)(ws, x))

        inputs = jpp.accumulate_grads(perturbed, jpp.GPipe(2), reduce=jpp.Stack())(batch)
        return step_of()(ws, inputs)

    mesh = meshes["plain"]
    args = [W, W + 0.5], X * np.arange(1, 5, dtype=np.float32).reshape(4, 1, 1)
    got = await mesh.fetch(await mesh.run(mesh.distributed(step), *args))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, jax.device_get(jax.jit(step)(*args))
    )


async def test_an_nnx_model_of_the_step_in_its_loop_gets_a_hint_that_works(meshes):
    from flax import nnx  # takes a second

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first, self.norm = nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, x):
            return jnp.sum(self.norm(jpp.pipeline_yield(self.first(x))) ** 2)

    graphdef, state = nnx.split(Model(nnx.Rngs(0)))

    def step(state, batch, *, hint, differentiates):
        model = nnx.merge(graphdef, state)
        split = nnx.split(model)

        def of_one(x):
            inner = nnx.merge(*split, copy=True) if hint else model
            if not differentiates:
                return inner(x)
            loss, grads = nnx.value_and_grad(lambda model: model(x))(inner)
            return grads, loss

        return jpp.accumulate_grads(of_one, jpp.GPipe(2))(batch)

    mesh = meshes["plain"]
    for differentiates in (True, False):
        wrong = functools.partial(step, hint=False, differentiates=differentiates)
        for call in (lambda f=wrong: jax.jit(f)(state, X), lambda f=wrong: f(state, X)):
            with pytest.raises(Exception, match="different trace level") as caught:
                call()
            assert (
                sum("nnx.merge(graphdef, state, copy=True)" in note for note in caught.value.__notes__) == 1
            )
        with pytest.raises(Exception, match="different trace level") as caught:
            await mesh.run(mesh.distributed(wrong), state, X)
        assert sum("nnx.merge(graphdef, state, copy=True)" in note for note in caught.value.__notes__) == 1
    right = functools.partial(step, hint=True, differentiates=True)
    got = await mesh.fetch(await mesh.run(mesh.distributed(right), state, X))
    want = jax.device_get(jax.jit(right)(state, X))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


async def test_a_step_that_nobody_awaits_is_named_with_its_line(meshes):
    step = meshes["plain"].distributed(GOOD)
    with pytest.warns(RuntimeWarning, match="coroutine 'step' was never awaited") as told:
        step([W, W], X)
    assert told[0].filename == __file__
    ws, _ = await asyncio.create_task(step([W, W], X))
    assert ws[0].shape == (4, 4)


UNAWAITED = {
    "step": (lambda mesh, step: step([W, W], X), "step"),
    "run": (lambda mesh, step: mesh.run(step, [W, W], X), "RemoteMesh.run"),
    "submit": (lambda mesh, step: mesh.submit(step, [W, W], X), "RemoteMesh.submit"),
    "put": (lambda mesh, step: mesh.put([W, W]), "RemoteMesh.put"),
    "fetch": (lambda mesh, step: mesh.fetch([W, W]), "RemoteMesh.fetch"),
    "compile": (lambda mesh, step: step.compile([W, W], X), "DistributedStep.compile"),
}


@pytest.mark.parametrize("name", UNAWAITED)
async def test_a_call_without_await_says_so_where_its_result_is_used(name, meshes):
    mesh = meshes["plain"]
    step = mesh.distributed(GOOD)
    call, called = UNAWAITED[name]
    unawaited = call(mesh, step)
    says = rf"^{re.escape(called)}\(\.\.\.\) is a coroutine, which has no result yet: write `await` before it"
    with pytest.raises(TypeError, match=says + r" \(`a, b = await \.\.\.`\)$") as caught:
        _, _ = unawaited  # type: ignore[misc]
    assert caught.traceback[-1].path == Path(__file__), "no frame of the package behind the user's"
    with pytest.raises(TypeError, match=says):
        unawaited[0]
    with pytest.raises(AttributeError, match=says + " to use its result's 'shape'"):
        _ = unawaited.shape
    with pytest.raises(
        TypeError, match=r"batch is a coroutine or a step under way, and no array: `await` it first"
    ):
        await mesh.run(step, [W, W], unawaited)
    await unawaited  # nothing of this has used it up
    with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
        await unawaited


async def test_a_loop_that_is_not_called_says_so_where_its_results_are_used(meshes):
    loop = jpp.accumulate_grads(jnp.sum, jpp.GPipe(1))
    says = r"^.*integration/test_user_errors.py:\d+: accumulate_grads returns a function, and .*: "
    says += "call it with the batch, `accumul"
    with pytest.raises(TypeError, match=says) as unpacked:
        _, _ = loop  # type: ignore[misc]
    with pytest.raises(TypeError, match=says) as indexed:
        loop[0]  # type: ignore[index]
    mesh = meshes["plain"]
    with pytest.raises(TypeError, match=says) as returned:
        await mesh.run(mesh.distributed(lambda x: (x, loop)), X)
    for caught in (unpacked, indexed, returned):
        assert caught.traceback[-1].path == Path(__file__), "no frame of the package behind the user's"
    with pytest.raises(TypeError, match="UncalledLoop"):
        jax.jit(lambda x: x - loop)(X)
    for call in (
        jax.jit(loop),
        functools.partial(loop),
        jax.checkpoint(loop),
        jax.jit(jax.value_and_grad(loop)),
    ):
        assert jax.tree.leaves(call(X))[0] == X.sum()  # it is a function to everyone
    assert loop.__name__ == "run" and list(inspect.signature(loop).parameters) == ["batch"]


@pytest.mark.parametrize(
    "batch", [{"x": X}, (X, X), X, [jnp.ones(3)]], ids=["dict", "tuple", "array", "list"]
)
def test_a_batch_in_the_schedules_place(batch):
    says = rf"^.*py:\d+: argument 2 of accumulate_grads is a {type(batch).__name__}, not a schedule; "
    says += "write `accum"
    with pytest.raises(TypeError, match=says) as caught:
        jpp.accumulate_grads(jnp.sum, batch)
    assert caught.traceback[-1].path == Path(__file__)


async def test_what_a_call_returns_is_a_coroutine_to_everyone(meshes):
    mesh = meshes["plain"]
    step = mesh.distributed(GOOD)
    await step.compile([W, W], X)
    for call in (lambda: step([W, W], X), lambda: mesh.run(step, [W, W], X)):
        running = call()
        assert asyncio.iscoroutine(running) and inspect.iscoroutine(running) and inspect.isawaitable(running)
        assert isinstance(running, Coroutine) and not isinstance(running, Iterable)
        assert inspect.getcoroutinestate(running) == inspect.CORO_CREATED
        running.close()
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            tasks = [group.create_task(call()), group.create_task(call())]
            assert "running at" in repr(tasks[0]) and tasks[0].get_stack()
        assert all(len(task.result()) == 2 for task in tasks)
        _, losses = await asyncio.wait_for(asyncio.shield(call()), 60)
        (_, same), _ = await asyncio.gather(call(), call())
        np.testing.assert_array_equal(await losses, await same)
        cancelled = asyncio.create_task(call())
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    if hasattr(inspect, "markcoroutinefunction"):  # Python 3.12
        assert inspect.iscoroutinefunction(mesh.run) and inspect.iscoroutinefunction(mesh.put)


# ---------------------------------------------------------------- remote arrays


async def test_arrays_that_cannot_be_used(meshes, monkeypatch):
    mesh, other = meshes["plain"], meshes["data"]
    keeps, donates = mesh.distributed(GOOD), mesh.distributed(GOOD, donate_argnums=0)
    state = await mesh.put([W, W])
    foreign = await other.put([W, W])
    gone = await mesh.put(W)
    await gone.delete()
    await gone.delete()  # twice does nothing
    fresh = await mesh.put(W)
    await mesh.run(keeps, [fresh, W], X)
    await mesh.run(donates, state, X)
    assert state[0].is_deleted() and gone.is_deleted() and not fresh.is_deleted()
    cases = [
        (keeps, (foreign, X), [r"ws\[0\] is a RemoteArray of another mesh", "fetch it there"]),
        (
            keeps,
            (state, X),
            [r"ws\[0\] cannot be used: it was donated to step 'step'", "use the step's result"],
        ),
        (donates, (state, X), ["it was donated to step 'step'"]),
        (keeps, ([W, gone], X), [r"ws\[1\] cannot be used: it was deleted"]),
        (donates, ([fresh, fresh], X), [r"ws\[0\] is donated and passed twice", "pass a copy"]),
    ]
    for step, args, says in cases:
        async with Untouched(mesh, monkeypatch):
            with pytest.raises(ArrayError) as caught:
                await mesh.run(step, *args)
        check(caught.value, Case(step, ArrayError, says))
    for awaitable in (lambda: mesh.fetch({"a": state[0]}), lambda: mesh.fetch([state[0], fresh])):
        with pytest.raises(ArrayError, match="it was donated to step 'step'"):
            await awaitable()
    with pytest.raises(ArrayError, match="the array cannot be used: it was deleted"):
        await gone
    with pytest.raises(ArrayError, match="another mesh"):
        await mesh.fetch(foreign)


async def test_put_says_what_like_has_to_be(meshes):
    mesh = meshes["plain"]
    step = mesh.distributed(GOOD)
    with pytest.raises(
        MeshError, match=r"mesh.put.* needs to know where step 'step' keeps each leaf; compile it first"
    ):
        await mesh.put([W, W], like=(step, 0))
    await step.compile([W, W], X)
    with pytest.raises(ArrayError, match="the values have 1 leaves, like has 2"):
        await mesh.put([W], like=(step, 0))
    with pytest.raises(ArrayError, match="neither"):
        await mesh.put([W], like=[W])


async def test_init_says_what_is_wrong(meshes):
    mesh = meshes["plain"]
    step = mesh.distributed(GOOD)
    with pytest.raises(
        MeshError, match=r"step.init needs .* step 'step' .*compile it first, for example `await step.c"
    ):
        await step.init(0, lambda: [jnp.eye(4), jnp.eye(4)])
    await step.compile([W, W], X)
    what = r"step.init: <lambda> does not make argument 0 of step 'step': "
    for made, says in [
        ([4], r"it has no ws\[1\] \(float32\[4, 4\]\)$"),
        ([8, 4], r"result\[0\] is float32\[8, 8\], but ws\[0\] is float32\[4, 4\]$"),
        ([4, 4, 2], r"the argument has no result\[2\] \(float32\[2, 2\]\)$"),
        ({"w": 4}, r"it has no ws\[0\] .*, ws\[1\] .*; the argument has no result\['w'\] \(f"),
    ]:
        with pytest.raises(ArrayError, match=what + says):
            await step.init(0, lambda made=made: jax.tree.map(jnp.eye, made))
    for call in (step.init(7, lambda: 0), mesh.put([W, W], like=(step, 7))):
        with pytest.raises(ArrayError, match=r": step 'step' has no argument 7 .*; arguments 0, 1 have$"):
            await call


async def test_a_like_of_another_mesh(meshes, tmp_path):
    mesh, other = meshes["plain"], meshes["data"]
    theirs = other.distributed(GOOD)
    await theirs.compile([W, W], X)
    await mesh.save(tmp_path, {"x": W})
    for like in ({"x": await other.put(W)}, (theirs, 0)):
        with pytest.raises(ArrayError, match=r"^mesh.put: `like` has .* of another mesh, whose actors"):
            await mesh.put([W], like=like)
        with pytest.raises(ArrayError, match=r"^mesh.restore: `like` has .* of another mesh, whose actors"):
            await mesh.restore(tmp_path, like)


# ---------------------------------------------------------------- the mesh itself


class Seconds:
    """A device model of one second a task."""

    def __repr__(self) -> str:
        return "Seconds()"  # names a test, in each process alike

    def task_s(self, work) -> float:
        return 1.0


OPTIONS = [
    ({"num_actors": 0}, MeshError, "num_actors is an int of at least 1 .* got 0"),
    ({"num_actors": "2"}, MeshError, "got '2'"),
    ({"num_actors": (2, 2)}, MeshError, r"got \(2, 2\)"),
    ({"num_actors": True}, MeshError, "got True"),
    (
        {"spmd_mesh": {"data": 0}},
        MeshError,
        "spmd_mesh has 'data': 0; an axis is a name and a size of at least 1",
    ),
    ({"spmd_mesh": (1, 2, 3)}, MeshError, "3 sizes without names; pass a mapping"),
    ({"spmd_mesh": 3}, MeshError, "spmd_mesh is 3; it is a mapping"),
    (
        {"spmd_mesh": {"data": 64}, "launcher": "inline"},
        MeshError,
        r"needs 64 devices, but this process has \d+; .*jax_num_cpu_devices', 64\).* or use launcher='local'",
    ),
    (
        {"launcher": "kubernetes"},
        MeshError,
        "'kubernetes' is none of 'local', 'inline', 'ssh', 'slurm', 'ray'; or give a",
    ),
    ({"launcher": 3}, MeshError, "launcher 3 is none of .*, nor a Launcher: it has no listen_host, tra"),
    ({"transport": "pigeon"}, MeshError, "'pigeon' does not work between processes; .* 'ucx'"),
    (
        {"transport": "ucx", "launcher": "inline"},
        MeshError,
        "'ucx' does not work inside one process; .* 'memory'",
    ),
    ({"platform": "tpu"}, MeshError, "platform is 'tpu'; it is 'cpu' or, for GPUs, 'cuda'"),
    (
        {"axis_rules": {"batch": "data"}},
        ShardingError,
        r"axis_rules\['batch'\] names the axis 'data'.* no axes",
    ),
    (
        {"axis_rules": {"batch": ("data", "model")}, "spmd_mesh": {"data": 1}},
        ShardingError,
        r"names the axis 'model', but spmd_mesh has \['data'\]; give spmd_mesh that axis, or map ",
    ),
    ({"axis_rules": {"batch": 3}}, ShardingError, r"axis_rules\['batch'\] is 3; it is a mesh axis"),
    ({"axis_types": {"x": "auto"}}, MeshError, "axis_types names the axis 'x'"),
    (
        {"axis_types": {"data": "manual"}, "spmd_mesh": {"data": 1}},
        MeshError,
        r"axis_types\['data'\] is 'manual'; it is 'auto' or 'explicit'",
    ),
    ({"max_inflight": 0}, MeshError, "max_inflight is 0; give a whole number of at least 1"),
    ({"setup": "module:"}, MeshError, "setup is 'module:'; name a function as 'module:function'"),
    ({"launcher": "sloorm"}, MeshError, "'sloorm' is none of .*; did you mean 'slurm'"),
    ({"setup": "nocolon"}, MeshError, "setup is 'nocolon'; name a function as 'module:function'"),
    ({"env": {"A": 1}}, MeshError, "env has 'A': 1; environment variables are strings"),
    (
        {"env": {"JAX_PLATFORMS": "cpu"}},
        MeshError,
        "JAX_PLATFORMS='cpu', which the mesh sets; give platform=",
    ),
    (
        {"device_model": 3},
        MeshError,
        r"device_model is 3, which has no method task_s\(work\); give an object whose task_s returns the s",
    ),
    ({"device_model": Seconds}, MeshError, r"device_model is <class .*Seconds'>, which has no method task_s"),
    (
        {"device_model": Seconds(), "platform": "cuda"},
        MeshError,
        "platform is 'cuda', whose devices have a speed of their own; give platform='cpu', or leave dev",
    ),
    ({"hosts": ["a"]}, MeshError, "2 actors do not fit 1 slot on 1 host; add hosts, raise slots="),
]


@pytest.mark.parametrize(("options", "error", "says"), OPTIONS, ids=[repr(o[0]) for o in OPTIONS])
def test_options_of_a_mesh(options, error, says):
    with pytest.raises(error, match=says):
        jpp.RemoteMesh(**{"num_actors": 2, **options})


async def test_steps_and_functions_of_elsewhere(meshes, monkeypatch):
    mesh, other = meshes["plain"], meshes["data"]
    async with Untouched(mesh, monkeypatch):
        with pytest.raises(
            MeshError, match=r"<DistributedStep 'step'> is a step of another mesh; make one with `mesh.d"
        ):
            await mesh.run(other.distributed(GOOD), [W, W], X)
        with pytest.raises(
            MeshError, match=r"is no step of this mesh; make one with `mesh.distributed\(fn\)`"
        ):
            await mesh.run(GOOD, [W, W], X)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda mesh: mesh.save("a", W, on_progres=print),
            "RemoteMesh.save .* on_progres=; did you mean on_progress=",
        ),
        (lambda mesh: mesh.restore("a", lik=W), "RemoteMesh.restore has no option lik=; did you mean like="),
        (lambda mesh: mesh.put(W, device=0), "RemoteMesh.put has no option device=; it has tree, like"),
        (
            lambda mesh: mesh.save(tree=W),
            r"RemoteMesh.save\(\) missing 1 required positional argument: 'path'",
        ),
    ],
)
def test_a_method_of_the_mesh_called_wrongly(call, says):
    with pytest.raises(TypeError, match=f"^{says}"):
        call(jpp.RemoteMesh(1, launcher="inline"))


@pytest.mark.skipif(
    sys.version_info < (3, 12), reason="inspect has no mark for such functions before Python 3.12"
)
def test_methods_of_the_mesh_are_coroutine_functions_to_inspect():
    assert all(
        inspect.iscoroutinefunction(getattr(jpp.RemoteMesh, name))
        for name in ("save", "restore", "put", "run")
    )


def test_argument_numbers_are_checked_where_the_signature_tells():
    mesh = jpp.RemoteMesh(1, launcher="inline")
    for option in ("donate_argnums", "static_argnums"):
        with pytest.raises(ValueError, match=rf"'step' takes 2 arguments, but {option} names argument 5"):
            mesh.distributed(GOOD, **{option: (0, 5)})
        mesh.distributed(lambda *args: args, **{option: 5})  # nobody knows before it is called
        mesh.distributed(GOOD, **{option: (0, 1)})


def test_help_has_every_option():
    text = inspect.getdoc(jpp.RemoteMesh) or ""
    missing = [
        name
        for name in inspect.signature(jpp.RemoteMesh).parameters
        if not re.search(rf"\b{name}\b.*:", text)
    ]
    assert not missing


def test_a_mesh_in_a_plain_with():
    with (
        pytest.raises(MeshError, match=r"write `async with RemoteMesh"),
        jpp.RemoteMesh(1, launcher="inline"),
    ):
        pass


async def test_a_mesh_before_it_starts_and_after_it_closes():
    mesh = jpp.RemoteMesh(1, launcher="inline")
    step = mesh.distributed(loop_over(loss_fn, 2))
    for use in (lambda: mesh.run(step, [W, W], X), lambda: mesh.put(W), lambda: step.compile([W, W], X)):
        with pytest.raises(MeshError, match=r"has not started; use it inside `async with RemoteMesh"):
            await use()
    with pytest.raises(MeshError, match="has not started"):
        _ = mesh.actors
    await mesh.aclose()  # nothing to close
    assert repr(mesh) == "<RemoteMesh: 1 actor, InlineLauncher, not started>"
    async with mesh:
        assert repr(mesh) == "<RemoteMesh: 1 actor, InlineLauncher, running>"
    assert repr(mesh) == "<RemoteMesh: 1 actor, InlineLauncher, closed>"
    for use in (lambda: mesh.run(step, [W, W], X), lambda: step.compile([W, W], X)):
        with pytest.raises(MeshClosedError, match="the mesh is closed; start a new one"):
            await use()
    with pytest.raises(MeshError, match="has been entered before; make a new RemoteMesh"):
        await mesh.__aenter__()
