"""Cases: where markers stand, what they mark, and how many there are."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tests.torture.blocks import cut, dense, error
from tests.torture.registry import array, batch, loss, weights


@loss(stages=2)
def a_marker_at_the_very_start(w, mb):
    return error(dense(cut(mb["x"]), w[0]), mb)


@loss(stages=2)
def a_marker_at_the_very_end(w, mb):
    return cut(error(dense(mb["x"], w[0]), mb))


@loss(stages=4)
def markers_at_both_ends(w, mb):
    x = cut(dense(cut(mb["x"]), w[0]))
    return cut(error(dense(x, w[1]), mb))


@loss(stages=3, on="inline")
def two_markers_in_a_row(w, mb):
    return error(cut(cut(dense(mb["x"], w[0]))) @ w[1], mb)


@loss(stages=4)
def three_markers_in_a_row(w, mb):
    return error(cut(cut(cut(dense(mb["x"], w[0])))) @ w[1], mb)


@loss(stages=4)
def stages_that_only_reshape(w, mb):
    x = cut(dense(mb["x"], w[0]))
    x = cut(x.reshape(-1))
    x = cut(x.reshape(3, 4).T.T)
    return error(x @ w[1], mb)


@loss(stages=2)
def a_marker_on_a_scalar(w, mb):
    return cut(jnp.mean(dense(mb["x"], w[0]))) ** 2 + error(mb["x"] @ w[1], mb)


@loss(stages=2)
def a_marker_on_weights(w, mb):
    """What only the second stage uses may be marked too."""
    x, second = cut((dense(mb["x"], w[0]), w[1]))
    return error(x @ second, mb)


@loss(stages=2)
def a_marker_whose_result_is_not_used(w, mb):
    x = dense(mb["x"], w[0])
    cut(x)
    return error(x @ w[1], mb)


@loss(stages=3)
def a_marked_value_and_the_value_itself(w, mb):
    x = dense(mb["x"], w[0])
    y = cut(x)
    z = cut(dense(x + y, w[1]))
    return error(z + x + y, mb)


class Carried(NamedTuple):
    x: jax.Array
    nothing: None
    more: dict


@loss(stages=3)
def a_marker_on_a_tree_with_none_and_empty_containers(w, mb):
    state = Carried(dense(mb["x"], w[0]), None, {"empty": (), "list": [dense(mb["x"], w[1])], "none": None})
    state = cut(state)
    assert state.nothing is None and state.more["empty"] == () and state.more["none"] is None
    state = cut(state._replace(x=dense(state.x, w[2])))
    return error(state.x + state.more["list"][0], mb)


@jax.tree_util.register_pytree_with_keys_class
class Layer:
    """A user's own pytree."""

    def __init__(self, w, b, name):
        self.w, self.b, self.name = w, b, name

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return ((key("w"), self.w), (key("b"), self.b)), self.name

    @classmethod
    def tree_unflatten(cls, name, children):
        return cls(*children, name)


def layers():
    return [Layer(w, array(40 + k, 4), f"layer{k}") for k, w in enumerate(weights(2))], batch()


@loss(stages=2, make_args=layers, on="inline")
def parameters_in_a_pytree_of_ones_own(params, mb):
    x = mb["x"]
    for k, layer in enumerate(params):
        x = jnp.tanh((cut(x) if k else x) @ layer.w + layer.b)
    return error(x, mb)


@loss(stages=2)
def a_marker_on_a_pytree_of_ones_own(w, mb):
    held = cut(Layer(dense(mb["x"], w[0]), jnp.sum(mb["x"], 0), "held"))
    return error(held.w @ w[1] + held.b, mb)


@loss(stages=16, make_args=lambda: (weights(16), batch(3)))
def a_python_loop_over_sixteen_layers(w, mb):
    x = mb["x"]
    for k, layer in enumerate(w):
        x = x + dense(cut(x, name=f"layer {k}") if k else x, layer)
    return error(x, mb)


@loss(stages=3)
def a_marker_every_other_layer(w, mb):
    x = mb["x"]
    for k, layer in enumerate(w):
        x = x + dense(x, layer)
        x = cut(x) if k in (1, 3) else x
    return error(x, mb)


@loss(stages=3)
def markers_in_a_recursion(w, mb):
    def layers(x, k):
        return x if k == 3 else layers(cut(dense(x, w[k])) if k < 2 else dense(x, w[k]), k + 1)

    return error(layers(mb["x"], 0), mb)
