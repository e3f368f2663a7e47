"""Trace a step function on its arguments' types and flatten the jaxpr into a `Traced` step.

Nested `jit`s are inlined, so that a stage can end between any two equations. An equation that cannot be
divided at a stage marker (a cond) stays one operation and must not contain a marker. Scans with markers are
unrolled.

`trace_ignoring_weak_types` also removes weak types that only the first call has. For example, the state of
the first call may be `jnp.full(shape, 0.1)`, which is weakly typed. The state that the step returns for the
next call is `p - lr * grad`, which is not. So the step would be compiled twice. If the weak type does not
change the computation, both calls use one compiled step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, KeysView, Sequence
from typing import Any, cast

import jax
import numpy as np

from jaxpp_async.compiler import debug_callbacks, known_integers, row_access, scan
from jaxpp_async.compiler.continued_arguments import continued_arguments
from jaxpp_async.compiler.evaluate import branches, value_type
from jaxpp_async.compiler.ir import (
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
    renamed,
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
from jaxpp_async.schedules.cut import stages_of

# A larger constant becomes a step argument: inside an executable it would be copied into every task that uses
# it.
CAPTURE_BYTES = 1024


def trace(
    fn: Callable,
    args: Sequence[Any],
    *,
    static_argnums: Sequence[int] = (),
    argument_names: tuple[str, ...] = (),
) -> Traced:
    """Trace a step function with JAX, without running it, and return it as flat operations.

    Args:
        fn: the step function.
        args: the arguments of `fn`. Every leaf is a `jax.ShapeDtypeStruct`, except that static arguments are
            the values themselves.
        static_argnums: the positions of the static arguments in `args`.
        argument_names: the names of the parameters of `fn`, for error messages.

    Raises:
        UnsupportedError: the step has a construct that cannot be pipelined.
    """
    dynamic = [i for i in range(len(args)) if i not in static_argnums]

    # With `wraps`, JAX's own errors name the user's function and its arguments.
    @functools.wraps(fn)
    def flat_fn(*dynamic_args):
        full = list(args)
        for position, value in zip(dynamic, dynamic_args, strict=True):
            full[position] = value
        results = fn(*full)
        for leaf in jax.tree.leaves(results):
            if isinstance(leaf, markers.UncalledLoop):  # JAX would only say that the leaf is no array
                raise tracebacks.deliberate(TypeError(leaf.advice()))
        return _hide_float0(results)

    dynamic_args = jax.tree.map(logical_axes.replicate_unless_given, tuple(args[i] for i in dynamic))
    closed, out_shapes = _make_jaxpr(flat_fn, dynamic_args)
    named, in_tree = jax.tree_util.tree_flatten_with_path(dynamic_args)
    names, arg_of = [], []
    for path, _ in named:
        arg = dynamic[path[0].idx]
        base = argument_names[arg] if arg < len(argument_names) else f"arg{arg}"
        names.append(base + jax.tree_util.keystr(path[1:]))
        arg_of.append(arg)
    out_named, out_tree = jax.tree_util.tree_flatten_with_path(_hide_float0(out_shapes))
    flattener = _Flattener()
    flat = flattener.flatten_step(closed)
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


def trace_ignoring_weak_types(
    fn: Callable,
    args: Sequence[Any],
    *,
    static_argnums: Sequence[int],
    argument_names: tuple[str, ...],
) -> tuple[Traced, frozenset[int]]:
    """Trace a step function so that its first and its later calls share one compilation where possible.

    An argument such as a training state may be weakly typed in the first call only: later calls get a result
    of the step in its place, which is strongly typed. If strong types in the first call do not change the
    computation, the argument is traced as strongly typed.

    Args:
        fn: the step function.
        args: the arguments of `fn`. Every leaf is a `jax.ShapeDtypeStruct`, except that static arguments are
            the values themselves.
        static_argnums: the positions of the static arguments in `args`.
        argument_names: the names of the parameters of `fn`, for error messages.

    Returns:
        The traced step, and the positions of the argument leaves for which callers may pass weakly or
        strongly typed arrays.

    Raises:
        UnsupportedError: the step has a construct that cannot be pipelined.
    """
    trace_on = functools.partial(trace, fn, static_argnums=static_argnums, argument_names=argument_names)
    first = now = trace_on(args)
    if not any(first.types[v].weak for v in first.flat.inputs):
        return first, frozenset()
    made_strong: set[int] = set()
    while losing := _losing_weak_type(now):
        made_strong |= losing
        now = trace_on(_without_weak_types(args, static_argnums, made_strong))
    if made_strong and list(_computation(first.flat, first.types)) == list(_computation(now.flat, now.types)):
        return now, frozenset(made_strong)
    return first, frozenset()


def warn_of_markers_outside(traced: Traced) -> None:
    """Warn about each `pipeline_yield` outside a microbatch loop, where it has no effect."""
    lines = dict.fromkeys(op.line for op in traced.flat.ops if isinstance(op, Op) and op.name == MARKER)
    for line in lines:
        file, _, number = line.rpartition(":")
        warnings.warn_explicit(
            "pipeline_yield outside accumulate_grads, or in one with a jax.grad or jax.vmap around it (which "
            "makes a plain loop of it), ends no stage: this part of the step is not pipelined; call "
            "pipeline_yield in the function that accumulate_grads runs, and take jax.grad and jax.vmap in "
            "there too",
            UserWarning,
            file or line,
            int(number) if number.isdigit() else 0,
        )


@jax.tree_util.register_pytree_node_class
class _Float0Result:
    """A placeholder for a result of dtype `float0` (the gradient of an integer), which has no data.

    In a tree of results the placeholder is a node without leaves, so that the step computes nothing for it.
    `jax.tree.unflatten` replaces the placeholder by a `float0` array.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def tree_flatten(self) -> tuple[tuple[()], tuple[int, ...]]:
        return (), self.shape

    @classmethod
    def tree_unflatten(cls, shape: tuple[int, ...], _: tuple[()]) -> np.ndarray:
        return private_api.float0_array(shape)


