"""Decide which of several observed failures caused the others, and is the failure to act on.

When an actor dies, the controller often notices three failures, in any order: the death, a lost connection
and a failed transfer. Therefore a failure that may be a consequence of another failure is only suspected. The
policy reports a suspected failure if no cause is observed within `GRACE_S` seconds.

Everything here is pure. `health_monitor`, and whoever else notices a failure, makes the observations;
`controller` passes them on with the time, and decides what to do about a reported failure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from jaxpp_async.controller.error_messages import (
    died_error,
    follows_first_process,
    is_consequence,
    lost_error,
    remote_error,
    silent_error,
    stuck_error,
)
from jaxpp_async.controller.stall_detector import StallDiagnosis
from jaxpp_async.errors import ActorError, ProtocolError, TransferError
from jaxpp_async.program.instructions import ActorId, ProcessId
from jaxpp_async.protocol.actor_info import ActorInfo
from jaxpp_async.protocol.messages import Failed, StepId

if TYPE_CHECKING:
    from jaxpp_async.launch.process_supervisor import Death

GRACE_S = 1.0
"""The seconds for which the report of a failure that may be a consequence is delayed, so that its cause can
be noticed.
"""


# ---------------------------------------------------------------- observations


@dataclass(frozen=True, slots=True)
class ProcessDied:
    """The observation that a process has ended.

    Args:
        info: the process.
        death: how the process ended, with the end of its output.
        step: the id of the step that the process was running, or None.
        instruction: the text of the instruction that the process was at in that step, or None if unknown.
    """

    info: ActorInfo
    death: Death
    step: StepId | None = None
    instruction: str | None = None


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The observation that the control connection of a process has closed.

    Args:
        info: the process.
        error: the error that closed the connection, or None.
        output_tail: the last lines of the process's output.
        step: the id of the step that the process was running, or None.
    """

    info: ActorInfo
    error: Exception | None = None
    output_tail: tuple[str, ...] = ()
    step: StepId | None = None


@dataclass(frozen=True, slots=True)
class FailureReported:
    """The observation that a process has reported a failure that concerns the whole mesh.

    Args:
        info: the process.
        failed: the failure that the process reported.
    """

    info: ActorInfo
    failed: Failed


@dataclass(frozen=True, slots=True)
class ActorSilent:
    """The observation that the heartbeats of a process have stopped for so long that it is given up.

    Args:
        info: the process.
        silence_s: the number of seconds for which no heartbeat has arrived.
        step: the id of the step that the process was running, or None.
        at: the text of the process's last known position in its program, or None.
    """

    info: ActorInfo
    silence_s: float
    step: StepId | None = None
    at: str | None = None


@dataclass(frozen=True, slots=True)
class StepStuck:
    """The observation that a step makes no progress.

    Args:
        diagnosis: the reason that was found.
        still_s: the number of seconds for which the step has made no progress.
        actors: the description of each actor that has not finished the step, by actor id.
    """

    diagnosis: StallDiagnosis
    still_s: float
    actors: Mapping[ActorId, ActorInfo]


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The observation that a transfer failed that the controller made, or asked actors to make for it."""

    error: TransferError


@dataclass(frozen=True, slots=True)
class ProtocolBroken:
    """The observation that a process has sent a message that the protocol does not allow."""

    error: ProtocolError


Observation: TypeAlias = (
    ProcessDied | ConnectionLost | FailureReported | ActorSilent | StepStuck | TransferFailed | ProtocolBroken
)


# ---------------------------------------------------------------- decisions


class _Rule(NamedTuple):
    """The judgement of one kind of observation.

    Args:
        may_follow: returns whether an observation may be a consequence of another failure.
        error: returns the error that describes an observation to the user.
    """

    may_follow: Callable[[Any], bool]
    error: Callable[[Any], ActorError]


_RULES: Mapping[type[Observation], _Rule] = {
    ProcessDied: _Rule(
        lambda seen: follows_first_process(seen.info, seen.death),
        lambda seen: died_error(seen.info, seen.death, seen.step, seen.instruction),
    ),
    ConnectionLost: _Rule(
        lambda _: True, lambda seen: lost_error(seen.info, seen.error, seen.output_tail, seen.step)
    ),
    FailureReported: _Rule(
        lambda seen: is_consequence(seen.failed, of_several=seen.info.size > 1),
        lambda seen: remote_error(seen.info, seen.failed, ends_mesh=True),
    ),
    ActorSilent: _Rule(
        lambda _: False, lambda seen: silent_error(seen.info, seen.silence_s, seen.step, seen.at)
    ),
    StepStuck: _Rule(lambda _: False, lambda seen: stuck_error(seen.diagnosis, seen.still_s, seen.actors)),
    TransferFailed: _Rule(lambda _: True, lambda seen: seen.error),
    ProtocolBroken: _Rule(lambda _: False, lambda seen: seen.error),
}


@dataclass(frozen=True, slots=True)
class FailureFound:
    """The finding that a failure is a cause, and has to be acted on.

    Args:
        error: the error that describes the failure to the user.
        dead: the process that died, or None if the failure is no death.
    """

    error: ActorError
    dead: ProcessId | None = None


class FailurePolicy:
    """A filter for the observed failures of one mesh, which reports causes and drops their consequences.

    At most one failure is suspected at a time. While one is, further failures that may be consequences are
    dropped. All times are in seconds of one clock, which the caller chooses.

    Attributes:
        due_s: the time at which the suspected failure is to be reported (see `judge`), or None if no failure
            is suspected.
    """

    def __init__(self) -> None:
        self.due_s: float | None = None
        self._suspected: FailureFound | None = None

    def observe(self, seen: Observation, now_s: float) -> FailureFound | None:
        """Judge an observation at the time `now_s`.

        Returns:
            The failure, if it is a cause. Any suspected failure is then dropped. None, if the failure may be
            a consequence: it is suspected now, or is dropped because another failure is suspected.
        """
        may_follow, error = _RULES[type(seen)]
        is_suspect = may_follow(seen)
        if is_suspect and self._suspected is not None:
            return None
        failure = FailureFound(error(seen), seen.info.process if isinstance(seen, ProcessDied) else None)
        if is_suspect:
            self._suspected, self.due_s = failure, now_s + GRACE_S
            return None
        self.drop_suspicion()
        return failure

    def judge(self, now_s: float) -> FailureFound | None:
        """Return the suspected failure, if no cause was observed within `GRACE_S` seconds; None otherwise.

        Args:
            now_s: the time. The caller has to call this at the time `due_s`.
        """
        if self.due_s is None or now_s < self.due_s:
            return None
        failure = self._suspected
        self.drop_suspicion()
        return failure

    def drop_suspicion(self) -> None:
        """Drop the suspected failure, if any, because a failure that explains it has been handled."""
        self._suspected = self.due_s = None
