"""Compile steps and load them on the actors, each set of shapes once.

`MeshStepCompiler` connects the compiler and the controller. Nothing of a step is run here: `StepRunner` takes
the compiled forms and runs them. `planning.machine` compiles steps too, for machines that need not exist.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from jaxpp_async.base.printable import shown_value
from jaxpp_async.compiler.pipeline import CompilePlan, StepRequest, compile_step
from jaxpp_async.controller.controller import Controller
from jaxpp_async.controller.deploy import LoadableProgram
from jaxpp_async.errors import MeshError
from jaxpp_async.jax_bridge import jax_config
from jaxpp_async.markers import nonfinite
from jaxpp_async.program.work import DeviceModel
from jaxpp_async.session import report
from jaxpp_async.session.argument_binding import Binding
from jaxpp_async.session.auto_steps import auto_steps, choose_form
from jaxpp_async.session.progress import MeshProgress, Phase
from jaxpp_async.session.step import (
    CompiledStep,
    DistributedStep,
    divide_leaves,
    handed_back,
    hidden_values,
    slots,
)

if TYPE_CHECKING:
    from jaxpp_async.planning.mesh_planner import MeshPlanner

_LOG = logging.getLogger("jaxpp_async")

_MOST_TASK_S = 1e9
"""The longest time in seconds that a device model may give to a task."""


class MeshStepCompiler:
    """The part of a mesh that compiles its steps, and knows which form of a step a call uses.

    A compiler owns one lock, under which one step at a time is looked up, compiled, loaded and kept, so that
    calls at the same time compile a step once. While a step under `Auto` is planned, its `AutoSteps.lock` is
    held, and this lock is taken inside it. None of the locks of `StepRunner` is held meanwhile, so that
    compiled steps start while another one compiles.

    Args:
        controller: a function that returns the mesh's controller, or raises `MeshError` if the mesh has not
            started.
        actor_config: the settings of JAX with which the actors were started; empty if the actors live in this
            process.
        planner: plans steps whose schedule is `Auto`.
        device_model: knows how long each executable of a step is to last at least; None to lengthen no
            executable.
        progress: tells the user what is compiled; None to tell nothing.
    """

    def __init__(
        self,
        controller: Callable[[], Controller],
        *,
        actor_config: Mapping[str, Any],
        planner: MeshPlanner,
        device_model: DeviceModel | None = None,
        progress: MeshProgress | None = None,
    ):
        self._controller, self._actor_config = controller, actor_config
        self._planner, self._device_model = planner, device_model
        self._progress = progress or MeshProgress("silent")
        self._compile_lock = asyncio.Lock()
        self._told_again: weakref.WeakSet[DistributedStep] = weakref.WeakSet()  # why is told

    async def compile(self, step: DistributedStep, args: Sequence[Any]) -> CompiledStep:
        """Return the compiled form of a step for these arguments; see `DistributedStep.compile`."""
        self._controller()
        signature = step.signature(args)
        if (found := step.find(signature)) is None:
            self._check_settings()
            # read now: both may change while other steps compile
            request, settings = (step.request(args), jax_config.trace_settings())
            async with self._compile_lock:
                # another call may have compiled it meanwhile
                if (found := step.find(signature)) is None:
                    self._tell_why_again(step, signature)
                    found = await self._load_under(settings, request, step)
                    step.keep(signature, found)
                    if found.auto is not None and (warning := self._planner.over_cap(step, found)):
                        _LOG.warning(warning)
        return await self.choose_form(step, found, args)

    def _tell_why_again(self, step: DistributedStep, signature: Any) -> None:
        """Warn the user that a step is compiled for further arguments; after the first time, only log it."""
        why = step.why_compiled_again(signature)
        if why is None:
            return
        level = logging.INFO if step in self._told_again else logging.WARNING
        self._told_again.add(step)
        _LOG.log(
            level,
            "step %r is compiled again: %s; every set of shapes is compiled once, so keep them few",
            step.__name__,
            why,
        )

    async def choose_form(
        self, step: DistributedStep, compiled: CompiledStep, args: Sequence[Any]
    ) -> CompiledStep:
        """Return the compiled form, or the one that is planned in its place if its schedule is `Auto`."""

        async def load(request: StepRequest, settings: Any) -> CompiledStep:
            async with self._compile_lock:
                return await self._load_under(settings, request, step)

        return await choose_form(step, compiled, args, self._planner, load)

    async def _load_under(
        self, settings: tuple[Any, ...], request: StepRequest, step: DistributedStep
    ) -> CompiledStep:
        """Compile a step and load it on the actors, if JAX still has the settings of the step's call."""
        if jax_config.trace_settings() != settings:
            raise MeshError(
                f"step {step.__name__!r} was called under other settings of JAX than hold now that it is "
                "its turn to be compiled: `with jax.enable_x64(...)` and its like hold for all tasks of "
                "a thread, so let no other task enter or leave one meanwhile"
            )
        return await self.load(request, step, self._device_model)

    def _check_settings(self) -> None:
        """Check that the actors make all the NaN and infinity checks of JAX that are enabled in this thread.

        Raises:
            MeshError: a check is enabled in this thread, but not on the actors.
        """
        theirs = self._actor_config or jax_config.global_checks()
        for name, value in jax_config.thread_checks().items():
            if value and not theirs.get(name):
                raise MeshError(
                    f"{name} is {value} here and {theirs.get(name)} on the actors, which have what "
                    "jax.config said when the mesh started, and nothing of what holds for one thread (`with "
                    f"jax.debug_nans(True)`); call jax.config.update({name!r}, {value}) before the mesh "
                    "starts, and use no `with`"
                )

    async def load(
        self, request: StepRequest, step: DistributedStep, device_model: DeviceModel | None = None
    ) -> CompiledStep:
        """Compile a step and load it on the actors, under no lock and whatever was compiled before.

        Args:
            request: what is compiled.
            step: the step, for its name and line in messages.
            device_model: knows how long each executable is to last at least; None to lengthen no executable.
        """
        with self._progress.phase(f"compiling {step.__name__}") as phase:
            return await self._load_told(request, step, device_model, phase)

    async def _load_told(
        self, request: StepRequest, step: DistributedStep, device_model: DeviceModel | None, phase: Phase
    ) -> CompiledStep:
        start_s = time.perf_counter()
        compiled = compile_step(request, lambda name: phase.update(f"pass {name} is done"))
        num_stages = sum(len(loop.stage_actors) for loop in compiled.placed.loops.values())
        stages = f"{num_stages} stage{'s' * (num_stages != 1)}" if num_stages else "no loop"
        phase.update(stages)
        report.report_notes(step.__name__, step.line, request, compiled)
        names = dict(enumerate(compiled.traced.arg_names)) if nonfinite.forbids_nonfinite() else {}
        modelled_s = (
            modelled_seconds(device_model, compiled, step.__name__) if device_model is not None else {}
        )
        program_id, loaded = await self._controller().load(
            LoadableProgram.of(compiled.programs, compiled.executables, names, modelled_s),
            lambda done, total, cached: phase.update(f"{stages}, {_compiled_text(done, total, cached)}"),
        )
        seconds = time.perf_counter() - start_s
        self._controller().mesh_events.compiled(step.__name__, seconds, len(compiled.placed.graph.nodes))
        inputs, outputs = slots(compiled)
        continued = {arg: result for result, arg in compiled.continues.items()}
        donated = {
            k: continued.get(k) for k, arg in enumerate(compiled.traced.arg_of) if arg in request.donated
        }
        arguments, division = divide_leaves(compiled, inputs, outputs)
        return CompiledStep(
            compiled=compiled,
            program_id=program_id,
            inputs=inputs,
            outputs=outputs,
            donated=donated,
            binding=Binding(inputs, outputs, len(compiled.traced.arg_of), donated),
            handed_back=handed_back(compiled),
            compile_s={a: reply.compile_s for a, reply in loaded.items()},
            temp_bytes={a: reply.temp_bytes for a, reply in loaded.items()},
            hidden_values=hidden_values(compiled),
            arguments=arguments,
            division=division,
            auto=auto_steps(compiled),
        )


