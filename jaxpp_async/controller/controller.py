"""controller: what a mesh asks of its actors: programs loaded, steps run, values put and fetched, and all of it ended.
Programs and numpy arrays in, step statistics and numpy arrays out. No jax.

Requests leave through the `outbox`, processes belong to the `crew`. `supervision` says what a failure is; then either
`recovery` mends it (`max_restarts`) or the first cause ends the mesh: every pending call fails, the other actors are
told to abort. Everything runs on one event loop; only `free` may be called from other threads.

host_requests: the controller's values to actors, and theirs to it. Numpy arrays in and out, each over the frames or
the data plane. No jax, and no word on whether the mesh may be asked at all: that is the controller's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxpp_async.base.events import EventLog
from jaxpp_async.base.install_hints import page
from jaxpp_async.controller.actor_group import ActorGroup
from jaxpp_async.controller.deploy import Deployment, LinkSetup, LoadedPrograms
from jaxpp_async.controller.error_messages import abandoned
from jaxpp_async.controller.failure_policy import FailurePolicy
from jaxpp_async.controller.host_values import HostValue, Sending
from jaxpp_async.controller.mesh_events import MeshEvents
from jaxpp_async.controller.options import ControllerOptions
from jaxpp_async.controller.recovery import Recovery
from jaxpp_async.controller.requests import FreeList, PendingRequest, RequestLog, SentRequest, StepHandle
from jaxpp_async.controller.startup import all_of, to_the_end
from jaxpp_async.controller.state_replicas import StateReplication
from jaxpp_async.errors import (
    ActorDiedError,
    ActorError,
    ActorUnresponsiveError,
    MeshClosedError,
    MeshError,
    TransferError,
)
from jaxpp_async.launch import Launcher
from jaxpp_async.layout.array_parts import Gathering, Scattering
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import ActorId, Aval, ProcessId
from jaxpp_async.protocol.actor_info import ActorInfo, Topology
from jaxpp_async.protocol.clocks import OUR_CLOCK, Clock
from jaxpp_async.protocol.loop_spin import LoopSpin, has_spare_core
from jaxpp_async.protocol.messages import (
    ArrayId,
    Done,
    Inspect,
    Inspected,
    Loaded,
    RunKind,
    Step,
    Store,
    step_id,
    step_number,
)
from jaxpp_async.protocol.task_group import OwnedTasks

_LOG = logging.getLogger("jaxpp_async")


class Controller:
    """The one owner of a mesh's actors. Made by `Controller.start`.

    Attributes:
        cause: the failure that ended the mesh, or None.
        ended: done once the mesh has failed or been closed.
        outbox: where every request leaves.
    """

    def __init__(
        self,
        processes: Topology,
        launcher: Launcher,
        options: ControllerOptions,
        *,
        events: EventLog | None,
        say: Callable[[str], None],
    ):
        self._loop, self._say = asyncio.get_running_loop(), say
        self.cause: ActorError | None = None
        self.mesh_events = MeshEvents(events)
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._is_started = self._cause_raised = False
        self._arrays = itertools.count()
        self._num_steps = self._num_ahead = 0
        self._programs, self._frees = LoadedPrograms(processes, for_successors=options.restarts), FreeList()
        self._under_way: dict[int, StepHandle] = {}
        self._loop_spin: LoopSpin | None = None
        self._tasks = OwnedTasks()
        self._closing: asyncio.Task[None] | None = None
        self._actor_group = ActorGroup(
            launcher,
            processes,
            options,
            number=self._number,
            say=self._tell,
            on_transfer_error=self._suspect,
            on_routes=self.mesh_events.connected,
        )
        self.request_log = RequestLog(
            self._actor_group.links,
            self._check_usable,
            remembers=options.restarts,
            max_frame_bytes=options.max_frame_bytes,
        )
        self._failure_policy = FailurePolicy(
            self._actor_group,
            self._programs,
            self._under_way,
            self._on_failure,
            lambda: self._is_recovering,
            self.mesh_events,
            options.deadlines,
        )
        self._host = HostRequests(self._actor_group, self.request_log, self._frees)
        self._linking = LinkSetup(self._actor_group, self.request_log, self._programs)
        self._deploying = Deployment(
            self._actor_group,
            self.request_log,
            self._programs,
            self._linking,
            paused=self._failure_policy.hearts.paused,
            tell=self._tell,
        )
        self._replication = (
            StateReplication(
                self._actor_group,
                self.request_log,
                every=options.backup_every,
                on_error=self._suspect,
                patience_s=options.deadlines.progress_s,
            )
            if options.restarts
            else None
        )
        self._recovery = (
            Recovery(
                self._actor_group,
                self.request_log,
                self._programs,
                self._replication,
                self._linking,
                max_restarts=options.max_restarts,
                watch=self._failure_policy.watch,
                unwatch=self._failure_policy.hearts.unwatch,
                end=self._end,
                on_restarted=self._on_restarted,
            )
            if self._replication is not None
            else None
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
        """Start actors and connect everyone with everyone.

        Args:
            num_actors: how many, at least 1.
            launcher: starts them; belongs to the controller from here on.
            options: how they are set up, started, watched and replaced; None: as nobody says otherwise.
            events: told of what happens to the mesh.
            on_progress: called with a line of text at each stage of launching and loading.

        Raises:
            LaunchError: an actor did not come up; has the end of its output.
            HandshakeError: an actor runs other versions.
        """
        options = options or ControllerOptions()
        processes = Topology(num_actors, options.actors.processes_per_actor)
        self = cls(processes, launcher, options, events=events, say=on_progress or (lambda text: None))
        try:
            await self._actor_group.start()
            for link in self._actor_group.links.values():
                self._failure_policy.watch(link)
            await self._actor_group.connect()
            # Only where it takes no core away from an actor.
            if self._actor_group.has_hearts and has_spare_core(
                link.info.host for link in self._actor_group.links.values()
            ):
                self._loop_spin = LoopSpin(self._loop, lambda: len(self._under_way) > 0)
            self._is_started = True
        except BaseException as error:
            # also a cancellation: whatever it is, nothing that was started may be left
            if isinstance(error, ActorError):
                self._cause_raised, self.cause = True, error
            ending = self._loop.create_task(self._kill_everything(), name="end a launch that failed")
            await to_the_end(ending, hurry=lambda: None)
            raise
        return self

    # ------------------------------------------------------------ what a mesh asks

    @property
    def actors(self) -> tuple[ActorInfo, ...]:
        """Where each actor is and how it does, in order of id."""
        return self._actor_group.infos

    @property
    def processes(self) -> Topology:
        """Which process is whose."""
        return self._actor_group.processes

    @property
    def scattering(self) -> Scattering:
        """How arrays lie on actors' processes."""
        return self._actor_group.scattering

    @property
    def num_steps(self) -> int:
        """How many steps of the user's have been started: the number of the next one."""
        return self._num_steps

    @property
    def is_closed(self) -> bool:
        """The mesh has failed, or was closed."""
        return self.cause is not None or self._closing is not None

    def clock(self, actor: ActorId) -> Clock:
        """The clock of the process that is this actor now, or that speaks for it."""
        return (
            self._failure_policy.clocks.of(self._actor_group.processes.process(actor, 0))
            if self._actor_group.has_hearts
            else OUR_CLOCK
        )

    def new_array_id(self) -> ArrayId:
        """An id that no array of this mesh has had."""
        return next(self._arrays)

    def new_program_id(self) -> int:
        """An id that no program of this mesh has had."""
        return self._programs.new_id()

    async def load(
        self,
        program_id: int,
        programs: Mapping[ActorId, ActorProgram],
        executables: Mapping[ActorId, Mapping[int, str]],
        blobs: Mapping[str, bytes],
        names: Mapping[int, str] = {},
    ) -> dict[ActorId, Loaded]:
        """Compile one program on every actor that has a part in it. There is no deadline, but a death ends it.

        Args:
            program_id: from `new_program_id`.
            programs: each actor's part.
            executables: for each actor, the content key of each executable index that its part uses.
            blobs: serialized executables by content key. Each goes to each actor at most once.
            names: of the step's arguments, by number, where errors on actors may have to name them.

        Raises:
            RemoteError: an executable does not compile; the mesh goes on. ActorError: the mesh failed.
        """
        self._check_usable()
        return await self._deploying.deploy(program_id, programs, executables, blobs, names)

    def start_step(
        self,
        program_id: int,
        inputs: Mapping[ActorId, dict[int, ArrayId]],
        outputs: Mapping[ActorId, dict[int, ArrayId]],
        *,
        puts: Mapping[ActorId, Sequence[HostValue]] | None = None,
        frees_before: Mapping[ActorId, Sequence[ArrayId]] = {},
        frees_after: Mapping[ActorId, Sequence[ArrayId]] | None = None,
        kind: RunKind = "step",
    ) -> StepHandle:
        """Send one frame to each process of a loaded program's actors. Does not wait; steps run in their order.

        Args:
            program_id: which program.
            inputs: for each actor, the array of each step argument that its part binds; kept, as the next.
            outputs: for each actor, the new array of each result that its part makes.
            puts: host values that go to each actor first; must not change before the handle's `wait_sent`.
            frees_before: arrays to free on each actor before the step begins; they stay if it cannot be sent.
            frees_after: arrays to free on each actor when the step is done.
            kind: whether the user counts it as a step.

        Raises:
            MeshClosedError: the mesh is closed or has failed.
        """
        self._check_usable()
        places = self._programs.places_of(program_id)
        step = step_id(self._num_steps, kind, self._num_ahead)
        handle = StepHandle(step, program_id, [p for _, processes in places for p in processes])
        frees, number, epoch = self._frees.take(), self.request_log.number, self._actor_group.epoch
        posts: list[SentRequest] = []
        freed = dict(frees)
        for actor, processes in places:
            values = puts.get(actor) if puts else None
            small, large = self._actor_group.plane.prepare(actor, values) if values else ((), {})
            message = Step(
                number(),
                epoch,
                step,
                program_id,
                inputs.get(actor) or {},
                outputs.get(actor) or {},
                small,
                (*frees.pop(actor, ()), *frees_before.get(actor, ()))
                if frees_before
                else frees.pop(actor, ()),
                tuple(frees_after.get(actor, ())) if frees_after else (),
            )
            for process in processes:
                posts.append(
                    self._host.with_values(process, message, handle, large.get(process, ()), handle.sends)
                )
        try:
            self.request_log.post(*posts)
        except MeshError:  # it cannot be encoded: nothing of it was sent
            self._frees.give_back(freed)
            raise
        if kind == "step":
            self._num_steps, self._num_ahead = self._num_steps + 1, 0
        else:
            self._num_ahead += 1
        self._under_way[step] = handle
        handle.when_done(partial(self._under_way.pop, step, None))
        if frees:
            self._frees.give_back(frees)  # of actors without a part in this step
        if frees_before:
            running = dict(places)
            self._frees.give_back({a: tuple(ids) for a, ids in frees_before.items() if a not in running})
        if self._replication is not None:
            self._replication.note_step()
        if self._loop_spin is not None:
            handle.when_done(self._loop_spin.end)
            self._loop_spin.begin()
        if not places:
            handle.end_without_actors()
        return handle

    async def put(self, values: Mapping[ActorId, Sequence[HostValue]]) -> None:
        """Keep host values on actors, outside a step. Returns when they are there.

        Raises:
            ActorError: an actor or the mesh failed.
        """
        self._check_usable()
        await self._host.put(values)

    async def fetch(self, wanted: Sequence[tuple[ActorId, ArrayId, Aval]]) -> list[np.ndarray[Any, Any]]:
        """Bring whole arrays to the controller.

        Args:
            wanted: actor, array and its aval, one an array; keys come as their `uint32` data.

        Raises:
            RemoteError: an actor does not have the array; the mesh goes on. ActorError: the mesh failed.
        """
        self._check_usable()
        return await self._host.fetch(wanted)

    async def secure(self) -> None:
        """With `max_restarts`: wait until a restart would not need the files that arrays were read from."""
        if self._replication is not None:
            await self._replication.secure()
        self._check_usable()

    def before_save(self) -> None:
        """With `max_restarts`: copy the state if that is due, since no copy is taken while a save is under way."""
        if self._replication is not None:
            self._replication.take_if_due()

    def free(self, actor: ActorId, array_id: ArrayId) -> None:
        """Free an array with the next request to its actor. Any thread may call this, also in a collection."""
        self._frees.add(actor, array_id)

    async def inspect(self) -> dict[ProcessId, dict[str, int]]:
        """Each process's numbers, such as `live_arrays` and `file_descriptors`; pending frees are sent before.

        Raises:
            ActorError: an actor or the mesh failed.
        """
        self._check_usable()
        self._host.send_frees()
        replies = {
            process: self.request_log.send(process, Inspect, Inspected)
            for process in sorted(self._actor_group.links)
        }
        return {process: (await reply).numbers for process, reply in replies.items()}

    # ------------------------------------------------------------ requests

    def _number(self) -> int:
        return self.request_log.number()

    # ------------------------------------------------------------ failures

    @property
    def _is_recovering(self) -> bool:
        return self._recovery is not None and self._recovery.is_under_way

    def _suspect(self, error: ActorError) -> None:
        if not self.is_closed:
            self._failure_policy.suspect(error)

    def _on_restarted(self, actors: list[ActorId], steps: int) -> None:
        self._failure_policy.calm_down()
        self.mesh_events.restarted([self._actor_group.info(actor) for actor in actors], steps)

    def _on_failure(self, error: ActorError, dead: ProcessId | None) -> None:
        if self.is_closed:
            return
        self.mesh_events.failed(error)
        if self._is_started and self._recovery is not None and self._recovery.can_mend(error):
            self._recovery.begin(error)
        else:
            self._end(error, dead)

    def _end(self, error: ActorError, dead: ProcessId | None = None) -> None:
        """End the mesh because of `error`, unless it has ended already: the first cause wins."""
        if self.is_closed:
            return
        self.cause = error
        self.ended.set_result(None)
        self._failure_policy.calm_down()
        _LOG.debug("the mesh failed: %s", error)
        lost = self._actor_group.processes.actor_of(dead) if dead is not None else None
        for actor in self._actor_group.actors:
            self._actor_group.set_state(actor, "failed" if actor in (lost, error.actor) else "closed")
        if self._recovery is None and isinstance(error, ActorDiedError | ActorUnresponsiveError):
            more = f"see {page('restarts.md')}"
            error.add_note(
                f"RemoteMesh(max_restarts=n) replaces actors that die or hang, and goes on: {more}"
            )
        if isinstance(error, ActorUnresponsiveError) and error.actor is not None:
            for process in self._actor_group.processes.processes_of(error.actor):
                self._actor_group.handles[process].kill()  # it would hold up the end
        step = min((s for s in self._under_way if error.step in (None, step_number(s))), default=None)
        self._cause_raised |= self.request_log.fail_all(error, step)
        self._tasks.start("abort after a failure", self._abort_others(error, dead))

    async def _abort_others(self, error: ActorError, dead: ProcessId | None) -> None:
        """Tell the living to drop everything; replies are of no interest any more."""
        await self._end_recovery()
        actor_group = self._actor_group
        actor_group.begin_epoch()
        for process, link in actor_group.links.items():
            if process != dead and link.connection.is_open:
                link.let_go()
                actor_group.abort(process, str(error))
        try:
            await actor_group.plane.transport.abort()
        except TransferError as held:  # nobody's error: the mesh has its own, and this process works on
            _LOG.warning("after the mesh failed: %s (docs/failures.md, Memory)", held)

    def _check_usable(self) -> None:
        """Raises:
        MeshClosedError: closed or failed. A cause that nobody has seen yet is raised itself, once.
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

    async def aclose(self) -> None:
        """Stop every actor and give everything back; ends within about ten seconds, whatever the actors do.

        Steps under way fail with `MeshClosedError`. A failure that ended the mesh is not raised again. A second call
        waits for the first. When it is cancelled, actors are killed at once and the rest is done all the same.
        """
        if self._closing is None:
            self._closing = self._loop.create_task(self._close(), name="close the mesh")
        await to_the_end(self._closing, hurry=self._actor_group.kill)

    async def _close(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
        await self._end_recovery()
        self.request_log.close(MeshClosedError("the mesh was closed while this was under way"))
        await self._failure_policy.aclose()
        await self._linking.aclose()
        await self._actor_group.shut_down()
        await self._tasks.aclose()
        self.mesh_events.closed(self.cause)

    async def _kill_everything(self) -> None:
        """The end of a launch that failed."""
        await self._failure_policy.aclose()
        await self._actor_group.kill_all()
        await self._tasks.aclose()
        self.mesh_events.closed(self.cause)

    async def _end_recovery(self) -> None:
        if self._recovery is not None and self._replication is not None:
            await self._recovery.aclose()
            await self._replication.aclose()

    # ------------------------------------------------------------ small things

    def _tell(self, text: str) -> None:
        _LOG.info("%s", text)
        self._say(text)


# ---------------------------------------------------------------- host requests


class HostRequests:
    """Requests that carry host values, and those that free arrays, of one mesh.

    Args:
        crew: the actors, and the controller's end of the data plane. outbox: takes the requests.
        frees: arrays to free; they go with the next request.
    """

    def __init__(self, actor_group: ActorGroup, request_log: RequestLog, frees: FreeList):
        self._actor_group, self._request_log, self._frees = actor_group, request_log, frees

    async def put(self, values: Mapping[ActorId, Sequence[HostValue]]) -> None:
        """Keep host values on actors, outside a step. Returns when they are there.

        Raises:
            ActorError: an actor or the mesh failed.
        """
        frees, calls, posts = self._frees.take(), dict[ProcessId, PendingRequest](), list[SentRequest]()
        for actor in sorted(set(values) | set(frees)):
            small, large = self._actor_group.plane.prepare(actor, values.get(actor, ()))
            for process in self._actor_group.processes.processes_of(actor):
                calls[process] = PendingRequest(Done)
                message = Store(self._request_log.number(), small, frees.get(actor, ()))
                posts.append(self.with_values(process, message, calls[process], large.get(process, ()), []))
        try:
            self._request_log.post(*posts)
        except MeshError:  # one of them cannot be encoded: nothing was sent
            self._frees.give_back(frees)
            raise

        async def stored(process: ProcessId) -> None:
            await self._request_log.drain(process)
            await calls[process].future

        await all_of({process: stored(process) for process in calls}, "put")

    async def fetch(self, wanted: Sequence[tuple[ActorId, ArrayId, Aval]]) -> list[np.ndarray[Any, Any]]:
        """Bring whole arrays to the controller.

        Args:
            wanted: actor, array and its aval, one an array; keys come as their `uint32` data.

        Raises:
            RemoteError: an actor does not have the array; the mesh goes on. ActorError: the mesh failed.
        """
        self.send_frees()
        gathering = Gathering(wanted, self._actor_group.scattering)
        fetches = {process: self._fetch_one(process, asked) for process, asked in gathering.asked.items()}
        return gathering.arrays(await all_of(fetches, "fetch"))

    def with_values(
        self,
        process: ProcessId,
        message: Step | Store,
        reply_handler: PendingRequest | StepHandle,
        large: Sequence[Sending],
        sends: list[asyncio.Future[None]],
    ) -> SentRequest:
        """A request to be posted with the host values that take the data plane; `sends` gets their transfers."""
        if not large:
            return SentRequest(process, message, reply_handler)
        size_bytes = sum(data.nbytes for _, data in large)
        return SentRequest(
            process,
            message,
            reply_handler,
            lambda: sends.extend(self._actor_group.plane.send(process, large)),
            size_bytes,
        )

    def send_frees(self) -> None:
        """Free what is to be freed, now."""
        for actor, array_ids in self._frees.take().items():
            for process in self._actor_group.processes.processes_of(actor):
                message = Store(self._request_log.number(), (), array_ids)
                self._request_log.post(SentRequest(process, message, PendingRequest(Done, awaited=False)))

    def _fetch_one(
        self, process: ProcessId, wanted: Sequence[tuple[ArrayId, Aval]]
    ) -> Coroutine[Any, Any, list[np.ndarray[Any, Any]]]:
        """The request leaves with the call, ahead of any later step that is given the arrays."""
        message, fetching = self._actor_group.plane.fetch(self._request_log.number(), process, wanted)
        self._request_log.post(SentRequest(process, message, fetching, fetching.start))

        async def fetched() -> list[np.ndarray[Any, Any]]:
            await self._request_log.drain(process)
            return await fetching.future

        return fetched()
