"""Loops cut at those of their marks that a schedule names: which marks stay, and what balanced cuts weigh."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from planning import f32, heavy, plan_step, sent

import jaxpp_async as jpp
from jaxpp_async.compiler.cut import cut_choice_of, cut_loops, marks_of, work_between_marks
from jaxpp_async.compiler.export import Target
from jaxpp_async.compiler.export_cache import ExportCache
from jaxpp_async.compiler.ir import Loop
from jaxpp_async.compiler.partition import partition
from jaxpp_async.compiler.pipeline import StepRequest, compile_step
from jaxpp_async.compiler.trace import trace
from jaxpp_async.errors import PlanError, ScheduleError, StageError, UnsupportedError
from jaxpp_async.schedules.cut import Cut
from jaxpp_async.schedules.planned import PlannedSchedule

D = 4
X = f32(3, 2, D)  # 3 microbatches of 2 rows
DOT, TANH, SUM = "dot_general", "tanh", "reduce_sum"


def weights(*widths):
    """The types of weights between layers of these widths, each with a mark behind it but the last."""
    return [f32(a, b) for a, b in pairwise(widths)]


def chain(ws, x):
    for i, w in enumerate(ws[:-1]):
        x = jpp.pipeline_yield(jnp.tanh(x @ w), name=f"layer {i}")
    return jnp.sum(jnp.square(x @ ws[-1]))


FIVE, SIX = weights(*[D] * 6), weights(*[D] * 7)


def step_of(schedule, loss=chain):
    def step(ws, batch):
        def of_one(x):
            value, grads = jax.value_and_grad(loss)(ws, x)
            return grads, value

        grads, losses = jpp.accumulate_grads(of_one, schedule)(batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), losses

    return step


def loops_of(fn, *args, schedule=None, actors=3):
    traced = cut_loops(trace(fn, args), schedule, actors)
    return [op for op in traced.flat.ops if isinstance(op, Loop)], traced.types


def cut(schedule, loss=chain, ws=SIX, x=X, **options):
    (loop,), types = loops_of(step_of(schedule, loss), ws, x, **options)
    return partition(loop, types)


# ---------------------------------------------------------------- marks that are named


def test_a_plan_for_another_step_is_refused():
    rows = tuple(map(tuple, jpp.Std1F1B(3).tasks(3, 3)))
    names = tuple(f"layer {i}" for i in range(5))
    plan = PlannedSchedule(rows, (1, 3), mark_names=names)
    staged = cut(plan)
    assert staged.loop.cut is not None and staged.loop.cut.boundaries == (1, 3)
    with pytest.raises(PlanError, match=r"a step with 5 marks .*, and the loop at .*test_cut.py:\d+ has 4"):
        cut(plan, ws=FIVE)
    other = PlannedSchedule(rows, (1, 3), mark_names=("embedding", *names[1:]))
    with pytest.raises(PlanError, match=r"mark 0 has the name 'embedding', and .* the name 'layer 0'; plan"):
        cut(other)

    def twice(ws, batch):
        step = step_of(plan)
        return step(step(ws, batch)[0], batch)

    with pytest.raises(PlanError, match=r"with one loop, and the step has 2 loops, at .*test_cut.py:\d+ and"):
        loops_of(twice, SIX, X)


@pytest.mark.parametrize("stages", [[1, 3], ["layer 1", "layer 3"], (1, "layer 3")])
def test_marks_that_are_not_named_have_no_effect(stages):
    staged = cut(jpp.Std1F1B(3, stages=stages))
    assert heavy(staged) == {
        "fwd0": [DOT, TANH] * 2,
        "fwd1": [DOT, TANH] * 2,
        "fwd2": [DOT, TANH, DOT, SUM],
        "bwd2": [DOT] * 4,
        "bwd1": [DOT] * 4,
        "bwd0": [DOT] * 3,
    }
    assert staged.stage_names == ("layer 1", "layer 3")
    assert staged.loop.cut is not None and staged.loop.cut.boundaries == (1, 3)
    assert [mark.name for mark in staged.loop.cut.marks] == [f"layer {i}" for i in range(5)]


def test_a_cut_equals_that_of_a_model_with_only_these_marks():
    def marked_twice(ws, x):
        for i, w in enumerate(ws[:-1]):
            x = jnp.tanh(x @ w)
            x = jpp.pipeline_yield(x, name=f"layer {i}") if i in (1, 3) else x
        return jnp.sum(jnp.square(x @ ws[-1]))

    ours = plan_step(step_of(jpp.Std1F1B(3, stages=[1, 3])), FIVE, X, actors=3)
    theirs = plan_step(step_of(jpp.Std1F1B(3), marked_twice), FIVE, X, actors=3)
    assert sent(ours) == sent(theirs)
    assert [str(p) for p in ours.programs] == [str(p) for p in theirs.programs]


def test_without_stages_every_mark_is_a_boundary_and_nothing_is_copied():
    traced = trace(step_of(jpp.GPipe(6)), (SIX, X))
    after = cut_loops(traced, None, 6)
    assert [op is item for op, item in zip(after.flat.ops, traced.flat.ops, strict=True)]
    (loop,) = [op for op in after.flat.ops if isinstance(op, Loop)]
    assert loop.cut is None and len(marks_of(loop)) == 5


def test_a_loop_of_one_stage_keeps_no_mark():
    staged = cut(jpp.GPipe(1, stages=[]))
    assert staged.num_stages == 1 and staged.stage_names == ()
    assert heavy(staged)["fwd0"] == [DOT, TANH] * 5 + [DOT, SUM]


def test_marks_in_a_scan_and_in_a_checkpoint_are_counted_as_they_run():
    def scanned(ws, x):
        def layer(x, w):
            return jpp.pipeline_yield(jax.checkpoint(lambda x: jnp.tanh(x @ w))(x)), None

        return jnp.sum(lax.scan(layer, x, jnp.stack(ws))[0])

    def checkpointed(ws, x):
        @jax.checkpoint
        def two(x, a, b):
            return jpp.pipeline_yield(jnp.tanh(jpp.pipeline_yield(jnp.tanh(x @ a)) @ b))

        return jnp.sum(two(two(x, *ws[:2]), *ws[2:4]))

    for loss in (scanned, checkpointed):
        staged = cut(jpp.Std1F1B(2, stages=[1]), loss, FIVE[:4])
        made = heavy(staged)
        assert len(marks_of(staged.loop)) == 1
        for task in ("fwd0", "fwd1"):
            assert made[task].count(DOT) + made[task].count("remat2") == 2
        assert made["fwd1"].count(SUM) == 1


def test_the_marks_of_a_gradient_s_tangents_follow_their_marks():
    """Forward mode inside: each mark has a side for tangents, which reverse mode transposes."""

    def loss(ws, x):
        primal, tangent = jax.jvp(lambda x: chain(ws, x), (x,), (jnp.ones_like(x),))
        return primal + tangent

    done = plan_step(step_of(jpp.Std1F1B(3, stages=[0, 2]), loss), FIVE, X, actors=3)
    assert done.passes["partition"].startswith("loop of 3 stages")


def test_a_mark_that_is_no_boundary_may_be_where_no_boundary_can_be():
    """Stages cannot run forward again behind their backward; a mark that was removed asks nothing of them."""

    def loss(ws, x):
        slopes = jax.vmap(jax.grad(lambda row: chain(ws, row[None])))(x)
        return jnp.sum(jnp.square(jpp.pipeline_yield(slopes) @ ws[0]))

    assert heavy(cut(jpp.GPipe(2, stages=[5]), loss))["fwd1"] == [DOT, SUM]
    with pytest.raises(StageError, match="the gradient of a gradient that goes through this pipeline_yield"):
        cut(jpp.GPipe(2, stages=[0]), loss)


# ---------------------------------------------------------------- which schedule says so


class Mine:
    """A schedule of one's own, whose cut is a list."""

    num_stages, stages = 3, [0, 4]

    def tasks(self, num_microbatches, num_actors):
        return jpp.GPipe(3).tasks(num_microbatches, num_actors)


