"""Direct tests of the look at results for NaNs and infinities."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpp_async.actors import executables
from jaxpp_async.actors.executables import Executable, Executables, SelfChecked, call_checked

NAN, INF = jnp.array([1.0, jnp.nan]), jnp.array([jnp.inf])


def look(*results, infs: bool = True, explain=lambda: None):
    return call_checked(lambda: list(results), [], infs=infs, explain=explain)


def test_results_are_returned_as_they_are_where_nothing_is_forbidden():
    assert look(NAN, INF)[1] is INF


@pytest.mark.parametrize(
    ("results", "position"), [((NAN,), 0), ((jnp.ones(2), jnp.array([1]), NAN), 2)], ids=["first", "third"]
)
def test_a_nan_is_an_error_that_names_the_result_and_the_option(results, position):
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        look(*results)
    assert str(caught.value) == (
        f"invalid value (nan) in result {position} (float32[2]) of the task; jax_debug_nans is on"
    )


def test_what_is_known_of_the_operation_comes_first():
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        look(NAN, explain=lambda: "train.py:3: invalid value (nan) encountered in log")
    assert str(caught.value) == "train.py:3: invalid value (nan) encountered in log; jax_debug_nans is on"


def test_infinities_are_an_error_only_where_they_are_looked_for():
    with jax.debug_infs(True):
        with pytest.raises(FloatingPointError, match=r"^invalid value \(inf\) in result 0 .* is on$"):
            look(INF)
        assert look(INF, infs=False)[0] is INF
        assert look(NAN)[0] is NAN


def test_an_executable_that_looks_at_itself_names_the_first_operation_of_its_last_call():
    seen = jnp.array([1, 0, 1], jnp.uint8)
    run = SelfChecked(lambda x: ([x], {"seen": seen}), ["", "a.py:1: add", "a.py:2: log"], ["batch", None])
    assert run.explain() is None  # not called yet
    assert list(run(NAN)) == [NAN]
    assert run.explain() == "a.py:2: invalid value (nan) encountered in log; batch had one already"


async def test_each_executable_that_is_compiled_is_told_and_whence_it_came(monkeypatch):
    def compile_blob(blob, donated, devices):
        return Executable(lambda: [], 0, (), (), is_cached=blob == b"cached")

    monkeypatch.setattr(executables, "compile_blob", compile_blob)
    no_devices: Any = None
    told: list[tuple[int, int, int]] = []
    with ThreadPoolExecutor(1) as workers:
        here = Executables(no_devices, workers)
        here.add_blobs({"a": b"cached", "b": b"new", "c": b"new"})
        await here.load([("a", ()), ("b", ()), ("a", ())], lambda *counts: told.append(counts))
        assert told == [(0, 2, 0), (1, 2, 1), (2, 2, 1)]
        await here.load([("a", ()), ("c", ())], lambda *counts: told.append(counts))
        assert told[3:] == [(0, 1, 0), (1, 1, 0)]
        await here.load([("a", ())], lambda *counts: told.append(counts))
    assert len(told) == 5
