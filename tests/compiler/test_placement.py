"""Where things outside the loops run, where state lives, what crosses after the loop, and what is donated."""

import sys
from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest
from planning import f32, plan_step, sent

import jaxpp_async as jpp
from jaxpp_async.compiler import ir
from jaxpp_async.compiler.ir import OuterStep
from jaxpp_async.compiler.placement import place
from jaxpp_async.program.instructions import Aval, Input, Output, Run

D, MB = 4, 3
X = f32(MB, 2, D)
STEP_COUNT = jax.ShapeDtypeStruct((), "int32")


def loss_fn(weights, x):
    for w in weights[:-1]:
        x = jpp.pipeline_yield(jnp.tanh(x @ w))
    return jnp.sum(jnp.square(x @ weights[-1]))


def tied_loss(weights, x):
    """The last stage uses the first one's weight again."""
    return jnp.sum(jnp.square(jpp.pipeline_yield(jnp.tanh(x @ weights[0])) @ weights[1] @ weights[0].T))


def gradients(loss, weights, batch, schedule):
    def of_one(x):
        value, grads = jax.value_and_grad(loss)(weights, x)
        return grads, value

    return jpp.accumulate_grads(of_one, schedule)(batch)


def homes(done):
    """Argument leaf's name to its actors."""
    graph = done.placed.graph
    return {graph.values[i.value].label: i.actors for i in graph.inputs}


def result_homes(done):
    graph, found = done.placed.graph, {}
    for o in graph.outputs:
        found[done.traced.out_names[o.result]] = tuple(
            sorted({*found.get(done.traced.out_names[o.result], ()), *o.actors})
        )
    return found


def outer_nodes(done):
    return [n for n in done.placed.graph.nodes if n.label.startswith("outer")]


def sent_after_the_loop(done):
    """(from, to, shape) of what nodes behind the loop take from other actors."""
    graph = done.placed.graph
    holders = {i.value: set(i.actors) for i in graph.inputs} | {
        v: {n.actor} for n in graph.nodes for v in n.outputs
    }
    found = set()
    for n in outer_nodes(done):
        for v in n.inputs:
            if n.actor not in holders[v]:
                found.add((min(holders[v]), n.actor, v))
    for o in graph.outputs:
        found |= {(min(holders[o.value]), a, o.value) for a in o.actors if a not in holders[o.value]}
    return sorted((a, b, graph.values[v].aval.shape) for a, b, v in found)


# ---------------------------------------------------------------- SGD, Adam


def adam_step(optimizer, num_stages):
    def step(state, batch):
        weights, opt = state
        grads, losses = gradients(loss_fn, weights, batch, jpp.Std1F1B(num_stages))
        updates, opt = optimizer.update(grads, opt, weights)
        return (optax.apply_updates(weights, updates), opt), losses

    return step


def adam_plan(optimizer, num_stages=2, actors=2, weights_a_stage=1):
    weights = [f32(D, D)] * num_stages * weights_a_stage
    opt = jax.eval_shape(optimizer.init, weights)
    return plan_step(adam_step(optimizer, num_stages), (weights, opt), X, actors=actors, donate=(0,))


CLIPPED = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100))
)


def test_sgd_updates_each_weight_where_its_gradient_is_and_sends_nothing():
    def step(weights, batch):
        grads, losses = gradients(loss_fn, weights, batch, jpp.Std1F1B(2))
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), losses

    done = plan_step(step, [f32(D, D)] * 2, X, donate=(0,))
    assert sent_after_the_loop(done) == []
    assert [homes(done)[f"weights[{k}]"] for k in (0, 1)] == [(0,), (1,)]
    assert result_homes(done) == {"result[0][0]": (0,), "result[0][1]": (1,), "result[1]": (1,)}


def test_optimizer_state_lies_next_to_its_parameter_and_the_count_everywhere():
    done = adam_plan(optax.adamw(1e-3))
    for name, actors in homes(done).items():
        if name.endswith(("[0]", ".mu[0]", ".nu[0]")) and name.startswith("state[0]"):
            assert actors == (0,), name
    where = homes(done)
    assert [where[f"state[0][{k}]"] for k in (0, 1)] == [(0,), (1,)]
    assert [where[f"state[1][0].{m}[{k}]"] for m in ("mu", "nu") for k in (0, 1)] == [(0,), (1,), (0,), (1,)]
    assert where["state[1][0].count"] == (0, 1)
    assert sent_after_the_loop(done) == []
    assert result_homes(done)["result[0][1][0].count"] == (0, 1)


