"""disturbing: carries a plan of faults out on a mesh that trains, one after the other, and counts them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import injecting
from fault_plan import ASKED, LETHAL, LINKS, Fault
from lockstep import SoakFailure, Trainer
from namespaces import Link, Network

import jaxpp_async as jpp
from jaxpp_async.base.events import Event

RESTART_LIMIT_S = 60.0
"""What it may take until an actor that is lost has been replaced."""

SILENCE_LIMIT_S = 16.0
"""What it may take until an actor that cannot be heard is given up: 10 s, on a machine that is not too busy.
"""

MOST_RESTARTS = 6
"""How many attempts one fault may take of a mesh's `max_restarts`: who allows as many is not let down."""

SLOW_MEGABITS_PER_S = 0.2
"""A step takes several times as long."""


@dataclass
class Tally:
    """What has been done and seen.

    Attributes:
        injected: faults by kind. missed: the process was gone already, or the system did not allow it.
        longest_restart_s: from a fault that takes a restart until all are at work again, by kind.
        most_restarts: how many attempts one fault took at most, by kind.
        num_attempts: all the restarts that have begun; whoever reads the log counts them.
        events: all of the mesh's.
        last: the faults of late, as text.
    """

    injected: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    longest_restart_s: dict[str, float] = field(default_factory=dict)
    most_restarts: Counter[str] = field(default_factory=Counter)
    num_attempts: int = 0
    events: list[Event] = field(default_factory=list)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=10))

    def num_events(self, kind: str) -> int:
        """How many of one kind."""
        return sum(event.kind == kind for event in self.events)


