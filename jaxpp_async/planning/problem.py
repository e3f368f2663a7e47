"""Describe a pipeline to plan in numbers alone: layers, actors, links, a memory cap; and one way to run it.

Nothing here knows of JAX. A `PipelineProblem` has one `Layer` for the operations between two marks; a cut
groups neighbouring layers into stages; an `Assignment` says in addition which actor runs which stage and in
which order. All of `planning/`'s searches, bounds and closed forms read these types. Every number may be in
any unit of time and of memory, as long as all of one problem are in the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

from jaxpp_async.program.instructions import ActorId, Task, TaskType
from jaxpp_async.schedules import stage_actors

Boundaries: TypeAlias = tuple[int, ...]
"""The boundaries between stages: the index of the first layer of every stage but the first, ascending. Mark
k, which ends layer k, is the boundary k + 1."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The costs of the operations between two marks, for one microbatch.

    Args:
        forward_s: the time of the forward, in seconds.
        input_gradient_s: the time of the part of the backward that the previous layer waits for; 0 where
            nothing waits for it, as in the first layer.
        weight_gradient_s: the time of the rest of the backward.
        kept_bytes: the bytes that the forward leaves for the backward.
        weight_kept_bytes: the bytes that stay from the end of the input gradient until the end of the weight
            gradient if the backward is split.
        sent_bytes: the bytes that a boundary at the layer's end sends forward, and as many backward.
        static_bytes: the bytes of parameters, gradients and optimizer state, which are there all the time.
    """

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    kept_bytes: float = 0.0
    weight_kept_bytes: float = 0.0
    sent_bytes: float = 0.0
    static_bytes: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self, [field.name for field in fields(self)])

    @property
    def work_s(self) -> float:
        """The time of the forward and the backward, in seconds."""
        return self.forward_s + self.input_gradient_s + self.weight_gradient_s


@dataclass(frozen=True)
class PipelineProblem:
    """Layers in order, and the machine that is to run them.

    A task of a stage takes the time of its layers and `dispatch_s`. A value that goes to another actor
    arrives `latency_s` + bytes / `bytes_per_s` after the end of the task that made it; transfers delay
    neither tasks nor each other.

    Args:
        layers: the layers, from the first to the last; at least one.
        num_actors: the number of actors.
        num_microbatches: the number of microbatches of a step.
        cap_bytes: the memory of each actor, or one number for all of them; infinite where nothing limits it.
        latency_s: the time that a transfer between two actors takes in any case, in seconds.
        bytes_per_s: the rate of a link.
        dispatch_s: the time that a task takes besides its computation, in seconds.
        num_stages: the number of stages that a cut must have; None for any.

    Raises:
        ValueError: a number is negative or not a number, or a count is not positive.
    """

    layers: tuple[Layer, ...]
    num_actors: int
    num_microbatches: int
    cap_bytes: tuple[float, ...] | float = math.inf
    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    dispatch_s: float = 0.0
    num_stages: int | None = None

    def __post_init__(self) -> None:
        _check_numbers(self, ["latency_s", "dispatch_s"])
        for name in ("num_actors", "num_microbatches"):
            if (count := getattr(self, name)) < 1:
                raise ValueError(f"{name}: expected a positive int, got {count!r}")
        if not self.layers:
            raise ValueError("layers: expected at least one, got none")
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s: expected a positive number, got {self.bytes_per_s!r}")
        if isinstance(self.cap_bytes, tuple) and len(self.cap_bytes) != self.num_actors:
            raise ValueError(f"cap_bytes: {len(self.cap_bytes)} numbers for {self.num_actors} actors")
        if self.num_stages is not None and not 1 <= self.num_stages <= len(self.layers):
            raise ValueError(
                f"num_stages: expected 1 to {len(self.layers)}, the number of layers, got {self.num_stages}"
            )
        if not all(cap >= 0 for cap in self.caps):
            raise ValueError(f"cap_bytes: expected numbers of at least 0, got {self.cap_bytes!r}")

    @cached_property
    def caps(self) -> tuple[float, ...]:
        """The memory of each actor, in bytes."""
        return self.cap_bytes if isinstance(self.cap_bytes, tuple) else (self.cap_bytes,) * self.num_actors

    @property
    def balanced_s(self) -> float:
        """The time of a step of perfect balance: the work of all microbatches, divided among the actors."""
        return self.num_microbatches * sum(layer.work_s for layer in self.layers) / self.num_actors

    def stages(self, cut: Boundaries) -> StageCosts:
        """Return the costs of the stages into which `cut` divides the layers.

        Raises:
            ValueError: the boundaries are not ascending, or not between two layers.
        """
        bounds = (0, *cut, len(self.layers))
        if any(first >= end for first, end in pairwise(bounds)):
            raise ValueError(f"cut {cut}: expected ascending boundaries from 1 to {len(self.layers) - 1}")
        groups = [self.layers[first:end] for first, end in pairwise(bounds)]

        def summed(name: str) -> tuple[float, ...]:
            return tuple(sum(getattr(layer, name) for layer in group) for group in groups)

        return StageCosts(
            forward_s=tuple(t + self.dispatch_s for t in summed("forward_s")),
            input_gradient_s=tuple(t + self.dispatch_s for t in summed("input_gradient_s")),
            weight_gradient_s=tuple(t + self.dispatch_s for t in summed("weight_gradient_s")),
            kept_bytes=summed("kept_bytes"),
            weight_kept_bytes=summed("weight_kept_bytes"),
            static_bytes=summed("static_bytes"),
            transfer_s=tuple(
                self.latency_s + group[-1].sent_bytes / self.bytes_per_s for group in groups[:-1]
            ),
            dispatch_s=self.dispatch_s,
        )


@dataclass(frozen=True, slots=True)
class StageCosts:
    """The costs of each stage of a cut, for one microbatch: sums of the costs of its layers, by stage index.

    Attributes:
        forward_s, input_gradient_s, weight_gradient_s: the times of the three tasks, each with dispatch.
        kept_bytes, weight_kept_bytes, static_bytes: see `Layer`.
        transfer_s: the time from stage s to stage s + 1, and back, if another actor runs that stage. There
            is one entry fewer than there are stages.
        dispatch_s: the dispatch that is part of the time of each task.
    """

    forward_s: tuple[float, ...]
    input_gradient_s: tuple[float, ...]
    weight_gradient_s: tuple[float, ...]
    kept_bytes: tuple[float, ...]
    weight_kept_bytes: tuple[float, ...]
    static_bytes: tuple[float, ...]
    transfer_s: tuple[float, ...]
    dispatch_s: float

    def __len__(self) -> int:
        return len(self.forward_s)

    def backward_s(self, stage: int) -> float:
        """Return the time of a whole backward, which is dispatched once."""
        return self.input_gradient_s[stage] + self.weight_gradient_s[stage] - self.dispatch_s

    @property
    def task_s(self) -> dict[TaskType, tuple[float, ...]]:
        """The time of each type of task, by stage index."""
        return {
            "fwd": self.forward_s,
            "bwd": tuple(map(self.backward_s, range(len(self)))),
            "bwd_input": self.input_gradient_s,
            "bwd_weight": self.weight_gradient_s,
        }

    def hops(self, actors: Sequence[ActorId]) -> list[float]:
        """Return the time of the transfer behind each stage but the last under a placement.

        Args:
            actors: the actor of each stage.
        """
        return [
            0.0 if here == there else t
            for t, (here, there) in zip(self.transfer_s, pairwise(actors), strict=True)
        ]

    def static_bytes_of_actors(self, actors: Sequence[ActorId], num_actors: int) -> list[float]:
        """Return the static bytes of each actor under a placement.

        Args:
            actors: the actor of each stage.
            num_actors: the number of actors.
        """
        found = [0.0] * num_actors
        for size_bytes, actor in zip(self.static_bytes, actors, strict=True):
            found[actor] += size_bytes
        return found


@dataclass(frozen=True, slots=True)
class Assignment:
    """One way to run a problem: a cut, and the order in which each actor runs its tasks.

    Args:
        cut: the boundaries between the stages.
        rows: one tuple of tasks per actor, in order of execution, such as `schedules.resolve` accepts. The
            rows say which actor has which stage, and which backwards are whole and which are split.
        name: the name of the schedule that the rows are from, for people.
    """

    cut: Boundaries
    rows: tuple[tuple[Task, ...], ...]
    name: str = ""

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.cut) + 1

    @property
    def marks(self) -> tuple[int, ...]:
        """The marks that are boundaries, counted from 0, as a schedule's `stages=` takes them."""
        return tuple(boundary - 1 for boundary in self.cut)

    @property
    def actors(self) -> tuple[ActorId, ...]:
        """The actor of each stage."""
        return stage_actors(self.rows)


def _check_numbers(value: object, names: Sequence[str]) -> None:
    for name in names:
        number = getattr(value, name)
        if not 0 <= number < math.inf:
            raise ValueError(f"{name}: expected a number of at least 0, got {number!r}")
