"""The task of each operation: each case is a model, with what its tasks compute and who takes from whom."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planning import cross_task_values, f32, heavy, plan_step, sent, staged, taken

import jaxpp_async as jpp
from jaxpp_async.compiler.evaluate import value_type
from jaxpp_async.errors import StageError

D = 4
W = f32(D, D)
X = f32(3, 2, D)  # 3 microbatches
DOT, TANH, SUM = "dot_general", "tanh", "reduce_sum"


def step_of(loss, num_stages=2):
    """Gradients of `loss(weights, x)` over microbatches, an SGD update, losses."""

    def step(ws, batch):
        def of_one(x):
            value, grads = jax.value_and_grad(loss)(ws, x)
            return grads, value

        grads, losses = jpp.accumulate_grads(of_one, jpp.Std1F1B(num_stages))(batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), losses

    return step


def tasks_of(loss, num_weights=2):
    return staged(step_of(loss), [W] * num_weights, X)


def square(x):
    return jnp.sum(x * x)


def weights_sent(done):
    return [t for t in sent(done) if t[2] == (D, D)]


# ---------------------------------------------------------------- chains


def chain(ws, x):
    for w in ws[:-1]:
        x = jpp.pipeline_yield(jnp.tanh(x @ w))
    return square(x @ ws[-1])


def test_a_chain_is_cut_at_its_markers_and_each_backward_keeps_its_stages_products():
    cut = tasks_of(chain, 3)
    assert cut.num_stages == 3
    assert heavy(cut) == {
        "fwd0": [DOT, TANH],
        "fwd1": [DOT, TANH],
        "fwd2": [DOT, SUM],
        "bwd2": [DOT, DOT],
        "bwd1": [DOT, DOT],
        "bwd0": [DOT],
    }
    assert taken(cut) == {
        "fwd0": set(),
        "fwd1": {"fwd0"},
        "fwd2": {"fwd1"},
        "bwd2": {"fwd1", "fwd2"},
        "bwd1": {"fwd0", "fwd1", "bwd2"},
        "bwd0": {"fwd0", "bwd1"},
    }


def test_a_constant_cotangent_does_not_pull_the_backward_away_from_its_weights():
    """The cotangent of a plain sum is a constant: nothing says where its products go but the weights."""

    def loss(ws, x):
        return jnp.sum(jpp.pipeline_yield(x @ ws[0]) @ ws[1])

    cut = tasks_of(loss)
    assert heavy(cut) == {"fwd0": [DOT], "fwd1": [DOT, SUM], "bwd1": [DOT, DOT], "bwd0": [DOT]}
    assert weights_sent(plan_step(step_of(loss), [W, W], X)) == []


def test_a_body_without_markers_is_one_stage():
    def loss(ws, x):
        return square(jnp.tanh(x @ ws[0]) @ ws[1])

    assert heavy(staged(step_of(loss, 1), [W, W], X)) == {
        "fwd0": [DOT, TANH, DOT, SUM],
        "bwd0": [DOT, DOT, DOT],
    }


def test_a_body_without_gradients_has_forward_tasks_alone():
    def step(ws, batch):
        return jpp.accumulate_grads(lambda x: square(jpp.pipeline_yield(x @ ws[0]) @ ws[1]), jpp.GPipe(2))(
            batch
        )

    assert heavy(staged(step, [W, W], X)) == {"fwd0": [DOT], "fwd1": [DOT, SUM]}


def test_two_markers_in_a_row_leave_an_empty_stage():
    cut = staged(
        step_of(lambda ws, x: square(jpp.pipeline_yield(jpp.pipeline_yield(x @ ws[0])) @ ws[1]), 3), [W, W], X
    )
    assert cut.num_stages == 3
    assert set(heavy(cut)) == {"fwd0", "fwd2", "bwd2", "bwd0"}


# ---------------------------------------------------------------- branches


def test_a_skip_connection_goes_directly_and_its_backward_stays_with_its_weights():
    def loss(ws, x):
        h = jnp.tanh(x @ ws[0])
        y = jpp.pipeline_yield(jnp.tanh(h @ ws[1]))
        y = jpp.pipeline_yield(jnp.tanh(y @ ws[2]))
        return square(y @ ws[3] + h)  # h is made in stage 0 and used in stage 2

    cut = staged(step_of(loss, 3), [W] * 4, X)
    assert heavy(cut)["bwd0"].count(DOT) == 3  # dW0, dW1, dh
    assert "fwd0" in taken(cut)["fwd2"]
    assert "bwd2" in taken(cut)["bwd0"]
    assert weights_sent(plan_step(step_of(loss, 3), [W] * 4, X, actors=3)) == []


def test_an_unmarked_projection_of_the_input_runs_where_it_merges():
    """x @ ws[1] needs no marker, and no marker needs it: the paper's rule puts it with its user."""

    def loss(ws, x):
        y = jpp.pipeline_yield(jnp.tanh(x @ ws[0]))
        return square(y + jnp.tanh(x @ ws[1]))

    cut = tasks_of(loss)
    assert heavy(cut) == {"fwd0": [DOT, TANH], "fwd1": [DOT, TANH, SUM], "bwd1": [DOT], "bwd0": [DOT]}
    assert weights_sent(plan_step(step_of(loss), [W, W], X)) == []


