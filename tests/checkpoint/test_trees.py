"""Direct tests of the leaves of a tree: what is saved of each, and what each is restored as."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxpp_async.checkpoint.manifest import Array, File, Manifest
from jaxpp_async.checkpoint.trees import (
    RestoreTarget,
    check_matches,
    named_leaves,
    targets,
    to_save,
    to_user_value,
)
from jaxpp_async.compiler.ir import ValueType
from jaxpp_async.errors import ArrayError, CheckpointError
from jaxpp_async.program.instructions import Aval
from jaxpp_async.session.remote_array import RemoteArray


class Mesh:
    def release(self, array) -> None: ...


MESH = Mesh()
F2 = ValueType(Aval((2,), "float32"))
KEY = ValueType(Aval((2,), "uint32"), key_impl="threefry2x32")

# ---------------------------------------------------------------- saving


def test_each_leaf_is_saved_where_it_is_and_as_what_it_is():
    there = RemoteArray(MESH, 1, F2, (0,))
    key = RemoteArray(MESH, 2, KEY, (), host=np.array([0, 7], np.uint32))
    value = np.arange(2)
    leaves = to_save({"a": there, "k": key, "n": 3, "s": "x", "v": value, "j": jax.random.key(1)}, MESH)
    value[:] = 9
    assert leaves.remote == {"a": there}
    assert leaves.values == {"n": 3, "s": "x"}
    assert {path: array.tolist() for path, array in leaves.host.items()} == {
        "k": [0, 7],
        "v": [0, 1],
        "j": [0, 1],
    }
    assert leaves.key_impls == {"k": "threefry2x32", "j": "threefry2x32"}


def test_an_array_of_another_mesh_cannot_be_saved_here():
    with pytest.raises(ArrayError, match=r"^a/0 is a RemoteArray of another mesh;"):
        to_save({"a": [RemoteArray(Mesh(), 1, F2, (0,))]}, MESH)


@pytest.mark.parametrize(
    ("leaf", "says"),
    [
        (
            print,
            "w is a builtin_function_or_method, which a checkpoint cannot hold; it holds ",
        ),
        (np.array([None]), "w is a numpy array of dtype object, which a checkpoint cannot hold"),
        (np.array(["a"]), "w is a numpy array of dtype <U1, which a checkpoint cannot hold"),
        (
            np.zeros(1, [("x", "f4")]),
            "w is a numpy array of dtype [('x', '<f4')], which a checkpoint cannot hold",
        ),
        (
            "\udcff",
            "w is a str with surrogates in it, which UTF-8 cannot hold (a path, perhaps): ",
        ),
        (10**4000, "w is a whole number of more than 4000 digits; save it as a str"),
    ],
    ids=["function", "objects", "text", "records", "surrogates", "huge"],
)
def test_what_a_checkpoint_cannot_hold_is_refused_by_name(leaf, says):
    with pytest.raises(CheckpointError) as caught:
        to_save({"w": leaf}, MESH)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (
            {"__metadata__": 1},
            "a leaf of the tree is called '__metadata__', which safetensors keeps for itself",
        ),
        ({"\ud800": 1}, r"'\ud800': this key of the tree is no text that UTF-8 can hold; rename it"),
    ],
)
def test_a_path_that_no_file_can_hold_is_refused(tree, says):
    with pytest.raises(CheckpointError) as caught:
        named_leaves(tree)
    assert str(caught.value) == says


def test_big_endian_numbers_are_saved_as_the_format_has_them():
    saved = to_save({"w": np.array([1, 2], ">i4")}, MESH).host["w"]
    assert (saved.dtype.str, saved.tolist()) == ("<i4", [1, 2])


# ---------------------------------------------------------------- what is asked for


def test_each_leaf_of_like_says_what_is_to_come_back_and_where():
    array = np.zeros((2, 3), ml_dtypes.bfloat16)
    there = RemoteArray(MESH, 1, F2, (0, 1))
    wanted, structure = targets({"a": there, "b": array, "n": 3, "s": jax.ShapeDtypeStruct((4,), jnp.int32)})
    numpy_target = wanted.pop("b")
    assert (numpy_target.value_type, numpy_target.actors) == (ValueType(Aval((2, 3), "bfloat16")), ())
    assert numpy_target.like is array
    assert wanted == {
        "a": RestoreTarget(F2, (0, 1)),
        "n": RestoreTarget(None, like=3),
        "s": RestoreTarget(ValueType(Aval((4,), "int32"))),
    }
    assert jax.tree.unflatten(structure, list("wxyz")) == {"a": "w", "b": "x", "n": "y", "s": "z"}


@pytest.mark.parametrize(
    ("like", "where"), [(print, "`like` itself"), ({"a": [print]}, "`like['a'][0]`")], ids=["alone", "inside"]
)
def test_a_leaf_that_nothing_can_be_restored_as_is_refused_by_its_place(like, where):
    with pytest.raises(CheckpointError) as caught:
        targets(like)
    assert str(caught.value).startswith(f"{where} is a builtin_function_or_method; give (step, argnum), ")


# ---------------------------------------------------------------- whether it is there


def stored(**leaves) -> Manifest:
    """A checkpoint of arrays, given as (dtype, shape) or (dtype, shape, PRNG), and of plain values."""
    of_arrays = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, tuple)}
    values = {name: leaf for name, leaf in leaves.items() if name not in of_arrays}
    arrays = {name: Array("f", *leaf[:2], "", *leaf[2:]) for name, leaf in of_arrays.items()}
    return Manifest({"f": File(8, "actor 0")}, arrays, values)


def asked(**leaves) -> dict[str, RestoreTarget]:
    return targets(leaves)[0]


@pytest.mark.parametrize(
    ("wanted", "there"),
    [
        (np.zeros(2, np.float32), ("float32", (2,))),
        (3, 4),
        (2.5, ("float64", ())),  # one element of an array as Python's number
        (jax.ShapeDtypeStruct((), jnp.int32), 7),
        (jax.random.key(0), ("uint32", (2,), "threefry2x32")),
    ],
    ids=["array", "value", "number from an array", "array from a number", "key"],
)
def test_a_leaf_that_fits_is_taken(wanted, there):
    check_matches(asked(w=wanted), stored(w=there))


@pytest.mark.parametrize(
    ("wanted", "there", "says"),
    [
        (
            np.zeros(2, np.float32),
            ("float32", (3,)),
            "'w' is float32[3] in the checkpoint, but float32[2] in `like`",
        ),
        (
            np.zeros(2, np.float32),
            ("int32", (2,)),
            "'w' is int32[2] in the checkpoint, but float32[2] in `like`",
        ),
        (3, 3.0, "'w' is a Python float in the checkpoint, but a Python int in `like`"),
        (True, 1, "'w' is a Python int in the checkpoint, but a Python bool in `like`"),
        (
            jax.ShapeDtypeStruct((), jnp.int32),
            1 << 40,
            "'w' is a Python int of 41 bits in the checkpoint, but int32[] in `like`",
        ),
        (
            jax.ShapeDtypeStruct((1,), jnp.int32),
            1,
            "'w' is a Python int in the checkpoint, but int32[1] in `like`",
        ),
        (
            np.zeros(2, np.uint32),
            ("uint32", (2,), "threefry2x32"),
            "'w' is uint32[2] (data of threefry2x32 keys) in the checkpoint, but uint32[2] in `like`",
        ),
    ],
)
def test_a_leaf_of_another_type_is_refused_with_both(wanted, there, says):
    with pytest.raises(CheckpointError) as caught:
        check_matches(asked(w=wanted), stored(w=there))
    assert str(caught.value) == says


def test_leaves_that_only_one_side_has_are_refused_with_the_others_like_it():
    with pytest.raises(CheckpointError) as missing:
        check_matches(asked(a=1, b=np.zeros(2, np.int32), c=1, d=1, e=1, f=1), stored(a=1, z=("int32", (1,))))
    assert str(missing.value).startswith(
        "`like` has int32[2] at 'b', where the checkpoint has nothing (and so at 'c', 'd', 'e' and 1 more); "
        "only the checkpoint has 'z'; leave out of `like` what the checkpoint lacks"
    )
    with pytest.raises(CheckpointError) as extra:
        check_matches(asked(a=1), stored(a=1, b=("int32", (1,)), c=2))
    assert str(extra.value).startswith(
        "the checkpoint has int32[1] at 'b', where `like` has nothing (and so at 'c'); add it to "
    )


# ---------------------------------------------------------------- what comes back


@pytest.mark.parametrize(
    ("like", "value", "found"),
    [
        (3, np.array(4), 4),
        (3, 4, 4),
        (np.float32(0), np.array(1.5, np.float32), np.float32(1.5)),
        (np.zeros(2, np.float32), np.array([1, 2], np.float32), [1, 2]),
        (jnp.zeros(2), np.array([1, 2], np.float32), [1, 2]),
    ],
    ids=["int from an array", "int", "numpy scalar", "numpy array", "jax array"],
)
def test_a_value_comes_back_as_one_of_the_kind_that_like_has(like, value, found):
    back = to_user_value(targets(like)[0]["."], value)
    assert isinstance(back, type(like))
    assert (back.tolist() if isinstance(found, list) else back) == found


def test_a_key_comes_back_as_a_key():
    key = jax.random.key(3)
    assert to_user_value(targets(key)[0]["."], np.asarray(jax.random.key_data(key))) == key
