"""Put sections together as one HTML document: the live page, which asks for changes, or a file that does not.

The document loads nothing from elsewhere. A saved one has no script, so that it can be opened anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path

from jaxpp_async.page.sections import SECTIONS
from jaxpp_async.view.html import colours_css, page_mark
from jaxpp_async.view.palette import USES


def write_document(
    sections: Mapping[str, str], *, title: str, version: str, seen: int | None = None, run: str = ""
) -> str:
    """Return a document as text.

    Args:
        sections: the HTML of each section, by its id.
        title: the title of the page.
        version: the version of this package.
        seen: the number of the state that the sections show, for a live page, whose script asks for later
            ones; None for a file.
        run: what the script of a live page sends, so that a page of an earlier run is noticed.
    """
    shown = "\n".join(
        f'<section id="{section.id}"{_WIDE * section.is_wide}>{sections.get(section.id, "")}</section>'
        for section in SECTIONS
    )
    live = (
        ""
        if seen is None
        else f' data-seen="{seen}" data-version="{escape(version)}" data-run="{escape(run)}"'
    )
    script = "" if seen is None else f"<script>{_text('page.js')}</script>"
    return f"""<!doctype html>
<html lang="en"{live}>
<meta charset="utf-8">
{page_mark()}
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{escape(title)}</title>
<style>{colours_css()}{_uses_css()}{_ALARM}{_text("page.css")}</style>
<main>
{shown}
</main>
<footer>jaxpp-async {escape(version)}</footer>
<div id="connection" role="status" hidden></div>
{script}
</html>
"""


def _uses_css() -> str:
    """Return the colours of the uses of a run's time as CSS variables, for light and dark pages."""
    light, dark = (
        "".join(f"--use-{use}:{colours[side]};" for use, colours in USES.items()) for side in (0, 1)
    )
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


_WIDE = ' class="wide"'
_ALARM = ":root{--alarm:#a63a00}@media(prefers-color-scheme:dark){:root{--alarm:#ff9a5c}}\n"


@cache
def security_policy() -> str:
    """Return the page's `Content-Security-Policy`: only its own script runs, and nothing is loaded."""
    digest = hashlib.sha256(_text("page.js").encode()).digest()
    return (
        f"default-src 'none'; script-src 'sha256-{base64.b64encode(digest).decode()}'; "
        "style-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def save_document(path: str | os.PathLike[str], text: str) -> None:
    """Write a document to a file, in place of one that exists, so that a reader sees one of the two whole.

    Args:
        path: the file.
        text: the document.

    Raises:
        OSError: the file cannot be written. Nothing is left of it.
    """
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


@cache
def _text(name: str) -> str:
    return files("jaxpp_async.page").joinpath(name).read_text(encoding="utf-8")
