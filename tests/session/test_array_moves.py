"""Direct tests of the programs that carry arrays between actors, and of what is said of them."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpp_async.compiler.export import Target
from jaxpp_async.compiler.ir import ValueType
from jaxpp_async.errors import ActorDiedError, ArrayError
from jaxpp_async.program.instructions import Aval, Delete, Input, Output, Recv, Send
from jaxpp_async.program.leaf_parts import Parts
from jaxpp_async.session.argument_binding import Slot
from jaxpp_async.session.array_moves import (
    Move,
    Moved,
    Mover,
    build,
    build_copies,
    carried_bytes,
    summary,
    warning,
)
from jaxpp_async.session.leaf_division import leaf_slots, part_types
from jaxpp_async.session.remote_array import RemoteArray

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


# ---------------------------------------------------------------- moves that are made


class Mesh:
    """Stands in for the controller and the arrays of a mesh of two actors; steps end at once.

    Attributes:
        fails: raised by the next step that is started.
    """

    num_steps = 7

    def __init__(self):
        self.loaded, self.started, self.released, self.fails = [], [], [], None
        self._number = 90

    def new_array_id(self) -> int:
        self._number += 1
        return self._number

    async def load(self, program, on_compiled=None):
        self.loaded.append(sorted(program.parts))
        return len(self.loaded) - 1, {}

    def start_step(self, step, inputs, outputs):
        assert step.kind == "move"
        self.started.append((step.program_id, dict(inputs), dict(outputs)))
        if self.fails is None:
            step.finish()
        else:
            step.fail(self.fails)
        return step

    def new_array(self, value_type, actors):
        return RemoteArray(self, self.new_array_id(), value_type, actors)

    def release(self, array) -> None:
        self.released.append(array.array_id)


def mover() -> tuple[Mover, Mesh]:
    mesh = Mesh()
    return Mover(lambda: mesh, mesh, 2, HERE), mesh


async def test_an_array_that_lies_where_it_is_taken_is_left_alone():
    moves, mesh = mover()
    leaf = RemoteArray(mesh, 5, ValueType(F4), (0,))
    slots = [Slot("x", ValueType(F4), (0,)), Slot("n", ValueType(F4), (1,))]
    assert await moves.bring([leaf, 3], slots, "train") == ()
    assert mesh.started == []


async def test_an_array_that_lies_elsewhere_is_carried_and_lies_on_both_and_the_program_is_loaded_once():
    moves, mesh = mover()
    for array_id in (5, 6):
        leaf = RemoteArray(mesh, array_id, ValueType(F4), (0,))
        moved = await moves.bring([leaf], [Slot("x", ValueType(F4), (1,))], "train")
        assert moved == (Moved("x", 16, 0, (1,)),)
        assert (leaf.array_id, leaf.actors) == (array_id, (0, 1))
    assert mesh.loaded == [[0, 1]]
    assert mesh.started == [(0, {0: {0: 5}}, {1: {0: 5}}), (0, {0: {0: 6}}, {1: {0: 6}})]


async def test_an_actor_that_fails_meanwhile_is_told_with_the_argument_that_was_on_its_way():
    moves, mesh = mover()
    mesh.fails = ActorDiedError("actor 1 died")
    with pytest.raises(ActorDiedError, match="actor 1 died") as caught:
        leaf = RemoteArray(mesh, 5, ValueType(F4), (0,))
        await moves.bring([leaf], [Slot("x", ValueType(F4), (1,))], "train")
    assert caught.value.__notes__ == [
        "x (16 bytes) was being moved from actor 0 to actors [1] for step 7 ('train'), which had not begun"
    ]


async def test_copies_have_ids_of_their_own_and_fail_with_the_step_that_makes_them():
    moves, mesh = mover()
    leaf = RemoteArray(mesh, 5, ValueType(F4), (0, 1))
    (copy,) = await moves.copy([("x", leaf)])
    assert (copy.array_id, copy.actors, copy.is_deleted()) == (91, (0, 1), False)
    assert mesh.started == [(0, {0: {0: 5}, 1: {0: 5}}, {0: {0: 91}, 1: {0: 91}})]
    mesh.fails = ActorDiedError("actor 1 died")
    (lost,) = await moves.copy([("x", leaf)])
    with pytest.raises(ArrayError, match=r"^it cannot be used: it could not be copied: actor 1 died$"):
        lost.check_usable("it", mesh)
    assert mesh.loaded == [[0, 1]]


# ---------------------------------------------------------------- arrays that are divided, or joined

PARTS = Parts(0, (0, 1, 4))


def whole_slot(*actors: int) -> Slot:
    return Slot("x", ValueType(F4), actors)


def divided_slot(*actors: tuple[int, ...], parts: Parts = PARTS) -> Slot:
    made = zip(parts.names("x"), part_types(ValueType(F4), parts), actors, strict=True)
    (slot,) = leaf_slots([Slot(name, kind, on) for name, kind, on in made], (parts,))
    return slot


async def test_a_whole_array_is_divided_and_its_buffers_are_freed():
    moves, mesh = mover()
    for array_id in (5, 6):
        leaf = RemoteArray(mesh, array_id, ValueType(F4), (0,))
        moved = await moves.divide([leaf, 3], [divided_slot((0,), (1,)), whole_slot(0)], "train")
        assert moved == (
            Moved("x[0:1]", 4, 0, (0,), redivided=True),
            Moved("x[1:4]", 12, 0, (1,), redivided=True),
        )
        assert carried_bytes(moved) == 12
        assert [(piece.shape, piece.actors) for piece in leaf.pieces] == [((1,), (0,)), ((3,), (1,))]
        assert mesh.released[-1] == array_id
        first, second = (piece.array_id for piece in leaf.pieces)
        assert mesh.started[-1] == (0, {0: {0: array_id}}, {0: {0: first}, 1: {1: second}})
    assert mesh.loaded == [[0, 1]]  # one program for both


async def test_parts_are_joined_and_those_that_stay_keep_their_buffers():
    moves, mesh = mover()
    leaf = RemoteArray(mesh, 5, ValueType(F4), (0,))
    await moves.divide([leaf], [divided_slot((0,), (1,))], "train")
    first, second = leaf.pieces
    finer = divided_slot((0,), (1,), (0,), parts=Parts(0, (0, 1, 2, 4)))
    moved = await moves.divide([leaf], [finer], "train")
    assert {(m.name, m.from_actor, m.to) for m in moved} == {("x[1:2]", 1, (1,)), ("x[2:4]", 1, (0,))}
    assert leaf.pieces[0] is first and not first.is_deleted() and second.is_deleted()
    assert mesh.released == [5, second.array_id]
    await moves.divide([leaf], [whole_slot(1)], "train")
    assert (leaf.division, leaf.actors, leaf.is_deleted()) == (None, (1,), False)
    assert len(mesh.released) == 5


@pytest.mark.parametrize(
    ("slot", "is_alike"),
    [
        (divided_slot((1,), (0,)), True),  # on other actors: `bring` moves it
        (Slot("x", ValueType(F4), (), any_sharding=True), True),  # nobody uses it
        (Slot("x", ValueType(F4), ()), False),  # the user asked for a sharding
        (whole_slot(0), False),
    ],
)
async def test_an_array_that_is_taken_as_it_is_divided_is_left_alone(slot, is_alike):
    moves, mesh = mover()
    leaf = RemoteArray(mesh, 5, ValueType(F4), (0,))
    await moves.divide([leaf], [divided_slot((0,), (1,))], "train")
    before = len(mesh.started)
    assert (await moves.divide([leaf], [slot], "train") == ()) == is_alike
    assert (len(mesh.started) == before) == is_alike


async def test_a_value_that_waits_here_is_divided_here():
    moves, mesh = mover()
    mesh.new_host_array = lambda kind, host: RemoteArray(mesh, mesh.new_array_id(), kind, (), host=host)
    value = np.arange(4, dtype=np.float32)
    leaf = RemoteArray(mesh, 5, ValueType(F4), (), host=value)
    assert await moves.divide([leaf], [divided_slot((0,), (1,))], "train") == ()
    assert [piece.host.tolist() for piece in leaf.pieces] == [[0], [1, 2, 3]]
    assert await moves.divide([leaf], [whole_slot(0)], "train") == ()
    assert (leaf.division, leaf.host.tolist(), mesh.started) == (None, [0, 1, 2, 3], [])


async def test_an_actor_that_fails_meanwhile_is_told_with_the_argument_that_was_divided():
    moves, mesh = mover()
    leaf = RemoteArray(mesh, 5, ValueType(F4), (0,))
    mesh.fails = ActorDiedError("actor 1 died")
    with pytest.raises(ActorDiedError, match="actor 1 died") as caught:
        await moves.divide([leaf], [divided_slot((0,), (1,))], "train")
    assert caught.value.__notes__ == [
        "x (16 bytes) was being divided or joined for step 7 ('train'), which had not begun"
    ]
    with pytest.raises(ArrayError, match=r"^x cannot be used: it could not be divided: actor 1 died$"):
        leaf.check_usable("x", mesh)


async def test_an_array_that_is_deleted_while_its_program_is_loaded_is_not_divided():
    moves, mesh = mover()
    leaf = RemoteArray(mesh, 5, ValueType(F4), (0,))
    load = mesh.load

    async def load_and_delete(*args):
        await leaf.delete()
        return await load(*args)

    mesh.load = load_and_delete
    with pytest.raises(ArrayError, match=r"^x cannot be used: it was deleted$"):
        await moves.divide([leaf], [divided_slot((0,), (1,))], "train")
    assert (mesh.started, mesh.released) == ([], [5])
