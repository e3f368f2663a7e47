"""Define GPT-3 175B and Llama2 70B as training steps in ordinary JAX, for abstract arguments.

Every layer is sharded over the mesh axis `"model"` as Megatron-LM does with sequence parallelism: weights are
split along heads and hidden columns, and between the sharded products each device has a part of the sequence.
So a layer gathers its input and scatters the sum of its output, twice each, and the backward does the same.
Attention recomputes its scores in the backward, as fused attention kernels do.

Each replica (an index along the mesh axis `"data"`) sums its own gradients over the microbatches. The sums
are added over the replicas once a step, after the loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxpp_async as jpp

Tree = Any

BFLOAT16, FLOAT32 = "bfloat16", "float32"


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer.

    Args:
        name: the name in the paper's table.
        num_layers: the number of transformer layers.
        dim: the features of a token between layers.
        num_heads: the number of attention heads.
        num_kv_heads: the number of heads of keys and values, which divides `num_heads`.
        hidden: the features inside the feed-forward block.
        vocab: the number of tokens in the vocabulary, padded to a multiple of the devices.
        seq_len: the tokens of a sequence.
        gated: whether the feed-forward block has a gate (SwiGLU) and norms have no mean (Llama), or not
            (GPT).
        tied: whether the embedding is also the output projection.
    """

    name: str
    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int
    hidden: int
    vocab: int
    seq_len: int
    gated: bool
    tied: bool

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def layer_parameters(self) -> int:
        """The number of parameters of a layer, without those of its norms."""
        qkv = self.dim * self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        return qkv + self.dim**2 + (3 if self.gated else 2) * self.dim * self.hidden

    @property
    def num_parameters(self) -> int:
        """The number of all parameters, without those of norms and positions."""
        return self.num_layers * self.layer_parameters + (1 if self.tied else 2) * self.vocab * self.dim


# Brown et al., Language Models are Few-Shot Learners, 2020, table 2.1. The vocabulary of 50,257 is padded to
# 51,200, as in Megatron-LM and in the FLOPs that the paper counts.
GPT3 = ModelShape("GPT-3 175B", 96, 12288, 96, 96, 4 * 12288, 51200, 2048, gated=False, tied=True)
# Touvron et al., Llama 2, 2023, table 1 and the released configuration of the 70B model.
LLAMA2 = ModelShape("Llama2 70B", 80, 8192, 64, 8, 28672, 32000, 4096, gated=True, tied=False)

MODELS = {shape.name: shape for shape in (GPT3, LLAMA2)}
"""The models of the paper's table, by name."""


