"""The host agent: the program `python -m jaxpp_async.launch.host_agent`, which a launcher runs on another
host to start and end the actors of that host.

The launcher writes orders (requests) to the agent's stdin, and the agent writes records (its messages to the
launcher) to its stdout; `host_agent_protocol` defines both. The agent starts actors, forwards the lines that
they print and reports how they end. When its stdin reaches end of file, or is silent for longer than a time
limit (the lease), the agent ends the actors. The agent also ends all processes that the actors started, even
those that left the actors' process groups. This is possible because the agent is the subreaper of its
descendants, which means that the kernel makes the agent the parent of every orphan among them.

The agent's first record is a greeting. The launcher sends the mesh's secret only after it has received the
greeting, so that no other program that was started by mistake gets the secret.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from importlib import metadata

import jaxpp_async
from jaxpp_async.base.install_hints import SAME_VERSIONS
from jaxpp_async.errors import MeshError
from jaxpp_async.launch import host_agent_protocol as kp
from jaxpp_async.launch.process_supervisor import ProcessSupervisor
from jaxpp_async.launch.spawn import ActorProcess, spawn_actor
from jaxpp_async.protocol.actor_info import ExitCode
from jaxpp_async.protocol.line_protocol import SIGN_OF_LIFE
from jaxpp_async.protocol.parent_watch import Lease, signal_at_parents_death

_PR_SET_CHILD_SUBREAPER = 36
_MAX_ORDER_BYTES = 1 << 20
_MAX_WAITING = 20_000
_END_S = 2.0


class HostAgent:
    """The state of the host agent, which runs the actors of one host. The methods `obey` and `end` must be
    called from the same thread.

    Args:
        lease: the longest time for which the agent and its actors continue if they hear nothing from the
            driver (the user's process).
    """

    def __init__(self, lease: Lease):
        self._lease = lease
        self._is_expired = False
        self._supervisor = ProcessSupervisor(lease.beat_s)
        self._actors: dict[str, ActorProcess] = {}
        self._records: queue.Queue[bytes | None] = queue.Queue()
        self._writer = threading.Thread(target=self._write_records, name="jaxpp-async records", daemon=True)
        self._writer.start()

    def say(self, record: kp.Record) -> None:
        """Queue a record (a message to the launcher), without waiting. If too many records are queued because
        nobody reads them, lines that actors printed are dropped.
        """
        if self._records.qsize() < _MAX_WAITING or not isinstance(record, kp.OutputLine):
            self._records.put(kp.write_record(record))

    def obey(self, order: kp.Order) -> None:
        """Carry out an order (a request of the launcher) to start or to signal an actor. The caller of this
        method handles the order `Close`.
        """
        if isinstance(order, kp.StartActor):
            self._start(order)
        elif isinstance(order, kp.SignalActor) and order.key in self._actors:
            self._actors[order.key].process.signal_group(order.signum)

    def expire(self) -> None:
        """Send a last message about each actor, which tells the driver (the user's process) that the actor
        ends because the driver was silent for longer than the lease. A driver that was suspended reads the
        message when it resumes.
        """
        self._is_expired = True
        for key in tuple(self._actors):
            self._forward(key, self._lease.last_words)

    def end(self) -> None:
        """Kill all actors and the processes that they started, and write the records (messages to the
        launcher) that are still queued.
        """
        with contextlib.suppress(TimeoutError):  # some process does not die: exit nevertheless
            self._supervisor.close().result(_END_S)
        kill_descendants(_END_S)
        self._records.put(None)
        self._writer.join(_END_S)

    def _start(self, order: kp.StartActor) -> None:
        key = order.key
        # Work in the driver's folder, if it exists on this host: a setup hook then imports the same modules.
        with contextlib.suppress(OSError):
            os.chdir(order.folder)
        try:
            actor = spawn_actor(
                self._supervisor, order.request, lambda line: self._forward(key, line)
            ).result()
        except (OSError, MeshError) as error:
            self.say(kp.StartFailed(key, str(error)))
            return
        self._actors[key] = actor
        self.say(kp.ActorStarted(key, actor.process.pid))
        actor.process.dead.add_done_callback(lambda dead: self._on_dead(key, dead.result().returncode))

    def _forward(self, key: str, line: str) -> None:
        for start in range(0, max(1, len(line)), kp.TEXT_CHARS):
            self.say(kp.OutputLine(key, line[start : start + kp.TEXT_CHARS]))

    def _on_dead(self, key: str, returncode: int) -> None:
        actor = self._actors.pop(key)
        position = actor.page.read()
        actor.page.close()
        self.say(kp.ActorEnded(key, ExitCode.LEASE_EXPIRED if self._is_expired else returncode, position))

    def _write_records(self) -> None:
        while (record := self._records.get()) is not None:
            try:
                while record:
                    record = record[os.write(1, record) :]
            except OSError:  # nobody reads any more; stdin ends as well
                return


def main() -> None:
    """Run the host agent until a `Close` order, a signal, or the loss of the driver (the user's process) ends
    it, then exit.
    """
    lease = Lease(float(sys.argv[1])) if len(sys.argv) == 2 else Lease()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Neither end of file nor a lease can end a process that was stopped (SIGSTOP). When its parent, such as
    # sshd, ends, this process goes on and sees both. (SIGKILL would leave behind what its actors started.)
    signal_at_parents_death(signal.SIGCONT)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, _on_signal)
    host_agent = HostAgent(lease)
    code = ExitCode.CRASH
    try:
        host_agent.say(hello())
        code = obey_orders(host_agent, 0, lease)
    except _Ended:
        code = ExitCode.CONTROLLER_GONE
    finally:
        with contextlib.suppress(_Ended):
            host_agent.end()
        os._exit(code)


def obey_orders(host_agent: HostAgent, descriptor: int, lease: Lease) -> ExitCode:
    """Read the launcher's orders (requests) from a file descriptor and carry them out. Stop if an order tells
    the agent to exit, if the input ends or is not valid, or if the lease expires.

    Args:
        host_agent: the agent that carries out the orders.
        descriptor: the file descriptor to read, which is stdin outside tests.
        lease: the longest time that may pass without input.

    Returns:
        The exit code of the agent.
    """
    poller, buffer = select.poll(), bytearray()
    poller.register(descriptor, select.POLLIN | select.POLLHUP)
    deadline = time.monotonic() + lease.seconds
    while poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        data = os.read(descriptor, 1 << 16)
        if not data:
            return ExitCode.CONTROLLER_GONE
        deadline = time.monotonic() + lease.seconds
        *lines, rest = (bytes(buffer) + data).split(b"\n")
        buffer[:] = rest.lstrip(SIGN_OF_LIFE)
        if len(buffer) > _MAX_ORDER_BYTES:
            return ExitCode.CONFIG
        for line in lines:
            try:
                order = kp.read_order(line)
            except ValueError as error:  # the line may contain the secret: do not print it
                print(
                    f"python -m jaxpp_async.launch.host_agent is run by a mesh, not by hand: {error}",
                    file=sys.stderr,
                )
                return ExitCode.CONFIG
            if isinstance(order, kp.Close):
                return ExitCode.OK
            if order is not None:
                host_agent.obey(order)
    host_agent.expire()
    return ExitCode.LEASE_EXPIRED


def hello() -> kp.AgentHello:
    """Make the host agent's greeting, which describes this process and the versions of the packages that are
    installed on this host.
    """
    versions: dict[str, str | None] = {"jaxpp-async": jaxpp_async.__version__}
    for name in SAME_VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return kp.AgentHello(socket.gethostname(), os.getpid(), sys.executable, versions)


def kill_descendants(timeout_s: float) -> None:
    """Kill every descendant of this process.

    Orphaned descendants become children of this process (it is a subreaper), so that none of them escapes.

    Args:
        timeout_s: the number of seconds after which to give up on processes that do not die.
    """
    deadline = time.monotonic() + timeout_s
    while (living := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        select.select([], [], [], 0.01)


def descendants(root: int) -> list[int]:
    """List the process ids of the living descendants of a process, from /proc, without zombies.

    Args:
        root: the process id of the process, which is not in the list.
    """
    children: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat") as stat:
                    state, parent = stat.read().rpartition(")")[2].split()[:2]
                    if state != "Z":
                        children.setdefault(int(parent), []).append(int(name))
    found, left = [], [root]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


class _Ended(BaseException):
    """An exception that ends this process after a signal asked it to end."""


def _on_signal(signum: int, frame: object) -> None:
    raise _Ended


if __name__ == "__main__":
    main()
