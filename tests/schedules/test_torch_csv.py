"""Schedules as torch.distributed.pipelining's compute-only CSV: read, written, and what errors say."""

from __future__ import annotations

import pytest
from built_in import BUILT_IN, every_schedule

import jaxpp_async as jpp
from jaxpp_async.errors import ScheduleError
from jaxpp_async.program.instructions import Task
from jaxpp_async.schedules import resolve
from jaxpp_async.schedules.validate import short_task


@pytest.fixture
def read(tmp_path):
    def read(text):
        path = tmp_path / "s.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return jpp.schedule_from_csv(path)

    return read


def _cells(rows) -> str:
    return "|".join(" ".join(map(short_task, row)) for row in rows)


@pytest.mark.parametrize("nth", range(len(BUILT_IN)), ids=[cls.__name__ for cls in BUILT_IN])
@pytest.mark.parametrize(("stages", "m", "a"), [(8, 8, 4), (5, 3, 2), (2, 4, 3), (1, 1, 1)])
def test_round_trip(nth, stages, m, a, tmp_path):
    schedule, path = every_schedule(stages)[nth], tmp_path / "s.csv"
    jpp.schedule_to_csv(schedule, path, m, a)
    found = jpp.schedule_from_csv(str(path))
    assert found.tasks(m, a) == schedule.tasks(m, a)
    assert (found.num_stages, found.num_microbatches, found.num_actors) == (stages, m, a)
    again = tmp_path / "again.csv"
    jpp.schedule_to_csv(found, again, m, a)
    assert again.read_bytes() == path.read_bytes()
    assert jpp.schedule_from_csv(again) == found
    assert hash(jpp.schedule_from_csv(again)) == hash(found)


def test_what_is_written(tmp_path):
    path = tmp_path / "s.csv"
    jpp.schedule_to_csv(jpp.ZeroBubbleH1(2), path, 2, 2)
    assert path.read_text() == "0F0,0F1,,0I0,0W0,0I1,0W1\n,1F0,1I0,1F1,1I1,1W0,1W1\n"
    jpp.schedule_to_csv([[Task(0, "fwd", 0)], []], path, 1, 2)
    assert path.read_text() == '0F0\n""\n'
    assert jpp.schedule_from_csv(path).rows == ((Task(0, "fwd", 0),), ())


# Text, the tasks in it.
READ = [
    ("0F0,,0B0\n", "0F0 0B0"),
    ("0F0 , 0B0,\r\n,,\r\n1F0,1I0,1W0\r\n", "0F0 0B0||1F0 1I0 1W0"),  # an actor without a task in between
    ("\ufeff0F0,0B0\n\n\n", "0F0 0B0"),
    ("0F10,(0F11;3B2)OVERLAP_F_B,0I1,0W1", "0F10 0F11 3B2 0I1 0W1"),  # as DualPipeV is written
    ("0F0,0B0,0W0,0F1,0BW1", "0F0 0I0 0W0 0F1 0B1"),  # the letters of older PyTorch
    ("0F0,0B0,0F1,0B1", "0F0 0B0 0F1 0B1"),
    ("0F0,0BW0", "0F0 0B0"),
]


@pytest.mark.parametrize(("text", "tasks"), READ)
def test_what_is_read(text, tasks, read):
    assert _cells(read(text).rows) == tasks


# Text, what the error holds.
WRONG = [
    (
        "0F0,0B0\n1F0,,F0",
        "s.csv, row 2, column 3, cell 'F0': this is not a task; write stage, kind and microbatch",
    ),
    ("0F0x", "row 1, column 1, cell '0F0x': this is not a task"),
    ("0F", "row 1, column 1, cell '0F': this is not a task"),
    ("0f0", "cell '0f0': this is not a task"),
    ("-1F0", "cell '-1F0': this is not a task"),
    (
        "0F0;0B0",
        "cell '0F0;0B0': this is not a task; write stage, kind and microbatch, such as 0F0, with kind F",
    ),
    ("0F0,(0F1;0Q0)OVERLAP_F_B", "column 2, cell '(0F1;0Q0)OVERLAP_F_B': this is not a task"),
    ("0F99999999999999999999", "this is not a task"),
    (
        "0F0,0SEND_F0",
        "column 2, cell '0SEND_F0': this is not computation; write the file with format=\"compute_only\"",
    ),
    ("0UNSHARD", "this is not computation"),
    (
        "0F0,0B0\n0F0",
        "row 2, column 1, cell '0F0': fwd(stage 0, mb 0) is in row 1, column 1 too; run every task once",
    ),
    ("0F0,0BW0,0I0", "column 2, cell '0BW0': BW and I are of different versions of PyTorch"),
    ("", "s.csv: there is no task in it; write a line an actor, with cells such as 0F0"),
    ("\n,,\n", "there is no task in it"),
    (b"\xff\xfe0\x00", "s.csv: it is not UTF-8 text"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_wrong_file(text, message, read):
    with pytest.raises(ScheduleError) as caught:
        read(text)
    assert message in str(caught.value)


def test_a_file_is_for_its_sizes(read):
    schedule = read("0F0,0B0\n1F0,1B0")
    assert repr(schedule).startswith("CsvSchedule(path=")
    sizes = {"num_stages": 2, "num_microbatches": 1, "num_actors": 2}
    assert _cells(resolve(schedule, **sizes)) == "0F0 0B0|1F0 1B0"
    for name, wanted, message in (
        ("num_microbatches", 3, "s.csv: it is a schedule of 1 microbatch and the step has 3"),
        ("num_actors", 4, "s.csv: it is a schedule of 2 actors (lines) and the step has 4"),
        ("num_stages", 3, "it has 2 stages and the loop body 3 stages"),
    ):
        with pytest.raises(ScheduleError) as caught:
            resolve(schedule, **{**sizes, name: wanted}, where="train.py:41")
        assert str(caught.value).startswith("train.py:41: ")
        assert message in str(caught.value)


def test_only_valid_schedules_are_written(tmp_path):
    path = tmp_path / "s.csv"
    for schedule, message in (
        ([[Task(0, "bwd", 0), Task(0, "fwd", 0)]], "runs before"),
        ([[("fwd", 0, 0)]], "is not a Task"),
        (jpp.GPipe, "this is a class"),
        (3, "this is not a schedule"),
    ):
        with pytest.raises(ScheduleError, match=message):
            jpp.schedule_to_csv(schedule, path, 1, 1)
    assert not path.exists()
