"""Find how far each actor's clock is ahead of the controller's, and the largest possible error of that
offset.

There are three sources. First, an estimate of the offset, which comes with a bound on its error. Second, the
step itself: the controller sent it before an actor began it, and had the reply after the actor finished it.
Third, the step's transfers: no data arrived before it was sent. With transfers in both directions this bounds
two actors' clocks against each other far more tightly than questions to the actors could, and it ensures that
in a trace no arrow from a send to its receive points into the past.

All of these bound the difference of two clocks from above, so the tightest bounds are the shortest paths in a
graph whose nodes are clocks and whose edges are bounds.

Source: R. Bellman, On a Routing Problem, 1958; as difference constraints in Cormen et al., Introduction to
Algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import ActorId, Recv, Send
from jaxpp_async.timeline.events import Recorded, TransferKey, stamp_range

Bounds = tuple[float, float]
"""The least and the most, in seconds, by which an actor's clock may be ahead of the controller's."""

_ROUNDING_S = 1e-9


@dataclass(frozen=True, slots=True)
class ClockAlignment:
    """The offsets of the actors' clocks from the controller's clock, in seconds.

    Args:
        offset_s: for each actor, how far its clock is ahead of the controller's.
        error_s: for each actor, the largest possible error of its offset.
        pair_error_s: the largest possible error of the difference between the offsets of any two actors.
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
    """Compute the offsets of the actors' clocks from the controller's clock, from all that is known of one
    step.

    If the bounds from transfers contradict the estimates of the offsets, the estimates are ignored. If they
    also contradict the step's own bounds, the transfers are ignored instead.

    Args:
        recorded: what is known of each actor's part in the step.
        programs: the program of each of these actors.
        stamps: for each of these actors, the time stamps of its instructions as `read_stamps` returns them.
        origin_s: when the controller sent the step, in seconds of the controller's clock.
    """
    if all(r.error_s == 0.0 for r in recorded.values()):
        return ClockAlignment({a: r.offset_s for a, r in recorded.items()}, dict.fromkeys(recorded, 0.0), 0.0)
    steps = {a: _step_bounds(r, stamps[a], origin_s) for a, r in recorded.items()}
    estimated = {a: _estimated_bounds(r, steps[a]) for a, r in recorded.items()}
    found = _transfer_bounds(programs, stamps)
    for bounds, transfers in ((estimated, found), (steps, found), (estimated, {})):
        aligned = align_clocks(bounds, transfers)
        if aligned is not None:
            return aligned
    raise AssertionError("bounds that have been made to agree with each step do")


def align_clocks(
    bounds: Mapping[ActorId, Bounds], leads: Mapping[tuple[ActorId, ActorId], float]
) -> ClockAlignment | None:
    """Return offsets of the actors' clocks that satisfy all bounds, or None if the bounds contradict each
    other.

    Args:
        bounds: for each actor, the least and the most in seconds by which its clock may be ahead of the
            controller's.
        leads: for some pairs (a, b) of actors, the most in seconds by which b's clock may be ahead of a's.
    """
    actors = sorted(bounds)
    index = {actor: k for k, actor in enumerate(actors, 1)}
    size = len(actors) + 1
    # most[a, b]: the most by which clock b is ahead of clock a; index 0 is the controller
    most = np.where(np.eye(size, dtype=bool), 0.0, np.inf)
    for actor, (low_s, high_s) in bounds.items():
        most[0, index[actor]], most[index[actor], 0] = high_s, -low_s
    for (a, b), lead_s in leads.items():
        most[index[a], index[b]] = min(most[index[a], index[b]], lead_s)
    for k in range(size):
        _tighten(most, k, k, 0.0)
    if (most.diagonal() < -_ROUNDING_S).any():
        return None
    known, offsets = most.copy(), np.zeros(size)
    for k in range(1, size):  # the middle of the interval that earlier choices leave for it
        offsets[k] = (most[0, k] - most[k, 0]) / 2
        _tighten(most, 0, k, offsets[k])
        _tighten(most, k, 0, -offsets[k])
    wrong = np.maximum(0.0, known - (offsets - offsets[:, None]))
    return ClockAlignment(
        {actor: float(offsets[k]) for actor, k in index.items()},
        {actor: float(max(wrong[0, k], wrong[k, 0])) for actor, k in index.items()},
        float(wrong[1:, 1:].max(initial=0.0)),
    )


def _transfer_bounds(
    programs: Sequence[ActorProgram], stamps: Mapping[ActorId, Sequence[tuple[float, float]]]
) -> dict[tuple[ActorId, ActorId], float]:
    """Derive from transfers by how much one actor's clock can be ahead of another's at most.

    If actor a sent data when its clock showed s, and actor b had received the data when b's clock showed t,
    then b's clock is ahead of a's by at most t - s.

    Args:
        programs: the program of each actor.
        stamps: for each actor, the start and end of each instruction, in seconds of the actor's own clock.

    Returns:
        A dictionary. Its keys are the pairs (a, b) of actors with a transfer from a to b; its values are the
        most, in seconds, by which b's clock can be ahead of a's.
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


def _tighten(most: np.ndarray[Any, Any], a: int, b: int, lead_s: float) -> None:
    """Tighten all bounds in place with a new one: clock b is ahead of clock a by at most `lead_s` seconds.

    Args:
        most: the matrix of bounds; `most[a, b]` is the most by which clock b is ahead of clock a.
        a, b: the clocks, as indices of the matrix.
        lead_s: the new bound in seconds.
    """
    most[:] = np.minimum(most, most[:, a, None] + lead_s + most[b])


def _step_bounds(r: Recorded, stamps: Sequence[tuple[float, float]], origin_s: float) -> Bounds:
    """Return the least and the most, in seconds, by which an actor's clock can be ahead of the controller's.

    This uses the step itself: the actor began it after the controller sent it, and finished before the
    controller had the reply.

    Args:
        r: what is known of the actor's part in the step.
        stamps: the start and end of each instruction, in seconds of the actor's own clock.
        origin_s: when the controller sent the step, in seconds of the controller's clock.
    """
    between = stamp_range(stamps)
    if r.error_s == 0.0 or between is None:
        return r.offset_s, r.offset_s
    low_s, high_s = between[1] - r.heard_s, between[0] - origin_s
    return min(low_s, high_s), max(low_s, high_s)  # they are in order unless a clock drifted within the step


def _estimated_bounds(r: Recorded, step: Bounds) -> Bounds:
    """Return the step's bounds on a clock's offset, narrowed by the estimate of that offset.

    If the estimate contradicts the step's bounds, it is wrong, and the step's bounds are returned.

    Args:
        r: what is known of the actor's part in the step, with the estimate.
        step: the bounds that `_step_bounds` returned.
    """
    if r.error_s is None:
        return step
    low_s, high_s = max(step[0], r.offset_s - r.error_s), min(step[1], r.offset_s + r.error_s)
    return (low_s, high_s) if low_s <= high_s else step