@pytest.mark.parametrize("actors", [2, 3, 4])
def test_global_norm_clipping_sends_scalars_and_one_partial_an_actor(actors):
    done = adam_plan(CLIPPED, num_stages=actors, actors=actors)
    crossing = sent_after_the_loop(done)
    assert {shape for *_, shape in crossing} == {()}
    # One partial from each actor to the one that adds them; back go the norm and whether it is too large.
    gather = [(a, b) for a, b, _ in crossing if b == 0]
    assert gather == [(a, 0) for a in range(1, actors)]
    assert sorted({(a, b) for a, b, _ in crossing if b != 0}) == [(0, a) for a in range(1, actors)]
    assert len(crossing) == 3 * (actors - 1)


def test_sums_of_several_gradients_an_actor_are_regrouped():
    """Six squares on two actors: each adds its own three before anything is sent."""

    def step(weights, batch):
        def loss(ws, x):
            x = jpp.pipeline_yield(jnp.tanh(x @ ws[0]) @ ws[1] @ ws[2])
            return jnp.sum(jnp.square(x @ ws[3] @ ws[4] @ ws[5]))

        grads, losses = gradients(loss, weights, batch, jpp.Std1F1B(2))
        norm = sum(jnp.sum(jnp.square(g)) for g in reversed(grads[::2] + grads[1::2]))  # in no useful order
        return jax.tree.map(lambda w, g: w - g / norm, weights, grads), losses, norm

    done = plan_step(step, [f32(D, D)] * 6, X, donate=(0,))
    crossing = sent_after_the_loop(done)
    assert crossing == [(0, 1, ()), (1, 0, ())]


def test_levels_are_as_few_as_the_crossings_ask_for():
    """With clipping: partials, total, update. Without it there is nothing to wait for."""
    for optimizer, expected in [(optax.adamw(1e-3), 1), (CLIPPED, 3)]:
        done = adam_plan(optimizer)
        behind = [n.label for n in outer_nodes(done)]
        assert len(set(behind)) == len(behind)  # one task an actor and level
        assert len({label.split(",")[0] for label in behind}) == expected


def test_a_schedule_of_the_learning_rate_is_computed_on_every_actor():
    done = adam_plan(optax.adamw(optax.linear_schedule(1.0, 0.0, 10)))
    assert homes(done)["state[1][0].count"] == (0, 1)
    assert sent_after_the_loop(done) == []


def test_a_float_count_is_computed_once_and_sent():
    """Two executables may round differently, and copies have to stay equal."""

    def step(state, batch):
        grads, losses = gradients(loss_fn, state["w"], batch, jpp.Std1F1B(2))
        weights = jax.tree.map(lambda w, g: w - g * state["rate"], state["w"], grads)
        return {"w": weights, "rate": state["rate"] * 0.9}, losses

    done = plan_step(step, {"w": [f32(D, D)] * 2, "rate": f32()}, X, donate=(0,))
    assert homes(done)["state['rate']"] == (0, 1)
    assert sent_after_the_loop(done) == [(0, 1, ())]


# ---------------------------------------------------------------- tied weights


def test_a_tied_weight_is_updated_once_and_sent():
    def step(state, batch):
        grads, losses = gradients(tied_loss, state["w"], batch, jpp.Std1F1B(2))
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
        return {"w": jax.tree.map(lambda w, m: w - m, state["w"], momenta), "m": momenta}, losses

    weights = [f32(D, D)] * 2
    done = plan_step(step, {"w": weights, "m": weights}, X, donate=(0,))
    where = homes(done)
    assert where["state['w'][0]"] == (0, 1) and where["state['w'][1]"] == (1,)
    assert len(where["state['m'][0]"]) == 1
    # A partial gradient one way, the new weight the other.
    crossing = sent_after_the_loop(done)
    assert sorted((a, b) for a, b, _ in crossing) == [(0, 1), (1, 0)]
    assert {shape for *_, shape in crossing} == {(D, D)}
    updates = [
        n for n in outer_nodes(done) for v in n.outputs if done.placed.graph.values[v].aval.shape == (D, D)
    ]
    assert len(updates) >= 3


@pytest.mark.parametrize("width", [4, 32], ids=["a small weight", "a large one"])
def test_a_statistic_behind_the_state_draws_no_weight_elsewhere(width):
    """The result that continues an argument also stays with that argument."""

    def step(weights, batch):
        grads, _ = gradients(loss_fn, weights, batch, jpp.Std1F1B(2))
        largest = jnp.maximum(jnp.max(jnp.abs(weights[0])), jnp.max(jnp.abs(weights[1])))
        return jax.tree.map(jnp.subtract, weights, grads), largest

    done = plan_step(step, [f32(width, width)] * 2, f32(MB, 2, width), donate=(0,))
    assert [homes(done)[f"weights[{k}]"] for k in (0, 1)] == [(0,), (1,)]
    assert sent_after_the_loop(done) == [(1, 0, ())]


