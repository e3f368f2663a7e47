"""The command `demo`: train a small model on a pipeline of processes here, and show a step of it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from jaxpp_async.commands.output import errors_printed, progress, say_written, terminal_width

LAYERS, WIDTH, ROWS = 8, 256, 64

LATEST = 9
"""The steps of which the one with the median time is shown, so that a pause of this machine is not."""

SHOW = "jaxpp-async demo --html step.html writes a step as a page to zoom into; then "
"""The next step after a demo that wrote no page."""


def demo(
    actors: Annotated[int, typer.Option(metavar="N", min=1, max=LAYERS, help="The number of actors.")] = 2,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="The number of training steps.")] = 20,
    microbatches: Annotated[int, typer.Option(metavar="N", min=1, help="Microbatches of a step.")] = 8,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the step as a page.")] = None,
) -> None:
    """Train a small model on a pipeline of processes here, and show a step of it.

    Of the latest steps, the one with the median time is shown.

    \b
    Examples:
      jaxpp-async demo
      jaxpp-async demo --actors 4 --html step.html
    """
    with errors_printed("demo"):
        with progress("importing JAX") as report:
            summary, timeline = asyncio.run(_train(actors, steps, microbatches, report))
        from jaxpp_async.view import to_terminal

        typer.echo(summary)

        console = Console(width=terminal_width())
        console.print(
            to_terminal(timeline.to_drawing(), console.width, has_colours=console.color_system is not None)
        )
        typer.echo(
            "Processes of this machine share its cores, so that equal stages may take unequal times.\n"
        )
        if html is not None:
            timeline.to_html(html)
            say_written(html, "a page to zoom into")
        typer.echo(
            f"next: {'' if html is not None else SHOW}a step of your own, in forty lines of the README"
        )


async def _train(actors: int, steps: int, microbatches: int, report: Any) -> tuple[str, Any]:
    """Train, and return what became of it as text, and the timeline of a step; see `LATEST`."""
    import jax
    import jax.numpy as jnp

    import jaxpp_async as jpp

    def loss(params: Any, mb: Any) -> Any:
        x = mb["x"]
        for k, w in enumerate(params):
            x = jnp.tanh(x @ w)
            if k + 1 < len(params):
                x = jpp.pipeline_yield(x)  # a stage may end here
        return jnp.mean((x - mb["y"]) ** 2)

    def train_step(params: Any, batch: Any) -> Any:
        def gradients(mb: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, mb)
            return grads, value

        schedule = jpp.Std1F1B(actors, stages="balanced")
        grads, losses = jpp.accumulate_grads(gradients, schedule)(batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), jnp.mean(losses)

    def init(key: Any) -> Any:
        return [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in jax.random.split(key, LAYERS)]

    shape = (microbatches, ROWS, WIDTH)
    batch = {
        "x": jax.random.normal(jax.random.key(1), shape),
        "y": jnp.tanh(jax.random.normal(jax.random.key(2), shape)),
    }
    report(f"starting {actors} processes")
    async with jpp.RemoteMesh(actors, progress=False) as mesh:
        step = mesh.distributed(train_step, donate_argnums=0)
        report("compiling")
        params, value = await mesh.run(step, init(jax.random.key(0)), batch)
        first, began = float(await value), time.monotonic()
        timelines = deque([mesh.last_step_timeline()], maxlen=min(LATEST, max(1, steps - 1)))
        for number in range(1, steps):
            report(f"step {number} of {steps}")
            params, value = await mesh.run(step, params, batch)
            timelines.append(mesh.last_step_timeline())
        last, each_s = float(await value), (time.monotonic() - began) / max(1, steps - 1)
        where = ", ".join(f"actor {a.id} is pid {a.pid}" for a in mesh.actors)
        summary = (
            f"{steps} steps on {actors} actors ({where})\nloss {first:.4f} -> {last:.4f}, "
            f"{1e3 * each_s:.3g} ms a step after the first\n"
        )
        return summary, sorted(timelines, key=lambda found: found.duration_s)[len(timelines) // 2]