def boundaries(*loops):
    return [loop.cut and loop.cut.boundaries for loop in loops]


def test_any_schedule_may_have_stages():
    args = SIX, X
    assert boundaries(*loops_of(step_of(Mine()), *args)[0]) == [(0, 4)]
    done = plan_step(step_of(Mine()), *args, actors=2)
    assert done.passes["partition"].splitlines()[0] == "loop of 3 stages, 3 microbatches"


def test_another_schedule_keeps_the_written_cut_unless_it_has_its_own():
    written = step_of(jpp.Std1F1B(3, stages=[1, 3]))
    args = SIX, X

    def under(schedule):
        return boundaries(*loops_of(written, *args, schedule=schedule)[0])

    assert under(None) == under(jpp.GPipe(3)) == under(jpp.GPipe(3).tasks(3, 2)) == [(1, 3)]
    assert under(jpp.GPipe(3, stages=[0, 1])) == [(0, 1)]
    with pytest.raises(ScheduleError, match="stages names 2 marks for 3 stages, and the schedule has 4"):
        under(jpp.GPipe(4))
    balanced = step_of(jpp.Std1F1B(3, stages="balanced"))
    (loop,), _ = loops_of(balanced, *args, schedule=jpp.GPipe(4))
    assert loop.cut is not None and len(loop.cut.boundaries) == 3


