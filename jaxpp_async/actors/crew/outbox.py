"""outbox: every request to an actor leaves through here, and is remembered for as long as it may have to be made again.

What an actor holds follows from the requests it was sent, in their order. So after a restart, with every actor back at
a copy of its arrays, the same requests bring it to where it was: those that change what it holds, answered or not, and
whatever has had no answer yet. Decides nothing about failures; knows neither processes nor clocks.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, cast

from jaxpp_async.actors.crew.rpc import ActorLink, Call, Replayed, Waiter
from jaxpp_async.actors.crew.step_handle import StepHandle
from jaxpp_async.actors.failures.failure import abandoned
from jaxpp_async.actors.messages import (
    ReadFile,
    Request,
    Step,
    StepId,
    Store,
    Sweep,
    Take,
    step_kind,
    step_number,
    step_text,
)
from jaxpp_async.actors.processes.actor_info import ActorInfo
from jaxpp_async.actors.protocol.codec import Encoder
from jaxpp_async.actors.protocol.wire import DEFAULT_MAX_FRAME_BYTES
from jaxpp_async.errors import ActorError, StepAbortedError
from jaxpp_async.program import ProcessId

StartTransfers: TypeAlias = Callable[[], None]
"""Starts the data that goes with a request, in the data plane's epoch of then."""

_CHANGES = (Store, Step, Take, ReadFile)
"""Requests on which it depends what an actor holds."""

_LOOK_OVER = 256
"""How many requests are remembered before it is asked which of them are still needed."""


@dataclass(slots=True)
class Post:
    """A request to one process, as it is made, and made again.

    Args:
        message: its request number, and a step's epoch, are others when it is made again.
        waiter: gets the reply.
        transfers: called behind the request, each time that it is made.
        size_bytes: of host arrays that `transfers` holds: the memory that remembering the request takes.
        serial: its place in the order of all that were made.
    """

    process: ProcessId
    message: Request
    waiter: Waiter
    transfers: StartTransfers | None = None
    size_bytes: int = 0
    serial: int = -1

    @property
    def is_needed(self) -> bool:
        return not self.waiter.done or (isinstance(self.message, _CHANGES) and not self._failed)

    @property
    def _failed(self) -> bool:
        """Its actor refused it: it has changed nothing."""
        call = self.waiter
        return isinstance(call, Call) and not call.future.cancelled() and call.future.exception() is not None


