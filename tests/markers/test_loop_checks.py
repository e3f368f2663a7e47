"""Direct tests of the checks of a loop's batch, its reductions and its results."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_async.errors import StageError
from jaxpp_async.markers.loop_checks import (
    check_num_microbatches,
    count_microbatches,
    reductions_for,
    refuse_batch_as_schedule,
    refuse_loss_before_gradients,
)
from jaxpp_async.markers.reductions import Concat, Max, Mean, Stack, Sum

LINE = "train.py:7"


def of(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# ---------------------------------------------------------------- the batch


@pytest.mark.parametrize(("wanted", "count"), [(None, None), (1, 1), (np.int64(4), 4)])
def test_the_number_of_microbatches_is_an_integer_or_not_given(wanted, count):
    assert check_num_microbatches(wanted) == count


@pytest.mark.parametrize(
    ("wanted", "error", "says"),
    [
        (True, TypeError, "num_microbatches is True; give an integer, or None"),
        (2.0, TypeError, "num_microbatches is 2.0; give an integer, or None"),
        ("2", TypeError, "num_microbatches is '2'; give an integer, or None"),
        (0, ValueError, "num_microbatches is 0; give a number of at least 1, or None"),
        (-3, ValueError, "num_microbatches is -3; give a number of at least 1, or None"),
    ],
)
def test_another_number_of_microbatches_is_refused(wanted, error, says):
    with pytest.raises(error) as caught:
        check_num_microbatches(wanted)
    assert str(caught.value) == says


class Own:
    """Not a good schedule, but one of somebody's own."""

    tasks, dtype = None, 1


@pytest.mark.parametrize("schedule", [[], [[]], 7, "text", Own()], ids=lambda s: type(s).__name__)
def test_a_wrong_schedule_that_is_no_batch_is_left_to_where_it_is_used(schedule):
    refuse_batch_as_schedule(schedule, LINE)


@pytest.mark.parametrize(
    "batch", [np.zeros(2), {"x": 1}, [np.zeros(2)], (jnp.zeros(2),)], ids=lambda b: type(b).__name__
)
def test_a_batch_in_the_place_of_the_schedule_is_refused_with_how_to_write_it(batch):
    with pytest.raises(TypeError) as caught:
        refuse_batch_as_schedule(batch, LINE)
    name = type(batch).__name__
    assert str(caught.value).startswith(
        f"{LINE}: argument 2 of accumulate_grads is a {name}, not a schedule; write `accumulate_grads(fn, "
    )


@pytest.mark.parametrize(("shapes", "wanted"), [([(4, 2), (4,)], None), ([(4,)], 4)])
def test_a_batch_has_as_many_microbatches_as_its_leaves_share(shapes, wanted):
    assert count_microbatches(["x", "y"][: len(shapes)], shapes, wanted, LINE) == 4


@pytest.mark.parametrize(
    ("shapes", "wanted", "says"),
    [
        ([], None, "accumulate_grads got a batch without arrays; pass leaves (num_microbatches, ...)"),
        (
            [(4,), ()],
            None,
            "y is a scalar and has no microbatch axis; every leaf of the batch is (num_microbatches, ",
        ),
        (
            [(4, 2), (3,)],
            None,
            "the batch's leaves have unequal numbers of microbatches (x: 4, y: 3); every leaf is ",
        ),
        ([(0, 2)], None, "x has shape (0, 2): no microbatches to accumulate; pass at least one"),
        (
            [(8, 3)],
            4,
            "x has shape (8, 3), which is 8 microbatches, but num_microbatches is 4; write "
            "`x.reshape(4, 2, 3)` if these are 8 rows of one batch",
        ),
        (
            [(1, 3)],
            4,
            "x has shape (1, 3), which is 1 microbatch, but num_microbatches is 4; its leading axis of 1 "
            "cannot be split into 4 of equal size: pass a multiple of 4",
        ),
        (
            [(2, 3, 4)],
            4,
            "x has shape (2, 3, 4), which is 2 microbatches, but num_microbatches is 4; its axes may be in "
            "another order: `jnp.moveaxis(x, 2, 0)` has that number",
        ),
    ],
)
def test_a_batch_without_a_usable_axis_is_refused_with_its_line_its_leaf_and_a_remedy(shapes, wanted, says):
    with pytest.raises(StageError) as caught:
        count_microbatches(["x", "y"][: len(shapes)], shapes, wanted, LINE)
    assert str(caught.value).startswith(f"{LINE}: {says}")


