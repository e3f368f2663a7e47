"""contender: the measured side of a benchmark that alternates between programs. In: lines of JSON on stdin;
out: lines of JSON on stdout. Needs nothing but the standard library, since contenders run in environments of
their own. Never measures anything itself: what a step is, the program says.

A contender sets up, warms up, says that it is ready and then does what it is told:

    <- {"ready": {"torch": "2.9", ...}}     once: versions and notes, for the results
    -> {"measure": 10}                      run ten steps
    <- {"ms": [8.1, ...], ...}              one duration a step; further keys reach the results as they are
    -> {"quit": true}                       end (the end of stdin means the same)

A duration is what a user waits for, by `time.perf_counter`: from the call to the step and its outputs being
ready. Between measurements a contender must be idle (others are being measured): no spinning threads, no
polling.

    channel = Channel()                                     # first of all: what libraries print goes to
    stderr step = ...                                              # set up, run it a few times
    channel.serve(lambda n: timed(step, n), torch=torch.__version__)
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

Answer = Sequence[float] | dict[str, Any]
"""Durations in ms; or a dict with them as `ms` and whatever else is to be kept."""


def timed(step: Callable[[], Any], times: int) -> list[float]:
    """Run `step` several times.

    Args:
        step: returns when all that a user waits for is there.

    Returns:
        One duration a step, in ms.
    """
    found = []
    for _ in range(times):
        start = time.perf_counter()
        step()
        found.append((time.perf_counter() - start) * 1e3)
    return found


async def timed_async(step: Callable[[], Awaitable[Any]], times: int) -> list[float]:
    """`timed`, for a step that is awaited."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        await step()
        found.append((time.perf_counter() - start) * 1e3)
    return found


class Channel:
    """The line to the driver.

    Making one claims stdout: whatever this process and its children print from then on goes to stderr, so
        that a
    library's banner cannot be taken for an answer. Make it before anything else is imported that prints.
    """

    def __init__(self) -> None:
        sys.stdout.flush()
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def ready(self, **facts: Any) -> None:
        """Say that measuring may start: versions and notes as keyword arguments."""
        self._say({"ready": facts})

    def serve(self, measure: Callable[[int], Answer], **facts: Any) -> None:
        """Answer until told to quit.

        Args:
            measure: runs so many steps.
            facts: versions and notes, for the results.
        """
        self.ready(**facts)
        # readline and not iteration, which would read ahead.
        while (times := _asked_for(sys.stdin.readline())) is not None:
            self._say(_as_dict(measure(times)))

    async def serve_async(self, measure: Callable[[int], Awaitable[Answer]], **facts: Any) -> None:
        """`serve`, for a measurement that is awaited. The event loop runs on while there is nothing to do."""
        loop = asyncio.get_running_loop()
        lines = asyncio.StreamReader()
        pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        try:
            self.ready(**facts)
            while (times := _asked_for((await lines.readline()).decode())) is not None:
                self._say(_as_dict(await measure(times)))
        finally:
            pipe.close()

    def _say(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


def _asked_for(line: str) -> int | None:
    """How many steps a line asks for; None where it says to end."""
    if not line:
        return None
    message = json.loads(line)
    return None if "quit" in message else int(message["measure"])


def _as_dict(answer: Answer) -> dict[str, Any]:
    return answer if isinstance(answer, dict) else {"ms": list(answer)}
