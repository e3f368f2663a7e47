"""compiler.tracing: a step function and its arguments' types in, a `Traced` step out. Never looks at a value.

Nested `jit`s are inlined, so that stages are cut between equations and not between blocks; what cannot be cut at a
marker (a scan, a cond) stays one operation and must not contain one.

compiler.choices: payloads of operations that choose between branches. In: branches as flat operations. Out:
functions of arrays, to be called under a JAX trace. Runs nothing by itself.

compiler.weak: arguments that are weakly typed at the first step only. In: a step and its arguments' types. Out: its
trace, with such arguments taken as what they are from the second step on.

`jnp.full(shape, 0.1)` is weakly typed, `p - lr * grad` is not: a state made of the first comes back as the second, and
the step would be compiled twice. Where the weak type changes nothing in the computation, one compiled form serves both.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpp_async.compiler import debug_callbacks, scan
from jaxpp_async.compiler.evaluate import read, run_ops, value_type
from jaxpp_async.compiler.ir import (
    Branches,
    Captured,
    Flat,
    Lit,
    Loop,
    Op,
    Print,
    PrintOperand,
    Ref,
    Traced,
    Types,
    ValueType,
    used_ids,
)
from jaxpp_async.compiler.ir_slicing import eliminate_dead
from jaxpp_async.compiler.primitives import (
    CALLBACKS,
    CALLS,
    CHECKPOINTS,
    LAID_OUT_BY_USER,
    LOOP,
    MARKER,
    MARKER_SIDE,
    PRINTS,
    inlines,
)
from jaxpp_async.compiler.scan import Where
from jaxpp_async.errors import ShardingError, UnsupportedError
from jaxpp_async.jax_bridge import private_api, tracebacks
from jaxpp_async.markers import logical_axes, markers
from jaxpp_async.markers.reductions import Stack

# Constants above this become step arguments: inside an executable they would be copied into every task that uses them.
CAPTURE_BYTES = 1024


def trace(
    fn: Callable,
    args: Sequence[Any],
    *,
    static_argnums: Sequence[int] = (),
    argument_names: tuple[str, ...] = (),
) -> Traced:
    """Trace `fn` on `args`, whose leaves are `jax.ShapeDtypeStruct`s (static arguments: the values themselves).

    Raises:
        UnsupportedError: the program has a construct that cannot be pipelined.
    """
    dynamic = [i for i in range(len(args)) if i not in static_argnums]

    # Wrapped: JAX's own errors then name the user's function and its arguments.
    @functools.wraps(fn)
    def flat_fn(*dynamic_args):
        full = list(args)
        for position, value in zip(dynamic, dynamic_args, strict=True):
            full[position] = value
        results = fn(*full)
        for leaf in jax.tree.leaves(results):
            if isinstance(leaf, markers.UncalledLoop):  # else JAX says that it is no array
                raise tracebacks.deliberate(TypeError(leaf.advice()))
        return _with_no_tangents(results)

    dynamic_args = jax.tree.map(logical_axes.replicate_unless_given, tuple(args[i] for i in dynamic))
    closed, out_shapes = _traced(flat_fn, dynamic_args)
    named, in_tree = jax.tree_util.tree_flatten_with_path(dynamic_args)
    names, arg_of = [], []
    for path, _ in named:
        arg = dynamic[path[0].idx]
        base = argument_names[arg] if arg < len(argument_names) else f"arg{arg}"
        names.append(base + jax.tree_util.keystr(path[1:]))
        arg_of.append(arg)
    out_named, out_tree = jax.tree_util.tree_flatten_with_path(_with_no_tangents(out_shapes))
    flattener = _Flattener()
    flat = flattener.top(closed)
    return Traced(
        flat=eliminate_dead(flat),
        types=flattener.types,
        arg_names=tuple(names),
        arg_of=tuple(arg_of),
        captured=tuple(flattener.captured.values()),
        out_names=tuple("result" + jax.tree_util.keystr(path) for path, _ in out_named),
        in_tree=in_tree,
        out_tree=out_tree,
        prints=tuple(flattener.prints),
    )


@jax.tree_util.register_pytree_node_class
class _NoTangent:
    """A result of dtype `float0`, the gradient of an integer: known by its shape, so the step makes nothing of it.

    In a tree of results it is no leaf, and becomes an array again where the tree is put together.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def tree_flatten(self) -> tuple[tuple[()], tuple[int, ...]]:
        return (), self.shape

    @classmethod
    def tree_unflatten(cls, shape: tuple[int, ...], _: tuple[()]) -> np.ndarray:
        return private_api.float0_array(shape)


