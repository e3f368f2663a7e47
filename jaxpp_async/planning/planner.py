"""Choose the cut, the schedule, the microbatches and the order of a step under a memory cap.

`plan` goes from cheap to exact. The costs of layers give a `PipelineProblem` for each machine and number of
microbatches. Those whose lower bound is above a step already found are left out. Named schedules are timed on
their best cuts, a search improves on the best of them, and the compiler compiles the very best. The plan is
the candidate whose compiled form fits into the memory and has the shortest simulated step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jaxpp_async.errors import PlanError
from jaxpp_async.planning.bound import bound_of_all, bound_of_cut
from jaxpp_async.planning.cost_model import CostModel
from jaxpp_async.planning.devices import find_device
from jaxpp_async.planning.evaluation import evaluate
from jaxpp_async.planning.layers import (
    PROFILED_MICROBATCHES,
    LayerCosts,
    profile_layers,
    resized,
    shortened,
    slowest_link,
)
from jaxpp_async.planning.machine import BETWEEN_HOSTS, Machine, PlannedStep, argument_types, compile_for
from jaxpp_async.planning.memory import ActorMemory, memory_needs
from jaxpp_async.planning.named import Timed, on_best_cut, on_equal_cut
from jaxpp_async.planning.plan import Candidate, Plan, PlannedSchedule, describe_arguments, format_row
from jaxpp_async.planning.problem import PipelineProblem
from jaxpp_async.planning.search import WORTHWHILE, search
from jaxpp_async.planning.simulation import Simulation, simulate
from jaxpp_async.schedules.validate import plural
from jaxpp_async.timeline import Timeline

NUM_COMPILED = 3
"""The number of candidates that are compiled in a round, beside those that turn out not to fit."""

MAX_ROUNDS = 4
"""The number of times that the estimate of memory is corrected by compiled candidates."""


FIRST_STEPS, KEPT_TIMELINES = 2, 6
"""The number of a mesh's first steps in which much is done for the first time, and the number of last steps
by which a mesh plans."""


def plan(
    train_step: Callable,
    args: Sequence[Any],
    *,
    machine: Machine | Sequence[Machine],
    global_batch: int | None = None,
    memory: int | str | None = None,
    costs: CostModel | Callable[[], CostModel] | None = None,
    microbatches: Sequence[int] | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    iterations: int | None = None,
    seed: int = 0,
) -> Plan:
    """Plan a step: choose where it is cut, how many stages and microbatches it has, and the order of tasks.

    Nothing is started or run. The same arguments give the same plan.

    Args:
        train_step: the step function, with a `pipeline_yield` behind each layer at which it may be cut.
        args: the arguments of a call; each array may be a `jax.ShapeDtypeStruct` instead.
        machine: the machine to plan for; or several, such as machines of the same devices with other
            numbers of actors and other `spmd_mesh` shapes, of which the best is chosen.
        global_batch: the number of examples of a step, microbatches times microbatch size. An argument whose
            arrays have this many in their first two dimensions is a batch.
        memory: the memory of each device that the step may use, in bytes or as text such as `"70GB"` or
            `"64GiB"`; None for all that the machine's devices have.
        costs: the costs of tasks and transfers, or a function that returns them; None for those of the
            machine's device, from its published figures.
        microbatches: the numbers of microbatches to choose from; None for that of `args`.
        batch_argnums: the positions of the batches in `args`; None for those that `global_batch` shows, or
            the last argument.
        in_shardings, out_shardings, donate_argnums, static_argnums: as for `RemoteMesh.distributed`.
        iterations: how many candidates the search looks at; None: as many as suit the problem.
        seed: the seed of the search and of the simulations.

    Returns:
        The plan.

    Raises:
        PlanError: nothing fits into the memory, the step has no marks, a global batch cannot be divided, or
            there are no costs.
        MissingCost: the cost model has no cost for a task or a transfer.
        UnsupportedError, StageError, ShardingError: the step cannot be compiled.
    """
    machines = [machine] if isinstance(machine, Machine) else list(machine)
    if not machines:
        raise PlanError("machine: expected a machine or several, got none")
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    types = argument_types(args, static)
    batch = _batches(types, static, batch_argnums, global_batch)
    first = jax.tree.leaves([types[n] for n in batch])
    if not first or not first[0].shape:
        raise PlanError(
            "no argument is a batch of shape (microbatches, microbatch size, ...); say batch_argnums="
        )
    given = first[0].shape[0]
    if global_batch is not None and math.prod(first[0].shape[:2]) != global_batch:
        raise PlanError(
            f"global_batch is {global_batch}, and the batch has {given} microbatches of "
            f"{math.prod(first[0].shape[1:2])}"
        )

    def compile_step(machine: Machine, args: Sequence[Any], schedule: Any) -> PlannedStep:
        return compile_for(
            machine,
            train_step,
            args,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
            schedule=schedule,
        )

    cap = parse_bytes(memory) if memory is not None else None
    known = costs() if callable(costs) else costs
    planner = _Planner(compile_step, batch, iterations, seed)
    for each in machines:
        used = known if known is not None else _published(each)
        limit = cap if cap is not None else each.memory
        for count in dict.fromkeys(microbatches or [given]):
            planner.add(each, used, resized(types, batch, count), count, limit)
    return planner.plan(getattr(train_step, "__name__", "step"))


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}I": 2 ** (10 * power) for power, unit in enumerate("KMGT", 1)}


def parse_bytes(memory: int | str) -> int:
    """Return the number of bytes that a user gave, such as `70_000_000_000`, `"70GB"` or `"64GiB"`.

    Raises:
        PlanError: the text is no number of bytes.
    """
    if isinstance(memory, int) and memory > 0:
        return memory
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", str(memory).upper())
    if match is None or match[2] not in _UNITS or not float(match[1]):
        raise PlanError(f"memory is {memory!r}; write bytes, or text such as '70GB' or '64GiB'")
    return int(float(match[1]) * _UNITS[match[2]])


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


def _published(machine: Machine) -> CostModel:
    device = find_device(machine.device)
    if device.bf16_flops_per_s is None or device.memory_bytes_per_s is None:
        raise PlanError(
            f"there are no costs: of device {device.name!r} no figures are published; pass costs=, such as "
            "CostModel.from_timelines([...]) of a few measured steps"
        )
    each = machine.devices_per_actor
    if (network := machine.links.get(BETWEEN_HOSTS)) is None:
        return CostModel.from_device(device, devices_per_actor=each)
    return CostModel.from_device(device, devices_per_actor=each, network=network)


def _batches(
    types: Sequence[Any], static: Sequence[int], argnums: int | Sequence[int] | None, global_batch: int | None
) -> tuple[int, ...]:
    """Return the positions of the arguments that are batches."""
    count = len(types)
    if argnums is not None:
        found = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        if any(not -count <= n < count for n in found):
            raise PlanError(f"batch_argnums is {argnums!r}, and the step is called with {count} arguments")
        return tuple(n % count for n in found)
    dynamic = [n for n in range(count) if n not in static]
    if global_batch is None:
        return tuple(dynamic[-1:])

    def is_batch(n: int) -> bool:
        leaves = [x for x in jax.tree.leaves(types[n]) if len(x.shape) > 1]
        return bool(leaves) and all(math.prod(x.shape[:2]) == global_batch for x in leaves)

    return tuple(n for n in dynamic if is_batch(n)) or tuple(dynamic[-1:])


# ---------------------------------------------------------------- cases and candidates


@dataclass(eq=False)
class _Case:
    """A machine and a number of microbatches that may be chosen.

    Attributes:
        machine: the machine.
        costs: the costs of tasks and transfers.
        args: the types of a call's arguments.
        num_microbatches: the number of microbatches.
        cap: the memory of each device; infinite if nothing limits it.
        layers: the costs of the layers.
    """

    machine: Machine
    costs: CostModel
    args: list[Any]
    num_microbatches: int
    cap: float
    layers: LayerCosts

    @property
    def problem(self) -> PipelineProblem:
        return self.layers.problem(self.machine.actors, self.num_microbatches, self.cap)


@dataclass(eq=False)
class _Option:
    """A candidate: a case and an assignment, with exact figures once it has been compiled."""

    case: _Case
    timed: Timed
    needs: tuple[ActorMemory, ...] = ()
    simulation: Simulation | None = None

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

    def busy_s(self) -> tuple[float, ...]:
        """Return the time that each actor spends in tasks of the loop."""
        return evaluate(self.case.problem, self.timed.assignment).busy_s

    @property
    def schedule(self) -> PlannedSchedule:
        assignment = self.timed.assignment
        return PlannedSchedule(assignment.rows, assignment.marks, assignment.name)

    @property
    def identity(self) -> Any:
        return id(self.case), self.timed.assignment

    def missed_bytes(self) -> float:
        """Return by how many bytes the estimate of an actor's memory was too small; negative if too large."""
        reserve = self.case.layers.reserve_bytes
        return max(
            need.total_bytes - peak - reserve
            for need, peak in zip(self.needs, self.timed.peak_bytes, strict=True)
        )


