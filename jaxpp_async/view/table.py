"""Write tables: small ones as HTML, for objects that a notebook shows as facts, and those of rich as text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from html import escape

from rich.console import Console
from rich.table import Table


def table_as_text(table: Table, width: int) -> str:
    """Return a table of rich as plain text, the same in terminals, notebooks and files.

    Args:
        table: the table.
        width: the number of characters of the longest line.
    """
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_jupyter=False, color_system=None, highlight=False, markup=False
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().split("\n"))


def to_html_table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as HTML, which takes its colours from the page around it.

    Args:
        title: the line above the table.
        header: the names of the columns; none: the rows have no header.
        rows: the rows, each with one value for each column.
    """
    style = 'style="text-align:left;padding:.2em .8em .2em 0"'
    head = "".join(f"<th {style}>{escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td {style}>{escape(str(value))}</td>" for value in row) + "</tr>" for row in rows
    )
    return (
        f"<div><b>{escape(title)}</b><table>"
        + (f"<thead><tr>{head}</tr></thead>" if header else "")
        + f"<tbody>{body}</tbody></table></div>"
    )
