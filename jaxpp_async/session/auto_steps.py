"""Measure the first steps of a compiled form whose schedule is `Auto`, and then replace the form once.

The first steps of the planned form are measured as well. If they are much longer than predicted, and longer
than those of the form that was replaced, that form comes back, for good.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxpp_async.base.printable import first_line
from jaxpp_async.compiler.pipeline import Compiled, StepRequest
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.errors import RemoteError, ScheduleError, ShardingError, StageError, UnsupportedError
from jaxpp_async.jax_bridge import jax_config
from jaxpp_async.schedules.auto import WarmUp
from jaxpp_async.session.owned_thread import run_in_owned_thread
from jaxpp_async.session.step import CompiledStep, DistributedStep

if TYPE_CHECKING:
    from jaxpp_async.planning.mesh_planner import Choice, MeshPlanner

_LOG = logging.getLogger("jaxpp_async")

Load: TypeAlias = Callable[[StepRequest, Any], Awaitable[CompiledStep]]
"""A function that compiles a request under the settings of JAX that are given, and loads it on the actors."""


@dataclass(eq=False)
class AutoSteps:
    """The measured steps of one compiled form whose schedule is `Auto`, until its schedule is chosen.

    Attributes:
        replaced: while a plan is on trial, the form that the planned one has replaced; else None.
        choice: while a plan is on trial, the choice of the plan; else None.
        finished: the steps that have finished, until the schedule is chosen.
        is_chosen: whether the schedule has been chosen.
        planned: the form that takes the place of this one; None if this one stays.
        lock: is held by the call that chooses, while other calls wait for what it chooses.
    """

    replaced: CompiledStep | None = None
    choice: Choice | None = None
    finished: list[SubmittedStep] = field(default_factory=list)
    is_chosen: bool = False
    planned: CompiledStep | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def note_end(self, step: SubmittedStep) -> None:
        """Record that a step has finished."""
        if not self.is_chosen:
            self.finished.append(step)

    def choose(self, planned: CompiledStep | None) -> None:
        """Record the choice: the form that takes the place of this one, or None if this one stays."""
        self.is_chosen, self.planned = True, planned
        self.replaced = self.choice = None
        self.finished.clear()


def auto_steps(compiled: Compiled) -> AutoSteps | None:
    """Return a record of measured steps for a compiled form, or None if the schedule of no loop is `Auto`."""
    loops = [scheduled.staged.loop for scheduled in compiled.placed.loops.values()]
    return AutoSteps() if any(isinstance(loop.schedule, WarmUp) for loop in loops) else None


async def choose_form(
    step: DistributedStep, compiled: CompiledStep, args: Any, planner: MeshPlanner, load: Load
) -> CompiledStep:
    """Return the form in which a call of a step runs whose schedule is `Auto`.

    When the costs are known, the first call plans, compiles the planned form, and puts it in the place of the
    form that was measured. Calls at the same time wait for this. A call that is cancelled meanwhile leaves
    the choice to the next one. A planned form is replaced by the earlier one if its first steps are bad.

    Args:
        step: the step.
        compiled: the form that the call would use.
        args: the arguments of the call.
        planner: the planner of the mesh.
        load: see `Load`.

    Raises:
        ActorError: an actor or the mesh failed.
        MeshError: another task has changed the settings of JAX meanwhile.
    """
    measured = compiled.auto
    if measured is None:
        return compiled
    if measured.choice is not None:
        return _on_trial(step, compiled, measured, planner)
    if not measured.is_chosen and planner.can_choose(len(measured.finished)):
        # read now: both may change while this waits
        request, settings = step.request(args), jax_config.trace_settings()
        async with measured.lock:
            if not measured.is_chosen:  # no other call has chosen meanwhile
                planned = await _plan(step, compiled, request, settings, measured, planner, load)
                measured.choose(planned)
                if planned is not None:
                    step.replace(compiled, planned)
    return measured.planned or compiled


def _on_trial(
    step: DistributedStep, compiled: CompiledStep, measured: AutoSteps, planner: MeshPlanner
) -> CompiledStep:
    """Return a planned form, or the form that it has replaced if its first steps show that this is better."""
    replaced, choice = measured.replaced, measured.choice
    assert replaced is not None and choice is not None
    if planner.can_judge(len(measured.finished)):
        timelines = [each.timeline() for each in measured.finished]
        why_not = planner.why_not(step.__name__, choice, timelines)
        measured.choose(None if why_not is None else replaced)
        if why_not is not None:
            _LOG.warning(why_not)
            if replaced.auto is not None:
                replaced.auto.choose(None)
            step.replace(compiled, replaced)
    return measured.planned or compiled


async def _plan(
    step: DistributedStep,
    compiled: CompiledStep,
    request: StepRequest,
    settings: Any,
    measured: AutoSteps,
    planner: MeshPlanner,
    load: Load,
) -> CompiledStep | None:
    """Return the planned form, or None if the step stays as it is, and write to the log which it is."""
    timelines = [each.timeline() for each in measured.finished]
    _LOG.info("step %r (jpp.Auto): planning begins, and this call waits for it", step.__name__)
    choice = await run_in_owned_thread(
        lambda tell: planner.choose(step, compiled, request.args, timelines, tell)
    )
    _LOG.log(choice.level, choice.text)
    if choice.plan is None:
        return None
    try:
        planned = await load(replace(request, schedule=choice.plan.schedule), settings)
    except (UnsupportedError, StageError, ScheduleError, ShardingError, RemoteError) as error:
        _LOG.warning(
            "step %r (jpp.Auto) stays as it is: its plan failed: %s", step.__name__, first_line(error)
        )
        return None
    trial = AutoSteps(compiled, choice) if choice.measured_s is not None else None
    return replace(planned, plan=choice.plan, auto=trial)
