"""saving: a tree of arrays in, a checkpoint on the disk out, whole or not at all. The actors write; this decides and
commits.

The manifest that is there when a save begins is the one that it replaces: where another save has put one meanwhile,
that one stays, and this save fails.

The arrays are taken as they are between the steps before a save and those after it; the files are written while
training goes on. One save of a mesh is under way at a time: the next one waits, so that copies do not pile up.

save_plan: the leaves of a tree to save in, which process writes which parts to which file out. Asks nobody.

sweeps: has the actors remove files of ended saves, and knows in which folders they still do.

endings: how work on a checkpoint ends that failed, or was cancelled while a thread was at it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from jaxpp_async.base.events import Emit, EventLog
from jaxpp_async.base.printable import shown
from jaxpp_async.checkpoint import manifest as m
from jaxpp_async.checkpoint.trees import Leaves, to_save
from jaxpp_async.controller.controller import Controller
from jaxpp_async.controller.startup import all_of
from jaxpp_async.errors import ActorError, CheckpointError
from jaxpp_async.layout.array_parts import Part
from jaxpp_async.program.instructions import CONTROLLER, ActorId, Aval, ProcessId
from jaxpp_async.protocol.actor_info import ProcessRank
from jaxpp_async.protocol.messages import ArrayId, BeginSnapshot, CheckFiles, Done, Sweep, WriteFile, Written
from jaxpp_async.protocol.task_group import OwnedTasks
from jaxpp_async.session.remote_array import Owner
from jaxpp_async.storage import checkpoint_folder, tensor_files
from jaxpp_async.storage.checkpoint_folder import CheckpointPath

_LOG = logging.getLogger("jaxpp_async")

OnProgress: TypeAlias = "Callable[[Saving], None]"
AfterCommit: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


class Saving:
    """A save under way; from `mesh.save`.

    Awaiting it waits until the checkpoint is whole on the disk, or raises why there is none (`CheckpointError`). A
    cancelled await leaves it going on; `cancel` ends it.

    Attributes:
        path: the checkpoint's folder.
        size_bytes: of all arrays. written_bytes: of those that are on the disk.
        is_awaited: somebody has seen to its error, or will.
    """

    def __init__(self, path: str, size_bytes: int, *, is_awaited: bool = False):
        self.path, self.size_bytes, self.written_bytes, self.is_awaited = path, size_bytes, 0, is_awaited
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._future.add_done_callback(lambda future: future.exception())  # nobody is obliged to await it
        self._task: asyncio.Task[None] | None = None

    def __await__(self) -> Generator[Any, None, Saving]:
        self.is_awaited = True
        yield from asyncio.shield(self._future).__await__()
        return self

    def __repr__(self) -> str:
        progress = f"{self.written_bytes:,} of {self.size_bytes:,} bytes{', done' * self.done()}"
        return f"<Saving {shown(self.path)}: {progress}>"

    def done(self) -> bool:
        """Whether the checkpoint is there, or never will be."""
        return self._future.done()

    async def cancel(self) -> None:
        """End it, and remove what it has written. One that is already whole stays."""
        self.is_awaited = True
        await asyncio.sleep(0)  # a task that is cancelled before it has begun does not clean up
        if self._task is not None and not self._task.done():
            if not self._task.cancelling():
                # a second cancellation would cut short what the first one removes
                self._task.cancel()
            await asyncio.wait([self._task])

    def run(self, tasks: OwnedTasks, work: Coroutine[Any, Any, None], on_end: Callable[[], None]) -> None:
        """Let `work` settle this, and call `on_end` behind it (for the mesh)."""

        def ended(_: asyncio.Task[None]) -> None:
            self.settle(CheckpointError(f"{shown(self.path)}: the save was cancelled"))
            on_end()

        self._task = tasks.start(f"save {shown(self.path)}", work)
        self._task.add_done_callback(ended)

    def settle(self, error: Exception | None = None) -> None:
        """It is over (for the mesh). Only the first call counts."""
        if not self._future.done():
            self._future.set_result(None) if error is None else self._future.set_exception(error)


class Saver:
    """The saves of one mesh.

    Args:
        controller: gives the mesh's controller, or raises `MeshError` if the mesh has not started.
        owner: of the mesh's arrays.
        on_event: told of each checkpoint that is whole.
    """

    def __init__(self, controller: Callable[[], Controller], owner: Owner, on_event: Emit | None = None):
        self._controller, self._owner = controller, owner
        self._on_event = on_event or EventLog().emit  # which still logs it
        self._one_at_a_time, self._tasks = asyncio.Lock(), OwnedTasks()
        self._sweeps = FileRemovals(controller)
        self._current: Saving | None = None

    async def save(
        self,
        path: CheckpointPath,
        tree: Any,
        *,
        wait: bool,
        on_progress: OnProgress | None,
        after_commit: AfterCommit | None = None,
    ) -> Saving:
        """See `RemoteMesh.save`.

        Args:
            after_commit: awaited once the checkpoint is whole, as part of the save.
        """
        self._controller()
        folder = checkpoint_folder.absolute(path)
        await self._one_at_a_time.acquire()
        try:
            await self._sweeps.wait_over(folder)
            saving = self._start(folder, tree, on_progress, after_commit, awaited=wait)
        except BaseException:  # also a cancellation: the place goes to the next save
            self._one_at_a_time.release()
            raise
        if wait:
            try:
                await saving
            except asyncio.CancelledError:
                await saving.cancel()
                raise
        return saving

    async def remove(self, path: str) -> None:
        """Remove a checkpoint, wherever parts of it lie.

        Raises:
            CheckpointError: a file cannot be removed.
        """
        try:
            names = await in_thread(lambda: checkpoint_folder.remove(path))
        except OSError as error:
            raise CheckpointError(f"{shown(path)}: {error.strerror or error}") from error
        await self._sweeps.run(path, names, remove_folder=True)

    async def aclose(self) -> None:
        """End the save under way; to be called before the actors are gone."""
        saving = self._current
        if saving is not None and not saving.done():
            _LOG.warning("%s: the mesh closed before this save was whole; await it first", shown(saving.path))
            await saving.cancel()
        await self._tasks.aclose()

    def _start(
        self,
        folder: str,
        tree: Any,
        on_progress: OnProgress | None,
        after: AfterCommit | None,
        *,
        awaited: bool,
    ) -> Saving:
        """Take hold of everything; from here on nothing is awaited until the actors have been asked to do so too."""
        leaves = to_save(tree, self._owner)
        plan = plan_of(leaves, self._controller())
        controller, save_id = self._controller(), checkpoint_folder.new_save_id()
        controller.before_save()
        makes = {
            process: lambda request, ids=ids: BeginSnapshot(request, os.fsencode(folder), ids)
            for process, ids in plan.takes.items()
        }
        takes = controller.request_log.send_each(makes, Done, awaited=awaited)
        saving = self._current = Saving(folder, plan.size_bytes, is_awaited=awaited)
        job = _Job(
            controller, saving, save_id, leaves, plan, takes, on_progress, after, self._on_event, self._sweeps
        )
        saving.run(self._tasks, job.run(), self._one_at_a_time.release)
        return saving


class _Job:
    """One save: writes, commits, cleans up."""

    def __init__(
        self,
        controller: Controller,
        saving: Saving,
        save_id: str,
        leaves: Leaves,
        plan: SavePlan,
        takes: Mapping[ProcessId, asyncio.Future[Any]],
        on_progress: OnProgress | None,
        after_commit: AfterCommit | None,
        on_event: Emit,
        sweeps: FileRemovals,
    ):
        self._after_commit, self._on_event, self._sweeps = after_commit, on_event, sweeps
        self._controller, self._saving, self._save_id = controller, saving, save_id
        self._leaves, self._plan, self._takes, self._on_progress = leaves, plan, takes, on_progress
        self._folder = saving.path
        self._made: list[str] = []
        self._replaces: bytes | None = None
        self._manifest = b""
        self._files: dict[str, m.File] = {}
        self._arrays: dict[str, m.Array] = {}
        self._stopped, self._began, self._committed = threading.Event(), False, False

    async def run(self) -> None:
        """Settles the `Saving`, whatever happens."""
        start_s = time.monotonic()
        try:
            await self._write_all()
            await in_thread(self._commit)
        except BaseException as error:  # also a cancellation: nothing half-written may stay
            if not self._committed:
                await self._clean_up()
                self._saving.settle(self._told(error))
                if not isinstance(error, Exception):
                    raise
                return
        self._tell(time.monotonic() - start_s)
        try:
            await self._tidy_up()
        finally:  # it is whole, whatever became of the older ones
            self._saving.settle()

    def _tell(self, seconds: float) -> None:
        size_bytes, count = self._saving.size_bytes, len(self._arrays)
        self._on_event(
            "checkpointed",
            f"saved {shown(self._folder)}: {count} arrays, {size_bytes} bytes, {seconds:.1f} s",
            path=self._folder,
            size_bytes=size_bytes,
            num_arrays=count,
            seconds=seconds,
        )

    # ------------------------------------------------------------ writing

    async def _write_all(self) -> None:
        await in_thread(self._begin)
        self._began = True
        writers = {process: self._write_on(process, files) for process, files in self._plan.files.items()}
        if self._leaves.host:
            writers[CONTROLLER] = self._write_here()
        await all_of(writers, "save")
        await all_of(
            {process: self._check_on(process, files) for process, files in self._plan.files.items()}, "save"
        )

    def _begin(self) -> None:
        """Runs in a thread, whose end a cancellation does not see: what it made is noted here."""
        self._made = checkpoint_folder.make(self._folder)
        self._replaces = checkpoint_folder.read_manifest(self._folder)

    async def _write_on(self, process: ProcessId, files: Sequence[Sequence[SavedArray]]) -> None:
        """One file after the other: the actor's threads have other things to do as well."""
        await self._takes[process]
        request_log = self._controller.request_log
        for index, entries in enumerate(files):
            file = checkpoint_folder.file_name(self._save_id, process, index)
            paths = list(dict.fromkeys(entry.path for entry in entries))

            def ask(
                request: int,
                file: str = file,
                entries: Sequence[SavedArray] = entries,
                paths: Sequence[str] = paths,
            ) -> WriteFile:
                arrays = tuple((entry.array_id, entry.name, entry.number) for entry in entries)
                return WriteFile(request, os.fsencode(self._folder), file, arrays, self._metadata(paths))

            written: Written = await request_log.send(process, ask, Written, awaited=self._saving.is_awaited)
            info = request_log.info(process)
            process_rank = ProcessRank(info.process, info.size)
            self._files[file] = m.File(written.size_bytes, f"{process_rank} on host {info.host}")
            for entry, digest in zip(entries, written.sha256, strict=True):
                self._note(file, entry, digest)
            self._advance(sum(self._size_of(entry) for entry in entries))

    async def _check_on(self, process: ProcessId, files: Sequence[Sequence[SavedArray]]) -> None:
        """Have a process look for the files that it wrote, once all are: they may lie where nobody else sees them."""
        names = [checkpoint_folder.file_name(self._save_id, process, index) for index in range(len(files))]
        sizes = tuple((name, self._files[name].size_bytes) for name in names)
        request_log, folder = self._controller.request_log, os.fsencode(self._folder)
        awaited = self._saving.is_awaited
        await request_log.send(
            process, lambda request: CheckFiles(request, folder, sizes), Done, awaited=awaited
        )

    def _note(self, file: str, entry: SavedArray, digest: str) -> None:
        """An array, or a part of one, is in a file."""
        path, part = entry.path, entry.part
        aval, key_impl = self._leaves.remote[path].value_type.aval, self._leaves.key_impls.get(path)
        if part is None:
            self._arrays[path] = m.Array(file, aval.dtype, aval.shape, digest, key_impl)
            return
        before = self._arrays[path].pieces if path in self._arrays else ()
        piece = m.Piece(file, entry.name, start(part), part.shape, digest)
        pieces = tuple(sorted((*before, piece), key=lambda p: p.start))
        self._arrays[path] = m.Array(pieces[0].file, aval.dtype, aval.shape, "", key_impl, pieces)

    def _size_of(self, entry: SavedArray) -> int:
        array = self._leaves.remote[entry.path]
        if entry.part is None:
            return array.nbytes
        return array.nbytes * math.prod(entry.part.shape) // max(1, math.prod(array.value_type.aval.shape))

    async def _write_here(self) -> None:
        """The arrays that lie here."""
        arrays, name = self._leaves.host, checkpoint_folder.file_name(self._save_id, None, 0)
        path, metadata = os.path.join(self._folder, name), self._metadata(list(arrays))

        def write() -> tuple[int, dict[str, str]]:
            checkpoint_folder.make(self._folder)  # another save that failed may have taken it away
            return tensor_files.write(path, arrays, metadata, self._stopped.is_set)

        try:
            size, digests = await in_thread(write, self._stopped)
        except OSError as error:
            raise CheckpointError(f"{shown(path)}: {error.strerror or error}") from error
        self._files[name] = m.File(size, "the controller")
        for p, array in arrays.items():
            self._arrays[p] = m.Array(
                name, array.dtype.name, array.shape, digests[p], self._leaves.key_impls.get(p)
            )
        self._advance(sum(array.nbytes for array in arrays.values()))

    def _metadata(self, paths: Sequence[str]) -> dict[str, str]:
        impls = {
            f"key_impl:{path}": self._leaves.key_impls[path]
            for path in paths
            if path in self._leaves.key_impls
        }
        return {"format": m.FORMAT, **impls}

    def _advance(self, size_bytes: int) -> None:
        self._saving.written_bytes += size_bytes
        if self._on_progress is not None:
            try:
                self._on_progress(self._saving)
            except Exception:  # a bug in what shows progress must not cost a checkpoint
                _LOG.exception("on_progress of the save %s failed", shown(self._folder))

    def _commit(self) -> None:
        """Runs in a thread."""
        order = {path: k for k, path in enumerate([*self._leaves.remote, *self._leaves.host])}
        arrays = dict(sorted(self._arrays.items(), key=lambda item: order[item[0]]))
        manifest = m.Manifest(dict(sorted(self._files.items())), arrays, self._leaves.values)
        self._manifest, sizes = (
            m.to_text(manifest).encode(),
            {n: file.size_bytes for n, file in self._files.items()},
        )
        checkpoint_folder.commit(self._folder, self._save_id, self._manifest, self._replaces, sizes)
        self._committed = True
        with contextlib.suppress(OSError):  # as the actors' sweep
            checkpoint_folder.remove_files(self._folder, checkpoint_folder.files_of(self._replaces))

    async def _tidy_up(self) -> None:
        """Remove what was replaced. Should that fail, this checkpoint is whole anyway."""
        await self._sweeps.run(self._folder, checkpoint_folder.files_of(self._replaces))
        if self._after_commit is not None:
            try:
                await self._after_commit()
            except (CheckpointError, ActorError, OSError) as error:
                where = shown(self._folder)
                _LOG.warning("%s is saved, but older checkpoints could not be removed: %s", where, error)

    # ------------------------------------------------------------ failing

    async def _clean_up(self) -> None:
        """Remove what this save has written, on the actors and here: they may share the folder, or not."""
        self._leaves = Leaves({}, {}, {}, {})
        names: tuple[str, ...] = ()

        def remove() -> None:
            checkpoint_folder.remove_files(self._folder, names)
            for folder in reversed(self._made):
                checkpoint_folder.remove_empty(folder)

        try:
            if self._began and not await in_thread(self._is_in_place):
                names = self._own_files()
            await self._sweeps.run(self._folder, names, remove_folder=bool(self._made))
            await in_thread(remove)
        except (OSError, CheckpointError) as error:
            _LOG.warning("%s: what a failed save wrote could not be removed: %s", shown(self._folder), error)

    def _is_in_place(self) -> bool:
        """Runs in a thread. A file system may say that a manifest could not be put in place, or not be made durable,
        and have it."""
        return bool(self._manifest) and checkpoint_folder.read_manifest(self._folder) == self._manifest

    def _own_files(self) -> tuple[str, ...]:
        """The names of all that this save may have written."""
        written = [(process, k) for process, files in self._plan.files.items() for k in range(len(files))]
        return tuple(
            checkpoint_folder.file_name(self._save_id, process, k) for process, k in [*written, (None, 0)]
        )

    def _told(self, error: BaseException) -> Exception:
        if isinstance(error, CheckpointError):
            return error
        if not isinstance(error, Exception):
            return CheckpointError(f"{shown(self._folder)}: the save was cancelled")
        return failed(self._folder, "saved", error)


