"""Find by how much each actor's clock is ahead of the controller's, and by how much that may be wrong.

Three things are known. An estimate of the offset says by how much it may be wrong. The
step itself was sent before an actor took it up, and the reply came after the actor was done. And no data was
there before it was sent: with transfers both ways that bounds two actors' clocks against each other by far
less than a question could, and no arrow points into the past.

All of these are differences between clocks that are at most so much, so the tightest bounds are shortest
paths.

Source: R. Bellman, On a Routing Problem, 1958; as difference constraints in Cormen et al., Introduction to
Algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import ActorId, Recv, Send
from jaxpp_async.timeline.events import Recorded, TransferKey, stamp_range

Bounds = tuple[float, float]
"""The least and the most by which a clock is ahead."""

_ROUNDING_S = 1e-9


@dataclass(frozen=True, slots=True)
class ClockAlignment:
    """The actors' clocks, set against the controller's, in seconds.

    Args:
        offset_s: by how much each is ahead.
        error_s: by how much that may be wrong.
        pair_error_s: by how much the difference between two of them may be wrong, at most.
    """

    offset_s: dict[ActorId, float]
    error_s: dict[ActorId, float]
    pair_error_s: float


def align_step(
    recorded: Mapping[ActorId, Recorded],
    programs: Sequence[ActorProgram],
    stamps: Mapping[ActorId, Sequence[tuple[float, float]]],
    origin_s: float,
) -> ClockAlignment:
    """Align the actors' clocks with the controller's.

    Where facts contradict each other, the step's own bounds hold.

    Args:
        recorded: each actor's part.
        programs: of these actors.
        stamps: of these actors, as `read_stamps` reads them.
        origin_s: when the controller sent the step, by its clock.
    """
    if all(r.error_s == 0.0 for r in recorded.values()):
        return ClockAlignment({a: r.offset_s for a, r in recorded.items()}, dict.fromkeys(recorded, 0.0), 0.0)
    steps = {a: _step_bounds(r, stamps[a], origin_s) for a, r in recorded.items()}
    estimated = {a: _estimated_bounds(r, steps[a]) for a, r in recorded.items()}
    found = _find_leads(programs, stamps)
    for bounds, transfers in ((estimated, found), (steps, found), (estimated, {})):
        aligned = align_clocks(bounds, transfers)
        if aligned is not None:
            return aligned
    raise AssertionError("bounds that have been made to agree with each step do")


def align_clocks(
    bounds: Mapping[ActorId, Bounds], leads: Mapping[tuple[ActorId, ActorId], float]
) -> ClockAlignment | None:
    """Find offsets that agree with all that is known; None if nothing does.

    Args:
        bounds: for each actor, against the controller.
        leads: for some (a, b), the most by which b's clock is ahead of a's.
    """
    actors = sorted(bounds)
    index = {actor: k for k, actor in enumerate(actors, 1)}
    size = len(actors) + 1
    # [a][b]: b is ahead of a by
    most = [[0.0 if a == b else math.inf for b in range(size)] for a in range(size)]
    for actor, (low_s, high_s) in bounds.items():
        most[0][index[actor]], most[index[actor]][0] = high_s, -low_s
    for (a, b), lead_s in leads.items():
        most[index[a]][index[b]] = min(most[index[a]][index[b]], lead_s)
    for k in range(size):
        _shorten(most, k, k, 0.0)
    if any(most[k][k] < -_ROUNDING_S for k in range(size)):
        return None
    known = [row[:] for row in most]
    offsets = [0.0] * size
    for k in range(1, size):  # one after the other, each in the middle of what those before leave it
        offsets[k] = (most[0][k] - most[k][0]) / 2
        _shorten(most, 0, k, offsets[k])
        _shorten(most, k, 0, -offsets[k])
    wrong = [[max(0.0, known[a][b] - (offsets[b] - offsets[a])) for b in range(size)] for a in range(size)]
    return ClockAlignment(
        {actor: offsets[k] for actor, k in index.items()},
        {actor: max(wrong[0][k], wrong[k][0]) for actor, k in index.items()},
        max((wrong[a][b] for a in range(1, size) for b in range(1, size)), default=0.0),
    )


def _find_leads(
    programs: Sequence[ActorProgram], stamps: Mapping[ActorId, Sequence[tuple[float, float]]]
) -> dict[tuple[ActorId, ActorId], float]:
    """Find the bounds that transfers give, as the most by which b's clock is ahead of a's, in seconds.

    Data that b had when its clock showed t had been sent when a's clock showed s: b's clock is ahead of a's
    by t - s at most.
    """
    sent: dict[TransferKey, float] = {}
    there: dict[TransferKey, float] = {}
    for program in programs:
        for instruction, (start_s, end_s) in zip(program.instructions, stamps[program.actor], strict=True):
            if isinstance(instruction, Send):
                sent[program.actor, instruction.to_actor, instruction.tag] = start_s
            elif isinstance(instruction, Recv):
                there[instruction.from_actor, program.actor, instruction.tag] = end_s
    found: dict[tuple[ActorId, ActorId], float] = {}
    for key, start_s in sent.items():
        lead_s = there.get(key, math.nan) - start_s
        if not math.isnan(lead_s):
            found[key[:2]] = min(found.get(key[:2], math.inf), lead_s)
    return found


def _shorten(most: list[list[float]], a: int, b: int, lead_s: float) -> None:
    """Shorten every path that may go by way of this: b is ahead of a by `lead_s` at most."""
    onwards = most[b][:]
    for row in most:
        until = row[a] + lead_s
        if until < math.inf:
            row[:] = [min(x, until + y) for x, y in zip(row, onwards, strict=True)]


def _step_bounds(r: Recorded, stamps: Sequence[tuple[float, float]], origin_s: float) -> Bounds:
    """Bound a clock by the step: taken up after it was sent, and done before the reply came."""
    between = stamp_range(stamps)
    if r.error_s == 0.0 or between is None:
        return r.offset_s, r.offset_s
    low_s, high_s = between[1] - r.heard_s, between[0] - origin_s
    return min(low_s, high_s), max(low_s, high_s)  # in order, unless a clock ran away within the step


def _estimated_bounds(r: Recorded, step: Bounds) -> Bounds:
    """Narrow the step's bounds by the estimate, unless the two contradict each other: then it is wrong."""
    if r.error_s is None:
        return step
    low_s, high_s = max(step[0], r.offset_s - r.error_s), min(step[1], r.offset_s + r.error_s)
    return (low_s, high_s) if low_s <= high_s else step
