"""The advice about an imbalance names the actor that holds the step up, and why."""

from __future__ import annotations

import pytest
from made_steps import run, step

from jaxpp_async.timeline.advice import advise
from jaxpp_async.timeline.imbalance import explain_imbalance, longer_than, work_of_actor


def explain(*actors):
    return explain_imbalance(step(*actors).actors)


def test_the_stage_to_shrink_is_one_of_the_busiest_actor():
    """Stage 2 is the slowest, and its actor has the least to compute: taking from actor 1 would be wrong."""
    sentence = explain(
        [run(0, 0, "fwd(stage 0, mb 0)", 0, 1), run(0, 1, "fwd(stage 2, mb 0)", 1, 10)],
        [run(1, 0, "fwd(stage 1, mb 0)", 0, 7.5), run(1, 1, "fwd(stage 3, mb 0)", 7.5, 15)],
    )
    assert sentence.startswith("actor 1 with stages 1 and 3 computes 50% longer than actor 0 with stages 0")
    assert "move a layer from stage 1 to stage 0" in sentence


def test_several_stages_on_one_actor_are_the_cause():
    sentence = explain(
        [run(0, 0, "fwd(stage 0, mb 0)", 0, 1), run(0, 1, "fwd(stage 1, mb 0)", 1, 2)],
        [run(1, 0, "fwd(stage 2, mb 0)", 0, 1.25)],
    )
    assert sentence.startswith("actor 0 with stages 0 and 1 computes 60% longer than actor 1 with stage 2;")
    assert "give each actor as many stages" in sentence and "from stage 0 to stage 2" in sentence


def test_the_update_is_the_cause():
    sentence = explain(
        [run(0, 0, "fwd(stage 0, mb 0)", 0, 1), run(0, 1, "outer(2, actor 0)", 1, 3)],
        [run(1, 0, "fwd(stage 1, mb 0)", 0, 1.05)],
    )
    assert sentence.startswith("actor 0 computes 2 s more than actor 1 outside the loop of microbatches")
    assert "from stage" not in sentence


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_a_stage_whose_tasks_took_no_time_is_no_error(seconds):
    timeline = step([run(0, 0, "fwd(stage 0, mb 0)", 0, 0)], [run(1, 0, "fwd(stage 1, mb 0)", 0, seconds)])
    assert advise(timeline)
    assert longer_than(seconds, 0.0)


def test_an_actor_without_a_stage_gets_one():
    sentence = explain([run(0, 0, "fwd(stage 0, mb 0)", 0, 1)], [run(1, 0, "outer(1, actor 1)", 0, 0.1)])
    assert sentence == "actor 1 has no stage; move layers from stage 0 to one of its own"


def test_the_work_of_an_actor():
    (actor,) = step([run(0, 0, "fwd(stage 0, mb 0)", 0, 1), run(0, 1, "outer(2, actor 0)", 1, 3)]).actors
    work = work_of_actor(actor)
    assert (work.stages, work.outside_s, work.total_s) == ({0: 1.0}, 2.0, 3.0)
