"""Train a mixture of experts on real text: stages on actors, experts and data on the devices of each actor.

    python examples/moe/train.py          # two actor processes of two CPU devices each
    python examples/moe/train.py --jit    # the same step under plain jax.jit

Each layer sends a token to its best experts, up to each expert's capacity. A layer adds two losses of its
own to the model's: one that balances the experts, and one that keeps the router's logits small. The router
also has a state, a bias for each expert, which the step moves towards the experts that had too few tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxpp_async as jpp

VOCAB_SIZE = 256
BALANCE_WEIGHT, Z_WEIGHT, BIAS_RATE = 1e-2, 1e-3, 1e-3
MICROBATCHES, MICROBATCH_SIZE = 8, 4

NUM_ACTORS = 2
SPMD_MESH = {"expert": 2, "data": 1}
"""The devices of each actor."""

AXIS_RULES = {"batch": ("data", "expert"), "group": "data", "expert": "expert"}
"""Logical axis to mesh axes. Sequences are split over all devices of an actor. Tokens at the experts are
split by expert over one axis, and by sequence ("group") over the other; XLA exchanges them."""


@dataclass(frozen=True)
class Config:
    """Sizes of the model. An expert takes at most `capacity` times its even share of a sequence's tokens."""

    num_layers: int = 4
    dim: int = 64
    num_heads: int = 4
    num_experts: int = 4
    hidden: int = 128
    top_k: int = 2
    capacity: float = 1.25
    seq_len: int = 64


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))


# ---------------------------------------------------------------- model


def init(key: jax.Array, config: Config) -> dict[str, Any]:
    """The state before the first step: parameters, the routers' biases, the optimizer's state."""
    embed_key, head_key, *keys = jax.random.split(key, 2 + config.num_layers)
    dim, experts, hidden = config.dim, config.num_experts, config.hidden

    def normal(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape) * shape[-2] ** -0.5

    def layer(key: jax.Array) -> dict[str, jax.Array]:
        qkv, out, router, up, down = jax.random.split(key, 5)
        return {
            "qkv": normal(qkv, dim, 3 * dim),
            "out": normal(out, dim, dim),
            "router": normal(router, dim, experts),
            "up": normal(up, experts, dim, hidden),
            "down": normal(down, experts, hidden, dim),
        }

    params = {
        "embed": 0.02 * jax.random.normal(embed_key, (VOCAB_SIZE + config.seq_len, dim)),
        "layers": [layer(key) for key in keys],
        "head": normal(head_key, dim, VOCAB_SIZE),
    }
    bias = [jnp.zeros(experts) for _ in keys]
    return {"params": params, "bias": bias, "optimizer": OPTIMIZER.init(params)}


def loss_fn(params: Any, bias: Any, microbatch: Any, config: Config) -> tuple[jax.Array, Any]:
    """The loss of a microbatch, and the metrics of each layer's router."""
    tokens, labels = microbatch["tokens"], microbatch["labels"]  # (batch, seq)
    positions = jnp.arange(VOCAB_SIZE, VOCAB_SIZE + tokens.shape[1])
    x = params["embed"][tokens] + params["embed"][positions]
    routers = []
    for layer, layer_bias in zip(params["layers"], bias, strict=True):
        x = jpp.shard(x, ("batch", None, None))
        x = x + attention(layer, norm(x), config)
        y, router = experts(layer, layer_bias, norm(x), config)
        routers.append(router)
        x = jpp.pipeline_yield(x + y)
    losses = optax.softmax_cross_entropy_with_integer_labels(norm(x) @ params["head"], labels)
    balance, z = (sum(router[name] for router in routers) for name in ("balance", "z"))
    return losses.mean() + BALANCE_WEIGHT * balance + Z_WEIGHT * z, routers


