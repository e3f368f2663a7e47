"""step_run: one step of a loaded program, from the executor's commands to transport, compute thread and store.

Everything but `_compute` runs on the event loop and never waits: completions call back, the executor answers with
commands, and these are carried out at once. One object a step, no asyncio task an instruction.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax

from jaxpp_async.actors import special_values
from jaxpp_async.actors.compute import ComputeThread
from jaxpp_async.actors.executor import Executor
from jaxpp_async.actors.messages import Step, StepStats
from jaxpp_async.actors.plan import (
    BindInput,
    BufferKey,
    Command,
    Drop,
    Execute,
    ExecutionPlan,
    Finish,
    KeepOutput,
    PostRecv,
    StartSend,
)
from jaxpp_async.actors.progress import NoteProgress, no_progress
from jaxpp_async.actors.receive_pool import ReceiveBuffer, ReceivePool
from jaxpp_async.actors.shards import Layouts, duplicate, send_views, transfer_sequence
from jaxpp_async.actors.store import Entry
from jaxpp_async.transport.base import PROGRAM_CHANNEL, Transport, make_tag


@dataclass(frozen=True, slots=True)
class LoadedProgram:
    """A plan with its compiled executables.

    Args:
        calls: the callable of each `Run`, by instruction.
    """

    plan: ExecutionPlan
    calls: Mapping[int, Callable[..., Sequence[jax.Array]]]


@dataclass(frozen=True, slots=True)
class Machine:
    """What steps run on.

    Args:
        device_lock: held while executing, where several actors share the devices.
        note_progress: told of every instruction that is taken up or waited at.
    """

    transport: Transport
    compute: ComputeThread
    pool: ReceivePool
    layouts: Layouts
    device_lock: threading.Lock | None = None
    note_progress: NoteProgress = no_progress


@dataclass(frozen=True, slots=True)
class StepFailure:
    """Why a step ended early, and the text of the instruction that failed or was under way."""

    error: BaseException
    instruction: str | None


StepEnd: TypeAlias = Callable[["StepRun", StepStats | StepFailure], None]


class StepRun:
    """One step under way.

    Args:
        message: the request.
        program: what to run.
        machine: where.
        bound: the store's entry for each step argument that the program binds.
        results: the store's entry for each result that the program makes.
        on_end: called once, with statistics (`live_buffers` 0) or the failure.
    """

    def __init__(
        self,
        message: Step,
        program: LoadedProgram,
        machine: Machine,
        bound: Mapping[int, Entry],
        results: Mapping[int, Entry],
        on_end: StepEnd,
    ):
        self.message = message
        self.executor = Executor(program.plan)
        self.ended = False
        self._program, self._machine, self._on_end = program, machine, on_end
        self._bound, self._results = bound, results
        self._entries_twice = _shared_entries(bound)
        self._num_devices = len(machine.layouts.devices.devices)
        self._arrays: list[jax.Array | None] = [None] * len(program.plan.avals)
        self._receiving: dict[BufferKey, ReceiveBuffer] = {}
        self._pieces_left: dict[int, int] = {}
        self._todo: deque[Command] = deque()
        self._carrying_out = False
        self._runs: list[tuple[str, float, float]] = []
        self._started_s = self._waited_s = self._computed_s = 0.0
        self._starved_since: float | None = None
        self._drains = False

    @property
    def plan(self) -> ExecutionPlan:
        """What it executes."""
        return self._program.plan

    @property
    def transfers(self) -> tuple[frozenset[int], int]:
        """The instructions whose transfers are under way, and how many transfers have ended."""
        open_ones = frozenset(instruction for instruction, left in self._pieces_left.items() if left)
        return open_ones, len(self._pieces_left) - len(open_ones)

    def start(self) -> None:
        """Take the step up."""
        self._started_s = time.monotonic()
        self._obey(self.executor.start())

    def fail(self, error: BaseException, instruction: int | None = None) -> None:
        """End the step early. Transfers under way keep their memory until the transport has ended them."""
        if self.ended:
            return
        text = self.executor.position() if instruction is None else self._program.plan.text(instruction)
        self.ended = True
        for entry in self._results.values():
            entry.fail(error)
        self._on_end(self, StepFailure(error, text))

    # ------------------------------------------------------------ commands

    def _obey(self, commands: list[Command]) -> None:
        self._todo.extend(commands)
        if self._carrying_out:
            return  # a command that is done at once brought more: the loop below takes them in order
        self._carrying_out = True
        try:
            while self._todo and not self.ended:
                command = self._todo.popleft()
                try:
                    self._carry_out(command)
                except Exception as error:  # whatever fails here is the step's failure, never the event loop's
                    self.fail(error, getattr(command, "instruction", None))
        finally:
            self._carrying_out = False
        self._watch_starvation()

    def _carry_out(self, command: Command) -> None:
        match command:
            case Execute():
                self._machine.compute.submit(partial(self._compute, command))
            case StartSend():
                self._send(command)
            case PostRecv():
                self._receive(command)
            case Drop(buffer=key):
                self._drop(key)
            case BindInput():
                self._bound[command.arg].when_done(partial(self._bind, command))
            case KeepOutput():
                self._keep(command)
            case Finish():
                self._finish()

    def _bind(self, command: BindInput, entry: Entry) -> None:
        if self.ended:
            return
        if entry.array is None:
            self.fail(entry.error or RuntimeError("array was never made"), command.instruction)
            return
        alone = not command.donated or id(entry) not in self._entries_twice
        array = entry.array if alone else duplicate(entry.array)
        self._arrays[command.buffer] = array
        self._obey(self.executor.arrived(command.buffer, array.nbytes))

    def _receive(self, command: PostRecv) -> None:
        buffer = self._machine.pool.take(command.aval)
        self._receiving[command.buffer] = buffer
        done = partial(self._piece_received, command)
        self._pieces_left[command.instruction] = len(buffer.memory)
        for k, memory in enumerate(buffer.memory):
            self._machine.transport.recv(memory, command.from_actor, self._tag(command.tag, k)).add_done_callback(done)

    def _piece_received(self, command: PostRecv, future: Any) -> None:
        if not self._piece_done(command, future):
            return
        buffer = self._receiving[command.buffer]
        try:
            array = self._arrays[command.buffer] = buffer.received(private_copy=command.private)
        except Exception as error:  # making the copy failed: the step's failure, like a failed transfer
            self.fail(error, command.instruction)
            return
        if command.private:
            self._machine.pool.give(self._receiving.pop(command.buffer))
        self._obey(self.executor.arrived(command.buffer, array.nbytes))

    def _send(self, command: StartSend) -> None:
        array = self._arrays[command.buffer]
        assert array is not None
        views = send_views(array, self._machine.layouts.of(self._program.plan.avals[command.buffer]))
        done = partial(self._piece_sent, command)
        self._pieces_left[command.instruction] = len(views)
        for k, view in enumerate(views):
            self._machine.transport.send(view, command.to_actor, self._tag(command.tag, k)).add_done_callback(done)

    def _piece_sent(self, command: StartSend, future: Any) -> None:
        if self._piece_done(command, future):
            self._obey(self.executor.sent(command.buffer))

    def _piece_done(self, command: PostRecv | StartSend, future: Any) -> bool:
        """Whether this was the last piece of a transfer, and all went well."""
        error = RuntimeError("the transfer was cancelled") if future.cancelled() else future.exception()
        if self.ended:
            return False
        if error is not None:
            self.fail(error, command.instruction)
            return False
        self._pieces_left[command.instruction] -= 1
        return self._pieces_left[command.instruction] == 0

    def _drop(self, key: BufferKey) -> None:
        self._arrays[key] = None
        buffer = self._receiving.pop(key, None)
        if buffer is not None:
            self._machine.pool.give(buffer)

    def _keep(self, command: KeepOutput) -> None:
        array, entry = self._arrays[command.buffer], self._results.get(command.result)
        assert array is not None
        if entry is not None:
            entry.resolve(duplicate(array) if command.copy else array)

    def _finish(self) -> None:
        self.ended = True
        now = time.monotonic()
        self._arrays, self._receiving = [], {}
        stats = StepStats(
            compute_s=self._computed_s,
            wait_s=self._waited_s,
            total_s=now - self._started_s,
            peak_bytes=self.executor.peak_bytes,
            live_buffers=0,
            runs=tuple(self._runs),
        )
        self._on_end(self, stats)

    def _tag(self, tag: int, shard_index: int) -> int:
        return make_tag(self.message.epoch, PROGRAM_CHANNEL, transfer_sequence(tag, shard_index, self._num_devices))

    # ------------------------------------------------------------ computing

    def _compute(self, command: Execute) -> Callable[[], None]:
        """Runs on the compute thread."""
        if self.ended:
            return _nothing
        self._note(command.instruction, computing=True)
        arrays = self._arrays
        lock: AbstractContextManager = self._machine.device_lock or nullcontext()
        try:
            with lock:
                start_s = time.monotonic()
                arguments = [arrays[key] for key in command.inputs]
                for position in command.donated:
                    arrays[command.inputs[position]] = None
                outputs = self._call(command, arguments)
                for array in outputs:
                    array.block_until_ready()
            for key, array in zip(command.outputs, outputs, strict=True):
                arrays[key] = array
        except Exception as error:  # whatever an executable raises is reported, with its instruction
            return partial(self.fail, error, command.instruction)
        finally:
            if not self.ended:  # the next step may be at work already
                self._note(command.instruction)
        return partial(self._ran, command, start_s, time.monotonic(), [array.nbytes for array in outputs])

    def _call(self, command: Execute, arguments: list[Any]) -> Sequence[jax.Array]:
        call = self._program.calls[command.instruction]
        if not special_values.wanted():
            return call(*arguments)
        label: Any = self._program.plan.program.instructions[command.instruction]
        return special_values.call_checked(call, arguments, infs=not label.label.startswith("start("))

    def _ran(self, command: Execute, start_s: float, end_s: float, nbytes: list[int]) -> None:
        if self.ended:
            return
        label: Any = self._program.plan.program.instructions[command.instruction]
        self._runs.append((label.label, start_s, end_s))
        self._computed_s += end_s - start_s
        self._obey(self.executor.ran(command.instruction, nbytes))

    def _note(self, instruction: int, *, waiting: bool = False, computing: bool = False) -> None:
        self._machine.note_progress(self.message.step, self.message.program_id, instruction, waiting, computing)

    def _watch_starvation(self) -> None:
        if not self._drains and not self.ended and self.executor.draining:
            self._drains = True
            self._note(self.executor.at, waiting=True)
        starved = not self.ended and self.executor.starved
        if starved == (self._starved_since is not None):
            return
        now = time.monotonic()
        if self._starved_since is None:
            self._starved_since = now
            self._note(self.executor.at, waiting=True)
        else:
            self._waited_s += now - self._starved_since
            self._starved_since = None


def _shared_entries(bound: Mapping[int, Entry]) -> frozenset[int]:
    """Entries bound to more than one argument, by identity."""
    seen: set[int] = set()
    return frozenset(id(entry) for entry in bound.values() if id(entry) in seen or seen.add(id(entry)))


def _nothing() -> None:
    """The step ended before this run was taken up."""
