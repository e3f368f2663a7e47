"""A step counts as stuck, and the diagnosis says why: programs, positions and reports in, no process
anywhere."""

from __future__ import annotations

import pytest
from msgspec import structs

from jaxpp_async.controller.error_messages import ActorInfo, silent_error, stuck_error
from jaxpp_async.controller.stall_detector import StallDetector, describe_position
from jaxpp_async.errors import ActorUnresponsiveError, TransferError
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import CONTROLLER, Aval, Input, Output, Recv, Run, Send
from jaxpp_async.protocol import messages as m
from jaxpp_async.protocol.actor_info import Position

AVAL = Aval((1024,), "float32")
SIZE = 4096

# Three stages in a row: forward 0 -> 1 -> 2, backward 2 -> 1 -> 0.
PROGRAMS = {
    0: (
        Input(0, 0),
        Run("fwd(stage 0, mb 0)", 0, (0,), (1,)),
        Send(1, 1, 0),
        Recv(2, 1, 3),
        Run("bwd(stage 0, mb 0)", 1, (1, 2), (3,)),  # 4
        Output(3, 0),
    ),
    1: (
        Recv(0, 0, 0),
        Run("fwd(stage 1, mb 0)", 0, (0,), (1,)),  # 1
        Send(1, 2, 1),
        Recv(2, 2, 2),
        Run("bwd(stage 1, mb 0)", 1, (0, 2), (3,)),  # 4
        Send(3, 0, 3),
    ),
    2: (
        Recv(0, 1, 1),
        Run("fwd_bwd(stage 2, mb 0)", 0, (0,), (1,)),  # 1
        Send(1, 1, 2),
    ),
}
PARTS = {a: ActorProgram(a, instructions, (AVAL,) * 4) for a, instructions in PROGRAMS.items()}
STEP = m.step_id(7)
INFOS = {a: ActorInfo(a, f"node{a}", 100 + a, (), "ready") for a in PARTS}


def part(program_id: int, actor: int) -> ActorProgram | None:
    return PARTS.get(actor) if program_id == 5 else None


def at(instruction: int, *, step: int = STEP, waiting: bool = True, computing: bool = False) -> Position:
    return Position(step, 5, instruction, waiting, computing)


def receive(buffer: int, peer: int, tag: int, **options) -> m.OpenTransfer:
    return m.OpenTransfer(
        **{"kind": "receive", "buffer": buffer, "peer": peer, "tag": tag, **OPEN, **options}
    )


def send(buffer: int, peer: int, tag: int, **options) -> m.OpenTransfer:
    return receive(buffer, peer, tag, **{"kind": "send", "needed": False, **options})


OPEN = {"size_bytes": SIZE, "posted": True, "needed": True}


def reported(
    instruction: int,
    *transfers: m.OpenTransfer,
    step: int | None = STEP,
    running: bool = False,
    done: int = 0,
):
    return m.Reported(step, 5, instruction, f"#{instruction} run", running, done, transfers)


def stuck_after(
    stuck: StallDetector,
    positions,
    unfinished=None,
    *,
    silent=(),
    start: float = 0.0,
    until: float | None = None,
):
    """The time at which a stall is found while nothing changes, and the stall."""
    now = start
    while now <= (start + 100.0 if until is None else until):
        stall = stuck.judge(now, unfinished or dict.fromkeys(positions, STEP), positions, silent)
        if stall is not None:
            return now, stall
        now += 0.5
    return None


WAITING = {0: at(4), 1: at(4), 2: at(1)}
"""0 waits for 1, which waits for 2, which waits for what 1 has sent."""

# ---------------------------------------------------------------- when


