"""Record XLA's profiles of a mesh's actors, and gather their files in one folder.

Actors on this machine write into the folder themselves. The files of other hosts come in small parts over the
control connections. An actor that cannot give its profile is named in a warning, and the others are written.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from jaxpp_async.base.printable import first_line, shown
from jaxpp_async.controller.actor_group import ActorGroup
from jaxpp_async.controller.requests import ActorLink, Requests
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.errors import ActorError, JaxppAsyncError, MeshError
from jaxpp_async.program.instructions import ProcessId
from jaxpp_async.protocol import messages as m
from jaxpp_async.protocol.task_group import awake_timeout

_LOG = logging.getLogger("jaxpp_async")

START_S, STOP_S, PART_S = 60.0, 120.0, 30.0
"""The most seconds that the profiler of a process may take to start, to end and write, and to send a part."""

MOST_BYTES = 1 << 30
"""The most bytes of one process's profile that are gathered from another host."""

_MOST_FILES = 1_000

_T = TypeVar("_T")


class Profiling:
    """The recorder of the profiles of one mesh, one at a time.

    Args:
        actor_group: the actors' processes.
        requests: sends the requests.
        under_way: the steps under way, by id.
        is_ended: returns whether the mesh has failed or closed.
    """

    def __init__(
        self,
        actor_group: ActorGroup,
        requests: Requests,
        under_way: dict[int, SubmittedStep],
        is_ended: Callable[[], bool],
    ):
        self._actor_group, self._requests = actor_group, requests
        self._under_way, self._is_ended = under_way, is_ended
        self._folder: Path | None = None
        self._links: dict[ProcessId, ActorLink] = {}

    async def start(self, folder: str | os.PathLike[str]) -> Path:
        """Begin to record on every process, and return the folder as an absolute path.

        Args:
            folder: a folder that is empty or does not exist yet.

        Raises:
            MeshError: a profile is being recorded, the folder cannot be used, or a process cannot record.
            ActorError: the mesh failed.
        """
        if self._folder is not None:
            raise MeshError(
                f"mesh.profile: a profile into {shown(self._folder)} is being recorded; leave its block first"
            )
        self._folder = Path(folder)
        try:
            path = self._folder = await asyncio.to_thread(_make_empty, self._folder)
            # inline actors share one JAX, and so one profile
            processes = sorted(self._actor_group.links)[: None if self._actor_group.has_processes else 1]
            self._links = {process: self._actor_group.links[process] for process in processes}
            await self._start_each()
        except BaseException:  # also a cancellation: the next profile may begin
            await self._end_each()
            self._folder, self._links = None, {}
            raise
        return path

    async def _start_each(self) -> None:
        is_here = self._actor_group.is_on_this_machine

        def begin(process: ProcessId) -> Coroutine[Any, Any, m.Done]:
            message = m.StartProfile(os.fsencode(self._place(process)) if is_here else None)
            return _within(START_S, "did not begin to record", self._requests.call(process, message))

        for process, outcome in (await _outcomes(self._links, begin)).items():
            if isinstance(outcome, JaxppAsyncError):
                who = self._links[process].info
                raise MeshError(f"mesh.profile: {who}: {_reason(outcome)}") from outcome
            if isinstance(outcome, BaseException):
                raise outcome

    def _place(self, process: ProcessId) -> Path:
        """Return the folder of one process's files."""
        assert self._folder is not None
        if not self._actor_group.has_processes:
            return self._folder / "inline"
        info = self._links[process].info
        folder = self._folder / f"actor-{info.id}"
        return folder if info.size == 1 else folder / f"process-{info.rank}"

    async def stop(self) -> None:
        """End the recording behind the steps that are under way, and gather the files. Processes whose
        profiles are lost are named in a warning.

        Raises:
            MeshError: no profile could be written.
        """
        try:
            await self._wait_for_steps()
            await self._requests.wait_open()  # a restart that is under way ends first
            if self._is_ended():
                way = "are written when they end" if self._actor_group.is_on_this_machine else "are lost"
                _LOG.warning(
                    "mesh.profile %s: the mesh has ended; the profiles of actors that still run %s",
                    shown(self._folder or ""),
                    way,
                )
                return
            lost: dict[ProcessId, BaseException] = {}
            for process, outcome in (await _outcomes(self._links, self._gather)).items():
                if isinstance(outcome, BaseException):
                    lost[process] = outcome
                    who = self._links[process].info
                    _LOG.warning("mesh.profile: of %s there is no profile: %s", who, _reason(outcome))
            if self._links and len(lost) == len(self._links):
                raise MeshError(
                    f"mesh.profile {shown(self._folder or '')}: no profile was written: "
                    f"{_reason(next(iter(lost.values())))}"
                )
        finally:
            await self._end_each()
            self._folder, self._links = None, {}

    async def _wait_for_steps(self) -> None:
        loop = asyncio.get_running_loop()
        ends = []
        for step in list(self._under_way.values()):
            end = loop.create_future()
            step.when_done(lambda end=end: end.done() or end.set_result(None))
            ends.append(end)
        if ends:
            await asyncio.wait(ends)

    async def _gather(self, process: ProcessId) -> None:
        """End the recording of one process, and fetch those of its files that are not here.

        Raises:
            MeshError: the process is another one than at the start, or its files cannot be had.
            ActorError: the process failed.
            OSError: a file cannot be written here.
        """
        if self._actor_group.links.get(process) is not self._links[process]:
            raise MeshError("it was replaced while it was being profiled")
        stopped: m.Profiled = await _within(
            STOP_S, "did not write its profile", self._requests.call(process, m.StopProfile())
        )
        place = self._place(process)
        files = {_checked_name(name): size for name, size in stopped.files[:_MOST_FILES]}
        if not files:
            raise MeshError("JAX's profiler wrote no file")
        missing = {name: size for name, size in files.items() if not _is_here(place / name, size)}
        if sum(missing.values()) > MOST_BYTES:
            total = sum(missing.values())
            raise MeshError(f"its files have {total:,} bytes, more than {MOST_BYTES:,}; profile fewer steps")
        for name, size in missing.items():
            await self._fetch(process, name, size, place / name)

    async def _fetch(self, process: ProcessId, name: str, size: int, path: Path) -> None:
        await asyncio.to_thread(os.makedirs, path.parent, 0o700, exist_ok=True)
        offset = 0
        while offset < size or offset == 0:
            request = m.ReadProfile(name, offset, m.PROFILE_PART_BYTES)
            part: m.ProfilePart = await _within(
                PART_S, f"did not send {shown(name)}", self._requests.call(process, request)
            )
            if (not part.data and size) or len(part.data) > size - offset:
                raise MeshError(f"{shown(name)} has not the {size:,} bytes that it had")
            await asyncio.to_thread(_append, path, part.data)
            offset += max(len(part.data), 1)

    async def _end_each(self) -> None:
        """Let every process forget its profile. A failure here is of no consequence."""

        def end(process: ProcessId) -> Coroutine[Any, Any, m.Done]:
            return _within(PART_S, "did not answer", self._requests.call(process, m.EndProfile()))

        if not self._is_ended():
            same = [p for p, link in self._links.items() if self._actor_group.links.get(p) is link]
            await _outcomes(same, end)


