"""Log records of actors: they reach the controller's `logging` with actor, host and step, and hold no actor
up."""

from __future__ import annotations

import asyncio
import logging
import pathlib
import re
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
from records_actor import STORM_S
from waiting import until

import jaxpp_async
from jaxpp_async.controller.controller import Controller
from jaxpp_async.controller.error_messages import ActorInfo
from jaxpp_async.launch import LocalLauncher
from jaxpp_async.launch.hosts import parse_hosts
from jaxpp_async.launch.remote import CommandReach, RemoteLauncher
from jaxpp_async.protocol import log_forwarding
from jaxpp_async.protocol.log_forwarding import (
    BURST,
    PER_TURN,
    RECORDS_PER_S,
    RateLimit,
    RecordSender,
    as_message,
    log_remote,
)
from jaxpp_async.protocol.messages import Log, step_number
from tests.controller.test_controller import load, mesh, start

INFO = ActorInfo(1, "n1", 4711, (), "ready")


def record(message: str = "hello", *args: object, name: str = "user", **fields: object) -> logging.LogRecord:
    return logging.getLogger(name).makeRecord(
        name, logging.INFO, "user.py", 12, message, args, None, extra=None
    )


# ---------------------------------------------------------------- pure parts


def test_the_rate_is_bounded_and_refusals_are_counted():
    limit = RateLimit(per_s=10, burst=5, now_s=0.0)
    assert [limit.admit(0.0, 0) for _ in range(7)] == [True] * 5 + [False] * 2
    assert [limit.admit(0.1, 0) for _ in range(2)] == [True, False]
    assert sum(limit.admit(60.0, 0) for _ in range(100)) == 5
    assert not limit.admit(120.0, 5)  # nobody takes what waits
    assert limit.num_refused == 2 + 1 + 95 + 1


def test_a_record_travels_as_text():
    assert as_message(record("%d of %s", 3, "it"), 7).message == "3 of it"
    long = as_message(record("x" * 10_000), None).message
    assert len(long) < 5000 and long.endswith("(10000 characters)")
    try:
        raise ValueError("boom " + "y" * 50_000)
    except ValueError:
        failed = record()
        failed.exc_info = sys.exc_info()
    traceback = as_message(failed, 0).fields["traceback"]
    assert traceback.endswith("yyy") and len(traceback) <= log_forwarding.MAX_TRACEBACK_CHARS


# ---------------------------------------------------------------- in the actor


@pytest.fixture
def logger() -> logging.Logger:
    return logging.Logger("test_records", logging.INFO)  # below no other: nobody else's handlers see it


async def test_records_of_all_threads_are_sent_in_order_and_a_few_a_turn(logger):
    sent: list[Log] = []
    sender = RecordSender(sent.append)
    sender.step = lambda: 5
    logger.addHandler(sender)
    thread = threading.Thread(
        target=lambda: [logger.info("%d", k) for k in range(3 * PER_TURN)], name="worker"
    )
    thread.start()
    thread.join()
    assert sent == []
    for turns in (1, 2, 3):
        await asyncio.sleep(0)
        assert len(sent) <= turns * PER_TURN
    await until(lambda: len(sent) == 3 * PER_TURN)
    assert [message.message for message in sent] == [str(k) for k in range(3 * PER_TURN)]
    assert {(message.step, message.fields["thread"]) for message in sent} == {(5, "worker")}


async def test_a_storm_is_counted_and_dropped(logger, monkeypatch):
    monkeypatch.setattr(log_forwarding, "REPORT_AFTER_S", 0.01)
    now_s, sent = 0.0, []
    sender = RecordSender(sent.append, clock=lambda: now_s)
    logger.addHandler(sender)
    for _ in range(10_000):
        logger.info("again")
    assert len(sender._waiting) == BURST
    await until(lambda: len(sent) > BURST)
    assert sent[-1].level == logging.WARNING
    assert (
        sent[-1].message
        == f"{10_000 - BURST} log records were dropped: this actor logs more than 200 a second"
    )
    now_s = 1.0
    logger.info("afterwards")
    sender.close()
    assert sent[-1].message == "afterwards"


async def test_a_record_that_cannot_be_formatted_does_no_harm(logger, capsys):
    sent: list[Log] = []
    logger.addHandler(RecordSender(sent.append))
    logger.info("%d", "no number")
    logger.info("next")
    await asyncio.sleep(0.01)
    assert [message.message for message in sent] == ["next"] and "no number" in capsys.readouterr().err


async def test_the_loop_does_not_wait_for_a_text_that_takes_long(logger):
    """Such as an array's, which waits for the device."""
    slow, asked, sent = threading.Event(), threading.Event(), []
    logger.addHandler(RecordSender(sent.append))

    class Slow:
        def __str__(self) -> str:
            asked.set()
            slow.wait(5)
            return "slow"

    thread = threading.Thread(target=lambda: logger.info("%s", Slow()))
    thread.start()
    assert asked.wait(5)
    logger.info("quick")
    await until(lambda: sent)
    slow.set()
    thread.join()
    assert [message.message for message in sent] == ["quick"]


# ---------------------------------------------------------------- on the controller


