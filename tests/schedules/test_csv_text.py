"""Direct tests of schedules as the text of a CSV file."""

from __future__ import annotations

import pytest

from jaxpp_async.errors import ScheduleError
from jaxpp_async.program.instructions import Task
from jaxpp_async.schedules.torch_csv import CsvSchedule, format_csv, parse_csv, schedule_from_csv

F, B, I, W = (Task(0, ty, 0) for ty in ("fwd", "bwd", "bwd_input", "bwd_weight"))  # noqa: E741


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("0F0,0B0\n", ((F, B),)),
        ("0F0,,0B0,\n\n", ((F, B),)),
        (" 0F0 ,0I0,0W0", ((F, I, W),)),
        ("0F0,0B0,0W0", ((F, I, W),)),  # of older PyTorch: W without I
        ("0F0,0BW0", ((F, B),)),
        (",\n0F0,0B0\n", ((), (F, B))),
        ("(0F0;0B0)OVERLAP_F_B", ((F, B),)),
        ("10F12", ((Task(12, "fwd", 10),),)),
    ],
)
def test_cells_are_read_in_the_letters_of_their_version(text, rows):
    assert parse_csv(text, "s.csv") == rows


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "s.csv: there is no task in it; write a line an actor, with cells such as 0F0"),
        (
            "0F0\n0F0",
            "s.csv, row 2, column 1, cell '0F0': fwd(stage 0, mb 0) is in row 1, column 1 too; run every ",
        ),
        (
            "0F0,x",
            "s.csv, row 1, column 2, cell 'x': this is not a task; write stage, kind and microbatch, such ",
        ),
        (
            "0F0,0SEND_F1",
            "s.csv, row 1, column 2, cell '0SEND_F1': this is not computation; write the file with format=",
        ),
        (
            "0I0,0BW0",
            "s.csv, row 1, column 2, cell '0BW0': BW and I are of different versions of PyTorch; write B, I ",
        ),
        ("0F\u0663", "s.csv, row 1, column 1, cell '0F\u0663': this is not a task"),
    ],
)
def test_a_cell_that_is_no_task_is_refused_with_its_place(text, says):
    with pytest.raises(ScheduleError) as caught:
        parse_csv(text, "s.csv")
    assert str(caught.value).startswith(says)


def test_a_file_has_a_column_for_each_slot_of_time_and_reads_back():
    rows = ((F, B), (Task(0, "fwd", 1), Task(0, "bwd", 1)), ())
    text = format_csv(rows)
    assert text == "0F0,,,0B0\n,1F0,1B0,\n,,,\n"
    assert parse_csv(text, "s.csv") == rows


def test_a_file_knows_its_sizes_and_is_good_for_no_others():
    schedule = CsvSchedule(((F, B), (Task(1, "fwd", 1),)), "s.csv")
    assert (schedule.num_stages, schedule.num_microbatches, schedule.num_actors) == (2, 2, 2)
    assert schedule.tasks(2, 2) == [[F, B], [Task(1, "fwd", 1)]]
    assert schedule == CsvSchedule(schedule.rows, "elsewhere.csv")
    with pytest.raises(
        ScheduleError, match=r"^s.csv: it is a schedule of 2 microbatches and the step has 3; write a file"
    ):
        schedule.tasks(3, 2)
    with pytest.raises(
        ScheduleError, match=r"^s.csv: it is a schedule of 2 actors \(lines\) and the step has 1; write"
    ):
        schedule.tasks(2, 1)


def test_a_file_that_is_no_text_is_refused_with_its_name(tmp_path):
    path = tmp_path / "s.csv"
    path.write_bytes(b"\xff\xfe0")
    with pytest.raises(ScheduleError, match=r"s.csv: it is not UTF-8 text .*; save it as UTF-8$"):
        schedule_from_csv(path)
