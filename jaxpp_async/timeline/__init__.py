"""Show what every actor did in one step, and when, and what the step's time was spent on.

Actors record the time of every instruction of every step (`StepStats.stamps`). Everything in this package is
computed afterwards, when a user asks for it. `docs/timeline.md` explains how to read the results.

    events            turns programs and time stamps into events and transfers
    clock_alignment   finds how far each actor's clock is ahead of the controller's
    event_graph       computes when events happen that wait for each other
    breakdown         finds where each actor's time went, and what the whole step was spent on
    imbalance         says why one actor computes more than the others
    advice            says what would make a step shorter
    drawing           draws a step
    trace             writes steps to a file for Perfetto, and reads them
    timeline          combines all this for one step: `Timeline`, and prints it as tables
"""

import warnings
from typing import Any

from jaxpp_async.timeline.breakdown import StepBreakdown, TimeShares
from jaxpp_async.timeline.drawing import draw_timeline
from jaxpp_async.timeline.events import ActorTimeline, Recorded, TimelineEvent, TimelineTransfer
from jaxpp_async.timeline.timeline import Timeline, load_timelines, make_timeline, no_cut
from jaxpp_async.timeline.trace import chrome_trace, write_trace

__all__ = (
    "ActorTimeline",
    "Recorded",
    "StepBreakdown",
    "TimeShares",
    "Timeline",
    "TimelineEvent",
    "TimelineTransfer",
    "chrome_trace",
    "draw_timeline",
    "load_timelines",
    "make_timeline",
    "no_cut",
    "write_trace",
)

_OLD_NAMES = {
    "Bill": "StepBreakdown",
    "Event": "TimelineEvent",
    "Shares": "TimeShares",
    "Transfer": "TimelineTransfer",
}
"""Names of earlier releases. Each works for one release, with a warning."""


def __getattr__(name: str) -> Any:
    if name not in _OLD_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = _OLD_NAMES[name]
    warnings.warn(f"{__name__}.{name} is now called {new}", DeprecationWarning, stacklevel=2)
    return globals()[new]
