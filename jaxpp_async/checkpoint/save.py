"""Save a tree of arrays as a checkpoint, completely or not at all.

The actors write their arrays to files in the checkpoint's folder. Then this module commits the save: it puts
a manifest, a file that describes the checkpoint's content, in the folder, in place of the manifest that was
there when the save began. If another save has replaced the old manifest meanwhile, the other save's manifest
stays, and this save fails.

A save stores the values that the arrays have after the steps that were called before the save, whatever steps
are called later. The files are written while training goes on. A mesh does one save at a time, so that copies
of arrays do not accumulate.

`Saver` and `Saving` are for the mesh and the user, and `_Job` does one save by a plan (`save_plan`). The rest
of the module removes files on the actors, and ends failed or cancelled work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from jaxpp_async.base.events import Emit, EventLog
from jaxpp_async.base.printable import first_line, shown
from jaxpp_async.checkpoint import manifest as m
from jaxpp_async.checkpoint.save_plan import SavedArray, SavePlan, make_save_plan, piece_name
from jaxpp_async.checkpoint.trees import Leaves, to_save
from jaxpp_async.controller.controller import Controller
from jaxpp_async.controller.requests import PendingRequest
from jaxpp_async.errors import ActorError, CheckpointError, RemoteError
from jaxpp_async.jax_bridge.tracebacks import HiddenFrames
from jaxpp_async.program.instructions import CONTROLLER, ProcessId
from jaxpp_async.protocol.actor_info import ProcessRank
from jaxpp_async.protocol.messages import BeginSnapshot, CheckFiles, Sweep, WriteFile, Written
from jaxpp_async.protocol.task_group import OwnedTasks, all_of
from jaxpp_async.session.progress import MeshProgress
from jaxpp_async.session.remote_array import Owner
from jaxpp_async.storage import checkpoint_folder, tensor_files
from jaxpp_async.storage.checkpoint_folder import CheckpointPath
from jaxpp_async.view import format_held, to_html_table

_LOG = logging.getLogger("jaxpp_async")

OnProgress: TypeAlias = "Callable[[Saving], None]"
AfterCommit: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


class Saving:
    """A save of a checkpoint that is under way, as `mesh.save` returns it.

    Await this object to wait until the checkpoint is complete on the disk; the await raises a
    `CheckpointError` if the save fails, and an `ActorError` if the mesh has ended. If the await is cancelled,
    the save goes on; only `cancel` ends it.

    Attributes:
        path: the checkpoint's folder.
        size_bytes: size of all arrays together.
        written_bytes: size of the arrays that are on the disk already.
        is_awaited: whether the user awaits or has awaited the save, so that its error is raised to the user.
    """

    def __init__(self, path: str, size_bytes: int, *, is_awaited: bool = False):
        self.path, self.size_bytes, self.written_bytes, self.is_awaited = path, size_bytes, 0, is_awaited
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._future.add_done_callback(
            lambda future: future.exception()
        )  # nobody is obliged to await the save
        self._task: asyncio.Task[None] | None = None

    def __await__(self) -> Generator[Any, None, Saving]:
        self.is_awaited = True
        with HiddenFrames():
            yield from asyncio.shield(self._future).__await__()
        return self

    def __repr__(self) -> str:
        progress = f"{self.written_bytes:,} of {self.size_bytes:,} bytes{', done' * self.done()}"
        return f"<Saving {shown(self.path)}: {progress}>"

    def _repr_html_(self) -> str:
        """Return the facts that a notebook shows."""
        facts = [("checkpoint", shown(self.path)), ("written", self.progress), ("state", self._state())]
        return to_html_table("Saving", (), facts)

    @property
    def progress(self) -> str:
        """How much has been written, as text."""
        return f"{format_held(self.written_bytes, 'bytes')} of {format_held(self.size_bytes, 'bytes')}"

    def _state(self) -> str:
        if not self.done():
            return "being written"
        error = self._future.exception() if not self._future.cancelled() else None
        return "complete" if error is None else f"failed: {error}"

    def done(self) -> bool:
        """Return whether the save has ended, with a complete checkpoint or with an error."""
        return self._future.done()

    def when_done(self, callback: Callable[[bool], object]) -> None:
        """Call `callback` when the save has ended, with whether the checkpoint is complete. Only the mesh
        calls this.
        """
        self._future.add_done_callback(lambda future: callback(future.exception() is None))

    async def cancel(self) -> None:
        """End the save and remove the files that it wrote; if the checkpoint is complete already, keep it."""
        self.is_awaited = True
        await asyncio.sleep(0)  # a task that is cancelled before it has begun does not clean up
        if self._task is not None and not self._task.done():
            if not self._task.cancelling():
                # a second cancellation would cut short the removal that the first one began
                self._task.cancel()
            await asyncio.wait([self._task])

    def run(self, tasks: OwnedTasks, work: Coroutine[Any, Any, None], on_end: Callable[[], None]) -> None:
        """Start a task that does this save. Only the mesh calls this.

        Args:
            tasks: the group to which the new task is added.
            work: the coroutine that does the save and calls `set_outcome`.
            on_end: called when the task has ended, also after an error or a cancellation.
        """

        def ended(_: asyncio.Task[None]) -> None:
            self.set_outcome(CheckpointError(f"{shown(self.path)}: the save was cancelled"))
            on_end()

        self._task = tasks.start(f"save {shown(self.path)}", work)
        self._task.add_done_callback(ended)

    def set_outcome(self, error: Exception | None = None) -> None:
        """Set the outcome of the save, so that all awaits of the save end.

        Only the mesh calls this. If the outcome is set already, nothing changes.

        Args:
            error: the error that awaits raise; None: the save has succeeded.
        """
        if not self._future.done():
            self._future.set_result(None) if error is None else self._future.set_exception(error)


class Saver:
    """The part of a mesh that saves and removes checkpoints, one save at a time.

    Args:
        controller: a function that returns the mesh's controller, or raises `MeshError` if the mesh has not
            started.
        owner: the part of the mesh that owns the mesh's arrays.
        on_event: called with an event for each checkpoint that is complete.
        progress: tells the user of each save; None to tell nothing.
    """

    def __init__(
        self,
        controller: Callable[[], Controller],
        owner: Owner,
        on_event: Emit | None = None,
        progress: MeshProgress | None = None,
    ):
        self._progress = progress or MeshProgress("silent")
        self._controller, self._owner = controller, owner
        self._on_event = on_event or EventLog().emit  # which logs each event
        self._one_at_a_time, self._tasks = asyncio.Lock(), OwnedTasks()
        self._removals = FileRemovals(controller)
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
        """Start to save a tree, and return the save under way; see `RemoteMesh.save`.

        Args:
            path: the checkpoint's folder.
            tree: the tree to save.
            wait: whether to return only when the checkpoint is complete.
            on_progress: called with the `Saving` whenever a file has been written.
            after_commit: a coroutine function to call once the checkpoint is complete; the save ends when the
                coroutine has ended.
        """
        self._controller()
        folder = checkpoint_folder.absolute(path)
        await self._one_at_a_time.acquire()
        try:
            await self._removals.wait_until_done(folder)
            job = self._begin(folder, tree, is_awaited=wait)
            job.on_progress, job.after_commit = on_progress, after_commit
            saving = self._current = job.saving
            self._tell(job, in_background=not wait)
            saving.run(self._tasks, job.run(), self._one_at_a_time.release)
        except BaseException:  # also a cancellation: the next save may begin
            self._one_at_a_time.release()
            raise
        if wait:
            try:
                await saving
            except asyncio.CancelledError:
                await saving.cancel()
                raise
        return saving

    def _tell(self, job: _Job, *, in_background: bool) -> None:
        """Tell the user of a save that begins, how far it is, and when it is complete."""
        saving = job.saving
        phase = self._progress.begin(f"saving {shown(saving.path)}", in_background=in_background)

        def on_progress(saving: Saving) -> None:
            phase.update(f"{saving.written_bytes / 2**20:,.1f} of {saving.size_bytes / 2**20:,.1f} MiB")
            if users is not None:
                users(saving)

        users, job.on_progress = job.on_progress, on_progress
        saving.when_done(lambda is_done: self._progress.end(phase, is_done=is_done))

    async def remove(self, path: str) -> None:
        """Remove the checkpoint at `path`, in this process's file system and in those of all actors.

        Raises:
            CheckpointError: this process cannot remove a file.
        """
        with tensor_files.checkpoint_errors(path):
            names = await in_thread(lambda: checkpoint_folder.remove(path))
        await self._removals.run(path, names, remove_folder=True)

    async def aclose(self) -> None:
        """If a save is under way, cancel it. Call this while the actors still run."""
        saving = self._current
        if saving is not None and not saving.done():
            _LOG.warning("%s: the mesh closed before this save was whole; await it first", shown(saving.path))
            await saving.cancel()
        await self._tasks.aclose()

    def _begin(self, folder: str, tree: Any, *, is_awaited: bool) -> _Job:
        """Ask actors for snapshots of the arrays, and return the job that writes them.

        Args:
            folder: the checkpoint's folder, as an absolute path.
            tree: the tree to save.
            is_awaited: whether the caller awaits the save, and thus sees an error of the mesh that ends it.
        """
        controller, leaves = self._controller(), to_save(tree, self._owner)
        plan = make_save_plan(leaves, controller)
        controller.before_save()
        messages = {
            process: BeginSnapshot(os.fsencode(folder), ids) for process, ids in plan.snapshots.items()
        }
        snapshots = controller.requests.send_each(messages, awaited=is_awaited)
        saving = Saving(folder, plan.size_bytes, is_awaited=is_awaited)
        return _Job(controller, saving, leaves, plan, snapshots, self._on_event, self._removals)


@dataclass(slots=True, eq=False)
class _Job:
    """An object that does one save: it writes the files, commits them, and removes them if the save fails.

    To commit is to put the manifest, which describes the checkpoint, in the folder.

    Attributes:
        snapshots: for each process that writes files, a request that is done when the process has made its
            snapshot of the arrays.
        made_folders: the folders that this save made, outermost first.
        replaced_manifest: the bytes of the manifest that was in the folder when the save began; None if the
            folder had none.
        manifest: the bytes of the manifest that this save writes.
        files: descriptions of the files that have been written, by name.
        arrays: descriptions of the arrays that have been written, by path.
        stopped: an event that is set to make the thread that writes host arrays end.
        has_begun: whether the folder is made, so that files may have been written.
        is_committed: whether this save's manifest is in the folder, so that the checkpoint is complete.
    """

    controller: Controller
    saving: Saving
    leaves: Leaves
    plan: SavePlan
    snapshots: Mapping[ProcessId, PendingRequest]
    on_event: Emit
    removals: FileRemovals

    on_progress: OnProgress | None = None
    after_commit: AfterCommit | None = None
    save_id: str = field(default_factory=checkpoint_folder.new_save_id)
    made_folders: list[str] = field(default_factory=list)
    replaced_manifest: bytes | None = None
    manifest: bytes = b""
    files: dict[str, m.File] = field(default_factory=dict)
    arrays: dict[str, m.Array] = field(default_factory=dict)
    stopped: threading.Event = field(default_factory=threading.Event)
    has_begun: bool = False
    is_committed: bool = False

    @property
    def folder(self) -> str:
        return self.saving.path

    async def run(self) -> None:
        """Write and commit the checkpoint, and set the outcome of the `Saving`, also after a failure."""
        start_s = time.monotonic()
        try:
            await self._write_all()
            await in_thread(self._commit)
        except BaseException as error:  # also a cancellation: nothing half-written may stay
            if not self.is_committed:
                await self._remove_own_files()
                self.saving.set_outcome(self._user_error(error))
                if not isinstance(error, Exception):
                    raise
                return
        self._report_saved(time.monotonic() - start_s)
        try:
            await self._remove_replaced()
        finally:  # this checkpoint is whole, whatever became of the older ones
            self.saving.set_outcome()

    def _report_saved(self, seconds: float) -> None:
        size_bytes, count = self.saving.size_bytes, len(self.arrays)
        self.on_event(
            "checkpointed",
            f"saved {shown(self.folder)}: {count} arrays, {size_bytes} bytes, {seconds:.1f} s",
            path=self.folder,
            size_bytes=size_bytes,
            num_arrays=count,
            seconds=seconds,
        )

    # ------------------------------------------------------------ writing

    async def _write_all(self) -> None:
        await in_thread(self._begin)
        self.has_begun = True
        writers = {process: self._write_on(process, files) for process, files in self.plan.files.items()}
        if self.leaves.host or self.leaves.host_parts:
            writers[CONTROLLER] = self._write_host_arrays()
        await all_of(writers, "save")
        await all_of(
            {process: self._check_files_on(process, files) for process, files in self.plan.files.items()},
            "save",
        )

    def _begin(self) -> None:
        """Make the checkpoint's folder and read the manifest that is in it.

        This runs in a thread. The results are stored in attributes, because a cancelled await would lose a
        returned value.
        """
        self.made_folders = checkpoint_folder.make(self.folder)
        self.replaced_manifest = checkpoint_folder.read_manifest(self.folder)

    async def _write_on(self, process: ProcessId, files: Sequence[Sequence[SavedArray]]) -> None:
        """Have a process write its files, one after the other.

        Writing one file at a time takes only one thread of the process, so the process's other threads stay
        free.

        Args:
            process: the process.
            files: for each file, the arrays or parts to write to it.
        """
        await self.snapshots[process]
        requests = self.controller.requests
        for index, entries in enumerate(files):
            file = checkpoint_folder.file_name(self.save_id, process, index)
            paths = list(dict.fromkeys(entry.path for entry in entries))
            message = WriteFile(
                os.fsencode(self.folder),
                file,
                tuple((entry.array_id, entry.name, entry.number) for entry in entries),
                self._metadata(paths),
            )
            written: Written = await requests.send(process, message, awaited=self.saving.is_awaited)
            info = requests.info(process)
            process_rank = ProcessRank(info.process, info.size)
            self.files[file] = m.File(written.size_bytes, f"{process_rank} on host {info.host}")
            for entry, digest in zip(entries, written.sha256, strict=True):
                self._add_array(file, entry, digest)
            self._advance(sum(self._size_bytes(entry) for entry in entries))

    async def _check_files_on(self, process: ProcessId, files: Sequence[Sequence[SavedArray]]) -> None:
        """Have a process check that the files that it wrote exist; called once all files are written.

        Only that process can check this, because its host may have a file system that no other host sees.
        """
        names = [checkpoint_folder.file_name(self.save_id, process, index) for index in range(len(files))]
        sizes = tuple((name, self.files[name].size_bytes) for name in names)
        message = CheckFiles(os.fsencode(self.folder), sizes)
        await self.controller.requests.send(process, message, awaited=self.saving.is_awaited)

    def _add_array(self, file: str, entry: SavedArray, digest: str) -> None:
        """Record for the manifest that an array, or one part of an array, has been written to a file.

        Args:
            file: name of the file.
            entry: the array or part.
            digest: the SHA-256 digest of the bytes of the array or part.
        """
        path = entry.path
        if entry.start is not None:
            self._add_piece(path, m.Piece(file, entry.name, entry.start, entry.piece_shape, digest))
            return
        aval, key_impl = self.leaves.remote[path].value_type.aval, self.leaves.key_impls.get(path)
        self.arrays[path] = m.Array(file, aval.dtype, aval.shape, digest, key_impl)

    def _add_piece(self, path: str, piece: m.Piece) -> None:
        """Record for the manifest that one piece of a leaf has been written."""
        aval, key_impl = self.leaves.remote[path].value_type.aval, self.leaves.key_impls.get(path)
        before = self.arrays[path].pieces if path in self.arrays else ()
        pieces = tuple(sorted((*before, piece), key=lambda p: p.start))
        self.arrays[path] = m.Array(pieces[0].file, aval.dtype, aval.shape, "", key_impl, pieces)

    def _size_bytes(self, entry: SavedArray) -> int:
        array = self.leaves.remote[entry.path]
        return array.nbytes * math.prod(entry.piece_shape) // max(1, math.prod(array.value_type.aval.shape))

    async def _write_host_arrays(self) -> None:
        """Write the arrays and parts whose values are in this process to one file, by a thread."""
        name, parts = checkpoint_folder.file_name(self.save_id, None, 0), self.leaves.host_parts
        named = {piece_name(p, part.start): (p, part) for p, each in parts.items() for part in each}
        arrays = self.leaves.host | {written: part.value for written, (_, part) in named.items()}
        path = os.path.join(self.folder, name)
        metadata = self._metadata([*self.leaves.host, *parts])

        def write() -> tuple[int, dict[str, str]]:
            checkpoint_folder.make(self.folder)  # another save that failed may have removed it
            return tensor_files.write(path, arrays, metadata, self.stopped.is_set)

        with tensor_files.checkpoint_errors(path):
            size, digests = await in_thread(write, self.stopped)
        self.files[name] = m.File(size, "the controller")
        for written, (p, part) in named.items():
            self._add_piece(p, m.Piece(name, written, part.start, part.value.shape, digests[written]))
        for p, array in self.leaves.host.items():
            self.arrays[p] = m.Array(
                name, array.dtype.name, array.shape, digests[p], self.leaves.key_impls.get(p)
            )
        self._advance(sum(array.nbytes for array in arrays.values()))

    def _metadata(self, paths: Sequence[str]) -> dict[str, str]:
        impls = self.leaves.key_impls
        return {"format": m.FORMAT} | {f"key_impl:{path}": impls[path] for path in paths if path in impls}

    def _advance(self, size_bytes: int) -> None:
        self.saving.written_bytes += size_bytes
        if self.on_progress is not None:
            try:
                self.on_progress(self.saving)
            except Exception:  # a bug in what shows progress must not cost a checkpoint
                _LOG.exception("on_progress of the save %s failed", shown(self.folder))

    def _commit(self) -> None:
        """Complete the checkpoint by putting this save's manifest in the place of the folder's old one.

        Then remove the files that the old manifest names. This runs in a thread.
        """
        order = {path: k for k, path in enumerate([*self.leaves.remote, *self.leaves.host])}
        arrays = dict(sorted(self.arrays.items(), key=lambda item: order[item[0]]))
        manifest = m.Manifest(dict(sorted(self.files.items())), arrays, self.leaves.values)
        self.manifest = m.to_text(manifest).encode()
        sizes = {name: file.size_bytes for name, file in self.files.items()}
        checkpoint_folder.commit(self.folder, self.save_id, self.manifest, self.replaced_manifest, sizes)
        self.is_committed = True
        with contextlib.suppress(OSError):  # this checkpoint is complete even if old files stay
            checkpoint_folder.remove_files(self.folder, checkpoint_folder.files_of(self.replaced_manifest))

    async def _remove_replaced(self) -> None:
        """Remove the files of the replaced checkpoint on the actors, and call `after_commit`.

        A failure is only logged, because this save's checkpoint is complete.
        """
        await self.removals.run(self.folder, checkpoint_folder.files_of(self.replaced_manifest))
        if self.after_commit is not None:
            try:
                await self.after_commit()
            except (CheckpointError, ActorError, OSError) as error:
                where = shown(self.folder)
                _LOG.warning("%s is saved, but older checkpoints could not be removed: %s", where, error)

    # ------------------------------------------------------------ failing

    async def _remove_own_files(self) -> None:
        """Remove the files that this save has written, both on the actors and in this process's file system.

        Both are needed because the actors' file systems may differ from this process's. If this save's
        manifest turns out to be in the folder, the checkpoint is complete, and its files stay.
        """
        self.leaves = Leaves({}, {}, {}, {})
        names: tuple[str, ...] = ()

        def remove() -> None:
            checkpoint_folder.remove_files(self.folder, names)
            for folder in reversed(self.made_folders):
                checkpoint_folder.remove_empty(folder)

        try:
            if self.has_begun and not await in_thread(self._is_in_place):
                names = self._own_file_names()
            await self.removals.run(self.folder, names, remove_folder=bool(self.made_folders))
            await in_thread(remove)
        except (OSError, CheckpointError) as error:
            _LOG.warning("%s: what a failed save wrote could not be removed: %s", shown(self.folder), error)

    def _is_in_place(self) -> bool:
        """Return whether this save's manifest is in the folder, so that the checkpoint is complete.

        This runs in a thread after a failure. A failed commit may have taken effect: a file system may report
        an error when a file is put in place or made durable, and store the file nevertheless.
        """
        return bool(self.manifest) and checkpoint_folder.read_manifest(self.folder) == self.manifest

    def _own_file_names(self) -> tuple[str, ...]:
        """Return the names of all files that this save may have written."""
        written = [(process, k) for process, files in self.plan.files.items() for k in range(len(files))]
        return tuple(
            checkpoint_folder.file_name(self.save_id, process, k) for process, k in [*written, (None, 0)]
        )

    def _user_error(self, error: BaseException) -> Exception:
        if isinstance(error, CheckpointError):
            return error
        if not isinstance(error, Exception):
            return CheckpointError(f"{shown(self.folder)}: the save was cancelled")
        note = "could not be saved; the checkpoint before it, if there is one, is whole"
        return checkpoint_failure(self.folder, note, error, self.controller.cause)


# ---------------------------------------------------------------- removing files on the actors

CLEAN_S = 5.0
"""The most seconds that actors may take to end a save that failed."""


class FileRemovals:
    """An object that has a mesh's actors remove files of saves, and keeps track of the removals under way.

    A save must wait until the removals in its folder have ended. Otherwise a late removal would delete the
    folder while the save begins to write to it.

    Args:
        controller: a function that returns the mesh's controller, or raises `MeshError` if the mesh has not
            started.
    """

    def __init__(self, controller: Callable[[], Controller]):
        self._controller = controller
        self._under_way: dict[str, set[asyncio.Future[Any]]] = {}

    async def run(self, folder: str, files: tuple[str, ...], *, remove_folder: bool = False) -> None:
        """Have every actor end its part of a save and remove files, and wait until all have done so.

        If an actor cannot remove a file, or takes longer than `CLEAN_S` seconds, this only logs a warning.

        Args:
            folder: the folder of the save.
            files: names of the files to remove.
            remove_folder: whether to remove the folder too if it is then empty.
        """
        controller = self._controller()
        if controller.is_closed:
            return
        message = Sweep(os.fsencode(folder), files, remove_folder)
        messages = dict.fromkeys(controller.processes.everyone, message)
        asked = controller.requests.send_each(messages, awaited=False).items()
        processes = {sweep.future: process for process, sweep in asked}
        for sweep in processes:
            self._under_way.setdefault(folder, set()).add(sweep)
            sweep.add_done_callback(lambda sweep: self._ended(folder, sweep))
        done, late = await asyncio.wait(processes, timeout=CLEAN_S)
        left = {sweep: "no answer" for sweep in late} | {
            sweep: first_line(error) for sweep in done if (error := sweep.exception()) is not None
        }
        hosts = {controller.requests.info(processes[sweep]).host for sweep in left}
        if controller.is_closed:  # an ended process of this host writes no more, and this process removes
            hosts.discard(socket.gethostname())
        if files and hosts:
            series = os.path.dirname(folder)
            if not checkpoint_folder.NUMBER.fullmatch(os.path.basename(folder)):
                series = folder
            _LOG.warning(
                "%s: files of a save may be left on %s: %s; while no save writes there, `await "
                "jpp.Checkpoints(mesh, %r).remove_leftovers()` removes what this host sees of them",
                shown(folder),
                ", ".join(sorted(hosts)),
                "; ".join(dict.fromkeys(left.values())),
                shown(series),
            )

    async def wait_until_done(self, folder: str) -> None:
        """Wait until no actor removes files in the folder any more.

        Unlike `run`, this waits without a time limit, and also for removals whose `run` was cancelled.
        """
        while sweeps := self._under_way.get(folder):
            await asyncio.wait(sweeps)

    def _ended(self, folder: str, sweep: asyncio.Future[Any]) -> None:
        if not sweep.cancelled():
            sweep.exception()  # marks the error as seen: nobody may be waiting any more
        left = self._under_way[folder]
        left.discard(sweep)
        if not left:
            del self._under_way[folder]


# ---------------------------------------------------------------- failed and cancelled work

T = TypeVar("T")


def checkpoint_failure(folder: str, what: str, error: Exception, ended_by: ActorError | None) -> Exception:
    """Return the error to raise when a checkpoint could not be saved or restored: a `CheckpointError`, or
    `error` itself with a note if the mesh has ended.

    Args:
        folder: the checkpoint's folder.
        what: what could not be done; then, after a semicolon, what became of the checkpoint, which is said
            if the mesh has ended.
        error: the cause.
        ended_by: the error that ended the mesh, or None.
    """
    if isinstance(error, ActorError) and (error is ended_by or not isinstance(error, RemoteError)):
        error.add_note(f"{shown(folder)} {what}")
        return error
    text = error.strerror or str(error) if isinstance(error, OSError) else str(error).partition("\n")[0]
    failed = what.partition(";")[0]
    result = CheckpointError(f"{shown(folder)} {failed}: {text or type(error).__name__}")
    result.__cause__ = error
    return result


async def in_thread(work: Callable[[], T], stop: threading.Event | None = None) -> T:
    """Run `work` in a thread and return its result.

    If the call is cancelled, wait until the thread has ended and then raise the cancellation, so that no
    thread writes to files after its save was cancelled.

    Args:
        work: the function to run.
        stop: an event that this function sets if the call is cancelled, and that `work` checks so that it can
            end early; None if `work` always runs to its end.
    """
    future = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if stop is not None:
            stop.set()
        while not future.done():
            with contextlib.suppress(
                asyncio.CancelledError
            ):  # cancelled once more; the thread does not end for that
                await asyncio.wait([future])
        with contextlib.suppress(Exception, asyncio.CancelledError):
            # marks the error as seen: the cancellation is raised instead
            future.result()
        raise
