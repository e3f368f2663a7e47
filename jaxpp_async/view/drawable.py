"""Give an object that has a drawing its pictures: `to_svg`, `to_html` and the picture in a notebook."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jaxpp_async.view.drawing import Drawing
from jaxpp_async.view.html import to_html
from jaxpp_async.view.svg import to_svg


class Drawable:
    """A base class of objects that can be drawn. A subclass defines `to_drawing`."""

    __slots__ = ()

    def to_drawing(self, **options: Any) -> Drawing:
        """Return the object as a drawing.

        Args:
            options: what to draw, for objects that leave it open, such as `num_actors` of a schedule.
        """
        raise NotImplementedError

    def to_svg(self, path: str | os.PathLike[str] | None = None, **options: Any) -> str:
        """Return the object's picture as SVG, and write it to a file if a path is given.

        Args:
            path: the file to write. A file that exists is replaced.
            options: those of `to_drawing`.

        Raises:
            OSError: the file cannot be written.
        """
        return _written(to_svg(self.to_drawing(**options)), path)

    def to_html(self, path: str | os.PathLike[str] | None = None, **options: Any) -> str:
        """Return the object's picture as a page that loads nothing, to zoom into and to point at.

        Args:
            path: the file to write. A file that exists is replaced.
            options: those of `to_drawing`.

        Raises:
            OSError: the file cannot be written.
        """
        return _written(to_html(self.to_drawing(**options)), path)

    def _repr_html_(self) -> str:
        """Return the picture that a notebook shows."""
        return to_svg(self.to_drawing())


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
