"""Direct tests of the counts that an actor gives of itself."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jaxpp_async.actors.actor import Actor
from jaxpp_async.protocol import messages as m


class Store:
    """Stands in for the arrays of an actor."""

    size_bytes = 40

    def __len__(self) -> int:
        return 3


RESOURCES = SimpleNamespace(
    step_resources=SimpleNamespace(pool=SimpleNamespace(free_buffers=2, free_bytes=64)),
    executables=SimpleNamespace(compilations=5),
)
RUN = SimpleNamespace(executor=SimpleNamespace(table_bytes=100, pending_bytes=10))


@pytest.fixture
def counted(monkeypatch):
    """Ask an actor with stand-ins for its parts for its counts, in a step or between two."""
    replies: list[m.Inspected] = []
    actor = Actor(
        0, make_transport=lambda name, network: None, send=lambda reply, number: replies.insert(number, reply)
    )
    monkeypatch.setattr(actor, "_resources_or_none", RESOURCES)
    monkeypatch.setattr(actor, "_store", Store())
    monkeypatch.setattr(actor, "_replica_store", SimpleNamespace(size_bytes=7))
    monkeypatch.setattr(actor, "_tasks", range(4))

    def count(run=None) -> dict[str, int]:
        actor._steps.current = run
        actor.handle(m.Inspect(), len(replies))
        return replies[-1].numbers

    yield count
    actor._workers.shutdown()


def test_arrays_buffers_tasks_and_compilations_are_counted_by_name(counted):
    found = counted(RUN)
    of_the_process = ("live_arrays", "live_bytes", "file_descriptors")
    assert {name: count for name, count in found.items() if name not in of_the_process} == {
        "store_arrays": 3,
        "store_bytes": 40,
        "table_bytes": 100,
        "pending_bytes": 10,
        "copied_bytes": 7,
        "free_receive_buffers": 2,
        "free_receive_bytes": 64,
        "compilations": 5,
        "tasks": 4,
    }
    assert found["file_descriptors"] > 0


def test_between_steps_the_table_is_empty(counted):
    found = counted()
    assert (found["table_bytes"], found["pending_bytes"]) == (0, 0)


def test_arrays_that_live_are_counted_with_their_bytes(counted):
    before = counted()
    kept = jnp.arange(1024, dtype=jnp.int32)
    after = counted()
    assert after["live_arrays"] - before["live_arrays"] == 1
    assert after["live_bytes"] - before["live_bytes"] == kept.nbytes
