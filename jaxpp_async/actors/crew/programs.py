"""programs: which part of which program each actor has, as the controller remembers it. In: programs and executables;
out: `Load` messages. Plain data; no jax, no I/O.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from jaxpp_async.actors.messages import Load
from jaxpp_async.actors.processes.progress import Position
from jaxpp_async.actors.processes.seats import Processes
from jaxpp_async.program import ActorId, ActorProgram, ProcessId
from jaxpp_async.program_text import format_instruction

Places: TypeAlias = tuple[tuple[ActorId, tuple[ProcessId, ...]], ...]
"""Actors with their processes, both in order."""


@dataclass(frozen=True, slots=True)
class _Program:
    """Args: places: each actor with a part, and its processes. texts: each part as it travels. keys: each part's
    executables, by index. blobs: executables, by key. names: of the step's arguments, where errors name them."""

    places: Places
    parts: dict[ActorId, ActorProgram]
    texts: dict[ActorId, str]
    keys: dict[ActorId, dict[int, str]]
    blobs: dict[str, bytes]
    names: dict[int, str]


class Programs:
    """The programs that actors have loaded, or are loading, by id.

    Args:
        processes: of the mesh.
        for_successors: whether actors that are replaced will have to load them again.
    """

    def __init__(self, processes: Processes, *, for_successors: bool = False) -> None:
        self._processes, self._for_successors = processes, for_successors
        self._ids = itertools.count()
        self._programs: dict[int, _Program] = {}

    def new_id(self) -> int:
        """An id that none has had."""
        return next(self._ids)

    def add(
        self,
        program_id: int,
        parts: Mapping[ActorId, ActorProgram],
        keys: Mapping[ActorId, Mapping[int, str]],
        blobs: Mapping[str, bytes],
        names: Mapping[int, str],
    ) -> None:
        """Its actors are about to load their parts.

        Args:
            keys: for each actor, the content key of each executable index that its part uses.
            blobs: serialized executables by content key.
            names: of the step's arguments, by number, where errors on actors may have to name them.
        """
        order = sorted(parts)
        texts = {actor: str(parts[actor]) for actor in order}
        used = {actor: dict(keys.get(actor, {})) for actor in order}
        places = tuple((actor, tuple(self._processes.of(actor))) for actor in order)
        in_order = {actor: parts[actor] for actor in order}
        self._programs[program_id] = _Program(places, in_order, texts, used, dict(blobs), dict(names))

    def note_loaded(self, program_id: int) -> None:
        """All its actors have it: unless it may be needed again, what only travels is dropped."""
        if not self._for_successors:
            program = self._programs[program_id]
            program.texts.clear()
            program.blobs.clear()

    def remove(self, program_id: int) -> None:
        """It could not be loaded."""
        self._programs.pop(program_id, None)

    def of(self, actor: ActorId) -> tuple[int, ...]:
        """The programs that an actor has a part in, in order of id."""
        return tuple(i for i, program in sorted(self._programs.items()) if actor in program.parts)

    def load_message(self, request: int, program_id: int, actor: ActorId, known: set[str]) -> Load:
        """What an actor is told to load.

        Args:
            known: content keys that it has been sent before; takes up those of this message.
        """
        program = self._programs[program_id]
        keys = program.keys[actor]
        new = set(keys.values()) - known
        known |= new
        blobs = {key: program.blobs[key] for key in sorted(new)}
        return Load(request, program_id, program.texts[actor], keys, blobs, program.names)

    def places_of(self, program_id: int) -> Places:
        """The actors that have a part in it."""
        return self._programs[program_id].places

    def parts(self, program_id: int) -> dict[ActorId, ActorProgram]:
        """What each actor has of a program."""
        program = self._programs.get(program_id)
        found = program.parts.items() if program is not None else ()
        return {actor: part for actor, part in found if isinstance(part, ActorProgram)}  # as in `part`

    def all_parts(self) -> list[dict[ActorId, ActorProgram]]:
        """`parts` of every program."""
        return [self.parts(program_id) for program_id in sorted(self._programs)]

    def part(self, program_id: int, actor: ActorId) -> ActorProgram | None:
        """What an actor has of a program; None if it has no part in it, or there is no such program."""
        program = self._programs.get(program_id)
        part = program.parts.get(actor) if program is not None else None
        return part if isinstance(part, ActorProgram) else None  # tests of the control plane load plain text

    def instruction_at(self, actor: ActorId, at: Position) -> str | None:
        """Text of the instruction that an actor was at; None if that says nothing."""
        program = self._programs.get(at.program_id)
        part = program.parts.get(actor) if program is not None else None
        if part is None or not 0 <= at.instruction < len(part.instructions):
            return None
        text = format_instruction(part.instructions[at.instruction])
        return f"{text} (waiting for data)" if at.waiting else text
