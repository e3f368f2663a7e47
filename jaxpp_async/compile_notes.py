"""compile_notes: log records and Python warnings about a step that was compiled without an error. Decides nothing."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

from jaxpp_async.compiler.continued import changed_arguments
from jaxpp_async.compiler.passes import Compiled, StepRequest
from jaxpp_async.program import ActorId, ActorProgram, runs

_LOG = logging.getLogger("jaxpp_async")


def report_notes(name: str, line: str, request: StepRequest, compiled: Compiled) -> None:
    """Log the microbatches of each loop, name actors that have nothing to do, and warn of donated arguments whose
    memory no result can take over.

    Args:
        name: of the step.
        line: `file:line` of `mesh.distributed`, where the warning points.
    """
    loops = [scheduled.staged.loop for scheduled in compiled.placed.loops.values()]
    for loop in loops:
        count = loop.num_microbatches
        _LOG.info(
            "step %r: %d microbatch%s of %s (%s)", name, count, "es" * (count != 1), _listed(loop.leaves), loop.line
        )
    if loops and (idle := _idle(compiled.programs)):
        _LOG.warning(
            "step %r leaves actors %s of %d idle: its schedule has fewer actors than the mesh; make more stages, "
            "or a mesh of as many actors as the schedule uses",
            name,
            idle,
            request.num_actors,
        )
    if changed := changed_arguments(compiled.traced, request.donated, compiled.continues):
        file, _, number = line.rpartition(":")
        warnings.warn_explicit(
            f"Some donated buffers were not usable: step {name!r} returns {_listed(changed)}; a result can take an "
            "argument's memory only with its shape and dtype: return it as it came, or do not donate it",
            UserWarning,
            file or line,
            int(number) if number.isdigit() else 0,
        )


def _listed(texts: Sequence[str], most: int = 8) -> str:
    shown = texts if len(texts) <= most else [*texts[: most - 1], f"{len(texts) - most + 1} more"]
    return ", ".join(shown)


def _idle(programs: Sequence[ActorProgram]) -> list[ActorId]:
    """Actors that run nothing."""
    return [p.actor for p in programs if not runs(p.instructions)]
