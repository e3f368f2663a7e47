"""Give the user the future of a step that has been sent, and do what the step's arrays and prints need.

`StepFuture` is the future that the user gets, and shows a `SubmittedStep` of the controller. `StepArrays`
updates the handles of the arrays that the step consumes and makes: when the step is sent, when the step
fails, and when the step's caller is cancelled. `Printer` calls the host code of `jax.debug.print` and
`jax.debug.callback`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Generator, Iterable, Sequence
from typing import Any

from jaxpp_async.base.printable import first_line, listed
from jaxpp_async.compiler import debug_callbacks
from jaxpp_async.compiler.ir import Traced
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.errors import JaxppAsyncError
from jaxpp_async.jax_bridge.tracebacks import HiddenFrames
from jaxpp_async.protocol.messages import StepStats
from jaxpp_async.protocol.task_group import retrieve
from jaxpp_async.session.host_transfers import RemoteValues
from jaxpp_async.session.move_programs import Moved
from jaxpp_async.session.remote_array import DONATED, FAILED, RemoteArray, is_remote
from jaxpp_async.session.step import CompiledStep
from jaxpp_async.timeline import Timeline


class StepFuture:
    """A future of a step that has been started, as `mesh.submit` returns it.

    Await this object to wait until every actor has finished the step; if the step fails, the await raises its
    error.

    Attributes:
        outputs: the step's result tree of `RemoteArray`s, which may be passed to the next step immediately.
        moves: the arguments that were moved to other actors or resharded before the step.
    """

    def __init__(
        self,
        outputs: Any,
        step: SubmittedStep,
        arrays: StepArrays,
        printing: asyncio.Task[None] | None = None,
        moved: tuple[Moved, ...] = (),
    ):
        self.outputs, self.moves, self._printing = outputs, moved, printing
        self._step, self._arrays = step, arrays

    def __await__(self) -> Generator[Any, None, Any]:
        with HiddenFrames():
            yield from self._step.__await__()
            if self._printing is not None:
                yield from asyncio.shield(self._printing).__await__()
        return self.outputs

    def __repr__(self) -> str:
        step = self._step
        if step.error is not None:
            state = f"failed: {first_line(step.error)}"
        elif step.done:
            state = "finished" if self.done() else "finished, printing"
        else:
            state = "under way"
        return f"<StepFuture: {step.title}, {state}>"

    def done(self) -> bool:
        """Return whether the step has failed, or has finished and called the host code of its prints."""
        return self._step.done and (self._printing is None or self._printing.done())

    @property
    def stats(self) -> list[StepStats]:
        """The statistics of each actor for this step (times and bytes of buffers), in order of the actors.

        Raises:
            MeshError: the step has not finished, or failed or was aborted.
        """
        return self._step.stats()

    def timeline(self) -> Timeline:
        """Return what each actor did in this step and when, instruction by instruction; see docs/timeline.md.

        The timeline remains available after restarts and after the mesh is closed. If the step was run again
        after a restart of actors, the timeline shows only the last execution, and begins when the step was
        sent again.

        Raises:
            MeshError: the step has not finished, or failed or was aborted.
        """
        return self._step.timeline()

    async def wait_sent(self) -> None:
        """Wait until the step's host arguments have left this process, so that they may be changed again."""
        await self._step.wait_sent()


