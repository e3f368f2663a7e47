"""Steps as they are once the controller has sent them, and their replies, for tests without a controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.protocol.actor_info import ActorInfo
from jaxpp_async.protocol.clocks import OWN_CLOCK, Clock
from jaxpp_async.protocol.messages import StepDone, StepStats

STATS = StepStats(0.5, 0.25, 1.0, 4096, 3)


def sent_step(
    step_id: int,
    processes: Sequence[int] = (0,),
    programs: Mapping[int, ActorProgram] = {},
    clock: Clock = OWN_CLOCK,
    name: str = "train",
) -> SubmittedStep:
    """A step that these processes run."""
    step = SubmittedStep(0, name)
    step.assign(step_id, processes, programs, lambda process: clock)
    step.is_sent = True
    return step


def link(actor: int = 0, rank: int = 0, size: int = 1, pid: int = 1) -> Any:
    """What a step looks at of a process's connection."""
    return SimpleNamespace(info=ActorInfo(actor, "host", pid, (), "ready", rank=rank, size=size))


def answer(step: SubmittedStep, actor: int = 0, stats: StepStats = STATS, **process: int) -> None:
    """The reply of one process, which has finished the step."""
    step.on_reply(link(actor, **process), StepDone(step.id, stats))
