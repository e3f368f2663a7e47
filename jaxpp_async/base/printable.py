"""printable: text from outside (paths, a user's words, exceptions) as text that every stream, file and frame takes."""

from __future__ import annotations

import os
from collections.abc import Sequence


def printable(text: str) -> str:
    """Escape what UTF-8 has no bytes for (lone surrogates, as in `"\\udcff"`), and leave the rest as it is."""
    return text.encode("utf-8", "backslashreplace").decode()


def shown(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> str:
    """Escape a path for a message: bytes that are no UTF-8 as `\\xff`, what cannot be seen (a newline) as `\\n`."""
    name = os.fspath(path)
    try:
        text = os.fsencode(name).decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # no name of a file, which is what the message will say
        text = printable(name) if isinstance(name, str) else repr(name)
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its type if the message is empty."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def listed(names: Sequence[str], most: int) -> str:
    """List names for a message: the first `most` of them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
