"""Make text from outside (paths, users' words, exceptions) acceptable to every stream, file and frame."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence


def printable(text: str) -> str:
    """Escape characters that UTF-8 cannot encode (lone surrogates, as in `"\\udcff"`)."""
    return text.encode("utf-8", "backslashreplace").decode()


def shown(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> str:
    """Escape a path for a message: bytes that are not UTF-8 as `\\xff`, invisible characters (a newline) as
    `\\n`.
    """
    name = os.fspath(path)
    try:
        text = os.fsencode(name).decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # it cannot be the name of a file, and the message will say so
        text = printable(name) if isinstance(name, str) else repr(name)
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class ErrorInWords(Exception):
    """The words of an error, for an object that keeps the error.

    An error has a traceback, whose frames hold the values they worked on: arrays, and often the object that
    keeps the error. Only the garbage collector frees such a cycle, and an actor makes so few objects that a
    full collection hardly ever comes.

    Args:
        exception_type: the qualified name of the error's type.
        message: the error's text.
        printed: the whole error with its traceback, as Python prints it.
    """

    def __init__(self, exception_type: str, message: str, printed: str):
        super().__init__(exception_type, message, printed)
        self.exception_type, self.message, self.printed = exception_type, message, printed

    def __str__(self) -> str:
        return self.message


def in_words(error: BaseException) -> ErrorInWords:
    """Put an error into words, to be kept without its frames; an `ErrorInWords` stays as it is."""
    if isinstance(error, ErrorInWords):
        return error
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    printed = "".join(traceback.format_exception(error))
    return ErrorInWords(printable(name), printable(str(error)), printable(printed))


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its type if the message is empty."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def listed(names: Sequence[str], most: int) -> str:
    """List names for a message: the first `most` of them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
