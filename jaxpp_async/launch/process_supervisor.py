"""Spawn, supervise and reap child processes on a separate thread, independently of the event loop.

The thread starts the processes, sends them heartbeats (single bytes), reads their output and detects their
deaths. None of this may depend on the event loop, because the user's code may block the event loop. The
thread runs as long as its processes do, because `PR_SET_PDEATHSIG` ends a process when the thread that
spawned it ends.
"""

from __future__ import annotations

import atexit
import codecs
import concurrent.futures
import contextlib
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxpp_async.base.descriptors import keep_from_children

TAIL_LINES = 50
_LINE_CHARS = 4096  # a longer line is cut in pieces: a progress bar may never end its line
_REAP_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Death:
    """A report of how a process ended.

    Args:
        returncode: the exit status as in `subprocess`; a negative one is the number of a signal.
        output_tail: the last lines that the process printed.
    """

    returncode: int
    output_tail: tuple[str, ...]


@dataclass(slots=True)
class OutputLines:
    """A filter for the output of a process. The filter splits the bytes of the output into lines, forwards
    each line, and keeps the last lines.

    Args:
        forward: a function that is called with each line.
        noise: a text; lines that contain it are dropped. An empty text drops nothing.

    Attributes:
        tail: the last lines.
    """

    forward: Callable[[str], None]
    noise: str = ""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    _rest: str = ""
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def feed(self, data: bytes, *, final: bool = False) -> None:
        """Forward and keep the lines that the next bytes of output complete.

        Args:
            data: the bytes, which may begin and end inside a line.
            final: whether the output has ended, so that an unfinished line counts as a line too.
        """
        lines = (self._rest + self._decoder.decode(data, final)).split("\n")
        self._rest = lines.pop()
        if final or len(self._rest) > _LINE_CHARS:
            lines.append(self._rest)
            self._rest = ""
        for whole in lines:
            line = whole.rstrip("\r")[:_LINE_CHARS]
            if (line or not final) and not (self.noise and self.noise in line):
                self.tail.append(line)
                self.forward(line)


def print_to_stderr(line: str) -> None:
    """Print a line of an actor's output to stderr, which is the default way to forward it."""
    with contextlib.suppress(OSError, ValueError):  # stderr is closed; `output_tail` still has the line
        print(line, file=sys.stderr, flush=True)


class SupervisedProcess:
    """A child process that a `ProcessSupervisor` started. Every method may be called from any thread."""

    def __init__(self, popen: subprocess.Popen[bytes], forward: Callable[[str], None], noise: str = ""):
        self.pid = popen.pid
        self.dead: concurrent.futures.Future[Death] = concurrent.futures.Future()
        assert popen.stdin is not None and popen.stdout is not None
        self._popen, self._stdin, self._stdout = popen, popen.stdin, popen.stdout
        self._output = OutputLines(forward, noise)
        self._unsent = bytearray()  # by `ProcessSupervisor.write`; only the supervisor's thread uses it
        self._lock = threading.Lock()  # never signal a pid after its reaping: it may be another process's

    def output_tail(self) -> tuple[str, ...]:
        """Return the last lines that the process printed."""
        return tuple(self._output.tail)

    def signal_group(self, signum: int) -> None:
        """Send a signal to the process and to the rest of its process group. Does nothing if the process is
        dead.
        """
        with self._lock:
            if self._popen.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signum)


