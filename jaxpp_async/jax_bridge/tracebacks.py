"""Find the user's line behind an equation or an error, and hide this package's frames from tracebacks.

Hidden are the frames of this package, and those of JAX and Python's library that it called, where they do not
help a user: an error of `errors`, or one of Python's types that is marked as `deliberate`, explains itself in
its message; the user's own error, raised while a step is traced, has its cause in the user's frames. In other
cases, a bug of this package for one, the frames behind the user's last one stay. JAX's own switch shows
everything: `JAX_TRACEBACK_FILTERING=off`. No message or cause is changed, nor an error that the caller was
handling already, and hiding never raises itself.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any, Final, TypeVar

import jax

from jaxpp_async.base.install_hints import page
from jaxpp_async.errors import JaxppAsyncError
from jaxpp_async.jax_bridge import jax_config
from jaxpp_async.jax_bridge.private_api import source_info

_PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_JAX_DIR = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep

_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_SCRIPTS = sysconfig.get_path("scripts") + os.sep
_IMPORTLIB = os.path.dirname(os.path.abspath(importlib.__file__)) + os.sep


def path_of(code: CodeType) -> str:
    """Return the file of some code: an absolute path, except for code that the user typed in or made.

    The path stays as it is where the code was typed in (`<stdin>`), made (`<string>`) or started by a
    relative path: such code belongs to no folder here, whatever the current folder is.
    """
    name = code.co_filename
    return os.path.abspath(name) if os.path.isabs(name) else name


def is_ours(name: str) -> bool:
    """Whether a file, by its absolute path, is this package's."""
    return name.startswith(_PACKAGE_DIR)


def is_of_importlib(name: str) -> bool:
    """Whether a file belongs to Python's machinery of imports, of which a part is built in."""
    return name.startswith(("<frozen importlib", _IMPORTLIB))


def is_of_library(name: str) -> bool:
    """Whether a file is Python's own. Installed packages lie below its folder, and are not Python's own."""
    return is_of_importlib(name) or (name.startswith(_LIBRARY) and not _is_of_package(name))


@functools.cache
def is_installed(name: str) -> bool:
    """Whether a file came with Python or with a package, or is a script that a package installed."""
    return name.startswith(("<frozen ", _SCRIPTS)) or is_of_library(name) or _is_of_package(name)


def _is_of_package(name: str) -> bool:
    return "site-packages" in name or "dist-packages" in name


def is_of_jax(name: str) -> bool:
    """Whether a file, by its absolute path, is JAX's."""
    return name.startswith(_JAX_DIR)


def source_line(eqn: Any) -> str:
    """Return `file:line` of the user's code that made `eqn`, or `"unknown line"`."""
    traceback = eqn.source_info.traceback
    return "unknown line" if traceback is None else _line_of(traceback)


@functools.lru_cache(maxsize=4096)  # equations that come from one by differentiation share its traceback
def _line_of(traceback: Any) -> str:
    codes, instructions = traceback.raw_frames()
    return _innermost(
        (code.co_filename, lambda c=code, i=instruction: source_info.raw_frame_to_frame(c, i).start_line)
        for code, instruction in zip(codes, instructions, strict=True)
        if _is_user_file(code.co_filename)
    )


def _innermost(frames: Iterable[tuple[str, Callable[[], int]]]) -> str:
    """Return `file:line` of the first frame that is the user's, or of the first at all if none is.

    Frames of installed packages, such as optax or flax, which call what the user wrote, are not the user's.

    Args:
        frames: innermost first, each a file and a function that finds the line.
    """
    installed = None
    for name, line in frames:
        if not is_installed(name):
            return f"{name}:{line()}"
        installed = installed or f"{name}:{line()}"
    return installed or "unknown line"


@functools.cache
def _is_user_file(name: str) -> bool:
    return source_info.is_user_filename(name) and not is_ours(name)


def location(eqn: Any) -> tuple[Any, ...]:
    """Return the part of `eqn`'s origin that is in a lowered program's bytes, under `innermost_locations`."""
    traceback = eqn.source_info.traceback
    return *(() if traceback is None else _place_of(traceback)), str(eqn.source_info.name_stack)


@functools.lru_cache(maxsize=4096)
def _place_of(traceback: Any) -> tuple[Any, ...]:
    frame = next(source_info.user_frames(traceback), None)
    return (frame.file_name, frame.start_line, frame.start_column) if frame is not None else ()


def debug_names(jaxpr: Any) -> tuple[Any, ...]:
    """Return the names that a jaxpr remembers of its function, its arguments and its results."""
    info = jaxpr.debug_info
    return info.traced_for, info.func_src_info, info.arg_names, info.result_paths


