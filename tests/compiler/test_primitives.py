"""The names that the compiler knows primitives by, and when an equation is replaced by what it wraps."""

import gc

import jax
import pytest
from jax._src.interpreters import batching

from jaxpp_async.compiler import primitives
from jaxpp_async.compiler.primitives import inlines
from jaxpp_async.markers import logical_axes, markers, nonfinite

# The primitives of `markers` and `sharding` are among those that exist; these name operations that no jaxpr
# has.
OURS = {primitives.STACK, primitives.INDEX}

# Names that other versions of JAX have or had.
OF_OTHER_VERSIONS = {
    "checkpoint",
    "closed_call",
    "core_call",
    "custom_vjp_call_jaxpr",
    "pjit",
    "remat",
    "remat2",
}
OF_OTHER_VERSIONS |= {"log2", "one_minus_square", "polynomial"}  # from JAX 0.12 on

# Elementwise, and not to be run again: random bits, series and iterations, and what is no computation on an
# array.
NOT_AGAIN = {
    "bessel_i0e",
    "bessel_i1e",
    "digamma",
    "igamma",
    "igamma_grad_a",
    "igammac",
    "lgamma",
    "polygamma",
    "zeta",
}
NOT_AGAIN |= {
    "regularized_incomplete_beta",
    "philox2x32",
    "philox4x32",
    "random_bits",
    "threefry2x32",
    "threefry4x32",
}
NOT_AGAIN |= {"global_array_to_host_local_array"}  # there once `multihost_utils` is imported
NOT_AGAIN |= {"from_edtype", "random_clone", "stage", "tie", "to_edtype", "with_memory_space_constraint"}

LISTS = {name: value for name, value in vars(primitives).items() if isinstance(value, frozenset)}
LISTS |= {name: frozenset(getattr(primitives, name)) for name in ("AFFINE", "LINEAR_IN_ONE")}


@pytest.fixture(scope="module")
def existing() -> set[str]:
    """Names of all primitives that JAX and we have made in this process."""
    kind = type(jax.lax.add_p)
    assert isinstance(markers.marker_p, kind) and isinstance(logical_axes.shard_p, kind)
    gc.unfreeze()  # conftest.py hides what was loaded from the collector, and so from this list
    found = {x.name for x in gc.get_objects() if isinstance(x, kind)}
    gc.freeze()
    return found


@pytest.mark.parametrize("name", sorted(LISTS))
def test_every_name_exists(name, existing):
    assert LISTS[name] - existing - OURS - OF_OTHER_VERSIONS == set()


def test_every_elementwise_primitive_is_known():
    """One that no table knows is kept for the backward where it could be made again: 0.12's tanh cost gelu
    that."""
    # of a batch they are what they are of one
    alike = (batching.vectorized_batcher, batching.broadcast_batcher)
    rules = batching.fancy_primitive_batchers.items()
    elementwise = {p.name for p, rule in rules if getattr(rule, "func", None) in alike}
    assert {"tanh", "add"} <= elementwise
    assert elementwise - primitives.LIGHT - NOT_AGAIN == set()


def test_one_of_each_wrapper_is_of_this_version(existing):
    for names in (primitives.CALLS, primitives.CHECKPOINTS, primitives.CUSTOM_RULES):
        assert names & existing


def test_markers_have_the_names_that_the_compiler_looks_for():
    found = markers.marker_p.name, markers.marker_side_p.name, markers.loop_p.name
    assert found == (primitives.MARKER, primitives.MARKER_SIDE, primitives.LOOP)


def test_the_search_for_nans_enters_what_means_what_is_inside():
    assert nonfinite.CALLS == primitives.CALLS | primitives.CHECKPOINTS | primitives.CUSTOM_RULES


# ("m" markers inside, "p" prints inside, "s" shardings of its own, "l" in a loop) -> inlined
WHEN = {
    "jit": {"": True, "l": True, "s": False, "sl": False, "sm": True, "sml": True, "sp": True},
    "remat2": {"": False, "l": False, "p": False, "m": True, "ml": True},
    "custom_vjp_call": {"": True, "l": False, "pl": True, "ml": True},
    "scan": {"": False, "ml": False, "p": False},
}


@pytest.mark.parametrize("name", WHEN)
def test_what_is_inlined(name):
    assert WHEN[name] == {
        when: inlines(name, marked="m" in when, prints="p" in when, pinned="s" in when, in_loop="l" in when)
        for when in WHEN[name]
    }
