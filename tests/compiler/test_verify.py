"""The checks of programs: valid ones pass, every way to break one is caught, deadlocks are explained."""

import time

import pytest
from graph_builder import F4, GraphBuilder, evaluate, interpret, pipeline_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from jaxpp_async.compiler.lowering import lower
from jaxpp_async.compiler.verify import (
    InternalError,
    check_deadlock,
    find_blocked_actors,
    verify_graph,
    verify_programs,
    verify_transfers,
)
from jaxpp_async.errors import ScheduleError
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import (
    Aval,
    Delete,
    GraphInput,
    GraphOutput,
    Input,
    Output,
    Recv,
    Run,
    Send,
    TaskGraph,
)

OTHER = Aval((5,), "float32")

# ---------------------------------------------------------------- one valid step, broken in every way


def valid() -> list[list]:
    """Two actors: 0 runs f and h and sends to 1, which runs g and sends back."""
    return [
        [
            Input(0, 0),
            Input(1, 1, True),
            Run("f", 0, (0,), (2, 3)),
            Send(2, 1, 0),
            Send(3, 1, 1),
            Delete(2),
            Delete(3),
            Recv(4, 1, 2),
            Run("h", 1, (1, 4), (5,), (0,)),
            Delete(4),
            Output(5, 0),
            Output(5, 1),
        ],
        [
            Recv(0, 0, 0),
            Recv(1, 0, 1),
            Run("g", 2, (0, 1), (2,)),
            Send(2, 0, 2),
            Delete(0),
            Delete(1),
            Delete(2),
        ],
    ]


def programs_of(streams) -> list[ActorProgram]:
    return [
        ActorProgram(a, tuple(s), (F4,) * (6 if a == 0 else 3), frozenset({0})) for a, s in enumerate(streams)
    ]


def test_the_unbroken_step_is_valid():
    verify_programs(programs_of(valid()))


def put(actor, index, *instructions):
    return lambda streams: streams[actor].__setitem__(slice(index, index + 1), instructions)


def add(actor, index, *instructions):
    return lambda streams: streams[actor].__setitem__(slice(index, index), instructions)


def swap(actor, i, k):
    def change(streams):
        s = streams[actor]
        s[i], s[k] = s[k], s[i]

    return change


MUTATIONS = [
    # one program
    ("make a slot twice", add(1, 3, Run("g", 2, (0, 1), (2,))), "b2 is assigned twice"),
    ("make a freed slot again", add(0, 7, Run("x", 9, (), (2,))), "b2 is assigned twice"),
    (
        "make a slot out of range",
        add(0, 7, Run("x", 9, (), (6,))),
        "b6 is out of range, the program has 6 slots",
    ),
    ("read before it is made", swap(0, 2, 3), "b2 is read before it is made"),
    ("read before it is received", swap(1, 1, 2), "b1 is read before it is made"),
    ("read after deletion", swap(0, 3, 5), "b2 was deleted before"),
    ("read after donation", add(0, 9, Run("x", 9, (1,), ())), "b1 was donated before"),
    ("delete a donated buffer", add(0, 9, Delete(1)), "b1 was donated before"),
    ("delete twice", add(0, 10, Delete(4)), "b4 was deleted before"),
    ("delete a kept argument", add(0, 9, Delete(0)), "b0 is an argument that the caller keeps"),
    ("forget a delete", put(0, 9), "b4 is still held at the end"),
    ("delete an output", add(0, 12, Delete(5)), "b5 has left the program"),
    ("run on an output", add(0, 12, Run("x", 9, (5,), ())), "b5 has left the program"),
    ("output a deleted buffer", put(0, 10, Output(4, 0)), "b4 was deleted before"),
    ("make a result twice", put(0, 11, Output(5, 0)), "result 0 is made twice"),
    ("bind an argument twice", put(0, 1, Input(1, 0, True)), "argument 0 is bound twice"),
    (
        "donate a kept argument",
        put(0, 2, Run("f", 0, (0,), (2, 3), (0,))),
        "b0 is donated, but is an argument that",
    ),
    (
        "donate a received buffer",
        put(0, 8, Run("h", 1, (1, 4), (5,), (0, 1))),
        "b4 is donated, but lies in the trans",
    ),
    (
        "donate a sent buffer",
        put(0, 5, Run("x", 9, (2,), (), (0,))),
        "b2 is donated, but may still be on its way",
    ),
    (
        "donate what is read twice",
        put(0, 8, Run("h", 1, (1, 1, 4), (5,), (0,))),
        "b1 is donated and read twice",
    ),
    ("donate out of range", put(0, 8, Run("h", 1, (1, 4), (5,), (2,))), "donated positions (2,) of 2 inputs"),
    ("donate a position twice", put(0, 8, Run("h", 1, (1, 4), (5,), (0, 0))), "donated positions (0, 0)"),
    (
        "forward a received buffer",
        add(1, 3, Send(0, 0, 3)),
        "b0 was received; a value is sent by the actor that mak",
    ),
    # programs together
    ("send a tag twice", add(0, 5, Send(3, 1, 0)), "tag 0: actor 0 sends it, and so does actor 0"),
    ("receive a tag twice", put(1, 1, Recv(1, 0, 0)), "tag 0: actor 1 receives it, and so does actor 1"),
    ("drop a send", put(0, 4), "tag 1: actor 1 receives it, but actor 0 has no part in it"),
    (
        "drop a receive",
        put(1, 1, Run("x", 9, (), (1,))),
        "tag 1: actor 0 sends it, but actor 1 has no part in it",
    ),
    ("send to another actor", put(0, 4, Send(3, 7, 1)), "tag 1: sent 0 -> 7, received 0 -> 1"),
    ("send to oneself", add(1, 3, Send(2, 1, 3)), "tag 3: actor 1 sends it"),
    (
        "post in another order",
        swap(1, 0, 1),
        "tag 0: actor 0 sends it to actor 1, which posts tag 1 in its place",
    ),
    ("call an executable otherwise", put(1, 2, Run("g", 0, (0, 1), (2,))), "'g' calls executable 0 with"),
]


