"""printing: calls a finished step's prints here. In: the step's hidden results. Out: what the user's host code does.

Steps print one after the other, in the order they started. Sends nothing to actors but the fetch of the values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from jaxpp_async.actors.crew.step_handle import StepHandle
from jaxpp_async.actors.owned_tasks import retrieve
from jaxpp_async.arrays import RemoteArray
from jaxpp_async.compiler import prints
from jaxpp_async.compiler.ir import Traced
from jaxpp_async.errors import JaxppAsyncError
from jaxpp_async.values import RemoteValues


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
        task.add_done_callback(retrieve)  # nobody is obliged to await a step; JAX has logged what a callback raised
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
        for each, operands in prints.calls(traced.prints, dict(zip(refs, values, strict=True))):
            each.call(operands)
