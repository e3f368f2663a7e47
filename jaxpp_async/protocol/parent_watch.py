"""End an actor process when its controller is gone. This module also defines the lease (how long an actor
process lives without hearing from the controller).

A lost controller is detected in two independent ways here, besides the heartbeat connection. First,
`PR_SET_PDEATHSIG` asks the kernel to kill this process together with the thread that spawned it. Second, a
thread reads stdin, to which the controller writes a byte every few seconds: end of file, or silence for
longer than the lease, means that the controller is gone. Neither way needs the event loop, JAX or the other
way. `run_with_parent` uses the first way for programs such as ssh.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from jaxpp_async.protocol.actor_info import ExitCode

_PRINT_S = 1.0
"""The most seconds that printing the last message may take; a driver that is stopped does not read it."""

_PR_SET_PDEATHSIG = 1


LEASE_S = 15.0
"""The seconds without a sign of life of the driver after which an actor or a host agent ends itself, unless a
mesh sets another value.
"""


@dataclass(frozen=True, slots=True)
class Lease:
    """The time for which actors and host agents continue to run without a heartbeat from the driver (the
    process that runs the user's script).

    Args:
        seconds: the time in seconds.
    """

    seconds: float = LEASE_S

    @property
    def beat_s(self) -> float:
        """The number of seconds between two heartbeats of the driver. A heartbeat is a byte that the driver
        writes to the stdin of each process that it started. Each heartbeat makes the lease begin anew.
        """
        return min(self.seconds / 5, 3.0)

    @property
    def last_words(self) -> str:
        """The text that a process prints before it ends itself with `ExitCode.LEASE_EXPIRED`, to tell the
        reason.
        """
        return (
            f"the driver was silent for {self.seconds:g} s (lease_s={self.seconds:g}): it was stopped, or "
            "a native call in it holds Python's GIL; a longer lease_s= of RemoteMesh waits for that"
        )


def signal_at_parents_death(signum: signal.Signals) -> None:
    """Ask the kernel to send this process a signal when the thread that spawned it ends.

    Only Linux has this feature. On other systems this function does nothing, and the caller must find out in
    another way that the parent has ended. The setting survives `exec`.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def die_with_parent(parent_pid: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel end this process by a signal when the thread that spawned it ends. If the parent
    process has ended already, end this process immediately.

    Args:
        parent_pid: the process id of the parent.
        signum: the signal.
    """
    signal_at_parents_death(signum)
    if os.getppid() != parent_pid:  # the parent died before the call
        leave(ExitCode.CONTROLLER_GONE)


def watch_stdin(descriptor: int, lease_s: float, leave: Callable[[ExitCode, str], None]) -> threading.Thread:
    """Start and return a thread that ends this process if a pipe reaches end of file, or if nothing arrives
    on the pipe for `lease_s` seconds.

    Args:
        descriptor: the read end of the pipe from the controller.
        lease_s: how long the pipe may be silent, in seconds.
        leave: called to end the process, with the exit code and a last message to print.
    """
    watcher = threading.Thread(
        target=_watch, args=(descriptor, lease_s, leave), name="jaxpp-async parent watch", daemon=True
    )
    watcher.start()
    return watcher


def leave(code: ExitCode, said: str = "") -> None:
    """End this process immediately: flush what it has printed, then exit without waiting for threads of UCX
    or JAX.

    Args:
        code: the exit code.
        said: a last message, printed to stderr; empty for none.
    """
    with contextlib.suppress(RuntimeError):  # no thread can be started any more
        printer = threading.Thread(target=_print, args=(said,), name="jaxpp-async last words", daemon=True)
        printer.start()
        printer.join(_PRINT_S)
    os._exit(code)


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the reader is gone
        sys.stdout.flush()
        print(text, end="\n" if text else "", file=sys.stderr, flush=True)


def run_with_parent() -> NoReturn:
    """Replace this process by another program that ends together with its parent. This runs as `python -m
    jaxpp_async.protocol.parent_watch PARENT COMMAND...`, where PARENT is the parent's process id.

    This is for programs such as ssh, which would otherwise go on after their parent has ended. The program
    gets SIGTERM when the parent ends, so that it can end the processes that it has started.
    """
    parent_pid, *command = sys.argv[1:]
    die_with_parent(int(parent_pid), signal.SIGTERM)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and so would the other program
        signal.signal(signum, signal.SIG_DFL)
    os.execvp(command[0], command)


def _watch(descriptor: int, lease_s: float, leave: Callable[[ExitCode, str], None]) -> None:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN | select.POLLHUP)
    deadline = time.monotonic() + lease_s
    while True:
        if poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            if not os.read(descriptor, 4096):
                return leave(ExitCode.CONTROLLER_GONE, "")
            deadline = time.monotonic() + lease_s
        elif time.monotonic() >= deadline:
            return leave(ExitCode.LEASE_EXPIRED, Lease(lease_s).last_words)


if __name__ == "__main__":
    run_with_parent()
