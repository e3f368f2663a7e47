"""Direct tests of the value that has all that an actor's steps run on."""

from __future__ import annotations

import dataclasses

import pytest

from jaxpp_async.actors.setup import StepResources
from jaxpp_async.protocol.actor_info import no_progress


def test_a_machine_of_one_process_on_cpus_shares_nothing_and_tells_nobody():
    machine = StepResources(transport="t", compute="c", pool="p", layouts="l")
    assert (machine.device_lock, machine.device, machine.may_begin) == (None, None, None)
    assert machine.note_progress is no_progress
    with pytest.raises(dataclasses.FrozenInstanceError):
        machine.device_lock = object()
