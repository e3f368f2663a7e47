"""Schedules in which each actor holds an early and a late part of the model.

With S = 2A stages, stage s and stage S-1-s are on one actor: the model goes down the actors and comes back
up, like a V. The first actor has the first and the last stage.

Any S: the model is cut into 2A parts of neighbouring stages, stage s in part c = s*2A//S, and parts c and
2A-1-c share actor min(c, 2A-1-c). Several stages in a part run as one longer stage. With fewer than 2A stages
some parts are empty and the order is that of 2A stages without them. With S <= A every stage has an actor to
itself, nothing folds, and placement and order are `ZeroBubbleH1`'s.

An actor's order is a sequence of phases, each some letters repeated: `f` a forward, `b` a whole backward, `i`
and `w` its halves, of the next microbatch that has not had it; small in the part on the way down, capital on
the way up. `*` is the oldest `w` or `W` that is due. Microbatches thus stand in order in every stage.

Notation: S stages, A actors, M microbatches; forwards and both halves of a backward take one unit of time, a
whole backward two. Activations are counted in (part, microbatch) pairs, each half as large as a stage of
`Std1F1B`.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from jaxpp_async.program.instructions import Task, TaskType
from jaxpp_async.schedules.base import BuiltIn, neighbouring_stages, through
from jaxpp_async.schedules.linear import one_forward_two_halves

Phases: TypeAlias = list[tuple[str, int]]
"""(letters, how often)."""

LETTERS: dict[str, TaskType] = {"f": "fwd", "b": "bwd", "i": "bwd_input", "w": "bwd_weight"}


class _VShaped(BuiltIn):
    """A schedule that folds the model into a V; a subclass gives each actor's phases."""

    def _rows(self, num_microbatches: int, num_actors: int) -> list[list[Task]]:
        if self.num_stages <= num_actors:
            return one_forward_two_halves(self.num_stages, num_microbatches, num_actors, per_hop=1)
        parts = neighbouring_stages(self.num_stages, 2 * num_actors)
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


class ZeroBubbleV(_VShaped):
    """Run each microbatch for the same time on every actor, down and up a V: no actor idles between its
    tasks.

    The activations are those of 1F1B's first actor. Stages are placed in a V (see the module's first lines).

    Bubble fraction (S = 2A, M >= 2A-1): (A-1)/(6M+A-1), all of it before an actor's first task and after its
    last; none in between. Activations on every actor: min(2M, 2A) parts, as much as A stages of 1F1B. With
    fewer microbatches it takes the order of 2A-1 of them without those that do not exist, and is never slower
    than `ZeroBubbleH1`.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, arXiv:2401.10241, section 6 and figure 8; Qi et
    al., Pipeline Parallelism with Controllable Memory, 2024, arXiv:2405.15362 (V-ZB); the same order as
    torch.distributed.pipelining's ScheduleZBVZeroBubble.
    """

    def _phases(self, actor: int, num_microbatches: int, num_actors: int) -> Phases:
        behind, count = num_actors - actor, max(num_microbatches, 2 * num_actors - 1)
        return [
            ("f", 2 * behind - 1),  # until the first microbatch comes back up
            ("Ff", actor),
            ("FIW", behind),  # until its gradient has gone up and come down
            ("fiwFIW", count - 2 * num_actors + actor + 1),
            ("iwFIW", behind - 1),
            ("iI", actor),  # gradients first: others wait for them
            ("iw", behind),
            ("W", actor),
            ("w", actor),
        ]


class DualPipeV(_VShaped):
    """Run a forward of one direction and a whole backward of the other side by side, in a V.

    This is DeepSeek's DualPipe cut in half: what one task of a pair communicates can overlap what the other
    computes. Stages are placed in a V (see the module's first lines). Backwards are split only near both
    ends.

    The paper runs such a pair as one block. Here it is just two tasks one after the other, forward first:
    transfers overlap computation under any schedule, and each of the two hands its result on when it ends.

    Bubble fraction (S = 2A, M >= 2A): (A-1)/(6M+A-1). With pairs as blocks of F&B = F+B the step takes twice
    as much more than 6M, the published (A-1)(F&B+B-3W) = 2(A-1) units. Activations on every actor: 2A+1
    parts. For M < 2A it is not defined; the order is then `ZeroBubbleV`'s.

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
            (whole, 1),  # no forward is left; these still run whole
            (split[: ahead + 1], 1),  # then gradients first, others wait for them
            ("*i", behind),
            ("*", ahead + 1),
        ]


def _spell(phases: Phases, down: range, up: range, num_microbatches: int) -> list[Task]:
    """Return the tasks that `phases` spell, less those of microbatches that do not exist."""
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
            row += through(down if letter.islower() else up, LETTERS[letter.lower()], i)
    return row
