"""Direct tests of the text of a step's report, from numbers made by hand."""

from __future__ import annotations

import pytest

from jaxpp_async.program.instructions import Aval
from jaxpp_async.program.leaf_parts import Parts
from jaxpp_async.schedules.cut import Cut, Mark
from jaxpp_async.session import report as reports
from jaxpp_async.session.report import ActorLine, CompileReport, PlaceLine, TransferLine

ACTOR = ActorLine(0, {"fwd": 2, "bwd": 2}, 64, 0, 1024, "bwd(mb 1)", 8, 0.125, 256)
SEND = TransferLine("float32[4], x", 0, 1, 16, 4, "in the loop", True, 2, "stage 1 needs it")
WHERE = (
    PlaceLine("state['w']", "float32[4]", (0, 1), 16, "stage 0"),
    PlaceLine("batch", "int32[2]", (0,), 8),
)
INDICES = PlaceLine("microbatch indices 0 to 1", "2 x int32[]", (0,), 8)


def test_a_report_reads_as_aligned_tables():
    report = CompileReport((ACTOR,), (SEND,), (*WHERE, INDICES), WHERE[:1], notes=("outer: a note.",))
    assert str(report).split("\n") == [
        "actor  tasks        arguments B  sent B  received B  peak B  peak at    XLA temp B  compiled in",
        "    0  2 fwd 2 bwd          256      64           0    1024  bwd(mb 1)           8       0.12 s",
        "outer: a note.",
        "",
        "transfers in one step",
        "when         actors  count x B  total B  how often       what           why",
        "in the loop  0 -> 1     4 x 16       64  2 a microbatch  float32[4], x  stage 1 needs it",
        "",
        "arguments",
        "name        type              B  actors  why",
        "state['w']  float32[4]  16 each  0, 1    stage 0",
        "batch       int32[2]          8  0",
        "",
        "results",
        "name        type              B  actors  why",
        "state['w']  float32[4]  16 each  0, 1    stage 0",
    ]


def test_a_step_without_transfers_says_so():
    assert "\n\nno transfers between actors\n\narguments\n" in str(CompileReport((ACTOR,), (), (), ()))


def test_transfers_outside_the_loop_are_counted_by_the_step():
    once, twice = (TransferLine("x", 0, 1, 16, count, "before the loop") for count in (1, 2))
    text = str(CompileReport((), (once, twice), (), ()))
    assert "  16  once       x\n" in text
    assert "  32  2 times    x\n" in text
    assert twice.total_bytes == 32


# ---------------------------------------------------------------- leaves in parts


def in_parts(*reasons: str) -> PlaceLine:
    """The line of a leaf of which part k lies on actor k, for the given reason."""
    parts = Parts(0, tuple(range(len(reasons) + 1)))
    lines = [
        PlaceLine(name, "float32[1]", (k,), 4, why)
        for k, (name, why) in enumerate(zip(parts.names("w"), reasons, strict=True))
    ]
    why = reports._why_of_parts(lines, parts)
    return PlaceLine("w", "float32[n]", tuple(range(len(lines))), 4 * len(lines), why, tuple(lines))


def texts_of(line: PlaceLine) -> tuple[str, str]:
    """The columns `actors` and `why` of a line of a report."""
    row = str(CompileReport((), (), (line,), ())).split("arguments\n")[1].splitlines()[1]
    *_, actors, why = [cell for cell in row.split("  ") if cell]
    return actors.strip(), why.strip()


@pytest.mark.parametrize(
    ("count", "actors"),
    [
        (2, "[0:1] 0; [1:2] 1"),
        (8, "; ".join(f"[{k}:{k + 1}] {k}" for k in range(8))),
        (9, "[0:1] 0; [1:2] 1; [2:3] 2; [3:4] 3; ... 2 more ...; [6:7] 6; [7:8] 7; [8:9] 8"),
        (64, "[0:1] 0; [1:2] 1; [2:3] 2; [3:4] 3; ... 57 more ...; [61:62] 61; [62:63] 62; [63:64] 63"),
    ],
)
def test_of_many_parts_the_first_and_the_last_are_shown(count, actors):
    line = in_parts(*[f"used by fwd(stage {k}), bwd(stage {k}), after the loop" for k in range(count)])
    why = "each used by its own stage (forward and backward), after the loop"
    assert texts_of(line) == (actors, why)


