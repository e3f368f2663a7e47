"""The pure parts of `benchmarks/`: ratios, critical paths, targets, and the line between driver and
contender."""

from __future__ import annotations

import io
import struct
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import bench
import bound
import controller
import parts
import rounds
import targets
from contender import timed
from rich.console import Console

from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import Aval, Recv, Run, Send

AVAL = Aval((2,), "float32")


def program(actor: int, *instructions) -> ActorProgram:
    return ActorProgram(actor, tuple(instructions), (AVAL,) * 8)


def run(executable: int, inputs: tuple[int, ...], output: int) -> Run:
    return Run(f"task {executable}", executable, inputs, (output,))


# Two microbatches through two stages: forwards down, one task on the last stage, backwards up.
PIPELINE = (
    program(
        0,
        Recv(4, 1, 2),
        Recv(5, 1, 3),
        run(0, (), 0),
        Send(0, 1, 0),
        run(0, (), 1),
        Send(1, 1, 1),
        run(1, (4,), 6),
        run(1, (5,), 7),
    ),
    program(
        1,
        Recv(0, 0, 0),
        Recv(1, 0, 1),
        run(2, (0,), 2),
        Send(2, 0, 2),
        run(2, (1,), 3),
        Send(3, 0, 3),
    ),
)


@pytest.mark.parametrize(
    ("forward", "last", "backward", "transfer", "expected"),
    [
        (1, 1, 1, 0, 4),  # F F B B on the first actor: its work alone
        (1, 3, 1, 0, 8),  # the last stage is the bottleneck
        (1, 1, 4, 0, 10),  # backwards at the end
        (1, 1, 1, 1, 6),  # a transfer down and one back that nothing hides
    ],
)
def test_the_critical_path_of_a_pipeline(forward, last, backward, transfer, expected):
    times = {(0, 0): forward, (0, 1): backward, (1, 2): last}
    assert bound.critical_path_s(PIPELINE, bound.usual_seconds(PIPELINE, times), transfer) == expected


def test_each_task_counts_with_the_time_that_it_took():
    # The second forward is late: everything after it is. A late first backward hides behind the second
    # forward's way.
    assert bound.critical_path_s(PIPELINE, [[1, 4, 1, 1], [1, 1]]) == 7
    assert bound.critical_path_s(PIPELINE, [[1, 1, 1, 1], [1, 1]]) == 4


@pytest.mark.parametrize("out", [0, 1], ids=["the slot that it was received in", "another slot"])
def test_a_run_may_write_to_a_slot_that_a_message_filled(out):
    programs = (
        program(0, Recv(1, 1, 1), run(0, (), 0), Send(0, 1, 0), run(2, (1,), 2)),
        program(1, Recv(0, 0, 0), run(1, (0,), out), Send(out, 0, 1)),
    )
    assert bound.critical_path_s(programs, [[1, 1], [5]]) == 7


def test_the_critical_path_of_programs_that_wait_for_each_other():
    waiting = [program(a, Recv(0, 1 - a, a), run(0, (0,), 1), Send(1, 1 - a, 1 - a)) for a in (0, 1)]
    with pytest.raises(ValueError, match="wait for each other"):
        bound.critical_path_s(waiting, [[1], [1]])


def test_task_times_are_medians_over_microbatches_and_steps():
    stamps = [struct.pack("<12d", *[float("nan")] * 4, 0, 3, 3, 4, 4, 9, 9, 10)]
    seconds = bound.run_seconds(program(1, *PIPELINE[1].instructions), stamps[0])
    assert seconds == [3, 5]
    assert bound.task_times(PIPELINE[1:], [[seconds], [[4, 4]]]) == {(1, 2): 4}
    assert bound.busiest_s(PIPELINE, {(0, 0): 1, (0, 1): 2, (1, 2): 4}) == 8


def test_ratios_are_taken_within_rounds():
    # The machine is three times as slow in the second round, and four times in the third.
    ours, theirs = rounds.Taken([[1, 2, 3], [6], [8]]), rounds.Taken([[4], [12], [16], [5]])
    assert rounds.ratio(ours, theirs) == 0.5
    assert rounds.ratio(ours, rounds.Taken()) is None


def test_medians_and_spreads():
    taken = rounds.Taken([[1, 2], [3, 4, 5]])
    assert (taken.median, taken.spread) == (3, 3)
    assert (rounds.Taken().median, rounds.Taken([[1]]).spread) == (None, None)
    assert len(timed(lambda: None, 3)) == 3


