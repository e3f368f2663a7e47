"""Define a user's step function that is bound to a mesh, and the forms in which it is compiled.

`DistributedStep` is the object that `mesh.distributed` returns. A `DistributedStep` has the options of the
step, and stores one `CompiledStep` for each kind of call. Compiling and running are done by the step's
`StepRunner`, which is a part of the mesh.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxpp_async.compiler.export_cache import ExportCache
from jaxpp_async.compiler.pipeline import Compiled, CompilePlan
from jaxpp_async.errors import ArrayError, MeshError
from jaxpp_async.jax_bridge import jax_config, tracebacks
from jaxpp_async.jax_bridge.tracebacks import HiddenFrames
from jaxpp_async.program.actor_program import format_program
from jaxpp_async.program.instructions import ActorId
from jaxpp_async.program.work import TaskWork
from jaxpp_async.session import report
from jaxpp_async.session.argument_binding import Binding, Slot, type_key
from jaxpp_async.session.awaiting import UnawaitedCoroutine, says_to_await
from jaxpp_async.session.drawing import draw_step
from jaxpp_async.session.leaf_division import LeafDivision, leaf_slots
from jaxpp_async.session.recompilation import why_compiled_again
from jaxpp_async.session.remote_array import RemoteArray
from jaxpp_async.session.step_request import StepDefinition, StepOptions
from jaxpp_async.view import Drawable, Drawing

if TYPE_CHECKING:
    from jaxpp_async.planning.plan import Plan
    from jaxpp_async.session.auto_steps import AutoSteps
    from jaxpp_async.session.step_runner import StepRunner


@dataclass(frozen=True, eq=False, repr=False)
class StepForm(Drawable):
    """One compiled form of a step, which prints as text and knows the work of its tasks.

    Attributes:
        compiled: the compiler's result.
        compile_s: for each actor, the seconds that compiling took; empty if no actor compiled it.
        temp_bytes: for each actor, the bytes of XLA's temporaries for each executable, by its index; empty if
            no actor compiled it.
    """

    compiled: CompilePlan
    compile_s: dict[ActorId, float]
    temp_bytes: dict[ActorId, dict[int, int]]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.title}; .report(), .as_text(), .passes, .to_svg()>"

    @property
    def title(self) -> str:
        """A few words that say how large the step is."""
        graph = self.compiled.placed.graph
        used = "".join(f"{text}, " for text in report.schedules_in_use(self.compiled))
        return f"{used}{graph.num_actors} actors, {len(graph.nodes)} tasks"

    def to_drawing(self, **options: Any) -> Drawing:
        """Return a drawing of the step before it runs; see `drawing.draw_step`."""
        return draw_step(self.compiled, self.works, self.title, **options)

    @property
    def works(self) -> tuple[TaskWork, ...]:
        """The work of each executable of the step, for each device of an actor; counted when first read."""
        return self.compiled.works

    @property
    def passes(self) -> Mapping[str, str]:
        """The program as text after each compiler pass, by the pass's name, in the order the passes ran."""
        return self.compiled.passes

    @property
    def stages(self) -> tuple[int, ...] | None:
        """The marks that end a stage, as a schedule's `stages` takes them; None without just one loop.

        With `stages="balanced"` they say which cut was chosen. Another step of the same model, such as an
        evaluation, takes them as its own `stages`, so that no parameter moves between the two.
        """
        return None if self.compiled.cut is None else self.compiled.cut.boundaries

    def as_text(self) -> str:
        """Return the instruction streams of all actors as one text."""
        return "\n\n".join(format_program(p) for p in self.compiled.programs)

    def report(self) -> report.CompileReport:
        """Return a report of the step's tasks, transfers, memory and placements, which prints as text."""
        return report.make(self.compiled, self.temp_bytes, self.compile_s)


@dataclass(frozen=True, eq=False, repr=False)
class CompiledStep(StepForm):
    """One compiled form of a step, loaded on every actor.

    A step has one form for each combination of shapes, dtypes, static values and shardings in its calls.

    Attributes:
        compiled: the compiler's result, with its executables.
        program_id: the id by which the controller runs the programs that the actors have loaded.
        inputs: the argument leaves, then the hidden arguments (captured arrays, microbatch indices). A leaf
            that is divided is here, and in all that follows, as many as it has parts.
        outputs: the result leaves, then the values that the step's prints show.
        donated: a dictionary. Its keys are the positions of the argument leaves whose buffers the step
            reuses; its values are the positions of the result leaves that are the arguments' new values, or
            None for an argument that has no new value.
        binding: the mapping of arguments and results to actors, which every call uses.
        handed_back: a dictionary for arguments that the step returns without using them. Its keys are
            positions of result leaves; its values are positions of argument leaves. The result stays on the
            argument's actors.
        hidden_values: host values of the hidden arguments.
        arguments: the argument leaves of the user.
        division: how leaves of the user are divided; None if no leaf is.
        hidden: the arrays of the hidden arguments on the actors; empty until the first run.
        auto: the measured steps of a form whose schedule is `Auto`, or of the first steps of its plan; None
            for any other form.
        plan: the plan that took the place of the schedule `Auto`; None if there is none.
    """

    compiled: Compiled
    program_id: int
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    donated: dict[int, int | None]
    binding: Binding
    handed_back: dict[int, int]
    hidden_values: tuple[Any, ...]
    arguments: tuple[Slot, ...]
    division: LeafDivision | None = None
    hidden: list[RemoteArray] = field(default_factory=list)
    auto: AutoSteps | None = None
    plan: Plan | None = None

    def divide(self, leaves: Sequence[Any]) -> Sequence[Any] | None:
        """Return a call's argument leaves as the step's programs take them; see `LeafDivision.divide`."""
        return leaves if self.division is None else self.division.divide(leaves)


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


