"""Actors over ssh: what goes wrong says where, why and what to do; nothing is left behind; results equal
plain JAX.

Tests with `sshd` in them talk to an sshd of their own: `make test-ssh`.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import sshd as sshd_of_tests
from fake_actor import scripted, start_fakes
from resources import nothing_left
from sshd import Sshd
from waiting import until

import jaxpp_async as jpp
from jaxpp_async.controller.controller import Controller
from jaxpp_async.controller.deploy import LoadableProgram
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.errors import ActorDiedError, HandshakeError, LaunchError
from jaxpp_async.launch.hosts import Host, Settings, parse_hosts
from jaxpp_async.launch.login_errors import explain_python, explain_ssh
from jaxpp_async.launch.remote import Timeouts
from jaxpp_async.launch.ssh import ssh_command, ssh_launcher
from tests.launch.test_local import HERE, is_running

CACHE = jax.config.jax_compilation_cache_dir
REASON = sshd_of_tests.skip_reason()
needs_sshd = pytest.mark.skipif(REASON is not None, reason=str(REASON))

# ---------------------------------------------------------------- pure parts


def test_the_command_asks_nothing_and_forwards_nothing():
    command = ssh_command(Host("n1", user="me", port=22), ["/my py/python", "-m", "agent"], ["-i", "key"])
    options = " ".join(command[: command.index("--")])
    assert options.startswith(
        "ssh -i key -T -o BatchMode=yes -o StrictHostKeyChecking=yes -o ConnectTimeout="
    )
    for option in (
        "ForwardAgent=no",
        "ForwardX11=no",
        "ControlPath=none",
        "ServerAliveInterval=5",
        "-p 22",
        "-l me",
    ):
        assert option in options
    assert command[-3:] == ["--", "n1", "echo jaxpp-async-login; exec '/my py/python' -m agent"]


CHANGED = """@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
Host key for [n1]:2222 has changed and you have requested strict checking.
Host key verification failed."""

SAID_BY_SSH = [
    (CHANGED, "its host key has changed: another machine", r"ssh-keygen -R '\[n1\]:2222'"),
    (
        "No ED25519 host key is known for n1 and you have ...\nHost key verification failed.",
        "not known",
        "once by hand",
    ),
    ("me@n1: Permission denied (publickey).", r"refused our key: me@n1: .*\(publickey\)", "authorized_keys"),
    ("Received disconnect: 2: Too many authentication failures", "refused our key", "ssh-agent"),
    ("ssh: connect to host n1 port 2222: Connection refused", "refused the connection", "start sshd there"),
    ("ssh: Could not resolve hostname n1: Name or service not known", "name cannot be looked up", "spelling"),
    (
        "ssh: connect to host n1 port 22: Connection timed out",
        r"cannot be reached \(Connection timed out\)",
        "firewall",
    ),
    (
        "ssh: connect to host n1 port 22: No route to host",
        r"cannot be reached \(No route to host\)",
        "leave it out",
    ),
    (
        "kex_exchange_identification: Connection closed by remote host",
        "closed the connection before",
        "MaxStartups",
    ),
    (
        "/home/me/.ssh/config: line 3: Bad configuration option: foo",
        "does not accept its configuration",
        "ssh_options",
    ),
    ("something new", "ssh failed: something new", "ssh -p 2222 me@n1 true` *, with -v"),
    ("", "ssh failed: it said nothing", "-v"),
]


@pytest.mark.parametrize(("said", "what", "remedy"), SAID_BY_SSH)
def test_what_ssh_says_is_explained(said, what, remedy):
    host = Host("n1", user="me", port=2222)
    found = explain_ssh(host, said.splitlines(), 255, is_logged_in=False)
    assert found is not None and re.search(what, found.what) and re.search(remedy, found.remedy)


SAID_BY_PYTHON = [
    (
        "bash: line 1: exec: /opt/py: cannot execute: No such file or directory",
        127,
        "there is no Python at /opt/py",
    ),
    ("fish: Unknown command: /opt/py", 127, "there is no Python at /opt/py"),
    ("bash: /opt/py: Permission denied", 126, r"no Python at /opt/py \(bash: .*Permission denied\)"),
    (
        "/opt/py: Error while finding ... (ModuleNotFoundError: No module named 'jaxpp_async')",
        1,
        "does not have the pack",
    ),
    ("/opt/py: No module named jaxpp_async.launch.host_agent", 1, "has an older jaxpp-async"),
    ("ModuleNotFoundError: No module named 'msgspec'", 1, "without the package msgspec"),
    ("Unknown option: -P\nusage: /opt/py [option] ...", 2, "/opt/py there is older than Python 3.11"),
    ("Segmentation fault", -11, "ended with signal 11 before it was ready: Segmentation fault"),
    ("", 3, "ended with code 3"),
]


@pytest.mark.parametrize(("said", "code", "what"), SAID_BY_PYTHON)
def test_what_keeps_python_from_starting_is_explained(said, code, what):
    found = explain_python("/opt/py", said.splitlines(), code)
    assert re.search(what, found.what) and "/opt/py" in found.what + found.remedy


# ---------------------------------------------------------------- with an sshd


@pytest.fixture(scope="module")
def sshd(tmp_path_factory) -> Iterator[Sshd]:
    folder = tmp_path_factory.mktemp("sshd")
    (folder / "home").mkdir()
    with sshd_of_tests.running(folder, f"SetEnv HOME={folder}/home") as running:
        yield running


@pytest.fixture
def rc(sshd) -> Iterator[Path]:
    """What the login shell reads before anything else: bash does so over ssh, also where it is not
    interactive."""
    path = sshd.folder / "home" / ".bashrc"
    yield path
    path.unlink(missing_ok=True)


def launcher(sshd: Sshd, hosts: list[str] | None = None, **options: Any) -> Any:
    settings = options.pop("settings", None) or Settings(env={"PYTHONPATH": str(HERE)})
    return ssh_launcher(
        parse_hosts([h.format(port=sshd.port) for h in hosts or ["127.0.0.1 port={port} slots=2"]]),
        ssh_options=[*options.pop("ssh_options", ()), *sshd.options],
        actor="fake_actor:FakeActor",
        settings=settings,
        **options,
    )


async def start(made: Any, num_actors: int = 2) -> Controller:
    await made.prepare()
    return await start_fakes(num_actors, made)


async def hanging_step(controller: Controller) -> Any:
    program, _ = await controller.load(LoadableProgram(scripted("hang")))
    return controller.start_step(SubmittedStep(program), {}, {})


def host_agents(sshd: Sshd) -> set[int]:
    """Host agents and actors that were started by way of an sshd: by its home, as others run tests on this
    machine too."""
    found, home = set(), str(sshd.folder / "home")
    for process in psutil.process_iter(["cmdline", "environ"]):
        is_its = (process.info["environ"] or {}).get("HOME") == home
        if is_its and "jaxpp_async.actors" in " ".join(process.info["cmdline"] or ()) and is_running(process):
            found.add(process.pid)
    return found


async def none_left(sshd: Sshd, before: set[int], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while left := host_agents(sshd) - before:
        assert time.monotonic() < deadline, [psutil.Process(pid).cmdline() for pid in left]
        await asyncio.sleep(0.05)


@needs_sshd
async def test_two_hosts_equal_plain_jax(sshd, tmp_path, caplog):
    (tmp_path / "hosts").write_text(f"127.0.0.1 port={sshd.port}\nlocalhost port={sshd.port} env=SECOND=1\n")

    def loss(params, x):
        return jnp.sum(jpp.pipeline_yield(jnp.tanh(x @ params[0])) @ params[1])

    def train_step(params, batch):
        def grads(mb):
            value, grad = jax.value_and_grad(loss)(params, mb)
            return grad, value

        grad, losses = jpp.accumulate_grads(grads, jpp.Std1F1B(2))(batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grad), losses

    params = [np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8), np.ones((8, 4), np.float32)]
    batch = np.linspace(-2, 2, 4 * 3 * 8, dtype=np.float32).reshape(4, 3, 8)
    before = host_agents(sshd)
    async with (
        nothing_left(caplog),
        jpp.RemoteMesh(
            2, hosts=tmp_path / "hosts", ssh_options=sshd.options, compilation_cache=CACHE
        ) as mesh,
    ):
        step = mesh.distributed(train_step)
        new, losses = await mesh.run(step, params, batch)
        actual = await mesh.fetch((new, losses))
        assert [info.state for info in mesh.actors] == ["ready", "ready"]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), actual, jax.jit(train_step)(params, batch)
    )
    await none_left(sshd, before)


@needs_sshd
async def test_restarts_reach_the_host_again(sshd, tmp_path, caplog):
    """An actor dies, then the way to a host, with all that is there."""
    (tmp_path / "hosts").write_text(f"127.0.0.1 port={sshd.port}\nlocalhost port={sshd.port}\n")

    def step(w, x):
        return jpp.accumulate_grads(
            lambda mb: jnp.sin(jpp.pipeline_yield(jnp.tanh(mb @ w)) @ w), jpp.GPipe(2)
        )(x)

    before = host_agents(sshd)
    async with (
        nothing_left(caplog),
        jpp.RemoteMesh(
            2,
            hosts=tmp_path / "hosts",
            ssh_options=sshd.options,
            compilation_cache=CACHE,
            max_restarts=2,
            backup_every=1,
        ) as mesh,
    ):
        distributed, args = (
            mesh.distributed(step),
            (np.eye(3, dtype=np.float32), np.ones((2, 2, 3), np.float32)),
        )
        expected = jax.jit(step)(*args)

        async def check_step() -> None:
            async with asyncio.timeout(30):
                np.testing.assert_allclose(await (await mesh.run(distributed, *args)), expected, rtol=1e-5)

        def is_replaced(pids: list[int]) -> bool:
            infos = mesh.actors
            return [info.pid for info in infos] != pids and all(info.state == "ready" for info in infos)

        await check_step()
        for kill in (
            lambda: os.kill(mesh.actors[1].pid, signal.SIGKILL),
            lambda: next(p for p in psutil.Process().children() if p.name() == "ssh").kill(),
        ):
            pids = [info.pid for info in mesh.actors]
            kill()
            await check_step()
            await until(partial(is_replaced, pids))  # a step may end before the loss is noticed
            await check_step()
    await none_left(sshd, before)


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def python_with(folder: Path, name: str, files: dict[str, str]) -> str:
    """An interpreter that finds `files` before anything else."""
    for file, text in files.items():
        (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / file).write_text(text)
    return script(folder / f"{name}-python", f'PYTHONPATH={folder / name} exec {sys.executable} "$@"')


def pythons(folder: Path) -> dict[str, str]:
    """Interpreters of hosts that lack something."""
    return {
        "absent": str(folder / "absent"),
        "bare": script(folder / "bare", f'exec {sys.executable} -S "$@"'),
        "old": python_with(
            folder, "old", {"jaxpp_async/__init__.py": "", "jaxpp_async/actors/__init__.py": ""}
        ),
        "other version": python_with(
            folder, "version", {"sitecustomize.py": "import jaxpp_async; jaxpp_async.__version__ = '9.9'"}
        ),
        "other jax": python_with(
            folder,
            "jax",
            {"jax-0.0.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: jax\nVersion: 0.0.1\n"},
        ),
    }


BAD_PYTHONS = [
    (
        "absent",
        LaunchError,
        "there is no Python at .*absent.*; install it there, or say where it is with python=",
    ),
    ("bare", LaunchError, "does not have the package jaxpp-async; install it there: .*bare -m pip install"),
    ("old", LaunchError, "has an older jaxpp-async than this machine"),
    (
        "other version",
        HandshakeError,
        "has jaxpp-async 9.9, this machine has jaxpp-async .* install the same version",
    ),
    ("other jax", HandshakeError, r"has jax 0.0.1, this machine has jax 0\.[\d.]+; .*pip install 'jax=="),
]


@needs_sshd
@pytest.mark.parametrize(("which", "error", "says"), BAD_PYTHONS)
async def test_what_a_host_lacks(sshd, tmp_path, caplog, which, error, says):
    """And the host that had started is stopped."""
    python = pythons(tmp_path)[which].replace(" ", "\\ ")
    before, began = host_agents(sshd), time.monotonic()
    async with nothing_left(caplog):
        with pytest.raises(error, match=f"host localhost:{sshd.port}: .*{says}") as raised:
            await start(launcher(sshd, ["127.0.0.1 port={port}", f"localhost port={{port}} python={python}"]))
    assert time.monotonic() - began < 15 and raised.value.host == "localhost"
    await none_left(sshd, before)


async def refused(sshd: Sshd, says: str, hosts: list[str] | None = None, **options: Any) -> str:
    began = time.monotonic()
    with pytest.raises(LaunchError, match=says) as raised:
        await start(launcher(sshd, hosts, **options))
    assert time.monotonic() - began < 15
    return str(raised.value)


@needs_sshd
async def test_a_changed_host_key(sshd):
    sshd.know("other_key")
    try:
        text = await refused(
            sshd, r"host 127.0.0.1:\d+: its host key has changed: .*ssh-keygen -R '\[127.0.0.1\]:"
        )
        assert "Host key verification failed" in text
    finally:
        sshd.know("host_key")


@needs_sshd
async def test_an_unknown_host_key(sshd):
    await refused(
        sshd, "its host key is not known here; run `ssh -p", ssh_options=["-oUserKnownHostsFile=/dev/null"]
    )


@needs_sshd
async def test_a_denied_key(sshd):
    authorized = sshd.folder / "authorized_keys"
    allowed = authorized.read_text()
    authorized.write_text((sshd.folder / "other_key.pub").read_text())
    try:
        await refused(sshd, r"refused our key: .*Permission denied \(publickey\).*without a password")
    finally:
        authorized.write_text(allowed)


@needs_sshd
async def test_a_refused_port(sshd):
    await refused(sshd, "refused the connection", [f"127.0.0.1 slots=2 port={sshd_of_tests.free_port()}"])


@needs_sshd
async def test_an_unreachable_host(sshd):
    await refused(
        sshd, r"host 192.0.2.9: cannot be reached", ["192.0.2.9 slots=2"], ssh_options=["-oConnectTimeout=1"]
    )


@needs_sshd
async def test_a_name_that_nobody_has(sshd):
    await refused(
        sshd, "host no-such-host.invalid: its name cannot be looked up", ["no-such-host.invalid slots=2"]
    )


@needs_sshd
async def test_a_port_that_is_no_ssh(sshd):
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await refused(sshd, "closed the connection before the login", [f"127.0.0.1 slots=2 port={port}"])


@needs_sshd
async def test_a_banner_is_shown_and_does_no_harm(sshd, rc):
    rc.write_text("echo Welcome to n1; echo and to stderr >&2\n")
    lines: list[str] = []
    controller = await start(launcher(sshd, forward=lines.append))
    await controller.aclose()
    assert f"[host 127.0.0.1:{sshd.port}] Welcome to n1" in lines


@needs_sshd
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "echo This account is closed; exit 3",
            "ended with code 3 before it ran our command, after it wrote a banner",
        ),
        ("echo Choose:; read -r choice", "did not finish the login in time; .* must not wait for input"),
    ],
)
async def test_a_login_shell_that_does_not_let_go(sshd, rc, text, says):
    rc.write_text(text + "\n")
    timeouts = Timeouts(login_s=2.0)
    said = await refused(sshd, says, timeouts=timeouts)
    assert "\nWhat came from there:\n  " in said and text.split(";")[0][5:] in said


@needs_sshd
async def test_nothing_secret_is_in_argument_vectors(sshd):
    settings = Settings(env={"PYTHONPATH": str(HERE), "TOKEN": "swordfish"})
    controller = await start(launcher(sshd, settings=settings))
    processes = [p.info["cmdline"] or () for p in psutil.process_iter(["cmdline"])]
    text = " ".join(word for words in processes for word in words)
    assert "jaxpp_async.launch.host_agent" in text and "swordfish" not in text and '"secret"' not in text
    pid = controller.actors[0].pid
    assert psutil.Process(pid).environ()["TOKEN"] == "swordfish"
    await controller.aclose()


@needs_sshd
async def test_the_end_of_an_actor_is_told_as_here(sshd, caplog):
    async with nothing_left(caplog):
        controller = await start(launcher(sshd))
        step = await hanging_step(controller)
        os.kill(controller.actors[1].pid, signal.SIGKILL)
        async with asyncio.timeout(2):
            with pytest.raises(ActorDiedError, match=r"actor 1 .* was killed by SIGKILL .* during step 0"):
                await step
        await controller.aclose()


@needs_sshd
async def test_a_lost_connection_is_told_as_such(sshd, caplog):
    before = host_agents(sshd)
    async with nothing_left(caplog):
        controller = await start(launcher(sshd))
        (ssh,) = [p for p in psutil.Process().children() if p.name() == "ssh"]
        step = await hanging_step(controller)
        ssh.kill()
        async with asyncio.timeout(2):
            with pytest.raises(ActorDiedError, match="the connection to its host ended") as raised:
                await step
        assert "Hello" not in str(raised.value)  # what a host agent says is for us
        await controller.aclose()
    await none_left(sshd, before)


# ---------------------------------------------------------------- no orphans (cases 15, 16)

DRIVER = """
import asyncio, sys
from fake_actor import start_fakes
from jaxpp_async.launch.hosts import parse_hosts
from jaxpp_async.launch.hosts import Settings
from jaxpp_async.launch.ssh import ssh_launcher

