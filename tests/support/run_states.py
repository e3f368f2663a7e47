"""Runs in all states, for tests of the page."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from jaxpp_async.base.events import Event
from jaxpp_async.page.run_state import ActorMemoryUse, EndedStep, MeshNow, RunRecord, RunState
from jaxpp_async.protocol.actor_info import ActorInfo, ActorState

BEGUN_S = 1000.0


@dataclass
class Stats:
    """The statistics of one actor for one step."""

    compute_s: float = 0.75
    total_s: float = 1.0
    peak_bytes: int = 4096


def event(kind: str, time_s: float, text: str = "", actor: int | None = None, **details: Any) -> Event:
    """Return an event at a time since the start of the run."""
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    return Event(kind, actor, None, text or kind, BEGUN_S + time_s, at, MappingProxyType(details))  # type: ignore[arg-type]


def step(number: int, sent_s: float, ended_s: float, name: str = "train", num_actors: int = 2) -> EndedStep:
    """Return a step that was sent and ended at times since the start of the run."""
    stats = {
        actor: Stats(total_s=ended_s - sent_s, compute_s=0.75 * (ended_s - sent_s))
        for actor in range(num_actors)
    }
    return EndedStep(number, name, BEGUN_S + sent_s, BEGUN_S + ended_s, stats, 1_000_000)


def actors(num: int = 2, state: ActorState = "ready") -> tuple[ActorInfo, ...]:
    """Return some actors of two hosts."""
    return tuple(ActorInfo(k, f"node{k % 2}", 100 + k, (f"cpu:{k}",), state) for k in range(num))


def new_record() -> RunRecord:
    """Return the record of a run that has just begun."""
    return RunRecord(BEGUN_S, "2026-01-02 03:04:05 UTC")


def trained_record(num_steps: int = 4) -> RunRecord:
    """Return the record of a run with some steps of a second, each a tenth of a second behind the other."""
    record = new_record()
    record.on_event(event("started", 1.0, "actor 0 is ready", 0))
    record.on_started(BEGUN_S + 2.0)
    record.on_event(event("compiled", 4.0, "compiled train in 2.0 s: 16 tasks", seconds=2.0))
    for number in range(num_steps):
        end_s = 4.0 + 1.1 * (number + 1)
        record.on_step_end(step(number, end_s - 1.0, end_s))
    return record


def state_of(record: RunRecord, at_s: float = 10.0, **now: Any) -> RunState:
    """Return the state of a run at a time since its start."""
    defaults: dict[str, Any] = {
        "actors": actors(),
        "memory": {k: ActorMemoryUse(0, 6_000_000 + k, 2_000_000, 16_000_000) for k in range(2)},
        "logged": {"lr": (3, 0.1), "loss": (3, 2.5)},
    }
    return record.state(MeshNow("2 actors", BEGUN_S + at_s, **(defaults | now)))
