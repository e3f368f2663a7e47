"""Predict GPT-3 on 64 GPUs for many interleavings and microbatch sizes, to see which comes out best.

Each configuration is compiled for itself; its memory follows from its programs.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from paper.compiled import CompiledPrograms, Configuration, compile_configuration, step_s
from paper.costs import Constants, machine_of
from paper.models import GPT3
from paper.predictions import MATMUL_ROW
from paper.rows import read_rows

ACTORS, GLOBAL_BATCH = 8, 128
REPEATS, MICROBATCH_SIZES = (1, 2, 3, 4, 6, 8, 12), (1, 2, 4, 8)
PAPERS_CHOICE = 6, 4
"""The repeat and the microbatch size that the paper chose."""

ACCUMULATION = (8, 16, 32, 64)
"""The numbers of microbatches that are compared at the paper's repeat."""

DISPATCH_RANGE_S = (0.0, 0.3e-3, 0.5e-3, 1e-3)
"""The other costs of dispatching a task for which the best configuration is found."""

MEMORY_BYTES = machine_of(1, 1).memory or 0
"""The bytes of memory of a GPU."""


@dataclass(frozen=True)
class Choice:
    """The prediction for one configuration on 64 GPUs.

    Args:
        repeat: the number of stages of each actor.
        microbatches: the number of microbatches in a step.
        microbatch: the number of sequences in a microbatch.
        memory_bytes: the most bytes that a GPU needs.
        step_s: the seconds of a step, for each of some sets of constants.
    """

    repeat: int
    microbatches: int
    microbatch: int
    memory_bytes: float
    step_s: tuple[float, ...]

    @property
    def fits(self) -> bool:
        """Whether a GPU has enough memory."""
        return self.memory_bytes <= MEMORY_BYTES

    def tflops(self, index: int = 0) -> float:
        """Return the model's TFLOPs a second and GPU with one set of constants, counted as the paper does."""
        (row,) = [row for row in read_rows() if row.key == MATMUL_ROW]
        sequences = self.microbatches * self.microbatch
        return row.model_flops * sequences / row.global_batch / row.gpus / self.step_s[index] / 1e12


def grid_configurations() -> list[Configuration]:
    """Return the configurations of the grid, those that take longest to compile first."""
    grid = [
        Configuration(GPT3.name, ACTORS, repeat, GLOBAL_BATCH // size, size)
        for repeat in REPEATS
        for size in MICROBATCH_SIZES
    ]
    return sorted(grid, key=lambda c: -c.repeat * c.microbatches)


def accumulation_configurations() -> list[Configuration]:
    """Return configurations at the paper's repeat with other numbers of microbatches than the grid's."""
    known = set(grid_configurations())
    found = [
        Configuration(GPT3.name, ACTORS, PAPERS_CHOICE[0], count, size)
        for count in ACCUMULATION
        for size in MICROBATCH_SIZES
        if size <= PAPERS_CHOICE[1]
    ]
    return [c for c in found if c not in known]


def evaluate(configuration: Configuration, constants: Sequence[Constants]) -> Choice:
    """Compile a configuration and predict it with several sets of constants."""
    step = compile_configuration(configuration)
    times = tuple(step_s(step, each) for each in constants)
    c = configuration
    return Choice(c.repeat, c.microbatches, c.microbatch, step.memory_bytes, times)


def best_choice(choices: Iterable[Choice], index: int = 0) -> Choice:
    """Return the quickest choice that fits into memory.

    Args:
        choices: the choices.
        index: the set of constants that counts.
    """
    return min((c for c in choices if c.fits), key=lambda c: c.step_s[index])


# ---------------------------------------------------------------- several at a time


class Workers:
    """Processes that compile configurations, as many at a time as there are cores, at most four."""

    def __init__(self) -> None:
        count = min(4, os.process_cpu_count() if hasattr(os, "process_cpu_count") else os.cpu_count() or 1)
        self._pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"))

    def compile_all(self, configurations: Sequence[Configuration]) -> Iterator[CompiledPrograms]:
        """Yield the configurations compiled, each as soon as it is done."""
        return self._each(compile_configuration, [(c,) for c in configurations])

    def evaluate_all(
        self, configurations: Sequence[Configuration], constants: Sequence[Constants]
    ) -> Iterator[Choice]:
        """Yield the choice of each configuration as soon as it is done."""
        return self._each(evaluate, [(c, constants) for c in configurations])

    def _each(self, fn: Callable, calls: Sequence[tuple]) -> Iterator:
        for done in as_completed([self._pool.submit(fn, *call) for call in calls]):
            yield done.result()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
