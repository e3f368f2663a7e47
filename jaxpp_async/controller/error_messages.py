"""failure: what is known of a failure in, the error a user reads out. Pure functions; no I/O, no clock."""

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

_OF_FELLOWS = ("JaxRuntimeError", "XlaRuntimeError")
_COLLECTIVE = re.compile(r"\b(Gloo|NCCL|[Cc]oordination service)\b")
"""In what XLA says of a collective that a fellow has left; it comes as a ValueError when a connection was reset."""

_OF_A_STEP: dict[str, type[ActorError]] = {
    f"{c.__module__}.{c.__name__}": c for c in (ProtocolError, TransferError)
}
"""What fails a step on an actor and is nobody's code: the user gets an error of the same class."""

_OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED|\bMemoryError\b|std::bad_alloc|[Cc]annot allocate memory|[Oo]ut of memory"
)
_NEED = (
    "the actor ran out of memory; `(await step.compile(...)).report()` says what each actor needs at its peak"
)

_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)(: |$)")
_RUN = re.compile(r'(?:#\d+ )?run +"([^"]*)".*?( \(waiting for data\))?$')
_MOST_CHARS = 120


def is_consequence(failed: Failed, *, of_several: bool = False) -> bool:
    """Whether another failure probably stands behind this one.

    Args:
        of_several: it is of one of several processes that compute together: XLA fails in one when another is gone.
    """
    kind = failed.exception_type.rpartition(".")[2]
    of_a_fellow = kind in _OF_FELLOWS or _COLLECTIVE.search(failed.message) is not None
    return kind in _CONSEQUENCES or (of_several and of_a_fellow)


def is_echo(process: ActorInfo, death: Death) -> bool:
    """Whether a process probably ended because the first of its actor's processes did: JAX then aborts the others."""
    return process.rank > 0 and death.returncode == -signal.SIGABRT


def remote_error(actor: ActorInfo, failed: Failed, *, ends_mesh: bool = False) -> ActorError:
    """The error for a request that failed on an actor: `RemoteError`, or what `_OF_A_STEP` says.

    Args:
        ends_mesh: it is no matter of that request alone; a transfer or a link that failed is then named as such.
    """
    where = str(actor)
    if failed.step is not None:
        where += f", {step_text(failed.step)}"
    if failed.instruction is not None:
        where += f", {_short(failed.instruction)}"
    # The first line alone tells the cause: it is all that a log or a progress bar may show.
    text = f"{where}: {failed.exception_type}: {failed.message}"
    if failed.instruction is not None and _short(failed.instruction) != failed.instruction:
        text += f"\n  at {failed.instruction}"
    if _OUT_OF_MEMORY.search(f"{failed.exception_type}: {failed.message}"):
        text += f"\n  {_NEED}"
    if failed.traceback:
        text += f"\n\nTraceback on the actor:\n{failed.traceback.rstrip()}"
    when: dict[str, Any] = {"instruction": failed.instruction, **_place(actor, failed.step)}
    own = _OF_A_STEP.get(failed.exception_type)
    if own is not None and (failed.step is not None or (ends_mesh and own is TransferError)):
        return own(text, **when)
    return RemoteError(text, exception_type=failed.exception_type, remote_traceback=failed.traceback, **when)


def died_error(
    actor: ActorInfo, death: Death, step: StepId | None, instruction: str | None = None
) -> ActorDiedError:
    """The error for an actor whose process ended.

    Args:
        step: the step that it was running, or None.
        instruction: text of the instruction it was at in that step, where that is known.
    """
    during = f" during {step_text(step)}" if step is not None else ""
    at = f", at {_short(instruction)}" if instruction is not None else ""
    end = describe_end(death.returncode, death.output_tail)
    text = f"{actor} {end}{during}{at}{_last_error(death.output_tail)}{describe_tail(death.output_tail)}"
    return ActorDiedError(text, instruction=instruction, **_place(actor, step))


