"""Choose the cut, the schedule, the microbatches and the order of a step under a memory cap.

`plan` goes from cheap to exact. The costs of layers give a `PipelineProblem` for each machine and number of
microbatches. Problems whose lower bound is above a step already found are left out. Named schedules are timed
on their best cuts, a search improves on the best of them, and the compiler compiles the very best. The plan
is the candidate whose compiled form fits into the memory and has the shortest simulated step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax

from jaxpp_async.base.quantities import parse_bytes
from jaxpp_async.compiler.pipeline import gc_paused
from jaxpp_async.errors import CostError, PlanError
from jaxpp_async.planning.bound import bound_of_all
from jaxpp_async.planning.calibration import TaskTimes
from jaxpp_async.planning.candidates import Case, Option, in_order_of_stages, ratios_of
from jaxpp_async.planning.cost_model import CostModel
from jaxpp_async.planning.evaluation import fits
from jaxpp_async.planning.layers import (
    PROFILED_MICROBATCHES,
    LayerCosts,
    profile_layers,
    resized,
    shortened,
    slowest_link,
)
from jaxpp_async.planning.least_memory import held_bytes, least_estimate, least_order
from jaxpp_async.planning.loop_bound import bounds_of_loop
from jaxpp_async.planning.machine import Machine, StepCompiler, argument_types
from jaxpp_async.planning.memory import memory_needs
from jaxpp_async.planning.named import Timed, on_best_cut
from jaxpp_async.planning.plan import Plan, describe_arguments, format_row
from jaxpp_async.planning.plan_options import check_plan_options
from jaxpp_async.planning.problem import Assignment, PipelineProblem
from jaxpp_async.planning.ranking import ROUNDS, rank_named
from jaxpp_async.planning.search import (
    SEARCHED,
    WORTHWHILE,
    NothingFits,
    SearchResult,
    search,
    usual_iterations,
)
from jaxpp_async.planning.search_moves import SearchPoint
from jaxpp_async.planning.simulation import simulate
from jaxpp_async.planning.verdicts import advice_for, nothing_fits, ranked_candidates, search_text
from jaxpp_async.schedules.planned import PlannedSchedule
from jaxpp_async.schedules.validate import plural

NUM_COMPILED = 3
"""The number of candidates that are compiled in a round, beside those that turn out not to fit."""

MAX_ROUNDS = 4
"""The number of times that the estimate of memory is corrected by compiled candidates."""

ESTIMATE_ERROR, FEW_TASKS = 0.02, 2_000
"""The share of a step by which estimates may order two candidates wrongly, so that both are compiled. Where
layers times microbatches are more than `FEW_TASKS`, so that compiling is slow, a quarter of it counts."""

CATEGORY_ERROR = 0.12
"""The share of a step by which the estimate may be too long in a category of which none was compiled (see
`Option.category`). Where compiling is slow, a twelfth of it counts."""

MAX_PROMISING = 12
"""The most candidates that are compiled because corrected estimates say that they may be the fastest. Where
there are many tasks it is fewer."""

DOUBTFUL_SHARE = 0.1
"""The share of the memory by which the estimate of a candidate may be too large. Where compiling is slow, a
quarter of it counts."""

MAX_SEARCHES = 6
"""The number of searches for one case, each with an estimate of memory that earlier ones have corrected."""

MAX_REFITS = 3
"""How often a named schedule that does not fit when it is compiled is compiled again on another cut."""

NUM_SEARCHED, OTHERS_PART = 3, 4
"""The number of cases that are searched, and the part of the candidates that all but the first one get."""

FIRST_PART, FIRST_PART_OF_MANY = 3, 12
"""The part of its candidates after which a search that has won nothing ends, and that of a problem of more
than `FEW_TASKS`. Each later search of a case, for another estimate of memory, looks at such a part."""

NEAR_BOUND = "a search has nothing to win: by estimate, no order is 1 % shorter than the best named schedule"

NOTHING_ELSE_FITS = "nothing faster was found that fits; no order was found that needs less memory"

OnProgress: TypeAlias = Callable[[str], None]
"""A function that is told, as text, what the planner does."""


@gc_paused()
def plan(
    train_step: Callable,
    args: Sequence[Any],
    *,
    machine: Machine | Sequence[Machine],
    global_batch: int | None = None,
    memory: int | str | None = None,
    costs: CostModel | Callable[[], CostModel] | None = None,
    microbatches: Sequence[int] | None = None,
    num_stages: int | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    iterations: int | None = None,
    seed: int = 0,
    on_progress: OnProgress | None = None,
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
        num_stages: the number of stages that the plan must have; None for any.
        batch_argnums: the positions of the batches in `args`; None for those that `global_batch` shows, or
            the last argument.
        in_shardings, out_shardings, donate_argnums, static_argnums: as for `RemoteMesh.distributed`.
        iterations: how many candidates the search looks at; None: as many as suit the problem.
        seed: the seed of the search and of the simulations.
        on_progress: a function that is told often what is being done, such as "searching, 160 of 2000". An
            exception that it raises ends the planning.

    Returns:
        The plan.

    Raises:
        PlanError: nothing fits into the memory, the step has no marks or too few for `num_stages`, a global
            batch cannot be divided, there are no costs, or an option is wrong.
        MissingCost: the cost model has no cost for a task or a transfer.
        UnsupportedError, StageError, ShardingError: the step cannot be compiled.
    """
    check_plan_options(
        machine=machine,
        costs=costs,
        global_batch=global_batch,
        microbatches=microbatches,
        num_stages=num_stages,
        batch_argnums=batch_argnums,
        iterations=iterations,
        seed=seed,
        on_progress=on_progress,
    )
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

    cap = parse_bytes(memory) if memory is not None else None
    known = costs() if callable(costs) else costs
    tell = on_progress or (lambda _: None)
    compiler = StepCompiler(
        train_step,
        "plan",
        lambda name: tell(f"compiling: {name}"),
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        donate_argnums=donate_argnums,
        static_argnums=static_argnums,
    )
    planner = _Planner(compiler, batch, iterations, seed, tell)
    models = _published(machines) if known is None else [known] * len(machines)
    for each, used in zip(machines, models, strict=True):
        limit = cap if cap is not None else each.memory
        for count in dict.fromkeys(microbatches or [given]):
            planner.add(each, used, resized(types, batch, count), count, limit, num_stages)
    return planner.plan()


