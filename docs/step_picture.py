"""Measure a step of four actors, and draw it: the picture at the top of the README, docs/images/step.svg. If
there is a Chromium, the run's page is photographed for docs/page.md.

Four processes train a small model with nine layers. The third stage has three of them and the others have
two, so that the picture has something to say. Four devices do not fit on a small machine, so each actor
computes and then waits until its task has lasted as long as a device of `RATE` takes (`device_model=`); the
order, transfers, waiting and bytes are those of the run.

Run it with `make pictures`.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxpp_async as jpp

ACTORS, LAYERS, WIDTH, ROWS, MICROBATCHES = 4, 9, 128, 256, 8
RATE = 8e8
"""The speed of the modelled device, in operations a second."""

PICTURE = Path(__file__).parent / "images" / "step.svg"
PAGE = PICTURE.with_name("page.png")


class Device:
    """A device on which each operation of a task takes the same time."""

    def task_s(self, work: Any) -> float:
        """Return the seconds that a task takes."""
        return work.flops / RATE


def loss_fn(params: Any, mb: Any) -> Any:
    """Return the loss of one microbatch; a stage may end behind each layer."""
    x = mb["x"]
    for k, w in enumerate(params):
        x = jnp.tanh(x @ w)
        if k + 1 < len(params):
            x = jpp.pipeline_yield(x)
    return jnp.mean((x - mb["y"]) ** 2)


def train_step(params: Any, batch: Any) -> Any:
    """Train for one step: gradients of all microbatches, then the update."""

    def gradients(mb: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, mb)
        return grads, loss

    grads, losses = jpp.accumulate_grads(gradients, jpp.Std1F1B(ACTORS, stages=[1, 3, 6]))(batch)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), jnp.mean(losses)


async def main() -> None:
    """Run some steps, and draw the last and the page."""
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    params = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys[1:]]
    batch = jax.random.normal(keys[0], (MICROBATCHES, ROWS, WIDTH))
    async with jpp.RemoteMesh(ACTORS, platform="cpu", device_model=Device()) as mesh:
        step = mesh.distributed(train_step, donate_argnums=0)
        params, batch = await mesh.put((params, {"x": batch, "y": jnp.tanh(batch)}))
        for number in range(30):
            params, loss = await mesh.run(step, params, batch)
            mesh.log(number, {"loss": await loss})
        timeline = mesh.last_step_timeline()
        with tempfile.TemporaryDirectory() as folder:
            mesh.write_page(Path(folder) / "run.html")
            photograph(Path(folder) / "run.html", PAGE)
    timeline.to_svg(PICTURE)
    print(timeline)
    for path in (PICTURE, PAGE):
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


def photograph(page: Path, picture: Path) -> None:
    """Write a picture of the upper part of a page, if there is a Chromium."""
    if (chromium := shutil.which("chromium")) is None:
        print(f"there is no chromium: {picture} stays as it is")
        return
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={page.parent}", "--window-size=1000,800", "--virtual-time-budget=3000"]
    subprocess.run(
        [*command, f"--screenshot={picture}", page.as_uri()], check=True, timeout=60, capture_output=True
    )


if __name__ == "__main__":
    asyncio.run(main())
