"""Direct tests of the programs that carry arrays between actors, and of what is said of moves."""

from __future__ import annotations

import pytest

from jaxpp_async.compiler.export import Target
from jaxpp_async.compiler.ir import ValueType
from jaxpp_async.program.instructions import Aval, Delete, Input, Output, Recv, Send
from jaxpp_async.session.move_programs import (
    Move,
    Moved,
    build,
    build_copies,
    carried_bytes,
    summary,
    warning,
)

F4 = Aval((4,), "float32")
HERE = Target(None, "cpu", {})


def test_an_array_is_sent_as_it_is_to_every_actor_that_needs_it():
    programs, executables = build(Move(ValueType(F4), 1, (0, 2), ()), 3, HERE)
    first, source, last = (program.instructions for program in programs)
    sends = [(i.to_actor, i.tag) for i in source if isinstance(i, Send)]
    assert [to for to, _ in sends] == [0, 2]
    assert first == (Recv(0, 1, sends[0][1]), Output(0, 0))
    assert last == (Recv(0, 1, sends[1][1]), Output(0, 0))
    assert [i for i in source if isinstance(i, Input)] == [Input(0, 0)]
    assert not any(isinstance(i, Output | Delete) for i in source)
    assert executables == ()


def test_an_actor_that_has_the_array_already_keeps_it():
    programs, _ = build(Move(ValueType(F4), 0, (0,), ()), 2, HERE)
    assert [program.instructions for program in programs] == [(Input(0, 0), Output(0, 0)), ()]


def test_copies_are_made_where_the_arrays_lie_and_nothing_is_sent():
    F2 = Aval((2,), "float32")
    first, second = build_copies(((ValueType(F4), (0, 1)), (ValueType(F2), (1,))), 2)
    assert first.instructions == (Input(0, 0), Output(0, 0))
    assert set(second.instructions) == {Input(0, 0), Output(0, 0), Input(1, 1), Output(1, 1)}


SMALL = Moved("batch['x']", 10, 0, (1,))
LARGE = Moved("state['w']", 3_000_000, 1, (0, 2))
RESHARDED = Moved("state['b']", 50, 1, (1,), resharded=True)


@pytest.mark.parametrize(
    ("moved", "size_bytes"),
    [([SMALL], 10), ([LARGE], 6_000_000), ([RESHARDED], 0), ([Moved("a", 7, 0, (0, 1))], 7), ([], 0)],
)
def test_only_what_leaves_its_actor_is_carried(moved, size_bytes):
    assert carried_bytes(moved) == size_bytes


def test_a_warning_names_the_largest_array_where_it_lies_where_it_is_needed_and_why():
    text = warning([SMALL, LARGE, RESHARDED], "train", lambda name: f"the reason of {name}")
    assert text.startswith(
        "step 'train': 2 arrays (6.0 MB) had to be carried to other actors; the largest, state['w'] (3.0 "
        "MB), lies on actor 1, and the step computes with it on actor 0, 2 (the reason of state['w']). An"
    )
    assert warning([SMALL], "train", str).startswith("step 'train': 1 array (0.0 MB) had")


def test_a_summary_counts_all_that_was_moved():
    text = summary([SMALL, LARGE], "train")
    assert text == "moved 2 arrays, 6000010 bytes, before step 'train', which keeps them elsewhere"
