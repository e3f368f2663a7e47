"""Random training steps compute what plain JAX computes, and nothing inside the compiler fails.

`make fuzz` draws more of them, and others each time; continuous integration has it draw 500.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import pytest
from checking import run_source
from hypothesis import HealthCheck, Phase, given, settings
from programs import programs

from jaxpp_async.testing import assert_close

NUM_PLANNED, NUM_ON_ACTORS = 60, 6

STEADY = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


def test_planned_steps():
    done: set[str] = set()

    # Hypothesis draws a program again now and then, and tries one again while it shrinks it.
    @settings(STEADY, max_examples=NUM_PLANNED * 3 // 2)
    @given(program=programs())
    def search(program):
        if program.source not in done and len(done) < NUM_PLANNED:
            run_source(program.source)
            done.add(program.source)

    search()
    assert len(done) == NUM_PLANNED


@functools.cache
def drawn_programs() -> list[str]:
    """Sources of a few of them."""
    found: list[str] = []

    @settings(STEADY, max_examples=NUM_ON_ACTORS, phases=[Phase.generate])
    @given(program=programs(largest=2))
    def draw(program):
        found.append(program.source)

    draw()
    return found


@pytest.mark.parametrize("number", range(NUM_ON_ACTORS))
async def test_steps_on_actors(remote_mesh, number):
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    run_source(drawn_programs()[number], lambda step, *args, **options: calls.append((step, args, options)))
    ((fn, args, options),) = calls
    mesh = await remote_mesh(options["actors"], launcher="inline")
    expected = jax.jit(fn, compiler_options={"xla_allow_excess_precision": False})(*args)
    step = mesh.distributed(fn, donate_argnums=options["donate"])
    got = await mesh.fetch(await mesh.run(step, *args))
    assert_close(got, expected, rtol=options["rtol"], atol=options["atol"])
    compiled = await step.compile(*args)
    assert all(str(text) for text in (compiled.report(), compiled.as_text(), *compiled.passes.values()))
