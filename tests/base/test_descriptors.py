"""Descriptors of a process alone: programs that it starts do not inherit them, nor do forked workers hold
them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time

import psutil
import pytest

from jaxpp_async.base.descriptors import (
    keep_accepted_from_children,
    keep_from_children,
    keeping_new_from_children,
)
from tests.launch.test_local import Driver, environment

# Two ends in one process over TCP; then what a program that is started, and what a forked worker, has of
# them.
ENDS = """
import asyncio, os, subprocess, sys
import numpy as np
from jaxpp_async.transport.base import PROGRAM_CHANNEL, make_tag
from jaxpp_async.transport.ucx.transport import UCXTransport

LIST = ["sh", "-c", "ls -l /proc/self/fd | sed 's/.*-> //'"]

async def main():
    first, second = UCXTransport(0), UCXTransport(1)
    await first.connect(1, second.address)
    await second.connect(0, first.address)
    x, y, tag = np.ones(3, np.uint8), np.zeros(3, np.uint8), make_tag(0, PROGRAM_CHANNEL, 1)
    await asyncio.gather(first.send(x, 1, tag), second.recv(y, 0, tag))
    await asyncio.gather(second.send(x, 0, tag), first.recv(y, 1, tag))
    for _ in range(100):  # a second connection may be accepted behind the first message
        listed = subprocess.run(LIST, close_fds=False, capture_output=True, text=True, check=True)
        inherited = listed.stdout.split("\\n")
        if not any(line.startswith("socket:") for line in inherited):
            break
        await asyncio.sleep(0.05)
    kinds = ("socket:", "anon_inode:", "/memfd", "/dev/shm")
    print(sorted(line for line in inherited if line.startswith(kinds)))
    print(sum(line.startswith("pipe:") for line in inherited))
    sys.stdout.flush()
    if not (worker := os.fork()):
        sockets = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2
                   and os.path.exists(f"/proc/self/fd/{fd}")]
        held = [fd for fd in sockets if fd.startswith("socket:")]
        print(len(held), flush=True)
        os._exit(0)
    os.waitpid(worker, 0)
    await asyncio.gather(first.send(x, 1, tag), second.recv(y, 0, tag))  # they still work
    await first.aclose()
    await second.aclose()

asyncio.run(main())
"""


@pytest.mark.parametrize("kinds", ["tcp,self", "^sysv"])
def test_what_ucx_opens_is_not_inherited(kinds):
    done = subprocess.run(
        [sys.executable, "-c", ENDS],
        env=environment() | {"UCX_TLS": kinds},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    sockets, pipes, held = done.stdout.splitlines() or [done.stderr] * 3
    assert (sockets, int(pipes)) == ("[]", 2), "the pipes are that program's own stdout and stderr"
    assert int(held) == 2, "asyncio's own pair, and nothing of UCX"


def forked(work) -> list[str]:
    """What a forked worker says."""
    read, write = os.pipe()
    if not (worker := os.fork()):
        os.write(write, "\n".join(map(str, work())).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(worker, 0)
    with open(read) as pipe:
        return pipe.read().splitlines()


def leads_to(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:.*fork:RuntimeWarning")
def test_they_lead_nowhere_in_a_forked_worker():
    """But a number that is another descriptor's by now is left alone."""
    kept, (read, write), (first, second) = os.pipe(), os.pipe(), socket.socketpair()
    keep_from_children(*kept, write, first.fileno())
    os.dup2(second.fileno(), write)
    try:
        expected = ["/dev/null"] * 3 + [leads_to(second.fileno())] * 2
        assert forked(lambda: map(leads_to, (*kept, first.fileno(), write, second.fileno()))) == expected
    finally:
        for descriptor in (*kept, read, write):
            os.close(descriptor)
        first.close()
        second.close()


def test_what_a_native_library_opens_or_accepts_is_kept_and_nothing_else():
    ours, before = os.pipe(), set(os.listdir("/proc/self/fd"))
    os.set_inheritable(ours[0], True)
    with contextlib.ExitStack() as stack:
        with keeping_new_from_children():
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            pipe = os.pipe()
            for descriptor in (listener.fileno(), *pipe):
                os.set_inheritable(descriptor, True)  # as C does
        assert not any(map(os.get_inheritable, (listener.fileno(), *pipe)))
        client = stack.enter_context(socket.create_connection(listener.getsockname()))
        accepted, _ = listener.accept()
        stack.enter_context(accepted)
        for sock in (client, accepted):
            sock.set_inheritable(True)
        keep_accepted_from_children()
        assert not accepted.get_inheritable() and client.get_inheritable() and os.get_inheritable(ours[0])
        for end in pipe:
            os.close(end)
    assert set(os.listdir("/proc/self/fd")) == before, "nothing is left open"
    for end in ours:
        os.close(end)


def test_a_forked_worker_of_a_driver_holds_nothing_of_its_actors():
    """So that whatever waits for the driver's end sees it."""
    fork = "__import__('os').fork() or __import__('time').sleep(60); await step"
    driver, worker = Driver(then=fork), None
    try:
        (worker,) = wait_for(lambda: set(psutil.Process(driver.popen.pid).children()) - set(driver.actors))
        assert psutil.Process(driver.popen.pid).net_connections("inet")
        wait_for(lambda: not worker.net_connections("inet"))  # a fork is seen before what it does first
        pipes = [
            {link for link in links(process) if link.startswith("pipe:")}
            for process in (worker, *driver.actors)
        ]
        assert all(pipes) and not pipes[0] & set.union(*pipes[1:])
        driver.popen.kill()
        assert driver.actors_gone_within(2) and worker.is_running()
    finally:
        if worker is not None:
            worker.kill()  # it has the driver's output open, for whose end `end` waits
        driver.end()


def links(process: psutil.Process) -> set[str]:
    folder = f"/proc/{process.pid}/fd"
    return {os.readlink(f"{folder}/{name}") for name in os.listdir(folder)}


def wait_for(look):
    deadline = time.monotonic() + 10
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found