@pytest.mark.parametrize(
    ("positions", "when", "actors"),
    [
        (WAITING, 10.0, (0, 1, 2)),
        ({**WAITING, 2: at(1, waiting=False, computing=True)}, None, ()),  # the end of the chain computes
        ({**WAITING, 1: at(4, waiting=False, computing=True)}, None, ()),
        ({0: at(4), 1: at(1)}, 10.0, (0, 1)),
        ({1: at(6), 2: at(1)}, 10.0, (1, 2)),  # 1 waits at its end until what it sent has gone
        ({0: at(4, step=6), 1: None}, 10.0, (0, 1)),  # begun the step has neither: they can only be asked
        ({0: at(1, waiting=False)}, 10.0, (0,)),  # neither waits nor computes: so is its event loop
    ],
)
def test_a_step_is_stuck_when_nobody_in_the_chain_moves(positions, when, actors):
    found = stuck_after(StallDetector(part), positions)
    if when is None:
        assert found is None
    else:
        assert (
            found is not None and found[0] == when and found[1].actors == actors and found[1].still_s == when
        )


def test_who_computes_elsewhere_does_not_hold_up_the_clock():
    """0 and 1 wait for each other, and not for 2, which computes."""
    parts = {
        **PARTS,
        2: PARTS[0],
        0: structs.replace(PARTS[2], instructions=(Recv(0, 1, 1), *PROGRAMS[2][1:])),
    }
    parts[1] = structs.replace(PARTS[1], instructions=(Recv(0, 0, 0), *PROGRAMS[1][1:]))
    positions = {0: at(1), 1: at(1), 2: at(1, waiting=False, computing=True)}
    found = stuck_after(StallDetector(lambda program_id, actor: parts[actor]), positions)
    assert found is not None and found[0] == 10.0 and found[1].actors == (0, 1)


@pytest.mark.parametrize("what", ["position", "step", "restart", "computed"])
def test_any_move_restarts_the_clock(what):
    stuck, positions, unfinished = StallDetector(part), dict(WAITING), dict.fromkeys(WAITING, STEP)
    assert stuck_after(stuck, positions, unfinished, until=9.0) is None
    if what == "position":
        positions[2] = at(3)
    elif what == "step":
        unfinished = dict.fromkeys(WAITING, 8)
    elif what == "restart":
        stuck.restart()
    else:
        stuck.judge(9.5, unfinished, {**positions, 1: at(4, waiting=False, computing=True)})
    found = stuck_after(stuck, positions, unfinished, start=9.5)
    assert found is not None and found[0] == 19.5


def test_silent_actors_are_left_to_the_monitor():
    stuck = StallDetector(part)
    assert stuck_after(stuck, WAITING, silent={2}) is None
    found = stuck_after(stuck, WAITING, start=100.5)
    assert found is not None and found[0] == 100.5


def test_an_idle_mesh_is_not_stuck():
    stuck = StallDetector(part)
    for now in range(100):
        assert stuck.judge(now, {}, {0: at(4)}) is None
    found = stuck_after(stuck, WAITING, start=100.0)  # a step submitted after a long rest
    assert found is not None and found[0] == 110.0


# ---------------------------------------------------------------- whether, after all

LOST = {
    0: reported(4, receive(2, 1, 3)),
    1: reported(4, receive(2, 2, 2), send(1, 2, 1)),
    2: reported(1, receive(0, 1, 1)),
}
"""1 has sent tag 1, and 2 waits to receive it."""


def conclude(reports, *, now: float = 10.0, unfinished=None, positions=None, silent=(), stuck=None):
    stuck = stuck or StallDetector(part)
    unfinished = unfinished or dict.fromkeys(reports, STEP)
    found = stuck_after(stuck, positions or {a: WAITING[a] for a in reports}, unfinished)
    assert found is not None
    return stuck.conclude(found[0] + now - 10.0, found[1], unfinished, reports, silent)


@pytest.mark.parametrize(
    "reports",
    [
        {**LOST, 2: reported(1, running=True)},
        {**LOST, 1: reported(4, running=True)},
        {**LOST, 2: reported(3)},  # it has gone on since its last beat
    ],
    ids=["computes", "computes in the chain", "moved"],
)
def test_not_stuck_after_all(reports):
    assert conclude(reports) is None


