"""schedules.zero_bubble: the schedules that split every backward, stages in line. Counts of stages, microbatches and
actors in, one list of tasks an actor out. Pure order: never looks at a program, never validates.

The stage before waits for `bwd_input`; nobody waits for `bwd_weight`, so it fills slots that would be idle. Both run in
microbatch order in every stage, and gradients accumulate in the order of the plain loop.

Notation: S stages, A actors, M microbatches; forwards and both halves of a backward take one unit of time. Activations
are counted in (stage, microbatch) pairs whose forward is done and whose `bwd_weight` is not.
"""

from __future__ import annotations

from jaxpp_async.program import Task
from jaxpp_async.schedules.base import BuiltIn, frozen_schedule, neighbouring_stages, through


@frozen_schedule
class ZeroBubbleH1(BuiltIn):
    """1F1B with each weight gradient put off by one microbatch for each actor ahead. Input gradients reach the first
    actor sooner, and weight gradients fill the end. Also called ZB1P. Stage s is on actor s*A//S; several on one actor
    run as one longer stage (see `GPipe`).

    Bubble fraction (A divides S, M >= A): (A-1)/(3M+A-1), a third of 1F1B's. Activations on every actor with k stages:
    k*min(M, A), as on 1F1B's first actor.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, arXiv:2401.10241, section 2.1 and figure 3 (top).
    """

    def _rows(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        return one_forward_two_halves(self.num_stages, num_microbatches, num_actors, per_hop=1)


@frozen_schedule
class ZeroBubbleH2(BuiltIn):
    """`ZeroBubbleH1` with twice the warm-up forwards and twice the delay of weight gradients: from M = 2A-1 on no actor
    idles between its first and its last task. Also called ZB2P. Placed as `ZeroBubbleH1`.

    Actor a still begins and ends a units after the first. So the bubble fraction of one step by itself is
    (A-1)/(3M+A-1), as H1's; it vanishes where steps follow each other without all actors waiting for one another (a
    global gradient norm makes them wait). From M = A to 2A-1 an actor idles up to 2A-1-M units between its tasks;
    with M <= A it is never faster than H1.

    Activations on every actor with k stages: k*min(M, 2A-1).

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, arXiv:2401.10241, section 2.2 and figure 3 (bottom).
    """

    def _rows(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        return one_forward_two_halves(self.num_stages, num_microbatches, num_actors, per_hop=2)


def one_forward_two_halves(
    num_stages: int, num_microbatches: int, num_actors: int, *, per_hop: int
) -> list[list[Task]]:
    """On each actor: `per_hop` warm-up forwards for each actor behind, then a forward, an input gradient and the weight
    gradient of `per_hop` microbatches for each actor ahead before that, in turn.

    Warm-up and delay add up to the same on every actor: each holds at most `per_hop * (A-1) + 1` microbatches.
    """
    groups = neighbouring_stages(num_stages, num_actors)
    used = [actor for actor, stages in enumerate(groups) if stages]
    rows: list[list[Task]] = [[] for _ in groups]
    for num_ahead, actor in enumerate(used):
        num_behind = len(used) - 1 - num_ahead
        rows[actor] = _row(groups[actor], num_microbatches, per_hop * num_behind, per_hop * num_ahead)
    return rows


def _row(stages: range, num_microbatches: int, num_warmup: int, delay: int) -> list[Task]:
    """Input gradient i stands after forward i + `num_warmup` and before weight gradient i - `delay`."""
    row: list[Task] = []
    for i in range(-num_warmup, num_microbatches + delay):
        if i + num_warmup < num_microbatches:
            row += through(stages, "fwd", i + num_warmup)
        if 0 <= i < num_microbatches:
            row += through(stages, "bwd_input", i)
        if 0 <= i - delay < num_microbatches:
            row += through(stages, "bwd_weight", i - delay)
    return row
