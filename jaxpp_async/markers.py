"""markers: `pipeline_yield` and `accumulate_grads`, as primitives with their rules under plain JAX.

In: the user's values. Out: the same values with marks in the jaxpr that `compiler.partition` reads. Without a mesh
`pipeline_yield` is the identity and `accumulate_grads` a loop: a scan, or under `jax.disable_jit` a Python loop. Never
places or schedules anything.
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

from jaxpp_async import explicit, jax_compat, jax_config, jax_origins, loop_checks, nonfinite, tracebacks
from jaxpp_async.errors import StageError
from jaxpp_async.reductions import Reduction
from jaxpp_async.tracebacks import HiddenFrames, deliberate

# ---------------------------------------------------------------- pipeline_yield
#
# marker:       (x, ...) -> (x, ..., token)     ends a stage
# marker_side:  (token, t, ...) -> (t, ...)     the same boundary for tangents (side="tangent") or cotangents
#
# The token is an empty array. It joins the sides of one boundary by dataflow, whatever jit, checkpoint or vmap do to
# the jaxpr between them: no counter, and a jitted block that is called three times is three boundaries.


def _marker_avals(*avals, name):
    return [*avals, jax_compat.ShapedArray(jax_compat.TOKEN_SHAPE, jax_compat.TOKEN_DTYPE)]


def _marker_reference(*values, name):
    return [*values, jnp.zeros(jax_compat.TOKEN_SHAPE, jax_compat.TOKEN_DTYPE)]


def _marker_jvp(primals, tangents, *, name):
    *outs, token = marker_p.bind(*primals, name=name)
    known = [i for i, t in enumerate(tangents) if not isinstance(t, jax_compat.Zero)]
    out_tangents = list(tangents)
    if known:
        marked = marker_side_p.bind(token, *[tangents[i] for i in known], side="tangent", name=name)
        for i, t in zip(known, marked, strict=True):
            out_tangents[i] = t
    zero = jax_compat.float0_zero(jax_compat.ShapedArray(jax_compat.TOKEN_SHAPE, jax_compat.TOKEN_DTYPE))
    return [*outs, token], [*out_tangents, zero]


def _marker_batch(operands, dims, *, name):
    results = marker_p.bind(*operands, name=name)
    return results, [*dims, None]


marker_p = jax_compat.new_primitive(
    "pipeline_yield", abstract_eval=_marker_avals, reference=_marker_reference, jvp=_marker_jvp, batch=_marker_batch
)
jax_compat.always_save_in_checkpoint(marker_p)


def _side_jvp(primals, tangents, *, side, name):
    token, *values = primals
    outs = marker_side_p.bind(token, *values, side=side, name=name)
    known = [i for i, t in enumerate(tangents[1:]) if not isinstance(t, jax_compat.Zero)]
    out_tangents = list(tangents[1:])
    if known:
        marked = marker_side_p.bind(token, *[tangents[1 + i] for i in known], side=side, name=name)
        for i, t in zip(known, marked, strict=True):
            out_tangents[i] = t
    return outs, out_tangents


def _side_transpose(cotangents, token, *values, side, name):
    known = [i for i, ct in enumerate(cotangents) if not isinstance(ct, jax_compat.Zero)]
    results = list(cotangents)
    if known:
        other = "cotangent" if side == "tangent" else "tangent"
        marked = marker_side_p.bind(token, *[cotangents[i] for i in known], side=other, name=name)
        for i, ct in zip(known, marked, strict=True):
            results[i] = ct
    return [None, *results]


def _side_batch(operands, dims, *, side, name):
    token, *values = operands
    if dims[0] is not None:
        token = lax.index_in_dim(token, 0, dims[0], keepdims=False)
    return marker_side_p.bind(token, *values, side=side, name=name), list(dims[1:])


marker_side_p = jax_compat.new_primitive(
    "pipeline_yield_side",
    abstract_eval=lambda token, *avals, side, name: list(avals),
    reference=lambda token, *values, side, name: list(values),
    jvp=_side_jvp,
    transpose=_side_transpose,
    batch=_side_batch,
)


def pipeline_yield(tree: Any, *, name: str | None = None) -> Any:
    """End the current pipeline stage at the floating values in `tree` and open the next.

    n calls in the function that `accumulate_grads` runs make n + 1 stages, whoever makes them: two forwards of a model
    with one call each are three stages. What these values depend on belongs to this stage or an earlier one,
    what depends on them to a later one. Without a mesh this is the identity.

    Args:
        tree: any pytree; its floating leaves are marked, integer and key leaves pass through.
        name: shown in `report()`, in the text of the pass `partition`, and in the error of a schedule that has another
            number of stages.

    Returns:
        `tree`, unchanged in structure, shapes, dtypes and values.

    Raises:
        StageError: `tree` has no floating leaf.

    Source: the JaxPP paper, section "Stage Marking".
    """
    with HiddenFrames():
        return _yielded(tree, name)


def _yielded(tree: Any, name: str | None) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    marked = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(jax.typeof(leaf).dtype, jnp.inexact)]
    if not marked:
        raise StageError(
            f"{jax_origins.caller_line()}: pipeline_yield got no floating value; "
            "pass the activations that the next stage works on"
        )
    *outs, _ = marker_p.bind(*[leaves[i] for i in marked], name=name)
    for i, out in zip(marked, outs, strict=True):
        leaves[i] = out
    return jax.tree.unflatten(treedef, leaves)


# ---------------------------------------------------------------- accumulate_grads


@dataclass(frozen=True)
class LoopSpec:
    """The static part of an accumulate loop, as a parameter of its primitive.

    Operands of the primitive: `num_consts` loop-invariant values, then the batch leaves, each
    `(num_microbatches, ...)`. Operands of `body`: the invariants, one microbatch's leaves, its index (int32).

    Args:
        body: closed jaxpr without constants.
        reductions: one for each result of `body`.
        schedule: a schedule object, or a tuple of tuples of `Task`.
        line: `file:line` of the `accumulate_grads` call.
        leaves: name and type of each leaf of a microbatch, such as `"batch['x'] float32[2,4]"`.
    """

    body: Any
    num_consts: int
    num_microbatches: int
    reductions: tuple[Reduction, ...]
    schedule: Any
    line: str
    leaves: tuple[str, ...]

    # Two loops are the same parameter only if they are the same object: jaxprs compare by identity, and that is what
    # JAX's caches need. A user's schedule class may not be hashable at all.
    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return id(self)


def _loop_reference(*operands, spec: LoopSpec):
    """The loop in plain JAX."""
    consts, batch = operands[: spec.num_consts], operands[spec.num_consts :]
    outs = [v.aval for v in spec.body.jaxpr.outvars]
    n = spec.num_microbatches
    # Keys can only be stacked, which the scan itself does.
    start: list[Any] = [
        None if _is_key(o) else explicit.bring(r.start(o.shape, o.dtype, n), _loop_sharding(r, o))
        for r, o in zip(spec.reductions, outs, strict=True)
    ]

    def microbatch(carry, index_and_leaves):
        index, leaves = index_and_leaves
        values = jax_compat.closed_call(spec.body, [*consts, *leaves, index])
        keys = [v for v, o in zip(values, outs, strict=True) if _is_key(o)]
        carry = [
            c if _is_key(o) else r.step(c, v, index)
            for r, c, v, o in zip(spec.reductions, carry, values, outs, strict=True)
        ]
        return carry, keys

    carry, keys = lax.scan(microbatch, start, (jnp.arange(n, dtype=jnp.int32), list(batch)))
    stacked = iter(keys)
    return [next(stacked) if _is_key(o) else r.end(c, n) for r, c, o in zip(spec.reductions, carry, outs, strict=True)]


def _is_key(aval: Any) -> bool:
    return jax_compat.is_key_dtype(aval.dtype)


def _loop_avals(*avals, spec: LoopSpec):
    return [
        jax_compat.ShapedArray(
            r.shape(v.aval.shape, spec.num_microbatches), v.aval.dtype, sharding=_loop_sharding(r, v.aval)
        )
        for r, v in zip(spec.reductions, spec.body.jaxpr.outvars, strict=True)
    ]


def _loop_sharding(reduction: Reduction, value: Any) -> Any:
    """The sharding of a result of the loop: on explicit axes that of its values, else None."""
    known = explicit.of(value)
    return known and known.update(spec=known.spec.update(partitions=reduction.spec(known.spec.partitions)))


def _loop_eager(*operands, spec: LoopSpec):
    try:
        return jax.jit(lambda *xs: _loop_reference(*xs, spec=spec))(*operands)
    except FloatingPointError:  # JAX found a NaN, and calls the whole loop "scan"
        names = [leaf.rpartition(" ")[0] for leaf in spec.leaves]
        if text := nonfinite.blame_in_loop(spec.body, operands, spec.num_consts, spec.num_microbatches, names):
            raise FloatingPointError(text) from None
        raise


class _Join:
    """One result of a loop whose microbatches run one by one."""

    def __init__(self, reduction: Reduction, num_microbatches: int) -> None:
        self._reduction, self._count = reduction, num_microbatches
        self._total: Any = None
        self._keys: list[jax.Array] = []  # can only be stacked
        self._no_tangent: Any = None

    def add(self, value: jax.Array, index: jax.Array) -> None:
        if jax_compat.is_float0(value):
            self._no_tangent = _no_tangent(self._reduction, value, self._count)
            return
        if _is_key(value):
            self._keys.append(value)
            return
        if self._total is None:
            if self._reduction.starts_from_first:  # a maximum starts at infinity, which `jax_debug_infs` forbids
                self._total = value
                return
            start = self._reduction.start(value.shape, value.dtype, self._count)
            self._total = explicit.bring(start, _loop_sharding(self._reduction, jax.typeof(value)))
        self._total = self._reduction.step(self._total, value, index)

    def result(self) -> jax.Array:
        if self._no_tangent is not None:
            return self._no_tangent
        return jnp.stack(self._keys) if self._keys else self._reduction.end(self._total, self._count)


loop_p = jax_compat.new_primitive(
    "accumulate_grads",
    abstract_eval=_loop_avals,
    reference=_loop_reference,
    effects=lambda spec: spec.body.effects,  # else plain JAX knows nothing of prints inside
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
        fn: `fn(microbatch)`, or `fn(microbatch, i)` with `pass_index`, `i` an int32 scalar. It may close over the
            step's values, may contain `pipeline_yield`, and may compute gradients or not.
        schedule: a schedule such as `Std1F1B(num_stages)`, or one list of `Task`s an actor.
        reduce: a tree prefix of `fn`'s result made of `Sum() Max() Min() Mean() Stack() Concat(axis)`. Default: the
            first element of a result tuple is summed, the others are stacked; a result that is no tuple is summed.
        pass_index: pass the microbatch's index to `fn`.
        num_microbatches: how many microbatches the batch must have, so that one which was not cut into microbatches,
            or has its axes in another order, is an error; None: as many as its leading axis has entries.

    Returns:
        A function of `batch`, a pytree of arrays `(num_microbatches, microbatch_size, ...)`, to `fn`'s result tree
        with every leaf reduced.

    Raises:
        StageError: `batch` has no leaves, or they do not share a leading microbatch axis, or not one of
            `num_microbatches`.
        TypeError: `schedule` is a batch; `reduce` does not fit `fn`'s result, or is not given where `fn` returns
            `(loss, grads)`.

    Source: the JaxPP paper, section "Gradient Accumulation Loop".
    """
    line = jax_origins.caller_line()
    with HiddenFrames():
        loop_checks.check_no_batch(schedule, line)
        wanted = loop_checks.check_option(num_microbatches)
    return UncalledLoop(lambda batch: _run_loop(fn, batch, schedule, reduce, pass_index, wanted, line), line)


