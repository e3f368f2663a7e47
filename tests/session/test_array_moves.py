"""Direct tests of arrays that are carried between actors, and copied, before a step."""

from __future__ import annotations

import asyncio

import pytest
from move_mesh import MoveMesh
from waiting import until

from jaxpp_async.compiler.export import Target
from jaxpp_async.compiler.ir import ValueType
from jaxpp_async.errors import ActorDiedError, ArrayError
from jaxpp_async.program.instructions import Aval
from jaxpp_async.session.argument_binding import Slot
from jaxpp_async.session.array_moves import Mover
from jaxpp_async.session.move_programs import Moved
from jaxpp_async.session.remote_array import RemoteArray

F4 = Aval((4,), "float32")
HERE = Target(None, "cpu", {})


def mover() -> tuple[Mover, MoveMesh]:
    mesh = MoveMesh()
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


async def test_the_moves_of_several_arrays_are_all_started_before_one_has_ended():
    moves, mesh = mover()
    first, second = (RemoteArray(mesh, 5 + k, ValueType(F4), (k,)) for k in range(2))
    homes = {"x": (1,), "y": (0, 1), "z": (0, 1)}
    slots = [Slot(name, ValueType(F4), actors) for name, actors in homes.items()]
    mesh.is_held = True
    moving = asyncio.ensure_future(moves.bring([first, second, first], slots, "train"))
    await until(lambda: len(mesh.started) == 2, every_s=0)
    assert mesh.started == [(0, {0: {0: 5}}, {1: {0: 5}}), (1, {1: {0: 6}}, {0: {0: 6}})]
    assert first.actors == second.actors == (0, 1) and not moving.done()
    mesh.let_go()
    assert await moving == (Moved("x", 16, 0, (1,)), Moved("y", 16, 1, (0,)))


async def test_of_several_moves_the_one_that_fails_is_named():
    moves, mesh = mover()
    leaves = [RemoteArray(mesh, 5 + k, ValueType(F4), (1,)) for k in range(2)]
    slots = [Slot(name, ValueType(F4), (0,)) for name in ("x", "y")]
    mesh.is_held = True
    moving = asyncio.ensure_future(moves.bring(leaves, slots, "train"))
    await until(lambda: len(mesh.started) == 2, every_s=0)
    mesh.let_go({1: ActorDiedError("actor 1 died")})
    with pytest.raises(ActorDiedError) as caught:
        await moving
    assert caught.value.__notes__ == [
        "y (16 bytes) was being moved from actor 1 to actors [0] for step 7 ('train'), which had not begun"
    ]


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