def test_what_is_no_schedule_is_left_to_the_checks_of_schedules():
    for schedule in (jpp.GPipe, 3, [[]], [["no task"]]):
        (loop,), _ = loops_of(step_of(schedule), SIX, X)
        assert loop.cut is None
        with pytest.raises(ScheduleError):
            plan_step(step_of(schedule), SIX, X)


def test_a_loop_of_fewer_marks_is_an_error_with_its_line():
    def step(ws, batch):
        schedule = jpp.GPipe(3, stages=[1, 3])
        long = jpp.accumulate_grads(lambda x: chain(ws, x), schedule)(batch)
        return long, jpp.accumulate_grads(lambda x: chain(ws[:4], x), schedule)(batch)

    with pytest.raises(ScheduleError) as caught:
        plan_step(step, FIVE, X)
    first, listed, *marks = str(caught.value).splitlines()
    assert first.startswith(__file__) and "names mark 3 and the loop body has none of this number" in first
    assert listed == "the marks of the loop body are:"
    assert [line.split(": ")[0].strip() for line in marks] == ["0", "1", "2"]
    assert all(f"'layer {k}'" in line for k, line in enumerate(marks))


def test_a_schedule_of_too_few_stages_is_told_of_stages():
    with pytest.raises(ScheduleError, match="or give it stages='balanced', or stages="):
        plan_step(step_of(jpp.GPipe(3)), FIVE, X)


# ---------------------------------------------------------------- balanced cuts


def test_the_work_between_marks_is_that_of_forward_and_backward():
    wide = weights(D, D, D, 100)
    (loop,), types = loops_of(step_of(jpp.GPipe(3)), wide, X)
    found = work_between_marks(loop, types)
    dots = 2 * 2 * D * np.array([2 * D, 3 * D, 3 * 100])  # the first has no gradient of its input
    assert np.all(found >= dots) and np.all(found <= 1.4 * dots)  # older JAX has more elementwise operations


def test_a_balanced_cut_gives_the_heavy_head_a_stage_of_its_own():
    staged = cut(jpp.Std1F1B(3, stages="balanced"), ws=weights(*[32] * 7, 300), x=f32(3, 2, 32))
    chosen = staged.loop.cut
    assert isinstance(chosen, Cut) and chosen.boundaries == (2, 5)
    assert len(chosen.shares) == 3 and sum(chosen.shares) == pytest.approx(1)
    assert chosen.shares[2] > chosen.shares[1] > chosen.shares[0]


@pytest.mark.parametrize(
    ("schedule", "choice"),
    [
        (jpp.Std1F1B(3, stages="balanced"), "work"),
        (jpp.Std1F1B(3, stages=[1, 3]), ""),
        (jpp.Std1F1B(5), ""),
        (PlannedSchedule(tuple(map(tuple, jpp.GPipe(3).tasks(3, 3))), (1, 3)), "plan"),
    ],
)
def test_how_a_cut_was_chosen_is_known(schedule, choice):
    traced = cut_loops(trace(step_of(schedule), (FIVE, X)), None, 3)
    assert cut_choice_of(traced.flat) == choice


def test_a_balanced_cut_weighs_the_actors_of_the_schedule():
    """The head is as heavy as several layers, and shares its actor with the first stage of a V."""
    ws, x = weights(*[32] * 9, 128), f32(4, 2, 32)
    (turns,), _ = loops_of(step_of(jpp.Interleaved1F1B(4, stages="balanced")), ws, x, actors=2)
    (fold,), _ = loops_of(step_of(jpp.ZeroBubbleV(4, stages="balanced")), ws, x, actors=2)
    assert turns.cut is not None and fold.cut is not None
    one, other = (cut.shares[0] + cut.shares[3] for cut in (turns.cut, fold.cut))
    assert abs(turns.cut.shares[0] + turns.cut.shares[2] - 0.5) < 0.06 and abs(other - 0.5) < 0.06 < one - 0.5


