"""loaded_program: a plan with all that can be known of it before its first step: executables, layouts, tags, and which
of its tasks are quick. No I/O, no clock: it is told how long tasks took.

loading: a Load message in, a program ready to step out: parsed, planned, compiled, its buffers allocated.
"""

from __future__ import annotations

import asyncio
from array import array as packed
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import jax

from jaxpp_async.actors import executables
from jaxpp_async.actors.executables import ContentKey, Executable, Executables, check_signature
from jaxpp_async.actors.execution_plan import Execute, ExecutionPlan, PostRecv, StartSend, make_plan
from jaxpp_async.actors.receive_buffers import ReceivePool
from jaxpp_async.actors.shards import Layouts
from jaxpp_async.layout import array_parts
from jaxpp_async.layout.array_parts import PieceTransfer, receives, relays, sends
from jaxpp_async.program.actor_program import parse_program
from jaxpp_async.program.instructions import Run
from jaxpp_async.protocol.actor_info import ProcessRank
from jaxpp_async.protocol.messages import Load, Loaded
from jaxpp_async.transport.nccl.order import OrderedMessage, StepOrder, order_of

Call = Callable[..., Sequence[jax.Array]]

QUICK_S = 0.0003
"""A task that takes less is run on the event loop's thread: a thread of its own costs some 100 us for each hand-over
and back, and the loop can be without its other work for that long."""

_QUICK_AFTER = 3
"""Runs in a row before a task is called quick: the first one fills JAX's caches."""

_FORGETTING = 0.05
"""How far at most the typical time grows with a longer run. A shorter one is believed at once: what disturbs a run only
ever makes it longer."""

_FAR_FROM_QUICK = 100
"""A run that takes so many times `QUICK_S` is believed as well: the loop cannot be without its other work as often as
it would take to find out slowly."""


class LoadedTask:
    """A `Run` made ready.

    Args:
        call: the executable.
        label: the run's.
        places: what the executable looks at, if it does (`Executable.places`).
        names: of its arguments, the user's; None: it is none of the step's.
    """

    __slots__ = ("_call", "_check_infs", "_explain")

    def __init__(self, call: Call, label: str, places: Sequence[str] | None, names: Sequence[str | None]):
        self._call, self._explain = call, _unexplained
        if places is not None:
            self._call = checked = executables.SelfChecked(call, places, names)
            self._explain = checked.explain
        self._check_infs = not label.startswith("start(")  # an accumulator of `Max` begins with one

    def run(self, arguments: Sequence[Any], *, checked: bool, wait: bool = True) -> Sequence[jax.Array]:
        """Call it.

        Args:
            checked: look for special values that the configuration forbids.
            wait: until it has computed.

        Raises:
            FloatingPointError: a result is a NaN or an infinity, which the configuration forbids.
            Whatever the executable does.
        """
        if checked:
            outputs = executables.call_checked(
                self._call, arguments, infs=self._check_infs, explain=self._explain
            )
        else:
            outputs = self._call(*arguments)
        if outputs and wait:
            outputs[-1].block_until_ready()  # results of one executable are there together
        return outputs


def _unexplained() -> str | None:
    return None


class _Pace:
    """How long one executable takes."""

    __slots__ = ("instructions", "is_quick", "runs", "typical_s")

    def __init__(self) -> None:
        self.instructions: list[int] = []
        self.typical_s, self.runs, self.is_quick = float("inf"), 0, False


