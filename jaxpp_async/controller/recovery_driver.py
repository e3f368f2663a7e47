"""Carry out what the state machine of restarts decides, and report the outcomes to it.

`recovery` decides without waiting. This module waits: it ends and starts processes, renews and connects the
data plane (the transport for arrays), loads programs, moves replicas of the state, and has requests made
again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, Final

from jaxpp_async.base.printable import first_line
from jaxpp_async.controller import recovery as r
from jaxpp_async.controller import state_replicas as s
from jaxpp_async.controller.actor_group import ActorGroup
from jaxpp_async.controller.deploy import LinkSetup, LoadedPrograms
from jaxpp_async.controller.error_messages import location
from jaxpp_async.controller.health_monitor import HealthMonitor
from jaxpp_async.controller.options import ControllerOptions
from jaxpp_async.controller.requests import Requests
from jaxpp_async.controller.stall_detector import SLOW_BYTES_PER_S
from jaxpp_async.errors import (
    ActorError,
    ActorUnresponsiveError,
    MeshError,
    RemoteError,
    TransferError,
)
from jaxpp_async.layout.state_replicas import ReplicaStore
from jaxpp_async.program.instructions import CONTROLLER, ActorId, ProcessId
from jaxpp_async.protocol.messages import (
    DropReplicas,
    ReceiveReplica,
    Rollback,
    SendReplica,
    TakeReplica,
)
from jaxpp_async.protocol.task_group import OwnedTasks, all_of, awake_timeout

_LOG = logging.getLogger("jaxpp_async")

ABORT_S, CONNECT_S = 10.0, 30.0
"""The most seconds that a living actor may take to drop its work and to make a new end of the data plane, and
the most seconds that all actors may take to connect these ends.
"""

ROLLBACK_S = 30.0
"""The seconds within which all actors have to restore their arrays; each 50 MB of arrays add a second."""

_SECURE_ATTEMPTS, _SAVE_POLL_S = 10, 0.1


class RecoveryDriver:
    """The component that carries out the commands of a `Recovery`.

    Args:
        recovery: the state machine, to which all events are reported through `handle`.
        actor_group: the actors' processes.
        requests: sends the requests, and sends them again in a restart.
        programs: the programs that replaced actors have to load again.
        linking: makes the NCCL links between actors again.
        health_monitor: watches the processes that are started.
        options: the deadline of transfers.
        suspect: called with the error of a transfer that may be only the consequence of another failure.
        on_restarted: called when a restart has succeeded, with the replaced actors, the number of steps that
            had already finished and are run again, and the seconds since the failure.
        end: called with the error with which the mesh has to end, and with the process that died, or None.
    """

    def __init__(
        self,
        recovery: r.Recovery,
        actor_group: ActorGroup,
        requests: Requests,
        programs: LoadedPrograms,
        linking: LinkSetup,
        health_monitor: HealthMonitor,
        options: ControllerOptions,
        *,
        suspect: Callable[[TransferError], None],
        on_restarted: Callable[[tuple[ActorId, ...], int, float], None],
        end: Callable[[ActorError, ProcessId | None], None],
    ):
        self.recovery = recovery
        self._actor_group, self._requests, self._programs = actor_group, requests, programs
        self._linking, self._health_monitor = linking, health_monitor
        self._patience_s, self._replica_every = options.progress_s, options.backup_every
        self._suspect, self._on_restarted, self._end = suspect, on_restarted, end
        self._replica_store = ReplicaStore()
        self._tasks = OwnedTasks()
        self._no_replica_in_making = asyncio.Event()

    def handle(self, event: r.Event) -> None:
        """Report an event to the state machine, and begin to carry out the commands that follow.

        The outcome of a command is reported as another event, after this method has returned. A command that
        acts at once and succeeds has no outcome.
        """
        commands = self.recovery.handle(event, time.monotonic())
        epoch = self.recovery.epoch
        for command in commands:
            try:
                work = _CARRY_OUT[type(command)](self, command)
            except Exception as error:
                # Not in a task, which `StopWork` could cancel. The mesh would then hang in a restart.
                asyncio.get_running_loop().call_soon(self._report_failure, command, epoch, error)
                continue
            if work is not None:
                task = self._tasks.start(
                    f"recovery: {type(command).__name__}", self._report(command, epoch, work)
                )
                # A task that is cancelled before it has begun leaves its work behind.
                task.add_done_callback(lambda _, work=work: work.close())
        if self.recovery.replicas.stage is s.Stage.IDLE:
            self._no_replica_in_making.set()
        else:
            self._no_replica_in_making.clear()

    async def aclose(self) -> None:
        """Cancel a restart or a replica that is under way, and begin none any more."""
        self.handle(r.MeshClosed())
        await self._tasks.aclose()

    async def make_replica(self) -> None:
        """Make a replica (a copy of the actors' arrays), or wait for the one that is being made, and return
        when it is whole or has been given up.
        """
        self.handle(r.ReplicaWanted())
        await self._no_replica_in_making.wait()

    async def secure(self) -> None:
        """Wait until a whole replica contains all arrays that were read from files, so that the files may be
        deleted.

        A replica is a copy of the actors' arrays, kept for restarts; without one, a restart would read the
        files again. If several attempts fail, this logs a warning and returns.
        """
        attempts, history = 0, self.recovery.history
        while history.needs_files:
            await self._requests.wait_open()
            if history.blocks_replicas:
                await asyncio.sleep(_SAVE_POLL_S)  # the end of a save has no event to wait for
            elif attempts < _SECURE_ATTEMPTS:
                attempts += 1
                await self.make_replica()
            else:
                _LOG.warning(
                    "no replica has the restored arrays: keep the files, a restart would read them again"
                )
                return

    async def _report(self, command: r.Command, epoch: int, work: Coroutine[Any, Any, object]) -> None:
        """Wait until a command has been carried out, and report the outcome.

        Args:
            command: the command.
            epoch: the epoch in which the command was given.
            work: the work that carries it out.
        """
        try:
            result = await work
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Not by `StopWork`: something that the command awaited was cancelled. Nobody would hear of it.
            self._report_failure(command, epoch, RuntimeError(f"its work was cancelled: {error!r}"))
        except Exception as error:
            self._report_failure(command, epoch, error)
        else:
            self.handle(r.CarriedOut(epoch, command, result))

    def _report_failure(self, command: r.Command, epoch: int, error: Exception) -> None:
        if not isinstance(error, ActorError | MeshError):  # a bug, or a launcher's own error
            _LOG.error("%s failed", command, exc_info=error)
        self.handle(r.NotCarriedOut(epoch, command, error))

    # ------------------------------------------------------------ the course of a restart

    def _hold_back(self, command: r.HoldBack) -> None:
        error, actor_group = command.error, self._actor_group
        where = {"actor": error.actor, "host": error.host, "step": error.step}
        _LOG.warning("restarting because of a failure: %s", error, extra=where)
        self._requests.hold_back()
        for actor in actor_group.actors:
            actor_group.set_state(actor, "restarting" if actor in command.lost else "waiting")
        for process in actor_group.processes.processes_of_all(command.lost):
            self._health_monitor.unwatch(process)

    def _stop_work(self, command: r.StopWork) -> Coroutine[Any, Any, None]:
        # At once: if they sent a request now, the abort would fail it, and that would be another failure.
        cancelled = self._tasks.cancel()
        self._linking.cancel()
        return self._stopped(cancelled)

    async def _stopped(self, cancelled: Collection[asyncio.Task[None]]) -> None:
        if cancelled:
            await asyncio.wait(cancelled)
        await self._linking.aclose()

    def _pause(self, command: r.WakeUp) -> Coroutine[Any, Any, None]:
        if command.note:
            _LOG.warning("%s", command.note)
        return asyncio.sleep(command.after_s)

    async def _start_successor(self, command: r.StartSuccessor) -> None:
        for link in await self._actor_group.start_actor(command.actor):
            self._health_monitor.watch(link)

    async def _renew_transport(self, command: r.RenewTransport) -> None:
        process = command.process
        if process is None:
            await self._actor_group.reset_host_transport()
            return
        try:
            async with awake_timeout(ABORT_S):
                await self._actor_group.abort(process, command.cause)
                await self._actor_group.reset_transport(process)
        except (TimeoutError, RemoteError) as error:
            info = self._actor_group.links[process].info
            why = str(error) or "no answer"
            what = f"{info} did not drop its work within {ABORT_S:g} s of a failure elsewhere: {why}"
            raise ActorUnresponsiveError(what, **location(info)) from error

    async def _connect(self, command: r.ConnectAll) -> None:
        self._actor_group.check_devices()
        try:
            async with awake_timeout(CONNECT_S):
                await self._actor_group.connect()
        except TimeoutError:
            raise TransferError(
                f"the data plane could not be connected anew within {CONNECT_S:g} s"
            ) from None

    async def _load(self, command: r.LoadPrograms) -> None:
        link = self._actor_group.links[command.process]
        actor = link.info.id
        sent: set[str] = set()  # those that `link` knows may be in requests that wait for the restart's end
        for program_id in self._programs.programs_of(actor):
            message = self._programs.load_message(program_id, actor, sent)
            await self._requests.call(command.process, message, in_restart=True)
        link.known_blobs |= sent

    async def _roll_back(self, command: r.RollBack) -> None:
        message = Rollback(command.generation)
        try:
            async with awake_timeout(ROLLBACK_S + command.size_bytes / SLOW_BYTES_PER_S):
                everyone = self._actor_group.processes.everyone
                await self._requests.call_each(dict.fromkeys(everyone, message), "roll back")
        except TimeoutError:
            raise ActorUnresponsiveError(
                "actors did not go back to the last replica of their arrays in time"
            ) from None

    def _resume(self, command: r.Resume) -> None:
        for actor in self._actor_group.actors:
            self._actor_group.set_state(actor, "ready")
        steps = self._requests.resume(command.requests, self.recovery.epoch)
        _LOG.warning(
            "replaced actors %s in %.1f s; %d step%s run again",
            list(command.replaced),
            command.took_s,
            steps,
            "s" * (steps != 1),
        )
        self._on_restarted(command.replaced, steps, command.took_s)

    # ------------------------------------------------------------ replicas

    def _copy_state(self, command: s.CopyState) -> Coroutine[Any, Any, s.StateCopy]:
        # Sent at once, so that the copy has its place among the requests.
        asked = self._requests.send(command.process, TakeReplica(command.generation), awaited=False)
        return self._state_copy(command.process, asked)

    async def _state_copy(self, process: ProcessId, asked: Awaitable[Any]) -> s.StateCopy:
        return s.StateCopy((await asked).arrays, self._actor_group.links[process].info.host)

    async def _move_part(self, command: s.MovePart) -> None:
        epoch, owner = self.recovery.epoch, command.owner
        receive = ReceiveReplica(epoch, command.generation, owner, command.source, command.arrays)
        send = SendReplica(epoch, command.generation, owner, command.to)
        ends = {command.to: self._move_end(command.to, receive)}
        ends[command.source] = self._move_end(command.source, send)
        try:
            async with awake_timeout(self._patience_s + command.total_bytes / SLOW_BYTES_PER_S):
                await all_of(ends, f"move the replica of process {owner}")
        except TimeoutError:
            raise self._slow_link(command) from None

    async def _move_end(self, process: ProcessId, message: ReceiveReplica | SendReplica) -> None:
        """Have a process send or receive one part of a replica, and wait until this is done.

        Args:
            process: the process that sends or receives: an actor process or the controller.
            message: the part and the process at the other end.
        """
        if process != CONTROLLER:
            await self._requests.send(process, message, awaited=False)
        elif isinstance(message, ReceiveReplica):
            await self._replica_store.receive(self._actor_group.host_transfers.transport, message)
        else:
            await self._replica_store.send(self._actor_group.host_transfers.transport, message)

    def _slow_link(self, command: s.MovePart) -> TransferError:
        actor_of = self._actor_group.processes.actor_of
        owner, source, to = map(actor_of, (command.owner, command.source, command.to))
        link = (
            "with the controller"
            if CONTROLLER in (command.source, command.to)
            else f"between actors {source} and {to}"
        )
        what = f"the replica of actor {owner}'s arrays does not arrive: the link {link} is broken"
        return TransferError(f"{what}, or slower than 50 MB/s (progress_timeout_s)", actor=to)

    async def _await_answers(self, command: s.AwaitAnswers) -> None:
        for request in self.recovery.history.unanswered(command.mark):
            answered = asyncio.Event()
            request.waiter.when_done(answered.set)
            await answered.wait()

    def _drop_others(self, command: s.DropOthers) -> None:
        self._replica_store.keep_only(command.generation)
        for process in self._actor_group.processes.everyone:
            self._requests.send(process, DropReplicas(command.generation), awaited=False)
        _LOG.debug("replica %d of the state is whole", command.generation)

    def _give_up_replica(self, command: r.GiveUpReplica) -> None:
        if isinstance(command.error, TransferError):
            self._suspect(command.error)
        elif isinstance(command.error, RemoteError):  # such as too little memory; the previous one is valid
            _LOG.warning(
                "no replica of the state could be made, the next is tried in %d steps: %s",
                self._replica_every,
                command.error,
            )
        else:  # the mesh has ended, and later calls raise the reason
            _LOG.debug("a replica of the state was not finished: %s", first_line(command.error))


_CARRY_OUT: Final[dict[type, Callable[[RecoveryDriver, Any], Coroutine[Any, Any, object] | None]]] = {
    r.HoldBack: RecoveryDriver._hold_back,
    r.StopWork: RecoveryDriver._stop_work,
    r.Reap: lambda driver, command: driver._actor_group.remove(command.actor),
    r.StartSuccessor: RecoveryDriver._start_successor,
    r.RenewTransport: RecoveryDriver._renew_transport,
    r.ConnectAll: RecoveryDriver._connect,
    r.LoadPrograms: RecoveryDriver._load,
    r.MakeLinks: lambda driver, command: driver._linking.link_again(),
    s.MovePart: RecoveryDriver._move_part,
    r.RollBack: RecoveryDriver._roll_back,
    r.Resume: RecoveryDriver._resume,
    r.WakeUp: RecoveryDriver._pause,
    r.EndMesh: lambda driver, command: driver._end(command.error, command.dead),
    s.CopyState: RecoveryDriver._copy_state,
    s.AwaitAnswers: RecoveryDriver._await_answers,
    s.DropOthers: RecoveryDriver._drop_others,
    r.GiveUpReplica: RecoveryDriver._give_up_replica,
}
"""How each command is carried out: at once, or by a coroutine whose outcome is reported."""