def _with_no_tangents(results: Any) -> Any:
    return jax.tree.map(lambda x: _NoTangent(x.shape) if private_api.is_float0(x) else x, results)


def _traced(fn: Callable, args: Sequence[Any]) -> tuple[Any, Any]:
    """The user's own errors pass as they are, with the user's traceback."""
    try:
        with tracebacks.framework_hints():
            return jax.make_jaxpr(fn, return_shape=True)(*args)
    except private_api.ShardingTypeError as error:  # on explicit axes; JAX says what to do
        raise ShardingError(f"{tracebacks.error_line(error)}: {error}") from error
    except (ValueError, RuntimeError) as error:
        if private_api.is_missing_gpu_error(error):
            raise UnsupportedError(
                f"{tracebacks.error_line(error)}: the step needs a GPU in this process to be traced ({error}); "
                "start it where there is one, or use an implementation that can do without "
                "(implementation='xla', if this is jax.nn.dot_product_attention)"
            ) from error
        if not private_api.is_unknown_axis_error(error):
            raise
        axes = list(jax.sharding.get_abstract_mesh().shape)
        advice = (
            "give spmd_mesh that axis or correct the constraint" if axes else "give RemoteMesh an spmd_mesh"
        )
        if "shard_map" in str(error):
            advice = "call shard_map without `mesh=`, which then takes the actors' mesh"
        raise ShardingError(
            f"{tracebacks.error_line(error)}: a sharding in the step does not fit the mesh, whose axes are "
            f"{axes or 'none'}: {error}; {advice}"
        ) from error


_LOOKED_AT = CALLBACKS | LAID_OUT_BY_USER | {LOOP, MARKER, MARKER_SIDE}
"""Primitives whose equations are more than one operation among others, though they may carry no jaxpr."""


def _refuse_other_meshes(eqn: Any, line: str) -> None:
    """Raise a `ShardingError` if an equation names a mesh of devices that actors do not have."""
    actors = dict(jax.sharding.get_abstract_mesh().shape)
    for mesh in private_api.meshes_named(eqn):
        named = dict(mesh.shape)
        # Of one device: whatever is split over it stays whole.
        if named == actors or (math.prod(named.values()) == 1 and math.prod(actors.values()) == 1):
            continue
        have = f"a mesh of its own, {actors}" if actors else "one device and no mesh"
        raise ShardingError(
            f"{line}: `{eqn.primitive.name}` names a mesh {named} of this process's devices, but each actor has {have}"
            f"; give RemoteMesh spmd_mesh={named}, or write a PartitionSpec over their axes, or jpp.shard(x, names)"
        )


def _refuse_other_meshes_inside(eqn: Any, around: Where) -> None:
    """The same for the equations that one carries."""
    for inner in private_api.sub_jaxprs(eqn):
        for each in inner.eqns:
            _refuse_other_meshes(each, _line(each, around))
            _refuse_other_meshes_inside(each, around)


