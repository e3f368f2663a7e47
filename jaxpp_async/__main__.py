"""Run the command line: `python -m jaxpp_async`."""

from jaxpp_async.cli import app

app(prog_name="python -m jaxpp_async")