def lost_error(
    actor: ActorInfo, error: Exception | None, tail: Sequence[str], step: StepId | None
) -> ActorDiedError:
    """The error for an actor whose control connection ended though its process did not."""
    why = f": {error}" if error is not None else ""
    text = f"{actor} closed its control connection though its process still runs{why}{describe_tail(tail)}"
    return ActorDiedError(text, **_place(actor, step))


def silent_error(
    actor: ActorInfo, silence_s: float, step: StepId | None, at: str | None
) -> ActorUnresponsiveError:
    """The error for an actor whose signs of life have stopped.

    Args:
        step: the step that it was running, or None.
        at: where it was last heard to be.
    """
    return ActorUnresponsiveError(
        describe_silence(actor, silence_s, at), instruction=at, **_place(actor, step)
    )


def describe_silence(actor: ActorInfo, silence_s: float, at: str | None) -> str:
    """That nothing was heard of an actor, and why that may be."""
    was = f"it was last at {at}; " if at is not None else ""
    return (
        f"{actor} has not been heard of for {silence_s:.1f} s; {was}it may be stopped (SIGSTOP), swapping, in native "
        "code that keeps Python's GIL, or its host or network down"
    )


def stuck_error(diagnosis: StallDiagnosis, still_s: float, actors: Mapping[int, ActorInfo]) -> ActorError:
    """The error for a step that does not go on: `TransferError` if a transfer was lost on its way.

    Args:
        still_s: for how long nothing has happened.
        actors: all of the mesh.
    """
    text = diagnosis.text({a: str(info) for a, info in actors.items()})
    cls = ActorUnresponsiveError if diagnosis.lost is None else TransferError
    info = actors.get(diagnosis.actor) if diagnosis.actor is not None else None
    where: dict[str, Any] = _place(info) if info is not None else {}
    said = f"{step_text(diagnosis.step)} has not gone on for {still_s:.1f} s: {text}"
    return cls(said, step=step_number(diagnosis.step), instruction=diagnosis.instruction, **where)


def launch_error(process_rank: ProcessRank, what: str, tail: Sequence[str] = ()) -> LaunchError:
    """The error for an actor that did not come up.

    Args:
        seat: of the process that did not.
    """
    return LaunchError(
        f"{process_rank} {what}{_last_error(tail)}{describe_tail(tail)}", actor=process_rank.actor
    )


def describe_end(returncode: int, tail: Sequence[str] = ()) -> str:
    """Such as `"was killed by SIGKILL"` or `"exited with code 3"`.

    Args:
        tail: the end of its output, which may tell why.
    """
    hint = " (possibly out of memory)" if any(map(_OUT_OF_MEMORY.search, tail)) else ""
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = f"signal {-returncode}"
        if name == "SIGKILL":  # what the kernel does to a process when memory is short
            hint = " (possibly out of memory)"
        return f"was killed by {name}{hint}"
    reason = EXIT_REASONS.get(returncode)
    return f"exited with code {returncode}" + (f" ({reason})" if reason else hint)


def describe_tail(tail: Sequence[str]) -> str:
    """The end of an actor's output, as lines to append to a message."""
    if not tail:
        return ""
    return "\nThe end of its output:\n" + "\n".join(f"  {line}" for line in tail)


def _last_error(tail: Sequence[str]) -> str:
    """The exception that Python printed last, to stand in the first line of a message."""
    found = next((line for line in reversed(tail) if _EXCEPTION.match(line)), None)
    return f": {found}" if found else ""


def _short(instruction: str) -> str:
    """A run by its task alone; other instructions by their beginning."""
    run = _RUN.match(instruction)
    if run:
        return run[1] + (run[2] or "")
    return instruction if len(instruction) <= _MOST_CHARS else f"{instruction[:_MOST_CHARS]} ..."


def abandoned(error: ActorError, message: str, cls: type[ActorError], **where: Any) -> ActorError:
    """An error of `cls` that hangs below `error`, its cause."""
    result = cls(message, **where)
    result.__cause__ = error
    return result


def _place(actor: ActorInfo, step: StepId | None = None) -> dict[str, Any]:
    where: dict[str, Any] = {"actor": actor.id, "host": actor.host, "pid": actor.pid}
    return where if step is None else {**where, "step": step_number(step)}
