"""Bring the processes of one actor to the same task after an abort has stopped them in the middle of a step.

A task that several processes compute together waits in each process until all of them have begun it. A
process that is told to abort could therefore wait forever for another process that has stopped one task
earlier. So a process that has begun fewer tasks than the others runs the missing tasks on zeros, and ignores
the results.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from jaxpp_async.actors.execution_plan import Execute
from jaxpp_async.actors.jax_runtime import agree
from jaxpp_async.actors.loaded_program import LoadedProgram
from jaxpp_async.actors.setup import CountedStep, Job, JobThread
from jaxpp_async.actors.shards import join_shards
from jaxpp_async.errors import MeshError
from jaxpp_async.protocol.messages import Cluster

_LOG = logging.getLogger("jaxpp_async")

AGREE_S, END_S = 4.0, 4.0
"""The longest time in seconds that a process waits for the other processes of its actor to report how many
tasks they have begun, and the longest time that all of them may take to end these tasks. Tasks that usually
take longer continue after that, before the tasks of the next step, as in an actor of one process."""


class TaskCount:
    """A counter of the tasks that this process has begun.

    All processes of an actor begin the same tasks in the same order, so their counters tell which process is
    behind.
    """

    def __init__(self) -> None:
        self._lock, self._count, self._stopped = threading.Lock(), 0, False

    def begin(self, run: CountedStep) -> bool:
        """Count one more task, unless `stop` has been called. Any thread may call this method.

        Args:
            run: the step to which the task belongs; its own counter `begun` is increased too.

        Returns:
            Whether the task may begin.
        """
        with self._lock:
            if not self._stopped:
                self._count += 1
                run.begun += 1
            return not self._stopped

    def stop(self) -> int:
        """Allow no more tasks to begin, and return the number of tasks that have begun."""
        with self._lock:
            self._stopped = True
            return self._count

    def go_on(self, count: int) -> None:
        """Allow tasks to begin again after `stop`, and set the counter to `count`."""
        with self._lock:
            self._stopped, self._count = False, count


@dataclass(frozen=True, slots=True)
class DroppedStep:
    """A step that will not be finished because of an abort.

    Args:
        program: the program of the step.
        begun: the number of the step's tasks that have begun on this process.
    """

    program: LoadedProgram
    begun: int

    @property
    def tasks_left(self) -> list[Execute]:
        """The commands of the step's tasks that have not begun on this process, in order."""
        tasks = [command for command in self.program.plan.commands if isinstance(command, Execute)]
        return tasks[self.begun :]


async def catch_up(
    name: str,
    dropped: Sequence[DroppedStep],
    task_count: TaskCount,
    cluster: Cluster,
    compute: JobThread,
    workers: ThreadPoolExecutor,
) -> None:
    """Run the tasks that other processes of the actor have begun and this process has not, with zeros as
    arguments. Then wait until all tasks of this process have ended.

    The processes first exchange how many tasks each of them has begun.

    Args:
        name: the name of this exchange, the same in all processes and used once.
        dropped: the aborted steps, which were under way or in the queue, in order.
        task_count: the counter of begun tasks, which allows no tasks to begin until this function has
            succeeded.
        cluster: the processes of the actor.
        compute: the thread that runs the tasks.
        workers: threads for waiting for the other processes.

    Raises:
        MeshError: another process does not answer, or a task that the processes compute together does not
            end.
    """
    loop = asyncio.get_running_loop()
    begun = task_count.stop()
    most = await loop.run_in_executor(workers, agree, name, begun, cluster, AGREE_S)
    left = [(one.program, task) for one in dropped for task in one.tasks_left]
    if len(left) < most - begun:
        raise MeshError(
            f"another process of this actor is {most - begun} tasks ahead, this one knows of {len(left)}"
        )
    for program, task in left[: most - begun]:
        compute.submit(_dry_run(program, task))
    longest_s = max((one.program.longest_s for one in dropped), default=0.0)
    await _wait_idle(compute, (1 + most - begun) * longest_s)
    task_count.go_on(most)


async def _wait_idle(compute: JobThread, expected_s: float) -> None:
    """Wait until the compute thread has finished its jobs.

    If the jobs do not finish within `END_S` seconds, but were expected to take at least half of that time,
    this function returns without an error. The thread then finishes them before the next step's tasks.

    Args:
        compute: the thread.
        expected_s: how long the jobs are expected to take in seconds, from the times of earlier tasks; 0 if
            no task has ended yet.

    Raises:
        MeshError: the jobs do not finish within `END_S` seconds, and were expected to take less than half of
            that time.
    """
    idle = asyncio.get_running_loop().create_future()
    compute.submit(lambda: lambda: None if idle.done() else idle.set_result(None))
    try:
        async with asyncio.timeout(END_S):
            await idle
    except TimeoutError:
        if expected_s < END_S / 2:
            before = f"used to take {expected_s:.3g} s" if expected_s else "none has ended before"
            raise MeshError(
                "a task that this actor's processes compute together does not end: it was waited for for "
                f"{END_S:g} s, and {before}"
            ) from None
        _LOG.info("the next step waits for tasks of a dropped one, which used to take %.1f s", expected_s)


def _dry_run(program: LoadedProgram, task: Execute) -> Job:
    """Return a job for the compute thread that runs a task with zeros as arguments, because other processes
    of the actor have begun this task and cannot finish it alone."""

    def run() -> None:
        layouts = [program.layouts[key] for key in task.inputs]
        try:
            arrays = [
                join_shards([np.zeros(shard.part.shape, layout.dtype) for shard in layout.shards], layout)
                for layout in layouts
            ]
            program.tasks[task.instruction].run(arrays, checked=False)
        except Exception as error:
            # nothing uses the results, and the other processes fail if their tasks do not end
            _LOG.debug("a task run for the other processes failed: %r", error)

    return run
