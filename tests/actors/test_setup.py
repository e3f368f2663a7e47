"""Direct tests of the value that holds everything an actor's steps run on."""

from __future__ import annotations

import dataclasses

import pytest

from jaxpp_async.actors.setup import StepResources
from jaxpp_async.protocol.actor_info import no_progress


def test_the_resources_of_one_process_on_cpus_have_no_lock_no_device_and_no_turn_to_wait_for():
    resources = StepResources(transport="t", compute="c", pool="p", layouts="l")
    assert (resources.device_lock, resources.device_work, resources.may_begin) == (None, None, None)
    assert resources.note_progress is no_progress
    with pytest.raises(dataclasses.FrozenInstanceError):
        resources.device_lock = object()
