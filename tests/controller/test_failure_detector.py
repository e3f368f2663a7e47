"""Who is suspect, back or dead, by a clock that the test turns."""

from __future__ import annotations

import inspect
import time

import pytest

from jaxpp_async.controller import failure_detector as monitor_module
from jaxpp_async.controller.failure_detector import FailureDetector, Verdict
from jaxpp_async.protocol.actor_info import Position
from jaxpp_async.protocol.clocks import SuspendAwareClock

AT = Position(7, 1, 12, False, True)


def run(script: str, tick_s: float = 0.5) -> list[tuple[float, Verdict]]:
    """What a monitor of actors 0 and 1 says, and when.

    Args:
        script: `"0: 0-4, 6-20"`: actor 0 beats every 0.5 s in these seconds; `"blocked: 5-12"`: this process
            was.
    """
    beats: dict[str, list[tuple[float, float]]] = {}
    for line in script.strip().splitlines():
        who, _, spans = line.partition(":")
        pairs = [span.split("-") for span in spans.split(",")]
        beats[who.strip()] = [(float(a), float(b)) for a, b in pairs]
    blocked = beats.pop("blocked", [])
    end = max(b for spans in beats.values() for _, b in spans)
    clock, monitor = SuspendAwareClock(100.0), FailureDetector()
    for actor in (0, 1):
        monitor.watch(actor, 0.0)
    found: list[tuple[float, Verdict]] = []
    waiting: list[tuple[int, float]] = []  # beats that came while nobody read
    for half in range(1, int(end * 2) + 1):
        t = half / 2
        is_blocked = any(a < t < b for a, b in blocked)
        for actor in (0, 1):
            if any(a <= t <= b for a, b in beats.get(str(actor), [])):
                waiting.append((actor, t))
        if is_blocked:
            continue
        for actor, _ in waiting:
            monitor.record_heartbeat(actor, clock.read(100.0 + t), AT)
        waiting.clear()
        found += [(t, verdict) for verdict in monitor.judge(clock.tick(100.0 + t))]
    return found


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("0: 0-30\n1: 0-30", []),
        ("0: 0-30\n1: 0-5, 7.5-30", []),
        ("0: 0-30\n1: 0-5, 9-30", [(8.0, "suspect 1"), (9.0, "recovered 1")]),
        ("0: 0-30\n1: 0-5", [(8.0, "suspect 1"), (15.0, "dead 1")]),
        ("0: 0-30\n1: 0-5, 16-30", [(8.0, "suspect 1"), (15.0, "dead 1")]),
        ("0: 0-4\n1: 0-30", [(7.0, "suspect 0"), (14.0, "dead 0")]),
        (
            "0: 0-40\n1: 0-5, 9-20, 24-40",
            [(8.0, "suspect 1"), (9.0, "recovered 1"), (23.0, "suspect 1"), (24.0, "recovered 1")],
        ),
        # This process was stopped, or blocked: nobody is to blame, whatever came meanwhile.
        ("0: 0-60\n1: 0-60\nblocked: 5-45", []),
        ("0: 0-5, 45-60\n1: 0-5, 45-60\nblocked: 5-45", []),
        ("0: 0-5, 45.5-60\n1: 0-60\nblocked: 5-45", []),
        ("0: 0-70\n1: 0-70\nblocked: 5-24, 24-43, 43-62", []),
        # Silence from before counts on afterwards; so does one that begins then, and no sooner.
        ("0: 0-60\n1: 0-4\nblocked: 6-46", [(46.0, "suspect 1"), (53.0, "dead 1")]),
        ("0: 0-60\n1: 0-45\nblocked: 5-45", [(48.0, "suspect 1"), (55.0, "dead 1")]),
    ],
)
def test_verdicts(script, said):
    assert [(t, f"{v.health} {v.process}") for t, v in run(script)] == said


def test_verdicts_say_how_long_and_where():
    (_, suspect), (_, recovered) = run("0: 0-20\n1: 0-5, 9-20")
    assert suspect == Verdict(1, "suspect", 3.0, AT) and recovered == Verdict(1, "recovered", 4.0, AT)
    assert run("0: 0-20\n1: 0-5")[-1][1] == Verdict(1, "dead", 10.0, AT)


def test_only_the_watched_are_judged():
    monitor = FailureDetector()
    monitor.record_heartbeat(0, 0.0, AT)
    monitor.watch(1, 0.0)
    monitor.watch(2, 0.0)
    monitor.unwatch(2)
    monitor.unwatch(5)
    assert [v.process for v in monitor.judge(20.0)] == [1] and monitor.watched == ()
    assert monitor.judge(40.0) == [] and monitor.position(1) is None
    monitor.watch(1, 40.0)  # its successor
    assert monitor.judge(41.0) == [] and monitor.watched == (1,)


def test_the_silent():
    monitor = FailureDetector()
    for actor in (0, 1):
        monitor.watch(actor, 0.0)
    monitor.record_heartbeat(0, 4.0, None)
    assert monitor.silent(4.5, 1.5) == {1} and monitor.silent(6.0, 1.5) == {0, 1}


def test_an_awake_clock_counts_no_more_than_it_saw():
    clock = SuspendAwareClock(10.0)
    assert clock.tick(10.5) == 0.5 and clock.read(10.8) == pytest.approx(0.8)
    assert clock.read(60.0) == 1.5  # before the late tick, too
    assert clock.tick(60.0) == 1.5 and clock.tick(60.5) == 2.0


def test_wall_clocks_are_not_read(monkeypatch):
    """Case 21: the modules that judge read no wall clock, so moving it does nothing."""
    from jaxpp_async.actors import heartbeat
    from jaxpp_async.controller import health_monitor, stall_detector
    from jaxpp_async.launch import process_supervisor
    from jaxpp_async.protocol import parent_watch

    for module in (
        monitor_module,
        stall_detector,
        stall_detector,
        health_monitor,
        heartbeat,
        parent_watch,
        process_supervisor,
    ):
        source = inspect.getsource(module)
        assert not any(name in source for name in ("time.time(", "datetime", "localtime", "loop.time(")), (
            module
        )
    monkeypatch.setattr(time, "time", lambda: pytest.fail("a wall clock was read"))
    assert run("0: 0-20\n1: 0-20") == []
