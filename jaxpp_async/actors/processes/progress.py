"""progress: where an actor is in its program, in a page of memory that its launcher shares with it.

The actor writes at every instruction (under a microsecond, no message). Its own heartbeat thread reads, and so does
whoever started it when it has died and nobody is left to ask. No file, no name: nothing stays behind.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_LAYOUT = struct.Struct("<?qqq??")


class NoteProgress(Protocol):
    """Told where an actor is; see `Position`."""

    def __call__(
        self, step: int, program_id: int, instruction: int, waiting: bool, computing: bool = False, /
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Position:
    """An instruction of a loaded program, in a step.

    Args:
        instruction: its index; the number of instructions stands for the end, where transfers may still be open.
        waiting: its data had not come yet.
        computing: the devices are at it. Neither: it is done, and the next thing has not begun.
    """

    step: int
    program_id: int
    instruction: int
    waiting: bool
    computing: bool = False


def hindmost(positions: Sequence[Position | None]) -> Position | None:
    """Where an actor is, by where its processes are: the one that is furthest behind. Those before it may only wait for
    it, in a task that they compute together. None if one has told nothing."""
    known = [position for position in positions if position is not None]
    if len(known) < len(positions) or not known:
        return None
    return min(known, key=lambda at: (at.step, at.instruction, at.computing))


def make_page() -> int:
    """A descriptor of a new page, inheritable by a spawned process that is handed it."""
    descriptor = os.memfd_create("jaxpp-progress", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    return descriptor


class ProgressPage:
    """One end of the page. Takes over `descriptor`; None: a page that nobody else sees."""

    def __init__(self, descriptor: int | None):
        self._page = mmap.mmap(-1 if descriptor is None else descriptor, mmap.PAGESIZE)
        if descriptor is not None:
            os.close(descriptor)

    def note(self, step: int, program_id: int, instruction: int, waiting: bool, computing: bool = False, /) -> None:
        """Write down where the actor is."""
        _LAYOUT.pack_into(self._page, 0, True, step, program_id, instruction, waiting, computing)

    def read(self) -> Position | None:
        """Where it was last; None before its first instruction, and once closed."""
        if self._page.closed:
            return None
        written, *position = _LAYOUT.unpack_from(self._page)
        return Position(*position) if written else None

    def close(self) -> None:
        """Give the page back. A second call does nothing."""
        self._page.close()


def no_progress(step: int, program_id: int, instruction: int, waiting: bool, computing: bool = False, /) -> None:
    """For actors that nobody reads: inline ones cannot die alone."""
