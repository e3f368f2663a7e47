"""Make text from outside this package (paths, users' text, messages of exceptions) safe to print, to write
and to send.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any


def printable(text: str) -> str:
    """Return a text with characters that UTF-8 cannot encode replaced by escapes (lone surrogates, as in
    `"\\udcff"`).
    """
    return text.encode("utf-8", "backslashreplace").decode()


def visible(text: str, keep: str = "\n") -> str:
    """Return a text for a terminal: invisible characters, which could be its commands, are escaped as in
    Python's `repr`.

    Args:
        text: the text.
        keep: invisible characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def shown(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> str:
    """Return a path as text for a message: bytes that are not UTF-8 are escaped as `\\xff`, and invisible
    characters as in Python's `repr` (a newline as `\\n`).
    """
    name = os.fspath(path)
    try:
        text = os.fsencode(name).decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # it cannot be the name of a file, and the message will say so
        text = printable(name) if isinstance(name, str) else repr(name)
    return visible(text, keep="")


def shown_value(value: object, as_text: Callable[[Any], str] = repr) -> str:
    """Return a user's value as short text for a message, with invisible characters as in Python's `repr`.

    Args:
        value: the value. If it cannot be made into text, the name of its type stands for it.
        as_text: a function that makes the text.
    """
    try:
        text = printable(as_text(value))
    except Exception:  # the user's `__repr__` may raise anything
        text = f"<{type(value).__name__}>"
    text = visible(text, keep="")
    return text if len(text) <= 300 else f"{text[:300]}..."


class ErrorInWords(Exception):
    """An error that contains only the text of another error. An object that stores an error for later stores
    this copy instead of the original.

    The frames of the original error's traceback refer to arrays, and often to the object that stores the
    error. Such a reference cycle would keep the arrays in memory until a full garbage collection, and in an
    actor these hardly ever happen, because an actor creates few objects.

    Args:
        exception_type: the qualified name of the original error's type.
        message: the original error's text.
        printed: the whole error with its traceback, as Python prints it.
    """

    def __init__(self, exception_type: str, message: str, printed: str):
        super().__init__(exception_type, message, printed)
        self.exception_type, self.message, self.printed = exception_type, message, printed

    def __str__(self) -> str:
        return self.message


def in_words(error: BaseException) -> ErrorInWords:
    """Convert an error to its text, which can be stored without the error's frames; return an `ErrorInWords`
    unchanged.
    """
    if isinstance(error, ErrorInWords):
        return error
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    printed = "".join(traceback.format_exception(error))
    return ErrorInWords(printable(name), printable(str(error)), printable(printed))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if the message is empty."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def listed(names: Sequence[str], most: int) -> str:
    """Join names for a message: the first `most` of them, separated by commas, and then how many more there
    are.
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
