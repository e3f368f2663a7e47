"""A user's folder with modules in it, for tests of commands that import them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from paths import ROOT


@contextmanager
def process_restored(folder: Path) -> Iterator[None]:
    """Return a context at whose end this process is as before a command imported modules of a folder.

    Args:
        folder: the folder.
    """
    path, platforms, line = list(sys.path), os.environ.get("JAX_PLATFORMS"), sys.argv
    examples = _take_modules(ROOT / "examples")  # other tests import them by names that a user may use, too
    try:
        yield
    finally:
        sys.path[:], sys.argv = path, line
        if platforms is None:
            os.environ.pop("JAX_PLATFORMS", None)
        _take_modules(folder)
        sys.modules.update(examples)


def _take_modules(folder: Path) -> dict[str, ModuleType]:
    """Remove the modules that were imported from a folder, and return them by name."""
    found = {
        name: module
        for name, module in sys.modules.items()
        if (file := getattr(module, "__file__", None)) is not None and Path(file).is_relative_to(folder)
    }
    for name in found:
        del sys.modules[name]
    return found


TRAIN = """
import jax
import jax.numpy as jnp

import jaxpp_async as jpp

print("this module prints")


def loss_fn(params, x):
    for weights in params:
        x = jpp.pipeline_yield(jnp.tanh(x @ weights))
    return jnp.mean(x**2)


def train_step(params, batch):
    def microbatch_grads(x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        return grads, loss

    grads, losses = jpp.accumulate_grads(microbatch_grads, jpp.Std1F1B(2, stages="balanced"))(batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), losses


def example_arguments():
    weights = jax.ShapeDtypeStruct((16, 16), "float32")
    return [weights] * 4, jax.ShapeDtypeStruct((4, 8, 16), "float32")


def broken_step(params, batch):
    return params @ batch["x"]


def unmarked_step(params, batch):
    return jpp.accumulate_grads(lambda x: jnp.sum(x), jpp.Std1F1B(1))(batch)
"""
"""A module with a step of four layers, with a mark behind each."""
