"""Direct tests of logical axis names, of the user's shardings, and of shardings in the types of values."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxpp_async.errors import ShardingError
from jaxpp_async.markers.logical_axes import (
    AXIS_TYPES,
    axis_rules,
    explicit_sharding,
    has_explicit_axes,
    leaf_specs,
    replicate_unless_given,
    reshard_to,
    resolve_names,
    result_type,
    shard,
    struct_with_spec,
    unreduced_axes,
)

EXPLICIT = AbstractMesh((2,), ("x",), axis_types=(AxisType.Explicit,))
AUTO = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
BOTH = AbstractMesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))
LEAF = jax.ShapeDtypeStruct((4,), jnp.float32)


@pytest.mark.parametrize(("mesh", "found"), [(None, False), (AUTO, False), (EXPLICIT, True), (BOTH, True)])
def test_a_mesh_puts_shardings_into_types_if_one_of_its_axes_is_explicit(mesh, found):
    assert has_explicit_axes(mesh) is found


def test_the_names_of_axis_types_are_those_that_users_give():
    assert {"auto": AxisType.Auto, "explicit": AxisType.Explicit} == AXIS_TYPES


def test_without_explicit_axes_nothing_is_known_and_nothing_is_done():
    x = jnp.ones(4)
    assert explicit_sharding(jax.typeof(x)) is None
    assert reshard_to(x, None) is x
    assert replicate_unless_given(LEAF) is LEAF
    with jax.sharding.use_abstract_mesh(AUTO):
        assert replicate_unless_given(LEAF) is LEAF


def test_an_argument_without_a_sharding_is_whole_on_every_device():
    with jax.sharding.use_abstract_mesh(EXPLICIT):
        found = replicate_unless_given(jax.ShapeDtypeStruct((4,), jnp.float32, weak_type=True))
        given = struct_with_spec(LEAF, EXPLICIT, ("x",))
        assert replicate_unless_given(given) is given
    assert (found.sharding, found.weak_type) == (NamedSharding(EXPLICIT, PartitionSpec()), True)


def test_a_value_is_brought_to_another_sharding_and_left_alone_in_its_own():
    split = NamedSharding(EXPLICIT, PartitionSpec("x"))

    def whole_to_split(x):
        assert reshard_to(x, jax.typeof(x).sharding) is x
        return reshard_to(x, split)

    with jax.sharding.use_abstract_mesh(EXPLICIT):
        jaxpr = jax.make_jaxpr(whole_to_split)(struct_with_spec(LEAF, EXPLICIT, ()))
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["reshard"]
    assert of_result(jaxpr) == PartitionSpec("x")


def of_result(jaxpr) -> PartitionSpec:
    return jaxpr.out_avals[0].sharding.spec


def test_the_type_of_a_result_has_its_sharding():
    with jax.sharding.use_abstract_mesh(EXPLICIT):
        found = result_type(lambda x: x * 2, struct_with_spec(LEAF, EXPLICIT, ("x",)))
        assert explicit_sharding(jax.make_jaxpr(lambda x: x)(found).out_avals[0]).spec == PartitionSpec("x")
    assert (found.shape, found.sharding.spec) == ((4,), PartitionSpec("x"))
    assert result_type(lambda x: x.sum(), LEAF).sharding is None


def test_axes_that_are_still_to_be_added_over_come_in_the_meshs_order():
    mesh = AbstractMesh((2,) * 6, tuple("abcdef"), axis_types=(AxisType.Explicit,) * 6)
    assert unreduced_axes(None) == ()
    assert unreduced_axes(NamedSharding(mesh, PartitionSpec("a"))) == ()
    assert unreduced_axes(NamedSharding(mesh, PartitionSpec("b", unreduced=set("fedca")))) == tuple("acdef")


# ---------------------------------------------------------------- logical names and the user's shardings


@pytest.mark.parametrize(
    ("names", "spec"),
    [
        (("batch", None), ("x", None)),
        (("batch", "batch"), ("x", None)),  # a mesh axis is used once
        (("both", "batch"), (("x", "y"), None)),
        (("batch", "both"), ("x", "y")),
        (("unknown",), (None,)),
        ((), ()),
    ],
)
def test_logical_names_become_mesh_axes_each_at_most_once(names, spec):
    assert resolve_names(names, {"batch": "x", "both": ("x", "y")}) == spec


TWO, SUMMANDS = PartitionSpec(None, None), PartitionSpec(unreduced={"x"})


def specs(prefix, tree, *shapes, axes=(("x", 2), ("y", 3))):
    names = [f"arg[{k}]" for k in range(len(shapes))]
    return leaf_specs(
        prefix, tree, names, shapes, axes=dict(axes), rules={"batch": "x"}, where="in_shardings"
    )


def test_a_prefix_says_the_sharding_of_all_leaves_below_it():
    tree = {"a": [1, 2], "b": 3}
    given = {"a": PartitionSpec(None, "y"), "b": ("batch",)}
    assert specs(given, tree, (2, 3), (4, 6), (2,)) == [(None, "y"), (None, "y"), ("x",)]
    assert specs(None, tree, (2, 3), (4, 6), (2,)) == [None, None, None]


@pytest.mark.parametrize(
    ("given", "shape", "says"),
    [
        ([None, None], (2,), "in_shardings is not a tree prefix of what it describes: "),
        (7, (2,), "in_shardings of arg[0]: 7 is no PartitionSpec, NamedSharding, tuple of names or None"),
        (
            PartitionSpec("z"),
            (2,),
            "in_shardings of arg[0] names the axis 'z', but the mesh has ['x', 'y']; give ",
        ),
        (
            PartitionSpec("x"),
            (3,),
            "in_shardings of arg[0]: dimension 0 of shape (3,) is not divisible by 2 ('x'); ",
        ),
        (
            PartitionSpec(("x", "y")),
            (2,),
            "in_shardings of arg[0]: dimension 0 of shape (2,) is not divisible by 6 ",
        ),
        (("x",), (2,), "in_shardings of arg[0] names 'x', an axis of the mesh, but axis_rules has no entry "),
        (TWO, (2,), f"in_shardings of arg[0]: {TWO} has 2 entries for an array of shape (2,)"),
        (SUMMANDS, (2,), f"in_shardings of arg[0]: {SUMMANDS} is reduced or unreduced over an axis, "),
        (NamedSharding(EXPLICIT, PartitionSpec("x")), (4,), None),
        (
            NamedSharding(AbstractMesh((4,), ("x",)), PartitionSpec("x")),
            (4,),
            "in_shardings of arg[0] is over a mesh {'x': 4} of this process's devices, but each actor has ",
        ),
    ],
)
def test_a_sharding_that_actors_cannot_have_is_refused_by_its_leaf(given, shape, says):
    if says is None:
        assert specs(given, 1, shape) == [("x",)]
        return
    with pytest.raises(ShardingError) as caught:
        specs(given, 1, shape)
    assert str(caught.value).startswith(says)


def test_a_mark_is_a_constraint_only_under_the_rules_of_a_mesh():
    def marked(x):
        return shard(x, ("batch",))

    x = jnp.ones((2, 2))
    assert (marked(x) == x).all()
    with jax.sharding.use_abstract_mesh(AUTO):
        plain = jax.jit(marked).lower(x).as_text()
        with axis_rules({"batch": "x"}):
            constrained = jax.jit(marked).lower(x).as_text()
    assert "sharding_constraint" not in plain
    assert "sharding_constraint" in constrained


def test_more_names_than_dimensions_are_refused_with_the_users_line():
    with pytest.raises(
        ShardingError, match=r"test_sharding.py:\d+: shard got 2 names \('a', 'b'\) for an array of 1 dim"
    ):
        shard(jnp.ones(2), ("a", "b"))


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_a_mesh_axis_without_a_rule_is_refused_as_a_logical_name(mesh):
    """Without an error the array would silently lie whole on every device."""
    x = struct_with_spec(LEAF, mesh, ())

    def marked():
        return jax.eval_shape(lambda x: shard(x, ("x",)), x)

    with jax.sharding.use_abstract_mesh(mesh):
        with axis_rules({"batch": "x"}), pytest.raises(ShardingError) as caught:
            marked()
        with axis_rules({"x": None}):
            assert marked().shape == (4,)
        assert marked().shape == (4,)  # of no actors: the identity
    assert re.match(r".*test_sharding.py:\d+: shard names 'x', an axis of the mesh, but ", str(caught.value))
    assert str(caught.value).endswith("RemoteMesh axis_rules={'x': 'x', ...}, or 'x': None to split nothing")
