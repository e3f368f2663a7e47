"""Carry out the operations of a mesh on its actors: load programs, run steps, put and fetch values, and close
the mesh.

`Controller` takes programs and numpy arrays, and returns step statistics and numpy arrays. Requests are sent
through `Requests`; the `ActorGroup` owns the processes. The `HealthMonitor` observes what goes wrong, the
`FailurePolicy` decides which failure to act on, and `Recovery` decides whether a restart replaces the lost
actors. If it does not, the failure ends the mesh: every pending request fails, and the other actors are told
to abort. Everything runs on one event loop; only `free` may be called from other threads.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxpp_async.base.events import EventLog
from jaxpp_async.base.install_hints import page
from jaxpp_async.base.spinning import LoopSpin, has_spare_core
from jaxpp_async.controller.actor_group import ActorGroup
from jaxpp_async.controller.deploy import (
    Deployment,
    LinkSetup,
    LoadableProgram,
    LoadedPrograms,
    OnCompiled,
)
from jaxpp_async.controller.error_messages import abandoned
from jaxpp_async.controller.failure_policy import FailureFound, FailurePolicy, Observation, TransferFailed
from jaxpp_async.controller.health_monitor import HealthMonitor
from jaxpp_async.controller.host_values import HostValue, Sending
from jaxpp_async.controller.mesh_events import MeshEvents
from jaxpp_async.controller.options import ControllerOptions
from jaxpp_async.controller.profiling import Profiling
from jaxpp_async.controller.recovery import MeshStarted, Recovery, ReplicaWanted, StepSent
from jaxpp_async.controller.recovery_driver import RecoveryDriver
from jaxpp_async.controller.request_history import OutgoingRequest
from jaxpp_async.controller.requests import ActorLink, FreeList, PendingRequest, Requests
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.errors import (
    ActorDiedError,
    ActorError,
    ActorUnresponsiveError,
    MeshClosedError,
    MeshError,
    TransferError,
)
from jaxpp_async.launch import Launcher
from jaxpp_async.layout.array_parts import Gathering
from jaxpp_async.program.instructions import ActorId, Aval, ProcessId
from jaxpp_async.protocol import messages as m
from jaxpp_async.protocol.actor_info import Activity, ActorInfo, Topology
from jaxpp_async.protocol.clocks import OWN_CLOCK, Clock
from jaxpp_async.protocol.task_group import OwnedTasks, all_of, wait_uninterrupted

_LOG = logging.getLogger("jaxpp_async")


class Controller:
    """The part of a mesh that starts its actors, sends them requests and handles their failures.

    A controller is made by `Controller.start`.

    Attributes:
        cause: the failure that ended the mesh, or None.
        ended: a future that is done as soon as the mesh has failed or its closing has begun.
        requests: sends all requests. Code outside this package may also use it to send a request directly.
        mesh_events: publishes what happens to the mesh as events that the user can read.
        num_steps: the number of steps that the user has started so far, which is also the number of the next
            step.
        profiling: records XLA's profiles of the actors.
        processes: the numbering of the mesh's processes, which says which processes each actor has.
        scattering: a description of how arrays are split over the processes of one actor.
    """

    def __init__(
        self,
        processes: Topology,
        launcher: Launcher,
        options: ControllerOptions,
        *,
        events: EventLog | None,
        on_progress: Callable[[str], None],
    ):
        self.processes = processes
        self._loop = asyncio.get_running_loop()
        self.cause: ActorError | None = None
        self.mesh_events = MeshEvents(events)
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._cause_raised = False
        self._arrays = itertools.count()
        self.num_steps = self._num_ahead = 0
        self._programs, self._frees = LoadedPrograms(processes, options), FreeList()
        self._under_way: dict[int, SubmittedStep] = {}
        self._loop_spin: LoopSpin | None = None
        self._tasks = OwnedTasks()
        self._closing: asyncio.Task[None] | None = None
        links: dict[ProcessId, ActorLink] = {}
        self._recovery = Recovery(
            processes, max_restarts=options.max_restarts, replica_every=options.backup_every
        )
        self.requests = Requests(links, self._recovery, self.check_usable, options.max_frame_bytes)
        self._actor_group = ActorGroup(
            launcher,
            processes,
            options,
            links,
            self.requests,
            self._recovery,
            on_progress=on_progress,
            on_transfer_error=self._on_transfer_error,
            on_routes=self.mesh_events.connected,
        )
        self.scattering = self._actor_group.scattering
        self._failure_policy = FailurePolicy()
        self._grace_timer: asyncio.TimerHandle | None = None
        self._health_monitor = HealthMonitor(
            self._actor_group,
            self._recovery,
            self._programs,
            self._under_way,
            self.mesh_events,
            options,
            self._observe,
        )
        self._clock_of: Callable[[ProcessId], Clock] = self._health_monitor.clocks.clock_of
        self.profiling = Profiling(self._actor_group, self.requests, self._under_way, lambda: self.is_closed)
        self._linking = LinkSetup(self._actor_group, self.requests, self._programs)
        self._deployment = Deployment(
            self._actor_group,
            self.requests,
            self._programs,
            self._linking,
            paused=self._health_monitor.paused,
            on_progress=on_progress,
        )
        self._recovery_driver = RecoveryDriver(
            self._recovery,
            self._actor_group,
            self.requests,
            self._programs,
            self._linking,
            self._health_monitor,
            options,
            suspect=self._on_transfer_error,
            on_restarted=self._on_restarted,
            end=self._end,
        )

    # ------------------------------------------------------------ start

    @classmethod
    async def start(
        cls,
        num_actors: int,
        launcher: Launcher,
        options: ControllerOptions | None = None,
        *,
        events: EventLog | None = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> Controller:
        """Start actors, connect all of them with each other, and return their controller.

        Args:
            num_actors: the number of actors, at least 1.
            launcher: starts the actors' processes; owned by the controller, which also closes it.
            options: how actors are set up, started, watched and replaced; None: the defaults.
            events: the log that gets the events of the mesh; None: they are dropped.
            on_progress: called with a line of text at each stage of launching and loading; None: the lines
                are logged.

        Raises:
            LaunchError: an actor did not start; the error has the end of the actor's output.
            HandshakeError: an actor runs other versions of the package or of JAX.
            MeshError: the devices of the actors cannot be used together, or this process may not open enough
                file descriptors.
        """
        options = options or ControllerOptions()
        processes = Topology(num_actors, options.actors.processes_per_actor)
        self = cls(processes, launcher, options, events=events, on_progress=on_progress or _log_progress)
        actor_group = self._actor_group
        try:
            await actor_group.start()
            for link in actor_group.links.values():
                self._health_monitor.watch(link)
            await actor_group.connect()
            if not actor_group.has_processes:
                self._clock_of = lambda process: OWN_CLOCK
            # Spin only if that takes no core away from an actor.
            if actor_group.has_processes and has_spare_core(
                link.info.host for link in actor_group.links.values()
            ):
                self._loop_spin = LoopSpin(self._loop, lambda: len(self._under_way) > 0)
            self._recovery_driver.handle(MeshStarted())
        except BaseException as error:
            # This includes cancellations: whatever ended the launch, no process may be left behind.
            if isinstance(error, ActorError):
                self._cause_raised, self.cause = True, error
            release = self._release(self._actor_group.kill_all)
            ending = self._loop.create_task(release, name="end a launch that failed")
            await wait_uninterrupted(ending, on_cancel=lambda: None)
            raise
        return self

    # ------------------------------------------------------------ state

    @property
    def actors(self) -> tuple[ActorInfo, ...]:
        """The host, processes, devices and state of each actor, in order of id."""
        return self._actor_group.infos

    @property
    def is_closed(self) -> bool:
        """Whether the mesh has failed, has been closed, or is being closed."""
        return self.cause is not None or self._closing is not None

    @property
    def num_under_way(self) -> int:
        """The number of programs that have been sent and have not ended: steps, and moves of arrays."""
        return len(self._under_way)

    @property
    def under_way_since_s(self) -> float | None:
        """The time at which the oldest step under way was sent, in `time.monotonic()`; None without one."""
        return min((step.sent_s for step in self._under_way.values()), default=None)

    def activities(self) -> dict[ActorId, Activity]:
        """Return what each actor does that has not finished all steps, by the actor's id.

        Nobody is asked: this is what actors' last heartbeats and the pages of their progress say.
        """
        return self._health_monitor.activities()

    def device_bytes(self, actor: ActorId) -> int | None:
        """Return the memory of each device of an actor; None if it is not known.

        The memory of a CPU is that of its host, of which each of the mesh's devices there has an equal part.
        That of other hosts is not known.

        Args:
            actor: the id of the actor.
        """
        hardware = self._actor_group.hardware.get(self.processes.process(actor, 0))
        if hardware is not None and hardware.memory_bytes:
            return hardware.memory_bytes
        here, actors = socket.gethostname(), self.actors
        if actor not in {each.id for each in actors if each.host == here}:
            return None
        host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return host_bytes // max(1, sum(len(each.devices) for each in actors if each.host == here))

    # ------------------------------------------------------------ programs and steps

    def new_array_id(self) -> m.ArrayId:
        """Return an id that no array of this mesh has had before."""
        return next(self._arrays)

    async def load(
        self, program: LoadableProgram, on_compiled: OnCompiled = lambda *_: None
    ) -> tuple[int, dict[ActorId, m.Loaded]]:
        """Compile one program on every actor that runs a part of it.

        Loading has no time limit. If an actor dies and is not replaced, loading fails.

        Args:
            program: the program.
            on_compiled: called whenever an actor has compiled an executable.

        Returns:
            The id by which `start_step` runs the program, and the reply of each actor's first process, by
            actor.

        Raises:
            RemoteError: an executable does not compile; the mesh remains usable.
            ActorError: the mesh failed.
        """
        self.check_usable()
        return await self._deployment.deploy(program, on_compiled)

    def start_step(
        self,
        step: SubmittedStep,
        inputs: Mapping[ActorId, dict[int, m.ArrayId]],
        outputs: Mapping[ActorId, dict[int, m.ArrayId]],
        *,
        puts: Mapping[ActorId, Sequence[HostValue]] | None = None,
        frees_before: Mapping[ActorId, Sequence[m.ArrayId]] = {},
        frees_after: Mapping[ActorId, Sequence[m.ArrayId]] | None = None,
    ) -> SubmittedStep:
        """Send a step of a loaded program to its actors, and return the step.

        This sends one control message to each process that takes part. Steps run in the order in which this
        method is called.

        Args:
            step: the step. Only steps of the kind `"step"` count in `num_steps`.
            inputs: for each actor a dictionary. Its keys are the numbers of the step arguments that the actor
                reads; its values are the array ids of these arguments. The controller keeps `inputs` and
                `outputs`, so the caller must not change them any more.
            outputs: for each actor a dictionary. Its keys are the numbers of the results that the actor
                makes; its values are the new array ids of these results.
            puts: host values (numpy arrays of this process) to send to each actor ahead of the step. The
                arrays must not change until the step's `wait_sent` has returned.
            frees_before: arrays to free on each actor before the step begins. If the step cannot be sent,
                they are not freed.
            frees_after: arrays to free on each actor when the step has finished.

        Raises:
            MeshClosedError: the mesh is closed or has failed.
            MeshError: a message cannot be encoded; nothing of the step was sent.
        """
        self.check_usable()
        program_id = step.program_id
        processes_by_actor = self._programs.processes_by_actor(program_id)
        step.assign(
            m.step_id(self.num_steps, step.kind, self._num_ahead),
            [process for _, processes in processes_by_actor for process in processes],
            self._programs.parts(program_id),
            self._clock_of,
        )
        frees, epoch = self._frees.take(), self._recovery.epoch
        posts: list[OutgoingRequest] = []
        freed = dict(frees)
        for actor, processes in processes_by_actor:
            values = puts.get(actor) if puts else None
            small, large = self._actor_group.host_transfers.prepare(actor, values) if values else ((), {})
            before = frees.pop(actor, ())
            message = m.Step(
                epoch,
                step.id,
                program_id,
                inputs.get(actor) or {},
                outputs.get(actor) or {},
                small,
                (*before, *frees_before.get(actor, ())) if frees_before else before,
                tuple(frees_after.get(actor, ())) if frees_after else (),
            )
            for process in processes:
                posts.append(self._with_values(process, message, step, large.get(process, ()), step.sends))
        try:
            self.requests.post(*posts)
        except MeshError:  # a message cannot be encoded: nothing was sent
            self._frees.give_back(freed)
            raise
        if step.kind == "step":
            self.num_steps, self._num_ahead = self.num_steps + 1, 0
        else:
            self._num_ahead += 1
        step.is_sent = True
        self._under_way[step.id] = step
        step.when_done(partial(self._under_way.pop, step.id, None))
        if frees:
            self._frees.give_back(frees)  # those of actors that have no part in this step
        if frees_before:
            running = dict(processes_by_actor)
            self._frees.give_back({a: ids for a, ids in frees_before.items() if a not in running})
        if self._recovery.is_enabled:
            self._recovery_driver.handle(StepSent())
        if self._loop_spin is not None:
            step.when_done(self._loop_spin.end)
            self._loop_spin.begin()
        if not processes_by_actor:
            step.finish()
        return step

    # ------------------------------------------------------------ values

    async def put(self, values: Mapping[ActorId, Sequence[HostValue]]) -> None:
        """Store numpy arrays on actors outside of a step; return when the actors have them.

        Args:
            values: for each actor, the arrays with the ids under which the actor stores them.

        Raises:
            ActorError: an actor or the mesh failed.
        """
        self.check_usable()
        frees, calls, posts = self._frees.take(), dict[ProcessId, PendingRequest](), list[OutgoingRequest]()
        for actor in sorted(set(values) | set(frees)):
            small, large = self._actor_group.host_transfers.prepare(actor, values.get(actor, ()))
            for process in self.processes.processes_of(actor):
                calls[process] = PendingRequest()
                message = m.Store(small, frees.get(actor, ()))
                posts.append(self._with_values(process, message, calls[process], large.get(process, ()), []))
        try:
            self.requests.post(*posts)
        except MeshError:  # one of them cannot be encoded: nothing was sent
            self._frees.give_back(frees)
            raise
        await all_of(
            {process: self.requests.reply_to(process, call) for process, call in calls.items()}, "put"
        )

    async def fetch(self, wanted: Sequence[tuple[ActorId, m.ArrayId, Aval]]) -> list[np.ndarray[Any, Any]]:
        """Copy arrays from actors to the controller, and return them whole, in the order asked for. Arrays
        that are no longer needed are freed first.

        Args:
            wanted: the actor, array id and aval of each array. A PRNG key array is returned as its `uint32`
                data.

        Raises:
            RemoteError: an actor does not have the array; the mesh remains usable.
            ActorError: the mesh failed.
        """
        return await self.start_fetch(wanted)

    def start_fetch(
        self, wanted: Sequence[tuple[ActorId, m.ArrayId, Aval]], *, awaited: bool = True
    ) -> Coroutine[Any, Any, list[np.ndarray[Any, Any]]]:
        """Send the requests of a `fetch` before this method returns, so that a step that is started later
        cannot donate the arrays first. Return a coroutine that returns the arrays.

        Args:
            wanted: as for `fetch`; the errors are the same.
            awaited: whether a caller gets the error if the mesh fails; see `Requests.send`.
        """
        self.check_usable()
        for actor, array_ids in self._frees.take().items():
            for process in self.processes.processes_of(actor):
                self.requests.send(process, m.Store((), array_ids), awaited=False)
        gathering = Gathering(wanted, self.scattering)
        fetches = {
            process: self._fetch_from(process, asked, awaited)
            for process, asked in gathering.requests.items()
        }

        async def gathered() -> list[np.ndarray[Any, Any]]:
            return gathering.arrays(await all_of(fetches, "fetch"))

        return gathered()

    def free(self, actor: ActorId, array_id: m.ArrayId) -> None:
        """Free an array of an actor. The array's id is sent along with the next step or other request that
        frees arrays.

        This may be called from any thread, also during garbage collection.
        """
        self._frees.add(actor, array_id)

    def _with_values(
        self,
        process: ProcessId,
        message: m.Step | m.Store,
        waiter: PendingRequest | SubmittedStep,
        large: Sequence[Sending],
        sends: list[asyncio.Future[None]],
    ) -> OutgoingRequest:
        """Make a request that starts the transfers of its large host values each time that the request is
        sent.

        Args:
            process: the process to send to.
            message: the request.
            waiter: receives the reply.
            large: the sequence number and bytes of each large host value (numpy array), which is sent over
                the data plane.
            sends: a list to which one future per transfer is added each time that the request is sent.
        """
        if not large:
            return OutgoingRequest(process, message, waiter)
        size_bytes = sum(data.nbytes for _, data in large)
        return OutgoingRequest(
            process,
            message,
            waiter,
            lambda: sends.extend(self._actor_group.host_transfers.send(process, large)),
            size_bytes,
        )

    def _fetch_from(
        self, process: ProcessId, wanted: Sequence[tuple[m.ArrayId, Aval]], awaited: bool
    ) -> Coroutine[Any, Any, list[np.ndarray[Any, Any]]]:
        """Send a request for arrays of one process immediately, and return a coroutine that returns the
        arrays; `awaited` is as in `start_fetch`.
        """
        message, fetch = self._actor_group.host_transfers.fetch(process, wanted, awaited=awaited)
        self.requests.post(OutgoingRequest(process, message, fetch, fetch.start))
        return self.requests.reply_to(process, fetch)

    # ------------------------------------------------------------ saves

    async def secure(self) -> None:
        """Wait until a restart would no longer read arrays from files again, so that the files may be
        deleted.

        A restart replaces lost actors and restores the actors' arrays. Without `max_restarts` there are no
        restarts, and this returns immediately.

        Raises:
            MeshClosedError: the mesh is closed or has failed.
        """
        if self._recovery.is_enabled:
            await self._recovery_driver.secure()
        self.check_usable()

    def before_save(self) -> None:
        """Start a replica (a copy of the actors' arrays, kept for restarts) if one is due.

        This is called before each save, because no replica can start during a save.

        Without `max_restarts` there are no replicas, and this does nothing.
        """
        self._recovery_driver.handle(ReplicaWanted(if_due=True))

    # ------------------------------------------------------------ failures

    def _observe(self, seen: Observation) -> None:
        """Let the failure policy judge an observation, and act on the failure that it reports, if any."""
        if not self.is_closed:
            self._act_on(self._failure_policy.observe(seen, self._loop.time()))

    def _on_transfer_error(self, error: TransferError) -> None:
        # A restart aborts all transfers, and its own commands tell of transfers that fail.
        if not self._recovery.is_restarting:
            self._observe(TransferFailed(error))

    def _end_grace(self, now_s: float) -> None:
        if not self.is_closed:
            self._act_on(self._failure_policy.judge(now_s))

    def _drop_suspicion(self) -> None:
        self._failure_policy.drop_suspicion()
        self._set_grace_timer()

    def _set_grace_timer(self) -> None:
        if self._grace_timer is not None:
            self._grace_timer.cancel()
        due_s = self._failure_policy.due_s
        if due_s is not None:
            self._grace_timer = self._loop.call_at(due_s, self._end_grace, due_s)

    def _on_restarted(self, actors: Sequence[ActorId], steps: int, seconds: float) -> None:
        self._drop_suspicion()
        self.mesh_events.restarted([self._actor_group.info(actor) for actor in actors], steps, seconds)

    def _act_on(self, failure: FailureFound | None) -> None:
        """Let the recovery decide about a failure that the failure policy reports: it begins a restart, or
        ends the mesh.

        Args:
            failure: the failure; None: the policy reports none, and may suspect one.
        """
        self._set_grace_timer()
        if failure is None:
            return
        self.mesh_events.failed(failure.error)
        self._recovery_driver.handle(failure)

    def _end(self, error: ActorError, dead: ProcessId | None) -> None:
        """End the mesh because of `error`. If the mesh has already ended, do nothing, so that the first cause
        is kept.

        Args:
            error: the cause.
            dead: the process that died, or None.
        """
        if self.is_closed:
            return
        self.cause = error
        self.ended.set_result(None)
        self._drop_suspicion()
        _LOG.debug("the mesh failed: %s", error)
        lost = self.processes.actor_of(dead) if dead is not None else None
        for actor in self._actor_group.actors:
            self._actor_group.set_state(actor, "failed" if actor in (lost, error.actor) else "closed")
        if not self._recovery.is_enabled and isinstance(error, ActorDiedError | ActorUnresponsiveError):
            more = f"see {page('restarts.md')}"
            error.add_note(
                f"RemoteMesh(max_restarts=n) replaces actors that die or hang, and goes on: {more}"
            )
        if isinstance(error, ActorUnresponsiveError) and error.actor is not None:
            for process in self.processes.processes_of(error.actor):
                self._actor_group.handles[process].kill()  # closing would wait for it
        step = min((s for s in self._under_way if error.step in (None, m.step_number(s))), default=None)
        self._cause_raised |= self.requests.fail_all(error, step)
        self._tasks.start("abort after a failure", self._abort_others(error, dead))

    async def _abort_others(self, error: ActorError, dead: ProcessId | None) -> None:
        """Tell all actors that still run to drop all their work, and ignore their replies from now on.

        Args:
            error: the failure that ended the mesh.
            dead: the process that died, or None.
        """
        await self._recovery_driver.aclose()
        actor_group = self._actor_group
        for process, link in actor_group.links.items():
            if process != dead and link.connection.is_open:
                link.detach()
                actor_group.abort(process, str(error))
        try:
            await actor_group.host_transfers.transport.abort()
        except TransferError as held:
            # The error is only logged, since the mesh has failed for another reason and this process goes on.
            _LOG.warning("after the mesh failed: %s (docs/failures.md, Memory)", held)

    def check_usable(self) -> None:
        """Check that the mesh can take requests.

        Raises:
            ActorError: the mesh has failed, and no caller has seen that failure yet. This error is the
                failure itself, and is raised only once.
            MeshClosedError: the mesh is closed, or has failed with an error that a caller has already seen.
        """
        if self.cause is not None:
            if not self._cause_raised:
                self._cause_raised = True
                raise self.cause
            summary = str(self.cause).splitlines()[0]
            raise abandoned(self.cause, f"the mesh has failed: {summary}", MeshClosedError)
        if self._closing is not None:
            raise MeshClosedError("the mesh is closed; start a new one")

    # ------------------------------------------------------------ end

    def abandon(self) -> None:
        """Begin to close, when nobody is left who could await `aclose`; any thread may call this."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin_closing)

    def _begin_closing(self) -> asyncio.Task[None]:
        if self._closing is None:
            self._closing = self._loop.create_task(self._close(), name="close the mesh")
        return self._closing

    async def aclose(self) -> None:
        """Stop every actor and release everything. This ends within about ten seconds, whatever the actors
        do.

        Steps in flight fail with `MeshClosedError`. A failure that ended the mesh is not raised again. A
        second call waits for the first one to end. If a call is cancelled, the actors are killed immediately
        and everything else is still released.
        """
        await wait_uninterrupted(self._begin_closing(), on_cancel=self._actor_group.kill)

    async def _close(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
        await self._recovery_driver.aclose()
        self.requests.close(MeshClosedError("the mesh was closed while this was under way"))
        await self._release(self._actor_group.shut_down)

    async def _release(self, end_actors: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """End all work for the mesh, and its actors by the given function, and report that it is closed."""
        self._drop_suspicion()
        await self._health_monitor.aclose()
        await self._linking.aclose()
        await end_actors()
        await self._tasks.aclose()
        self.mesh_events.closed(self.cause)


def _log_progress(text: str) -> None:
    _LOG.info("%s", text)
