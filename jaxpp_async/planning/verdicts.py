"""Say why each candidate of a plan was chosen or lost, and what would make the chosen one faster."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from jaxpp_async.base.quantities import format_seconds
from jaxpp_async.planning.bound import bound_of_all
from jaxpp_async.planning.candidates import Case, Option, ratios_of
from jaxpp_async.planning.evaluation import evaluate
from jaxpp_async.planning.named import on_equal_cut
from jaxpp_async.planning.plan import Candidate, idle_text
from jaxpp_async.planning.problem import PipelineProblem
from jaxpp_async.planning.ranking import rank_named
from jaxpp_async.planning.search import SEARCHED, WORTHWHILE


def ranked_candidates(
    best: Option, options: Sequence[Option], cases: Sequence[Case]
) -> tuple[Candidate, ...]:
    """Return all candidates: the chosen one, those that fit, the fastest first, and those that do not.

    Args:
        best: the chosen one.
        options: what was timed or compiled. Of two equal ones the last counts.
        cases: all machines and numbers of microbatches.
    """
    every = {option.identity: option for option in options}
    every.pop(best.identity, None)
    ratios = ratios_of([best, *every.values()])
    usual = ratios.get(best.category, 1.0)

    def step_s(option: Option) -> float:
        """Return the time that is shown; that of an estimate is corrected by compiled candidates."""
        if option.simulation is not None:
            return option.step_s
        return option.timed.step_s * ratios.get(option.category, usual)

    def rank(option: Option) -> tuple[float, str]:
        return step_s(option), option.timed.assignment.name

    slower = sorted((o for o in every.values() if o.fits), key=rank)
    found = [(best, "chosen")]
    found += [(option, _why_slower(option, best, step_s(option))) for option in slower]
    larger = sorted((o for o in every.values() if not o.fits), key=rank)
    names = {(id(option.case), option.timed.assignment.name) for option in [best, *every.values()]}
    for case in {id(option.case): option.case for option in [best, *every.values()]}.values():
        if case.cap < math.inf:
            for timed in on_equal_cut(replace(case.problem, cap_bytes=math.inf)):
                if (id(case), timed.assignment.name) not in names:
                    larger.append(Option(case, timed))
    found += [(option, _why_larger(option)) for option in larger]
    seen = {id(option.case) for option, _ in found}
    lost = [_unable(case, best) for case in cases if id(case) not in seen]
    return (*(_candidate(option, step_s(option), verdict) for option, verdict in found), *lost)


def _candidate(option: Option, step_s: float, verdict: str) -> Candidate:
    case, busy = option.case, option.busy_s()
    return Candidate(
        name=option.timed.assignment.name,
        num_actors=case.machine.actors,
        spmd_mesh=dict(case.machine.spmd_mesh),
        num_microbatches=case.num_microbatches,
        cut=option.timed.assignment.marks,
        step_s=step_s,
        peak_bytes=option.peak_bytes,
        cap_bytes=None if case.cap == math.inf else case.cap,
        bubble=max(0.0, 1 - sum(busy) / len(busy) / option.timed.step_s),
        is_compiled=option.simulation is not None,
        verdict=verdict,
    )


def _unable(case: Case, best: Option) -> Candidate:
    """Return the entry of a case of which no schedule was timed."""
    bound = bound_of_all(case.problem)
    is_longer = bound >= best.timed.step_s
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
        verdict="no schedule takes less, by a proof" if is_longer else "no named schedule fits on any cut",
    )


def _why_slower(option: Option, best: Option, step_s: float) -> str:
    """Return why an option that fits, and that takes so many seconds, is not the chosen one."""
    longer = f"{step_s / best.step_s - 1:+z.1%}"
    busy = option.busy_s()
    if option.case is not best.case:
        return f"{longer}: other microbatches or another machine"
    if len(busy) == 1:
        return f"{longer}: other tasks"
    excess = max(0.0, max(busy) / (sum(busy) / len(busy)) - 1)
    idle = max(0.0, 1 - max(busy) / option.timed.step_s)
    return f"{longer}: busiest actor has {excess:z.0%} too much work, idles {idle:z.0%}"


def search_text(outcome: str, options: Iterable[Option]) -> str:
    """Return a sentence that says what the searches have won.

    Args:
        outcome: the sentence for when no searched order was compiled, or none of them fits.
        options: the compiled candidates.
    """
    found: dict[bool, list[Option]] = {True: [], False: []}
    for option in options:
        found[option.timed.assignment.name == SEARCHED].append(option)
    searched = min((o.step_s for o in found[True] if o.fits), default=None)
    named = min((o for o in found[False] if o.fits), key=lambda o: o.step_s, default=None)
    if searched is None:
        return outcome
    takes = f"the searched order takes {format_seconds(searched, 4)} a step"
    if named is None:
        return f"no named schedule fits; {takes}"
    gain, name = 1 - searched / named.step_s, named.timed.assignment.name
    if gain <= 0:
        return f"{takes} when it is compiled, and {name} {format_seconds(named.step_s, 4)}"
    return f"{takes}, {gain:z.1%} less than {name} ({format_seconds(named.step_s, 4)})"


def _why_larger(option: Option) -> str:
    over = option.peak_bytes - option.case.cap
    return f"does not fit: {over / option.case.cap:z.0%} over the cap" if over > 0 else "no cut of it fits"


def advice_for(best: Option) -> tuple[str, ...]:
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
        free = rank_named([replace(problem, cap_bytes=math.inf)], rounds=0, num_replayed=3)
        for _, timed in free[:1]:
            if all(need <= cap for need, cap in zip(timed.peak_bytes, problem.caps, strict=True)):
                continue
            found.append(
                (1 - timed.step_s / step_s, f"more memory, with which {timed.assignment.name} would fit")
            )
    works = [layer.work_s for layer in problem.layers]
    heaviest = works.index(max(works))
    if works[heaviest] * problem.num_actors > sum(works):
        share = works[heaviest] / sum(works)
        part = 1 - max(problem.balanced_s, 1e-300) / step_s
        found.append((part, f"a mark inside layer {heaviest}, which is {share:z.0%} of the work, at most"))
    more_s = (step_s + max(best.busy_s())) / 2  # the actors' other microbatches follow without idle time
    found.append((1 - more_s / step_s, "twice as many microbatches of this size, by example at most"))
    found.sort(key=lambda pair: -pair[0])
    helps = tuple(f"{text}: {share:z.1%} less" for share, text in found if share >= WORTHWHILE) or (
        "nothing of memory, links, overhead or more microbatches makes this step shorter by 1 %",
    )
    idle = idle_text(assignment.rows)
    return (idle, *helps) if idle else helps


def nothing_fits(name: str, smallest: Option) -> str:
    """Return the message that no candidate fits, with what takes the memory of the one that needs least."""
    worst = max(smallest.needs, key=lambda each: each.total_bytes)
    assignment = smallest.timed.assignment
    return (
        f"no plan of step {name!r} fits into {smallest.case.cap:,.0f} bytes a device; the least that was "
        f"found is {worst.total_bytes:,} bytes, with {assignment.name} cut at the marks "
        f"{list(assignment.marks)} and {smallest.case.num_microbatches} microbatches; give more memory or "
        f"actors, shard the state over more devices, or donate it\n{worst}"
    )
