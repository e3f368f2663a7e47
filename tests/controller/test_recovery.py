"""Tests of the state machine of restarts: each event in each state, and random sequences. No JAX."""

from __future__ import annotations

from typing import Any

import pytest

from jaxpp_async.controller import recovery as r
from jaxpp_async.controller import state_replicas as s
from jaxpp_async.controller.recovery import State
from jaxpp_async.controller.request_history import RequestHistory
from jaxpp_async.errors import (
    ActorDiedError,
    ActorUnresponsiveError,
    HandshakeError,
    LaunchError,
    MeshError,
    ProtocolError,
    RemoteError,
    RestartBudgetExceeded,
    StateLostError,
    TransferError,
)
from jaxpp_async.protocol.actor_info import Topology
from tests.support.simulated_mesh import SimulatedMesh, Violation

DIED = ActorDiedError("actor 1 was killed", actor=1, host="n1", pid=7, step=3)
USER_ERROR = RemoteError("ValueError: no", exception_type="builtins.ValueError", actor=0)


def started(num_actors: int = 3, max_restarts: int = 2) -> r.Recovery:
    machine = r.Recovery(Topology(num_actors), max_restarts=max_restarts, replica_every=3)
    machine.handle(r.MeshStarted(), 0.0)
    return machine


def in_state(state: State) -> r.Recovery:
    """A machine of four actors in the given state of a restart of actor 1, with a whole replica."""
    machine = r.Recovery(Topology(4), max_restarts=2, replica_every=3)
    if state is State.STARTING:
        return machine
    machine.handle(r.MeshStarted(), 0.0)
    carry_out(machine, machine.handle(r.ReplicaWanted(), 0.0))
    assert machine.replicas.whole is not None
    if state is State.RUNNING:
        return machine
    if state is State.ENDED:
        machine.handle(r.MeshClosed(), 0.0)
        return machine
    commands = machine.handle(r.FailureFound(DIED), 0.0)
    if state is State.PAUSING:
        machine.handle(r.NotCarriedOut(machine.epoch, commands[-1], TransferError("slow")), 0.0)
    while machine.state is not state:
        commands = carry_out(machine, commands, one_state=True)
    return machine


def carry_out(
    machine: r.Recovery, commands: list[r.Command], *, one_state: bool = False, now: float = 0.0
) -> list[r.Command]:
    """Report each command as carried out, also those that follow, and return the last ones that followed.

    Args:
        one_state: whether to stop when the machine has entered another state.
    """
    at_once = (r.HoldBack, r.Resume, r.GiveUpReplica, s.DropOthers)
    waited_for = [c for c in commands if not isinstance(c, at_once)]
    followed: list[r.Command] = []
    for command in waited_for:
        copy = s.StateCopy((), f"n{command.process}") if isinstance(command, s.CopyState) else None
        followed += machine.handle(r.CarriedOut(machine.epoch, command, copy), now)
    return followed if one_state or not waited_for else carry_out(machine, followed, now=now) or followed


def names(commands: list[r.Command]) -> str:
    """The types of some commands, each once, in order."""
    return " ".join(dict.fromkeys(type(command).__name__ for command in commands))


# ---------------------------------------------------------------- tables


def test_the_tables_are_complete():
    assert set(r.REACTIONS) == set(State)
    assert all(set(row) == set(r.Meaning) for row in r.REACTIONS.values())
    state, course = State.STOPPING, []
    while state is not State.RUNNING:
        course.append(state)
        state = r.COURSE[state].then
    assert set(course) == set(r.COURSE) - {State.RUNNING}


def test_the_course_of_a_restart():
    machine = in_state(State.RUNNING)
    commands, course = machine.handle(r.FailureFound(DIED), 5.0), []
    while machine.is_restarting:
        course.append(f"{machine.state.value}: {names(commands)}")
        commands = carry_out(machine, commands, one_state=True, now=9.0)
    assert course == [
        "stopping: HoldBack StopWork",
        "reaping: Reap",
        "renewing: StartSuccessor RenewTransport",
        "connecting: ConnectAll",
        "loading: LoadPrograms",
        "linking: MakeLinks",
        "restoring: DropOthers MovePart",
        "handing over: MovePart",
        "rolling back: RollBack",
    ]
    assert commands == [r.Resume((), (1,), 4.0)]


