"""`pipeline_yield` and `accumulate_grads` in plain JAX: no mesh, no stage, only the values (and where markers
stay)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planning import f32, staged

import jaxpp_async as jpp
from jaxpp_async.errors import StageError

W = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
X = jnp.linspace(0.5, 2.0, 6).reshape(2, 3)


def model(mark):
    """A function of (w, x) whose middle is passed through `mark`."""

    def f(w, x):
        h = mark({"h": jnp.sin(x @ w), "n": jnp.arange(4)})
        return jnp.sum(jnp.tanh(h["h"] * 2.0) * (1 + h["n"]))

    return f


# ---------------------------------------------------------------- pipeline_yield is the identity


TRANSFORMS = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(f, argnums=(0, 1)),
    "jit of grad": lambda f: jax.jit(jax.value_and_grad(f)),
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (w + 1, x - 1)),
    "linearize": lambda f: lambda w, x: jax.linearize(f, w, x)[1](w, x),
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "hessian": jax.hessian,
    "Hessian-vector product": lambda f: (
        lambda w, x: jax.jvp(lambda v: jax.grad(f)(v, x), (w,), (jnp.ones_like(w),))[1]
    ),
    "grad of grad": lambda f: jax.grad(lambda w, x: jnp.sum(jax.grad(f)(w, x) ** 2)),
    "vmap": lambda f: lambda w, x: jax.vmap(f, in_axes=(None, 0))(w, jnp.stack([x, -x])),
    "grad of vmap": lambda f: jax.grad(
        lambda w, x: jax.vmap(f, in_axes=(0, None))(jnp.stack([w, -w]), x).sum()
    ),
    "vmap of grad": lambda f: lambda w, x: jax.vmap(jax.grad(f), in_axes=(None, 0))(w, jnp.stack([x, -x])),
    "checkpoint": jax.checkpoint,
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "grad of jit of checkpoint of vmap": lambda f: jax.grad(
        lambda w, x: jax.jit(jax.checkpoint(jax.vmap(f, in_axes=(None, 0))))(w, jnp.stack([x, -x])).sum()
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_is_the_identity_under(name):
    transform = TRANSFORMS[name]
    actual, expected = (
        jax.jit(transform(model(jpp.pipeline_yield)))(W, X),
        jax.jit(transform(model(lambda t: t)))(W, X),
    )
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_is_the_identity_without_jit():
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.value_and_grad(model(jpp.pipeline_yield))(W, X),
        jax.value_and_grad(model(lambda t: t))(W, X),
    )


def test_integers_and_keys_pass_unmarked_and_trees_keep_their_shape():
    tree = {
        "x": jnp.ones(3),
        "n": 3,
        "key": jax.random.key(0),
        "none": None,
        "half": jnp.ones(2, jnp.bfloat16),
    }
    out = jpp.pipeline_yield(tree, name="middle")
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    assert out["n"] is tree["n"] and out["key"] is tree["key"]
    assert out["half"].dtype == jnp.bfloat16


@pytest.mark.parametrize("tree", [jnp.arange(3), {"key": jax.random.key(0)}, ()])
def test_without_a_floating_value_it_names_the_line(tree):
    with pytest.raises(
        StageError, match=r"markers/test_markers.py:\d+: pipeline_yield got no floating value; pass the activ"
    ):
        jpp.pipeline_yield(tree)


def test_nan_and_infinity_go_through():
    x = jnp.array([jnp.nan, jnp.inf, -jnp.inf, -0.0])
    np.testing.assert_array_equal(jax.jit(jpp.pipeline_yield)(x), x)


# ---------------------------------------------------------------- markers in a loop's body


def step_of(loss, num_stages=2):
    def step(w, batch):
        def of_one(x):
            value, grads = jax.value_and_grad(loss)(w, x)
            return grads, value

        return jpp.accumulate_grads(of_one, jpp.GPipe(num_stages))(batch)

    return step


def test_a_jitted_block_called_three_times_is_three_markers():
    block = jax.jit(lambda w, x: jpp.pipeline_yield(jnp.tanh(x @ w)))
    cut = staged(step_of(lambda w, x: jnp.sum(block(w, block(w, block(w, x))))), f32(4, 4), f32(3, 2, 4))
    assert cut.num_stages == 4


@pytest.mark.parametrize(
    "wrap", [jax.checkpoint, lambda f: jax.checkpoint(jax.checkpoint(f))], ids=["one", "two"]
)
def test_a_checkpoint_around_a_marker_saves_what_it_marks(wrap):
    """The backward computes again from the marker, so the marker is there once and the stage before it is not
    run again behind it."""

    def loss(w, x):
        return jnp.sum(wrap(lambda x: jnp.sin(jpp.pipeline_yield(jnp.tanh(x @ w)) @ w))(x))

    cut = staged(step_of(loss), f32(4, 4), f32(3, 2, 4))
    names = [op.name for op in cut.loop.body.ops]
    assert (cut.num_stages, names.count("pipeline_yield")) == (2, 1)
    ops = {f"{ty}{stage}": [op.name for op in t.ops] for (ty, stage), t in cut.tasks.items()}
    assert ops["fwd0"].count("dot_general") == 1
    assert "tanh" not in ops["fwd1"] + ops["bwd1"]


def test_names_reach_the_partition():
    def loss(w, x):
        x = jpp.pipeline_yield(x @ w, name="embedding")
        return jnp.sum(jpp.pipeline_yield(x @ w))

    assert staged(step_of(loss, 3), f32(4, 4), f32(3, 2, 4)).stage_names == ("embedding", None)


# ---------------------------------------------------------------- accumulate_grads is a loop


BATCH = jnp.array([[1.0, -2.0], [jnp.nan, 4.0], [-jnp.inf, 0.5], [2.0, -2.0]])
CLEAN = jnp.array([[1.5, -2.0], [0.25, 4.0], [-3.0, 0.5]])
WHOLE = jnp.array([[3, -2], [7, 1], [-9, 0]], jnp.int32)
TRUTH = jnp.array([[True, False], [False, False], [True, False]])

REDUCTIONS = [
    ("Sum", jpp.Sum(), CLEAN, lambda xs: sum(xs[1:], xs[0])),
    ("Sum nan inf", jpp.Sum(), BATCH, lambda xs: sum(xs[1:], xs[0])),
    ("Sum int", jpp.Sum(), WHOLE, lambda xs: sum(xs[1:], xs[0])),
    ("Mean", jpp.Mean(), BATCH[2:], lambda xs: (xs[0] + xs[1]) / 2),
    ("Max", jpp.Max(), CLEAN, lambda xs: np.max(xs, 0)),
    ("Max nan inf", jpp.Max(), BATCH, lambda xs: np.max(xs, 0)),
    ("Max int", jpp.Max(), WHOLE, lambda xs: np.max(xs, 0)),
    ("Max bool", jpp.Max(), TRUTH, lambda xs: np.any(xs, 0)),
    ("Max of infinities", jpp.Max(), jnp.full((2, 2), -jnp.inf), lambda xs: np.max(xs, 0)),
    ("Min", jpp.Min(), CLEAN, lambda xs: np.min(xs, 0)),
    ("Min nan inf", jpp.Min(), BATCH, lambda xs: np.min(xs, 0)),
    ("Min uint8", jpp.Min(), WHOLE.astype(jnp.uint8), lambda xs: np.min(xs, 0)),
    ("Min bool", jpp.Min(), TRUTH, lambda xs: np.all(xs, 0)),
    ("Min bfloat16", jpp.Min(), CLEAN.astype(jnp.bfloat16), lambda xs: np.min(xs, 0)),
    ("Stack", jpp.Stack(), BATCH, np.stack),
    ("Stack bool", jpp.Stack(), TRUTH, np.stack),
    ("Concat", jpp.Concat(), BATCH, np.concatenate),
    ("Concat last", jpp.Concat(-1), jnp.stack([CLEAN, -CLEAN]), lambda xs: np.concatenate(xs, -1)),
]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("name", "reduction", "batch", "by_hand"), REDUCTIONS, ids=[r[0] for r in REDUCTIONS]
)
def test_reduction_equals_a_loop_by_hand(name, reduction, batch, by_hand, jit):
    run = jpp.accumulate_grads(lambda x: x, jpp.GPipe(1), reduce=reduction)
    actual = (jax.jit(run) if jit else run)(batch)
    expected = by_hand([np.asarray(x) for x in batch])
    assert actual.dtype == batch.dtype
    np.testing.assert_array_equal(np.asarray(actual), expected)


def test_keys_stack_and_nothing_else():
    keys = jax.random.split(jax.random.key(1), 3)
    stacked = jpp.accumulate_grads(lambda k: k, jpp.GPipe(1), reduce=jpp.Stack())(keys)
    np.testing.assert_array_equal(jax.random.key_data(stacked), jax.random.key_data(keys))
    with pytest.raises(
        TypeError, match=r"markers/test_markers.py:\d+: result: Sum cannot reduce PRNG keys; use Stack\(\)"
    ):
        jpp.accumulate_grads(lambda k: k, jpp.GPipe(1))(keys)


def test_default_reduction_sums_the_first_of_a_tuple_and_stacks_the_rest():
    def of_one(x):
        return {"g": x, "h": 2 * x}, x[0], {"aux": x}

    grads, losses, aux = jpp.accumulate_grads(of_one, jpp.GPipe(1))(CLEAN)
    np.testing.assert_array_equal(grads["g"], CLEAN.sum(0))
    np.testing.assert_array_equal(losses, CLEAN[:, 0])
    np.testing.assert_array_equal(aux["aux"], CLEAN)
    alone = jpp.accumulate_grads(lambda x: {"a": x}, jpp.GPipe(1))(CLEAN)
    np.testing.assert_array_equal(alone["a"], CLEAN.sum(0))


def test_reduce_is_a_tree_prefix():
    reduce = (jpp.Max(), {"s": jpp.Stack(), "m": jpp.Mean()})
    run = jpp.accumulate_grads(lambda x: ((x, -x), {"s": x[0], "m": x}), jpp.GPipe(1), reduce=reduce)
    (high, low), rest = run(CLEAN)
    np.testing.assert_array_equal(high, CLEAN.max(0))
    np.testing.assert_array_equal(low, (-CLEAN).max(0))
    assert rest["s"].shape == (3,) and rest["m"].shape == (2,)


def test_pass_index_counts_microbatches():
    run = jpp.accumulate_grads(lambda x, i: (x * i, i), jpp.GPipe(1), pass_index=True)
    total, indices = jax.jit(run)(CLEAN)
    np.testing.assert_array_equal(indices, jnp.arange(3, dtype=jnp.int32))
    np.testing.assert_allclose(total, CLEAN[1] + 2 * CLEAN[2])


def test_a_gradient_loop_with_stages_equals_a_loop_by_hand():
    def loss(w, x):
        return jnp.mean(jpp.pipeline_yield(jnp.tanh(x @ w)) ** 2)

    batch = jnp.linspace(-1, 1, 4 * 2 * 3).reshape(4, 2, 3)
    grads, losses = jax.jit(step_of(loss))(W, batch)
    by_hand = [jax.value_and_grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2))(W, x) for x in batch]
    np.testing.assert_allclose(grads, sum(g for _, g in by_hand), rtol=1e-6)
    np.testing.assert_allclose(losses, [v for v, _ in by_hand], rtol=1e-6)


def test_the_whole_loop_can_be_transformed():
    """Differentiated or mapped from outside, it is the loop that it stands for."""

    def total(w, batch):
        return jpp.accumulate_grads(lambda x: jnp.sum(jnp.sin(x @ w)), jpp.GPipe(1))(batch)

    batch = jnp.linspace(-1, 1, 18).reshape(3, 2, 3)

    def plain(w):
        return jnp.sum(jnp.sin(batch @ w))

    np.testing.assert_allclose(jax.grad(total)(W, batch), jax.grad(plain)(W), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        jax.vmap(total, in_axes=(0, None))(jnp.stack([W, -W]), batch),
        [plain(W), plain(-W)],
        rtol=1e-5,
        atol=1e-6,
    )
