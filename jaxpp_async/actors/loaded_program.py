"""Prepare a program before its first step: plan and compile it, and allocate its receive buffers.

A `LoadedProgram` contains everything about a program that does not change from step to step: executables,
layouts, and the messages of its transfers. A `LoadedProgram` also learns from measured times which tasks are
quick; these may run on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from array import array as packed
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import jax

from jaxpp_async.actors import executables
from jaxpp_async.actors.executables import ContentKey, Executable, Executables, check_signature
from jaxpp_async.actors.execution_plan import Execute, ExecutionPlan, PostRecv, StartSend, make_plan
from jaxpp_async.actors.receive_buffers import FreeBuffers, ReceivePool
from jaxpp_async.actors.shards import Layouts
from jaxpp_async.layout.array_parts import (
    Part,
    PieceTransfer,
    order_receives,
    order_sends,
    plan_receives,
    plan_relays,
    plan_sends,
)
from jaxpp_async.program.instructions import Run
from jaxpp_async.protocol.actor_info import ProcessRank
from jaxpp_async.protocol.messages import Load, Loaded
from jaxpp_async.transport.nccl.order import OrderedMessage, StepOrder, order_of

QUICK_S = 0.0003
"""The time in seconds below which a task runs on the event loop's thread. Handing the task to another thread
and back would cost some 100 us, and the loop can be kept from its other work for so short a time."""

_QUICK_AFTER = 3
"""The number of runs after which a task may count as quick. The first run is slow, because it fills JAX's
caches."""

_GROWTH = 0.05
"""The fraction of its difference to the time of a longer run by which the typical time of a task grows. The
difference counts up to the typical time itself. A shorter run replaces the typical time immediately, because
disturbances only ever make a run longer."""

_FAR_FROM_QUICK = 100
"""The multiple of `QUICK_S` above which the time of a run replaces the typical time immediately too, because
slow growth would keep the event loop from its other work for many such runs."""


class LoadedTask:
    """The executable of one `Run` instruction, which can check its results for NaNs and infinities.

    Args:
        executable: the executable.
        label: the label of the `Run` instruction. Tasks with a label `start(...)` make initial accumulators,
            which may be infinite, so infinities in their results are not errors.
        names: the user's name of each argument of the executable; None for an argument that is not an
            argument of the step.
    """

    __slots__ = ("_call", "_check_infs", "_explain", "label")

    def __init__(self, executable: Executable, label: str, names: Sequence[str | None]):
        self.label, self._call, self._explain = label, executable.call, None
        if executable.places is not None:
            self._call = checked = executables.SelfChecked(executable.call, executable.places, names)
            self._explain = checked.explain
        self._check_infs = not label.startswith("start(")  # an accumulator of `Max` begins with one

    def run(self, arguments: Sequence[Any], *, checked: bool, wait: bool = True) -> Sequence[jax.Array]:
        """Call the executable, and return its results.

        Args:
            arguments: the arguments of the executable.
            checked: whether to look for NaNs and infinities that the configuration forbids.
            wait: whether to return only when the results are computed.

        Raises:
            FloatingPointError: a result has a NaN or an infinity that the configuration forbids.
            Exception: the exception that the executable raised.
        """
        if checked:
            outputs = executables.call_checked(
                self._call, arguments, infs=self._check_infs, explain=self._explain
            )
        else:
            outputs = self._call(*arguments)
        if outputs and wait:
            outputs[-1].block_until_ready()  # results of one executable are ready together
        return outputs


class _RunTimes:
    """An estimate of how long one executable takes, which decides whether it counts as quick.

    Quick tasks run on the event loop's thread, others on the compute thread.
    """

    __slots__ = ("instructions", "is_quick", "runs", "typical_s")

    def __init__(self) -> None:
        self.instructions: list[int] = []
        self.typical_s, self.runs, self.is_quick = float("inf"), 0, False


class LoadedProgram:
    """One program of an actor, ready to run steps.

    Args:
        plan: the commands of the program.
        executables: the executable of each `Run` instruction, by the instruction's index.
        names: the user's names of step arguments, by the argument's number, for error messages.
        modelled_s: how long a call of an executable lasts at least, in seconds, by the executable's index in
            the program; empty unless the mesh has a device model.
        layouts: the distributions of arrays over this process's devices.
        pool: the source of receive buffers. The constructor allocates as many as the program uses at the same
            time.
        process_rank: the number of this process, and its rank in its actor.

    Attributes:
        tasks: the task of each `Run` instruction, by the instruction's index.
        modelled_s: how long each `Run` instruction lasts at least, in seconds, by the instruction's index. A
            `Run` that is not among them lasts as long as it computes. The others never count as quick, since
            the event loop must not wait for their end.
        layouts: the layout of each buffer, by buffer key.
        buffers: the free buffers from which each `Recv` instruction takes one, by the instruction's index.
        transfers: the messages of each `Send` and `Recv` instruction, by the instruction's index.
        relays: the messages that forward parts (distinct slices) of received arrays to other processes of the
            actor. The outer keys are the indices of the `Recv` instructions that forward anything; the inner
            keys are the indices of the parts.
        blank_stamps: the time stamps of a step that has not begun: two NaNs per instruction, in the format of
            `array("d")`.
        donates: whether the program consumes any of its arguments.
        quick: the indices of the `Run` instructions whose executables have lately taken less than `QUICK_S`,
            and so may run on the event loop's thread; this set changes from step to step.
        longest_s: the longest time in seconds that any `Run` has taken.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        executables: Mapping[int, Executable],
        names: Mapping[int, str],
        modelled_s: Mapping[int, float],
        layouts: Layouts,
        pool: ReceivePool,
        process_rank: ProcessRank,
    ):
        self.plan = plan
        argument = {bind.buffer: names.get(bind.arg) for bind in plan.binds}
        runs = {command.instruction: command for command in plan.commands if isinstance(command, Execute)}
        self.tasks: dict[int, LoadedTask] = {}
        for at, executable in executables.items():
            run = plan.program.instructions[at]
            assert isinstance(run, Run)
            names_of_inputs = [argument.get(key) for key in runs[at].inputs]
            self.tasks[at] = LoadedTask(executable, run.label, names_of_inputs)
        self.modelled_s = {
            at: modelled_s[run.executable] for at, run in runs.items() if run.executable in modelled_s
        }
        self.layouts = tuple(layouts.of(aval) for aval in plan.avals)
        for aval, count in plan.max_receives.items():
            pool.buffers_of(aval).reserve(count)
        self._process_rank, self._num_devices = process_rank, layouts.devices.size
        self.buffers: dict[int, FreeBuffers] = {}
        self.transfers: dict[int, tuple[PieceTransfer, ...]] = {}
        self.relays: dict[int, dict[int, tuple[PieceTransfer, ...]]] = {}
        for command, held in self._transferred_parts():
            at, tag = command.instruction, command.tag
            if isinstance(command, StartSend):
                self.transfers[at] = plan_sends(process_rank, held, tag, command.to_actor, self._num_devices)
                continue
            self.buffers[at] = pool.buffers_of(command.aval)
            self.transfers[at] = plan_receives(process_rank, held, tag, command.from_actor, self._num_devices)
            if relays := plan_relays(process_rank, held, tag, self._num_devices):
                self.relays[at] = relays
        self.blank_stamps = packed("d", [float("nan")] * (2 * len(plan.commands))).tobytes()
        self.donates = any(command.donated for command in plan.binds)
        self.quick: set[int] = set()
        self.longest_s = 0.0
        # The time of a loop may depend on its data. In an actor of several processes a task may have to wait
        # for the other processes, and the event loop must not be blocked, so no task counts as quick.
        never_quick = {
            at for at, executable in executables.items() if executable.has_loop or at in self.modelled_s
        }
        self._run_times = {} if process_rank.size > 1 else _group_runs(runs, never_quick)

    def _transferred_parts(self) -> Iterator[tuple[StartSend | PostRecv, list[Part]]]:
        """Yield the command of each send and receive of the program, with those parts (distinct slices) of
        the transferred array that this process stores."""
        for command in self.plan.commands:
            if isinstance(command, StartSend | PostRecv):
                yield command, [shard.part for shard in self.layouts[command.buffer].shards]

    @cached_property
    def order(self) -> StepOrder:
        """The order of the program's messages on each link, for a transport that must know it before a step
        (NCCL)."""
        found: list[OrderedMessage] = []
        for command, held in self._transferred_parts():
            order, peer = (
                (order_sends, command.to_actor)
                if isinstance(command, StartSend)
                else (order_receives, command.from_actor)
            )
            found += order(self._process_rank, held, command.tag, peer, self._num_devices)
        return order_of(self._process_rank.process, found)

    def record_time(self, instruction: int, seconds: float) -> None:
        """Record how long a `Run` instruction took, and update whether its executable counts as quick.

        Quick tasks run on the event loop's thread, others on the compute thread.

        Args:
            instruction: the index of the `Run` instruction.
            seconds: the measured time.
        """
        self.longest_s = max(self.longest_s, seconds)
        times = self._run_times.get(instruction)
        if times is None:
            return
        if seconds > _FAR_FROM_QUICK * QUICK_S:
            times.runs = 0
        if seconds < times.typical_s or seconds > _FAR_FROM_QUICK * QUICK_S:
            times.typical_s = seconds
        else:
            times.typical_s += _GROWTH * min(seconds - times.typical_s, times.typical_s)
        times.runs += 1
        if (times.runs > _QUICK_AFTER and times.typical_s < QUICK_S) != times.is_quick:
            times.is_quick = not times.is_quick
            (self.quick.update if times.is_quick else self.quick.difference_update)(times.instructions)