def stage_layers(num_layers: int, num_actors: int, repeat: int) -> list[int]:
    """Return the number of layers of each stage of an interleaved pipeline.

    Each actor gets equally many layers where that is possible, also if its stages cannot be equal.

    Args:
        num_layers: the number of layers of the model.
        num_actors: the number of actors; stage s is on actor s % num_actors.
        repeat: the number of stages of each actor.
    """
    num_stages = num_actors * repeat
    ends = [num_layers * (s + 1) // num_stages for s in range(num_stages)]
    counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    rounds = [counts[first : first + num_actors] for first in range(0, num_stages, num_actors)]
    return [n for k, of_round in enumerate(rounds) for n in (of_round[::-1] if k % 2 else of_round)]


# ---------------------------------------------------------------- parameters


def parameter_shapes(shape: ModelShape) -> tuple[Tree, Tree]:
    """Return the shapes of all parameters, and their shardings over the axis `"model"`, as two equal
    trees."""
    d, n, kv, h = shape.dim, shape.num_heads, shape.num_kv_heads, shape.head_dim
    groups = n // kv
    layer = {
        "norm1": ((d,), P()),
        "q": ((d, kv, groups, h), P(None, "model")),
        "kv": ((d, 2, kv, h), P(None, None, "model")),
        "out": ((kv, groups, h, d), P("model")),
        "norm2": ((d,), P()),
        "up": ((d, shape.hidden), P(None, "model")),
        "down": ((shape.hidden, d), P("model")),
    }
    if groups == 1:  # one product makes queries, keys and values
        layer["qkv"] = ((d, 3, kv, groups, h), P(None, None, "model"))
        del layer["q"], layer["kv"]
    if shape.gated:
        layer["up"] = ((d, 2, shape.hidden), P(None, None, "model"))
    tree: Tree = {
        "embed": ((shape.vocab, d), P("model")),
        "layers": [dict(layer) for _ in range(shape.num_layers)],
        "norm": ((d,), P()),
    }
    if not shape.tied:
        tree["head"] = ((shape.vocab, d), P("model"))

    def is_leaf(x: Tree) -> bool:
        return isinstance(x, tuple)

    return tuple(jax.tree.map(lambda leaf, k=k: leaf[k], tree, is_leaf=is_leaf) for k in (0, 1))


def _typed(shapes: Tree, dtype: str) -> Tree:
    return jax.tree.map(
        lambda dims: jax.ShapeDtypeStruct(dims, dtype), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


# ---------------------------------------------------------------- the forward

_SEQUENCE, _WHOLE = P(None, "model", None), P(None, None, None)
_constrain = jax.lax.with_sharding_constraint


def _gathered(x: jax.Array) -> jax.Array:
    """Gather the parts of the sequence; the backward scatters the sum of the gradients."""
    return _constrain(_constrain(x, _SEQUENCE), _WHOLE)


def _scattered(x: jax.Array) -> jax.Array:
    """Add up the devices' summands and scatter the sum along the sequence; the backward gathers."""
    return _constrain(_constrain(x, _WHOLE), _SEQUENCE)


def _norm(shape: ModelShape, scale: jax.Array, x: jax.Array) -> jax.Array:
    y = x.astype(FLOAT32)
    if not shape.gated:
        y = y - jnp.mean(y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * scale


def _products(
    shape: ModelShape, scale: jax.Array, x: jax.Array, *products: tuple[str, jax.Array]
) -> list[jax.Array]:
    """Multiply the norm of `x` with weights.

    The backward makes the norm again and gathers it a second time, as Megatron-LM does, so that each device
    keeps only its part of the sequence.

    Args:
        shape: the sizes of the model.
        scale: the scale of the norm.
        x: (batch, tokens, features).
        products: for each product the einsum and the weights.
    """

    @jax.checkpoint
    def multiply(scale: jax.Array, x: jax.Array, *weights: jax.Array) -> list[jax.Array]:
        h = _gathered(_norm(shape, scale, x))
        return [jnp.einsum(form, h, w) for (form, _), w in zip(products, weights, strict=True)]

    return multiply(scale, x, *(weights for _, weights in products))


@jax.checkpoint
def _attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Mix values by attention.

    Args:
        q: queries, (batch, tokens, kv heads, groups, features).
        k, v: keys and values, (batch, tokens, kv heads, features).

    Returns:
        The mixed values, shaped as the queries.
    """
    scores = jnp.einsum("bqkgh,bskh->bkgqs", q, k).astype(FLOAT32) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30)).astype(v.dtype)
    return jnp.einsum("bkgqs,bskh->bqkgh", weights, v)


@functools.partial(jax.jit, static_argnums=0)
def apply_layer(shape: ModelShape, p: Tree, x: jax.Array) -> jax.Array:
    """Apply one transformer layer.

    Args:
        shape: the sizes of the model.
        p: the layer's parameters.
        x: the layer's input, (batch, tokens, features); each device has a part of the tokens.
    """
    if "qkv" in p:
        (qkv,) = _products(shape, p["norm1"], x, ("bsd,dckgh->cbskgh", p["qkv"]))
        q, k, v = qkv[0], qkv[1, ..., 0, :], qkv[2, ..., 0, :]
    else:
        products = ("bsd,dkgh->bskgh", p["q"]), ("bsd,dckh->cbskh", p["kv"])
        q, (k, v) = _products(shape, p["norm1"], x, *products)
    x = x + _scattered(jnp.einsum("bskgh,kghd->bsd", _attention(q, k, v), p["out"]))
    if shape.gated:
        ((gate, up),) = _products(shape, p["norm2"], x, ("bsd,dcf->cbsf", p["up"]))
        h = jax.nn.silu(gate) * up
    else:
        h = jax.nn.gelu(_products(shape, p["norm2"], x, ("bsd,df->bsf", p["up"]))[0])
    return x + _scattered(h @ p["down"])


def _loss(shape: ModelShape, boundaries: frozenset[int], params: Tree, tokens: jax.Array) -> jax.Array:
    """Return the mean loss of a microbatch.

    Args:
        shape: the sizes of the model.
        boundaries: the layers, counted from 0, after which a stage ends.
        params: the parameters.
        tokens: (sequences, tokens + 1).
    """
    x = _scattered(params["embed"][tokens[:, :-1]])
    for k, layer in enumerate(params["layers"]):
        x = apply_layer(shape, layer, x)
        if k in boundaries:
            x = jpp.pipeline_yield(x)
    head = params["embed" if shape.tied else "head"]
    logits = jnp.einsum("bsd,vd->bsv", _gathered(_norm(shape, params["norm"], x)), head).astype(FLOAT32)
    labels = jax.nn.one_hot(tokens[:, 1:], shape.vocab, dtype=FLOAT32)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * labels, -1))


# ---------------------------------------------------------------- the step


@dataclass(frozen=True)
class TrainingStep:
    """A training step and its abstract arguments.

    Attributes:
        fn: the step, `(state, batch) -> (state, losses)`.
        args: the types of the state and of the batch.
        in_shardings: the shardings of both over the axes `"data"` and `"model"`.
    """

    fn: Callable
    args: tuple[Tree, Tree]
    in_shardings: tuple[Tree, Any]


def training_step(
    shape: ModelShape,
    layers: Sequence[int],
    schedule: Any,
    num_microbatches: int,
    microbatch: int,
    replicas: int = 1,
) -> TrainingStep:
    """Return a training step with Adam in mixed precision.

    Weights, activations and sums of gradients are bfloat16; the master weights and the two moments of Adam
    are float32.

    Args:
        shape: the sizes of the model.
        layers: the number of layers of each stage.
        schedule: the schedule of the pipeline, of as many stages.
        num_microbatches: the number of microbatches of each replica.
        microbatch: the number of sequences in a microbatch of one replica.
        replicas: the number of replicas, which the mesh axis `"data"` has.
    """
    ends = [sum(layers[: s + 1]) - 1 for s in range(len(layers) - 1)]
    boundaries = frozenset(ends)

    def step(state: Tree, batch: jax.Array) -> tuple[Tree, jax.Array]:
        def of_replica(tokens: jax.Array) -> tuple[jax.Array, Tree]:
            return jax.value_and_grad(lambda p: _loss(shape, boundaries, p, tokens))(state["params"])

        def gradients(tokens: jax.Array) -> tuple[Tree, jax.Array]:
            if replicas == 1:
                losses, grads = of_replica(tokens[0])
            else:
                losses, grads = jax.vmap(of_replica, spmd_axis_name="data")(tokens)
            return grads, losses

        grads, losses = jpp.accumulate_grads(gradients, schedule)(batch)
        if replicas > 1:
            grads = jax.tree.map(lambda g: jax.lax.reduce_sum(g, (0,)), grads)  # stays bfloat16
        return _adam(state, grads, 1.0 / (num_microbatches * replicas)), losses

    shapes, specs = parameter_shapes(shape)
    state = {name: _typed(shapes, dtype) for name, dtype in _STATE.items()}
    batch = jax.ShapeDtypeStruct((num_microbatches, replicas, microbatch, shape.seq_len + 1), "int32")
    shardings = dict.fromkeys(_STATE, specs), P(None, "data")
    return TrainingStep(step, (state, batch), shardings)


_STATE = {"params": BFLOAT16, "master": FLOAT32, "first": FLOAT32, "second": FLOAT32}


def _adam(state: Tree, grads: Tree, scale: float) -> Tree:
    def update(master, first, second, grad):
        grad = grad.astype(FLOAT32) * scale
        first = 0.9 * first + 0.1 * grad
        second = 0.95 * second + 0.05 * jnp.square(grad)
        master = master - 1e-4 * first / (jnp.sqrt(second) + 1e-8)
        return master.astype(BFLOAT16), master, first, second

    made = jax.tree.map(update, state["master"], state["first"], state["second"], grads)
    return {
        name: jax.tree.map(lambda leaf, k=k: leaf[k], made, is_leaf=lambda x: isinstance(x, tuple))
        for k, name in enumerate(_STATE)
    }
