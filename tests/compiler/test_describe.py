"""What each pass left, as text, and why things are where they are, as words."""

from __future__ import annotations

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiler_inputs import Body, placed_step, scheduled, two_stages
from planning import f32

import jaxpp_async as jpp
from jaxpp_async.compiler.continued_arguments import continued_arguments
from jaxpp_async.compiler.describe import (
    Explainer,
    PassTexts,
    format_executables,
    format_flat,
    format_graph,
    format_programs,
    format_scheduled,
    format_specs,
    format_staged,
)
from jaxpp_async.compiler.ir import Flat, Lit
from jaxpp_async.markers.reductions import Stack, Sum
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import Aval, Delete, Input

# ---------------------------------------------------------------- texts


def test_texts_are_made_when_they_are_read_and_each_time_anew():
    made = []

    def maker():
        made.append(1)
        return f"text {len(made)}"

    texts = PassTexts({"trace": maker}).with_text("emit", lambda: "last")
    assert (list(texts), len(texts), made) == (["trace", "emit"], 2, [])
    assert [texts["trace"], texts["trace"], texts["emit"]] == ["text 1", "text 2", "last"]
    assert repr(texts) == "<texts of trace, emit>"


def test_a_flat_body_is_one_line_an_operation_and_a_loop_stands_indented():
    outer = Body(w=(2, 2), batch=(3, 2))
    outer.add("c = mul w #2.0")
    body = Body(outer.types, w=(2, 2), x=(2,), i=Aval((), "int32"))
    body.add("y[2] _ = dot_general x w", "z = neg y '")
    loop = body.loop("z y", reductions=[Sum(), Stack()], microbatches=3)
    flat = Flat(outer.inputs, (*outer.ops, loop), (loop.outputs[0], Lit(np.float32(1))))
    first = loop.invariants[0]
    assert format_flat(flat, outer.types).splitlines() == [
        "inputs %0:float32[2,2] %1:float32[3,2]",
        "%2:float32[2,2] = mul %0 #2.0:float32",
        f"%{first + 2}:float32[2] %{first + 3}:float32[2] = loop[3 microbatches] %{first} %{first + 1} {{",
        "  inputs %3:float32[2,2] %4:float32[2] %5:int32[]",
        "  %6:float32[2] = dot_general %4 %3",
        "  %7:float32[2] = neg %6 '",
        "  return %7 %6",
        "} reduce (Sum, Stack)",
        f"return %{first + 2} #1.0:float32",
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), "#0.5:float32"),
        (np.arange(3, dtype="int8"), "#[0, 1, 2]:int8[3]"),
        (np.zeros((3, 3), "float32"), "#...:float32[3,3]"),
        (jnp.ones((2, 4), "int32"), "#[[1, 1, 1, 1], [1, 1, 1, 1]]:int32[2,4]"),
    ],
)
def test_a_constant_is_written_out_up_to_eight_elements(value, expected):
    assert format_flat(Flat((), (), (Lit(value),)), Body().types) == f"inputs \nreturn {expected}"


