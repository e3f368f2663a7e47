"""examine: hosts and a way to them in, an `Examination` out. Asks all hosts at once, with deadlines; judges nothing.

Every host runs `doctor.host`, started as a mesh starts its keepers; a host that does not answer is a fact like others.

host_link: the doctor's end of one host. A stream of bytes to `doctor.host` in, answers to orders out.

It decides nothing about hosts, and knows no ssh: whatever carries bytes there and lines back will do.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from jaxpp_async.base.gpu_inventory import VISIBLE
from jaxpp_async.doctor import protocol
from jaxpp_async.doctor.facts import Asked, ClockDifference, Examination, HostReport, LinkReport
from jaxpp_async.doctor.gather import CHILD_S
from jaxpp_async.errors import MeshError
from jaxpp_async.launch.commands import command_here, command_there
from jaxpp_async.launch.host_agent_client import HostProgram, NotUpError, Reach
from jaxpp_async.launch.hosts import (
    ANY,
    Host,
    ProcessPlacement,
    Settings,
    address_towards,
    control_address,
    environment,
)
from jaxpp_async.launch.login_errors import Explanation, explain_python
from jaxpp_async.launch.remote import MAX_HANDSHAKES, CommandReach, Timeouts

HERE = "this machine"
PROGRAM = "jaxpp_async.doctor.host"
FACTS_S = CHILD_S + 10.0
ANSWER_S = 8.0
MEASURED_S = 30.0
_CLOCK_QUESTIONS = 5


@dataclass(frozen=True, slots=True)
class ExaminationPlan:
    """What is to be examined, and how hosts are reached.

    Args:
        hosts: None: this machine alone. settings: of all hosts; a host's own win.
        control_address: as `RemoteMesh` has it. measures: whether to measure between hosts.
    """

    asked: Asked
    hosts: tuple[Host, ...] | None = None
    settings: Settings = field(default_factory=Settings)
    control_address: str | None = None
    measures: bool = True
    timeouts: Timeouts = field(default_factory=Timeouts)


async def examine(plan: ExaminationPlan, reach: Reach | None, say: Callable[[str], None]) -> Examination:
    """Find everything out.

    Args:
        reach: the way to `plan.hosts`; closed at the end. say: told what is going on.
    """
    here = CommandReach(lambda placement, command: list(command))
    try:
        return await _Examiner(plan, here, reach, say).run()
    finally:
        for way in (here, reach):
            if way is not None:
                await way.aclose()


@dataclass(frozen=True, slots=True)
class _End:
    """A host to ask: by which way, and as what.

    Args:
        base: settings of all hosts. platform: what JAX is to start on there.
    """

    host: Host
    name: str
    reach: Reach
    base: Settings
    platform: str

    @property
    def settings(self) -> Settings:
        return self.host.settings.over(self.base)


class Callers:
    """Who connects, as actors would, and proves by a token that it is who was invited."""

    def __init__(self) -> None:
        self._expected: dict[bytes, asyncio.Event] = {}

    async def invite(self, link: HostLink, address: str, port: int) -> str:
        """Have a host connect. Returns: why it could not; empty if it could."""
        token, came = secrets.token_hex(16), asyncio.Event()
        self._expected[token.encode()] = came
        try:
            await link.ask(protocol.CallBack(address, port, token), protocol.Completed, ANSWER_S)
            async with asyncio.timeout(ANSWER_S):
                await came.wait()
        except HostError as error:
            return f"{address}: {error}"
        except TimeoutError:
            return f"{address}: it reached another machine by this address"
        return ""

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection has come."""
        try:
            async with asyncio.timeout(ANSWER_S):
                came = self._expected.get((await reader.readline()).strip())
            if came is not None:
                came.set()
        except (OSError, ValueError):  # late, broken off, or a line without end: nobody of ours
            return
        finally:
            writer.close()