def _hide_float0(results: Any) -> Any:
    return jax.tree.map(lambda x: _Float0Result(x.shape) if private_api.is_float0(x) else x, results)


def _make_jaxpr(fn: Callable, args: Sequence[Any]) -> tuple[Any, Any]:
    """Call `jax.make_jaxpr`; if JAX raises an unhelpful error, raise one with advice for the user instead.

    Other errors, such as those of the user's own code, are raised unchanged.

    Returns:
        The closed jaxpr, and the tree of the results' shapes.
    """
    try:
        with tracebacks.framework_hints():
            return jax.make_jaxpr(fn, return_shape=True)(*args)
    except private_api.ShardingTypeError as error:  # on explicit axes; JAX's message says what to do
        raise ShardingError(f"{tracebacks.error_line(error)}: {error}") from error
    except (ValueError, RuntimeError) as error:
        if private_api.is_missing_gpu_error(error):
            raise UnsupportedError(
                f"{tracebacks.error_line(error)}: the step needs a GPU in this process to be traced "
                f"({error}); start it where there is one, or use an implementation that can do without "
                "(implementation='xla', if this is jax.nn.dot_product_attention)"
            ) from error
        if not private_api.is_unknown_axis_error(error):
            raise
        axes = list(jax.sharding.get_abstract_mesh().shape)
        advice = (
            "give spmd_mesh that axis or correct the constraint" if axes else "give RemoteMesh an spmd_mesh"
        )
        if private_api.is_other_mesh_error(error):
            advice = "call shard_map without `mesh=`, which then takes the actors' mesh"
        raise ShardingError(
            f"{tracebacks.error_line(error)}: a sharding in the step does not fit the mesh, whose axes are "
            f"{axes or 'none'}: {str(error).rstrip('.')}; {advice}"
        ) from error


# ---------------------------------------------------------------- equations to operations

_NOT_SIMPLE = CALLBACKS | LAID_OUT_BY_USER | {LOOP, MARKER, MARKER_SIDE}
"""Primitives whose equations the fast path `add_simple` cannot translate, even if they contain no jaxpr."""

_MAY_BE_KNOWN = known_integers.FUNCTIONS.keys() | row_access.REWRITES.keys()
"""Primitives whose result may be known, or that may read rows at known positions."""

