"""Plan the steps of a mesh, by the mesh's own costs, and decide how a step with the schedule `Auto` runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from msgspec import structs

from jaxpp_async.base.printable import first_line, listed
from jaxpp_async.base.quantities import format_seconds, parse_bytes
from jaxpp_async.compiler.ir import Loop
from jaxpp_async.compiler.pipeline import CompilePlan
from jaxpp_async.errors import JaxppAsyncError, PlanError
from jaxpp_async.planning.calibration import formula_error
from jaxpp_async.planning.cost_model import CostModel
from jaxpp_async.planning.machine import BETWEEN_DEVICES, Machine
from jaxpp_async.planning.memory import memory_needs
from jaxpp_async.planning.plan import Plan
from jaxpp_async.planning.planner import plan
from jaxpp_async.planning.samples import LinkCost, Samples
from jaxpp_async.planning.search import WORTHWHILE
from jaxpp_async.planning.simulation import simulate
from jaxpp_async.schedules.auto import Auto, WarmUp
from jaxpp_async.schedules.validate import describe_schedule, plural
from jaxpp_async.timeline import Timeline

if TYPE_CHECKING:
    from jaxpp_async.session.step import StepForm
    from jaxpp_async.session.step_request import StepDefinition

FIRST_STEPS, KEPT_TIMELINES = 2, 6
"""The number of a mesh's first steps in which much is done for the first time, and the number of last steps
by which a mesh plans."""

MISSED, TRIAL_STEPS = 0.05, FIRST_STEPS + 4
"""The share of the prediction by which the first steps of a plan may be longer before the step goes back to
the schedule of its first steps, and the number of steps after which this is decided."""

WARM_UP_STEPS = FIRST_STEPS + 4
"""The number of steps of one compiled form that are measured before its schedule is planned."""

EXCHANGES = (
    "exchanges between an actor's devices have no time of their own: it is in the rate of the measured tasks"
)
"""The sentence about the exchanges in the costs that a mesh has measured."""


@dataclass(frozen=True)
class Choice:
    """The decision how a step with the schedule `Auto` runs from now on.

    Attributes:
        plan: the plan by which the step runs; None if it stays with the schedule of its first steps.
        text: a sentence for the log.
        level: the level of the log record: a warning if no plan could be made.
        measured_s: the median time of the steps that were measured, in seconds; None if none was, or if the
            step cannot go back to them.
    """

    plan: Plan | None
    text: str
    level: int = logging.INFO
    measured_s: float | None = None


class MeshPlanner:
    """A planner for the steps of one mesh.

    Args:
        machine: the actors and devices of the mesh.
        device_model: the mesh's `device_model`; its costs count if it is a `CostModel` with links.
    """

    def __init__(self, machine: Machine, device_model: Any = None):
        self._machine, self._device_model = machine, device_model

    def plan(
        self,
        step: StepDefinition,
        args: Sequence[Any],
        timelines: Sequence[Timeline],
        *,
        costs: CostModel | None = None,
        **options: Any,
    ) -> Plan:
        """Plan a step for this mesh; see `RemoteMesh.plan`.

        Args:
            step: the step.
            args: the types of a call's arguments.
            timelines: the timelines of the last steps, the latest one at the end.
            costs: the costs of tasks and transfers; None for those of the mesh.
            options: options of `planner.plan`.

        Raises:
            PlanError: as for `planner.plan`, or too few steps were measured.
            MissingCost: the cost model has no cost for a task or a transfer.
            UnsupportedError, StageError, ShardingError: the step cannot be compiled.
        """
        return plan(
            step.fn,
            args,
            machine=self._machine,
            costs=costs if costs is not None else partial(self._costs, timelines),
            in_shardings=step.options.in_shardings,
            out_shardings=step.options.out_shardings,
            donate_argnums=step.options.donate_argnums,
            static_argnums=step.options.static_argnums,
            **options,
        )

    def _costs(self, timelines: Sequence[Timeline]) -> CostModel:
        """Return the costs of the mesh: of its device model, or measured.

        The exchanges between the devices of an actor are not measured by themselves. Their time is in that of
        the tasks, to which the formula for other tasks is fitted.

        Raises:
            PlanError: there is no cost model with links, and too few steps were measured.
        """
        if self._device_model is not None and not isinstance(self._device_model, CostModel) and not timelines:
            raise PlanError(
                "the mesh's device_model is no CostModel with links, so that it has no costs of transfers to "
                "plan by; run a few steps first, which measures them, or pass costs=, such as "
                "CostModel.for_machine(machine)"
            )
        costs = costs_of(self._device_model, timelines)
        if costs is self._device_model or self._machine.devices_per_actor == 1:
            return costs
        links = {BETWEEN_DEVICES: LinkCost(Samples((0.0,))), **costs.links}
        return structs.replace(costs, links=links, assumed=(*costs.assumed, EXCHANGES))

    # ------------------------------------------------------------ Auto

    @property
    def _needs_no_steps(self) -> bool:
        return isinstance(self._device_model, CostModel) and bool(self._device_model.links)

    def can_choose(self, num_measured: int) -> bool:
        """Return whether the costs are known well enough to plan.

        Args:
            num_measured: the number of steps of the compiled form that were measured.
        """
        return self._needs_no_steps or num_measured >= WARM_UP_STEPS

    def choose(
        self,
        step: StepDefinition,
        form: StepForm,
        args: Sequence[Any],
        timelines: Sequence[Timeline],
        on_progress: Callable[[str], None],
    ) -> Choice:
        """Decide how a step with the schedule `Auto` runs from now on.

        The step stays with the schedule of its first steps if no plan can be made, or if the plan is hardly
        shorter. A training does not end because it could not be planned, so no error is raised.

        Args:
            step: the step.
            form: the compiled form of the step's first steps.
            args: the types of a call's arguments.
            timelines: the timelines of the steps that were measured, the latest one at the end.
            on_progress: see `planner.plan`.
        """
        try:
            return self._choose(step, form, args, timelines, on_progress)
        except Exception as error:  # the user's function is traced, which may raise anything
            kind = "" if isinstance(error, JaxppAsyncError) else f"{type(error).__name__}: "
            text = f"{_title(step)} stays with {_schedules(form.compiled)}: {kind}{first_line(error)}"
            return Choice(None, text, logging.WARNING)

    def _choose(
        self,
        step: StepDefinition,
        form: StepForm,
        args: Sequence[Any],
        timelines: Sequence[Timeline],
        on_progress: Callable[[str], None],
    ) -> Choice:
        auto, costs = _auto_of(form.compiled), self._costs(timelines)
        found = self.plan(
            step,
            args,
            timelines,
            costs=costs,
            memory=auto.memory,
            num_stages=auto.num_stages,
            batch_argnums=_batch_argnums(form.compiled),
            on_progress=on_progress,
        )
        before_s, planned_s = simulate(form, costs).step_s.p50, found.step_s.p50
        before = f"{_schedules(form.compiled)}: {format_seconds(before_s, 4)} predicted"
        measured_s = _measured_s(timelines) if timelines else None
        if measured_s is not None:
            before += f", {format_seconds(measured_s, 4)} measured"
        planned = f"{_named(found)}: {format_seconds(planned_s, 4)} a step predicted"
        known = "by the device model" if self._needs_no_steps else f"after {len(timelines)} measured steps"
        if self.over_cap(step, form) is not None:  # the first steps' schedule is no choice
            return Choice(found, f"{_title(step)}: {known}, {planned}; {before}")
        error, gain = formula_error(costs, form.compiled.cut), 1 - planned_s / before_s
        if gain < WORTHWHILE or (error and gain < error):
            text = f"{_title(step)}: {known}, it stays with {before}; the best plan, {planned}"
            doubt = f", which may be wrong by {error:z.0%}, since some layers were not measured"
            return Choice(None, text if gain < WORTHWHILE else text + doubt)
        return Choice(found, f"{_title(step)}: {known}, {planned}; {before}", measured_s=measured_s)

    def can_judge(self, num_measured: int) -> bool:
        """Return whether enough steps of a plan were measured to say whether its prediction was right.

        Args:
            num_measured: the number of steps of the planned form that have finished.
        """
        return num_measured >= TRIAL_STEPS

    def why_not(self, name: str, choice: Choice, timelines: Sequence[Timeline]) -> str | None:
        """Return why a step goes back to the schedule of its first steps, or None if it stays with its plan.

        A step goes back if it takes longer than predicted by over `MISSED`, and longer than it took before.

        Args:
            name: the name of the step function.
            choice: the choice of the plan.
            timelines: the timelines of the plan's first steps.
        """
        if choice.plan is None or choice.measured_s is None:
            return None
        took_s, predicted_s = _measured_s(timelines), choice.plan.step_s.p50
        if took_s <= max((1 + MISSED) * predicted_s, choice.measured_s):
            return None
        return (
            f"step {name!r} (jpp.Auto) goes back to the schedule of its first steps, which took "
            f"{format_seconds(choice.measured_s, 4)}: by its plan, {_named(choice.plan)}, it takes "
            f"{format_seconds(took_s, 4)}, and {format_seconds(predicted_s, 4)} were predicted"
        )

    def over_cap(self, step: StepDefinition, form: StepForm) -> str | None:
        """Return a warning if a compiled form needs more memory than its `Auto` allows, else None."""
        used = [loop.schedule for loop in _loops(form.compiled)]
        given = [schedule.auto.memory for schedule in used if isinstance(schedule, WarmUp)]
        caps = [parse_bytes(memory) for memory in given if memory is not None]
        if not caps:
            return None
        worst = max(memory_needs(form, self._machine), key=lambda needs: needs.total_bytes)
        if worst.total_bytes <= min(caps):
            return None
        return (
            f"{_title(step)}: its first steps, under {_schedules(form.compiled)}, need {worst.total_bytes:,} "
            f"bytes on each device of actor {worst.actor}, and memory= allows {min(caps):,}; if they do not "
            "fit, plan before the run with jaxpp_async.plan(...), and run the plan with "
            "mesh.distributed(fn, plan=plan)"
        )


def costs_of(model: Any, timelines: Sequence[Timeline]) -> CostModel:
    """Return the costs by which a mesh plans: those of a cost model with links, else the measured ones.

    Args:
        model: the mesh's device model or the user's costs; None if there is none.
        timelines: the timelines of the mesh's last steps, the latest one at the end.

    Raises:
        PlanError: there is no cost model, and too few steps were measured.
    """
    if isinstance(model, CostModel) and (model.links or not timelines):
        return model
    measured = timelines[-KEPT_TIMELINES:] if len(timelines) > KEPT_TIMELINES else timelines[FIRST_STEPS:]
    if len(measured) < 2:
        raise PlanError(
            f"there are no costs to plan by: {plural(len(timelines), 'step')} finished in a row here, "
            f"and the first {FIRST_STEPS} do not count; run a few more steps first, or pass costs="
        )
    return CostModel.from_timelines(measured)


def _measured_s(timelines: Sequence[Timeline]) -> float:
    """Return the median time in seconds that the actors took for a step, without the first steps."""
    return median(t.end_s - t.begin_s for t in timelines[FIRST_STEPS:])


def _title(step: StepDefinition) -> str:
    return f"step {step.__name__!r} (jpp.Auto)"


def _named(plan: Plan) -> str:
    name = "a searched order" if plan.name == "searched" else plan.name
    return (
        f"{name} with {f'stages at marks {listed([*map(str, plan.cut)], 40)}' if plan.cut else 'one stage'}"
    )


def _loops(compiled: CompilePlan) -> list[Loop]:
    return [scheduled.staged.loop for scheduled in compiled.placed.loops.values()]


def _schedules(compiled: CompilePlan) -> str:
    """Return the schedules of a step's loops as text, an `Auto` as that of its first steps."""
    used = [loop.schedule for loop in _loops(compiled)]
    plain = [schedule.plain if isinstance(schedule, WarmUp) else schedule for schedule in used]
    return " and ".join(dict.fromkeys(map(describe_schedule, plain)))


def _auto_of(compiled: CompilePlan) -> Auto:
    """Return the `Auto` of a step's loop.

    Raises:
        PlanError: the step has several loops.
    """
    first, *others = _loops(compiled)
    if others:
        where = listed([loop.line for loop in (first, *others)], 4)
        raise PlanError(
            f"the step has several loops, at {where}, and a plan is of one loop; write another schedule in "
            "each, such as Std1F1B(num_stages, stages='balanced'), or make steps of one loop each"
        )
    return first.schedule.auto


def _batch_argnums(compiled: CompilePlan) -> tuple[int, ...] | None:
    """Return the positions of the arguments that a step's loops take their batches from.

    Returns:
        The positions; None if no loop's batch is an argument of the step, as it came.
    """
    traced = compiled.traced
    positions = dict(zip(traced.flat.inputs, traced.arg_of, strict=False))
    read = {r for loop in _loops(compiled) for r in loop.batch if isinstance(r, int)}
    found = {positions[r] for r in read if r in positions}
    return tuple(sorted(found)) or None
