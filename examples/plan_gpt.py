"""Plan or simulate the training of a GPT of 400 million parameters on machines that need not be there.

    jaxpp-async plan examples/plan_gpt.py:train_step --actors 4 --device h100-sxm --memory 16GB --donate 0

The command takes the step and the shapes of its arguments from this module. Nothing is started, no array is
made, and a laptop will do. docs/planning.md has more.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import jaxpp_async as jpp
from gpt.model import ModelConfig, state_specs
from gpt.steps import make_init, make_optimizer, make_train_step

NUM_MICROBATCHES, MICROBATCH_SIZE, SEQ_LEN = 32, 1, 2048

config = ModelConfig(num_layers=8, dim=2048, num_heads=16, seq_len=SEQ_LEN)
optimizer = make_optimizer(num_steps=10_000)
train_step = make_train_step(config, optimizer, jpp.Std1F1B(4, stages="balanced"))


def example_arguments() -> tuple[Any, ...]:
    """The types of the state and of a batch."""
    state = jax.eval_shape(make_init(config, optimizer), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((NUM_MICROBATCHES, MICROBATCH_SIZE, SEQ_LEN), jnp.int32)
    return state, {"tokens": tokens, "labels": tokens}


def in_shardings() -> tuple[Any, ...]:
    """The shardings of the arguments for actors of several devices, with the axes "data" and "model"."""
    return state_specs(example_arguments()[0]), PartitionSpec(None, "data")
