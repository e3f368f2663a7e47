"""Define the amount of work in one executable, from which a cost model computes how long one call takes.

The compiler counts the work of an executable from its operations, without running it. A timeline carries the
work of the tasks that it shows, so that a cost model can be calibrated on measured steps. A mesh whose
devices have a known speed asks a `DeviceModel` for the time of each executable.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class Collective(msgspec.Struct, frozen=True):
    """An exchange between the devices of one actor that an executable makes, such as an all-reduce.

    Args:
        kind: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"` or `"all-to-all"`.
        devices: the number of devices that take part in one exchange.
        size_bytes: the bytes of the array that each device holds in full, before or after the exchange.
    """

    kind: str
    devices: int
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
    """

    key: str
    flops: float
    size_bytes: float
    collectives: tuple[Collective, ...] = ()


class DeviceModel(Protocol):
    """The interface of an object that knows how long a device takes for an executable, such as a cost
    model."""

    def task_s(self, work: TaskWork, /) -> float:
        """Return the time in seconds of one call of an executable.

        Args:
            work: the work of the executable for each device of an actor.
        """
        ...
