"""Examine the hosts of a run for the doctor, the command that checks whether a run would work before the user
starts it.

This module asks all hosts in parallel, with deadlines, for the facts that the doctor needs, and measures the
links between the hosts. Every host runs the program `doctor.host`, which is started in the same way as a mesh
starts its host agents. If a host does not answer, the examination goes on, and the report of that host gives
the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from jaxpp_async.base.gpu_inventory import VISIBLE
from jaxpp_async.doctor import protocol
from jaxpp_async.doctor.facts import ClockDifference, Examination, HostReport, LinkReport, RequestedRun
from jaxpp_async.doctor.gather import CHILD_S
from jaxpp_async.errors import MeshError
from jaxpp_async.launch.host_agent_client import HostProgram, ProgramNotStartedError, Reach
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
from jaxpp_async.launch.run_module import command_here, command_there

HERE = "this machine"
PROGRAM = "jaxpp_async.doctor.host"
FACTS_S = CHILD_S + 10.0
ANSWER_S = 8.0
MEASURED_S = 30.0
_CLOCK_QUESTIONS = 5

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ExaminationPlan:
    """The plan of an examination: the run to be checked, its hosts, and how to reach them.

    Args:
        asked: the run that the user wants to start.
        hosts: the hosts on which actors would run; None for this machine alone.
        settings: the settings of all hosts; a host's own settings override them.
        control_address: the option `control_address` of `RemoteMesh`: the address on which this machine would
            listen for actors. None to choose one automatically.
        measures: whether to measure the links between hosts.
        timeouts: the limits on how long the login to a host, and the start of Python there, may take.
    """

    asked: RequestedRun
    hosts: tuple[Host, ...] | None = None
    settings: Settings = field(default_factory=Settings)
    control_address: str | None = None
    measures: bool = True
    timeouts: Timeouts = field(default_factory=Timeouts)


async def examine(plan: ExaminationPlan, reach: Reach | None, say: Callable[[str], None]) -> Examination:
    """Examine the hosts of a run, and return the facts that show whether the run would work.

    Args:
        plan: the run and its hosts.
        reach: the object that runs programs on `plan.hosts`; this function closes it at the end. None if the
            run uses this machine alone.
        say: a function that is called with a line of text at the beginning of each part of the work.

    Returns:
        The facts that were found. If a host could not be asked, its report has the reason instead of facts.
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
    """A host to examine, and how to run a program on it.

    Args:
        host: the host.
        name: the host's name for messages to the user.
        reach: the object that runs programs on the host.
        base: the settings of all hosts; the host's own settings override them.
        platform: the platform on which JAX is to start on this host.
    """

    host: Host
    name: str
    reach: Reach
    base: Settings
    platform: str

    @property
    def settings(self) -> Settings:
        return self.host.settings.merged_over(self.base)


