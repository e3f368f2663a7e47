"""Define the commands of `jaxpp-async`, which print text or JSON and end with an exit status."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxpp_async import __version__
from jaxpp_async.commands.checkpoint import app as checkpoint
from jaxpp_async.commands.demo import demo
from jaxpp_async.commands.doctor import doctor
from jaxpp_async.commands.page import page
from jaxpp_async.commands.plan import plan
from jaxpp_async.commands.schedule import app as schedule
from jaxpp_async.commands.simulate import simulate
from jaxpp_async.commands.timeline import timeline

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)
for command in (demo, doctor, page, plan, simulate, timeline):
    app.command()(command)
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(schedule, name="schedule")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"jaxpp-async {__version__}")
        raise typer.Exit


@app.callback(help="jaxpp_async: pipelines of JAX models over async actors.")
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Offer the commands of jaxpp-async, which trains pipelined JAX models over async actors."""
