"""Every case of the suite equals plain `jax.jit`, under every schedule of the list; some on real actors too."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from interpret import run_plan
from planning import plan_step

from jaxpp_async.testing import assert_close
from torture import (  # noqa: F401  # importing them registers their cases
    checkpoints,
    control_flow,
    dtypes,
    graphs,
    loops,
    placing_markers,
    randomness,
    recipes,
    results,
    transforms,
    weights,
)
from torture.registry import CASES, SCHEDULES, Case, Pipe


@functools.cache
def expected(case: Case) -> Any:
    """What plain JAX computes. The schedule is nothing to it."""
    kind, _ = SCHEDULES["GPipe"]
    # Strict: what crosses a stage as bfloat16 is rounded to it. Little optimized: compiling is what costs.
    options = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}
    plain = jax.jit(functools.partial(case.step, kind), compiler_options=options)
    return jax.device_get(plain(*case.make_args()))


def runs(case: Case) -> Iterator[tuple[Pipe, int]]:
    """Kinds of schedule and numbers of actors that the case is run with."""
    for kind, actors in SCHEDULES.values():
        yield kind, actors or min(case.stages, 4)


def params(cases: Any) -> list[Any]:
    """A case each; those that are known to be broken have to fail."""
    return [
        pytest.param(c, id=c.name, marks=[pytest.mark.xfail(strict=True, reason=c.broken)] if c.broken else [])
        for c in cases
    ]


@pytest.mark.parametrize("case", params(CASES.values()))
def test_equals_jit(case):
    for kind, actors in runs(case):
        done = plan_step(functools.partial(case.step, kind), *case.make_args(), actors=actors)
        assert_close(run_plan(done, *case.make_args()), expected(case), rtol=case.rtol, atol=1e-6)


async def check_on_actors(mesh, case, kind):
    step = mesh.distributed(functools.partial(case.step, kind))
    found = await mesh.fetch(await mesh.run(step, *case.make_args()))
    assert_close(found, expected(case), rtol=case.rtol, atol=1e-6)


KINDS = itertools.cycle(kind for kind, _ in SCHEDULES.values())
ON_ACTORS = [pytest.param(c, next(KINDS), id=c.name) for c in CASES.values() if c.on and not c.broken]
ACROSS_PROCESSES = [pytest.param(c, next(KINDS), id=c.name) for c in CASES.values() if c.on == "processes"]


@pytest.mark.parametrize("case, kind", ON_ACTORS)
async def test_equals_jit_on_actors(remote_mesh, case, kind):
    await check_on_actors(await remote_mesh(2, launcher="inline"), case, kind)


@pytest.mark.parametrize("case, kind", ACROSS_PROCESSES)
async def test_equals_jit_across_processes(remote_mesh, case, kind):
    await check_on_actors(await remote_mesh(2), case, kind)