def _compiled_text(done: int, total: int, cached: int) -> str:
    """Return how far actors are with the executables of a step: XLA's own work, and that of the cache."""
    xla = f"{done - cached} by XLA" if done > cached else ""
    cache = f"{cached} from the cache" if cached else ""
    how = ", ".join(filter(None, (xla, cache)))
    return f"{done} of {total} executables are compiled{f' ({how})' if how else ''}"


def modelled_seconds(model: DeviceModel, compiled: CompilePlan, step_name: str) -> dict[int, float]:
    """Return how long each executable of a step is to last, by its index, as a device model says.

    Executables that last no time at all are left out.

    Args:
        model: the user's device model.
        compiled: the compiled step.
        step_name: the name of the step, for error messages.

    Raises:
        MeshError: the model raises an exception, or returns something other than a time of at most
            `_MOST_TASK_S`.
    """
    found: dict[int, float] = {}
    for index, (recipe, work) in enumerate(zip(compiled.placed.recipes, compiled.works, strict=True)):
        where = f"step {step_name!r}: device_model.task_s of {recipe.name!r} ({work.flops:.3g} FLOPs)"
        try:
            seconds = model.task_s(work)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # the user's model may raise anything
            raise MeshError(
                f"{where} raised {type(error).__name__}: {shown_value(error, str)}; let it return seconds "
                "for every executable of the step, of which nothing has been loaded"
            ) from error
        if not isinstance(seconds, Real) or isinstance(seconds, bool) or not 0 <= seconds <= _MOST_TASK_S:
            raise MeshError(
                f"{where} returned {shown_value(seconds)}; let it return a finite number of seconds, 0 or "
                "more, for every executable of the step, of which nothing has been loaded"
            )
        if seconds > 0:
            found[index] = float(seconds)
    return found
