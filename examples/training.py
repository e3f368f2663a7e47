"""training: what the small examples share: options, the loop over batches, the comparison with plain
`jax.jit`.

In: a `Program`, which an example builds for a schedule. Out: lines with the loss. Knows no model and no
    framework.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

import jaxpp_async as jpp
from gpt.data import Batch, DataError, load_corpus, train_batches
from gpt.steps import largest_relative_difference

VOCAB_SIZE = 256
MICROBATCH_SIZE, SEQ_LEN = 4, 64


@dataclass(frozen=True)
class Program:
    """A training program for one schedule. Both functions run on a mesh, or unchanged under `jax.jit`.

    Args:
        init: key to state, any pytree of arrays.
        train_step: (state, batch) to (new state, mean loss).
    """

    init: Callable[[jax.Array], Any]
    train_step: Callable[[Any, Batch], tuple[Any, jax.Array]]


class ScheduleName(StrEnum):
    """`--schedule`."""

    gpipe = "GPipe"
    std1f1b = "Std1F1B"
    eager1f1b = "Eager1F1B"
    zerobubbleh1 = "ZeroBubbleH1"
    zerobubbleh2 = "ZeroBubbleH2"
    interleaved1f1b = "Interleaved1F1B"
    loopedbfs = "LoopedBFS"
    zerobubblev = "ZeroBubbleV"
    dualpipev = "DualPipeV"
    vhalf = "VHalf"
    vmin = "VMin"


TWO_STAGES = frozenset(
    {
        ScheduleName.interleaved1f1b,
        ScheduleName.loopedbfs,
        ScheduleName.zerobubblev,
        ScheduleName.dualpipev,
        ScheduleName.vhalf,
        ScheduleName.vmin,
    }
)
"""Schedules that want two stages on each actor."""


class LauncherName(StrEnum):
    """`--launcher`: a process an actor, or all in this one."""

    local = "local"
    inline = "inline"


def main(make_program: Callable[[Any], Program]) -> None:
    """Train what `make_program(schedule)` builds, as the command line says."""

    def command(
        steps: Annotated[int, typer.Option(min=1, help="optimizer steps")] = 200,
        schedule: Annotated[ScheduleName, typer.Option(case_sensitive=False)] = ScheduleName.std1f1b,
        actors: Annotated[
            int,
            typer.Option(
                min=1, max=4, help=f"actors; {', '.join(sorted(TWO_STAGES))} have two stages on each"
            ),
        ] = 2,
        launcher: Annotated[
            LauncherName, typer.Option(help="local: a process an actor")
        ] = LauncherName.local,
        microbatches: Annotated[int, typer.Option(min=1, help="microbatches a step")] = 4,
        seed: Annotated[int, typer.Option(min=0, help="of parameters, dropout and batches")] = 0,
        data: Annotated[
            Path | None, typer.Option(help="text; default: the sources of Python's library")
        ] = None,
        verify: Annotated[
            int, typer.Option(min=0, help="compare the first VERIFY steps with plain jax.jit")
        ] = 0,
    ) -> None:
        if verify > steps:
            raise typer.BadParameter(f"--verify {verify} is more than --steps {steps}")
        try:
            text = load_corpus(data).train

            def batches():
                return train_batches(text, (microbatches, MICROBATCH_SIZE, SEQ_LEN), seed)

            batches()
        except DataError as error:
            raise typer.BadParameter(str(error)) from None
        num_stages = actors * (2 if schedule in TWO_STAGES else 1)
        program = make_program(getattr(jpp, schedule)(num_stages, stages="balanced"))
        key = jax.random.key(seed)

        async def on_a_mesh() -> tuple[list[float], Any]:
            async with jpp.RemoteMesh(actors, launcher=launcher) as mesh:
                return await train(mesh, program, key, islice(batches(), steps), verify)

        losses, state = asyncio.run(on_a_mesh())
        if verify:
            print_difference(program, key, islice(batches(), verify), losses, state)

    typer.run(command)


async def train(
    mesh: Any, program: Program, key: jax.Array, batches: Iterable[Batch], verify: int = 0
) -> tuple[list[float], Any]:
    """Train on a mesh, printing as it goes.

    Returns:
        The loss of each step, and the state after `verify` steps (None: not asked for).
    """
    losses, checked = [], None
    batches = iter(batches)
    first = next(batches)
    step = mesh.distributed(program.train_step, donate_argnums=0)
    await step.compile(jax.eval_shape(program.init, key), first)
    state = await step.init(0, program.init, key)  # Each leaf is made where the step keeps it.
    for batch in chain([first], batches):
        state, loss = await mesh.run(step, state, batch)
        losses.append(float(await loss))
        if len(losses) in (1, verify) or len(losses) % 10 == 0:
            print_loss(losses)
        if len(losses) == verify:
            checked = await mesh.fetch(state)
    if len(losses) not in (1, verify) and len(losses) % 10:  # else it has been shown
        print_loss(losses)
    return losses, checked


def print_loss(losses: list[float]) -> None:
    """Print the last step's."""
    print(f"step {len(losses):4}  loss {losses[-1]:.3f}", flush=True)


def print_difference(
    program: Program, key: jax.Array, batches: Iterable[Batch], losses: list[float], state: Any
) -> None:
    """Run the same steps under plain `jax.jit` and print the largest relative differences."""
    step, expected = jax.jit(program.train_step), jax.jit(program.init)(key)
    expected_losses = []
    for batch in batches:
        expected, loss = step(expected, batch)
        expected_losses.append(float(loss))
    of_loss = largest_relative_difference(losses[: len(expected_losses)], expected_losses)
    of_state = largest_relative_difference(_numbers(state), _numbers(expected))
    print(f"largest relative difference of loss: {of_loss:.1e}")
    print(f"largest relative difference of state: {of_state:.1e}")


def _numbers(state: Any) -> list[np.ndarray]:
    """The state's leaves; of a PRNG key, its data."""
    leaves = jax.tree.leaves(state)
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in leaves
    ]