def test_efficiency_is_taken_within_steps():
    # A task of the third step took longer, and the step with it; the third round did not say.
    extras = [{"bounds_ms": [9, 9, 18]}, {"bounds_ms": [19, 18]}, {}]
    taken = rounds.Taken([[10, 10, 20], [20, 20], [10]], extras=extras)
    assert parts._efficiency(taken) == pytest.approx(0.9)
    assert parts._median_bound(taken) == 18
    assert parts._efficiency(rounds.Taken()) is None and parts._median_bound(rounds.Taken()) is None


def test_usual_efficiency_is_taken_within_rounds():
    # The machine is twice as slow in the second round, and its tasks with it; the third did not say.
    taken = rounds.Taken(
        [[9, 10, 11], [20, 22], [10]], extras=[{"usual_bound_ms": 9}, {"usual_bound_ms": 18.9}, {}]
    )
    assert parts._usual_efficiency(taken) == pytest.approx(0.9)
    assert parts._usual_efficiency(rounds.Taken()) is None


def test_hidden_transfers_are_taken_within_rounds():
    # Half is hidden in every round, on a machine that is slower each time.
    taken = {
        "compute_only": rounds.Taken([[100, 101, 99], [200], [400]]),
        "transfer_only": rounds.Taken([[60], [110], [210]]),
        "together": rounds.Taken(
            [[135], [260], [510]],
            extras=[{"usual_bound_ms": b, "bound_slow_ms": b + 10} for b in (90, 180, 360)],
        ),
    }
    assert parts._hidden(taken) == {"no_slack": 10, "hidden_percent": 50}


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        (1.3200001, False),  # another order of sums
        (1.3204, True),
        (float("nan"), True),
    ],
)
def test_a_contender_that_computes_something_else_is_told(theirs, told):
    taken = {name: rounds.Taken([[1]], facts={"loss": 1.32}) for name in ("ours", "submit", "jit")}
    taken["torch"] = rounds.Taken([[1]], facts={"loss": theirs})
    taken["no loss"] = rounds.Taken([[1]])
    lines: list[str] = []
    parts._first_losses(taken, lines.append)
    assert [line.split(":")[0] for line in lines] == ["torch"] * told


def test_who_has_no_figures_stands_in_the_table_with_the_reason():
    taken = {
        "ours": rounds.Taken([[1, 2], [2, 2]], facts={"loss": 1.0}),
        "torch": rounds.Taken(failure="torch ended (1). Its last words: Traceback | No module named 'torch'"),
        "ray": rounds.Taken([[3, 3]], failure="ray said nothing within 10 s. It printed nothing."),
    }
    said = io.StringIO()
    console = Console(width=200, file=said, color_system=None)
    console.print(bench.medians({"tiny_step": parts._medians(taken)}))
    lines = said.getvalue().splitlines()
    assert any("torch: not available: No module named 'torch'" in line for line in lines)
    assert any("ray (failed later: ray said nothing" in line and "3 ms" in line for line in lines)


async def test_a_part_that_fails_costs_the_others_nothing(monkeypatch):
    async def good(context):
        """Says so."""
        context.progress("well")
        return {"figure": 1}

    async def bad(context):
        """Does not."""
        return {}["no such key"]

    monkeypatch.setattr(bench, "PARTS", {f.__name__: parts.Part(f, "no time") for f in (bad, good)})
    kept = {}
    said = io.StringIO()
    console = Console(width=200, file=said, color_system=None)
    failed = await bench.measure(
        ["bad", "good"], False, console, lambda name, figures, _: kept.update({name: figures})
    )
    assert (failed, kept) == (["bad"], {"good": {"figure": 1}})
    assert "good: Says so. (may take no time)" in said.getvalue()
    assert "failed: KeyError: 'no such key'" in said.getvalue()


def test_results_are_of_the_newest_run_and_keep_what_it_left_out():
    old = {
        "machine": {},
        "date": "once",
        "tiny_step": 1,
        "overlap": 2,
        "taken": {"tiny_step": "then", "overlap": "then"},
    }
    found = bench.merged(old, {"tiny_step": 1.234567, "taken": {"tiny_step": "now"}})
    assert found["date"] != "once" and found["machine"]["cores"]
    assert (found["tiny_step"], found["overlap"]) == (1.2346, 2)
    assert found["taken"] == {"tiny_step": "now", "overlap": "then"}


def test_every_part_says_what_it_measures_and_for_how_long():
    assert all(part.what.endswith(".") and part.may_take for part in parts.PARTS.values())