class UncalledLoop:
    """A function of the batch that says to be called where somebody takes it for its results."""

    def __init__(self, run: Callable[[Any], Any], line: str):
        self._run, self._line, self.__name__ = run, line, "run"

    def __call__(self, batch: Any) -> Any:
        with HiddenFrames():
            return self._run(batch)

    def __getitem__(self, key: object) -> NoReturn:
        """Unpacking comes here too, since there is no `__iter__`."""
        with HiddenFrames():
            raise deliberate(TypeError(self.advice()))

    def advice(self) -> str:
        """What to write instead."""
        return (
            f"{self._line}: accumulate_grads returns a function, and this one has no results yet: call it with the "
            "batch, `accumulate_grads(fn, schedule)(batch)`"
        )


def _run_loop(
    fn: Callable, batch: Any, schedule: Any, reduce: Any, pass_index: bool, wanted: int | None, line: str
) -> Any:
    """What the function that `accumulate_grads` returns does; `line` is the user's."""
    named, tree = jax.tree_util.tree_flatten_with_path(batch)
    names = tuple(f"batch{jax.tree_util.keystr(path)}" for path, _ in named)
    leaves = [leaf for _, leaf in named]
    avals = [jax.typeof(leaf) for leaf in leaves]
    num_microbatches = loop_checks.microbatch_count(names, [aval.shape for aval in avals], wanted, line)
    if jax_config.runs_op_by_op():
        leaves = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in leaves]
        microbatches = (jax.tree.unflatten(tree, [leaf[i] for leaf in leaves]) for i in range(num_microbatches))
        return _run_in_python(fn, microbatches, num_microbatches, reduce, pass_index, line)

    slices = [explicit.result_type(lambda x: lax.index_in_dim(x, 0, 0, keepdims=False), leaf) for leaf in leaves]
    index = jax.ShapeDtypeStruct((), jnp.int32)
    traced = jax.make_jaxpr(_named_as(fn, pass_index), return_shape=True)
    with tracebacks.framework_hints():
        closed, shapes = traced(jax.tree.unflatten(tree, slices), index)
    out_leaves, out_tree = jax.tree.flatten(shapes)
    if reduce is None:
        loop_checks.check_order(shapes, closed, line)
    reductions = loop_checks.reductions_for(reduce, shapes, line)
    results = [_no_tangent(r, leaf, num_microbatches) for r, leaf in zip(reductions, out_leaves, strict=True)]
    made = [k for k, result in enumerate(results) if result is None]
    lifted, consts = jax_compat.lift_consts(jax_compat.with_results(closed, made))
    joined = tuple(reductions[k] for k in made)
    types = tuple(f"{name} {aval.str_short()}" for name, aval in zip(names, closed.in_avals, strict=False))
    spec = LoopSpec(lifted, len(consts), num_microbatches, joined, _frozen(schedule), line, types)
    for k, result in zip(made, loop_p.bind(*consts, *leaves, spec=spec), strict=True):
        results[k] = result
    return jax.tree.unflatten(out_tree, results)


