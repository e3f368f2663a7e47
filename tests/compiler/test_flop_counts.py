"""Operations of single primitives, worked by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxpp_async.compiler.flop_counts import equation_flops


def flops(fn, *shapes) -> float:
    """The operations of the most expensive equation of a function."""
    jaxpr = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(s, "float32") for s in shapes))
    found = []
    for eqn in jaxpr.eqns:
        operands, results = ([tuple(v.aval.shape) for v in vs] for vs in (eqn.invars, eqn.outvars))
        found.append(equation_flops(eqn.primitive.name, eqn.params, operands, results))
    return max(found)


def conv(x, k, strides=(1, 1), padding="VALID", groups=1, **kwargs):
    return lax.conv_general_dilated(
        x,
        k,
        strides,
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
        **kwargs,
    )


@pytest.mark.parametrize(
    ("fn", "shapes", "expected"),
    [
        pytest.param(jnp.matmul, [(2, 3), (3, 5)], 2 * 2 * 3 * 5, id="product"),
        pytest.param(
            lambda a, b: jnp.einsum("bij,bjk->bik", a, b),
            [(7, 2, 3), (7, 3, 5)],
            2 * 7 * 2 * 3 * 5,
            id="batch",
        ),
        pytest.param(conv, [(2, 4, 4, 3), (3, 3, 3, 8)], 2 * 2 * (2 * 2) * 9 * 3 * 8, id="convolution"),
        pytest.param(
            lambda x, k: conv(x, k, padding="SAME"),
            [(1, 3, 1, 1), (3, 1, 1, 1)],
            2 * (2 + 3 + 2),
            id="no products with padding",
        ),
        pytest.param(
            lambda x, k: conv(x, k, groups=3), [(1, 4, 4, 3), (3, 3, 1, 6)], 2 * 4 * 9 * 6, id="groups"
        ),
        pytest.param(
            lambda x, k: conv(x, k, padding=[(2, 2), (0, 0)], lhs_dilation=(2, 1)),
            [(1, 3, 1, 1), (3, 1, 1, 1)],
            2 * 3 * 3,
            id="no products with the zeros of a dilation",
        ),
        pytest.param(jnp.tanh, [(4, 5)], 20, id="elementwise"),
        pytest.param(lambda x: jnp.sum(x, axis=1), [(4, 5)], 20, id="a reduction reads all"),
        pytest.param(lambda x: lax.cumsum(x, 0), [(4, 5)], 20, id="cumulative"),
        pytest.param(lambda x: lax.argmax(x, 0, jnp.int32), [(4, 5)], 20, id="argmax"),
        pytest.param(lambda x: lax.sort(x, dimension=1), [(4, 8)], 4 * 8 * 3, id="sort"),
        pytest.param(lambda x: x.T, [(4, 5)], 0, id="transpose"),
        pytest.param(lambda x: x.astype("bfloat16"), [(4, 5)], 0, id="cast"),
        pytest.param(
            lambda x: lax.reduce_window(x, 0.0, lax.add, (2,), (1,), "VALID"), [(5,)], 4 * 2, id="window"
        ),
        pytest.param(lax.linalg.cholesky, [(2, 6, 6)], 2 * 6**3 / 3, id="cholesky"),
        pytest.param(
            lambda x: lax.fft_p.bind(x, fft_type=lax.FftType.RFFT, fft_lengths=(8,)),
            [(2, 8)],
            5 * 16 * 3,
            id="fft",
        ),
        pytest.param(
            lambda x, w: lax.ragged_dot(x, w, jnp.array([2, 2], "int32")),
            [(4, 3), (2, 3, 5)],
            2 * 4 * 3 * 5,
            id="each row of a ragged product is in one group",
        ),
    ],
)
def test_operations(fn, shapes, expected):
    assert flops(fn, *shapes) == expected
