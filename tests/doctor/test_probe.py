"""Tests of the measurement between two ends of a data plane, inside this process."""

from __future__ import annotations

import asyncio

import pytest

from jaxpp_async.doctor import host
from jaxpp_async.doctor.host import ProbeEnd
from jaxpp_async.transport.memory import MemoryNetwork, MemoryTransport


@pytest.fixture
async def ends(monkeypatch):
    """Two ends on a network in memory; large messages are small, and few."""
    network = MemoryNetwork()
    made = []

    def make_transport(kind: str, peer_id: int) -> MemoryTransport:
        assert kind == "ucx"
        made.append(MemoryTransport(network, peer_id))
        return made[-1]

    monkeypatch.setattr(host, "make_process_transport", make_transport)
    for name, value in {"LARGE_BYTES": 64, "MOST_ROUNDS": 3, "PINGS": 4, "WARM_PINGS": 1}.items():
        monkeypatch.setattr(host, name, value)
    both = ProbeEnd(0), ProbeEnd(1)
    yield both
    for end in both:
        await end.aclose()


async def test_the_end_that_leads_has_the_figures_and_the_other_zeros(ends):
    leads, follows = ends
    found, nothing = await asyncio.gather(
        leads.measure(1, follows.address, leads=True), follows.measure(0, leads.address, leads=False)
    )
    assert nothing == (0.0, 0.0)
    latency_s, bytes_per_s = found
    assert latency_s > 0
    assert bytes_per_s > 0


async def test_an_end_that_hears_nothing_gives_up(ends, monkeypatch):
    monkeypatch.setattr(host, "MEASURE_S", 0.0)
    with pytest.raises(TimeoutError):
        await ends[0].measure(1, ends[1].address, leads=True)
