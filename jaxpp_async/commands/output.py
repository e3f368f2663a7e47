"""Print what commands say: errors with their exit status, progress, and text that fits the terminal."""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import gc
import io
import os
import shutil
import signal
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import TextIO

import typer
from rich.console import Console
from rich.markup import escape

from jaxpp_async.base.printable import visible
from jaxpp_async.errors import JaxppAsyncError

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130
"""The exit statuses of a command that found no good answer, of one whose options or files are wrong, and of
one that Ctrl-C ended.
"""

ENDS = (SystemExit, typer.Exit, typer.Abort)
"""The errors by which a user's code ends Python, or the command, with an exit status of its own."""

LOG_INTERVAL_S = 10.0
"""The seconds between two lines of progress where the standard error stream is no terminal."""


class UseError(Exception):
    """The command line, or a file or module that it names, is wrong. The message says what to write instead.

    The cause, if there is one, is an error of the user's own code, whose traceback is printed as well.
    """


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error's first sentence, which names what is spelled nearly like `name`.

    Args:
        name: the name that was not found.
        known: all names that there are.
    """
    names = {each.lower(): each for each in known}
    close = [names[each] for each in difflib.get_close_matches(name.lower(), names, 3)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def print_error(command: str, message: str) -> None:
    """Print why a command ends, in red.

    Args:
        command: the name of the command.
        message: the reason.
    """
    text = visible(f"{command}: {message}")
    Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)


_RETRY_S = 0.05
"""The seconds after which a Ctrl-C is raised that came while the garbage collector ran."""


def is_importing_at(frame: FrameType | None) -> bool:
    """Return whether a module is being imported where a frame is."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


class Interrupt:
    """A context that notes Ctrl-C itself, because an exception of Python's own handler can be lost.

    Python ignores an exception that is raised while the garbage collector calls its callbacks, and JAX has
    such a callback, which runs often while a step is traced. Here the first Ctrl-C raises `KeyboardInterrupt`
    and is remembered for `check`; while the collector runs, it is raised a moment later. While a module is
    imported, it ends the process at once, because some modules abort Python if they are imported in part.
    The second one ends the process at once, too.

    Args:
        command: the name of the command.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._is_noted = self._is_raised = self._is_collecting = False

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if there was a Ctrl-C."""
        if self._is_noted:
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupt:
        self._before = None
        # Python runs handlers in the main thread alone, and a parent may have asked to ignore the signal.
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            gc.callbacks.insert(0, self._begin_callbacks)
            gc.callbacks.append(self._end_callbacks)
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            gc.callbacks.remove(self._begin_callbacks)
            gc.callbacks.remove(self._end_callbacks)

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_importing = is_importing_at(frame)
        if self._is_raised or is_importing:
            Console(stderr=True).show_cursor()  # a status line on a terminal has hidden the cursor
            if is_importing:
                print_error(self._command, "interrupted")
            os._exit(INTERRUPTED)
        self._is_noted = True
        own = (Interrupt._begin_callbacks.__code__, Interrupt._end_callbacks.__code__)
        if self._is_collecting or (frame is not None and frame.f_code in own):
            again = threading.Timer(_RETRY_S, self._repeat)
            again.daemon = True
            again.start()
            return
        self._is_raised = True
        raise KeyboardInterrupt

    def _repeat(self) -> None:
        if signal.getsignal(signal.SIGINT) == self._note and not self._is_raised:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _begin_callbacks(self, phase: str, info: dict[str, int]) -> None:
        self._is_collecting = True
        if gc.callbacks[-1] != self._end_callbacks:  # JAX was imported meanwhile, and has added its own
            gc.callbacks.remove(self._end_callbacks)
            gc.callbacks.append(self._end_callbacks)

    def _end_callbacks(self, phase: str, info: dict[str, int]) -> None:
        self._is_collecting = False


