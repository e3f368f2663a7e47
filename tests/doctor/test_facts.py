"""Tests of how many processes each host gets."""

from __future__ import annotations

import pytest

from jaxpp_async.doctor.facts import Examination, HostReport, ProcessSlots, RequestedRun, find_process_slots
from jaxpp_async.errors import MeshError

HERE = HostReport("here", slots=3)


def found(*slots: int, **asked) -> Examination:
    """Hosts of so many slots, apart from this machine."""
    return Examination(
        RequestedRun(**asked), HERE, tuple(HostReport(f"n{k}", n) for k, n in enumerate(slots))
    )


@pytest.mark.parametrize(
    ("slots", "asked", "expected"),
    [
        ((2, 1), {}, ProcessSlots((2, 1), 1, 1)),  # as many as have a slot
        ((2, 2), {"num_actors": 3}, ProcessSlots((2, 1), 1, 1)),
        ((4, 4), {"devices_per_actor": 2}, ProcessSlots((2, 2), 1, 2, slots_each=2)),
        ((4, 4), {"devices_per_actor": 8}, ProcessSlots((1, 1), 2, 4, slots_each=4)),  # one actor over both
        ((4, 4, 4, 4), {"devices_per_actor": 8}, ProcessSlots((1, 1, 1, 1), 2, 4, slots_each=4)),
        # one slot each: a process of whatever size
        ((1, 1), {"devices_per_actor": 2}, ProcessSlots((1, 1), 1, 2)),
        (
            (4, 4),
            {"devices_per_actor": 4, "processes_per_actor": 2},
            ProcessSlots((2, 2), 2, 2, slots_each=2),
        ),
        ((4, 4), {"devices_per_actor": 2, "slots_are_processes": True}, ProcessSlots((4, 4), 1, 2)),
        (
            (3,),
            {"devices_per_actor": 4, "processes_per_actor": 2, "slots_are_processes": True},
            ProcessSlots((2,), 2, 2),
        ),
    ],
)
def test_hosts_are_filled_in_order_as_a_launcher_would(slots, asked, expected):
    assert find_process_slots(found(*slots, **asked)) == expected


def test_on_this_machine_alone_slots_are_actors():
    local = Examination(RequestedRun(devices_per_actor=4, processes_per_actor=2), HERE, (HERE,))
    assert find_process_slots(local) == ProcessSlots((6,), 2, 2)


@pytest.mark.parametrize(
    ("slots", "asked", "says"),
    [
        ((1, 1), {"num_actors": 3}, "3 actors do not fit 2 slots on 2 hosts; add hosts"),
        (
            (2, 2),
            {"num_actors": 1, "devices_per_actor": 8},
            "1 actor of 8 devices do not fit 4 slots on 2 hosts; a slot",
        ),
        (
            (1,),
            {"devices_per_actor": 2, "slots_are_processes": True, "num_actors": 2},
            "2 actors do not fit 1 slot on 1",
        ),
    ],
)
def test_what_does_not_fit_is_refused(slots, asked, says):
    with pytest.raises(MeshError) as caught:
        find_process_slots(found(*slots, **asked))
    assert str(caught.value).startswith(says)
