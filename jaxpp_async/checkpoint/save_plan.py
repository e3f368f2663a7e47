"""save_plan: the leaves of a tree to save in, which process writes which parts to which file out. Asks nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpp_async.actors.controller import Controller
from jaxpp_async.actors.messages import ArrayId
from jaxpp_async.actors.values.parts import Part
from jaxpp_async.checkpoint import manifest as m
from jaxpp_async.checkpoint.trees import Leaves
from jaxpp_async.program import ActorId, Aval, ProcessId

FILE_BYTES = 256 << 20
"""Arrays are put together in files of about this size: the grain of progress, and of what a writer holds twice."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An array in a file, or one of the parts in which the processes of an actor have it.

    Args:
        part: None: all of it.
    """

    array_id: ArrayId
    path: str
    part: Part | None = None

    @property
    def name(self) -> str:
        """Under which it is there."""
        if self.part is None:
            return self.path
        starts = ",".join(str(start) for start in start(self.part))
        return f"{self.path}[{starts}]"

    @property
    def number(self) -> int:
        """As `WriteFile` has it."""
        return -1 if self.part is None else self.part.number


@dataclass(frozen=True, slots=True)
class Plan:
    """Who writes what.

    Args:
        takes: the arrays that each process is to take hold of.
        files: each process's files, and what is in them.
    """

    takes: dict[ProcessId, tuple[ArrayId, ...]]
    files: dict[ProcessId, list[tuple[Entry, ...]]]
    size_bytes: int


def start(part: Part) -> tuple[int, ...]:
    return tuple(one.start or 0 for one in part.index)


def plan_of(leaves: Leaves, controller: Controller) -> Plan:
    paths: dict[ArrayId, list[str]] = {}
    for path, array in leaves.remote.items():
        paths.setdefault(array.array_id, []).append(path)  # one array may stand at several places of the tree
    by_id = {array.array_id: array for array in leaves.remote.values()}
    sizes = {i: array.nbytes * len(paths[i]) for i, array in by_id.items()}
    shares = m.share_out(sizes, {i: array.actors for i, array in by_id.items()})
    files: dict[ProcessId, list[tuple[Entry, ...]]] = {}
    takes: dict[ProcessId, dict[ArrayId, None]] = {}
    for actor, share in shares.items():
        for ids in m.in_files(share, sizes, FILE_BYTES):
            of_process: dict[ProcessId, list[Entry]] = {}
            for i in ids:
                for process, parts in _writers(actor, i, by_id[i].value_type.aval, controller):
                    takes.setdefault(process, {})[i] = None
                    entries = of_process.setdefault(process, [])
                    entries += [Entry(i, path, part) for path in paths[i] for part in parts]
            for process, entries in of_process.items():
                files.setdefault(process, []).append(tuple(entries))
    size_bytes = sum(sizes.values()) + sum(array.nbytes for array in leaves.host.values())
    return Plan({process: tuple(ids) for process, ids in takes.items()}, files, size_bytes)


def _writers(
    actor: ActorId, array_id: ArrayId, aval: Aval, controller: Controller
) -> list[tuple[ProcessId, Sequence[Part | None]]]:
    """Which of an actor's processes write an array, and which parts of it."""
    processes, how = controller.processes, controller.scattering
    if not how.splits:
        return [(processes.process(actor, 0), [None])]
    owned = how.owned(array_id, aval)
    is_whole = len(how.parts(aval)) == 1
    return [(processes.process(actor, rank), [None] if is_whole else parts) for rank, parts in sorted(owned.items())]
