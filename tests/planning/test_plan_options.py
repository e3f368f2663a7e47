"""Options of `plan` that are refused before anything is compiled."""

import pytest

import jaxpp_async as jpp
from jaxpp_async.errors import PlanError
from jaxpp_async.planning.plan_options import check_plan_options

NAMES = "global_batch", "microbatches", "num_stages", "batch_argnums", "iterations", "costs", "on_progress"
RIGHT = {"machine": jpp.Machine(2), "seed": 0, **dict.fromkeys(NAMES)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"machine": 3}, "machine is 3; write a jpp.Machine"),
        ({"costs": 3}, "costs is 3; write a CostModel"),
        ({"microbatches": [0]}, r"microbatches is \[0\]; write a list of numbers of at least 1"),
        ({"microbatches": ["a"]}, r"microbatches is \['a'\]; write"),
        ({"microbatches": [2.0]}, r"microbatches is \[2.0\]; write"),
        ({"microbatches": []}, r"microbatches is \[\]; write"),
        ({"num_stages": "2"}, "num_stages is '2'; write a whole number, or None"),
        ({"num_stages": True}, "num_stages is True; write"),
        ({"seed": -1}, "seed is -1; write a whole number of at least 0"),
        ({"batch_argnums": "a"}, "batch_argnums is 'a'; write the position of an argument"),
        ({"iterations": -1}, "iterations is -1; write a whole number of at least 0, or None"),
    ],
)
def test_a_wrong_option_is_named(options, message):
    check_plan_options(**RIGHT)
    with pytest.raises(PlanError, match=message):
        check_plan_options(**{**RIGHT, **options})
    with pytest.raises(PlanError, match=message):
        jpp.plan(lambda x: x, (1,), **{"machine": jpp.Machine(2), **options})
