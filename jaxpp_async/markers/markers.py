"""markers: `pipeline_yield` and `accumulate_grads`, as primitives with their rules under plain JAX.

In: the user's values. Out: the same values with marks in the jaxpr that `compiler.partition` reads. Without a mesh
`pipeline_yield` is the identity and `accumulate_grads` a loop: a scan, or under `jax.disable_jit` a Python loop. Never
places or schedules anything.

nonfinite: computations that also say which of their operations make a NaN or an infinity.

The loop in plain JAX uses them and, by `compiler.emit`, so do tasks on actors, where `actors.devices.special_values`
reads what they say. They look only for what JAX's options forbid when they are traced.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpp_async.errors import StageError
from jaxpp_async.jax_bridge import jax_config, private_api, tracebacks
from jaxpp_async.jax_bridge.tracebacks import HiddenFrames, deliberate
from jaxpp_async.markers import logical_axes, loop_checks
from jaxpp_async.markers.reductions import Reduction

# ---------------------------------------------------------------- pipeline_yield
#
# marker:       (x, ...) -> (x, ..., token)     ends a stage
# marker_side:  (token, t, ...) -> (t, ...)     the same boundary for tangents (side="tangent") or cotangents
#
# The token is an empty array. It joins the sides of one boundary by dataflow, whatever jit, checkpoint or vmap do to
# the jaxpr between them: no counter, and a jitted block that is called three times is three boundaries.


def _marker_avals(*avals, name):
    return [*avals, private_api.ShapedArray(private_api.TOKEN_SHAPE, private_api.TOKEN_DTYPE)]


def _marker_reference(*values, name):
    return [*values, jnp.zeros(private_api.TOKEN_SHAPE, private_api.TOKEN_DTYPE)]


def _marker_jvp(primals, tangents, *, name):
    *outs, token = marker_p.bind(*primals, name=name)
    known = [i for i, t in enumerate(tangents) if not isinstance(t, private_api.Zero)]
    out_tangents = list(tangents)
    if known:
        marked = marker_side_p.bind(token, *[tangents[i] for i in known], side="tangent", name=name)
        for i, t in zip(known, marked, strict=True):
            out_tangents[i] = t
    zero = private_api.float0_zero(private_api.ShapedArray(private_api.TOKEN_SHAPE, private_api.TOKEN_DTYPE))
    return [*outs, token], [*out_tangents, zero]


def _marker_batch(operands, dims, *, name):
    results = marker_p.bind(*operands, name=name)
    return results, [*dims, None]


marker_p = private_api.new_primitive(
    "pipeline_yield",
    abstract_eval=_marker_avals,
    reference=_marker_reference,
    jvp=_marker_jvp,
    batch=_marker_batch,
)
private_api.always_save_in_checkpoint(marker_p)


def _side_jvp(primals, tangents, *, side, name):
    token, *values = primals
    outs = marker_side_p.bind(token, *values, side=side, name=name)
    known = [i for i, t in enumerate(tangents[1:]) if not isinstance(t, private_api.Zero)]
    out_tangents = list(tangents[1:])
    if known:
        marked = marker_side_p.bind(token, *[tangents[1 + i] for i in known], side=side, name=name)
        for i, t in zip(known, marked, strict=True):
            out_tangents[i] = t
    return outs, out_tangents


def _side_transpose(cotangents, token, *values, side, name):
    known = [i for i, ct in enumerate(cotangents) if not isinstance(ct, private_api.Zero)]
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


marker_side_p = private_api.new_primitive(
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
        None if _is_key(o) else logical_axes.bring(r.start(o.shape, o.dtype, n), _loop_sharding(r, o))
        for r, o in zip(spec.reductions, outs, strict=True)
    ]

    def microbatch(carry, index_and_leaves):
        index, leaves = index_and_leaves
        values = private_api.closed_call(spec.body, [*consts, *leaves, index])
        keys = [v for v, o in zip(values, outs, strict=True) if _is_key(o)]
        carry = [
            c if _is_key(o) else r.step(c, v, index)
            for r, c, v, o in zip(spec.reductions, carry, values, outs, strict=True)
        ]
        return carry, keys

    carry, keys = lax.scan(microbatch, start, (jnp.arange(n, dtype=jnp.int32), list(batch)))
    stacked = iter(keys)
    return [
        next(stacked) if _is_key(o) else r.end(c, n)
        for r, c, o in zip(spec.reductions, carry, outs, strict=True)
    ]


def _is_key(aval: Any) -> bool:
    return private_api.is_key_dtype(aval.dtype)


def _loop_avals(*avals, spec: LoopSpec):
    return [
        private_api.ShapedArray(
            r.shape(v.aval.shape, spec.num_microbatches), v.aval.dtype, sharding=_loop_sharding(r, v.aval)
        )
        for r, v in zip(spec.reductions, spec.body.jaxpr.outvars, strict=True)
    ]


def _loop_sharding(reduction: Reduction, value: Any) -> Any:
    """The sharding of a result of the loop: on explicit axes that of its values, else None."""
    known = logical_axes.of(value)
    return known and known.update(spec=known.spec.update(partitions=reduction.spec(known.spec.partitions)))


def _loop_eager(*operands, spec: LoopSpec):
    try:
        return jax.jit(lambda *xs: _loop_reference(*xs, spec=spec))(*operands)
    except FloatingPointError:  # JAX found a NaN, and calls the whole loop "scan"
        names = [leaf.rpartition(" ")[0] for leaf in spec.leaves]
        if text := blame_in_loop(spec.body, operands, spec.num_consts, spec.num_microbatches, names):
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
        if private_api.is_float0(value):
            self._no_tangent = _no_tangent(self._reduction, value, self._count)
            return
        if _is_key(value):
            self._keys.append(value)
            return
        if self._total is None:
            if self._reduction.starts_from_first:
                # a maximum starts at infinity, which `jax_debug_infs` forbids
                self._total = value
                return
            start = self._reduction.start(value.shape, value.dtype, self._count)
            self._total = logical_axes.bring(start, _loop_sharding(self._reduction, jax.typeof(value)))
        self._total = self._reduction.step(self._total, value, index)

    def result(self) -> jax.Array:
        if self._no_tangent is not None:
            return self._no_tangent
        return jnp.stack(self._keys) if self._keys else self._reduction.end(self._total, self._count)


loop_p = private_api.new_primitive(
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
    line = tracebacks.caller_line()
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
        microbatches = (
            jax.tree.unflatten(tree, [leaf[i] for leaf in leaves]) for i in range(num_microbatches)
        )
        return _run_in_python(fn, microbatches, num_microbatches, reduce, pass_index, line)

    slices = [
        logical_axes.result_type(lambda x: lax.index_in_dim(x, 0, 0, keepdims=False), leaf) for leaf in leaves
    ]
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
    lifted, consts = private_api.lift_consts(private_api.with_results(closed, made))
    joined = tuple(reductions[k] for k in made)
    types = tuple(f"{name} {aval.str_short()}" for name, aval in zip(names, closed.in_avals, strict=False))
    spec = LoopSpec(lifted, len(consts), num_microbatches, joined, _frozen(schedule), line, types)
    for k, result in zip(made, loop_p.bind(*consts, *leaves, spec=spec), strict=True):
        results[k] = result
    return jax.tree.unflatten(out_tree, results)


def _no_tangent(reduction: Reduction, value: Any, num_microbatches: int) -> Any:
    """Join gradients of integers (`allow_int`), which nothing has to compute; None for other values."""
    if not private_api.is_float0(value):
        return None
    return private_api.float0_array(reduction.shape(value.shape, num_microbatches))


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
            lambda x: x if isinstance(x, jax.Array) or private_api.is_float0(x) else jnp.asarray(x), result
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


# ---------------------------------------------------------------- nonfinite

_NAN, _INF = 1, 2
_WORDS = {_NAN: "nan", _INF: "inf"}

CALLS = frozenset().union(
    ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "checkpoint", "remat", "remat2"),
    ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
)
"""Primitives that mean what is inside them. `compiler.primitives` has the same names, by what they are for."""


def wanted() -> bool:
    """Whether JAX's options forbid NaNs or infinities."""
    return jax_config.forbids_nans() or jax_config.forbids_infs()


