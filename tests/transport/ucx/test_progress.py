"""Direct tests of a worker's progress on the event loop, with a worker that plays a script."""

from __future__ import annotations

import asyncio
import os

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
    """A worker's progress, and what it tells."""

    def __init__(self, worker: Worker, *, looks: bool = False):
        self.worker, self.told, self.broken = worker, 0, []
        self.completed: list[str] = []
        self.progress = Progress(
            worker,
            BrokenError,
            DisturbedError,
            self.completed,
            deliver=self.deliver,
            looks=lambda: looks,
            broken=self.broken.append,
        )

    def deliver(self) -> bool:
        had, self.told = bool(self.completed), self.told + len(self.completed)
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


async def test_a_worker_works_until_nothing_is_left_and_is_armed(drive):
    one = drive(Worker(work=10))
    one.completed.append("a")
    one.progress.run()
    assert (one.worker.work, one.told, one.worker.num_armed) == (0, 1, 1)


async def test_much_work_is_done_in_turns_with_the_loops_other_work(drive):
    one, turns = drive(Worker(work=5000)), []
    one.progress.run()
    asyncio.get_running_loop().call_soon(lambda: turns.append(one.worker.work))
    assert 0 < one.worker.work < 5000
    assert one.worker.num_armed == 0
    await one.worker.armed.wait()
    assert one.worker.work == 0
    assert turns[0] > 0


async def test_a_worker_that_has_more_to_do_by_the_time_it_is_armed_goes_on(drive):
    one = drive(Worker(arms=[False, DisturbedError("an empty datagram"), True]))
    one.progress.run()
    assert one.worker.num_armed == 3
    assert one.broken == []


async def test_a_broken_worker_is_told_once_with_its_cause(drive):
    one = drive(Worker(work=-1))
    one.progress.run()
    assert one.broken == ["UCX makes no progress any more: the device is gone"]


async def test_many_wishes_to_run_are_one_run(drive):
    one = drive(Worker())
    one.progress.kick()
    one.progress.kick()
    await asyncio.sleep(0)
    assert one.worker.num_armed == 1


async def test_a_worker_that_has_ended_is_never_touched_again(drive):
    one = drive(Worker(work=5))
    one.progress.kick()
    one.progress.end()
    await asyncio.sleep(0)
    assert (one.worker.work, one.worker.num_armed) == (5, 0)


async def test_who_is_in_a_hurry_looks_for_messages_before_it_sleeps(drive):
    one = drive(Worker(), looks=True)
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