_HOST_VALUES = np.ndarray | np.generic | int | float | complex


class _Flattener:
    """A translator of jaxprs to flat operations, which inlines calls and numbers all values."""

    def __init__(self) -> None:
        self.types = Types()
        self.known: dict[int, tuple[Any, ValueType]] = {}  # by id() of the aval, which is kept alive
        self.origins = tracebacks.Origins()
        self.captured: dict[int, Captured] = {}  # by id() of the array, which `Captured` keeps alive
        self.prints: list[Any] = []  # the prints of the body that is being flattened
        self.stacks: dict[int, list[Ref]] = {}  # see `scan.Flattener`
        self.integers: dict[int, np.ndarray] = {}  # arrays of integers that are known, by id
        self.zeros: set[int] = set()  # arrays that are zero everywhere
        self.every_mark_counts = True  # whether each mark of the loop that is flattened ends a stage

    def flatten_step(self, closed: Any) -> Flat:
        flat = self.flatten_body(closed, Where(""))
        captured = (c.value_id for c in self.captured.values())
        hidden = debug_callbacks.hidden_results(self.prints)
        return Flat((*flat.inputs, *captured), flat.ops, (*flat.outputs, *hidden))

    def flatten_body(self, closed: Any, where: Where, operands: Sequence[Ref] = ()) -> Flat:
        """Translate a closed jaxpr (a step, a branch, the body of a loop or scan) to operations over new ids.

        Args:
            closed: the closed jaxpr.
            where: the origin of the jaxpr's equations.
            operands: the values that the first inputs always have, of which some may be known integers.
        """
        jaxpr, _ = private_api.open_jaxpr(closed)
        inputs = [self.types.new(self.type_of(v.aval)) for v in jaxpr.invars]
        for value, ref in zip(inputs, operands, strict=False):
            if (known := self.known_integers(ref)) is not None:
                self.integers[value] = known
        ops: list[Op | Loop] = []
        outputs = self.inline(closed, inputs, ops, where)
        return Flat(tuple(inputs), tuple(ops), tuple(outputs))

    def inline(self, closed: Any, inputs: Sequence[Ref], ops: list, where: Where) -> list[Ref]:
        """Append the operations of a closed jaxpr to `ops`, and return the values that are its results.

        Args:
            closed: the closed jaxpr.
            inputs: the operands that the jaxpr is applied to.
            ops: the list of operations to append to.
            where: the origin of the jaxpr's equations.
        """
        jaxpr, consts = private_api.open_jaxpr(closed)
        literal, constant = private_api.Literal, self.constant
        env: dict[Any, Ref] = dict(zip(jaxpr.invars, inputs, strict=True))
        env.update((var, constant(const)) for var, const in zip(jaxpr.constvars, consts, strict=True))

        for eqn in jaxpr.eqns:
            operands: list[Ref] = [constant(a.val) if type(a) is literal else env[a] for a in eqn.invars]
            name = eqn.primitive.name
            if name in _MAY_BE_KNOWN and (known := self.add_known(eqn, operands, ops, where)) is not None:
                results = known
            elif name not in _NOT_SIMPLE and private_api.is_simple(eqn):
                results = self.add_simple(eqn, operands, ops, where)
            else:
                results = self.add_equation(eqn, operands, ops, self.where(eqn, where))
            if len(results) == 1:
                env[eqn.outvars[0]] = results[0]
            else:
                env.update(zip(eqn.outvars, results, strict=True))
        return [constant(a.val) if type(a) is literal else env[a] for a in jaxpr.outvars]

    def where(self, eqn: Any, around: Where) -> Where:
        """Return the origin of an equation: the user's source line, and the kinds of code that contain it.

        Args:
            eqn: the equation.
            around: the origin of the jaxpr that contains the equation.
        """
        return Where(_line(eqn, around), around.transposed or self.origins.of(eqn)[0], around.in_loop)

    def type_of(self, aval: Any) -> ValueType:
        """Return the `ValueType` of a JAX aval.

        Types are cached, since thousands of values share a few dozen avals.
        """
        if (entry := self.known.get(id(aval))) is None:
            entry = self.known[id(aval)] = aval, value_type(aval)
        return entry[1]

    def new_results(self, eqn: Any) -> tuple[int, ...]:
        """Return a new value id for each result of an equation, or -1 for a result that nothing uses."""
        drop, new, type_of = private_api.DropVar, self.types.new, self.type_of
        return tuple([-1 if type(v) is drop else new(type_of(v.aval)) for v in eqn.outvars])

    def add_simple(self, eqn: Any, inputs: list[Ref], ops: list, where: Where) -> Sequence[int]:
        """Append an equation without inner jaxprs to `ops` as one operation, and return its results.

        This is the fast path of `add_equation`, which exists because a step has thousands of such equations.
        """
        variables = eqn.outvars
        if len(variables) == 1 and type(v := variables[0]) is not private_api.DropVar:
            outputs = (self.types.new(self.type_of(v.aval)),)
        else:
            outputs = self.new_results(eqn)
        transposed, recomputed = self.origins.of(eqn)
        params = {"repeats": functools.partial(_repeats, eqn)} if recomputed and where.in_loop else {}
        run = functools.partial(private_api.bind_eqn, eqn)
        transposed = transposed or where.transposed
        ops.append(Op(eqn.primitive.name, tuple(inputs), outputs, run, _line(eqn, where), transposed, params))
        return outputs

    def add_known(self, eqn: Any, inputs: list[Ref], ops: list, where: Where) -> Sequence[Ref] | None:
        """Append an equation whose result is known, or that takes rows at known positions, in simpler terms.

        Args:
            eqn: the equation; its primitive is in `_MAY_BE_KNOWN`.
            inputs: the operands of the equation.
            ops: the list of operations to append to.
            where: the origin of the jaxpr that contains the equation.

        Returns:
            The results; None if the equation is neither.
        """
        name = eqn.primitive.name
        if name in known_integers.FUNCTIONS:
            operands = [r.value if isinstance(r, Lit) else self.integers.get(r) for r in inputs]
            if not any(x is None for x in operands):
                return self.add_constant(eqn, operands, inputs, ops, where)
            if name not in row_access.REWRITES:
                return None
        if any(isinstance(r, int) and self.types[r].sharding is not None for r in inputs):
            return None  # on a mesh with explicit axes, each operation says its own sharding
        if name in ("split", "unstack") and (where.transposed or self.origins.of(eqn)[0]):
            return None  # one linear operation, which may stand behind the loop, not one for each row
        known = [self.known_integers(r) for r in inputs]
        rewritten = row_access.rewrite(eqn, known, [r in self.zeros for r in inputs])
        if rewritten is None:
            return None
        avals = [eqn.invars[k].aval for k in rewritten.operands]
        closed = private_api.in_place_of(eqn, rewritten.run, avals)
        return self.inline(closed, [inputs[k] for k in rewritten.operands], ops, self.where(eqn, where))

    def add_constant(
        self, eqn: Any, operands: Sequence[Any], inputs: list[Ref], ops: list, where: Where
    ) -> Sequence[Ref]:
        """Append an equation of constants to `ops`, unless its result is a known integer; return its result.

        Args:
            eqn: the equation; its primitive is in `known_integers.FUNCTIONS`.
            operands: the values of its operands.
            inputs: the operands.
            ops: the list of operations to append to.
            where: the origin of the jaxpr that contains the equation.
        """
        value = known_integers.compute(eqn, operands)
        if value is not None and not value.ndim:
            return [Lit(_scalar(value, eqn.outvars[0].aval))]
        results = self.add_simple(eqn, inputs, ops, where)
        if value is not None:
            self.integers.update(dict.fromkeys(results, value))
        if eqn.primitive.name == "broadcast_in_dim" and not np.any(operands[0]):
            self.zeros.update(results)
        return results

    def known_integers(self, ref: Ref) -> np.ndarray | None:
        """Return the value of an operand that is a known integer, or an array of them; else None."""
        value = np.asarray(ref.value) if isinstance(ref, Lit) else self.integers.get(ref)
        return None if value is None or value.dtype.kind not in "iub" else value

    def add_equation(self, eqn: Any, inputs: list[Ref], ops: list, where: Where) -> Sequence[Ref]:
        """Append an equation to `ops` (inlined, unrolled or as one operation), and return the results.

        Args:
            eqn: the equation, which may contain others.
            inputs: the operands of the equation.
            ops: the list of operations to append to.
            where: the origin of the equation.
        """
        name = eqn.primitive.name
        if name == LOOP:
            return self.add_loop(eqn, inputs, ops)
        if name in PRINTS:
            self.prints.append(debug_callbacks.make_print(eqn, inputs, where.line))
            return []
        _refuse_other_meshes(eqn, where.line)
        within = set().union(*map(private_api.primitives_inside, private_api.sub_jaxprs(eqn)))
        marked = {MARKER if n == MARKER_SIDE else n for n in within & {MARKER, MARKER_SIDE, LOOP}}
        if debug_callbacks.is_checkpoint_with_prints(eqn) and not marked:
            return self.add_with_lifted_prints(eqn, inputs, ops, where)
        inner = private_api.inner_jaxpr(eqn)
        if inner is not None and inlines(
            name,
            marked=bool(marked),
            prints=bool(within & PRINTS),
            pinned=private_api.pins_shardings(eqn),
            in_loop=where.in_loop,
        ):
            return self.inline(inner, inputs, ops, where)
        # A scan over elements that an unrolled scan stacked, one per layer, is unrolled too. A checkpoint
        # around the unrolled scan makes such a scan.
        if name == "scan" and LOOP not in marked and (marked or scan.reads_stacks(self, eqn, inputs)):
            return scan.unroll(self, eqn, inputs, ops, where)
        if marked:
            raise UnsupportedError(
                f"{where.line}: {' and '.join(sorted(marked))} inside `{name}` cannot be pipelined yet; "
                "move it out (write the loop or the choice in Python)"
            )
        self.refuse_host_code(eqn, ops, where)
        _refuse_other_meshes_inside(eqn, where)
        outputs = self.new_results(eqn)
        params = {"side": eqn.params["side"]} if name == MARKER_SIDE else {}
        if name in (MARKER, MARKER_SIDE):
            params["name"] = eqn.params["name"]
        if where.in_loop and self.origins.of(eqn)[1]:
            params["repeats"] = functools.partial(_repeats, eqn)
        run = functools.partial(private_api.bind_eqn, eqn)
        op = Op(name, tuple(inputs), outputs, run, where.line, where.transposed, params)
        ops.append(self.make_expandable_in_stage(op, eqn) if where.in_loop else self.make_expandable(op, eqn))
        return outputs

    def refuse_host_code(self, eqn: Any, ops: list, where: Where) -> None:
        counts = where.in_loop and self.every_mark_counts
        stage = functools.partial(_count_markers, ops) if counts else None
        debug_callbacks.refuse_host_code(eqn, where.line, stage)

    def make_expandable_in_stage(self, op: Op, eqn: Any) -> Op:
        """Make an operation inside a loop divisible: a checkpoint can then be expanded, and a scan split.

        When the backward of a stage is split in two, both halves may need results of the operation. Each half
        can then run only the inner operations that it needs.

        Args:
            op: the operation.
            eqn: the equation from which the operation was made.

        Returns:
            A copy of the operation with `Op.expand` or `Op.split`. If the operation is neither a checkpoint
            nor a scan, or contains a large constant, the operation itself.
        """
        # A large constant inside would have to become an operand, but at the time of the split no operand can
        # be added to the loop.
        if op.name not in CHECKPOINTS | {"scan"} or private_api.largest_constant_inside(eqn) > CAPTURE_BYTES:
            return op
        if op.name == "scan":
            parts = private_api.scan_parts(eqn)
            return dataclasses.replace(op, split=functools.partial(scan.split, self, parts))

        inner: list[Any] = []
        where = Where(op.line, op.transposed, in_loop=True)
        results = self.inline(private_api.inner_jaxpr(eqn), op.inputs, inner, where)
        made = [o for each in inner for o in each.outputs if o >= 0]

        def expand() -> tuple[tuple[Op, ...], tuple[Ref, ...]]:
            new: dict[Ref, Ref] = {o: self.types.new(self.types[o], like=o) for o in made}
            ids = cast(KeysView[int], new.keys())
            copies = [
                dataclasses.replace(
                    renamed(each, ids, lambda r: new.get(r, r)),
                    outputs=tuple(cast(int, new.get(o, o)) for o in each.outputs),
                )
                for each in inner
            ]
            return tuple(copies), tuple(new.get(r, r) if isinstance(r, int) else r for r in results)

        return dataclasses.replace(op, expand=expand)

    def make_expandable(self, op: Op, eqn: Any) -> Op:
        """Make a cond, a scan, a call or a checkpoint outside the microbatch loops divisible.

        If the operands of the operation are on several actors, placement can then replace the operation by
        the operations inside it. The body of a scan is computed in parts if a value inside it is divided.

        Args:
            op: the operation.
            eqn: the equation from which the operation was made.

        Returns:
            A copy of the operation with `Op.branches` (for a cond), `Op.body` (for a scan) or `Op.expand`. If
            the operation is of another kind, the operation itself.
        """
        if op.name == "cond":
            bodies = [self.flatten_body(b, Where(op.line)) for b in eqn.params["branches"]]
            used = {r for b in bodies for r in used_ids(b.ops, b.outputs)}
            inside = tuple(c.value_id for c in self.captured.values() if c.value_id in used)
            bodies = [Flat((*b.inputs, *inside), b.ops, b.outputs) for b in bodies]
            within = map(private_api.primitives_inside, private_api.sub_jaxprs(eqn))
            chosen = branches(bodies, self.types, terminates=not any("while" in names for names in within))
            inputs = (*op.inputs, *inside)
            return dataclasses.replace(op, inputs=inputs, run=chosen.choose(bodies), branches=chosen)
        if op.name == "scan" and private_api.largest_constant_inside(eqn) <= CAPTURE_BYTES:
            where = Where(op.line, op.transposed)
            flatten = functools.partial(self.flatten_body, private_api.scan_parts(eqn).body, where)
            return dataclasses.replace(op, body=functools.cache(flatten))
        if op.name in CALLS | CHECKPOINTS:
            inner: list[Any] = []
            pins_in, pins_out = private_api.pinned_shardings(eqn)
            pinned = [self.pinned(r, pin, inner, op.line) for r, pin in zip(op.inputs, pins_in, strict=True)]
            where = Where(op.line, op.transposed)
            results = self.inline(private_api.inner_jaxpr(eqn), pinned, inner, where)
            results = [self.pinned(r, pin, inner, op.line) for r, pin in zip(results, pins_out, strict=True)]
            return dataclasses.replace(op, expand=lambda: (tuple(inner), tuple(results)))
        return op

    def pinned(self, ref: Ref, sharding: Any, ops: list, line: str) -> Ref:
        """Append an operation that constrains a value to a sharding that the user gave to a nested `jit`.

        Args:
            ref: the value.
            sharding: the sharding; None if the user gave none.
            ops: the list of operations to append to.
            line: the `file:line` in the user's code.

        Returns:
            The constrained value. If `sharding` is None or `ref` is a constant, `ref` itself.
        """
        if sharding is None or not isinstance(ref, int):
            return ref
        out = self.types.new(self.types[ref])
        ops.append(Op("sharding_constraint", (ref,), (out,), functools.partial(_constrain, sharding), line))
        return out

    def add_with_lifted_prints(self, eqn: Any, inputs: list[Ref], ops: list, where: Where) -> list[Ref]:
        """Append a checkpoint that contains debug prints to `ops` without the prints, and record the prints.

        The printed values become further results of the checkpoint.

        Args:
            eqn: the equation of the checkpoint.
            inputs: the operands of the equation.
            ops: the list of operations to append to.
            where: the origin of the equation.

        Returns:
            The results of the original checkpoint, without the printed values.
        """
        alone, consts, inside = debug_callbacks.lift_prints(eqn)
        self.refuse_host_code(alone, ops, where)  # a scan inside may still print
        results = self.add_equation(alone, [*map(self.constant, consts), *inputs], ops, where)
        for inner, operands in inside:
            refs = [results[o] if isinstance(o, int) else self.constant(o.val) for o in operands]
            self.prints.append(debug_callbacks.make_print(inner, refs, tracebacks.source_line(inner)))
        return list(results[: len(eqn.outvars)])

    def add_loop(self, eqn: Any, inputs: list[Ref], ops: list) -> list[Ref]:
        spec: markers.LoopSpec = eqn.params["spec"]
        n = spec.num_consts
        self.every_mark_counts = stages_of(spec.schedule) is None
        outer_prints, self.prints = self.prints, []
        body = self.flatten_body(spec.body, Where(spec.line, in_loop=True), inputs[:n])
        body_prints, self.prints = self.prints, outer_prints
        if nested := next((op for op in body.ops if isinstance(op, Loop)), None):
            raise UnsupportedError(
                f"{nested.line}: accumulate_grads inside another accumulate_grads ({spec.line}) cannot be "
                "pipelined; write the inner one as a Python loop"
            )
        stacked = self.move_prints_out(body_prints, body.inputs, inputs, spec)
        body_outputs = (*body.outputs, *stacked)
        # Arrays captured inside the body enter it as further invariants, under their own ids.
        used = used_ids(body.ops, body_outputs)
        inside = [c.value_id for c in self.captured.values() if c.value_id in used]
        outputs = tuple(self.types.new(self.type_of(v.aval)) for v in eqn.outvars)
        ops.append(
            Loop(
                body=Flat((*body.inputs[:n], *inside, *body.inputs[n:]), body.ops, body_outputs),
                invariants=(*inputs[:n], *inside),
                batch=tuple(inputs[n:]),
                outputs=(*outputs, *stacked.values()),
                reductions=(*spec.reductions, *[Stack()] * len(stacked)),
                schedule=spec.schedule,
                num_microbatches=spec.num_microbatches,
                line=spec.line,
                leaves=spec.leaves,
            )
        )
        return list(outputs)

    def move_prints_out(
        self,
        inside: Sequence[Print],
        body_inputs: Sequence[int],
        inputs: Sequence[Ref],
        spec: markers.LoopSpec,
    ) -> dict[int, int]:
        """Record the debug prints of a loop's body as prints that run after the step, for every microbatch.

        Args:
            inside: the prints of the body.
            body_inputs: the ids of the body's inputs, the microbatch's index last.
            inputs: the loop's operands, which are values outside the loop, in the order of `body_inputs`.
            spec: the specification of the loop.

        Returns:
            A dictionary of the values that the loop has to stack over microbatches for these prints. Its keys
            are value ids in the body; its values are the ids of the stacks outside the loop.
        """
        if not inside:
            return {}
        outside = [PrintOperand(r, per_microbatch=k >= spec.num_consts) for k, r in enumerate(inputs)]
        known = dict(zip(body_inputs, [*outside, PrintOperand(None)], strict=True))
        known.update((c.value_id, PrintOperand(c.value_id)) for c in self.captured.values())
        moved, stacked = debug_callbacks.move_prints_out(inside, known, self.types, spec.num_microbatches)
        self.prints.append(moved)
        return stacked

    def constant(self, value: Any) -> Ref:
        # The cheap check for `_HOST_VALUES` comes first, since asking whether a value is a `jax.Array` takes
        # longer than all the other checks.
        is_key = (
            not isinstance(value, _HOST_VALUES)
            and isinstance(value, jax.Array)
            and private_api.is_key_dtype(value.dtype)
        )
        return self.capture(value) if is_key or getattr(value, "nbytes", 0) > CAPTURE_BYTES else Lit(value)

    def capture(self, value: Any) -> int:
        if id(value) not in self.captured:
            array = value if isinstance(value, jax.Array) else np.asarray(value)
            new_id = self.types.new(value_type(jax.typeof(array)))
            self.captured[id(value)] = Captured(value, new_id)
        return self.captured[id(value)].value_id


