"""Rules of one program by itself, the numbers that it assigns, and waits of several programs together."""

from __future__ import annotations

import pytest

from jaxpp_async.compiler.verify import (
    AssignedIds,
    BlockedActor,
    InternalError,
    check_deadlock,
    find_blocked_actors,
    verify_program,
)
from jaxpp_async.errors import ScheduleError
from jaxpp_async.program.actor_program import ActorProgram, format_instruction
from jaxpp_async.program.instructions import Aval, Delete, Input, Output, Recv, Run, Send

F4 = Aval((4,), "float32")

# ---------------------------------------------------------------- numbers that were assigned


def test_numbers_that_come_in_order_and_others_are_all_known():
    made = AssignedIds(10)
    assert made.extend([0, 1]) and made.extend([])
    for number in (4, 3):
        made.add(number)
    assert [n for n in range(-2, 12) if n in made] == [0, 1, 3, 4]
    assert (made.has([0, 3]), made.has([0, 2]), made.has([]), made.has([-1, 0])) == (True, False, True, False)
    made.add(2)  # closes the gap
    assert (made.upto, made.beyond) == (5, set())
    assert made.has([4, 0]) and made.extend([5, 6])


@pytest.mark.parametrize(
    ("before", "numbers"),
    [
        pytest.param([], [1], id="not the next"),
        pytest.param([], [0, 2], id="with a gap"),
        pytest.param([], [1, 0], id="in another order"),
        pytest.param([0], [0], id="again"),
        pytest.param([], [0, 1, 2, 3], id="too many"),
        pytest.param([1], [0], id="behind a gap"),
    ],
)
def test_other_numbers_than_the_next_ones_are_not_assigned_at_once(before, numbers):
    made = AssignedIds(3)
    for number in before:
        made.add(number)
    assert made.extend(numbers) is False
    assert [n for n in range(4) if n in made] == before


# ---------------------------------------------------------------- one program


def program(*instructions, slots: int = 4, uncounted=frozenset()) -> ActorProgram:
    return ActorProgram(3, instructions, (F4,) * slots, uncounted)


KEPT, OWN = Input(0, 0), Input(0, 0, True)
BUG = "; this is a bug in jaxpp_async.compiler.lowering"


@pytest.mark.parametrize(
    "instructions",
    [
        pytest.param([KEPT], id="a kept argument stays"),
        pytest.param([OWN, Delete(0)], id="an own argument is deleted"),
        pytest.param(
            [OWN, Run("f", 0, (0,), (1,), (0,)), Output(1, 0), Output(1, 1)], id="two results of one"
        ),
        pytest.param(
            [Recv(0, 1, 0), Run("f", 0, (0, 0), (2, 1)), Delete(0), Delete(1), Delete(2)], id="any order"
        ),
    ],
)
def test_a_program_that_keeps_the_rules_passes(instructions):
    verify_program(program(*instructions))


RUN = Run("f", 7, (0,), (1,), (0,))


@pytest.mark.parametrize(
    ("instructions", "message"),
    [
        ([Send(0, 1, 0)], "b0 is read before it is made"),
        ([Delete(0)], "0 'delete b0': b0 is read before it is made"),
        ([RUN], "b0 is read before it is made"),
        ([OWN, Delete(0), Delete(1)], "2 'delete b1': b1 is read before it is made"),
        ([OWN, Delete(0), Delete(0)], "2 'delete b0': b0 was deleted before"),
        ([OWN, RUN, Send(0, 1, 0)], "b0 was donated before"),
        ([OWN, Output(0, 0), Delete(0)], "b0 has left the program"),
        ([OWN, Input(0, 1)], "b0 is assigned twice"),
        ([OWN, Input(1, 0)], "argument 0 is bound twice"),
        ([Input(4, 0)], "b4 is out of range, the program has 4 slots"),
        ([KEPT, Delete(0)], "1 'delete b0': b0 is an argument that the caller keeps"),
        ([KEPT, RUN], "b0 is donated, but is an argument that the caller keeps"),
        ([Recv(0, 1, 0), RUN], "b0 is donated, but lies in the transport's memory"),
        ([OWN, Send(0, 1, 0), RUN], "b0 is donated, but may still be on its way to another actor"),
        ([Recv(0, 1, 0), Send(0, 2, 1)], "b0 was received; a value is sent by the actor that makes it"),
        ([OWN, Run("f", 0, (0, 0), (1,), (0,))], "b0 is donated and read twice by the same run"),
        ([OWN, Run("f", 0, (0,), (1,), (1,))], "donated positions (1,) of 1 inputs"),
        ([OWN, Run("f", 0, (0,), (1,), (0, 0))], "donated positions (0, 0) of 1 inputs"),
        ([OWN, RUN, Run("f", 7, (1,), (2,))], "executable 7 donated (0,) in an earlier run"),
        ([OWN, Output(0, 0), Output(0, 0)], "result 0 is made twice"),
    ],
)
def test_a_broken_rule_names_the_actor_the_instruction_and_the_buffer(instructions, message):
    with pytest.raises(InternalError) as caught:
        verify_program(program(*instructions))
    text = str(caught.value)
    assert text.startswith(f"actor 3, instruction {len(instructions) - 1} '") and text.endswith(BUG)
    assert f"{message}{BUG}" in text


