"""loading: a Load message in, a program ready to step out: parsed, planned, compiled, its buffers allocated."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from jaxpp_async.actors.messages import Load, Loaded
from jaxpp_async.actors.plan import Execute, ExecutionPlan, make_plan
from jaxpp_async.actors.processes.seats import Seat
from jaxpp_async.actors.steps.executables import ContentKey, Executable, Executables, check_signature
from jaxpp_async.actors.steps.loaded_program import LoadedProgram
from jaxpp_async.actors.values.receive_pool import ReceivePool
from jaxpp_async.actors.values.shards import Layouts
from jaxpp_async.program_text import parse_program


async def load_program(
    message: Load,
    executables: Executables,
    layouts: Layouts,
    pool: ReceivePool,
    workers: ThreadPoolExecutor,
    seat: Seat,
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
    program = LoadedProgram(plan, calls, places, message.names, layouts, pool, loops, seat)
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