def test_what_continues_an_argument_lives_on_all_its_homes():
    """A cast of a weight is a result of its own, on the other actor."""

    def step(state, batch):
        grads, losses = gradients(loss_fn, state["w"], batch, jpp.Std1F1B(2))
        both = jnp.concatenate([state["w"][0], state["w"][1]])
        return (
            {"w": jax.tree.map(jnp.subtract, state["w"], grads), "both": both * state["both"]},
            losses,
            both,
        )

    done = plan_step(step, {"w": [f32(D * 8, D * 8)] * 2, "both": f32(2 * D * 8, D * 8)}, f32(MB, 2, D * 8))
    for name, actors in homes(done).items():
        if name.startswith("state"):
            assert result_homes(done)[name.replace("state", "result[0]")] == actors, name


# ---------------------------------------------------------------- donation


def donated_labels(done, actor):
    """Labels of the buffers that the runs of an actor's program consume, by run."""
    program = done.programs[actor]
    names = {i.buffer: homes_by_arg(done)[i.arg] for i in program.instructions if isinstance(i, Input)}
    return {
        i.label: [names.get(i.inputs[p], f"{i.inputs[p]}") for p in i.donated]
        for i in program.instructions
        if isinstance(i, Run)
    }


def homes_by_arg(done):
    return {i.arg: done.placed.graph.values[i.value].label for i in done.placed.graph.inputs}


def test_donated_state_and_accumulators_are_reused_in_place():
    done = adam_plan(optax.adamw(1e-3))
    for actor in (0, 1):
        donated = donated_labels(done, actor)
        update = donated[next(label for label in reversed(list(donated)) if label.startswith("outer"))]
        expected = [
            f"state[0][{actor}]",
            "state[1][0].count",
            f"state[1][0].mu[{actor}]",
            f"state[1][0].nu[{actor}]",
        ]
        assert sorted(name for name in update if name.startswith("state")) == expected
        for label, names in donated.items():
            if label.startswith("bwd"):
                assert len(names) == 1, "each backward adds into its accumulator in place"
            if label.startswith("fwd"):
                assert not any(name.startswith("state") for name in names)


def test_what_is_not_donated_is_kept():
    done = plan_step(adam_step(optax.adamw(1e-3), 2), *_state_and_batch(), actors=2)
    for actor in (0, 1):
        assert not any(
            name.startswith(("state", "batch"))
            for names in donated_labels(done, actor).values()
            for name in names
        )
        assert not any(i.donated for i in done.programs[actor].instructions if isinstance(i, Input))


def _state_and_batch():
    weights = [f32(D, D)] * 2
    return (weights, jax.eval_shape(optax.adamw(1e-3).init, weights)), X


def test_a_result_that_is_an_argument_is_passed_on():
    def step(state, batch):
        grads, losses = gradients(loss_fn, state["w"], batch, jpp.Std1F1B(2))
        return (
            {"w": jax.tree.map(jnp.subtract, state["w"], grads), "fixed": state["fixed"]},
            losses,
            state["fixed"],
        )

    for donate in ((), (0,)):
        done = plan_step(step, {"w": [f32(D, D)] * 2, "fixed": f32(7)}, X, donate=donate)
        (actor,) = homes(done)["state['fixed']"]
        instructions = done.programs[actor].instructions
        (buffer,) = [
            i.buffer
            for i in instructions
            if isinstance(i, Input) and homes_by_arg(done)[i.arg] == "state['fixed']"
        ]
        assert sum(isinstance(i, Output) and i.buffer == buffer for i in instructions) == 2
        assert (7,) not in [shape for *_, shape in sent(done)]


def test_a_result_that_is_an_argument_and_no_other_is_nobodys_work():
    done = plan_step(lambda a, b, x: (x + 1, b, a), f32(7), f32(7), X)
    assert homes(done) == {"a": (), "b": (), "x": (0,)}
    assert result_homes(done) == {"result[0]": (0,)}
    assert done.placed.placement.handed_back == {1: done.traced.flat.inputs[1], 2: done.traced.flat.inputs[0]}


# ---------------------------------------------------------------- before the loop, and without one


