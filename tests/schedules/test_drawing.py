"""Tests of `schedules/drawing.py`: pictures of built-in and other schedules."""

import pytest

from jaxpp_async.errors import ScheduleError
from jaxpp_async.schedules import (
    Auto,
    DualPipeV,
    GPipe,
    Interleaved1F1B,
    LoopedBFS,
    Std1F1B,
    Task,
    VMin,
    ZeroBubbleH1,
    peak_activations,
    schedule_from_csv,
    schedule_to_csv,
)
from jaxpp_async.schedules.drawing import draw_schedule
from jaxpp_async.view import Cell, to_svg


def test_cells_are_the_tasks_and_a_whole_backward_takes_twice_as_long():
    drawing = GPipe(1).to_drawing(num_microbatches=2)
    assert drawing.rows[0].cells == (
        Cell(0, 1, "forward", "0", "fwd(stage 0, mb 0)"),
        Cell(1, 2, "forward", "1", "fwd(stage 0, mb 1)"),
        Cell(2, 4, "backward", "0", "bwd(stage 0, mb 0)"),
        Cell(4, 6, "backward", "1", "bwd(stage 0, mb 1)"),
    )
    assert drawing.rows[0].memory == ((0, 1.0), (1, 2.0), (4, 1.0), (6, 0.0))
    assert drawing.title == "GPipe(num_stages=1): 2 microbatches on 1 actor, bubble 0%"


@pytest.mark.parametrize(
    "schedule, actors",
    [
        (Std1F1B(4), 4),
        (ZeroBubbleH1(3), 3),
        (Interleaved1F1B(8), 4),
        (LoopedBFS(6), 3),
        (DualPipeV(8), 4),
        (VMin(8), 4),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else str(value),
)
def test_without_numbers_a_schedule_has_its_usual_actors_and_twice_as_many_microbatches(schedule, actors):
    drawing = schedule.to_drawing()
    assert len(drawing.rows) == actors
    assert f"{2 * actors} microbatches" in drawing.title
    assert drawing.most_held == max(peak_activations(schedule.tasks(2 * actors, actors)))


def test_a_schedule_of_ones_own_can_be_drawn():
    class OneByOne:
        num_stages = 2

        def tasks(self, num_microbatches, num_actors):
            order = [("fwd", 0), ("fwd", 1), ("bwd", 1), ("bwd", 0)]
            rows = [[] for _ in range(num_actors)]
            for i in range(num_microbatches):
                for ty, stage in order:
                    rows[stage].append(Task(i, ty, stage))
            return rows

    assert draw_schedule(OneByOne(), 2, 2).end == 12


def test_a_schedule_of_a_file_can_be_drawn(tmp_path):
    schedule_to_csv(Std1F1B(2), tmp_path / "order.csv", 3, 2)
    assert (
        len(schedule_from_csv(tmp_path / "order.csv").to_drawing(num_microbatches=3, num_actors=2).rows) == 2
    )


def test_numbers_that_do_not_suit_are_an_error():
    with pytest.raises(ScheduleError):
        Std1F1B(2).to_drawing(num_actors=-1)


def test_every_schedule_has_pictures():
    assert Std1F1B(2).to_svg(num_microbatches=5).count("actor") >= 2
    assert Std1F1B(2)._repr_html_().startswith("<svg")


def test_a_large_schedule_is_drawn_for_fewer_microbatches():
    drawing = Std1F1B(400).to_drawing()
    assert "62 microbatches on 400 actors" in drawing.title
    assert len(to_svg(drawing).encode()) < 200_000


def test_a_schedule_of_too_many_tasks_is_refused_at_once():
    with pytest.raises(ScheduleError, match="1,048,576 tasks, and at most 500,000 are drawn; give 488 micro"):
        Std1F1B(512).to_drawing(num_microbatches=1024)
    with pytest.raises(ScheduleError, match=r"2,000,000 tasks.*; give fewer stages"):
        Std1F1B(1_000_000).to_drawing()


def test_a_schedule_without_stages_is_refused():
    with pytest.raises(ScheduleError, match="no stages before a step is planned; name a schedule"):
        draw_schedule(Auto())