class LoadedProgram:
    """One program of an actor.

    Args:
        plan: what it executes.
        calls: the callable of each `Run`, by instruction.
        places: what each `Run` looks at for NaNs and infinities, by instruction; those are missing that do not.
        names: of the step's arguments, by number, where something is to be said of them.
        layouts: of the actor's devices.
        pool: where receives find memory; it allocates now what the program will use at once.
        loops: `Run`s that are never quick, since how long they take may depend on their data.
        seat: this process's.

    Attributes:
        tasks: each `Run`, by instruction.
        layouts: of each buffer key.
        bins: where each `Recv` finds memory, by instruction.
        legs: of each `Send` and `Recv`, by instruction: its messages.
        relays: of a `Recv`, what this process passes on to others of its actor, by piece; most have none.
        no_stamps: the time stamps of a step that has not begun: two NaNs an instruction, as `array("d")` packs them.
        donates: whether it consumes any of its arguments.
        quick: the `Run`s that have been taking less than `QUICK_S`; changes from step to step.
        longest_s: what any `Run` has taken at most.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        calls: Mapping[int, Call],
        places: Mapping[int, Sequence[str]],
        names: Mapping[int, str],
        layouts: Layouts,
        pool: ReceivePool,
        loops: Container[int],
        process_rank: ProcessRank,
    ):
        self.plan = plan
        argument = {bind.buffer: names.get(bind.arg) for bind in plan.binds}
        runs = {command.instruction: command for command in plan.commands if isinstance(command, Execute)}
        self.tasks = {
            at: LoadedTask(
                call, _label(plan, at), places.get(at), [argument.get(key) for key in runs[at].inputs]
            )
            for at, call in calls.items()
        }
        self.layouts = tuple(layouts.of(aval) for aval in plan.avals)
        for aval, count in plan.max_receives.items():
            pool.bin(aval).reserve(count)
        receives = [command for command in plan.commands if isinstance(command, PostRecv)]
        self.bins = {command.instruction: pool.bin(command.aval) for command in receives}
        self._process_rank, self._num_devices = process_rank, layouts.devices.size
        self.legs: dict[int, tuple[PieceTransfer, ...]] = {}
        self.relays: dict[int, dict[int, tuple[PieceTransfer, ...]]] = {}
        self._find_legs()
        self.no_stamps = packed("d", [float("nan")] * (2 * len(plan.commands))).tobytes()
        self.donates = any(command.donated for command in plan.binds)
        self.quick: set[int] = set()
        self.longest_s = 0.0
        # With others a task may have to wait for them, which the event loop must not.
        self._paces = {
            at: pace for at, pace in _paces(plan).items() if at not in loops and self._process_rank.size == 1
        }

    def _find_legs(self) -> None:
        process_rank, num_devices = self._process_rank, self._num_devices
        for command in self.plan.commands:
            if not isinstance(command, StartSend | PostRecv):
                continue
            at, tag = command.instruction, command.tag
            held = [shard.part for shard in self.layouts[command.buffer].shards]
            if isinstance(command, StartSend):
                self.legs[at] = sends(process_rank, held, tag, command.to_actor, num_devices)
                continue
            self.legs[at] = receives(process_rank, held, tag, command.from_actor, num_devices)
            if passed_on := relays(process_rank, held, tag, num_devices):
                self.relays[at] = passed_on

    @cached_property
    def order(self) -> StepOrder:
        """In which order it transfers, for a transport that has to know."""
        found: list[OrderedMessage] = []
        for command in self.plan.commands:
            if isinstance(command, StartSend | PostRecv):
                held = [shard.part for shard in self.layouts[command.buffer].shards]
                if isinstance(command, StartSend):
                    found += array_parts.sent(
                        self._process_rank, held, command.tag, command.to_actor, self._num_devices
                    )
                else:
                    found += array_parts.received(
                        self._process_rank, held, command.tag, command.from_actor, self._num_devices
                    )
        return order_of(self._process_rank.process, found)

    def took(self, instruction: int, seconds: float) -> None:
        """Remember how long a `Run` took."""
        self.longest_s = max(self.longest_s, seconds)
        pace = self._paces.get(instruction)
        if pace is None:
            return
        if seconds > _FAR_FROM_QUICK * QUICK_S:
            pace.runs = 0
        if seconds < pace.typical_s or seconds > _FAR_FROM_QUICK * QUICK_S:
            pace.typical_s = seconds
        else:
            pace.typical_s += _FORGETTING * min(seconds - pace.typical_s, pace.typical_s)
        pace.runs += 1
        if (pace.runs > _QUICK_AFTER and pace.typical_s < QUICK_S) != pace.is_quick:
            pace.is_quick = not pace.is_quick
            (self.quick.update if pace.is_quick else self.quick.difference_update)(pace.instructions)


def _label(plan: ExecutionPlan, at: int) -> str:
    run = plan.program.instructions[at]
    assert isinstance(run, Run)
    return run.label


def _paces(plan: ExecutionPlan) -> dict[int, _Pace]:
    of_executable: dict[tuple[int, tuple[int, ...]], _Pace] = {}
    found: dict[int, _Pace] = {}
    for command in plan.commands:
        if isinstance(command, Execute):
            pace = of_executable.setdefault((command.executable, command.donated), _Pace())
            pace.instructions.append(command.instruction)
            found[command.instruction] = pace
    return found


# ---------------------------------------------------------------- loading


async def load_program(
    message: Load,
    executables: Executables,
    layouts: Layouts,
    pool: ReceivePool,
    workers: ThreadPoolExecutor,
    process_rank: ProcessRank,
) -> tuple[LoadedProgram, Loaded]:
    """Make a program ready, so that its first step compiles and allocates nothing.

    Args:
        seat: this process's place in its actor.

    Returns:
        The program, and the reply.

    Raises:
        ValueError: the program is not well formed, or an executable is not what the program takes it for.
        KeyError: an executable that never came.
    """
    executables.add_blobs(message.blobs)
    plan = await asyncio.get_running_loop().run_in_executor(workers, _read, message.program)
    runs = [command for command in plan.commands if isinstance(command, Execute)]
    compile_s = await executables.load((message.executables[run.executable], run.donated) for run in runs)
    loops: set[int] = set()
    calls, places, temp_bytes = {}, {}, dict.fromkeys(message.executables, 0)
    checked: set[tuple] = set()
    for run in runs:
        content_key = message.executables[run.executable]
        executable = executables.get((content_key, run.donated))
        _check(plan, run, content_key, executable, layouts, checked)
        calls[run.instruction] = executable.call
        if executable.places is not None:
            places[run.instruction] = executable.places
        if executable.has_loop:
            loops.add(run.instruction)
        temp_bytes[run.executable] = max(temp_bytes[run.executable], executable.temp_bytes)
    program = LoadedProgram(plan, calls, places, message.names, layouts, pool, loops, process_rank)
    return program, Loaded(message.request, compile_s, temp_bytes)


def _read(text: str) -> ExecutionPlan:
    return make_plan(parse_program(text))


def _check(
    plan: ExecutionPlan,
    run: Execute,
    content_key: ContentKey,
    executable: Executable,
    layouts: Layouts,
    checked: set[tuple],
) -> None:
    inputs = tuple(plan.avals[key] for key in run.inputs)
    outputs = tuple(plan.avals[key] for key in run.outputs)
    if (content_key, inputs, outputs) in checked:
        return
    checked.add((content_key, inputs, outputs))
    where = plan.text(run.instruction)
    check_signature(executable.inputs, [layouts.of(aval) for aval in inputs], f"{where}: input")
    check_signature(executable.outputs, [layouts.of(aval) for aval in outputs], f"{where}: output")
