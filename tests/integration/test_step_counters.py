"""What a step costs, counted and not timed: a slow-down shows as a changed count."""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp_async as jpp
from jaxpp_async.actors import host_values, loaded_program, receive_buffers, shards
from jaxpp_async.actors.executor import Executor
from jaxpp_async.actors.loaded_program import LoadedTask
from jaxpp_async.actors.setup import JobThread
from jaxpp_async.base.spinning import LoopSpin
from jaxpp_async.controller.deploy import LoadableProgram
from jaxpp_async.controller.submitted_step import SubmittedStep
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.protocol.frames import FrameKey
from jaxpp_async.transport.memory import MemoryTransport


def loss_fn(params, mb):
    x = jnp.tanh(mb["x"] @ params[0])
    x = jpp.pipeline_yield(x)
    return jnp.mean((x @ params[1] - mb["y"]) ** 2)


def train_step(params, batch):
    def grads_of(mb):
        loss, grads = jax.value_and_grad(loss_fn)(params, mb)
        return grads, loss

    grads, losses = jpp.accumulate_grads(grads_of, jpp.Std1F1B(2))(batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), losses


def problem(rows: int = 3) -> tuple[Any, Any]:
    """Parameters and a batch of four microbatches; 3 rows are small values, which ride in frames."""
    params = [np.ones((64, 64), np.float32), np.ones((64, 64), np.float32)]
    return params, {name: np.ones((4, rows, 64), np.float32) for name in ("x", "y")}


async def steady(mesh: jpp.RemoteMesh, batch: Any) -> Callable[[], Awaitable[Any]]:
    """One more step of a training that is under way."""
    step = mesh.distributed(train_step, donate_argnums=0)
    state = problem()[0]

    async def once() -> None:
        nonlocal state
        state, losses = await mesh.run(step, state, batch)
        await losses.delete()

    for _ in range(3):
        await once()
    return once


def count_passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often this thread's event loop has woken up from here on."""
    selector, passes = asyncio.get_running_loop()._selector, 0  # type: ignore[attr-defined]
    real = selector.select

    def select(timeout: float | None = None) -> Any:
        nonlocal passes
        passes += 1
        return real(timeout)

    monkeypatch.setattr(selector, "select", select)
    return lambda: passes


# ---------------------------------------------------------------- the controller


def frames(mesh: jpp.RemoteMesh) -> dict[int, tuple[int, int]]:
    """Frames that the controller has written to each actor and read from it: their sequence numbers."""
    assert mesh._controller is not None
    wires = {actor: link.connection.wire for actor, link in mesh._controller._actor_group.links.items()}
    return {actor: (wire._num_sent, wire._num_received) for actor, wire in wires.items()}


async def test_controller_sends_one_request_an_actor_and_step(remote_mesh, monkeypatch):
    mesh = await remote_mesh(2, launcher="local")
    controller = mesh._controller
    loop_spin = LoopSpin(asyncio.get_running_loop(), lambda: bool(controller._under_way))
    # whether this machine has a core to spare or not
    monkeypatch.setattr(controller, "_loop_spin", loop_spin)
    once = await steady(mesh, problem()[1])
    before = frames(mesh)
    for _ in range(10):
        await once()
    assert frames(mesh) == {actor: (sent + 10, read + 10) for actor, (sent, read) in before.items()}


async def test_controller_sends_one_message_an_actor_for_each_large_host_argument(remote_mesh, monkeypatch):
    mesh = await remote_mesh(2, launcher="local")
    transport = mesh._controller._actor_group.host_transfers.transport
    sent: list[tuple[int, int]] = []
    real = transport.send
    monkeypatch.setattr(
        transport,
        "send",
        lambda data, peer, tag: (sent.append((peer, data.nbytes)), real(data, peer, tag))[1],
    )
    for rows, expected in ((3, []), (64, [(0, 4 * 64 * 64 * 4), (1, 4 * 64 * 64 * 4)])):
        once = await steady(mesh, problem(rows)[1])
        sent.clear()
        await once()
        assert sorted(sent) == expected  # each leaf goes to the one actor that uses it


