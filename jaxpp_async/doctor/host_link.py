"""host_link: the doctor's end of one host. A stream of bytes to `doctor.host` in, answers to orders out.

It decides nothing about hosts, and knows no ssh: whatever carries bytes there and lines back will do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from jaxpp_async.actors.launch.keeper_link import KeeperError, Stream
from jaxpp_async.actors.warden import TAIL_LINES, Death
from jaxpp_async.doctor import talk

T = TypeVar("T")


class HostError(Exception):
    """A host did not do what it was asked; the message says why, without naming it."""


class HostLink:
    """One host, or a second process on one.

    Args:
        name: of the host, for messages. login_mark: a line that tells that the host let us in.
    """

    def __init__(self, name: str, *, login_mark: str | None = None):
        self._loop = asyncio.get_running_loop()
        self.name, self._login_mark = name, login_mark
        self._logged_in = asyncio.Event()
        self._records: asyncio.Queue[talk.Record] = asyncio.Queue()
        self._said: list[str] = []
        self._silent = ""
        self._stream: Stream | None = None
        self._over: asyncio.Task[Death] | None = None

    def on_line(self, line: str) -> None:
        """Take a line of the host's output. Any thread may call this."""
        try:
            self._loop.call_soon_threadsafe(self._take, line)
        except RuntimeError:  # the loop has closed: nobody is left to tell
            return

    def attach(self, stream: Stream) -> None:
        """The stream has begun."""
        self._stream = stream
        self._over = self._loop.create_task(stream.wait_over(), name=f"watch the doctor's program on {self.name}")

    async def wait_login(self, timeout_s: float) -> None:
        """Wait until the host's login shell, or what stands for it, has answered.

        Raises:
            KeeperError: it has not.
        """
        await self._wait(self._logged_in.wait(), timeout_s)

    async def wait_up(self, timeout_s: float) -> None:
        """Wait until Python and the package answer.

        Raises:
            KeeperError: they do not.
        """
        await self._wait(self._records.get(), timeout_s)

    async def ask(self, order: talk.Order, expected: type[T], timeout_s: float) -> T:
        """One order, and its answer. One at a time.

        Raises:
            HostError: it could not be done, or there is no answer.
        """
        assert self._stream is not None
        if self._silent:  # its answer may still come, and would be taken for another's
            raise HostError(self._silent)
        self._stream.write(talk.write_order(order))
        try:
            record = await self._wait(self._records.get(), timeout_s)
        except KeeperError as error:
            self._silent = _no_answer(error, timeout_s)
            raise HostError(self._silent) from None
        if isinstance(record, talk.Failed):
            raise HostError(record.error)
        if not isinstance(record, expected):
            raise HostError(f"it answered with {type(record).__name__} when asked for {expected.__name__}")
        return record

    async def aclose(self) -> None:
        """End it. A second call does nothing."""
        if self._stream is not None and self._over is not None:
            self._stream.kill()
            await self._over

    async def _wait(self, wanted: Awaitable[T], timeout_s: float) -> T:
        assert self._over is not None
        task = asyncio.ensure_future(wanted)
        try:
            await asyncio.wait([task, self._over], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            ended = self._over.result().returncode if self._over.done() else None
            raise KeeperError(tuple(self._said), ended, self._logged_in.is_set())
        finally:
            task.cancel()

    def _take(self, line: str) -> None:
        try:
            record = talk.read_record(line)
        except ValueError as error:
            self._said.append(str(error))
            return
        if record is not None:
            self._logged_in.set()
            self._records.put_nowait(record)
        elif line.strip() == self._login_mark:
            self._logged_in.set()
        elif line.strip():
            self._said.append(line)
            del self._said[:-TAIL_LINES]


def _no_answer(error: KeeperError, timeout_s: float) -> str:
    if error.ended is None:
        return f"it did not answer within {timeout_s:g} s"
    last = f": {error.said[-1].strip()}" if error.said else ""
    how = f"code {error.ended}" if error.ended >= 0 else f"signal {-error.ended}"
    return f"its program ended with {how}{last}"