class _Flattener:
    """Inlines calls and numbers values."""

    def __init__(self) -> None:
        self.types = Types()
        self.known: dict[int, tuple[Any, ValueType]] = {}  # by id() of the aval, which is kept alive
        self.origins = tracebacks.Origins()
        self.captured: dict[int, Captured] = {}  # by id() of the array, which `Captured` keeps alive
        self.prints: list[Any] = []  # of the body that is being inlined
        self.stacks: dict[int, list[Ref]] = {}  # see `scans.Flattener`

    def top(self, closed: Any) -> Flat:
        jaxpr, consts = private_api.open_jaxpr(closed)
        inputs = [self.types.new(self.type_of(v.aval)) for v in jaxpr.invars]
        env: dict[Any, Ref] = dict(zip(jaxpr.invars, inputs, strict=True))
        ops: list[Op | Loop] = []
        outputs = self.inline(jaxpr, consts, env, ops, Where(""))
        inputs += [c.value_id for c in self.captured.values()]
        return Flat(tuple(inputs), tuple(ops), (*outputs, *debug_callbacks.hidden_results(self.prints)))

    def inline(
        self, jaxpr: Any, consts: Sequence[Any], env: dict[Any, Ref], ops: list, where: Where
    ) -> list[Ref]:
        """Append `jaxpr`'s equations to `ops`; `env` maps its variables. Returns its results."""
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.constant(const)

        literal, constant = private_api.Literal, self.constant

        for eqn in jaxpr.eqns:
            inputs: list[Ref] = [constant(a.val) if type(a) is literal else env[a] for a in eqn.invars]
            if eqn.primitive.name not in _LOOKED_AT and private_api.is_simple(eqn):
                results = self.simple(eqn, inputs, ops, where)
            else:
                results = self.equation(eqn, inputs, ops, self.where(eqn, where))
            if len(results) == 1:
                env[eqn.outvars[0]] = results[0]
            else:
                env.update(zip(eqn.outvars, results, strict=True))
        return [constant(a.val) if type(a) is literal else env[a] for a in jaxpr.outvars]

    def where(self, eqn: Any, around: Where) -> Where:
        """Where an equation of a jaxpr stands that itself stands `around`."""
        return Where(_line(eqn, around), around.transposed or self.origins.of(eqn)[0], around.in_loop)

    def type_of(self, aval: Any) -> ValueType:
        """The type of a value; a step has thousands of values and a few dozen avals."""
        if (entry := self.known.get(id(aval))) is None:
            entry = self.known[id(aval)] = aval, value_type(aval)
        return entry[1]

    def made(self, eqn: Any) -> tuple[int, ...]:
        """New ids for an equation's results; -1 for those that nobody wants."""
        drop, new, type_of = private_api.DropVar, self.types.new, self.type_of
        return tuple([-1 if type(v) is drop else new(type_of(v.aval)) for v in eqn.outvars])

    def simple(self, eqn: Any, inputs: list[Ref], ops: list, where: Where) -> Sequence[Ref]:
        """Append an equation that wraps nothing: one of the thousands of which a step consists."""
        variables = eqn.outvars
        if len(variables) == 1 and type(v := variables[0]) is not private_api.DropVar:
            outputs = (self.types.new(self.type_of(v.aval)),)
        else:
            outputs = self.made(eqn)
        transposed, recomputed = self.origins.of(eqn)
        params = {"repeats": functools.partial(_repeats, eqn)} if recomputed and where.in_loop else {}
        run = functools.partial(private_api.bind_eqn, eqn)
        transposed = transposed or where.transposed
        ops.append(Op(eqn.primitive.name, tuple(inputs), outputs, run, _line(eqn, where), transposed, params))
        return outputs

    def equation(self, eqn: Any, inputs: list[Ref], ops: list, where: Where) -> Sequence[Ref]:
        name = eqn.primitive.name
        if name == LOOP:
            return self.loop(eqn, inputs, ops)
        if name in PRINTS:
            self.prints.append(debug_callbacks.print_of(eqn, inputs, where.line))
            return []
        _refuse_other_meshes(eqn, where.line)
        inner = private_api.inner_jaxpr(eqn)
        within = _within(eqn)
        marked = _marks(within)
        if debug_callbacks.can_lift(eqn) and not marked:
            return self.lifted(eqn, inputs, ops, where)
        if inner is not None and inlines(
            name,
            marked=bool(marked),
            prints=bool(within & PRINTS),
            pinned=private_api.pins_shardings(eqn),
            in_loop=where.in_loop,
        ):
            jaxpr, consts = private_api.open_jaxpr(inner)
            env = dict(zip(jaxpr.invars, inputs, strict=True))
            return self.inline(jaxpr, consts, env, ops, where)
        # One that goes over what an unrolled scan kept for each layer (a checkpoint around that scan) is unrolled too.
        if name == "scan" and LOOP not in marked and (marked or scan.reads_stacks(self, eqn, inputs)):
            return scan.unrolled(self, eqn, inputs, ops, where)
        if marked:
            raise UnsupportedError(
                f"{where.line}: {' and '.join(sorted(marked))} inside `{name}` cannot be pipelined yet; "
                "move it out (write the loop or the choice in Python)"
            )
        debug_callbacks.refuse_host(
            eqn, where.line, functools.partial(_stage, ops) if where.in_loop else None
        )
        _refuse_other_meshes_inside(eqn, where)
        outputs = self.made(eqn)
        params = {"side": eqn.params["side"]} if name == MARKER_SIDE else {}
        if name in (MARKER, MARKER_SIDE):
            params["name"] = eqn.params["name"]
        if where.in_loop and self.origins.of(eqn)[1]:
            params["repeats"] = functools.partial(_repeats, eqn)
        run = functools.partial(private_api.bind_eqn, eqn)
        op = Op(name, tuple(inputs), outputs, run, where.line, where.transposed, params)
        ops.append(self.cuttable(op, eqn) if where.in_loop else self.opened(op, eqn))
        return outputs

    def cuttable(self, op: Op, eqn: Any) -> Op:
        """An operation in a stage, with what a split of the stage's backward needs to take it apart."""
        # A large constant in there would have to become an operand, and the loop's operands are known by then.
        if op.name not in CHECKPOINTS | {"scan"} or private_api.largest_constant_inside(eqn) > CAPTURE_BYTES:
            return op
        if op.name == "scan":
            return dataclasses.replace(op, split=scan.splitter(self, eqn))
        return dataclasses.replace(op, expand=functools.partial(self.inside, eqn, op))

    def inside(self, eqn: Any, op: Op) -> tuple[tuple[Op, ...], tuple[Ref, ...]]:
        """What a checkpoint in a stage computes."""
        inner: list[Any] = []
        jaxpr, consts = private_api.open_jaxpr(private_api.inner_jaxpr(eqn))
        env = dict(zip(jaxpr.invars, op.inputs, strict=True))
        results = self.inline(jaxpr, consts, env, inner, Where(op.line, op.transposed, in_loop=True))
        return tuple(inner), tuple(results)

    def opened(self, op: Op, eqn: Any) -> Op:
        """An operation outside the loops, with what is inside it: placement takes it apart where it joins actors."""
        if op.name == "cond":
            bodies = [self.body(b, Where(op.line)) for b in eqn.params["branches"]]
            used = {r for b in bodies for r in used_ids(b.ops, b.outputs)}
            inside = tuple(c.value_id for c in self.captured.values() if c.value_id in used)
            bodies = [Flat((*b.inputs, *inside), b.ops, b.outputs) for b in bodies]
            ends = not any(
                "while" in private_api.primitives_inside(inner) for inner in private_api.sub_jaxprs(eqn)
            )
            chosen = branches(bodies, self.types, ends=ends)
            inputs = (*op.inputs, *inside)
            return dataclasses.replace(op, inputs=inputs, run=chosen.choose(bodies), branches=chosen)
        if op.name in CALLS | CHECKPOINTS:
            inner: list[Any] = []
            jaxpr, consts = private_api.open_jaxpr(private_api.inner_jaxpr(eqn))
            pins = private_api.pinned_shardings(eqn)
            inputs = [self.pinned(r, pin, inner, op.line) for r, pin in zip(op.inputs, pins[0], strict=True)]
            env = dict(zip(jaxpr.invars, inputs, strict=True))
            results = self.inline(jaxpr, consts, env, inner, Where(op.line, op.transposed))
            results = [self.pinned(r, pin, inner, op.line) for r, pin in zip(results, pins[1], strict=True)]
            return dataclasses.replace(op, expand=lambda: (tuple(inner), tuple(results)))
        return op

    def body(self, closed: Any, where: Where) -> Flat:
        """A branch, or a scan's body, as flat operations, over value ids of its own."""
        jaxpr, consts = private_api.open_jaxpr(closed)
        inputs = [self.types.new(self.type_of(v.aval)) for v in jaxpr.invars]
        ops: list[Op | Loop] = []
        outputs = self.inline(jaxpr, consts, dict(zip(jaxpr.invars, inputs, strict=True)), ops, where)
        return Flat(tuple(inputs), tuple(ops), tuple(outputs))

    def pinned(self, ref: Ref, sharding: Any, ops: list, line: str) -> Ref:
        """`ref` with a sharding that the user gave to a nested `jit`."""
        if sharding is None or not isinstance(ref, int):
            return ref
        out = self.types.new(self.types[ref])
        ops.append(Op("sharding_constraint", (ref,), (out,), functools.partial(_constrain, sharding), line))
        return out

    def lifted(self, eqn: Any, inputs: list[Ref], ops: list, where: Where) -> list[Ref]:
        """A checkpoint, and then the prints inside it: what they show becomes results of the checkpoint."""
        alone, consts, inside = debug_callbacks.lift(eqn)
        # A scan inside may still print.
        debug_callbacks.refuse_host(
            alone, where.line, functools.partial(_stage, ops) if where.in_loop else None
        )
        results = self.equation(alone, [*map(self.constant, consts), *inputs], ops, where)
        for inner, operands in inside:
            refs = [results[o] if isinstance(o, int) else self.constant(o.val) for o in operands]
            self.prints.append(debug_callbacks.print_of(inner, refs, tracebacks.source_line(inner)))
        return list(results[: len(eqn.outvars)])

    def loop(self, eqn: Any, inputs: list[Ref], ops: list) -> list[Ref]:
        spec: markers.LoopSpec = eqn.params["spec"]
        jaxpr, consts = private_api.open_jaxpr(spec.body)
        body_inputs = [self.types.new(self.type_of(v.aval)) for v in jaxpr.invars]
        body_ops: list[Op | Loop] = []
        env: dict[Any, Ref] = dict(zip(jaxpr.invars, body_inputs, strict=True))
        outer_prints, self.prints = self.prints, []
        body_outputs = self.inline(jaxpr, consts, env, body_ops, Where(spec.line, in_loop=True))
        body_prints, self.prints = self.prints, outer_prints
        if nested := next((op for op in body_ops if isinstance(op, Loop)), None):
            raise UnsupportedError(
                f"{nested.line}: accumulate_grads inside another accumulate_grads ({spec.line}) cannot be pipelined; "
                "write the inner one as a Python loop"
            )
        stacked = self.loop_prints(body_prints, body_inputs, inputs, spec)
        body_outputs += stacked
        # Arrays captured inside the body enter it as further invariants, under their own ids.
        used = used_ids(body_ops, body_outputs)
        inside = [c.value_id for c in self.captured.values() if c.value_id in used]
        ids = body_inputs[: spec.num_consts] + inside + body_inputs[spec.num_consts :]
        invariants = [*inputs[: spec.num_consts], *inside]
        outputs = tuple(self.types.new(self.type_of(v.aval)) for v in eqn.outvars)
        ops.append(
            Loop(
                body=Flat(tuple(ids), tuple(body_ops), tuple(body_outputs)),
                invariants=tuple(invariants),
                batch=tuple(inputs[spec.num_consts :]),
                outputs=(*outputs, *stacked.values()),
                reductions=(*spec.reductions, *[Stack()] * len(stacked)),
                schedule=spec.schedule,
                num_microbatches=spec.num_microbatches,
                line=spec.line,
                leaves=spec.leaves,
            )
        )
        return list(outputs)

    def loop_prints(
        self,
        inside: Sequence[Print],
        body_inputs: Sequence[int],
        inputs: Sequence[Ref],
        spec: markers.LoopSpec,
    ) -> dict[int, int]:
        """Keep a loop's prints. Returns the values it has to stack for them: id in the body to id outside."""
        if not inside:
            return {}
        n = spec.num_consts
        outside = [PrintOperand(r, per_microbatch=k >= n) for k, r in enumerate(inputs)]
        known = dict(zip(body_inputs, [*outside, PrintOperand(None)], strict=True))
        known.update((c.value_id, PrintOperand(c.value_id)) for c in self.captured.values())
        found, stacked = debug_callbacks.shown_outside(inside, known, self.types, spec.num_microbatches)
        self.prints.append(found)
        return stacked

    def constant(self, value: Any) -> Ref:
        # Asked first, since whether something is a `jax.Array` takes longer to find out than all the rest.
        is_key = not isinstance(value, _HOST_VALUES) and _is_key(value)
        return self.capture(value) if is_key or getattr(value, "nbytes", 0) > CAPTURE_BYTES else Lit(value)

    def capture(self, value: Any) -> int:
        if id(value) not in self.captured:
            array = value if isinstance(value, jax.Array) else np.asarray(value)
            new_id = self.types.new(value_type(jax.typeof(array)))
            self.captured[id(value)] = Captured(value, new_id)
        return self.captured[id(value)].value_id


