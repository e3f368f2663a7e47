"""Make the errors that a user reads from the facts that are known of a failure, with pure functions."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxpp_async.controller.stall_detector import StallDiagnosis
from jaxpp_async.errors import (
    ActorDiedError,
    ActorError,
    ActorUnresponsiveError,
    LaunchError,
    ProtocolError,
    RemoteError,
    TransferError,
)
from jaxpp_async.protocol.actor_info import ActorInfo, ProcessRank
from jaxpp_async.protocol.messages import Failed, StepId, step_number, step_text
from jaxpp_async.protocol.parent_watch import EXIT_REASONS

if TYPE_CHECKING:
    from jaxpp_async.launch.process_supervisor import Death

_CONSEQUENCES = ("TransferError", "StepAbortedError", "CancelledError")
"""Remote exceptions that usually follow from another actor's death, which may be noticed a moment later."""

_OF_OTHER_PROCESSES = ("JaxRuntimeError", "XlaRuntimeError")
_COLLECTIVE = re.compile(r"\b(Gloo|NCCL|[Cc]oordination service)\b")
"""Words in XLA's error for a collective that another process has left; a ValueError after a reset."""

_OF_A_STEP: dict[str, type[ActorError]] = {
    f"{c.__module__}.{c.__name__}": c for c in (ProtocolError, TransferError)
}
"""Errors that fail a step on an actor without any user code: the user gets an error of the same class."""

_OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED|\bMemoryError\b|std::bad_alloc|[Cc]annot allocate memory|[Oo]ut of memory"
)
_MEMORY_HINT = (
    "the actor ran out of memory; `(await step.compile(...)).report()` says what each actor needs at its peak"
)

_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)(: |$)")
_RUN = re.compile(r'(?:#\d+ )?run +"([^"]*)".*?( \(waiting for data\))?$')
_MOST_CHARS = 120


def is_consequence(failed: Failed, *, of_several: bool = False) -> bool:
    """Whether another failure probably caused this one.

    Args:
        of_several: whether it comes from one of several processes that compute together: XLA fails in one of
            them when another is gone.
    """
    kind = failed.exception_type.rpartition(".")[2]
    of_another = kind in _OF_OTHER_PROCESSES or _COLLECTIVE.search(failed.message) is not None
    return kind in _CONSEQUENCES or (of_several and of_another)


def is_echo(process: ActorInfo, death: Death) -> bool:
    """Whether a process probably ended because its actor's first process did: JAX then aborts the others."""
    return process.rank > 0 and death.returncode == -signal.SIGABRT


def remote_error(actor: ActorInfo, failed: Failed, *, ends_mesh: bool = False) -> ActorError:
    """Make the error for a request that failed on an actor: `RemoteError`, or a class of `_OF_A_STEP`.

    Args:
        ends_mesh: whether it concerns more than that request; a failed link is then a `TransferError`.
    """
    where = str(actor)
    if failed.step is not None:
        where += f", {step_text(failed.step)}"
    if failed.instruction is not None:
        where += f", {_short(failed.instruction)}"
    # The first line alone tells the cause, since a log or a progress bar may show no more.
    text = f"{where}: {failed.exception_type}: {failed.message}"
    if failed.instruction is not None and _short(failed.instruction) != failed.instruction:
        text += f"\n  at {failed.instruction}"
    if _OUT_OF_MEMORY.search(f"{failed.exception_type}: {failed.message}"):
        text += f"\n  {_MEMORY_HINT}"
    if failed.traceback:
        text += f"\n\nTraceback on the actor:\n{failed.traceback.rstrip()}"
    when: dict[str, Any] = {"instruction": failed.instruction, **location(actor, failed.step)}
    own = _OF_A_STEP.get(failed.exception_type)
    if own is not None and (failed.step is not None or (ends_mesh and own is TransferError)):
        return own(text, **when)
    return RemoteError(text, exception_type=failed.exception_type, remote_traceback=failed.traceback, **when)


def died_error(
    actor: ActorInfo, death: Death, step: StepId | None, instruction: str | None = None
) -> ActorDiedError:
    """Make the error for an actor whose process ended.

    Args:
        step: the step that it was running, or None.
        instruction: text of the instruction that it was at in that step, where that is known.
    """
    during = f" during {step_text(step)}" if step is not None else ""
    at = f", at {_short(instruction)}" if instruction is not None else ""
    end = describe_end(death.returncode, death.output_tail)
    text = f"{actor} {end}{during}{at}{_last_error(death.output_tail)}{describe_tail(death.output_tail)}"
    return ActorDiedError(text, instruction=instruction, **location(actor, step))


