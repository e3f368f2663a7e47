"""Direct tests of who writes what of a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from jaxpp_async.checkpoint import save_plan
from jaxpp_async.checkpoint.save_plan import SavedArray, make_save_plan
from jaxpp_async.checkpoint.trees import Leaves, to_save
from jaxpp_async.compiler.ir import ValueType
from jaxpp_async.layout.array_parts import Scattering, parts_of
from jaxpp_async.program.instructions import Aval
from jaxpp_async.program.leaf_parts import Parts
from jaxpp_async.protocol.actor_info import Topology
from jaxpp_async.session.leaf_division import part_types
from jaxpp_async.session.remote_array import PartArrays, RemoteArray


class Mesh:
    """Stands in for a mesh's owner of arrays."""

    def release(self, array) -> None: ...


MESH = Mesh()


def array(array_id: int, *actors: int, size: int = 4, spec=()) -> RemoteArray:
    return RemoteArray(MESH, array_id, ValueType(Aval((size,), "float32", spec)), actors)


def plan(arrays: dict[str, RemoteArray], host=(), *, per_actor: int = 1):
    how = Scattering((("x", 2),), per_actor)
    controller = SimpleNamespace(processes=Topology(2, per_actor), scattering=how)
    return make_save_plan(Leaves(arrays, dict(host), {}, {}), controller)


def names(files) -> dict[int, list[list[str]]]:
    return {process: [[entry.name for entry in file] for file in each] for process, each in files.items()}


def test_an_array_on_one_actor_is_written_there_and_one_on_several_where_least_is_written():
    made = plan({"a": array(1, 0), "b": array(2, 1, size=2), "both": array(3, 0, 1)})
    assert made.snapshots == {0: (1,), 1: (2, 3)}
    assert names(made.files) == {0: [["a"]], 1: [["b", "both"]]}


def test_an_array_at_two_places_of_a_tree_is_taken_once_and_written_under_both_names():
    tied = array(1, 0)
    made = plan({"embed": tied, "head": tied}, host=[("x", np.zeros(2, np.int8))])
    assert made.snapshots == {0: (1,)}
    assert names(made.files) == {0: [["embed", "head"]]}
    assert made.size_bytes == 2 * 16 + 2


def test_files_are_of_about_one_size_and_no_array_is_cut(monkeypatch):
    monkeypatch.setattr(save_plan, "FILE_BYTES", 32)
    sizes = {"a": 4, "b": 4, "c": 16, "d": 1}
    made = plan({name: array(k, 0, size=size) for k, (name, size) in enumerate(sizes.items())})
    assert names(made.files) == {0: [["a", "b"], ["c"], ["d"]]}


def test_of_an_actor_of_two_processes_each_writes_the_parts_that_it_owns():
    made = plan({"split": array(1, 0, spec=("x",)), "whole": array(2, 0)}, per_actor=2)
    assert names(made.files) == {0: [["split[0]", "whole"]], 1: [["split[2]"]]}
    assert made.snapshots == {0: (1, 2), 1: (1,)}
    assert [entry.number for file in made.files[1] for entry in file] == [1]


def test_a_part_is_named_by_where_it_begins():
    part = parts_of(Aval((2, 4), "float32", (None, "x")), (("x", 2),))[1]
    assert (SavedArray(1, "w", part).name, SavedArray(1, "w", part).number) == ("w[0,2]", 1)
    assert (SavedArray(1, "w").name, SavedArray(1, "w").number) == ("w", -1)
    shard = SavedArray(1, "w", part, origin=(6, 0))
    assert (shard.name, shard.number, shard.start, shard.piece_shape) == ("w[6,2]", 1, (6, 2), (2, 2))


def in_parts(first_id: int, bounds: tuple[int, ...], *actors: tuple[int, ...], spec=()) -> RemoteArray:
    parts, kind = Parts(0, bounds), ValueType(Aval((bounds[-1],), "float32", spec))
    kinds = part_types(kind, parts)
    arrays = [
        RemoteArray(MESH, first_id + k, each, on, host=None if on else np.zeros(each.aval.shape, "float32"))
        for k, (each, on) in enumerate(zip(kinds, actors, strict=True))
    ]
    return RemoteArray.in_parts(MESH, kind, PartArrays(parts, tuple(arrays)))


def test_each_part_of_an_array_is_written_where_it_lies():
    made = plan({"w": in_parts(1, (0, 4, 6), (0,), (1,)), "b": array(3, 1)})
    assert made.snapshots == {0: (1,), 1: (2, 3)}
    assert names(made.files) == {0: [["w[0]"]], 1: [["w[4]", "b"]]}
    assert made.size_bytes == 6 * 4 + 4 * 4
    ((second, _),) = made.files[1]
    assert (second.start, second.piece_shape, second.number) == ((4,), (2,), -1)


def test_a_part_that_several_processes_hold_is_written_in_several_pieces():
    made = plan({"w": in_parts(1, (0, 4, 6), (0,), (1,), spec=("x",))}, per_actor=2)
    assert names(made.files) == {0: [["w[0]"]], 1: [["w[2]"]], 2: [["w[4]"]], 3: [["w[5]"]]}


def test_a_part_that_is_still_in_this_process_is_written_by_it():
    w = in_parts(1, (0, 4, 6), (0,), ())
    leaves = to_save({"w": w}, MESH)
    assert list(leaves.remote) == ["w"]
    assert [(part.start, part.value.tolist()) for part in leaves.host_parts["w"]] == [((4,), [0, 0])]
    controller = SimpleNamespace(processes=Topology(2, 1), scattering=Scattering((("x", 2),), 1))
    made = make_save_plan(leaves, controller)
    assert (names(made.files), made.size_bytes) == ({0: [["w[0]"]]}, 24)
    here = to_save({"w": in_parts(1, (0, 4, 6), (), ())}, MESH)
    assert (list(here.remote), here.host["w"].shape, here.host_parts) == ([], (6,), {})
