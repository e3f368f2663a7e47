"""Let a user mark the stages and the microbatch loop of a step: `pipeline_yield` and `accumulate_grads`.

Both are JAX primitives. Their marks remain in the jaxpr of a traced step, where `compiler.partition` reads
the marks. In plain JAX, without a mesh, `pipeline_yield` is the identity and `accumulate_grads` runs a loop:
a scan, or a Python loop under `jax.disable_jit`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from jaxpp_async.errors import StageError
from jaxpp_async.jax_bridge import jax_config, private_api, tracebacks
from jaxpp_async.jax_bridge.tracebacks import HiddenFrames, deliberate
from jaxpp_async.markers import logical_axes, loop_checks, nonfinite
from jaxpp_async.markers.reductions import Reduction

# ---------------------------------------------------------------- pipeline_yield
#
# marker:       (x, ...) -> (x, ..., token)     ends a stage
# marker_side:  (token, t, ...) -> (t, ...)     the same boundary for tangents (side="tangent") or cotangents
#
# The token is an empty array. Dataflow of the token joins the sides of one boundary, whatever jit, checkpoint
# or vmap do to the jaxpr between the sides. No counter is needed: a jitted block that is called three times
# is three boundaries.

_TOKEN = private_api.ShapedArray(private_api.TOKEN_SHAPE, private_api.TOKEN_DTYPE)


def _marker_avals(*avals, name):
    return [*avals, _TOKEN]


def _marker_reference(*values, name):
    return [*values, jnp.zeros(private_api.TOKEN_SHAPE, private_api.TOKEN_DTYPE)]


def _marker_jvp(primals, tangents, *, name):
    *outs, token = marker_p.bind(*primals, name=name)
    marked = _mark_side(token, tangents, side="tangent", name=name)
    return [*outs, token], [*marked, private_api.float0_zero(_TOKEN)]


def _mark_side(token, values, *, side, name):
    """Mark tangents or cotangents as belonging to the stage boundary that `token` stands for.

    Args:
        token: the extra result of the `pipeline_yield` primitive at that boundary.
        values: the tangents or cotangents; symbolic zeros among them are not marked.
        side: `"tangent"` or `"cotangent"`.
        name: the user's name for the boundary, or None.

    Returns:
        The values, in the same order.
    """
    known = [i for i, value in enumerate(values) if not isinstance(value, private_api.Zero)]
    results = list(values)
    if known:
        marked = marker_side_p.bind(token, *[values[i] for i in known], side=side, name=name)
        for i, value in zip(known, marked, strict=True):
            results[i] = value
    return results


def _marker_batch(operands, dims, *, name):
    return marker_p.bind(*operands, name=name), [*dims, None]


marker_p = private_api.new_primitive(
    "pipeline_yield",
    abstract_eval=_marker_avals,
    reference=_marker_reference,
    jvp=_marker_jvp,
    batch=_marker_batch,
)
private_api.always_save_in_checkpoint(marker_p)


def _side_jvp(primals, tangents, *, side, name):
    outs = marker_side_p.bind(*primals, side=side, name=name)
    return outs, _mark_side(primals[0], tangents[1:], side=side, name=name)


def _side_transpose(cotangents, token, *values, side, name):
    other = "cotangent" if side == "tangent" else "tangent"
    return [None, *_mark_side(token, cotangents, side=other, name=name)]


def _side_batch(operands, dims, *, side, name):
    token, *values = operands
    if dims[0] is not None:
        token = lax.index_in_dim(token, 0, dims[0], keepdims=False)
    return marker_side_p.bind(token, *values, side=side, name=name), list(dims[1:])


marker_side_p = private_api.new_primitive(
    "pipeline_yield_side",
    abstract_eval=lambda token, *avals, side, name: list(avals),
    reference=lambda token, *values, side, name: list(values),
    jvp=_side_jvp,
    transpose=_side_transpose,
    batch=_side_batch,
)


def pipeline_yield(tree: Any, *, name: str | None = None) -> Any:
    """End the current pipeline stage at the floating values in `tree` and begin the next stage.

    The function that `accumulate_grads` runs has n + 1 stages if `pipeline_yield` is called n times in it,
    also in functions that it calls: two forwards of a model with one call each are three stages. If the
    schedule has `stages`, they say which of the calls end a stage, and the other calls do nothing. The values
    on which the marked values depend belong to the stage that ends or to an earlier one; the values that
    depend on the marked values belong to a later one. Without a mesh this is the identity.

    Args:
        tree: any pytree. Floating leaves are marked; integer and key leaves are returned as they are.
        name: a name for the boundary, by which the `stages` of a schedule may name it. The name is shown in
            `report()`, in the text of the pass `partition`, and in the error about a schedule that has
            another number of stages.

    Returns:
        `tree`, unchanged in structure, shapes, dtypes and values.

    Raises:
        StageError: `tree` has no floating leaf.

    Source: the JaxPP paper, section "Stage Marking".
    """
    with HiddenFrames():
        leaves, treedef = jax.tree.flatten(tree)
        marked = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(jax.typeof(leaf).dtype, jnp.inexact)]
        if not marked:
            raise StageError(
                f"{tracebacks.caller_line()}: pipeline_yield got no floating value; "
                "pass the activations that the next stage works on"
            )
        *outs, _ = marker_p.bind(*[leaves[i] for i in marked], name=name)
        for i, out in zip(marked, outs, strict=True):
            leaves[i] = out
        return jax.tree.unflatten(treedef, leaves)


# ---------------------------------------------------------------- accumulate_grads


@dataclass(frozen=True)
class LoopSpec:
    """The static description of an accumulate loop, as the parameter of its JAX primitive.

    The primitive's operands are `num_consts` loop-invariant values, then the batch leaves, each
    `(num_microbatches, ...)`. The operands of `body` are the invariants, one microbatch's leaves and its
    index (int32).

    Args:
        body: the loop's function as a closed jaxpr without constants.
        num_consts: the number of loop-invariant values among the operands.
        num_microbatches: the number of microbatches.
        reductions: one reduction per result of `body`.
        schedule: a schedule object, or a tuple of tuples of `Task`.
        line: `file:line` of the `accumulate_grads` call.
        leaves: the name and type of each leaf of a microbatch, such as `"batch['x'] float32[2,4]"`.
    """

    body: Any
    num_consts: int
    num_microbatches: int
    reductions: tuple[Reduction, ...]
    schedule: Any
    line: str
    leaves: tuple[str, ...]

    # Two loops are equal only if they are the same object: jaxprs compare by identity, and JAX's caches need
    # that. A user's schedule class may not be hashable at all.
    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return id(self)


def _loop_reference(*operands, spec: LoopSpec):
    """Compute the results of an accumulate loop with a scan, as plain JAX without a mesh does.

    Args:
        operands: the loop-invariant values, then the leaves of the batch.
        spec: the static description of the loop.

    Returns:
        One joined value per result of the loop's body.
    """
    consts, batch = operands[: spec.num_consts], operands[spec.num_consts :]
    outs = [v.aval for v in spec.body.jaxpr.outvars]
    n = spec.num_microbatches
    # Keys can only be stacked, and the scan itself stacks them.
    start: list[Any] = [
        None
        if private_api.is_key_dtype(o.dtype)
        else logical_axes.reshard_to(r.start(o.shape, o.dtype, n), _loop_sharding(r, o))
        for r, o in zip(spec.reductions, outs, strict=True)
    ]

    def microbatch(carry, index_and_leaves):
        index, leaves = index_and_leaves
        values = private_api.closed_call(spec.body, [*consts, *leaves, index])
        keys = [v for v, o in zip(values, outs, strict=True) if private_api.is_key_dtype(o.dtype)]
        carry = [
            c if private_api.is_key_dtype(o.dtype) else r.step(c, v, index)
            for r, c, v, o in zip(spec.reductions, carry, values, outs, strict=True)
        ]
        return carry, keys

    carry, keys = lax.scan(microbatch, start, (jnp.arange(n, dtype=jnp.int32), list(batch)))
    stacked = iter(keys)
    return [
        next(stacked) if private_api.is_key_dtype(o.dtype) else r.end(c, n)
        for r, c, o in zip(spec.reductions, carry, outs, strict=True)
    ]


def _loop_types(*avals, spec: LoopSpec):
    return [
        private_api.ShapedArray(
            r.shape(v.aval.shape, spec.num_microbatches), v.aval.dtype, sharding=_loop_sharding(r, v.aval)
        )
        for r, v in zip(spec.reductions, spec.body.jaxpr.outvars, strict=True)
    ]


def _loop_sharding(reduction: Reduction, value: Any) -> Any:
    """Return the sharding of a loop's result, derived from the sharding of one microbatch's value.

    Args:
        reduction: the operator that joins the values of all microbatches.
        value: the aval of one microbatch's value.

    Returns:
        The sharding; None on a mesh without explicit axes.
    """
    known = logical_axes.explicit_sharding(value)
    return known and known.update(spec=known.spec.update(partitions=reduction.spec(known.spec.partitions)))


def _loop_eager(*operands, spec: LoopSpec):
    try:
        return jax.jit(lambda *xs: _loop_reference(*xs, spec=spec))(*operands)
    except FloatingPointError:  # JAX found a NaN, and its message names the whole loop as "scan"
        names = [leaf.rpartition(" ")[0] for leaf in spec.leaves]
        text = nonfinite.describe_origin_in_loop(
            spec.body, operands, spec.num_consts, spec.num_microbatches, names
        )
        if text:
            raise FloatingPointError(text) from None
        raise


class _EagerAccumulator:
    """The running total of one result of a loop whose microbatches run one by one in Python.

    This is used under `jax.disable_jit`.
    """

    def __init__(self, reduction: Reduction, num_microbatches: int) -> None:
        self._reduction, self._count = reduction, num_microbatches
        self._total: Any = None
        self._keys: list[jax.Array] = []  # PRNG keys can only be stacked
        self._float0: Any = None

    def add(self, value: jax.Array, index: jax.Array) -> None:
        if private_api.is_float0(value):
            self._float0 = _join_float0(self._reduction, value, self._count)
            return
        if private_api.is_key_dtype(value.dtype):
            self._keys.append(value)
            return
        if self._total is None:
            if self._reduction.starts_from_first:
                # The start value of a maximum is minus infinity, which `jax_debug_infs` forbids.
                self._total = value
                return
            start = self._reduction.start(value.shape, value.dtype, self._count)
            self._total = logical_axes.reshard_to(start, _loop_sharding(self._reduction, jax.typeof(value)))
        self._total = self._reduction.step(self._total, value, index)

    def result(self) -> jax.Array:
        if self._float0 is not None:
            return self._float0
        return jnp.stack(self._keys) if self._keys else self._reduction.end(self._total, self._count)


loop_p = private_api.new_primitive(
    "accumulate_grads",
    abstract_eval=_loop_types,
    reference=_loop_reference,
    effects=lambda spec: spec.body.effects,  # without them plain JAX would drop the prints inside
)
loop_p.def_impl(_loop_eager)


def accumulate_grads(
    fn: Callable,
    schedule: Any,
    *,
    reduce: Any = None,
    pass_index: bool = False,
    num_microbatches: int | None = None,
) -> Callable[[Any], Any]:
    """Run `fn` on every microbatch of a batch under `schedule` and join the results.

    Args:
        fn: `fn(microbatch)`, or `fn(microbatch, i)` with `pass_index`, where `i` is an int32 scalar. The
            function may close over the step's values, may contain `pipeline_yield`, and may compute gradients
            or not.
        schedule: a schedule such as `Std1F1B(num_stages)`, or a list with one list of `Task`s per actor.
        reduce: a tree prefix of `fn`'s result made of `Sum() Max() Min() Mean() Stack() Concat(axis)`. By
            default the first element of a result tuple is summed and the others are stacked; a result that is
            not a tuple is summed.
        pass_index: whether to pass the microbatch's index to `fn`.
        num_microbatches: the number of microbatches that the batch must have. This finds batches that were
            not split into microbatches or whose axes are in another order. If None, the size of the batch's
            leading axis is the number of microbatches.

    Returns:
        A function that takes a batch, a pytree of arrays `(num_microbatches, microbatch_size, ...)`, and
        returns `fn`'s result tree with every leaf reduced.

    Raises:
        StageError: `batch` has no leaves, or they do not share a leading microbatch axis, or its size is not
            `num_microbatches`.
        TypeError: `schedule` is a batch; `reduce` does not fit `fn`'s result, or is not given where `fn`
            returns `(loss, grads)`.

    Source: the JaxPP paper, section "Gradient Accumulation Loop".
    """
    line = tracebacks.caller_line()
    with HiddenFrames():
        loop_checks.refuse_batch_as_schedule(schedule, line)
        expected = loop_checks.check_num_microbatches(num_microbatches)
    return UncalledLoop(
        lambda batch: _run_loop(fn, batch, schedule, reduce, pass_index, expected, line), line
    )


class UncalledLoop:
    """The function that `accumulate_grads` returns. Calling it with a batch runs the loop.

    Code that unpacks or indexes this function, as if it were the results, gets an error that says to call it
    first.
    """

    def __init__(self, run: Callable[[Any], Any], line: str):
        self._run, self._line, self.__name__ = run, line, "run"

    def __call__(self, batch: Any) -> Any:
        with HiddenFrames():
            return self._run(batch)

    def __getitem__(self, key: object) -> NoReturn:
        """Raise an error that tells the user to call the loop before using its result.

        Python calls this method also when a user unpacks the loop, since the class has no `__iter__`.
        """
        with HiddenFrames():
            raise deliberate(TypeError(self.advice()))

    def advice(self) -> str:
        """Return the text of the error that tells the user to call the loop with a batch."""
        return (
            f"{self._line}: accumulate_grads returns a function, and this one has no results yet: call it "
            "with the batch, `accumulate_grads(fn, schedule)(batch)`"
        )


def _run_loop(
    fn: Callable, batch: Any, schedule: Any, reduce: Any, pass_index: bool, expected: int | None, line: str
) -> Any:
    """Run an accumulate loop on `batch` and return its results.

    The loop is bound as one JAX primitive, or runs in Python under `jax.disable_jit`.

    Args:
        fn, schedule, reduce, pass_index: the arguments of `accumulate_grads`.
        batch: a pytree of arrays `(num_microbatches, microbatch_size, ...)`.
        expected: the number of microbatches that the batch must have; None for any number.
        line: the line of the user's `accumulate_grads` call, which begins each error message.
    """
    named, tree = jax.tree_util.tree_flatten_with_path(batch)
    names = tuple(f"batch{jax.tree_util.keystr(path)}" for path, _ in named)
    leaves = [leaf for _, leaf in named]
    avals = [jax.typeof(leaf) for leaf in leaves]
    num_microbatches = loop_checks.count_microbatches(names, [aval.shape for aval in avals], expected, line)
    if jax_config.runs_op_by_op():
        leaves = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in leaves]
        microbatches = (
            jax.tree.unflatten(tree, [leaf[i] for leaf in leaves]) for i in range(num_microbatches)
        )
        return _run_in_python(fn, microbatches, num_microbatches, reduce, pass_index, line)

    slices = [
        logical_axes.result_type(lambda x: lax.index_in_dim(x, 0, 0, keepdims=False), leaf) for leaf in leaves
    ]
    index = jax.ShapeDtypeStruct((), jnp.int32)
    traced = jax.make_jaxpr(_with_index(fn, pass_index), return_shape=True)
    with tracebacks.framework_hints():
        closed, shapes = traced(jax.tree.unflatten(tree, slices), index)
    out_leaves, out_tree = jax.tree.flatten(shapes)
    if reduce is None:
        loop_checks.refuse_loss_before_gradients(shapes, closed, line)
    reductions = loop_checks.reductions_for(reduce, shapes, line)
    results = [
        _join_float0(r, leaf, num_microbatches) for r, leaf in zip(reductions, out_leaves, strict=True)
    ]
    made = [k for k, result in enumerate(results) if result is None]
    lifted, consts = private_api.lift_consts(private_api.with_results(closed, made))
    joined = tuple(reductions[k] for k in made)
    types = tuple(f"{name} {aval.str_short()}" for name, aval in zip(names, closed.in_avals, strict=False))
    spec = LoopSpec(lifted, len(consts), num_microbatches, joined, _freeze_schedule(schedule), line, types)
    for k, result in zip(made, loop_p.bind(*consts, *leaves, spec=spec), strict=True):
        results[k] = result
    return jax.tree.unflatten(out_tree, results)


def _join_float0(reduction: Reduction, value: Any, num_microbatches: int) -> Any:
    """Return a loop's result for gradients of integers (dtype `float0`), which need no computation.

    Args:
        reduction: how the microbatches' values are combined.
        value: one microbatch's value, or its type.
        num_microbatches: the number of microbatches.

    Returns:
        The joined `float0` array; None for a value of any other dtype.
    """
    if not private_api.is_float0(value):
        return None
    return private_api.float0_array(reduction.shape(value.shape, num_microbatches))


def _with_index(fn: Callable, pass_index: bool) -> Callable:
    """Return a function of a microbatch and its index that calls `fn`, which may take only the microbatch.

    The new function has the name and the argument names of `fn`, which JAX shows if tracing fails. Each call
    returns a new function: JAX caches traces by function, and the values that `fn` closes over may have
    changed since the last trace.

    Args:
        fn: the user's function.
        pass_index: whether `fn` takes the index as its second argument.
    """

    def body(microbatch: Any, index: Any) -> Any:
        return fn(microbatch, index) if pass_index else fn(microbatch)

    functools.update_wrapper(body, fn, updated=())
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # such as builtins, which may have no signature
        names = []
    given = [*names[:1], *(names[1:2] if pass_index else ["microbatch_index"])]
    if len(given) == 2:
        params = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in given]
        # JAX reads `__signature__`, which type stubs of functions do not have.
        body.__signature__ = inspect.Signature(params)  # type: ignore[attr-defined]
    return body


def _run_in_python(
    fn: Callable, microbatches: Iterable[Any], count: int, reduce: Any, pass_index: bool, line: str
) -> Any:
    """Run an accumulate loop in Python on concrete arrays, so that a debugger can step through it.

    This is used under `jax.disable_jit`.

    Args:
        fn, reduce, pass_index: the arguments of `accumulate_grads`.
        microbatches: the microbatches, each a pytree of arrays.
        count: the number of microbatches.
        line: the line of the user's `accumulate_grads` call, for error messages.

    Returns:
        The result tree of `fn`, with every leaf reduced over the microbatches.
    """
    joins: list[_EagerAccumulator] = []
    tree: Any = None
    for i, microbatch in enumerate(microbatches):
        index = jnp.int32(i)
        result = fn(microbatch, index) if pass_index else fn(microbatch)
        result = jax.tree.map(
            lambda x: x if isinstance(x, jax.Array) or private_api.is_float0(x) else jnp.asarray(x), result
        )
        values, tree = jax.tree.flatten(result)
        if not joins:
            joins = [_EagerAccumulator(r, count) for r in loop_checks.reductions_for(reduce, result, line)]
        for join, value in zip(joins, values, strict=True):
            join.add(value, index)
    return jax.tree.unflatten(tree, [join.result() for join in joins])


def _freeze_schedule(schedule: Any) -> Any:
    if isinstance(schedule, list | tuple):
        return tuple(tuple(row) if isinstance(row, list | tuple) else row for row in schedule)
    return schedule
