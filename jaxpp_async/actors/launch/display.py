"""display: how the launch goes, a line a host: live where somebody watches a terminal, as log records elsewhere."""

from __future__ import annotations

import logging
import sys
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

_LOG = logging.getLogger("jaxpp_async")

MAX_LINES = 24
"""More hosts than this are summed up: a live display taller than its terminal flickers."""


class HostLines:
    """One line a host. Used from one thread.

    Args:
        console: default: stderr.
    """

    def __init__(self, console: Console | None = None):
        self._console = console or Console(file=sys.stderr)
        self._lines: dict[str, str] = {}
        self._live: Any = None

    def set(self, host: str, text: str) -> None:
        """What a host is at now."""
        self._lines[host] = text
        if not self._console.is_terminal:
            _LOG.info("host %s: %s", host, text)
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(self.render(), refresh=True)

    def render(self) -> Text:
        """All lines; the states of many hosts are counted instead."""
        if len(self._lines) <= MAX_LINES:
            width = max(map(len, self._lines), default=0)
            return Text("\n".join(f"{host:<{width}}  {text}" for host, text in self._lines.items()))
        counts: dict[str, int] = {}
        for text in self._lines.values():
            counts[text] = counts.get(text, 0) + 1
        return Text("\n".join(f"{count} hosts  {text}" for text, count in counts.items()))

    def close(self) -> None:
        """Leave the last state on the terminal. A second call does nothing."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        self._lines.clear()