_HOST_VALUES = np.ndarray | np.generic | int | float | complex


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and private_api.is_key_dtype(value.dtype)


def _line(eqn: Any, around: Where) -> str:
    own = tracebacks.source_line(eqn)
    return own if own != "unknown line" else around.line or own


def _stage(ops: Sequence[Op | Loop]) -> int:
    """The stage that an operation behind `ops` of a loop's body is written in."""
    return sum(isinstance(op, Op) and op.name == MARKER for op in ops)


def _constrain(sharding: Any, xs: Sequence[Any]) -> list[Any]:
    return [jax.lax.with_sharding_constraint(xs[0], sharding)]


def _repeats(eqn: Any, other: Op) -> bool:
    """Whether an operation does what an equation does, on whatever operands."""
    of = getattr(other.run, "args", ())
    return len(of) == 1 and private_api.same_computation(eqn, of[0])


def _within(eqn: Any) -> set[str]:
    """Names of the primitives inside the jaxprs that an equation carries."""
    return set().union(*map(private_api.primitives_inside, private_api.sub_jaxprs(eqn)))


def _marks(names: set[str]) -> set[str]:
    """Markers and loops among primitives."""
    return {MARKER if n == MARKER_SIDE else n for n in names & {MARKER, MARKER_SIDE, LOOP}}


