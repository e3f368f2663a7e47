"""Plan a save: which process writes which arrays, or parts of arrays, to which file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from jaxpp_async.checkpoint import manifest as m
from jaxpp_async.checkpoint.trees import Leaves
from jaxpp_async.controller.controller import Controller
from jaxpp_async.layout.array_parts import Part
from jaxpp_async.program.instructions import ActorId, Aval, ProcessId
from jaxpp_async.protocol.messages import ArrayId
from jaxpp_async.session.remote_array import RemoteArray

FILE_BYTES = 256 << 20
"""The size in bytes up to which several arrays are put together in one file.

Progress is reported once per file, and a process that writes holds the bytes of one file twice.
"""


@dataclass(frozen=True, slots=True)
class SavedArray:
    """One entry of a file in a save plan: a leaf, or a piece of a leaf, that a process writes to the file.

    A leaf is written in pieces if it lives in parts, each of which is an array of its own, if several
    processes of an actor write it, or both.

    Args:
        array_id: the id of the array.
        path: the path of the leaf.
        part: the slice of the array that one process of an actor writes; None: the whole array.
        origin: the index in the leaf at which the array begins, if the array is a part of the leaf; None if
            it is the whole leaf.
        shape: the shape of the array.
    """

    array_id: ArrayId
    path: str
    part: Part | None = None
    origin: tuple[int, ...] | None = None
    shape: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The name of the leaf or piece in its file, such as `"params/w"`, or `"params/w[0,128]"` for a
        piece.

        The numbers in a piece's name are the index in the leaf at which the piece begins.
        """
        return self.path if self.start is None else piece_name(self.path, self.start)

    @property
    def start(self) -> tuple[int, ...] | None:
        """The index in the leaf at which the piece begins; None for a whole leaf."""
        if self.part is None:
            return self.origin
        start = part_start(self.part)
        return start if self.origin is None else tuple(map(add, self.origin, start))

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """The shape of what is written."""
        return self.shape if self.part is None else self.part.shape

    @property
    def number(self) -> int:
        """The number that identifies the part in the message `WriteFile`; -1 for the whole array."""
        return -1 if self.part is None else self.part.number


@dataclass(frozen=True, slots=True)
class SavePlan:
    """A plan of a save that says which process writes which arrays to which file.

    Args:
        snapshots: for each process, the ids of the arrays of which it makes a snapshot before it writes them.
        files: for each process, one tuple per file with the arrays and parts to write to it.
        size_bytes: size of all arrays together.
    """

    snapshots: dict[ProcessId, tuple[ArrayId, ...]]
    files: dict[ProcessId, list[tuple[SavedArray, ...]]]
    size_bytes: int


def piece_name(path: str, start: Sequence[int]) -> str:
    """Return the name of a piece of a leaf in its file, such as `"params/w[0,128]"`.

    Args:
        path: the path of the leaf.
        start: the index in the leaf at which the piece begins.
    """
    return f"{path}[{','.join(map(str, start))}]"


def part_start(part: Part) -> tuple[int, ...]:
    """Return the index of a part's first element in its array, one number per axis."""
    return tuple(one.start or 0 for one in part.index)


def make_save_plan(leaves: Leaves, controller: Controller) -> SavePlan:
    """Choose which processes write the leaves of a tree, and to which files, and return this as a plan."""
    places: dict[ArrayId, list[tuple[str, tuple[int, ...] | None]]] = {}
    by_id: dict[ArrayId, RemoteArray] = {}
    for path, leaf in leaves.remote.items():
        for array, start in zip(leaf.pieces, leaf.starts, strict=True):
            if array.host is not None:
                continue  # a part that is still in this process, which writes it; see `Leaves.host_parts`
            by_id[array.array_id] = array
            # one array may be several leaves of the tree
            origin = None if leaf.division is None else start
            places.setdefault(array.array_id, []).append((path, origin))
    sizes = {i: array.nbytes * len(places[i]) for i, array in by_id.items()}
    shares = m.assign_writers(sizes, {i: array.actors for i, array in by_id.items()})
    files: dict[ProcessId, list[tuple[SavedArray, ...]]] = {}
    takes: dict[ProcessId, dict[ArrayId, None]] = {}
    for actor, share in shares.items():
        for ids in m.split_into_files(share, sizes, FILE_BYTES):
            of_process: dict[ProcessId, list[SavedArray]] = {}
            for i in ids:
                aval = by_id[i].value_type.aval
                for process, parts in _writers(actor, i, aval, controller):
                    takes.setdefault(process, {})[i] = None
                    entries = of_process.setdefault(process, [])
                    entries += [
                        SavedArray(i, path, part, origin, aval.shape)
                        for path, origin in places[i]
                        for part in parts
                    ]
            for process, entries in of_process.items():
                files.setdefault(process, []).append(tuple(entries))
    here = [*leaves.host.values(), *(part.value for parts in leaves.host_parts.values() for part in parts)]
    size_bytes = sum(sizes.values()) + sum(array.nbytes for array in here)
    return SavePlan({process: tuple(ids) for process, ids in takes.items()}, files, size_bytes)


def _writers(
    actor: ActorId, array_id: ArrayId, aval: Aval, controller: Controller
) -> list[tuple[ProcessId, Sequence[Part | None]]]:
    """Return which processes of an actor write an array, and which parts of the array each of them writes.

    Returns:
        Pairs of a process and its parts, which are slices of the array; a part of None is the whole array.
    """
    processes, how = controller.processes, controller.scattering
    if not how.splits:
        return [(processes.process(actor, 0), [None])]
    owned = how.owned(array_id, aval)
    is_whole = len(how.parts(aval)) == 1
    return [
        (processes.process(actor, rank), [None] if is_whole else parts)
        for rank, parts in sorted(owned.items())
    ]
