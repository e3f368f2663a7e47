"""TaskGraph to programs: small graphs by hand, pipelines, and random graphs against direct evaluation."""

from copy import copy

import pytest
from graph_builder import (
    ACTIVATION,
    RESIDUAL,
    WEIGHT,
    GraphBuilder,
    evaluate,
    gpipe,
    interpret,
    pipeline_graph,
    std_1f1b,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from program_text import parse_program

from jaxpp_async.compiler.lowering import (
    donate_buffers,
    insert_transfers,
    lower,
    plan_transfers,
)
from jaxpp_async.compiler.verify import verify_graph, verify_programs, verify_together
from jaxpp_async.program.actor_program import ActorProgram, format_program
from jaxpp_async.program.buffer_table import peak_plan
from jaxpp_async.program.instructions import Recv, Run, runs

# ---------------------------------------------------------------- small graphs


def chain() -> GraphBuilder:
    """x -> f -> g, on two actors."""
    g = GraphBuilder(2)
    (y,) = g.node("f", 0, [g.input("x", 0)], ["y"])
    (z,) = g.node("g", 1, [y], ["z"])
    g.output(z, 1)
    return g


def skip() -> GraphBuilder:
    """A value made on actor 0 and used on actors 1 and 2; the direct link skips actor 1."""
    g = GraphBuilder(3)
    (a,) = g.node("f0", 0, [g.input("x", 0)], ["a"])
    (b,) = g.node("f1", 1, [a], ["b"])
    (c,) = g.node("f2", 2, [b, a], ["c"])
    g.output(c, 2)
    return g


def tied() -> GraphBuilder:
    """A tied weight: each actor has its accumulator; they meet after the loop."""
    g = GraphBuilder(2)
    w = g.input("w", 0, donated=True)
    sums = []
    for actor in (0, 1):
        (s,) = g.node(f"zeros{actor}", actor, [], ["s"], executable=10 + actor)
        for i in range(2):
            (s,) = g.node(f"bwd{actor} mb {i}", actor, [w, s], ["s"], executable=20 + actor, donatable=(1,))
        sums.append(s)
    (new,) = g.node("update", 0, [w, *sums], ["new w"], executable=30, donatable=(0, 1, 2))
    g.output(new, 0)
    return g


def everywhere() -> GraphBuilder:
    """One value returned on two actors and as two results."""
    g = GraphBuilder(2)
    (y,) = g.node("f", 0, [g.input("x", 0, donated=True)], ["y"], donatable=(0,))
    g.output(y, 0, 1)
    g.output(y, 0)
    return g


def passed_through() -> GraphBuilder:
    """Arguments returned unchanged, donated and not; one donated and unused; one moved and not kept."""
    g = GraphBuilder(2)
    g.output(g.input("kept", 0), 0)
    g.output(g.input("donated", 0, donated=True), 0)
    g.input("unused", 0, donated=True)
    g.output(g.input("moved", 0, donated=True), 1)
    return g


def dead() -> GraphBuilder:
    """A result that nobody uses."""
    g = GraphBuilder(1)
    (y, _) = g.node("f", 0, [g.input("x", 0)], ["y", "never used"])
    g.output(y, 0)
    return g


GOLDEN = [
    (
        chain,
        """\
actor 0: 2 slots
uncounted b0
input  b0 = arg 0 f32[4]
run    "f" exe 0 (b0) -> (b1 f32[4])
send   b1 to 1 tag 0
delete b1

actor 1: 2 slots
recv   b0 from 0 tag 0 f32[4]
run    "g" exe 1 (b0) -> (b1 f32[4])
delete b0
output b1 = result 0
""",
    ),
    (
        skip,
        """\
actor 0: 2 slots
uncounted b0
input  b0 = arg 0 f32[4]
run    "f0" exe 0 (b0) -> (b1 f32[4])
send   b1 to 1 tag 0
send   b1 to 2 tag 1
delete b1

actor 1: 2 slots
recv   b0 from 0 tag 0 f32[4]
run    "f1" exe 1 (b0) -> (b1 f32[4])
send   b1 to 2 tag 2
delete b0
delete b1

actor 2: 3 slots
recv   b0 from 0 tag 1 f32[4]
recv   b1 from 1 tag 2 f32[4]
run    "f2" exe 2 (b1, b0) -> (b2 f32[4])
delete b1
delete b0
output b2 = result 0
""",
    ),
    (
        tied,
        """\
actor 0: 6 slots
uncounted b0
input  b0 = arg 0 f32[4] donated
send   b0 to 1 tag 0
run    "zeros0" exe 10 () -> (b1 f32[4])
run    "bwd0 mb 0" exe 20 (b0, b1) -> (b2 f32[4]) donate (1)
run    "bwd0 mb 1" exe 20 (b0, b2) -> (b3 f32[4]) donate (1)
recv   b4 from 1 tag 1 f32[4]
run    "update" exe 30 (b0, b3, b4) -> (b5 f32[4]) donate (1)
delete b0
delete b4
output b5 = result 0

actor 1: 4 slots
uncounted b1
run    "zeros1" exe 11 () -> (b0 f32[4])
recv   b1 from 0 tag 0 f32[4]
run    "bwd1 mb 0" exe 21 (b1, b0) -> (b2 f32[4]) donate (1)
run    "bwd1 mb 1" exe 21 (b1, b2) -> (b3 f32[4]) donate (1)
send   b3 to 0 tag 1
delete b1
delete b3
""",
    ),
    (
        everywhere,
        """\
actor 0: 2 slots
uncounted b0
input  b0 = arg 0 f32[4] donated
run    "f" exe 0 (b0) -> (b1 f32[4]) donate (0)
send   b1 to 1 tag 0
output b1 = result 0
output b1 = result 1

actor 1: 1 slots
recv   b0 from 0 tag 0 f32[4]
output b0 = result 0
""",
    ),
    (
        passed_through,
        """\
actor 0: 4 slots
uncounted b0-b3
input  b0 = arg 0 f32[4]
input  b1 = arg 1 f32[4] donated
input  b2 = arg 2 f32[4] donated
input  b3 = arg 3 f32[4] donated
send   b3 to 1 tag 0
delete b2
delete b3
output b0 = result 0
output b1 = result 1

actor 1: 1 slots
uncounted b0
recv   b0 from 0 tag 0 f32[4]
output b0 = result 2
""",
    ),
    (
        dead,
        """\
actor 0: 3 slots
uncounted b0
input  b0 = arg 0 f32[4]
run    "f" exe 0 (b0) -> (b1 f32[4], b2 f32[4])
delete b2
output b1 = result 0
""",
    ),
]


@pytest.mark.parametrize("make, text", GOLDEN, ids=[make.__name__ for make, _ in GOLDEN])
def test_small_graphs(make, text):
    graph = make().graph()
    verify_graph(graph)
    programs = lower(graph, receives_ahead=0)
    assert "\n".join(map(str, programs)) == text
    verify_programs(programs)
    assert interpret(programs, 0) == evaluate(graph)


# ---------------------------------------------------------------- receives


def _stream(program: ActorProgram) -> str:
    """`r3` for a receive of tag 3, the label for a run."""
    words = (
        f"r{i.tag}" if isinstance(i, Recv) else i.label if isinstance(i, Run) else ""
        for i in program.instructions
    )
    return " ".join(filter(None, words))


@pytest.mark.parametrize(
    "ahead, stream",
    [
        (0, "r0 g0 r1 g1 r2 g2 r3"),
        (1, "r0 r1 g0 r2 g1 r3 g2"),
        (2, "r0 r1 r2 g0 r3 g1 g2"),
        (8, "r0 r1 r2 r3 g0 g1 g2"),
    ],
)
def test_receives_are_posted_a_bounded_number_of_runs_ahead(ahead, stream):
    g = GraphBuilder(2)
    x = g.input("x", 0)
    sent = [g.node(f"f{i}", 0, [x], ["y"])[0] for i in range(4)]
    for i in range(3):
        g.node(f"g{i}", 1, [sent[i]], [])
    g.output(sent[3], 1)
    assert _stream(lower(g.graph(), receives_ahead=ahead)[1]) == stream


def test_receives_keep_the_order_of_the_sends():
    g = GraphBuilder(3)
    x, other = g.input("x", 0), g.input("other", 2)
    (early,) = g.node("early", 0, [x], ["a"])
    (late,) = g.node("late", 0, [x], ["b"])
    g.node("g0", 1, [late], [])
    g.node("g1", 1, [other], [])
    g.node("g2", 1, [early], [])
    programs = lower(g.graph(), receives_ahead=0)
    # Tag 1 is needed last and sent first; tag 0, from another actor, is not held to that.
    assert _stream(programs[1]) == "r1 r2 g0 r0 g1 g2"
    verify_programs(programs)


def test_arguments_are_sent_in_the_order_they_are_needed():
    g = GraphBuilder(2)
    a, b = g.input("a", 0), g.input("b", 0)
    g.node("g0", 1, [b], [])
    g.node("g1", 1, [a], [])
    assert [(t.value, t.tag) for t in plan_transfers(g.graph())] == [(b, 0), (a, 1)]


def test_an_argument_that_lives_on_several_actors_moves_from_the_first():
    g = GraphBuilder(3)
    x = g.input("x", 1, 2)
    for actor in range(3):
        g.node("f", actor, [x], [], executable=0)
    assert [(t.from_actor, t.to_actor) for t in plan_transfers(g.graph())] == [(1, 0)]


def test_fewer_than_no_runs_ahead_are_refused():
    with pytest.raises(ValueError, match="at least 0"):
        lower(chain().graph(), receives_ahead=-1)


# ---------------------------------------------------------------- donation


def _donated(build) -> list[tuple[int, ...]]:
    g = GraphBuilder(2)
    build(g)
    graph = g.graph()
    return [run.donated for run in runs(donate_buffers(graph, insert_transfers(graph))[0].instructions)]


def _used_later(g):
    (y,) = g.node("f", 0, [], ["y"])
    g.node("g", 0, [y], [], donatable=(0,))
    g.node("h", 0, [y], [], donatable=(0,))


def _read_twice(g):
    (y,) = g.node("f", 0, [], ["y"])
    g.node("g", 0, [y, y], [], donatable=(0, 1))


def _returned(g):
    (y,) = g.node("f", 0, [], ["y"])
    g.node("g", 0, [y], [], donatable=(0,))
    g.output(y, 0)


def _sent(g):
    (y,) = g.node("f", 0, [], ["y"])
    g.node("g", 0, [y], [], donatable=(0,))
    g.node("h", 1, [y], [])


def _received(g):
    (y,) = g.node("f", 1, [], ["y"])
    g.node("g", 0, [y], [], donatable=(0,))


def _arguments(g):
    g.node("f", 0, [g.input("kept", 0), g.input("donated", 0, donated=True)], [], donatable=(0, 1))


def _one_of_two_runs(g):
    (a,) = g.node("f", 0, [], ["a"], executable=0)
    (b,) = g.node("f", 0, [], ["b"], executable=0)
    g.node("g", 0, [a, b], [], executable=1, donatable=(0, 1))
    (c,) = g.node("f", 0, [], ["c"], executable=0)
    g.node("g", 0, [g.input("kept", 0), c], [], executable=1, donatable=(0, 1))


def _not_offered(g):
    (y,) = g.node("f", 0, [], ["y"])
    g.node("g", 0, [y], [])


@pytest.mark.parametrize(
    "build, donated",
    [
        (_used_later, [(), (), (0,)]),
        (_read_twice, [(), ()]),
        (_returned, [(), ()]),
        (_sent, [(), ()]),
        (_received, [()]),
        (_arguments, [(1,)]),
        (_one_of_two_runs, [(), (), (1,), (), (1,)]),
        (_not_offered, [(), ()]),
    ],
)
def test_donation(build, donated):
    assert _donated(build) == donated


def test_donation_of_a_shared_executable_differs_between_actors_only():
    g = GraphBuilder(2)
    for actor in (0, 1):
        (y,) = g.node("f", actor, [], ["y"], executable=0)
        g.node("g", actor, [y], [], executable=1, donatable=(0,))
        if actor:
            g.output(y, actor)
    programs = lower(g.graph())
    assert [runs(p.instructions)[1].donated for p in programs] == [(0,), ()]
    verify_programs(programs)


# ---------------------------------------------------------------- pipelines


@pytest.mark.parametrize("order", [std_1f1b, gpipe])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_pipelines_lower_to_valid_programs(order, num_stages):
    graph = pipeline_graph(num_stages, 6, order)
    verify_graph(graph)
    programs = lower(graph)
    verify_programs(programs)
    assert interpret(programs, 1) == evaluate(graph)
    assert tuple(parse_program(format_program(p)) for p in programs) == programs
    for p in programs:
        accumulate = [run for run in runs(p.instructions) if run.label.startswith("bwd")]
        assert all(0 in run.donated for run in accumulate), "accumulators are updated in place"


def test_every_stage_leaves_valid_programs():
    graph = pipeline_graph(3, 5)
    moved = insert_transfers(graph)
    verify_together(moved)
    verify_together(donate_buffers(graph, moved))


def _peaks(order, num_stages: int, num_microbatches: int) -> list[int]:
    return [peak_plan(p).peak_bytes for p in lower(pipeline_graph(num_stages, num_microbatches, order))]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_peak_of_1f1b_does_not_depend_on_the_number_of_microbatches(num_stages):
    assert (
        _peaks(std_1f1b, num_stages, 8)
        == _peaks(std_1f1b, num_stages, 16)
        == _peaks(std_1f1b, num_stages, 32)
    )


def test_peak_of_1f1b_follows_the_formula():
    residual, activation, weight = RESIDUAL.size_bytes, ACTIVATION.size_bytes, WEIGHT.size_bytes
    first, last = _peaks(std_1f1b, 2, 8)
    # At a forward: two residuals, the gradient, the activation just made and the two cotangents asked for
    # ahead.
    assert first == 2 * residual + weight + 3 * activation
    # At a forward: its residual, the gradient, the activation it reads and the one asked for ahead.
    assert last == residual + weight + 2 * activation


@pytest.mark.parametrize("num_microbatches", [4, 8, 16])
def test_peak_of_gpipe_follows_the_formula(num_microbatches):
    residual, activation, weight = RESIDUAL.size_bytes, ACTIVATION.size_bytes, WEIGHT.size_bytes
    first, last = _peaks(gpipe, 2, num_microbatches)
    assert first == num_microbatches * residual + weight + 3 * activation
    assert last == num_microbatches * residual + weight + activation


# ---------------------------------------------------------------- random graphs


@st.composite
def graphs(draw):
    """Any DAG over 1 to 4 actors: shared executables, several results, values of every fate."""
    num_actors = draw(st.integers(1, 4))
    g = GraphBuilder(num_actors)
    actor = st.integers(0, num_actors - 1)
    some_actors = st.lists(actor, min_size=1, max_size=num_actors, unique=True)
    values = [
        g.input(f"x{k}", *draw(some_actors), donated=draw(st.booleans()))
        for k in range(draw(st.integers(0, 4)))
    ]
    for k in range(draw(st.integers(0, 12))):
        operands = draw(st.lists(st.sampled_from(values), max_size=3)) if values else []
        num_results = draw(st.integers(0, 2))
        donatable = [p for p in range(len(operands)) if draw(st.booleans())]
        # An executable is shared by nodes of one signature.
        executable = 100 * draw(st.integers(0, 1)) + 10 * len(operands) + num_results
        kinds = [draw(st.sampled_from(["temp", "accumulator", "result"])) for _ in range(num_results)]
        made = [g.value(f"v{k}", kind) for kind in kinds]
        values += g.node(f"n{k}", draw(actor), operands, made, executable=executable, donatable=donatable)
    if values:
        for _ in range(draw(st.integers(0, 4))):
            g.output(draw(st.sampled_from(values)), *draw(some_actors))
    return g.graph()


@settings(max_examples=300, deadline=None)
@given(graphs(), st.integers(0, 3), st.integers(0, 1000))
def test_random_graphs_mean_what_they_meant(graph, ahead, seed):
    verify_graph(graph)
    programs = lower(graph, receives_ahead=ahead)
    verify_programs(programs)
    assert interpret(programs, seed) == evaluate(graph)


@settings(max_examples=50, deadline=None)
@given(graphs())
def test_lowering_is_deterministic_and_prints(graph):
    programs = lower(graph)
    assert lower(copy(graph)) == programs
    assert tuple(parse_program(format_program(p)) for p in programs) == programs
