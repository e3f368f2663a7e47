"""shares: an actor's events in, what it did with the step's time out: computing, waiting, transfers, dispatch, idle.

Measured, not modelled: each moment from the first actor's first instruction to the last one's last is one of the five,
so that they add up to it. `bill` says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxpp_async.program import ActorId
from jaxpp_async.timeline.events import ActorTimeline, Event, Transfer


@dataclass(frozen=True, slots=True)
class Shares:
    """Where one actor's time went in one step, in seconds. They add up to the time from when the
    first actor took the step up until the last one was done.

    Args:
        compute_s: in tasks.
        wait_s: nothing to compute: what the next task reads had not been made yet, on another actor or by whoever
            gives the step its arguments.
        transfer_s: nothing to compute: that had been sent, and was not there yet. After the last task: until the last
            transfer has ended.
        dispatch_s: everything was there, and no task ran.
        idle_s: before the actor took the step up, and after its last instruction.
    """

    actor: ActorId
    compute_s: float
    wait_s: float
    transfer_s: float
    dispatch_s: float
    idle_s: float

    @property
    def duration_s(self) -> float:
        """Their sum, the same for all actors of a step."""
        return self.compute_s + self.wait_s + self.transfer_s + self.dispatch_s + self.idle_s


def shares(timeline: ActorTimeline, transfers: Mapping[int, Transfer], span_s: float) -> Shares:
    """Take one actor's time apart.

    Args:
        transfers: those that it receives, by the receive's instruction.
        span_s: of the step.
    """
    by_instruction = {e.instruction: e for e in timeline.events}
    compute_s = wait_s = transfer_s = dispatch_s = 0.0
    free_s = timeline.begin_s  # since when it computes nothing
    for run in timeline.runs:
        start_s = max(run.start_s, free_s)
        made_s, there_s = _when_there(run, by_instruction, transfers)
        there_s = min(max(there_s, free_s), start_s)
        made_s = min(max(made_s, free_s), there_s)
        wait_s, transfer_s, dispatch_s = (
            wait_s + made_s - free_s,
            transfer_s + there_s - made_s,
            dispatch_s + start_s - there_s,
        )
        free_s = max(run.end_s, start_s)
        compute_s += free_s - start_s
    moved_s = max((e.end_s for e in timeline.events if e.kind in ("send", "recv")), default=free_s)
    transfer_s += max(0.0, moved_s - free_s)
    free_s = max(free_s, moved_s)
    end_s = max(timeline.end_s, free_s)
    dispatch_s += end_s - free_s
    idle_s = span_s - (end_s - timeline.begin_s)
    return Shares(timeline.actor, compute_s, wait_s, transfer_s, dispatch_s, idle_s)


def _when_there(
    run: Event, by_instruction: Mapping[int, Event], transfers: Mapping[int, Transfer]
) -> tuple[float, float]:
    """When the last thing that a task reads was made elsewhere and sent, and when it was here."""
    last = max(
        (by_instruction[i] for i in run.needs if i in by_instruction and by_instruction[i].kind in ("recv", "input")),
        key=lambda e: e.end_s,
        default=None,
    )
    if last is None:
        return float("-inf"), float("-inf")
    sent = transfers.get(last.instruction)
    return (sent.send.start_s if sent is not None else last.end_s), last.end_s