def _published(machines: Sequence[Machine]) -> list[CostModel]:
    """Return the costs of machines by their devices' published figures; equal ones are the same object."""
    found: list[CostModel] = []
    for machine in machines:
        try:
            costs = CostModel.for_machine(machine)
        except CostError as error:
            raise PlanError(f"there are no costs: {error}; or pass costs=") from error
        found.append(next((other for other in found if other == costs), costs))
    return found


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


def _num_tasks(case: Case) -> int:
    """Return the number of layers times that of microbatches."""
    return len(case.layers.layers) * case.num_microbatches


# ---------------------------------------------------------------- the course


@dataclass(eq=False)
class _Planner:
    """The work of `plan`.

    Args:
        compiler: compiles the step.
        batch: the positions of the batches in the arguments.
        iterations: how many candidates the search looks at; None: as many as suit the problem.
        seed: the seed of the search and of the simulations.
        on_progress: a function that is told what is being done.
    """

    compiler: StepCompiler
    batch: tuple[int, ...]
    iterations: int | None
    seed: int
    on_progress: OnProgress
    cases: list[Case] = field(default_factory=list)
    compiled: dict[Any, Option] = field(default_factory=dict)
    won: str = "no search was made, since nothing was found that fits by estimate"
    _layers: dict[Any, LayerCosts] = field(default_factory=dict)

    def add(
        self,
        machine: Machine,
        costs: CostModel,
        args: list[Any],
        num_microbatches: int,
        cap: float | None,
        num_stages: int | None,
    ) -> None:
        """Add a machine and a number of microbatches to choose from."""
        key = repr(replace(machine, actors=1)), num_microbatches, id(costs)
        if key not in self._layers:
            self.on_progress(f"profiling the layers for {plural(num_microbatches, 'microbatch', 'es')}")
            few = min(PROFILED_MICROBATCHES, num_microbatches)
            short = shortened(args, self.batch, few)
            self._layers[key] = profile_layers(
                self.compiler,
                short,
                machine,
                costs,
                few,
                self.batch.__contains__,
            )
        latency_s, bytes_per_s = slowest_link(costs, machine.num_actors)
        layers = replace(self._layers[key], latency_s=latency_s, bytes_per_s=bytes_per_s)
        limit, most = math.inf if cap is None else float(cap), len(layers.layers)
        if num_stages is not None and not 1 <= num_stages <= most:
            raise PlanError(
                f"num_stages is {num_stages!r}, and the step's {plural(most - 1, 'mark')} can end 1 to "
                f"{most} stages; call pipeline_yield in more places, or ask for fewer stages"
            )
        self.cases.append(Case(machine, costs, args, num_microbatches, limit, num_stages, layers))

    def plan(self) -> Plan:
        """Return the best plan of all cases."""
        for _ in range(MAX_ROUNDS):
            named = self._named()
            self._correct(self._try(named, NUM_COMPILED))
            self._try(self._doubtful(), 1)
            self._refit()
            searched = self._searched(named)
            self._try_promising([*named, *searched])
            if any(option.fits for option in self.compiled.values()):
                return self._plan([*named, *searched])
        smallest = self._smallest()
        if smallest.fits:
            self.won = NOTHING_ELSE_FITS
            return self._plan([smallest])
        raise PlanError(nothing_fits(self.compiler.name, smallest))

    def _named(self, *, rounds: int = ROUNDS, slack: float = 0.0) -> list[Option]:
        """Return the named schedules of all cases that fit by estimate, the fastest first.

        Args:
            rounds: how often the boundaries of a cut are moved by one layer.
            slack: the share of the memory by which the estimate may be above it.
        """
        problems = [
            replace(problem, cap_bytes=(1 + slack) * max(problem.caps))
            for problem in (case.problem for case in self.cases)
        ]
        ranked = rank_named(problems, rounds=rounds, on_progress=self.on_progress)
        return [Option(self.cases[number], timed) for number, timed in ranked]

    def _doubtful(self) -> list[Option]:
        """Return named schedules that may fit although they do not by estimate, if they would be the best."""
        if all(case.cap == math.inf for case in self.cases):
            return []
        best_s = (1 - WORTHWHILE) * self._best_s()
        slack = DOUBTFUL_SHARE / (4 if all(_num_tasks(case) > FEW_TASKS for case in self.cases) else 1)
        found = self._named(rounds=0, slack=slack)
        return [
            o
            for o in found
            if not o.fits
            and o.timed.step_s < best_s
            and o.peak_bytes <= (1 + slack) * o.case.cap
            and o.identity not in self.compiled
        ]

    def _refit(self) -> None:
        """Compile faster named schedules that do not fit again, on cuts for the memory that they really need.

        The bytes besides those of layers depend on a schedule more than on its cut. So the compiled form of a
        schedule says which cuts of it fit.
        """
        for _ in range(MAX_REFITS):
            best_s = self._best_s()
            larger = [o for o in self.compiled.values() if not o.fits and o.timed.step_s < best_s < math.inf]
            before = len(self.compiled)
            for option in {o.kind: o for o in sorted(larger, key=lambda o: -o.timed.step_s)}.values():
                alike = [o.unestimated_bytes() for o in larger if o.kind == option.kind]
                caps = tuple(max(0.0, option.case.cap - max(each)) for each in zip(*alike, strict=True))
                problem = replace(option.case.problem, cap_bytes=caps)
                found = on_best_cut(problem, name=option.timed.assignment.name)
                self._try([Option(option.case, timed) for timed in found if timed.step_s < best_s], 1)
            if len(self.compiled) == before:
                return

    def _searched(self, named: Sequence[Option]) -> list[Option]:
        """Return what searches find, compiled: for the case of the best named schedule, and for few others.

        The others are those whose bound allows them to win, each with a part of the candidates.
        """
        found: list[Option] = []
        cases = list({id(option.case): option.case for option in named}.values()) or self.cases
        for number, case in enumerate(cases[:NUM_SEARCHED]):
            best_s = self._best_s()
            if bound_of_all(case.problem) >= (1 - WORTHWHILE) * best_s:
                if not number:
                    self.won = NEAR_BOUND
                continue
            iterations = usual_iterations(case.problem) if self.iterations is None else self.iterations
            known = [option.timed for option in named if option.case is case]
            found += self._searched_case(
                case, known, iterations // (OTHERS_PART if number else 1), not number
            )
        return found

    def _searched_case(
        self, case: Case, named: Sequence[Timed], iterations: int, is_first: bool
    ) -> list[Option]:
        """Return what searches find for a case, compiled.

        A search that wins nothing with the first part of its candidates ends, unless memory is tight and the
        problem small. Each compiled form says how many bytes each actor needs besides those of its layers.
        Another search, which starts where the one before ended, then has what is left: less on actors that
        needed more than there is, and all of it if the compiled form fits and memory is tight. The first one
        has what the median of these bytes leaves.
        """
        own = [option for option in self.compiled.values() if option.case is case]
        besides = [each for option in own for each in option.unestimated_bytes()]
        usual = statistics.median(besides) if besides else case.layers.reserve_bytes
        caps, points, found = (max(0.0, case.cap - usual),) * case.machine.actors, (), list[Option]()
        is_tight = not all(option.fits for option in own)
        first = iterations // (FIRST_PART if _num_tasks(case) <= FEW_TASKS else FIRST_PART_OF_MANY)
        goes_on = self.iterations is not None or (is_tight and _num_tasks(case) <= FEW_TASKS)
        for _ in range(MAX_SEARCHES):
            problem, best_s = replace(case.problem, cap_bytes=caps), self._best_s()
            known = self._known(case, named, caps)
            try:
                result = self._search(problem, first, known, points)
                if not points and (goes_on or result.gain >= WORTHWHILE / 2):
                    result = self._search(problem, iterations - first, known, result.points)
            except NothingFits:
                break
            if is_first and not found and result.named is not None:
                self.won = f"a search has nothing to win over {result.named.assignment.name}"
            if result.gain < WORTHWHILE or result.best.step_s > (1 - WORTHWHILE / 2) * best_s:
                break
            best, order = in_order_of_stages(result.best)
            found += self._try([Option(case, best)], 1)
            last, points = found[-1], result.points
            if last.fits and not is_tight:
                break
            changed = list(caps)
            for actor, need, extra in zip(order, last.needs, last.unestimated_bytes(), strict=True):
                if last.fits or need.total_bytes > case.cap:
                    changed[actor] = max(0.0, case.cap - extra)
            caps = tuple(changed)
        if is_first and found and not any(option.fits for option in found):
            self.won = "the searched order does not fit when it is compiled"
        return found

    def _known(self, case: Case, named: Sequence[Timed], caps: Sequence[float]) -> list[Timed]:
        """Return the named schedules of a case that fit when compiled, or by estimate, fastest first."""
        own = {o.timed.assignment: o for o in self.compiled.values() if o.case is case}
        every = {timed.assignment: timed for timed in named}
        every |= {key: o.timed for key, o in own.items() if o.timed.assignment.name != SEARCHED}
        found = [
            timed
            for key, timed in every.items()
            if (own[key].fits if key in own else fits(timed.peak_bytes, caps))
        ]
        return sorted(found, key=lambda timed: timed.step_s)

    def _try_promising(self, options: Sequence[Option]) -> None:
        """Compile candidates that may be faster than the fastest compiled one, the most promising first.

        Estimates are corrected by the compiled candidates of the same category, so that each one that is
        compiled makes the others' estimates better.
        """
        most = max(1, min(MAX_PROMISING, 2 * FEW_TASKS // max(map(_num_tasks, self.cases))))
        for _ in range(most):
            best_s = min((o.step_s for o in self.compiled.values() if o.fits), default=0.0)
            ratios = ratios_of(self.compiled.values())
            found = [
                (self._expected_s(option, ratios), number, option)
                for number, option in enumerate(options)
                if option.fits and option.identity not in self.compiled
            ]
            expected_s, _, option = min(found, default=(math.inf, 0, None))
            if option is None or expected_s >= best_s:
                return
            self.compiled[option.identity] = self._compile(option)

    def _expected_s(self, option: Option, ratios: Mapping[Any, float]) -> float:
        """Return the least time that a candidate's compiled step is expected to take, in seconds."""
        is_large = _num_tasks(option.case) > FEW_TASKS
        if option.category in ratios:
            return option.timed.step_s * ratios[option.category] * (1 - (0 if is_large else ESTIMATE_ERROR))
        own = [ratio for category, ratio in ratios.items() if category[0] == option.category[0]]
        least = min(own or ratios.values(), default=1.0)
        return option.timed.step_s * least * (1 - CATEGORY_ERROR / (12 if is_large else 1))

    def _best_s(self) -> float:
        """Return the estimated step of the fastest compiled candidate that fits."""
        return min((o.timed.step_s for o in self.compiled.values() if o.fits), default=math.inf)

    def _search(
        self,
        problem: PipelineProblem,
        iterations: int,
        named: Sequence[Timed] | None,
        points: Sequence[SearchPoint] = (),
    ) -> SearchResult:
        return search(
            problem,
            iterations=iterations,
            seed=self.seed,
            named=named,
            points=points,
            on_progress=self.on_progress,
        )

    def _try(self, options: Sequence[Option], wanted: int) -> list[Option]:
        """Compile options and simulate them, the first ones first, until enough of them fit.

        Options that are slower than one that fits are compiled only if the estimates leave it open which of
        them is faster.
        """
        tried: list[Option] = []
        for option in options:
            fitting = [each.timed.step_s for each in tried if each.fits]
            if len(fitting) >= wanted or len(tried) >= 2 * wanted:
                break
            margin = ESTIMATE_ERROR if _num_tasks(option.case) <= FEW_TASKS else ESTIMATE_ERROR / 4
            if fitting and option.timed.step_s > (1 + margin) * min(fitting):
                break
            known = self.compiled.get(option.identity)
            if known is None:
                known = self.compiled[option.identity] = self._compile(option)
            tried.append(known)
        return tried

    def _compile(self, option: Option) -> Option:
        """Return an option with the exact figures of its compiled form."""
        case, name = option.case, option.timed.assignment.name
        self.on_progress(f"compiling {name}")
        step = self.compiler.compile(case.machine, case.args, option.schedule)
        self.on_progress(f"simulating {name}")
        known = Option(case, option.timed, memory_needs(step, case.machine))
        known.simulation = simulate(step, case.costs, seed=self.seed)
        compiled, times = step.compiled, TaskTimes(case.costs, step.compiled.cut)
        known.bounds = bounds_of_loop(compiled.placed.graph, step.works, case.costs, times)
        return known

    def _correct(self, tried: Sequence[Option]) -> None:
        """Change the reserve of the cases of compiled options by what their estimates missed."""
        for case in {id(option.case): option.case for option in tried}.values():
            reserve = max(
                max(each.total_bytes for each in option.needs) - max(option.timed.peak_bytes)
                for option in tried
                if option.case is case
            )
            for other in self.cases:
                if other.machine.spmd_mesh == case.machine.spmd_mesh:
                    other.layers = replace(other.layers, reserve_bytes=max(0.0, reserve))

    def _smallest(self) -> Option:
        """Return the compiled option that needs the least memory, of those that fit if any does.

        The cases that need least by estimate are looked at.
        """
        cases = sorted(self.cases, key=lambda case: least_estimate(case.problem) + case.layers.reserve_bytes)
        found = [(case, least_order(case.problem, self._lean_needs(case))) for case in cases[:NUM_COMPILED]]
        case, (timed, _) = min(found, key=lambda pair: pair[1][1])
        self._try([Option(case, timed)], 1)
        return min(self.compiled.values(), key=lambda option: (not option.fits, option.peak_bytes))

    def _lean_needs(self, case: Case) -> Callable[[Assignment], list[float]]:
        """Return a function that returns the bytes that each actor needs for one microbatch at a time.

        The function compiles few microbatches, since more of them only take the bytes of their arguments.
        """
        few = min(PROFILED_MICROBATCHES, case.num_microbatches)
        args = shortened(case.args, self.batch, few)
        short = case.layers.problem(case.machine.actors, few, case.cap, case.num_stages)

        def needs(assignment: Assignment) -> list[float]:
            self.on_progress("looking for the least memory")
            rows = tuple(tuple(task for task in row if task.i < few) for row in assignment.rows)
            schedule = PlannedSchedule(rows, assignment.marks, assignment.name)
            with gc_paused():
                found = memory_needs(self.compiler.compile(case.machine, args, schedule))
            counted, all_ = (held_bytes(each, assignment) for each in (short, case.problem))
            return [
                need.total_bytes + more - less for need, more, less in zip(found, all_, counted, strict=True)
            ]

        return needs

    # ------------------------------------------------------------ the result

    def _plan(self, options: Sequence[Option]) -> Plan:
        fitting = [option for option in self.compiled.values() if option.fits]
        least_s = min(option.step_s for option in fitting)
        # Between machines that are about as fast, the one with fewer devices is chosen.
        best = min(
            fitting,
            key=lambda o: (
                o.num_devices if o.step_s <= (1 + WORTHWHILE) * least_s else math.inf,
                o.step_s,
                o.timed.step_s,
            ),
        )
        assert best.simulation is not None and best.bounds is not None
        self.on_progress("explaining the plan")
        case, assignment = best.case, best.timed.assignment
        layers, stages = case.layers, case.problem.stages(assignment.cut)
        return Plan(
            step=self.compiler.name,
            arguments=describe_arguments(case.args),
            num_actors=case.machine.actors,
            spmd_mesh=dict(case.machine.spmd_mesh),
            num_microbatches=case.num_microbatches,
            marks=tuple(map(str, layers.marks)),
            mark_names=tuple(mark.name for mark in layers.marks),
            cut=assignment.marks,
            name=assignment.name,
            orders=tuple(map(format_row, assignment.rows)),
            task_s=stages.task_s,
            step_s=best.simulation.step_s,
            loop_s=best.simulation.loop_s,
            bound=best.bounds.any_placement_s,
            placement_bound=best.bounds.this_placement_s,
            memory=tuple(each.total_bytes for each in best.needs),
            kept_bytes=stages.kept_bytes,
            weight_kept_bytes=stages.weight_kept_bytes,
            cap_bytes=None if case.cap == math.inf else case.cap,
            candidates=ranked_candidates(best, [*options, *self.compiled.values()], self.cases),
            search=search_text(self.won, self.compiled.values()),
            advice=advice_for(best),
            assumed=(
                *layers.assumed,
                *(f"memory: {row.what}, {row.note}" for row in best.needs[0].rows if row.source == "assumed"),
                *best.simulation.assumed,
            ),
        )
