"""Hold a step that has been sent: its future, its arrays, the recording for its timeline, and its prints.

`StepFuture` is for the user. `StepArrays` marks the arrays that the step uses up and makes, when it is sent,
fails or loses its caller. `Recording` makes the timeline, also after the future is gone. `Printer` calls the
host code of `jax.debug.print` and `jax.debug.callback`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Generator, Iterable, Sequence
from typing import Any

from jaxpp_async.base.printable import first_line, listed
from jaxpp_async.compiler import debug_callbacks
from jaxpp_async.compiler.ir import Traced
from jaxpp_async.controller.controller import Controller
from jaxpp_async.controller.requests import StepHandle
from jaxpp_async.errors import JaxppAsyncError, MeshError
from jaxpp_async.jax_bridge.tracebacks import HiddenFrames
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import ActorId
from jaxpp_async.protocol.actor_info import ActorInfo
from jaxpp_async.protocol.clocks import Clock, Readings
from jaxpp_async.protocol.messages import StepStats, step_number, step_text
from jaxpp_async.protocol.task_group import retrieve
from jaxpp_async.session.array_moves import Moved
from jaxpp_async.session.host_transfers import RemoteValues
from jaxpp_async.session.remote_array import DONATED, FAILED, RemoteArray, is_remote
from jaxpp_async.session.step import CompiledStep
from jaxpp_async.timeline import Recorded, Timeline, make_timeline


class StepFuture:
    """A step that has been started; `mesh.submit` returns one.

    Awaiting it waits until every actor has finished the step, and raises the step's error.

    Attributes:
        outputs: the step's result tree of `RemoteArray`s, valid at once: they may be passed to the next step.
        moves: the arguments that lay on other actors and were carried to where the step needs them.
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
        return f"<StepFuture: {self._recording.title}, {state}>"

    def done(self) -> bool:
        """Whether the step has finished and printed what it prints, or failed."""
        return self._handle.done and (self._printing is None or self._printing.done())

    @property
    def stats(self) -> list[StepStats]:
        """Where the time of each actor went in this step and what its buffers held, in actor order.

        Raises:
            MeshError: the step has not finished, or failed or was aborted.
        """
        return self._recording.stats()

    def timeline(self) -> Timeline:
        """Return what each actor did in this step, instruction by instruction. See docs/timeline.md.

        The timeline stays as it was when the step ended, also after restarts and when the mesh is closed. A
        step that a restart ran again has the timeline of the run that counted, from when it was sent again.

        Raises:
            MeshError: the step has not finished, or failed or was aborted.
        """
        return self._recording.timeline()

    async def wait_sent(self) -> None:
        """Wait until the step's host arguments have left this process: you may change them again then."""
        await self._handle.wait_sent()


class Recording:
    """The record from which the timeline and the statistics of one step are made once somebody asks for them.

    A step that nobody asks about costs a few references here.

    Args:
        name: the step function's name.
        handle: knows what the actors answered, and when.
        programs: the programs that the actors ran.
        controller: knows which processes the actors are, and their clocks.
    """

    __slots__ = ("_controller", "_processes", "handle", "name", "programs")

    def __init__(
        self, name: str, handle: StepHandle, programs: Sequence[ActorProgram], controller: Controller
    ):
        self.name, self.handle, self.programs = name, handle, programs
        self._controller: Controller | None = controller
        self._processes: dict[ActorId, tuple[ActorInfo, Clock, Readings]] = {}
        handle.when_done(self._keep_processes)

    @property
    def title(self) -> str:
        """The step's number and name, such as `"step 7 ('train_step')"`."""
        return f"{step_text(self.handle.step)} ({self.name!r})"

    def stats(self) -> list[StepStats]:
        """Return the statistics of each actor, in the order of the actors.

        Raises:
            MeshError: the step has not finished, or failed.
        """
        stats = self._result("stats")
        return [stats[actor] for actor in sorted(stats)]

    def timeline(self) -> Timeline:
        """Return what each actor did, and when.

        Raises:
            MeshError: the step has not finished, or failed.
        """
        result = self._result("a timeline")
        by_actor = {p.actor: p for p in self.programs}
        recorded = {a: self._recorded(by_actor[a], stats.stamps) for a, stats in result.items()}
        return make_timeline(step_number(self.handle.step), self.name, self.handle.sent_s, recorded)

    def _result(self, wanted: str) -> dict[ActorId, StepStats]:
        if not self.handle.done:
            raise MeshError(f"a step has {wanted} once it has finished; await it first")
        if (error := self.handle.error) is not None:
            wanted = wanted.removeprefix("a ")
            raise MeshError(f"{self.title} failed, so it has no {wanted}: {first_line(error)}")
        return self.handle.result()

    def _keep_processes(self) -> None:
        """Note who ran the step, now that it has ended.

        After a restart its actors may be other processes, with other clocks.
        """
        controller, self._controller = self._controller, None
        if controller is None or self.handle.error is not None:
            return
        for actor in self.handle.heard_s:
            clock = controller.clock(actor)
            first = controller.processes.process(actor, 0)
            self._processes[actor] = controller.request_log.info(first), clock, clock.readings

    def _recorded(self, program: ActorProgram, stamps: bytes) -> Recorded:
        info, clock, readings = self._processes[program.actor]
        heard_s = self.handle.heard_s[program.actor]
        offset = clock.offset(heard_s, readings)
        return Recorded(
            program=program,
            stamps=stamps,
            heard_s=heard_s,
            offset_s=offset.offset_s if offset is not None else 0.0,
            error_s=offset.error_s if offset is not None else None,
            host=info.host,
            pid=info.pid,
        )


class StepArrays:
    """The donated arguments and the results of one step that has been sent.

    From when the step is sent until it has ended, this object decides what each of these handles stands for:
    while the caller waits, after the caller has gone, and when the step fails.

    Args:
        name: the step function's name.
        compiled: knows which result continues which argument.
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
        """Mark the donated arguments and the results unusable, because the step has failed."""
        for k, array in enumerate(self._results):
            # No program touches an argument that is handed back, so it outlives the failure.
            if not array.is_deleted() and k not in self._compiled.handed_back:
                array.retire(FAILED, f"its step failed: {why}")
        for array in self.donated.values():
            array.retire(DONATED, f"it was donated to step {self._name!r}, which failed: {why}")

    def abandon(self) -> str | None:
        """Let each donated array stand for the result that continues it, since nobody has the results.

        Returns:
            What became of the donated arguments, for the log; None if there are none.
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
        """Name the trees in which the two leaves are the same part, such as `("state", "result[0]")`."""
        name, traced = self._compiled.inputs[arg].name, self._compiled.compiled.traced
        argument = re.split(r"[\[.]", name, maxsplit=1)[0]
        return argument, traced.out_names[result].removesuffix(name[len(argument) :])

    def _names(self, leaves: Iterable[int]) -> str:
        return listed([self._compiled.inputs[k].name for k in leaves], 3)


class Printer:
    """The printer of one mesh's steps, which calls their host code in the order in which the steps started.

    Args:
        values: fetches the arrays that the prints show.
    """

    def __init__(self, values: RemoteValues):
        self._values = values
        self._last: asyncio.Task[None] | None = None

    def start(self, traced: Traced, shown: Sequence[RemoteArray], handle: StepHandle) -> asyncio.Task[None]:
        """Print once the step has finished, after the steps before it; a step that fails prints nothing.

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
        except JaxppAsyncError:  # whoever awaits the step gets the error
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
