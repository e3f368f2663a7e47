"""Direct tests of how processes are numbered, what is known of them, and where they are in their programs."""

from __future__ import annotations

import os

import pytest

from jaxpp_async.protocol.actor_info import (
    ActorInfo,
    Position,
    ProcessRank,
    ProgressPage,
    Topology,
    actor_and_rank,
    furthest_behind,
    ignore_progress,
    make_page,
    merge_processes,
    process_of,
)

# ---------------------------------------------------------------- numbers of processes


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_actor_and_the_rank_of_a_process_lead_back_to_its_number(size):
    for process in range(7):
        actor, rank = actor_and_rank(process, size)
        assert process_of(actor, rank, size) == process
        assert 0 <= rank < size


def test_the_processes_of_an_actor_have_consecutive_numbers():
    mesh = Topology(num_actors=3, per_actor=2)
    assert mesh.count == 6
    assert [list(mesh.processes_of(actor)) for actor in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert [mesh.actor_of(process) for process in mesh.everyone] == [0, 0, 1, 1, 2, 2]
    assert [mesh.rank_of(process) for process in mesh.everyone] == [0, 1, 0, 1, 0, 1]


def test_a_process_exchanges_data_with_its_own_actor_and_with_its_rank_in_other_actors():
    mesh = Topology(num_actors=3, per_actor=3)
    assert mesh.peers_of(4) == {3, 5, 1, 7}
    assert Topology(2).peers_of(0) == {1}
    assert Topology(1).peers_of(0) == set()


def test_processes_of_several_actors_come_in_order_whatever_order_the_actors_have():
    assert Topology(3, 2).processes_of_all([2, 0]) == [0, 1, 4, 5]


def test_a_process_knows_those_of_its_actor_and_its_counterparts_in_others():
    process_rank = ProcessRank(process=5, size=3)
    assert (process_rank.actor, process_rank.rank) == (1, 2)
    assert (process_rank.process_of_rank(0), process_rank.counterpart_in(0)) == (3, 2)


@pytest.mark.parametrize(
    ("process_rank", "text"),
    [
        (ProcessRank(4), "actor 4"),
        (ProcessRank(3, 2), "actor 1 (process 1 of 2)"),
        (ProcessRank(0, 2), "actor 0 (process 0 of 2)"),
    ],
)
def test_a_process_is_named_only_where_its_actor_has_several(process_rank, text):
    assert str(process_rank) == text


# ---------------------------------------------------------------- what is known of an actor


def info(rank: int, state: str = "ready", size: int = 2) -> ActorInfo:
    devices, gpus = (f"cpu:{rank}",), (f"GPU-{rank}",)
    return ActorInfo(3, f"h{rank}", 100 + rank, devices, state, rank=rank, size=size, gpus=gpus)


def test_an_actor_of_several_processes_has_the_devices_of_all_and_the_host_and_pid_of_the_first():
    actor = merge_processes([info(0), info(1)])
    assert (actor.id, actor.host, actor.pid, actor.size) == (3, "h0", 100, 1)
    assert (actor.devices, actor.gpus) == (("cpu:0", "cpu:1"), ("GPU-0", "GPU-1"))
    assert actor.processes == (info(0), info(1))


@pytest.mark.parametrize(
    ("states", "state"),
    [
        (("ready", "ready"), "ready"),
        (("ready", "closed"), "closed"),
        (("closed", "waiting"), "waiting"),
        (("waiting", "starting"), "starting"),
        (("starting", "restarting"), "restarting"),
        (("failed", "restarting"), "failed"),
    ],
)
def test_an_actor_is_as_well_as_the_worst_of_its_processes(states, state):
    assert merge_processes([info(rank, state) for rank, state in enumerate(states)]).state == state
    assert merge_processes([info(rank, state) for rank, state in enumerate(reversed(states))]).state == state


def test_an_actor_of_one_process_has_itself_as_its_process():
    alone = info(0, size=1)
    actor = merge_processes([alone])
    assert actor.processes == (alone,)
    assert repr(actor) == "<actor 3 (host h0, pid 100): ready cpu:0>"


def test_texts_name_host_and_pid_of_the_process_that_is_meant():
    assert str(info(1)) == "actor 3 (process 1 of 2: host h1, pid 101)"
    assert info(1).process == 7
    assert repr(merge_processes([info(0), info(1, "failed")])) == (
        "<actor 3: failed cpu:0 cpu:1; 2 processes: host h0 pid 100 ready, host h1 pid 101 failed>"
    )


# ---------------------------------------------------------------- progress


def test_what_is_noted_on_a_page_is_read_at_its_other_end():
    descriptor = make_page()
    theirs, ours = ProgressPage(os.dup(descriptor)), ProgressPage(descriptor)
    try:
        assert ours.read() is None
        theirs.note(1 << 40, 2, 3, True)
        assert ours.read() == Position(1 << 40, 2, 3, waiting=True, computing=False)
        theirs.note(7, 0, 4, False, True)
        assert ours.read() == Position(7, 0, 4, waiting=False, computing=True)
    finally:
        theirs.close()
        ours.close()


def test_a_page_takes_over_its_descriptor_and_reads_nothing_once_closed():
    descriptor = make_page()
    page = ProgressPage(descriptor)
    with pytest.raises(OSError):
        os.fstat(descriptor)
    page.note(1, 2, 3, False)
    page.close()
    page.close()
    assert page.read() is None


def test_a_page_that_nobody_else_sees_needs_no_descriptor():
    page = ProgressPage(None)
    page.note(1, 2, 3, True)
    assert page.read() == Position(1, 2, 3, True)
    page.close()
    assert ignore_progress(1, 2, 3, True) is None


AT = [Position(5, 0, 3, False), Position(5, 0, 2, False, computing=True), Position(4, 0, 9, True)]


@pytest.mark.parametrize(
    ("positions", "found"),
    [
        (AT, AT[2]),  # an earlier step, whatever the instruction
        (AT[:2], AT[1]),
        ([Position(5, 0, 2, False, computing=True), Position(5, 0, 2, True)], Position(5, 0, 2, True)),
        ([AT[0], None], None),  # one has told nothing
        ([], None),
    ],
)
def test_an_actor_is_where_the_process_is_that_is_furthest_behind(positions, found):
    assert furthest_behind(positions) == found
