"""Direct tests of how arrays lie on an actor's processes, and of which process sends which part to whom."""

from __future__ import annotations

from collections import Counter, defaultdict

import ml_dtypes
import numpy as np
import pytest

from jaxpp_async.layout.array_parts import (
    Gathering,
    Part,
    PieceTransfer,
    Scattering,
    join_parts,
    numpy_dtype,
    order_receives,
    order_sends,
    parts_of,
    plan_receives,
    plan_relays,
    plan_sends,
    sequence_number,
    total_bytes,
)
from jaxpp_async.program.instructions import Aval
from jaxpp_async.protocol.actor_info import ProcessRank
from jaxpp_async.transport.nccl.order import NcclLink, OrderedMessage

AXES = (("x", 2), ("y", 2))
ALL = slice(None)
SPECS = [
    Aval((4, 6), "float32"),
    Aval((4, 6), "float32", ("x",)),
    Aval((4, 6), "float32", ("y", "x")),
    Aval((4, 6), "float32", (("y", "x"),)),
    Aval((4, 6), "float32", (None, "y")),
    Aval((), "int32"),
]


# ---------------------------------------------------------------- parts


def test_an_array_split_by_one_axis_has_a_part_for_each_index_of_it():
    first, second = parts_of(Aval((4, 6), "float32", ("x",)), AXES, num_processes=2)
    assert first == Part(0, (slice(0, 2), ALL), (2, 6), positions=(0, 1), ranks=(0,))
    assert second == Part(1, (slice(2, 4), ALL), (2, 6), positions=(2, 3), ranks=(1,))


def test_a_part_of_the_inner_axis_is_held_by_every_process():
    first, second = parts_of(Aval((4,), "float32", ("y",)), AXES, num_processes=2)
    assert (first.positions, first.ranks) == ((0, 2), (0, 1))
    assert (second.positions, second.ranks) == ((1, 3), (0, 1))


def test_parts_are_numbered_as_the_devices_first_hold_them_and_not_by_their_index():
    parts = parts_of(Aval((8,), "float32", (("y", "x"),)), AXES)
    assert [part.index for part in parts] == [(slice(0, 2),), (slice(4, 6),), (slice(2, 4),), (slice(6, 8),)]
    assert [part.number for part in parts] == [0, 1, 2, 3]


def test_what_is_still_to_be_added_up_has_a_part_for_each_summand_of_the_whole_shape():
    parts = parts_of(Aval((4,), "float32", (), unreduced=("x",)), AXES)
    assert [(part.index, part.shape, part.positions) for part in parts] == [
        ((ALL,), (4,), (0, 1)),
        ((ALL,), (4,), (2, 3)),
    ]


def test_the_owner_of_a_part_goes_round_its_holders_with_the_salt():
    part = Part(1, (), (), positions=(0, 2, 4), ranks=(0, 2, 5))
    assert [part.owner(salt) for salt in range(4)] == [2, 5, 0, 2]


@pytest.mark.parametrize(
    ("aval", "says"),
    [
        (Aval((4,), "float32", ("z",)), "names the axis 'z', the mesh has ['x', 'y']"),
        (Aval((4, 3), "float32", (None, "y")), "cannot be split over a mesh of {'x': 2, 'y': 2}"),
    ],
)
def test_a_spec_that_does_not_fit_the_mesh_is_refused_with_the_array_and_the_mesh(aval, says):
    with pytest.raises(ValueError) as caught:
        parts_of(aval, AXES)
    assert str(caught.value) == f"{aval} {says}"


# ---------------------------------------------------------------- transfers between actors


def held(process_rank: ProcessRank, aval: Aval) -> list[Part]:
    return [part for part in parts_of(aval, AXES, process_rank.size) if process_rank.rank in part.ranks]


def test_a_replicated_array_crosses_once_and_is_passed_on_where_it_arrives():
    aval, tag = Aval((4,), "float32"), 3  # one part; rank 1 owns it for an odd tag
    process_ranks = {process: ProcessRank(process, 2) for process in range(6)}
    assert plan_sends(process_ranks[1], held(process_ranks[1], aval), tag, 2, 4) == (
        PieceTransfer(0, peer=5, sequence=12),
    )
    assert plan_sends(process_ranks[0], held(process_ranks[0], aval), tag, 2, 4) == ()
    assert plan_receives(process_ranks[5], held(process_ranks[5], aval), tag, 0, 4) == (
        PieceTransfer(0, peer=1, sequence=12),
    )
    assert plan_receives(process_ranks[4], held(process_ranks[4], aval), tag, 0, 4) == (
        PieceTransfer(0, peer=5, sequence=12),
    )
    assert plan_relays(process_ranks[5], held(process_ranks[5], aval), tag, 4) == {
        0: (PieceTransfer(0, peer=4, sequence=12),)
    }
    assert plan_relays(process_ranks[4], held(process_ranks[4], aval), tag, 4) == {}


@pytest.mark.parametrize("aval", SPECS, ids=str)
@pytest.mark.parametrize("tag", [0, 1, 6])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_message_that_is_sent_or_passed_on_is_one_that_somebody_receives(aval, tag, size):
    out, into = Counter(), Counter()
    for rank in range(size):
        source, target = ProcessRank(rank, size), ProcessRank(size + rank, size)
        messages = plan_sends(source, held(source, aval), tag, 1, 4)
        out.update((source.process, message.peer, message.sequence) for message in messages)
        passed_on = plan_relays(target, held(target, aval), tag, 4).values()
        out.update(
            (target.process, message.peer, message.sequence) for messages in passed_on for message in messages
        )
        arriving = plan_receives(target, held(target, aval), tag, 0, 4)
        into.update((message.peer, target.process, message.sequence) for message in arriving)
    assert out == into
    assert set(out.values()) == {1}


