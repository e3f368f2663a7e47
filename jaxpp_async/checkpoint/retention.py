"""Define `Checkpoints`, which saves a training run's numbered checkpoints and keeps the newest few."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import Any, Protocol

from jaxpp_async.base.printable import shown
from jaxpp_async.checkpoint.save import OnProgress, Saver, Saving
from jaxpp_async.checkpoint.stored import StoredCheckpoint, describe
from jaxpp_async.errors import ActorError, CheckpointError, MeshError
from jaxpp_async.jax_bridge.tracebacks import HiddenFrames
from jaxpp_async.storage import checkpoint_folder
from jaxpp_async.storage.checkpoint_folder import CheckpointPath
from jaxpp_async.storage.tensor_files import checkpoint_errors
from jaxpp_async.view import format_held, to_html_table

_LOG = logging.getLogger("jaxpp_async")

_DIGITS = checkpoint_folder.NUMBER_DIGITS


class Mesh(Protocol):
    """The part of the interface of `RemoteMesh` that `Checkpoints` needs to save and restore trees."""

    @property
    def saver(self) -> Saver: ...

    async def restore(self, path: CheckpointPath, like: Any) -> Any: ...


class Checkpoints:
    """The checkpoints of one training run, each in a folder of `directory` that is named by its step number.

        async with jpp.Checkpoints(mesh, "checkpoints", keep=3) as checkpoints:
            if checkpoints.latest() is not None:
                run = await checkpoints.restore(like)
            ...
            await checkpoints.save(step_number, run)

    Leaving the context waits until the save under way has ended, and raises an error if that save failed.

    Args:
        mesh: the mesh whose arrays are saved and restored.
        directory: the folder that contains the checkpoints' folders; the first save makes it. Only one
            training run may use it at a time.
        keep: the number of checkpoints to keep, counting the one that was saved last. Older checkpoints are
            removed only once that one is complete.

    Raises:
        MeshError: `keep` is below 1.
    """

    def __init__(self, mesh: Mesh, directory: CheckpointPath, *, keep: int = 3):
        if keep < 1:
            raise MeshError(f"keep is {keep}; at least one checkpoint has to stay")
        self._mesh, self._keep, self.directory = mesh, keep, checkpoint_folder.absolute(directory)
        self._current: Saving | None = None

    def __repr__(self) -> str:
        numbers = self.step_numbers()
        newest = f", the newest of step {numbers[-1]}" if numbers else ""
        return f"<Checkpoints {shown(self.directory)}: {len(numbers)} complete{newest}; keeps {self._keep}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the complete checkpoints, newest first, and the save under way."""
        rows = []
        for number in self.step_numbers()[::-1]:
            with contextlib.suppress(OSError):  # a save has removed it meanwhile
                rows.append(_facts(number, describe(self.directory, os.path.basename(self.path(number)))))
        saving = self._current
        if saving is not None and not saving.done():
            rows.insert(0, (os.path.basename(saving.path), "being saved", saving.progress, ""))
        return to_html_table(repr(self).strip("<>"), ("step", "saved", "size", "leaves"), rows)

    async def __aenter__(self) -> Checkpoints:
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            await self.wait()
        except (CheckpointError, ActorError) as failure:
            if error is None:
                with HiddenFrames():
                    raise
            if failure is not error:  # the error that ended the context is raised instead
                _LOG.warning("%s", failure)

    async def save(
        self, step_number: int, tree: Any, *, wait: bool = False, on_progress: OnProgress | None = None
    ) -> Saving:
        """Start to save a tree in its present state; the files are written in the background.

        If the previous save is still writing, this method first waits for it. Once this checkpoint is
        complete, older ones are removed so that at most `keep` stay, this one included. Checkpoints with
        higher numbers are neither counted nor removed.

        Args:
            step_number: the number that names the checkpoint; a checkpoint of the same number is replaced.
            tree: the tree to save, as for `RemoteMesh.save`.
            wait: whether to return only when the checkpoint is complete.
            on_progress: called with the `Saving` whenever a file has been written.

        Returns:
            The save under way, which can be awaited.

        Raises:
            CheckpointError: a leaf cannot be saved, the previous save failed and nobody has awaited it, or
                `wait` is true and this save failed.
            ActorError: the mesh ended before the previous save was complete, and nobody has awaited that
                save, or, if `wait` is true, before this one was.
            ArrayError: an array cannot be used; see `RemoteMesh.save`.
            MeshClosedError: the mesh is closed; see `RemoteMesh.save`.
        """

        async def prune() -> None:
            # Checkpoints of higher numbers are of another run, or of this run before it was set back; these
            # do not count, so that this save stays in any case.
            for number in [n for n in self.step_numbers() if n <= step_number][: -self._keep]:
                await self._mesh.saver.remove(self.path(number))

        with HiddenFrames():
            await self.wait()
            saving = self._current = await self._mesh.saver.save(
                self.path(step_number), tree, wait=wait, on_progress=on_progress, after_commit=prune
            )
        return saving

    async def wait(self) -> None:
        """Wait until the last save has ended; return immediately if there was none.

        Raises:
            CheckpointError: the save failed, and nobody has awaited it yet.
            ActorError: the mesh ended before the save was complete, and nobody has awaited it yet.
        """
        saving = self._current
        if saving is None:
            return
        was_told = saving.is_awaited
        try:
            await saving
        except (CheckpointError, ActorError):
            if not was_told:
                with HiddenFrames():
                    raise
        finally:
            if saving.done() and self._current is saving:
                self._current = None

    async def restore(self, like: Any, step_number: int | None = None) -> Any:
        """Restore a checkpoint, by default the newest, and return its tree.

        Args:
            like: a tree that says in which form each leaf is restored, as for `RemoteMesh.restore`.
            step_number: the number of the checkpoint; None: that of the newest.

        Raises:
            CheckpointError: the checkpoint does not exist, is broken, or does not match `like`. If there are
                other checkpoints, a note names them.
            ArrayError, ActorError: as for `RemoteMesh.restore`.
        """
        numbers = self.step_numbers()
        number = step_number if step_number is not None else max(numbers, default=None)
        if number is None:
            what = f"there is no checkpoint in it with a step number for its name ({'0' * _DIGITS})"
            own = "; this folder is itself a checkpoint: mesh.restore(path, like)" * self._is_whole("")
            with HiddenFrames():
                raise CheckpointError(f"{shown(self.directory)}: {what}{own}")
        try:
            return await self._mesh.restore(self.path(number), like)
        except CheckpointError as error:
            if step_number is None and (self.latest() or number) > number:
                return await self.restore(like)  # a save has put a newer one in its place meanwhile
            if older := [n for n in numbers if n != number]:
                error.add_note(
                    f"{shown(self.directory)} also has {older}: restore(like, step_number={older[-1]})"
                )
            with HiddenFrames():
                raise

    def latest(self) -> int | None:
        """Return the step number of the newest complete checkpoint; None if there is none."""
        return max(self.step_numbers(), default=None)

    def step_numbers(self) -> list[int]:
        """Return the step numbers of all complete checkpoints, in ascending order."""
        return sorted(int(name) for name in self._folders() if self._is_whole(name))

    def path(self, step_number: int) -> str:
        """Return the path of the folder for the checkpoint of this step number."""
        return os.path.join(self.directory, f"{step_number:0{_DIGITS}d}")

    async def remove_leftovers(self) -> list[str]:
        """Remove the files of saves that were broken off because their process died.

        Such files are removed from the checkpoints' folders, and from `directory` itself if `mesh.save` has
        saved a checkpoint there. The files cannot be told from the files of a save that is still under way,
        so nothing removes them automatically. Call this only while no save writes to `directory`.

        Returns:
            The paths of the removed files.

        Raises:
            CheckpointError: a file cannot be removed.
        """
        await self.wait()
        return await asyncio.to_thread(self._remove_leftovers)

    def _remove_leftovers(self) -> list[str]:
        removed: list[str] = []
        folders = [os.path.join(self.directory, name) for name in sorted(self._folders())]
        with contextlib.suppress(FileNotFoundError):
            if checkpoint_folder.written_by_saves(os.listdir(self.directory)):
                folders.append(self.directory)
        for folder in folders:
            with checkpoint_errors(folder):
                removed += [os.path.join(folder, name) for name in checkpoint_folder.remove_leftovers(folder)]
        return removed

    def _folders(self) -> list[str]:
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        return [name for name in names if checkpoint_folder.NUMBER.fullmatch(name)]

    def _is_whole(self, name: str) -> bool:
        return os.path.exists(os.path.join(self.directory, name, checkpoint_folder.MANIFEST))


def _facts(number: int, stored: StoredCheckpoint) -> tuple[object, ...]:
    if stored.error:
        return number, stored.saved, f"cannot be read: {stored.error}", ""
    return number, stored.saved, format_held(stored.size_bytes, "bytes"), stored.num_leaves
