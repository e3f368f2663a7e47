"""Run one step of a loaded program: carry out the executor's commands on the transport, the devices and the
store.

Everything runs on the event loop without blocking it, except that long tasks run on the compute thread. When
an operation completes, a callback reports this to the executor. The executor returns the next commands, and
these are carried out immediately. A step is one object; no instruction needs an asyncio task or a future.

`StepRun` is for devices that have computed the results when a call returns; for other devices see
`device_step_run`.
"""

from __future__ import annotations

import asyncio
import time
from array import array as packed
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import jax

from jaxpp_async.actors.array_store import StoredArray
from jaxpp_async.actors.execution_plan import (
    BindInput,
    BufferKey,
    Command,
    Drop,
    Execute,
    Finish,
    KeepOutput,
    PostRecv,
    StartSend,
)
from jaxpp_async.actors.executor import Executor
from jaxpp_async.actors.loaded_program import LoadedProgram
from jaxpp_async.actors.profiling import step_markers
from jaxpp_async.actors.receive_buffers import ReceiveBuffer
from jaxpp_async.actors.setup import StepResources
from jaxpp_async.actors.shards import Layout, duplicate, send_memories
from jaxpp_async.base.printable import ErrorInWords, in_words
from jaxpp_async.base.spinning import sleep_until
from jaxpp_async.errors import TransferError
from jaxpp_async.layout.array_parts import PieceTransfer
from jaxpp_async.markers import nonfinite
from jaxpp_async.protocol.messages import Step, StepStats
from jaxpp_async.transport.base import PROGRAM_CHANNEL, Memory, OnEnd, Transport, make_tag

MAX_PASS_S = 0.002
"""The longest time in seconds for which tasks run on the event loop one after the other before the loop does
its other work."""


@dataclass(frozen=True, slots=True)
class StepFailure:
    """The reason why a step ended early.

    Args:
        error: the error.
        instruction: the text of the instruction that failed or was under way.
    """

    error: ErrorInWords
    instruction: str | None


StepEnd: TypeAlias = Callable[["StepRun", StepFailure | None], None]


