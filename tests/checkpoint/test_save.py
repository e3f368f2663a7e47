"""Direct tests of how a save ends, and what is removed behind it."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from types import SimpleNamespace

import pytest

from jaxpp_async.checkpoint import save
from jaxpp_async.checkpoint.save import (
    FileRemovals,
    Saving,
    checkpoint_failure,
    in_thread,
)
from jaxpp_async.errors import ActorDiedError, CheckpointError, RemoteError
from jaxpp_async.protocol.actor_info import Topology
from jaxpp_async.protocol.messages import Done
from jaxpp_async.protocol.task_group import OwnedTasks

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