class _Examiner:
    """One examination."""

    def __init__(self, plan: ExaminationPlan, here: Reach, reach: Reach | None, say: Callable[[str], None]):
        self._plan, self._here, self._reach, self._say = plan, here, reach, say
        self._handshakes = asyncio.Semaphore(MAX_HANDSHAKES)

    async def run(self) -> Examination:
        plan, host = self._plan, Host("localhost", self._plan.asked.num_actors or 1)
        self._say("looking at this machine")
        if plan.hosts is None or self._reach is None:
            mine = _End(host, HERE, self._here, plan.settings, plan.asked.platform)
            async with self._link(mine) as link:
                report = await self._report(mine, link)
                links = await self._measure_pairs([(mine, link)]) if _may_measure(report) else ()
            return Examination(plan.asked, report, (report,), links)
        self._say(f"reaching {len(plan.hosts)} host{'s' * (len(plan.hosts) != 1)}")
        mine = _End(host, HERE, self._here, Settings(), "cpu")
        ends = [_End(h, str(h), self._reach, plan.settings, plan.asked.platform) for h in plan.hosts]
        async with contextlib.AsyncExitStack() as stack:
            links = await asyncio.gather(
                *(stack.enter_async_context(self._link(end)) for end in (mine, *ends))
            )
            pairs = list(zip((mine, *ends), links, strict=True))
            here, *reports = await asyncio.gather(*(self._report(end, link) for end, link in pairs))
            reports, error = await self._call_back(reports, pairs[1:])
            there = [pair for pair, report in zip(pairs[1:], reports, strict=True) if _may_measure(report)]
            return Examination(plan.asked, here, tuple(reports), await self._measure_pairs(there), error)

    # ------------------------------------------------------------ one host

    @contextlib.asynccontextmanager
    async def _link(self, end: _End) -> AsyncIterator[HostLink | Explanation]:
        """A host's program; or why it is not there."""
        link = HostLink(end.name, login_mark=end.reach.login_mark)
        try:
            yield await self._open(link, end)
        finally:
            await link.aclose()

    async def _open(self, link: HostLink, end: _End) -> HostLink | Explanation:
        timeouts, settings = self._plan.timeouts, end.settings
        python = settings.python or sys.executable
        try:
            async with self._handshakes:
                own = end.reach is self._here and settings.python is None
                program = command_here(PROGRAM) if own else command_there(python, PROGRAM)
                command = host_command(program, settings.env)
                link.attach(
                    await end.reach.open(ProcessPlacement(end.host, 0, end.host.slots), command, link.on_line)
                )
                if end.reach.login_mark is not None:
                    await link.wait_login(timeouts.login_s)
            await link.wait_up(timeouts.python_s)
            await link.ask(
                protocol.Prepare(_environment(end, self._plan.asked)), protocol.Completed, ANSWER_S
            )
        except OSError as error:
            return Explanation(f"could not be reached: {error}", "")
        except NotUpError as error:
            return end.reach.explain(end.host, error) or explain_python(
                end.host, python, error.said, error.ended
            )
        except HostError as error:
            return _deaf(error)
        return link

    async def _report(self, end: _End, link: HostLink | Explanation) -> HostReport:
        """What a host says of itself."""
        names_gpus = end.settings.devices is not None or VISIBLE in end.settings.env
        report = HostReport(end.name, end.host.slots, names_gpus=names_gpus)
        if isinstance(link, Explanation):
            return replace(report, trouble=link)
        try:
            clock = await _ask_clock(link)
            found = await link.ask(protocol.AskFacts(end.platform), protocol.Facts, FACTS_S)
        except HostError as error:
            return replace(report, trouble=_deaf(error))
        return replace(report, facts=found.facts, clock=clock)

    # ------------------------------------------------------------ the way back

    async def _call_back(
        self, reports: list[HostReport], ends: Sequence[tuple[_End, HostLink | Explanation]]
    ) -> tuple[list[HostReport], str]:
        """Have every host connect to where actors would. Returns: reports with what came of it; what forbids it."""
        assert self._reach is not None
        names, address = await self._reach.resolve([end.host for end, _ in ends]), self._plan.control_address
        try:
            address = address or await asyncio.to_thread(control_address, names)
            callers = Callers()
            server = await asyncio.start_server(callers.take, address, 0)
        except MeshError as error:
            return reports, str(error)
        except OSError as error:
            return reports, f"this machine cannot listen at {address}: {error}"
        async with server:
            port: int = server.sockets[0].getsockname()[1]

            async def one(report: HostReport, link: HostLink | Explanation, name: str) -> HostReport:
                if isinstance(link, Explanation) or report.facts is None:
                    return report
                towards = (
                    await asyncio.to_thread(address_towards, name) if address == ANY else address
                ) or HERE
                return replace(report, calls_back=await callers.invite(link, towards, port))

            asked = zip(reports, (link for _, link in ends), names, strict=True)
            return list(await asyncio.gather(*(one(*each) for each in asked))), ""

    # ------------------------------------------------------------ between hosts

    async def _measure_pairs(
        self, ends: Sequence[tuple[_End, HostLink | Explanation]]
    ) -> tuple[LinkReport, ...]:
        """Each host with the next one, in turn: neighbours in a pipeline are neighbours in a hostfile.

        One host alone is measured between two of its processes.
        """
        if not self._plan.measures:
            return ()
        found: list[LinkReport] = []
        for (end, link), (other, other_link) in itertools.pairwise(ends):
            found.append(await self._measure(end.name, link, other.name, other_link))
        if len(ends) == 1:
            end, link = ends[0]
            async with self._link(end) as second:
                found.append(await self._measure(end.name, link, end.name, second))
        return tuple(found)

    async def _measure(
        self, name: str, link: HostLink | Explanation, other_name: str, other: HostLink | Explanation
    ) -> LinkReport:
        transport = "tcp" if self._plan.asked.transport == "tcp" else "ucx"
        report = LinkReport(name, other_name, transport)
        if isinstance(link, Explanation) or isinstance(other, Explanation):
            return replace(report, error="one of the two is not there")
        self._say(f"measuring between {name} and {other_name}")
        try:
            ends = [
                await each.ask(protocol.OpenEnd(peer), protocol.End, ANSWER_S)
                for peer, each in enumerate((link, other))
            ]
            measured, _ = await asyncio.gather(
                link.ask(protocol.Measure(1, ends[1].address, True), protocol.Measured, MEASURED_S),
                other.ask(protocol.Measure(0, ends[0].address, False), protocol.Measured, MEASURED_S),
            )
        except HostError as error:
            return replace(report, error=str(error))
        return replace(report, latency_s=measured.latency_s, bytes_per_s=measured.bytes_per_s)


