"""Launchers of one's own: the `Launcher` interface done by hand, and a command that runs an agent elsewhere.
Also what every launcher on other hosts shares: at most eight handshakes at once, one address, one line a
host.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from fake_actor import NullTransport, scripted, start_fakes
from own_launcher import SubprocessLauncher
from resources import nothing_left
from rich.console import Console

from jaxpp_async.controller.controller import Controller
from jaxpp_async.controller.deploy import LoadableProgram
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.errors import ActorDiedError, LaunchError, MeshError
from jaxpp_async.launch import LaunchSpec
from jaxpp_async.launch import host_agent_protocol as kp
from jaxpp_async.launch import hosts as addresses_module
from jaxpp_async.launch.choose import choose_launcher
from jaxpp_async.launch.hosts import Settings, parse_hosts, place
from jaxpp_async.launch.options import LaunchOptions
from jaxpp_async.launch.remote import MAX_HANDSHAKES, CommandReach, HostLines, RemoteLauncher
from jaxpp_async.launch.spawn import ActorRequest
from jaxpp_async.protocol.frames import version_mismatch
from jaxpp_async.protocol.line_protocol import RECORD
from jaxpp_async.protocol.task_group import all_of
from tests.launch.test_local import HERE, environment, is_running

# ---------------------------------------------------------------- the interface, by hand


class MyLauncher(SubprocessLauncher):
    """The launcher of the example, for actors that do nothing."""

    def __init__(self) -> None:
        super().__init__(actor="fake_actor:FakeActor")

    def make_transport(self, kind: str, network: Any) -> Any:
        return NullTransport()

    async def start(self, spec: LaunchSpec, adopt: Callable[[socket.socket], None]) -> Any:
        env = {**spec.env, "PYTHONPATH": environment()["PYTHONPATH"]}
        return await super().start(dataclasses.replace(spec, env=env), adopt)


async def start(launcher: Any, num_actors: int = 2) -> Controller:
    return await start_fakes(num_actors, launcher)


async def hanging_step(controller: Controller) -> Any:
    program, _ = await controller.load(LoadableProgram(scripted("hang", len(controller.actors))))
    return controller.start_step(SubmittedStep(program), {}, {})


async def test_a_launcher_of_ones_own(caplog):
    async with nothing_left(caplog):
        controller = await start(MyLauncher())
        step = await hanging_step(controller)
        os.kill(controller.actors[0].pid, signal.SIGKILL)
        with pytest.raises(
            ActorDiedError, match=r"actor 0 \(host this machine, pid \d+\) was killed by SIGKILL"
        ):
            await step
        await controller.aclose()


# ---------------------------------------------------------------- a command that runs a program elsewhere


def elsewhere(hosts: list[str], reach: Any = None, **options: Any) -> RemoteLauncher:
    settings = Settings(env={"PYTHONPATH": str(HERE)})
    reach = reach or CommandReach(lambda placement, host_agent: ["sh", "-c", 'exec "$@"', "sh", *host_agent])
    options = {"control_address": "127.0.0.1", "settings": settings} | options
    return RemoteLauncher(reach, parse_hosts(hosts), actor="fake_actor:FakeActor", **options)


def test_its_actors_spread_over_the_slots_of_its_hosts():
    launcher = elsewhere(["a slots=4", "b slots=4"])
    made, per_actor = choose_launcher(LaunchOptions(launcher=launcher, num_devices=4), 2)
    assert (made, per_actor, launcher.slots_each) == (launcher, 1, 4)
    assert [p.host.name for p in place(launcher.hosts, 2, launcher.slots_each)] == ["a", "b"]
    assert choose_launcher(LaunchOptions(launcher=launcher, num_devices=8), 1) == (launcher, 2)
    with pytest.raises(MeshError, match="8 actors of 4 devices do not fit 8 slots on 2 hosts"):
        choose_launcher(LaunchOptions(launcher=launcher, num_devices=4), 8)


@pytest.mark.parametrize(("per_actor", "says"), [(1, "2 actors started"), (2, "2 processes started")])
def test_what_has_started_is_counted_as_what_it_is(caplog, per_actor, says):
    launcher = elsewhere(["a slots=2"])
    spec = LaunchSpec(0, 2, 0, b"", None, processes_per_actor=per_actor)
    with caplog.at_level("INFO", "jaxpp_async"):
        launcher._note_started(place(launcher.hosts, 2)[0], spec)
    assert f"host a: {says}" in caplog.messages


async def test_tasks_are_named_by_what_they_do_and_for_whom():
    async def name() -> str:
        task = asyncio.current_task()
        assert task is not None
        return task.get_name()

    assert await all_of({3: name()}, "load") == {3: "load 3"}


async def test_actors_through_a_command(caplog):
    async with nothing_left(caplog):
        controller = await start(elsewhere(["a slots=2 env=WHERE=a cpus=0", "b env=WHERE=b"]), 3)
        processes = [psutil.Process(info.pid) for info in controller.actors]
        assert [p.environ()["WHERE"] for p in processes] == ["a", "a", "b"]
        assert processes[0].cpu_affinity() == [0] and processes[0].ppid() == processes[1].ppid()
        step = await hanging_step(controller)
        processes[2].send_signal(signal.SIGSEGV)
        with pytest.raises(ActorDiedError, match="was killed by SIGSEGV"):
            await step
        await controller.aclose()
        assert not any(map(is_running, processes))


async def test_a_command_that_fails(caplog):
    async with nothing_left(caplog):
        with pytest.raises(
            LaunchError, match=r"host a: .* ended with code 4 before it was ready: no such pod"
        ):
            await start(
                elsewhere(
                    ["a"], CommandReach(lambda p, host_agent: ["sh", "-c", "echo no such pod; exit 4"])
                ),
                1,
            )
        with pytest.raises(LaunchError, match=r"host a: could not be reached: .*/no/command"):
            await start(elsewhere(["a"], CommandReach(lambda p, host_agent: ["/no/command"])), 1)


async def test_an_actor_that_cannot_be_set_up_says_so(caplog):
    async with nothing_left(caplog):
        with pytest.raises(LaunchError, match=r"names CPU 9999"):
            await start(elsewhere(["a cpus=9999"]), 1)


@pytest.mark.parametrize("how", ["end of file", "lease", "SIGTERM"])
def test_a_host_agent_leaves_nothing_behind(how, tmp_path):
    """Not even what has a session of its own."""
    code = (
        "import subprocess, time; "
        "print('child', subprocess.Popen(['sleep', '62'], start_new_session=True).pid, flush=True); "
        "time.sleep(62)"
    )
    actor = f'#!/bin/sh\nexec {sys.executable} -c "{code}"\n'
    command = [sys.executable, "-m", "jaxpp_async.launch.host_agent", "1.0" if how == "lease" else "15"]
    host_agent = subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert host_agent.stdin is not None and host_agent.stdout is not None
    path = tmp_path / "actor"
    path.write_text(actor)
    path.chmod(0o755)
    try:
        host_agent.stdin.write(kp.write_order(kp.StartActor("0", ActorRequest(str(path), {}, {}), "/")))
        host_agent.stdin.flush()
        processes = []
        while len(processes) < 2:
            record = kp.read_record(host_agent.stdout.readline().decode().rstrip("\n"))
            if isinstance(record, kp.ActorStarted):
                processes.append(psutil.Process(record.pid))
            elif isinstance(record, kp.OutputLine):
                processes.append(psutil.Process(int(record.text.split()[1])))
        assert all(map(is_running, processes))
        if how == "end of file":
            host_agent.stdin.close()
        elif how == "SIGTERM":
            host_agent.terminate()
        assert host_agent.wait(5) in (81, 82)
        deadline = time.monotonic() + 1
        while any(map(is_running, processes)):
            assert time.monotonic() < deadline
        rest = [kp.read_record(line) for line in host_agent.stdout.read().decode().split("\n")]
        (dead,) = [record for record in rest if isinstance(record, kp.ActorEnded)]
        said = [record.text for record in rest if isinstance(record, kp.OutputLine)]
        if how == "lease":  # should the driver wake up, it hears that this was its own doing
            assert dead.returncode == 82 and said[-1].startswith("the driver was silent for 1 s (lease_s=1)")
        else:
            assert dead.returncode == -signal.SIGKILL and said == []
    finally:
        host_agent.kill()
        host_agent.wait()
        host_agent.stdin.close()
        host_agent.stdout.close()


async def test_signs_of_life_over_a_command_of_ones_own_keep_a_short_lease():
    controller = await start(elsewhere(["a"], lease_s=1.0), 1)
    try:
        await asyncio.sleep(2.5)
        assert controller.cause is None
    finally:
        await controller.aclose()


# ---------------------------------------------------------------- what all of them share


async def test_at_most_eight_handshakes_at_once():
    """Each host waits for a login that never comes."""
    under_way, most = 0, 0
    enough = asyncio.Event()

    class Slow:
        agent_per_process, login_mark = False, "in"

        async def resolve(self, hosts):
            return [host.name for host in hosts]

        async def open(self, placement, host_agent, on_line):
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            if under_way == MAX_HANDSHAKES:
                asyncio.get_running_loop().call_later(0.1, enough.set)
            await asyncio.Event().wait()

        def explain(self, host, error):
            return None

        async def aclose(self):
            return None

    starting = asyncio.create_task(start(elsewhere([f"h{i}" for i in range(20)], Slow()), 20))
    await enough.wait()
    assert most == MAX_HANDSHAKES
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


@pytest.mark.parametrize(
    ("ways", "address"),
    [
        ({"a": "127.0.0.1"}, "127.0.0.1"),
        ({"a": "127.0.0.1", "here": "10.0.0.1"}, "127.0.0.1"),  # an address of this machine's own
        ({"here": "10.0.0.1", "b": "10.0.0.1"}, "10.0.0.1"),
        ({"a": "127.0.0.1", "b": "10.0.0.1", "c": "10.0.0.1"}, "10.0.0.1"),
        ({"a": None, "b": "10.0.0.1"}, "10.0.0.1"),
        ({"a": "10.0.0.1", "b": "10.1.0.1"}, None),
    ],
)
def test_the_address_that_reaches_the_hosts(monkeypatch, ways, address):
    theirs = {"a": "127.0.0.1", "here": "10.0.0.1"} if ways.get("a") == "127.0.0.1" else {"here": "10.0.0.1"}
    monkeypatch.setattr(
        addresses_module, "_route_to", lambda name: ways[name] and (ways[name], theirs.get(name, "10.0.0.77"))
    )
    if address is not None:
        assert addresses_module.control_address(list(ways)) == address
    else:
        with pytest.raises(
            MeshError, match=r"10.0.0.1 for a, 10.1.0.1 for b\); choose one with control_address="
        ):
            addresses_module.control_address(list(ways))


def test_addresses_of_this_machine():
    assert addresses_module.address_towards("localhost") == "127.0.0.1"
    assert addresses_module.address_towards("no-such-host.invalid") is None


def test_one_line_a_host():
    text = io.StringIO()
    lines = HostLines(Console(file=text, force_terminal=True, width=60))
    lines.set("a", "connecting")
    lines.set("host-b", "1 actor started")
    assert lines.render().plain == "a       connecting\nhost-b  1 actor started"
    lines.close()
    assert "1 actor started" in text.getvalue()
    for i in range(40):
        lines.set(f"h{i}", "connecting" if i % 2 else "starting Python")
    assert lines.render().plain == "20 hosts  starting Python\n20 hosts  connecting"
    lines.close()


def test_host_lines_without_a_terminal(caplog):
    caplog.set_level("INFO", logger="jaxpp_async")
    HostLines(Console(file=io.StringIO())).set("a", "connecting")
    assert "host a: connecting" in caplog.text


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ({"jax": "1", "jaxlib": "1"}, None),
        (
            {"jax": "2", "jaxlib": "1"},
            "/py has jax 2, this machine has jax 1; .* /py -m pip install 'jax==1'",
        ),
        ({"jax": "1", "jaxlib": None}, "/py has no jaxlib, this machine has jaxlib 1"),
        ({}, "/py has no jax, "),
    ],
)
def test_other_versions_are_named(theirs, says):
    found = version_mismatch({"jax": "1", "jaxlib": "1"}, theirs, "/py")
    assert found is None if says is None else found is not None and re.search(says, found)


MESSAGES = [
    kp.AgentHello("h", 1, "/py", {"jax": None}),
    kp.ActorStarted("0.0", 7),
    kp.StartFailed("0.0", "no"),
    kp.OutputLine("0.0", "caf\u00e9 \x1e \x00"),
    kp.ActorEnded("0.0", -9, None),
]


@pytest.mark.parametrize("record", MESSAGES)
def test_records_are_lines(record):
    line = kp.write_record(record)
    assert line.count(b"\n") == 1 and kp.read_record(line.decode().rstrip("\n")) == record


def test_orders_are_lines():
    request = ActorRequest("/py", {"A": "1"}, {"secret": "ab"}, 1, 2, (0, 1))
    for order in (kp.StartActor("0.1", request, "/"), kp.SignalActor("0.1", 9), kp.Close()):
        assert kp.read_order(b".." + kp.write_order(order)) == order
    assert kp.read_order(b"...") is None and "ab" not in repr(kp.StartActor("0", request, "/"))


@pytest.mark.parametrize("line", [b"{}", b'["Start", {"secret": "abab"}]', b'["Evil", {}]', b"\xff", b"[1]"])
def test_lines_that_are_no_orders(line):
    with pytest.raises(ValueError) as raised:
        kp.read_order(line)
    assert "abab" not in str(raised.value)


def test_a_banner_is_no_record():
    assert kp.read_record("Welcome to n1") is None and kp.read_record("") is None
    with pytest.raises(ValueError, match="no message of a host agent"):
        kp.read_record(RECORD + "{}")
