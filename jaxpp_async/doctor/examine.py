"""Ask all hosts at once, with deadlines, for the facts that the doctor judges, and measure their links.

Every host runs the program `doctor.host`, started in the way that a mesh starts its host agents. A host that
does not answer is a fact like any other.
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

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ExaminationPlan:
    """The run to be examined, and how its hosts are reached.

    Args:
        asked: the run.
        hosts: the hosts on which actors would run; None for this machine alone.
        settings: the settings of all hosts; a host's own settings override them.
        control_address: the option of that name of `RemoteMesh`.
        measures: whether to measure between hosts.
        timeouts: how long each part of a login may take.
    """

    asked: Asked
    hosts: tuple[Host, ...] | None = None
    settings: Settings = field(default_factory=Settings)
    control_address: str | None = None
    measures: bool = True
    timeouts: Timeouts = field(default_factory=Timeouts)


async def examine(plan: ExaminationPlan, reach: Reach | None, say: Callable[[str], None]) -> Examination:
    """Find out everything about the plan's hosts.

    Args:
        plan: the run and its hosts.
        reach: runs programs on `plan.hosts`; it is closed at the end. None for this machine alone.
        say: a function that is called with a line about each part of the work as it begins.

    Returns:
        All facts; a host that could not be asked has the reason in its report.
    """
    here = CommandReach(lambda placement, command: list(command))
    try:
        return await _Examiner(plan, here, reach, say).run()
    finally:
        for way in (here, reach):
            if way is not None:
                await way.aclose()


@dataclass(frozen=True, slots=True)
class _Target:
    """A host to ask.

    Args:
        name: the host's name for messages.
        reach: runs programs on the host.
        base: the settings of all hosts.
        platform: the platform that JAX is to start on there.
    """

    host: Host
    name: str
    reach: Reach
    base: Settings
    platform: str

    @property
    def settings(self) -> Settings:
        return self.host.settings.over(self.base)


class CallbackListener:
    """A listener to which hosts connect as actors would; each proves by a token which host it is."""

    def __init__(self) -> None:
        self._expected: dict[bytes, asyncio.Event] = {}

    async def request_callback(self, link: HostLink, address: str, port: int) -> str:
        """Have a host connect to an address of this machine.

        Returns:
            Why the host could not connect; empty if it could.
        """
        token, has_come = secrets.token_hex(16), asyncio.Event()
        self._expected[token.encode()] = has_come
        try:
            await link.ask(protocol.CallBack(address, port, token), protocol.Completed, ANSWER_S)
            async with asyncio.timeout(ANSWER_S):
                await has_come.wait()
        except HostError as error:
            return f"{address}: {error}"
        except TimeoutError:
            return f"{address}: it reached another machine by this address"
        return ""

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read the token of a new connection and close the connection."""
        try:
            async with asyncio.timeout(ANSWER_S):
                has_come = self._expected.get((await reader.readline()).strip())
            if has_come is not None:
                has_come.set()
        except (OSError, ValueError):  # late, cut off, or an endless line: none of our hosts
            return
        finally:
            writer.close()


