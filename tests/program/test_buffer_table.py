"""Tests of `program/buffer_table.py`: the bytes that a program's buffer table holds, and the most of them."""

from __future__ import annotations

import pytest

from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.buffer_table import PeakPlan, held_bytes, peak_plan
from jaxpp_async.program.instructions import Aval, Delete, Input, Output, Recv, Run, Send

SIZES = (10, 20, 30, 40)


def peak(*instructions, uncounted=()) -> PeakPlan:
    avals = tuple(Aval((n,), "int8") for n in SIZES)
    return peak_plan(ActorProgram(0, instructions, avals, frozenset(uncounted)))


def arg(slot: int) -> Input:
    return Input(slot, slot)


def recv(slot: int) -> Recv:
    return Recv(slot, 1, 0)


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        pytest.param([], (0, 0), id="nothing"),
        pytest.param([arg(0), arg(1)], (30, 1), id="arguments"),
        pytest.param(
            [recv(2), Run("f", 0, (2,), (0,)), Delete(2)], (40, 1), id="a receive, from its posting"
        ),
        pytest.param([arg(0), Run("f", 0, (0,), (1, 2))], (60, 1), id="inputs stay while results come"),
        pytest.param([arg(2), Run("f", 0, (2,), (1,), (0,)), arg(0)], (30, 0), id="donated ones go at once"),
        pytest.param([arg(1), Delete(1), arg(0)], (20, 0), id="the first of the highest"),
        pytest.param([arg(0), Delete(0), arg(1), Delete(1), arg(2)], (30, 4), id="one at a time"),
        pytest.param([arg(3), Output(3, 0), arg(2)], (40, 0), id="a result leaves"),
        pytest.param(
            [arg(3), Output(3, 0), Output(3, 1), arg(2), arg(1)], (50, 4), id="a result twice leaves once"
        ),
        pytest.param([arg(0), Send(0, 1, 0), arg(1)], (30, 2), id="a send moves nothing"),
    ],
)
def test_the_peak_is_the_most_that_is_held_and_the_first_instruction_that_reaches_it(instructions, expected):
    assert peak(*instructions) == PeakPlan(*expected)


def test_uncounted_slots_never_count():
    instructions = [arg(3), Run("f", 0, (3,), (1, 0)), Delete(3), Delete(1)]
    assert peak(*instructions) == PeakPlan(70, 1)
    assert peak(*instructions, uncounted=[3]) == PeakPlan(30, 1)
    assert peak(*instructions, uncounted=[0, 1, 3]) == PeakPlan(0, 0)


def test_a_sharded_array_counts_as_one_whole_copy():
    aval = Aval((4, 4), "bfloat16", ("x",))
    assert peak_plan(ActorProgram(0, (Input(0, 0),), (aval,))).peak_bytes == 32


def test_held_bytes_at_each_instruction():
    instructions = (
        Input(0, 0),
        Recv(1, 1, 0),
        Run("f", 0, (0, 1), (2,)),
        Delete(1),
        Run("g", 1, (2,), (3,), (0,)),
        Output(3, 0),
    )
    program = ActorProgram(
        0, instructions, tuple(Aval((n,), "float32") for n in (10, 2, 10, 10)), frozenset()
    )
    assert held_bytes(program) == [40, 48, 88, 80, 80, 40]
