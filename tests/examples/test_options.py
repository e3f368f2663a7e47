"""The options of examples/train_gpt.py: what is refused before anything is launched, and with which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpt.options import SCHEDULES, parse_options


def test_defaults_are_two_actors_of_one_stage_under_1f1b():
    options = parse_options([])
    assert (options.actors, options.num_stages, options.schedule) == (2, 2, "Std1F1B")
    assert options.batch_shape == (8, 2, 128) and options.data is None


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_names_in_any_case_exist_in_the_package(name: str):
    import jaxpp_async as jpp

    options = parse_options(["--schedule", name.upper(), "--actors", "2"])
    assert options.schedule == name
    assert getattr(jpp, name)(num_stages=options.num_stages).num_stages == options.num_stages


def test_every_schedule_of_the_package_can_be_tried():
    import jaxpp_async as jpp
    from training import ScheduleName

    classes = [getattr(jpp, name) for name in jpp.__all__ if isinstance(getattr(jpp, name), type)]
    # ControllableMemory is made with a number that the command line has no option for; Auto has no stages.
    others = {"ControllableMemory", "Auto"}
    there_are = {c.__name__ for c in classes if callable(getattr(c, "tasks", None))} - others
    assert there_are == set(SCHEDULES) == set(ScheduleName)


def test_schedules_that_fold_or_interleave_have_two_stages_an_actor():
    assert parse_options(["--schedule", "interleaved1f1b"]).num_stages == 4
    assert parse_options(["--schedule", "zerobubblev"]).num_stages == 4
    assert parse_options(["--schedule", "loopedbfs", "--stages", "3"]).num_stages == 3


def test_paths_and_switches():
    options = parse_options(["--data", "x", "--dump-passes", "missing/y", "--tie-embedding", "--verify", "3"])
    assert (options.data, options.dump_passes) == (Path("x"), Path("missing/y"))
    assert options.tie_embedding and options.verify == 3


@pytest.mark.parametrize(
    ("line", "traced"),
    [
        ("", []),
        ("--trace x.json", [6, 7, 8]),
        ("--trace x.json --trace-step 1", [1]),
        ("--trace x --steps 2", [1, 2]),
    ],
)
def test_the_steps_that_are_traced(line: str, traced: list[int]):
    options = parse_options(["--steps", "8", *line.split()])
    assert [number for number in range(1, options.steps + 1) if options.is_traced(number)] == traced


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--schedule 2F2B", "no schedule '2F2B'; there are GPipe, Std1F1B, Eager1F1B, ZeroBubbleH1, "),
        ("--actors 0", "'0' is not a whole number of at least 1"),
        ("--stages 0", "'0' is not a whole number of at least 1"),
        ("--steps many", "'many' is not a whole number of at least 1"),
        ("--launcher ssh", "invalid choice: 'ssh'"),
        ("--actors 3 --stages 2", "--stages 2 leaves some of 3 --actors without a stage"),
        ("--layers 1", "--layers 1 cannot fill 2 stages"),
        ("--layers 3 --schedule loopedbfs", "--layers 3 cannot fill 4 stages"),
        ("--batch-size 12", "--batch-size 12 is not a multiple of --microbatches x --dp = 8"),
        ("--dp 3", "--batch-size 16 is not a multiple of --microbatches x --dp = 24"),
        ("--dim 130", "--dim 130 is not a multiple of --heads 4"),
        ("--dim 12", "--dim / --heads = 3 is odd"),
        ("--tp 3", "--heads 4 is not a multiple of --tp 3"),
        ("--verify 9 --steps 8", "--verify 9 is more than --steps 8"),
        (f"--dump-passes {__file__}", "is a file; name a folder"),
        ("--trace no/such/folder/x.json", "--trace no/such/folder/x.json cannot be written; name a file"),
        (f"--trace {Path(__file__).parent}", "cannot be written; name a file"),
        ("--trace-step 3", "--trace-step 3 needs --trace FILE"),
        ("--trace x.json --trace-step 9 --steps 8", "--trace-step 9 is more than --steps 8"),
    ],
)
def test_options_that_do_not_go_together(line: str, message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as error:
        parse_options(line.split())
    assert error.value.code == 2 and message in capsys.readouterr().err
