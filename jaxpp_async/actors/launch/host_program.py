"""host_program: this end of one program on a host, behind a login. What it prints in; its records out.

It knows no ssh, and not what the program is for: whatever carries bytes there and lines back will do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from jaxpp_async.actors.processes.warden import TAIL_LINES, Death

R = TypeVar("R")
T = TypeVar("T")


class Stream(Protocol):
    """Bytes to a program's stdin. It keeps the lease: a sign of life every few seconds, from a thread."""

    def write(self, data: bytes) -> None:
        """Send, in order and without waiting; nothing happens once it is over."""
        ...

    def kill(self) -> None:
        """End it at once, and so the program."""
        ...

    async def wait_over(self) -> Death:
        """Wait until it is over; how its process ended, and the last lines that were no records."""
        ...


class NotUpError(Exception):
    """A program on a host did not come up, or did not answer.

    Attributes:
        said: what came instead. ended: exit status of its stream; None: it took too long.
        is_logged_in: the host let us in before.
    """

    def __init__(self, said: tuple[str, ...], ended: int | None, is_logged_in: bool):
        super().__init__(f"no answer: {ended}, {said[-3:]}")
        self.said, self.ended, self.is_logged_in = said, ended, is_logged_in


class HostProgram(Generic[R]):
    """One program. Whoever makes a kind of it says what its records mean.

    Args:
        name: of its host, for messages.
        read_record: the record in a line, None if it is none; a ValueError says what is wrong with it.
        login_mark: a line that tells that the host let us in; a record tells it as well.
    """

    def __init__(self, name: str, read_record: Callable[[str], R | None], login_mark: str | None):
        self._loop = asyncio.get_running_loop()
        self.name, self._read_record, self._login_mark = name, read_record, login_mark
        self._logged_in = asyncio.Event()
        self._said: list[str] = []
        self._stream: Stream | None = None
        self._over: asyncio.Task[Death] | None = None

    @property
    def is_over(self) -> bool:
        """Its stream was there, and has ended."""
        return self._over is not None and self._over.done()

    def on_line(self, line: str) -> None:
        """Take a line of its output. Any thread may call this."""
        try:
            self._loop.call_soon_threadsafe(self._take, line)
        except RuntimeError:  # the loop has closed: nobody is left to tell
            return

    def attach(self, stream: Stream) -> None:
        """The stream has begun."""
        self._stream = stream
        self._over = self._loop.create_task(self._watch(stream), name=f"watch what runs on {self.name}")

    async def wait_login(self, timeout_s: float) -> None:
        """Wait until the host's login shell, or what stands for it, has answered.

        Raises:
            NotUpError: it has not.
        """
        await self._wait(self._logged_in.wait(), timeout_s)

    async def _wait(self, wanted: Awaitable[T], timeout_s: float) -> T:
        """Wait for something that the program does.

        Raises:
            NotUpError: it ended, or took longer.
        """
        assert self._over is not None
        task = asyncio.ensure_future(wanted)
        try:
            await asyncio.wait([task, self._over], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            ended = self._over.result().returncode if self._over.done() else None
            raise NotUpError(tuple(self._said), ended, self._logged_in.is_set())
        finally:
            task.cancel()

    async def _end(self, timeout_s: float = 0.0) -> None:
        """Wait for its end, and kill the stream if that takes longer. A second call does nothing."""
        if self._stream is None or self._over is None:
            return
        if timeout_s:
            await asyncio.wait([self._over], timeout=timeout_s)
        self._stream.kill()
        await self._over

    async def _watch(self, stream: Stream) -> Death:
        end = await stream.wait_over()
        self._take_end(end)
        return end

    def _take(self, line: str) -> None:
        try:
            record = self._read_record(line)
        except ValueError as error:
            self._take_text(str(error))
            return
        if record is not None:
            self._logged_in.set()
            self._take_record(record)
        elif line.strip() == self._login_mark:
            self._logged_in.set()
        else:
            self._take_text(line)

    # ------------------------------------------------------------ for each kind to say

    def _take_record(self, record: R) -> None:
        raise NotImplementedError

    def _take_text(self, line: str) -> None:
        """A line that is no record: by default kept, for whoever has to say why it did not come up."""
        if line.strip():
            self._said.append(line)
            del self._said[:-TAIL_LINES]

    def _take_end(self, end: Death) -> None:
        """Its stream has ended."""
