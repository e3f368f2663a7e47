"""Say what every actor did in one step, and when, and what the step's time was spent on.

Actors stamp every instruction of every step (`StepStats.stamps`); everything here is computed afterwards, for
whoever asks. `docs/timeline.md` says how to read it.

    events            programs and stamps as events and transfers
    clock_alignment   by how much each actor's clock is ahead of the controller's
    breakdown         where an actor's time went, and what the step was spent on
    timeline          all of it, of one step: `Timeline`, as tables and as a trace for Perfetto
"""

from jaxpp_async.timeline.breakdown import StepBreakdown, TimeShares
from jaxpp_async.timeline.events import ActorTimeline, Recorded, TimelineEvent, TimelineTransfer
from jaxpp_async.timeline.timeline import Timeline, chrome_trace, make_timeline, write_trace

__all__ = (
    "ActorTimeline",
    "Recorded",
    "StepBreakdown",
    "TimeShares",
    "Timeline",
    "TimelineEvent",
    "TimelineTransfer",
    "chrome_trace",
    "make_timeline",
    "write_trace",
)
