"""progress: where an actor is in its program, in a page of memory that its launcher shares with it.

The actor writes at every instruction (under a microsecond, no message); the controller reads when the actor has died,
when nobody is left to ask. No file, no name: nothing stays behind.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

_LAYOUT = struct.Struct("<?qqq?")

NoteProgress: TypeAlias = "Callable[[int, int, int, bool], None]"
"""Called with step, program id, instruction index, and whether it waits for data."""


@dataclass(frozen=True, slots=True)
class Position:
    """An instruction of a loaded program, in a step. `waiting`: its data had not come yet."""

    step: int
    program_id: int
    instruction: int
    waiting: bool


def make_page() -> int:
    """A descriptor of a new page, inheritable by a spawned process that is handed it."""
    descriptor = os.memfd_create("jaxpp-progress", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    return descriptor


class ProgressPage:
    """One end of the page. Takes over `descriptor`."""

    def __init__(self, descriptor: int):
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)
        os.close(descriptor)

    def note(self, step: int, program_id: int, instruction: int, waiting: bool) -> None:
        """Write down where the actor is."""
        _LAYOUT.pack_into(self._page, 0, True, step, program_id, instruction, waiting)

    def read(self) -> Position | None:
        """Where it was last; None before its first instruction, and once closed."""
        if self._page.closed:
            return None
        written, *position = _LAYOUT.unpack_from(self._page)
        return Position(*position) if written else None

    def close(self) -> None:
        """Give the page back. A second call does nothing."""
        self._page.close()


def no_progress(step: int, program_id: int, instruction: int, waiting: bool) -> None:
    """For actors that nobody reads: inline ones cannot die alone."""
