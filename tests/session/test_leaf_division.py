"""Direct tests of how the leaves of a user and the parts of a step are converted to each other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_async.compiler.ir import ValueType
from jaxpp_async.errors import ArrayError
from jaxpp_async.program.instructions import Aval
from jaxpp_async.program.leaf_parts import Parts
from jaxpp_async.session.argument_binding import Slot
from jaxpp_async.session.leaf_division import DividedPlace, LeafDivision, join_moves, leaf_slots, part_types
from jaxpp_async.session.move_programs import Moved
from jaxpp_async.session.remote_array import DELETED, DONATED, LIVE, PartArrays, RemoteArray

F43, F2 = ValueType(Aval((4, 3), "float32")), ValueType(Aval((2,), "float32"))
PARTS = Parts(0, (0, 1, 4))
KINDS = part_types(F43, PARTS)


class Mesh:
    """Stands in for the owner of arrays; it notes what is freed."""

    def __init__(self):
        self.freed = []

    def release(self, array) -> None:
        self.freed += [piece.array_id for piece in array.pieces]


@pytest.fixture
def mesh() -> Mesh:
    return Mesh()


def in_parts(mesh: Mesh, first_id: int = 1, *, actors=((0,), (1,)), host=(None, None)) -> RemoteArray:
    made = zip(KINDS, actors, host, strict=True)
    arrays = tuple(RemoteArray(mesh, first_id + k, t, a, host=h) for k, (t, a, h) in enumerate(made))
    return RemoteArray.in_parts(mesh, F43, PartArrays(PARTS, arrays))


def slots(*, actors=((0,), (1,)), replaced_on=((), ())) -> list[Slot]:
    made = zip(PARTS.names("state['w']"), KINDS, actors, replaced_on, strict=True)
    return [
        Slot("rate", F2, (0,)),
        *(Slot(name, kind, at, replaced_on=new) for name, kind, at, new in made),
    ]


def division(**options) -> LeafDivision:
    found = leaf_slots(slots(**options), (None, PARTS))
    return LeafDivision(found, found[::-1])


# ---------------------------------------------------------------- slots


def test_the_slot_of_a_divided_leaf_has_its_name_its_type_and_all_its_actors():
    rate, w = division().arguments
    assert (rate.name, rate.parts, rate.pieces) == ("rate", None, (rate,))
    assert (w.name, w.type, w.actors, w.parts) == ("state['w']", F43, (0, 1), PARTS)
    assert [(p.name, p.actors) for p in w.pieces] == [("state['w'][0:1]", (0,)), ("state['w'][1:4]", (1,))]


@pytest.mark.parametrize(
    ("actors", "replaced_on", "places"),
    [
        (((0,), (1,)), ((), ()), ((0,), (1,))),
        (((0,), ()), ((), ()), ((0,), (0,))),
        (((), (1,)), ((), ()), ((1,), (1,))),
        (((), ()), ((0,), (1, 2)), ((0,), (1, 2))),
        (((), ()), ((), ()), None),
    ],
)
def test_a_part_that_nobody_uses_lies_with_one_that_somebody_uses(actors, replaced_on, places):
    _, w = division(actors=actors, replaced_on=replaced_on).arguments
    place = DividedPlace.of(w)
    assert (place and place.actors) == places


def test_the_place_of_an_array_is_that_of_its_parts(mesh):
    place = DividedPlace.of(in_parts(mesh))
    assert place == DividedPlace(PARTS, ((), ()), ((0,), (1,)))
    wide = ValueType(Aval((4, 9), "int8"))
    assert [kind.aval.shape for kind in place.types(wide)] == [(1, 9), (3, 9)]
    assert DividedPlace.of(RemoteArray(mesh, 1, F43, (0,))) is None


# ---------------------------------------------------------------- calls


def test_an_array_in_the_same_parts_is_taken_as_its_parts(mesh):
    w = in_parts(mesh)
    assert division().divide([3.0, w]) == [3.0, *w.pieces]


@pytest.mark.parametrize("value", [np.arange(12, dtype=np.float32), jnp.arange(12, dtype=jnp.float32)])
def test_of_a_host_value_each_part_is_a_view(value):
    value = value.reshape(4, 3)
    _, first, second = division().divide([0.5, value])
    np.testing.assert_array_equal(np.concatenate([first, second]), value)
    assert np.shares_memory(first, second.base)


@pytest.mark.parametrize("other", [Parts(0, (0, 2, 4)), Parts(1, (0, 1, 3)), None])
def test_an_array_in_other_parts_has_to_be_divided_first(mesh, other):
    w = RemoteArray(mesh, 1, F43, (0,))
    if other is not None:
        arrays = tuple(RemoteArray(mesh, 1 + k, kind, (0,)) for k, kind in enumerate(part_types(F43, other)))
        w = RemoteArray.in_parts(mesh, F43, PartArrays(other, arrays))
    assert division().divide([3.0, w]) is None
    assert division().divide([3.0, jax.ShapeDtypeStruct((4, 3), "float32")]) is None


def test_a_host_value_that_has_changed_meanwhile_is_refused_by_its_name():
    with pytest.raises(ArrayError, match=r"^state\['w'\] is float32\[5, 3\] now, but was float32\[4, 3\]"):
        division().divide([3.0, np.zeros((5, 3), np.float32)])


def test_results_are_joined_and_those_behind_them_left_out(mesh):
    arrays = [RemoteArray(mesh, k, kind, (0,)) for k, kind in enumerate((*KINDS, F2, F2))]
    w, rate = division().join(mesh, arrays)
    assert (w.pieces, w.shape, w.value_type, rate) == (tuple(arrays[:2]), (4, 3), F43, arrays[2])


# ---------------------------------------------------------------- the handle of an array in parts


def test_a_step_that_takes_it_whole_does_not_take_it_as_it_is(mesh):
    w = in_parts(mesh)
    assert w.id_at(mesh, (0,), ()) is None
    assert w.id_at(mesh, (), None) == w.array_id
    assert w.id_at(mesh, (), ()) is None
    w.retire(DONATED, "it was donated")
    assert w.id_at(mesh, (), None) is None


async def test_its_parts_are_freed_once_when_it_is_deleted_or_dropped(mesh):
    w = in_parts(mesh, 1)
    await w.delete()
    await w.delete()
    assert mesh.freed == [1, 2]
    in_parts(mesh, 3)
    assert sorted(mesh.freed) == [1, 2, 3, 4]
    assert (w.is_deleted(), w._current_state) == (True, DELETED)
    with pytest.raises(ArrayError, match=r"^it cannot be used: it was deleted"):
        w.check_usable("it", mesh)


def test_it_takes_over_another_array_whole_or_in_parts(mesh):
    old, new = in_parts(mesh, 1), in_parts(mesh, 3)
    old.retire(DONATED, "it was donated")
    pieces = new.pieces
    old.take_over(new)
    assert (old.pieces, old._current_state, new.is_deleted(), new.actors) == (pieces, LIVE, True, ())
    del new
    assert mesh.freed == []
    whole = RemoteArray(mesh, 7, F43, (2,))
    old.take_over(whole)
    assert (old.division, old.actors, old.array_id) == (None, (2,), 7)
    del pieces
    assert sorted(mesh.freed) == [3, 4]


def test_of_a_part_that_takes_over_another_array_it_has_the_new_value(mesh):
    w = in_parts(mesh, 1)
    for k, part in enumerate(w.pieces):
        part.retire(DONATED, "it was donated")
        part.take_over(RemoteArray(mesh, 10 + k, KINDS[k], (k,)))
    assert not w.is_deleted()
    assert [part.array_id for part in w.pieces] == [10, 11]


def test_a_value_that_waits_here_is_joined_and_one_of_which_a_part_is_on_actors_is_not(mesh):
    value = np.arange(12, dtype=np.float32).reshape(4, 3)
    here = in_parts(mesh, actors=((), ()), host=(value[:1], value[1:]))
    np.testing.assert_array_equal(here.host, value)
    assert (here.actors, repr(here)) == ((), "RemoteArray(float32[4, 3], on the controller)")
    assert in_parts(mesh, actors=((), (1,)), host=(value[:1], None)).host is None


def test_of_many_parts_some_are_shown(mesh):
    parts = Parts(0, tuple(range(7)))
    kind = ValueType(Aval((6,), "float32"))
    arrays = tuple(RemoteArray(mesh, k, t, (k % 2,)) for k, t in enumerate(part_types(kind, parts)))
    array = RemoteArray.in_parts(mesh, kind, PartArrays(parts, arrays))
    assert repr(array).endswith("[2:3] actors=[0], [3:4] actors=[1] and 2 more)")


def test_neighbours_on_one_actor_are_shown_as_one(mesh):
    parts = Parts(1, (0, 1, 2, 4, 5))
    kind = ValueType(Aval((2, 5), "float32"))
    types = part_types(kind, parts)
    arrays = tuple(RemoteArray(mesh, k, types[k], (actor,)) for k, actor in enumerate((0, 0, 1, 1)))
    array = RemoteArray.in_parts(mesh, kind, PartArrays(parts, arrays))
    assert repr(array) == "RemoteArray(float32[2, 5], [:, 0:2] actors=[0], [:, 2:5] actors=[1])"
    assert "[:, 0:2] actor 0, [:, 2:5] actor 1" in array._repr_html_()


def test_neighbouring_layers_that_took_the_same_way_are_one_move():
    parts = Parts(0, (0, 1, 2, 5, 6))
    kind = ValueType(Aval((6,), "float32"))
    names = parts.names("w")
    slots = tuple(Slot(name, t, (1,)) for name, t in zip(names, part_types(kind, parts), strict=True))
    leaf = Slot("w", kind, (1,), parts=parts, part_slots=slots)
    way = {"from_actor": 0, "to": (1,)}
    first, second = Moved(names[0], 4, **way), Moved(names[1], 4, **way)
    third, last = Moved(names[2], 12, 0, (2,)), Moved(names[3], 4, 0, (2,), redivided=True)
    other = Moved("x", 4, **way)
    assert join_moves([other, first, second, third, last], [leaf]) == {
        other: "x",
        Moved("w[0:2]", 8, **way): names[0],
        third: names[2],
        last: names[3],
    }
    assert join_moves([second, first], [leaf]) == {second: names[1], first: names[0]}
