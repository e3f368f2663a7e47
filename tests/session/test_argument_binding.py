"""Direct tests of the types of a step's arguments, and of what its actors are told of them."""

from __future__ import annotations

import asyncio

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxpp_async.compiler.ir import ValueType
from jaxpp_async.errors import ArrayError
from jaxpp_async.program.instructions import Aval
from jaxpp_async.session.argument_binding import (
    HOST_VALUE,
    Binding,
    Slot,
    as_user_sees,
    host_array,
    leaf_type,
    sent_type,
    shape_struct,
    type_key,
)
from jaxpp_async.session.remote_array import RemoteArray

F2 = ValueType(Aval((2,), "float32"))
SPLIT = ValueType(Aval((2,), "float32", ("x",)))


class Owner:
    """A mesh that only counts what is freed."""

    def __init__(self):
        self.released = []

    def release(self, array: RemoteArray) -> None:
        self.released.append(array.array_id)


MESH = Owner()


def array(array_id: int, *actors: int, of: ValueType = F2, owner: Owner = MESH) -> RemoteArray:
    return RemoteArray(owner, array_id, of, actors)


def waiting(array_id: int, value: np.ndarray) -> RemoteArray:
    return RemoteArray(MESH, array_id, F2, (), host=value)


def ids_from(first: int):
    numbers = iter(range(first, first + 100))
    return lambda: next(numbers)


# ---------------------------------------------------------------- leaves


@pytest.mark.parametrize(
    ("leaf", "found"),
    [
        (3, ((), "int32", True)),
        (True, ((), "bool", False)),
        (2.5, ((), "float32", True)),
        (np.zeros((2, 3)), ((2, 3), "float32", False)),  # jax_enable_x64 is off
        (np.zeros(2, np.int8), ((2,), "int8", False)),
        (np.zeros(2, ml_dtypes.bfloat16), ((2,), "bfloat16", False)),
        (jnp.ones((1,)), ((1,), "float32", False)),
        (jax.ShapeDtypeStruct((4,), jnp.int32), ((4,), "int32", False)),
        ([1, 2], ((2,), "int32", False)),
    ],
    ids=repr,
)
def test_the_type_of_a_leaf_is_what_jax_makes_of_it(leaf, found):
    assert leaf_type(leaf) == found


@pytest.mark.parametrize(
    ("leaf", "says"),
    [
        ("text", "is a str, which JAX cannot compute with; make the argument static or leave it out"),
        (
            np.array(["a"]),
            "is a ndarray of dtype <U1, which JAX cannot compute with; make the argument static or leave it",
        ),
        (
            np.datetime64("2020"),
            "is a datetime64, which JAX cannot compute with; make the argument static or leave it out",
        ),
        (None, "is a NoneType, which JAX cannot compute with; make the argument static or leave it out"),
        (
            len,
            "is a builtin_function_or_method, which JAX cannot compute with; pass a model's arrays only and",
        ),
    ],
    ids=["text", "array of text", "date", "nothing", "function"],
)
def test_what_jax_cannot_compute_with_is_refused_with_what_to_do(leaf, says):
    with pytest.raises(TypeError) as caught:
        shape_struct(leaf)
    assert str(caught.value).startswith(says)


def test_a_coroutine_is_refused_with_the_word_that_is_missing():
    waiting_for = asyncio.sleep(0)
    try:
        with pytest.raises(TypeError, match=r"^is a coroutine or a step under way, and no array: `await` it"):
            shape_struct(waiting_for)
    finally:
        waiting_for.close()


def test_an_array_that_was_made_with_64_bits_is_refused_where_they_are_off():
    wide = array(1, 0, of=ValueType(Aval((2,), "float64")))
    with pytest.raises(TypeError, match=r"^is float64, made where jax_enable_x64 was on, and here it"):
        shape_struct(wide)
    with jax.enable_x64(True):
        assert leaf_type(wide) == ((2,), "float64", False)


@pytest.mark.parametrize(
    ("one", "other", "has_one_key"),
    [
        (1, 2, True),
        (1, 1.0, False),
        (True, 1, False),
        (np.zeros(2), np.ones(2), True),
        (np.zeros(2), np.zeros(3), False),
        (jnp.zeros(2), np.zeros(2, np.float32), False),
    ],
    ids=repr,
)
def test_leaves_with_one_type_key_have_one_type(one, other, has_one_key):
    assert (type_key(one) == type_key(other)) is has_one_key
    if has_one_key:
        assert leaf_type(one) == leaf_type(other)


def test_of_what_is_rare_the_type_itself_has_to_be_asked():
    assert type_key([1, 2]) is None
    assert type_key(np.float32(1)) is None
    assert type_key(array(1, 0)) is F2


def test_a_host_value_travels_in_c_order_and_with_jaxs_dtype():
    value = host_array(np.arange(6).reshape(2, 3).T)
    assert (value.flags.c_contiguous, value.dtype, value.tolist()) == (
        True,
        np.int32,
        [[0, 3], [1, 4], [2, 5]],
    )
    assert host_array(3.0).shape == ()


def test_a_key_travels_as_its_data_and_comes_back_as_a_key():
    key = jax.random.key(7)
    travels = sent_type(key)
    data = host_array(key)
    assert (data.dtype, data.shape) == (np.uint32, travels.aval.shape)
    assert as_user_sees(data, travels) == key
    plain = np.zeros(2)
    assert as_user_sees(plain, F2) is plain


# ---------------------------------------------------------------- the quick way


def binding(*slots: Slot, outputs=(), donated=(), hidden: int = 0) -> Binding:
    return Binding(slots, outputs, len(slots) - hidden, donated)