class Outbox:
    """Requests to the actors of one mesh.

    Args:
        links: the processes as they are now, by number.
        check_usable: raises if the mesh is closed or has failed.
        remembers: whether requests are remembered at all.
        max_frame_bytes: the longest that a request may be.
    """

    def __init__(
        self,
        links: Mapping[ProcessId, ActorLink],
        check_usable: Callable[[], None],
        *,
        remembers: bool,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
    ):
        self._links, self._check_usable, self._remembers = links, check_usable, remembers
        self._numbers, self._serials = itertools.count(), itertools.count()
        self._open: set[Waiter] = set()  # also those that have had their reply, and wait for what comes behind it
        self._encoder = Encoder(max_frame_bytes)
        self._sent: list[Post] = []
        self._size_bytes = 0
        self._look_over_at = _LOOK_OVER
        self._is_open = asyncio.Event()
        self._is_open.set()

    # ------------------------------------------------------------ asking

    def number(self) -> int:
        """A request number that none has had."""
        return next(self._numbers)

    def post(self, *posts: Post) -> None:
        """Send now, behind what was posted before; during a restart, as soon as it is over.

        Raises:
            MeshError: one of them cannot be encoded. None is sent then, and nothing remembered.
        """
        # First: what is remembered and cannot be encoded would end every restart from then on.
        encoded = [self._encoder.encode(post.message) for post in posts]
        is_open = self._is_open.is_set()
        for post, data in zip(posts, encoded, strict=True):
            waiter = post.waiter
            if waiter not in self._open:  # a step is posted to several processes
                self._open.add(waiter)
                waiter.when_done(partial(self._open.discard, waiter))
            if self._remembers:
                self._remember(post)
            if is_open:
                self._links[post.process].request(post.message, waiter, data)
                if post.transfers is not None:
                    post.transfers()

    def send(
        self, process: ProcessId, make: Callable[[int], Request], expected: type, *, awaited: bool = True
    ) -> asyncio.Future[Any]:
        """Make one request, for those who need no more of the controller.

        Args:
            make: request number to request.
            expected: the reply's type.
            awaited: whether somebody will see a failure of the mesh through this.

        Returns:
            The reply, to come; `RemoteError` if the request failed on the actor, `ActorError` if the mesh failed.

        Raises:
            MeshClosedError: the mesh is closed or has failed. MeshError: the request cannot be encoded.
        """
        return self.send_each({process: make}, expected, awaited=awaited)[process]

    def send_each(
        self, makes: Mapping[ProcessId, Callable[[int], Request]], expected: type, *, awaited: bool = True
    ) -> dict[ProcessId, asyncio.Future[Any]]:
        """Make one request to each of several processes, or none at all: else as `send`."""
        self._check_usable()
        calls = {process: Call(expected, awaited=awaited) for process in makes}
        self.post(*(Post(process, make(self.number()), calls[process]) for process, make in makes.items()))
        return {process: call.future for process, call in calls.items()}

    def info(self, process: ProcessId) -> ActorInfo:
        """Where a process is."""
        return self._links[process].info

    async def drain(self, process: ProcessId) -> None:
        """Wait until little is left unsent to a process, or it has gone."""
        await self._links[process].connection.drain()

    # ------------------------------------------------------------ remembering

    @property
    def mark(self) -> int:
        """This point between two requests."""
        return next(self._serials)

    @property
    def size_bytes(self) -> int:
        """Host memory that remembered requests hold."""
        return self._size_bytes

    def unanswered(self, mark: int) -> tuple[Waiter, ...]:
        """Who still waits for requests before a mark."""
        return tuple(sent.waiter for sent in self._sent if sent.serial < mark and not sent.waiter.done)

    @property
    def has_snapshot(self) -> bool:
        """Arrays were taken for a save that is not over: a copy of what actors hold would lack them."""
        return any(isinstance(sent.message, Take) for sent in self._needed())

    @property
    def needs_files(self) -> bool:
        """What actors hold would be read from files again, which may by then be gone."""
        return any(isinstance(sent.message, ReadFile) for sent in self._needed())

    @property
    def is_open(self) -> bool:
        """Requests are sent when they are made; False during a restart."""
        return self._is_open.is_set()

    async def wait_open(self) -> None:
        """Wait until requests are sent when they are made."""
        await self._is_open.wait()

    def forget_before(self, mark: int) -> None:
        """A copy of what the actors held at `mark` is safe: nothing before is needed again."""
        self._keep([sent for sent in self._needed() if sent.serial > mark])

    def _remember(self, sent: Post) -> None:
        sent.serial = next(self._serials)
        self._sent.append(sent)
        self._size_bytes += sent.size_bytes
        if len(self._sent) > self._look_over_at:  # what was fetched hangs on its request
            self._keep(self._needed())
            self._look_over_at = 2 * len(self._sent) + _LOOK_OVER

    def _keep(self, sent: list[Post]) -> None:
        self._sent, self._size_bytes = sent, sum(one.size_bytes for one in sent)

    def _needed(self) -> list[Post]:
        swept: set[tuple[ProcessId, bytes]] = set()
        needed: list[Post] = []
        for sent in reversed(self._sent):
            message = sent.message
            if isinstance(message, Sweep) and sent.waiter.done:
                swept.add((sent.process, message.folder))
            is_swept = isinstance(message, Take) and (sent.process, message.folder) in swept
            if sent.is_needed and not is_swept:
                needed.append(sent)
        return needed[::-1]

    # ------------------------------------------------------------ restarts

    def hold_back(self) -> None:
        """From here on requests are remembered and not sent, until `replay`."""
        self._is_open.clear()
        for link in self._links.values():
            link.drop_waiters()

    def replay(self, epoch: int) -> int:
        """Make again what is needed, in the order of old, then go on as ever.

        Args:
            epoch: of the steps from here on.

        Returns:
            How many steps of the user's were run before and run again.
        """
        self._keep(self._needed())
        for waiter in {id(sent.waiter): sent.waiter for sent in self._sent if not sent.waiter.done}.values():
            waiter.again()
        self._is_open.set()
        again = set()
        for sent in self._sent:
            sent.serial = next(self._serials)  # behind every mark so far
            changed: dict[str, Any] = {"request": self.number()}
            if isinstance(sent.message, Step):
                changed["epoch"] = epoch
            sent.message = replace(cast(Any, sent.message), **changed)
            if sent.waiter.done:
                if isinstance(sent.message, Step) and step_kind(sent.message.step) == "step":
                    again.add(step_number(sent.message.step))
                # What is put or read and cannot be had again fails whoever uses it, if anyone still does.
                sent.waiter = Replayed(takes_failures=not isinstance(sent.message, Step))
            self._links[sent.process].request(sent.message, sent.waiter)
            if sent.transfers is not None:
                sent.transfers()
        return len(again)

    # ------------------------------------------------------------ the end

    def fail_all(self, error: ActorError, step: StepId | None) -> bool:
        """End everything that waits, because of `error`.

        Calls and the step under way (id `step`) get the error itself; steps behind it are aborted because of it.

        Returns:
            Whether somebody will see the error.
        """
        seen = False
        for waiter in self._take_waiters():
            if isinstance(waiter, StepHandle) and waiter.step != step:
                text = f"{step_text(waiter.step)} was aborted: {str(error).splitlines()[0]}"
                waiter.fail(abandoned(error, text, StepAbortedError, step=step_number(waiter.step)))
            else:
                seen |= waiter.is_awaited
                waiter.fail(error)
        return seen

    def close(self, error: ActorError) -> None:
        """End everything that waits with the same error."""
        for waiter in self._take_waiters():
            waiter.fail(error)

    def _take_waiters(self) -> list[Waiter]:
        waiters = {waiter for link in self._links.values() for waiter in link.waiters.values()} | self._open
        for link in self._links.values():
            link.waiters.clear()
        self._keep([])
        self._is_open.set()  # nothing is sent any more; nobody is to wait for it
        return list(waiters)
