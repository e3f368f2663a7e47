"""Direct tests of what becomes of the arrays that a step was given for good."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from jaxpp_async.compiler.ir import ValueType
from jaxpp_async.errors import ArrayError
from jaxpp_async.program.instructions import Aval
from jaxpp_async.program.leaf_parts import Parts
from jaxpp_async.session.argument_binding import Slot
from jaxpp_async.session.leaf_division import leaf_slots, part_types
from jaxpp_async.session.remote_array import RemoteArray
from jaxpp_async.session.step_future import StepArrays

F4 = ValueType(Aval((4,), "float32"))


class Mesh:
    def release(self, array) -> None: ...


MESH = Mesh()
NAMES = ("state['w']", "state['b']", "batch", "cache.a", "cache.b", "cache.c", "cache.d")
RESULTS = ("result[0]['w']", "result[0]['b']", "result[1]")


def array(array_id: int) -> RemoteArray:
    return RemoteArray(MESH, array_id, F4, (0,))


def compiled(donated: dict[int, int | None], handed_back=()) -> SimpleNamespace:
    """A compiled step: `donated` has the result that continues each donated leaf."""
    inputs = [Slot(name, F4, (0,)) for name in NAMES]
    traced = SimpleNamespace(out_names=RESULTS)
    return SimpleNamespace(
        donated=donated,
        handed_back=handed_back,
        inputs=inputs,
        arguments=inputs,
        compiled=SimpleNamespace(traced=traced),
    )


def why(leaf: RemoteArray) -> str | None:
    """Why an array cannot be used; None: it can."""
    try:
        leaf.check_usable("it", MESH)
    except ArrayError as error:
        return str(error).removeprefix("it cannot be used: ")
    return None


def test_a_donated_array_cannot_be_used_once_the_step_is_sent_and_the_others_can():
    given, kept = array(1), array(2)
    step = StepArrays("train", compiled({0: 0}), [given, kept, np.zeros(4)], [array(10)])
    assert why(given) == "it was donated to step 'train'; use the step's result instead"
    assert (why(kept), step.donated) == (None, {0: given})


def test_after_a_failure_neither_arguments_nor_results_can_be_used():
    given, made, back = array(1), array(10), array(11)
    step = StepArrays("train", compiled({0: 0}, handed_back={1: 0}), [given], [made, back])
    step.fail("actor 1 died")
    assert why(given) == "it was donated to step 'train', which failed: actor 1 died"
    assert why(made) == "its step failed: actor 1 died"
    assert why(back) is None  # no program touches it


def test_without_its_caller_each_donated_array_stands_for_the_result_that_continues_it():
    weights, bias, results = array(1), array(2), [array(10), array(11), array(12)]
    step = StepArrays("train", compiled({0: 0, 1: 1}), [weights, bias], results)
    said = step.abandon()
    assert (weights.array_id, bias.array_id, why(weights)) == (10, 11, None)
    assert said == "state stands for result[0]; to give it the same batch again trains on it twice"
    step.fail("actor 1 died")
    assert why(weights) == "its step failed: actor 1 died"


def test_what_no_result_continues_is_lost_and_host_values_are_what_they_were():
    lost = [array(k) for k in range(4)]
    leaves = [np.zeros(4), np.zeros(4), np.zeros(4), *lost]
    step = StepArrays("train", compiled(dict.fromkeys([0, 3, 4, 5, 6])), leaves, [])
    assert step.abandon() == (
        "no result continues cache.a, cache.b, cache.c and 1 more, which cannot be used any more; "
        "host values are what they were: state['w']"
    )
    assert why(lost[0]) == (
        "it was donated to step 'train', whose caller was cancelled, and no result continues it: none has "
        "its place in the tree, its shape and its dtype; make it anew"
    )


@pytest.mark.parametrize("leaves", [[], [array(1)]])
def test_of_a_step_that_was_given_nothing_for_good_there_is_nothing_to_say(leaves):
    assert StepArrays("train", compiled({}), leaves, []).abandon() is None


def test_a_leaf_in_parts_is_named_once():
    parts = Parts(0, (0, 1, 4))
    slots = [
        Slot(name, kind, (0,)) for name, kind in zip(parts.names("cache"), part_types(F4, parts), strict=True)
    ]
    step = compiled({0: None, 1: None})
    step.inputs, step.arguments = slots, leaf_slots(slots, (parts,))
    assert StepArrays("train", step, [array(1), array(2)], []).abandon() == (
        "no result continues cache, which cannot be used any more"
    )
