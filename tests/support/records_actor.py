"""A fake actor that logs: what a program's text says, `"log"` or `"storm"`, it does at each step before it
answers."""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from fake_actor import FakeActor

from jaxpp_async.protocol import messages as m

STORM_PER_S, STORM_S = 10_000, 1.0


class RecordsActor(FakeActor):
    def __init__(self, actor_id: int, *, send: Callable[..., None], **seams: Any):
        super().__init__(actor_id, send=send, **seams)
        self.current_step: int | None = None
        self._has_stormed = False

    def _on_step(self, message: m.Step) -> m.StepDone | None:
        self.current_step = m.step_number(message.step)
        what = self._programs[message.program_id]
        if what == "log":
            _log()
        elif what == "storm" and not self._has_stormed:
            self._has_stormed = True
            threading.Thread(target=_storm, daemon=True).start()
        return super()._on_step(message)


def _log() -> None:
    print("to stdout", flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    log = logging.getLogger("user.code")
    log.debug("not this one")
    log.info("%d apples", 3)
    warnings.warn("old apples", stacklevel=1)
    try:
        raise ValueError("no apples")
    except ValueError:
        log.exception("it failed")
    thread = threading.Thread(target=lambda: log.warning("from a thread"), name="picker")
    thread.start()
    thread.join()


def _storm() -> None:
    """So many records, evenly, to the end of the time."""
    log, began = logging.getLogger("user.storm"), time.monotonic()
    sent = 0
    while (passed := time.monotonic() - began) < STORM_S:
        while sent < passed * STORM_PER_S:
            log.warning("record %d %s", sent, "x" * 200)
            sent += 1
        time.sleep(0.001)
    log.error("the storm is over: %d", sent)