async def test_controller_wakes_up_once_a_reply(remote_mesh, monkeypatch):
    mesh = await remote_mesh(2, launcher="local")
    monkeypatch.setattr(mesh._controller, "_loop_spin", None)  # with a core to spare it would not sleep
    once = await steady(mesh, problem()[1])
    passes, counts = count_passes(monkeypatch), []
    for _ in range(20):
        before = passes()
        await once()
        counts.append(passes() - before)
    # One a reply, and one in which the caller goes on; heartbeats and a step's late frames come between in
    # some steps.
    assert statistics.median(counts) <= 3, counts


async def test_an_empty_step_takes_few_macs_and_calls(remote_mesh, monkeypatch):
    mesh = await remote_mesh(2, launcher="inline")
    controller = mesh._controller
    empty = LoadableProgram({actor: ActorProgram(actor, (), ()) for actor in (0, 1)})
    program_id, _ = await controller.load(empty)
    for _ in range(5):
        await controller.start_step(SubmittedStep(program_id), {}, {})
    calls: list[int] = []
    package = str(Path(jpp.__file__).parent)
    comprehensions = {"<listcomp>", "<dictcomp>", "<setcomp>"}  # frames of their own before Python 3.12

    def count(frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        calls[-1] += (
            event == "call" and code.co_filename.startswith(package) and code.co_name not in comprehensions
        )

    for _ in range(9):
        calls.append(0)
        sys.setprofile(count)
        try:
            await controller.start_step(SubmittedStep(program_id), {}, {})
        finally:
            sys.setprofile(None)
    # Functions of this package, of the controller and both actors: 146, and 229 before anybody counted.
    assert statistics.median(calls) <= 155, calls
    tally = Tally()
    tally.watch(monkeypatch, FrameKey, "sign")
    await controller.start_step(SubmittedStep(program_id), {}, {})
    assert tally == {"sign": 4 * 2}  # two requests and two replies, each signed once and looked at once


async def test_controller_looks_up_a_steady_call_without_its_signature(remote_mesh, monkeypatch):
    mesh = await remote_mesh(2, launcher="local")
    once = await steady(mesh, problem()[1])
    monkeypatch.setattr(
        "jaxpp_async.session.step_request.leaf_type", lambda leaf: (_ for _ in ()).throw(AssertionError(leaf))
    )
    await once()


async def test_controller_tells_calls_apart_that_look_alike(remote_mesh):
    """A call is recalled by its kinds: none of these may be taken for the one before."""
    mesh = await remote_mesh(2, launcher="inline")
    step = mesh.distributed(lambda x, y, flag: (x + y, x * flag), static_argnums=2)
    x = np.arange(4, dtype=np.float32)
    calls = [(x, x, 2), (x, x, 3), (x, 1.0, 3), (x, 1, 3), (x, np.float32(1), 3), (x, jnp.asarray(1.0), 3)]
    calls += [(x.astype(np.int32), x, 3), (x[:2], x[:2], 3), (x, x[:, None], 3), (x[::2], x[:2], 3)]
    for args in calls * 2:
        expected = jax.jit(lambda x, y, flag: (x + y, x * flag), static_argnums=2)(*args)
        for got, wanted in zip(await mesh.fetch(await mesh.run(step, *args)), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
            assert got.dtype == wanted.dtype


# ---------------------------------------------------------------- the actors


class Tally(Counter[str]):
    """Counts calls of what costs an actor something. Inline actors: both of them."""

    def watch(
        self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, size: Callable[..., int] | None = None
    ):
        real = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self[name] += 1 if size is None else size(*args)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)


async def test_actors_do_no_more_than_their_programs_say(remote_mesh, monkeypatch):
    monkeypatch.setattr(loaded_program, "QUICK_S", 10.0)  # however busy the machine is
    mesh = await remote_mesh(2, launcher="inline")
    batch = problem()[1]
    once = await steady(mesh, batch)
    await once()
    await once()  # by now every task has been found to be quick
    tally = Tally()
    tally.watch(monkeypatch, MemoryTransport, "post_send")
    tally.watch(monkeypatch, MemoryTransport, "post_recv")
    tally.watch(monkeypatch, MemoryTransport, "send")
    tally.watch(monkeypatch, MemoryTransport, "recv")
    tally.watch(monkeypatch, JobThread, "submit")
    tally.watch(monkeypatch, LoadedTask, "run")
    tally.watch(monkeypatch, Executor, "arrived")
    tally.watch(monkeypatch, Executor, "ran")
    tally.watch(monkeypatch, host_values, "place", lambda host, layout: host.nbytes)
    tally.watch(monkeypatch, shards, "duplicate")
    tally.watch(monkeypatch, shards, "host_bytes")
    tally.watch(monkeypatch, receive_buffers.ReceiveBuffer, "copied")
    tally.watch(monkeypatch, receive_buffers, "aligned_bytes")
    tally.watch(monkeypatch, jax, "device_put")
    steps, passes, loop_passes = 5, [], count_passes(monkeypatch)
    for _ in range(steps):
        before = loop_passes()
        await once()
        passes.append(loop_passes() - before)
    instructions = [i for p in mesh.last_step_timeline().actors for i in p.events]
    # forwards, backwards, the fused; accumulators; updates. And sends
    runs, transfers = (4 * 2 + 4 + 3 + 2, 2 * 4)
    expected = {
        "run": runs,
        "ran": runs,
        "post_send": transfers,
        "post_recv": transfers,
        "arrived": transfers,  # an argument that is there is not asked for
        # The only bytes that are copied on the host, and the only arrays that no executable made. None of
        # them by `jax.device_put`, which takes ten times as long.
        "place": sum(leaf.nbytes for leaf in batch.values()),
    }
    assert {name: count / steps for name, count in tally.items()} == expected
    assert sum(e.kind == "run" for e in instructions) == runs
    # Controller and actors share the loop here, and what is sent to each other in one pass is taken up in the
    # next.
    assert statistics.median(passes) <= 8, passes


async def test_a_task_that_takes_its_time_leaves_the_event_loop_alone(remote_mesh, monkeypatch):
    monkeypatch.setattr(loaded_program, "QUICK_S", 10.0)
    mesh = await remote_mesh(2, launcher="inline")
    once = await steady(mesh, problem()[1])
    await once()
    await once()
    tally = Tally()
    tally.watch(monkeypatch, JobThread, "submit")
    await once()
    assert not tally
    monkeypatch.setattr(loaded_program, "QUICK_S", 0.0)  # from now on nothing is
    await once()
    tally.clear()
    await once()
    assert tally["submit"] == 4 * 2 + 4 + 3 + 2


async def test_a_task_with_a_loop_is_never_run_on_the_event_loop(remote_mesh, monkeypatch):
    """However quick it has been, its data may keep it."""
    monkeypatch.setattr(loaded_program, "QUICK_S", 10.0)
    mesh = await remote_mesh(2, launcher="inline")
    step = mesh.distributed(
        lambda x, n: jax.lax.while_loop(lambda c: c[1] < n, lambda c: (c[0] * 2, c[1] + 1), (x, 0))[0]
    )
    plain = mesh.distributed(lambda x, n: x * n)
    x = np.ones(4, np.float32)
    for _ in range(6):
        await mesh.run(step, x, 3)
        await mesh.run(plain, x, 3)
    tally = Tally()
    tally.watch(monkeypatch, JobThread, "submit")
    await mesh.run(plain, x, 3)
    assert not tally
    found = await mesh.run(step, x, 5)
    assert tally["submit"] == 1
    np.testing.assert_array_equal(await found, x * 32)
