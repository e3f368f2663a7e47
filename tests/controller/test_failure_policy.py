"""Tables of observations with their times, and the failures that the policy reports."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from jaxpp_async.controller.failure_policy import (
    GRACE_S,
    ActorSilent,
    ConnectionLost,
    FailureFound,
    FailurePolicy,
    FailureReported,
    Observation,
    ProcessDied,
    ProtocolBroken,
    StepStuck,
    TransferFailed,
)
from jaxpp_async.controller.stall_detector import StallDiagnosis
from jaxpp_async.errors import (
    ActorDiedError,
    ActorUnresponsiveError,
    ProtocolError,
    RemoteError,
    TransferError,
)
from jaxpp_async.launch.process_supervisor import Death
from jaxpp_async.protocol.actor_info import ActorInfo
from jaxpp_async.protocol.messages import Failed, step_id

INFO = ActorInfo(1, "n1", 42, (), "ready")
SECOND = replace(INFO, rank=1, size=2)
WHO = r"actor 1 \(host n1, pid 42\)"
WHO_SECOND = r"actor 1 \(process 1 of 2: host n1, pid 42\)"
STEP = step_id(7)
KILLED, ABORTED = Death(-9, ()), Death(-6, ())


def failed(kind: str, text: str = "why") -> Failed:
    return Failed(kind, text, "", STEP)


STUCK = StallDiagnosis(STEP, "deaf", "actor 1 lives but does not answer", 1, None, None, (1,), (), {1: "?"})
XLA = failed("XlaRuntimeError", "a peer is gone")
GLOO = failed("ValueError", "Gloo connection closed")

CAUSES: dict[str, tuple[Observation, type, str, int | None]] = {
    "a death": (
        ProcessDied(INFO, KILLED, STEP, "#3 send b1 to 0"),
        ActorDiedError,
        f"{WHO} was killed by SIGKILL .* during step 7, at #3 send b1 to 0",
        1,
    ),
    "an abort of the only process": (ProcessDied(INFO, ABORTED), ActorDiedError, f"{WHO} .*SIGABRT", 1),
    "an abort of the first process": (
        ProcessDied(replace(SECOND, rank=0), ABORTED),
        ActorDiedError,
        r"process 0 of 2.*SIGABRT",
        2,
    ),
    "another end of a second process": (
        ProcessDied(SECOND, KILLED),
        ActorDiedError,
        f"{WHO_SECOND} .*SIGKILL",
        3,
    ),
    "the user's error": (
        FailureReported(INFO, failed("ValueError")),
        RemoteError,
        f"{WHO}, step 7: ValueError: why",
        None,
    ),
    "XLA's error in the only process": (
        FailureReported(INFO, XLA),
        RemoteError,
        f"{WHO}, step 7: XlaRuntimeError: a peer is gone",
        None,
    ),
    "a silence": (
        ActorSilent(INFO, 10.25, STEP, "run f of step 7"),
        ActorUnresponsiveError,
        f"{WHO} has not been heard of for 10.2 s; it was last at run f of step 7",
        None,
    ),
    "a stuck step": (
        StepStuck(STUCK, 12.0, {1: INFO}),
        ActorUnresponsiveError,
        "step 7 has not gone on for 12.0 s: actor 1 lives but does not answer",
        None,
    ),
    "a broken protocol": (ProtocolBroken(ProtocolError("no such request")), ProtocolError, "no such", None),
}
"""Observations that are reported at once: as which error, with which text, and which process died."""

SUSPECTS: dict[str, tuple[Observation, type, str, int | None]] = {
    "a lost connection": (
        ConnectionLost(INFO, OSError("reset"), ("last words",), STEP),
        ActorDiedError,
        f"(?s){WHO} closed its control connection though its process still runs: reset.*last words",
        None,
    ),
    "a closed connection": (ConnectionLost(INFO), ActorDiedError, f"{WHO} closed its control.*runs$", None),
    "an actor's failed transfer": (
        FailureReported(INFO, failed("jaxpp_async.errors.TransferError")),
        TransferError,
        f"{WHO}, step 7: .*why",
        None,
    ),
    "an actor's failed transfer between steps": (
        FailureReported(INFO, Failed("jaxpp_async.errors.TransferError", "why", "")),
        TransferError,
        f"{WHO}: .*why",
        None,
    ),
    "an actor's aborted step": (
        FailureReported(INFO, failed("jaxpp_async.errors.StepAbortedError")),
        RemoteError,
        "StepAbortedError",
        None,
    ),
    "an actor's cancelled task": (
        FailureReported(INFO, failed("asyncio.exceptions.CancelledError")),
        RemoteError,
        "CancelledError",
        None,
    ),
    "XLA's error in one of two processes": (
        FailureReported(SECOND, XLA),
        RemoteError,
        f"{WHO_SECOND}.*a peer is gone",
        None,
    ),
    "a collective's error in one of two processes": (
        FailureReported(SECOND, GLOO),
        RemoteError,
        f"{WHO_SECOND}.*Gloo",
        None,
    ),
    "the abort of a second process": (
        ProcessDied(SECOND, ABORTED),
        ActorDiedError,
        f"{WHO_SECOND} .*SIGABRT",
        3,
    ),
    "the controller's failed transfer": (
        TransferFailed(TransferError("no route")),
        TransferError,
        "no route",
        None,
    ),
}
"""Observations that are reported only if nothing else explains them."""

ALL = CAUSES | SUSPECTS


def check(name: str, failure: FailureFound | None) -> None:
    """Check that a failure is that of one row of the tables."""
    _, cls, text, dead = ALL[name]
    assert failure is not None
    assert type(failure.error) is cls and failure.dead == dead
    with pytest.raises(cls, match=text):
        raise failure.error


def test_the_tables_have_every_kind_of_observation():
    assert {type(seen) for seen, *_ in ALL.values()} == set(get_args(Observation))


@pytest.mark.parametrize("name", CAUSES)
@pytest.mark.parametrize("before", [None, *SUSPECTS])
def test_a_cause_is_reported_at_once_and_nothing_is_suspected_any_more(name, before):
    policy = FailurePolicy()
    if before is not None:
        assert policy.observe(SUSPECTS[before][0], 5.0) is None
    check(name, policy.observe(CAUSES[name][0], 5.9))
    assert policy.due_s is None and policy.judge(100.0) is None


@pytest.mark.parametrize("name", SUSPECTS)
def test_a_possible_consequence_that_stays_alone_is_reported_late_and_once(name):
    policy = FailurePolicy()
    assert policy.observe(SUSPECTS[name][0], 5.0) is None
    assert policy.due_s == 5.0 + GRACE_S
    assert policy.judge(5.0 + 0.99 * GRACE_S) is None
    check(name, policy.judge(5.0 + GRACE_S))
    assert policy.due_s is None and policy.judge(100.0) is None


@pytest.mark.parametrize("first", SUSPECTS)
def test_of_two_possible_consequences_the_first_is_reported_and_its_time_stays(first):
    policy = FailurePolicy()
    for k, second in enumerate(SUSPECTS):
        now_s = 10.0 * k
        assert policy.observe(SUSPECTS[first][0], now_s) is None
        assert policy.observe(SUSPECTS[second][0], now_s + 0.9 * GRACE_S) is None
        assert policy.due_s == now_s + GRACE_S
        check(first, policy.judge(now_s + GRACE_S))
        assert policy.judge(now_s + 9.0) is None


@pytest.mark.parametrize("name", ALL)
def test_after_a_report_the_next_failure_is_judged_by_itself(name):
    policy = FailurePolicy()
    for k, before in enumerate(ALL):
        now_s = 10.0 * k
        check(before, policy.observe(ALL[before][0], now_s) or policy.judge(now_s + GRACE_S))
        check(name, policy.observe(ALL[name][0], now_s + 5) or policy.judge(now_s + 5 + GRACE_S))


@pytest.mark.parametrize("name", SUSPECTS)
def test_a_suspicion_that_is_dropped_is_not_reported_and_the_next_has_its_own_time(name):
    policy = FailurePolicy()
    assert policy.observe(SUSPECTS[name][0], 5.0) is None
    policy.drop_suspicion()
    assert policy.due_s is None and policy.judge(5.0 + GRACE_S) is None
    assert policy.observe(SUSPECTS[name][0], 5.5) is None
    assert policy.judge(5.0 + GRACE_S) is None  # a timer of the first
    check(name, policy.judge(5.5 + GRACE_S))


DEATH, OTHER = "a death", "another end of a second process"
LOST, TRANSFER, ABORT = "a lost connection", "an actor's failed transfer", "the abort of a second process"

STORIES: dict[str, tuple[list[tuple[float, str]], list[tuple[float, str]]]] = {
    "a death, then its lost connection": ([(0.0, DEATH), (0.1, LOST)], [(0.0, DEATH), (1.1, LOST)]),
    "a lost connection, then the death": ([(0.0, LOST), (0.9, DEATH)], [(0.9, DEATH)]),
    "a death that comes too late": ([(0.0, LOST), (1.1, DEATH)], [(1.0, LOST), (1.1, DEATH)]),
    "a transfer, the connection, the death": ([(0.0, TRANSFER), (0.1, LOST), (0.2, DEATH)], [(0.2, DEATH)]),
    "a transfer and the connection alone": ([(0.0, TRANSFER), (0.6, LOST)], [(1.0, TRANSFER)]),
    "two deaths at once": ([(0.0, DEATH), (0.0, OTHER)], [(0.0, DEATH), (0.0, OTHER)]),
    "an aborted process, then the one that it followed": ([(0.0, ABORT), (0.3, DEATH)], [(0.3, DEATH)]),
    "an aborted process alone": ([(0.0, ABORT)], [(1.0, ABORT)]),
    "a suspicion after another": ([(0.0, LOST), (1.5, TRANSFER)], [(1.0, LOST), (2.5, TRANSFER)]),
}
"""What is observed when, and what is reported when."""


@pytest.mark.parametrize("story", STORIES)
def test_stories(story):
    observed, expected = STORIES[story]
    policy, reported = FailurePolicy(), list[tuple[float, FailureFound]]()

    def note(now_s: float, failure: FailureFound | None) -> None:
        if failure is not None:
            reported.append((now_s, failure))

    for now_s, name in [*observed, (10.0, None)]:
        if policy.due_s is not None and policy.due_s <= now_s:  # the controller's timer
            due_s = policy.due_s
            note(due_s, policy.judge(due_s))
        if name is not None:
            note(now_s, policy.observe(ALL[name][0], now_s))
    assert [when for when, _ in reported] == pytest.approx([when for when, _ in expected])
    for (_, failure), (_, name) in zip(reported, expected, strict=True):
        check(name, failure)