def _refuse_other_meshes(eqn: Any, line: str) -> None:
    """Raise a `ShardingError` if an equation refers to a mesh of devices other than that of the actors."""
    actors = dict(jax.sharding.get_abstract_mesh().shape)
    for mesh in private_api.meshes_named(eqn):
        named = dict(mesh.shape)
        # On a mesh of one device a split value stays whole.
        if named == actors or (math.prod(named.values()) == 1 and math.prod(actors.values()) == 1):
            continue
        have = f"a mesh of its own, {actors}" if actors else "one device and no mesh"
        raise ShardingError(
            f"{line}: `{eqn.primitive.name}` names a mesh {named} of this process's devices, but each actor "
            f"has {have}; give RemoteMesh spmd_mesh={named}, or write a PartitionSpec over their axes, or "
            "jpp.shard(x, names)"
        )


def _refuse_other_meshes_inside(eqn: Any, around: Where) -> None:
    """Raise a `ShardingError` if an inner equation of `eqn` refers to a mesh other than that of the actors.

    Args:
        eqn: the equation whose inner equations are checked, at any depth; `eqn` itself is not checked.
        around: the origin of the outer equation, for the error message.
    """
    for inner in private_api.sub_jaxprs(eqn):
        for each in inner.eqns:
            _refuse_other_meshes(each, _line(each, around))
            _refuse_other_meshes_inside(each, around)


