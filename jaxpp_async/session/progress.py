"""Tell the user what a mesh is doing while steps wait for it: starting, compiling, saving, restoring.

On a terminal that is one line of the standard error stream, which shows for how long it has been going on.
Elsewhere, and on a terminal that shows log records of this level anyway, log records say it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias, TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from jaxpp_async.base.printable import listed, visible
from jaxpp_async.errors import MeshError

_LOG = logging.getLogger("jaxpp_async")

Mode: TypeAlias = Literal["line", "records", "silent"]

VARIABLE = "JAXPP_ASYNC_PROGRESS"
"""The environment variable that takes the place of the option `progress` where that is None: `0` or `1`."""

LONG_S = 1.0
"""The seconds from which on a phase leaves a line on a terminal when it ends."""

RECORD_EVERY_S = 10.0
"""The seconds between two log records that say how far a phase is."""


def choose_mode(option: Any) -> Mode:
    """Return how progress is told, by the option of the mesh, the environment and the terminal.

    Args:
        option: False for silence; True for the line wherever the standard error stream is a terminal; None
            for the line on a terminal that shows no log records of level `INFO`, and else for records.

    Raises:
        MeshError: the option or the environment variable is something else.
    """
    given = os.environ.get(VARIABLE)
    if option is None and given is not None:
        if given not in ("0", "1"):
            raise MeshError(
                f"{VARIABLE} is {given!r}; set it to 0 for silence, to 1 for a line, or not at all"
            )
        option = given == "1"
    if option is not None and not isinstance(option, bool):
        raise MeshError(f"progress is {option!r}; give True, False, or None for what suits the terminal")
    if option is False:
        return "silent"
    is_line = _is_terminal(sys.stderr) and (option is True or not _shows_records())
    return "line" if is_line else "records"


def _is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal on which a line can be drawn again; a notebook is none."""
    try:
        return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    except (AttributeError, ValueError):  # it is None under pythonw, or closed
        return False


def _shows_records() -> bool:
    """Return whether a handler prints log records of level `INFO` of this package on a terminal."""
    if not _LOG.isEnabledFor(logging.INFO):
        return False
    logger: logging.Logger | None = _LOG
    while logger is not None:
        for handler in logger.handlers:
            stream = getattr(handler, "stream", None) or getattr(
                getattr(handler, "console", None), "file", None
            )
            if handler.level <= logging.INFO and _is_terminal(stream):
                return True
        logger = logger.parent if logger.propagate else None
    return False


class Phase:
    """Something that takes a while: what it is, how far it is, and since when.

    Args:
        what: what is being done, such as `"compiling train_step"`.
        progress: shows the phase.
    """

    def __init__(self, what: str, progress: MeshProgress):
        self.what, self.detail = what, ""
        self.began_s = self._told_s = time.monotonic()
        self._progress = progress

    def update(self, detail: str, *, is_news: bool = False) -> None:
        """Say how far the phase is.

        Args:
            detail: such as `"3 of 8 executables"`.
            is_news: whether log records say this at once, and not only after `RECORD_EVERY_S`.
        """
        self.detail = detail
        now = time.monotonic()
        if is_news or now - self._told_s >= RECORD_EVERY_S:
            self._told_s = now
            self._progress.record(self.text)

    @property
    def text(self) -> str:
        """The text of what is being done, and of how far it is, in one line."""
        return visible(f"{self.what}: {self.detail}" if self.detail else self.what, keep="")

    @property
    def seconds(self) -> float:
        """For how long the phase has been going on."""
        return time.monotonic() - self.began_s


class Launch(Phase):
    """The start of a mesh's actors. The mesh goes on telling it what its actors do when it has ended."""

    has_ended = False

    def tell(self, text: str) -> None:
        """Say what has happened: a line of `Controller.start`."""
        if self.has_ended:
            self._progress.record(text)
        else:
            self.update(text, is_news=True)

    def note_ready(self, hosts: Iterable[str]) -> None:
        """Say that all actors are ready.

        Args:
            hosts: the host of each actor.
        """
        each = list(hosts)
        different = list(dict.fromkeys(each))
        count = f"{len(each)} actor{'s are' if len(each) != 1 else ' is'}"
        self.detail, self.has_ended = f"{count} ready on {listed(different, 4)}", True


