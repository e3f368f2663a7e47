"""What actors hold: peak bytes as planned and as measured, their formulas, the buffer table against JAX's own
list of arrays, memory that is used in place. `docs/memory.md` explains the numbers."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from models import Model, grads_step, mlp
from resources import inspect_actors

import jaxpp_async as jpp
from jaxpp_async.actors import step_run
from jaxpp_async.actors.executor import Executor
from jaxpp_async.actors.shards import buffer_addresses, count_memory

WIDTH, ROWS = 8, 4
ACTIVATION = ROWS * WIDTH * 4
WEIGHT = WIDTH * WIDTH * 4


def sine_chain(num_stages: int, *, tied: bool = False) -> Model:
    """Stages whose residuals are plain to see: `sin(x @ w)` keeps `cos(x @ w)` and, unless it is the
    microbatch's own slice, `x`. `tied`: one weight for all of them."""

    def loss(params, mb):
        x = mb["x"]
        for stage in range(num_stages):
            x = jnp.sin(x @ params[0 if tied else stage])
            if stage < num_stages - 1:
                x = jpp.pipeline_yield(x)
        return jnp.sum(x * mb["y"])

    def init(seed):
        keys = jax.random.split(jax.random.key(seed), 1 if tied else num_stages)
        return [jax.random.normal(k, (WIDTH, WIDTH)) for k in keys]

    def batch(seed, num_microbatches):
        x, y = np.random.default_rng(seed).normal(size=(2, num_microbatches, ROWS, WIDTH)).astype(np.float32)
        return {"x": x, "y": y}

    return Model("tied" if tied else "sine", num_stages, init, loss, batch)


async def peaks(mesh, model: Model, schedule, num_microbatches: int) -> tuple[list[int], list[int]]:
    """Planned and measured peak bytes of one step, an actor each."""
    step = mesh.distributed(grads_step(model, schedule), donate_argnums=0)
    params, batch = model.init(0), model.batch(0, num_microbatches)
    report = (await step.compile(params, batch)).report()
    await mesh.run(step, params, batch)
    return [a.peak_bytes for a in report.actors], [s.peak_bytes for s in mesh.last_step_stats()]


# ---------------------------------------------------------------- plan and measurement


@pytest.mark.parametrize(
    ("num_actors", "model", "schedule"),
    [
        (1, sine_chain(2), jpp.GPipe(2)),
        (2, mlp(2), jpp.Std1F1B(2)),
        (2, sine_chain(4), jpp.Interleaved1F1B(4)),
        (2, sine_chain(2, tied=True), jpp.Eager1F1B(2)),
        (3, sine_chain(3, tied=True), jpp.GPipe(3)),
        (4, mlp(4), jpp.Std1F1B(4)),
    ],
    ids=lambda x: x if isinstance(x, int) else getattr(x, "name", type(x).__name__),
)
async def test_plan_and_measurement_are_one_number_inline(remote_mesh, num_actors, model, schedule):
    mesh = await remote_mesh(num_actors, launcher="inline")
    planned, measured = await peaks(mesh, model, schedule, 4)
    assert planned == measured and min(planned) > 0


@pytest.mark.parametrize(
    ("model", "schedule"),
    [(mlp(2), jpp.Std1F1B(2)), (sine_chain(4, tied=True), jpp.LoopedBFS(4))],
    ids=lambda x: getattr(x, "name", type(x).__name__),
)
async def test_plan_and_measurement_are_one_number_on_processes(remote_mesh, model, schedule):
    planned, measured = await peaks(await remote_mesh(2), model, schedule, 4)
    assert planned == measured and min(planned) > 0


# ---------------------------------------------------------------- formulas


def residuals(num_stages: int) -> list[int]:
    """Bytes that each stage of `sine_chain` keeps of one microbatch from forward to backward."""
    return [ACTIVATION] + [2 * ACTIVATION] * (num_stages - 1)


def gpipe_peaks(num_stages: int, num_microbatches: int) -> list[int]:
    """At the first backward: all residuals, the gradient, the cotangent it makes (not in the first stage),
    the one it reads and the two received ahead (not in the last)."""
    transfers = [3 * ACTIVATION] + [4 * ACTIVATION] * (num_stages - 2) + [ACTIVATION]
    return [num_microbatches * r + WEIGHT + t for r, t in zip(residuals(num_stages), transfers, strict=True)]


def one_f_one_b_peaks(num_stages: int) -> list[int]:
    """As GPipe, with the residuals of `num_stages - stage` microbatches; the last stage receives two inputs
    ahead."""
    transfers = [3 * ACTIVATION] + [4 * ACTIVATION] * (num_stages - 2) + [3 * ACTIVATION]
    held = [n * r for n, r in zip(range(num_stages, 0, -1), residuals(num_stages), strict=True)]
    held[-1] = ACTIVATION  # its forward and backward are one executable: only its input is held
    return [h + WEIGHT + t for h, t in zip(held, transfers, strict=True)]


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 4), (3, 4), (3, 8)])
async def test_gpipe_holds_every_microbatch(remote_mesh, num_stages, num_microbatches):
    mesh = await remote_mesh(num_stages, launcher="inline")
    planned, measured = await peaks(mesh, sine_chain(num_stages), jpp.GPipe(num_stages), num_microbatches)
    assert planned == measured == gpipe_peaks(num_stages, num_microbatches)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 8), (3, 8), (3, 16), (3, 32)])
