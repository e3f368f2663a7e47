"""Direct tests of several savers in one folder, one file operation after the other in a drawn order.

The manifest in place names whole files at any time. A saver that is told "saved" was in place, and one that
is told otherwise leaves nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxpp_async.errors import CheckpointError
from jaxpp_async.storage import checkpoint_folder, tensor_files

INTERLEAVINGS = int(os.environ.get("JAXPP_INTERLEAVINGS", "60"))
"""Of each test; some thousands have been run."""

# ---------------------------------------------------------------- one operation at a time


class Killed(BaseException):
    """This process is no more."""


class Turns:
    """Lets one of several threads at a time do one file operation; a seed decides which. A thread may be
    killed, as a process is: between two of its operations, with its descriptors closed and nothing of its own
    done any more."""

    def __init__(self, rng: random.Random, kills: int) -> None:
        self._rng, self.kills = rng, kills
        self._of: dict[threading.Thread, _Turn] = {}

    def __call__(self) -> None:
        """To be called ahead of each operation, on its thread."""
        self._of[threading.current_thread()].wait()

    def opened(self, descriptor: int) -> int:
        self._of[threading.current_thread()].descriptors.add(descriptor)
        return descriptor

    def close(self, descriptor: int) -> None:
        turn = self._of[threading.current_thread()]
        if descriptor in turn.descriptors:  # else the system has closed it
            turn.descriptors.discard(descriptor)
            os.close(descriptor)

    def run(self, works: list[Callable[[], None]], look: Callable[[], None]) -> None:
        """Run all to their end, and `look` after each operation."""

        def work_on(turn: _Turn, work: Callable[[], None]) -> None:
            try:
                with contextlib.suppress(Killed):
                    turn.wait()
                    work()
            except Exception as error:  # on a thread: the test raises it
                errors.append(error)
            turn.ended = True
            turn.parked.release()

        errors: list[Exception] = []
        self._of.clear()
        for work in works:
            turn = _Turn()
            thread = threading.Thread(target=work_on, args=(turn, work), daemon=True)
            self._of[thread] = turn
            thread.start()
            turn.parked.acquire()
        living = list(self._of.values())
        while living:
            turn = self._rng.choice(living)
            if self.kills and self._rng.random() < 0.03:
                self.kills -= 1
                turn.kill()
            turn.go.release()
            turn.parked.acquire()
            living = [turn for turn in living if not turn.ended]
            look()
        for thread in self._of:
            thread.join()
        if errors:
            raise errors[0]


class _Turn:
    def __init__(self) -> None:
        self.go, self.parked = threading.Semaphore(0), threading.Semaphore(0)
        self.descriptors: set[int] = set()
        self.ended = self.is_killed = False

    def wait(self) -> None:
        if not self.is_killed:
            self.parked.release()
            self.go.acquire()
        if self.is_killed:
            raise Killed

    def kill(self) -> None:
        self.is_killed = True
        while self.descriptors:
            os.close(self.descriptors.pop())


class SteppedOs:
    """`os`, of which each operation on files takes a turn."""

    path = os.path

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def __getattr__(self, name: str) -> Any:
        original = self._turns.close if name == "close" else getattr(os, name)
        if name not in ("open", "unlink", "replace", "listdir", "rmdir", "stat"):
            return original

        def stepped(*args: Any) -> Any:
            self._turns()
            return self._turns.opened(original(*args)) if name == "open" else original(*args)

        return stepped


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Turns], None]]:
    """Has every file operation of `checkpoint_folder` take a turn."""

    def install(turns: Turns) -> None:
        def read_whole(*args: Any) -> bytes:
            turns()
            return tensor_files.read_whole(*args)

        def flock(descriptor: int, how: int) -> None:
            turns()
            fcntl.flock(descriptor, how)

        for name, stand_in in {
            "os": SteppedOs(turns),
            "read_whole": read_whole,
            "sync_folder": lambda folder: None,
            "time": type("Time", (), {"sleep": lambda seconds: turns(), "monotonic": lambda: 0.0}),
            "fcntl": type("Fcntl", (), {**vars(fcntl), "flock": staticmethod(flock)}),
        }.items():
            patch.setattr(checkpoint_folder, name, stand_in)

    with monkeypatch.context() as patch:
        yield install


class Saver:
    """Saves as `checkpoint.saving` does, files that are as long as their number says."""

    def __init__(self, folder: str, number: int, turns: Turns) -> None:
        self.number, self.told = number, ""
        self._folder, self._turns, self._id = folder, turns, f"{number:016x}"
        self.sizes = {checkpoint_folder.file_name(self._id, actor, 0): 10 + number for actor in (0, None)}

    def __call__(self) -> None:
        replaces = checkpoint_folder.read_manifest(self._folder)
        manifest = json.dumps({"by": self.number, "files": self.sizes}).encode()
        try:
            for name, size in self.sizes.items():
                self._turns()
                pathlib.Path(self._folder, name).write_bytes(bytes(size))
            checkpoint_folder.check_files(self._folder, self.sizes)
            checkpoint_folder.commit(self._folder, self._id, manifest, replaces, self.sizes)
        except CheckpointError as error:
            if checkpoint_folder.read_manifest(self._folder) != manifest:
                checkpoint_folder.remove_files(self._folder, list(self.sizes))
            self.told = str(error)
        else:
            self.told = "saved"
            checkpoint_folder.remove_files(self._folder, checkpoint_folder.files_of(replaces))


class Watcher:
    """Looks at a folder between any two operations.

    Attributes:
        history: whose manifests were in place, in order.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder, self.history = folder, list[int]()

    def __call__(self) -> None:
        try:
            manifest = json.loads((self._folder / "manifest.json").read_text())
        except FileNotFoundError:
            return
        if self.history[-1:] != [manifest["by"]]:
            self.history.append(manifest["by"])
        for name, size in manifest["files"].items():
            assert (self._folder / name).stat().st_size == size, f"{name}, after {self.history}"


