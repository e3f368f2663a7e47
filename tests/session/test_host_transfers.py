"""Direct tests of host values as they are put on actors, fetched and freed."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxpp_async.compiler.export import Target
from jaxpp_async.compiler.ir import ValueType
from jaxpp_async.errors import ArrayError
from jaxpp_async.program.instructions import Aval
from jaxpp_async.program.leaf_parts import Parts
from jaxpp_async.session.argument_binding import Slot
from jaxpp_async.session.host_transfers import RemoteValues
from jaxpp_async.session.leaf_division import DividedPlace
from jaxpp_async.session.remote_array import RemoteArray

TWO = Target(jax.sharding.AbstractMesh((2,), ("x",)), "cpu", {})


class Controller:
    """Keeps what it is given, as the actors would."""

    def __init__(self):
        self.puts, self.freed, self._number = [], [], 0

    def check_usable(self) -> None:
        pass

    def new_array_id(self) -> int:
        self._number += 1
        return self._number

    async def put(self, by_actor) -> None:
        self.puts.append(
            {actor: [(v.array_id, v.value.tolist()) for v in values] for actor, values in by_actor.items()}
        )

    async def fetch(self, wanted):
        return [np.full(aval.shape, array_id, aval.dtype) for _, array_id, aval in wanted]

    def free(self, actor: int, array_id: int) -> None:
        self.freed.append((actor, array_id))


def values(target: Target = TWO) -> tuple[RemoteValues, Controller]:
    controller = Controller()
    return RemoteValues(lambda: controller, target), controller


async def test_a_value_without_a_place_waits_here_and_later_changes_do_not_reach_it():
    mine, controller = values()
    value = np.array([1, 2], np.float32)
    tree = await mine.put({"x": value})
    value[:] = 0
    assert (tree["x"].actors, tree["x"].host.tolist(), controller.puts) == ((), [1, 2], [])
    fetched = await mine.fetch(tree)
    fetched["x"][:] = 9
    assert (await mine.fetch(tree))["x"].tolist() == [1, 2]


async def test_a_value_like_another_goes_where_that_lies_and_is_split_as_that_is():
    mine, controller = values()
    like = RemoteArray(mine, 50, ValueType(Aval((4,), "float32", ("x",))), (0, 1))
    made = await mine.put(np.arange(4, dtype=np.float32), like)
    assert (made.actors, made.spec, made.array_id) == ((0, 1), ("x",), 1)
    assert controller.puts == [{0: [(1, [0, 1, 2, 3])], 1: [(1, [0, 1, 2, 3])]}]


async def test_a_value_that_cannot_be_split_so_is_refused_with_its_shape_and_the_axis():
    mine, controller = values()
    like = RemoteArray(mine, 50, ValueType(Aval((4,), "float32", ("x",))), (0,))
    with pytest.raises(ArrayError, match=r"shape \(3,\) is not divisible by axis 'x'$"):
        await mine.put(np.zeros(3, np.float32), like)
    assert controller.puts == []


@pytest.mark.parametrize(
    ("like", "says"),
    [
        (np.zeros(2), "mesh.put: like is neither (step, argnum) nor a tree of RemoteArrays"),
        ([], "mesh.put: the values have 1 leaves, like has 0"),
    ],
)
async def test_a_like_that_says_no_place_is_refused(like, says):
    with pytest.raises(ArrayError) as caught:
        await values()[0].put(np.zeros(2), like)
    assert str(caught.value) == says


async def test_what_lies_on_actors_is_fetched_in_one_request_and_the_rest_stays():
    mine, _ = values()
    slots = [
        Slot("a", ValueType(Aval((2,), "float32")), (1,)),
        Slot("b", ValueType(Aval((), "int32")), (0, 1)),
    ]
    first, second = mine.new_arrays(slots)
    found = await mine.fetch([first, 3, second])
    assert [np.asarray(one).tolist() for one in found] == [[1, 1], 3, 2]


async def test_an_array_on_actors_is_no_host_value():
    mine, _ = values()
    with pytest.raises(ArrayError, match=r"^mesh.put takes host values, not RemoteArray\(.*; `await"):
        await mine.put(mine.new_array(ValueType(Aval((), "int32")), [0]))


async def test_an_array_that_cannot_be_fetched_is_named_by_its_place():
    mine, _ = values()
    gone = mine.new_array(ValueType(Aval((), "int32")), [0])
    gone.retire("deleted", "it was deleted")
    with pytest.raises(ArrayError, match=r"^array 1 of the tree cannot be used: it was deleted$"):
        await mine.fetch([1, gone])


def test_an_array_is_freed_on_every_actor_that_holds_it():
    mine, controller = values()
    made = mine.new_array(ValueType(Aval((), "int32")), [0, 2])
    del made
    assert controller.freed == [(0, 1), (2, 1)]


def test_the_sharding_of_an_array_is_that_of_one_actor():
    mine, _ = values()
    assert mine.sharding_of(Aval((4,), "float32", ("x",))).spec == jax.sharding.PartitionSpec("x")
    assert values(Target(None, "cpu", {}))[0].sharding_of(Aval((4,), "float32")).is_fully_replicated


# ---------------------------------------------------------------- arrays in parts


def in_parts(mine: RemoteValues, *actors: tuple[int, ...], spec=()) -> RemoteArray:
    kind, parts = ValueType(Aval((4,), "float32")), Parts(0, (0, 1, 4))
    return mine.new_array_in_parts(kind, DividedPlace(parts, (spec, spec), actors))


async def test_of_a_value_like_an_array_in_parts_each_actor_gets_its_part():
    mine, controller = values(Target(None, "cpu", {}))
    like = in_parts(mine, (0,), (1, 2))
    made = await mine.put(np.arange(4, dtype=np.float32), like)
    first, second = (piece.array_id for piece in made.pieces)
    rest = [(second, [1, 2, 3])]
    assert controller.puts == [{0: [(first, [0])], 1: rest, 2: rest}]
    assert (made.actors, made.shape) == ((0, 1, 2), (4,))
    del made
    assert sorted(controller.freed) == [(0, first), (1, second), (2, second)]


async def test_an_array_in_parts_is_fetched_part_by_part_and_joined():
    mine, _ = values(Target(None, "cpu", {}))
    array = in_parts(mine, (0,), (1, 2))
    assert [one.tolist() for one in await mine.fetch([array, np.zeros(1)])] == [[1, 2, 2, 2], [0]]
    assert (await mine.fetch(array)).tolist() == [1, 2, 2, 2]


async def test_a_value_keeps_its_own_type_in_the_parts_of_another():
    mine, controller = values()
    like = in_parts(mine, (0,), (1,))
    made = await mine.put(np.zeros((4, 2), np.int8), like)
    assert [(p.shape, p.dtype) for p in made.pieces] == [((1, 2), np.int8), ((3, 2), np.int8)]
    with pytest.raises(ArrayError, match=r"shape \(1,\) is not divisible by axis 'x'$"):
        await mine.put(np.zeros(4, np.float32), in_parts(mine, (0,), (1,), spec=("x",)))
    assert len(controller.puts) == 1


async def test_a_value_of_another_length_is_refused_with_the_parts():
    mine, controller = values(Target(None, "cpu", {}))
    with pytest.raises(ArrayError, match=r"in parts of 4 rows together, along axis 0, .* shape \(3,\);"):
        await mine.put(np.zeros(3, np.float32), in_parts(mine, (0,), (1,)))
    assert controller.puts == []
