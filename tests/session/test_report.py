"""Direct tests of the text of a step's report, from numbers made by hand."""

from __future__ import annotations

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
