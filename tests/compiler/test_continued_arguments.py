"""Which argument each result continues, and which donated ones come back in another type."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planning import f32

import jaxpp_async as jpp
from jaxpp_async.compiler.continued_arguments import changed_arguments, continued_arguments, result_positions
from jaxpp_async.compiler.trace import trace
from jaxpp_async.program.instructions import Aval
from jaxpp_async.program.leaf_parts import Parts


class State(NamedTuple):
    p: object
    m: object


def traced(fn, *args):
    return trace(fn, args, argument_names=("first", "second", "third"))


def pairs(fn, *args) -> dict[str, str]:
    """Result to the argument that it continues, by name."""
    t = traced(fn, *args)
    return {t.out_names[k]: t.arg_names[a] for k, a in continued_arguments(t).items()}


A, B, S = f32(2), f32(3), f32()


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        pytest.param(lambda x, y: (x + 1, y.sum()), (A, B), {"result[0]": "first"}, id="an array"),
        pytest.param(lambda x: x * 2, (A,), {"result": "first"}, id="the whole result"),
        pytest.param(
            lambda s, x: (x.sum(), {"p": s["p"] + 1, "q": s["q"]}),
            ({"p": A, "q": B}, A),
            {"result[1]['p']": "first['p']", "result[1]['q']": "first['q']"},
            id="a tree, not in its place",
        ),
        pytest.param(
            lambda s: {"in": [State(s.p * 2, s.m), 1.0]},
            (State(A, B),),
            {"result['in'][0].p": "first.p", "result['in'][0].m": "first.m"},
            id="a tree inside another",
        ),
        pytest.param(
            lambda s: (s.p, s.m),
            (State(A, B),),
            {},
            id="another structure",
        ),
        pytest.param(lambda x: x.astype("bfloat16"), (A,), {}, id="another dtype"),
        pytest.param(lambda x: jnp.concatenate([x, x]), (A,), {}, id="another shape"),
        pytest.param(
            lambda m, p: p - 0.5 * jnp.sin(jnp.cos(m)),
            (A, A),
            {"result": "second"},
            id="of two alike, the nearer",
        ),
        pytest.param(
            lambda p, m: (p - 0.5 * (m + 1), m + 1),
            (A, A),
            {"result[0]": "first", "result[1]": "second"},
            id="two of each",
        ),
        pytest.param(
            lambda x, y: (y, x), (A, A), {"result[0]": "second", "result[1]": "first"}, id="handed back"
        ),
        pytest.param(lambda x, y: (y, y), (A, A), {"result[0]": "second"}, id="handed back twice"),
        pytest.param(
            lambda s: {"p": s["p"] * 2, "q": s["q"] * 2, "cache": jnp.concatenate([s["cache"]] * 2)},
            ({"p": A, "q": A, "cache": B},),
            {"result['p']": "first['p']", "result['q']": "first['q']"},
            id="most of a tree",
        ),
        pytest.param(
            lambda s: {"p": s["p"] * 2, "cache": jnp.concatenate([s["cache"]] * 2)},
            ({"p": A, "cache": B},),
            {},
            id="half of a tree",
        ),
        pytest.param(
            lambda x: np.float32(3.0) + 0 * jnp.zeros(()),
            (S,),
            {"result": "first"},
            id="a scalar made of no argument",
        ),
    ],
)
def test_a_result_continues_the_argument_whose_structure_and_types_it_has(fn, args, expected):
    assert pairs(fn, *args) == expected


def test_a_constant_continues_an_argument_of_its_type():
    assert pairs(lambda x: np.zeros(2, "float32"), A) == {"result": "first"}
    assert pairs(lambda x: np.zeros(2, "int32"), A) == {}


def test_a_key_continues_keys_of_its_implementation_alone():
    key, other = jax.eval_shape(lambda: (jax.random.key(0), jax.random.key(0, impl="unsafe_rbg")))
    assert pairs(lambda k: jax.random.split(k)[0], key) == {"result": "first"}
    data = jax.ShapeDtypeStruct((2,), "uint32")
    assert pairs(lambda k, d: jax.random.split(k)[0], other, data) == {"result": "first"}
    assert pairs(jax.random.key_data, key) == {}


def test_a_loop_counts_for_many_operations():
    def step(direct, looped, batch):
        added = jpp.accumulate_grads(lambda x: jnp.sum(x, 0) * looped, jpp.GPipe(1))(batch)
        for _ in range(5):
            direct = jnp.sin(direct)
        return direct + added

    assert pairs(step, A, A, f32(3, 2, 2)) == {"result": "first"}


def test_positions_have_the_tree_of_the_results():
    t = traced(lambda x: {"b": (x, x * 2), "a": x}, A)
    assert result_positions(t) == {"b": (1, 2), "a": 0}


# ---------------------------------------------------------------- donated, and not continued


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        pytest.param(
            lambda x: x.astype("bfloat16"),
            (A,),
            ["first float32[2] as result bfloat16[2]"],
            id="the only result",
        ),
        pytest.param(
            lambda x, y: (jnp.concatenate([x, x]), y.sum()),
            (A, B),
            ["first float32[2] as result[0] float32[4]"],
            id="in its place",
        ),
        pytest.param(
            lambda s, x: (x.sum(), {"p": s["p"].astype("int8"), "q": s["q"][:1]}),
            ({"p": A, "q": B}, A),
            [
                "first['p'] float32[2] as result[1]['p'] int8[2]",
                "first['q'] float32[3] as result[1]['q'] float32[1]",
            ],
            id="a tree, wherever it is",
        ),
        pytest.param(lambda x: x.sum(), (A,), [], id="a loss"),
        pytest.param(lambda x: (x * 2, x[:1]), (A,), [], id="one that continues"),
        pytest.param(lambda x, y: (y[:1], x), (A, B), [], id="one that is a result elsewhere"),
        pytest.param(
            lambda x, y: x[:1], (A, B), ["first float32[2] as result float32[1]"], id="not the others"
        ),
        pytest.param(lambda x: ({"p": x[:1]},), (A,), [], id="another structure in its place"),
    ],
)
def test_a_donated_argument_that_comes_back_in_another_type_is_named(fn, args, expected):
    t = traced(fn, *args)
    assert changed_arguments(t, [0], continued_arguments(t)) == expected


def test_a_donated_argument_that_is_a_result_itself_is_not_named():
    t = traced(lambda x, y: (y[:1], x), A, B)
    assert changed_arguments(t, [0], {}) == []


def test_only_donated_arguments_are_looked_at():
    t = traced(lambda x, y: (x[:1], y[:1]), A, B)
    assert changed_arguments(t, [1], {}) == ["second float32[3] as result[1] float32[1]"]
    assert changed_arguments(t, [], {}) == []


def test_a_leaf_in_parts_is_named_and_typed_as_a_whole():
    t = traced(lambda x: jnp.concatenate([x, x]), f32(4))
    first, second = (t.types.new(replace(t.types[v], aval=Aval((2,), "float32"))) for v in t.flat.inputs * 2)
    parts = Parts(0, (0, 2, 4))
    divided = replace(
        t,
        flat=replace(t.flat, inputs=(first, second)),
        arg_names=parts.names("first"),
        arg_of=(0, 0),
        argument_parts=(parts,),
    )
    assert changed_arguments(divided, [0], {}) == ["first float32[4] as result float32[8]"]
