"""A step of two actors with times that are easy to work with, as a timeline."""

from __future__ import annotations

from jaxpp_async.program.work import TaskWork
from jaxpp_async.timeline import ActorTimeline, Timeline, TimelineEvent, TimelineTransfer

WORKS = (TaskWork("small", 10.0, 1.0), TaskWork("large", 20.0, 2.0))


def event(actor, instruction, kind, start_s, end_s, *needs, executable=None, size=0, peer=None, label=""):
    return TimelineEvent(
        actor, instruction, kind, label, start_s, end_s, size, peer, None, needs, executable=executable
    )


def timeline(*actors: ActorTimeline, transfers=(), works=WORKS, duration_s=20.0) -> Timeline:
    return Timeline(3, "train", 0.0, duration_s, actors, tuple(transfers), count_works=lambda: works)


SENT = event(0, 2, "send", 4.25, 6, 1, size=100, peer=1)
CAME = event(1, 0, "recv", 1.5, 6, size=100, peer=0)
FIRST = (
    event(0, 0, "input", 1, 1.5, label="arg 4"),
    event(0, 1, "run", 2, 4, 0, executable=0),
    SENT,
    event(0, 3, "run", 4.5, 5, executable=0),
)
SECOND = (
    CAME,
    event(1, 1, "run", 6.25, 10, 0, executable=1),
    event(1, 2, "run", 10.125, 12, 0, 1, executable=1),
)
STEP = timeline(
    ActorTimeline(0, FIRST, host="a", pid=1),
    ActorTimeline(1, SECOND, host="a", pid=2),
    transfers=[TimelineTransfer(SENT, CAME)],
)
