"""The command `timeline`: show a step that `Timeline.write` saved, as tables or as a picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from jaxpp_async.commands.output import UseError, errors_printed, say_written, terminal_width, wrap

if TYPE_CHECKING:
    from jaxpp_async.timeline import Timeline


def timeline(
    file: Annotated[Path, typer.Argument(help="A file that timeline.write(path) made.", show_default=False)],
    step: Annotated[
        int | None, typer.Option(metavar="N", help="The number of the step; default: the last of the file.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the picture as SVG.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it as a page to zoom.")] = None,
) -> None:
    """Show where a step's time went: a picture, its tables, and advice.

    \b
    Examples:
      jaxpp-async timeline step.json
      jaxpp-async timeline step.json --html step.html
    """
    with errors_printed("timeline"):
        from jaxpp_async.view import to_terminal

        found = load_timeline(file, step)
        console = Console(width=terminal_width())
        drawing = replace(found.to_drawing(), advice=())  # which stands below the tables
        console.print(to_terminal(drawing, console.width, has_colours=console.color_system is not None))
        typer.echo("\n" + wrap(str(found), console.width))
        if svg is not None:
            found.to_svg(svg)
            say_written(svg)
        if html is not None:
            found.to_html(html)
            say_written(html, "a page to zoom into")


def load_timeline(file: Path, step: int | None) -> Timeline:
    """Return a step of a file that `Timeline.write` or `write_trace` has written.

    Args:
        file: the file.
        step: the number of the step; None: the last of the file.

    Raises:
        UseError: the file does not have the step.
        TimelineError: the file has no timelines, or those of another version, or it is damaged.
        OSError: the file cannot be read.
    """
    from jaxpp_async.timeline import load_timelines

    steps = {found.step: found for found in load_timelines(file)}
    if not steps:
        raise UseError(f"{file} has no steps")
    if step is not None and step not in steps:
        raise UseError(f"{file} has no step {step}; it has {', '.join(map(str, steps))}")
    return steps[max(steps) if step is None else step]