def host_command(program: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """A host's program in its environment, of which the dynamic loader reads its part once, as a process starts; the
    rest comes later (`talk.Prepare`)."""
    loader = [f"{name}={value}" for name, value in env.items() if name.startswith("LD_")]
    return [*(["env", *loader] if loader else []), *program]


def _environment(end: _End, asked: Asked) -> dict[str, str]:
    """What all actors of a host have in common: each has devices of its own."""
    settings = end.settings
    env = {"UCX_TLS": "tcp,self"} if asked.transport == "tcp" else {}
    if settings.devices is not None:
        env[VISIBLE] = ",".join(settings.devices)
    return env | environment(
        replace(settings, devices=None), ProcessPlacement(end.host, 0, end.host.slots), end.platform
    )


def _deaf(error: HostError) -> Explanation:
    return Explanation(f"does not answer: {error}", "is it overloaded, or a disk stuck?")


async def _ask_clock(link: HostLink) -> ClockDifference:
    """The shortest of a few questions counts: an answer took half of its way, give or take the other half."""
    found: list[ClockDifference] = []
    for _ in range(_CLOCK_QUESTIONS):
        began_s, wall_s = time.monotonic(), time.time()
        answer = await link.ask(protocol.AskClock(), protocol.ClockIs, ANSWER_S)
        took_s = time.monotonic() - began_s
        found.append(ClockDifference(answer.wall_s - (wall_s + took_s / 2), took_s / 2))
    return min(found, key=lambda clock: clock.error_s)


def _may_measure(report: HostReport) -> bool:
    return report.facts is not None and report.facts.ucx is not None


# ---------------------------------------------------------------- host link

T = TypeVar("T")


class HostError(Exception):
    """A host did not do what it was asked; the message says why, without naming it."""


class HostLink(HostProgram[protocol.Record]):
    """One host, or a second process on one.

    Args:
        name: of the host, for messages. login_mark: a line that tells that the host let us in.
    """

    def __init__(self, name: str, *, login_mark: str | None = None):
        super().__init__(name, protocol.read_record, login_mark)
        self._records: asyncio.Queue[protocol.Record] = asyncio.Queue()
        self._silent = ""

    async def wait_up(self, timeout_s: float) -> None:
        """Wait until Python and the package answer.

        Raises:
            NotUpError: they do not.
        """
        await self._wait(self._records.get(), timeout_s)

    async def ask(self, order: protocol.Order, expected: type[T], timeout_s: float) -> T:
        """One order, and its answer. One at a time.

        Raises:
            HostError: it could not be done, or there is no answer.
        """
        assert self._stream is not None
        if self._silent:  # its answer may still come, and would be taken for another's
            raise HostError(self._silent)
        self._stream.write(protocol.write_order(order))
        try:
            record = await self._wait(self._records.get(), timeout_s)
        except NotUpError as error:
            self._silent = _no_answer(error, timeout_s)
            raise HostError(self._silent) from None
        if isinstance(record, protocol.ProbeFailed):
            raise HostError(record.error)
        if not isinstance(record, expected):
            raise HostError(f"it answered with {type(record).__name__} when asked for {expected.__name__}")
        return record

    async def aclose(self) -> None:
        """End it. A second call does nothing."""
        await self._end()

    def _take_record(self, record: protocol.Record) -> None:
        self._records.put_nowait(record)


def _no_answer(error: NotUpError, timeout_s: float) -> str:
    if error.ended is None:
        return f"it did not answer within {timeout_s:g} s"
    last = f": {error.said[-1].strip()}" if error.said else ""
    how = f"code {error.ended}" if error.ended >= 0 else f"signal {-error.ended}"
    return f"its program ended with {how}{last}"
