"""Checks of what a user logs, and histories that stay small."""

from __future__ import annotations

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxpp_async.session import metric_log
from jaxpp_async.session.metric_log import MetricHistory, check_step, check_values
from jaxpp_async.view.history import EXACT


def test_numbers_of_every_kind_become_floats():
    values = {
        "int": 3,
        "bool": True,
        "fraction": Fraction(1, 2),
        "float32": np.float32(0.5),
        "bfloat16": ml_dtypes.bfloat16(2),
        "numpy array": np.array(7, np.int16),
        "jax array": jax.block_until_ready(jnp.asarray(1.5, jnp.bfloat16)),
        "inf": -math.inf,
    }
    checked = check_values(values)
    assert checked == {
        "int": 3.0,
        "bool": 1.0,
        "fraction": 0.5,
        "float32": 0.5,
        "bfloat16": 2.0,
        "numpy array": 7.0,
        "jax array": 1.5,
        "inf": -math.inf,
    }
    assert {type(value) for value in checked.values()} == {float}
    assert math.isnan(check_values({"x": float("nan")})["x"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], r"values is \[1.0\]; give a mapping such as \{'loss': loss\}"),
        ({3: 1.0}, "the name 3 is no text"),
        ({"": 1.0}, "the name '' has not 1 to 200 printable characters"),
        ({"a\nb": 1.0}, "has not 1 to 200 printable characters"),
        ({"x" * 201: 1.0}, "has not 1 to 200 printable characters"),
        ({"loss": "0.5"}, "'loss' is '0.5'; give one number"),
        ({"loss": {"a": 1.0}}, "'loss' is {'a': 1.0}; give one number"),
        ({"loss": None}, "'loss' is None; give one number"),
        ({"loss": 1j}, "'loss' is 1j; give one number"),
        ({"loss": np.ones(4, np.float32)}, r"'loss' is float32\[4\]; give one number, such as loss.mean\(\)"),
        ({"loss": jnp.ones((2, 3))}, r"'loss' is float32\[2, 3\]; give one number"),
        ({"loss": np.str_("3")}, "'loss' has the dtype <U1; give a real number"),
        ({"loss": np.array(1j)}, "'loss' has the dtype complex128; give a real number"),
        ({"loss": np.timedelta64(5, "s")}, r"'loss' has the dtype timedelta64\[s\]; give a real number"),
        ({"key": jax.random.key(0)}, r"'key' has the dtype key<fry>; give a real number"),
        ({"loss": 10**400}, "'loss' is too large for a float"),
    ],
)
def test_what_is_no_number_is_refused_by_its_name(values, message):
    with pytest.raises((TypeError, ValueError), match=message):
        check_values(values)


def test_a_traced_and_a_deleted_array_are_refused():
    with pytest.raises(TypeError, match=r"'loss' is .*, which is being traced; let the step return it"):
        jax.jit(lambda x: check_values({"loss": x}))(1.0)
    array = jnp.asarray(1.0)
    array.delete()
    with pytest.raises(ValueError, match=r"'loss' is a jax.Array that was deleted or donated"):
        check_values({"loss": array})


@pytest.mark.parametrize("step", [-1, 2**63, 1.0, "1", None])
def test_a_step_is_a_whole_number(step):
    with pytest.raises((TypeError, ValueError), match=r"mesh.log: step is .*; give a whole number"):
        check_step(step)
    assert check_step(np.int64(7)) == 7


def test_a_history_has_the_latest_values_one_by_one_and_the_older_ones_in_groups():
    log = MetricHistory()
    assert log.history("loss").num_values == 0 and log.latest() == {}
    num = 20 * EXACT
    for step in range(num):
        log.add(step, {"loss": -float(step)})
    history = log.history("loss")
    found = history.buckets()
    assert history.num_values == num and len(found) <= 3 * EXACT
    assert found.mean[-EXACT:].tolist() == [-step for step in range(num - EXACT, num)]
    assert found.mean[0] == -15.5 and (found.least[0], found.least_step[0]) == (-31, 31)
    assert log.latest() == {"loss": (num - 1, 1.0 - num)}


def test_what_is_read_does_not_change_afterwards():
    log = MetricHistory()
    log.add(0, {"loss": 1.0})
    before = log.history("loss")
    log.add(1, {"loss": 2.0})
    assert before.buckets().mean.tolist() == [1.0]


def test_names_without_end_are_not_all_kept(monkeypatch):
    monkeypatch.setattr(metric_log, "MOST_NAMES", 3)
    log = MetricHistory()
    for step in range(10):
        log.add(step, {f"loss {step}": 1.0, "loss": 2.0})
    assert log.names == ("loss 0", "loss", "loss 1")
    assert log.num_dropped == 8 and log.history("loss").num_values == 10
