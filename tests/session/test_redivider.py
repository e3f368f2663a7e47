"""Direct tests of arrays that are divided into parts, or joined, before a step."""

from __future__ import annotations

import numpy as np
import pytest
from move_mesh import MoveMesh

from jaxpp_async.compiler.export import Target
from jaxpp_async.compiler.ir import ValueType
from jaxpp_async.errors import ActorDiedError, ArrayError
from jaxpp_async.program.instructions import Aval
from jaxpp_async.program.leaf_parts import Parts
from jaxpp_async.session.argument_binding import Slot
from jaxpp_async.session.leaf_division import leaf_slots, part_types
from jaxpp_async.session.move_programs import Moved, carried_bytes
from jaxpp_async.session.redivider import Redivider
from jaxpp_async.session.remote_array import RemoteArray

F4 = Aval((4,), "float32")
HERE = Target(None, "cpu", {})
PARTS = Parts(0, (0, 1, 4))


def make() -> tuple[Redivider, MoveMesh]:
    mesh = MoveMesh()
    return Redivider(lambda: mesh, mesh, 2, HERE), mesh


def whole_slot(*actors: int) -> Slot:
    return Slot("x", ValueType(F4), actors)


def divided_slot(*actors: tuple[int, ...], parts: Parts = PARTS) -> Slot:
    made = zip(parts.names("x"), part_types(ValueType(F4), parts), actors, strict=True)
    (slot,) = leaf_slots([Slot(name, kind, on) for name, kind, on in made], (parts,))
    return slot


async def test_a_whole_array_is_divided_and_its_buffers_are_freed():
    redivider, mesh = make()
    for array_id in (5, 6):
        leaf = RemoteArray(mesh, array_id, ValueType(F4), (0,))
        moved = await redivider.divide([leaf, 3], [divided_slot((0,), (1,)), whole_slot(0)], "train")
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
    redivider, mesh = make()
    leaf = RemoteArray(mesh, 5, ValueType(F4), (0,))
    await redivider.divide([leaf], [divided_slot((0,), (1,))], "train")
    first, second = leaf.pieces
    finer = divided_slot((0,), (1,), (0,), parts=Parts(0, (0, 1, 2, 4)))
    moved = await redivider.divide([leaf], [finer], "train")
    assert {(m.name, m.from_actor, m.to) for m in moved} == {("x[1:2]", 1, (1,)), ("x[2:4]", 1, (0,))}
    assert leaf.pieces[0] is first and not first.is_deleted() and second.is_deleted()
    assert mesh.released == [5, second.array_id]
    await redivider.divide([leaf], [whole_slot(1)], "train")
    assert (leaf.division, leaf.actors, leaf.is_deleted()) == (None, (1,), False)
    assert len(mesh.released) == 5


async def test_the_old_rows_of_a_leaf_are_freed_before_the_next_leaf_is_copied():
    redivider, mesh = make()
    start_step, released = mesh.start_step, []

    def start(*args):
        released.append(list(mesh.released))
        return start_step(*args)

    mesh.start_step = start
    leaves = [RemoteArray(mesh, array_id, ValueType(F4), (0,)) for array_id in (5, 6, 7)]
    await redivider.divide(leaves, [divided_slot((0,), (1,))] * 3, "train")
    assert released == [[], [5], [5, 6]]


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
    redivider, mesh = make()
    leaf = RemoteArray(mesh, 5, ValueType(F4), (0,))
    await redivider.divide([leaf], [divided_slot((0,), (1,))], "train")
    before = len(mesh.started)
    assert (await redivider.divide([leaf], [slot], "train") == ()) == is_alike
    assert (len(mesh.started) == before) == is_alike


async def test_a_value_that_waits_here_is_divided_here():
    redivider, mesh = make()
    mesh.new_host_array = lambda kind, host: RemoteArray(mesh, mesh.new_array_id(), kind, (), host=host)
    value = np.arange(4, dtype=np.float32)
    leaf = RemoteArray(mesh, 5, ValueType(F4), (), host=value)
    assert await redivider.divide([leaf], [divided_slot((0,), (1,))], "train") == ()
    assert [piece.host.tolist() for piece in leaf.pieces] == [[0], [1, 2, 3]]
    assert await redivider.divide([leaf], [whole_slot(0)], "train") == ()
    assert (leaf.division, leaf.host.tolist(), mesh.started) == (None, [0, 1, 2, 3], [])


async def test_an_actor_that_fails_meanwhile_is_told_with_the_argument_that_was_divided():
    redivider, mesh = make()
    leaf = RemoteArray(mesh, 5, ValueType(F4), (0,))
    mesh.fails = ActorDiedError("actor 1 died")
    with pytest.raises(ActorDiedError, match="actor 1 died") as caught:
        await redivider.divide([leaf], [divided_slot((0,), (1,))], "train")
    assert caught.value.__notes__ == [
        "x (16 bytes) was being divided or joined for step 7 ('train'), which had not begun"
    ]
    with pytest.raises(ArrayError, match=r"^x cannot be used: it could not be divided: actor 1 died$"):
        leaf.check_usable("x", mesh)


async def test_an_array_that_is_deleted_while_its_program_is_loaded_is_not_divided():
    redivider, mesh = make()
    leaf = RemoteArray(mesh, 5, ValueType(F4), (0,))
    load = mesh.load

    async def load_and_delete(*args):
        await leaf.delete()
        return await load(*args)

    mesh.load = load_and_delete
    with pytest.raises(ArrayError, match=r"^x cannot be used: it was deleted$"):
        await redivider.divide([leaf], [divided_slot((0,), (1,))], "train")
    assert (mesh.started, mesh.released) == ([], [5])