async def main():
    launcher = ssh_launcher(parse_hosts({hosts}), ssh_options={options}, actor="orphans:ActorWithChildren",
        settings=Settings(env={{"PYTHONPATH": {path!r}}}), **{more})
    await launcher.prepare()
    controller = await start_fakes(2, launcher)
    {before}
    print(*(info.pid for info in controller.actors), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""

ORPHANS = """
import subprocess, sys
from fake_actor import FakeActor

class ActorWithChildren(FakeActor):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        subprocess.Popen(["sleep", "61"])
        subprocess.Popen(["sleep", "61"], start_new_session=True)
"""


@pytest.fixture
def driver(sshd, tmp_path, request):
    """A driver with two actors over ssh, each with two children, one of which has a session of its own."""
    (tmp_path / "orphans.py").write_text(ORPHANS)
    path = os.pathsep.join([str(tmp_path), str(HERE)])
    hosts = [f"127.0.0.1 port={sshd.port}", f"localhost port={sshd.port}"]
    more = dict(getattr(request, "param", {}))
    before = more.pop("before", "")
    code = DRIVER.format(hosts=hosts, options=sshd.options, path=path, more=more, before=before)
    popen = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )
    assert popen.stdout is not None
    actors = [psutil.Process(int(pid)) for pid in popen.stdout.readline().split()]
    below = [child for actor in actors for child in actor.children()]
    host_agents = [actor.parent() for actor in actors]
    assert len(actors) == 2 and len(below) == 4 and None not in host_agents
    yield popen, [*host_agents, *actors, *below]
    popen.kill()
    popen.communicate()
    for process in (*host_agents, *actors, *below):
        if process is not None and is_running(process):
            process.kill()