async def _outcomes(
    processes: Iterable[ProcessId], work: Callable[[ProcessId], Coroutine[Any, Any, _T]]
) -> dict[ProcessId, _T | BaseException]:
    """Do some work for all processes at the same time, and return the result or error of each."""
    asked = list(processes)
    outcomes = await asyncio.gather(*map(work, asked), return_exceptions=True)
    return dict(zip(asked, outcomes, strict=True))


async def _within(seconds: float, late: str, work: Coroutine[Any, Any, _T]) -> _T:
    try:
        async with awake_timeout(seconds):
            return await work
    except TimeoutError:
        raise MeshError(f"it {late} within {seconds:g} s") from None


def _reason(error: BaseException) -> str:
    """Return an error in one line, without the place and the class that a remote error begins with."""
    text = first_line(error)
    return text.rpartition("MeshError: ")[2] if isinstance(error, ActorError) else text


def _make_empty(folder: Path) -> Path:
    """Make a folder that only this user can enter, or check that it is empty; return its absolute path.

    Raises:
        MeshError: there is a file of that name, or files in the folder, or it cannot be made.
    """
    path = folder.absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        has_files = any(path.iterdir())
    except OSError as error:
        raise MeshError(f"mesh.profile: {shown(path)} cannot be used: {error.strerror}") from None
    if has_files:
        raise MeshError(f"mesh.profile: the folder {shown(path)} has files; name a new or empty one")
    return path


def _checked_name(name: str) -> str:
    """Return the path of a file in a profile, as a process reports it, if it lies in the profile's folder.

    Raises:
        MeshError: the path leads elsewhere.
    """
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise MeshError(f"it reports a file {shown(name)}, outside of its profile")
    return name


def _is_here(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _append(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "ab") as file:
        file.write(data)
