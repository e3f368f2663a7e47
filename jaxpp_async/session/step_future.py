"""step_future: a step that was sent in; what its caller may await and ask out. Sends nothing, and decides nothing.

printing: calls a finished step's prints here. In: the step's hidden results. Out: what the user's host code does.

Steps print one after the other, in the order they started. Sends nothing to actors but the fetch of the values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from jaxpp_async.compiler import debug_callbacks
from jaxpp_async.compiler.ir import Traced
from jaxpp_async.controller.requests import StepHandle
from jaxpp_async.errors import JaxppAsyncError, MeshError
from jaxpp_async.jax_bridge.tracebacks import HiddenFrames
from jaxpp_async.program.instructions import ActorId
from jaxpp_async.protocol.messages import StepStats
from jaxpp_async.protocol.task_group import retrieve
from jaxpp_async.session.array_moves import Moved
from jaxpp_async.session.host_transfers import RemoteValues
from jaxpp_async.session.remote_array import RemoteArray
from jaxpp_async.session.step_arrays import StepArrays
from jaxpp_async.session.step_recording import Recording, first_line
from jaxpp_async.timeline import Timeline


class StepFuture:
    """A step that has been admitted; from `mesh.submit`.

    Attributes:
        outputs: the step's result tree of `RemoteArray`s, valid at once: they may be passed to the next step.
        moves: arguments that lay elsewhere and were carried to where the step needs them.

    Awaiting it waits until every actor has finished the step, and raises its error.
    """

    def __init__(
        self,
        outputs: Any,
        recording: Recording,
        arrays: StepArrays,
        printing: asyncio.Task[None] | None = None,
        moved: tuple[Moved, ...] = (),
    ):
        self.outputs, self.moves, self._recording, self._printing = outputs, moved, recording, printing
        self._arrays, self._handle = arrays, recording.handle

    def __await__(self) -> Generator[Any, None, Any]:
        with HiddenFrames():
            yield from self._handle.__await__()
            if self._printing is not None:
                yield from asyncio.shield(self._printing).__await__()
        return self.outputs

    def __repr__(self) -> str:
        handle = self._handle
        if handle.error is not None:
            state = f"failed: {first_line(handle.error)}"
        elif handle.done:
            state = "finished" if self.done() else "finished, printing"
        else:
            state = "under way"
        return f"<StepFuture: {self._recording.what}, {state}>"

    def done(self) -> bool:
        """Whether the step has finished and printed what it prints, or failed."""
        return self._handle.done and (self._printing is None or self._printing.done())

    @property
    def stats(self) -> list[StepStats]:
        """Where each actor's time went in this step, and what its buffers held.

        Raises:
            MeshError: it has not finished, or it failed or was aborted.
        """
        handle = self._handle
        if not handle.done:
            raise MeshError("a step has stats once it has finished; await it first")
        if handle.error is not None:
            raise MeshError(f"{self._recording.what} failed, so it has no stats: {first_line(handle.error)}")
        return by_actor(handle.result())

    def timeline(self) -> Timeline:
        """What each actor did in this step, instruction by instruction. See docs/timeline.md.

        It stays what it was when the step ended, also after restarts and when the mesh is closed. A step that a restart
        ran again has the timeline of the run that counted, from when it was sent anew.

        Raises:
            MeshError: it has not finished, or it failed or was aborted.
        """
        return self._recording.timeline()

    async def wait_sent(self) -> None:
        """Wait until the step's host arguments have left: they may change again."""
        await self._handle.wait_sent()


def by_actor(stats: Mapping[ActorId, StepStats]) -> list[StepStats]:
    """In the order of the actors."""
    return [stats[a] for a in sorted(stats)]


# ---------------------------------------------------------------- printing


class Printer:
    """Makes the prints of one mesh's steps.

    Args:
        values: fetches what they show.
    """

    def __init__(self, values: RemoteValues):
        self._values = values
        self._last: asyncio.Task[None] | None = None

    def start(self, traced: Traced, shown: Sequence[RemoteArray], handle: StepHandle) -> asyncio.Task[None]:
        """Print once the step has finished, after the steps before it; nothing if it fails.

        Args:
            shown: the step's hidden results.

        Returns:
            The task. It raises what a user's callback raises, and the mesh's failure if the values are lost.
        """
        task = asyncio.get_running_loop().create_task(self._print(traced, list(shown), handle, self._last))
        # nobody is obliged to await a step; JAX has logged what a callback raised
        task.add_done_callback(retrieve)
        self._last = task
        return task

    async def _print(
        self, traced: Traced, shown: list[RemoteArray], handle: StepHandle, before: asyncio.Task[None] | None
    ) -> None:
        try:
            await handle
        except JaxppAsyncError:  # whoever awaits the step gets it
            return
        values = await self._values.fetch(shown)
        shown.clear()  # frees them on the actors
        if before is not None:
            await asyncio.wait([before])
            before = None
        refs = [r for r in traced.shown if isinstance(r, int)]
        for each, operands in debug_callbacks.print_calls(
            traced.prints, dict(zip(refs, values, strict=True))
        ):
            each.call(operands)
