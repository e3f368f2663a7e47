"""Define the built-in schedules. Some have whole backwards, some split backwards, and some are V-shaped.

Schedules with whole backwards, except for GPipe and LoopedBFS, follow one pattern: an actor runs some warm-up
forwards, then alternates between one forward and one backward, then runs the remaining backwards. These
schedules differ in the number of warm-up forwards of each actor and in the order of an actor's stages.

A schedule with split backwards runs `bwd_input` (the gradient of a stage's input) and `bwd_weight` (the
gradient of its weights) as separate tasks. The previous stage waits for `bwd_input`; no task waits for
`bwd_weight`, so it fills times in which the actor would be idle.

Microbatches run backward in the order 0, 1, 2, ... in every stage, also where a paper reverses the order
(GPipe, LoopedBFS): bubbles and memory do not depend on this order, and gradients then accumulate in the order
of the plain loop.

In V-shaped schedules each actor has an early and a late part of the model. With S = 2A stages, stage s and
stage S-1-s are on one actor: a microbatch passes the actors from first to last and then back, like a V. The
first actor has the first and the last stage. For any other S the model is split into 2A parts of neighbouring
stages: stage s is in part c = s*2A//S, and parts c and 2A-1-c are on actor min(c, 2A-1-c). Several stages in
a part run as one longer stage. With fewer than 2A stages some parts are empty, and the order is that of 2A
stages without the tasks of empty parts. With S <= A every actor has at most one stage, and both placement and
order are those of `ZeroBubbleH1`.

Notation below: S stages, A actors, M microbatches. Bubble fractions assume that forwards, whole backwards and
both halves of a split backward take one unit of time each; in V-shaped schedules a whole backward takes two.
Activations are counted in (stage, microbatch) pairs whose forward has run and whose backward (if it is split:
whose `bwd_weight`) has not. V-shaped schedules count (part, microbatch) pairs instead; a part is half as
large as a stage of `Std1F1B`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

from jaxpp_async.program.instructions import Task, TaskType
from jaxpp_async.schedules.base import BuiltIn, divided_stages, flat, neighbouring_stages, tasks_through

# ---------------------------------------------------------------- neighbouring stages on one actor


class GPipe(BuiltIn):
    """A schedule that runs all forwards, then all backwards. Stage s is on actor s*A//S (S stages, A actors).

    Several stages on one actor run one after the other for each microbatch, as one longer stage would. A
    finer order would not be faster, since only the group's first and last stage communicate with other
    actors.

    Bubble fraction (A divides S, M microbatches): (A-1)/(M+A-1). Peak activations, in (stage, microbatch)
    pairs, on an actor with k stages: k*M.

    Source: Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, 2019,
    arXiv:1811.06965, figure 2.
    """

    def _rows(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        groups = neighbouring_stages(self.num_stages, num_actors)
        return [
            flat(tasks_through(stages, ty, i) for ty in ("fwd", "bwd") for i in range(num_microbatches))
            for stages in groups
        ]


class Std1F1B(BuiltIn):
    """A schedule that alternates between one forward and one backward after a warm-up (PipeDream-Flush).

    Stage s is on actor s*A//S (S stages, A actors); several stages on one actor run as one longer stage (see
    `GPipe`). This is the schedule with the least memory and the fewest transfers.

    Bubble fraction (A divides S, M microbatches): (A-1)/(M+A-1), the same as GPipe's. Peak activations, in
    (stage, microbatch) pairs, on actor a with k stages: k*min(M, A-a), however large M is. With S = A, stage
    s has at most min(M, S-s) of them.

    Source: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, 2021, arXiv:2006.09503, section
    3.2; Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM,
    2021, arXiv:2104.04473, section 2.2.1.
    """

    def _rows(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        return _one_forward_one_backward(self.num_stages, num_microbatches, num_actors, warmup_per_hop=1)


class Eager1F1B(BuiltIn):
    """A schedule like `Std1F1B` with twice the warm-up forwards, which hides slow transfers.

    An actor runs two warm-up forwards, instead of one, for each actor with later stages. An activation then
    arrives one task earlier than it is needed. Stage s is on actor s*A//S (S stages, A actors).

    Bubble fraction (A divides S, M microbatches): (A-1)/(M+A-1). Peak activations, in (stage, microbatch)
    pairs, on actor a with k stages: k*min(M, 2*(A-a)-1).

    Source: Zhuang et al., On Optimizing the Communication of Model Parallelism, 2022, arXiv:2211.05322,
    section 4 (eager-1F1B), as in Alpa's overlap-friendly schedule: 2*(A-a)-1 forwards before the first
    backward.
    """

    def _rows(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        return _one_forward_one_backward(self.num_stages, num_microbatches, num_actors, warmup_per_hop=2)


def _one_forward_one_backward(
    num_stages: int, num_microbatches: int, num_actors: int, *, warmup_per_hop: int
) -> list[list[Task]]:
    groups = neighbouring_stages(num_stages, num_actors)
    rows = []
    # With more actors than stages some groups are empty; only actors with stages are counted.
    num_behind = sum(1 for stages in groups if stages)
    for stages in groups:
        num_behind -= 1 if stages else 0
        forwards, backwards = (
            [tasks_through(stages, ty, i) for i in range(num_microbatches)] for ty in ("fwd", "bwd")
        )
        rows.append(_alternate(forwards, backwards, num_warmup=warmup_per_hop * num_behind))
    return rows


def _alternate(
    forwards: Sequence[list[Task]], backwards: Sequence[list[Task]], *, num_warmup: int
) -> list[Task]:
    """Return one actor's tasks: warm-up forwards, then a forward and a backward in turn, then backwards.

    Args:
        forwards, backwards: groups of tasks; each group counts as one forward or backward.
        num_warmup: the number of warm-up forwards.
    """
    num_warmup = min(num_warmup, len(forwards))
    order = flat(forwards[:num_warmup])
    for position, backward in enumerate(backwards):
        if num_warmup + position < len(forwards):
            order += forwards[num_warmup + position]
        order += backward
    return order


# ---------------------------------------------------------------- every A-th stage on one actor


class Interleaved1F1B(BuiltIn):
    """A 1F1B schedule that gives each actor several distant stages: stage s is on actor s % A.

    With S stages and A actors, a microbatch passes every actor v = S/A times, so the bubble is v times
    smaller than that of `Std1F1B` and there are v times as many transfers.

    The microbatches are divided into groups: an actor runs a whole group through one of its stages, then
    through the next of its stages. Where A divides the number M of microbatches, a group has A microbatches
    and the order is that of Megatron. Other cases:

    - M > A: there are M//A groups of nearly equal size, none smaller than A. No bubble is added; larger
      groups need more activations.
    - M < A: all M microbatches are one group.
    - S not a multiple of A: the order is that of the next larger multiple, without the stages that do not
      exist.
    - S <= A: the order is that of `Std1F1B`.

    Bubble fraction (A divides S, M >= A): (A-1)/(v*M+A-1). Peak activations, in (stage, microbatch) pairs, on
    actor a (A divides S, v > 1, g the size of the largest group): min(v*M, (v-1)*g + 2*(A-1-a) + 1); each
    pair has 1/v of the size of a pair of `Std1F1B` with one stage per actor.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM,
    2021, arXiv:2104.04473, section 2.2.2 and figure 4; warm-up counts as in Megatron-LM's
    `forward_backward_pipelining_with_interleaving`, uneven groups after torch.distributed.pipelining's
    flexible rounds.
    """

    stages_per_actor = (2, 3, 4)

    def _rows(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        num_used = min(self.num_stages, num_actors)
        num_loops = -(-self.num_stages // num_used)
        if num_loops == 1:
            rows = _one_forward_one_backward(self.num_stages, num_microbatches, num_used, warmup_per_hop=1)
        else:
            rows = [self._row(actor, num_used, num_loops, num_microbatches) for actor in range(num_used)]
        return rows + [[] for _ in range(num_actors - num_used)]

    def _row(self, actor: int, num_actors: int, num_loops: int, num_microbatches: int) -> list[Task]:
        """Return one actor's tasks in order.

        The order is first made for groups of equal size and for a multiple of `num_actors` stages. Tasks
        whose stage or microbatch does not exist are then left out. The order is still valid, since
        dependencies are between tasks of one microbatch and the stages that are left out are the last ones.

        Args:
            actor: the id of the actor.
            num_actors: the number of actors that have stages.
            num_loops: how many times a microbatch passes each actor.
            num_microbatches: the number of microbatches.
        """
        group_size, groups = _groups(num_microbatches, num_actors)
        stages = [loop * num_actors + actor for loop in range(num_loops)]

        def slots(ty: TaskType, stages: list[int]) -> list[list[Task]]:
            return [
                [Task(group[position], ty, stage)]
                if position < len(group) and stage < self.num_stages
                else []
                for group in groups
                for stage in stages
                for position in range(group_size)
            ]

        num_warmup = (num_loops - 1) * group_size + 2 * (num_actors - 1 - actor)
        return _alternate(slots("fwd", stages), slots("bwd", stages[::-1]), num_warmup=num_warmup)


def _groups(num_microbatches: int, num_actors: int) -> tuple[int, list[range]]:
    """Divide the microbatches into the groups that `Interleaved1F1B` runs through one stage after another.

    Returns:
        The size of the largest group, and one range of microbatch indices per group.
    """
    num_groups = max(1, num_microbatches // num_actors)
    bounds = [-(-group * num_microbatches // num_groups) for group in range(num_groups + 1)]
    groups = [range(first, end) for first, end in pairwise(bounds)]
    return len(groups[0]), groups


class LoopedBFS(BuiltIn):
    """A breadth-first schedule: an actor runs all microbatches through one of its stages after another.

    Stage s is on actor s % A (S stages, A actors). All uses of a stage's weights follow one another, and the
    stage's gradient is finished early, which suits sharded data parallelism.

    Bubble fraction (A divides S, v = S/A, M microbatches, M >= A): (A-1)/(v*M+A-1). Peak activations, in
    (stage, microbatch) pairs, on an actor with k stages: k*M.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, 2022, arXiv:2211.05953, section 4.
    """

    stages_per_actor = (2, 4)

    def _rows(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        microbatches = range(num_microbatches)
        rows = []
        for actor in range(num_actors):
            stages = range(actor, self.num_stages, num_actors)
            forwards = [Task(i, "fwd", stage) for stage in stages for i in microbatches]
            rows.append(
                forwards + [Task(i, "bwd", stage) for stage in reversed(stages) for i in microbatches]
            )
        return rows


# ---------------------------------------------------------------- split backwards


class ZeroBubbleH1(BuiltIn):
    """A schedule like `Std1F1B` with split backwards, whose weight gradients fill idle time (ZB1P).

    Each weight gradient is delayed by one microbatch for each actor with earlier stages. Input gradients
    arrive at the first actor sooner, and weight gradients fill the idle time at the end of the step. Stage s
    is on actor s*A//S (S stages, A actors); several stages on one actor run as one longer stage (see
    `GPipe`).

    Bubble fraction (A divides S, M microbatches, M >= A): (A-1)/(3M+A-1), a third of 1F1B's. Peak
    activations, in (stage, microbatch) pairs, on every actor with k stages: k*min(M, A), as on 1F1B's first
    actor.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, arXiv:2401.10241, section 2.1 and figure 3
    (top).
    """

    def _rows(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        return _one_forward_two_halves(self.num_stages, num_microbatches, num_actors, per_hop=1)


class ZeroBubbleH2(BuiltIn):
    """A schedule like `ZeroBubbleH1` with twice the warm-up forwards and twice the delay (also called ZB2P).

    With at least 2A-1 microbatches (A actors) no actor idles between its first and its last task. Stages are
    placed as in `ZeroBubbleH1`.

    Actor a begins and ends its tasks a units of time after actor 0; a unit is the time of one forward. So a
    single step of M microbatches has the bubble fraction (A-1)/(3M+A-1), the same as with `ZeroBubbleH1`.
    This bubble vanishes if steps follow each other and the actors do not all wait for one another between
    steps. A global gradient norm makes the actors wait. For M from A to 2A-1 an actor idles up to 2A-1-M
    units between its tasks; with M <= A the schedule is never faster than H1.

    Peak activations, in (stage, microbatch) pairs, on every actor with k stages: k*min(M, 2A-1).

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, arXiv:2401.10241, section 2.2 and figure 3
    (bottom).
    """

    def _rows(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        return _one_forward_two_halves(self.num_stages, num_microbatches, num_actors, per_hop=2)


def _one_forward_two_halves(
    num_stages: int, num_microbatches: int, num_actors: int, *, per_hop: int
) -> list[list[Task]]:
    """Return each actor's tasks for 1F1B with backwards that are split into input and weight gradients.

    An actor first runs `per_hop` warm-up forwards for each actor with later stages. Then it alternates
    between a forward, an input gradient and a weight gradient; the weight gradient is `per_hop` microbatches
    late for each actor with earlier stages. Warm-up and delay add up to the same number on each of the A
    actors, so each actor keeps the activations of at most `per_hop * (A-1) + 1` microbatches.
    """
    groups = neighbouring_stages(num_stages, num_actors)
    used = [actor for actor, stages in enumerate(groups) if stages]
    rows: list[list[Task]] = [[] for _ in groups]
    for num_ahead, actor in enumerate(used):
        num_behind = len(used) - 1 - num_ahead
        rows[actor] = split_row(groups[actor], num_microbatches, per_hop * num_behind, per_hop * num_ahead)
    return rows


def split_row(stages: range, num_microbatches: int, num_warmup: int, delay: int) -> list[Task]:
    """Return one actor's tasks for 1F1B with backwards that are split into input and weight gradients.

    The input gradient of microbatch i runs after the forward of microbatch i + `num_warmup` and before the
    weight gradient of microbatch i - `delay`.

    Args:
        stages: the actor's stages, which run as one longer stage.
        num_microbatches: the number of microbatches.
        num_warmup: the number of microbatches by which forwards are ahead of input gradients.
        delay: the number of microbatches by which weight gradients are behind input gradients.
    """
    row: list[Task] = []
    for i in range(-num_warmup, num_microbatches + delay):
        if i + num_warmup < num_microbatches:
            row += tasks_through(stages, "fwd", i + num_warmup)
        if 0 <= i < num_microbatches:
            row += tasks_through(stages, "bwd_input", i)
        if 0 <= i - delay < num_microbatches:
            row += tasks_through(stages, "bwd_weight", i - delay)
    return row


# ---------------------------------------------------------------- V-shaped schedules
#
# An actor's order is a sequence of phases; a phase is a text of letters and how often it is repeated. A
# letter is one task: `f` a forward, `b` a whole backward, `i` and `w` its halves `bwd_input` and
# `bwd_weight`. Small letters are tasks of the actor's early part of the model, capital letters of its late
# part. A letter stands for the first microbatch that has not run this kind of task in this part, so
# microbatches run in order in every stage. `*` is the oldest `w` or `W` whose `i` or `I` has run.

Phases: TypeAlias = list[tuple[str, int]]
"""The order of one actor's tasks, as pairs of a text with a letter per task and how often to repeat it."""

