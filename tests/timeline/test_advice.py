"""Tests of `timeline/advice.py`: each item of a bill has its advice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_steps import run, step

from jaxpp_async.timeline.advice import advise
from jaxpp_async.timeline.events import TimelineEvent, TimelineTransfer
from jaxpp_async.timeline.imbalance import longer_than, stage_times
from jaxpp_async.timeline.timeline import Timeline


def sentences(timeline: Timeline) -> list[str]:
    return [str(advice) for advice in advise(timeline)]


def test_advice_has_its_item_and_its_share_apart_from_its_words():
    queue, reply = advise(step([run(0, 0, "fwd(stage 0, mb 0)", 4, 9)], duration_s=10))
    assert (queue.item, queue.share, queue.title) == ("queue", 0.4, "queue 40%")
    assert reply.item == "reply" and reply.text.startswith("the controller heard late that the step had")
    (nothing,) = advise(step([run(0, 0, "fwd(stage 0, mb 0)", 0, 5)]))
    assert (nothing.item, nothing.share, nothing.title) == (None, 0.0, "")


def test_a_slow_stage_is_named_with_the_one_that_can_take_a_layer():
    (sentence,) = sentences(
        step([run(0, 0, "fwd(stage 0, mb 0)", 0, 4)], [run(1, 0, "fwd(stage 1, mb 0)", 0, 6)])
    )
    assert sentence.startswith("imbalance 17%: stage 1 takes 50% longer than stage 0; move a layer")


UNEVEN = step([run(0, 0, "fwd(stage 0, mb 0)", 0, 4)], [run(1, 0, "fwd(stage 1, mb 0)", 0, 6)])


@pytest.mark.parametrize(
    ("choice", "what"),
    [
        ("", "move a layer from stage 1 to stage 0, or write stages='balanced'"),
        ("work", "name the cut by hand (stages=[...]), or plan with measured costs (mesh.plan)"),
        ("plan", "plan again with them (mesh.plan)"),
    ],
)
def test_what_to_do_about_an_uneven_cut_depends_on_how_it_was_chosen(choice, what):
    (sentence,) = sentences(replace(UNEVEN, cut_choice=choice))
    assert sentence.endswith(what) and ("move a layer" in sentence) == (choice == "")


def test_from_twice_as_long_on_a_time_is_named_by_its_factor():
    assert longer_than(3.0, 2.0) == "50% longer than"
    assert longer_than(39.3, 1.0) == "39.3 times as long as"
    assert longer_than(2.0, 1.0) == "2 times as long as"


def test_a_printed_timeline_ends_with_the_sentence_that_names_the_slow_stage():
    assert str(UNEVEN).endswith("\n\nwhat to do:\n" + "\n".join(sentences(UNEVEN)))
    assert "stage 1 takes 50% longer than stage 0" in str(UNEVEN)


def test_one_slow_task_makes_no_slow_stage():
    times = {"fwd(stage 0)": (1.0, 1.0, 7.0), "bwd(stage 0)": (2.0,) * 3, "fwd(stage 1)": (3.0,) * 3}
    assert stage_times(times) == {0: 9.0, 1: 9.0}
    first = [run(0, k, f"fwd(stage 0, mb {k})", k, k + 1) for k in range(2)]
    slow = run(0, 2, "fwd(stage 0, mb 2)", 2, 6)
    second = [run(1, k, f"fwd(stage 1, mb {k})", k, k + 1) for k in range(3)]
    assert "compute equally long in the middle" in sentences(step([*first, slow], second))[0]


def test_each_sentence_says_what_to_do():
    waits = sentences(step([run(0, 0, "fwd(stage 0, mb 0)", 4, 9)], duration_s=10))
    late = sentences(
        step([run(0, 0, "fwd(stage 0, mb 0)", 0, 1)], [run(1, 0, "fwd(stage 1, mb 0)", 1, 2)], duration_s=2)
    )
    said = "\n".join([*waits, *late])
    assert "mesh.submit" in said and "mesh.put" in said


def test_the_slowest_transfer_is_named():
    sent = TimelineEvent(0, 1, "send", "fwd(stage 0, mb 0)", 1, 1, 2_000_000, peer=1, tag=0, needs=(0,))
    came = TimelineEvent(1, 0, "recv", "fwd(stage 0, mb 0)", 0, 3, 2_000_000, peer=0, tag=0)
    found = sentences(
        step(
            [run(0, 0, "fwd(stage 0, mb 0)", 0, 1), sent],
            [came, run(1, 1, "fwd(stage 1, mb 0)", 3, 4, 0)],
            transfers=[TimelineTransfer(sent, came)],
        )
    )
    assert found[0].startswith("transfer 50%") and "fwd(stage 0, mb 0), 2 MB from actor 0 to 1" in found[0]
    assert found[1].startswith("bubble 25%") and "more microbatches" in found[1]


def test_pauses_between_tasks_are_dispatch():
    (sentence,) = sentences(
        step([run(0, 0, "fwd(stage 0, mb 0)", 0, 0.004), run(0, 1, "bwd(stage 0, mb 0)", 0.006, 0.010)])
    )
    assert sentence.startswith("dispatch 20%") and "tasks take 4 ms" in sentence


def test_waiting_for_the_step_before_and_for_the_reply_are_told_too():
    found = sentences(step([run(0, 0, "fwd(stage 0, mb 0)", 4, 9)], duration_s=10))
    assert [sentence.partition(" ")[0] for sentence in found] == ["queue", "reply"]


def test_a_step_without_losses_says_so():
    (sentence,) = sentences(step([run(0, 0, "fwd(stage 0, mb 0)", 0, 5)]))
    assert sentence.startswith("no cause costs 3% of the step")


def test_a_step_in_which_nothing_happened_has_no_losses():
    assert len(sentences(Timeline(0, "train", 0.0, 0.0, (), ()))) == 1
