"""sweeps: has the actors remove files of ended saves, and knows in which folders they still do."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

from jaxpp_async.actors.controller import Controller
from jaxpp_async.actors.messages import Done, Sweep

_LOG = logging.getLogger("jaxpp_async")

CLEAN_S = 5.0
"""What actors may take to end a save that failed."""


class Sweeps:
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
        sweeps = list(controller.outbox.send_each(makes, Done, awaited=False).values())
        for sweep in sweeps:
            self._under_way.setdefault(folder, set()).add(sweep)
            sweep.add_done_callback(lambda sweep: self._ended(folder, sweep))
        done, late = await asyncio.wait(sweeps, timeout=CLEAN_S)
        errors = [error for sweep in done if (error := sweep.exception()) is not None]
        if late or errors:
            _LOG.warning("files of an ended save may be left: %s", errors or f"{len(late)} actors did not answer")

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