@pytest.mark.parametrize(
    ("theirs", "limit", "state"),
    [
        ({}, 3, "missed"),  # as it was promised
        ({"torch": 12.0}, 4.5, "met"),  # half as slow again as the machine on which it was set
        ({"torch": 4.0}, 1.5, "missed"),
    ],
)
def test_a_limit_in_ms_is_that_of_a_machine_of_known_speed(theirs, limit, state):
    (row,) = [
        row for row in targets.rows({"tiny_step": {"ours": 4.0, **theirs}}) if row.target.what == "tiny step"
    ]
    assert (row.limit, row.state) == (limit, state)
    assert ("was not measured" in row.note) == (not theirs)


FIGURES = {
    "tiny_step": {"ours": 2.0, "ratio": {"ours/torch": 0.4, "ours/ray": 0.11, "submit/ours": 1.0}},
    "big_step": {
        "efficiency": 0.97,
        "ratio": {"ours/jit_two_cores": 1.2, "ours_zero_bubble/jit_two_cores": 0.96},
    },
    "overlap": {"hidden_percent": 98.0},
    "peak_bytes": {"std1f1b": {"8": 64, "32": 65}},
}


@pytest.mark.parametrize(
    ("what", "value", "state"),
    [
        ("tiny step", 2.0, "met"),
        ("tiny step against torch.distributed.pipelining", 0.4, "met"),
        ("tiny step against Ray tasks", 0.11, "missed"),
        ("two steps in flight against one", 1.0, "missed"),  # faster, it says
        ("big step, efficiency against its bound", 0.97, "met"),
        ("big step, best schedule, against jit on both cores", 0.96, "wish met"),
        ("big step against torch 1F1B", None, "not measured"),
        ("transfers hidden behind computation", 98.0, "wish met"),
        ("peak bytes, 1F1B, 32 against 8 microbatches", 65 / 64, "missed"),
        ("transport, 1 MiB, against memcpy", None, "not measured"),
    ],
)
def test_what_became_of_a_target(what, value, state):
    (row,) = [row for row in targets.rows(FIGURES) if row.target.what == what]
    assert (row.value, row.state) == (value, state)


@pytest.mark.parametrize(
    ("together", "percent"),
    [
        (150, 0),  # one after the other
        (110, 100),  # all but what nothing can stand beside
        (130, 50),
    ],
)
def test_how_much_of_the_transfers_is_hidden(together, percent):
    assert targets.hidden_percent(100, 50, together, no_slack=10) == percent


def test_a_target_cannot_ask_for_more_than_is_wished():
    for target in targets.TARGETS:
        assert target.wish is None or target.keeps(target.wish, target.limit) or target.wish == target.limit


CONTENDER = """
import sys
sys.path.insert(0, {benchmarks!r})
from contender import Channel
channel = Channel()
print("a banner")
{setup}
channel.serve(lambda n: [1.0] * n, version="1")
"""


@pytest.mark.parametrize(
    ("setup", "failure"),
    [
        ("", None),
        ("raise SystemExit('no such GPU')", "no such GPU"),
        ("import time; time.sleep(60)", "said nothing within 0.3 s"),
        ("channel.ready = lambda **facts: channel._say({'hello': 1})", "not 'ready'"),
    ],
)
async def test_contenders_are_measured_in_turns_and_one_that_fails_is_left_out(setup, failure):
    def contender(name: str, setup: str) -> rounds.Contender:
        code = CONTENDER.format(benchmarks=str(rounds.HERE), setup=setup)
        late = failure is not None and "said nothing" in failure
        return rounds.Contender(name, (sys.executable, "-c", code), ready_s=0.3 if late and setup else 60)

    taken = await rounds.take([contender("good", ""), contender("other", setup)], rounds.Plan(2, 3, 1))
    assert taken["good"].rounds == [[1.0] * 3] * 2
    assert taken["good"].facts == {"version": "1"}
    if failure is None:
        assert taken["other"].rounds == taken["good"].rounds
    else:
        assert failure in str(taken["other"].failure)


async def test_a_program_that_is_missing_is_reported():
    taken = await rounds.take([rounds.Contender("absent", ("/no/such/program",))], rounds.Plan(1, 1, 0))
    assert "/no/such/program" in str(taken["absent"].failure)


async def test_the_driver_says_what_it_does():
    code = CONTENDER.format(benchmarks=str(rounds.HERE), setup="")
    said: list[str] = []
    await rounds.take(
        [rounds.Contender("good", (sys.executable, "-c", code))], rounds.Plan(2, 1, 0), said.append
    )
    assert said == ["setting up good", "round 1 of 2: good", "round 2 of 2: good"]


async def test_actors_that_execute_nothing_answer_like_actors():
    """What `controller.py` measures with: it has to know every request that a mesh makes."""
    figures = await controller.measure(2, 10)
    assert all(value > 0 for value in figures.values())
