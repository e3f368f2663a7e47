"""Steps made by hand, of which a test knows how long each task takes."""

from __future__ import annotations

from jaxpp_async.timeline.events import ActorTimeline, TimelineEvent
from jaxpp_async.timeline.timeline import Timeline


def run(actor, instruction, label, start_s, end_s, *needs) -> TimelineEvent:
    return TimelineEvent(actor, instruction, "run", label, start_s, end_s, needs=needs)


def step(*actors, transfers=(), duration_s=None) -> Timeline:
    timelines = tuple(ActorTimeline(a, tuple(events)) for a, events in enumerate(actors))
    end_s = max(a.end_s for a in timelines)
    return Timeline(0, "train", 0.0, duration_s or end_s, timelines, tuple(transfers))
