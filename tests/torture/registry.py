"""What a case of the torture suite is. Decorated functions in, `CASES` by name out; runs nothing.

A case's first argument, `pipe`, makes the schedules of its loops: `pipe(3)` is one for three stages. So the
same case runs under any kind of schedule, and under plain `jax.jit`, where the schedule does not matter.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

import jaxpp_async as jpp
from jaxpp_async.schedules import dependencies

WIDTH, ROWS, NUM_MICROBATCHES = 4, 3, 4  # rows unlike width: a weight is told from an activation by its shape

Pipe: TypeAlias = Callable[[int], Any]
Args: TypeAlias = Callable[[], tuple[Any, ...]]
Register: TypeAlias = Callable[[Callable], Callable]


@dataclass(frozen=True)
class RandomOrder:
    """Any order of the tasks that their dependencies allow, each stage on any actor."""

    num_stages: int
    seed: int = 0

    def tasks(self, num_microbatches: int, num_actors: int) -> list[list[jpp.Task]]:
        rng = random.Random(f"{self.seed} {self.num_stages} {num_microbatches} {num_actors}")
        places = [rng.randrange(num_actors) for _ in range(self.num_stages)]
        stages = range(self.num_stages)
        left = [jpp.Task(i, ty, s) for s in stages for i in range(num_microbatches) for ty in ("fwd", "bwd")]
        rows: list[list[jpp.Task]] = [[] for _ in range(num_actors)]
        done: set[jpp.Task] = set()
        while left:
            task = rng.choice([t for t in left if done.issuperset(dependencies(t, self.num_stages))])
            left.remove(task)
            done.add(task)
            rows[places[task.stage]].append(task)
        return rows


# THE list of schedules: kind and number of actors (None: one a stage, at most four). Every case runs under
# the first two and one of the others, which are dealt round; under all of them with TORTURE=all in the
# environment.
SCHEDULES: dict[str, tuple[Pipe, int | None]] = {
    "GPipe": (jpp.GPipe, 2),
    "Std1F1B": (jpp.Std1F1B, None),
    "Interleaved1F1B": (jpp.Interleaved1F1B, 2),
    "RandomOrder": (RandomOrder, 3),
    "ZeroBubbleH1": (jpp.ZeroBubbleH1, None),
    "DualPipeV": (jpp.DualPipeV, 2),
}


class Chosen:
    """A pipe whose schedules are of the kind that is chosen when they are asked: a step is traced once for
    all."""

    kind: Pipe = jpp.GPipe

    def __call__(self, num_stages: int) -> ChosenSchedule:
        return ChosenSchedule(num_stages, self)


@dataclass(frozen=True, eq=False)
class ChosenSchedule:
    """See `Chosen`."""

    num_stages: int
    chosen: Chosen

    def tasks(self, num_microbatches: int, num_actors: int) -> list[list[jpp.Task]]:
        return self.chosen.kind(self.num_stages).tasks(num_microbatches, num_actors)


@dataclass(frozen=True)
class Case:
    """A training step and what is expected of it.

    Args:
        name: of its function.
        step: `step(pipe, *args)`.
        stages: of its longest loop.
        make_args: draws the arguments, numpy.
        rtol: of each result leaf's largest magnitude.
        on: `"inline"` or `"processes"`: also runs on real actors.
        broken: why it does not work yet; the test then expects it to fail.
    """

    name: str
    step: Callable[..., Any]
    stages: int
    make_args: Args
    rtol: float = 1e-5
    on: str | None = None
    broken: str | None = None

    def __str__(self) -> str:
        return self.name


CASES: dict[str, Case] = {}


def array(seed: int, *shape: int, scale: float = 0.6) -> np.ndarray:
    """Normal draws in float32."""
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def weights(count: int = 6) -> list[np.ndarray]:
    """Square matrices."""
    return [array(k, WIDTH, WIDTH) for k in range(count)]


def batch(num_microbatches: int = NUM_MICROBATCHES) -> dict[str, np.ndarray]:
    """`x` and `y` (microbatches, rows, width); `tokens` (microbatches, rows), below the width."""
    tokens = np.random.default_rng(11).integers(0, WIDTH, size=(num_microbatches, ROWS), dtype=np.int32)
    return {
        "x": array(12, num_microbatches, ROWS, WIDTH),
        "y": array(13, num_microbatches, ROWS, WIDTH),
        "tokens": tokens,
    }


def usual() -> tuple[Any, ...]:
    """What most cases take: six weights and a batch."""
    return weights(), batch()


def step(
    stages: int, make_args: Callable[[], tuple[Any, ...]] = usual, **options: Any
) -> Callable[[Callable], Callable]:
    """Register `fn(pipe, *args)`, a whole training step."""

    def register(fn: Callable) -> Callable:
        name = fn.__name__
        assert name not in CASES, f"two cases named {name}"
        CASES[name] = Case(name, fn, stages, make_args, **options)
        return fn

    return register


def loss(
    stages: int, make_args: Callable[[], tuple[Any, ...]] = usual, **options: Any
) -> Callable[[Callable], Callable]:
    """Register `fn(weights, microbatch, *more)`, a loss: the step returns its gradients, summed, and its
    values."""

    def register(fn: Callable) -> Callable:
        step(stages, make_args, **options)(gradients_of(fn, stages))
        return fn

    return register


def gradients_of(fn: Callable, stages: int) -> Callable[..., Any]:
    """The step of a loss."""

    def whole(pipe: Pipe, params: Any, batches: Any, *more: Any) -> Any:
        def of_one(microbatch: Any) -> Any:
            value, grads = jax.value_and_grad(fn)(params, microbatch, *more)
            return grads, value

        return jpp.accumulate_grads(of_one, pipe(stages))(batches)

    whole.__name__ = fn.__name__
    return whole
