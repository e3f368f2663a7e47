"""Direct tests of the messages of the control channel: ids of runs, defaults, and that each can travel."""

from __future__ import annotations

import inspect

import pytest
from message_examples import examples, subclasses
from msgspec import structs

from jaxpp_async.protocol.actor_info import Position
from jaxpp_async.protocol.codec import Encoder, decoder_of
from jaxpp_async.protocol.messages import (
    Beat,
    BeginSnapshot,
    Cluster,
    Done,
    Failed,
    Hardware,
    Message,
    MessagePart,
    ReadFile,
    Reply,
    Report,
    Request,
    Rollback,
    Rules,
    Step,
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


@pytest.mark.parametrize("cls", subclasses(MessagePart), ids=lambda cls: cls.__name__)
def test_every_message_is_frozen_and_travels_under_its_own_name(cls):
    assert cls.__struct_config__.frozen and cls.__struct_config__.forbid_unknown_fields
    assert cls.__struct_config__.tag == (cls.__name__ if issubclass(cls, Message) else None)


@pytest.mark.parametrize(
    "message",
    [
        Rollback(None),
        Rollback(3),
        Sweep(b"/tmp/\xff", ("a", "b"), remove_folder=True),
        Beat(Position(1, 2, 3, True, False), "clock"),
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


# ---------------------------------------------------------------- rules

REQUESTS = [cls for cls in accepted_messages("actor") if cls.__module__ == Request.__module__]


@pytest.mark.parametrize("cls", REQUESTS, ids=lambda cls: cls.__name__)
def test_every_request_declares_its_rules_below_its_docstring(cls):
    rules = vars(cls).get("rules")
    assert isinstance(rules, Rules), f"{cls.__name__} has no rules of its own"
    assert issubclass(rules.reply, Reply) and rules.reply is not Failed
    lines = inspect.getsource(cls).splitlines()
    (at,) = (k for k, line in enumerate(lines) if line.startswith("    rules = Rules("))
    assert '"""' in "".join(lines[at - 2 : at]), "the rules stand below the docstring"


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"changes_state": True}, "ordered and repeated"),
        ({"changes_state": True, "ordered": True}, "ordered and repeated"),
        ({"changes_state": True, "repeated": True}, "ordered and repeated"),
        ({"reads_files": True, "ordered": True, "repeated": True}, "changes state"),
        ({"ended_by": Sweep, "ordered": True, "repeated": True}, "changes state"),
        ({"ended_by": Report, "ordered": True, "repeated": True, "changes_state": True}, "is repeated"),
    ],
    ids=str,
)
def test_rules_that_contradict_each_other_are_refused(rules, said):
    with pytest.raises(ValueError, match=said):
        Rules(Done, **rules)


def test_what_a_restart_does_with_each_request():
    """The behaviour that users rely on: who adds a request says here what is to become of it."""
    assert {cls.__name__ for cls in REQUESTS if cls.rules.changes_state} == {
        "BeginSnapshot", "ReadFile", "Step", "Store",
    }  # fmt: skip
    assert {cls.__name__ for cls in REQUESTS if cls.rules.repeated and not cls.rules.changes_state} == {
        "CheckFiles", "Fetch", "Inspect", "Load", "Sweep", "WriteFile",
    }  # fmt: skip
    assert [cls for cls in REQUESTS if cls.rules.reads_files] == [ReadFile]
    assert {cls: cls.rules.ended_by for cls in REQUESTS if cls.rules.ended_by} == {BeginSnapshot: Sweep}


def test_a_request_that_has_an_end_has_the_scope_of_its_end():
    assert BeginSnapshot(b"/a", ()).scope == Sweep(b"/a").scope == b"/a"
    assert Rollback(1).scope is None


def test_only_a_step_changes_when_it_is_sent_again():
    for request in examples("actor"):
        again = request.again(2**40)
        expected = structs.replace(request, epoch=2**40) if isinstance(request, Step) else request
        assert again == expected