def test_a_cut_loop_is_written_task_by_task_and_result_by_result():
    body = two_stages()
    body.ops[1].params["name"] = "encoder"
    body.add("g = add_any a b '")
    found = scheduled(body.loop("g loss", reductions=[Sum(), Stack()]), body.types, jpp.GPipe(2), 2)
    ids = {n: body.ref(n) for n in ("h", "x", "w", "z", "loss", "a", "dy", "b")}
    v = {name: f"%{k}" for name, k in ids.items()}
    assert format_staged(found.staged).splitlines() == [
        "loop of 2 stages, 2 microbatches",
        "stage 0 ends at pipeline_yield 'encoder'",
        "fwd stage 0",
        f"  {v['h']} = dot_general {v['x']} {v['w']}",
        "fwd stage 1",
        f"  {v['z']} = dot_general {v['h']} {v['w']}",
        f"  {v['loss']} = reduce_sum {v['z']}",
        "bwd stage 1",
        f"  {v['a']} = dot_general {v['h']} {v['z']}",
        f"  {v['dy']} = dot_general {v['z']} {v['w']}",
        "bwd stage 0",
        f"  {v['b']} = dot_general {v['x']} {v['dy']}",
        f"result 0: Sum {v['a']} of bwd stage 1 + {v['b']} of bwd stage 0",
        f"result 1: Stack {v['loss']} of fwd stage 1",
    ]
    lines = format_scheduled(found).splitlines()
    assert lines[:3] == [
        "time     0    1    2    3    4    5",
        "actor 0  0F0  0F1  .    .    0B0  0B1",
        "actor 1  .    1F0  1F1  1B0  1B1  .",
    ]
    at = lines.index(f"bwd stage 1 on actor 1 ({v['h']} {v['z']} {v['w']}) -> ({v['dy']})")
    assert lines[at + 1 : at + 4] == [
        f"  {v['a']} = dot_general {v['h']} {v['z']}",
        f"  {v['dy']} = dot_general {v['z']} {v['w']}",
        f"  result 0 += {v['a']}",
    ]


def test_programs_and_executables_are_written_one_after_the_other():
    aval = Aval((2,), "float32")
    programs = [ActorProgram(a, (Input(0, a), Delete(0)), (aval,)) for a in (0, 1)]
    assert format_programs(programs) == f"{programs[0]}\n\n{programs[1]}"
    emitted = [SimpleNamespace(name="fwd0", blob=b"1234"), SimpleNamespace(name="bwd0", blob=b"")]
    assert format_executables(emitted) == "exe 0 fwd0 4 bytes\nexe 1 bwd0 0 bytes"


# ---------------------------------------------------------------- reasons


def train(ws, scale, unused, batch):
    def loss(w, x):
        return jnp.sum(jpp.pipeline_yield(jnp.tanh(x @ w[0])) @ w[1])

    half = [w.astype("bfloat16") for w in ws]

    def of_one(x):
        value, grads = jax.value_and_grad(loss)(half, x)
        return grads, value

    grads, losses = jpp.accumulate_grads(of_one, jpp.GPipe(2))(batch)
    norm = jnp.sum(grads[0] * grads[0]) + jnp.sum(grads[1] * grads[1])
    return [w - scale * g / norm for w, g in zip(ws, grads, strict=True)], losses, unused


def explained(fn=train, *args):
    args = args or ([f32(3, 3)] * 2, f32(), f32(5), f32(2, 4, 3))
    traced, placed = placed_step(fn, *args)
    return Explainer(traced, placed, continued_arguments(traced)), placed


def test_every_transfer_says_what_it_is_when_it_happens_and_who_needs_it():
    reasons, _ = explained()
    lines = [f"{c.from_actor}->{c.to_actor} {c.what} {c.when}: {c.why}" for c in reasons.crossings()]
    forth = "0->1 float32[4, 3] of fwd(stage 0) in the loop: for fwd(stage 1), bwd(stage 1)"
    back = "1->0 float32[4, 3] of bwd(stage 1) in the loop: for bwd(stage 0)"
    assert lines[:4] == [forth, forth, back, back]
    assert [re.sub(r":\d+ ", ":LINE ", line) for line in lines[4:]] == [
        "1->0 bfloat16[] convert_element_type at test_describe.py:LINE after the loop: for add there",
        "0->1 float32[] convert_element_type at test_describe.py:LINE after the loop: for div there",
    ]
    assert [reasons.is_in_loop(c.when) for c in reasons.crossings()] == [True] * 4 + [False] * 2


