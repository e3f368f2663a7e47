"""Timelines: stamps to events and transfers, where time went, a step's breakdown, clocks of other hosts, the
trace, and what real steps say. The tests without a mesh use programs of a few lines, with stamps that add up
by hand."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
import signal
import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from docs_code import doc_code
from models import grads_step, mlp
from program_text import parse_program

import jaxpp_async as jpp
from jaxpp_async.errors import ActorDiedError, MeshClosedError, MeshError, StepAbortedError
from jaxpp_async.program.actor_program import ActorProgram, format_program
from jaxpp_async.program.instructions import Recv, Run, Send
from jaxpp_async.protocol.clocks import Clocks
from jaxpp_async.timeline import Recorded, Timeline, chrome_trace, make_timeline, write_trace
from jaxpp_async.timeline.clock_alignment import align_clocks
from jaxpp_async.timeline.events import read_stamps, transfer_labels

NAN = math.nan
NO = (NAN, NAN)

STAGE_0 = """\
actor 0: 5 slots
input  b0 = arg 0 f32[4]
run    "fwd(stage 0, mb 0)" exe 0 (b0) -> (b1 f32[4])
send   b1 to 1 tag 0
delete b1
run    "fwd(stage 0, mb 1)" exe 0 (b0) -> (b2 f32[4])
send   b2 to 1 tag 1
recv   b3 from 1 tag 2 f32[8]
run    "bwd(stage 0, mb 0)" exe 1 (b3) -> (b4 f32[4])
output b4 = result 0
"""
STAGE_1 = """\
actor 1: 4 slots
recv   b0 from 0 tag 0 f32[4]
recv   b1 from 0 tag 1 f32[4]
run    "fwd_bwd(stage 1, mb 0)" exe 2 (b0) -> (b2 f32[8])
send   b2 to 0 tag 2
run    "fwd_bwd(stage 1, mb 1)" exe 2 (b1) -> (b3 f32[8])
output b3 = result 1
"""
PROGRAMS = [parse_program(STAGE_0), parse_program(STAGE_1)]

# In seconds since the step was sent, at 100 on the controller's clock. Actor 0 takes it up at 1, actor 1 at
# 2.
STAMPS: list[list[tuple[float, float]]] = [
    [(1, 1), (2, 4), (4, 5), NO, (4, 6), (7, 8), (1, 16), (17, 20), (20, 20)],
    [(2, 5), (2, 9), (5, 9), (9, 15), (10, 14), (14, NAN)],
]


def packed(stamps: Sequence[tuple[float, float]], shift: float) -> bytes:
    return b"".join(struct.pack("<dd", a + shift, b + shift) for a, b in stamps)


def made(
    programs: Sequence[ActorProgram] = PROGRAMS,
    stamps: Sequence[Sequence[tuple[float, float]]] = STAMPS,
    *,
    origin: float = 100.0,
    ahead: Sequence[float] = (0.0, 0.0),
    record_heartbeat: float = 22.0,
    **known: Any,
) -> Timeline:
    """The timeline of a step of `heard` seconds; clock k is ahead by `ahead[k]`."""
    recorded = {
        p.actor: Recorded(
            p, packed(s, origin + ahead[k]), origin + record_heartbeat, **{"offset_s": ahead[k], **known}
        )
        for k, (p, s) in enumerate(zip(programs, stamps, strict=True))
    }
    return make_timeline(7, "train_step", origin, recorded)


# ---------------------------------------------------------------- events


def test_every_stamped_instruction_is_an_event_in_program_order():
    timeline = made()
    assert (timeline.step, timeline.name, timeline.duration_s) == (7, "train_step", 22.0)
    said = [
        (e.instruction, e.kind, e.label, e.start_s, e.end_s, e.size_bytes, e.peer, e.tag)
        for e in a0(timeline)
    ]
    assert said == [
        (0, "input", "arg 0", 1, 1, 16, None, None),
        (1, "run", "fwd(stage 0, mb 0)", 2, 4, 0, None, None),
        (2, "send", "fwd(stage 0, mb 0)", 4, 5, 16, 1, 0),
        (4, "run", "fwd(stage 0, mb 1)", 4, 6, 0, None, None),
        (5, "send", "fwd(stage 0, mb 1)", 7, 8, 16, 1, 1),
        (6, "recv", "fwd_bwd(stage 1, mb 0)", 1, 16, 32, 1, 2),
        (7, "run", "bwd(stage 0, mb 0)", 17, 20, 0, None, None),
        (8, "output", "result 0", 20, 20, 16, None, None),
    ]
    assert [e.needs for e in a0(timeline)] == [(), (0,), (1,), (0,), (4,), (), (6,), (7,)]
    assert timeline.actors[1].events[-1].duration_s == 0  # one stamp of two is a moment
    assert [e.start_s for e in timeline.events] == sorted(e.start_s for e in timeline.events)


def a0(timeline: Timeline):
    return timeline.actors[0].events


def test_transfers_pair_a_send_with_its_receive():
    found = [
        (t.send.actor, t.receive.actor, t.send.tag, t.send.start_s, t.receive.end_s) for t in made().transfers
    ]
    assert found == [(0, 1, 0, 4, 5), (0, 1, 1, 7, 9), (1, 0, 2, 9, 16)]
    assert [t.duration_s for t in made().transfers] == [1, 2, 7]


def test_what_is_passed_on_is_called_after_what_made_it():
    programs = [
        parse_program("actor 0: 2 slots\ninput  b0 = arg 5 f32[2]\nsend   b0 to 1 tag 0\n"
                      'run    "f" exe 0 () -> (b1 f32[2])\nsend   b1 to 1 tag 1\n'),
        parse_program("actor 1: 2 slots\nrecv   b0 from 0 tag 0 f32[2]\nrecv   b1 from 0 tag 1 f32[2]\n"
                      "send   b0 to 2 tag 0\nsend   b1 to 2 tag 1\n"),
        parse_program("actor 2: 2 slots\nrecv   b0 from 1 tag 0 f32[2]\nrecv   b1 from 1 tag 1 f32[2]\n"),
    ]  # fmt: skip
    assert transfer_labels(programs) == {
        (0, 1, 0): "arg 5",
        (0, 1, 1): "f",
        (1, 2, 0): "arg 5",
        (1, 2, 1): "f",
    }


def test_stamps_of_another_program_are_refused():
    with pytest.raises(ValueError, match="8 pairs of stamps for 9 instructions"):
        made(stamps=[STAMPS[0][1:], STAMPS[1]])


# ---------------------------------------------------------------- where time went


def test_shares_say_what_each_actor_did():
    """Actor 0, from 1 on: 1-2 dispatch, 2-6 fwd, then nothing until its gradient, which is sent at 9 and
    there at 16, 17-20 bwd. Actor 1, from 2 on: the first activation is sent at 4 and there at 5, ..."""
    zero, one = made().shares
    assert (zero.compute_s, zero.wait_s, zero.transfer_s, zero.dispatch_s, zero.idle_s) == (7, 3, 7, 2, 0)
    assert (one.compute_s, one.wait_s, one.transfer_s, one.dispatch_s, one.idle_s) == (8, 2, 2, 1, 6)
    assert zero.duration_s == one.duration_s == 19


def test_the_breakdown_says_why_a_step_took_as_long_as_it_did():
    """Alone on the critical path, without anything in the way: fwd 2, fwd_bwd 4, bwd 3."""
    breakdown = made().bill
    assert breakdown.compute_s == (7 + 8) / 2
    assert breakdown.bound_s == 10  # fwd 2, fwd_bwd 4, fwd_bwd 4: longer than fwd, fwd_bwd, bwd
    assert breakdown.imbalance_s == 8 - 7.5
    assert breakdown.schedule_s == 10 - 8
    # fwd until 2, there at 3, fwd_bwd until 7, there at 14, bwd until 17
    assert breakdown.transfer_s == 17 - 10
    assert breakdown.queue_s == 1 and breakdown.reply_s == 2
    assert breakdown.total_s == 22 and breakdown.span_s == 19
    assert breakdown.efficiency == 10 / 19


def test_stages_that_are_not_alike_cost_imbalance_and_late_actors_cost_their_start():
    programs = [
        parse_program(f'actor {a}: 2 slots\nrun    "fwd(stage {a}, mb 0)" exe 0 () -> (b0 f32[1])\n'
                      f'run    "fwd(stage {a}, mb 1)" exe 0 () -> (b1 f32[1])\n')
        for a in (0, 1)
    ]  # fmt: skip
    breakdown = made(programs, [[(0, 3), (3, 6)], [(0, 1), (1, 2)]], record_heartbeat=6.0).bill
    assert (breakdown.compute_s, breakdown.imbalance_s, breakdown.schedule_s) == (4, 2, 0)
    assert (breakdown.queue_s, breakdown.transfer_s, breakdown.start_s) == (0, 0, 0)
    assert (breakdown.dispatch_s, breakdown.reply_s) == (0, 0)
    late = made(programs, [[(0, 3), (4, 7)], [(7, 8), (8, 9)]], record_heartbeat=9.0).bill
    assert (late.start_s, late.dispatch_s) == (3, 0)  # actor 1 began when all could have been over


def test_a_step_that_is_not_one():
    circle = [
        parse_program("actor 0: 2 slots\nrecv   b0 from 1 tag 0 f32[1]\n"
                      'run    "f" exe 0 (b0) -> (b1 f32[1])\nsend   b1 to 1 tag 0\n'),
        parse_program("actor 1: 2 slots\nrecv   b0 from 0 tag 0 f32[1]\n"
                      'run    "g" exe 0 (b0) -> (b1 f32[1])\nsend   b1 to 0 tag 0\n'),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="in a circle"):
        _ = made(circle, [[(0, 1), (1, 2), (2, 3)]] * 2).bill
    nothing = make_timeline(0, "empty", 5.0, {})
    assert nothing.bill.total_s == 0 and nothing.events == () and "0 actors" in str(nothing)


def test_a_timeline_is_one_short_line_where_python_shows_it():
    for shown in (made(), made().actors[0]):
        assert "\n" not in repr(shown) and len(repr(shown)) < 150
    assert "step 7 of 'train_step': 22.00 s on 2 actors" in repr(made())


def test_a_timeline_prints():
    text = str(made())
    assert text.startswith("step 7 of 'train_step': 22.00 s on 2 actors\n")
    for line in (
        "of 19.00 s  computing",
        "actor 0           37%      16%",
        "53% of what the schedule allows: 10.00 s (compute, imbalance, schedule) at best, 19.00 s taken",
        "fwd_bwd(stage 1)     2  4.00 s",
        "schedule      2.00 s     9%",
    ):
        assert line in text, text
    assert made().task_times["fwd(stage 0)"] == (2, 2) and made().median_s("bwd(stage 0)") == 3


def test_a_timeline_prints_the_same_text_in_a_notebook(monkeypatch):
    outside = str(made())
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)  # rich would display tables by itself there
    assert str(made()) == outside
    with pytest.raises(KeyError, match="no task 'bwd', but fwd"):
        made().median_s("bwd")


# ---------------------------------------------------------------- clocks


@pytest.mark.parametrize(
    ("offset_s", "error_s", "off", "within"),
    [
        (50.0, 0.0, 0.0, 0.0),  # a clock that is shared is believed
        (50.25, 0.5, 0.25, 0.5),  # an estimate within the step's own bounds is believed
        (52.0, 2.0, 0.5, 0.5),  # one that reaches beyond them is cut: it was taken up after it was sent, ...
        (0.0, None, 0.0, 1.0),  # without one there are these bounds, and data is sent before it is there
        (80.0, 0.5, 0.0, 1.0),  # one that contradicts them is wrong
    ],
)
def test_the_step_bounds_what_a_clock_may_be_off(offset_s, error_s, off, within):
    """Actor 0's clock is ahead by 50; its stamps are from 1 to 20 of a step of 22 s."""
    recorded = {
        0: Recorded(PROGRAMS[0], packed(STAMPS[0], 150.0), 122.0, offset_s, error_s, "far", 9),
        1: Recorded(PROGRAMS[1], packed(STAMPS[1], 100.0), 122.0),
    }
    timeline = make_timeline(7, "s", 100.0, recorded)
    zero = timeline.actors[0]
    assert zero.begin_s == 1 - off and zero.clock_error_s == within
    assert zero.begin_s >= 0 and zero.end_s <= timeline.duration_s
    assert timeline.clock_error_s == within
    assert ("clocks within" in str(timeline)) == (within > 0)