def test_parallel_branches_run_in_stages_of_their_own_and_merge_in_the_last():
    def loss(ws, x):
        a = jpp.pipeline_yield(jnp.tanh(x @ ws[0]))
        b = jpp.pipeline_yield(jnp.sin(x @ ws[1]))
        return square((a + b) @ ws[2])

    cut = staged(step_of(loss, 3), [W] * 3, X)
    assert heavy(cut) == {
        "fwd0": [DOT, TANH],
        "fwd1": [DOT, "sin"],
        "fwd2": [DOT, SUM],
        "bwd2": [DOT, DOT],
        "bwd1": [DOT],
        "bwd0": [DOT],
    }
    assert taken(cut)["fwd1"] == set()
    assert taken(cut)["bwd0"] == {"fwd0", "bwd2"}
    assert weights_sent(plan_step(step_of(loss, 3), [W] * 3, X, actors=3)) == []


def test_a_value_through_several_markers_goes_directly():
    def loss(ws, x):
        pair = jpp.pipeline_yield((jnp.tanh(x @ ws[0]), jnp.sin(x)))
        pair = jpp.pipeline_yield((jnp.tanh(pair[0] @ ws[1]), pair[1]))
        return square(pair[0] @ ws[2] + pair[1] @ ws[3])

    done = plan_step(step_of(loss, 3), [W] * 4, X, actors=3)
    # Only activations forth and cotangents back between adjacent stages, one each a microbatch.
    links = {(a, b): [t for t in sent(done) if t[:2] == (a, b)] for a in range(3) for b in range(3)}
    assert {link: len(ts) for link, ts in links.items() if ts} == {(0, 1): 3, (1, 2): 3, (2, 1): 3, (1, 0): 3}


def test_an_early_stages_value_skips_the_stages_between():
    def loss(ws, x):
        side = jnp.tanh(x @ ws[3])
        h, side = jpp.pipeline_yield((jnp.tanh(x @ ws[0]), side))
        h, side = jpp.pipeline_yield((jnp.tanh(h @ ws[1]), side))
        return square(h @ ws[2] + side)

    done = plan_step(step_of(loss, 3), [W] * 4, X, actors=3)
    count = {(a, b): sum(t[:2] == (a, b) for t in sent(done)) for a in range(3) for b in range(3) if a != b}
    assert count == {(0, 1): 3, (1, 2): 3, (0, 2): 3, (2, 1): 3, (1, 0): 3, (2, 0): 3}


# ---------------------------------------------------------------- tied weights


def tied_two(ws, x):
    return square(jpp.pipeline_yield(jnp.tanh(x @ ws[0])) @ ws[0].T)


def tied_three(ws, x):
    h = jpp.pipeline_yield(jnp.tanh(x @ ws[0]))
    h = jpp.pipeline_yield(jnp.tanh(h @ ws[0]))
    return square(h @ ws[0].T)


def tied_twice(ws, x):
    """Two tied arrays of equal shape."""
    h = jpp.pipeline_yield(jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]))
    return square((h @ ws[1].T) @ ws[0].T)


@pytest.mark.parametrize(
    ("loss", "stages", "parts"), [(tied_two, 2, [2]), (tied_three, 3, [3]), (tied_twice, 2, [2, 2])]
)
def test_a_tied_weight_is_summed_in_each_stage_and_joined_once(loss, stages, parts):
    weights = [W] * len(parts)
    cut = staged(step_of(loss, stages), weights, X)
    assert [len(p) for p in cut.outputs[:-1]] == parts
    assert all({p.task[0] for p in result} == {"bwd"} for result in cut.outputs[:-1])
    assert all(len({p.task for p in result}) == len(result) for result in cut.outputs[:-1])
    done = plan_step(step_of(loss, stages), weights, X, actors=stages)
    tasks = {v for n in done.placed.graph.nodes if n.task is not None for v in n.outputs}
    last = {v for n in done.placed.graph.nodes if n.task is not None and n.task.i == 2 for v in n.outputs}
    for value in tasks - last:
        uses = [n for n in done.placed.graph.nodes if value in n.inputs]
        homes = {n.actor for n in done.placed.graph.nodes if value in n.outputs}
        crosses = any(n.actor not in homes for n in uses)
        assert not (crosses and done.placed.graph.values[value].aval.shape == (D, D)), (
            "a weight crosses in the loop"
        )
    # After it: every partial sum but one to where the update runs, and the new weight back to the others.
    assert len(weights_sent(done)) == sum(2 * (n - 1) for n in parts)


