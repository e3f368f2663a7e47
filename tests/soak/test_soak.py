"""The soak's own parts. The soak itself: `make soak`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest
from fault_plan import KINDS, LINKS, fault_plan
from injecting import Process, cut_connections


def test_a_seed_gives_a_plan():
    plan = fault_plan(seed=1, seconds=120, num_actors=3)
    assert (
        plan == fault_plan(seed=1, seconds=120, num_actors=3) != fault_plan(seed=2, seconds=120, num_actors=3)
    )
    # a longer soak begins the same
    assert plan == fault_plan(seed=1, seconds=1200, num_actors=3)[: len(plan)]
    times = [fault.at_s for fault in plan]
    assert times == sorted(times) and times[0] >= 1 and times[-1] <= 120
    assert {fault.actor for fault in plan} == {0, 1, 2}


@pytest.mark.parametrize("seed", range(20))
def test_two_minutes_have_every_kind(seed):
    kinds = {fault.kind for fault in fault_plan(seed, seconds=120, num_actors=2)}
    assert kinds == set(KINDS)


@pytest.mark.parametrize("seed", range(5))
def test_links_come_first_where_there_are_any(seed):
    plan = fault_plan(seed, seconds=300, num_actors=2, links=True)
    assert {fault.kind for fault in plan[: len(LINKS)]} == set(LINKS)
    assert {fault.kind for fault in plan[: len(LINKS) + len(KINDS)]} == {*LINKS, *KINDS}


def test_a_process_that_is_gone_is_not_signalled():
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child,
        Process(child.pid) as process,
    ):
        assert process.signal(signal.SIGSTOP) and process.signal(signal.SIGCONT)
        child.kill()
        child.wait()
        assert not process.signal(signal.SIGKILL)
    with Process(child.pid) as process:
        assert not process.signal(signal.SIGKILL)


def test_connections_of_another_process_are_cut():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; s = socket.create_connection(('127.0.0.1', {port})); print(s.recv(1))"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        there, _ = server.accept()
        with there:
            before = psutil.Process(os.getpid()).num_fds()
            cut = cut_connections(child.pid, lambda connection: connection.remote_port == port)
            if cut is None:
                child.kill()
                pytest.skip("this system does not let one process take another's descriptor")
            assert cut == 1 and child.communicate(timeout=5)[0] == "b''\n"
            assert there.recv(1) == b"" and psutil.Process(os.getpid()).num_fds() == before - 1  # its stdout