BOTH_WAYS = [
    parse_program(f"actor {a}: 2 slots\ninput  b0 = arg 0 f32[1]\nsend   b0 to {1 - a} tag {a}\n"
                  f"recv   b1 from {1 - a} tag {1 - a} f32[1]\n")
    for a in (0, 1)
]  # fmt: skip


@pytest.mark.parametrize(
    ("stamps", "expected"),
    [
        # Sent at 3 and 5, there at 4 and 6, by clocks that agree; with ways of no time they could be 1 apart
        # each way.
        ([[(3, 3), (3, 4), (2, 6)], [(3, 3), (5, 6), (2, 4)]], (0.0, 1.0)),
        # Clock 1 is 2 ahead: its data seems to have left at 7 and been there at 6, which cannot be.
        ([[(3, 3), (3, 4), (2, 6)], [(5, 5), (7, 8), (4, 6)]], (2.0, 1.0)),
        # Data one way only: 1 is ahead by 4 - 3 at most, and behind as the step allows.
        ([[(3, 3), (3, 4), (2, NAN)], [(3, 3), (NAN, NAN), (2, 4)]], None),
    ],
    ids=["agree", "ahead", "one way"],
)
def test_transfers_bound_two_clocks_against_each_other(stamps, expected):
    """The controller knows next to nothing: the step was sent at 0 and heard of at 12."""
    timeline = made(BOTH_WAYS, stamps, record_heartbeat=12.0, ahead=(0.0, 0.0), error_s=None, offset_s=0.0)
    zero, one = timeline.actors
    apart = (stamps[1][0][0] - one.events[0].start_s) - (stamps[0][0][0] - zero.events[0].start_s)
    for t in timeline.transfers:
        assert t.receive.end_s >= t.send.start_s - 1e-9
    if expected is not None:
        assert (
            apart == pytest.approx(expected[0], abs=expected[1])
            and timeline.clock_error_s <= 2 * expected[1] + 1e-9
        )
    assert 0 < timeline.clock_error_s <= min(zero.clock_error_s + one.clock_error_s, 12.0)
    check_trace(timeline.to_chrome_trace())


