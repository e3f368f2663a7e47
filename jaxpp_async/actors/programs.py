"""programs: which part of which program each actor has, as the controller remembers it. Plain data; no jax, no I/O."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from jaxpp_async.actors.progress import Position
from jaxpp_async.program import ActorId, ActorProgram
from jaxpp_async.program_text import format_instruction


class Programs:
    """The programs that actors have loaded, by id."""

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._parts: dict[int, dict[ActorId, ActorProgram]] = {}

    def new_id(self) -> int:
        """An id that none has had."""
        return next(self._ids)

    def add(self, program_id: int, parts: Mapping[ActorId, ActorProgram]) -> None:
        """Its actors have loaded their parts."""
        self._parts[program_id] = {actor: parts[actor] for actor in sorted(parts)}

    def actors_of(self, program_id: int) -> tuple[ActorId, ...]:
        """The actors that have a part in it, in order of id."""
        return tuple(self._parts[program_id])

    def instruction_at(self, actor: ActorId, at: Position) -> str | None:
        """Text of the instruction that an actor was at; None if that says nothing."""
        part = self._parts.get(at.program_id, {}).get(actor)
        if part is None or not 0 <= at.instruction < len(part.instructions):
            return None
        text = format_instruction(part.instructions[at.instruction])
        return f"{text} (waiting for data)" if at.waiting else text
