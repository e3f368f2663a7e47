"""Bytes that a device needs: the buffer table as actors measure it, and every row by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layer_steps import layer_step
from planning import f32

import jaxpp_async as jpp
from jaxpp_async.compiler.ir import Recipe, Types
from jaxpp_async.planning.machine import Machine, compile_for
from jaxpp_async.planning.memory import (
    BUFFER_TABLE,
    RECEIVE_BUFFERS,
    RESULTS,
    SENDS,
    TEMPORARIES,
    device_aval,
    memory_needs,
)
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import Aval, Delete, Input, Output, Recv, Run, Send, TaskGraph
from jaxpp_async.program.work import TaskWork

WIDTH, ROWS = 8, 4
WEIGHT = WIDTH * WIDTH * 4
NO_WORK = TaskWork("k", 0.0, 0.0)


def arrays(num_stages, num_microbatches):
    rng = np.random.default_rng(0)
    ws = [rng.normal(size=(WIDTH, WIDTH)).astype("float32") for _ in range(num_stages)]
    return ws, rng.normal(size=(num_microbatches, ROWS, WIDTH)).astype("float32")


# ---------------------------------------------------------------- against actors


@pytest.mark.parametrize(
    ("num_actors", "num_stages", "schedule"),
    [
        (1, 2, jpp.GPipe(2)),
        (2, 2, jpp.Std1F1B(2)),
        (2, 4, jpp.Interleaved1F1B(4)),
        (2, 2, jpp.ZeroBubbleH1(2)),
        (2, 4, jpp.ZeroBubbleV(4)),
        (3, 3, jpp.Eager1F1B(3)),
        (2, 4, jpp.LoopedBFS(4)),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, int) else str(x),
)
async def test_the_buffer_table_is_what_actors_measure(remote_mesh, num_actors, num_stages, schedule):
    mesh = await remote_mesh(num_actors, launcher="inline")
    fn, (ws, xs) = layer_step(num_stages, schedule), arrays(num_stages, 6)
    step = mesh.distributed(fn, donate_argnums=0)
    compiled = await step.compile(ws, xs)
    planned = compile_for(Machine(num_actors), fn, (ws, xs), donate_argnums=0)
    new, losses = await mesh.run(step, ws, xs)
    measured = [stats.peak_bytes for stats in mesh.last_step_stats()]
    for needs in (memory_needs(compiled), memory_needs(planned)):
        assert [n.peak_bytes for n in needs] == measured
        assert [n.row(BUFFER_TABLE).size_bytes for n in needs] == measured  # one device an actor
    assert {n.row(TEMPORARIES).source for n in memory_needs(compiled)} == {"measured"}
    assert {n.row(TEMPORARIES).source for n in memory_needs(planned)} == {"assumed"}
    del new, losses


async def test_arguments_and_results_are_the_arrays_that_actors_keep(remote_mesh):
    mesh = await remote_mesh(2, launcher="inline")
    fn, (ws, xs) = layer_step(2, jpp.Std1F1B(2)), arrays(2, 6)
    for donated in ((), (0,)):
        step = mesh.distributed(fn, donate_argnums=donated)
        compiled = await step.compile(ws, xs)
        new, losses = await mesh.run(step, ws, xs)
        for needs in memory_needs(compiled):
            held = [a for a in (*new, losses) if needs.actor in a.actors]
            fresh = sum(a.nbytes for a in (held if not donated else [x for x in held if x is losses]))
            assert needs.row(RESULTS).size_bytes == fresh
            state = needs.row("argument ws")
            assert (state.size_bytes, state.source) == (WEIGHT, "exact")
            assert needs.row("argument xs").size_bytes == (xs.nbytes if needs.actor == 0 else 0)
            assert needs.row("argument of the step itself").size_bytes in (0, 6 * 4)


# ---------------------------------------------------------------- by hand


def needs_of(
    *instructions, sizes=(10, 20, 30, 40), uncounted=(), works=(NO_WORK,) * 2, temp_bytes=None, limit=None
):
    avals = tuple(Aval((n,), "int8") for n in sizes)
    program = ActorProgram(0, instructions, avals, frozenset(uncounted))
    compiled = SimpleNamespace(
        programs=[program],
        target=SimpleNamespace(axes={}),
        placed=SimpleNamespace(
            graph=TaskGraph(1, (), (), (), ()), recipes=[Recipe("f", (), ())] * 2, types=Types()
        ),
        traced=SimpleNamespace(arg_of=()),
    )
    step = SimpleNamespace(compiled=compiled, works=works, temp_bytes=temp_bytes or {})
    (needs,) = memory_needs(step, None if limit is None else SimpleNamespace(memory=limit))
    return needs


def size(needs, what):
    return needs.row(what).size_bytes


def test_results_count_until_they_take_the_memory_of_donated_arguments():
    kept = needs_of(Input(0, 0), Run("f", 0, (0,), (1, 3)), Output(1, 0), Delete(3), uncounted=(0,))
    assert size(kept, RESULTS) == 20 and size(kept, BUFFER_TABLE) == 60
    donated = needs_of(Input(1, 0, True), Run("f", 0, (1,), (2,), (0,)), Output(2, 0), uncounted=(1,))
    assert size(donated, RESULTS) == 10  # 30 in the place of 20


def test_a_result_in_the_memory_of_a_donated_argument_is_no_part_of_the_buffer_table():
    update = Input(1, 0, True), Run("f", 0, (1,), (2, 3), (0,)), Output(2, 0), Delete(3)
    needs = needs_of(*update, sizes=(10, 20, 20, 40), uncounted=(1,))
    assert size(needs, BUFFER_TABLE) == 40 and size(needs, RESULTS) == 0 and needs.peak_bytes == 60
    other = needs_of(*update, sizes=(10, 20, 30, 40), uncounted=(1,))  # XLA cannot use the memory
    assert size(other, BUFFER_TABLE) == 70


def test_a_stacked_result_counts_while_it_is_made_and_once_when_it_is_two_results():
    needs = needs_of(
        Run("start", 0, (), (3,)), Run("f", 1, (3,), (2,), (0,)), Output(2, 0), Output(2, 1), uncounted=(2, 3)
    )
    assert size(needs, RESULTS) == 40 and size(needs, BUFFER_TABLE) == 0


def test_an_argument_that_is_handed_back_is_no_new_memory():
    assert size(needs_of(Input(0, 0), Output(0, 0), uncounted=(0,)), RESULTS) == 0


def test_receive_buffers_of_other_moments_lie_unused_at_the_peak():
    needs = needs_of(
        Recv(0, 1, 0),
        Run("f", 0, (0,), (1,)),
        Delete(0),
        Run("g", 1, (1,), (3,)),  # the peak, 60, while the buffer of 10 bytes lies unused
        Delete(1),
        Delete(3),
    )
    assert size(needs, BUFFER_TABLE) == 60 and size(needs, RECEIVE_BUFFERS) == 10
    in_use = needs_of(Recv(0, 1, 0), Run("f", 0, (0,), (3,)), Delete(0), Delete(3))
    assert size(in_use, BUFFER_TABLE) == 50 and size(in_use, RECEIVE_BUFFERS) == 0


def test_one_array_is_under_way_to_each_actor():
    needs = needs_of(
        Run("f", 0, (), (0, 1, 2)), Send(0, 1, 0), Send(1, 1, 1), Send(2, 2, 2), *map(Delete, range(3))
    )
    row = needs.row(SENDS)
    assert (row.size_bytes, row.source) == (20 + 30, "assumed")


def test_temporaries_are_measured_or_estimated_from_the_work():
    instructions = Input(0, 0), Run("f", 0, (0,), (1,)), Output(1, 0)
    work = TaskWork("k", 0.0, 130.0, temp_bytes=49.5)
    assumed = needs_of(*instructions, uncounted=(0,), works=(work,)).row(TEMPORARIES)
    assert (assumed.size_bytes, assumed.source) == (50, "assumed")
    measured = needs_of(*instructions, uncounted=(0,), temp_bytes={0: {0: 7, 1: 9}}).row(TEMPORARIES)
    assert (measured.size_bytes, measured.source) == (9, "measured")


def test_the_sum_is_compared_with_the_memory_of_a_device_and_nothing_is_raised():
    instructions = Input(0, 0), Run("f", 0, (0,), (1,)), Output(1, 0)
    given = {"uncounted": (0,), "temp_bytes": {0: {0: 7}}}
    needs = needs_of(*instructions, **given, limit=47)
    assert needs.total_bytes == 20 + 20 + 7 and needs.fits
    small = needs_of(*instructions, **given, limit=46)
    assert not small.fits and str(small).endswith("47 B of 46 B, which does not fit")
    assert needs_of(*instructions, **given).fits is None
    assert "buffer table" in str(small) and "measured: " in str(small)


# ---------------------------------------------------------------- shardings


def test_a_device_holds_its_part_of_an_array():
    axes = {"d": 4, "m": 2}
    assert device_aval(Aval((8, 6), "float32", ("d", "m")), axes).shape == (2, 3)
    assert device_aval(Aval((8, 6), "float32", (("d", "m"),)), axes).shape == (1, 6)
    assert device_aval(Aval((8, 6), "float32"), axes).shape == (8, 6)
    assert device_aval(Aval((5,), "float32", ("m",)), axes).shape == (3,)


def test_shardings_divide_every_row():
    fn, args = layer_step(2, jpp.Std1F1B(2)), ([f32(WIDTH, WIDTH)] * 2, f32(6, ROWS, WIDTH))
    whole = memory_needs(compile_for(Machine(2), fn, args))
    split = memory_needs(
        compile_for(Machine(2, {"data": 2}, "a100-40g"), fn, args, in_shardings=(None, P(None, "data"))),
        Machine(2, {"data": 2}, "a100-40g"),
    )
    for one, half in zip(whole, split, strict=True):
        assert half.row("argument ws") == one.row("argument ws")  # replicated
        assert 2 * half.row("argument xs").size_bytes == one.row("argument xs").size_bytes
        assert half.row(BUFFER_TABLE).size_bytes < one.row(BUFFER_TABLE).size_bytes
        assert half.peak_bytes == one.peak_bytes  # a sharded array counts as one whole array
        assert half.limit_bytes == 40e9 and half.fits


def test_a_batch_grows_neither_arguments_nor_results():
    instructions = Input(0, 0), Run("f", 0, (0,), (1,)), Output(1, 0)
    needs = needs_of(*instructions, uncounted=(0, 1), temp_bytes={0: {0: 7}})
    others = sum(
        row.size_bytes for row in needs.rows if row.what.startswith("argument") or row.what == RESULTS
    )
    assert needs.batch_bytes == needs.total_bytes - others >= 7