def test_what_transfers_say_must_agree_with_the_step():
    """Data that is there before it was sent by clocks that are known: transfers are then not asked, arrows
    left out."""
    stamps = [[(3, 3), (8, 9), (2, 2)], [(3, 3), (5, 6), (2, 4)]]
    timeline = made(BOTH_WAYS, stamps, record_heartbeat=12.0, offset_s=0.0, error_s=1e-3)
    assert timeline.actors[0].events[0].start_s == pytest.approx(3)
    assert sum(t.duration_s < 0 for t in timeline.transfers) == 2
    trace = timeline.to_chrome_trace()
    check_trace(trace)
    assert not [e for e in trace["traceEvents"] if e["ph"] in "sf"]


@pytest.mark.parametrize("seed", range(20))
def test_true_clocks_are_within_what_alignment_says(seed):
    """Five clocks, bounds and leads that hold of them: the offsets keep to all, and errors cover what is
    true."""
    rng = random.Random(seed)
    true = {a: rng.uniform(-50, 50) for a in range(5)}
    bounds = {a: (t - rng.uniform(0, 3), t + rng.uniform(0, 3)) for a, t in true.items()}
    pairs = [(a, b) for a in true for b in true if a != b and rng.random() < 0.6]
    leads = {(a, b): true[b] - true[a] + rng.expovariate(5) for a, b in pairs}
    aligned = align_clocks(bounds, leads)
    assert aligned is not None
    for a, (low, high) in bounds.items():
        assert low - 1e-9 <= aligned.offset_s[a] <= high + 1e-9
        assert abs(aligned.offset_s[a] - true[a]) <= aligned.error_s[a] + 1e-9
    for (a, b), lead in leads.items():
        assert aligned.offset_s[b] - aligned.offset_s[a] <= lead + 1e-9
    wrong = [aligned.offset_s[b] - aligned.offset_s[a] - (true[b] - true[a]) for a in true for b in true]
    assert max(wrong) <= aligned.pair_error_s + 1e-9
    assert align_clocks(bounds, {**leads, (0, 1): -200.0}) is None


