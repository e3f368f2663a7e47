"""Tests of the doctor's connection to the program on one host."""

from __future__ import annotations

import asyncio

import pytest

from jaxpp_async.doctor.examine import HostError, HostLink
from jaxpp_async.doctor.protocol import (
    AskClock,
    ClockIs,
    Completed,
    ProbeFailed,
    Started,
    read_order,
    write_record,
)
from jaxpp_async.launch.host_agent_client import ProgramNotStartedError
from jaxpp_async.launch.process_supervisor import Death


class Stream:
    """A connection to a host that answers each order with the next of some records."""

    def __init__(self, link: HostLink, *answers: object):
        self.link, self.answers, self.orders = link, list(answers), []
        self.over: asyncio.Future[Death] = asyncio.get_running_loop().create_future()

    def write(self, data: bytes) -> None:
        self.orders.append(read_order(data))
        if self.answers:
            self.link.on_line(write_record(self.answers.pop(0)).decode())

    def kill(self) -> None:
        if not self.over.done():
            self.over.set_result(Death(-9, ()))

    async def wait_ended(self) -> Death:
        return await self.over


def linked(*answers: object) -> tuple[HostLink, Stream]:
    link = HostLink("n1")
    stream = Stream(link, *answers)
    link.attach(stream)
    return link, stream


async def test_a_host_is_up_with_its_first_word():
    link, _ = linked()
    link.on_line(write_record(Started("1")).decode())
    await link.wait_up(60.0)


async def test_an_order_has_its_answer():
    link, stream = linked(ClockIs(5.0))
    assert await link.ask(AskClock(), ClockIs, 60.0) == ClockIs(5.0)
    assert stream.orders == [AskClock()]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (ProbeFailed("no clock here"), "no clock here"),
        (Completed(), "it answered with Completed when asked for ClockIs"),
    ],
    ids=["failed", "another"],
)
async def test_an_answer_that_is_none_is_an_error(answer, says):
    link, _ = linked(answer)
    with pytest.raises(HostError) as caught:
        await link.ask(AskClock(), ClockIs, 60.0)
    assert str(caught.value) == says


async def test_a_host_that_did_not_answer_once_is_never_asked_again():
    link, stream = linked()
    for _ in range(2):
        with pytest.raises(HostError, match=r"^it did not answer within 0 s$"):
            await link.ask(AskClock(), ClockIs, 0.0)
    assert stream.orders == [AskClock()]  # a late answer would be taken for another's


@pytest.mark.parametrize(
    ("returncode", "said", "says"),
    [(3, "boom ", "its program ended with code 3: boom"), (-11, None, "its program ended with signal 11")],
)
async def test_the_end_of_a_host_is_told_with_its_last_word(returncode, said, says):
    link, stream = linked()
    if said is not None:
        link.on_line(said)
    stream.over.set_result(Death(returncode, ()))
    with pytest.raises(HostError) as caught:
        await link.ask(AskClock(), ClockIs, 60.0)
    assert str(caught.value) == says


async def test_a_host_that_ends_before_its_first_word_is_not_up():
    link, _ = linked()
    await link.aclose()
    await link.aclose()
    with pytest.raises(ProgramNotStartedError) as caught:
        await link.wait_up(60.0)
    assert caught.value.exit_status == -9
