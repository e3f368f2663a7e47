"""timeline: what every actor did in one step, and when. In: programs and time stamps. Out: `Timeline`.

No jax, and no I/O but `write_trace`. Actors stamp every instruction of every step (`StepStats.stamps`); all that is
here is done for whoever asks, afterwards. `docs/timeline.md` says how to read it.

    recorded   what is known of one actor's part in a step
    aligning   what is known of clocks -> offsets
    events   programs and stamps -> events, transfers
    shares   an actor's events -> where its time went
    bill     all events -> what the step was spent on
    text, trace   for people, for Perfetto
    step     all of it, of one step: `Timeline`
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