@pytest.mark.parametrize("mutate, message", [m[1:] for m in MUTATIONS], ids=[m[0] for m in MUTATIONS])
def test_a_broken_step_is_caught(mutate, message):
    streams = valid()
    mutate(streams)
    with pytest.raises(InternalError) as caught:
        verify_programs(programs_of(streams))
    assert message in str(caught.value)
    assert "this is a bug in jaxpp_async" in str(caught.value)


def test_transfers_of_unequal_avals_are_caught():
    first, second = programs_of(valid())
    with pytest.raises(InternalError, match=r"tag 0: actor 0 sends .* actor 1 receives"):
        verify_programs([first, replace(second, avals=(OTHER, F4, F4))])


def test_runs_of_an_executable_donate_alike():
    run = Run("f", 0, (0,), (1,), (0,))
    stream = (
        Run("make", 1, (), (0,)),
        run,
        replace(run, inputs=(1,), outputs=(2,), donated=()),
        Delete(1),
        Delete(2),
    )
    with pytest.raises(InternalError, match=r"executable 0 donated \(0,\) in an earlier run"):
        verify_programs([ActorProgram(0, stream, (F4,) * 3)])


def test_programs_stand_at_their_actor():
    with pytest.raises(InternalError, match="program 0 is actor 1's"):
        verify_programs(programs_of(valid())[::-1])


def test_uncounted_slots_exist():
    with pytest.raises(InternalError, match="uncounted slots"):
        verify_programs([ActorProgram(0, (), (), frozenset({3}))])


# ---------------------------------------------------------------- task graphs


def small_graph() -> TaskGraph:
    g = GraphBuilder(2)
    (y,) = g.node("f", 0, [g.input("x", 0)], ["y"])
    (z,) = g.node("g", 1, [y], ["z"])
    g.output(z, 1)
    return g.graph()


