"""Calibrate the formula for tasks that were not measured by the measured stages that contain their layers.

The tasks of a new cut have never run. Their layers have, as parts of the measured stages. If a measured stage
took longer than the formula says, each of its layers is taken to need longer by the same share. Forwards and
the two halves of backwards have factors of their own. The estimate of layers, the simulation of compiled
steps and the sentences about both use the factors by `TaskTimes`, so that they agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxpp_async.errors import MissingCost
from jaxpp_async.planning.cost_model import CostModel
from jaxpp_async.planning.measurements import MeasuredCut
from jaxpp_async.planning.samples import Samples
from jaxpp_async.program.task_label import TASK_TRAITS, LabelType, TaskLabel, TaskPart, task_kind
from jaxpp_async.program.work import LoopCut, TaskWork


@dataclass(frozen=True)
class LayerFactors:
    """The factors by which layers take longer than the formula says.

    Attributes:
        flops: the work of each layer, in any unit, by which the layers of a task are weighted.
        factors: for each layer, the factor of each part that was measured, by the part.
    """

    flops: tuple[float, ...]
    factors: tuple[Mapping[str, float], ...]

    def task_factor(self, parts: Sequence[TaskPart], layers: range) -> float:
        """Return the mean factor of a task's layers, weighted by their work; 1 for what was not measured.

            Args:
        XX: the layers of the task's stage.
        """
        whole = math.fsum(self.flops[layer] for layer in layers)
        if not whole:
            return 1.0
        sums = [self.flops[n] * self.factors[n].get(part, 1.0) for n in layers for part in parts]
        return math.fsum(sums) / (whole * len(parts))

    def is_measured(self, layer: int) -> bool:
        """Return whether the forward and the backward of a layer were measured, in whichever stage."""
        return {"fwd", "bwd_weight"} <= self.factors[layer].keys()


def layer_factors(costs: CostModel, marks: Sequence[str]) -> LayerFactors | None:
    """Return the factors of the layers of a step by the cuts of it that were measured.

    Each layer has the factors of its stage in the finest measured cut, the latest of several equally fine
    ones. The factors that it lacks are those of the next cut.

    Args:
        costs: the costs, with the cuts that were measured.
        marks: all marks of the step's loop, as text.

    Returns:
        The factors; None if no cut of these marks was measured.

    Raises:
        MissingCost: there is no cost for a link between the devices of an actor.
    """
    cuts = [each for each in costs.cuts if each.cut.marks == tuple(marks)]
    if not cuts or costs.formula is None:
        return None
    factors: list[dict[str, float]] = [{} for _ in range(len(marks) + 1)]
    for each in sorted(reversed(cuts), key=lambda each: -len(each.cut.boundaries)):
        for stage, found in _stage_factors(costs, each).items():
            for layer in each.cut.layers_of(stage):
                factors[layer] = {**found, **factors[layer]}
    flops = next((each.cut.flops for each in cuts if each.cut.flops), (1.0,) * len(factors))
    return LayerFactors(flops, tuple(factors))


def _stage_factors(costs: CostModel, measured: MeasuredCut) -> dict[int, dict[str, float]]:
    """Return the factors of each measured stage, by the parts of a layer's time."""
    ratios: dict[int, dict[LabelType, float]] = {}
    for text, work in measured.works.items():
        label = TaskLabel.parse(text)
        if (
            label.traits.parts
            and label.stage is not None
            and work.key in costs.tasks
            and (by_formula_s := costs.formula_s(work)) > 0
        ):
            ratios.setdefault(label.stage, {})[label.type] = costs.tasks[work.key].mean / by_formula_s
    found: dict[int, dict[str, float]] = {}
    for stage, by_type in ratios.items():
        found[stage] = {}
        for type_, traits in TASK_TRAITS.items():
            for part in traits.parts if type_ in by_type else ():
                found[stage].setdefault(part, by_type[type_])
    return found


class TaskTimes:
    """The times of the tasks of one compiled step, measured or by the calibrated formula.

    Args:
        costs: the costs of tasks.
        cut: the cut of the step's loop; None if it has no loop or several.
    """

    def __init__(self, costs: CostModel, cut: LoopCut | None) -> None:
        self._costs, self._cut = costs, cut
        self._factors = layer_factors(costs, cut.marks) if cut is not None else None

    def is_known(self, work: TaskWork, label: str) -> bool:
        """Return whether a task was measured, or the stages that contained all that it computes.

        Args:
            work: the work of the task.
            label: the label of the task, such as `"fwd(stage 0, mb 3)"`.
        """
        known = TaskLabel.parse(label)
        parts = {*known.traits.parts}
        if self._costs.is_measured(work) or self._factors is None or self._cut is None:
            return self._costs.is_measured(work)
        if not parts or known.stage is None:
            return False
        layers = self._cut.layers_of(known.stage)
        return all(parts <= self._factors.factors[layer].keys() for layer in layers)

    def task_s(self, work: TaskWork, label: str) -> float:
        """Return the mean time of a task in seconds; the arguments and errors are those of `samples`."""
        return self.samples(work, label).mean

    def samples(self, work: TaskWork, label: str) -> Samples:
        """Return the distribution of a task's time.

        Args:
            work: the work of the task.
            label: the label of the task.

        Raises:
            MissingCost: there is no cost for the task, which the message names.
        """
        try:
            samples = self._costs.samples(work)
        except MissingCost as error:
            raise MissingCost(f"task {task_kind(label)!r} of the step: {error}") from None
        if self._factors is None or self._cut is None or self._costs.is_measured(work):
            return samples
        known = TaskLabel.parse(label)
        if not known.traits.parts or known.stage is None:
            return samples
        factor = self._factors.task_factor(known.traits.parts, self._cut.layers_of(known.stage))
        return Samples(tuple(factor * each for each in samples.seconds))

    @property
    def is_calibrated(self) -> bool:
        """Whether stages were measured that contained layers of the step."""
        return self._factors is not None


def formula_error(costs: CostModel, cut: LoopCut | None) -> float:
    """Return by what share the time of a new task may be wrong, because layers of a step were not measured.

    Args:
        costs: the costs of tasks.
        cut: the cut of a compiled form of the step; None if it has no loop or several.

    Returns:
        The error of the formula's fit; 0 if all layers are parts of measured stages.
    """
    factors = layer_factors(costs, cut.marks) if cut is not None else None
    if factors is not None and all(map(factors.is_measured, range(len(factors.factors)))):
        return 0.0
    return costs.formula_error
