"""host_link: the doctor's end of one host. A stream of bytes to `doctor.host` in, answers to orders out.

It decides nothing about hosts, and knows no ssh: whatever carries bytes there and lines back will do.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

from jaxpp_async.actors.launch.host_program import HostProgram, NotUpError
from jaxpp_async.doctor import talk

T = TypeVar("T")


class HostError(Exception):
    """A host did not do what it was asked; the message says why, without naming it."""


class HostLink(HostProgram[talk.Record]):
    """One host, or a second process on one.

    Args:
        name: of the host, for messages. login_mark: a line that tells that the host let us in.
    """

    def __init__(self, name: str, *, login_mark: str | None = None):
        super().__init__(name, talk.read_record, login_mark)
        self._records: asyncio.Queue[talk.Record] = asyncio.Queue()
        self._silent = ""

    async def wait_up(self, timeout_s: float) -> None:
        """Wait until Python and the package answer.

        Raises:
            NotUpError: they do not.
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
        except NotUpError as error:
            self._silent = _no_answer(error, timeout_s)
            raise HostError(self._silent) from None
        if isinstance(record, talk.Failed):
            raise HostError(record.error)
        if not isinstance(record, expected):
            raise HostError(f"it answered with {type(record).__name__} when asked for {expected.__name__}")
        return record

    async def aclose(self) -> None:
        """End it. A second call does nothing."""
        await self._end()

    def _take_record(self, record: talk.Record) -> None:
        self._records.put_nowait(record)


def _no_answer(error: NotUpError, timeout_s: float) -> str:
    if error.ended is None:
        return f"it did not answer within {timeout_s:g} s"
    last = f": {error.said[-1].strip()}" if error.said else ""
    how = f"code {error.ended}" if error.ended >= 0 else f"signal {-error.ended}"
    return f"its program ended with {how}{last}"
