"""Show schedules, steps, plans and timelines as pictures: SVG, a page, or lines in a terminal.

This package knows drawings only. Each package with something to draw makes a `Drawing` of it.

    Drawing, Row, Cell    a picture as data (`drawing`)
    Drawable              gives an object that has a drawing `to_svg`, `to_html` and a picture in notebooks
    to_svg                SVG (`svg`); many cells become areas (`aggregate`)
    to_html               a page that loads nothing, with zoom (`html`, drawing.js, drawing.css)
    Curve                 values over steps, which `curves_to_svg` and `curves_to_html` draw (`curves`)
    History, Buckets      the values of a long run in bounded memory (`history`)
    to_html_table         facts as a table (`table`)
    to_terminal           lines of text (`terminal`)
    INKS                  the colour of each kind of cell (`palette`)
"""

from jaxpp_async.view.curves import Curve, curves_to_html, curves_to_svg
from jaxpp_async.view.drawable import Drawable
from jaxpp_async.view.drawing import Cell, CellKind, Drawing, Row, format_held, format_time
from jaxpp_async.view.html import page_mark, page_version, to_html
from jaxpp_async.view.palette import INKS
from jaxpp_async.view.svg import to_svg
from jaxpp_async.view.table import to_html_table
from jaxpp_async.view.terminal import to_terminal

__all__ = [
    "INKS",
    "Cell",
    "CellKind",
    "Curve",
    "Drawable",
    "Drawing",
    "Row",
    "curves_to_html",
    "curves_to_svg",
    "format_held",
    "format_time",
    "page_mark",
    "page_version",
    "to_html",
    "to_html_table",
    "to_svg",
    "to_terminal",
]