class Checker:
    """Evaluates equations under a trace and looks at each floating value that they make.

    Attributes:
        places: where and by what each value was made that was looked at, in program order.
    """

    def __init__(self) -> None:
        self.places: list[str] = []
        self._found: list[Any] = []

    def found(self) -> Any:
        """A vector with a small integer for each of `places`: what its value has, 0 for nothing. `blame` reads it."""
        return jnp.stack(self._found) if self._found else jnp.zeros((0,), jnp.uint8)

    def check_argument(self, value: Any) -> None:
        """Look at a value that came in: it has a place without words."""
        self.places.append("")
        self._found.append(_seen(value) if _is_floating(value) else jnp.uint8(0))

    def check_result(self, value: Any, line: str, operation: str) -> None:
        """Look at a value that an operation made, if it is a floating one."""
        if _is_floating(value):
            self.places.append(f"{line}: {operation}")
            self._found.append(_seen(value))

    def run_closed(self, closed: Any, args: Sequence[Any], around: str) -> list[Any]:
        """The results of a closed jaxpr; `around` is the line of what has no line of its own."""
        env: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(closed.jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, private_api.Literal) else env[atom]

        for eqn in closed.jaxpr.eqns:
            results = self.run_equation(eqn, [read(a) for a in eqn.invars], around)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(a) for a in closed.jaxpr.outvars]

    def run_equation(self, eqn: Any, operands: Sequence[Any], around: str) -> list[Any]:
        """The results of an equation. Calls and scans are entered; what else has jaxprs inside is looked at as one."""
        line = tracebacks.source_line(eqn)
        line = around if line == "unknown line" else line
        if eqn.primitive.name == "scan":
            return self._scan(private_api.scan_parts(eqn), operands, line)
        if eqn.primitive.name in CALLS and (inner := private_api.inner_jaxpr(eqn)) is not None:
            return self.run_closed(inner, operands, line)
        results = private_api.bind_eqn(eqn, operands)
        for value in results:
            self.check_result(value, line, eqn.primitive.name)
        return results

    def _scan(self, parts: private_api.ScanParts, operands: Sequence[Any], line: str) -> list[Any]:
        consts = operands[: parts.num_consts]
        inside = Checker()

        def body(carry: list[Any], xs: list[Any]) -> Any:
            inside.__init__()  # JAX may trace it twice
            results = inside.run_closed(parts.body, [*consts, *carry, *xs], line)
            return results[: parts.num_carry], (results[parts.num_carry :], inside.found())

        start, xs = list(operands[parts.num_consts : parts.first_x]), list(operands[parts.first_x :])
        carry, (stacked, found) = lax.scan(body, start, xs, length=parts.length, reverse=parts.reverse)
        self.places += inside.places
        self._found += list(found.max(axis=0, initial=0)) if inside.places else []
        return [*carry, *stacked]