def lost_error(
    actor: ActorInfo, error: Exception | None, tail: Sequence[str], step: StepId | None
) -> ActorDiedError:
    """Make the error for an actor whose control connection ended though its process did not."""
    why = f": {error}" if error is not None else ""
    text = f"{actor} closed its control connection though its process still runs{why}{describe_tail(tail)}"
    return ActorDiedError(text, **location(actor, step))


def silent_error(
    actor: ActorInfo, silence_s: float, step: StepId | None, at: str | None
) -> ActorUnresponsiveError:
    """Make the error for an actor whose heartbeats have stopped.

    Args:
        silence_s: for how many seconds.
        step: the step that it was running, or None.
        at: text of its last known position.
    """
    return ActorUnresponsiveError(
        describe_silence(actor, silence_s, at), instruction=at, **location(actor, step)
    )


def describe_silence(actor: ActorInfo, silence_s: float, at: str | None) -> str:
    """Say that no heartbeat of an actor came for a while, and why that may be."""
    was = f"it was last at {at}; " if at is not None else ""
    return (
        f"{actor} has not been heard of for {silence_s:.1f} s; {was}it may be stopped (SIGSTOP), swapping, "
        "in native code that keeps Python's GIL, or its host or network down"
    )


def stuck_error(diagnosis: StallDiagnosis, still_s: float, actors: Mapping[int, ActorInfo]) -> ActorError:
    """Make the error for a step that does not go on: `TransferError` if a transfer was lost on its way.

    Args:
        still_s: for how many seconds nothing has happened.
        actors: all actors with an unfinished step, by id.
    """
    text = diagnosis.text({a: str(info) for a, info in actors.items()})
    cls = ActorUnresponsiveError if diagnosis.lost is None else TransferError
    info = actors.get(diagnosis.actor) if diagnosis.actor is not None else None
    where: dict[str, Any] = location(info) if info is not None else {}
    said = f"{step_text(diagnosis.step)} has not gone on for {still_s:.1f} s: {text}"
    return cls(said, step=step_number(diagnosis.step), instruction=diagnosis.instruction, **where)


def launch_error(process_rank: ProcessRank, what: str, tail: Sequence[str] = ()) -> LaunchError:
    """Make the error for an actor of which a process did not come up.

    Args:
        what: a clause that says what happened to the process.
        tail: the end of its output.
    """
    return LaunchError(
        f"{process_rank} {what}{_last_error(tail)}{describe_tail(tail)}", actor=process_rank.actor
    )


def describe_end(returncode: int, tail: Sequence[str] = ()) -> str:
    """Say how a process ended, such as `"was killed by SIGKILL"` or `"exited with code 3"`.

    Args:
        tail: the end of its output, which may say why.
    """
    hint = " (possibly out of memory)" if any(map(_OUT_OF_MEMORY.search, tail)) else ""
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = f"signal {-returncode}"
        if name == "SIGKILL":  # the kernel kills a process so when memory is short
            hint = " (possibly out of memory)"
        return f"was killed by {name}{hint}"
    reason = EXIT_REASONS.get(returncode)
    return f"exited with code {returncode}" + (f" ({reason})" if reason else hint)


def describe_tail(tail: Sequence[str]) -> str:
    """Format the end of an actor's output as lines to append to a message."""
    if not tail:
        return ""
    return "\nThe end of its output:\n" + "\n".join(f"  {line}" for line in tail)


def _last_error(tail: Sequence[str]) -> str:
    """Find the exception that Python printed last, for the first line of a message."""
    found = next((line for line in reversed(tail) if _EXCEPTION.match(line)), None)
    return f": {found}" if found else ""


def _short(instruction: str) -> str:
    """Shorten an instruction's text: a run to its task, others to their beginning."""
    run = _RUN.match(instruction)
    if run:
        return run[1] + (run[2] or "")
    return instruction if len(instruction) <= _MOST_CHARS else f"{instruction[:_MOST_CHARS]} ..."


def abandoned(error: ActorError, message: str, cls: type[ActorError], **where: Any) -> ActorError:
    """Make an error of `cls` whose cause is `error`."""
    result = cls(message, **where)
    result.__cause__ = error
    return result


def location(actor: ActorInfo, step: StepId | None = None) -> dict[str, Any]:
    """Make the keyword arguments of an `ActorError` that say where it happened."""
    where: dict[str, Any] = {"actor": actor.id, "host": actor.host, "pid": actor.pid}
    return where if step is None else {**where, "step": step_number(step)}
