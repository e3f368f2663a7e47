"""Define a user's step function that is bound to a mesh, and the forms in which it is compiled.

`DistributedStep` is the object that `mesh.distributed` returns. A `DistributedStep` has the options of the
step, and stores one `CompiledStep` for each kind of call. Compiling and running are done by the step's
`StepRunner`, which is a part of the mesh.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxpp_async.compiler.continued_arguments import result_positions
from jaxpp_async.compiler.evaluate import value_type
from jaxpp_async.compiler.export_cache import ExportCache
from jaxpp_async.compiler.ir import Loop, Traced
from jaxpp_async.compiler.pipeline import Compiled, StepRequest
from jaxpp_async.errors import MeshError, ShardingError
from jaxpp_async.jax_bridge import jax_config, private_api, tracebacks
from jaxpp_async.jax_bridge.tracebacks import HiddenFrames, deliberate
from jaxpp_async.markers import logical_axes
from jaxpp_async.program.actor_program import format_program
from jaxpp_async.program.instructions import ActorId
from jaxpp_async.session import report
from jaxpp_async.session.argument_binding import Binding, Slot, leaf_type, shape_struct, type_key
from jaxpp_async.session.awaiting import UnawaitedCoroutine, says_to_await
from jaxpp_async.session.remote_array import RemoteArray

if TYPE_CHECKING:
    from jaxpp_async.session.step_runner import StepRunner


@dataclass(frozen=True, eq=False)
class CompiledStep:
    """One compiled form of a step, loaded on every actor.

    A step has one form for each combination of shapes, dtypes, static values and shardings in its calls.

    Attributes:
        compiled: the compiler's result.
        program_id: the id by which the controller runs the programs that the actors have loaded.
        inputs: the argument leaves, then the hidden arguments (captured arrays, microbatch indices).
        outputs: the result leaves, then the values that the step's prints show.
        donated: a dictionary. Its keys are the positions of the argument leaves whose buffers the step
            reuses; its values are the positions of the result leaves that are the arguments' new values, or
            None for an argument that has no new value.
        binding: the mapping of arguments and results to actors, which every call uses.
        handed_back: a dictionary for arguments that the step returns without using them. Its keys are
            positions of result leaves; its values are positions of argument leaves. The result stays on the
            argument's actors.
        compile_s: for each actor, the seconds that compiling took.
        temp_bytes: for each actor, the bytes of XLA's temporaries for each executable, by its index.
        hidden_values: host values of the hidden arguments.
        hidden: the arrays of the hidden arguments on the actors; empty until the first run.
    """

    compiled: Compiled
    program_id: int
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    donated: dict[int, int | None]
    binding: Binding
    handed_back: dict[int, int]
    compile_s: dict[ActorId, float]
    temp_bytes: dict[ActorId, dict[int, int]]
    hidden_values: tuple[Any, ...]
    hidden: list[RemoteArray] = field(default_factory=list)

    def __repr__(self) -> str:
        graph = self.compiled.placed.graph
        return (
            f"<CompiledStep: {graph.num_actors} actors, {len(graph.nodes)} tasks; .report(), .as_text(), "
            ".passes>"
        )

    @property
    def passes(self) -> Mapping[str, str]:
        """The program as text after each compiler pass, by the pass's name, in the order the passes ran."""
        return self.compiled.passes

    def as_text(self) -> str:
        """Return the instruction streams of all actors as one text."""
        return "\n\n".join(format_program(p) for p in self.compiled.programs)

    def report(self) -> report.CompileReport:
        """Return a report of the step's tasks, transfers, memory and placements, which prints as text."""
        return report.make(self.compiled, self.temp_bytes, self.compile_s)

    def argument_slots(self, argnum: int) -> list[Slot]:
        """Return a slot (name, type and actors) for each leaf of the argument at position `argnum`."""
        return [s for s, arg in zip(self.inputs, self.compiled.traced.arg_of, strict=False) if arg == argnum]


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
    """

    in_shardings: Any
    out_shardings: Any
    donate_argnums: tuple[int, ...]
    static_argnums: tuple[int, ...]
    schedule: Any = None


@dataclass(frozen=True, slots=True)
class CallSignature:
    """The properties of one call that `DistributedStep.recall` compares with those of a later call.

    If all properties are equal, the later call uses the same compiled form.

    Args:
        treedef: the tree structure of the dynamic (not static) arguments.
        static: the static arguments.
        static_hash: the hash of `static`.
        config: the settings of JAX on which tracing depends.
        type_keys: for each leaf, a value that determines its type (see `argument_binding.type_key`).
    """

    treedef: Any
    static: tuple[Any, ...]
    static_hash: int
    config: tuple[Any, ...]
    type_keys: list[Any]


_CALLS_KEPT = 4
"""The number of latest call signatures that a step remembers together with their compiled steps: those of
training, of evaluation, and of the shorter batch at the end of either.
"""


class DistributedStep:
    """A user's step function bound to a mesh, as `mesh.distributed` returns it.

    `await step(*args)` is the same as `await mesh.run(step, *args)`.
    """

    def __init__(
        self,
        runner: StepRunner,
        fn: Callable,
        options: StepOptions,
        *,
        line: str | None = None,
        exports: ExportCache | None = None,
    ):
        self.runner, self.fn, self._options = runner, fn, options
        self._exports = exports or ExportCache()  # shared by all forms of the step, under other schedules too
        self.line = line or tracebacks.caller_line()  # of `mesh.distributed`, for errors in shardings
        self._compiled: dict[Any, CompiledStep] = {}
        self._latest: CompiledStep | None = None
        self._calls: deque[tuple[CallSignature, CompiledStep]] = deque(maxlen=_CALLS_KEPT)
        self.__name__ = getattr(fn, "__name__", "step")
        named = signature_of(fn)
        self._names = tuple(named.parameters) if named else ()  # without names, positions serve as names
        # A wrapper's own signature is checked, since it may take more arguments than the wrapped function.
        # `jax.jit` around a wrapper has the signature of the innermost function, so then nothing is checked.
        inner = getattr(fn, "__wrapped__", None)
        self._parameters = None if hasattr(inner, "__wrapped__") else signature_of(fn, follow_wrapped=False)

    def __repr__(self) -> str:
        return f"<DistributedStep {self.__name__!r}>"

    def __call__(self, *args: Any) -> Coroutine[Any, Any, Any]:
        running = self._run(args)
        running.__qualname__ = self.__name__  # for "coroutine 'train_step' was never awaited"
        return UnawaitedCoroutine(running)  # pyright: ignore[reportReturnType]  # as its `__class__` says

    async def _run(self, args: tuple[Any, ...]) -> Any:
        with HiddenFrames():
            return await self.runner.run(self, args)

    def with_schedule(self, schedule: Any) -> DistributedStep:
        """Return the same step under another schedule, which must have the same number of stages.

        Tasks that have been compiled for an earlier schedule are not compiled again. A schedule may need a
        task in a form that no earlier schedule needed, such as half of a backward, or the last stage's
        forward and backward in one task. Each such form is compiled once.
        """
        options = replace(self._options, schedule=schedule)
        return DistributedStep(self.runner, self.fn, options, line=self.line, exports=self._exports)

    @says_to_await
    async def compile(self, *args: Any) -> CompiledStep:
        """Trace the step and compile it on every actor, without running it.

        Each of the errors below is raised before anything is sent to an actor.

        Args:
            args: the arguments of a call; each array may be a `jax.ShapeDtypeStruct` instead.

        Raises:
            UnsupportedError: the step function cannot be pipelined.
            StageError: a stage needs a later stage's value, or a loop has no usable microbatch axis.
            ScheduleError: the schedule is invalid for this step.
            ShardingError: a sharding is invalid for this mesh or for the array.
        """
        with HiddenFrames():
            return await self.runner.compile(self, args)

    @says_to_await
    async def init(self, argnum: int, fn: Callable, *args: Any) -> Any:
        """Make argument `argnum` of this step by running `fn(*args)` on the actors.

        Each actor computes only the leaves that the step keeps on this actor.

        The step must have been compiled: `await step.compile(jax.eval_shape(fn, *args), batch)` decides which
        actors keep each leaf. The values equal those of `jax.jit(fn)(*args)`.

        Returns:
            A tree of `RemoteArray`s with the structure of the tree that `fn` returns.
        """
        with HiddenFrames():
            return await self.runner.init(self, argnum, fn, args)

    def find(self, signature: Any) -> CompiledStep | None:
        """Return the compiled form of the step for a call's signature, or None if there is none yet.

        A form that is found becomes the one that `latest` returns.

        Args:
            signature: the return value of the method `signature` for the call.
        """
        found = self._compiled.get(signature)
        self._latest = found or self._latest
        return found

    def keep(self, signature: Any, compiled: CompiledStep) -> None:
        """Store a compiled form of the step, so that `find` and `latest` return it for later calls.

        Args:
            signature: the return value of the method `signature` for the call.
            compiled: the compiled form.
        """
        self._compiled[signature] = self._latest = compiled
        # From the second step on a state may have lost the weak types that it began with.
        self._compiled[_settled(signature, compiled.compiled.weak_or_strong)] = compiled

    def latest(self, what: str) -> CompiledStep:
        """Return the step's compiled form that was most recently stored or found.

        Args:
            what: the user's call that needs the form, for the error message.

        Raises:
            MeshError: the step has not been compiled.
        """
        if self._latest is None:
            raise MeshError(
                f"{what} needs to know where step {self.__name__!r} keeps each leaf; compile it first, for "
                "example `await step.compile(jax.eval_shape(init_fn, key), batch)`"
            )
        return self._latest

    def recall(self, args: Sequence[Any]) -> tuple[list[Any], CompiledStep | CallSignature | None]:
        """Flatten the dynamic (not static) arguments, and find the compiled form that an equal call used.

        This is a fast path. If it finds no form, the caller asks `signature` and `find`, which also know the
        forms of older calls. A form that is found becomes the one that `latest` returns.

        Returns:
            The leaves, and one of:
            - the compiled form of the step;
            - the call's `CallSignature`, to be passed to `remember` once the step is compiled;
            - None, if the call cannot be remembered.
        """
        leaves, treedef = jax.tree.flatten(self._dynamic(args))
        type_keys, config = [type_key(leaf) for leaf in leaves], jax_config.trace_settings()
        static = self._static(args)
        try:
            static_hash = hash(static)
        except TypeError:
            return leaves, None  # `signature` says which argument it is
        for call, compiled in self._calls:
            if (
                call.type_keys == type_keys
                and call.treedef == treedef
                and call.config == config
                # the hashes first, as in a dict, since a user's `==` may be slow or odd
                and call.static_hash == static_hash
                and call.static == static
            ):
                self._latest = compiled
                # the next call will most often bring these very objects: quick to compare
                call.type_keys[:] = type_keys
                return leaves, compiled
        return leaves, None if None in type_keys else CallSignature(
            treedef, static, static_hash, config, type_keys
        )

    def remember(self, call: CallSignature, compiled: CompiledStep) -> None:
        """Store the compiled form of the step for a call, so that `recall` finds it for an equal call later.

        Args:
            call: the signature that `recall` returned for the call.
            compiled: the compiled form.
        """
        self._calls.appendleft((call, compiled))

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
        if not logical_axes.has_explicit_axes(self.runner.target.mesh):
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
        runner, options = self.runner, self._options
        given = self._in_specs(self._dynamic(shapes), self._dynamic(range(len(args))))
        if logical_axes.has_explicit_axes(runner.target.mesh):
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
            num_actors=runner.num_actors,
            target=runner.target,
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
        mesh, specs = self.runner.target.mesh, iter(given)

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
        target, what = self.runner.target, f"{self.line}: {what}"
        return logical_axes.leaf_specs(
            prefix, tree, names, shapes, axes=target.axes, rules=target.axis_rules, where=what
        )


def signature_of(fn: Callable, *, follow_wrapped: bool = True) -> inspect.Signature | None:
    """Return a function's signature, or None if Python cannot determine it, as for some builtins.

    Args:
        fn: the function.
        follow_wrapped: whether to return, for a wrapper, the signature of the function that it wraps.
    """
    try:
        return inspect.signature(fn, follow_wrapped=follow_wrapped)
    except (TypeError, ValueError):
        return None


def _settled(signature: Any, settled: frozenset[int]) -> Any:
    """Return a call's signature, changed so that the leaves at the positions `settled` are not weakly typed.

    A training state may be weakly typed in the first step only. Later calls then have the returned signature,
    and use the same compiled form.

    Args:
        signature: the return value of `DistributedStep.signature`.
        settled: positions of leaves for which the compiled form does not depend on weak types.
    """
    treedef, types, static, config = signature
    strong = tuple((s, d, weak and k not in settled) for k, (s, d, weak) in enumerate(types))
    return treedef, strong, static, config


def slots(compiled: Compiled) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
    """Return the input slots and the result slots of a compiled step.

    A slot has the name, type and actors of a leaf. The inputs are the arguments, captured arrays and
    microbatch indices, in this order.
    """
    graph, types, ids = compiled.placed.graph, compiled.traced.types, compiled.placed.value_ids
    inputs = {
        i.arg: Slot(
            graph.values[i.value].label,
            replace(types[ids[i.value]], aval=graph.values[i.value].aval),
            i.actors,
            any_sharding=i.arg in compiled.any_sharding,
        )
        for i in sorted(graph.inputs, key=lambda i: i.arg)
    }
    found: dict[int, Slot] = {
        result: replace(inputs[arg], name=compiled.traced.result_name(result))
        for result, arg in handed_back(compiled).items()
    }
    for o in graph.outputs:
        old = found[o.result].actors if o.result in found else ()
        value = replace(types[ids[o.value]], aval=graph.values[o.value].aval)
        if o.result >= len(compiled.traced.out_names):
            value = replace(value, key_impl=None)  # host code gets keys as their data, as under `jax.jit`
        actors = tuple(sorted({*old, *o.actors}))
        found[o.result] = Slot(compiled.traced.result_name(o.result), value, actors)
    for result, arg in compiled.continues.items():
        if not inputs[arg].actors:
            inputs[arg] = replace(inputs[arg], replaced_on=found[result].actors)
    return tuple(inputs.values()), tuple(found[k] for k in range(len(found)))


def handed_back(compiled: Compiled) -> dict[int, int]:
    """Return which results of a step are arguments that the step returns unchanged and that no task uses.

    Returns:
        A dictionary. Its keys are positions of results; its values are positions of arguments.
    """
    leaf_of = {v: arg for arg, v in enumerate(compiled.traced.flat.inputs)}
    return {result: leaf_of[v] for result, v in compiled.placed.placement.handed_back.items()}


def hidden_values(compiled: Compiled) -> tuple[Any, ...]:
    """Return the values, as host arrays, of a step's captured arrays, then of its microbatch indices."""
    return (
        *(c.value for c in compiled.traced.captured),
        *(np.asarray(i, np.int32) for i in range(compiled.placed.num_indices)),
    )