class CallbackListener:
    """A server on this machine, to which hosts connect in order to test that actors on them could do so. Each
    host sends a token, by which the server recognizes the host.
    """

    def __init__(self) -> None:
        self._expected: dict[bytes, asyncio.Event] = {}

    async def request_callback(self, link: HostLink, address: str, port: int) -> str:
        """Have a host connect to an address of this machine, and wait until it has connected.

        Args:
            link: the connection to the doctor's program on the host.
            address: the address of this machine.
            port: the port on which this machine listens.

        Returns:
            The reason why the host could not connect; empty if it could.
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
        """Read the token of a new connection, note which host has connected, and close the connection."""
        try:
            async with asyncio.timeout(ANSWER_S):
                has_come = self._expected.get((await reader.readline()).strip())
            if has_come is not None:
                has_come.set()
        except (OSError, ValueError):  # a late, cut or endless line is from none of our hosts
            return
        finally:
            writer.close()


class _Examiner:
    """One examination of a run and its hosts. The method `run` carries out the examination."""

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
        """Start the doctor's program on a host for the duration of the context.

        The context's value is the connection to the program, or an explanation of why the program did not
        start.
        """
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
        except ProgramNotStartedError as error:
            return target.reach.explain(target.host, error) or explain_python(
                python, error.said, error.exit_status
            )
        except HostError as error:
            return _explain_silence(error)
        return link

    async def _ask(self, target: _Target, link: HostLink | Explanation) -> HostReport:
        """Ask a host for its clock and its facts, and return its report.

        Args:
            target: the host.
            link: the connection to the doctor's program on the host, or the explanation of why there is none,
                which then goes into the report.
        """
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
        """Have every host connect to the address of this machine to which its actors would connect.

        Args:
            reports: the reports of the hosts.
            targets: the hosts, in the same order, each with the connection to its program or an explanation
                of why there is none.

        Returns:
            Two parts. The first part is the list of reports, each with the outcome in `calls_back`. The
            second part is an empty string if this machine could listen for the hosts, and otherwise the
            reason why it could not.
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
        """Measure the link between each host and the next host in the list, one link after the other.

        Only neighbours are measured, because hosts that are adjacent in a hostfile are adjacent in a
        pipeline. If there is only one host, the link between two processes of that host is measured.

        Args:
            targets: the hosts, each with the connection to its program or an explanation of why there is
                none.

        Returns:
            One report per link; empty if the plan says that links are not to be measured.
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
                await each.ask(protocol.OpenEnd(peer), protocol.EndOpened, ANSWER_S)
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
    """Return the command line that starts the doctor's program on a host.

    The command line also sets those variables of `env` that the dynamic loader reads, because the loader
    reads them only when a process starts. The program gets the other variables later, in a `protocol.Prepare`
    message.

    Args:
        program: the program's argument vector.
        env: the environment variables that the user set for the host.
    """
    loader = [f"{name}={value}" for name, value in env.items() if name.startswith("LD_")]
    return [*(["env", *loader] if loader else []), *program]


def _shared_environment(target: _Target, asked: RequestedRun) -> dict[str, str]:
    """Return the environment variables that all actors of a host have in common.

    Differences between actors, such as the devices that each of them gets, are left out.
    """
    settings = target.settings
    env = {"UCX_TLS": "tcp,self"} if asked.transport == "tcp" else {}
    if settings.devices is not None:
        env[VISIBLE] = ",".join(settings.devices)
    return env | environment(dataclasses.replace(settings, devices=None), target.platform)


def _explain_silence(error: HostError) -> Explanation:
    return Explanation(f"does not answer: {error}", "is it overloaded, or a disk stuck?")


async def _ask_clock(link: HostLink) -> ClockDifference:
    """Measure how far a host's clock is ahead of this machine's clock. Of several round trips, the shortest
    one is used.

    The host is assumed to have read its clock in the middle of the round trip. The possible error is
    therefore half the duration of the round trip.
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
    """An error with the reason why a host did not carry out a request of the doctor; the message does not
    name the host.
    """


class HostLink(HostProgram[protocol.Record]):
    """A connection to the program that the doctor runs on a host (`doctor.host`), which gathers facts and
    measures links.

    If a run uses one host only, the doctor opens two such connections to that host, each to a program of its
    own, and measures the link between the two programs.

    Args:
        name: the host's name for error messages.
        login_mark: a line that the host prints once its login has succeeded; None if the host prints no such
            line.
    """

    def __init__(self, name: str, *, login_mark: str | None = None):
        super().__init__(name, protocol.read_record, login_mark)
        self._records: asyncio.Queue[protocol.Record] = asyncio.Queue()
        self._silence = ""

    async def wait_up(self, timeout_s: float) -> None:
        """Wait until the program on the host has reported that Python and this package have started there.

        Raises:
            ProgramNotStartedError: the program did not report within `timeout_s` seconds, or it ended.
        """
        await self._wait(self._records.get(), timeout_s)

    async def ask(self, order: protocol.Order, expected: type[T], timeout_s: float) -> T:
        """Send an order (a request) to the program on the host, wait for the answer and return the answer.

        A caller must wait for each answer before it sends the next order. If one answer does not arrive in
        time, every further order fails, because a late answer would be mistaken for the answer to the next
        order.

        Args:
            order: the order to send.
            expected: the type of the answer.
            timeout_s: the number of seconds to wait for the answer.

        Raises:
            HostError: the host could not carry out the order, did not answer in time, or gave an answer of
                another type than `expected`.
        """
        assert self._stream is not None
        if self._silence:  # a late answer would be mistaken for that of this order
            raise HostError(self._silence)
        self._stream.write(protocol.write_order(order))
        try:
            record = await self._wait(self._records.get(), timeout_s)
        except ProgramNotStartedError as error:
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


def _describe_silence(error: ProgramNotStartedError, timeout_s: float) -> str:
    if error.exit_status is None:
        return f"it did not answer within {timeout_s:g} s"
    last = f": {error.said[-1].strip()}" if error.said else ""
    how = f"code {error.exit_status}" if error.exit_status >= 0 else f"signal {-error.exit_status}"
    return f"its program ended with {how}{last}"
