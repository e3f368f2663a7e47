"""Say why one actor computes more than the others in a step, and what to move.

The busiest actor holds a step up, and not the slowest stage: an actor may run several stages, and it computes
outside the loop of microbatches as well, such as the update of its parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType

from jaxpp_async.base.quantities import format_seconds
from jaxpp_async.program.instructions import ActorId
from jaxpp_async.program.task_label import TaskLabel, task_kind
from jaxpp_async.program.work import CutChoice
from jaxpp_async.timeline.events import ActorTimeline

_EVEN = 1.05
"""The ratio of two times up to which they count as equal."""

_CUT_AGAIN: Mapping[CutChoice, str] = MappingProxyType(
    {
        "": "move a layer from stage {slow} to stage {quick}, or write stages='balanced'",
        "work": (
            "stages='balanced' makes FLOPs as even as the marks allow, and times are not: name the cut by "
            "hand (stages=[...]), or plan with measured costs (mesh.plan)"
        ),
        "plan": "the plan took other times than those measured here: plan again with them (mesh.plan)",
    }
)
"""For each way in which a cut was chosen, what to do if its stages are not even."""


@dataclass(frozen=True)
class ActorWork:
    """The time that one actor's tasks take in a step.

    Args:
        actor: the actor.
        stages: the seconds of the tasks of each of its stages.
        outside_s: the seconds of its tasks outside the loop of microbatches.
    """

    actor: ActorId
    stages: Mapping[int, float]
    outside_s: float

    @property
    def total_s(self) -> float:
        """The seconds of all its tasks."""
        return sum(self.stages.values()) + self.outside_s


def work_of_actor(timeline: ActorTimeline) -> ActorWork:
    """Return the time that the tasks of one actor take; see `stage_times` for tasks that took longer once.

    Args:
        timeline: the actor's part of a step.
    """
    times: dict[str, list[float]] = defaultdict(list)
    for run in timeline.runs:
        times[task_kind(run.label)].append(run.duration_s)
    outside_s = sum(sum(taken) for kind, taken in times.items() if TaskLabel.parse(kind).stage is None)
    return ActorWork(timeline.actor, stage_times(times), outside_s)


def stage_times(task_times: Mapping[str, Sequence[float]]) -> dict[int, float]:
    """Return the seconds that all tasks of each stage take together, if each takes the median of its kind.

    A task that took longer once, because its machine was busy, does not make its stage slow.

    Args:
        task_times: the seconds of the tasks of each kind, such as `"fwd(stage 0)"`.
    """
    found: dict[int, float] = defaultdict(float)
    for kind, times in task_times.items():
        if (stage := TaskLabel.parse(kind).stage) is not None:
            found[stage] += median(times) * len(times)
    return dict(found)


def explain_imbalance(actors: Sequence[ActorTimeline], cut_choice: CutChoice = "") -> str:
    """Return a sentence that says why one actor has more to compute than the others, and what to do.

    Args:
        actors: the actors' parts of a step.
        cut_choice: the way in which the step was cut into stages.
    """
    works = [work_of_actor(actor) for actor in actors if actor.events]
    busy, idle = max(works, key=lambda w: w.total_s), min(works, key=lambda w: w.total_s)
    if busy.total_s <= _EVEN * idle.total_s:
        return (
            "the actors compute equally long in the middle; some tasks took longer this time: give each "
            "actor cores of its own"
        )
    more_outside_s = busy.outside_s - idle.outside_s
    if more_outside_s >= (busy.total_s - idle.total_s) / 2:
        more = format_seconds(more_outside_s)
        return (
            f"actor {busy.actor} computes {more} more than actor {idle.actor} outside the loop of "
            "microbatches, such as in the update; move parameters, such as an embedding, to a stage of actor "
            f"{idle.actor}"
        )
    slow = max(busy.stages, key=busy.stages.__getitem__)
    if not idle.stages:
        return f"actor {idle.actor} has no stage; move layers from stage {slow} to one of its own"
    quick = min(idle.stages, key=idle.stages.__getitem__)
    again = _CUT_AGAIN[cut_choice].format(slow=slow, quick=quick)
    if len(busy.stages) == len(idle.stages) == 1:
        longer = longer_than(busy.stages[slow], idle.stages[quick])
        return f"stage {slow} takes {longer} stage {quick}; {again}"
    longer = longer_than(busy.total_s, idle.total_s)
    each = (
        f"actor {busy.actor} with {_stages(busy)} computes {longer} actor {idle.actor} with {_stages(idle)}"
    )
    if len(busy.stages) > len(idle.stages):
        again = f"give each actor as many stages, or {again}"
    return f"{each}; {again}"


def longer_than(long_s: float, short_s: float) -> str:
    """Return how much longer one time is than another, as text that goes on with the name of the other.

    Args:
        long_s, short_s: the two times in seconds.

    Returns:
        Text such as `"50% longer than"`, or `"39 times as long as"` from twice on.
    """
    if short_s <= 0:
        return f"{format_seconds(long_s)} longer than"
    ratio = long_s / short_s
    return f"{ratio:.3g} times as long as" if ratio >= 2 else f"{ratio - 1:z.0%} longer than"


def _stages(work: ActorWork) -> str:
    if not work.stages:
        return "no stage"
    numbers = [str(stage) for stage in sorted(work.stages)]
    if len(numbers) == 1:
        return f"stage {numbers[0]}"
    return (
        f"stages {', '.join(numbers[:-1])} and {numbers[-1]}"
        if len(numbers) <= 4
        else f"{len(numbers)} stages"
    )