def _group_runs(runs: Mapping[int, Execute], never_quick: Container[int]) -> dict[int, _RunTimes]:
    """Make the objects that estimate the times of `Run` instructions; `Run`s of the same executable share one
    object.

    Args:
        runs: the commands of all `Run` instructions, by the instruction's index.
        never_quick: the indices of the `Run` instructions that never count as quick, which are left out of
            the result.

    Returns:
        A dictionary. Its keys are the indices of the `Run` instructions; its values are the estimating
        objects.
    """
    of_executable: dict[tuple[int, tuple[int, ...]], _RunTimes] = {}
    found: dict[int, _RunTimes] = {}
    for at, command in runs.items():
        times = of_executable.setdefault((command.executable, command.donated), _RunTimes())
        times.instructions.append(at)
        if at not in never_quick:
            found[at] = times
    return found


# ---------------------------------------------------------------- loading


async def load_program(
    message: Load,
    executables: Executables,
    layouts: Layouts,
    pool: ReceivePool,
    workers: ThreadPoolExecutor,
    process_rank: ProcessRank,
    on_compiled: Callable[[int, int, int], None] = lambda *_: None,
) -> tuple[LoadedProgram, Loaded]:
    """Prepare a program so that its first step has nothing to compile or allocate.

    Args:
        message: the program, and the executables that the actor does not have yet.
        executables: compiles executables, and keeps them.
        layouts: the distributions of arrays over this process's devices.
        pool: the source of receive buffers.
        workers: threads for planning.
        process_rank: the number of this process, and its rank in its actor.
        on_compiled: see `Executables.load`.

    Returns:
        The program, and the reply to the controller.

    Raises:
        ValueError: the program is malformed, names an executable that the message does not list, or an
            executable has other arguments or results than the program says.
        KeyError: the controller has never sent an executable that the message lists.
    """
    executables.add_blobs(message.blobs)
    plan = await asyncio.get_running_loop().run_in_executor(workers, make_plan, message.program)
    runs = [command for command in plan.commands if isinstance(command, Execute)]
    for run in runs:
        if run.executable not in message.executables:
            raise ValueError(f"{plan.text(run.instruction)}: the program came without this executable")
    keys = [(message.executables[run.executable], run.donated) for run in runs]
    compile_s = await executables.load(keys, on_compiled)
    of_run: dict[int, Executable] = {}
    temp_bytes = dict.fromkeys(message.executables, 0)
    checked: set[tuple[Any, ...]] = set()
    for run in runs:
        content_key = message.executables[run.executable]
        executable = of_run[run.instruction] = executables.get((content_key, run.donated))
        _check(plan, run, content_key, executable, layouts, checked)
        temp_bytes[run.executable] = max(temp_bytes[run.executable], executable.temp_bytes)
    program = LoadedProgram(plan, of_run, message.names, message.modelled_s, layouts, pool, process_rank)
    return program, Loaded(compile_s, temp_bytes)


def _check(
    plan: ExecutionPlan,
    run: Execute,
    content_key: ContentKey,
    executable: Executable,
    layouts: Layouts,
    checked: set[tuple[Any, ...]],
) -> None:
    """Check that an executable has the arguments and results that a `Run` instruction expects.

    Args:
        plan: the plan of the program.
        run: the command of the `Run` instruction.
        content_key: the content key (a hash of the bytes) of the executable's task.
        executable: the executable.
        layouts: the distributions of arrays over this process's devices.
        checked: the combinations of content key and avals that were checked before; this combination is
            added.

    Raises:
        ValueError: an argument or a result of the executable differs from the program's aval.
    """
    inputs = tuple(plan.avals[key] for key in run.inputs)
    outputs = tuple(plan.avals[key] for key in run.outputs)
    if (content_key, inputs, outputs) in checked:
        return
    checked.add((content_key, inputs, outputs))
    where = plan.text(run.instruction)
    check_signature(executable.inputs, [layouts.of(aval) for aval in inputs], f"{where}: input")
    check_signature(executable.outputs, [layouts.of(aval) for aval in outputs], f"{where}: output")
