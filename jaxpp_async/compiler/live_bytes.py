"""Estimate the most bytes of temporaries that an executable holds at one time, from its operations in order.

XLA fuses an elementwise operation into what reads its result, so that the result takes memory only where a
product, a loop or another operation that is not fused needs it whole, or where several operations read it. A
value that takes no memory is computed from values that do, which live until it is read. XLA may order
operations otherwise, copies arrays to change their layouts, and may have one kernel for several operations,
such as attention; so the result is an estimate.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

OperationKind = Literal["kernel", "reduction", "fused", "alias"]


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of an executable, with the arrays that it reads and makes.

    Args:
        kind: a `"kernel"` reads arrays from memory and writes arrays to memory; a `"reduction"` writes to
            memory, and what it reads may be computed on the way; a `"fused"` operation has results in memory
            only where a kernel or several operations read them; an `"alias"` gives other names to the first
            arrays that it reads.
        reads, makes: the arrays, each equal to itself alone.
        inside_bytes: the bytes of temporaries inside the operation, such as those of a loop's body.
    """

    kind: OperationKind
    reads: Sequence[Hashable]
    makes: Sequence[Hashable]
    inside_bytes: float = 0.0


def peak_live_bytes(
    operations: Sequence[Operation],
    outside: Collection[Hashable],
    size_bytes: Callable[[Any], float],
) -> float:
    """Return the most bytes that the arrays made by some operations take at one time.

    Args:
        operations: the operations, in the order in which they run.
        outside: the arrays whose memory does not count: arguments and results. Arrays that no operation makes
            do not count either.
        size_bytes: a function that returns the bytes of an array.
    """
    apart, stored, until = set(outside), set[Hashable](outside), dict[Hashable, int]()

    num_readers: Counter[Hashable] = Counter()

    def read(x: Hashable, i: int) -> None:
        until[x] = max(until.get(x, i), i)

    for i, operation in reversed(list(enumerate(operations))):
        last = i  # the last time at which the operation's inputs are needed
        if operation.kind == "alias":
            for x, name in zip(operation.reads, operation.makes, strict=False):
                if name in until:
                    read(x, until[name])
                    num_readers[x] += num_readers[name] - 1
                stored.update([x] if name in stored else [])
                apart.update([x] if name in apart else [])
                apart.add(name)
        elif operation.kind == "fused":
            stored.update(x for x in operation.makes if num_readers[x] > 1)
            last = max([i, *(until.get(x, i) for x in operation.makes if x not in stored)])
        else:
            stored.update(operation.makes)
        if operation.kind == "kernel":
            stored.update(operation.reads)
        for x in operation.reads:
            read(x, last)
            num_readers[x] += 1

    live = peak = 0.0
    freed: dict[int, float] = defaultdict(float)
    for i, operation in enumerate(operations):
        made = 0.0
        for x in operation.makes:
            if x in stored and x not in apart and x in until:
                made += (size := size_bytes(x))
                freed[until[x]] += size
        if operation.kind == "fused":  # an elementwise operation writes over what it reads last
            live -= freed[i]
        peak = max(peak, live + made + operation.inside_bytes)
        live += made - (0.0 if operation.kind == "fused" else freed[i])
    return peak
