"""Record XLA's profile of an actor process while the controller wants one, with markers of steps and tasks.

JAX has one profiler a process, which inline actors share. Markers are made only while it records.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxpp_async.actors.server import handles
from jaxpp_async.base.printable import shown
from jaxpp_async.errors import MeshError
from jaxpp_async.protocol import messages as m

_CLOSE_S = 2.0
"""The longest time in seconds for which the end of an actor waits until a profile is written."""

_MARKERS_S = 1.0
"""The longest time in seconds for which the end of a recording waits for steps that are still running."""

_T = TypeVar("_T")

_recording = threading.Event()
"""Whether the profiler of this process records for a mesh."""

_marked = threading.Condition()
_open: weakref.WeakSet[StepMarkers] = weakref.WeakSet()
"""The markers of steps that have begun and not ended; `_marked` guards them."""


class StepMarkers:
    """The markers of one step in a profile: one around the step, on the compute thread, and one around each
    task.

    Args:
        step: the id of the run of a program.
        actor: the actor, which the markers name, since inline actors share one profile.
    """

    def __init__(self, step: m.StepId, actor: int):
        self._kind, self._number, self._actor = m.step_kind(step), m.step_number(step), actor
        self._whole: Any = None

    def begin(self, submit: Callable[[Callable[[], None]], None]) -> None:
        """Begin the step.

        Args:
            submit: a function that has the compute thread run a job, before the step's first task.
        """
        with _marked:
            _open.add(self)
        submit(self._enter)

    def _enter(self) -> None:
        annotation = (
            jax.profiler.StepTraceAnnotation if self._kind == "step" else jax.profiler.TraceAnnotation
        )
        number = {"step_num" if self._kind == "step" else "ahead_of_step": self._number}
        self._whole = annotation(self._kind, actor=self._actor, **number)
        self._whole.__enter__()

    def end(self, submit: Callable[[Callable[[], None]], None]) -> None:
        """End the step; `submit` is as for `begin`, and the job runs behind the step's last task."""
        submit(self._exit)

    def _exit(self) -> None:
        if self._whole is not None:
            self._whole.__exit__(None, None, None)
            self._whole = None
        with _marked:
            _open.discard(self)
            _marked.notify_all()

    def task(self, label: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager around the call of one task.

        Args:
            label: the label of the task, such as `"fwd(stage 0, mb 3)"`.
        """
        return jax.profiler.TraceAnnotation(label, actor=self._actor, step=self._number)


def step_markers(step: m.StepId, actor: int) -> StepMarkers | None:
    """Return the markers of a step that is about to begin; None if nothing records.

    Args:
        step: the id of the step.
        actor: the id of the actor.
    """
    return StepMarkers(step, actor) if _recording.is_set() else None


class ProfileRequests:
    """The component of an actor process that records a profile and sends its files to the controller.

    Args:
        workers: threads for starting and ending the profiler, and for reading files.
    """

    def __init__(self, workers: ThreadPoolExecutor):
        self._workers = workers
        self._folder: str | None = None
        self._is_temporary = self._is_recording = False
        self._files: dict[str, int] = {}

    @handles(m.StartProfile)
    async def start(self, message: m.StartProfile) -> m.Done:
        """Begin to record into the folder that the controller names, or into a temporary one.

        Raises:
            MeshError: JAX cannot record: its profiler is in use, or the folder cannot be made.
        """
        if self._folder is not None:
            raise MeshError("this process is being profiled already")
        self._is_temporary = message.folder is None
        self._folder = folder = await self._in_thread(lambda: _make_folder(message.folder))
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # else it would mostly be the event loop's own functions
        try:
            await self._in_thread(lambda: jax.profiler.start_trace(folder, profiler_options=options))
        except Exception as error:  # JAX's profiler raises errors of several types
            await self._drop()
            raise MeshError(f"JAX's profiler does not start: {error}") from None
        self._is_recording = True
        _recording.set()
        return m.Done()

    @handles(m.StopProfile)
    async def stop(self, message: m.StopProfile) -> m.Profiled:
        """End the recording, and return what was written.

        Raises:
            MeshError: nothing was being recorded, since the process is a successor of the one that was.
        """
        if not self._is_recording:
            raise MeshError("this process was not being profiled")
        self._end_recording()
        await self._in_thread(_wait_for_markers)
        await self._in_thread(jax.profiler.stop_trace)
        assert self._folder is not None
        self._files = await self._in_thread(lambda: _sizes(Path(self._folder or "")))
        return m.Profiled(tuple(self._files.items()))

    @handles(m.ReadProfile)
    async def read(self, message: m.ReadProfile) -> m.ProfilePart:
        """Return a part of one file of the profile.

        Raises:
            MeshError: the profile has no such file.
        """
        if self._folder is None or message.file not in self._files:
            raise MeshError(f"the profile of this process has no file {shown(message.file)}")
        path = Path(self._folder, message.file)
        return m.ProfilePart(
            await self._in_thread(
                lambda: _read(path, message.offset, min(message.size, m.PROFILE_PART_BYTES))
            )
        )

    @handles(m.EndProfile)
    async def end(self, message: m.EndProfile) -> m.Done:
        """Forget the profile, end its recording if that is under way, and remove a temporary folder."""
        if self._is_recording:
            self._end_recording()
            await self._in_thread(jax.profiler.stop_trace)
        await self._drop()
        return m.Done()

    async def aclose(self) -> None:
        """Write a profile that is still being recorded, if its folder is not temporary, since the mesh failed
        while it was recorded. This takes `_CLOSE_S` seconds at most.
        """
        if self._is_recording:
            self._end_recording()
            with contextlib.suppress(Exception):  # nobody can be told any more
                async with asyncio.timeout(_CLOSE_S):
                    await self._in_thread(jax.profiler.stop_trace)
        await self._drop()

    def _end_recording(self) -> None:
        self._is_recording = False
        _recording.clear()

    async def _drop(self) -> None:
        folder, self._folder, self._files = self._folder, None, {}
        if folder is not None and self._is_temporary:
            await self._in_thread(lambda: shutil.rmtree(folder, ignore_errors=True))

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)


def _wait_for_markers() -> None:
    """Wait until the marker of each step that has ended is in the profile; the controller knows the end of a
    step before the compute thread does.
    """
    with _marked:
        _marked.wait_for(lambda: not _open, timeout=_MARKERS_S)


def _make_folder(path: bytes | None) -> str:
    """Make a folder that only this user can enter, and return its path."""
    if path is None:
        return tempfile.mkdtemp(prefix="jaxpp-profile-")
    try:
        os.makedirs(path, 0o700)
    except OSError as error:
        raise MeshError(f"{shown(path)} cannot be made: {error.strerror}") from None
    return os.fsdecode(path)


def _sizes(folder: Path) -> dict[str, int]:
    """Return the size in bytes of each file below a folder, by its path in the folder."""
    found: dict[str, int] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            path.chmod(0o600)
            found[str(path.relative_to(folder))] = path.stat().st_size
    return found


def _read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)