class Origins:
    """The origins of equations, found once for all equations that share a stack of names."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bool, bool]] = {}  # by id() of the stack, which is kept alive

    def of(self, eqn: Any) -> tuple[bool, bool]:
        """Return how an equation was made.

        Returns:
            Whether JAX's transpose (reverse-mode differentiation) made it, and whether it is one that a
            checkpoint's backward computes again.
        """
        stack = eqn.source_info.name_stack.stack
        if (known := self._known.get(id(stack))) is None:
            transposed = any(type(e) is source_info.Transform and e.name == "transpose" for e in stack)
            recomputed = any("rematted_computation" in e.name for e in stack)
            known = self._known[id(stack)] = stack, transposed, recomputed
        return known[1], known[2]


def caller_line() -> str:
    """Return `file:line` of the innermost caller that is the user's.

    This package's and JAX's callers never are; one of an installed package is taken if there is no other.
    """

    def callers() -> Iterator[tuple[str, Callable[[], int]]]:
        frame = sys._getframe(2)
        while frame is not None:
            name = path_of(frame.f_code)
            if not (is_ours(name) or is_of_jax(name) or is_of_importlib(name)):
                yield name, lambda f=frame: f.f_lineno
            frame = frame.f_back

    return _innermost(callers())


def error_line(error: BaseException) -> str:
    """Return `file:line` of the innermost frame of an error's traceback that is the user's.

    Frames of this package and JAX never are; one of an installed package is taken if there is no other.
    """
    frames: list[tuple[str, Callable[[], int]]] = []
    for entry in _entries(error.__traceback__):
        name = path_of(entry.tb_frame.f_code)
        if not (is_ours(name) or is_of_jax(name)):
            frames.append((name, lambda e=entry: e.tb_lineno))
    return _innermost(reversed(frames))


# ---------------------------------------------------------------- tracebacks

_E = TypeVar("_E", bound=BaseException)

_DELIBERATE: Final = "_jaxpp_async_deliberate"


def deliberate(error: _E) -> _E:
    """Mark an error as a user's mistake that its message explains: `raise deliberate(TypeError(...))`."""
    error.__dict__[_DELIBERATE] = True
    return error


@contextlib.contextmanager
def framework_hints() -> Iterator[None]:
    """Around the tracing of a user's function: add to a framework's error a note with what to write here."""
    try:
        yield
    except Exception as error:  # flax is not imported for its types, and gives this two of them
        # in a loop, which is in a step
        hinted = any("copy=True" in note for note in getattr(error, "__notes__", ()))
        if "different trace level" in str(error) and not hinted:
            error.add_note(
                "A step, and the function that accumulate_grads runs, are traced by themselves: neither may "
                "change or differentiate an nnx object that was made outside. Write `graphdef, state = "
                "nnx.split(model)` there, and `model = nnx.merge(graphdef, state, copy=True)` in the "
                f"function: {page('models.md')}"
            )
        raise


class HiddenFrames:
    """A context around a public function's work, which shortens the traceback of every error that leaves it.

    The errors that are printed with it are shortened too. Where there is no error the context costs next to
    nothing.
    """

    __slots__ = ("_handled",)

    def __enter__(self) -> None:
        # Python chains it to each error that is raised in here, and its traceback belongs to the caller.
        self._handled = sys.exception()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        # Python goes on with the error's traceback as it is now, and adds nothing for the `with` itself.
        if (
            error is None
            or not (isinstance(error, Exception) or _is_cancelled(error))
            or not jax_config.hides_frames()
        ):
            return
        # An error raised here would take the place of the user's, and a user's exception may do anything when
        # it is looked at (properties, `__getattribute__`): a long traceback is the lesser evil.
        with contextlib.suppress(Exception):
            for each in _chain(error, self._handled):
                says_all = _says_all(each)
                # Past the exception's own `__setattr__`, which refuses where it is a frozen dataclass.
                BaseException.with_traceback(each, shown(each.__traceback__, says_all=says_all))


def shown(traceback: TracebackType | None, *, says_all: bool) -> TracebackType | None:
    """Return the part of a traceback that a user sees.

    Args:
        says_all: the error's message explains everything, so that none of this package's frames is needed.
    """
    entries = list(_entries(traceback))
    hidden, last_of_user = _hidden([entry.tb_frame for entry in entries])
    rest: TracebackType | None = None
    for k in range(len(entries) - 1, -1, -1):
        if not hidden[k] or (k > last_of_user and not says_all):
            entry = entries[k]
            rest = TracebackType(rest, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rest


def _hidden(frames: list[FrameType]) -> tuple[list[bool], int]:
    """Return for each frame whether it may be left out, and the index of the user's last frame (-1: none)."""
    hidden: list[bool] = []
    last_of_user = -1
    for k, frame in enumerate(frames):
        name = path_of(frame.f_code)
        ours, helps = is_ours(name), is_of_jax(name) or is_of_library(name)
        hidden.append(ours or (helps and bool(hidden) and hidden[-1]))
        if not ours and not helps:
            last_of_user = k
    return hidden, last_of_user


def _says_all(error: BaseException) -> bool:
    """Whether an error can be understood without this package's frames."""
    if isinstance(error, JaxppAsyncError) or _is_cancelled(error):
        return True
    # past a `__getattribute__` of the user's
    return _DELIBERATE in object.__getattribute__(error, "__dict__")


def _is_cancelled(error: BaseException) -> bool:
    """Whether an error is asyncio's `CancelledError`; by name, since `markers` does without asyncio."""
    return type(error).__name__ == "CancelledError"


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _chain(error: BaseException, handled: BaseException | None) -> Iterator[BaseException]:
    """Iterate over an error and all that are printed with it, up to the one that was being handled before."""
    seen = {id(handled)} - {id(error)}  # it may be raised once more while it is handled
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__cause__, None if each.__suppress_context__ else each.__context__]