def all_gone_within(processes: list[psutil.Process], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(map(is_running, processes)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@needs_sshd
def test_sigkill_of_the_driver_ends_everything_over_ssh(driver):
    popen, processes = driver
    popen.kill()
    assert all_gone_within(processes, 5)


@needs_sshd
@pytest.mark.parametrize(
    "driver", [{"before": "import os, time; os.fork() or time.sleep(60)"}], indirect=True
)
def test_a_forked_worker_that_outlives_the_driver_holds_nothing_up(driver):
    popen, processes = driver
    (ssh, *_), (worker, *_) = (
        [p for p in psutil.Process(popen.pid).children() if (p.name() == "ssh") is is_ssh]
        for is_ssh in (True, False)
    )
    popen.kill()
    try:
        assert all_gone_within([ssh, *processes], 5) and is_running(worker)
    finally:
        worker.kill()


@needs_sshd
def test_a_stopped_host_agent_does_not_outlive_the_driver(driver):
    popen, processes = driver
    for host_agent in processes[:2]:
        host_agent.suspend()
    popen.kill()
    assert all_gone_within(processes, 5)


@needs_sshd
@pytest.mark.parametrize("driver", [{"lease_s": 1.5}], indirect=True)
def test_a_stopped_drivers_actors_end_by_their_lease_over_ssh(driver):
    popen, processes = driver
    time.sleep(2.0)  # renewed until here, or they would be gone
    assert all(map(is_running, processes))
    popen.send_signal(signal.SIGSTOP)
    assert all_gone_within(processes, 5)
    popen.send_signal(signal.SIGCONT)


@needs_sshd
async def test_a_native_call_of_the_driver_is_named_over_ssh(sshd):
    """The host agent's lease ends first, and kills the actors: which would look like a want of memory."""
    controller = await start(launcher(sshd, lease_s=1.0))
    step = await hanging_step(controller)
    ctypes.PyDLL(None).usleep(2_500_000)
    with pytest.raises(
        ActorDiedError, match=r"(?s)exited with code 82 \(the driver, .*silent for 1 s \(lease_s=1\)"
    ):
        await step
    await controller.aclose()


@needs_sshd
def test_a_killed_host_agent_takes_its_actors_along(driver):
    _, (host_agent, _, actor, *_) = driver
    host_agent.kill()
    assert all_gone_within([actor], 3)


# ---------------------------------------------------------------- the doctor


def doctor(sshd: Sshd, hosts: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status, and what it says of hosts."""
    options = " ".join(sshd.options)
    command = [
        sys.executable,
        "-m",
        "jaxpp_async",
        "doctor",
        "--hosts",
        str(hosts),
        "--ssh-options",
        options,
        "--json",
    ]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=90, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def wrong(told: dict[str, Any]) -> list[tuple[str, str]]:
    return [(f["host"], f["what"]) for f in told["findings"] if f["level"] == "error"]


@needs_sshd
def test_the_doctor_looks_at_hosts_and_measures_between_them(sshd, tmp_path):
    (tmp_path / "hosts").write_text(
        f"127.0.0.1 port={sshd.port}\nlocalhost port={sshd.port} slots=2 env=UCX_LOG_LEVEL=warn\n"
    )
    code, told = doctor(sshd, tmp_path / "hosts", "--actors", "3")
    assert (code, wrong(told)) == (0, [])
    first, second = told["hosts"]
    assert first["facts"]["packages"] == second["facts"]["packages"] == told["here"]["facts"]["packages"]
    assert (first["calls_back"], second["calls_back"]) == ("", "")
    assert (
        second["facts"]["settings"]["UCX_LOG_LEVEL"] == "warn"
        and "UCX_LOG_LEVEL" not in first["facts"]["settings"]
    )
    assert all(abs(host["clock"]["ahead_s"]) < 0.5 for host in told["hosts"])  # one machine has one clock
    (link,) = told["links"]
    assert (link["first"], link["error"]) == (f"127.0.0.1:{sshd.port}", "")
    assert link["latency_s"] > 0 and link["bytes_per_s"] > 0
    assert_no_doctors_left()


@needs_sshd
def test_the_doctor_names_each_host_that_would_fail(sshd, tmp_path):
    """Those that answer are looked at all the same."""
    found = pythons(tmp_path)
    (tmp_path / "hosts").write_text(
        f"127.0.0.1 port={sshd.port} slots=2\n"
        f"localhost port={sshd.port} python={found['absent']}\n"
        f"127.0.0.1 port={sshd_of_tests.free_port()}\n"
    )
    code, told = doctor(sshd, tmp_path / "hosts", "--no-transfers")
    said = dict(wrong(told))
    assert code == 1 and len(said) == 2
    assert "there is no Python at" in said[f"localhost:{sshd.port}"] and "refused the connection" in str(said)
    assert told["hosts"][0]["facts"] is not None and told["hosts"][0]["calls_back"] == ""
    assert_no_doctors_left()


def assert_no_doctors_left(timeout_s: float = 5.0) -> None:
    """What ran on the hosts has ended, or does so as soon as it hears of the end of its stdin."""
    deadline = time.monotonic() + timeout_s
    while left := [
        p for p in psutil.process_iter(["cmdline"]) if "jaxpp_async.doctor.host" in (p.info["cmdline"] or ())
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