# ---------------------------------------------------------------- what needs no gradient


def test_a_frozen_first_stage_has_no_backward():
    def loss(ws, x):
        h = jax.lax.stop_gradient(jnp.tanh(x @ ws[0]))
        return square(jpp.pipeline_yield(h) @ ws[1])

    cut = tasks_of(loss)
    # The gradient of ws[0] is zero, a constant made anywhere; stage 0's backward computes nothing.
    assert heavy(cut).get("bwd0", []) == []
    assert heavy(cut)["bwd1"] == [DOT]
    assert "bwd1" not in taken(cut).get("bwd0", set())


def test_a_frozen_argument_of_the_first_stage_leaves_only_the_last_stages_backward():
    def step(frozen, w, batch):
        def of_one(x):
            value, grad = jax.value_and_grad(lambda w: square(jpp.pipeline_yield(jnp.tanh(x @ frozen)) @ w))(
                w
            )
            return grad, value

        return jpp.accumulate_grads(of_one, jpp.GPipe(2))(batch)

    assert heavy(staged(step, W, W, X)) == {"fwd0": [DOT, TANH], "fwd1": [DOT, SUM], "bwd1": [DOT]}


def test_unused_parameters_cost_nothing():
    done = plan_step(step_of(lambda ws, x: chain(ws[:2], x)), [W, W, W], X)
    (unused,) = [i for i in done.placed.graph.inputs if done.placed.graph.values[i.value].label == "ws[2]"]
    assert len(unused.actors) == 1
    assert weights_sent(done) == []


# ---------------------------------------------------------------- checkpoints


def test_a_checkpoint_in_each_stage_computes_again_in_its_own_backward():
    def loss(ws, x):
        block = jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(x @ w) * 2))
        return square(block(jpp.pipeline_yield(block(x, ws[0])), ws[1]))

    cut = tasks_of(loss)
    assert heavy(cut) == {
        "fwd0": [DOT, "sin", TANH],
        "fwd1": [DOT, "sin", TANH, SUM],
        "bwd1": ["remat2"],
        "bwd0": ["remat2"],
    }
    # Only the activation and its cotangent cross; nothing of the inside of a block is kept.
    assert taken(cut)["bwd0"] == {"bwd1"}
    assert taken(cut)["bwd1"] == {"fwd0", "fwd1"}
    assert weights_sent(plan_step(step_of(loss), [W, W], X)) == []


def test_a_checkpoint_around_a_marker_does_not_run_the_earlier_stage_again():
    def loss(ws, x):
        def both(x):
            h = jpp.pipeline_yield(jnp.tanh(x @ ws[0]))
            return jnp.sin(h @ ws[1])

        return square(jax.checkpoint(both)(x))

    cut = tasks_of(loss)
    assert TANH not in heavy(cut)["bwd1"] and TANH not in heavy(cut)["fwd1"]
    assert heavy(cut)["bwd1"].count(DOT) == 3  # h @ w1 again, dW1, dh
    assert weights_sent(plan_step(step_of(loss), [W, W], X)) == []


# ---------------------------------------------------------------- light operations


def shapes_crossing(cut, types):
    crossing = {v for takes, _ in cross_task_values(cut).values() for v in takes}
    return sorted(types[v].aval.shape for v in crossing)


def crossing(loss, *args, num_stages=2):
    done = plan_step(step_of(loss, num_stages), *args, actors=num_stages)
    (cut,) = [s.staged for s in done.placed.loops.values()]
    return shapes_crossing(cut, done.traced.types)


ACT = (2, D)


def test_a_transposed_weight_is_transposed_in_each_stage():
    def loss(ws, x):
        t = ws[0].T
        return square(jpp.pipeline_yield(jnp.tanh(x @ t)) @ ws[1])

    assert (D, D) not in crossing(loss, [W, W], X)


