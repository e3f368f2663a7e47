"""Direct tests of the messages of the control channel: ids of runs, defaults, and that each can travel."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from jaxpp_async.protocol import messages
from jaxpp_async.protocol.codec import decode, encode, message_types
from jaxpp_async.protocol.messages import (
    Beat,
    Cluster,
    Failed,
    Hardware,
    Message,
    Reply,
    Reported,
    Request,
    Rollback,
    Sweep,
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


def test_every_request_and_reply_begins_with_the_number_of_the_request():
    for cls in (*typing.get_args(Request), *typing.get_args(Reply)):
        assert dataclasses.fields(cls)[0].name == "request", cls.__name__


def test_every_message_of_the_unions_is_found_in_the_module_under_its_own_name():
    for name, cls in message_types(Message).items():
        assert getattr(messages, name) is cls


def test_every_message_is_frozen_data_without_a_dictionary_of_its_own():
    for cls in message_types(Message).values():
        assert cls.__dataclass_params__.frozen, cls.__name__
        assert "__slots__" in vars(cls), cls.__name__


@pytest.mark.parametrize(
    "message",
    [
        Rollback(1, None),
        Rollback(1, 3),
        Sweep(2, b"/tmp/\xff", ("a", "b"), remove_folder=True),
        Beat((1, 2, 3, True, False), "clock"),
        Beat(None),
        Failed(None, "ValueError", "no", ""),
    ],
    ids=repr,
)
def test_messages_with_fields_that_may_be_missing_arrive_as_they_were(message):
    assert decode(encode(message), message_types(Message)) == message


def test_two_reports_are_equal_though_their_clocks_show_different_times():
    assert Reported(1, None, now_s=1.0) == Reported(1, None, now_s=2.0)
    assert Reported(1, 5) != Reported(1, None)


def test_hardware_of_cpus_says_nothing_of_gpus():
    found = Hardware("cpu", 2)
    assert (found.cuda, found.driver, found.gpus, found.memory_fraction, found.nccl_shares) == (
        "",
        "",
        (),
        0.0,
        False,
    )