def test_a_quiet_actor_that_does_not_answer_is_left_to_the_monitor():
    assert conclude({**LOST, 1: None}, silent={1}) is None
    diagnosis = conclude({**LOST, 1: None})
    assert diagnosis is not None and diagnosis.cause == "deaf"


def test_large_transfers_get_a_second_for_50_mb():
    stuck, unfinished = StallDetector(part), dict.fromkeys(WAITING, STEP)
    large = {**LOST, 2: reported(1, receive(0, 1, 1, size_bytes=250_000_000))}
    assert conclude(large, stuck=stuck) is None
    found = stuck_after(stuck, WAITING, start=10.5)
    assert found is not None and found[0] == 15.0
    assert stuck.conclude(15.0, found[1], unfinished, large).cause == "lost"
    stuck = StallDetector(part)
    assert conclude(large, stuck=stuck) is None
    found = stuck_after(stuck, WAITING, start=10.5)
    trickling = {**large, 2: structs.replace(large[2], transfers_done=1)}
    assert stuck.conclude(15.0, found[1], unfinished, trickling) is None  # slow, but it comes
    found = stuck_after(stuck, WAITING, start=15.5)
    assert found is not None and found[0] == 25.0


# ---------------------------------------------------------------- why


@pytest.mark.parametrize(
    ("reports", "cause", "culprit", "waits"),
    [
        (
            LOST,
            "lost",
            "b0 of actor 2 (4,096 bytes, tag 1) is on its way from actor 1 to actor 2, both of which live",
            (
                "actor 0 waits for b2 from actor 1 (tag 3, 4,096 bytes)",
                "actor 1 waits for b2 from actor 2 (tag 2, 4,096 bytes)",
                "actor 2 waits for b0 from actor 1 (tag 1, 4,096 bytes), which has sent it",
            ),
        ),
        (  # 1 says that the send is done; it never arrived
            {**LOST, 1: reported(4, receive(2, 2, 2))},
            "lost",
            "b0 of actor 2 ",
            3,
        ),
        (  # 1 has finished the step altogether
            {0: reported(4, receive(2, 1, 3))},
            "lost",
            "b2 of actor 0 (4,096 bytes, tag 3) is on its way from actor 1 to actor 0",
            1,
        ),
        (  # 1 waits at its end until 2 has taken what it sent, which 2 is ready for
            {1: reported(6, send(1, 2, 1, needed=True)), 2: reported(1, receive(0, 1, 1))},
            "lost",
            "b1 of actor 1 (4,096 bytes, tag 1) is on its way from actor 1 to actor 2",
            1,
        ),
        ({**LOST, 1: None}, "deaf", "actor 1 lives but does not answer: its event loop is blocked", 1),
        (
            {**LOST, 1: m.Reported(None)},
            "idle",
            "actor 1 has not begun step 7, which it was told to run",
            1,
        ),
        (  # 0 is a step ahead; what 1 lacks of the step before is what holds both up
            {0: reported(4, receive(2, 1, 3)), 1: reported(1, receive(0, 0, 0), step=6)},
            "lost",
            "b0 of actor 1 (4,096 bytes, tag 0) is on its way from actor 0 to actor 1",
            2,
        ),
        (
            {0: reported(1, receive(0, CONTROLLER, -1, kind="argument"))},
            "controller",
            "actor 0 waits for argument b0 (4,096 bytes) from the controller, which does not arrive",
            1,
        ),
        (
            {0: reported(4, receive(2, 1, 3)), 1: reported(1, receive(0, 0, 9))},
            "cycle",
            "actors 0, 1 wait for each other in a circle",
            2,
        ),
        ({0: reported(4)}, "none", "actor 0 waits for nothing and does not go on", 0),
        (  # a send whose data has not come is no send yet
            {
                0: reported(4, receive(2, 1, 3)),
                1: reported(
                    6,
                    send(3, 0, 3, posted=False, needed=False),
                    receive(9, CONTROLLER, -1, kind="argument", needed=False),
                ),
            },
            "controller",
            "actor 1 waits for argument b9",
            2,
        ),
    ],
)
def test_the_first_culprit(reports, cause, culprit, waits):
    positions = {
        a: at(r.instruction) if r is not None and r.step == STEP else None for a, r in reports.items()
    }
    diagnosis = conclude(reports, positions=positions)
    assert diagnosis is not None and diagnosis.cause == cause and diagnosis.culprit.startswith(culprit)
    assert diagnosis.waits == waits if isinstance(waits, tuple) else len(diagnosis.waits) == waits
    assert diagnosis.step == STEP and sorted(diagnosis.places) == sorted(reports)