def _node(index, **changes):
    def change(graph):
        nodes = list(graph.nodes)
        nodes[index] = replace(nodes[index], **changes)
        return replace(graph, nodes=tuple(nodes))

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (_node(0, outputs=(0,)), "f makes 'x', which exists already"),
        (_node(1, outputs=(1,)), "g makes 'y', which exists already"),
        (_node(1, outputs=(9,)), "g makes value 9 of 3"),
        (_node(0, inputs=(2,)), "f reads 'z' before it is made"),
        (_node(0, inputs=(9,)), "f reads 9 before it is made"),
        (_node(0, actor=2), "f runs on actor 2 of 2"),
        (_node(0, donatable=(1,)), r"f donates \(1,\)"),
        (lambda g: replace(g, nodes=g.nodes[::-1]), "g reads 'y' before it is made"),
        (lambda g: replace(g, inputs=(GraphInput(0, 0, ()),)), "f reads 'x' before it is made"),
        (lambda g: replace(g, inputs=(GraphInput(0, 0, (0, 5)),)), r"argument 0 lives on actors \(0, 5\)"),
        (lambda g: replace(g, inputs=(GraphInput(0, 0, (0, 0)),)), "argument 0 names an actor twice"),
        (lambda g: replace(g, nodes=g.nodes[:1]), "result 0 is value 2, which nothing makes"),
        (lambda g: replace(g, outputs=g.outputs * 2), "result 0 on actor 1 appears twice"),
        (lambda g: replace(g, outputs=(GraphOutput(2, 0, (1, 1)),)), "result 0 names an actor twice"),
        (lambda g: replace(g, outputs=(GraphOutput(2, 0, (-1,)),)), "result 0 lives on actors"),
    ],
)
def test_a_broken_graph_is_caught(change, message):
    verify_graph(small_graph())
    with pytest.raises(InternalError, match=message):
        verify_graph(change(small_graph()))


def test_one_result_may_be_another_value_on_each_actor():
    g = GraphBuilder(2)
    steps = [g.node("count", a, [g.input(f"step{a}", a)], ["step"], executable=0)[0] for a in (0, 1)]
    graph = replace(g.graph(), outputs=tuple(GraphOutput(v, 0, (a,)) for a, v in enumerate(steps)))
    verify_graph(graph)
    programs = lower(graph)
    verify_programs(programs)
    assert [p.instructions[-1] for p in programs] == [Output(1, 0), Output(1, 0)]
    assert interpret(programs, 0) == evaluate(graph)


# ---------------------------------------------------------------- deadlock


def ring(num_actors: int) -> list[ActorProgram]:
    """Each actor waits for the next actor before it sends."""
    size = range(num_actors)
    return [
        ActorProgram(
            a,
            (
                Recv(0, (a + 1) % num_actors, (a + 1) % num_actors),
                Run(f"bwd(stage {a}, mb 0)", a, (0,), (1,)),
                Send(1, (a - 1) % num_actors, a),
                Delete(0),
                Delete(1),
            ),
            (F4, F4),
        )
        for a in size
    ]


def test_a_cycle_is_printed():
    with pytest.raises(ScheduleError) as caught:
        verify_programs(ring(3))
    text = str(caught.value)
    assert "the schedule deadlocks: 3 of 3 actors cannot go on" in text
    for actor, peer in ((0, 1), (1, 2), (2, 0)):
        assert f'actor {actor} waits at run    "bwd(stage {actor}, mb 0)" exe {actor} (b0) -> (b1)' in text
        assert f"for tag {peer} from actor {peer}" in text


def test_only_the_cycle_is_printed_not_who_waits_for_it():
    outside = ActorProgram(0, (Recv(0, 1, 77), Run("eval", 9, (0,), ())), (F4,))
    shifted = []
    for p in ring(2):
        at = {
            Recv: lambda i: replace(i, from_actor=i.from_actor + 1),
            Send: lambda i: replace(i, to_actor=i.to_actor + 1),
        }
        instructions = tuple(at.get(type(i), lambda i: i)(i) for i in p.instructions)
        shifted.append(replace(p, actor=p.actor + 1, instructions=instructions))
    shifted[0] = replace(shifted[0], instructions=(*shifted[0].instructions[:3], Send(1, 0, 77)))
    with pytest.raises(ScheduleError, match="3 of 3") as caught:
        check_deadlock([outside, *shifted])
    assert "actor 0 waits" not in str(caught.value)
    assert "actor 1 waits" in str(caught.value) and "actor 2 waits" in str(caught.value)