X0, X1, Y01 = Slot("x", F2, (0,)), Slot("x", F2, (1,)), Slot("y", F2, (0, 1))


def test_arrays_that_lie_where_the_step_takes_them_are_found_by_their_ids():
    step = binding(X0, Y01, Slot("rate", F2, (1,)))
    assert step.ids(MESH, [array(5, 0), array(6, 0, 1), np.zeros(2)]) == [5, 6, HOST_VALUE]


@pytest.mark.parametrize(
    ("leaves", "why"),
    [
        ([array(5, 1), array(6, 0, 1)], "on another actor"),
        ([array(5, 0), array(6, 0)], "on one of two actors"),
        ([array(5, 0, 1), array(5, 0, 1)], "twice"),
        ([array(5, 0, owner=Owner()), array(6, 0, 1)], "of another mesh"),
        ([array(5, 0, of=SPLIT), array(6, 0, 1)], "split otherwise"),
        ([waiting(5, np.zeros(2, np.float32)), array(6, 0, 1)], "waits here"),
        ([jax.ShapeDtypeStruct((2,), "float32"), array(6, 0, 1)], "a shape alone"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whatever_takes_more_than_a_look_is_left_to_the_careful_way(leaves, why):
    assert binding(X0, Y01).ids(MESH, leaves) is None


def test_an_argument_that_takes_any_sharding_may_be_split_otherwise():
    assert binding(Slot("x", F2, (0,), any_sharding=True)).ids(MESH, [array(5, 0, of=SPLIT)]) == [5]


def test_host_values_get_ids_and_go_to_every_actor_that_takes_them_for_this_step_only():
    step, value = binding(X0, Y01, hidden=0), np.array([1, 2], np.float32)
    bound = step.bind([array(5, 0), value], [5, HOST_VALUE], [], ids_from(90))
    assert bound.array_ids == {0: {0: 5, 1: 90}, 1: {1: 90}}
    assert list(bound.puts) == [0, 1]
    for (put,) in bound.puts.values():
        assert put.array_id == 90
        assert put.value is value
    assert bound.frees_after == {0: [90], 1: [90]}


def test_a_donated_host_value_is_the_steps_to_free():
    bound = binding(X0, donated=(0,)).bind([np.zeros(2, np.float32)], [HOST_VALUE], [], ids_from(90))
    assert (bound.array_ids, bound.frees_after) == ({0: {0: 90}}, {})


def test_a_host_value_that_no_actor_takes_goes_nowhere():
    bound = binding(Slot("x", F2, ())).bind([np.zeros(2, np.float32)], [HOST_VALUE], [], ids_from(90))
    assert (bound.array_ids, bound.puts) == ({}, {})


def test_hidden_arguments_stand_behind_the_others():
    step = binding(X0, Slot("microbatch indices", F2, (1,)), hidden=1)
    bound = step.bind([array(5, 0)], step.ids(MESH, [array(5, 0)]), [array(77, 1)], ids_from(90))
    assert bound.array_ids == {0: {0: 5}, 1: {1: 77}}


def test_an_argument_that_has_changed_meanwhile_is_an_error_that_says_what_it_was():
    with pytest.raises(ArrayError) as caught:
        binding(X0).bind([np.zeros(3, np.float32)], [HOST_VALUE], [], ids_from(90))
    assert str(caught.value) == (
        "x is float32[3] now, but was float32[2] when the step was called; leave arguments alone until the "
        "step has them"
    )


def test_results_are_told_to_the_actors_that_make_them():
    step = binding(X0, outputs=(Slot("a", F2, (1,)), Slot("b", F2, (0, 1)), Slot("c", F2, ())))
    assert step.results([array(7), array(8), array(9)]) == {0: {1: 8}, 1: {0: 7, 1: 8}}


# ---------------------------------------------------------------- the careful way


def test_an_array_that_waits_goes_once_to_all_actors_that_take_it_and_lies_there_once_marked_sent():
    leaf, value = waiting(5, np.array([1, 2], np.float32)), np.array([1, 2], np.float32)
    bound = binding(X0, X1).bind_with_care([leaf, leaf], [], ids_from(90))
    assert bound.array_ids == {0: {0: 5}, 1: {1: 5}}
    assert {actor: [put.array_id for put in puts] for actor, puts in bound.puts.items()} == {0: [5], 1: [5]}
    assert bound.frees_after == {}
    assert leaf.actors == ()  # another argument may yet turn out to be unreadable
    bound.mark_sent()
    assert leaf.actors == (0, 1)
    assert leaf.host is None
    np.testing.assert_array_equal(bound.puts[0][0].value, value)


def test_an_array_that_is_two_arguments_is_told_twice_and_sent_never():
    leaf = array(5, 0)
    bound = binding(X0, X0).bind_with_care([leaf, leaf], [array(77, 0)], ids_from(90))
    assert (bound.array_ids, bound.puts) == ({0: {0: 5, 1: 5}}, {})


def test_an_argument_that_is_handed_back_is_copied():
    value = np.array([1, 2], np.float32)
    step = binding(Slot("x", SPLIT, (), any_sharding=True))
    found, host = step.returned_host_value(0, value)
    value[:] = 0
    assert (found, host.tolist()) == (F2, [1, 2])
    with pytest.raises(ArrayError, match=r"^x is int32\[2\] now, but was float32\[2\]"):
        step.returned_host_value(0, np.zeros(2, np.int32))


def test_a_slot_without_a_use_has_its_home_where_its_successor_is_made():
    assert Slot("x", F2, (), replaced_on=(1,)).home == (1,)
    assert Slot("x", F2, (0,), replaced_on=(1,)).home == (0,)
