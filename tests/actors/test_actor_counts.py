"""Direct tests of what an actor counts of itself."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp

from jaxpp_async.actors.actor import numbers


class Store:
    size_bytes = 40

    def __len__(self) -> int:
        return 3


EQUIPMENT = SimpleNamespace(
    machine=SimpleNamespace(pool=SimpleNamespace(free_buffers=2, free_bytes=64)),
    executables=SimpleNamespace(compilations=5),
)
EXECUTOR = SimpleNamespace(table_bytes=100, pending_bytes=10)


def counted(executor=None) -> dict[str, int]:
    return numbers(EQUIPMENT, Store(), SimpleNamespace(size_bytes=7), executor, num_tasks=4)


def test_what_an_actor_holds_and_has_done_is_counted_by_name():
    found = counted(EXECUTOR)
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


def test_between_steps_the_table_is_empty():
    found = counted()
    assert (found["table_bytes"], found["pending_bytes"]) == (0, 0)


def test_arrays_that_live_are_counted_with_their_bytes():
    before = counted()
    kept = jnp.arange(1024, dtype=jnp.int32)
    after = counted()
    assert after["live_arrays"] - before["live_arrays"] == 1
    assert after["live_bytes"] - before["live_bytes"] == kept.nbytes