def norm(x: jax.Array) -> jax.Array:
    """Root-mean-square norm over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attention(layer: Any, x: jax.Array, config: Config) -> jax.Array:
    """Causal attention, (batch, seq, dim) to the same."""
    qkv = (x @ layer["qkv"]).reshape(*x.shape[:2], 3, config.num_heads, -1)
    mixed = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
    return mixed.reshape(x.shape) @ layer["out"]


def experts(layer: Any, bias: jax.Array, x: jax.Array, config: Config) -> tuple[jax.Array, Any]:
    """Send each token to its `top_k` experts and add up what they make of it.

    The bias takes part in the choice of experts alone, not in their weights. The tokens of a sequence queue
    for each expert, first choices first; an expert drops the tokens past its capacity.

    Source: GShard (arXiv 2006.16668), ST-MoE (arXiv 2202.08906), and for the bias arXiv 2408.15664.

    Args:
        layer: the weights of the router and of its experts.
        bias: (experts,).
        x: (batch, seq, dim).
        config: the sizes.

    Returns:
        (batch, seq, dim); and a dictionary with the losses `balance` and `z`, with `counts`, how often each
        expert was chosen, (experts,), and with `dropped`, how many of these choices were dropped.
    """
    (batch, seq, _), num, top_k = x.shape, config.num_experts, config.top_k
    num_slots = int(config.capacity * top_k * seq / num)
    logits = x @ layer["router"]
    probs = jax.nn.softmax(logits)  # (batch, seq, experts)
    _, chosen = jax.lax.top_k(probs + jax.lax.stop_gradient(bias), top_k)
    picked = jax.nn.one_hot(chosen, num, dtype=jnp.int32)  # (batch, seq, top_k, experts)
    weights = (picked * probs[:, :, None]).sum(axis=-1)  # (batch, seq, top_k)
    weights = weights / weights.sum(axis=-1, keepdims=True)

    queue = picked.swapaxes(1, 2).reshape(batch, top_k * seq, num)
    place = (jnp.cumsum(queue, axis=1) * queue - 1).reshape(batch, top_k, seq, num).swapaxes(1, 2)
    slots = jax.nn.one_hot(place, num_slots)  # zeros where an expert is not chosen, or is full
    dispatch = slots.sum(axis=2)  # (batch, seq, experts, num_slots)
    combine = (slots * weights[..., None, None]).sum(axis=2)

    by_sequence, by_expert = (None, "batch"), ("expert", "group")
    sent = jpp.shard(jnp.einsum("bsec,bsd->ebcd", dispatch, x), by_sequence)
    sent = jpp.shard(sent, by_expert)  # from one to the other: an all-to-all
    hidden = jax.nn.gelu(jnp.einsum("ebcd,edh->ebch", sent, layer["up"]))
    made = jpp.shard(jnp.einsum("ebch,ehd->ebcd", hidden, layer["down"]), by_expert)
    y = jnp.einsum("bsec,ebcd->bsd", combine, jpp.shard(made, by_sequence))

    counts = picked.sum(axis=(0, 1, 2))
    share = counts / counts.sum()
    return y, {
        "balance": num * jnp.sum(share * probs.mean(axis=(0, 1))),
        "z": jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2),
        "counts": counts,
        "dropped": counts.sum() - jnp.sum(dispatch, dtype=jnp.int32),
    }


# ---------------------------------------------------------------- step


def make_train_step(config: Config, schedule: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return the step, (state, batch) to (new state, metrics), for a mesh or unchanged for `jax.jit`."""

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        def of_microbatch(microbatch: Any) -> tuple[Any, Any, Any]:
            value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
            (loss, routers), grads = value_and_grad(state["params"], state["bias"], microbatch, config)
            return grads, loss, routers

        reduce = (jpp.Mean(), jpp.Mean(), jpp.Sum())
        grads, loss, routers = jpp.accumulate_grads(of_microbatch, schedule, reduce=reduce)(batch)
        updates, optimizer = OPTIMIZER.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        bias = [
            b + BIAS_RATE * jnp.sign(router["counts"].mean() - router["counts"])
            for b, router in zip(state["bias"], routers, strict=True)
        ]
        metrics = {
            "loss": loss,
            "counts": [router["counts"] for router in routers],
            "dropped": sum(router["dropped"] for router in routers),
        }
        return {"params": params, "bias": bias, "optimizer": optimizer}, metrics

    return train_step


def batches(config: Config, num_batches: int) -> list[dict[str, np.ndarray]]:
    """Random windows of Python's own sources: int32, (microbatches, sequences, seq)."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)
    shape = num_batches, MICROBATCHES, MICROBATCH_SIZE, 1
    starts = np.random.default_rng(0).integers(len(text) - config.seq_len, size=shape)
    windows = text[starts + np.arange(config.seq_len + 1)].astype(np.int32)
    return [{"tokens": batch[..., :-1], "labels": batch[..., 1:]} for batch in windows]


# ---------------------------------------------------------------- training


def shardings(state: Any) -> Any:
    """Weights of experts, and the optimizer's moments of them, are split over experts; all else is whole."""
    return jax.tree.map(lambda leaf: P("expert") if leaf.ndim == 3 else P(), state)


async def train(
    mesh: jpp.RemoteMesh, config: Config, schedule: Any, data: list[Any]
) -> tuple[Any, list[Any]]:
    """Train on a mesh; return the state, which stays on the actors, and each step's metrics."""
    key, make_state = jax.random.key(0), partial(init, config=config)
    shapes, metrics = jax.eval_shape(make_state, key), []
    step = mesh.distributed(
        make_train_step(config, schedule),
        in_shardings=(shardings(shapes), P(None, ("data", "expert"))),
        donate_argnums=0,
    )
    print("compiling", flush=True)
    await step.compile(shapes, data[0])
    state = await step.init(0, make_state, key)  # Each leaf is made where the step keeps it.
    for batch in data:
        state, of_step = await mesh.run(step, state, batch)
        metrics.append(await mesh.fetch(of_step))
        show(metrics)
    return state, metrics


def train_with_jit(config: Config, schedule: Any, data: list[Any]) -> tuple[Any, list[Any]]:
    """The same under plain `jax.jit`."""
    step, metrics = jax.jit(make_train_step(config, schedule), donate_argnums=0), []
    print("compiling", flush=True)
    state = jax.jit(partial(init, config=config))(jax.random.key(0))
    for batch in data:
        state, of_step = step(state, batch)
        metrics.append(jax.device_get(of_step))
        show(metrics)
    return state, metrics


def show(metrics: list[Any]) -> None:
    """Print a line for every tenth step."""
    if len(metrics) % 10 == 1:
        counts = np.sum(metrics[-1]["counts"], axis=0)
        dropped = metrics[-1]["dropped"] / counts.sum()
        line = f"loss {metrics[-1]['loss']:.3f}  tokens of each expert {counts}  dropped {dropped:.1%}"
        print(f"step {len(metrics):3}  {line}", flush=True)


async def main(config: Config, schedule: Any, data: list[Any]) -> None:
    async with jpp.RemoteMesh(NUM_ACTORS, spmd_mesh=SPMD_MESH, axis_rules=AXIS_RULES) as mesh:
        await train(mesh, config, schedule, data)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=61, help="optimizer steps")
    parser.add_argument("--jit", action="store_true", help="plain jax.jit, without a mesh")
    options, sizes = parser.parse_args(), Config()
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: train at least one step")
    arguments = sizes, jpp.DualPipeV(2 * NUM_ACTORS, stages="balanced"), batches(sizes, options.steps)
    if options.jit:
        train_with_jit(*arguments)
    else:
        asyncio.run(main(*arguments))