def _no_tangent(reduction: Reduction, value: Any, num_microbatches: int) -> Any:
    """Join gradients of integers (`allow_int`), which nothing has to compute; None for other values."""
    if not jax_compat.is_float0(value):
        return None
    return jax_compat.float0_array(reduction.shape(value.shape, num_microbatches))


def _named_as(fn: Callable, pass_index: bool) -> Callable:
    """`fn` as a function of a microbatch and its index. JAX names `fn` and its arguments where tracing fails.

    A new function each time: JAX recalls what it traced by function, and `fn` may have changed what it closes over.
    """

    def body(microbatch: Any, index: Any) -> Any:
        return fn(microbatch, index) if pass_index else fn(microbatch)

    functools.update_wrapper(body, fn, updated=())
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # builtins and the like
        names = []
    given = [*names[:1], *(names[1:2] if pass_index else ["microbatch_index"])]
    if len(given) == 2:
        params = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in given]
        # JAX reads it, and no stub of functions has it.
        body.__signature__ = inspect.Signature(params)  # type: ignore[attr-defined]
    return body


def _run_in_python(
    fn: Callable, microbatches: Iterable[Any], count: int, reduce: Any, pass_index: bool, line: str
) -> Any:
    """A Python loop over arrays that are here: `jax.disable_jit`, for a debugger."""
    joins: list[_Join] = []
    tree: Any = None
    for i, microbatch in enumerate(microbatches):
        index = jnp.int32(i)
        result = fn(microbatch, index) if pass_index else fn(microbatch)
        result = jax.tree.map(
            lambda x: x if isinstance(x, jax.Array) or jax_compat.is_float0(x) else jnp.asarray(x), result
        )
        values, tree = jax.tree.flatten(result)
        if not joins:
            joins = [_Join(r, count) for r in loop_checks.reductions_for(reduce, result, line)]
        for join, value in zip(joins, values, strict=True):
            join.add(value, index)
    return jax.tree.unflatten(tree, [join.result() for join in joins])


def _frozen(schedule: Any) -> Any:
    if isinstance(schedule, list | tuple):
        return tuple(tuple(row) if isinstance(row, list | tuple) else row for row in schedule)
    return schedule
