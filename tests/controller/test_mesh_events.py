"""Direct tests of what happens to actors as events of their mesh, and of ways through host memory."""

from __future__ import annotations

import logging

import pytest

from jaxpp_async.base.events import EventLog
from jaxpp_async.controller.mesh_events import MeshEvents, staged
from jaxpp_async.errors import ActorDiedError, ActorUnresponsiveError, TransferError
from jaxpp_async.protocol.actor_info import ActorInfo
from jaxpp_async.protocol.messages import step_id

ACTOR = ActorInfo(1, "n1", 42, ("cpu:0", "cpu:1"), "ready")
WHO = "actor 1 (host n1, pid 42)"
WHY = "cancelled by its caller, to end: a step that was sent runs on"


@pytest.mark.parametrize(
    ("ways", "is_staged"),
    [
        (("cuda_ipc", "tcp"), False),
        (("rc_mlx5",), False),
        (("dc_mlx5", "tcp"), False),
        (("tcp",), True),
        (("posix", "cma"), True),
        (("rcx",), True),  # not one of them, though it begins alike
        ((), False),  # nobody knows
    ],
)
def test_device_memory_passes_through_the_hosts_where_no_way_reads_it(ways, is_staged):
    assert staged({3: ways}) == ({3: ways} if is_staged else {})


@pytest.fixture
def log() -> EventLog:
    return EventLog()


def told(log: EventLog) -> list[tuple]:
    """Kind, actor, step and text of each event."""
    return [(event.kind, event.actor, event.step, event.text) for event in log._kept]


def test_an_actor_that_is_ready_is_told_with_its_devices(log):
    MeshEvents(log).started(ACTOR)
    assert told(log) == [("started", 1, None, f"{WHO} is ready: cpu:0, cpu:1")]
    assert log._kept[0].details == {"host": "n1", "pid": 42, "devices": ("cpu:0", "cpu:1")}


def test_slow_ways_are_a_warning_and_fast_ones_no_news(log, caplog):
    MeshEvents(log).connected(ACTOR, {0: ("rc_mlx5",)})
    assert told(log) == []
    MeshEvents(log).connected(ACTOR, {0: ("rc_mlx5",), 3: ("tcp",), 2: ("tcp", "cma")})
    ((kind, actor, _, text),) = told(log)
    assert (kind, actor) == ("staged", 1)
    assert text.startswith(f"{WHO} sends device memory to peers 2, 3 through host memory: UCX has cma, tcp")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_silence_and_its_end_are_told_with_how_long_it_was(log, caplog):
    MeshEvents(log).suspect(ACTOR, 3.25, "run f of step 7", 10.0)
    MeshEvents(log).recovered(ACTOR, 4.5)
    assert told(log) == [
        ("suspect", 1, None, f"{WHO} has not been heard of for 3.2 s"),
        ("recovered", 1, None, f"{WHO} is heard again, after 4.5 s"),
    ]
    suspect, recovered = (record.getMessage() for record in caplog.records)
    assert suspect.startswith(f"{WHO} has not been heard of for 3.2 s; it was last at run f of step 7; ")
    assert suspect.endswith("; it is given up after 10 s")
    assert recovered == f"{WHO} is heard again, after 4.5 s"
    assert {(r.levelname, r.actor, r.host) for r in caplog.records} == {("WARNING", 1, "n1")}


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        (ActorDiedError("gone\nmore", actor=1, step=7), True),
        (ActorUnresponsiveError("still"), True),
        (TransferError("x"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failure_is_told_if_an_actor_is_gone(log, error, is_told):
    MeshEvents(log).failed(error)
    assert len(told(log)) == is_told
    if error.step is not None:
        assert told(log) == [("died", 1, 7, "gone")]


def test_a_restart_is_told_for_each_that_was_replaced_or_for_the_mesh(log):
    MeshEvents(log).restarted([ACTOR], 3, 1.5)
    MeshEvents(log).restarted([], 2, 0.25)
    assert told(log) == [
        ("restarted", 1, None, f"{WHO} is at work again after 1.5 s; steps that are run again: 3"),
        ("restarted", None, None, "the mesh is at work again after 0.2 s; steps that are run again: 2"),
    ]


def test_what_takes_long_is_told_by_its_name(log):
    MeshEvents(log).compiled("train", 1.25, 8)
    MeshEvents(log).waiting("train", step_id(7, "move"))
    assert told(log) == [
        ("compiled", None, None, "compiled train in 1.2 s: 8 tasks"),
        ("waiting", None, 7, f"step 'train' waits for a move for step 7, {WHY}"),
    ]


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (None, "the mesh is closed"),
        (ValueError("bad"), "the mesh is closed: bad"),
        (KeyboardInterrupt(), "the mesh is closed: KeyboardInterrupt"),
    ],
    ids=repr,
)
def test_a_mesh_is_closed_once(log, cause, text):
    MeshEvents(log).closed(cause)
    MeshEvents(log).closed(ValueError("later"))
    assert told(log) == [("closed", None, None, text)]