@dataclass(eq=False)
class _Planner:
    """The work of `plan`.

    Args:
        compile_step: a function that compiles the step for a machine, arguments and a schedule.
        batch: the positions of the batches in the arguments.
        iterations: how many candidates the search looks at; None: as many as suit the problem.
        seed: the seed of the search and of the simulations.
    """

    compile_step: Callable[[Machine, Sequence[Any], Any], PlannedStep]
    batch: tuple[int, ...]
    iterations: int | None
    seed: int
    cases: list[_Case] = field(default_factory=list)
    compiled: dict[Any, _Option] = field(default_factory=dict)
    _layers: dict[Any, LayerCosts] = field(default_factory=dict)

    def add(
        self, machine: Machine, costs: CostModel, args: list[Any], num_microbatches: int, cap: float | None
    ) -> None:
        """Add a machine and a number of microbatches to choose from."""
        key = tuple(machine.spmd_mesh.items()), num_microbatches, id(costs)
        if key not in self._layers:
            few = min(PROFILED_MICROBATCHES, num_microbatches)
            short = shortened(args, self.batch, few)
            self._layers[key] = profile_layers(
                lambda machine, schedule: self.compile_step(machine, short, schedule),
                machine,
                costs,
                few,
                self.batch.__contains__,
            )
        latency_s, bytes_per_s = slowest_link(costs, machine.num_actors)
        layers = replace(self._layers[key], latency_s=latency_s, bytes_per_s=bytes_per_s)
        limit = math.inf if cap is None else float(cap)
        self.cases.append(_Case(machine, costs, args, num_microbatches, limit, layers))

    def plan(self, name: str) -> Plan:
        """Return the best plan of all cases.

        Args:
            name: the name of the step function.
        """
        bounded = any(case.cap < math.inf for case in self.cases)
        if bounded:  # correct the estimate of memory before the search relies on it
            self._correct(self._try(self._named(rounds=0)[:1], 1))
        for _ in range(MAX_ROUNDS):
            named = self._named()
            tried = self._try(named, NUM_COMPILED)
            options = sorted(named + self._searched(named), key=lambda option: option.step_s)
            if any(option.fits for option in self.compiled.values()):
                return self._plan(name, options)
            self._correct(tried)
        smallest = self._smallest()
        if smallest.fits:
            return self._plan(name, [smallest])
        raise PlanError(_nothing_fits(name, smallest))

    def _named(self, rounds: int = 8) -> list[_Option]:
        """Return the named schedules of all cases that fit by estimate, the fastest first.

        Args:
            rounds: how often the boundaries of a cut are moved by one layer; see `on_best_cut`.
        """
        found: list[_Option] = []
        bounds = {id(case): bound_of_all(case.problem) for case in self.cases}
        for case in sorted(self.cases, key=lambda case: bounds[id(case)]):
            if not found or bounds[id(case)] < min(option.step_s for option in found):
                found += [_Option(case, timed) for timed in on_best_cut(case.problem, rounds=rounds)]
        return sorted(found, key=lambda option: option.timed.step_s)

    def _searched(self, named: Sequence[_Option]) -> list[_Option]:
        """Return what a search finds for the case of the best named schedule, compiled.

        If the compiled form of what was found does not fit, another search has so much less memory.
        """
        case = named[0].case if named else self.cases[0]
        problem, found = case.problem, list[_Option]()
        known = [option.timed for option in named if option.case is case] or None
        for _ in range(MAX_ROUNDS):
            try:
                result = search(problem, iterations=self.iterations, seed=self.seed, named=known)
            except ValueError:  # nothing fits by estimate
                break
            if result.gain < WORTHWHILE:
                break
            found += self._try([_Option(case, result.best)], 1)
            if found[-1].fits:
                break
            over = 1.02 * (found[-1].peak_bytes - case.cap)
            problem = replace(problem, cap_bytes=max(0.0, max(problem.caps) - over))
            known = None
        return found

    def _try(self, options: Sequence[_Option], wanted: int) -> list[_Option]:
        """Compile options and simulate them, the first ones first, until enough of them fit."""
        tried: list[_Option] = []
        for option in options:
            if sum(each.fits for each in tried) >= wanted or len(tried) >= 2 * wanted:
                break
            known = self.compiled.get(option.identity)
            if known is None:
                case = option.case
                step = self.compile_step(case.machine, case.args, option.schedule)
                known = _Option(case, option.timed, memory_needs(step, case.machine))
                known.simulation = simulate(step, case.costs, seed=self.seed)
                self.compiled[option.identity] = known
            tried.append(known)
        return tried

    def _correct(self, tried: Sequence[_Option]) -> None:
        """Change the reserve of the cases of compiled options by what their estimates missed."""
        for case in {id(option.case): option.case for option in tried}.values():
            missed = max(option.missed_bytes() for option in tried if option.case is case)
            reserve = max(0.0, case.layers.reserve_bytes + missed)
            for other in self.cases:
                if other.machine.spmd_mesh == case.machine.spmd_mesh:
                    other.layers = replace(other.layers, reserve_bytes=reserve)

    def _smallest(self) -> _Option:
        """Return the compiled option that needs the least memory of all named schedules."""
        found = []
        for case in self.cases:
            free = replace(case.problem, cap_bytes=math.inf)
            every = on_best_cut(free, rounds=0) + on_equal_cut(free)
            every = every or [search(free, iterations=100, seed=self.seed).best]  # more actors than layers
            found.append(_Option(case, min(every, key=lambda timed: max(timed.peak_bytes))))
        least = sorted(found, key=lambda option: option.peak_bytes)[:NUM_COMPILED]
        tried = [*self._try(least, NUM_COMPILED), *self.compiled.values()]
        return min(tried, key=lambda option: (not option.fits, option.peak_bytes))

    # ------------------------------------------------------------ the result

    def _plan(self, name: str, options: Sequence[_Option]) -> Plan:
        fitting = [option for option in self.compiled.values() if option.fits]
        best = min(fitting, key=lambda option: (option.step_s, option.timed.step_s))
        assert best.simulation is not None
        case, assignment, problem = best.case, best.timed.assignment, best.case.problem
        layers = case.layers
        return Plan(
            step=name,
            arguments=describe_arguments(case.args),
            num_actors=case.machine.actors,
            spmd_mesh=dict(case.machine.spmd_mesh),
            num_microbatches=case.num_microbatches,
            marks=tuple(map(str, layers.marks)),
            cut=assignment.marks,
            name=assignment.name,
            orders=tuple(map(format_row, assignment.rows)),
            step_s=best.simulation.step_s,
            loop_s=best.timed.step_s,
            bound=bound_of_cut(problem, assignment.cut),
            memory=tuple(each.total_bytes for each in best.needs),
            cap_bytes=None if case.cap == math.inf else case.cap,
            candidates=self._ranked(best, options),
            advice=_advice(best),
            assumed=(
                *layers.assumed,
                *(f"memory: {row.what}, {row.note}" for row in best.needs[0].rows if row.source == "assumed"),
                *best.simulation.assumed,
            ),
        )

    def _ranked(self, best: _Option, options: Sequence[_Option]) -> tuple[Candidate, ...]:
        """Return all candidates: the chosen one, those that fit, the fastest first, and those that do not."""
        every = {option.identity: option for option in options} | self.compiled
        every.pop(best.identity, None)
        slower = sorted((o for o in every.values() if o.fits), key=_rank)
        found = [(best, "chosen"), *((option, _why_slower(option, best)) for option in slower)]
        larger = sorted((o for o in every.values() if not o.fits), key=_rank)
        names = {(id(option.case), option.timed.assignment.name) for option in every.values()}
        for case in {id(option.case): option.case for option in [best, *every.values()]}.values():
            if case.cap < math.inf:
                free = replace(case.problem, cap_bytes=math.inf)
                for timed in on_equal_cut(free):
                    key = (id(case), timed.assignment.name)
                    if key not in names and key != (id(best.case), best.timed.assignment.name):
                        larger.append(_Option(case, timed))
        found += [(option, _why_larger(option)) for option in larger]
        ranked = [_candidate(option, verdict) for option, verdict in found]
        seen = {id(option.case) for option, _ in found}
        for case in self.cases:
            if id(case) not in seen:
                ranked.append(_outbid(case, best))
        return tuple(ranked)


