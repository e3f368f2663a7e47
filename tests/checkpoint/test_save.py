"""Direct tests of who writes what of a checkpoint, how a save ends, and what is removed behind it."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from jaxpp_async.checkpoint import save
from jaxpp_async.checkpoint.save import (
    FileRemovals,
    SavedArray,
    Saving,
    checkpoint_failure,
    in_thread,
    make_save_plan,
)
from jaxpp_async.checkpoint.trees import Leaves
from jaxpp_async.compiler.ir import ValueType
from jaxpp_async.errors import ActorDiedError, CheckpointError, RemoteError
from jaxpp_async.layout.array_parts import Scattering, parts_of
from jaxpp_async.program.instructions import Aval
from jaxpp_async.protocol.actor_info import Topology
from jaxpp_async.protocol.messages import Done
from jaxpp_async.protocol.task_group import OwnedTasks
from jaxpp_async.session.remote_array import RemoteArray


class Mesh:
    """Stands in for a mesh's owner of arrays."""

    def release(self, array) -> None: ...


MESH = Mesh()

# ---------------------------------------------------------------- who writes what


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
    monkeypatch.setattr(save, "FILE_BYTES", 32)
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


# ---------------------------------------------------------------- how it ends


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(28, "No space left on device", "/x"), "No space left on device"),
        (OSError("own words"), "own words"),
        (ValueError("first\nsecond"), "first"),
        (ValueError(), "ValueError"),
    ],
    ids=repr,
)
def test_a_failure_names_the_folder_what_was_tried_and_the_cause(error, why):
    found = checkpoint_failure("/tmp/a\nb", "could not be written; is gone", error, None)
    assert isinstance(found, CheckpointError)
    assert str(found) == f"/tmp/a\\nb could not be written: {why}"
    assert found.__cause__ is error


@pytest.mark.parametrize("error", [ActorDiedError("killed"), RemoteError("a step failed")], ids=repr)
def test_what_ended_the_mesh_stays_the_error_and_gets_a_note(error):
    assert checkpoint_failure("/tmp/a", "could not be saved; is whole", error, error) is error
    assert error.__notes__ == ["/tmp/a could not be saved; is whole"]
    file_failed = checkpoint_failure("/tmp/a", "could not be saved", RemoteError("disk full"), error)
    assert str(file_failed) == "/tmp/a could not be saved: disk full"


async def test_work_in_a_thread_gives_its_result_or_its_error():
    assert await in_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


async def test_a_cancelled_wait_ends_only_when_the_thread_has_seen_the_stop():
    begun, stop, ended = threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        stop.wait()
        ended.append(True)
        raise OSError("no matter any more")

    task = asyncio.ensure_future(in_thread(work, stop))
    await asyncio.get_running_loop().run_in_executor(None, begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


async def test_a_save_tells_how_far_it_is_and_only_its_first_end_counts():
    saving = Saving("/tmp/a\nb", 4096)
    saving.written_bytes = 1024
    assert repr(saving) == "<Saving /tmp/a\\nb: 1,024 of 4,096 bytes>"
    saving.set_outcome(CheckpointError("full"))
    saving.set_outcome()
    assert (saving.done(), repr(saving)) == (True, "<Saving /tmp/a\\nb: 1,024 of 4,096 bytes, done>")
    with pytest.raises(CheckpointError, match=r"^full$"):
        await saving


async def test_a_cancelled_save_says_so_and_ends_before_the_cancellation_returns():
    saving, cleaned = Saving("/tmp/a", 0), []

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            cleaned.append("work")

    saving.run(OwnedTasks(), work(), lambda: cleaned.append("end"))
    await saving.cancel()
    await saving.cancel()
    assert cleaned == ["work", "end"]
    with pytest.raises(CheckpointError, match=r"^/tmp/a: the save was cancelled$"):
        await saving


# ---------------------------------------------------------------- removing files


class Controller:
    """Sends requests to two actors, which answer when the test says so."""

    is_closed = False

    def info(self, process):
        return SimpleNamespace(host=f"node{process}" if self.hosts else socket.gethostname())

    def __init__(self, hosts: bool = True):
        self.hosts = hosts
        self.processes, self.requests, self.asked, self.replies = Topology(2), self, [], []

    def send_each(self, messages, *, awaited):
        assert not awaited
        self.asked.append(dict(messages))
        loop = asyncio.get_running_loop()
        futures = {process: loop.create_future() for process in messages}
        self.replies += futures.values()
        return {process: SimpleNamespace(future=future) for process, future in futures.items()}


async def test_every_actor_is_told_to_remove_the_files_and_the_folder_is_free_once_all_have(caplog):
    controller = Controller()
    under_way = FileRemovals(lambda: controller)
    running = asyncio.ensure_future(under_way.run("/tmp/\udcff", ("f",), remove_folder=True))
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(under_way.wait_until_done("/tmp/\udcff"))
    await under_way.wait_until_done("/elsewhere")
    (asked,) = controller.asked
    assert list(asked) == [0, 1]
    for sweep in asked.values():
        assert (sweep.folder, sweep.files, sweep.remove_folder) == (b"/tmp/\xff", ("f",), True)
    controller.replies[0].set_result(Done())
    await asyncio.sleep(0)
    assert not waiting.done()
    controller.replies[1].set_result(Done())
    await asyncio.gather(running, waiting)
    assert caplog.records == []


async def test_an_actor_that_cannot_or_does_not_answer_is_only_told(caplog, monkeypatch):
    monkeypatch.setattr(save, "CLEAN_S", 0.0)
    controller = Controller()
    under_way = FileRemovals(lambda: controller)
    await under_way.run("/tmp/a", ("f",))
    assert [record.getMessage() for record in caplog.records] == [
        "/tmp/a: files of a save may be left on node0, node1: no answer; while no save writes there, `await "
        "jpp.Checkpoints(mesh, '/tmp/a').remove_leftovers()` removes what this host sees of them"
    ]
    assert caplog.records[0].levelno == logging.WARNING
    waiting = asyncio.ensure_future(under_way.wait_until_done("/tmp/a"))  # they may still be at it
    for reply in controller.replies:
        reply.set_exception(OSError("no"))
    await waiting


@pytest.mark.parametrize("hosts", [False, True])
async def test_of_a_mesh_that_ends_the_cause_is_told_once_and_only_if_files_may_be_left(caplog, hosts):
    controller = Controller(hosts)
    running = asyncio.ensure_future(FileRemovals(lambda: controller).run("/tmp/runs/00000003", ("f",)))
    await asyncio.sleep(0)
    controller.is_closed = True
    for reply in controller.replies:
        reply.set_exception(ActorDiedError("killed\nits output"))
    await running
    text = "/tmp/runs/00000003: files of a save may be left on node0, node1: killed; while"
    assert [record.getMessage()[: len(text)] for record in caplog.records] == [text] * hosts
    assert "Checkpoints(mesh, '/tmp/runs')" in caplog.text or not hosts


async def test_of_a_mesh_that_is_closed_nobody_is_asked():
    controller = Controller()
    controller.is_closed = True
    await FileRemovals(lambda: controller).run("/tmp/a", ())
    assert controller.asked == []
