"""A mesh as notebooks use it: started without `async with`, shown as HTML, dropped."""

from __future__ import annotations

import gc
import logging
import os
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
from waiting import until

import jaxpp_async as jpp
from jaxpp_async.errors import MeshClosedError, MeshError


def double(x):
    return 2 * x


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_mesh_is_started_used_and_ended_without_a_context():
    mesh = await jpp.RemoteMesh(1, launcher="inline").start()
    result = await mesh.run(mesh.distributed(double), np.float32(21))
    assert np.asarray(await result) == 42
    await mesh.aclose()
    assert mesh.is_closed


async def test_a_mesh_is_started_once():
    mesh = await jpp.RemoteMesh(1, launcher="inline").start()
    with pytest.raises(MeshError, match="entered before"):
        await mesh.start()
    await mesh.aclose()


async def test_a_dropped_mesh_warns_and_its_processes_end(caplog):
    mesh = await jpp.RemoteMesh(1).start()
    step = mesh.distributed(double)
    kept = await mesh.run(step, jnp.ones(3))  # neither steps nor arrays keep a mesh alive
    pid, gone = mesh.actors[0].pid, weakref.ref(mesh)
    gc.collect()
    gc.disable()
    try:
        with caplog.at_level(logging.WARNING, "jaxpp_async"):
            del mesh
    finally:
        gc.enable()
    assert gone() is None
    assert "is dropped while it runs" in caplog.text
    await until(lambda: not is_running(pid))
    with pytest.raises(MeshClosedError):
        await step(kept)


async def test_a_mesh_that_was_closed_is_dropped_in_silence(caplog):
    mesh = await jpp.RemoteMesh(1, launcher="inline").start()
    await mesh.aclose()
    del mesh
    gc.collect()
    assert "dropped" not in caplog.text


async def test_a_mesh_and_an_array_show_their_facts():
    mesh = jpp.RemoteMesh(1, launcher="inline")
    assert "not started" in mesh._repr_html_()
    await mesh.start()
    array = await mesh.run(mesh.distributed(double), np.ones((2, 3), np.float32))
    html = mesh._repr_html_()
    assert "<td" in html and str(os.getpid()) in html and "<svg" in html
    facts = array._repr_html_()
    assert "float32" in facts and "(2, 3)" in facts and "actor 0" in facts and "24 B" in facts
    await mesh.aclose()
    assert "closed" in mesh._repr_html_()
