"""Clocks of actors on other hosts: which are ours, what their readings say, and who is asked when."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpp_async.controller import clock_sync
from jaxpp_async.controller.clock_sync import FORGET_S, ClockWatch
from jaxpp_async.errors import MeshClosedError
from jaxpp_async.protocol import messages as m
from jaxpp_async.protocol.clocks import DRIFT, NUM_READINGS, Clocks, Offset, clock_name
from jaxpp_async.protocol.frames import Identity

# ---------------------------------------------------------------- readings


def test_processes_of_one_host_share_a_clock():
    code = "from jaxpp_async.protocol.clocks import clock_name; print(clock_name())"
    assert clock_name() != ""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == clock_name()


@pytest.mark.parametrize(
    ("own", "name", "offset"),
    [("a", "a", Offset(0.0, 0.0)), ("a", "b", None), ("", "", None), ("a", "", None)],
    ids=["ours", "another", "neither can be told", "theirs cannot be told"],
)
def test_only_one_and_the_same_clock_needs_no_reading(own, name, offset):
    clocks = Clocks(own)
    clocks.name(1, name)
    assert clocks.clock_of(1).offset(5.0) == offset and clocks.clock_of(1).is_ours == (offset is not None)
    assert clocks.clock_of(2).offset(5.0) is None


def test_the_answer_that_came_back_soonest_says_most():
    clocks = Clocks("a")
    clocks.note(1, 10.0, 62.0, 14.0)  # 50 ahead, and half of 4 s may be wrong
    assert clocks.clock_of(1).offset(14.0) == Offset(50.0, 2.0)
    clocks.note(1, 20.0, 70.25, 21.0)
    assert clocks.clock_of(1).offset(21.0) == Offset(49.75, 0.5)
    clocks.note(1, 30.0, 89.0, 40.0)
    offset = clocks.clock_of(1).offset(31.0)
    assert offset is not None and offset.offset_s == 49.75
    # it is ten seconds old: the clocks have parted since
    assert offset.error_s == pytest.approx(0.5 + 10 * DRIFT)


def test_errors_bound_what_is_wrong_whatever_the_way_takes():
    """A clock ahead by 1000 s that gains 50 millionths, ways of 0.1 to 30 ms that are not alike there and
    back."""
    rng = random.Random(7)
    clocks = Clocks("a")
    for k in range(3 * NUM_READINGS):
        sent, there, back = k * 0.5, rng.uniform(1e-4, 3e-2), rng.uniform(1e-4, 3e-2)
        clocks.note(1, sent, 1000 + (sent + there) * (1 + 50e-6), sent + there + back)
        now = sent + there + back
        offset = clocks.clock_of(1).offset(now)
        assert offset is not None and abs(offset.offset_s - (1000 + now * 50e-6)) <= offset.error_s < 0.031
    assert offset.error_s < 0.01


def test_another_process_is_another_clock():
    clocks = Clocks("a")
    clocks.name(1, "b")
    clocks.note(1, 0.0, 7.0, 1.0)
    clocks.name(1, "b")
    assert clocks.clock_of(1).offset(1.0) is not None
    clocks.name(1, "c")  # a successor on another host
    assert clocks.clock_of(1).offset(1.0) is None
    clocks.note(1, 0.0, 7.0, 1.0)
    clocks.forget(1)
    assert clocks.clock_of(1).offset(1.0) is None


def test_a_clock_that_is_kept_stays_that_of_its_process():
    clocks = Clocks("a")
    clocks.name(1, "b")
    clocks.note(1, 0.0, 7.0, 1.0)
    kept = clocks.clock_of(1)
    clocks.forget(1)
    clocks.note(1, 1.0, 99.0, 1.0)
    assert kept.offset(1.0) == Offset(6.5, 0.5) and clocks.clock_of(1).offset(1.0) == Offset(98.0, 0.0)


def test_readings_of_then_say_more_than_those_of_much_later():
    clocks = Clocks("a")
    clocks.note(1, 0.0, 7.0, 1.0)
    kept = clocks.clock_of(1).readings
    for k in range(NUM_READINGS):
        clocks.note(1, 1e5 + k, 1e5 + k + 8.0, 1e5 + k)
    clock = clocks.clock_of(1)
    assert len(clock.readings) == NUM_READINGS and kept[0] not in clock.readings
    assert clock.offset(1.0, kept) == Offset(6.5, 0.5) != clock.offset(1.0)


# ---------------------------------------------------------------- asking


class Actors:
    """Answer when they are told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, asyncio.Future[m.Reported]]] = []
        self.over = False
        self.watch = ClockWatch(self.ask, own="ours")

    def ask(self, actor: int) -> asyncio.Future[m.Reported]:
        if self.over:
            raise MeshClosedError("over")
        self.asked.append((actor, asyncio.get_running_loop().create_future()))
        return self.asked[-1][1]

    def beat(self, actor: int, clock: str) -> None:
        self.watch.record_heartbeat(Identity(actor, 0, "beats"), m.Beat(None, clock))

    async def answer(self, k: int, **reply: Any) -> None:
        self.asked[k][1].set_result(m.Reported(0, None, **reply))
        await asyncio.sleep(0)


async def test_only_other_clocks_are_asked_and_one_question_is_open():
    actors = Actors()
    for _ in range(3):
        actors.beat(0, "ours")
        actors.beat(1, "theirs")
    assert [actor for actor, _ in actors.asked] == [1]
    assert (
        actors.watch.clock_of(0).offset(0.0) == Offset(0.0, 0.0)
        and actors.watch.clock_of(1).offset(0.0) is None
    )
    await actors.answer(0, now_s=1e6)
    now = asyncio.get_running_loop().time()
    offset = actors.watch.clock_of(1).offset(now)
    assert offset is not None and abs(offset.offset_s - (1e6 - now)) <= offset.error_s + 1.0
    actors.beat(1, "theirs")
    assert len(actors.asked) == 2


async def test_answers_that_say_nothing():
    actors = Actors()
    actors.beat(1, "theirs")
    await actors.answer(0)  # an actor that does not tell the time
    actors.beat(1, "theirs")
    actors.asked[1][1].set_exception(MeshClosedError("over"))
    await asyncio.sleep(0)
    actors.beat(1, "theirs")
    actors.watch.begin(1)  # replaced meanwhile: the answer is of another life
    actors.beat(1, "theirs")
    await actors.answer(2, now_s=5.0)
    assert actors.watch.clock_of(1).offset(0.0) is None
    actors.over = True
    actors.watch.begin(1)
    actors.beat(1, "theirs")  # nobody to ask
    assert len(actors.asked) == 4


async def test_a_question_that_was_lost_is_asked_again(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(clock_sync, "time", SimpleNamespace(monotonic=lambda: now[0]))
    actors = Actors()
    for _ in range(2):
        actors.beat(1, "theirs")
    assert len(actors.asked) == 1
    now[0] += FORGET_S
    actors.beat(1, "theirs")
    assert len(actors.asked) == 2
    await actors.answer(0, now_s=7.0)  # the first comes after all
    assert actors.watch.clock_of(1).offset(now[0]) is None