@contextlib.contextmanager
def errors_printed(command: str) -> Iterator[Interrupt]:
    """Return a context in which an error is printed and ends the command with its exit status.

    An error of this package needs no traceback. An error of the user's code gets one, of the user's frames.
    Ctrl-C is one line.

    Args:
        command: the name of the command.

    Yields:
        The `Interrupt` by which the command finds out that there was a Ctrl-C.
    """
    try:
        with Interrupt(command) as interrupt:
            yield interrupt
    except KeyboardInterrupt:
        print_error(command, "interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except UseError as error:
        if error.__cause__ is not None:
            _print_traceback(error.__cause__, says_all=True)
        print_error(command, str(error))
        raise typer.Exit(WRONG_USE) from None
    except JaxppAsyncError as error:
        print_error(command, str(error))
        raise typer.Exit(FAILED) from None
    except ENDS as error:
        if isinstance(error, typer.Exit) and error.exit_code:  # of this command itself
            raise
        _print_traceback(error, says_all=False)
        how = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else type(error).__name__
        print_error(command, f"the code of the step ends Python: {how}; a step has to return")
        raise typer.Exit(FAILED) from None
    except OSError as error:
        if error.filename is None:
            raise
        print_error(command, f"{error.filename}: {error.strerror}")
        raise typer.Exit(WRONG_USE) from None
    except typer.BadParameter:
        raise
    except Exception as error:  # of the user's code while it is traced, or a bug
        _print_traceback(error, says_all=False)
        raise typer.Exit(FAILED) from None


def _print_traceback(error: BaseException, *, says_all: bool) -> None:
    """Print an error with the frames of the user's code.

    Args:
        error: the error.
        says_all: whether frames of this package that the user's code has called are left out as well.
    """
    from jaxpp_async.jax_bridge.jax_config import hides_frames
    from jaxpp_async.jax_bridge.tracebacks import shown

    frames = shown(error.__traceback__, says_all=says_all)
    if hides_frames():
        frames = _without_jax_at_the_end(frames)
        if type(error.__cause__).__module__.startswith("jax."):  # it only says that frames were left out
            error.__cause__ = None
        if hasattr(error, "__notes__"):
            error.__notes__ = [note for note in error.__notes__ if "JAX_TRACEBACK_FILTERING" not in note]
    traceback.print_exception(type(error), error, frames, file=sys.stderr)


def _without_jax_at_the_end(frames: TracebackType | None) -> TracebackType | None:
    """Return a copy of a traceback without the frames of JAX below its last other frame.

    The traceback is kept as it is if all frames are JAX's.
    """
    from jaxpp_async.jax_bridge.tracebacks import is_of_jax, path_of

    entries = []
    while frames is not None:
        entries.append(frames)
        frames = frames.tb_next
    others = [k for k, entry in enumerate(entries) if not is_of_jax(path_of(entry.tb_frame.f_code))]
    rest: TracebackType | None = None
    for entry in reversed(entries[: others[-1] + 1] if others else entries):
        rest = TracebackType(rest, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rest


@contextlib.contextmanager
def progress(first: str, check: Callable[[], None] = lambda: None) -> Iterator[Callable[[str], None]]:
    """Show what a command is doing: on a terminal always, elsewhere as a line every ten seconds.

    Output of the user's code goes to the standard error stream meanwhile, so that the standard output has the
    command's result alone.

    Args:
        first: what the command does first.
        check: a function that is called whenever the command goes on, and at the end; an exception that it
            raises ends the command.

    Yields:
        A function that is told what the command does next.
    """
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        if console.is_terminal:
            status = stack.enter_context(console.status(escape(first)))
            show = lambda text: status.update(escape(text))  # noqa: E731
        else:
            show = stack.enter_context(_logged(first))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))

        def report(text: str) -> None:
            check()
            show(text)

        yield report
        check()


@contextlib.contextmanager
def result_stream() -> Iterator[TextIO | None]:
    """Give the command's result a stream of its own, so that the standard output has nothing else.

    A user's module may write to the standard output past Python's `sys.stdout`: by its descriptor, from a
    process that it starts, or at the end of this process. So from here on the descriptor is that of the
    standard error stream, also behind this context.

    Yields:
        The stream for the result, which is what the standard output was.
    """
    stdout = sys.stdout
    if stdout is not sys.__stdout__ or stdout is None:  # a test reads it, or it is closed
        yield stdout
        return
    stdout.flush()
    try:
        descriptor = stdout.fileno()
        # not 2, which is free if the standard error stream is closed, and to which libraries would write
        own = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    except (OSError, io.UnsupportedOperation):  # it is closed
        yield stdout
        return
    elsewhere = os.open(os.devnull, os.O_WRONLY) if sys.__stderr__ is None else sys.__stderr__.fileno()
    os.dup2(elsewhere, descriptor)
    stream = os.fdopen(own, "w", encoding=stdout.encoding, errors=stdout.errors)
    try:
        yield stream
    finally:
        with contextlib.suppress(OSError):  # of a reader that has gone, which was raised before
            stream.close()


@contextlib.contextmanager
def _logged(first: str) -> Iterator[Callable[[str], None]]:
    """Print every `LOG_INTERVAL_S` seconds on the standard error stream what a command is doing.

    Args:
        first: what the command does first.

    Yields:
        A function that is told what the command does next.
    """
    doing, begin_s, is_done, stream = [first], time.monotonic(), threading.Event(), sys.stderr

    def log() -> None:
        while not is_done.wait(LOG_INTERVAL_S):
            print(f"{time.monotonic() - begin_s:.0f} s: {doing[0]}", file=stream, flush=True)

    thread = threading.Thread(target=log, name="progress", daemon=True)
    thread.start()
    try:
        yield lambda text: doing.__setitem__(0, text)
    finally:
        is_done.set()
        thread.join()


def say_written(path: Path, what: str = "the picture") -> None:
    """Print which file a command has written, with a link that terminals and browsers open.

    Args:
        path: the file.
        what: what the file is.
    """
    typer.echo(f"{path} is {what}, {path.stat().st_size / 1e3:.0f} kB: {path.absolute().as_uri()}")


def terminal_width() -> int:
    """Return the characters of a line of the terminal; 110 if the output goes elsewhere."""
    return shutil.get_terminal_size((110, 24)).columns


def wrap(text: str, width: int) -> str:
    """Return a text in which lines that are longer than the width are broken between words.

    The rest of a line is indented by two more characters than its beginning.

    Args:
        text: the text.
        width: the number of characters of the longest line.
    """
    return "\n".join(_wrap_line(line, width) for line in text.split("\n"))


def _wrap_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False,
        drop_whitespace=True, replace_whitespace=False,
    )  # fmt: skip
