"""Direct tests of computations that say which of their operations make a NaN or an infinity."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_async.markers.nonfinite import (
    NonfiniteChecker,
    describe_origin,
    describe_origin_in_loop,
    forbids_nonfinite,
)


@pytest.mark.parametrize(("nans", "infs"), [(False, False), (True, False), (False, True)])
def test_they_are_looked_for_only_where_jax_forbids_them(nans, infs):
    with jax.debug_nans(nans), jax.debug_infs(infs):
        assert forbids_nonfinite() is (nans or infs)


@pytest.mark.parametrize(
    ("found", "places", "names", "text"),
    [
        ([0, 0], ["", "a.py:1: log"], ["x"], None),
        ([0, 1], ["", "a.py:1: log"], ["x"], "a.py:1: invalid value (nan) encountered in log"),
        (
            [0, 2, 1],
            ["", "a.py:1: div", "a.py:2: sub"],
            ["x"],
            "a.py:1: invalid value (inf) encountered in div",
        ),
        (
            [1, 1],
            ["", "a.py:1: log"],
            ["x"],
            "a.py:1: invalid value (nan) encountered in log; x had one already",
        ),
        ([1, 2, 0], ["", "", "a.py:1: log"], ["x", "y"], "x, y had an invalid value (nan) already"),
        ([1, 1], ["", ""], ["x", "x"], "x had an invalid value (nan) already"),
        ([1, 0], ["", "a.py:1: log"], [None], None),  # of an argument without a name there is nothing to say
    ],
)
def test_the_first_operation_is_blamed_and_arguments_that_came_with_one_are_named(found, places, names, text):
    assert describe_origin(np.array(found), places, names) == text
    if text is not None:
        assert ", microbatch 2" in describe_origin(np.array(found), places, names, ", microbatch 2")


def looked_at(fn, *args, nans: bool = False, infs: bool = False):
    """Results of a function that is run equation by equation, and what was seen at which place."""
    closed, checker = jax.make_jaxpr(fn)(*args), NonfiniteChecker()

    def run(args):
        results = checker.run_closed(closed, args, "unknown line")
        return results, checker.found()

    with jax.debug_nans(nans), jax.debug_infs(infs):
        compiled = jax.jit(run).lower(list(args)).compile()
    results, found = compiled(list(args))
    return results, dict(zip(checker.places, np.asarray(found).tolist(), strict=True))


def operations(seen: dict[str, int]) -> dict[str, int]:
    """Without their lines."""
    return {place.rpartition(": ")[2]: kind for place, kind in seen.items()}


def test_each_floating_result_of_an_operation_has_a_place_with_its_line():
    (result,), seen = looked_at(lambda x: jnp.log(x).astype(jnp.int32) + 1, jnp.float32(3.0), nans=True)
    assert int(result) == 2
    ((place, kind),) = seen.items()
    assert (place.rpartition(": ")[2], kind) == ("log", 0)
    assert "test_nonfinite.py:" in place


def test_nans_and_infinities_are_told_apart_and_only_what_is_forbidden_is_seen():
    x = jnp.array([-1.0, 0.0])
    assert operations(looked_at(jnp.log, x, nans=True, infs=True)[1]) == {"log": 1}  # a NaN is worse
    assert operations(looked_at(jnp.log, x, infs=True)[1]) == {"log": 2}
    assert operations(looked_at(jnp.reciprocal, x, nans=True)[1]).popitem()[1] == 0
    assert operations(looked_at(jnp.reciprocal, x, infs=True)[1]).popitem()[1] == 2


def test_calls_and_scans_are_entered():
    def scanned(x):
        return jax.lax.scan(lambda c, v: (c + jnp.sqrt(v), c), jnp.zeros(()), x)

    (last, firsts), seen = looked_at(jax.jit(scanned), jnp.array([1.0, -1.0, 4.0]), nans=True)
    assert operations(seen) == {"sqrt": 1, "add": 1}
    assert np.isnan(last)
    np.testing.assert_array_equal(firsts, [0.0, 1.0, np.nan])


def test_the_microbatch_that_makes_one_is_named_and_that_of_an_argument_too():
    batch = jnp.array([[1.0], [-1.0], [2.0]])
    fine = batch[::2]
    body = jax.make_jaxpr(lambda w, x, i: jnp.sqrt(x) * w)(np.float32(1), batch[0], np.int32(0))
    with jax.debug_nans(True):
        text = describe_origin_in_loop(body, [np.float32(1), batch], 1, 3, ["batch"])
        given = describe_origin_in_loop(body, [np.float32(np.nan), fine], 1, 2, ["batch"])
        nothing = describe_origin_in_loop(body, [np.float32(1), fine], 1, 2, ["batch"])
    assert text.endswith(": invalid value (nan) encountered in sqrt, microbatch 1")
    assert given.endswith("mul, microbatch 0; a value that the loop's function closes over had one already")
    assert nothing is None
