"""Tests of `session/drawing.py`: a compiled step before it runs."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from msgspec import structs

import jaxpp_async as jpp
from jaxpp_async.session.drawing import draw_step


@pytest.fixture(scope="module")
def step():
    def loss(weights, mb):
        hidden = jpp.pipeline_yield(jnp.tanh(mb @ weights[0]))
        return jnp.sum(hidden @ weights[1])

    def train(weights, batch):
        def grads(mb):
            value, found = jax.value_and_grad(loss)(weights, mb)
            return found, value

        found, losses = jpp.accumulate_grads(grads, jpp.GPipe(2))(batch)
        return jax.tree.map(lambda w, g: w - g, weights, found), losses

    types = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 2, jax.ShapeDtypeStruct((3, 8, 16), jnp.float32)
    return jpp.compile_for(jpp.Machine(2), train, types)


def test_each_task_is_a_cell_of_its_actor_as_long_as_its_flops_say(step):
    drawing = step.to_drawing()
    nodes = step.compiled.placed.graph.nodes
    assert [len(row.cells) for row in drawing.rows] == [
        sum(node.actor == actor for node in nodes) for actor in range(2)
    ]
    first = drawing.rows[0].cells
    assert [cell.text for cell in first[:3]] == ["0", "1", "2"]
    forwards = [cell.end - cell.start for cell in first[:3]]
    assert forwards == pytest.approx([forwards[0]] * 3)
    assert drawing.unit == "forwards" and "actors idle" in drawing.advice[0]


def test_a_step_of_which_no_work_is_known_has_tasks_of_no_length(step):
    works = [structs.replace(work, flops=0.0) for work in step.works]
    assert draw_step(step.compiled, works, "a step").end == 0


def test_memory_reaches_the_planned_peak(step):
    report = step.report()
    held = [max(size for _, size in row.memory) for row in step.to_drawing().rows]
    assert held == [actor.peak_bytes for actor in report.actors]


def test_memory_is_drawn_against_the_machines(step):
    assert draw_step(step.compiled, step.works, "a step").cap is None
    assert step.to_drawing(cap=7).cap == 7
    machine = jpp.Machine(2, {"data": 2}, memory=1000)
    assert replace(step, machine=machine).to_drawing().cap == 2000  # of both devices of an actor


def test_a_compiled_step_has_pictures(step):
    assert step._repr_html_().startswith("<svg") and "fwd(stage 0, mb 1)" in step.to_html()