def check(savers: list[Saver], watcher: Watcher, folder: pathlib.Path, *, kills: int) -> None:
    for saver in savers:
        if saver.told:
            assert (saver.told == "saved") == (saver.number in watcher.history), saver.told
    if not kills:
        files = {name for saver in savers if saver.number == watcher.history[-1] for name in saver.sizes}
        assert {path.name for path in folder.iterdir()} == {"manifest.json", *files}


@pytest.mark.parametrize("kills", [0, 1])
@pytest.mark.parametrize("count", [2, 3])
def test_savers_interleaved_at_random(tmp_path, stepped, count, kills):
    outcomes = set()
    for seed in range(INTERLEAVINGS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        turns, watcher = Turns(random.Random(seed), kills), Watcher(folder)
        stepped(turns)
        savers = [Saver(str(folder), number, turns) for number in range(count)]
        turns.run(savers, watcher)
        check(savers, watcher, folder, kills=kills)
        outcomes.add(tuple(saver.told[:5] == "saved" for saver in savers))
        turns.kills = 0
        survivor = Saver(str(folder), count, turns)  # whoever was killed keeps nobody from saving
        turns.run([survivor], watcher)
        assert survivor.told == "saved" and watcher.history[-1] == count
    assert len(outcomes) >= count  # the same one does not always win


def test_who_removes_or_cleans_takes_nothing_that_is_in_place(tmp_path, stepped):
    for seed in range(INTERLEAVINGS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        turns, watcher = Turns(random.Random(seed), 0), Watcher(folder)
        stepped(turns)
        savers = [Saver(str(folder), number, turns) for number in range(2)]
        remover = checkpoint_folder.remove if seed % 2 else checkpoint_folder.remove_leftovers

        def remove(remover: Any = remover, folder: pathlib.Path = folder) -> None:
            remover(str(folder))

        with contextlib.suppress(FileNotFoundError):
            turns.run([*savers, remove], watcher)
        for saver in savers:
            assert not saver.told or (saver.told == "saved") == (saver.number in watcher.history), saver.told
