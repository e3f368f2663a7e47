"""stuck_report: the step that an actor is at in, `Reported` out: where it is and which of its data is not there. Reads
only; it is asked when a step does not go on.
"""

from __future__ import annotations

import time

from jaxpp_async.actors.messages import OpenTransfer, Reported
from jaxpp_async.actors.plan import BindInput, PostRecv, StartSend
from jaxpp_async.actors.steps.step_run import StepRun
from jaxpp_async.program import CONTROLLER, Input, Recv, Send


def report(request: int, run: StepRun | None) -> Reported:
    """The answer to `Report`.

    Args:
        run: the step under way, if there is one.
    """
    if run is None or run.ended:
        return Reported(request, None, now_s=time.monotonic())
    executor = run.executor
    return Reported(
        request=request,
        step=run.message.step,
        program_id=run.message.program_id,
        instruction=executor.at,
        at=executor.position(),
        running=not executor.starved and not executor.draining,
        transfers_done=run.transfers[1],
        transfers=tuple(_open_transfers(run)),
        now_s=time.monotonic(),
    )


def _open_transfers(run: StepRun) -> list[OpenTransfer]:
    executor, plan, under_way = run.executor, run.plan, run.transfers[0]
    unsent = {command.instruction for command in executor.unsent}
    found: list[OpenTransfer] = []
    for command in plan.commands[: executor.at]:
        if isinstance(command, BindInput) and not executor.is_here(command.buffer):
            kind, peer, tag, posted = "argument", CONTROLLER, -1, True
        elif isinstance(command, PostRecv) and command.instruction in under_way:
            kind, peer, tag, posted = "receive", command.from_actor, command.tag, True
        elif isinstance(command, StartSend) and command.instruction in under_way | unsent:
            kind, peer, tag, posted = "send", command.to_actor, command.tag, command.instruction not in unsent
        else:
            continue
        instruction = plan.program.instructions[command.instruction]
        assert isinstance(instruction, Input | Recv | Send)
        needed = executor.draining or command.buffer in executor.awaited
        size_bytes = plan.avals[command.buffer].size_bytes
        found.append(OpenTransfer(kind, instruction.buffer, peer, tag, size_bytes, posted, needed))
    return found