class ProcessSupervisor:
    """A thread that starts, feeds, watches and reaps child processes.

    Args:
        beat_s: the number of seconds between two heartbeats, which are single bytes that the thread writes to
            the stdin of every process.
    """

    def __init__(self, beat_s: float):
        self._beat_s = beat_s
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._processes: set[SupervisedProcess] = set()
        self._descriptors: dict[SupervisedProcess, int] = {}  # pidfds, if the kernel supports them
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        keep_from_children(self._wake_read, self._wake_write)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)
        self._closing = False
        self._finished: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="jaxpp-async process supervisor", daemon=True)
        self._thread.start()
        # If nobody closes the mesh, its actors end at exit, and this thread ends before stderr is closed.
        atexit.register(self._at_exit)

    def spawn(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        first_line: bytes,
        forward: Callable[[str], None],
        *,
        noise: str = "",
        descriptors: Sequence[int] = (),
    ) -> concurrent.futures.Future[SupervisedProcess]:
        """Start a process in a new session (as `setsid` does) and write `first_line` to its stdin.

        Args:
            command: the argument vector.
            env: the whole environment of the process.
            first_line: the bytes to write first to the stdin of the process. For an actor this is a line with
                its configuration and the mesh's secret.
            forward: a function that is called on the supervisor's thread with each line of the process's
                stdout and stderr.
            noise: a text; lines of output that contain it are dropped.
            descriptors: file descriptors that the process inherits, under the same numbers.

        Returns:
            A future whose result is the started process; the future fails with OSError if the process could
            not be started.
        """
        env = dict(env)
        spawned: concurrent.futures.Future[SupervisedProcess] = concurrent.futures.Future()

        def start() -> SupervisedProcess:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=env,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C reaches the driver alone, and the group is killed as a whole
                bufsize=0,
            )
            return SupervisedProcess(popen, forward, noise)

        def spawn() -> None:
            if not spawned.set_running_or_notify_cancel():
                return
            try:
                spawned.set_result(self._spawn(start, first_line))
            except OSError as error:
                spawned.set_exception(error)

        self._do(spawn)
        if self._finished.done():
            self._run_commands()
        return spawned

    def write(self, process: SupervisedProcess, data: bytes) -> None:
        """Queue bytes for a process's stdin, in order and without waiting. Any thread may call this.

        No heartbeat is written between the bytes of one call. Bytes that the process has not read when it
        exits are dropped.
        """
        self._do(lambda: self._write(process, data))

    def close(self) -> concurrent.futures.Future[None]:
        """Kill the processes that still run and end the thread.

        Returns:
            A future that completes when every process is reaped and every file descriptor is closed.
        """
        atexit.unregister(self._at_exit)
        if not self._finished.done():
            self._do(self._on_close)
        return self._finished

    # ------------------------------------------------------------ any thread

    def _do(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        with contextlib.suppress(BlockingIOError, OSError):
            # If the pipe is full, the thread will wake anyway. If it is closed, the thread has finished.
            os.write(self._wake_write, b"\0")

    def _at_exit(self) -> None:
        self._do(self._on_close)
        self._thread.join(2.0)

    # ------------------------------------------------------------ the supervisor's thread

    def _run(self) -> None:
        next_beat_s = time.monotonic() + self._beat_s
        while self._processes or not self._closing:
            timeout_s = next_beat_s - time.monotonic()
            if len(self._descriptors) < len(self._processes):
                timeout_s = min(timeout_s, _REAP_POLL_S)
            for key, _ in self._selector.select(max(0.0, timeout_s)):
                # Skip the event if an earlier one has reaped the process and closed its descriptors.
                if self._selector.get_map().get(key.fd) is key:
                    key.data()
            if len(self._descriptors) < len(self._processes):
                self._reap_without_descriptors()
            if time.monotonic() >= next_beat_s:
                next_beat_s = time.monotonic() + self._beat_s
                self._beat()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._finished.set_result(None)
        self._run_commands()  # refuses commands that came too late

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        self._run_commands()

    def _run_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _on_close(self) -> None:
        self._closing = True
        for process in self._processes:
            process.signal_group(signal.SIGKILL)

    def _spawn(self, start: Callable[[], SupervisedProcess], first_line: bytes) -> SupervisedProcess:
        if self._closing:
            raise OSError("the mesh is closing")
        process = start()
        stdin, stdout = process._stdin, process._stdout
        keep_from_children(stdin.fileno(), stdout.fileno())
        self._processes.add(process)
        os.set_blocking(stdout.fileno(), False)
        os.set_blocking(stdin.fileno(), False)
        self._selector.register(stdout, selectors.EVENT_READ, lambda: self._on_output(process))
        with contextlib.suppress(OSError, AttributeError):  # without a pidfd the process is polled
            self._descriptors[process] = os.pidfd_open(process.pid)
            self._selector.register(
                self._descriptors[process], selectors.EVENT_READ, lambda: self._reap(process)
            )
        with contextlib.suppress(BrokenPipeError):  # the process is dead already, which its death reports
            written = stdin.write(first_line)
            if written != len(first_line):
                process.signal_group(signal.SIGKILL)
                raise OSError(f"the configuration of {len(first_line)} bytes does not fit the actor's stdin")
        return process

    def _write(self, process: SupervisedProcess, data: bytes) -> None:
        if process in self._processes:
            was_idle = not process._unsent
            process._unsent += data
            self._flush(process, was_idle)

    def _flush(self, process: SupervisedProcess, was_idle: bool) -> None:
        """Write as many unsent bytes to a process's stdin as the pipe accepts; the selector calls this again
        when the pipe accepts more.

        Args:
            process: the process.
            was_idle: whether there were no unsent bytes before, so that the selector does not watch the pipe
                yet.
        """
        stdin = process._stdin
        try:
            del process._unsent[: stdin.write(process._unsent) or 0]
        except BrokenPipeError:  # the process is dead, which its death reports, or has closed its stdin
            process._unsent.clear()
        if process._unsent and was_idle:
            self._selector.register(stdin, selectors.EVENT_WRITE, lambda: self._flush(process, False))
        elif not process._unsent and not was_idle:
            self._selector.unregister(stdin)

    def _beat(self) -> None:
        for process in self._processes:
            if process._unsent:  # a sign of life may not interrupt a message, and the message is one itself
                continue
            # The pipe of a stopped actor is full, that of a dead one broken. Neither may delay the others.
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                process._stdin.write(b".")

    def _on_output(self, process: SupervisedProcess) -> None:
        """Read the output that a process has printed. At end of file, stop watching its stdout; its death is
        detected separately.
        """
        data = process._stdout.read(1 << 16)
        if data:
            process._output.feed(data)
        elif data == b"":
            self._selector.unregister(process._stdout)

    def _reap_without_descriptors(self) -> None:
        for process in tuple(self._processes):
            if process not in self._descriptors and os.waitid(
                os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
            ):
                self._reap(process)

    def _reap(self, process: SupervisedProcess) -> None:
        """Finish a process that has ended: kill the rest of its process group, read its last output, and
        collect its exit status.
        """
        stdin, stdout = process._stdin, process._stdout
        process.signal_group(signal.SIGKILL)  # before `wait` frees the group's id for reuse
        while data := stdout.read(1 << 16):
            process._output.feed(data)
        process._output.feed(b"", final=True)
        with contextlib.suppress(KeyError):
            self._selector.unregister(stdout)
        descriptor = self._descriptors.pop(process, None)
        if descriptor is not None:
            self._selector.unregister(descriptor)
            os.close(descriptor)
        if process._unsent:
            process._unsent.clear()
            self._selector.unregister(stdin)
        stdout.close()
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
        with process._lock:
            returncode = process._popen.wait()
        self._processes.discard(process)
        process.dead.set_result(Death(returncode, process.output_tail()))
