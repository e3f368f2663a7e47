"""controller: owns the actors of one mesh: starts them, loads programs, runs steps, gathers failures, stops everything.
Programs and numpy arrays in, step statistics and numpy arrays out. No jax.

The first failure wins: it ends every pending call, the other actors are told to abort, and the mesh is closed.
Everything runs on one event loop; only `free` may be called from other threads.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import jaxpp_async
from jaxpp_async.actors.bringup import ActorConfig, Bringup, all_of
from jaxpp_async.actors.ending import bounded, ignore_late_reply, to_the_end, wait_all_dead
from jaxpp_async.actors.failure import ActorInfo, abandoned, died_error, is_consequence, lost_error, remote_error
from jaxpp_async.actors.frees import FreeList
from jaxpp_async.actors.gate import Gate
from jaxpp_async.actors.handshake import SECRET_BYTES
from jaxpp_async.actors.host_data import FinishFetch, HostPlane, HostValue
from jaxpp_async.actors.launch import ActorHandle, Launcher, LaunchSpec
from jaxpp_async.actors.messages import (
    Abort,
    ArrayId,
    Connect,
    Done,
    Inspect,
    Inspected,
    Load,
    Loaded,
    Shutdown,
    Step,
    Store,
)
from jaxpp_async.actors.owned_tasks import OwnedTasks
from jaxpp_async.actors.programs import Programs
from jaxpp_async.actors.protocol import DEFAULT_MAX_FRAME_BYTES
from jaxpp_async.actors.rpc import ActorLink, Call, Requests, StepHandle, fail_waiters
from jaxpp_async.errors import ActorError, MeshClosedError, ProtocolError, TransferError
from jaxpp_async.program import CONTROLLER, ActorId, ActorProgram, Aval
from jaxpp_async.transport.base import Transport

_LOG = logging.getLogger("jaxpp_async")

LAUNCH_TIMEOUT_S = 120.0
GRACE_S = 1.0
"""How long a failure that looks like a consequence waits for its cause to be noticed."""

SHUTDOWN_S, TERMINATE_S, KILL_S = 4.0, 1.5, 1.5
"""What actors may take to end when asked, when signalled, and to be reaped when killed."""


class Controller:
    """The one owner of a mesh's actors. Made by `Controller.start`.

    Attributes:
        cause: the failure that ended the mesh, or None.
        requests: single requests to single actors.
    """

    def __init__(self, launcher: Launcher, say: Callable[[str], None]):
        loop = asyncio.get_running_loop()
        self.cause: ActorError | None = None
        self._loop, self._launcher, self._say = loop, launcher, say
        self._links: dict[ActorId, ActorLink] = {}
        self._handles: dict[ActorId, ActorHandle] = {}
        self._gate: Gate | None = None
        self._plane: HostPlane | None = None
        self._epoch = 0
        self._requests, self._steps = itertools.count(), itertools.count()
        self.requests = Requests(self._links, self._requests, self._check_usable)
        self._arrays, self._programs = itertools.count(), Programs()
        self._frees = FreeList()
        self._under_way: dict[int, StepHandle] = {}
        self._broken: asyncio.Future[None] = loop.create_future()
        self._cause_raised = False
        self._suspicion: asyncio.TimerHandle | None = None
        self._tasks = OwnedTasks()
        self._closing: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ start

    @classmethod
    async def start(
        cls,
        num_actors: int,
        launcher: Launcher,
        config: ActorConfig | None = None,
        *,
        launch_timeout_s: float = LAUNCH_TIMEOUT_S,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        make_transport: Callable[[str], Transport] | None = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> Controller:
        """Start actors and connect everyone with everyone.

        Args:
            num_actors: how many, at least 1.
            launcher: starts them; belongs to the controller from here on.
            config: how each is set up.
            launch_timeout_s: how long all of it may take.
            max_frame_bytes: the longest control frame.
            make_transport: the controller's own end of the data plane; default: the launcher's.
            on_progress: called with a line of text at each stage of launching and loading.

        Raises:
            LaunchError: an actor did not come up; has the end of its output.
            HandshakeError: an actor runs other versions.
        """
        self = cls(launcher, on_progress or (lambda text: None))
        try:
            await self._start(num_actors, config or ActorConfig(), launch_timeout_s, max_frame_bytes, make_transport)
        except BaseException as error:  # also a cancellation: whatever it is, nothing that was started may be left
            if isinstance(error, ActorError):
                self._cause_raised, self.cause = True, error
            ending = self._loop.create_task(self._kill_everything(), name="end a launch that failed")
            await to_the_end(ending, hurry=lambda: None)
            raise
        return self

    async def _start(
        self,
        num_actors: int,
        config: ActorConfig,
        timeout_s: float,
        max_frame_bytes: int,
        make_transport: Callable[[str], Transport] | None,
    ) -> None:
        launcher, secret = self._launcher, secrets.token_bytes(SECRET_BYTES)
        gate = Gate(secret, version=jaxpp_async.__version__, max_frame_bytes=max_frame_bytes)
        self._gate = gate
        address = await gate.listen(launcher.listen_host) if launcher.listen_host is not None else None
        bringup = Bringup(launcher, gate, timeout_s=timeout_s, say=self._tell)
        self._handles = bringup.handles
        self._tell(f"starting {num_actors} actor{'s' if num_actors != 1 else ''}")
        kind = config.transport or launcher.transports[0]

        async def bring_up(actor_id: ActorId) -> ActorLink:
            spec = LaunchSpec(actor_id, num_actors, 0, secret, address, config.platform, config.env, max_frame_bytes)
            link = self._links[actor_id] = await bringup.start_actor(spec)
            await bringup.configure(link, config.message(self._request(), kind, self._epoch))
            return link

        links = await all_of({i: bring_up(i) for i in range(num_actors)}, "start")
        for link in links.values():
            self._supervise(link)
        transport = (make_transport or launcher.make_transport)(kind)
        self._plane = HostPlane(transport, self._epoch, self._suspect)
        addresses = {i: link.address for i, link in links.items()} | {CONTROLLER: transport.address}
        for actor_id in links:
            await transport.connect(actor_id, addresses[actor_id])
        await self._call_all(lambda i: Connect(self._request(), self._epoch, addresses), Done, "connect")

    def _supervise(self, link: ActorLink) -> None:
        """From here on a death, a lost connection or a failure of this actor is the mesh's."""
        link.connection.on_message = lambda message: self._on_message(link, message)
        link.connection.on_closed = lambda error: self._on_lost(link, error)
        self._tasks.start(f"watch actor {link.info.id}", self._watch(link))
        if not link.connection.is_open:
            self._on_lost(link, None)

    # ------------------------------------------------------------ what a mesh asks

    @property
    def actors(self) -> tuple[ActorInfo, ...]:
        """Where each actor is and how it does, in order of id."""
        return tuple(link.info for _, link in sorted(self._links.items()))

    @property
    def is_closed(self) -> bool:
        """The mesh has failed, or was closed."""
        return self.cause is not None or self._closing is not None

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
    ) -> dict[ActorId, Loaded]:
        """Compile one program on every actor that has a part in it. There is no deadline, but a death ends it.

        Args:
            program_id: from `new_program_id`.
            programs: each actor's part.
            executables: for each actor, the content key of each executable index that its part uses.
            blobs: serialized executables by content key. Each goes to each actor at most once.

        Raises:
            RemoteError: an executable does not compile; the mesh goes on. ActorError: the mesh failed.
        """
        self._check_usable()

        async def load_one(link: ActorLink) -> Loaded:
            keys = dict(executables.get(link.info.id, {}))
            new = set(keys.values()) - link.known_blobs
            text = str(programs[link.info.id])
            message = Load(self._request(), program_id, text, keys, {key: blobs[key] for key in sorted(new)})
            link.known_blobs |= new
            try:
                return await link.call(message, Loaded)
            except ActorError:
                link.known_blobs -= new  # what the actor kept of them is unknown: send them again
                raise

        self._tell(f"compiling on {len(programs)} actor{'s' if len(programs) != 1 else ''}")
        loaded = await all_of({i: load_one(self._links[i]) for i in sorted(programs)}, "load")
        self._programs.add(program_id, programs)
        return loaded

    def start_step(
        self,
        program_id: int,
        inputs: Mapping[ActorId, Mapping[int, ArrayId]],
        outputs: Mapping[ActorId, Mapping[int, ArrayId]],
        *,
        puts: Mapping[ActorId, Sequence[HostValue]] | None = None,
        frees_after: Mapping[ActorId, Sequence[ArrayId]] | None = None,
    ) -> StepHandle:
        """Send one frame to each actor of a loaded program. Does not wait; steps run in the order of these calls.

        Args:
            program_id: which program.
            inputs: for each actor, the array of each step argument that its part binds.
            outputs: for each actor, the new array of each result that its part makes.
            puts: host values that go to each actor first; must not change before the handle's `wait_sent`.
            frees_after: arrays to free on each actor when the step is done.

        Raises:
            MeshClosedError: the mesh is closed or has failed.
        """
        self._check_usable()
        actors = self._programs.actors_of(program_id)
        handle = StepHandle(next(self._steps), program_id, actors)
        frees = self._frees.take()
        sends: list[asyncio.Future[None]] = []
        messages: list[tuple[ActorLink, Step, list[tuple[int, np.ndarray[Any, Any]]]]] = []
        for actor in actors:
            link = self._links[actor]
            small, large = self._host.prepare(link, (puts or {}).get(actor, ()))
            message = Step(
                request=self._request(),
                epoch=self._epoch,
                step=handle.step,
                program_id=program_id,
                inputs=dict(inputs.get(actor, {})),
                outputs=dict(outputs.get(actor, {})),
                puts=small,
                frees=frees.pop(actor, ()),
                frees_after=tuple((frees_after or {}).get(actor, ())),
            )
            messages.append((link, message, large))
        self._under_way[handle.step] = handle
        handle.future.add_done_callback(lambda _: self._under_way.pop(handle.step, None))
        for link, message, large in messages:
            link.request(message, handle)
            sends += self._host.send(link, large)
        self._frees.give_back(frees)  # of actors without a part in this step
        handle.sends = tuple(sends)
        return handle

    async def put(self, values: Mapping[ActorId, Sequence[HostValue]]) -> None:
        """Keep host values on actors, outside a step. Returns when they are there.

        Raises:
            ActorError: an actor or the mesh failed.
        """
        self._check_usable()
        frees = self._frees.take()

        async def put_one(link: ActorLink) -> None:
            actor = link.info.id
            small, large = self._host.prepare(link, values.get(actor, ()))
            call = Call(Done)
            link.request(Store(self._request(), small, frees.get(actor, ())), call)
            self._host.send(link, large)
            await link.connection.drain()
            await call.future

        actors = sorted(set(values) | set(frees))
        await all_of({actor: put_one(self._links[actor]) for actor in actors}, "put")

    async def fetch(self, wanted: Sequence[tuple[ActorId, ArrayId, Aval]]) -> list[np.ndarray[Any, Any]]:
        """Bring whole arrays to the controller.

        Args:
            wanted: actor, array and its aval, one an array; keys come as their `uint32` data.

        Raises:
            RemoteError: an actor does not have the array; the mesh goes on. ActorError: the mesh failed.
        """
        self._check_usable()
        self._send_frees()
        by_actor: dict[ActorId, list[int]] = defaultdict(list)
        for position, (actor, _, _) in enumerate(wanted):
            by_actor[actor].append(position)
        fetches = {
            actor: self._fetched(
                self._host.fetch(self._links[actor], self._request(), [wanted[p][1:] for p in positions], self._broken)
            )
            for actor, positions in by_actor.items()
        }
        results: list[Any] = [None] * len(wanted)
        for actor, arrays in (await all_of(fetches, "fetch")).items():
            for position, array in zip(by_actor[actor], arrays, strict=True):
                results[position] = array
        return results

    def free(self, actor: ActorId, array_id: ArrayId) -> None:
        """Free an array with the next request to its actor. Any thread may call this, also in a collection."""
        self._frees.add(actor, array_id)

    async def inspect(self) -> dict[ActorId, dict[str, int]]:
        """Each actor's numbers, such as `live_arrays` and `file_descriptors`; pending frees are sent before.

        Raises:
            ActorError: an actor or the mesh failed.
        """
        self._check_usable()
        self._send_frees()
        replies = await self._call_all(lambda i: Inspect(self._request()), Inspected, "inspect")
        return {actor: reply.numbers for actor, reply in replies.items()}

    # ------------------------------------------------------------ requests and host values

    def _request(self) -> int:
        return next(self._requests)

    async def _call_all(self, make: Callable[[ActorId], Any], expected: type, what: str) -> dict[ActorId, Any]:
        calls = {i: link.call(make(i), expected) for i, link in sorted(self._links.items())}
        return await all_of(calls, what)

    def _send_frees(self) -> None:
        for actor, array_ids in self._frees.take().items():
            self._links[actor].request(Store(self._request(), (), array_ids), Call(Done, awaited=False))

    @property
    def _host(self) -> HostPlane:
        assert self._plane is not None  # connected by `start`
        return self._plane

    async def _fetched(self, finish: FinishFetch) -> list[np.ndarray[Any, Any]]:
        try:
            return await finish()
        except TransferError:
            # Why the transfer failed is known to the mesh, now or when the suspicion is over.
            await asyncio.wait([self._broken])
            self._check_usable()
            raise

    # ------------------------------------------------------------ failures

    def _on_message(self, link: ActorLink, message: Any) -> None:
        try:
            failed = link.settle(message)
        except ProtocolError as error:
            self._fail(error)
            return
        if failed is not None:
            error = remote_error(link.info, failed)
            self._suspect(error) if is_consequence(failed) else self._fail(error)

    async def _watch(self, link: ActorLink) -> None:
        death = await link.handle.wait_dead()
        step = self._step_of(link)
        self._fail(died_error(link.info, death, step, self._instruction_of(link, step)), dead=link)

    def _on_lost(self, link: ActorLink, error: Exception | None) -> None:
        """The connection ended; if the process did as well, its death says more."""
        lost = lost_error(link.info, error, link.handle.output_tail(), self._step_of(link))
        self._suspect(lost)

    def _suspect(self, error: ActorError) -> None:
        """Take `error` as the cause unless a better one is noticed within `GRACE_S`."""
        if self._suspicion is None and not self.is_closed:
            self._suspicion = self._loop.call_later(GRACE_S, self._fail, error)

    def _instruction_of(self, link: ActorLink, step: int | None) -> str | None:
        """Text of the instruction that a dead actor was at in `step`, if it left word."""
        at = link.handle.progress()
        return self._programs.instruction_at(link.info.id, at) if at is not None and at.step == step else None

    def _step_of(self, link: ActorLink) -> int | None:
        """The step that this actor is running: the oldest that it has not finished."""
        return next((s for s, h in self._under_way.items() if h.waits_for(link.info.id)), None)

    def _fail(self, error: ActorError, *, dead: ActorLink | None = None) -> None:
        """End the mesh because of `error`, unless it has ended already: the first cause wins."""
        if self.is_closed:
            return
        self.cause = error
        if self._suspicion is not None:
            self._suspicion.cancel()
        _LOG.debug("the mesh failed: %s", error)
        for link in self._links.values():
            failed = dead is link or link.info.id == error.actor
            link.info = replace(link.info, state="failed" if failed else "closed")
        step = error.step if error.step is not None else min(self._under_way, default=None)
        self._cause_raised |= fail_waiters(self._links.values(), error, step)
        self._broken.set_result(None)
        self._tasks.start("abort after a failure", self._abort_others(error, dead))

    async def _abort_others(self, error: ActorError, dead: ActorLink | None) -> None:
        """Tell the living to drop everything; replies are of no interest any more."""
        self._epoch += 1
        for link in self._links.values():
            if link is not dead and link.connection.is_open:
                link.connection.on_message = ignore_late_reply
                link.connection.send(Abort(self._request(), self._epoch, str(error)))
        if self._plane is not None:
            self._plane.epoch = self._epoch
            await self._plane.transport.abort()

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
        await to_the_end(self._closing, hurry=self._kill_actors)

    async def _close(self) -> None:
        for link in self._links.values():
            for waiter in tuple(link.waiters.values()):
                waiter.fail(MeshClosedError("the mesh was closed while this was under way"))
            link.waiters.clear()
            link.connection.on_message = ignore_late_reply
            link.connection.on_closed = None
            link.connection.send(Shutdown(self._request()))
        if not self._broken.done():
            self._broken.set_result(None)
        if not await wait_all_dead(self._handles, SHUTDOWN_S):
            for handle in self._handles.values():
                handle.terminate()
            if not await wait_all_dead(self._handles, TERMINATE_S):
                _LOG.warning("actors did not end when asked to; killing them")
        await self._kill_everything()

    async def _kill_everything(self) -> None:
        """The end of the end, also of a launch that failed."""
        self._kill_actors()
        if not await wait_all_dead(self._handles, KILL_S):
            _LOG.warning("an actor's process could not be reaped")
        if self._suspicion is not None:
            self._suspicion.cancel()
        for link in self._links.values():
            link.connection.on_message = ignore_late_reply
            link.connection.on_closed = None
            link.connection.abort()
            link.info = replace(link.info, state="closed")
        if self._gate is not None:
            await self._gate.aclose()
        if self._plane is not None:
            await bounded(self._plane.transport.aclose(), KILL_S, "the data plane did not close in time")
        await bounded(self._launcher.aclose(), KILL_S, "the launcher did not close in time")
        await self._tasks.aclose()

    # ------------------------------------------------------------ small things

    def _kill_actors(self) -> None:
        for handle in self._handles.values():
            handle.kill()

    def _tell(self, text: str) -> None:
        _LOG.info("%s", text)
        self._say(text)
