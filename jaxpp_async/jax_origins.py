"""jax_origins: which line of the user's code an equation or an error comes from, and what made an equation.

In: equations, jaxprs, errors. Out: `file:line` and names. No door to private JAX: it takes that from `jax_compat`.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

import jax

from jaxpp_async.jax_compat import source_info

_PACKAGE_DIR = os.path.dirname(os.path.abspath(__file__)) + os.sep
_JAX_DIR = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep


_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_SCRIPTS = sysconfig.get_path("scripts") + os.sep
_IMPORTLIB = os.path.dirname(os.path.abspath(importlib.__file__)) + os.sep


def path_of(code: CodeType) -> str:
    """The file of some code: an absolute path, but where the code is the user's and was typed in (`<stdin>`), made
    (`<string>`) or started by a relative path: those are of no folder here, whatever the current one is.
    """
    name = code.co_filename
    return os.path.abspath(name) if os.path.isabs(name) else name


def is_ours(name: str) -> bool:
    """Whether a file, by its absolute path, is this package's."""
    return name.startswith(_PACKAGE_DIR)


def is_of_importlib(name: str) -> bool:
    """Whether a file is of Python's machinery of imports, of which a part is built in."""
    return name.startswith(("<frozen importlib", _IMPORTLIB))


def is_of_library(name: str) -> bool:
    """Whether a file is Python's own. Installed packages lie below it, and are not."""
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
    """`file:line` of the user's code that made `eqn`, or `"unknown line"`."""
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
    """`file:line` of the first frame that is not of an installed package, such as optax or flax, which call what the
    user wrote; of the first at all if there is no other.

    Args:
        frames: innermost first, each a file and what finds the line.
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
    """What stands of `eqn`'s origin in a lowered program's bytes, under `innermost_locations`."""
    traceback = eqn.source_info.traceback
    return *(() if traceback is None else _place_of(traceback)), str(eqn.source_info.name_stack)


@functools.lru_cache(maxsize=4096)
def _place_of(traceback: Any) -> tuple[Any, ...]:
    frame = next(source_info.user_frames(traceback), None)
    return (frame.file_name, frame.start_line, frame.start_column) if frame is not None else ()


def debug_names(jaxpr: Any) -> tuple[Any, ...]:
    """The names that a jaxpr remembers of its function, its arguments and its results."""
    info = jaxpr.debug_info
    return info.traced_for, info.func_src_info, info.arg_names, info.result_paths


class Origins:
    """What made equations, found once for all that share a stack of names."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bool, bool]] = {}  # by id() of the stack, which is kept alive

    def of(self, eqn: Any) -> tuple[bool, bool]:
        """Whether JAX's transpose (reverse-mode differentiation) made an equation, and whether it is one that a
        checkpoint's backward computes again."""
        stack = eqn.source_info.name_stack.stack
        if (known := self._known.get(id(stack))) is None:
            transposed = any(type(e) is source_info.Transform and e.name == "transpose" for e in stack)
            recomputed = any("rematted_computation" in e.name for e in stack)
            known = self._known[id(stack)] = stack, transposed, recomputed
        return known[1], known[2]


def caller_line() -> str:
    """`file:line` of the innermost caller outside this package, JAX and, if there is one, installed packages."""

    def callers() -> Iterator[tuple[str, Callable[[], int]]]:
        frame = sys._getframe(2)
        while frame is not None:
            name = path_of(frame.f_code)
            if not (is_ours(name) or is_of_jax(name) or is_of_importlib(name)):
                yield name, lambda f=frame: f.f_lineno
            frame = frame.f_back

    return _innermost(callers())


def error_line(error: BaseException) -> str:
    """`file:line` of the innermost frame of an error's traceback outside this package, JAX and, if there is one,
    installed packages."""
    frames: list[tuple[str, Callable[[], int]]] = []
    entry = error.__traceback__
    while entry is not None:
        name = path_of(entry.tb_frame.f_code)
        if not (is_ours(name) or is_of_jax(name)):
            frames.append((name, lambda e=entry: e.tb_lineno))
        entry = entry.tb_next
    return _innermost(reversed(frames))
