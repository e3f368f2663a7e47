"""What becomes of tasks that the processes of an actor have begun and that take their time."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpp_async.actors import catching_up
from jaxpp_async.actors.catching_up import Dropped, Tally, catch_up
from jaxpp_async.actors.compute import ComputeThread
from jaxpp_async.errors import MeshError


@pytest.mark.parametrize(
    ("longest_s", "said"), [(60.0, None), (0.001, "used to take 0.001 s"), (0.0, "none has ended")]
)
async def test_a_task_that_used_to_take_long_is_no_dead_one(monkeypatch, longest_s, said):
    monkeypatch.setattr(catching_up, "END_S", 0.02)
    monkeypatch.setattr(catching_up, "agree", lambda name, mine, *_: mine)
    program: Any = SimpleNamespace(longest_s=longest_s, plan=SimpleNamespace(commands=()))
    compute, over = ComputeThread("test-compute", asyncio.get_running_loop()), threading.Event()

    def task() -> Any:
        over.wait(30)
        return lambda: None

    compute.submit(task)
    tally, cluster = Tally(), Any
    with ThreadPoolExecutor(1) as workers:
        waiting = catch_up("now", [Dropped(program, 0)], tally, cluster, compute, workers)
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