def warn_of_markers_outside(traced: Traced) -> None:
    """Say where a `pipeline_yield` does nothing: outside every loop there are no stages."""
    lines = dict.fromkeys(op.line for op in traced.flat.ops if isinstance(op, Op) and op.name == MARKER)
    for line in lines:
        file, _, number = line.rpartition(":")
        warnings.warn_explicit(
            "pipeline_yield outside accumulate_grads, or in one with a jax.grad or jax.vmap around it (which makes a "
            "plain loop of it), ends no stage: this part of the step is not pipelined; call pipeline_yield in the "
            "function that accumulate_grads runs, and take jax.grad and jax.vmap in there too",
            UserWarning,
            file or line,
            int(number) if number.isdigit() else 0,
        )


# ---------------------------------------------------------------- choices


def branches(bodies: Sequence[Flat], types: Types, *, ends: bool) -> Branches:
    """The branches of a `cond`, for passes that split it.

    Args:
        bodies: one a branch, with the same results.
        types: of every value id, also of those that bodies get later.
        ends: no branch has a `while`.
    """
    return Branches(tuple(bodies), lambda chosen: _chooser(chosen, types), _select, ends)


def _chooser(bodies: Sequence[Flat], types: Types) -> Callable[[Sequence[Any]], Sequence[Any]]:
    def run(xs: Sequence[Any]) -> Sequence[Any]:
        return lax.switch(xs[0], [_function(body, dtypes) for body in bodies], *xs[1:])

    dtypes = [_dtype(refs, types) for refs in zip(*(body.outputs for body in bodies), strict=True)]
    return run