# ---------------------------------------------------------------- the trace


NEEDED = {
    "M": {"ph", "pid", "name", "args"},
    "X": {"ph", "pid", "tid", "name", "cat", "ts", "dur", "args"},
    "s": {"ph", "pid", "tid", "name", "cat", "ts", "id"},
    "f": {"ph", "pid", "tid", "name", "cat", "ts", "id", "bp"},
}
"""The fields of each phase, as "Trace Event Format" has them; threads' names say which thread besides."""


def check_trace(trace: dict[str, Any]) -> None:
    """What a viewer needs: whole events, names for all tracks, slices that do not overlap on one, arrows
    inside."""
    trace = json.loads(json.dumps(trace, allow_nan=False))
    assert (
        set(trace) - {"jaxpp_async"} == {"traceEvents", "displayTimeUnit"}
        and trace["displayTimeUnit"] == "ms"
    )
    events = trace["traceEvents"]
    for e in events:
        is_threads = e["ph"] == "M" and e["name"].startswith("thread_")
        assert set(e) == NEEDED[e["ph"]] | ({"tid"} if is_threads else set()), e
        assert all(type(e[k]) is int and e[k] > 0 for k in ("pid", "tid", "id") if k in e), e
        assert all(type(e[k]) in (int, float) and e[k] >= 0 for k in ("ts", "dur") if k in e), e
        assert all(type(e[k]) is str and e[k] for k in ("name", "cat") if k in e), e
    _check_names(
        [e for e in events if e["ph"] == "M"], {e["pid"] for e in events}, {e.get("tid") for e in events}
    )
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    slices = {(e["pid"], e["tid"], e["ts"]): e for e in events if e["ph"] == "X"}
    ends: dict[int, dict[str, dict]] = defaultdict(dict)
    for e in events:
        if e["ph"] == "X":
            assert e["dur"] > 0, "a slice of no length holds no arrow"
            tracks[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
        elif e["ph"] in "sf":
            assert e["ph"] not in ends[e["id"]], "an arrow has one start and one end"
            ends[e["id"]][e["ph"]] = e
    for track in tracks.values():
        track.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(track))
    for arrow in ends.values():
        assert set(arrow) == {"s", "f"} and arrow["s"]["ts"] <= arrow["f"]["ts"] and arrow["f"]["bp"] == "e"
        assert all(arrow["s"][k] == arrow["f"][k] for k in ("name", "cat")), (
            "viewers pair by both, and the id"
        )
        send, receive = (_slice_around(arrow[end], tracks, slices) for end in "sf")
        assert (send["cat"], receive["cat"]) == ("sends", "receives"), (
            "from a track of the sender to the receiver's"
        )
        assert send["args"]["tag"] == receive["args"]["tag"], arrow
        assert (send["args"]["to_actor"], receive["args"]["from_actor"]) == (
            receive["pid"] - 2,
            send["pid"] - 2,
        )


