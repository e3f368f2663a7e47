"""Schedules whose actors hold neighbouring stages, or stages that lie A apart.

All but GPipe and LoopedBFS with whole backwards follow one pattern: warm-up forwards, then one forward and
one backward in turn, then the backwards left over. They differ in how many forwards warm an actor up and in
which stage each slot takes.

In schedules with split backwards the stage before waits for `bwd_input`; nobody waits for `bwd_weight`, so it
fills slots that would be idle.

Microbatches run backward in the order 0, 1, 2, ... in every stage, also where a paper draws it reversed
(GPipe, LoopedBFS): no bubble and no memory depends on it, and gradients then accumulate in the order of the
plain loop.

Notation below: S stages, A actors, M microbatches. Bubble fractions are for forwards, whole backwards and
both halves of a split backward of one unit of time each. Activations are counted in (stage, microbatch) pairs
whose forward is done and whose backward (for a split one its `bwd_weight`) is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from jaxpp_async.program.instructions import Task, TaskType
from jaxpp_async.schedules.base import BuiltIn, flat, neighbouring_stages, through

# ---------------------------------------------------------------- neighbouring stages on one actor


class GPipe(BuiltIn):
    """Run all forwards, then all backwards. Stage s is on actor s*A//S.

    Several stages on one actor run one after the other for each microbatch, as one longer stage would: only
    the group's ends talk to other actors, so nothing finer is faster.

    Bubble fraction (A divides S): (A-1)/(M+A-1). Activations on an actor with k stages: k*M.

    Source: Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, 2019,
    arXiv:1811.06965, figure 2.
    """

    def _rows(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        groups = neighbouring_stages(self.num_stages, num_actors)
        return [
            flat(through(stages, ty, i) for ty in ("fwd", "bwd") for i in range(num_microbatches))
            for stages in groups
        ]


class Std1F1B(BuiltIn):
    """Run one forward and one backward in turn (PipeDream-Flush).

    Stage s is on actor s*A//S; several on one actor run as one longer stage (see `GPipe`).

    Bubble fraction (A divides S): (A-1)/(M+A-1), as GPipe. Activations on actor a with k stages: k*min(M,
    A-a), however large M is. With S = A stage s holds min(M, S-s).

    Source: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, 2021, arXiv:2006.09503, section
    3.2; Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM,
    2021, arXiv:2104.04473, section 2.2.1.
    """

    def _rows(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        return _one_forward_one_backward(self.num_stages, num_microbatches, num_actors, warmup_per_hop=1)


class Eager1F1B(BuiltIn):
    """Run 1F1B with forwards further ahead: two warm-up forwards for each actor behind, for `Std1F1B`'s one.

    An activation then arrives one slot before it is needed, which hides the transfer. Placed as `Std1F1B`.

    Bubble fraction (A divides S): (A-1)/(M+A-1). Activations on actor a with k stages: k*min(M, 2*(A-a)-1).

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
    # With more actors than stages some groups are empty: only those with stages lie behind one another.
    num_behind = sum(1 for stages in groups if stages)
    for stages in groups:
        num_behind -= 1 if stages else 0
        forwards, backwards = (
            [through(stages, ty, i) for i in range(num_microbatches)] for ty in ("fwd", "bwd")
        )
        rows.append(_alternate(forwards, backwards, num_warmup=warmup_per_hop * num_behind))
    return rows


# ---------------------------------------------------------------- stages that lie A apart on one actor