def _dtype(refs: Sequence[Ref], types: Types) -> Any:
    """The dtype of one result, which every branch gives; None for keys."""
    value_id = next((r for r in refs if isinstance(r, int)), None)
    if value_id is None:
        return _constant_dtype(refs[0].value) if isinstance(refs[0], Lit) else None
    return None if types[value_id].key_impl else jnp.dtype(types[value_id].aval.dtype)


def _function(body: Flat, dtypes: Sequence[Any]) -> Callable[..., list[Any]]:
    def run(*args: Any) -> list[Any]:
        env: dict[int, Any] = dict(zip(body.inputs, args, strict=True))
        # no branch has a loop: tracing refuses it
        run_ops([op for op in body.ops if isinstance(op, Op)], env)
        results = [read(env, r) for r in body.outputs]
        # A constant may be a Python number, whose dtype would follow the configuration.
        return [
            x if dtype is None else jnp.asarray(x, dtype) for x, dtype in zip(results, dtypes, strict=True)
        ]

    return run


def _select(xs: Sequence[Any]) -> list[Any]:
    """`cases[position]`, both computed. Constants among them become arrays of the others' type."""
    position, *cases = xs
    arrays = [x for x in cases if isinstance(x, jax.Array)]
    dtype = arrays[0].dtype if arrays else _constant_dtype(cases[0])
    return [
        lax.select_n(position, *(x if isinstance(x, jax.Array) else jnp.asarray(x, dtype) for x in cases))
    ]


