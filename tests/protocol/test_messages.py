"""Direct tests of the messages of the control channel: ids of runs, defaults, and that each can travel."""

from __future__ import annotations

import pytest
from message_examples import subclasses

from jaxpp_async.protocol.codec import Encoder, decoder_of
from jaxpp_async.protocol.messages import (
    Beat,
    Cluster,
    Failed,
    Hardware,
    Message,
    Part,
    Rollback,
    Sweep,
    accepted_messages,
    step_id,
    step_kind,
    step_number,
    step_text,
)


@pytest.mark.parametrize("number", [0, 7, 1 << 20])
@pytest.mark.parametrize("kind", ["move", "init", "step"])
@pytest.mark.parametrize("ahead", [0, 3])
def test_a_run_id_has_the_number_of_its_step_and_its_kind(number, kind, ahead):
    run = step_id(number, kind, ahead)
    assert (step_number(run), step_kind(run)) == (number, kind)


@pytest.mark.parametrize(
    ("kind", "text"), [("step", "step 7"), ("move", "a move for step 7"), ("init", "an init ahead of step 7")]
)
def test_a_run_is_named_for_users_by_its_kind(kind, text):
    assert step_text(step_id(7, kind, ahead=2)) == text


def test_run_ids_count_up_in_the_order_in_which_runs_are_made():
    runs = [step_id(0), step_id(1, "move"), step_id(1, "init", 1), step_id(1, "step", 2), step_id(2, "move")]
    assert runs == sorted(set(runs))


def test_a_run_id_of_no_known_kind_reads_as_a_step():
    assert step_kind(step_id(4) | 3) == "step"
    assert step_text(step_id(4) | 3) == "step 4"


def test_a_cluster_has_as_many_processes_as_addresses():
    assert Cluster("host:1", ("10.0.0.1", "10.0.0.2"), rank=1).size == 2


@pytest.mark.parametrize("cls", subclasses(Part), ids=lambda cls: cls.__name__)
def test_every_message_is_frozen_and_travels_under_its_own_name(cls):
    assert cls.__struct_config__.frozen and cls.__struct_config__.forbid_unknown_fields
    assert cls.__struct_config__.tag == (cls.__name__ if issubclass(cls, Message) else None)


@pytest.mark.parametrize(
    "message",
    [
        Rollback(None),
        Rollback(3),
        Sweep(b"/tmp/\xff", ("a", "b"), remove_folder=True),
        Beat((1, 2, 3, True, False), "clock"),
        Beat(None),
        Failed("ValueError", "no", ""),
    ],
    ids=repr,
)
def test_messages_with_fields_that_may_be_missing_arrive_as_they_were(message):
    known = (*accepted_messages("actor"), *accepted_messages("controller"), Beat)
    assert decoder_of(known).decode(Encoder(1000).encode(message, 7)) == (7, message)


def test_hardware_of_cpus_says_nothing_of_gpus():
    found = Hardware("cpu", 2)
    assert (found.cuda, found.driver, found.gpus, found.memory_fraction, found.nccl_shares) == (
        "",
        "",
        (),
        0.0,
        False,
    )