def test_a_partial_sum_crosses_behind_the_loop_that_accumulates_it():
    def step(w, batch):
        def of_one(x):
            loss = jax.value_and_grad(lambda w: jnp.sum((jpp.pipeline_yield(jnp.tanh(x @ w)) @ w) ** 2))
            return loss(w)[::-1]

        grad, losses = jpp.accumulate_grads(of_one, jpp.GPipe(2))(batch)
        return w - grad, losses

    traced, placed = placed_step(step, f32(3, 3), f32(2, 4, 3))
    reasons = Explainer(traced, placed, continued_arguments(traced))
    found = [f"{c.what} {c.when}: {c.why}" for c in reasons.crossings() if not reasons.is_in_loop(c.when)]
    (total,) = [text for text in found if "accumulated by" in text]
    task = total.removeprefix("float32[3, 3] accumulated by ").split(" after the loop: ")
    assert task in (["bwd(stage 0)", "for add_partial there"], ["bwd(stage 1)", "for add_partial there"])


def test_arguments_say_who_uses_them_and_through_what():
    reasons, placed = explained()
    values = {placed.graph.values[i.value].label: i for i in placed.graph.inputs}
    why = {name: reasons.why_input(i.value, i.actors) for name, i in values.items()}
    assert why["arg0[0]"] == "used before the loop for fwd(stage 0), after the loop"
    assert why["arg0[1]"] == "used before the loop for fwd(stage 1), bwd(stage 1), after the loop"
    assert why["arg1"] == "used after the loop"
    assert why["arg2"] == "not used: stays where it is, and is handed back as result[2]"
    assert why["arg3"] == "used by fwd(stage 0), bwd(stage 0)"


def test_results_say_what_they_continue_or_who_makes_them():
    reasons, placed = explained()
    why = {o.result: reasons.why_result(o.result, o.value) for o in placed.graph.outputs}
    assert why == {
        0: "continues arg0[0]",
        1: "continues arg0[1]",
        2: "made there: collected by fwd(stage 1)",
    }
    unused = next(i.value for i in placed.graph.inputs if placed.graph.values[i.value].label == "arg2")
    assert reasons.why_result(3, unused) == "is arg2, handed back where it lies"


def test_a_result_whose_home_was_asked_for_says_so():
    traced, placed = placed_step(lambda x: x * 2, f32(2), result_homes={0: frozenset((1,))})
    assert Explainer(traced, placed, {}).why_result(0, placed.graph.outputs[0].value) == "asked for by init"


def test_an_argument_that_differs_between_actors_says_why_for_each():
    def step(x, y):
        return x * 2, y + x

    traced, placed = placed_step(step, f32(2), f32(2), result_homes={0: frozenset((0,)), 1: frozenset((1,))})
    reasons = Explainer(traced, placed, {})
    (x, _) = placed.graph.inputs
    assert x.actors == (0, 1)
    assert reasons.why_input(x.value, x.actors) == "used in the step"
    assert (
        reasons.why_input(x.value, (0, 5)) == "actor 0: used in the step; actor 5: nobody uses it on actor 5"
    )


def test_phases_are_named_by_the_loops_around_them():
    def step(w, batch):
        def loop(w):
            return jpp.accumulate_grads(lambda x: jnp.sum(x * w, 0), jpp.GPipe(1))(batch)

        first = loop(jnp.sin(w))
        second = loop(jnp.cos(first) + w)
        return jnp.tanh(second)

    traced, placed = placed_step(step, f32(3), f32(2, 4, 3), actors=1)
    reasons = Explainer(traced, placed, {})
    phases = [reasons.phase(n) for n in placed.graph.nodes if n.task is None and n.label.startswith("outer")]
    assert phases == ["before loop 1", "before loop 2", "after loop 2"]
    assert reasons.num_microbatches == 2


def test_a_graph_and_its_shardings_are_one_line_a_value():
    _, placed = placed_step(lambda x: x * 2, f32(2, 3), actors=1)
    lines = format_graph(placed).splitlines()
    assert lines[0] == "in  v0 arg0 on [0]" and lines[-1] == "exe 0 outer0_actor0 (%0) -> (%1) ops 1"
    assert format_specs(placed).splitlines() == [
        "v0 arg0 float32[2, 3] replicated",
        "v1 %1@outer(0) float32[2, 3] replicated",
    ]