class _Examiner:
    """Carry out one examination."""

    def __init__(self, plan: ExaminationPlan, here: Reach, reach: Reach | None, say: Callable[[str], None]):
        self._plan, self._here, self._reach, self._say = plan, here, reach, say
        self._handshakes = asyncio.Semaphore(MAX_HANDSHAKES)

    async def run(self) -> Examination:
        plan, host = self._plan, Host("localhost", self._plan.asked.num_actors or 1)
        self._say("looking at this machine")
        if plan.hosts is None or self._reach is None:
            mine = _Target(host, HERE, self._here, plan.settings, plan.asked.platform)
            async with self._link(mine) as link:
                report = await self._ask(mine, link)
                links = await self._measure_pairs([(mine, link)]) if _may_measure(report) else ()
            return Examination(plan.asked, report, (report,), links)
        self._say(f"reaching {len(plan.hosts)} host{'s' * (len(plan.hosts) != 1)}")
        mine = _Target(host, HERE, self._here, Settings(), "cpu")
        targets = [_Target(h, str(h), self._reach, plan.settings, plan.asked.platform) for h in plan.hosts]
        async with contextlib.AsyncExitStack() as stack:
            links = await asyncio.gather(
                *(stack.enter_async_context(self._link(target)) for target in (mine, *targets))
            )
            pairs = list(zip((mine, *targets), links, strict=True))
            here, *reports = await asyncio.gather(*(self._ask(target, link) for target, link in pairs))
            reports, error = await self._check_callbacks(reports, pairs[1:])
            there = [pair for pair, report in zip(pairs[1:], reports, strict=True) if _may_measure(report)]
            return Examination(plan.asked, here, tuple(reports), await self._measure_pairs(there), error)

    # ------------------------------------------------------------ one host

    @contextlib.asynccontextmanager
    async def _link(self, target: _Target) -> AsyncIterator[HostLink | Explanation]:
        """Start a host's program, and end it with the context; or explain why it did not start."""
        link = HostLink(target.name, login_mark=target.reach.login_mark)
        try:
            yield await self._open(link, target)
        finally:
            await link.aclose()

    async def _open(self, link: HostLink, target: _Target) -> HostLink | Explanation:
        timeouts, settings = self._plan.timeouts, target.settings
        python = settings.python or sys.executable
        try:
            async with self._handshakes:
                own = target.reach is self._here and settings.python is None
                program = command_here(PROGRAM) if own else command_there(python, PROGRAM)
                command = host_command(program, settings.env)
                placement = ProcessPlacement(target.host, 0, target.host.slots)
                link.attach(await target.reach.open(placement, command, link.on_line))
                if target.reach.login_mark is not None:
                    await link.wait_login(timeouts.login_s)
            await link.wait_up(timeouts.python_s)
            await link.ask(
                protocol.Prepare(_shared_environment(target, self._plan.asked)), protocol.Completed, ANSWER_S
            )
        except OSError as error:
            return Explanation(f"could not be reached: {error}", "")
        except NotUpError as error:
            return target.reach.explain(target.host, error) or explain_python(
                target.host, python, error.said, error.ended
            )
        except HostError as error:
            return _explain_silence(error)
        return link

    async def _ask(self, target: _Target, link: HostLink | Explanation) -> HostReport:
        """Ask a host for its clock and its facts."""
        names_gpus = target.settings.devices is not None or VISIBLE in target.settings.env
        report = HostReport(target.name, target.host.slots, names_gpus=names_gpus)
        if isinstance(link, Explanation):
            return replace(report, trouble=link)
        try:
            clock = await _ask_clock(link)
            found = await link.ask(protocol.AskFacts(target.platform), protocol.Facts, FACTS_S)
        except HostError as error:
            return replace(report, trouble=_explain_silence(error))
        return replace(report, facts=found.facts, clock=clock)

    # ------------------------------------------------------------ connecting back

    async def _check_callbacks(
        self, reports: list[HostReport], targets: Sequence[tuple[_Target, HostLink | Explanation]]
    ) -> tuple[list[HostReport], str]:
        """Have every host connect to the address to which its actors would connect.

        Returns:
            The reports, each with the outcome, and the error that forbids all of it; empty if nothing does.
        """
        assert self._reach is not None
        names, address = await self._reach.resolve([t.host for t, _ in targets]), self._plan.control_address
        try:
            address = address or await asyncio.to_thread(control_address, names)
            listener = CallbackListener()
            server = await asyncio.start_server(listener.accept, address, 0)
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
                return replace(report, calls_back=await listener.request_callback(link, towards, port))

            asked = zip(reports, (link for _, link in targets), names, strict=True)
            return list(await asyncio.gather(*(one(*each) for each in asked))), ""

    # ------------------------------------------------------------ between hosts

    async def _measure_pairs(
        self, targets: Sequence[tuple[_Target, HostLink | Explanation]]
    ) -> tuple[LinkReport, ...]:
        """Measure each host with the next one, one pair after the other.

        Hosts that are adjacent in a pipeline are adjacent in a hostfile. A single host is measured between
        two of its processes.
        """
        if not self._plan.measures:
            return ()
        found: list[LinkReport] = []
        for (target, link), (other, other_link) in itertools.pairwise(targets):
            found.append(await self._measure(target.name, link, other.name, other_link))
        if len(targets) == 1:
            target, link = targets[0]
            async with self._link(target) as second:
                found.append(await self._measure(target.name, link, target.name, second))
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
            targets = [
                await each.ask(protocol.OpenEnd(peer), protocol.End, ANSWER_S)
                for peer, each in enumerate((link, other))
            ]
            measured, _ = await asyncio.gather(
                link.ask(protocol.Measure(1, targets[1].address, True), protocol.Measured, MEASURED_S),
                other.ask(protocol.Measure(0, targets[0].address, False), protocol.Measured, MEASURED_S),
            )
        except HostError as error:
            return replace(report, error=str(error))
        return replace(report, latency_s=measured.latency_s, bytes_per_s=measured.bytes_per_s)