def test_the_surest_culprit_wins():
    """0 waits for two: of one it has been heard that it does not answer, the other's data is lost."""
    reports = {0: reported(4, receive(2, 1, 3), receive(3, 2, 8)), 1: None, 2: reported(3, send(5, 0, 8))}
    diagnosis = conclude(reports, positions={0: at(4), 1: None, 2: at(3)})
    assert diagnosis is not None and diagnosis.cause == "lost" and diagnosis.chain == (0, 1)


# ---------------------------------------------------------------- what a user reads


def test_the_error_of_a_lost_transfer():
    diagnosis = conclude(LOST)
    assert diagnosis is not None
    error = stuck_error(diagnosis, 10.4, INFOS)
    assert isinstance(error, TransferError)
    assert (error.actor, error.host, error.pid, error.step) == (2, "node2", 102, 7)
    lines = str(error).splitlines()
    assert lines[0].startswith(
        "step 7 has not gone on for 10.4 s: b0 of actor 2 (4,096 bytes, tag 1) is on its way from"
    )
    assert lines[1] == "Who waits for whom:" and lines[5] == "Where each actor is:"
    assert lines[6] == "  actor 0 (host node0, pid 100): step 7, #4 run bwd(stage 0, mb 0)"


def test_the_errors_of_other_causes():
    for reports, actor in (
        ({**LOST, 1: None}, 1),
        ({0: reported(1, receive(0, CONTROLLER, -1, kind="argument"))}, None),
    ):
        diagnosis = conclude(
            reports, positions={**dict.fromkeys(reports), **WAITING} if 1 in reports else {0: at(1)}
        )
        assert diagnosis is not None
        error = stuck_error(diagnosis, 12.0, INFOS)
        assert type(error) is ActorUnresponsiveError and error.actor == actor and error.step == 7


def test_the_error_of_a_silent_actor():
    where = describe_position(part, 1, at(1, waiting=False, computing=True))
    error = silent_error(INFOS[1], 10.24, STEP, where)
    assert str(error).startswith(
        "actor 1 (host node1, pid 101) has not been heard of for 10.2 s; it was last at "
    )
    assert "last at run fwd(stage 1, mb 0) of step 7; it may be stopped (SIGSTOP)" in str(error)
    assert (error.actor, error.host, error.pid, error.step) == (1, "node1", 101, 7)
    assert "last at" not in str(silent_error(INFOS[1], 10.0, None, None))


def test_positions_read_as_instructions():
    assert describe_position(part, 0, at(6)) == "the end of step 7, with transfers open"
    assert describe_position(part, 0, at(4)).endswith("of step 7, waiting for data")
    assert (
        describe_position(part, 9, at(4))
        == describe_position(part, 0, Position(STEP, 99, 4, True))
        == "step 7"
    )


def test_hundreds_of_actors_in_a_row():
    """The chain is followed without recursion, and the message stays short enough to read."""
    count = 2000
    reports = {a: reported(0, receive(0, a + 1, a)) for a in range(count - 1)} | {count - 1: None}
    diagnosis = conclude(reports, positions=dict.fromkeys(reports))
    assert diagnosis is not None and diagnosis.cause == "deaf" and diagnosis.actor == count - 1
    assert len(stuck_error(diagnosis, 10.0, {}).args[0].splitlines()) < 80