def _line(eqn: Any, around: Where) -> str:
    own = tracebacks.source_line(eqn)
    return own if own != "unknown line" else around.line or own


def _scalar(value: np.ndarray, aval: Any) -> Any:
    """Return a known scalar as a constant of a program: a Python number if it has that type, else NumPy's."""
    is_weak = aval.weak_type and value.dtype in (np.bool_, jax.dtypes.canonicalize_dtype(int))
    return value.item() if is_weak else value[()]


def _count_markers(ops: Sequence[Op | Loop]) -> int:
    """Return the number of stage markers in `ops`, which are the operations of a loop's body so far.

    The number is also the index of the stage that the next operation is in.
    """
    return sum(isinstance(op, Op) and op.name == MARKER for op in ops)


def _constrain(sharding: Any, xs: Sequence[Any]) -> list[Any]:
    return [jax.lax.with_sharding_constraint(xs[0], sharding)]


def _repeats(eqn: Any, other: Op) -> bool:
    """Return whether an operation runs the same computation as an equation; operands are not compared."""
    args = getattr(other.run, "args", ())
    return len(args) == 1 and private_api.same_computation(eqn, args[0])


# ---------------------------------------------------------------- weak types


def _losing_weak_type(traced: Traced) -> set[int]:
    """Return the positions of weakly typed argument leaves that are strongly typed in the next call.

    These are leaves whose next value, such as that of a training state, is a strongly typed result.
    """

    def is_weak(ref: Ref) -> bool:
        return isinstance(ref, int) and traced.types[ref].weak

    inputs, outputs = traced.flat.inputs, traced.flat.outputs
    pairs = continued_arguments(traced).items()
    return {arg for result, arg in pairs if is_weak(inputs[arg]) and not is_weak(outputs[result])}


