"""Direct tests of a timeline's numbers as text, and of its trace."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest

from jaxpp_async.errors import TimelineError
from jaxpp_async.program.work import TaskWork
from jaxpp_async.timeline.breakdown import StepBreakdown, TimeShares
from jaxpp_async.timeline.events import ActorTimeline, Recorded, TimelineEvent, TimelineTransfer
from jaxpp_async.timeline.timeline import (
    Timeline,
    _breakdown_table,
    _shares_table,
    _tasks_table,
    load_timelines,
    make_timeline,
)
from jaxpp_async.timeline.trace import chrome_trace, write_trace

# ---------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("duration_s", "num_actors", "error_s", "text"),
    [
        (1.5, 2, 0.0, "step 7 of 'train': 1.50 s on 2 actors"),
        (0.0015, 1, 0.0, "step 7 of 'train': 1.50 ms on 1 actor"),
        (0.00025, 2, 2e-6, "step 7 of 'train': 250 us on 2 actors, clocks within 2 us"),
        (0.9996, 0, 0.0, "step 7 of 'train': 1.00 s on 0 actors"),
        (0.0, 2, 0.0, "step 7 of 'train': 0 on 2 actors"),
    ],
)
def test_the_title_has_the_time_in_its_unit(duration_s, num_actors, error_s, text):
    actors = tuple(ActorTimeline(actor, ()) for actor in range(num_actors))
    step = Timeline(7, "train", 100.0, duration_s, actors, (), error_s)
    assert str(step).split("\n\n")[0] == text
    assert repr(step).startswith(f"<Timeline: {text}; ")


def test_shares_are_parts_of_the_span_in_aligned_columns():
    assert _shares_table([TimeShares(0, 0.5, 0.25, 0.125, 0.125, 0.0), TimeShares(11, 1, 0, 0, 0, 0)]).split(
        "\n"
    ) == [
        "of 1.00 s  computing  waiting  transfers  dispatch  idle",
        "actor 0          50%      25%        12%       12%    0%",
        "actor 11        100%       0%         0%        0%    0%",
    ]


def test_tasks_are_listed_with_how_often_they_ran():
    assert _tasks_table([("fwd(stage 0)", 8, 0.001, 0.008)]).split("\n") == [
        "task          runs   median  together",
        "fwd(stage 0)     8  1.00 ms   8.00 ms",
    ]


def test_a_breakdown_adds_up_in_its_last_line():
    lines = _breakdown_table(StepBreakdown(1, 2, 1, 1, 2, 0, 1, 2)).split("\n")
    assert lines[1].split()[:3] == ["queue", "1.00", "s"]
    assert lines[-1].endswith(
        "100%  57% of what the schedule allows: 4.00 s (compute, imbalance, schedule) at best, 7.00 s taken "
        "(all but queue and reply)"
    )
    assert len(lines) == 10


# ---------------------------------------------------------------- trace

SEND = TimelineEvent(0, 1, "send", "x", 0.5, 0.75, size_bytes=16, peer=1, tag=3, text="send")
RECV = TimelineEvent(1, 0, "recv", "x", 0.0, 1.0, size_bytes=16, peer=0, tag=3, text="recv")
RUN = TimelineEvent(0, 0, "run", "fwd(stage 0, mb 0)", 0.0, 0.5, text="run")
ACTORS = (ActorTimeline(0, (RUN, SEND), host="n1", pid=9), ActorTimeline(1, (RECV,), host="n2", pid=8))
STEP = Timeline(7, "train", 100.0, 1.25, ACTORS, (TimelineTransfer(SEND, RECV),))


def drawn(*steps: Timeline) -> tuple[list[dict], dict]:
    """The slices and arrows of a trace, and names of its processes and threads."""
    trace = chrome_trace(steps)
    names = {
        (entry["pid"], entry.get("tid")): entry["args"]["name"]
        for entry in trace["traceEvents"]
        if entry["name"] in ("process_name", "thread_name")
    }
    return [entry for entry in trace["traceEvents"] if entry["ph"] != "M"], names


def test_each_slice_has_its_process_its_thread_and_its_time_in_microseconds():
    events, names = drawn(STEP)
    slices = [
        (names[e["pid"], None], names[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"])
        for e in events
        if e["ph"] == "X"
    ]
    assert slices == [
        ("controller", "steps", "step 7", 0.0, 1250000.0),
        ("actor 0 (n1, pid 9)", "tasks", "fwd(stage 0, mb 0)", 0.0, 500000.0),
        ("actor 0 (n1, pid 9)", "sends", "x", 500000.0, 250000.0),
        ("actor 1 (n2, pid 8)", "receives", "x", 500000.0, 500000.0),  # from when it was sent
    ]


def test_a_transfer_is_an_arrow_that_ends_inside_of_its_receive():
    events, _ = drawn(STEP)
    start, end = (e for e in events if e["ph"] in "sf")
    assert (start["ts"], start["id"], end["id"]) == (500000.0, 1, 1)
    assert 500000.0 < end["ts"] < 1000000.0


def test_an_arrow_into_the_past_is_not_drawn():
    early = TimelineEvent(1, 0, "recv", "x", 0.0, 0.25, peer=0, tag=3)
    step = Timeline(
        7, "train", 100.0, 1.0, (ACTORS[0], ActorTimeline(1, (early,))), (TimelineTransfer(SEND, early),)
    )
    assert [e for e in drawn(step)[0] if e["ph"] in "sf"] == []


def test_slices_that_overlap_take_a_second_thread_which_is_free_again_afterwards():
    runs = [TimelineEvent(0, k, "run", f"r{k}", k, k + 2) for k in range(3)]
    events, names = drawn(Timeline(0, "s", 0.0, 4.0, (ActorTimeline(0, tuple(runs)),), ()))
    assert [names[e["pid"], e["tid"]] for e in events if e["name"].startswith("r")] == [
        "tasks",
        "tasks 2",
        "tasks",
    ]


def test_the_first_step_is_the_zero_of_all_and_no_thread_has_a_process_number():
    later = Timeline(8, "train", 102.0, 0.5, (), ())
    events, names = drawn(later, STEP)
    assert [(e["name"], e["ts"]) for e in events if e["cat"] == "steps"] == [
        ("step 7", 0.0),
        ("step 8", 2000000.0),
    ]
    assert {tid for _, tid in names if tid is not None}.isdisjoint(pid for pid, _ in names)


def test_a_trace_is_written_as_json(tmp_path):
    write_trace(tmp_path / "trace.json", [STEP])
    written = json.loads((tmp_path / "trace.json").read_text())
    del written["jaxpp_async"]  # which viewers skip
    assert written == chrome_trace([STEP])


# ---------------------------------------------------------------- a timeline


def test_the_median_of_an_unknown_task_names_those_that_there_are():
    assert STEP.median_s("fwd(stage 0)") == 0.5
    with pytest.raises(KeyError, match="the step has no task 'bwd', but fwd"):
        STEP.median_s("bwd")
    with pytest.raises(KeyError, match="the step has no task 'bwd', but none at all"):
        make_timeline(0, "empty", 0.0, {}).median_s("bwd")


def test_what_is_recorded_of_an_actor_is_by_default_of_our_own_clock():
    recorded = Recorded(program=None, stamps=b"", heard_s=1.0)
    assert (recorded.offset_s, recorded.error_s, recorded.host, recorded.pid) == (0.0, 0.0, "", 0)


def test_works_are_counted_when_they_are_read_and_travel_with_the_timeline():
    counted = []

    def count():
        counted.append(1)
        return [TaskWork("key", 1.0, 2.0)]

    run = TimelineEvent(0, 0, "run", "fwd", 0.0, 1.0, executable=0)
    delete = TimelineEvent(0, 1, "output", "result 0", 1.0, 1.0)
    step = Timeline(0, "step", 0.0, 1.0, (ActorTimeline(0, (run, delete)),), (), count_works=count)
    assert counted == []
    assert step.works_of(run) == TaskWork("key", 1.0, 2.0) and step.works_of(delete) is None
    assert counted == [1]
    copy = pickle.loads(pickle.dumps(step))
    assert (copy, copy.works) == (step, step.works)


# ---------------------------------------------------------------- reading


def saved_step(number: int) -> Timeline:
    sent = TimelineEvent(0, 1, "send", "fwd(stage 0, mb 0)", 1.5, 2.5, 64, peer=1, tag=0, needs=(0,))
    came = TimelineEvent(1, 0, "recv", "fwd(stage 0, mb 0)", 1.0, 3.0, 64, peer=0, tag=0, held_bytes=64)
    ran = TimelineEvent(0, 0, "run", "fwd(stage 0, mb 0)", 0.5, 1.5, executable=3, text='run "fwd"')
    actors = (ActorTimeline(0, (ran, sent), 1e-6, "here", 41), ActorTimeline(1, (came,), 2e-6, "there", 42))
    transfers = (TimelineTransfer(sent, came),)
    return Timeline(number, "train", 100.0, 4.0, actors, transfers, 3e-6, cut_choice="work")


def test_a_written_step_is_read_as_it_was(tmp_path):
    saved_step(7).write(tmp_path / "step.json")
    assert load_timelines(tmp_path / "step.json") == [saved_step(7)]


def test_several_steps_are_read_from_one_file(tmp_path):
    write_trace(tmp_path / "steps.json", iter([saved_step(1), saved_step(2)]))
    assert [found.step for found in load_timelines(tmp_path / "steps.json")] == [1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "no timeline that `Timeline.write` has written"),
        ('{"traceEvents": []}', "no timeline that `Timeline.write` has written"),
        (
            '{"jaxpp_async": {"version": 99, "steps": []}}',
            "version 99, and this version of jaxpp_async reads 1",
        ),
        ('{"jaxpp_async": {"version": 1, "steps": [{"step": 1}]}}', "damaged"),
    ],
)
def test_a_file_that_is_no_timeline_is_refused(text, message, tmp_path):
    (tmp_path / "step.json").write_text(text)
    with pytest.raises(TimelineError, match=message):
        load_timelines(tmp_path / "step.json")


def test_a_printed_step_of_somebody_else_cannot_command_the_terminal():
    evil = "fwd\x1b]0;pwned\x07"
    event = TimelineEvent(0, 0, "run", evil, 0.0, 1.0)
    text = str(Timeline(0, evil, 0.0, 1.0, (ActorTimeline(0, (event,)),), ()))
    assert "\x1b" not in text and "\x07" not in text and "\\x1b]0;pwned" in text


def spoilt(**changes):
    """Return the events of two actors that hand data to each other, with the first event changed."""
    events = [
        TimelineEvent(0, 0, "run", "fwd(stage 0, mb 0)", 0.0, 1.0),
        TimelineEvent(0, 1, "send", "x", 1.0, 1.5, 8, peer=1, tag=0, needs=(0,)),
        TimelineEvent(1, 0, "recv", "x", 0.0, 1.5, 8, peer=0, tag=0),
        TimelineEvent(1, 1, "run", "fwd(stage 1, mb 0)", 1.5, 2.0, needs=(0,)),
    ]
    events[0] = replace(events[0], **changes)
    return [tuple(e for k, e in enumerate(events) if k // 2 == actor) for actor in range(2)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actor": 7}, "actor 0 of step 3 has an instruction of actor 7"),
        ({"instruction": 1}, "actor 0 of step 3 has an instruction twice"),
        ({"end_s": -1.0}, "instruction 0 of actor 0 of step 3 ends before it starts"),
        ({"end_s": 1e300}, "a time that is no number, or beyond 1e\\+09 s"),
        ({"label": "think(stage 0, mb 0)"}, "of a task of the unknown type 'think'"),
        ({"needs": (0,)}, "tasks wait for each other in a circle"),
    ],
)
def test_a_file_whose_step_cannot_have_been_is_refused(changes, message, tmp_path):
    def written(actors):
        timelines = tuple(ActorTimeline(actor, events) for actor, events in enumerate(actors))
        write_trace(tmp_path / "step.json", [Timeline(3, "train", 0.0, 2.0, timelines, ())])
        return tmp_path / "step.json"

    assert load_timelines(written(spoilt()))[0].bill.total_s == 2.0
    with pytest.raises(TimelineError, match=f"or it is damaged: .*{message}"):
        load_timelines(written(spoilt(**changes)))


def test_a_file_with_an_actor_twice_is_refused(tmp_path):
    actors = (ActorTimeline(0, spoilt()[0]),) * 2
    write_trace(tmp_path / "step.json", [Timeline(3, "train", 0.0, 2.0, actors, ())])
    with pytest.raises(TimelineError, match="step 3 has an actor twice"):
        load_timelines(tmp_path / "step.json")
