"""The progress of a UCX worker on the event loop (`ucx/progress.py`), with a worker that plays a script."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from jaxpp_async.transport.ucx.progress import Progress


class BrokenError(Exception):
    pass


class DisturbedError(BrokenError):
    pass


class Worker:
    """Has some steps of work to do, and can be armed when they are done.

    Args:
        work: how many steps there are. arms: what each call of `arm` gives, an error being raised; then True.
    """

    def __init__(self, work: int = 0, arms=()):
        self.work, self.arms, self.num_armed, self.armed = work, list(arms), 0, asyncio.Event()
        self.epoll_file_descriptor, self._other_end = os.pipe()

    def progress_once(self) -> bool:
        if self.work < 0:
            raise BrokenError("the device is gone")
        self.work -= self.work > 0
        return self.work > 0

    def arm(self) -> bool:
        self.num_armed += 1
        self.armed.set()
        found = self.arms.pop(0) if self.arms else True
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        os.close(self.epoll_file_descriptor)
        os.close(self._other_end)


class Driven:
    """A worker's progress, and what it has reported.

    Args:
        may_spin: what `Progress` is told about looking for messages.
    """

    def __init__(self, worker: Worker, *, may_spin: bool = False):
        self.worker, self.num_finished, self.broken = worker, 0, []
        self.completed: list[str] = []
        self.progress = Progress(
            worker,
            BrokenError,
            DisturbedError,
            self.completed,
            finish_ended=self.finish_ended,
            may_spin=lambda: may_spin,
            on_broken=self.broken.append,
        )

    def finish_ended(self) -> bool:
        had = bool(self.completed)
        self.num_finished += len(self.completed)
        self.completed.clear()
        return had


@pytest.fixture
async def drive():
    driven = []

    def make(worker: Worker, **options) -> Driven:
        driven.append(Driven(worker, **options))
        return driven[-1]

    yield make
    for one in driven:
        one.progress.end()
        one.worker.close()


async def test_a_worker_progresses_until_nothing_is_left_and_is_armed(drive):
    one = drive(Worker(work=10))
    one.completed.append("a")
    one.progress.run()
    assert (one.worker.work, one.num_finished, one.worker.num_armed) == (0, 1, 1)


async def test_a_flood_of_work_leaves_the_loops_other_work_its_turns(drive):
    one, turns = drive(Worker(work=5000)), []
    one.progress.run()
    asyncio.get_running_loop().call_soon(lambda: turns.append(one.worker.work))
    assert 0 < one.worker.work < 5000
    assert one.worker.num_armed == 0
    await one.worker.armed.wait()
    assert one.worker.work == 0
    assert turns[0] > 0


async def test_a_worker_that_cannot_be_armed_goes_on(drive):
    one = drive(Worker(arms=[False, DisturbedError("an empty datagram"), True]))
    one.progress.run()
    assert one.worker.num_armed == 3
    assert one.broken == []


async def test_a_broken_worker_is_reported_once_with_its_cause(drive):
    one = drive(Worker(work=-1))
    one.progress.run()
    assert one.broken == ["UCX makes no progress any more: the device is gone"]


async def test_runs_that_are_scheduled_in_one_pass_are_one_run(drive):
    one = drive(Worker())
    one.progress.schedule_run()
    one.progress.schedule_run()
    await asyncio.sleep(0)
    assert one.worker.num_armed == 1


async def test_a_worker_that_has_ended_is_never_touched_again(drive):
    one = drive(Worker(work=5))
    one.progress.schedule_run()
    one.progress.end()
    await asyncio.sleep(0)
    assert (one.worker.work, one.worker.num_armed) == (5, 0)


async def test_a_waiter_that_may_spin_looks_for_messages_before_it_sleeps(drive):
    one = drive(Worker(), may_spin=True)
    one.progress.run()
    assert one.worker.num_armed == 0  # the loop's other work has its turn first
    one.progress.adaptive_spin.limit_s = 0.0
    await asyncio.sleep(0)
    assert one.worker.num_armed == 1


async def test_the_worker_runs_when_its_descriptor_can_be_read(drive):
    one = drive(Worker(work=3))
    os.write(one.worker._other_end, b"x")
    await one.worker.armed.wait()
    assert one.worker.work == 0


async def test_a_process_that_waited_for_a_processor_does_not_take_its_worker_for_stalled(drive):
    one = drive(Worker(arms=[False] * 100_000))
    one.progress.run()
    time.sleep(0.3)  # noqa: ASYNC251 - as if others had the processors
    one.progress.run()
    assert one.progress.stalled_s == 0.0
    for _ in range(60):
        one.progress.run()
    assert one.progress.stalled_s >= 0.3
    one.worker.arms = []
    one.progress.run()
    assert one.progress.stalled_s == 0.0
