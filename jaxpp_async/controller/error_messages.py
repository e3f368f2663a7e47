"""Build the errors about actors that a user reads, from the known facts of a failure.

All functions are pure.
"""

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
from jaxpp_async.protocol.actor_info import ActorInfo, ExitCode, ProcessRank
from jaxpp_async.protocol.messages import Failed, StepId, step_number, step_text

if TYPE_CHECKING:
    from jaxpp_async.launch import ActorHandle
    from jaxpp_async.launch.process_supervisor import Death

_CONSEQUENCES = ("TransferError", "StepAbortedError", "CancelledError")
"""Remote exceptions that usually follow from another actor's death, which may be noticed a moment later."""

_OF_OTHER_PROCESSES = ("JaxRuntimeError", "XlaRuntimeError")
_COLLECTIVE = re.compile(r"\b(Gloo|NCCL|[Cc]oordination service)\b")
"""The words by which XLA's error for a collective that another process has left is recognized, whose type
does not tell: after a reset of the connection it is a ValueError.
"""

_OF_A_STEP: dict[str, type[ActorError]] = {
    f"{c.__module__}.{c.__name__}": c for c in (ProtocolError, TransferError)
}
"""The errors of an actor that fail a step without any user code being involved, by qualified name. The user
gets an error of the same class.
"""

_EXIT_REASONS: dict[int, str] = {
    ExitCode.CRASH: "it raised outside any request",
    ExitCode.CONFIG: "its configuration on stdin was unusable",
    ExitCode.CONTROLLER_GONE: "its stdin reached end of file: the controller was gone",
    ExitCode.LEASE_EXPIRED: "the driver, this process, was silent for longer than lease_s: it, or the "
    "host agent on the actor's host, was stopped, or a native call held Python's GIL",
    ExitCode.REFUSED: "the handshake with the controller failed",
    ExitCode.CONNECTION_LOST: "its control connection broke",
    ExitCode.HOST_LOST: "unknown how: the connection to its host ended",
}
"""The meanings of the exit codes with which an actor process reports a failure."""

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
    """Return whether a failure is probably only a consequence of another failure.

    Args:
        failed: the failure that a process reported.
        of_several: whether the process is one of several that compute together for one actor. If so, an XLA
            error that says that another process is gone also counts as a consequence.
    """
    kind = failed.exception_type.rpartition(".")[2]
    of_another = kind in _OF_OTHER_PROCESSES or _COLLECTIVE.search(failed.message) is not None
    return kind in _CONSEQUENCES or (of_several and of_another)


def follows_first_process(process: ActorInfo, death: Death) -> bool:
    """Return whether a process probably ended only because the first process of its actor had ended.

    JAX aborts the other processes of an actor when the first one is gone.
    """
    return process.rank > 0 and death.returncode == -signal.SIGABRT


def remote_error(actor: ActorInfo, failed: Failed, *, ends_mesh: bool = False) -> ActorError:
    """Return the error for a request that failed on an actor.

    If a step failed because the actor raised a `ProtocolError` or a `TransferError`, the result has that
    class. Otherwise the result is a `RemoteError`, with the exception that `ends_mesh` describes.

    Args:
        actor: the actor process that reported the failure.
        failed: the failure that the process reported.
        ends_mesh: whether the failure ends the whole mesh and not only one request. If so, a `TransferError`
            of the actor results in a `TransferError` even if it did not happen in a step.
    """
    where = str(actor)
    if failed.step is not None:
        where += f", {step_text(failed.step)}"
    if failed.instruction is not None:
        where += f", {_short(failed.instruction)}"
    # The first line must tell the cause by itself, since a log or a progress bar may show only that.
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
    """Return the error for an actor process that ended unexpectedly.

    Args:
        actor: the actor process.
        death: how the process ended, with the end of its output.
        step: the id of the step that the process was running, or None.
        instruction: the text of the instruction that the process was at in that step, or None if unknown.
    """
    during = f" during {step_text(step)}" if step is not None else ""
    at = f", at {_short(instruction)}" if instruction is not None else ""
    end = describe_end(death.returncode, death.output_tail)
    text = f"{actor} {end}{during}{at}{_last_error(death.output_tail)}{describe_tail(death.output_tail)}"
    return ActorDiedError(text, instruction=instruction, **location(actor, step))


def lost_error(
    actor: ActorInfo, error: Exception | None, tail: Sequence[str], step: StepId | None
) -> ActorDiedError:
    """Return the error for an actor process that still runs but whose control connection has closed.

    Args:
        actor: the actor process.
        error: the error that closed the connection, or None.
        tail: the last lines of the process's output.
        step: the id of the step that the process was running, or None.
    """
    why = f": {error}" if error is not None else ""
    text = f"{actor} closed its control connection though its process still runs{why}{describe_tail(tail)}"
    return ActorDiedError(text, **location(actor, step))


def silent_error(
    actor: ActorInfo, silence_s: float, step: StepId | None, at: str | None
) -> ActorUnresponsiveError:
    """Return the error for an actor whose heartbeats have stopped.

    Args:
        actor: the actor.
        silence_s: the number of seconds for which no heartbeat has arrived.
        step: the id of the step that the actor was running, or None.
        at: the text of the actor's last known position in its program, or None.
    """
    return ActorUnresponsiveError(
        describe_silence(actor, silence_s, at), instruction=at, **location(actor, step)
    )


