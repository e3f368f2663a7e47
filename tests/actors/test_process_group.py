"""What becomes of tasks that the processes of an actor have begun and that take their time."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpp_async.actors import process_group
from jaxpp_async.actors.process_group import DroppedStep, TaskCount, catch_up
from jaxpp_async.actors.setup import JobThread
from jaxpp_async.errors import MeshError
from jaxpp_async.protocol import messages as m
from tests.actors.test_actor import harness


@pytest.mark.parametrize(
    ("longest_s", "said"), [(60.0, None), (0.001, "used to take 0.001 s"), (0.0, "none has ended")]
)
async def test_a_task_that_used_to_take_long_is_no_dead_one(monkeypatch, longest_s, said):
    monkeypatch.setattr(process_group, "END_S", 0.02)
    monkeypatch.setattr(process_group, "agree", lambda name, mine, *_: mine)
    program: Any = SimpleNamespace(longest_s=longest_s, plan=SimpleNamespace(commands=()))
    compute, over = JobThread("test-compute", asyncio.get_running_loop()), threading.Event()

    def task() -> Any:
        over.wait(30)
        return lambda: None

    compute.submit(task)
    tally, cluster = TaskCount(), Any
    with ThreadPoolExecutor(1) as workers:
        waiting = catch_up("now", [DroppedStep(program, 0)], tally, cluster, compute, workers)
        try:
            if said is None:
                await waiting
                assert tally.begin(SimpleNamespace(begun=0))
            else:
                with pytest.raises(MeshError, match=said):
                    await waiting
        finally:
            over.set()
            await compute.aclose()


async def test_transfers_end_and_processes_catch_up_at_the_same_time(monkeypatch):
    """Ending a communicator may wait for all that its device does: here for a task that ends once another
    process has caught up. And who has caught up may wait for a transfer to end. Either one first would wait
    for ever."""
    abort_has_begun, caught_up = threading.Event(), threading.Event()

    def agree(name: str, mine: int, *_: Any) -> int:
        assert abort_has_begun.wait(10), "transfers go on while the processes catch up"
        caught_up.set()
        return mine

    def task() -> Any:
        caught_up.wait(60)
        return lambda: None

    monkeypatch.setattr(process_group, "agree", agree)
    async with harness() as h:
        compute = h.actors[0]._resources.step_resources.compute

        async def abort() -> None:
            abort_has_begun.set()
            idle = asyncio.get_running_loop().create_future()
            compute.submit(lambda: lambda: idle.set_result(None))
            await idle

        compute.submit(task)
        h.actors[0]._cluster = m.Cluster("", ("", ""), 0)
        try:
            with monkeypatch.context() as patched:
                patched.setattr(h.transports[0], "abort", abort)
                async with asyncio.timeout(10):
                    await h.ask(0, m.Abort, epoch=2, cause="actor 1 died")
        finally:
            caught_up.set()
