"""Define a candidate of a plan: a case (a machine and a number of microbatches), a cut and an order of tasks.

A candidate's figures are estimates from the costs of layers until it has been compiled; then they are exact.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from jaxpp_async.planning.cost_model import CostModel
from jaxpp_async.planning.evaluation import evaluate
from jaxpp_async.planning.layers import LayerCosts
from jaxpp_async.planning.loop_bound import LoopBounds
from jaxpp_async.planning.machine import Machine
from jaxpp_async.planning.memory import ActorMemory
from jaxpp_async.planning.named import Timed
from jaxpp_async.planning.problem import PipelineProblem
from jaxpp_async.planning.simulation import Simulation
from jaxpp_async.program.instructions import ActorId
from jaxpp_async.schedules.planned import PlannedSchedule


@dataclass(eq=False)
class Case:
    """A machine and a number of microbatches that may be chosen.

    Attributes:
        machine: the machine.
        costs: the costs of tasks and transfers.
        args: the types of a call's arguments.
        num_microbatches: the number of microbatches.
        cap: the memory of each device; infinite if nothing limits it.
        num_stages: the number of stages that the plan must have; None for any.
        layers: the costs of the layers.
    """

    machine: Machine
    costs: CostModel
    args: list[Any]
    num_microbatches: int
    cap: float
    num_stages: int | None
    layers: LayerCosts

    @property
    def problem(self) -> PipelineProblem:
        return self.layers.problem(self.machine.actors, self.num_microbatches, self.cap, self.num_stages)


@dataclass(eq=False)
class Option:
    """A candidate: a case and an assignment, with exact figures once it has been compiled.

    Attributes:
        case: the machine and the number of microbatches.
        timed: the assignment, with its estimated figures.
        needs: the memory of each actor of the compiled step.
        simulation: the simulation of the compiled step.
        bounds: the times below which no order of the compiled tasks runs the loop.
    """

    case: Case
    timed: Timed
    needs: tuple[ActorMemory, ...] = ()
    simulation: Simulation | None = None
    bounds: LoopBounds | None = None

    @property
    def step_s(self) -> float:
        return self.timed.step_s if self.simulation is None else self.simulation.step_s.p50

    @property
    def peak_bytes(self) -> float:
        if self.needs:
            return max(each.total_bytes for each in self.needs)
        return max(self.timed.peak_bytes) + self.case.layers.reserve_bytes

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.case.cap

    @property
    def num_devices(self) -> int:
        """The number of devices of all actors of the case's machine."""
        return self.case.machine.devices_per_actor * self.case.machine.actors

    def busy_s(self) -> tuple[float, ...]:
        """Return the time that each actor spends in tasks of the loop."""
        return evaluate(self.case.problem, self.timed.assignment).busy_s

    @property
    def schedule(self) -> PlannedSchedule:
        assignment = self.timed.assignment
        names = tuple(mark.name for mark in self.case.layers.marks)
        return PlannedSchedule(assignment.rows, assignment.marks, assignment.name, names)

    @property
    def identity(self) -> Any:
        return id(self.case), self.timed.assignment

    @property
    def kind(self) -> Any:
        """A key that candidates of the same case and the same schedule have in common, whatever their cut."""
        return id(self.case), self.timed.assignment.name

    @property
    def category(self) -> Any:
        """A key that candidates have in common whose estimates are wrong by about the same share.

        A layer's time is that of the layer alone. Stages of several layers, and whole backwards, take less.
        """
        rows = self.timed.assignment.rows
        is_split = any(task.ty == "bwd_input" for row in rows for task in row)
        return id(self.case), self.timed.assignment.num_stages, is_split

    def unestimated_bytes(self) -> tuple[float, ...]:
        """Return how many bytes each actor of the compiled form needs besides those of its layers."""
        return tuple(
            need.total_bytes - peak for need, peak in zip(self.needs, self.timed.peak_bytes, strict=True)
        )


def in_order_of_stages(timed: Timed) -> tuple[Timed, tuple[ActorId, ...]]:
    """Return an assignment whose actors are in the order of their first stages, and their former numbers.

    All links are alike in a problem, so that the figures stay the same. Actors without a task are the last.
    """
    rows = timed.assignment.rows
    firsts = {actor: min((task.stage for task in row), default=math.inf) for actor, row in enumerate(rows)}
    order = tuple(sorted(firsts, key=firsts.__getitem__))
    assignment = replace(timed.assignment, rows=tuple(rows[actor] for actor in order))
    peaks = tuple(timed.peak_bytes[actor] for actor in order)
    return replace(timed, assignment=assignment, peak_bytes=peaks), order


def ratios_of(options: Iterable[Option]) -> dict[Any, float]:
    """Return by how much compiled steps are longer than estimated, as a ratio, by category.

    Args:
        options: compiled candidates; others do not count.
    """
    found: dict[Any, list[float]] = defaultdict(list)
    for option in options:
        if option.simulation is not None and option.timed.step_s > 0:
            found[option.category].append(option.step_s / option.timed.step_s)
    return {category: statistics.median(ratios) for category, ratios in found.items()}