def _is_floating(value: Any) -> bool:
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return False
    spec = jax.typeof(value).sharding.spec
    # of sums over devices, pending or made, JAX computes no `any`
    return not spec.unreduced and not spec.reduced


def _seen(value: Any) -> Any:
    """Find the worst that a value has: `_NAN`, `_INF` or 0."""
    value = value.astype(jnp.float32) if value.dtype.itemsize < 2 else value  # of 8 bits
    seen = jnp.uint8(0)
    if jax_config.forbids_infs():
        seen = jnp.where(jnp.any(jnp.isinf(value)), jnp.uint8(_INF), seen)
    if jax_config.forbids_nans():
        seen = jnp.where(jnp.any(jnp.isnan(value)), jnp.uint8(_NAN), seen)
    return seen


def blame(found: Any, places: Sequence[str], names: Sequence[str | None], where: str = "") -> str | None:
    """Name the first operation that made a NaN or an infinity, in JAX's words, and the arguments that came with one.

    Args:
        found, places: as `Checker` has them.
        names: of the arguments that were looked at, the user's; None: it has none.
        where: said behind the operation, such as `", microbatch 2"`.

    Returns:
        None: there is neither.
    """
    seen = [(place, kind) for place, kind in zip(places, np.asarray(found).tolist(), strict=True)]
    given = [(name, kind) for name, (_, kind) in zip(names, seen, strict=False) if kind]
    made = next(((place, kind) for place, kind in seen if kind and place), None)
    came = ", ".join(dict.fromkeys(name for name, _ in given if name))
    if made is None:
        return f"{came} had an invalid value ({_WORDS[given[0][1]]}) already{where}" if came else None
    line, _, operation = made[0].rpartition(": ")
    text = f"{line}: invalid value ({_WORDS[made[1]]}) encountered in {operation}{where}"
    return f"{text}; {came} had one already" if came else text


def blame_in_loop(
    body: Any, operands: Sequence[Any], num_consts: int, num_microbatches: int, names: Sequence[str]
) -> str | None:
    """Name the operation of a loop's body, and the microbatch, that make a NaN or an infinity.

    Args:
        body: closed jaxpr of invariants, one microbatch's leaves and its index.
        operands: the invariants, then the batch's leaves, each with a leading axis of microbatches.
        names: of the leaves.

    Returns:
        None: no operation of the body does it by itself.
    """
    checker = Checker()

    @jax.jit
    def look_at(operands: list[Any], index: Any) -> Any:
        checker.__init__()
        leaves = [lax.dynamic_index_in_dim(x, index, 0, keepdims=False) for x in operands[num_consts:]]
        args = [*operands[:num_consts], *leaves]
        for arg in args:
            checker.check_argument(arg)
        checker.run_closed(body, [*args, index], "unknown line")
        return checker.found()

    named = [*["a value that the loop's function closes over"] * num_consts, *names]
    for i in range(num_microbatches):
        found = look_at(list(operands), np.int32(i))
        if text := blame(found, checker.places, named, f", microbatch {i}"):
            return text
    return None