async def test_1f1b_holds_as_many_microbatches_as_stages(remote_mesh, num_stages, num_microbatches):
    mesh = await remote_mesh(num_stages, launcher="inline")
    planned, measured = await peaks(mesh, sine_chain(num_stages), jpp.Std1F1B(num_stages), num_microbatches)
    assert planned == measured == one_f_one_b_peaks(num_stages)


# ---------------------------------------------------------------- the table and JAX's own list


def held_in_table(run: step_run.StepRun) -> int:
    """A step reports what it holds: its table, deletions that wait for sends, results of loops."""
    plan, executor = run.program.plan, run.executor
    bound = {command.buffer for command in plan.binds}
    arrays = [
        a
        for key, a in enumerate(run._arrays)
        if a is not None and not plan.counted_bytes[key] and key not in bound
    ]
    return executor.table_bytes + executor.pending_bytes + sum(a.nbytes for a in arrays)


@pytest.mark.parametrize("schedule", [jpp.GPipe(3), jpp.Std1F1B(3)], ids=lambda s: type(s).__name__)
async def test_before_every_run_the_table_is_what_jax_holds(remote_mesh, monkeypatch, schedule):
    mesh, model = await remote_mesh(1, launcher="inline"), sine_chain(3)
    step = mesh.distributed(grads_step(model, schedule), donate_argnums=0)
    params, batch = model.init(0), model.batch(0, 4)
    compiled = await step.compile(params, batch)
    state = (await mesh.run(step, params, batch))[0]
    batch = await mesh.put(batch, like=(step, 1))
    seen: list[tuple[int, int]] = []

    def compute(self, command):
        seen.append((count_memory(jax.live_arrays())[1], held_in_table(self)))
        return original(self, command)

    original = step_run.StepRun._call
    monkeypatch.setattr(step_run.StepRun, "_call", compute)
    # One run at a time, so that between two of them nothing is on its way.
    everything = range(10_000)
    monkeypatch.setattr(step_run, "Executor", lambda plan, alone: Executor(plan, alone=everything))
    # Nothing of other tests may go while this step is measured: not what they left in cycles, whose ids
    # actors free with the next message, and not what a task or a mesh of theirs still holds. What the step
    # donates goes anyway.
    gc.collect()
    await inspect_actors(mesh._running())
    others = jax.live_arrays()
    await mesh.run(step, state, batch)
    del others
    before = seen[0][0]
    assert [live - before for live, _ in seen] == [table for _, table in seen]
    assert len(seen) == sum(sum(a.tasks.values()) for a in compiled.report().actors)
    assert max(table for _, table in seen) > 4 * ACTIVATION


async def test_between_steps_actors_hold_the_store_and_receive_buffers_alone(remote_mesh):
    mesh, model = await remote_mesh(2), mlp(2)
    step = mesh.distributed(grads_step(model, jpp.Std1F1B(2)), donate_argnums=0)
    state, batch = model.init(0), model.batch(0, 4)
    for _ in range(3):
        state, grads, losses = await mesh.run(step, state, batch)
        await losses
        await mesh.fetch(grads)
        for numbers in (await inspect_actors(mesh._running())).values():
            assert numbers["live_arrays"] == numbers["store_arrays"] + numbers["free_receive_buffers"]
            assert numbers["live_bytes"] == numbers["store_bytes"] + numbers["free_receive_bytes"]
            assert numbers["table_bytes"] == numbers["pending_bytes"] == 0 < numbers["store_bytes"]


def test_memory_is_counted_once_however_many_arrays_show_it():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    split = jax.device_put(np.ones((4, 4), np.float32), NamedSharding(mesh, PartitionSpec("data")))
    copied = jax.device_put(np.ones((4, 4), np.float32), NamedSharding(mesh, PartitionSpec()))
    alone = jax.device_put(np.ones(3, np.int8), jax.devices()[0])
    views = [a.addressable_data(0) for a in (split, copied, alone)]
    empty = jnp.zeros((0, 4))
    assert count_memory([*views, split, copied, alone, empty]) == (3, 64 + 64 + 3)
    gone = jnp.ones(5)
    gone.delete()
    assert count_memory([gone]) == (0, 0)


# ---------------------------------------------------------------- in place


async def test_donated_state_and_accumulators_stay_where_they_are(remote_mesh, monkeypatch):
    mesh, model = await remote_mesh(2, launcher="inline"), sine_chain(2)
    step = mesh.distributed(grads_step(model, jpp.Std1F1B(2)), donate_argnums=0)
    state, batch = model.init(0), model.batch(0, 4)
    state = (await mesh.run(step, state, batch))[0]
    moved: list[str] = []
    in_place: dict[str, int] = {}

    def compute(self, command):
        before = [buffer_addresses(self._arrays[command.inputs[position]])[0] for position in command.donated]
        after = original(self, command)
        made = {buffer_addresses(self._arrays[key])[0] for key in command.outputs}
        label = self.program.plan.program.instructions[command.instruction].label.partition("(")[0]
        in_place[label] = in_place.get(label, 0) + sum(address in made for address in before)
        moved.extend(label for address in before if address not in made)
        return after

    original = step_run.StepRun._call
    monkeypatch.setattr(step_run.StepRun, "_call", compute)
    state = (await mesh.run(step, state, batch))[0]
    assert not moved
    assert in_place["bwd"] == 4, "the first stage's gradient accumulates in place, for each microbatch"
    assert in_place["fwd_bwd"] == 2 * 4, "so do the last stage's gradient and the losses"
    assert in_place["outer"] == 2, "an updated weight takes the place of the old one"