def _slice_around(end: dict, tracks: dict[tuple[int, int], list[tuple[float, float]]], slices: dict) -> dict:
    """The one slice that a viewer binds an arrow's end to: of its thread, at its time."""
    (begin,) = [a for a, b in tracks[end["pid"], end["tid"]] if a <= end["ts"] < b]
    return slices[end["pid"], end["tid"], begin]


def _check_names(named: list[dict[str, Any]], pids: set[int], tids: set[int | None]) -> None:
    """Each process and thread has one name and one place, and each thread one process; no number is that of
    both."""
    for what, numbers in (("process", pids), ("thread", tids - {None})):
        for field in (f"{what}_name", f"{what}_sort_index"):
            found = [e["pid" if what == "process" else "tid"] for e in named if e["name"] == field]
            assert sorted(found) == sorted(numbers), field
    assert not pids & tids


def test_a_trace_has_a_track_an_actor_and_arrows_for_transfers():
    trace = made().to_chrome_trace()
    check_trace(trace)
    events = trace["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {1: "controller", 2: "actor 0", 3: "actor 1"}
    threads = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert threads == {
        (1, "steps"),
        *((pid, kind) for pid in (2, 3) for kind in ("tasks", "sends", "receives")),
    }
    slices = {(e["pid"], e["cat"], e["name"]): e for e in events if e["ph"] == "X"}
    run = slices[2, "tasks", "fwd(stage 0, mb 1)"]
    assert (run["ts"], run["dur"], run["args"]) == (
        4e6,
        2e6,
        {"step": 7, "instruction": 4, "text": a0(made())[3].text},
    )
    sent, received = slices[2, "sends", "fwd(stage 0, mb 1)"], slices[3, "receives", "fwd(stage 0, mb 1)"]
    assert (sent["ts"], sent["args"]["bytes"], sent["args"]["to_actor"]) == (7e6, 16, 1)
    assert (received["ts"], received["dur"], received["args"]["from_actor"]) == (7e6, 2e6, 0)
    assert sum(e["ph"] == "s" for e in events) == 3
    assert slices[1, "steps", "step 7"]["dur"] == 22e6


def test_a_slice_shows_its_line_of_the_program():
    slices = [e for e in made().to_chrome_trace()["traceEvents"] if e["ph"] == "X" and e["cat"] != "steps"]
    lines = {actor: format_program(program).splitlines()[1:] for actor, program in enumerate(PROGRAMS)}
    for drawn in slices:
        args = drawn["args"]
        assert args["text"] == lines[drawn["pid"] - 2][args["instruction"]]


def test_an_actor_that_was_replaced_keeps_its_track():
    """Two steps before a restart and one after: the track says which processes it shows."""
    before, after = made(host="far", pid=7), made(origin=160.0, host="far", pid=9)
    trace = chrome_trace([before, made(origin=130.0, host="far", pid=7), after])
    check_trace(trace)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["controller", *(f"actor {a} (far, pid 7, then far, pid 9)" for a in (0, 1))]


def test_a_trace_of_nothing():
    check_trace(chrome_trace([]))
    check_trace(make_timeline(0, "empty", 5.0, {}).to_chrome_trace())


def test_slices_that_overlap_get_threads_of_their_own():
    """Three receives at once, and two steps under way at once."""
    receives = "".join(f"recv   b{k} from 0 tag {k} f32[1]\n" for k in range(3))
    sends = "".join(f"send   b0 to 1 tag {k}\n" for k in range(3))
    programs = [
        parse_program(f'actor 0: 1 slots\nrun    "f" exe 0 () -> (b0 f32[1])\n{sends}'),
        parse_program(f"actor 1: 3 slots\n{receives}"),
    ]
    stamps = [[(0, 1), (1, 9), (1, 8), (1, 1)], [(0, 9), (0, 8), (0, 1)]]
    one, other = made(programs, stamps), made(programs, stamps, origin=105.0)
    trace = chrome_trace([other, one])
    check_trace(trace)
    steps = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 1]
    assert [e["ts"] for e in steps] == [0, 5e6] and steps[0]["tid"] != steps[1]["tid"]
    assert len({e["id"] for e in trace["traceEvents"] if e["ph"] == "s"}) == 6