# ---------------------------------------------------------------- save plan

FILE_BYTES = 256 << 20
"""Arrays are put together in files of about this size: the grain of progress, and of what a writer holds twice."""


@dataclass(frozen=True, slots=True)
class SavedArray:
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
class SavePlan:
    """Who writes what.

    Args:
        takes: the arrays that each process is to take hold of.
        files: each process's files, and what is in them.
    """

    takes: dict[ProcessId, tuple[ArrayId, ...]]
    files: dict[ProcessId, list[tuple[SavedArray, ...]]]
    size_bytes: int


def start(part: Part) -> tuple[int, ...]:
    return tuple(one.start or 0 for one in part.index)


def plan_of(leaves: Leaves, controller: Controller) -> SavePlan:
    paths: dict[ArrayId, list[str]] = {}
    for path, array in leaves.remote.items():
        paths.setdefault(array.array_id, []).append(path)  # one array may stand at several places of the tree
    by_id = {array.array_id: array for array in leaves.remote.values()}
    sizes = {i: array.nbytes * len(paths[i]) for i, array in by_id.items()}
    shares = m.share_out(sizes, {i: array.actors for i, array in by_id.items()})
    files: dict[ProcessId, list[tuple[SavedArray, ...]]] = {}
    takes: dict[ProcessId, dict[ArrayId, None]] = {}
    for actor, share in shares.items():
        for ids in m.in_files(share, sizes, FILE_BYTES):
            of_process: dict[ProcessId, list[SavedArray]] = {}
            for i in ids:
                for process, parts in _writers(actor, i, by_id[i].value_type.aval, controller):
                    takes.setdefault(process, {})[i] = None
                    entries = of_process.setdefault(process, [])
                    entries += [SavedArray(i, path, part) for path in paths[i] for part in parts]
            for process, entries in of_process.items():
                files.setdefault(process, []).append(tuple(entries))
    size_bytes = sum(sizes.values()) + sum(array.nbytes for array in leaves.host.values())
    return SavePlan({process: tuple(ids) for process, ids in takes.items()}, files, size_bytes)


