"""Tests of the answers of a host to the doctor, in this process."""

from __future__ import annotations

import asyncio
import os

import pytest

from jaxpp_async.doctor.host import ProbeServer, send_record
from jaxpp_async.doctor.protocol import (
    AskClock,
    CallBack,
    ClockIs,
    Completed,
    Measure,
    Prepare,
    ProbeFailed,
    Started,
    read_record,
)


async def test_variables_are_set_before_anything_else(monkeypatch):
    monkeypatch.setenv("JAXPP_TEST_DOCTOR", "before")
    assert await ProbeServer().answer(Prepare({"JAXPP_TEST_DOCTOR": "after"})) == Completed()
    assert os.environ["JAXPP_TEST_DOCTOR"] == "after"


async def test_the_clock_is_the_wall_clock(monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1234.5)
    assert await ProbeServer().answer(AskClock()) == ClockIs(1234.5)


async def test_a_host_calls_back_with_the_token_it_was_given():
    record_heartbeat = asyncio.get_running_loop().create_future()

    async def serve(reader, writer) -> None:
        record_heartbeat.set_result(await reader.read())
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await ProbeServer().answer(CallBack("127.0.0.1", port, "token")) == Completed()
        assert await record_heartbeat == b"token\n"


async def test_what_fails_is_an_answer():
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    answer = await ProbeServer().answer(CallBack("127.0.0.1", port, "token"))
    assert isinstance(answer, ProbeFailed)
    assert "Connect call failed" in answer.error or "Connection refused" in answer.error


async def test_without_an_open_end_nothing_can_be_measured():
    assert await ProbeServer().answer(Measure(1, "", leads=True)) == ProbeFailed(
        "there is no open end of the data plane"
    )


class End:
    """An end of the data plane, opened before."""

    closed = 0

    async def measure(self, peer, address, *, leads):
        assert (peer, address, leads) == (1, b"addr", True)
        raise TimeoutError

    async def aclose(self):
        self.closed += 1


async def test_an_end_is_given_back_whatever_came_of_the_measurement():
    host, end = ProbeServer(), End()
    host._end = end
    assert await host.answer(Measure(1, b"addr", leads=True)) == ProbeFailed("it took too long")
    assert end.closed == 1
    await host.aclose()
    assert end.closed == 1


def test_a_record_is_one_line_on_stdout(capfdbinary):
    send_record(Started("1.2"))
    out = capfdbinary.readouterr().out
    assert out.count(b"\n") == 1
    assert read_record(out.decode()) == Started("1.2")


@pytest.mark.parametrize("line", ["Last login: today", ""])
def test_other_lines_are_no_records(line):
    assert read_record(line) is None