_LETTERS: dict[str, TaskType] = {"f": "fwd", "b": "bwd", "i": "bwd_input", "w": "bwd_weight"}


class VShaped(BuiltIn):
    """A base class of schedules that place stages in a V: an actor has an early and a late part of the model.

    A subclass implements `_phases`, which returns one actor's order as phases. A phase is a short sequence of
    tasks, written as letters (see `_spell`), and the number of its repetitions.
    """

    stages_per_actor = (2,)

    def _rows(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        if self.num_stages <= num_actors:
            return _one_forward_two_halves(self.num_stages, num_microbatches, num_actors, per_hop=1)
        parts = divided_stages(self.num_stages, 2 * num_actors)
        return [
            _spell(
                self._phases(actor, num_microbatches, num_actors),
                parts[actor],
                parts[-1 - actor],
                num_microbatches,
            )
            for actor in range(num_actors)
        ]

    def _phases(self, actor: int, num_microbatches: int, num_actors: int) -> Phases:
        raise NotImplementedError


class ZeroBubbleV(VShaped):
    """A V-shaped schedule with split backwards in which no actor idles between its tasks.

    Each actor has an early and a late part of the model (see the module's first lines), and each microbatch
    spends the same time on every actor. Activations take as much memory as on the first actor of 1F1B.

    Bubble fraction (S = 2A stages on A actors, M >= 2A-1 microbatches): (A-1)/(6M+A-1), all of it before an
    actor's first task and after its last. Peak activations, in (part of the model, microbatch) pairs, on
    every actor: min(2M, 2A), as much memory as A stages of 1F1B. With fewer microbatches the order is that of
    2A-1 microbatches, without the tasks of microbatches that do not exist; the schedule is never slower than
    `ZeroBubbleH1`.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, arXiv:2401.10241, section 6 and figure 8; Qi et
    al., Pipeline Parallelism with Controllable Memory, 2024, arXiv:2405.15362 (V-ZB); the same order as
    torch.distributed.pipelining's ScheduleZBVZeroBubble.
    """

    def _phases(self, actor: int, num_microbatches: int, num_actors: int) -> Phases:
        behind, count = num_actors - actor, max(num_microbatches, 2 * num_actors - 1)
        return [
            ("f", 2 * behind - 1),  # until the first microbatch comes back from the last actor
            ("Ff", actor),
            ("FIW", behind),  # until its gradient has passed the other actors and come back
            ("fiwFIW", count - 2 * num_actors + actor + 1),
            ("iwFIW", behind - 1),
            ("iI", actor),  # input gradients come first, since other actors wait for them
            ("iw", behind),
            ("W", actor),
            ("w", actor),
        ]


class DualPipeV(VShaped):
    """A V-shaped schedule that pairs a forward in one half of the V with a whole backward in the other half.

    The communication of one task of a pair can overlap the computation of the other. This is DeepSeek's
    DualPipe "cut in half", as the second source calls it. Each actor has an early and a late part of the
    model (see the module's first lines). Backwards are split into input and weight gradients only near the
    start and the end of the step.

    The paper runs such a pair as one block. This schedule runs it as two tasks one after the other, forward
    first: transfers overlap computation under any schedule, and each of the two tasks sends its result on as
    soon as it ends.

    Bubble fraction (S = 2A stages on A actors, M >= 2A microbatches): (A-1)/(6M+A-1), since each actor has 6M
    units of work and the step takes 6M+A-1 units. A unit is the time of a forward, an input gradient or a
    weight gradient. With pairs run as blocks the step would take 6M+2(A-1) units: the paper gives the excess
    as (A-1)(F&B+B-3W), with 3 units for a block F&B, 2 units for a whole backward B and one unit for a weight
    gradient W. Peak activations, in (part of the model, microbatch) pairs, on every actor: 2A+1. The schedule
    is not defined for M < 2A; the order is then `ZeroBubbleV`'s.

    Source: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, arXiv:2412.19437, section 3.2.1 (DualPipe); Qi et
    al. (Sea AI Lab), DualPipe could be better without the Dual, 2025 ("cut-in-half"); the same order as the
    DualPipeV of DeepSeek's DualPipe repository and torch.distributed.pipelining's ScheduleDualPipeV.
    """

    def _phases(self, actor: int, num_microbatches: int, num_actors: int) -> Phases:
        if num_microbatches < 2 * num_actors:
            return ZeroBubbleV(self.num_stages)._phases(actor, num_microbatches, num_actors)
        behind, ahead = num_actors - 1 - actor, actor
        whole, split = ("Bb" * num_actors)[: ahead + 1], ("iI" if ahead % 2 == 0 else "Ii") * num_actors
        return [
            ("f", 2 * behind),
            ("fF", ahead + 1),
            ("IWF", behind),
            ("fBFb", num_microbatches - num_actors - behind),  # pairs f B and F b
            ("BFb", behind),
            (whole, 1),  # no forward is left; these backwards still run whole
            (split[: ahead + 1], 1),  # input gradients come first, since other actors wait for them
            ("*i", behind),
            ("*", ahead + 1),
        ]


def _spell(phases: Phases, down: range, up: range, num_microbatches: int) -> list[Task]:
    """Return one actor's tasks in a V-shaped schedule, given its order as repeated sequences of tasks.

    Tasks of microbatches that do not exist are left out.

    Args:
        phases: pairs of a text and the number of its repetitions. Each letter of the text is one task. `f` is
            a forward, `b` a whole backward, `i` the input gradient and `w` the weight gradient of a split
            backward. Lower case is the early part of the model, upper case the late part. `*` is the oldest
            `w` or `W` that has not run although its `i` or `I` has.
        down: the stages of the actor's early part of the model.
        up: the stages of the actor's late part of the model.
        num_microbatches: the number of microbatches.
    """
    row: list[Task] = []
    counts: Counter[str] = Counter()
    due: list[str] = []
    for symbol in (symbol for letters, count in phases for symbol in letters * count):
        letter = due[0] if symbol == "*" else symbol
        if letter in "wW":
            due.remove(letter)
        elif letter in "iI":
            due.append("w" if letter == "i" else "W")
        halves = {"b": "iw", "B": "IW"}.get(letter, letter)
        i = counts[halves[0]]
        counts.update(halves)
        if i < num_microbatches:
            row += tasks_through(down if letter.islower() else up, _LETTERS[letter.lower()], i)
    return row