_P = TypeVar("_P", bound=Phase)


class MeshProgress:
    """The teller of what one mesh is doing; all methods are called on the mesh's event loop.

    Args:
        mode: how it is told; see `choose_mode`.
    """

    def __init__(self, mode: Mode):
        self.mode: Mode = mode
        self._phases: list[Phase] = []
        self._live: Live | None = None

    @contextlib.contextmanager
    def phase(self, what: str, *, in_background: bool = False) -> Iterator[Phase]:
        """Return a context in which something is being done, and that may be left in any order with others.

        Args:
            what: what is being done, such as `"starting 2 actors"`.
            in_background: whether steps go on meanwhile, so that no line is drawn among what the user prints.

        Yields:
            The phase, which is told how far it is. When the context is left without an error, its `detail`
            is the result.
        """
        with self._ended(self.begin(what, in_background=in_background)) as phase:
            yield phase

    @contextlib.contextmanager
    def launch(self) -> Iterator[Launch]:
        """Return a context in which actors are started."""
        with self._ended(self._show(Launch("launching", self))) as phase:
            yield phase

    @contextlib.contextmanager
    def _ended(self, phase: _P) -> Iterator[_P]:
        try:
            yield phase
        except BaseException:  # also a cancellation: the phase has ended
            self.end(phase, is_done=False)
            raise
        self.end(phase)

    def begin(self, what: str, *, in_background: bool = False) -> Phase:
        """Begin a phase, which `end` has to end; see `phase`."""
        phase = Phase(what, self)
        self.record(phase.text)
        return phase if in_background else self._show(phase)

    def _show(self, phase: _P) -> _P:
        self._phases.append(phase)
        self._draw()
        return phase

    def end(self, phase: Phase, *, is_done: bool = True) -> None:
        """End a phase. A second call does nothing.

        Args:
            phase: the phase.
            is_done: whether it came to its end, so that this is told.
        """
        was_shown = phase in self._phases
        if was_shown:
            self._phases.remove(phase)
        if is_done:
            done = f"{phase.text}, in {phase.seconds:.1f} s"
            self.record(done)
            if was_shown and self._live is not None and phase.seconds >= LONG_S:
                self._live.console.print(Text(done, style="dim"), soft_wrap=True)
        if not self._phases:
            self._stop()

    def record(self, text: str) -> None:
        """Log a text, where progress is told by log records."""
        if self.mode == "records":
            _LOG.info("%s", text)

    def close(self) -> None:
        """End all phases, without telling that they are done, and leave the terminal as it was."""
        self._phases.clear()
        self._stop()

    def _draw(self) -> None:
        if self.mode != "line" or self._live is not None:
            return
        # What goes to a file must go there, and not to the terminal of the other stream.
        self._live = Live(
            _Line(self._phases),
            console=Console(stderr=True),
            refresh_per_second=5,
            transient=True,
            redirect_stdout=_is_terminal(sys.stdout),
        )
        try:
            self._live.start()
        except Exception:  # the terminal is gone; training goes on
            self._live, self.mode = None, "silent"
            return
        atexit.register(self._stop)  # else a program that ends meanwhile would leave no cursor

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            atexit.unregister(self._stop)
            with contextlib.suppress(Exception):  # as in `_draw`
                live.stop()


class _Line:
    """The line of the phase that began last, shortened to the width of the terminal."""

    def __init__(self, phases: list[Phase]):
        self._phases, self._spinner = phases, Spinner("dots")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        phases = tuple(self._phases)  # another thread draws than ends phases
        line = Text("", no_wrap=True, overflow="ellipsis")
        if phases:
            seconds, done = f"  {phases[-1].seconds:.0f} s", Text(phases[-1].text)
            frame = self._spinner.render(console.get_time())
            done.truncate(max(1, options.max_width - len(seconds) - 2), overflow="ellipsis")
            line = line.append_text(frame if isinstance(frame, Text) else Text("")).append(" ")
            line.append_text(done).append(seconds)
        yield line
