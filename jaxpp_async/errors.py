"""Define the errors of this package; all that a user can catch from it derive from `JaxppAsyncError`."""

from __future__ import annotations


class JaxppAsyncError(Exception):
    """Base of every error of this package."""


# ---------------------------------------------------------------- raised before any actor runs


class UnsupportedError(JaxppAsyncError):
    """The program cannot be pipelined.

    The message names the primitive, the stage and the user's line, and says what to change.
    """


class ScheduleError(JaxppAsyncError, ValueError):
    """A schedule has a wrong number of stages, a task twice, missing or too early, or it deadlocks."""


class StageError(JaxppAsyncError, ValueError):
    """A stage needs a later stage's value in the same microbatch, or a loop has no usable microbatch axis."""


class ShardingError(JaxppAsyncError, ValueError):
    """A sharding names an unknown mesh axis or logical axis, or does not divide an array."""


class MeshError(JaxppAsyncError, ValueError):
    """A mesh asks for what the hosts do not have, or is used before it starts or after it has closed."""


class ArrayError(JaxppAsyncError, ValueError):
    """A `RemoteArray` cannot be used: another mesh's, donated, deleted, lost, or given to JAX as a value."""


class InstallError(JaxppAsyncError, ImportError):
    """A package that the requested feature needs is missing; the message names the extra that brings it."""


# ---------------------------------------------------------------- raised while actors run


class ActorError(JaxppAsyncError):
    """Something failed on an actor, or between two actors.

    Attributes:
        actor: id of the actor, or None.
        host: name of its host, or None.
        pid: id of its process, or None.
        step: number of the user's step that was under way, or for which an argument was being moved, counted
            from 0 over the mesh's life; or None.
        instruction: text of the instruction under way, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        actor: int | None = None,
        host: str | None = None,
        pid: int | None = None,
        step: int | None = None,
        instruction: str | None = None,
    ):
        super().__init__(message)
        self.actor, self.host, self.pid, self.step, self.instruction = actor, host, pid, step, instruction


class LaunchError(ActorError):
    """An actor could not be started, or did not report in time."""


class ActorDiedError(ActorError):
    """An actor's process ended. The message has the signal or exit code and the end of its stderr."""


class StateLostError(ActorDiedError):
    """An actor was lost together with the one that held its arrays' copy: no restart can bring them back."""


class ActorUnresponsiveError(ActorError):
    """An actor's heartbeats stopped, or a step made no progress."""


class RemoteError(ActorError):
    """Code failed on an actor.

    Attributes:
        exception_type: qualified name of the remote exception's type.
        remote_traceback: the remote traceback, as text (remote exceptions are never unpickled).
    """

    def __init__(self, message: str, *, exception_type: str = "", remote_traceback: str = "", **where):
        super().__init__(message, **where)
        self.exception_type, self.remote_traceback = exception_type, remote_traceback


class TransferError(ActorError):
    """A transfer between two actors failed. The message names both and the buffer."""


class ProtocolError(ActorError):
    """A peer sent something that the protocol forbids: a wrong size, sequence number, MAC or message."""


class HandshakeError(ProtocolError):
    """A peer could not prove that it belongs to this mesh, or runs other versions."""


class StepAbortedError(ActorError):
    """This step was ended because of another failure, which is its `__cause__`."""


class MeshClosedError(ActorError):
    """The mesh closed, or died of an earlier failure, which is then the `__cause__`."""


class CheckpointError(JaxppAsyncError):
    """A checkpoint could not be written or read; the message names the path and the cause."""


class RestartBudgetExceeded(ActorError):
    """Actors died more often than `max_restarts` allows."""
