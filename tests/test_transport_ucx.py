"""The UCX transport: the conformance suite within one process, then what only it has, then two processes."""

from __future__ import annotations

import pytest
from transport_conformance import TransportConformance

from jaxpp_async.transport.ucx import UCXTransport

pytest.importorskip("ucxx", reason="UCX tests need the package ucxx")


@pytest.fixture
async def make_transport():
    made = []

    async def make(peer_id: int) -> UCXTransport:
        made.append(UCXTransport(peer_id))
        return made[-1]

    yield make
    for transport in made:
        await transport.aclose()


class TestUCXConformance(TransportConformance):
    """All of it, on UCX."""