def test_rotary_tables_and_masks_are_made_again_in_each_stage():
    def loss(ws, x):  # x: (5, 2, D)
        angles = jnp.arange(2.0)[:, None] * (10.0 ** -jnp.arange(float(D)))[None]
        table, mask = jnp.cos(angles), jnp.tril(jnp.ones((2, 2), bool))
        x = jpp.pipeline_yield(jnp.tanh((x * table) @ ws[0]))
        scores = jnp.where(mask, (x * table) @ jnp.swapaxes(x @ ws[1], 1, 2), -1e9)
        return square(jnp.tanh(scores))

    shapes = crossing(loss, [W, W], f32(3, 5, 2, D))
    assert (5, 2, D) in shapes and all(shape[0] == 5 for shape in shapes)
    cut = staged(step_of(loss), [W, W], f32(3, 5, 2, D))
    assert all("cos" in [op.name for op in cut.tasks[key].ops] for key in [("fwd", 0), ("fwd", 1)])


def test_a_cast_of_a_weight_is_repeated():
    def loss(ws, x):
        half = [w.astype(jnp.bfloat16) for w in ws]
        x = jpp.pipeline_yield(jnp.tanh(x.astype(jnp.bfloat16) @ half[0]))
        return square((x @ half[1]).astype(jnp.float32))

    assert (D, D) not in crossing(loss, [W, W], X)
    assert weights_sent(plan_step(step_of(loss), [W, W], X)) == []


# ---------------------------------------------------------------- odd bodies


def test_an_inner_gradient_in_a_forward_stage_is_forward():
    """The score of an inner energy feeds the next stage: JAX's transpose made it, the pipeline runs it
    forward."""

    def loss(ws, x):
        score = jax.grad(lambda x: square(jnp.tanh(x @ ws[0])))(x)
        return square(jpp.pipeline_yield(score) @ ws[1])

    cut = tasks_of(loss)
    assert heavy(cut)["fwd0"].count(DOT) == 2
    assert heavy(cut)["fwd1"] == [DOT, SUM]
    assert weights_sent(plan_step(step_of(loss), [W, W], X)) == []


def test_aux_of_an_early_stage_is_reduced_there():
    def step(ws, batch):
        def loss(ws, x):
            h = jnp.tanh(x @ ws[0])
            return square(jpp.pipeline_yield(h) @ ws[1]), jnp.max(h)

        def of_one(x):
            (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(ws, x)
            return grads, value, aux

        return jpp.accumulate_grads(of_one, jpp.GPipe(2), reduce=(jpp.Sum(), jpp.Mean(), jpp.Max()))(batch)

    cut = staged(step, [W, W], X)
    assert [p[0].task for p in cut.outputs] == [("bwd", 0), ("bwd", 1), ("fwd", 1), ("fwd", 0)]
    done = plan_step(step, [W, W], X)
    assert done.placed.graph.outputs[-1].actors == (0,)
    assert () not in [shape for *_, shape in sent(done)]


def test_labels_are_used_in_the_last_stage_alone():
    def step(w, batch):
        def loss(w, mb):
            return square(jpp.pipeline_yield(jnp.tanh(mb["x"] @ w)) - mb["y"])

        def of_one(mb):
            value, grad = jax.value_and_grad(loss)(w, mb)
            return grad, value

        return jpp.accumulate_grads(of_one, jpp.GPipe(2))(batch)

    done = plan_step(step, W, {"x": X, "y": X})
    homes = {done.placed.graph.values[i.value].label: i.actors for i in done.placed.graph.inputs}
    assert (homes["batch['x']"], homes["batch['y']"]) == ((0,), (1,))


def test_the_flat_body_computes_what_the_function_does():
    """Every task's operations, run in order with values handed over, give the gradient."""
    from jaxpp_async.compiler.evaluate import read_operand, run_ops

    key = jax.random.key(0)
    ws = list(jax.random.normal(key, (3, D, D)))
    batch = jax.random.normal(key, X.shape)
    cut = staged(step_of(chain, 3), ws, batch)
    env = dict(zip(cut.loop.body.inputs, [*ws, batch[0], jnp.int32(0)], strict=True))
    for task in cut.tasks.values():
        run_ops(task.ops, env)
    values = [sum(read_operand(env, p.value) for p in parts) for parts in cut.outputs]
    loss, grads = jax.value_and_grad(chain)(ws, batch[0])
    for actual, expected in zip(values, [*grads, loss], strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_later_stages_value_in_an_earlier_one_is_an_error():
    def loss(ws, x):
        g = jax.grad(lambda w: square(jpp.pipeline_yield(jnp.tanh(x @ w)) @ ws[1]))(ws[0])
        return square(jpp.pipeline_yield(x @ g) @ ws[1])

    with pytest.raises(
        StageError, match=r"compiler/test_partition.py:\d+: stage 1 needs .* depends on the backward pass"
    ):
        tasks_of(loss)


def test_types_of_values_are_those_of_jax():
    assert value_type(jax.typeof(jnp.float32(1))).aval.dtype == "float32"
    assert value_type(jax.typeof(jax.random.split(jax.random.key(0), 3))).aval.shape == (3, 2)