def test_a_trace_is_a_file(tmp_path):
    made().write(tmp_path / "one.json")
    write_trace(tmp_path / "two.json", [made(), made(origin=130.0)])
    written = json.loads((tmp_path / "one.json").read_text())
    assert {name: written[name] for name in made().to_chrome_trace()} == made().to_chrome_trace()
    check_trace(json.loads((tmp_path / "two.json").read_text()))


# ---------------------------------------------------------------- real steps


def check_real(timeline: Timeline, programs: Sequence[ActorProgram]) -> None:
    """What holds for any step, whatever it took."""
    by_actor = {p.actor: p for p in programs if p.instructions}
    assert [a.actor for a in timeline.actors] == sorted(by_actor)
    for actor in timeline.actors:
        instructions = by_actor[actor.actor].instructions
        order = [k for k, i in enumerate(instructions) if isinstance(i, Run)]
        assert [e.instruction for e in actor.runs] == order  # each once, in the program's order
        ends = [0.0] + [t for e in actor.runs for t in (e.start_s, e.end_s)]
        assert ends == sorted(ends), "one task after the other"
        transfers = [k for k, i in enumerate(instructions) if isinstance(i, Send | Recv)]
        assert [e.instruction for e in actor.events if e.peer is not None] == transfers
        assert all(e.start_s <= e.end_s for e in actor.events)
        assert actor.begin_s >= 0 and actor.end_s <= timeline.duration_s
        made = {e.instruction: e for e in actor.events}
        for e in actor.events:
            if e.kind in ("run", "send"):
                assert all(e.start_s >= made[k].end_s for k in e.needs if k in made), e
    sends = [i for p in programs for i in p.instructions if isinstance(i, Send)]
    assert len(timeline.transfers) == len(sends)
    for t in timeline.transfers:
        assert t.receive.end_s > t.send.start_s and t.send.size_bytes == t.receive.size_bytes > 0
    for shares in timeline.shares:
        assert shares.duration_s == pytest.approx(timeline.end_s - timeline.begin_s)
        assert min(shares.wait_s, shares.transfer_s, shares.dispatch_s) >= 0 and shares.idle_s >= -1e-9
    breakdown = timeline.bill
    assert breakdown.total_s == pytest.approx(timeline.duration_s)
    assert (
        min(
            breakdown.compute_s,
            breakdown.imbalance_s,
            breakdown.schedule_s,
            breakdown.transfer_s,
            breakdown.start_s,
        )
        >= -1e-9
    )
    check_trace(timeline.to_chrome_trace())
    assert f"on {len(timeline.actors)} actor" in str(timeline)