def test_values_made_before_the_loop_reach_their_stages():
    def step(weights, batch):
        scaled = [w * jnp.sum(weights[1]) for w in weights]
        return gradients(loss_fn, scaled, batch, jpp.Std1F1B(2))

    done = plan_step(step, [f32(D, D)] * 2, X)
    first_task = next(k for k, n in enumerate(done.placed.graph.nodes) if n.task is not None)
    assert any(n.label.startswith("outer") for n in done.placed.graph.nodes[:first_task])


def test_without_a_loop_everything_runs_on_one_actor():
    done = plan_step(lambda w, x: (w @ w + x, jnp.sum(x)), f32(D, D), f32(D, D))
    assert [n.actor for n in done.placed.graph.nodes] == [0]
    assert sent(done) == []


def test_two_loops_run_one_after_the_other():
    """Training, then evaluation with the new weights."""

    def step(weights, batch):
        grads, losses = gradients(loss_fn, weights, batch, jpp.Std1F1B(2))
        weights = jax.tree.map(jnp.subtract, weights, grads)
        after = jpp.accumulate_grads(lambda x: loss_fn(weights, x), jpp.GPipe(2), reduce=jpp.Stack())(batch)
        return weights, losses, after

    done = plan_step(step, [f32(D, D)] * 2, X, donate=(0,))
    labels = [n.label for n in done.placed.graph.nodes]
    assert labels.count("fwd(stage 0, mb 2)") == 2
    assert (D, D) not in [shape for *_, shape in sent(done)]


def test_random_keys_and_constants_as_results_move_no_weight():
    def step(key, weights, batch):
        key, used = jax.random.split(key)
        grads, losses = gradients(
            lambda ws, x: loss_fn(ws, x * jax.random.bernoulli(used, 0.5, x.shape)),
            weights,
            batch,
            jpp.GPipe(2),
        )
        return key, grads, losses, 3

    done = plan_step(step, jax.eval_shape(lambda: jax.random.key(0)), [f32(D, D)] * 2, X)
    assert (D, D) not in [shape for *_, shape in sent(done)]
    assert result_homes(done)["result[3]"] == (0,)


# ---------------------------------------------------------------- cost


def update_of_many(leaves, actors):
    """Clipping and an update, an operation at a time: squares, their sum over all actors, and new weights."""
    types = ir.Types()
    new = lambda *shape: types.new(ir.ValueType(Aval(shape, "float32")))  # noqa: E731
    weights, grads = ([new(32) for _ in range(leaves)] for _ in range(2))
    op = lambda name, reads, out: ir.Op(name, tuple(reads), (out,), list, "line 1")  # noqa: E731
    items = [ir.Loop(ir.Flat((), (), ()), (), (), tuple(grads), (), None, 1, "line 0")]
    total = None
    for g in grads:
        square = new()
        items.append(op("reduce_sum", [g], square))
        if total is not None:
            items.append(op("add", [total, square], out := new()))
        total = square if total is None else out
    results = [new(32) for _ in range(leaves)]
    for w, g, result in zip(weights, grads, results, strict=True):
        items += [op("mul", [g, total], scaled := new(32)), op("sub", [w, scaled], result)]
    return (
        OuterStep(
            inputs=tuple(weights),
            items=tuple(items),
            outputs=tuple(results),
            loop_needs={0: {w: frozenset({k % actors}) for k, w in enumerate(weights)}},
            loop_makes={0: {g: k % actors for k, g in enumerate(grads)}},
            continues={k: k for k in range(leaves)},
            num_actors=actors,
        ),
        types,
    )


def calls_of(fn, *args):
    """How many calls and lines of Python a function takes: what it costs, without a clock."""
    count = 0

    def tick(*_):
        nonlocal count
        count += 1
        return tick

    sys.settrace(tick)
    try:
        fn(*args)
    finally:
        sys.settrace(None)
    return count


def test_placing_costs_as_much_as_there_are_operations():
    """A sum of a thousand leaves is a chain a thousand deep."""
    once, twice = (calls_of(place, *update_of_many(n, 8)) for n in (500, 1000))
    assert twice < 2.1 * once


def test_sums_over_many_leaves_meet_once_an_actor():
    placement = place(*update_of_many(1000, 8))
    sums = [
        (item, placement.op_actors[i])
        for i, item in enumerate(placement.items)
        if isinstance(item, ir.Op) and item.name == "add"
    ]
    assert len(sums) == 999
    assert Counter(actors for _, actors in sums) == {
        frozenset({a}): 124 + (7 if a == 0 else 0) for a in range(8)
    }
    assert placement.num_levels == 4  # before the loop, squares, their sum, the update
