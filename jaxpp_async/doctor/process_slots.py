"""room: hosts' slots and what is asked for in, how many processes each host gets out. As the launcher does it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpp_async.doctor.facts import Asked, Examination
from jaxpp_async.launch.hosts import Host, place, spread


@dataclass(frozen=True, slots=True)
class ProcessSlots:
    """Who is where.

    Args:
        num_processes: on each host. per_actor: of how many each actor is.
        devices_each: of a process. slots_each: how many slots of one host a process takes.
    """

    num_processes: tuple[int, ...]
    per_actor: int
    devices_each: int
    slots_each: int = 1


def find_process_slots(found: Examination) -> ProcessSlots:
    """Place the actors that are asked for; if no number is, as many as there is room for.

    Raises:
        MeshError: they do not fit.
    """
    asked, each = found.asked, found.asked.processes_per_actor or 1
    if found.is_local:  # slots are actors there: nothing has been said of hosts
        return ProcessSlots((found.here.slots * each,), each, asked.devices_per_actor // each)
    # names are no matter here
    hosts = [Host(f"host{index}", report.slots) for index, report in enumerate(found.hosts)]
    num_actors = asked.num_actors or max(1, _most(hosts, asked))
    slots_each = 1
    if asked.slots_are_processes:
        placements = place(hosts, num_actors * each, per_actor=each)
    else:
        how = spread(hosts, num_actors, asked.devices_per_actor, asked.processes_per_actor)
        each, slots_each = how.per_actor, how.slots_each
        placements = place(hosts, num_actors * each, slots_each, per_actor=each)
    counts = tuple(sum(placement.host is host for placement in placements) for host in hosts)
    return ProcessSlots(counts, each, asked.devices_per_actor // each, slots_each)


def _most(hosts: Sequence[Host], asked: Asked) -> int:
    """How many actors there is room for, each of as few processes as may be."""
    devices, given = asked.devices_per_actor, asked.processes_per_actor
    if asked.slots_are_processes or devices == 1 or all(host.slots == 1 for host in hosts):
        return sum(host.slots for host in hosts) // (given or 1)
    for each in [given] if given else [k for k in range(1, devices + 1) if devices % k == 0]:
        most = sum(host.slots // (devices // each) for host in hosts) // each
        if most:
            return most
    return 0
