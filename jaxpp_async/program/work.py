"""Define the amount of work in one executable, from which a cost model computes how long one call takes.

The compiler counts the work of an executable from its operations, without running it. A timeline carries the
work of the tasks that it shows, so that a cost model can be calibrated on measured steps. A mesh whose
devices have a known speed asks a `DeviceModel` for the time of each executable.
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

import msgspec

CollectiveKind: TypeAlias = Literal[
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
]
"""The kinds of exchanges between the devices of one actor."""


class Collective(msgspec.Struct, frozen=True):
    """An exchange between the devices of one actor that an executable makes, such as an all-reduce.

    Args:
        kind: the kind of exchange.
        axes: the mesh axes along which the devices exchange, each with its number of devices, such as
            `(("data", 2), ("model", 8))`.
        size_bytes: the bytes of the array that each device holds in full, before or after the exchange.
    """

    kind: CollectiveKind
    axes: tuple[tuple[str, int], ...]
    size_bytes: float


class TaskWork(msgspec.Struct, frozen=True):
    """The amount of work that one call of an executable is for each device of an actor.

    Args:
        key: the identity of the computation. Executables with equal keys compute the same and take the same
            time.
        flops: the floating-point operations of each device; a multiply-add counts as two.
        size_bytes: the bytes that each device reads from its memory and writes to it, if no operation were
            fused with another except elementwise ones.
        collectives: the exchanges between the devices of the actor.
        temp_bytes: an estimate of the most bytes that each device needs at one time for arrays that are
            neither arguments nor results of the executable.
    """

    key: str
    flops: float
    size_bytes: float
    collectives: tuple[Collective, ...] = ()
    temp_bytes: float = 0.0


class LoopCut(msgspec.Struct, frozen=True):
    """The cut of a step's one loop into stages, and the work of each layer between two marks.

    Args:
        marks: all marks (calls of `pipeline_yield`) of the loop's body as text, in the order of the forward.
        boundaries: the numbers of the marks that end a stage, ascending.
        flops: the floating-point operations of each layer, forward and backward, for one microbatch; one
            number more than there are marks, or empty if they were not counted.
    """

    marks: tuple[str, ...]
    boundaries: tuple[int, ...]
    flops: tuple[float, ...] = ()

    def layers_of(self, stage: int) -> range:
        """Return the numbers of the layers of a stage."""
        ends = (-1, *self.boundaries, len(self.marks))
        return range(ends[stage] + 1, ends[stage + 1] + 1)


CutChoice: TypeAlias = Literal["", "work", "plan"]
"""How the boundaries of a step's stages were chosen: `"work"` by counted operations (`stages="balanced"`),
`"plan"` by a plan, `""` by the user, or not known.
"""


class DeviceModel(Protocol):
    """The interface of an object that knows how long a device takes for an executable, such as a cost
    model."""

    def task_s(self, work: TaskWork, /) -> float:
        """Return the time in seconds of one call of an executable.

        Args:
            work: the work of the executable for each device of an actor.
        """
        ...
