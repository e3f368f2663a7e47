"""Direct tests of how a host's agent reads its orders, in this process: it starts none of its own here."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata

import pytest

import jaxpp_async
from jaxpp_async.base.install_hints import SAME_VERSIONS
from jaxpp_async.launch.host_agent import descendants, hello, obey_orders
from jaxpp_async.launch.host_agent_protocol import Close, SignalActor, write_order
from jaxpp_async.protocol.actor_info import ExitCode
from jaxpp_async.protocol.parent_watch import Lease


class Agent:
    """Notes the orders that it is to carry out."""

    def __init__(self):
        self.obeyed, self.is_expired = [], False

    def obey(self, order) -> None:
        self.obeyed.append(order)

    def expire(self) -> None:
        self.is_expired = True


def run_agent(*said: bytes, lease_s: float = 60.0, ends: bool = True) -> tuple[Agent, ExitCode]:
    """Run an agent whose stdin gives this; return it with its exit code."""
    agent, (ours, theirs) = Agent(), os.pipe()
    try:
        for data in said:
            os.write(theirs, data)
        if ends:
            os.close(theirs)
        return agent, obey_orders(agent, ours, Lease(lease_s))
    finally:
        os.close(ours)
        if not ends:
            os.close(theirs)


def test_orders_are_carried_out_until_one_says_to_close():
    first, second = SignalActor("a", 15), SignalActor("b", 9)
    agent, code = run_agent(write_order(first), b"..", write_order(second), write_order(Close()), b"rest")
    assert (agent.obeyed, code) == ([first, second], ExitCode.OK)


def test_the_end_of_stdin_is_the_end_of_the_driver_and_half_an_order_is_none():
    agent, code = run_agent(write_order(SignalActor("a", 15)), write_order(SignalActor("b", 15))[:-5])
    assert (agent.obeyed, code) == ([SignalActor("a", 15)], ExitCode.CONTROLLER_GONE)


def test_what_is_no_order_ends_the_agent_without_quoting_it(capfd):
    agent, code = run_agent(b'["StartActor", "a-secret"]\n')
    assert (agent.obeyed, code) == ([], ExitCode.CONFIG)
    said = capfd.readouterr().err
    assert said.endswith("is run by a mesh, not by hand: no message of a host agent (ValidationError)\n")
    assert "a-secret" not in said


def test_an_agent_that_hears_nothing_for_longer_than_its_lease_says_so_and_ends():
    agent, code = run_agent(lease_s=0.0, ends=False)
    assert (agent.is_expired, code) == (True, ExitCode.LEASE_EXPIRED)


def test_the_first_word_says_who_this_is_and_what_is_installed():
    said = hello()
    assert (said.pid, said.python) == (os.getpid(), sys.executable)
    assert said.versions == {
        "jaxpp-async": jaxpp_async.__version__,
        **{name: metadata.version(name) for name in SAME_VERSIONS},
    }


def test_a_package_that_is_missing_has_no_version(monkeypatch):
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert {hello().versions[name] for name in SAME_VERSIONS} == {None}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_below_this_one_are_found_while_they_live():
    child = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        assert child.pid in descendants(os.getpid())
    finally:
        child.communicate()
    assert child.pid not in descendants(os.getpid())


def test_a_host_agent_starts_without_what_only_meshes_need():
    """It starts before anything else on every host, and stays as long as the mesh."""
    code = (
        "import sys, jaxpp_async.launch.host_agent; print(*sys.modules.keys() & {'numpy', 'asyncio', 'jax'})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.split() == []
