"""Define the errors of this package. All errors that users may want to catch derive from
`JaxppAsyncError`.
"""

from __future__ import annotations


class JaxppAsyncError(Exception):
    """The base class of every error of this package."""


# ---------------------------------------------------------------- raised before any actor runs


class UnsupportedError(JaxppAsyncError):
    """The step function cannot be pipelined.

    The message names the primitive, the stage and the user's line, and says what to change.
    """


class ScheduleError(JaxppAsyncError, ValueError):
    """A schedule is invalid: it has a wrong number of stages, contains a task twice, too early or not at all,
    or deadlocks.
    """


class StageError(JaxppAsyncError, ValueError):
    """A stage needs a later stage's value in the same microbatch, or a loop has no usable microbatch axis."""


class ShardingError(JaxppAsyncError, ValueError):
    """A sharding names an unknown mesh axis or logical axis, or does not divide an array."""


class MeshError(JaxppAsyncError, ValueError):
    """A mesh's options ask for something that the hosts do not have, or the mesh is used before it starts or
    after it has closed.
    """


class ArrayError(JaxppAsyncError, ValueError):
    """A `RemoteArray` cannot be used: it belongs to another mesh, it was donated, deleted or lost, or it was
    passed to a JAX function, which accepts only local values.
    """


class CostError(JaxppAsyncError, ValueError):
    """A cost model cannot be made from these timelines, or read from this file."""


class MissingCost(CostError):
    """A cost model has no cost for a task or a transfer of a step; the message names it."""


class PlanError(JaxppAsyncError, ValueError):
    """A step cannot be planned, since nothing fits into the memory or something that a plan needs is missing;
    or a plan was made for another step, other shapes, another mesh, or by another version.
    """


class TimelineError(JaxppAsyncError, ValueError):
    """A file is no timeline, or one of another version, or it is damaged."""


class PageError(JaxppAsyncError, ValueError):
    """The live page of a run cannot be served, such as at a port that is taken."""


class InstallError(JaxppAsyncError, ImportError):
    """A package that the requested feature needs is missing; the message names the pip extra that installs
    it.
    """


# ---------------------------------------------------------------- raised while actors run


class ActorError(JaxppAsyncError):
    """Something failed on an actor, or between two actors.

    Attributes:
        actor: the id of the actor, or None if the error concerns no single actor.
        host: the name of the actor's host, or None.
        pid: the process id of the actor, or None.
        step: the number of the user's step that was under way, or for which an argument was being moved,
            counted from 0 over the mesh's life; or None.
        instruction: the text of the instruction under way, or None.
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
    """An actor could not be started, or did not report to the controller in time."""


class ActorDiedError(ActorError):
    """An actor was lost: its process ended unexpectedly, or its connection to the controller ended although
    the process may still run.

    If the process ended, the message has its signal or exit code. In both cases the message ends with the
    last lines that the process printed. This error is also raised if lost actors could not be replaced
    because of a bug in this package or an error in the launcher.
    """


class StateLostError(ActorDiedError):
    """An actor was lost together with the actor that kept the copy of its arrays for restarts, so that no
    restart can restore these arrays.
    """


class ActorUnresponsiveError(ActorError):
    """An actor's heartbeats stopped, or a step made no progress."""


class RemoteError(ActorError):
    """Code that ran on an actor raised an exception.

    Attributes:
        exception_type: the qualified name of the remote exception's type.
        remote_traceback: the remote traceback as text (remote exceptions are never unpickled).
    """

    def __init__(self, message: str, *, exception_type: str = "", remote_traceback: str = "", **where):
        super().__init__(message, **where)
        self.exception_type, self.remote_traceback = exception_type, remote_traceback


class TransferError(ActorError):
    """A transfer between two actors failed. The message names both actors and the program's buffer."""


class ProtocolError(ActorError):
    """A peer sent something that the protocol forbids: a wrong size, sequence number, MAC or message."""


class HandshakeError(ProtocolError):
    """A peer could not prove that it belongs to this mesh, or it runs another version of this package."""


class StepAbortedError(ActorError):
    """A step was ended because of another failure, which is the `__cause__` of this error."""


class MeshClosedError(ActorError):
    """The mesh cannot be used any more, because it was closed or because it failed earlier. If it failed, the
    earlier failure is the `__cause__` of this error.
    """


class CheckpointError(JaxppAsyncError):
    """A checkpoint could not be written or read; the message names the path and the cause."""


class RestartBudgetExceeded(ActorError):
    """Actors failed more often than `max_restarts` allows."""