def test_a_balanced_cut_without_gradients_weighs_the_forward():
    def step(ws, batch):
        return jpp.accumulate_grads(lambda x: chain(ws, x), jpp.GPipe(3, stages="balanced"))(batch)

    (loop,), _ = loops_of(step, weights(*[32] * 7, 200), f32(3, 2, 32))
    assert loop.cut is not None and loop.cut.boundaries == (2, 5)
    assert plan_step(step, weights(*[32] * 7, 200), f32(3, 2, 32)).passes["partition"].splitlines()[:4] == [
        "loop of 3 stages, 3 microbatches",
        f"stage boundaries: marks {loop.cut}",
        *[f"stage {k} ends at mark {mark}" for k, mark in enumerate(loop.cut.boundary_marks)],
    ]


def test_loops_of_one_model_have_one_balanced_cut():
    """The evaluation in a training step reads each weight where the training has it."""

    def step(ws, batch):
        schedule = jpp.GPipe(3, stages="balanced")
        new, losses = step_of(schedule)(ws, batch)
        held = jpp.accumulate_grads(lambda x: chain(ws, x), schedule)(batch)
        other = jpp.accumulate_grads(lambda x: chain(ws[1:], x), schedule)(batch)
        return new, losses, held, other

    loops, _ = loops_of(step, weights(*[32] * 7, 200), f32(3, 2, 32))
    train, held, other = loops
    assert train.cut == held.cut and other.cut is not None and len(other.cut.marks) == 5
    assert train.cut is not None and train.cut.boundaries == (2, 5)


# ---------------------------------------------------------------- what the compiled step says


def test_every_pass_is_told_of_the_cut():
    done = plan_step(step_of(jpp.Std1F1B(3, stages=[1, 3])), FIVE, X, actors=3)
    text = done.passes["partition"].splitlines()
    assert text[0] == "loop of 3 stages, 3 microbatches"
    assert text[1] == "stage boundaries: marks 1, 3 of 4 (counted from 0)"
    assert text[2].startswith("stage 0 ends at mark 1 (") and text[2].endswith(" 'layer 1')")
    assert done.passes["trace"].count("= pipeline_yield ") == 4  # as the user wrote it


@pytest.mark.parametrize(
    "schedule",
    [
        jpp.Interleaved1F1B(4, stages=[0, 2, 3]),
        jpp.ZeroBubbleV(4, stages=[1, 2, 4]),
        jpp.DualPipeV(4, stages="balanced"),
        jpp.ZeroBubbleH2(2, stages=[2]),
        jpp.LoopedBFS(3, stages="balanced"),
    ],
    ids=lambda s: type(s).__name__,
)
def test_every_kind_of_schedule_runs_under_a_cut(schedule):
    done = plan_step(step_of(schedule), SIX, f32(4, 2, D), actors=2, donate=(0,))
    assert done.passes["partition"].startswith(f"loop of {schedule.num_stages} stages, ")


def test_cuts_share_the_executables_of_equal_stages():
    """Stages of two equal layers are lowered once, wherever they are in the model and in whichever cut."""
    exports = ExportCache()
    layers = weights(*[D] * 11, 3)

    def lowered(stages):
        before = exports.count
        fn = step_of(jpp.GPipe(4, stages=stages))
        compile_step(
            StepRequest(
                fn=fn,
                args=(layers, X),
                argument_names=("ws", "batch"),
                static_argnums=(),
                donated=(0,),
                in_specs=lambda traced: [None] * len(traced.arg_names),
                out_specs=lambda traced: [None] * len(traced.out_names),
                num_actors=4,
                target=Target(None, "cpu", {}),
                exports=exports,
            )
        )
        return exports.count - before

    counts = [lowered(stages) for stages in ([3, 5, 7], [3, 5, 7], [3, 5, 8], (3, 5, 7))]
    assert counts[1] == counts[3] == 0
    assert 0 < counts[2] < counts[0]  # stages 0 and 1 are known, 2 and 3 are new


@pytest.mark.parametrize(
    ("schedule", "said"), [(jpp.GPipe(2), " in stage 1 "), (jpp.GPipe(1, stages=[]), "` runs Python")]
)
def test_an_error_of_tracing_names_a_stage_only_where_every_mark_ends_one(schedule, said):
    def loss(ws, x):
        x = jpp.pipeline_yield(x @ ws[0])
        return jnp.sum(x) + jnp.sum(jax.pure_callback(lambda v: v, f32(2, D), lax.stop_gradient(x)))

    with pytest.raises(UnsupportedError, match=said):
        trace(step_of(schedule, loss), ([f32(D, D)], X))
