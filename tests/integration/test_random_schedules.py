"""Random valid schedules of a real step, from the user's list of tasks to the last send.

Nothing deadlocks, whatever takes how long, and the numbers stay those of plain JAX.
"""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import pytest
from faulty_network import FaultyNetwork
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import f32, plan_step

import jaxpp_async as jpp
from jaxpp_async.launch.inline import InlineLauncher
from jaxpp_async.program.buffer_table import peak_plan
from jaxpp_async.program.instructions import Task
from jaxpp_async.schedules import dependencies
from jaxpp_async.testing import assert_close
from jaxpp_async.transport.memory import MemoryTransport
from tests.actors.test_execution_plan import Step
from tests.schedules.test_schedule_properties import schedules

WIDTH, ROWS = 4, 2


def loss_fn(weights, mb):
    x = skip = mb["x"]
    for stage, w in enumerate(weights):
        if stage:
            x = jpp.pipeline_yield(x)
        x = jnp.tanh(x @ w)
    return jnp.mean((x + skip - mb["y"]) ** 2)


def train_step(weights, batch):
    def grads_of(mb):
        loss, grads = jax.value_and_grad(loss_fn)(weights, mb)
        return grads, loss

    grads, losses = jpp.accumulate_grads(grads_of, jpp.GPipe(len(weights)))(batch)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads))
    return [w - 0.1 * g / norm for w, g in zip(weights, grads, strict=True)], losses


@settings(max_examples=40, deadline=None)
@given(drawn=schedules(), seed=st.integers(0, 1 << 16))
def test_programs_of_random_schedules_end_in_any_order_of_events(drawn, seed):
    rows, sizes = drawn
    weights = [f32(WIDTH, WIDTH)] * sizes["num_stages"]
    batch = {name: f32(sizes["num_microbatches"], ROWS, WIDTH) for name in "xy"}
    planned = plan_step(train_step, weights, batch, actors=sizes["num_actors"], schedule=rows)
    assert Step(planned.programs, seed).measure() == [peak_plan(p).peak_bytes for p in planned.programs]


def draw_schedule(
    num_stages: int, num_microbatches: int, num_actors: int, rng: random.Random
) -> list[list[Task]]:
    """A random order of all tasks along their dependencies, each stage on a random actor; some backwards are
    split."""
    places = [rng.randrange(num_actors) for _ in range(num_stages)]
    pairs = [(s, i) for s in range(num_stages) for i in range(num_microbatches)]
    split = {pair for pair in pairs if rng.random() < 0.4}
    backwards = {pair: ("bwd_input", "bwd_weight") if pair in split else ("bwd",) for pair in pairs}
    left = [Task(i, ty, s) for s, i in pairs for ty in ("fwd", *backwards[s, i])]
    rows: list[list[Task]] = [[] for _ in range(num_actors)]
    done: set[Task] = set()
    while left:
        task = rng.choice([t for t in left if done.issuperset(dependencies(t, num_stages, split))])
        left.remove(task)
        done.add(task)
        rows[places[task.stage]].append(task)
    return rows


class SlowLauncher(InlineLauncher):
    """Inline actors whose transfers take random times."""

    def __init__(self, rng: random.Random):
        network = FaultyNetwork(delay=lambda *_: rng.choice([0.0, 0.0, 0.001, 0.004]))
        super().__init__(make_transport=lambda kind, peer: MemoryTransport(network, peer))


@pytest.mark.parametrize("seed", range(3))
async def test_random_schedules_with_random_delays_equal_jit(seed):
    rng = random.Random(seed)
    keys = jax.random.split(jax.random.key(seed), 6)
    weights = [jax.random.normal(k, (WIDTH, WIDTH)) for k in keys[:4]]
    batch = {
        "x": jax.random.normal(keys[4], (3, ROWS, WIDTH)),
        "y": jax.random.normal(keys[5], (3, ROWS, WIDTH)),
    }
    expected = jax.jit(train_step)(weights, batch)
    async with jpp.RemoteMesh(3, launcher=SlowLauncher(rng)) as mesh:
        step = mesh.distributed(train_step)
        split = jpp.ZeroBubbleH1(4), jpp.ZeroBubbleH2(4), jpp.ZeroBubbleV(4), jpp.DualPipeV(4)
        capped = jpp.VHalf(4), jpp.VMin(4), jpp.ControllableMemory(4, activations=1)
        for schedule in (*(draw_schedule(4, 3, 3, rng) for _ in range(4)), *split, *capped):
            result = await mesh.run(step.with_schedule(schedule), weights, batch)
            assert_close(await mesh.fetch(result), expected)
