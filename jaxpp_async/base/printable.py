"""Make text from outside (paths, users' words, exceptions) acceptable to every stream, file and frame."""

from __future__ import annotations

import os


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
