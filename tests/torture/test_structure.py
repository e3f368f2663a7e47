"""What the compiler promises beside the numbers: what crosses between actors in the loop, what is computed
where."""

from __future__ import annotations

import functools
from collections import Counter

import jax
import pytest
from planning import heavy, plan_step

import jaxpp_async as jpp
from jaxpp_async.compiler.evaluate import recipe_function
from jaxpp_async.jax_bridge import private_api
from jaxpp_async.session import report
from tests.torture.registry import NUM_MICROBATCHES, WIDTH, Chosen
from tests.torture.test_programs import CASES, weights_that_cross

WEIGHT_BYTES = 4 * WIDTH * WIDTH


@functools.cache
def planned(name, kind=jpp.Std1F1B):
    """The case's plan with an actor a stage."""
    case, chosen = CASES[name], Chosen()
    chosen.kind = kind
    return plan_step(functools.partial(case.step, chosen), *case.make_args(), actors=case.stages)


def cut_of(name):
    (scheduled,) = planned(name).placed.loops.values()
    return scheduled.staged


def case(name, *more):
    """A parameter set under the case's name."""
    return pytest.param(name, *more, id=name)


# ---------------------------------------------------------------- tied weights

# Case: how many stages use each of its tied weights.
TIED = {
    "tied_weight_in_two_stages": [2],
    "tied_weight_in_three_stages": [3],
    "tied_weight_in_four_stages": [4],
    "two_tied_weights_of_equal_shape": [2, 2],
    "two_tied_weights_of_equal_shape_in_four_stages": [4, 4],
    "three_tied_weights_in_different_pairs_of_stages": [2, 2, 2],
    "tied_weight_used_twice_in_each_stage": [3],
    "tied_embedding_as_lookup_and_head": [2],
    "tied_weight_with_a_regularizer": [2],
    "checkpoint_and_a_tied_weight": [2],
}


@pytest.mark.parametrize("name", TIED)
def test_tied_weights_meet_once_after_the_loop(name):
    transfers = report.make(planned(name), {}, {}).transfers
    large = [t for t in transfers if t.size_bytes >= WEIGHT_BYTES]
    assert all("float32[3, 4]" in t.what for t in large if t.in_loop), "only activations cross in the loop"
    # Every part but one to where they meet, and the sum to where the weight lives, which the result
    # continues.
    weights = [t for t in large if not t.in_loop]
    assert sum(t.count for t in weights) == sum(2 * (uses - 1) for uses in TIED[name])


# ---------------------------------------------------------------- what is computed again

# Every layer has one tanh, so executables tell by theirs whose layers they run.
CHECKPOINTED = [
    name
    for name in CASES
    if name.startswith(("checkpoint_", "jit_around_checkpoint"))
    and "dropout" not in name
    and "static" not in name
]


def count_of(jaxpr, primitive):
    inner = sum(count_of(j, primitive) for eqn in jaxpr.eqns for j in private_api.sub_jaxprs(eqn))
    return inner + sum(eqn.primitive.name == primitive for eqn in jaxpr.eqns)


def counts_of(done, primitive):
    """How often each executable runs a primitive, by its name such as `"bwd1"`."""
    found = Counter()
    for recipe in done.placed.recipes:
        types = done.traced.types
        inputs = [jax.ShapeDtypeStruct(types[v].aval.shape, types[v].aval.dtype) for v in recipe.inputs]
        found[recipe.name] += count_of(
            jax.make_jaxpr(recipe_function(recipe, types))(*inputs).jaxpr, primitive
        )
    return found


@pytest.mark.parametrize("name", [case(name) for name in CHECKPOINTED])
def test_a_checkpoint_runs_no_earlier_stage_again(name):
    done = planned(name, jpp.GPipe)
    tanhs, dots = counts_of(done, "tanh"), counts_of(done, "dot_general")
    stages = range(CASES[name].stages)
    assert [tanhs[f"fwd{s}"] for s in stages] and sum(tanhs.values())
    for s in stages:
        # Again in the checkpoint, and once more of a saved product for who reads the result outside.
        assert tanhs[f"bwd{s}"] <= 2 * tanhs[f"fwd{s}"], f"stage {s}: {tanhs}"
        # again, and two products a product
        assert dots[f"bwd{s}"] <= 3 * dots[f"fwd{s}"], f"stage {s}: {dots}"


