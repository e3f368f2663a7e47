"""Three small steps and the schedules they are compiled under. Linear layers and relu only: the residuals of
other functions differ between versions of JAX.

Run as a program it prints the digest of every text, for comparing processes.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))  # for runs outside pytest

from planning import f32, plan_step

import jaxpp_async as jpp
from jaxpp_async.compiler.pipeline import CompilePlan

SCHEDULES = {
    "gpipe": jpp.GPipe(2),
    "std1f1b": jpp.Std1F1B(2),
    "eager1f1b": jpp.Eager1F1B(2),
    "interleaved1f1b": jpp.Interleaved1F1B(4),
    "loopedbfs": jpp.LoopedBFS(4),
    "zerobubbleh1": jpp.ZeroBubbleH1(2),
    "zerobubblev": jpp.ZeroBubbleV(4),
}
"""On two actors. Four microbatches: with fewer, some of these are the same order."""

NUM_MICROBATCHES = 4

DETAILED = "std1f1b"
"""Under this one the passes before the last have their text kept as well."""


def _layers(weights, x):
    for w in weights[:-1]:
        x = jpp.pipeline_yield(jax.nn.relu(x @ w))
    return x @ weights[-1]


def _gradients(loss, weights, batch, schedule):
    def of_one(mb):
        value, grads = jax.value_and_grad(loss)(weights, mb)
        return grads, value

    return jpp.accumulate_grads(of_one, schedule)(batch)


def mlp(schedule) -> CompilePlan:
    """A weight a stage, SGD, the state donated."""

    def step(weights, batch):
        def loss(weights, mb):
            error = _layers(weights, mb["x"]) - mb["y"]
            return jnp.sum(jnp.square(error))

        grads, losses = _gradients(loss, weights, batch, schedule)
        return jax.tree.map(lambda w, g: w - 0.5 * g, weights, grads), losses

    batch = {"x": f32(NUM_MICROBATCHES, 2, 4), "y": f32(NUM_MICROBATCHES, 2, 4)}
    return plan_step(step, [f32(4, 4)] * schedule.num_stages, batch, donate=(0,))


def tied(schedule) -> CompilePlan:
    """The last stage uses the first one's weight again; momentum, a step count, the norm of all gradients."""

    def step(state, batch):
        def loss(weights, x):
            error = _layers(weights, x) @ weights[0].T - x
            return jnp.sum(jnp.square(error))

        grads, losses = _gradients(loss, state["weights"], batch, schedule)
        norm = sum(jnp.sum(g * g) for g in grads)
        momenta = [0.5 * m + g / norm for m, g in zip(state["momenta"], grads, strict=True)]
        weights = [w - m / state["count"] for w, m in zip(state["weights"], momenta, strict=True)]
        return {"weights": weights, "momenta": momenta, "count": state["count"] + 1}, losses, norm

    weights = [f32(4, 4)] * schedule.num_stages
    state = {"weights": weights, "momenta": weights, "count": f32()}
    return plan_step(step, state, f32(NUM_MICROBATCHES, 2, 4), donate=(0,))


def sharded(schedule) -> CompilePlan:
    """Data and tensor parallel inside each actor, by a constraint and a logical name; aux values; nothing
    donated."""

    def step(weights, batch):
        def loss(weights, x):
            x = jax.lax.with_sharding_constraint(x, P("data"))
            y = jpp.shard(_layers(weights, x), ("batch", "mlp"))
            return jnp.sum(jnp.square(y)), jnp.max(y)

        def of_one(x):
            (value, largest), grads = jax.value_and_grad(loss, has_aux=True)(weights, x)
            return grads, value, largest

        reduce = (jpp.Sum(), jpp.Mean(), jpp.Max())
        return jpp.accumulate_grads(of_one, schedule, reduce=reduce)(batch)

    return plan_step(
        step,
        [f32(4, 4)] * schedule.num_stages,
        f32(NUM_MICROBATCHES, 2, 4),
        spmd_mesh={"data": 2, "model": 2},
        axis_rules={"batch": "data", "mlp": "model"},
        in_shardings=(P(None, "model"), None),
    )


STEPS: dict[str, Callable[..., CompilePlan]] = {"mlp": mlp, "tied": tied, "sharded": sharded}


def text_of(step: str, schedule: str) -> str:
    """Every pass's text, under its name."""
    texts = dict(STEPS[step](SCHEDULES[schedule]).passes)
    if schedule != DETAILED:
        texts = {name: texts[name] for name in ("partition", "schedule", "place", "delete")}
    return "".join(f"---------------- {name}\n\n{text.strip()}\n\n" for name, text in texts.items())


ALL_NAMES = [(step, schedule) for step in STEPS for schedule in SCHEDULES]
"""(step, schedule) of every golden file."""


if __name__ == "__main__":
    for names in ALL_NAMES:
        print(*names, hashlib.sha256(text_of(*names).encode()).hexdigest())
