"""Why a step is compiled again, in the words of the user's arguments."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp_async as jpp
from jaxpp_async.session.recompilation import why_compiled_again

NAMES = ["state['w']", "batch['x']", "batch['y']", "batch['z']", "batch['a']"]


def signature(*types, static=(), config=0, tree="tree"):
    return tree, types, static, config


A, B = ((8, 2), "float32", False), ((8, 1), "float32", False)
WEAK = ((), "float32", True), ((), "float32", False)


@pytest.mark.parametrize(
    ("now", "before", "why"),
    [
        (signature(A, B), [signature(A, A)], "batch['x'] was float32[8,2] and is float32[8,1]"),
        (
            signature(WEAK[0]),
            [signature(WEAK[1])],
            "state['w'] was float32[] and is float32[] (weakly typed)",
        ),
        (
            signature(A, B),
            [signature(B, A), signature(A, A)],
            "batch['x'] was float32[8,2] and is float32[8,1]",
        ),
        (signature(A, static=(3,)), [signature(A, static=(2,))], "a static argument was 2 and is 3"),
        (signature(A, tree="other"), [signature(A)], "its arguments have another tree structure"),
        (signature(A, config=1), [signature(A)], "settings of JAX or shardings of arguments are others"),
    ],
)
def test_what_differs_from_the_most_similar_call(now, before, why):
    assert why_compiled_again(now, dict.fromkeys(before, NAMES)) == why


def test_many_changes_are_counted():
    why = why_compiled_again(signature(*[A] * 5), {signature(*[B] * 5): NAMES})
    assert why.startswith("state['w'] was") and why.endswith(" and 2 more")


async def test_a_step_warns_once_with_the_name_of_the_argument(remote_mesh, caplog):
    mesh = await remote_mesh(1, launcher="inline")

    def evaluate(batch, scale):
        return batch["x"].sum() * scale

    step = mesh.distributed(evaluate)
    for rows in (4, 4, 3, 2, 4):
        await mesh.run(step, {"x": jnp.ones((rows, 2))}, np.float32(2))
    again = [r for r in caplog.records if "is compiled again" in r.getMessage()]
    assert [r.levelname for r in again] == ["WARNING"]  # the third is at INFO
    assert again[0].getMessage() == (
        "step 'evaluate' is compiled again: batch['x'] was float32[4,2] and is float32[3,2]; every set of "
        "shapes is compiled once, so keep them few"
    )
    other = step.with_schedule(jpp.GPipe(1))
    await mesh.run(other, {"x": jnp.ones((4, 2))}, np.float32(2))
    assert len([r for r in caplog.records if "is compiled again" in r.getMessage()]) == 1