def _constant_dtype(value: Any) -> Any:
    return private_api.canonical_dtype(np.asarray(value).dtype)


# ---------------------------------------------------------------- weak


def trace_settled(
    trace: Callable[[Sequence[Any]], Traced],
    args: Sequence[Any],
    static_argnums: Sequence[int],
    continued: Callable[[Traced], Mapping[int, int]],
) -> tuple[Traced, frozenset[int]]:
    """Trace a step with settled weak types.

    Args:
        trace: arguments to a traced step.
        args: leaves are `jax.ShapeDtypeStruct`s; static arguments as they are.
        continued: result leaf to the argument leaf it continues.

    Returns:
        The traced step, and the argument leaves that it takes weak as well as strong.
    """
    first = now = trace(args)
    if not any(first.types[v].weak for v in first.flat.inputs):
        return first, frozenset()
    settled: set[int] = set()
    while lost := _lost(now, continued(now)):
        settled |= lost
        now = trace(_strong(args, static_argnums, settled))
    if settled and list(_shape_of(first.flat, first.types)) == list(_shape_of(now.flat, now.types)):
        return now, frozenset(settled)
    return first, frozenset()


def _lost(traced: Traced, continues: Mapping[int, int]) -> set[int]:
    """Argument leaves that are weak and whose next value is not."""
    lost = set()
    for result, arg in continues.items():
        ref = traced.flat.outputs[result]
        if traced.types[traced.flat.inputs[arg]].weak and not (
            isinstance(ref, int) and traced.types[ref].weak
        ):
            lost.add(arg)
    return lost


def _strong(args: Sequence[Any], static_argnums: Sequence[int], leaves: set[int]) -> list[Any]:
    dynamic = [i for i in range(len(args)) if i not in static_argnums]
    flat, tree = jax.tree.flatten([args[i] for i in dynamic])
    for k in leaves:
        flat[k] = jax.ShapeDtypeStruct(flat[k].shape, flat[k].dtype, sharding=flat[k].sharding)
    strong = list(args)
    for i, arg in zip(dynamic, jax.tree.unflatten(tree, flat), strict=True):
        strong[i] = arg
    return strong


def _shape_of(flat: Flat, types: Types) -> Iterator[tuple]:
    """What is computed, without conversions that only take a weak type away."""
    for op in flat.ops:
        avals = tuple(types[o].aval for o in op.outputs if o >= 0)
        if isinstance(op, Loop):
            yield ("loop", avals, op.reductions, tuple(_shape_of(op.body, types)))
        elif op.name != "convert_element_type" or not _same_aval(op.inputs[0], op.outputs[0], types):
            yield (op.name, avals)
    yield ("return", *(types[r].aval if isinstance(r, int) else None for r in flat.outputs))


def _same_aval(ref: Any, output: int, types: Types) -> bool:
    return isinstance(ref, int) and output >= 0 and types[ref].aval == types[output].aval