class DistributedStep(StepDefinition):
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
        super().__init__(runner, fn, options, line=line or tracebacks.caller_line(), exports=exports)
        self.runner = runner
        self._compiled: dict[Any, CompiledStep] = {}
        self._latest: CompiledStep | None = None
        self._calls: deque[tuple[CallSignature, CompiledStep]] = deque(maxlen=_CALLS_KEPT)

    def __repr__(self) -> str:
        return f"<DistributedStep {self.__name__!r}>"

    def __call__(self, *args: Any) -> Coroutine[Any, Any, Any]:
        running = self._run(args)
        running.__qualname__ = self.__name__  # for "coroutine 'train_step' was never awaited"
        return UnawaitedCoroutine(running)  # pyright: ignore[reportReturnType]  # as its `__class__` says

    async def _run(self, args: tuple[Any, ...]) -> Any:
        with HiddenFrames():
            return await self.runner.run(self, args)

    @property
    def plan(self) -> Plan | None:
        """The plan by which the step runs; None if it has none, or not yet.

        A step has a plan if it was made with one, or if its schedule is `Auto`, has been planned, and did not
        stay as it was. If calls have several shapes, this is the plan for the latest one.
        """
        if self._options.plan is not None or self._latest is None:
            return self._options.plan
        return self._latest.plan

    def with_schedule(self, schedule: Any) -> DistributedStep:
        """Return the same step under another schedule.

        A schedule without `stages` keeps the cut that is written in the step: those of the schedule of each
        loop, or every mark. Such a schedule must have the same number of stages, unless the cut is
        `"balanced"`. A schedule with `stages` cuts every loop of the step anew.

        Tasks that have been compiled for an earlier schedule are not compiled again. A schedule may need a
        task in a form that no earlier schedule needed, such as half of a backward, or the last stage's
        forward and backward in one task. Each such form is compiled once.
        """
        options = replace(self._options, schedule=schedule, plan=None)
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
            return await self.runner.compiler.compile(self, args)

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

    def why_compiled_again(self, signature: Any) -> str | None:
        """Return what differs between a call and earlier ones; None for the first form of the step.

        Args:
            signature: the return value of the method `signature` for the call.
        """
        names = {key: [slot.name for slot in form.arguments] for key, form in self._compiled.items()}
        return why_compiled_again(signature, names) if names else None

    def replace(self, old: CompiledStep, new: CompiledStep) -> None:
        """Put a compiled form in the place of another one, for all calls that would use the other one.

        Args:
            old: the form that is no longer used.
            new: the form that takes its place.
        """
        self._compiled = {k: new if form is old else form for k, form in self._compiled.items()}
        calls = [(call, new if form is old else form) for call, form in self._calls]
        self._calls = deque(calls, maxlen=_CALLS_KEPT)
        self._latest = new if self._latest is old else self._latest

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

    def argument(self, argnum: int, call: str) -> Any:
        """Return the argument at position `argnum` as a tree of slots (name, type and actors of each leaf).

        Args:
            argnum: the number of the argument.
            call: the user's call that needs it, for the error message.

        Raises:
            MeshError: the step has not been compiled.
            ArrayError: the step has no such argument with arrays in it.
        """
        compiled = self.latest(call)
        traced = compiled.compiled.traced
        slots = jax.tree.unflatten(traced.in_tree, compiled.arguments)
        numbers = jax.tree.unflatten(traced.in_tree, [traced.arg_of[k] for k in traced.argument_positions])
        found = [next(iter(jax.tree.leaves(number)), None) for number in numbers]
        if argnum in found:
            return slots[found.index(argnum)]
        there = [str(number) for number in found if number is not None]
        have = f"argument{'s' * (len(there) > 1)} {', '.join(there)} ha{'ve' if len(there) > 1 else 's'}"
        raise ArrayError(
            f"{call}: step {self.__name__!r} has no argument {argnum!r} with arrays in it; "
            f"{have if there else 'nor has any other'}"
        )

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


def divide_leaves(
    compiled: Compiled, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> tuple[tuple[Slot, ...], LeafDivision | None]:
    """Return the slots of a compiled step's argument leaves, and how the step divides the user's leaves.

    Args:
        compiled: the compiled step.
        inputs, outputs: the slots that the step's programs know; see `slots`.
    """
    traced = compiled.traced
    arguments, results = inputs[: len(traced.arg_names)], outputs[: len(traced.out_names)]
    if not any((*traced.argument_parts, *traced.result_parts)):
        return tuple(arguments), None
    # `argument_parts` is empty if no argument is divided, and so is `result_parts`.
    of_arguments = traced.argument_parts or (None,) * len(arguments)
    of_results = traced.result_parts or (None,) * len(results)
    division = LeafDivision(leaf_slots(arguments, of_arguments), leaf_slots(results, of_results))
    return division.arguments, division


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