def _without_weak_types(args: Sequence[Any], static_argnums: Sequence[int], leaves: set[int]) -> list[Any]:
    """Return a step's arguments, with some of their leaves made strongly typed.

    Args:
        args: the arguments of the step.
        static_argnums: the numbers of the static arguments, which have no leaves.
        leaves: the positions of the leaves to make strongly typed.
    """
    dynamic = [i for i in range(len(args)) if i not in static_argnums]
    flat, tree = jax.tree.flatten([args[i] for i in dynamic])
    for k in leaves:
        flat[k] = jax.ShapeDtypeStruct(flat[k].shape, flat[k].dtype, sharding=flat[k].sharding)
    strong = list(args)
    for i, arg in zip(dynamic, jax.tree.unflatten(tree, flat), strict=True):
        strong[i] = arg
    return strong


def _computation(flat: Flat, types: Types) -> Iterator[tuple]:
    """Yield a description of each operation, so that the computations of two traces can be compared.

    Conversions that only remove a weak type are left out.
    """
    for op in flat.ops:
        avals = tuple(types[o].aval for o in op.outputs if o >= 0)
        if isinstance(op, Loop):
            yield ("loop", avals, op.reductions, tuple(_computation(op.body, types)))
        elif op.name != "convert_element_type" or tuple(types[r].aval for r in op.reads) != avals:
            yield (op.name, avals)
    yield ("return", *(types[r].aval if isinstance(r, int) else None for r in flat.outputs))
