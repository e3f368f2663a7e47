"""Show a drawing as one HTML file that loads nothing: zoom, move, and point at a cell to read what it is.

The file has the drawing's data as JSON, the style and the script, which draws on a canvas, so that a step of
a hundred thousand cells opens at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from jaxpp_async.view.drawing import Cell, CellKind, Drawing
from jaxpp_async.view.palette import CELL_TEXT, DARK, INKS, LIGHT, Paper

TICKS = 10_000_000
"""The number of units of time in which a page counts a drawing's length, so that times are whole numbers."""


PAGE_VERSION = 1
"""The version of the pages that this package writes."""

_MARK = re.compile(r'<meta name="generator" content="jaxpp_async page (\d+)">')


def page_mark() -> str:
    """Return the element in the head of a page by which `page_version` knows it as one of this package."""
    return f'<meta name="generator" content="jaxpp_async page {PAGE_VERSION}">'


def page_version(text: str) -> int | None:
    """Return the version of a page; None if this package did not write it.

    Args:
        text: the beginning of an HTML file.
    """
    found = _MARK.search(text)
    return int(found[1]) if found else None


def to_html(drawing: Drawing) -> str:
    """Return a drawing as the text of an HTML file.

    Args:
        drawing: the drawing.
    """
    keys = "".join(
        f'<span class="key"><span class="swatch{" striped" if INKS[kind].pattern else ""}" '
        f'style="background-color:var(--{_name(kind)})"></span>{kind}</span>'
        for kind in drawing.kinds
    )
    keys += "".join(f'<span class="key">{escape(note)}</span>' for note in drawing.notes)
    advice = "".join(f"<li>{escape(text)}</li>" for text in drawing.advice)
    # In a script element only "<" could end the data, so that it is written as an escape.
    data = json.dumps(_data(drawing), separators=(",", ":")).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
{page_mark()}
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(drawing.title)}</title>
<style>{colours_css()}{_text("drawing.css")}</style>
<h1>{escape(drawing.title)}</h1>
<div class="bar">{keys}<span class="buttons">
<button data-key="-" title="zoom out (-)">-</button><button data-key="+" title="zoom in (+)">+</button>
<button data-key="0" title="show all (0)">all</button></span></div>
<canvas id="drawing" tabindex="0" role="img" aria-label="{escape(drawing.title)}"></canvas>
<div id="tip" hidden></div>
<ul class="advice">{advice}</ul>
<script type="application/json" id="data">{data}</script>
<script>{_text("drawing.js")}</script>
</html>
"""


@cache
def _text(name: str) -> str:
    return files("jaxpp_async.view").joinpath(name).read_text(encoding="utf-8")


def _name(kind: CellKind) -> str:
    return kind.replace(" ", "-")


def colours_css() -> str:
    """Return the colours of a page as CSS variables, for light and dark pages."""

    def variables(paper: Paper, inks: dict[str, str]) -> str:
        named = {
            "background": paper.background,
            "text": paper.text,
            "faint": paper.faint,
            "lines": paper.lines,
            "memory": paper.memory,
            "cap": paper.cap,
            "cell-text": CELL_TEXT,
            **inks,
        }
        return ":root{" + ";".join(f"--{name}:{colour}" for name, colour in named.items()) + "}"

    light = variables(LIGHT, {_name(kind): ink.light for kind, ink in INKS.items()})
    dark = variables(DARK, {_name(kind): ink.dark for kind, ink in INKS.items()})
    return f"{light}@media(prefers-color-scheme:dark){{{dark}}}:root{{color-scheme:light dark}}\n"


def _data(drawing: Drawing) -> dict[str, Any]:
    """Return the drawing as the script reads it; times are whole numbers from 0 to `TICKS`."""
    kinds, end = list(drawing.kinds), drawing.end
    scale = TICKS / end if end > 0 else 0.0

    def columns(cells: Sequence[Cell]) -> dict[str, list[Any]]:
        return {
            "start": [round(cell.start * scale) for cell in cells],
            "end": [round(cell.end * scale) for cell in cells],
            "kind": [kinds.index(cell.kind) for cell in cells],
            "text": [cell.text for cell in cells],
            "title": [cell.title for cell in cells],
        }

    return {
        "unit": drawing.unit,
        "end": end,
        "ticks": TICKS,
        "held": drawing.held,
        "cap": drawing.cap,
        "top": drawing.memory_top,
        "kinds": kinds,
        "striped": [k for k, kind in enumerate(kinds) if INKS[kind].pattern],
        "rows": [
            {
                "name": row.name,
                "cells": columns(row.cells),
                "planned": columns(row.planned),
                "memory": [[round(at * scale), size] for at, size in row.memory],
            }
            for row in drawing.rows
        ],
    }