@pytest.mark.parametrize("launcher", ["inline", "local"])
async def test_every_instruction_of_a_real_step_is_on_its_timeline(remote_mesh, launcher, tmp_path, capsys):
    mesh = await remote_mesh(2, launcher=launcher)
    model = mlp(2)
    step = mesh.distributed(grads_step(model, jpp.Std1F1B(2)), donate_argnums=0)
    params, batch = model.init(0), model.batch(0, 4)
    programs = (await step.compile(params, batch)).compiled.programs
    first = await mesh.submit(step, params, batch)
    second = await mesh.submit(step, first.outputs[0], batch)
    with pytest.raises(MeshError, match="once it has finished"):
        second.timeline()
    await second
    one, two = first.timeline(), second.timeline()
    for timeline in (one, two):
        assert timeline.name == "step" and timeline.clock_error_s == 0
        check_real(timeline, programs)
    # they were under way together
    assert two.step == one.step + 1 and two.origin_s < one.origin_s + one.duration_s
    assert mesh.last_step_timeline() == two
    check_trace(chrome_trace([one, two]))
    await doc_code("timeline.md")["where_time_goes"](mesh, step, params, batch, tmp_path / "step.json")
    assert capsys.readouterr().out.startswith(f"step {two.step + 1} of 'step': ")
    check_trace(json.loads((tmp_path / "step.json").read_text()))


