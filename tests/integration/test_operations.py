"""What docs/operations.md tells readers to copy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Iterator

import jax.numpy as jnp
import pytest
from docs_code import doc_code

from jaxpp_async.base.events import EventLog, Events
from jaxpp_async.controller.error_messages import ActorInfo
from jaxpp_async.protocol.log_forwarding import log_remote
from jaxpp_async.protocol.messages import Log

docs = doc_code("operations.md")


class FakeMesh:
    """A mesh that does nothing but have events."""

    def __init__(self) -> None:
        self._log = EventLog()

    def events(self) -> Events:
        return self._log.subscribe()

    async def __aenter__(self) -> FakeMesh:
        self._log.emit("started", "actor 0 is ready", actor=0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._log.emit("closed", "the mesh is closed")

    async def train(self) -> None:
        self._log.emit("died", "actor 0 was killed by SIGKILL", actor=0, step=3)


async def test_a_watcher_pages_and_ends_with_the_mesh():
    paged: list[str] = []

    async def page(text: str) -> None:
        await asyncio.sleep(0)
        paged.append(text)

    async with asyncio.timeout(5):
        await docs["main"](FakeMesh(), FakeMesh.train, page)
    assert [text.partition(" ")[2] for text in paged] == ["died: actor 0 was killed by SIGKILL"]


@contextlib.contextmanager
def no_handlers() -> Iterator[None]:
    """The root logger as a program finds it."""
    root = logging.getLogger()
    handlers, level, root.handlers = root.handlers, root.level, []
    try:
        yield
    finally:
        root.handlers = handlers
        root.setLevel(level)


def log_something() -> None:
    log_remote(
        ActorInfo(3, "n1", 4711, (), "ready"),
        Log(20, "user.setup", "hello", 7, {"traceback": "Traceback: x"}),
    )
    logging.getLogger("jaxpp_async").info("ours")
    logging.getLogger("another.package").warning("theirs")


def test_the_log_format_fits_every_record(capsys):
    with no_handlers():
        docs["log_to_stderr"]()
        log_something()
    first, traceback, ours, theirs = capsys.readouterr().err.splitlines()
    assert first.endswith("INFO actor=3 step=7 user.setup: [actor 3] hello") and traceback == "Traceback: x"
    assert ours.endswith("INFO actor=None step=None jaxpp_async: ours")
    assert theirs.endswith("WARNING actor=None step=None another.package: theirs")


def test_json_lines(capsys):
    handler = logging.StreamHandler()
    handler.setFormatter(docs["JsonLines"]())
    with no_handlers():
        logging.basicConfig(level=logging.INFO, handlers=[handler])
        log_something()
    remote, _, theirs = map(json.loads, capsys.readouterr().err.splitlines())
    assert (remote["actor"], remote["step"], remote["host"], remote["process"]) == (3, 7, "n1", 4711)
    assert remote["text"] == "[actor 3] hello\nTraceback: x" and remote["at"].endswith("+00:00")
    assert theirs["actor"] is None and theirs["text"] == "theirs"


async def test_sigterm_cancels_the_main_task():
    left: list[str] = []

    async def main() -> None:
        docs["leave_on_sigterm"]()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(30)
        finally:
            left.append("in order")

    try:
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(main())
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    assert left == ["in order"]


async def test_what_is_logged_is_printed_step_by_step(capsys):
    def train_step(state, batch):
        return state + batch, state

    await docs["train_and_log"](train_step, jnp.zeros(()), [jnp.ones(())] * 3)
    assert capsys.readouterr().out.splitlines() == [
        f"{step} {{'loss': {float(step)}, 'rate': 0.0003}}" for step in range(3)
    ]