class Interleaved1F1B(BuiltIn):
    """1F1B in which each actor holds v = S/A stages that lie A apart: stage s is on actor s % A. A microbatch
    passes every actor v times, and the bubble shrinks by v at the price of v times the transfers.

    Microbatches go in groups: an actor runs a whole group through one of its stages, then through its next.
    Where A divides M, a group has A microbatches and the order is Megatron's. Otherwise:

    - M > A: M//A groups, as equal as can be, none smaller than A. No bubble is added; larger groups hold more
      activations.
    - M < A: one group of M.
    - S not a multiple of A: the order of the next larger multiple without the stages that do not exist.
    - S <= A: the order of `Std1F1B`.

    Bubble fraction (A divides S, M >= A): (A-1)/(v*M+A-1). Activations on actor a (A divides S, v > 1, g the
    size of the largest group): min(v*M, (v-1)*g + 2*(A-1-a) + 1), each of a stage of 1/v the size.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM,
    2021, arXiv:2104.04473, section 2.2.2 and figure 4; warm-up counts as in Megatron-LM's
    `forward_backward_pipelining_with_interleaving`, uneven groups after torch.distributed.pipelining's
    flexible rounds.
    """

    def _rows(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        num_used = min(self.num_stages, num_actors)
        num_loops = -(-self.num_stages // num_used)
        if num_loops == 1:
            rows = _one_forward_one_backward(self.num_stages, num_microbatches, num_used, warmup_per_hop=1)
        else:
            rows = [self._row(actor, num_used, num_loops, num_microbatches) for actor in range(num_used)]
        return rows + [[] for _ in range(num_actors - num_used)]

    def _row(self, actor: int, num_actors: int, num_loops: int, num_microbatches: int) -> list[Task]:
        """Order one actor's tasks for groups of one size and whole loops, less the tasks that do not exist.

        The rest of a valid order is valid: dependencies join tasks of one microbatch, and the stages left out
        are the last.
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
    """Return the size of the largest group of `Interleaved1F1B`, and the microbatches of each group."""
    num_groups = max(1, num_microbatches // num_actors)
    bounds = [-(-group * num_microbatches // num_groups) for group in range(num_groups + 1)]
    groups = [range(first, end) for first, end in pairwise(bounds)]
    return len(groups[0]), groups


class LoopedBFS(BuiltIn):
    """Run all microbatches through one of an actor's stages before the next stage (breadth-first).

    Stage s is on actor s % A. Each stage's weights are used, and its gradient is finished, in one go.

    Bubble fraction (A divides S, v = S/A, M >= A): (A-1)/(v*M+A-1). Activations on an actor with k stages:
    k*M.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, 2022, arXiv:2211.05953, section 4.
    """

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


# ---------------------------------------------------------------- parts


def _alternate(
    forwards: Sequence[list[Task]], backwards: Sequence[list[Task]], *, num_warmup: int
) -> list[Task]:
    """Order `num_warmup` forwards, then a forward and a backward in turn, then the backwards left over."""
    num_warmup = min(num_warmup, len(forwards))
    order = flat(forwards[:num_warmup])
    for position, backward in enumerate(backwards):
        if num_warmup + position < len(forwards):
            order += forwards[num_warmup + position]
        order += backward
    return order


# ---------------------------------------------------------------- split backwards


class ZeroBubbleH1(BuiltIn):
    """Run 1F1B with each weight gradient put off by one microbatch for each actor ahead. Also called ZB1P.

    Input gradients reach the first actor sooner, and weight gradients fill the end. Stage s is on actor
    s*A//S; several on one actor run as one longer stage (see `GPipe`).

    Bubble fraction (A divides S, M >= A): (A-1)/(3M+A-1), a third of 1F1B's. Activations on every actor with
    k stages: k*min(M, A), as on 1F1B's first actor.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, arXiv:2401.10241, section 2.1 and figure 3
    (top).
    """

    def _rows(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        return one_forward_two_halves(self.num_stages, num_microbatches, num_actors, per_hop=1)


class ZeroBubbleH2(BuiltIn):
    """Run `ZeroBubbleH1` with twice the warm-up forwards and twice the delay. Also called ZB2P.

    From M = 2A-1 on no actor idles between its first and its last task. Placed as `ZeroBubbleH1`.

    Actor a still begins and ends a units after the first. So the bubble fraction of one step by itself is
    (A-1)/(3M+A-1), as H1's; it vanishes where steps follow each other without all actors waiting for one
    another (a global gradient norm makes them wait). From M = A to 2A-1 an actor idles up to 2A-1-M units
    between its tasks; with M <= A it is never faster than H1.

    Activations on every actor with k stages: k*min(M, 2A-1).

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, arXiv:2401.10241, section 2.2 and figure 3
    (bottom).
    """

    def _rows(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        return one_forward_two_halves(self.num_stages, num_microbatches, num_actors, per_hop=2)


def one_forward_two_halves(
    num_stages: int, num_microbatches: int, num_actors: int, *, per_hop: int
) -> list[list[Task]]:
    """Order the tasks of 1F1B with split backwards on every actor.

    An actor runs `per_hop` warm-up forwards for each actor behind it. Then it runs in turn a forward, an
    input gradient, and a weight gradient that is `per_hop` microbatches late for each actor ahead of it.
    Warm-up and delay add up to the same on every actor: each holds at most `per_hop * (A-1) + 1`
    microbatches.
    """
    groups = neighbouring_stages(num_stages, num_actors)
    used = [actor for actor, stages in enumerate(groups) if stages]
    rows: list[list[Task]] = [[] for _ in groups]
    for num_ahead, actor in enumerate(used):
        num_behind = len(used) - 1 - num_ahead
        rows[actor] = _split_row(groups[actor], num_microbatches, per_hop * num_behind, per_hop * num_ahead)
    return rows


def _split_row(stages: range, num_microbatches: int, num_warmup: int, delay: int) -> list[Task]:
    """Order one actor's tasks.

    Input gradient i runs behind forward i + `num_warmup` and ahead of weight gradient i - `delay`.
    """
    row: list[Task] = []
    for i in range(-num_warmup, num_microbatches + delay):
        if i + num_warmup < num_microbatches:
            row += through(stages, "fwd", i + num_warmup)
        if 0 <= i < num_microbatches:
            row += through(stages, "bwd_input", i)
        if 0 <= i - delay < num_microbatches:
            row += through(stages, "bwd_weight", i - delay)
    return row