# ---------------------------------------------------------------- the results


class Grads(NamedTuple):
    w: object
    b: object


@pytest.mark.parametrize(
    ("reduce", "shapes", "found"),
    [
        (None, of(2), (Sum(),)),
        (None, (of(2), of()), (Sum(), Stack())),
        (None, ({"w": of(2), "b": of()}, (of(), of())), (Sum(), Sum(), Stack(), Stack())),
        (None, Grads(of(2), of()), (Sum(), Sum())),  # one value with named parts
        (None, [of(), of()], (Sum(), Sum())),
        (Max(), (of(), of()), (Max(), Max())),
        (
            (Mean(), {"a": Stack(), "b": Concat()}),
            (of(), {"a": of(), "b": of(3)}),
            (Mean(), Stack(), Concat()),
        ),
    ],
)
def test_each_leaf_of_the_results_gets_the_reduction_that_stands_above_it(reduce, shapes, found):
    assert reductions_for(reduce, shapes, LINE) == found


@pytest.mark.parametrize(
    ("reduce", "shapes", "says"),
    [
        (Sum, of(), "reduce has the class Sum; write Sum()"),
        ("sum", of(), "reduce has 'sum'; use Sum() Max() Min() Mean() Stack() Concat()"),
        (
            (Sum(), Sum()),
            of(),
            "reduce is not a tree prefix of the function's result *: it is (Sum(), Sum()); give an ",
        ),
        (None, (of(), of(dtype=jnp.bool_)), None),  # the second is stacked
        (
            Sum(),
            {"hit": of(dtype=jnp.bool_)},
            "result['hit']: Sum() cannot add booleans; cast to int32 first, or use ",
        ),
        (
            Mean(),
            of(dtype=jnp.int32),
            "result: Mean() takes floating values, not int32; cast first, or use Sum()",
        ),
        (
            Concat(),
            of(),
            "result: Concat(axis=0) needs that axis, but the value has 0 dimensions; use Stack()",
        ),
    ],
)
def test_reductions_that_do_not_fit_are_refused_with_the_line_and_the_result(reduce, shapes, says):
    if says is None:
        reductions_for(reduce, shapes, LINE)
        return
    with pytest.raises(TypeError) as caught:
        reductions_for(reduce, shapes, LINE)
    assert str(caught.value).startswith(f"{LINE}: {says}")


def grads_first(x):
    return jax.grad(lambda v: (v * v).sum())(x), x.sum()


def loss_first(x):
    return jax.value_and_grad(lambda v: (v * v).sum())(x)


def aux_first(x):
    return jax.value_and_grad(lambda v: ((v * v).sum(), v), has_aux=True)(x)


def order_of(fn) -> None:
    x = jnp.ones(3)
    body, shapes = jax.make_jaxpr(fn, return_shape=True)(x)
    refuse_loss_before_gradients(shapes, body, LINE)


@pytest.mark.parametrize(
    ("fn", "name", "loss"),
    [(loss_first, "result[1] (float32[3])", "loss"), (aux_first, "result[1] (float32[3])", "(loss, aux)")],
)
def test_a_loss_before_its_gradients_is_refused_with_both_ways_to_write_it(fn, name, loss):
    with pytest.raises(TypeError) as caught:
        order_of(fn)
    text = str(caught.value)
    assert text.startswith(
        f"{LINE}: the function returns the loss first, as jax.value_and_grad does: without `reduce` "
    )
    assert f"gradients such as {name} too. Return the gradients first:\n  {loss}, grads = jax" in text


@pytest.mark.parametrize(
    "fn",
    [
        grads_first,
        lambda x: x,
        lambda x: (x.sum(), x * 2),  # a forward pass has no gradients
        lambda x: (x.sum(), jax.grad(lambda v: v * v)(x[0])),  # a scalar gradient may as well be stacked
    ],
)
def test_results_in_another_order_are_taken(fn):
    order_of(fn)