class StepArrays:
    """An object that updates the handles of a step's donated arguments and results after the step is sent.

    Donated arguments become unusable when the step is sent. If the step fails, the results become unusable
    too. If the step's caller is cancelled, the handle of each donated argument refers to the argument's new
    value, which is one of the results.

    Args:
        name: the step function's name.
        compiled: the compiled step, which says which result is the new value of each donated argument.
        leaves: the argument leaves of the call.
        results: the handles of the step's results.

    Attributes:
        donated: the donated arrays, by the position of their leaf.
    """

    __slots__ = ("_compiled", "_name", "_results", "donated")

    def __init__(self, name: str, compiled: CompiledStep, leaves: Sequence[Any], results: list[RemoteArray]):
        self._name, self._compiled, self._results = name, compiled, results
        self.donated = {k: leaves[k] for k in compiled.donated if is_remote(leaves[k])}
        for array in self.donated.values():
            array.retire(DONATED, f"it was donated to step {name!r}; use the step's result instead")

    def fail(self, why: str) -> None:
        """Mark the donated arguments and the results unusable, because the step has failed.

        Args:
            why: the first line of the step's error, for later errors about these arrays.
        """
        for k, array in enumerate(self._results):
            # No program touches an argument that is handed back, so it outlives the failure.
            if not array.is_deleted() and k not in self._compiled.handed_back:
                array.retire(FAILED, f"its step failed: {why}")
        for array in self.donated.values():
            array.retire(DONATED, f"it was donated to step {self._name!r}, which failed: {why}")

    def abandon(self) -> str | None:
        """Make each donated array refer to the result that is its new value, after the caller was cancelled.

        A donated array that has no new value stays unusable. The caller never gets the results themselves.

        Returns:
            Text for the log that says what became of the donated arguments; None if no argument was donated.
        """
        lost: dict[int, RemoteArray] = {}
        continued: dict[str, str] = {}
        for k, array in self.donated.items():
            result = self._compiled.donated[k]
            if result is None:
                lost[k] = array
                why = (
                    f"it was donated to step {self._name!r}, whose caller was cancelled, and no result "
                    "continues it"
                )
                array.retire(
                    DONATED, f"{why}: none has its place in the tree, its shape and its dtype; make it anew"
                )
            else:
                array.take_over(self._results[result])
                self._results[result] = array  # should the step fail, `fail` marks this one
                continued.update([self._argument_and_result(k, result)])
        here = [k for k in self._compiled.donated if k not in self.donated]
        self.donated = lost
        said = [f"{argument} stands for {result}" for argument, result in continued.items()]
        if lost:
            said.append(f"no result continues {self._names(lost)}, which cannot be used any more")
        if here:
            said.append(f"host values are what they were: {self._names(here)}")
        if continued:
            said.append("to give it the same batch again trains on it twice")
        return "; ".join(said) or None

    def _argument_and_result(self, arg: int, result: int) -> tuple[str, str]:
        """Return the names of an argument and a result that contain two given leaves.

        The result leaf is the new value of the argument leaf, so both leaves have the same path in their
        trees. The names are, for example, `("state", "result[0]")`.

        Args:
            arg: position of the argument leaf.
            result: position of the result leaf.
        """
        name, traced = self._compiled.inputs[arg].name, self._compiled.compiled.traced
        argument = re.split(r"[\[.]", name, maxsplit=1)[0]
        return argument, traced.out_names[result].removesuffix(name[len(argument) :])

    def _names(self, leaves: Iterable[int]) -> str:
        of_inputs = [slot.name for slot in self._compiled.arguments for _ in slot.pieces]
        return listed(list(dict.fromkeys(of_inputs[k] for k in leaves)), 3)


class Printer:
    """An object that runs the host code of `jax.debug.print` and `jax.debug.callback`.

    One `Printer` serves all steps of a mesh, and runs their host code in the order of the steps.

    Args:
        values: the part of the mesh that fetches the values to print.
    """

    def __init__(self, values: RemoteValues):
        self._values = values
        self._last: asyncio.Task[None] | None = None

    def start(self, traced: Traced, shown: Sequence[RemoteArray], step: SubmittedStep) -> asyncio.Task[None]:
        """Start a task that calls the host code of a step's prints and callbacks once the step has finished.

        The task first waits until the host code of earlier steps has run. If the step fails, the task calls
        nothing.

        Args:
            traced: the traced step, which has the host code to call.
            shown: the step's hidden results, which are the operands of the host code.
            step: the step.

        Returns:
            The task. The task fails with the exception of a user's callback, or with the mesh's error if the
            values are lost.
        """
        task = asyncio.get_running_loop().create_task(self._print(traced, list(shown), step, self._last))
        # nobody is obliged to await a step; JAX has logged what a callback raised
        task.add_done_callback(retrieve)
        self._last = task
        return task

    async def _print(
        self, traced: Traced, shown: list[RemoteArray], step: SubmittedStep, before: asyncio.Task[None] | None
    ) -> None:
        try:
            await step
        except JaxppAsyncError:  # whoever awaits the step gets the error
            return
        values = await self._values.fetch(shown)
        shown.clear()  # frees them on the actors
        if before is not None:
            await asyncio.wait([before])
            before = None
        refs = [r for r in traced.hidden_results if isinstance(r, int)]
        for each, operands in debug_callbacks.print_calls(
            traced.prints, dict(zip(refs, values, strict=True))
        ):
            each.call(operands)
