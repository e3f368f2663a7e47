"""A measured step of two tasks on two actors, for tests of what is done with timelines."""

from __future__ import annotations

from jaxpp_async.timeline.events import ActorTimeline, TimelineEvent, TimelineTransfer
from jaxpp_async.timeline.timeline import Timeline

SENT = TimelineEvent(0, 1, "send", "fwd(stage 0, mb 3)", 12, 13, 8, peer=1, tag=0, needs=(0,))
CAME = TimelineEvent(1, 0, "recv", "fwd(stage 0, mb 3)", 10, 15, 8, peer=0, tag=0, held_bytes=8)
FIRST = ActorTimeline(0, (TimelineEvent(0, 0, "run", "fwd(stage 0, mb 3)", 10, 12, held_bytes=16), SENT))
SECOND = ActorTimeline(
    1, (CAME, TimelineEvent(1, 1, "run", "bwd(stage 1, mb 3)", 16, 20, needs=(0,), held_bytes=24))
)
STEP = Timeline(4, "train", 0.0, 21.0, (FIRST, SECOND), (TimelineTransfer(SENT, CAME),))