WORKING = (State.STOPPING, State.REAPING, State.RENEWING, State.CONNECTING, State.LOADING, State.LINKING,
           State.RESTORING, State.HANDING_OVER, State.ROLLING_BACK)  # fmt: skip
EARLY = (State.STOPPING, State.REAPING)
SUCCESSOR_IS_UP = WORKING[3:]
ALL = tuple(State)


def outcome(machine: r.Recovery, error: Exception | None = None, epoch: int | None = None) -> r.Event:
    """The outcome of a command of the present state, or of one that no state waits for."""
    command = next(iter(machine._open), r.ConnectAll())
    epoch = machine.epoch if epoch is None else epoch
    return r.CarriedOut(epoch, command) if error is None else r.NotCarriedOut(epoch, command, error)


EVENTS: dict[str, Any] = {
    # event: what it is, and the states it leads to; it changes nothing in states that are not named
    "start": (lambda _: r.MeshStarted(), {State.STARTING: State.RUNNING}),
    "the lost actor dies": (
        lambda _: r.FailureFound(DIED),
        {State.STARTING: State.ENDED, State.RUNNING: State.STOPPING, State.PAUSING: State.PAUSING}
        | dict.fromkeys(SUCCESSOR_IS_UP, State.STOPPING),
    ),
    "an actor that held nothing of the lost one falls silent": (
        lambda _: r.FailureFound(ActorUnresponsiveError("silent", actor=3)),
        {State.STARTING: State.ENDED, State.RUNNING: State.STOPPING, State.PAUSING: State.STOPPING}
        | dict.fromkeys(WORKING, State.STOPPING),
    ),
    "the holder of the lost one's copy dies": (
        lambda _: r.FailureFound(ActorDiedError("also killed", actor=2)),
        {State.STARTING: State.ENDED, State.RUNNING: State.STOPPING, State.PAUSING: State.ENDED}
        | dict.fromkeys(WORKING, State.ENDED),
    ),
    "a transfer fails": (
        lambda _: r.FailureFound(TransferError("broken")),
        {State.STARTING: State.ENDED, State.RUNNING: State.STOPPING, State.PAUSING: State.STOPPING}
        | dict.fromkeys(WORKING[2:], State.STOPPING),
    ),
    "user code fails": (lambda _: r.FailureFound(USER_ERROR), dict.fromkeys(ALL[:-1], State.ENDED)),
    "an outcome from an earlier epoch": (lambda m: outcome(m, epoch=m.epoch - 1), {}),
    "a command fails": (lambda m: outcome(m, TransferError("x")), dict.fromkeys(WORKING, State.PAUSING)),
    "a start fails": (lambda m: outcome(m, LaunchError("x", actor=1)), dict.fromkeys(WORKING, State.PAUSING)),
    "the devices differ": (
        lambda m: outcome(m, MeshError("x")),
        dict.fromkeys((*WORKING, State.PAUSING), State.ENDED),
    ),
    "a bug": (lambda m: outcome(m, KeyError("x")), dict.fromkeys((*WORKING, State.PAUSING), State.ENDED)),
    "the pause is over": (
        lambda m: r.CarriedOut(m.epoch, r.WakeUp(r.GRACE_S)),
        {State.PAUSING: State.STOPPING},
    ),
    "a step is sent": (lambda _: r.StepSent(), {}),
    "a replica is wanted": (lambda _: r.ReplicaWanted(), {}),
    "the mesh is closed": (lambda _: r.MeshClosed(), dict.fromkeys(ALL[:-1], State.ENDED)),
}


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
@pytest.mark.parametrize("name", EVENTS)
def test_every_event_in_every_state(state, name):
    machine = in_state(state)
    make, leads_to = EVENTS[name]
    epoch, commands = machine.epoch, machine.handle(make(machine), 1.0)
    assert machine.state is leads_to.get(state, state)
    begins = machine.state is State.STOPPING and bool(commands)
    ends = machine.state is State.ENDED and state is not State.ENDED
    assert machine.epoch == epoch + (begins or ends)
    if ends:
        assert names(commands) == ("" if name == "the mesh is closed" else "EndMesh")
        assert len(machine.history) == 0 and not machine._open
    elif machine.state is state and not begins:
        making = state is State.RUNNING and name == "a replica is wanted"
        assert names(commands) == ("CopyState" if making else "")


