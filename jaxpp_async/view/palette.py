"""Give each kind of cell its colour, on a light and on a dark background.

The same kind has the same colour in every drawing, page and terminal. The colours of kinds are those of Okabe
and Ito, which people with any of the three kinds of colour blindness can tell apart. Kinds that mean trouble
or idle time have a pattern as well.

Source: Masataka Okabe and Kei Ito, Color Universal Design, 2008: the eight colours.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from jaxpp_async.view.drawing import CellKind


@dataclass(frozen=True, slots=True)
class Ink:
    """How a kind of cell looks.

    Args:
        light, dark: the colour on a light and on a dark background, such as `"#56b4e9"`.
        letter: the letter of the kind where there are no colours.
        pattern: `"stripes"` if lines are drawn over the colour, else `""`.
    """

    light: str
    dark: str
    letter: str
    pattern: str = ""


INKS = MappingProxyType[CellKind, Ink](
    {
        "forward": Ink("#56b4e9", "#56b4e9", "F"),
        "backward": Ink("#e69f00", "#e69f00", "B"),
        "input gradient": Ink("#f0e442", "#f0e442", "I"),
        "weight gradient": Ink("#009e73", "#009e73", "W"),
        "update": Ink("#cc79a7", "#cc79a7", "U"),
        "transfer": Ink("#5a6270", "#5a6270", "t"),
        "waiting": Ink("#e4e7ec", "#343b46", ".", "stripes"),
        "failure": Ink("#d55e00", "#d55e00", "X", "stripes"),
    }
)
"""The colour and the letter of each kind."""


USES = MappingProxyType[str, tuple[str, str]](
    {
        "steps": ("#12327a", "#4b6ff0"),
        "start": ("#8fd694", "#a6f0a0"),
        "compile": ("#b98ae8", "#c9a0f5"),
        "restarts": (INKS["failure"].light, INKS["failure"].dark),
        "between": ("#7a4a3a", "#96604a"),
    }
)
"""The colour of each use of a run's time, on a light and on a dark background.

None is that of a kind of cell, except that restarts have the colour of failures.
"""


@dataclass(frozen=True, slots=True)
class Paper:
    """The colours of everything in a drawing that is no cell.

    Args:
        background: behind the drawing.
        text: words and numbers.
        faint: less important words, and the axis.
        lines: the lines of the grid.
        memory: the area of the bytes held.
        cap: the line of the most bytes that are allowed.
        curve: the line of values over steps.
    """

    background: str
    text: str
    faint: str
    lines: str
    memory: str
    cap: str
    curve: str


LIGHT = Paper("#ffffff", "#1b1f24", "#5f6875", "#e3e6ea", "#b9c2cf", "#d55e00", "#0072b2")
DARK = Paper("#15181d", "#e8eaed", "#9aa4b2", "#2b313a", "#55606f", "#ff7a1a", "#56b4e9")
CELL_TEXT = "#10141a"
"""The colour of text on cells, on both backgrounds."""