def test_no_two_parts_of_two_transfers_share_a_sequence_number():
    parts = parts_of(Aval((8,), "float32", (("x", "y"),)), AXES)
    numbers = [sequence_number(tag, part, 4) for tag in range(3) for part in parts]
    assert numbers == list(range(12))


# ---------------------------------------------------------------- the order of transfers


def test_a_message_in_order_names_the_first_device_of_each_process_that_holds_the_part():
    process_rank = ProcessRank(0, 2)  # devices 0 and 1 of 4
    aval = Aval((4,), "float32", ("y",))  # parts on devices (0, 2) and (1, 3)
    assert list(order_sends(process_rank, held(process_rank, aval), 0, 1, 4)) == [
        OrderedMessage(0, NcclLink(0, 2, 0, 0))
    ]
    assert list(order_receives(process_rank, held(process_rank, aval), 0, 1, 4)) == [
        OrderedMessage(0, NcclLink(2, 0, 0, 0)),  # owned: from the other actor
        OrderedMessage(1, NcclLink(1, 0, 1, 1)),  # from the process of its actor that owns it
        OrderedMessage(0, NcclLink(0, 1, 0, 0)),  # then what that process needs
    ]


@pytest.mark.parametrize("aval", SPECS, ids=str)
def test_both_ends_of_a_link_list_the_same_messages_in_the_same_order(aval):
    starts, arrivals = defaultdict(list), defaultdict(list)
    for tag in range(4):
        for rank in range(2):
            source, target = ProcessRank(rank, 2), ProcessRank(2 + rank, 2)
            for number, link in order_sends(source, held(source, aval), tag, 1, 4):
                starts[link].append(number)
            for number, link in order_receives(target, held(target, aval), tag, 0, 4):
                (starts if link.sender == target.process else arrivals)[link].append(number)
    assert starts == arrivals
    assert starts


# ---------------------------------------------------------------- scattering


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float32", np.dtype("float32")),
        ("bool", np.dtype("bool")),
        ("bfloat16", np.dtype(ml_dtypes.bfloat16)),
        ("float8_e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn)),
        ("int4", np.dtype(ml_dtypes.int4)),
    ],
)
def test_a_dtype_is_found_by_the_name_that_an_aval_carries(name, dtype):
    assert numpy_dtype(name) == dtype


def test_pieces_are_copies_of_the_bytes_of_each_part_with_their_owner():
    how = Scattering(AXES, per_actor=2)
    value = np.arange(4, dtype=np.float32)
    pieces = how.pieces(0, Aval((4,), "float32", ("x",)), value)
    value[:] = 9
    assert [(owner, number, data.view(np.float32).tolist()) for owner, number, data in pieces] == [
        (0, 0, [0, 1]),
        (1, 1, [2, 3]),
    ]


def test_owned_parts_are_listed_by_rank_and_who_owns_none_is_left_out():
    how = Scattering(AXES, per_actor=4)
    owned = how.owned(1, Aval((4,), "float32", ("x",)))
    assert {rank: [part.number for part in parts] for rank, parts in owned.items()} == {1: [0], 2: [1]}


def test_of_an_actor_of_one_process_a_fetch_asks_for_whole_arrays():
    aval = Aval((2,), "float32", ("x",))
    gathering = Gathering([(1, 7, aval), (0, 8, aval)], Scattering(AXES, per_actor=1))
    assert gathering.requests == {1: [(7, aval)], 0: [(8, aval)]}
    first, second = np.zeros(2, np.float32), np.ones(2, np.float32)
    assert [id(array) for array in gathering.arrays({0: [second], 1: [first]})] == [id(first), id(second)]


@pytest.mark.parametrize("aval", SPECS, ids=str)
@pytest.mark.parametrize("per_actor", [2, 4])
def test_what_processes_send_of_an_array_is_put_together_to_the_array(aval, per_actor):
    how = Scattering(AXES, per_actor)
    value = np.arange(int(np.prod(aval.shape)), dtype=aval.dtype).reshape(aval.shape)
    gathering = Gathering([(1, 5, aval)], how)
    answers = {}
    for process, asked in gathering.requests.items():
        owned = [data for rank, _, data in how.pieces(5, aval, value) if how.process(1, rank) == process]
        answers[process] = [np.concatenate(owned)]
        ((array_id, flat),) = asked
        assert (array_id, flat.dtype, flat.shape) == (5, "uint8", answers[process][0].shape)
    (found,) = gathering.arrays(answers)
    assert found.dtype == value.dtype
    np.testing.assert_array_equal(found, value)


def test_bytes_of_parts_are_placed_by_their_parts_and_not_by_their_order():
    aval = Aval((4,), "bfloat16", ("x",))
    first, second = parts_of(aval, AXES)
    data = np.array([3, 4, 1, 2], ml_dtypes.bfloat16).view(np.uint8)
    assert total_bytes([first, second], aval) == data.nbytes == 8
    assert join_parts(aval, [((second, first), data)]).tolist() == [1, 2, 3, 4]


def test_scattering_finds_the_first_process_of_an_actor():
    how = Scattering(AXES, per_actor=2)
    assert [how.first_of(process) for process in range(5)] == [0, 0, 2, 2, 4]
    assert how.splits
    assert not Scattering(AXES, 1).splits