def _rank(option: _Option) -> tuple[float, str]:
    return option.timed.step_s, option.timed.assignment.name


def _candidate(option: _Option, verdict: str) -> Candidate:
    case, busy = option.case, option.busy_s()
    return Candidate(
        name=option.timed.assignment.name,
        num_actors=case.machine.actors,
        spmd_mesh=dict(case.machine.spmd_mesh),
        num_microbatches=case.num_microbatches,
        cut=option.timed.assignment.marks,
        step_s=option.step_s,
        peak_bytes=option.peak_bytes,
        cap_bytes=None if case.cap == math.inf else case.cap,
        bubble=1 - sum(busy) / len(busy) / option.timed.step_s,
        is_compiled=option.simulation is not None,
        verdict=verdict,
    )


def _outbid(case: _Case, best: _Option) -> Candidate:
    """Return the entry of a case of which no schedule can be the best."""
    bound = bound_of_all(case.problem)
    return Candidate(
        name="any schedule",
        num_actors=case.machine.actors,
        spmd_mesh=dict(case.machine.spmd_mesh),
        num_microbatches=case.num_microbatches,
        cut=(),
        step_s=bound,
        peak_bytes=0.0,
        cap_bytes=None if case.cap == math.inf else case.cap,
        bubble=0.0,
        is_compiled=False,
        verdict="no schedule is faster than this bound, or none fits",
    )