class StepRun:
    """One step under way, on devices that have computed the results of an executable when its call returns.

    Args:
        message: the controller's request.
        program: the program to run.
        resources: the transport, the devices and the thread that the step uses.
        bound: the array store's entry for each step argument that the program uses, by the argument's number.
        results: the array store's entry for each step result that the program makes, by the result's number.
        on_end: called once when the step has ended, with the failure or None.

    Attributes:
        ended: whether the step has finished or failed.
        begun: the number of tasks that have begun; counted only in an actor of several processes.
    """

    ended, begun = False, 0
    _carrying_out = _drains = False
    _transfers_done = 0
    _copying = 0  # step results that must be copies, and whose copies are not complete
    _on_thread = 0  # tasks given to the compute thread whose end it has not reported
    _started_s = _ended_s = _waited_s = _computed_s = 0.0
    _starved_since = 0.0  # 0: the step is not starved

    def __init__(
        self,
        message: Step,
        program: LoadedProgram,
        resources: StepResources,
        bound: Mapping[int, StoredArray],
        results: Mapping[int, StoredArray],
        on_end: StepEnd,
    ):
        self.message = message
        # Where actors share devices, a task may have to wait for its turn, and the event loop must not be
        # blocked. On devices that compute after a call has returned, no task is over when its call returns.
        self._markers = step_markers(message.step, program.plan.program.actor)
        # While a profile is recorded, all tasks run on the compute thread, inside the step's marker.
        runs_on_loop = (
            resources.device_lock is None and resources.device_work is None and self._markers is None
        )
        self._quick = program.quick if runs_on_loop else frozenset()
        self.executor = Executor(program.plan, alone=self._quick)
        self.program, self._resources, self._on_end = program, resources, on_end
        self._bound, self._results = bound, results
        self._arrays: list[jax.Array | None] = [None] * len(program.plan.avals)
        self._receiving: dict[BufferKey, ReceiveBuffer] = {}
        self._pieces_left: dict[int, int] = {}
        self._tag_base = make_tag(message.epoch, PROGRAM_CHANNEL, 0)
        self._todo: deque[Command] = deque()
        self._checked = nonfinite.forbids_nonfinite()
        self._stamps = packed("d", program.blank_stamps)

    @property
    def transfers(self) -> tuple[frozenset[int], int]:
        """The indices of the instructions whose transfers are under way, and the number of transfers that
        have completed."""
        return frozenset(self._pieces_left), self._transfers_done

    def stats(self, live_buffers: int) -> StepStats:
        """Return the statistics of a step that has finished: its times and its peak memory.

        Args:
            live_buffers: the number of arrays in the actor's store now.
        """
        return StepStats(
            self._computed_s,
            self._waited_s,
            self._ended_s - self._started_s,
            self.executor.peak_bytes,
            live_buffers,
            self._stamps.tobytes(),
        )

    def start(self) -> None:
        """Start the step: assign the available arguments to buffers, and carry out the first commands."""
        self._started_s = time.monotonic()
        if self._markers is not None:
            self._markers.begin(self._resources.compute.submit)
        self._carry_out(self.executor.start(self._bind_present()))

    def fail(self, error: BaseException, instruction: int | None = None) -> None:
        """End the step early with an error. Transfers under way keep using their memory until the transport
        has ended them.

        Args:
            error: the error.
            instruction: the index of the instruction that failed; None to report the instruction that is
                under way.
        """
        if self.ended:
            return
        text = self.executor.position() if instruction is None else self.program.plan.text(instruction)
        self.ended = True
        self._end_markers()
        self._resources.transport.hurry(False)
        words = in_words(error)
        for entry in self._results.values():
            entry.fail(words)
        self._on_end(self, StepFailure(words, text))

    def _end_markers(self) -> None:
        if self._markers is not None:
            self._markers.end(self._resources.compute.submit)

    # ------------------------------------------------------------ commands

    def _carry_out(self, commands: list[Command]) -> None:
        todo = self._todo
        todo.extend(commands)
        if self._carrying_out:
            return  # a command that completed immediately caused this call: the loop below continues
        self._carrying_out = True
        if self._starved_since and not self.executor.starved:
            self._waited_s += time.monotonic() - self._starved_since
            self._starved_since = 0.0
        yield_at_s = 0.0
        try:
            while todo and not self.ended:
                command = todo.popleft()
                try:
                    getattr(self, _CARRY_OUT[type(command)])(command)
                except Exception as error:
                    # every exception fails the step and never reaches the event loop
                    self.fail(error, getattr(command, "instruction", None))
                if todo and type(command) is Execute:
                    now = time.monotonic()
                    if not yield_at_s:
                        yield_at_s = now + MAX_PASS_S
                    elif now > yield_at_s:
                        asyncio.get_running_loop().call_soon(self._carry_out, [])
                        return
        finally:
            self._carrying_out = False
        if not self.ended:
            self._note_waiting()

    def _bind_present(self) -> list[BufferKey]:
        """Assign the step arguments that are available to their buffers, so that these arguments need no
        callbacks.

        Nearly always these are all arguments. An array that is bound to several arguments is left out where
        it is donated, since it must be copied first.

        Returns:
            The keys of the buffers of these arguments.
        """
        now = self._started_s
        present: list[BufferKey] = []
        twice = _shared_entries(self._bound) if self.program.donates else frozenset()
        for command in self.program.plan.binds:
            entry = self._bound[command.arg]
            array = entry.array
            if array is None or (command.donated and id(entry) in twice):
                continue
            self._arrays[command.buffer] = array
            present.append(command.buffer)
            self._stamps[2 * command.instruction] = self._stamps[2 * command.instruction + 1] = now
        if present:
            self._has_bound(present)
        return present

    def _await_argument(self, command: BindInput) -> None:
        self._stamps[2 * command.instruction] = time.monotonic()
        self._bound[command.arg].when_done(partial(self._bind, command))

    def _bind(self, command: BindInput, entry: StoredArray) -> None:
        if self.ended:
            return
        if entry.array is None:
            self.fail(entry.error or RuntimeError("array was never made"), command.instruction)
            return
        alone = not command.donated or id(entry) not in _shared_entries(self._bound)
        self._arrays[command.buffer] = entry.array if alone else duplicate(entry.array)
        self._has_bound((command.buffer,))
        self._stamps[2 * command.instruction + 1] = time.monotonic()
        self._carry_out(self.executor.arrived(command.buffer))

    def _has_bound(self, keys: Iterable[BufferKey]) -> None:
        """Note that the buffers with these keys are step arguments, which a device may still be computing.

        This does nothing for devices that have computed when a call returns; `DeviceStepRun` overrides it.
        """

    def _receive(self, command: PostRecv) -> None:
        instruction = command.instruction
        self._stamps[2 * instruction] = time.monotonic()
        buffer = self._receiving[command.buffer] = self.program.buffers[instruction].take()
        pieces, transfers = buffer.pieces, self.program.transfers[instruction]
        self._pieces_left[instruction] = len(transfers)
        done = partial(self._piece_received, command)
        relays = self.program.relays.get(instruction)
        if relays is not None:
            self._pieces_left[instruction] += sum(map(len, relays.values()))
            relay = TransferRelay(self._resources.transport, self._tag_base, lambda: self.ended, done)
            relay.receive(pieces, transfers, relays)
            return
        tag_base, post = self._tag_base, self._resources.transport.post_recv
        for part_index, peer, sequence in transfers:
            if post(pieces[part_index], peer, tag_base + sequence, done):
                done(None)

    def _piece_received(self, command: PostRecv, error: Exception | None) -> None:
        if self._piece_done(command, error):
            self._received(command, self._receiving[command.buffer])

    def _received(self, command: PostRecv, buffer: ReceiveBuffer) -> None:
        """Make the array of a receive available to the step, once all its data has arrived.

        Args:
            command: the command that posted the receive.
            buffer: the memory with the data.
        """
        key = command.buffer
        if command.private or buffer.array is None:
            try:
                self._arrays[key] = buffer.copied()
            except Exception as failure:  # no copy could be made, which fails the step
                self.fail(failure, command.instruction)
                return
            if command.private:
                self._receiving.pop(key).give_back()
        else:
            self._arrays[key] = buffer.array
        self._carry_out(self.executor.arrived(key))

    def _send(self, command: StartSend) -> None:
        instruction = command.instruction
        self._stamps[2 * instruction] = time.monotonic()
        array, layout = self._arrays[command.buffer], self.program.layouts[command.buffer]
        assert array is not None
        pieces = self._memories(command, array, layout)
        if pieces is None:
            return  # the command is carried out again when the array is available
        transfers = self.program.transfers[instruction]
        self._pieces_left[instruction] = len(transfers)
        done = partial(self._piece_sent, command)
        tag_base, post = self._tag_base, self._resources.transport.post_send
        for part_index, peer, sequence in transfers:
            if post(pieces[part_index], peer, tag_base + sequence, done):
                done(None)
        if not transfers:  # other processes of the actor own all parts of the array, and send them
            self._pieces_left[instruction] = 1
            done(None)

    def _memories(self, command: StartSend, array: jax.Array, layout: Layout) -> Sequence[Memory] | None:
        """Return the memory to send for an array.

        Returns:
            The memory of each distinct shard. None if the array is not computed yet; `_send` is then called
            again once it is.
        """
        return send_memories(array, layout)

    def _piece_sent(self, command: StartSend, error: Exception | None) -> None:
        if self._piece_done(command, error):
            self._carry_out(self.executor.sent(command.buffer))

    def _piece_done(self, command: PostRecv | StartSend, error: Exception | None) -> bool:
        """Count one message of a transfer as complete, and fail the step if there is an error.

        Args:
            command: the command that posted the transfer.
            error: the error of the message, or None.

        Returns:
            Whether all messages of the transfer are complete and the step goes on.
        """
        if self.ended:
            return False
        instruction = command.instruction
        if error is not None:
            self.fail(error, instruction)
            return False
        left = self._pieces_left[instruction] - 1
        if left:
            self._pieces_left[instruction] = left
            return False
        del self._pieces_left[instruction]
        self._transfers_done += 1
        self._stamps[2 * instruction + 1] = time.monotonic()
        return True

    def _drop(self, command: Drop) -> None:
        self._arrays[command.buffer] = None
        buffer = self._receiving.pop(command.buffer, None)
        if buffer is not None:
            buffer.give_back()

    def _keep(self, command: KeepOutput) -> None:
        array, entry = self._arrays[command.buffer], self._results.get(command.result)
        assert array is not None
        if entry is None:
            return
        if not command.copy:
            entry.resolve(array)
            return
        copy = duplicate(array)  # started now, since the next step may consume the array
        self._copying += 1
        self._resources.compute.submit(partial(self._wait_copied, copy, entry))

    def _wait_copied(self, copy: jax.Array, entry: StoredArray) -> Callable[[], None] | None:
        """Wait until the copy of a step result is complete; called on the compute thread, since a large copy
        takes long.

        Args:
            copy: the copy.
            entry: the store's entry for the step result. The entry gets the copy only after this wait, since
                nothing may read the copy earlier.

        Returns:
            The function to call on the event loop afterwards, which stores the copy, or fails the step after
            an error.
        """
        try:
            copy.block_until_ready()
        except Exception as error:  # this fails the step, like an error of a task
            return partial(self._copied, entry, error)
        return partial(self._copied, entry, copy)

    def _copied(self, entry: StoredArray, outcome: jax.Array | Exception) -> None:
        self._copying -= 1
        if isinstance(outcome, Exception):
            entry.fail(outcome)
            self.fail(outcome)
            return
        entry.resolve(outcome)
        if self.executor.finished and not self.ended:
            self._finish()

    def _finish(self, _: Finish | None = None) -> None:
        if self._copying:
            return  # the end of the last copy calls this method again
        self.ended = True
        self._end_markers()
        self._ended_s = time.monotonic()
        self._note(self.executor.at)
        self._resources.transport.hurry(False)
        self._arrays, self._receiving = [], {}
        self._on_end(self, None)

    # ------------------------------------------------------------ computing

    def _execute(self, command: Execute) -> None:
        """Carry out a `Run` instruction: run a quick task on the event loop's thread, and give any other task
        to the compute thread.

        Handing a quick task to another thread and back would take longer than the task.
        """
        if self._on_thread or command.instruction not in self._quick:
            self._on_thread += 1
            self._resources.transport.hurry(False)
            self._resources.compute.submit(partial(self._compute, command))
            return
        self._note(command.instruction, computing=True)
        start_s, end_s = self._call(command)
        self._carry_out(self._ran(command, start_s, end_s))

    def _compute(self, command: Execute) -> Callable[[], None] | None:
        """Call the executable of a `Run` instruction and wait for its results; called on the compute thread.

        If the mesh has a device model, also wait until the call has lasted as long as the model says, or
        until the step has ended.

        Returns:
            The function to call on the event loop afterwards, which continues the step, or fails it after an
            error. None if no executable was called, because the step has ended or must not begin more tasks.
        """
        if self.ended or not self._may_begin():
            return None
        self._note(command.instruction, computing=True)
        try:
            with self._resources.device_lock or nullcontext():
                start_s, end_s = self._call(command)
            if (modelled_s := self.program.modelled_s.get(command.instruction)) is not None:
                end_s = sleep_until(start_s + modelled_s, lambda: self.ended)
        except Exception as error:  # every error of an executable is reported, with its instruction
            return partial(self.fail, error, command.instruction)
        finally:
            if not self.ended:  # the next step may have begun already
                self._note(command.instruction)
        return partial(self._computed, command, start_s, end_s)

    def _may_begin(self) -> bool:
        may_begin = self._resources.may_begin
        return may_begin is None or may_begin(self)

    def _call(self, command: Execute) -> tuple[float, float]:
        """Call the executable of a `Run` instruction, and wait for its results.

        Returns:
            The times (`time.monotonic`) at which the call began and at which the results were computed.
        """
        start_s = time.monotonic()
        self._run(command, wait=True)
        return start_s, time.monotonic()

    def _run(self, command: Execute, *, wait: bool) -> Sequence[jax.Array]:
        """Call the executable of a `Run` instruction, store the results in their buffers, and return them.

        Args:
            command: the command of the `Run` instruction.
            wait: whether to return only when the results are computed.
        """
        task, arrays = self.program.tasks[command.instruction], self._arrays
        arguments = [arrays[key] for key in command.inputs]
        for position in command.donated:
            arrays[command.inputs[position]] = None
        with nullcontext() if self._markers is None else self._markers.task(task.label):
            outputs = task.run(arguments, checked=self._checked, wait=wait)
        for key, array in zip(command.outputs, outputs, strict=True):
            arrays[key] = array
        return outputs

    def _computed(self, command: Execute, start_s: float, end_s: float) -> None:
        self._on_thread -= 1
        if not self.ended:
            self._carry_out(self._ran(command, start_s, end_s))

    def _ran(self, command: Execute, start_s: float, end_s: float) -> list[Command]:
        instruction = command.instruction
        self._stamps[2 * instruction], self._stamps[2 * instruction + 1] = start_s, end_s
        self._computed_s += end_s - start_s
        self.program.record_time(instruction, end_s - start_s)
        return self.executor.ran(instruction)

    # ------------------------------------------------------------ waiting

    def _note(self, instruction: int, *, waiting: bool = False, computing: bool = False) -> None:
        self._resources.note_progress(
            self.message.step, self.message.program_id, instruction, waiting, computing
        )

    def _note_waiting(self) -> None:
        """If the step waits for other actors, record this in its progress, and tell the transport to poll for
        messages.

        This is called when no command is left to carry out.
        """
        executor = self.executor
        if executor.starved and not self._starved_since:
            self._starved_since = time.monotonic()
        elif not executor.draining or self._drains:
            return
        self._drains = executor.draining
        self._note(executor.at, waiting=True)
        self._resources.transport.hurry(True)


