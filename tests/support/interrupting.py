"""Cancels an operation at each of its awaits in turn: not after some time, so that what a failing point did,
it does again."""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any

WAYS = ("task", "timeout", "group", "twice")


@dataclass(frozen=True, slots=True)
class Point:
    """Where an operation is cancelled.

    Args:
        wait: at which of its waits, counted from 0.
        turns: how many turns of the event loop later: what it waits for may have come by then.
        way: one of `WAYS`: `"task"` (`task.cancel`), `"timeout"` (`asyncio.timeout`), `"group"` (a sibling in
            a task group fails), `"twice"` (cancelled again while it cleans up).
    """

    wait: int
    turns: int
    way: str

    def __str__(self) -> str:
        return f"cancelled by {self.way} at wait {self.wait}, {self.turns} turns later"


class _SiblingError(Exception):
    """What a task group's other task raises."""


async def interrupted(operation: Callable[[], Awaitable[Any]], point: Point) -> bool:
    """Run an operation, cancel it at `point`, and return whether it came to that wait."""
    wait = _Wait(point)
    task = asyncio.get_running_loop().create_task(_HOW[point.way](operation, wait), name=f"{operation}")
    await asyncio.wait([task])
    error = None if task.cancelled() else task.exception()
    if isinstance(error, BaseExceptionGroup):
        others = error.split(_SiblingError)[1]
        assert others is None, others
    elif error is not None and not isinstance(error, TimeoutError):
        raise error
    return wait.reached


async def points(
    operation: Callable[[], Awaitable[Any]], turns: tuple[int, ...] = (0, 1, 3)
) -> AsyncIterator[Point]:
    """Interrupts `operation` at each of its waits, and gives each point once it has been."""
    ways, wait, more = list(WAYS), 0, True
    while more:
        more = False
        for number, after in enumerate(turns):
            point = Point(wait, after, ways[(wait + number) % len(ways)])
            more |= await interrupted(operation, point)
            yield point
        wait += 1


class _Wait:
    """Calls `interrupt` at one wait of what it watches."""

    def __init__(self, point: Point):
        self._point, self._loop = point, asyncio.get_running_loop()
        self.interrupt: Callable[[], Any] = lambda: None
        self.reached = False

    @types.coroutine
    def watch(self, awaitable: Awaitable[Any]) -> Generator[Any, Any, Any]:
        waits, steps, error = 0, awaitable.__await__(), None
        while True:
            try:
                future = steps.send(None) if error is None else steps.throw(error)  # type: ignore[attr-defined]
            except StopIteration as end:
                return end.value
            if waits == self._point.wait:
                self.reached = True
                self._after(self._point.turns)
            waits, error = waits + 1, None
            try:
                yield future
            except BaseException as raised:
                error = raised

    def _after(self, turns: int) -> None:
        if turns:
            self._loop.call_soon(self._after, turns - 1)
        else:
            self.interrupt()


def _current() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def _task(operation: Callable[[], Awaitable[Any]], wait: _Wait) -> None:
    wait.interrupt = _current().cancel
    await wait.watch(operation())


async def _twice(operation: Callable[[], Awaitable[Any]], wait: _Wait) -> None:
    task, loop = _current(), asyncio.get_running_loop()

    def cancel() -> None:
        task.cancel()
        loop.call_soon(loop.call_soon, task.cancel)

    wait.interrupt = cancel
    await wait.watch(operation())


async def _timeout(operation: Callable[[], Awaitable[Any]], wait: _Wait) -> None:
    async with asyncio.timeout(None) as timeout:
        wait.interrupt = lambda: timeout.reschedule(0)
        await wait.watch(operation())
        wait.interrupt = lambda: None


async def _group(operation: Callable[[], Awaitable[Any]], wait: _Wait) -> None:
    failing = asyncio.get_running_loop().create_future()

    async def sibling() -> None:
        await failing

    async with asyncio.TaskGroup() as group:
        group.create_task(sibling(), name="sibling")
        wait.interrupt = lambda: failing.done() or failing.set_exception(_SiblingError())
        await wait.watch(operation())
        failing.done() or failing.set_result(None)


_HOW = {"task": _task, "timeout": _timeout, "group": _group, "twice": _twice}
