"""Run the steps that the controller requests of an actor one after the other, and answer each request once.

A step never arrives twice within an epoch (the epoch counts the mesh's aborts). The frames of a connection
are numbered, and the controller sends a step again only in a restart, which begins a new epoch. After a
failed step no other step runs until the controller has aborted the mesh and begun the next epoch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxpp_async.actors.loaded_program import LoadedProgram
from jaxpp_async.actors.process_group import DroppedStep
from jaxpp_async.actors.server import SendMessage, failed_reply
from jaxpp_async.actors.step_run import StepEnd, StepFailure, StepRun
from jaxpp_async.errors import ProtocolError, StepAbortedError
from jaxpp_async.program.instructions import ActorId
from jaxpp_async.protocol import messages as m


class StepQueue:
    """The steps that one actor is to run, in order. A `StepQueue` starts the steps one after the other and
    answers their requests.

    Args:
        actor_id: the id of the actor, for error messages.
        programs: the loaded programs, by id.
        prepare: creates the `StepRun` of a requested step, with the arrays that the request names as they are
            at that moment.
        on_turn: called before a step starts; an exception that it raises fails the step.
        complete: makes the reply to the request of a step that has finished.
        send: transmits a reply to the controller.

    Attributes:
        epoch: the epoch (the mesh's count of aborts) whose steps may run.
        current: the step under way, or None.
    """

    def __init__(
        self,
        actor_id: ActorId,
        programs: Mapping[int, LoadedProgram],
        *,
        prepare: Callable[[m.Step, StepEnd], StepRun],
        on_turn: Callable[[StepRun], None],
        complete: Callable[[StepRun], m.StepDone],
        send: SendMessage,
    ):
        self.actor_id, self._programs = actor_id, programs
        self._prepare, self._on_turn, self._complete, self._send = prepare, on_turn, complete, send
        self.epoch, self._last_step = 0, -1
        self.current: StepRun | None = None
        self._waiting: deque[StepRun] = deque()
        self._broken: str | None = None  # the reason why no step runs until the next epoch, if there is one
        self._failed: StepRun | None = None
        self._refused: list[LoadedProgram] = []  # the programs of steps refused since then

    def check_goes_on(self) -> None:
        """Check that no step has failed in this epoch. After a failed step, requests that take effect in
        order with steps and that a restart makes again wait for the restart, since the arrays that they name
        may never be made.

        Raises:
            StepAbortedError: a step has failed.
        """
        if self._broken is not None:
            raise StepAbortedError(f"not begun: {self._broken}", actor=self.actor_id)

    def request(self, message: m.Step, number: int) -> None:
        """Run a step after those that were requested before it.

        Args:
            message: the request.
            number: the number of the request, which goes with its reply.

        Raises:
            ProtocolError: the step belongs to another epoch, or does not come after the epoch's last step.
            StepAbortedError: an earlier step has failed.
        """
        if message.epoch != self.epoch or message.step <= self._last_step or self._broken is not None:
            self._refuse(message)
        self._last_step = message.step
        try:
            run = self._prepare(message, partial(self._on_end, number))
        except Exception as error:  # the step cannot start, which is reported as its failure
            self._send(failed_reply(error, step=message.step), number)
            return
        self._waiting.append(run)
        self._start_next()

    def _refuse(self, message: m.Step) -> None:
        where: dict[str, Any] = {"actor": self.actor_id, "step": m.step_number(message.step)}
        what = m.step_text(message.step)
        if message.epoch != self.epoch:
            raise ProtocolError(f"{what} is of epoch {message.epoch}, the actor is in {self.epoch}", **where)
        if message.step <= self._last_step:
            last = m.step_text(self._last_step)
            raise ProtocolError(f"{what} was requested after {last} in the same epoch", **where)
        if message.program_id in self._programs:
            self._refused.append(self._programs[message.program_id])
        raise StepAbortedError(f"not started: {self._broken}", **where)

    def _start_next(self) -> None:
        while self.current is None and self._waiting and self._broken is None:
            self.current = run = self._waiting.popleft()
            try:
                self._on_turn(run)
            except Exception as error:  # the step cannot transfer, which fails it
                run.fail(error)
                continue
            run.start()

    def _on_end(self, number: int, run: StepRun, failure: StepFailure | None) -> None:
        message = run.message
        if failure is None:
            reply = self._complete(run)
        else:
            # Transfers stay open until the controller's Abort: ending them here would fail the peers' steps
            # with transfer errors that could reach the controller before their cause.
            if self._broken is None:
                self._broken = f"{m.step_text(message.step)} failed on actor {self.actor_id}"
                self._failed = run
            reply = failed_reply(failure.error, step=message.step, instruction=failure.instruction)
        if run is self.current:
            self.current = None
        if self._waiting:
            # The next step starts later, from the event loop: a step with local instructions only can end
            # inside `start`, and the loop of `_start_next` then continues with the next step. The call is
            # scheduled before the reply is sent, because after the reply an actor without a step makes its
            # event loop look for messages.
            asyncio.get_running_loop().call_soon(self._start_next)
        self._send(reply, number)

    def arrays_to_free(self) -> set[m.ArrayId]:
        """Return the ids of the arrays that will be freed when the steps under way and in the queue end."""
        runs = [*self._waiting, *([self.current] if self.current is not None else [])]
        return {array_id for run in runs for array_id in run.message.frees_after}

    def abort(self, cause: StepAbortedError, epoch: int) -> list[DroppedStep]:
        """Fail every step that is under way or in the queue, and run no more steps until `resume`.

        Args:
            cause: the error with which the steps fail.
            epoch: the next epoch, whose steps may run after `resume`.

        Returns:
            The steps that will not be finished, in order. If a step had failed before, that step comes first,
            and the steps that were refused since then come last.
        """
        self._broken = str(cause)
        dropped = [self.current] if self.current is not None else []
        dropped += self._waiting
        self._waiting.clear()
        begun = [self._failed, *dropped] if self._failed is not None else dropped
        steps = [DroppedStep(run.program, run.begun) for run in begun]
        steps += [DroppedStep(program, 0) for program in self._refused]
        for run in dropped:
            run.fail(cause)
        self.epoch, self._last_step = epoch, -1
        return steps

    def resume(self) -> None:
        """Let steps run again. Call this when the transfers of the aborted steps have ended."""
        self._failed, self._refused, self._broken = None, [], None

    def close(self) -> None:
        """Drop every step that is under way or in the queue, without sending replies."""
        self._waiting.clear()
        if self.current is not None:
            self.current.ended = True