def test_a_remote_record_has_actor_host_and_step(caplog):
    fields = {"thread": "worker", "file": "/x/user.py", "line": 12, "traceback": "Traceback: no apples"}
    with caplog.at_level(logging.INFO, "jaxpp_async"):
        log_remote(INFO, Log(logging.INFO, "user.code", "100 % sure", 7, fields))
    [seen] = caplog.records
    assert (seen.name, seen.actor, seen.host, seen.step) == ("user.code", 1, "n1", 7)
    assert (seen.process, seen.threadName, seen.filename, seen.lineno) == (4711, "worker", "user.py", 12)
    text = logging.Formatter("%(actor)s %(step)s %(message)s").format(seen)
    assert text == "1 7 [actor 1] 100 % sure\nTraceback: no apples"


@pytest.mark.parametrize(
    ("package", "own", "level", "is_seen"),
    [
        (logging.INFO, logging.NOTSET, logging.INFO, True),
        (logging.INFO, logging.NOTSET, logging.DEBUG, False),
        (logging.ERROR, logging.NOTSET, logging.WARNING, False),
        (logging.INFO, logging.ERROR, logging.WARNING, False),
        (logging.ERROR, logging.DEBUG, logging.DEBUG, True),
    ],
)
def test_levels_are_those_of_the_logger_or_of_the_package(caplog, package, own, level, is_seen):
    caplog.handler.setLevel(logging.DEBUG)
    with caplog.at_level(package, "jaxpp_async"), caplog.at_level(own, "some.package"):
        caplog.handler.setLevel(logging.DEBUG)
        log_remote(INFO, Log(level, "some.package.part", "hello"))
    assert bool(caplog.records) == is_seen


def test_every_record_of_the_package_has_the_attributes(caplog):
    sources = pathlib.Path(jaxpp_async.__file__).parent.rglob("*.py")
    names = {
        name
        for path in sources
        for name in re.findall(r'getLogger\("(jaxpp_async[^"]*)"\)', path.read_text())
    }
    assert len(names) >= 3
    for name in names:
        logging.getLogger(name).warning("hello")
    formatter = logging.Formatter("%(actor)s %(host)s %(step)s %(message)s")
    assert {formatter.format(seen) for seen in caplog.records} == {"None None None hello"}


def test_an_inline_actors_records_name_it(caplog):
    log_forwarding.name_actor(3).run(logging.getLogger("jaxpp_async").warning, "hello")
    assert [seen.actor for seen in caplog.records] == [3]  # type: ignore[attr-defined]


# ---------------------------------------------------------------- from a process to the controller


def by_logger(caplog: pytest.LogCaptureFixture, prefix: str) -> list[Any]:
    return [seen for seen in caplog.records if seen.name.startswith(prefix)]


@pytest.fixture(scope="module")
async def controller() -> AsyncIterator[Controller]:
    logging.getLogger("jaxpp_async").setLevel(logging.INFO)  # before the mesh, as a user does
    try:
        async with mesh(1, launcher=LocalLauncher(actor="records_actor:RecordsActor")) as controller:
            yield controller
    finally:
        logging.getLogger("jaxpp_async").setLevel(logging.NOTSET)


async def test_what_a_process_logs(controller, caplog):
    step = start(controller, await load(controller, "log"))
    await step
    await until(lambda: len(by_logger(caplog, "user.code")) == 3)
    apples, failed, thread = by_logger(caplog, "user.code")
    assert [seen.getMessage() for seen in (apples, failed, thread)] == [
        "[actor 0] 3 apples",
        "[actor 0] it failed",
        "[actor 0] from a thread",
    ]
    assert {(seen.actor, seen.step, seen.process) for seen in (apples, thread)} == {
        (0, step_number(step.id), controller.actors[0].pid)
    }
    assert "ValueError: no apples" in caplog.text and thread.threadName == "picker"
    [warned] = by_logger(caplog, "py.warnings")
    assert "old apples" in warned.getMessage() and warned.levelno == logging.WARNING


async def test_what_a_process_elsewhere_prints_and_logs(caplog):
    """Through a host agent, as over ssh."""
    lines: list[str] = []
    caplog.set_level(logging.INFO, "jaxpp_async")
    reach = CommandReach(lambda placement, host_agent: ["sh", "-c", 'exec "$@"', "sh", *host_agent])
    launcher = RemoteLauncher(
        reach, parse_hosts(["a"]), actor="records_actor:RecordsActor", forward=lines.append
    )
    async with mesh(1, launcher=launcher) as controller:
        await start(controller, await load(controller, "log"))
        await until(lambda: len(by_logger(caplog, "user.code")) == 3 and len(lines) >= 2)
        host = controller.actors[0].host
    assert {"[actor 0, a] to stdout", "[actor 0, a] to stderr"} <= set(lines)
    assert {(seen.actor, seen.host) for seen in by_logger(caplog, "user.code")} == {(0, host)}


async def test_a_storm_of_records_holds_nobody_up(controller, caplog):
    """10,000 records a second for a second: 200 a second and a burst arrive, steps go on, memory stays."""
    process = psutil.Process(controller.actors[0].pid)
    resident = process.memory_info().rss
    program = await load(controller, "storm")
    began, longest_s, steps = time.monotonic(), 0.0, 0
    while time.monotonic() - began < STORM_S:
        step_began = time.monotonic()
        await start(controller, program)
        longest_s, steps = max(longest_s, time.monotonic() - step_began), steps + 1
    await until(lambda: by_logger(caplog, "jaxpp_async.records"))
    took_s = time.monotonic() - began
    assert len(by_logger(caplog, "user.storm")) <= BURST + RECORDS_PER_S * (took_s + 0.5)
    assert steps > 50 and longest_s < 1
    assert process.memory_info().rss - resident < 16 << 20