def test_receives_in_another_order_stall():
    streams = valid()
    swap(1, 0, 1)(streams)
    programs = programs_of(streams)
    assert [w.actor for w in find_blocked_actors(programs)] == [0, 1]


def test_a_send_without_receive_never_completes():
    sender = ActorProgram(0, (Run("f", 0, (), (0,)), Send(0, 1, 5), Delete(0)), (F4,))
    programs = [sender, ActorProgram(1, (), ())]
    (wait,) = find_blocked_actors(programs)
    assert str(wait) == "actor 0 waits at the end of the step for actor 1 to receive tag 5"


def test_a_receive_nobody_reads_is_waited_for():
    programs = [ActorProgram(0, (Recv(0, 1, 5), Output(0, 0)), (F4,)), ActorProgram(1, (), ())]
    (wait,) = find_blocked_actors(programs)
    assert str(wait) == "actor 0 waits at the end of the step for tag 5 from actor 1"


@st.composite
def scrambled(draw):
    """Matching transfers between actors, in any order: about half of these deadlock."""
    num_actors = draw(st.integers(2, 4))
    work: list[list[tuple]] = [[] for _ in range(num_actors)]
    for tag in range(draw(st.integers(1, 6))):
        a, b = draw(st.permutations(range(num_actors)))[:2]
        work[a].append((Run(f"make {tag}", tag, (), (tag,)), Send(tag, b, tag), Delete(tag)))
        work[b].append((Recv(tag, a, tag), Run(f"use {tag}", 10 + tag, (tag,), ()), Delete(tag)))
    streams = [[i for block in draw(st.permutations(blocks)) for i in block] for blocks in work]
    return [ActorProgram(a, tuple(s), (F4,) * 6) for a, s in enumerate(streams)]


@settings(max_examples=200, deadline=None)
@given(scrambled(), st.integers(0, 99))
def test_the_run_without_data_finds_what_an_interpreter_runs_into(programs, seed):
    try:
        interpret(programs, seed)
        stuck = False
    except AssertionError as e:
        assert "deadlock" in str(e)
        stuck = True
    try:
        verify_transfers(programs)
        in_order = True
    except InternalError:  # the receives of a link are in another order, which stalls it in any case
        in_order = False
    assert bool(find_blocked_actors(programs)) == (stuck or not in_order)
    if stuck:
        with pytest.raises(ScheduleError, match="Who waits for whom"):
            check_deadlock(programs)


# ---------------------------------------------------------------- size


def wide_graph(num_actors: int, num_stages: int, num_microbatches: int) -> TaskGraph:
    """The dataflow of an interleaved pipeline, microbatch after microbatch, with six residuals a stage."""
    g = GraphBuilder(num_actors)
    weights = [g.input(f"w{s}", s % num_actors) for s in range(num_stages)]
    grads = [
        g.node(f"zeros{s}", s % num_actors, [], ["grad"], executable=3 * s)[0] for s in range(num_stages)
    ]
    x = g.input("x", 0)
    for i in range(num_microbatches):
        y, residuals = x, []
        for s in range(num_stages):
            y, *saved = g.node(
                f"fwd(stage {s}, mb {i})",
                s % num_actors,
                [weights[s], y],
                ["y"] + 6 * ["r"],
                executable=3 * s + 1,
            )
            residuals.append(saved)
        for s in reversed(range(num_stages)):
            inputs = [grads[s], y, *residuals[s]]
            grads[s], y = g.node(
                f"bwd(stage {s}, mb {i})",
                s % num_actors,
                inputs,
                ["g", "dx"],
                executable=3 * s + 2,
                donatable=(0, 2),
            )
    for s in range(num_stages):
        g.output(grads[s], s % num_actors)
    return g.graph()


def test_verification_is_fast_enough_for_large_steps():
    graph = wide_graph(8, 48, 64)
    programs = lower(graph)
    start = time.perf_counter()
    verify_programs(programs)
    seconds = time.perf_counter() - start
    # 0.2 s where it was written; the bound allows for a loaded machine.
    assert seconds < 1.5, f"{seconds:.2f} s for {sum(len(p.instructions) for p in programs)} instructions"


def test_pipelines_pass():
    assert find_blocked_actors(lower(pipeline_graph(3, 6))) == []