@pytest.mark.parametrize("state", WORKING, ids=lambda state: state.name)
def test_a_state_ends_with_its_last_outcome(state):
    machine = in_state(state)
    commands = sorted(machine._open, key=repr)
    for command in commands[:-1]:
        assert machine.handle(r.CarriedOut(machine.epoch, command), 1.0) == []
        assert machine.state is state
    machine.handle(r.CarriedOut(machine.epoch, commands[-1]), 1.0)
    assert machine.state is r.COURSE[state].then


# ---------------------------------------------------------------- which failures, how often, how long


@pytest.mark.parametrize(
    ("error", "undone"),
    [
        (DIED, True),
        (ActorUnresponsiveError("x", actor=0), True),
        (TransferError("x"), True),
        (LaunchError("x"), True),
        (ProtocolError("x", actor=1), True),
        (ProtocolError("x", actor=1, instruction="recv"), False),
        (RemoteError("x", exception_type="jaxpp_async.errors.TransferError"), True),
        (USER_ERROR, False),
        (HandshakeError("x"), False),
        (StateLostError("x"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_which_failures_a_restart_can_undo(error, undone):
    assert r.can_be_undone(error) == undone
    machine = started()
    assert names(machine.handle(r.FailureFound(error), 0.0)) == ("HoldBack StopWork" if undone else "EndMesh")


def test_without_max_restarts_every_failure_ends_the_mesh_with_itself():
    assert started(max_restarts=0).handle(r.FailureFound(DIED), 0.0) == [r.EndMesh(DIED)]


def restart(machine: r.Recovery, error: Exception, now: float) -> list[r.Command]:
    """Let a failure be undone, and return the last commands."""
    return carry_out(machine, machine.handle(r.FailureFound(error), now), now=now)  # type: ignore[arg-type]


def test_more_restarts_than_allowed_within_the_window_end_the_mesh():
    machine = started()
    restart(machine, DIED, 0.0)
    restart(machine, DIED, 10.0)
    (end,) = machine.handle(r.FailureFound(DIED), r.WINDOW_S - 1)
    assert isinstance(end, r.EndMesh) and isinstance(end.error, RestartBudgetExceeded)
    assert str(end.error).startswith(
        "max_restarts=2 allows 2 restarts within 10 minutes, and one more would be needed: actor 1 was k"
    )
    assert (end.error.actor, end.error.pid, end.error.step, end.error.__cause__) == (1, 7, 3, DIED)
    machine = started()
    restart(machine, DIED, 0.0)
    restart(machine, DIED, 10.0)
    restart(machine, DIED, r.WINDOW_S + 1)
    assert machine.state is State.RUNNING


def test_the_budget_frees_a_place_when_a_restart_leaves_the_window():
    budget = r.Budget(2, window_s=600.0)
    budget.take(0.0)
    budget.take(1.0)
    assert [budget.allows(now) for now in (1.0, 600.0, 600.5, 601.5)] == [False, False, True, True]
    assert not r.Budget(0).allows(0.0)


def test_actors_that_die_together_count_once():
    machine = r.Recovery(Topology(4), max_restarts=1, replica_every=3)
    machine.handle(r.MeshStarted(), 0.0)
    machine.handle(r.FailureFound(DIED), 0.0)
    commands = machine.handle(r.FailureFound(ActorDiedError("x", actor=3)), 0.1)
    assert commands == [r.HoldBack(commands[0].error, frozenset({1, 3})), r.StopWork()]  # type: ignore[union-attr]
    assert machine.epoch == 2


@pytest.mark.parametrize(("failure", "pauses"), [(LaunchError("no host", actor=1), [2, 4, 8, 16, 30]),
                                                 (TransferError("x"), [1, 1]),
                                                 (ActorUnresponsiveError("x", actor=0), [0, 0])])  # fmt: skip
def test_pauses_between_attempts_and_how_many_there_are(failure, pauses):
    machine, found = started(max_restarts=len(pauses) - (1 if pauses[0] == 2 else 0)), []
    commands = machine.handle(r.FailureFound(DIED), 0.0)
    for _ in range(20):
        commands = machine.handle(r.NotCarriedOut(machine.epoch, commands[-1], failure), 0.0)
        wake = commands[-1]
        if isinstance(wake, r.EndMesh):  # of a failed start at once: no pause would change it
            break
        assert isinstance(wake, r.WakeUp)
        found.append(wake.after_s)
        commands = machine.handle(r.CarriedOut(machine.epoch, wake), 0.0)
        if isinstance(commands[-1], r.EndMesh):
            break
    assert found == pauses
    assert isinstance(commands[-1].error, RestartBudgetExceeded)  # type: ignore[union-attr]


def test_a_failed_start_is_told_at_once_and_the_last_one_ends_the_mesh_without_a_pause():
    machine, error = started(max_restarts=1), LaunchError("no answer\noutput", actor=1, host="n1", pid=8)
    commands, notes = machine.handle(r.FailureFound(DIED), 0.0), []
    for now in (1.0, 4.0):
        *_, wake = machine.handle(r.NotCarriedOut(machine.epoch, commands[-1], error), now)
        notes.append(wake.note)  # type: ignore[union-attr]
        commands = machine.handle(r.CarriedOut(machine.epoch, wake), now)
    (end,) = machine.handle(r.NotCarriedOut(machine.epoch, commands[-1], error), 9.0)
    assert notes == [
        f"a start failed: no answer (host n1, pid 8); the next begins in {seconds} s; "
        "1 of 1 restarts (max_restarts) are used"
        for seconds in (2, 4)
    ]
    assert isinstance(end, r.EndMesh) and isinstance(end.error, RestartBudgetExceeded)
    assert end.error.__cause__ is error and end.error.pid == 8
    machine = started(max_restarts=1)
    commands = machine.handle(r.FailureFound(DIED), 0.0)
    for _ in range(2):
        *_, wake = machine.handle(r.NotCarriedOut(machine.epoch, commands[-1], error), 1.0)
        commands = machine.handle(r.CarriedOut(machine.epoch, wake), 1.0)
    late = r.WINDOW_S - 1  # the failure leaves the window within the pause
    *_, wake = machine.handle(r.NotCarriedOut(machine.epoch, commands[-1], error), late)
    assert isinstance(wake, r.WakeUp) and wake.after_s == 8
    assert isinstance(machine.handle(r.CarriedOut(machine.epoch, wake), late + 8)[0], r.HoldBack)


def test_a_failed_recovery_tells_its_story():
    machine = in_state(State.RESTORING)
    (end,) = machine.handle(outcome(machine, KeyError("bug")), 61.5)
    assert isinstance(end, r.EndMesh)
    first, *rest = str(end.error).splitlines()
    assert first == "the restart failed: KeyError('bug'); its cause: actor 1 was killed"
    assert rest[0] == "The story of the restart:"
    assert rest[1:2] == [
        "     0.0 s  running: actor 1 was killed -> stopping",
    ]
    assert rest[-1] == "    61.5 s  restoring: MovePart failed: 'bug' -> ended"


def test_requests_that_cannot_be_made_again_end_the_mesh_with_the_cause_and_the_story():
    machine = in_state(State.ROLLING_BACK)
    (resume,) = carry_out(machine, list(machine._open), one_state=True)
    assert machine.state is State.RUNNING
    (end,) = machine.handle(r.NotCarriedOut(machine.epoch, resume, MeshError("too long")), 2.0)
    assert isinstance(end, r.EndMesh)
    first, *story = str(end.error).splitlines()
    assert first == "the restart failed: MeshError('too long'); its cause: actor 1 was killed"
    assert story[-1].endswith("running: Resume failed: too long -> ended")


def test_the_story_tells_of_each_actor_that_is_lost():
    machine = r.Recovery(Topology(4), max_restarts=1, replica_every=3)
    machine.handle(r.MeshStarted(), 0.0)
    machine.handle(r.FailureFound(DIED), 10.0)
    machine.handle(r.FailureFound(ActorDiedError("actor 3 too", actor=3)), 10.5)
    assert [line.strip() for line in machine.story] == [
        "0.0 s  running: actor 1 was killed -> stopping",
        "0.5 s  stopping: actor 3 too -> stopping",
    ]


# ---------------------------------------------------------------- random sequences


def simulate(seeds: range) -> set[tuple[State, r.Meaning]]:
    """Run one simulated mesh per seed, of various sizes, and return what the machine has met."""
    met = set()
    for seed in seeds:
        late = seed % 2 == 0  # failures begin when a replica is whole, and few follow it
        mesh = SimulatedMesh(
            seed,
            num_actors=1 + seed % 4,
            per_actor=2 if seed % 7 == 0 else 1,
            num_failures=2 + seed % 3 if late else seed % 5,
            fails_late=late,
            faults=0.05 if seed % 3 == 0 else 0.0,
            closes=seed % 5 == 0,
            replica_every=30 if late else 3,
            max_restarts=2 if seed % 11 == 0 else 100,
        )
        try:
            mesh.run()
        except Violation as violation:
            story = "\n".join(mesh.machine.story)
            raise Violation(f"seed {seed}: {violation}\n{story}") from None
        met |= mesh.meanings
    return met


@pytest.mark.parametrize("first", range(0, 10_000, 2_500))
def test_nothing_is_lost_repeated_or_kept_in_random_sequences(first):
    met = simulate(range(first, first + 2_500))
    working = {r.Meaning.PART, r.Meaning.ALL, r.Meaning.LOSS}
    assert {state for state, meaning in met if meaning in working} >= {State.RUNNING, *WORKING}
    assert {meaning for _, meaning in met} >= set(r.Meaning) - {r.Meaning.STARTED, r.Meaning.CLOSE}


def forget_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart makes only those requests again that have no answer."""
    needed = RequestHistory.needed
    monkeypatch.setattr(
        RequestHistory, "needed", lambda history: [q for q in needed(history) if not q.is_answered]
    )


def compare_no_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcome of a command of an earlier attempt counts."""
    meaning = r.Recovery._meaning

    def wrong(machine: r.Recovery, event: Any) -> r.Meaning:
        if isinstance(event, r.CarriedOut):
            event = r.CarriedOut(machine.epoch, event.command, event.result)
        return meaning(machine, event)

    monkeypatch.setattr(r.Recovery, "_meaning", wrong)


def count_as_whole_before_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica counts as whole when its parts have been sent, whether they have arrived or not."""
    enter = s.StateReplicas._enter

    def wrong(replicas: s.StateReplicas, stage: s.Stage, making: Any) -> list[s.ReplicaCommand]:
        commands = enter(replicas, stage, making)
        return (
            [*commands, *enter(replicas, s.Stage.SETTLING, making)] if stage is s.Stage.STORING else commands
        )

    monkeypatch.setattr(s.StateReplicas, "_enter", wrong)


def hand_nothing_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a lost actor kept for others is not handed to its successor."""
    monkeypatch.setattr(s.StateReplicas, "hand_over", lambda replicas, lost: [])


def count_as_whole_before_older_requests_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica counts as whole although requests from before it have no answer."""
    row = s._COURSE[s.Stage.STORING]
    monkeypatch.setitem(s._COURSE, s.Stage.STORING, type(row)(row.commands, s.Stage.IDLE))


PLANTED = {
    forget_replay: "has .* expected|runs on|an effect lasts",
    compare_no_epoch: "hangs|of epoch|in epoch|in another epoch",
    count_as_whole_before_it_is_stored: "is not where it should be|does not have replica",
    count_as_whole_before_older_requests_are_answered: "never answered",
    hand_nothing_over: "is not where it should be",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_random_sequences_find_planted_bugs(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(Violation, match=PLANTED[plant]):
        simulate(range(3_000))