def _why_slower(option: _Option, best: _Option) -> str:
    """Return why an option that fits is not the chosen one."""
    compared = option.simulation is not None
    mine, others = (option.step_s, best.step_s) if compared else (option.timed.step_s, best.timed.step_s)
    busy = option.busy_s()
    excess, idle = max(busy) / (sum(busy) / len(busy)) - 1, 1 - max(busy) / option.timed.step_s
    if option.case is not best.case:
        return f"{mine / others - 1:+.1%}: other microbatches or another machine"
    return f"{mine / others - 1:+.1%}: busiest actor has {excess:.0%} too much work, idles {idle:.0%}"


def _why_larger(option: _Option) -> str:
    over = option.peak_bytes - option.case.cap
    return f"does not fit: {over / option.case.cap:.0%} over the cap" if over > 0 else "no cut of it fits"


def _advice(best: _Option) -> tuple[str, ...]:
    """Return what would make the chosen schedule's loop shorter, the most helpful first."""
    problem, assignment = best.case.problem, best.timed.assignment
    step_s = best.timed.step_s
    found: list[tuple[float, str]] = []

    def gain(changed: PipelineProblem) -> float:
        return 1 - evaluate(changed, assignment).step_s / step_s

    found.append((gain(replace(problem, latency_s=0.0, bytes_per_s=math.inf)), "transfers that take no time"))
    found.append(
        (gain(replace(problem, dispatch_s=0.0)), "tasks without overhead (larger microbatches help)")
    )
    if problem.cap_bytes != math.inf:
        free = on_best_cut(replace(problem, cap_bytes=math.inf), rounds=0)[:1]
        if free:
            found.append(
                (1 - free[0].step_s / step_s, f"more memory, with which {free[0].assignment.name} would fit")
            )
    works = [layer.work_s for layer in problem.layers]
    heaviest = works.index(max(works))
    if works[heaviest] * problem.num_actors > sum(works):
        share = works[heaviest] / sum(works)
        part = 1 - max(problem.balanced_s, 1e-300) / step_s
        found.append((part, f"a mark inside layer {heaviest}, which is {share:.0%} of the work, at most"))
    more_s = (step_s + max(best.busy_s())) / 2  # the actors' other microbatches follow without idle time
    found.append((1 - more_s / step_s, "twice as many microbatches of this size, by example at most"))
    found.sort(key=lambda pair: -pair[0])
    return tuple(f"{text}: {share:.1%} less" for share, text in found if share >= WORTHWHILE) or (
        "nothing of memory, links, overhead or more microbatches makes this step shorter by 1 %",
    )


def _nothing_fits(name: str, smallest: _Option) -> str:
    """Return the message that no candidate fits, with what takes the memory of the one that needs least."""
    worst = max(smallest.needs, key=lambda each: each.total_bytes)
    assignment = smallest.timed.assignment
    return (
        f"no plan of step {name!r} fits into {smallest.case.cap:,.0f} bytes a device; the least that was "
        f"found is {worst.total_bytes:,} bytes, with {assignment.name} cut at the marks "
        f"{list(assignment.marks)} and {smallest.case.num_microbatches} microbatches; give more memory or "
        f"actors, shard the state over more devices, or donate it\n{worst}"
    )