class Disturber:
    """Disturbs one mesh.

    Two actors lost at once may be more than the replicas in their peers' memory can mend, so what is
    lethal waits until the mesh has recovered and copied its state; everything else may happen at any time.

    Args:
        steps_between: how many steps lie between a recovery and the next lethal fault.
        network: of the actors' hosts, in order; None: they all run on this machine.
    """

    def __init__(
        self, mesh: jpp.RemoteMesh, trainer: Trainer, steps_between: int, network: Network | None = None
    ):
        self._mesh, self._trainer, self._steps_between, self._network = mesh, trainer, steps_between, network
        self.tally = Tally()
        self._calm_from = 0

    async def watch(self) -> None:
        """Keep what happens to the mesh; ends with it."""
        async for event in self._mesh.events():
            self.tally.events.append(event)
            if event.kind in ("died", "restarted"):
                self._calm_from = self._trainer.num_run + self._steps_between

    async def disturb(self, plan: Sequence[Fault], seconds: float) -> None:
        """Carry out what there is time for, each to its end.

        Raises:
            SoakFailure: a lost actor was not replaced in time.
        """
        start_s = time.monotonic()
        for fault in plan:
            if time.monotonic() > start_s + seconds:
                return
            await asyncio.sleep(max(0.0, start_s + fault.at_s - time.monotonic()))
            self.tally.last.append(f"{datetime.now(UTC):%H:%M:%S} {fault.kind}, actor {fault.actor}")
            if fault.kind in ASKED:
                self._trainer.wishes.append(fault)
                self.tally.injected[fault.kind] += 1
            elif fault.kind in LETHAL:
                await self._lose(fault)
            else:
                self._count(fault, await self._hurt(fault))

    async def calm(self) -> None:
        """Wait until the mesh has recovered from everything."""
        async with asyncio.timeout(RESTART_LIMIT_S):
            await _until(lambda: self._trainer.num_run >= self._calm_from and self._all_ready())

    def _all_ready(self) -> bool:
        return all(actor.state == "ready" for actor in self._mesh.actors)

    # ------------------------------------------------------------ faults

    async def _lose(self, fault: Fault) -> None:
        await self.calm()
        async with self._timed(fault):
            was_there = await self._kill(fault)
            self._count(fault, was_there)
            before = self.tally.num_events("restarted")
            try:
                async with asyncio.timeout(RESTART_LIMIT_S):
                    await _until(lambda: not was_there or self.tally.num_events("restarted") > before)
            except TimeoutError:
                raise SoakFailure(f"{fault} was not mended within {RESTART_LIMIT_S:g} s") from None

    @contextlib.asynccontextmanager
    async def _timed(self, fault: Fault) -> AsyncIterator[None]:
        """Notes how long a fault took, and how many restarts."""
        tally, began_s, before = self.tally, time.monotonic(), self.tally.num_attempts
        yield
        took_s, attempts = time.monotonic() - began_s, tally.num_attempts - before
        tally.longest_restart_s[fault.kind] = max(took_s, tally.longest_restart_s.get(fault.kind, 0.0))
        tally.most_restarts[fault.kind] = max(attempts, tally.most_restarts[fault.kind])
        if attempts > MOST_RESTARTS:
            raise SoakFailure(f"{fault} took {attempts} restarts")

    async def _kill(self, fault: Fault) -> bool:
        pid = self._pid(fault)
        match fault.kind:
            case "terminate":
                return injecting.send(pid, signal.SIGTERM)
            case "stop for ever":
                return injecting.send(pid, signal.SIGSTOP)
            case "cut the control connection":
                port = self._control_address[1]
                return bool(injecting.cut_connections(pid, lambda connection: connection.remote_port == port))
            case "cut a control link past 10 s":
                return await self._silence(fault)
            case "kill, and its successor":
                was_there = injecting.send(pid, signal.SIGKILL)
                await asyncio.sleep(fault.seconds)
                is_at_work, deaths = self._all_ready(), self.tally.num_events("died")
                injecting.send(self._pid(fault), signal.SIGKILL)
                if is_at_work:  # a death of its own; until it is noticed all looks calm
                    await _until(lambda: self.tally.num_events("died") > deaths)
                return was_there
            case _:
                return injecting.send(pid, signal.SIGKILL)

    async def _silence(self, fault: Fault) -> bool:
        """Its host cannot be reached, until the actor was given up and its successor is missed."""
        before = len(self.tally.events)
        with self._cut(fault, "control"):
            try:
                async with asyncio.timeout(SILENCE_LIMIT_S):
                    await _until(lambda: any(event.kind == "died" for event in self.tally.events[before:]))
            except TimeoutError:
                raise SoakFailure(f"{fault} was not noticed within {SILENCE_LIMIT_S:g} s") from None
            await asyncio.sleep(fault.seconds)
        died = [event for event in self.tally.events[before:] if event.kind == "died"]
        if [(event.actor, event.details["error"]) for event in died] != [
            (fault.actor, "ActorUnresponsiveError")
        ]:
            raise SoakFailure(f"{fault} was noticed as {[str(event) for event in died]}")
        return True

    async def _hurt_link(self, fault: Fault) -> None:
        match fault.kind:
            case "cut a control link for 2 s":
                with self._cut(fault, "control"):
                    await asyncio.sleep(fault.seconds)
            case "cut a data link for 2 s":
                with self._cut(fault, "data"):
                    await asyncio.sleep(fault.seconds)
            case "slow a data link":
                with self._slow(fault):
                    await asyncio.sleep(fault.seconds)
            case _:
                await self.calm()  # what is counted is to be its own
                async with self._timed(fault):
                    with self._cut(fault, "data"):
                        await asyncio.sleep(fault.seconds)
                    await self.calm()

    @contextlib.contextmanager
    def _cut(self, fault: Fault, link: Link) -> Iterator[None]:
        assert self._network is not None  # the plan has no such fault otherwise
        host = self._network.hosts[fault.actor]
        self._network.cut(host, link)
        num_run = self._trainer.num_run
        try:
            yield
            if self._trainer.num_run > num_run + 1:  # what was on its way when it was cut
                raise SoakFailure(f"{self._trainer.num_run - num_run} steps ended in spite of {fault}")
        finally:
            self._network.restore(host, link)
            self._calm_from = self._trainer.num_run + self._steps_between

    @contextlib.contextmanager
    def _slow(self, fault: Fault) -> Iterator[None]:
        assert self._network is not None
        host = self._network.hosts[fault.actor]
        self._network.slow(host, "data", SLOW_MEGABITS_PER_S)
        try:
            yield
        finally:
            self._network.speed_up(host, "data")

    async def _hurt(self, fault: Fault) -> bool:
        if fault.kind in LINKS:
            await self._hurt_link(fault)
            return True
        pid = self._pid(fault)
        match fault.kind:
            case "slow":
                return await injecting.slow_down(pid, fault.seconds)
            case "garbage":
                await injecting.garbage(self._control_address, fault.number)
                return True
            case "cut the data connections":
                # it may take a restart, and a death in the middle of that would be a second loss
                await self.calm()
                port = self._control_address[1]
                cut = injecting.cut_connections(pid, lambda connection: connection.remote_port != port)
                self._calm_from = self._trainer.num_run + self._steps_between
                return bool(cut)
            case _:
                return await injecting.stop_for(pid, fault.seconds)

    def _pid(self, fault: Fault) -> int:
        pid = self._mesh.actors[fault.actor].pid
        assert pid != os.getpid()  # inline actors cannot be disturbed
        return pid

    @property
    def _control_address(self) -> tuple[str, int]:
        """Where the mesh listens for its actors."""
        address = self._mesh._running()._actor_group._address
        assert address is not None  # inline actors cannot be disturbed
        return address

    def _count(self, fault: Fault, was_there: bool) -> None:
        (self.tally.injected if was_there else self.tally.missed)[fault.kind] += 1


async def _until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110  (nobody says when)
        await asyncio.sleep(0.02)