def _writers(
    actor: ActorId, array_id: ArrayId, aval: Aval, controller: Controller
) -> list[tuple[ProcessId, Sequence[Part | None]]]:
    """Which of an actor's processes write an array, and which parts of it."""
    processes, how = controller.processes, controller.scattering
    if not how.splits:
        return [(processes.process(actor, 0), [None])]
    owned = how.owned(array_id, aval)
    is_whole = len(how.parts(aval)) == 1
    return [
        (processes.process(actor, rank), [None] if is_whole else parts)
        for rank, parts in sorted(owned.items())
    ]


# ---------------------------------------------------------------- sweeps

CLEAN_S = 5.0
"""What actors may take to end a save that failed."""


class FileRemovals:
    """Keeps account, by folder, of what a mesh's actors are removing: a late one would take the folder away in which
    the next save begins to write.

    Args:
        controller: as the `Saver`'s.
    """

    def __init__(self, controller: Callable[[], Controller]):
        self._controller = controller
        self._under_way: dict[str, set[asyncio.Future[Any]]] = {}

    async def run(self, folder: str, files: tuple[str, ...], *, remove_folder: bool = False) -> None:
        """Have every actor end its part of a save and remove files: see `Sweep`. This only says so if one cannot."""
        controller = self._controller()
        if controller.is_closed:
            return

        def make(request: int) -> Sweep:
            return Sweep(request, os.fsencode(folder), files, remove_folder)

        makes = dict.fromkeys(controller.processes.everyone, make)
        sweeps = list(controller.request_log.send_each(makes, Done, awaited=False).values())
        for sweep in sweeps:
            self._under_way.setdefault(folder, set()).add(sweep)
            sweep.add_done_callback(lambda sweep: self._ended(folder, sweep))
        done, late = await asyncio.wait(sweeps, timeout=CLEAN_S)
        errors = [error for sweep in done if (error := sweep.exception()) is not None]
        if late or errors:
            _LOG.warning(
                "files of an ended save may be left: %s", errors or f"{len(late)} actors did not answer"
            )

    async def wait_over(self, folder: str) -> None:
        """Wait until nobody sweeps there, also for those whom `run` did not wait for: it was cancelled, or they were
        late."""
        while sweeps := self._under_way.get(folder):
            await asyncio.wait(sweeps)

    def _ended(self, folder: str, sweep: asyncio.Future[Any]) -> None:
        if not sweep.cancelled():
            sweep.exception()  # seen: nobody may be waiting any more
        left = self._under_way[folder]
        left.discard(sweep)
        if not left:
            del self._under_way[folder]


# ---------------------------------------------------------------- endings

T = TypeVar("T")


def failed(folder: str, what: str, error: Exception) -> CheckpointError:
    """The error for a checkpoint that could not be `what`, with its cause."""
    text = error.strerror or str(error) if isinstance(error, OSError) else str(error).partition("\n")[0]
    result = CheckpointError(f"{shown(folder)} could not be {what}: {text or type(error).__name__}")
    result.__cause__ = error
    return result


async def in_thread(work: Callable[[], T], stop: threading.Event | None = None) -> T:
    """Run `work` in a thread. When cancelled, `stop` is set and the thread's end awaited: nothing is written later."""
    future = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if stop is not None:
            stop.set()
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):  # once more; the thread does not end for it
                await asyncio.wait([future])
        with contextlib.suppress(Exception, asyncio.CancelledError):
            # seen: the cancellation is what is raised
            future.result()
        raise
