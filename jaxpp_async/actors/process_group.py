"""catching_up: the processes of an actor, stopped in the middle of steps, end at the same task.

What they compute together waits in each process until all have come. So a process that was told to drop its work could
wait for ever for one that has dropped it a task earlier. Whoever has begun fewer tasks than the others therefore runs
those that it lacks, on zeros and for nothing. In: how many each has begun, and what was dropped. Nothing comes out.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from jaxpp_async.actors.execution_plan import Execute
from jaxpp_async.actors.jax_runtime import agree
from jaxpp_async.actors.loaded_program import LoadedProgram
from jaxpp_async.actors.setup import ComputeThread, CountedStep
from jaxpp_async.actors.shards import joined
from jaxpp_async.errors import MeshError
from jaxpp_async.protocol.messages import Cluster

_LOG = logging.getLogger("jaxpp_async")

AGREE_S, END_S = 4.0, 4.0
"""What the others may take to say how far they are, and all of them to end the tasks that they have begun: unless tasks
have been seen to take longer, which then go on in front of the next step's, as in an actor of one process."""


class TaskCount:
    """How many tasks a process has begun; the others of its actor begin the same ones in the same order."""

    def __init__(self) -> None:
        self._lock, self._count, self._stopped = threading.Lock(), 0, False

    def begin(self, run: CountedStep) -> bool:
        """Count one more, here and for the step that it is of, unless it was told to stop. Any thread."""
        with self._lock:
            if not self._stopped:
                self._count += 1
                run.begun += 1
            return not self._stopped

    def stop(self) -> int:
        """Let none begin from here on; how many have."""
        with self._lock:
            self._stopped = True
            return self._count

    def go_on(self, count: int) -> None:
        """Let them begin again, so many having been begun."""
        with self._lock:
            self._stopped, self._count = False, count


@dataclass(frozen=True, slots=True)
class DroppedStep:
    """A step that will not be finished, and how many of its tasks were begun."""

    program: LoadedProgram
    begun: int

    @property
    def left(self) -> list[Execute]:
        """The tasks that were not."""
        return [command for command in self.program.plan.commands if isinstance(command, Execute)][
            self.begun :
        ]


async def catch_up(
    name: str,
    dropped: Sequence[DroppedStep],
    tally: TaskCount,
    cluster: Cluster,
    compute: ComputeThread,
    workers: ThreadPoolExecutor,
) -> None:
    """Begin as many tasks as any process of the actor has, and wait until they have all ended.

    Args:
        name: of this occasion, the same for all processes.
        dropped: the steps that were under way or to come, in order.
        tally: stopped before.

    Raises:
        MeshError: another process does not answer, or what they compute together does not end though it used to.
    """
    loop = asyncio.get_running_loop()
    begun = tally.stop()
    most = await loop.run_in_executor(workers, agree, name, begun, cluster, AGREE_S)
    left = [(one.program, task) for one in dropped for task in one.left]
    if len(left) < most - begun:
        raise MeshError(
            f"another process of this actor is {most - begun} tasks ahead, this one knows of {len(left)}"
        )
    for program, task in left[: most - begun]:
        compute.submit(_dry_run(program, task))
    longest_s = max((one.program.longest_s for one in dropped), default=0.0)
    await _ended(compute, (1 + most - begun) * longest_s)
    tally.go_on(most)


async def _ended(compute: ComputeThread, expected_s: float) -> None:
    """Wait for what the compute thread has.

    Args:
        expected_s: how long that takes, by what such tasks took before; 0: none has ended yet.
    """
    idle = asyncio.get_running_loop().create_future()
    compute.submit(lambda: lambda: None if idle.done() else idle.set_result(None))
    try:
        async with asyncio.timeout(END_S):
            await idle
    except TimeoutError:
        if expected_s < END_S / 2:
            raise MeshError(
                "a task that this actor's processes compute together does not end: it was waited for for "
                f"{END_S:g} s, and {f'used to take {expected_s:.3g} s' if expected_s else 'none has ended before'}"
            ) from None
        _LOG.info("the next step waits for tasks of a dropped one, which used to take %.1f s", expected_s)


def _dry_run(program: LoadedProgram, task: Execute) -> Callable[[], Callable[[], None]]:
    def run() -> Callable[[], None]:
        layouts = [program.layouts[key] for key in task.inputs]
        try:
            arrays = [
                joined([np.zeros(s.shape, layout.dtype) for s in layout.shards], layout) for layout in layouts
            ]
            program.tasks[task.instruction].run(arrays, checked=False)
        except Exception as error:
            # nobody wants its results; whether the others go on shows in whether theirs end
            _LOG.debug("a task run for the other processes failed: %r", error)
        return _nothing

    return run


def _nothing() -> None:
    """Nobody waits for it."""
