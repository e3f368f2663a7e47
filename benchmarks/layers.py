"""layers: a model of equal layers, which benchmarks of predictions and plans cut as they like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpp_async as jpp


@dataclass(frozen=True)
class Layers:
    """A model whose layers are `tanh(x @ up) @ down`, and its data.

    Args:
        num_layers: the number of layers.
        width: the length of a vector between layers; both matrices of a layer are squares of this size.
        rows: the number of examples of a microbatch.
        num_microbatches: the number of microbatches of a step.
    """

    num_layers: int
    width: int
    rows: int
    num_microbatches: int

    @property
    def layer_flops(self) -> int:
        """The floating-point operations of the forward of a layer, for one microbatch."""
        return 2 * 2 * self.rows * self.width * self.width

    def values(self) -> tuple[list[dict[str, np.ndarray]], dict[str, np.ndarray]]:
        """Return the parameters of all layers, and a batch of shape (microbatches, rows, width)."""
        random = np.random.default_rng(0)
        matrix, examples = (self.width, self.width), (self.num_microbatches, self.rows, self.width)
        params = [
            {name: random.normal(size=matrix).astype(np.float32) / self.width**0.5 for name in ("up", "down")}
            for _ in range(self.num_layers)
        ]
        return params, {name: random.normal(size=examples).astype(np.float32) for name in ("x", "y")}

    def training(self, parts: Sequence[int], schedule: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
        """Return a training step with marks between parts of the model.

        Args:
            parts: the number of layers in each part; their sum is the number of layers.
            schedule: the schedule of the step.
        """
        ends = {sum(parts[: k + 1]) for k in range(len(parts) - 1)}

        def loss(params: Any, mb: Any) -> jax.Array:
            x = mb["x"]
            for k, layer in enumerate(params, 1):
                x = jnp.tanh(x @ layer["up"]) @ layer["down"]
                if k in ends:
                    x = jpp.pipeline_yield(x)
            return jnp.mean((x - mb["y"]) ** 2)

        def step(params: Any, batch: Any) -> Any:
            def grads(mb: Any) -> Any:
                value, found = jax.value_and_grad(loss)(params, mb)
                return found, value

            found, losses = jpp.accumulate_grads(grads, schedule)(batch)
            return jax.tree.map(lambda p, g: p - 0.01 * g, params, found), losses

        return step