def test_policies_decide_what_a_stage_computes_again():
    """Everything saved: nothing again. Nothing saved: each stage's own layer, once."""
    for name, again in {
        "checkpoint_policy_everything_saveable_around_markers": 0,
        "checkpoint_policy_nothing_saveable_around_markers": 1,
        "checkpoint_policy_dots_saveable_around_blocks": 1,
    }.items():
        tanhs = counts_of(planned(name, jpp.GPipe), "tanh")
        assert [tanhs[f"bwd{s}"] for s in (0, 1)] == [again, again], (name, tanhs)


# ---------------------------------------------------------------- what is not computed


@pytest.mark.parametrize(
    "name, backwards",
    [
        ("evaluation_loop", set()),
        ("frozen_everything", set()),
        ("frozen_first_stage", {1, 2}),
        ("frozen_first_and_middle_stage", {2}),
        ("gradients_of_the_last_stage_alone", {2}),
        ("only_the_last_stage_has_weights", {2}),
        ("stop_gradient_between_stages", {1}),
    ],
)
def test_stages_that_need_no_gradient_have_no_backward(name, backwards):
    found = {task[-1] for task, names in heavy(cut_of(name)).items() if task.startswith("bwd") and names}
    assert found <= {str(stage) for stage in backwards}


@pytest.mark.parametrize(
    "name, stages",
    [
        ("one_jitted_block_for_several_stages", 4),
        ("a_python_loop_over_sixteen_layers", 16),
        ("marker_inside_a_scan_over_layers", 5),
        ("two_markers_in_a_row", 3),
        ("vmap_over_a_marked_function", 2),
        ("checkpoint_inside_checkpoint_around_markers", 3),
    ],
)
def test_every_marker_is_one_boundary(name, stages):
    assert cut_of(name).num_stages == stages


# ---------------------------------------------------------------- what crosses


def crossings(name):
    """`float32[3, 4]` and how often a microbatch, for what crosses in the loop."""
    lines = report.make(planned(name), {}, {}).transfers
    found = Counter()
    for t in lines:
        if t.in_loop:
            found[t.what.split(" of ")[0].split(" by ")[0].split("  ")[0]] += t.count / NUM_MICROBATCHES
    return found


@pytest.mark.parametrize(
    "name, most",
    [
        # an activation and a cotangent a boundary; tables are made again
        case("rotary_tables_for_all_stages", 4),
        case("a_causal_mask_for_all_stages", 4),
        case("a_batch_leaf_used_by_several_stages", 4),
        case("captured_arrays_for_all_stages", 6),  # and what was looked up in the table
        case("skip_from_the_input_to_every_stage", 6),
        case("skip_over_three_stages", 8),  # and the skip, both ways
        case("dropout_with_a_new_style_key", 4),
        case("one_key_used_in_every_stage", 4),
    ],
)
def test_only_activations_cross(name, most):
    values = [t for t in report.make(planned(name), {}, {}).transfers if t.in_loop]
    assert sum(t.count for t in values) <= most * NUM_MICROBATCHES, values


@pytest.mark.parametrize(
    "name", [case("tied_parts_of_one_array"), case("index_selects_a_row_of_a_shared_table")]
)
def test_parts_of_a_shared_array_are_taken_again(name):
    assert not weights_that_cross(planned(name))


def test_a_value_through_several_stages_goes_directly():
    pairs = {
        (t.from_actor, t.to_actor)
        for t in report.make(planned("skip_over_three_stages"), {}, {}).transfers
        if t.in_loop
    }
    assert (0, 3) in pairs and (3, 0) in pairs


def test_bfloat16_activations_cross_as_bfloat16():
    lines = report.make(planned("bfloat16_compute_with_float32_masters"), {}, {}).transfers
    assert {t.size_bytes for t in lines if t.in_loop} == {2 * 3 * WIDTH}
    assert all(t.count == NUM_MICROBATCHES for t in lines if t.in_loop)


def test_a_stacked_leaf_that_spans_actors_is_reported_with_its_bytes():
    made = report.make(planned("marker_inside_a_scan_over_layers"), {}, {})
    (leaf,) = [line for line in made.inputs if line.name == "params"]
    assert leaf.actors == (0, 1, 2, 3) and leaf.size_bytes == 4 * WEIGHT_BYTES