def describe_silence(actor: ActorInfo, silence_s: float, at: str | None) -> str:
    """Return a sentence that says for how long no heartbeat of an actor has arrived, and lists possible
    reasons.

    Args:
        actor: the actor.
        silence_s: the number of seconds for which no heartbeat has arrived.
        at: the text of the actor's last known position in its program, or None.
    """
    was = f"it was last at {at}; " if at is not None else ""
    return (
        f"{actor} has not been heard of for {silence_s:.1f} s; {was}it may be stopped (SIGSTOP), swapping, "
        "in native code that keeps Python's GIL, or its host or network down"
    )


def stuck_error(diagnosis: StallDiagnosis, still_s: float, actors: Mapping[int, ActorInfo]) -> ActorError:
    """Return the error for a step that makes no progress. The result is a `TransferError` if a transfer was
    lost; otherwise it is an `ActorUnresponsiveError`.

    Args:
        diagnosis: the reason that was found.
        still_s: the number of seconds for which the step has made no progress.
        actors: the description of each actor that has not finished the step, by actor id.
    """
    text = diagnosis.text({a: str(info) for a, info in actors.items()})
    cls = ActorUnresponsiveError if diagnosis.lost is None else TransferError
    info = actors.get(diagnosis.actor) if diagnosis.actor is not None else None
    where: dict[str, Any] = location(info) if info is not None else {}
    said = f"{step_text(diagnosis.step)} has not gone on for {still_s:.1f} s: {text}"
    return cls(said, step=step_number(diagnosis.step), instruction=diagnosis.instruction, **where)


def launch_error(
    process_rank: ProcessRank, what: str, tail: Sequence[str] = (), *, handle: ActorHandle | None = None
) -> LaunchError:
    """Return the error for an actor process that could not be started.

    Args:
        process_rank: the process.
        what: a clause without a subject that says what happened to the process, such as `"did not connect"`.
        tail: the last lines of the process's output.
        handle: the handle of the process; None if it has none.
    """
    where = {} if handle is None else {"host": handle.host, "pid": handle.pid}
    text = f"{process_rank} {what}{_last_error(tail)}{describe_tail(tail)}"
    return LaunchError(text, actor=process_rank.actor, **where)


def describe_end(returncode: int, tail: Sequence[str] = ()) -> str:
    """Return how a process ended, such as `"was killed by SIGKILL"` or `"exited with code 3"`.

    Args:
        returncode: the exit code, or the negated number of the signal that killed the process.
        tail: the last lines of the process's output. If they say that memory ran out, the result says so too.
    """
    hint = " (possibly out of memory)" if any(map(_OUT_OF_MEMORY.search, tail)) else ""
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = f"signal {-returncode}"
        if name == "SIGKILL":  # the kernel sends this when memory runs out
            hint = " (possibly out of memory)"
        return f"was killed by {name}{hint}"
    reason = _EXIT_REASONS.get(returncode)
    return f"exited with code {returncode}" + (f" ({reason})" if reason else hint)


def describe_tail(tail: Sequence[str]) -> str:
    """Return the last lines of an actor's output as text to append to an error message; empty if there are
    none.
    """
    if not tail:
        return ""
    return "\nThe end of its output:\n" + "\n".join(f"  {line}" for line in tail)


def _last_error(tail: Sequence[str]) -> str:
    """Return the last line in an actor's output that names a Python exception, as `": line"`, or an empty
    text if there is none.

    The result is appended to the first line of an error message.
    """
    found = next((line for line in reversed(tail) if _EXCEPTION.match(line)), None)
    return f": {found}" if found else ""


def _short(instruction: str) -> str:
    """Return a short form of an instruction's text: the name of the task for a `Run` instruction; for any
    other instruction, at most the first `_MOST_CHARS` characters.
    """
    run = _RUN.match(instruction)
    if run:
        return run[1] + (run[2] or "")
    return instruction if len(instruction) <= _MOST_CHARS else f"{instruction[:_MOST_CHARS]} ..."


def abandoned(error: ActorError, message: str, cls: type[ActorError], **where: Any) -> ActorError:
    """Return a new error of class `cls` with the text `message`. The `__cause__` of the new error is `error`.

    Args:
        error: the cause.
        message: the message of the new error.
        cls: the class of the new error.
        **where: further keyword arguments of `cls`, such as the actor or the step.
    """
    result = cls(message, **where)
    result.__cause__ = error
    return result


def location(actor: ActorInfo, step: StepId | None = None) -> dict[str, Any]:
    """Return the keyword arguments of an `ActorError` that say where the error happened.

    Args:
        actor: the actor or process; its id, host and pid are in the result.
        step: the id of the step, or None. If given, the result has the user's number of the step.
    """
    where: dict[str, Any] = {"actor": actor.id, "host": actor.host, "pid": actor.pid}
    return where if step is None else {**where, "step": step_number(step)}