def host_command(program: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return the command that starts a host's program with the variables that the dynamic loader reads.

    The loader reads them once, as a process starts; the other variables follow later, by `protocol.Prepare`.
    """
    loader = [f"{name}={value}" for name, value in env.items() if name.startswith("LD_")]
    return [*(["env", *loader] if loader else []), *program]


def _shared_environment(target: _Target, asked: Asked) -> dict[str, str]:
    """Return the environment that all actors of a host have in common: each has devices of its own."""
    settings = target.settings
    env = {"UCX_TLS": "tcp,self"} if asked.transport == "tcp" else {}
    if settings.devices is not None:
        env[VISIBLE] = ",".join(settings.devices)
    return env | environment(
        replace(settings, devices=None), ProcessPlacement(target.host, 0, target.host.slots), target.platform
    )


def _explain_silence(error: HostError) -> Explanation:
    return Explanation(f"does not answer: {error}", "is it overloaded, or a disk stuck?")


async def _ask_clock(link: HostLink) -> ClockDifference:
    """Measure how far a host's clock is ahead, by the shortest of a few questions.

    The answer is taken to be as old as half of the question's round trip, with an error of that half.
    """
    found: list[ClockDifference] = []
    for _ in range(_CLOCK_QUESTIONS):
        began_s, wall_s = time.monotonic(), time.time()
        answer = await link.ask(protocol.AskClock(), protocol.ClockIs, ANSWER_S)
        took_s = time.monotonic() - began_s
        found.append(ClockDifference(answer.wall_s - (wall_s + took_s / 2), took_s / 2))
    return min(found, key=lambda clock: clock.error_s)


def _may_measure(report: HostReport) -> bool:
    return report.facts is not None and report.facts.ucx is not None


# ---------------------------------------------------------------- one host's program


class HostError(Exception):
    """The reason why a host did not do what it was asked; the message does not name the host."""


class HostLink(HostProgram[protocol.Record]):
    """A connection to the program `doctor.host` on one host, of which a host may run two.

    Args:
        name: the host's name for messages.
        login_mark: a line that the host prints once its login has succeeded.
    """

    def __init__(self, name: str, *, login_mark: str | None = None):
        super().__init__(name, protocol.read_record, login_mark)
        self._records: asyncio.Queue[protocol.Record] = asyncio.Queue()
        self._silence = ""

    async def wait_up(self, timeout_s: float) -> None:
        """Wait until Python has started there with the package.

        Raises:
            NotUpError: Python or the package did not answer.
        """
        await self._wait(self._records.get(), timeout_s)

    async def ask(self, order: protocol.Order, expected: type[T], timeout_s: float) -> T:
        """Send an order and wait for its answer; a caller waits for each answer before the next order.

        Raises:
            HostError: the host could not do it, or did not answer.
        """
        assert self._stream is not None
        if self._silence:  # a late answer would be taken for that of this order
            raise HostError(self._silence)
        self._stream.write(protocol.write_order(order))
        try:
            record = await self._wait(self._records.get(), timeout_s)
        except NotUpError as error:
            self._silence = _describe_silence(error, timeout_s)
            raise HostError(self._silence) from None
        if isinstance(record, protocol.ProbeFailed):
            raise HostError(record.error)
        if not isinstance(record, expected):
            raise HostError(f"it answered with {type(record).__name__} when asked for {expected.__name__}")
        return record

    async def aclose(self) -> None:
        """End the program on the host. A second call does nothing."""
        await self._end()

    def _take_record(self, record: protocol.Record) -> None:
        self._records.put_nowait(record)


def _describe_silence(error: NotUpError, timeout_s: float) -> str:
    if error.ended is None:
        return f"it did not answer within {timeout_s:g} s"
    last = f": {error.said[-1].strip()}" if error.said else ""
    how = f"code {error.ended}" if error.ended >= 0 else f"signal {-error.ended}"
    return f"its program ended with {how}{last}"
