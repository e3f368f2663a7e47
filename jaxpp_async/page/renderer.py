"""Decide when which part of the page is written again, so that the page costs next to nothing.

Each part is written at most once in `LEAST_S`, and so seldom that writing it takes its `MOST_SHARE` of the
time. A part that is expensive, such as the drawing of a step of a hundred thousand tasks, is written less
often than the others. Nothing is written while nobody looks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

from jaxpp_async.page.answers import LastStep
from jaxpp_async.page.run_state import RunState, StepCurves
from jaxpp_async.page.sections import write_curves, write_run, write_step
from jaxpp_async.timeline import Timeline
from jaxpp_async.view.history import History

Part: TypeAlias = Literal["run", "curves", "step"]
"""The parts of the page: the state of the run, values over its steps, and its last step."""

PARTS: tuple[Part, ...] = get_args(Part)

LEAST_S = 2.0
"""The seconds between two times at which a part is written, at least."""

MOST_SHARE: Mapping[Part, float] = MappingProxyType({"run": 0.0005, "curves": 0.0005, "step": 0.001})
"""The share of the time of one core that writing each part may take, for each pair of actors."""

MOST_PAIRS = 8
"""The most pairs of actors that count for `MOST_SHARE`."""


@dataclass(frozen=True)
class Snapshot:
    """All that the page shows, at one moment; nothing in it changes any more.

    Args:
        run: the state of the run.
        steps: the history of each step function; empty if curves are not due.
        logged: the history of the names that the user logs, by name; empty if curves are not due.
        make_timeline: a function that returns the timeline of the last step; None if none has ended.
        step_key: what changes with the last step.
    """

    run: RunState
    steps: tuple[StepCurves, ...] = ()
    logged: Mapping[str, History] = field(default_factory=dict)
    make_timeline: Callable[[], Timeline] | None = None
    step_key: object = None


class Renderer:
    """The sections of a page as they were written last, with the number of the state that changed each.

    One thread at a time may use a renderer.

    Attributes:
        seen: the number of the latest state.
        sections: the HTML of each section, by its id.
        run: the run of the latest state; None before anything is written.
    """

    def __init__(self) -> None:
        self.seen = 0
        self.sections: dict[str, str] = {}
        self.run: RunState | None = None
        self._changed: dict[str, int] = {}
        self._due_s: dict[Part, float] = dict.fromkeys(PARTS, -math.inf)
        self._step_key: object = None

    def due(self, now_s: float) -> frozenset[Part]:
        """Return the parts that are to be written at this time.

        Args:
            now_s: the time, in `time.monotonic()`.
        """
        return frozenset(part for part, due_s in self._due_s.items() if now_s >= due_s)

    def due_in(self, now_s: float) -> float:
        """Return the seconds until a part is to be written; 0 if one is."""
        return max(0.0, min(self._due_s.values()) - now_s)

    def write(self, snapshot: Snapshot, parts: frozenset[Part], now_s: float) -> None:
        """Write parts of the page again.

        Args:
            snapshot: what to show.
            parts: the parts.
            now_s: the time of the snapshot, in `time.monotonic()`.
        """
        self.seen += 1
        self.run = snapshot.run
        for part in PARTS:
            if part not in parts:
                continue
            begun_s = time.thread_time()
            for name, html in self._write_part(part, snapshot).items():
                if self.sections.get(name) != html:
                    self.sections[name], self._changed[name] = html, self.seen
            cost_s = time.thread_time() - begun_s
            share = MOST_SHARE[part] * min(MOST_PAIRS, max(1.0, len(snapshot.run.mesh.actors) / 2))
            self._due_s[part] = now_s + max(LEAST_S, cost_s / share)

    def _write_part(self, part: Part, snapshot: Snapshot) -> dict[str, str]:
        if part == "run":
            return write_run(snapshot.run)
        if part == "curves":
            return write_curves(snapshot.run, snapshot.steps, snapshot.logged)
        if self.sections.get("grid") and snapshot.step_key == self._step_key:
            return {}
        self._step_key = snapshot.step_key
        make = snapshot.make_timeline
        return write_step(snapshot.run, None if make is None else LastStep(make()))

    def changed_since(self, seen: int) -> dict[str, str]:
        """Return the sections that have changed after a state.

        Args:
            seen: the number of the state; 0 for all sections.
        """
        return {name: html for name, html in self.sections.items() if self._changed[name] > seen}
