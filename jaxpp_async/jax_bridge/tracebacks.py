"""Find the user's line that led to an equation or an error, and hide this package's frames from tracebacks.

Frames of this package are hidden if they do not help a user, together with the frames of JAX and of Python's
library that these frames called. Frames do not help in two cases:

- The error's message explains the error. Such an error has one of the types in `errors`, or it has one of
  Python's own types and is marked by `deliberate`.
- The user's own code raised the error while a step was traced, so the cause is in the user's frames.

In other cases, such as a bug of this package, the frames that the user's innermost frame called stay visible.
JAX's own switch, `JAX_TRACEBACK_FILTERING=off`, makes all frames visible. Hiding frames changes no message
and no cause of an error, leaves errors alone that the caller was already handling, and never raises an error
itself.
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
    """Return the file name of some code, with `..` resolved if the name is an absolute path.

    Any other name is returned unchanged: `<stdin>` for code that was typed in, `<string>` for generated code,
    or a relative path. If such a name were made absolute in the current folder, the code might seem to be in
    this package.
    """
    name = code.co_filename
    return os.path.abspath(name) if os.path.isabs(name) else name


def is_ours(name: str) -> bool:
    """Return whether a file, given by its absolute path, belongs to this package."""
    return name.startswith(_PACKAGE_DIR)


def is_of_importlib(name: str) -> bool:
    """Return whether a file belongs to Python's import system, part of which is built in and has no path."""
    return name.startswith(("<frozen importlib", _IMPORTLIB))


def is_of_library(name: str) -> bool:
    """Return whether a file belongs to Python's standard library, and not to a package installed below it."""
    return is_of_importlib(name) or (name.startswith(_LIBRARY) and not _is_of_package(name))


@functools.cache
def is_installed(name: str) -> bool:
    """Return whether a file came with Python or a package, or is a script that a package installed."""
    return name.startswith(("<frozen ", _SCRIPTS)) or is_of_library(name) or _is_of_package(name)


def _is_of_package(name: str) -> bool:
    return "site-packages" in name or "dist-packages" in name


def is_of_jax(name: str) -> bool:
    """Return whether a file, given by its absolute path, belongs to JAX."""
    return name.startswith(_JAX_DIR)


def source_line(eqn: Any) -> str:
    """Return `file:line` of the user's code that made an equation, or `"unknown line"`."""
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
    """Return `file:line` of the first frame in the user's own code, or of the first frame if there is none.

    The user's own code excludes installed packages, such as optax or flax, which call the user's functions.

    Args:
        frames: the frames, innermost first, each as a file name and a function that returns the line number.

    Returns:
        The text `file:line`, or `"unknown line"` if there are no frames.
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
    """Return the source location and name stack of an equation, as they appear in a lowered program's bytes.

    This is valid for programs that are lowered in the context of `jax_config.innermost_locations`.
    """
    traceback = eqn.source_info.traceback
    return *(() if traceback is None else _place_of(traceback)), str(eqn.source_info.name_stack)


@functools.lru_cache(maxsize=4096)
def _place_of(traceback: Any) -> tuple[Any, ...]:
    frame = next(source_info.user_frames(traceback), None)
    return (frame.file_name, frame.start_line, frame.start_column) if frame is not None else ()


def debug_names(jaxpr: Any) -> tuple[Any, ...]:
    """Return the names in a jaxpr's debug information: of its function, its arguments and its results."""
    info = jaxpr.debug_info
    return info.traced_for, info.func_src_info, info.arg_names, info.result_paths


class Origins:
    """A cache of which JAX transformations made an equation, with one entry per name stack."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bool, bool]] = {}  # by id() of the stack, which is kept alive

    def of(self, eqn: Any) -> tuple[bool, bool]:
        """Return which JAX transformations made an equation.

        Returns:
            Whether transposition (reverse-mode differentiation) made the equation, and whether it recomputes
            a value in the backward of a `jax.checkpoint`.
        """
        stack = eqn.source_info.name_stack.stack
        if (known := self._known.get(id(stack))) is None:
            transposed = any(type(e) is source_info.Transform and e.name == "transpose" for e in stack)
            recomputed = any("rematted_computation" in e.name for e in stack)
            known = self._known[id(stack)] = stack, transposed, recomputed
        return known[1], known[2]


def caller_line() -> str:
    """Return `file:line` of the innermost caller, on the current stack, that is in the user's own code.

    Frames of this package and of JAX are ignored. If no caller is in the user's own code, a frame of another
    installed package is used.
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
    """Return `file:line` of the innermost frame of an error's traceback that is in the user's own code.

    Frames of this package and of JAX are ignored. If no frame is in the user's own code, a frame of another
    installed package is used.
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
    """Mark an error as a user's mistake that the error's message explains, and return the error.

    The traceback of such an error is shortened. Write `raise deliberate(TypeError(...))`.
    """
    error.__dict__[_DELIBERATE] = True
    return error


@contextlib.contextmanager
def framework_hints() -> Iterator[None]:
    """Return a context for tracing a user's function, which adds a hint to a certain error of flax.

    If flax raises an error because the function uses an nnx object that was made outside the function, the
    error gets a note that says what the user should write instead.
    """
    try:
        yield
    except Exception as error:  # flax raises it as two types, and is not imported to name them
        # The context of a step encloses those of its loops, so the note may have been added already.
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
    """A context manager that shortens the tracebacks of errors raised in the body of a public function.

    The tracebacks of the causes that Python prints with an error are shortened too. If there is no error, the
    context costs next to nothing.
    """

    __slots__ = ("_handled",)

    def __enter__(self) -> None:
        # Python makes it the context of each error that is raised inside; its traceback is the caller's.
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
                # This bypasses the exception's own `__setattr__`, which raises in a frozen dataclass.
                BaseException.with_traceback(each, shown(each.__traceback__, says_all=says_all))


def shown(traceback: TracebackType | None, *, says_all: bool) -> TracebackType | None:
    """Return a copy of a traceback without the frames that do not help a user; None if no frame is left.

    Args:
        traceback: the traceback.
        says_all: whether the error's message explains the error, so that all frames of this package can be
            left out.
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
    """Return which frames of a traceback may be left out, and which is the innermost one of the user's code.

    Args:
        frames: the frames, outermost first.

    Returns:
        One bool per frame, True if the frame may be left out; and the index of the innermost frame in the
        user's code, or -1 if there is none.
    """
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
    """Return whether an error's message explains it, so that no frame of this package needs to be shown."""
    if isinstance(error, JaxppAsyncError) or _is_cancelled(error):
        return True
    # `object` bypasses a `__getattribute__` of the user's
    return _DELIBERATE in object.__getattribute__(error, "__dict__")


def _is_cancelled(error: BaseException) -> bool:
    """Return whether an error is asyncio's `CancelledError`, which is recognized by its name.

    In this way the module does not import asyncio; the package `markers`, which uses this module, works
    without asyncio.
    """
    return type(error).__name__ == "CancelledError"


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _chain(error: BaseException, handled: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and all errors that Python prints with it, as causes and contexts.

    Args:
        error: the error.
        handled: an error to leave out, with its causes, because the caller was already handling it; or None.
    """
    seen = {id(handled)} - {id(error)}  # it may be raised once more while it is handled
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__cause__, None if each.__suppress_context__ else each.__context__]
