"""The command `schedule`: draw a schedule, or compare several, in the terminal or as files."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from jaxpp_async.commands.output import UseError, errors_printed, say_written, terminal_width, wrap
from jaxpp_async.commands.schedule_text import parse_schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Draw a schedule, or compare several; no device is needed.",
)

Actors = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Default: as many as suit the schedule.")
]
Microbatches = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Default: twice the number of actors.")
]


@app.command()
def show(
    schedule: Annotated[str, typer.Argument(help="Such as 'ZeroBubbleH1(4)'.", show_default=False)],
    actors: Actors = None,
    microbatches: Microbatches = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the picture as SVG.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it as a page to zoom.")] = None,
) -> None:
    """Draw which actor runs which task, and when.

    A whole backward takes twice as long as any other task, since no times are known.

    \b
    Examples:
      jaxpp-async schedule show 'Std1F1B(4)'
      jaxpp-async schedule show 'ZeroBubbleV(8)' --actors 4 --microbatches 12 --svg zbv.svg
    """
    with errors_printed("schedule show"):
        from jaxpp_async.schedules import draw_schedule
        from jaxpp_async.view import to_html, to_svg, to_terminal

        drawing = draw_schedule(parse_schedule(schedule), microbatches, actors)
        console = Console(width=terminal_width())
        console.print(to_terminal(drawing, console.width, has_colours=console.color_system is not None))
        for path, text, what in ((svg, to_svg, "the picture"), (html, to_html, "a page to zoom into")):
            if path is not None:
                path.write_text(text(drawing), encoding="utf-8")
                say_written(path, what)


@app.command()
def compare(
    schedules: Annotated[
        list[str] | None,
        typer.Argument(help="Such as 'GPipe(4)' 'VHalf(8)'; default: all.", show_default=False),
    ] = None,
    actors: Annotated[int, typer.Option(metavar="N", min=1, help="The number of actors.")] = 4,
    microbatches: Microbatches = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare schedules: idle time, activations held, and arrays sent between actors.

    The model is the same for all, so that a stage is shorter where a schedule has more of them, and an
    activation as much smaller.

    \b
    Examples:
      jaxpp-async schedule compare --actors 8 --microbatches 64
      jaxpp-async schedule compare 'Std1F1B(4)' 'ZeroBubbleH1(4)' 'VMin(8)' --actors 4
    """
    from jaxpp_async.view.table import table_as_text

    with errors_printed("schedule compare"):
        from jaxpp_async.schedules.drawing import check_size

        if schedules:
            chosen = [parse_schedule(text) for text in schedules]
        else:
            from jaxpp_async.schedules import NAMED

            chosen = [kind(kind.stages_per_actor[0] * actors) for kind in NAMED]
        count = microbatches or 2 * actors
        for schedule in chosen:
            check_size(schedule, count)
        found = [_figures(schedule, count, actors) for schedule in chosen]
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column(f"{count} microbatches on {actors} actors", no_wrap=True)
    for name in ("bubble", "activations", "of 1F1B's", "sent"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in found:
        table.add_row(
            each["schedule"],
            f"{each['bubble']:z.1%}",
            f"{each['activations']:.2f}",
            f"{each['of_1f1b']:z.0%}",
            str(each["sent"]),
        )
    typer.echo(table_as_text(table, terminal_width()))
    notes = [
        note for name, note in _NOTES.items() if any(each["schedule"].startswith(name) for each in found)
    ]
    typer.echo(wrap("\n".join([_COLUMNS, *notes]), terminal_width()))


_COLUMNS = (
    "bubble: idle share of the actors; activations: the most that an actor holds, of microbatches, where one "
    "whole actor's share of the model counts 1; sent: arrays between actors, forward and back"
)

_NOTES = MappingProxyType(
    {
        "Eager1F1B(": (
            "Eager1F1B holds more than Std1F1B so that slow transfers are hidden; here they take no time"
        ),
        "ZeroBubbleH2(": (
            "ZeroBubbleH2 holds more than ZeroBubbleH1 so that its bubble vanishes where steps follow each "
            "other; here is one step. A value of all actors, such as a global norm, keeps the bubble"
        ),
    }
)
"""Why a schedule holds more than another one that idles as long, by the beginning of its text."""


def _figures(schedule: Any, num_microbatches: int, num_actors: int) -> dict[str, Any]:
    """Return the figures of one schedule, by name."""
    from jaxpp_async.schedules import Std1F1B, bubble_fraction, peak_activations, resolve, stage_actors
    from jaxpp_async.schedules.drawing import FORWARDS

    def tasks_of(schedule: Any) -> Sequence[Sequence[Any]]:
        return resolve(
            schedule,
            num_stages=schedule.num_stages,
            num_microbatches=num_microbatches,
            num_actors=num_actors,
        )

    if schedule.num_stages < num_actors:
        raise UseError(
            f"{schedule!r} has fewer stages than there are actors; give --actors {schedule.num_stages}"
        )
    rows = tasks_of(schedule)
    placed = stage_actors(rows)
    hops = sum(a != b for a, b in pairwise(placed))
    each = num_actors / schedule.num_stages
    held = max(peak_activations(rows)) * each
    return {
        "schedule": repr(schedule),
        "bubble": bubble_fraction(rows, FORWARDS),
        "activations": held,
        "of_1f1b": held / max(peak_activations(tasks_of(Std1F1B(num_actors)))),
        "sent": 2 * hops * num_microbatches,
    }
