"""Train a Llama with plain `jax.jit`. `train.py` is the same script as a pipeline.

python examples/llama/plain.py --help
"""

from __future__ import annotations

import argparse
import sysconfig
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from orbax import checkpoint as ocp

# ---------------------------------------------------------------- the model


@dataclass(frozen=True)
class Config:
    """The sizes of a model. Parameters and optimizer state are float32, activations are `dtype`."""

    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int
    vocab_size: int
    seq_len: int
    rope_theta: float = 500_000.0
    dtype: Any = jnp.bfloat16


SIZES = {
    "tiny": Config(4, 64, 4, 2, 192, 256, 64),
    "1b": Config(16, 2048, 32, 8, 8192, 128_256, 4096),
    "8b": Config(32, 4096, 32, 8, 14_336, 128_256, 8192),
}


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding of queries or keys (batch, seq, heads, head_dim)."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


class Layer(nnx.Module):
    """Grouped-query attention, then SwiGLU, each behind an RMSNorm. (batch, seq, dim) to the same."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, dtype=config.dtype, rngs=rngs)
        norm = partial(nnx.RMSNorm, config.dim, dtype=config.dtype, rngs=rngs)
        self.head_dim, self.theta = config.dim // config.num_heads, config.rope_theta
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.query = linear(config.dim, config.dim)
        self.key = linear(config.dim, config.num_kv_heads * self.head_dim)
        self.value = linear(config.dim, config.num_kv_heads * self.head_dim)
        self.output = linear(config.dim, config.dim)
        self.gate, self.up = (linear(config.dim, config.hidden_dim) for _ in range(2))
        self.down = linear(config.hidden_dim, config.dim)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.attention_norm(x)
        q, k, v = (
            project(y).reshape(*x.shape[:2], -1, self.head_dim)
            for project in (self.query, self.key, self.value)
        )
        q, k = rotate(q, self.theta), rotate(k, self.theta)
        x = x + self.output(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        y = self.mlp_norm(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    """Tokens (batch, seq) to logits (batch, seq, vocabulary). The layers are one module, stacked."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(config.vocab_size, config.dim, dtype=config.dtype, rngs=rngs)
        make = nnx.vmap(lambda rngs: Layer(config, rngs=rngs))
        self.layers = nnx.split_rngs(splits=config.num_layers)(make)(rngs)
        self.norm = nnx.RMSNorm(config.dim, dtype=config.dtype, rngs=rngs)
        self.head = nnx.Linear(config.dim, config.vocab_size, use_bias=False, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def apply(layer: Layer, x: jax.Array) -> jax.Array:
            return layer(x)

        return self.head(self.norm(apply(self.layers, self.embed(tokens))))


# ---------------------------------------------------------------- the program


class Program:
    """The functions to train a model: `init` makes the state, `train_step` and `evaluate` take it.

    Args:
        config: the model.
        options: of the command line.
    """

    def __init__(self, config: Config, options: argparse.Namespace):
        self.config = config
        self.graphdef = nnx.graphdef(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
        steps = options.steps
        self.rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps, 3e-4)
        adamw = optax.adamw(self.rate, b2=0.95, weight_decay=0.1)
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def init(self, key: jax.Array) -> Any:
        """Return parameters and optimizer state."""
        params = nnx.to_pure_dict(nnx.state(Llama(self.config, rngs=nnx.Rngs(key))))
        return {"params": params, "optimizer": self.optimizer.init(params), "step": jnp.zeros((), int)}

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """Return the mean cross-entropy of (batch, seq) tokens and labels, in nats."""
        logits = nnx.merge(self.graphdef, params)(batch["tokens"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    def train_step(self, state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        """Return the new state and metrics."""
        params = state["params"]
        loss, grads = jax.value_and_grad(self.loss)(params, batch)
        updates, optimizer = self.optimizer.update(grads, state["optimizer"], params)
        metrics = {"loss": loss, "grad norm": optax.global_norm(grads), "rate": self.rate(state["step"])}
        new = {"params": optax.apply_updates(params, updates), "optimizer": optimizer}
        return new | {"step": state["step"] + 1}, metrics

    def evaluate(self, state: Any, batch: Any) -> jax.Array:
        """Return the mean loss."""
        return self.loss(state["params"], batch)


# ---------------------------------------------------------------- the data


class Windows:
    """A source of windows of a text, a byte a token."""

    def __init__(self, text: np.ndarray, seq_len: int):
        self.text, self.seq_len = text, seq_len

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.seq_len

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        window = self.text[index * self.seq_len :][: self.seq_len + 1].astype(np.int32)
        return {"tokens": window[:-1], "labels": window[1:]}


def read(path: str | None) -> np.ndarray:
    """Return the bytes of a file; by default those of Python's own modules."""
    paths = [Path(path)] if path else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)


def make_batches(text: np.ndarray, config: Config, options: argparse.Namespace) -> Any:
    """Return an endless iterator of batches, which knows its place."""
    data = grain.MapDataset.source(Windows(text, config.seq_len)).shuffle(seed=options.seed).repeat()
    data = data.batch(options.batch_size, drop_remainder=True)
    return iter(data.to_iter_dataset())


# ---------------------------------------------------------------- the run


class Printer:
    """A logger that prints a line a step."""

    def log(self, step: int, values: Any) -> None:
        print(f"step {step:4}", *(f"{name} {float(values[name]):.4g}" for name in sorted(values)), sep="  ")


def main(options: argparse.Namespace) -> None:
    config, text = SIZES[options.size], read(options.data)
    program, key = Program(config, options), jax.random.key(options.seed)
    split = len(text) * 9 // 10
    batches = make_batches(text[:split], config, options)
    held_out = list(islice(make_batches(text[split:], config, options), 4))
    logger = Printer()
    with ocp.CheckpointManager(Path(options.checkpoints).absolute()) as checkpoints:
        step = jax.jit(program.train_step, donate_argnums=0)
        evaluate = jax.jit(program.evaluate)
        first = checkpoints.latest_step() or 0
        if first >= options.steps:
            print(f"already at step {first}: give --steps more")
            return
        print(f"compiling a Llama of size {options.size}", flush=True)
        if first:
            print(f"going on after step {first} of {options.checkpoints}")
            like = {"state": jax.eval_shape(program.init, key), "data": batches.get_state()}
            run = checkpoints.restore(first, args=ocp.args.StandardRestore(like))
            state = run["state"]
            batches.set_state(run["data"])
        else:
            state = jax.jit(program.init)(key)
        for number in range(first + 1, options.steps + 1):
            state, metrics = step(state, next(batches))
            if number % options.log_every == 0:
                logger.log(number, metrics)
            if number % options.eval_every == 0:
                losses = [evaluate(state, batch) for batch in held_out]
                logger.log(number, {"held-out loss": np.mean(losses)})
            if number % options.save_every == 0 or number == options.steps:
                run = {"state": state, "data": batches.get_state()}
                checkpoints.save(number, args=ocp.args.StandardSave(run))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--data", help="a text; default: the modules of Python's library")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences a step")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches")
    parser.add_argument("--log-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--eval-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--checkpoints", default="llama-checkpoints", metavar="FOLDER")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(parse())
