"""Direct tests of how a program is made ready to execute."""

from __future__ import annotations

import pytest
from msgspec import msgpack

from jaxpp_async.actors.execution_plan import (
    BindInput,
    Drop,
    Execute,
    KeepOutput,
    PostRecv,
    StartSend,
    make_plan,
)
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import Aval, Delete, Input, Output, Recv, Run, Send

F4, F2 = Aval((4,), "float32"), Aval((2,), "float32")


def plan(*instructions, avals=(F4,) * 4, uncounted=frozenset()):
    return make_plan(ActorProgram(1, instructions, avals, uncounted))


def test_every_definition_of_a_slot_gets_a_number_of_its_own():
    made = plan(Recv(0, 2, 5), Delete(0), Recv(0, 2, 6), Send(0, 3, 7))
    assert made.commands == (
        PostRecv(0, 0, 2, 5, F4, private=False),
        Drop(0),
        PostRecv(2, 1, 2, 6, F4, private=False),
        StartSend(3, 1, 3, 7),
    )
    assert made.avals == (F4, F4)


def test_a_receive_that_leaves_the_step_or_is_donated_has_memory_of_its_own():
    made = plan(
        Recv(0, 2, 0),
        Recv(1, 2, 1),
        Recv(2, 2, 2),
        Run("r", 0, (0, 1), (3,), donated=(1,)),
        Output(2, 0),
    )
    assert [command.private for command in made.commands[:3]] == [False, True, True]
    assert made.commands[3] == Execute(3, 0, (0, 1), (3,), (1,))


def test_a_result_that_is_an_argument_or_a_result_already_is_copied():
    made = plan(Input(0, 0), Input(1, 1, donated=True), Output(0, 0), Output(1, 1), Output(1, 2))
    assert made.binds == (BindInput(0, 0, 0, False), BindInput(1, 1, 1, True))
    assert made.keeps == (
        KeepOutput(0, 0, copy=True),
        KeepOutput(1, 1, copy=False),
        KeepOutput(1, 2, copy=True),
    )


def test_bytes_count_but_for_slots_that_the_program_leaves_out():
    assert plan(Input(0, 0), Recv(1, 0, 0), uncounted=frozenset({0})).counted_bytes == (0, 16)


def test_the_next_run_may_be_issued_early_unless_it_consumes_what_is_sent_between():
    first, last = Run("a", 0, (0,), (1,)), Run("b", 0, (1,), (2,), donated=(0,))
    assert plan(Input(0, 0), first, last).next_run == {1: 2, 2: None}
    assert plan(Input(0, 0), first, Send(1, 0, 0), last).next_run == {1: None, 3: None}
    keeps = Run("b", 0, (1,), (2,))
    assert plan(Input(0, 0), first, Send(1, 0, 0), keeps).next_run == {1: 3, 3: None}


def test_receive_buffers_are_counted_by_the_most_that_are_held_at_once():
    made = plan(
        Recv(0, 2, 0),
        Recv(1, 2, 1),
        Delete(0),
        Recv(0, 2, 2),
        Recv(2, 2, 3),
        Run("r", 0, (0, 1), (3,), donated=(0, 1)),
        Recv(0, 2, 4),
        avals=(F4, F4, F2, F4),
    )
    assert made.max_receives == {F4: 2, F2: 1}


@pytest.mark.parametrize(
    ("instructions", "says"),
    [
        ([Send(0, 3, 7)], "instruction #0 (send   b0 to 3 tag 7): slot 0 holds no buffer"),
        (
            [Recv(0, 2, 5), Recv(0, 2, 6)],
            "instruction #1 (recv   b0 from 2 tag 6 f32[4]): slot 0 is defined while it holds a buffer",
        ),
        (
            [Recv(0, 2, 5), Output(0, 1), Delete(0)],
            "instruction #2 (delete b0): slot 0 has left the program as a result",
        ),
        (
            [Recv(4, 2, 5)],
            "instruction #0 (recv   b4 from 2 tag 5): slot 4 does not exist; the program has 4 slots",
        ),
        (
            [Input(-1, 0)],
            "instruction #0 (input  b-1 = arg 0): slot -1 does not exist; the program has 4 slots",
        ),
        (
            [Run("r", 0, (), (1, 7))],
            'instruction #0 (run    "r" exe 0 () -> (b1, b7)): '
            "slot 7 does not exist; the program has 4 slots",
        ),
        ([Send(-1, 3, 7)], "instruction #0 (send   b-1 to 3 tag 7): slot -1 holds no buffer"),
        ([Input(0, -1)], "instruction #0 (input  b0 = arg -1 f32[4]): arg -1 is negative"),
        (
            [Input(0, 0), Output(0, -2)],
            "instruction #1 (output b0 = result -2): result -2 is negative",
        ),
        (
            [Run("r", -3, (), (1,))],
            'instruction #0 (run    "r" exe -3 () -> (b1)): executable -3 is negative',
        ),
        ([Recv(0, 2, -5)], "instruction #0 (recv   b0 from 2 tag -5 f32[4]): tag -5 is negative"),
        (
            [Input(0, 0), Send(0, 1, -1)],
            "instruction #1 (send   b0 to 1 tag -1): tag -1 is negative",
        ),
        (
            [Input(0, 0, True), Run("r", 0, (0,), (1,), (-1,))],
            'instruction #1 (run    "r" exe 0 (b0) -> (b1) donate (-1)): '
            "position -1 of 1 inputs cannot be donated",
        ),
        (
            [Input(0, 0, True), Run("r", 0, (0,), (1,), (1,))],
            'instruction #1 (run    "r" exe 0 (b0) -> (b1) donate (1)): '
            "position 1 of 1 inputs cannot be donated",
        ),
        (
            [Input(0, 0, True), Run("r", 0, (0,), (1,), (0, 0))],
            'instruction #1 (run    "r" exe 0 (b0) -> (b1) donate (0, 0)): slot 0 holds no buffer',
        ),
    ],
)
def test_a_program_that_is_not_well_formed_is_refused_with_the_instruction_and_the_slot(instructions, says):
    with pytest.raises(ValueError) as caught:
        plan(*instructions)
    assert str(caught.value) == f"program of actor 1, {says}"


@pytest.mark.parametrize(
    ("slots", "says"),
    [
        ({"avals": (F4, Aval((2, -1), "float32"))}, "has a negative dimension"),
        ({"uncounted": frozenset({4})}, "slot 4 of 4 cannot be left out of the count"),
        ({"uncounted": frozenset({-1})}, "slot -1 of 4 cannot be left out of the count"),
        ({"avals": (Aval((2,), "float"),)}, "unknown dtype 'float'"),
    ],
)
def test_slots_that_cannot_be_are_refused(slots, says):
    with pytest.raises(ValueError, match=says):
        plan(Input(0, 0), **slots)


def test_equal_avals_of_a_decoded_program_become_one_object():
    program = ActorProgram(0, (Input(0, 0), Input(1, 1)), (F4, F4, F2, F4))
    decoded = msgpack.decode(msgpack.encode(program), type=ActorProgram)
    assert decoded == program and len(set(map(id, decoded.avals))) == 4
    made = make_plan(decoded)
    assert made.program == program and len(set(map(id, made.program.avals))) == 2
    assert made.avals[0] is made.avals[1] is made.program.avals[3]


def test_an_instruction_reads_with_its_position():
    assert plan(Recv(0, 2, 5)).text(0) == "#0 recv   b0 from 2 tag 5 f32[4]"
