"""Turn a step function and the arguments of a call into the compiler's input, without a mesh.

A `StepDefinition` has a step function with its options, and the devices that it is compiled for. A step of a
mesh (`session.step`) is one, and so is a step that is compiled for a machine that need not exist
(`planning.machine`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxpp_async.compiler.continued_arguments import result_positions
from jaxpp_async.compiler.evaluate import value_type
from jaxpp_async.compiler.export import Target
from jaxpp_async.compiler.export_cache import ExportCache
from jaxpp_async.compiler.ir import Loop, Traced
from jaxpp_async.compiler.pipeline import StepRequest
from jaxpp_async.errors import ShardingError
from jaxpp_async.jax_bridge import jax_config, private_api, tracebacks
from jaxpp_async.jax_bridge.tracebacks import deliberate
from jaxpp_async.markers import logical_axes
from jaxpp_async.session.argument_binding import leaf_type, shape_struct
from jaxpp_async.session.remote_array import RemoteArray

if TYPE_CHECKING:
    from jaxpp_async.planning.plan import Plan


class DeviceLayout(Protocol):
    """The devices that a step is compiled for."""

    @property
    def num_actors(self) -> int: ...

    @property
    def target(self) -> Target: ...


@dataclass(frozen=True)
class StepOptions:
    """The options of a step, which the user passes to `RemoteMesh.distributed`.

    Args:
        in_shardings: a tree prefix of the arguments' shardings over one actor's devices; None if the
            shardings are to be inferred.
        out_shardings: a tree prefix of the results' shardings; None if the shardings are to be inferred.
        donate_argnums: positions of the arguments whose buffers the step may reuse.
        static_argnums: positions of the hashable arguments that are part of the program.
        schedule: the schedule to use in place of the one in the function; None keeps that one.
        plan: the plan that the schedule is of, which is for arguments of some types; None if there is none.
    """

    in_shardings: Any
    out_shardings: Any
    donate_argnums: tuple[int, ...]
    static_argnums: tuple[int, ...]
    schedule: Any = None
    plan: Plan | None = None


def make_options(
    fn: Callable,
    *,
    in_shardings: Any,
    out_shardings: Any,
    donate_argnums: int | Sequence[int],
    static_argnums: int | Sequence[int],
    caller: str,
    schedule: Any = None,
    plan: Plan | None = None,
) -> StepOptions:
    """Check a user's options of a step, and return them.

    Args:
        fn: the step function.
        in_shardings, out_shardings, donate_argnums, static_argnums: as for `RemoteMesh.distributed`.
        caller: the function that the user called, for error messages.
        schedule: the schedule to use in place of those in the function; None keeps them.
        plan: see `StepOptions`.

    Raises:
        TypeError: `fn` cannot be called.
        ValueError: an option names an argument that `fn` does not have.
    """
    if not callable(fn):
        raise deliberate(TypeError(f"{caller} takes a step function; got {fn!r}"))
    donated = _argnums("donate_argnums", donate_argnums, fn)
    static = _argnums("static_argnums", static_argnums, fn)
    return StepOptions(in_shardings, out_shardings, donated, static, schedule, plan)


def _argnums(name: str, value: int | Sequence[int], fn: Callable) -> tuple[int, ...]:
    found = (value,) if isinstance(value, int) else tuple(value)
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in found):
        raise deliberate(ValueError(f"{name} is {value!r}; give positions of arguments, counted from 0"))
    most = _most_arguments(fn)
    if most is not None and found and max(found) >= most:
        takes = f"takes {most} argument{'s' * (most != 1)}"
        step = getattr(fn, "__name__", "step")
        raise deliberate(ValueError(f"step {step!r} {takes}, but {name} names argument {max(found)}"))
    return found


def _most_arguments(fn: Callable) -> int | None:
    """Return how many arguments `fn` can be called with by position; None if the number is unlimited or
    unknown.
    """
    signature = _signature(fn, follow_wrapped=False)  # a wrapper may add parameters
    kinds = [p.kind for p in signature.parameters.values()] if signature is not None else []
    if signature is None or inspect.Parameter.VAR_POSITIONAL in kinds:
        return None
    return sum(
        kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds
    )


class StepDefinition:
    """A user's step function with its options and the devices that it is compiled for.

    Args:
        layout: the number of actors, and the devices of each.
        fn: the step function.
        options: the options of the step.
        line: `file:line` of the call that made the step, for error messages; None for the caller's.
        exports: a cache of executables that were lowered for the same function; None for a new one.
    """

    def __init__(
        self,
        layout: DeviceLayout,
        fn: Callable,
        options: StepOptions,
        *,
        line: str | None = None,
        exports: ExportCache | None = None,
    ):
        self.layout, self.fn, self._options = layout, fn, options
        self._exports = exports or ExportCache()  # shared by all forms of the step, under other schedules too
        self.line = line or tracebacks.caller_line()  # for errors in shardings
        self.__name__ = getattr(fn, "__name__", "step")
        named = _signature(fn)
        self._names = tuple(named.parameters) if named else ()  # without names, positions serve as names
        # A wrapper's own signature is checked, since it may take more arguments than the wrapped function.
        # `jax.jit` around a wrapper has the signature of the innermost function, so then nothing is checked.
        inner = getattr(fn, "__wrapped__", None)
        self._parameters = None if hasattr(inner, "__wrapped__") else _signature(fn, follow_wrapped=False)

    @property
    def options(self) -> StepOptions:
        """The options of the step."""
        return self._options

    def _dynamic(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return those entries of `args` that belong to the traced (not static) arguments.

        Args:
            args: one entry per argument of a call, such as the argument itself or its position.
        """
        static = self._options.static_argnums
        return tuple(a for i, a in enumerate(args) if i not in static) if static else tuple(args)

    def _static(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return those entries of `args` that belong to the static arguments.

        Args:
            args: one entry per argument of a call, such as the argument itself or its position.
        """
        return tuple(args[i] for i in self._options.static_argnums if i < len(args))

    def signature(self, args: Sequence[Any]) -> Any:
        """Return a hashable value that determines which compiled form of the step a call needs.

        The value has the tree structure and the types of the traced arguments, the static arguments, and
        JAX's settings. If a mesh axis is explicit, the value also has the shardings of arrays.

        Raises:
            TypeError: an argument is missing, a static argument cannot be hashed, or JAX cannot compute with
                a traced argument.
            ValueError: `static_argnums` or `donate_argnums` has a position at which the call has no argument.
        """
        self._check_count(args)
        static, dynamic = self._static(args), self._dynamic(args)
        self._check_hashable(static)
        leaves, treedef = jax.tree.flatten(dynamic)
        config = (jax_config.trace_settings(), self._given_specs(leaves))
        try:
            types = tuple(leaf_type(x) for x in leaves)
        except TypeError:
            self._name_bad_leaf(dynamic)
            raise
        return treedef, types, static, config

    def _given_specs(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shardings of the leaves that are `RemoteArray`s, if tracing depends on them.

        Returns:
            One entry per leaf: the sharding of a `RemoteArray`, None for another leaf. If no mesh axis is
            explicit, tracing does not depend on shardings, and the tuple is empty.
        """
        if not logical_axes.has_explicit_axes(self.layout.target.mesh):
            return ()
        return tuple(leaf.spec if isinstance(leaf, RemoteArray) else None for leaf in leaves)

    def _check_hashable(self, static: Sequence[Any]) -> None:
        for argnum, value in zip(self._options.static_argnums, static, strict=True):
            try:
                hash(value)
            except TypeError:
                raise deliberate(
                    TypeError(
                        f"step {self.__name__!r}: argument {self._name(argnum)} is static and a "
                        f"{type(value).__name__}, which has no hash; pass a hashable value, such as a tuple"
                    )
                ) from None

    def _name(self, argnum: int) -> str:
        return self._names[argnum] if argnum < len(self._names) else f"arg{argnum}"

    def _name_bad_leaf(self, dynamic: Sequence[Any]) -> None:
        """Raise a TypeError that names the first leaf with which JAX cannot compute.

        Args:
            dynamic: the arguments that are not static.
        """
        count = len(dynamic) + len(self._options.static_argnums)
        argnums = self._dynamic(range(count))
        for path, leaf in jax.tree_util.tree_flatten_with_path(tuple(dynamic))[0]:
            try:
                leaf_type(leaf)
            except TypeError as error:
                name = self._name(argnums[path[0].idx]) + jax.tree_util.keystr(path[1:])
                raise deliberate(TypeError(f"step {self.__name__!r}: {name} {error}")) from None

    def _check_count(self, args: Sequence[Any]) -> None:
        try:
            if self._parameters is not None:
                self._parameters.bind(*args)
        except TypeError as error:  # in Python's own words: "missing a required argument: 'batch'"
            name = self.__name__
            raise deliberate(
                TypeError(f"step {name!r}, called with {len(args)}: {error}; it is {name}{self._parameters}")
            ) from None
        for argnums, what in (
            (self._options.static_argnums, "static_argnums"),
            (self._options.donate_argnums, "donate_argnums"),
        ):
            if argnums and max(argnums) >= len(args):
                raise deliberate(
                    ValueError(
                        f"step {self.__name__!r} got {len(args)} arguments, but {what} names argument "
                        f"{max(argnums)}"
                    )
                )

    def request(self, args: Sequence[Any]) -> StepRequest:
        """Return the input with which the compiler compiles this step for a call with these arguments."""
        static = self._options.static_argnums
        shapes = [a if i in static else jax.tree.map(shape_struct, a) for i, a in enumerate(args)]
        layout, options = self.layout, self._options
        if options.plan is not None:
            options.plan.check_arguments(shapes)
        given = self._in_specs(self._dynamic(shapes), self._dynamic(range(len(args))))
        if logical_axes.has_explicit_axes(layout.target.mesh):
            shapes = self._typed(shapes, args, given)

        def out_specs(traced: Traced) -> list:
            tree = result_positions(traced)
            results = traced.flat.outputs[: len(traced.out_names)]
            shapes_of = [
                traced.types[r].aval.shape if isinstance(r, int) else np.shape(r.value) for r in results
            ]
            return self._specs(options.out_shardings, tree, traced.out_names, shapes_of, "out_shardings")

        return StepRequest(
            fn=self.fn,
            args=shapes,
            argument_names=self._names,
            static_argnums=static,
            donated=options.donate_argnums,
            in_specs=lambda traced: self._microbatches_whole(traced, given),
            out_specs=out_specs,
            num_actors=layout.num_actors,
            target=layout.target,
            schedule=options.schedule,
            exports=self._exports,
        )

    def _in_specs(self, dynamic: tuple[Any, ...], argnums: Sequence[int]) -> list:
        """Return one entry per leaf of the dynamic arguments: its sharding in `in_shardings`, or None.

        Args:
            dynamic: the dynamic (not static) arguments, with a `jax.ShapeDtypeStruct` for each leaf.
            argnums: the position of each dynamic argument in the call.
        """
        prefix = self._options.in_shardings
        named = jax.tree_util.tree_flatten_with_path(dynamic)[0]
        names = [self._name(argnums[path[0].idx]) + jax.tree_util.keystr(path[1:]) for path, _ in named]
        if self._options.static_argnums and isinstance(prefix, tuple) and not isinstance(prefix, P):
            prefix = self._dynamic(prefix)
        # A key array's shape as the user knows it, with its data's dimensions behind it.
        shapes = [value_type(private_api.ShapedArray(s.shape, s.dtype)).aval.shape for _, s in named]
        return self._specs(prefix, dynamic, names, shapes, "in_shardings")

    def _microbatches_whole(self, traced: Traced, given: list) -> list:
        """Check that no sharding of the user splits a batch along its microbatches, and return `given`.

        Args:
            traced: the traced step.
            given: for each argument leaf, the user's sharding or None.

        Raises:
            ShardingError: a sharding splits the dimension of the microbatches. Microbatches run one after the
                other, so splitting them over devices gains nothing.
        """
        spec_of = dict(zip(traced.flat.inputs, zip(traced.arg_names, given, strict=True), strict=False))
        loops = [op for op in traced.flat.ops if isinstance(op, Loop)]
        for line, leaf in [
            (loop.line, r) for loop in loops for r in loop.batch if isinstance(r, int) and r in spec_of
        ]:
            name, spec = spec_of[leaf]
            if spec and spec[0]:
                first, *rest = spec
                instead = P(None, *rest) if any(rest) else P(None, first)
                raise ShardingError(
                    f"{self.line}: in_shardings of {name}: {P(*spec)} splits dimension 0, the microbatches "
                    f"of the loop at {line}, which run one after the other; to split their rows write "
                    f"{instead}"
                )
        return given

    def _typed(self, shapes: Sequence[Any], args: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        """Return the shapes of the arguments with a sharding in each leaf, which explicit mesh axes require.

        The sharding of a leaf is the one that the user gave. If the user gave none, a `RemoteArray` keeps the
        sharding that it has, and any other leaf is replicated.

        Args:
            shapes: the arguments, with a `jax.ShapeDtypeStruct` for each leaf.
            args: the arguments themselves.
            given: for each leaf, the user's sharding or None.
        """
        mesh, specs = self.layout.target.mesh, iter(given)

        def leaf(struct: Any, value: Any) -> Any:
            spec = next(specs)
            if spec is None:
                spec = value.spec if isinstance(value, RemoteArray) else ()
            rank = len(struct.shape)
            return logical_axes.struct_with_spec(struct, mesh, spec[:rank])

        static = self._options.static_argnums
        return [a if i in static else jax.tree.map(leaf, a, args[i]) for i, a in enumerate(shapes)]

    def _specs(self, prefix: Any, tree: Any, names: Sequence[str], shapes: Sequence[Any], what: str) -> list:
        if prefix is None:
            return [None] * len(names)
        target, what = self.layout.target, f"{self.line}: {what}"
        return logical_axes.leaf_specs(
            prefix, tree, names, shapes, axes=target.axes, rules=target.axis_rules, where=what
        )


def _signature(fn: Callable, *, follow_wrapped: bool = True) -> inspect.Signature | None:
    """Return a function's signature, or None if Python cannot determine it, as for some builtins.

    Args:
        fn: the function.
        follow_wrapped: whether to return, for a wrapper, the signature of the function that it wraps.
    """
    try:
        return inspect.signature(fn, follow_wrapped=follow_wrapped)
    except (TypeError, ValueError):
        return None
