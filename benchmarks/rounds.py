"""rounds: contenders in, their durations out, measured alternately. Starts and ends processes; knows nothing
of what they do (`contender.py` is their side of the line) and never raises because one of them fails.

Machines drift: other programs come and go, clocks change. So contenders take turns, a few steps at a time, in
    another
order each round, and ratios are taken within a round.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).parent
_LINE_BYTES = 1 << 24
_END_S = 10.0
"""A contender that was told to quit gets this long, then its process group is killed."""


@dataclass(frozen=True)
class Contender:
    """A program that can be measured.

    Args:
        name: its key in the results.
        command: interpreter, program and arguments.
        env: variables to add; `benchmarks/` is on PYTHONPATH already.
        ready_s: how long it may take to set up and warm up.
        step_s: how long a step may take at most.
    """

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ready_s: float = 90.0
    step_s: float = 10.0


def ours(name: str, program: str, *args: str, **options: Any) -> Contender:
    """A contender in this environment: `benchmarks/PROGRAM`."""
    return Contender(name, (sys.executable, str(HERE / program), *args), **options)


@dataclass(frozen=True)
class Plan:
    """How often and how long.

    Args:
        num_rounds: turns of each contender.
        num_steps: measured steps a turn.
        num_settling: steps before them that are not counted: caches are somebody else's after the others'
            turns.
        seed: of the orders.
    """

    num_rounds: int = 5
    num_steps: int = 10
    num_settling: int = 3
    seed: int = 0


@dataclass
class Taken:
    """What was measured of one contender.

    Attributes:
        rounds: durations in ms, round by round.
        facts: what it said when it was ready.
        extras: what else its answers held, round by round.
        failure: why it has no figures, or none of the later rounds.
    """

    rounds: list[list[float]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    extras: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None

    @property
    def median(self) -> float | None:
        """Of all steps, in ms; None where there are none."""
        steps = [ms for taken in self.rounds for ms in taken]
        return statistics.median(steps) if steps else None

    @property
    def spread(self) -> float | None:
        """Distance of the quartiles, in ms."""
        steps = [ms for taken in self.rounds for ms in taken]
        if len(steps) < 2:
            return None
        low, _, high = statistics.quantiles(steps, n=4)
        return high - low


def ratio(one: Taken, other: Taken) -> float | None:
    """How long `one` takes in terms of `other`: the median over rounds of the quotient of the round's
    medians."""
    pairs = [(a, b) for a, b in zip(one.rounds, other.rounds, strict=False) if a and b]
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs) if pairs else None


def _unheard(line: str) -> None:
    """Who waits for no news."""


async def take(
    contenders: Sequence[Contender], plan: Plan, progress: Callable[[str], None] = _unheard
) -> dict[str, Taken]:
    """Measure contenders alternately.

    All are started first, one after the other, and all have ended when this returns, by whatever way.

    Args:
        contenders: by names of their own.
        plan: how often and how long.
        progress: takes what is being done now, such as `round 2 of 5: torch`.

    Returns:
        By name. One that failed or was late has a `failure`.
    """
    taken = {c.name: Taken() for c in contenders}
    async with contextlib.AsyncExitStack() as stack:
        lines: dict[str, _Line] = {}
        for contender in contenders:
            progress(f"setting up {contender.name}")
            with _failures_into(taken[contender.name]):
                line = lines[contender.name] = await stack.enter_async_context(_started(contender))
                with line.killed_on_failure():
                    taken[contender.name].facts = await line.answer("ready", contender.ready_s)
        shuffle = random.Random(plan.seed).shuffle
        for number in range(1, plan.num_rounds + 1):
            order = [c for c in contenders if taken[c.name].failure is None]
            shuffle(order)
            for contender in order:
                progress(f"round {number} of {plan.num_rounds}: {contender.name}")
                await _turn(contender, lines[contender.name], plan, taken[contender.name])
    return taken


async def once(contender: Contender) -> dict[str, Any]:
    """What a program says that measures something by itself and answers with the `ready` line.

    Raises:
        ContenderError: it died, was late, or said something else.
    """
    async with _started(contender) as line:
        return await line.answer("ready", contender.ready_s)


async def _turn(contender: Contender, line: _Line, plan: Plan, taken: Taken) -> None:
    with _failures_into(taken), line.killed_on_failure():
        if plan.num_settling:
            await line.ask(plan.num_settling, contender.step_s)
        answer = await line.ask(plan.num_steps, contender.step_s)
        taken.rounds.append([float(ms) for ms in answer.pop("ms")])
        taken.extras.append(answer)


@contextlib.contextmanager
def _failures_into(taken: Taken) -> Iterator[None]:
    try:
        yield
    except (ContenderError, OSError) as error:
        taken.failure = str(error)


class ContenderError(Exception):
    """A contender died, was late or said what cannot be understood."""


class _Line:
    """The driver's end of a contender's stdin and stdout."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: IO[bytes]):
        self._name, self.process, self._log = name, process, log

    async def ask(self, num_steps: int, step_s: float) -> dict[str, Any]:
        """Have it run so many steps."""
        self._say({"measure": num_steps})
        answer = await self._read(10 + num_steps * step_s)
        if not isinstance(answer.get("ms"), list) or len(answer["ms"]) == 0:
            raise ContenderError(f"{self._name} answered {str(answer)[:100]}, not with durations in `ms`")
        return answer

    async def answer(self, key: str, within_s: float) -> dict[str, Any]:
        """What its next line has under `key`."""
        answer = await self._read(within_s)
        if not isinstance(answer.get(key), dict):
            raise ContenderError(f"{self._name} said {str(answer)[:100]}, not {key!r}")
        return answer[key]

    async def _read(self, within_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), within_s)
        except TimeoutError:
            raise ContenderError(
                f"{self._name} said nothing within {within_s:.3g} s. {self._last_words()}"
            ) from None
        if not line:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), 2)
            raise ContenderError(f"{self._name} ended ({self.process.returncode}). {self._last_words()}")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ContenderError(f"{self._name} said {line[:100]!r}, which is no JSON object")
        return message

    @contextlib.contextmanager
    def killed_on_failure(self) -> Iterator[None]:
        """One that is merely late would compute on while others are measured."""
        try:
            yield
        except BaseException:  # also a cancellation: whoever waits no longer must not leave it computing
            self.kill()
            raise

    def kill(self) -> None:
        """End it and what it started and left in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def quit(self) -> None:
        """Ask it to end, and wait."""
        with contextlib.suppress(OSError, TimeoutError):
            self._say({"quit": True})
            await asyncio.wait_for(self.process.wait(), _END_S)

    def _say(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return "Its last words: " + " | ".join(lines[-12:]) if lines else "It printed nothing."


@contextlib.asynccontextmanager
async def _started(contender: Contender) -> AsyncIterator[_Line]:
    """A contender's process, in a group of its own that is gone afterwards."""
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *contender.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, "PYTHONPATH": path, **contender.env},
            start_new_session=True,
            limit=_LINE_BYTES,
        )
        line = _Line(contender.name, process, log)
        try:
            yield line
        finally:
            await asyncio.shield(_ended(line))


async def _ended(line: _Line) -> None:
    if line.process.returncode is None:
        await line.quit()
    line.kill()  # also when it has ended by itself: what it started may live on
    await line.process.wait()