@pytest.mark.parametrize(
    ("reasons", "why"),
    [
        (["used after the loop"] * 2, "used after the loop"),
        (
            [
                "used by fwd(stage 0), bwd_input(stage 0), bwd_weight(stage 0)",
                "used by fwd_bwd_input(stage 1), bwd_weight(stage 1)",
            ],
            "each used by its own stage (forward and backward)",
        ),
        (["used by fwd(stage 0)", "used by fwd(stage 1)"], "each used by its own stage (forward)"),
        (
            ["made there: accumulated by bwd(stage 0)", "made there: accumulated by fwd_bwd(stage 1)"],
            "[0:1] made there: accumulated by bwd(stage 0); "
            "[1:2] made there: accumulated by fwd_bwd(stage 1)",
        ),
        (
            [f"used before the loop for fwd(stage {k}), bwd(stage {k}), after the loop" for k in range(3)],
            "each used before the loop for its own stage (forward and backward), after the loop",
        ),
        (
            [
                "used by fwd(stage 0)",
                "used by fwd(stage 1)",
                "actor 0: used after the loop; actor 2: used by fwd(stage 2)",
                "used by fwd(stage 0), fwd(stage 3)",
            ],
            "[0:2] each used by its own stage (forward); "
            "[2:3] actor 0: used after the loop; actor 2: used by fwd(stage 2); "
            "[3:4] used by fwd(stage 0), fwd(stage 3)",
        ),
        (
            [f"used by fwd(stage 0), fwd(stage {k})" for k in range(1, 7)],
            "[0:1] used by fwd(stage 0), fwd(stage 1); [1:2] used by fwd(stage 0), fwd(stage 2); "
            "... 3 more ...; [5:6] used by fwd(stage 0), fwd(stage 6)",
        ),
    ],
)
def test_why_parts_lie_where_they_lie_is_said_once(reasons, why):
    assert in_parts(*reasons).why == why


def test_neighbours_on_the_same_actors_are_one_line():
    parts = Parts(0, (0, 1, 2, 3, 4))
    places = [(0, "used by fwd(stage 0)"), (0, "used by bwd(stage 0)"), (1, "is state"), (2, "is state")]
    lines = [
        PlaceLine(name, "float32[1, 3]", (actor,), 12, f"{why}{row}")
        for name, row, (actor, why) in zip(parts.names("w"), parts.names(""), places, strict=True)
    ]
    assert reports._join_neighbours("w", Aval((4, 3), "float32"), parts, lines) == (
        PlaceLine(
            "w[0:2]", "float32[2, 3]", (0,), 24, "[0:1] used by fwd(stage 0); [1:2] used by bwd(stage 0)"
        ),
        PlaceLine("w[2:3]", "float32[1, 3]", (1,), 12, "is state"),
        PlaceLine("w[3:4]", "float32[1, 3]", (2,), 12, "is state"),
    )


def test_a_leaf_whose_parts_lie_together_is_shown_whole():
    avals = [Aval((1, 3), "float32")] * 2
    lines = [PlaceLine(name, "float32[1, 3]", (0,), 12, "x") for name in ("w[0:1]", "w[1:2]")]
    whole = PlaceLine("w", "float32[2, 3]", (0,), 24, "x")
    assert reports._by_leaf(lines, avals, 2, [Parts(0, (0, 1, 2))]) == [whole]


# ---------------------------------------------------------------- cuts


@pytest.mark.parametrize(
    ("cut", "text"),
    [
        (Cut((Mark("m.py:4"),) * 8, (3,)), "stage 0 ends behind mark 3 of 8 (counted from 0; m.py:4)"),
        (
            Cut((Mark("m.py:4"),) * 6, (1, 3, 4), (0.25, 0.25, 0.25, 0.25)),
            "stage 0 ends behind mark 1 of 6 (counted from 0; m.py:4), stage 1 behind mark 3, "
            "stage 2 behind mark 4; balanced: the stages have 25.0%, 25.0%, 25.0%, 25.0% of the work",
        ),
        (
            Cut((Mark("m.py:4", "a"), Mark("m.py:4", "b"), Mark("m.py:9")), (0, 1, 2)),
            "stage 0 ends behind mark 0 of 3 (counted from 0; 'a'; m.py:4), stage 1 behind mark 1 ('b'), "
            "stage 2 behind mark 2 (m.py:9)",
        ),
        (Cut((Mark("m.py:4"),), ()), "one stage, with 1 mark inside it"),
    ],
)
def test_a_cut_says_behind_which_mark_each_stage_ends(cut, text):
    assert cut.stage_ends == text