_CARRY_OUT: dict[type, str] = {
    Execute: "_execute",
    StartSend: "_send",
    PostRecv: "_receive",
    Drop: "_drop",
    BindInput: "_await_argument",
    KeepOutput: "_keep",
    Finish: "_finish",
}
"""The name of the method that carries out each type of command. A table of bound methods in each step would
be a reference cycle, which would keep the step's arrays until the garbage collector finds it."""


def _shared_entries(bound: Mapping[int, StoredArray]) -> frozenset[int]:
    """Return the `id()` of each array store entry that is bound to more than one step argument."""
    seen: set[int] = set()
    return frozenset(id(entry) for entry in bound.values() if id(entry) in seen or seen.add(id(entry)))


@dataclass(frozen=True, slots=True)
class TransferRelay:
    """A receive of data that other processes of the actor need as well. Each part (a distinct slice) of the
    array is forwarded to these processes once that part has been received.

    Args:
        transport: carries the parts.
        tag_base: the wire tag of sequence number 0 of the step; sequence numbers are added to it.
        is_over: returns whether the step has ended, so that nothing more needs to be forwarded.
        done: called when a receive or a send has ended, once for each. Until all of them have ended, the
            memory may be read, but must not be overwritten or returned to the pool.
    """

    transport: Transport
    tag_base: int
    is_over: Callable[[], bool]
    done: OnEnd

    def receive(
        self,
        pieces: Sequence[Memory],
        transfers: Sequence[PieceTransfer],
        relays: Mapping[int, Sequence[PieceTransfer]],
    ) -> None:
        """Post the receives of all parts; each part is forwarded once it has arrived.

        Args:
            pieces: the memory of each part.
            transfers: the message that this process receives for each part.
            relays: a dictionary. Its keys are the indices of the parts to forward; its values are the
                messages that forward the part.
        """
        for part_index, peer, sequence in transfers:
            onward = relays.get(part_index, ())
            on_end = partial(self._pass_on, pieces[part_index], onward) if onward else self.done
            if self.transport.post_recv(pieces[part_index], peer, self.tag_base + sequence, on_end):
                on_end(None)

    def _pass_on(self, memory: Memory, onward: Sequence[PieceTransfer], error: Exception | None) -> None:
        """Forward a received part of the array to other processes, and report to `done` that the receive has
        ended.

        Args:
            memory: the memory of the part.
            onward: the messages that forward the part.
            error: the error of the receive, or None. If there is one, nothing is forwarded.
        """
        if error is None and not self.is_over():
            for _, peer, sequence in onward:
                try:
                    if self.transport.post_send(memory, peer, self.tag_base + sequence, self.done):
                        self.done(None)
                except TransferError as failure:
                    self.done(failure)
                    return
        self.done(error)
