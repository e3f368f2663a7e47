"""report: what the user sees while a run goes on and at its end: a progress bar in a terminal, else plain
lines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

NUM_PLAIN_LINES = 20
LONG_SAVE_BYTES = 1 << 30
"""Of larger checkpoints, more is said than that they are written."""


class Reporter:
    """Print the run: but for bar and spinner all are plain lines, the same in a terminal and in a file."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)

    def line(self, text: str = "") -> None:
        """Print `text` as it is: no wrapping, no markup."""
        self._console.print(text, markup=False, soft_wrap=True)
        self._console.file.flush()  # A pipe is block-buffered: its reader wants the line now.

    def lines(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.line(text)

    @contextmanager
    def phase(self, doing: str) -> Iterator[None]:
        """Say what is going on, then how long it took."""
        start = time.monotonic()
        if not self._console.is_terminal:
            self.line(f"{doing} ...")
        with self.spinner(doing):
            yield
        self.line(f"{doing}: {time.monotonic() - start:.1f} s")

    @contextmanager
    def spinner(self, doing: str) -> Iterator[None]:
        """In a terminal, say what is going on for as long as it lasts; leaves no line behind."""
        with self._console.status(doing) if self._console.is_terminal else nullcontext():
            yield

    def saving(self, saving: Any) -> None:
        """Say how far a checkpoint has come; called each time that a file of it is on the disk."""
        if saving.written_bytes < saving.size_bytes < LONG_SAVE_BYTES:
            return
        share = saving.written_bytes / max(saving.size_bytes, 1)
        self.line(f"checkpoint {saving.path}: {share:.0%} of {saving.size_bytes / 2**20:,.1f} MiB written")

    @contextmanager
    def training(
        self, num_steps: int, tokens_per_step: int, first_step: int = 0
    ) -> Iterator[TrainingProgress]:
        """Shows step, loss and tokens/s for as long as the context lasts."""
        if not self._console.is_terminal:
            yield TrainingProgress(num_steps, tokens_per_step, self._plain, first_step)
            return
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, TimeRemainingColumn(), console=self._console) as bar:
            task = bar.add_task("", total=num_steps, completed=first_step)
            yield TrainingProgress(
                num_steps,
                tokens_per_step,
                lambda p: bar.update(
                    task,
                    completed=p.step,
                    description=f"loss {p.loss:.3f}, {p.rate:,.0f} tokens/s on average",
                ),
                first_step,
            )

    def _plain(self, progress: TrainingProgress) -> None:
        every = max(1, progress.num_steps // NUM_PLAIN_LINES)
        if progress.step % every == 0 or progress.step in (1, progress.num_steps):
            of = f"{progress.step:{len(str(progress.num_steps))}}/{progress.num_steps}"
            self.line(f"step {of}  loss {progress.loss:.3f}  {progress.rate:,.0f} tokens/s on average")


class TrainingProgress:
    """Counts steps and the seconds spent on them; tells `show` after each."""

    def __init__(self, num_steps: int, tokens_per_step: int, show: Any, first_step: int = 0):
        self.num_steps, self._tokens_per_step, self._show = num_steps, tokens_per_step, show
        self.step, self._first_step, self.loss, self.elapsed_s = first_step, first_step, float("nan"), 0.0
        self._resumed: float | None = None

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Time passes inside this context only."""
        self._resumed = time.monotonic()
        try:
            yield
        finally:
            self.elapsed_s, self._resumed = self.seconds, None

    @property
    def seconds(self) -> float:
        return self.elapsed_s + (time.monotonic() - self._resumed if self._resumed is not None else 0.0)

    @property
    def rate(self) -> float:
        """Tokens a second, over all steps so far that were not another run's."""
        return (self.step - self._first_step) * self._tokens_per_step / max(self.seconds, 1e-9)

    def advance(self, loss: float) -> None:
        self.step, self.loss = self.step + 1, loss
        self._show(self)


@dataclass(frozen=True)
class ActorTime:
    """One actor's seconds over some steps, and the most bytes its buffers held in any of them."""

    compute_s: float = 0.0
    wait_s: float = 0.0
    peak_bytes: int = 0

    def add(self, stats: Any) -> ActorTime:
        """With one step's `StepStats` added."""
        return ActorTime(
            self.compute_s + stats.compute_s,
            self.wait_s + stats.wait_s,
            max(self.peak_bytes, stats.peak_bytes),
        )


def actor_table(times: Sequence[ActorTime], wall_s: float) -> list[str]:
    """Lines that say where each actor's share of `wall_s` went. Idle is neither computing nor waiting for
    data."""
    lines = [f"{'':8}  {'computing':>9}  {'waiting for data':>16}  {'idle':>6}  {'peak buffers':>12}"]
    for actor, spent in enumerate(times):
        idle_s = max(0.0, wall_s - spent.compute_s - spent.wait_s)
        compute, wait, idle = (
            seconds / max(wall_s, 1e-9) for seconds in (spent.compute_s, spent.wait_s, idle_s)
        )
        peak = f"{spent.peak_bytes / 2**20:.1f} MiB"
        lines.append(f"actor {actor:<2}  {compute:9.0%}  {wait:16.0%}  {idle:6.0%}  {peak:>12}")
    return lines


def printable(text: bytes) -> str:
    """`text` with everything a terminal might obey, and broken UTF-8, replaced."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in _decode(text))


def _decode(text: bytes) -> str:
    return text.decode(errors="replace").replace("\t", "    ").replace("\r", "")


def validation_line(loss: float, bigram: float, unigram: float) -> str:
    """The run's last line."""
    return f"validation loss {loss:.3f} (bigram {bigram:.3f}, unigram {unigram:.3f}) nats/byte"


def verify_lines(loss: float, parameters: float) -> list[str]:
    """What `--verify` prints: largest relative differences from plain `jax.jit`."""
    return [
        f"largest relative difference of loss: {loss:.1e}",
        f"largest relative difference of parameters: {parameters:.1e}",
    ]
