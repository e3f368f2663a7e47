"""disturbing: carries a plan of faults out on a mesh that trains, one after the other, and counts them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import injecting
from fault_plan import ASKED, LETHAL, Fault
from lockstep import SoakFailure, Trainer

import jaxpp_async as jpp
from jaxpp_async.events import Event

RESTART_LIMIT_S = 60.0
"""What it may take until an actor that is lost has been replaced."""


@dataclass
class Tally:
    """What has been done and seen.

    Attributes:
        injected: faults by kind. missed: the process was gone already, or the system did not allow it.
        longest_restart_s: from a lethal fault to the actor's successor at work, by kind.
        events: all of the mesh's.
        last: the faults of late, as text.
    """

    injected: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    longest_restart_s: dict[str, float] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=10))

    def num_events(self, kind: str) -> int:
        """How many of one kind."""
        return sum(event.kind == kind for event in self.events)


class Disturber:
    """Disturbs one mesh.

    Two actors lost at once may be more than the copies in their neighbours' memory can mend, so what is lethal waits
    until the mesh has recovered and copied its state; everything else may happen at any time.

    Args:
        steps_between: how many steps lie between a recovery and the next lethal fault.
    """

    def __init__(self, mesh: jpp.RemoteMesh, trainer: Trainer, steps_between: int):
        self._mesh, self._trainer, self._steps_between = mesh, trainer, steps_between
        self.tally = Tally()
        self._calm_from = 0

    async def watch(self) -> None:
        """Keep what happens to the mesh; ends with it."""
        async for event in self._mesh.events():
            self.tally.events.append(event)
            if event.kind in ("died", "restarted"):
                self._calm_from = self._trainer.num_run + self._steps_between

    async def disturb(self, plan: Sequence[Fault]) -> None:
        """Carry out all of it.

        Raises:
            SoakFailure: a lost actor was not replaced in time.
        """
        start_s = time.monotonic()
        for fault in plan:
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
        began_s = time.monotonic()
        if not await self._kill(fault):
            self.tally.missed[fault.kind] += 1
            return
        before = self.tally.num_events("restarted")
        self.tally.injected[fault.kind] += 1
        try:
            async with asyncio.timeout(RESTART_LIMIT_S):
                await _until(lambda: self.tally.num_events("restarted") > before)
        except TimeoutError:
            raise SoakFailure(f"{fault} was not mended within {RESTART_LIMIT_S:g} s") from None
        took_s = time.monotonic() - began_s
        self.tally.longest_restart_s[fault.kind] = max(took_s, self.tally.longest_restart_s.get(fault.kind, 0.0))

    async def _kill(self, fault: Fault) -> bool:
        pid = self._pid(fault)
        match fault.kind:
            case "terminate":
                return injecting.send(pid, signal.SIGTERM)
            case "stop for ever":
                return injecting.send(pid, signal.SIGSTOP)
            case "cut the control connection":
                port = injecting.control_port(pid)
                return bool(injecting.cut_connections(pid, lambda connection: connection.raddr.port == port))
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

    async def _hurt(self, fault: Fault) -> bool:
        pid = self._pid(fault)
        match fault.kind:
            case "slow":
                return await injecting.slow_down(pid, fault.seconds)
            case "garbage":
                port = injecting.control_port(pid)
                if port is not None:
                    await injecting.garbage(port, fault.number)
                return port is not None
            case "cut the data connections":
                await self.calm()  # it may take a restart, and a death in the middle of that would be a second loss
                port = injecting.control_port(pid)
                cut = injecting.cut_connections(pid, lambda connection: connection.raddr.port != port)
                self._calm_from = self._trainer.num_run + self._steps_between
                return bool(cut)
            case _:
                return await injecting.stop_for(pid, fault.seconds)

    def _pid(self, fault: Fault) -> int:
        pid = self._mesh.actors[fault.actor].pid
        assert pid != os.getpid()  # inline actors cannot be disturbed
        return pid

    def _count(self, fault: Fault, was_there: bool) -> None:
        (self.tally.injected if was_there else self.tally.missed)[fault.kind] += 1


async def _until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110  (nobody says when)
        await asyncio.sleep(0.02)