def use_clocks(mesh: jpp.RemoteMesh, clocks: Clocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a mesh estimate its processes' clocks with `clocks`, in reading them and in following steps."""
    controller = mesh._running()
    monkeypatch.setattr(controller._health_monitor, "clocks", clocks)
    monkeypatch.setattr(controller, "_clock_of", clocks.clock_of)


async def test_actors_whose_clock_is_not_ours_are_asked_for_it(remote_mesh, monkeypatch):
    """It is ours: the offset must come out as nothing, but for the error that it says it has."""
    mesh = await remote_mesh(2, launcher="local")
    use_clocks(mesh, clocks := Clocks("elsewhere"), monkeypatch)
    model = mlp(2)
    step = mesh.distributed(grads_step(model, jpp.Std1F1B(2)))
    params, batch = model.init(0), model.batch(0, 4)
    await step.compile(params, batch)
    async with asyncio.timeout(10):
        while any(clocks.clock_of(actor).offset(0.0) is None for actor in (0, 1)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await mesh.run(step, params, batch)
    timeline = mesh.last_step_timeline()
    ours = [read_stamps(s.stamps)[0][0] - timeline.origin_s for s in mesh.last_step_stats()]
    for actor, begin_s in zip(timeline.actors, ours, strict=True):
        assert actor.clock_error_s > 0 and abs(actor.events[0].start_s - begin_s) <= actor.clock_error_s
        assert actor.begin_s >= 0 and actor.end_s <= timeline.duration_s
    assert "clocks within" in str(timeline)
    check_trace(timeline.to_chrome_trace())


# ---------------------------------------------------------------- steps that did not go well


def processes(timeline: Timeline) -> list[tuple[int, str, int]]:
    return [(a.actor, a.host, a.pid) for a in timeline.actors]


async def test_a_timeline_stays_what_it_was_after_a_restart_and_after_the_end(monkeypatch):
    """Its processes and their clocks, however those of the successors are."""
    async with jpp.RemoteMesh(2, max_restarts=1) as mesh:
        clocks = Clocks("elsewhere")
        monkeypatch.setattr(clocks, "begin_reading", lambda process, name, now_s: False)
        use_clocks(mesh, clocks, monkeypatch)
        for actor in (0, 1):
            clocks.note(actor, 0.0, 0.5, 1.0)
        step, args = a_step(mesh)
        before = await mesh.submit(step, *args)
        await before
        first, were = before.timeline(), [(a.id, a.host, a.pid) for a in mesh.actors]
        assert processes(first) == were
        os.kill(mesh.actors[1].pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            await mesh.run(step, *args)
        clocks.note(1, 0.0, 1e6, 1.0)
        now = [(a.id, a.host, a.pid) for a in mesh.actors]
        assert now[0] == were[0] and now[1] != were[1]
        last = mesh.last_step_timeline()
        assert before.timeline() == first and processes(last) == now
        check_trace(chrome_trace([first, last]))
    assert before.timeline() == first and mesh.last_step_timeline() == last


def a_step(mesh: jpp.RemoteMesh, fn: Any = None) -> tuple[Any, tuple[Any, ...]]:
    model = mlp(2)
    return mesh.distributed(fn or grads_step(model, jpp.Std1F1B(2))), (model.init(0), model.batch(0, 4))


async def test_a_step_that_a_restart_ran_again_has_the_timeline_of_the_run_that_counted():
    async with jpp.RemoteMesh(2, launcher="inline", max_restarts=1) as mesh:
        step, args = a_step(mesh)
        programs = (await step.compile(*args)).compiled.programs
        await mesh.run(step, *args)
        future = await mesh.submit(step, *args)
        sent_first_s = future._step.sent_s
        mesh._controller._actor_group.handles[1].kill()
        with pytest.raises(MeshError, match="once it has finished"):
            future.timeline()
        async with asyncio.timeout(60):
            await future
        timeline = future.timeline()
        check_real(timeline, programs)
        assert timeline.origin_s > sent_first_s and mesh.last_step_timeline() == timeline


async def test_steps_that_fail_or_are_aborted_leave_the_last_timeline():
    """A death without restarts fails one step and aborts those behind it; the mesh's end does neither any
    harm."""
    async with jpp.RemoteMesh(2, launcher="inline") as mesh:
        step, args = a_step(mesh)
        await mesh.run(step, *args)
        good = mesh.last_step_timeline()
        steps = [await mesh.submit(step, *args) for _ in range(2)]
        mesh._controller._actor_group.handles[1].kill()
        for future, error in zip(steps, (ActorDiedError, StepAbortedError), strict=True):
            with pytest.raises(error):
                await future
            with pytest.raises(MeshError, match=r"step \d+ \('step'\) failed, so it has no timeline: "):
                future.timeline()
            assert mesh.last_step_timeline() == good
    assert mesh.last_step_timeline() == good


async def test_a_step_that_the_end_of_the_mesh_cut_short_has_none():
    async with jpp.RemoteMesh(2, launcher="inline") as mesh:
        step, args = a_step(mesh)
        await step.compile(*args)
        future = await mesh.submit(step, *args)
    with pytest.raises(MeshClosedError):
        await future
    with pytest.raises(MeshError, match="has no timeline: the mesh was closed"):
        future.timeline()
    with pytest.raises(MeshError, match="no step has finished"):
        mesh.last_step_timeline()


def test_before_the_first_step():
    with pytest.raises(MeshError, match="no step has finished"):
        jpp.RemoteMesh(2, launcher="inline").last_step_timeline()
