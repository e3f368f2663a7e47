"""Every case of the suite equals plain `jax.jit` under every listed schedule; some on real actors too."""

from __future__ import annotations

import functools
import itertools
import os
from typing import Any

import jax
import pytest
from interpret import run_plan
from planning import plan_step

import jaxpp_async as jpp
from jaxpp_async.compiler.pipeline import CompilePlan
from jaxpp_async.testing import assert_close
from tests.torture import (  # noqa: F401  # importing them registers their cases
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
from tests.torture.registry import CASES, SCHEDULES, WIDTH, Case, Chosen, Pipe

# What plain JAX is compiled with. Strict: what crosses a stage as bfloat16 is rounded to it. And little
# optimized: compiling is what the suite costs.
OPTIONS = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}


@functools.cache
def plain(case: Case) -> Any:
    """What plain JAX computes. The schedule is nothing to it."""
    return jax.device_get(
        jax.jit(functools.partial(case.step, jpp.GPipe), compiler_options=OPTIONS)(*case.make_args())
    )


def runs(case: Case) -> list[tuple[Pipe, int]]:
    """Kinds of schedule and numbers of actors that the case is run with."""
    kinds = list(SCHEDULES.values())
    if os.environ.get("TORTURE") != "all":
        kinds = [*kinds[:2], kinds[2:][list(CASES).index(case.name) % len(kinds[2:])]]
    return [(kind, actors or min(case.stages, 4)) for kind, actors in kinds]


def params(cases: Any) -> list[Any]:
    """A case each; those that are known to be broken have to fail."""
    return [
        pytest.param(
            c, id=c.name, marks=[pytest.mark.xfail(strict=True, reason=c.broken)] if c.broken else []
        )
        for c in cases
    ]


# Where something of a weight's shape has to cross in the loop: Jacobians, a gradient a row, gradients that
# wait for those of other stages (also for a scalar of theirs: weights of 64 bytes are no more than that); and
# what test_structure.py knows as broken.
MAY_CROSS = {
    "jacobian_in_forward_mode",
    "jacobian_in_reverse_mode",
    "vmap_of_grad_gives_gradients_a_row",
    "gradients_of_different_stages_combined_in_the_loop",
    "gradients_clipped_in_the_loop",
    "tied_parts_of_one_array",
}


def weights_that_cross(done: CompilePlan) -> set[tuple[str, str]]:
    """The tasks between which a value of a weight's shape crosses, from one actor to another."""
    graph = done.placed.graph
    tasks = [n for n in graph.nodes if n.task is not None]
    maker = {v: n for n in tasks for v in n.outputs}
    return {
        (maker[v].label, n.label)
        for n in tasks
        for v in n.inputs
        if v in maker and maker[v].actor != n.actor and graph.values[v].aval.shape[-2:] == (WIDTH, WIDTH)
    }


@pytest.mark.filterwarnings("ignore:pipeline_yield outside accumulate_grads")
@pytest.mark.parametrize("case", params(CASES.values()))
def test_equals_jit(case):
    chosen, args = Chosen(), case.make_args()
    # The same function under every schedule and for plain JAX: it is traced once.
    step = jax.jit(functools.partial(case.step, chosen))
    expected = jax.device_get(step.lower(*args).compile(OPTIONS)(*args))
    for chosen.kind, actors in runs(case):
        done = plan_step(step, *args, actors=actors)
        assert_close(run_plan(done, *args), expected, rtol=case.rtol, atol=1e-6)
        assert not weights_that_cross(done) or case.name in MAY_CROSS


async def check_on_actors(mesh, case, kind):
    step = mesh.distributed(functools.partial(case.step, kind))
    found = await mesh.fetch(await mesh.run(step, *case.make_args()))
    assert_close(found, plain(case), rtol=case.rtol, atol=1e-6)


KINDS = itertools.cycle(kind for kind, _ in SCHEDULES.values())
ON_ACTORS = [pytest.param(c, next(KINDS), id=c.name) for c in CASES.values() if c.on == "inline"]
ACROSS_PROCESSES = [pytest.param(c, next(KINDS), id=c.name) for c in CASES.values() if c.on == "processes"]


@pytest.mark.filterwarnings("ignore:pipeline_yield outside accumulate_grads")
@pytest.mark.parametrize("case, kind", ON_ACTORS)
async def test_equals_jit_on_actors(remote_mesh, case, kind):
    await check_on_actors(await remote_mesh(2, launcher="inline"), case, kind)


@pytest.mark.parametrize("case, kind", ACROSS_PROCESSES)
async def test_equals_jit_across_processes(remote_mesh, case, kind):
    await check_on_actors(await remote_mesh(2), case, kind)