def test_what_is_left_at_the_end_is_a_leak():
    leaking = program(OWN, Run("f", 0, (0,), (2, 1)))
    with pytest.raises(InternalError) as caught:
        verify_program(leaking)
    assert str(caught.value) == f"actor 3, instruction 1: b0 is still held at the end{BUG}"


def test_uncounted_slots_exist():
    verify_program(program(KEPT, uncounted=frozenset((0, 3))))
    with pytest.raises(InternalError, match=r"uncounted slots \[0, 4\] of 4"):
        verify_program(program(KEPT, uncounted=frozenset((0, 4))))


# ---------------------------------------------------------------- several together


def actors(*streams) -> list[ActorProgram]:
    return [ActorProgram(a, tuple(stream), (F4,) * 8) for a, stream in enumerate(streams)]


def recv(buffer: int, source: int, tag: int) -> Recv:
    return Recv(buffer, source, tag)


def run(*inputs: int) -> Run:
    return Run("f", 0, inputs, (7,))


RING = actors([recv(0, 1, 1), run(0), Send(7, 1, 0)], [recv(0, 0, 0), run(0), Send(7, 0, 1)])
CROSSED = actors([Send(0, 1, 0), Send(1, 1, 1)], [recv(1, 0, 1), recv(0, 0, 0), run(1), run(0)])


@pytest.mark.parametrize(
    "programs",
    [
        pytest.param(actors([Send(0, 1, 0)], [recv(0, 0, 0), run(0)]), id="sent, then received"),
        pytest.param(actors([recv(0, 1, 0), run(0)], [Send(0, 0, 0)]), id="received before it is sent"),
        pytest.param(
            actors([Send(0, 1, 0), recv(1, 1, 1), run(1)], [Send(0, 0, 1), recv(1, 0, 0), run(1)]),
            id="an exchange",
        ),
        pytest.param(
            actors([Send(0, 1, 0)], [recv(0, 0, 0), run(0), Send(7, 2, 1)], [recv(0, 1, 1), run(0)]),
            id="a chain",
        ),
    ],
)
def test_programs_that_end_are_waited_for_by_nobody(programs):
    assert find_blocked_actors(programs) == []
    check_deadlock(programs)


def test_actors_that_need_each_other_first_wait():
    waits = find_blocked_actors(RING)
    at = waits[0].at
    assert at == format_instruction(RING[0], 1)
    assert waits == [BlockedActor(0, at, 1, 1), BlockedActor(1, at, 0, 0)]
    assert str(waits[0]) == f"actor 0 waits at {at} for tag 1 from actor 1"


def test_transfers_of_one_link_complete_in_order():
    at = find_blocked_actors(CROSSED)[-1].at
    assert find_blocked_actors(CROSSED) == [
        BlockedActor(0, "the end of the step", 0, 1, sends=True),
        BlockedActor(1, at, 1, 0),
    ]
    assert (
        str(find_blocked_actors(CROSSED)[0])
        == "actor 0 waits at the end of the step for actor 1 to receive tag 0"
    )


def test_what_nobody_receives_or_sends_is_waited_for_at_the_end():
    end = "the end of the step"
    assert find_blocked_actors(actors([Send(0, 1, 5)], [])) == [BlockedActor(0, end, 5, 1, sends=True)]
    assert find_blocked_actors(actors([recv(0, 1, 5)], [])) == [BlockedActor(0, end, 5, 1)]


def test_a_deadlock_names_the_circle_and_not_those_who_wait_for_it():
    programs = actors(
        [recv(0, 1, 9), run(0)],  # waits for the circle
        [recv(0, 2, 1), run(0), Send(7, 2, 0), Send(7, 0, 9)],
        [recv(0, 1, 0), run(0), Send(7, 1, 1)],
        [],
    )
    at = format_instruction(RING[0], 1)
    with pytest.raises(ScheduleError) as caught:
        check_deadlock(programs)
    assert str(caught.value) == (
        "the schedule deadlocks: 3 of 4 actors cannot go on. Who waits for whom:\n"
        f"  actor 1 waits at {at} for tag 1 from actor 2\n"
        f"  actor 2 waits at {at} for tag 0 from actor 1\n"
        "Order the tasks of these actors so that each comes after what it needs from the others."
    )


def test_a_chain_of_waiting_that_is_no_circle_is_told_from_its_first_actor():
    programs = actors([recv(0, 1, 0), run(0)], [recv(0, 2, 1), run(0), Send(7, 0, 0)], [])
    with pytest.raises(ScheduleError, match=r"2 of 3 actors(.|\n)*actor 0 waits(.|\n)*actor 1 waits"):
        check_deadlock(programs)
