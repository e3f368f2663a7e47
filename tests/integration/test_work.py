"""The counted work of a whole training step, sharded or not, against what XLA counts and exchanges."""

from __future__ import annotations

import re
from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from on_devices import mesh_of

import jaxpp_async as jpp
from gpt.data import train_batches
from gpt.model import AXIS_RULES, ModelConfig, state_specs
from gpt.steps import make_init, make_optimizer, make_train_step
from jaxpp_async.actors.executables import compile_blob
from jaxpp_async.actors.jax_runtime import Devices

_EXCHANGE = re.compile(
    r"= (\S+|\([^)]*\)) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_ARRAY = re.compile(r"f32\[([\d,]*)\]")


def exchanged_bytes(text: str) -> Counter[str]:
    """The bytes of float32 arrays that each kind of exchange in a module gives a device."""
    found: Counter[str] = Counter()
    for shapes, kind in _EXCHANGE.findall(text):
        for shape in _ARRAY.findall(shapes):
            found[kind] += 4 * int(np.prod([int(n) for n in shape.split(",") if n]))
    return found


@pytest.mark.parametrize("axes", [{}, {"data": 2, "model": 2}], ids=["one device", "four devices"])
def test_each_task_of_a_language_model_has_the_operations_and_exchanges_that_xla_compiles(axes):
    config, optimizer = (
        ModelConfig(num_layers=2, dim=64, num_heads=4, seq_len=64),
        make_optimizer(9),
    )
    step = make_train_step(config, optimizer, jpp.Std1F1B(2, stages=["layer 0"]))
    state = jax.eval_shape(make_init(config, optimizer), jax.random.key(0))
    batch = next(train_batches(np.arange(10_000, dtype=np.uint8), (4, 4, 64), 0))
    shardings = (state_specs(state), P(None, "data")) if axes else None
    machine = jpp.Machine(2, axes, axis_rules=AXIS_RULES if axes else {})
    planned = jpp.compile_for(
        machine, step, (state, batch), in_shardings=shardings, donate_argnums=0, lower=True
    )
    devices = Devices(mesh_of(axes or {"one": 1}))
    seen = set()
    for emitted, work in zip(planned.compiled.executables, planned.works, strict=True):
        if emitted.key in seen or emitted.name.startswith("start"):
            continue
        seen.add(emitted.key)
        compiled = compile_blob(emitted.blob, (), devices).call
        if emitted.name.startswith(("fwd", "bwd")):
            assert work.flops == pytest.approx(compiled.cost_analysis()["flops"], rel=0.03)
        counted: Counter[str] = Counter()
        for c in work.collectives:
            counted[c.kind] += int(c.size_bytes)
        assert counted == exchanged_bytes(compiled.as_text()), emitted.name
    assert any(work.collectives for work in planned.works) == bool(axes)
