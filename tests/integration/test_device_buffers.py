"""What differs where devices compute after a call has returned, and the transport reads and writes their
memory.

Without a GPU: `fake_device` computes on CPUs and is late. With one, `make test-gpu` walks the same paths.
"""

from __future__ import annotations

import asyncio
import threading

import checkpoint_faults
import jax
import numpy as np
import pytest
from fake_device import FakeDevices, FakeDeviceTransport
from faulty_network import FaultyNetwork
from waiting import until

import jaxpp_async as jpp
from jaxpp_async.controller.mesh_events import staged
from jaxpp_async.errors import RemoteError
from jaxpp_async.launch import LocalLauncher
from jaxpp_async.launch.inline import InlineLauncher
from jaxpp_async.program.instructions import Aval, Delete, Input, Output, Recv, Run, Send
from jaxpp_async.protocol import messages as m

# All that holds for actors on CPUs; each runs here on devices that are late.
from tests.actors.test_actor import (  # noqa: F401
    TIMEOUT_S,
    Harness,
    V,
    add,
    blob,
    double,
    harness,
    store_array,
    test_a_fetch_sees_the_array_that_a_later_step_consumes,
    test_a_late_host_argument_is_waited_for,
    test_a_step_that_is_not_the_next_one_of_its_epoch_is_refused,
    test_a_transfer_that_fails_names_its_instruction,
    test_abort_ends_waiting_steps_and_the_actors_go_on,
    test_an_argument_handed_back_is_a_copy,
    test_an_executable_that_raises,
    test_closing_in_the_middle_of_a_step,
    test_donated_state_is_updated_in_place_and_leaves_the_store,
    test_many_steps_leave_nothing_behind,
    test_one_array_as_two_arguments_one_of_them_donated,
    test_put_and_fetch,
    test_received_results_do_not_share_receive_memory,
    test_sharded_arrays_travel,
    test_sharded_pipeline_with_collectives_under_random_delays,
    test_two_actors_in_a_pipeline,
    test_two_steps_in_flight_with_puts_and_frees,
)
from tests.integration.test_multi_process_actors import BOTH, DP, FSDP, close, problem, train_step
from tests.integration.test_numerics import check_five_steps


class LateDevices(list):
    """Make the late devices of each actor and keep them."""

    def __init__(self, moment=None):
        self.moment = moment

    def __call__(self, devices, transport):
        self.append(FakeDevices(devices, self.moment))
        return self[-1]


@pytest.fixture(autouse=True)
def late_devices(monkeypatch):
    late_devices = LateDevices()
    monkeypatch.setattr(Harness, "options", {"open_devices": late_devices})
    monkeypatch.setattr(Harness, "transport_type", FakeDeviceTransport)
    return late_devices


class Gate:
    """Holds marks back until they are let through one by one, and says what has been reached."""

    def __init__(self):
        self._let_through = threading.Semaphore(0)
        self.failure: Exception | None = None
        self.open = False

    def __call__(self):
        if not self.open:
            assert self._let_through.acquire(timeout=TIMEOUT_S)
        if self.failure is not None:
            raise self.failure

    def let_through(self, count=1):
        self._let_through.release(count)


@pytest.fixture
def gate(late_devices):
    late_devices.moment = gate = Gate()
    yield gate
    gate.open = True
    gate.let_through(100)


async def settle():
    """Let threads and the loop do what they can do without the device."""
    for _ in range(20):
        await asyncio.sleep(0.002)


def step(number, inputs, outputs):
    return dict(epoch=1, step=number, program_id=0, inputs=inputs, outputs=outputs)


# ---------------------------------------------------------------- sending


async def test_a_send_starts_when_the_device_has_computed(gate, late_devices):
    """And the next run is given to the device meanwhile, though it has not computed the first."""
    sent = []
    network = FaultyNetwork(delay=lambda sender, peer, tag, size: sent.append(tag & 0xFFFF) or 0.0)
    first = [
        Input(0, 0),
        Run("a", 0, (0,), (1,)),
        Send(1, 1, 0),
        Delete(1),
        Run("b", 0, (0,), (2,)),
        Send(2, 1, 1),
    ]
    second = [Recv(0, 0, 0), Recv(1, 0, 1), Output(0, 0), Output(1, 1)]
    async with harness(2, network=network) as h:
        await h.load(0, [*first, Delete(2)], [V] * 3, [blob(double, V)])
        await h.load(1, second, [V] * 2, [])
        await h.put(0, 1, np.ones(8, np.float32))
        steps = [
            await h.start(0, m.Step, **step(0, {0: 1}, {})),
            await h.start(1, m.Step, **step(0, {}, {0: 5, 1: 6})),
        ]
        await until(lambda: late_devices[0].marked == [1, 1])  # both runs are with the device
        await settle()
        assert sent == []
        gate.let_through()
        await until(lambda: sent == [0])
        await settle()
        assert sent == [0] and not steps[0].done()
        gate.open = True
        gate.let_through(8)
        done = await asyncio.wait_for(asyncio.gather(*steps), TIMEOUT_S)
        assert all(isinstance(reply, m.StepDone) for reply in done)
        for value in await h.fetch(1, 5, 6):
            assert np.all(value == 2)
    stamps = np.frombuffer(done[0].stats.stamps, "<f8").reshape(-1, 2)
    (a_start, a_end), (b_start, b_end) = stamps[1], stamps[4]
    assert a_start < a_end <= b_start <= b_end, "a run begins for the device when the one before it has ended"
    assert done[0].stats.compute_s == pytest.approx(a_end - a_start + b_end - b_start)


async def test_an_argument_that_is_not_there_yet_is_sent_when_it_is(late_devices, monkeypatch):
    """A value just put may still be on its way to the device; nobody waits for it but the send."""
    ready = []
    monkeypatch.setattr(type(jax.numpy.zeros(1)), "is_ready", lambda array: bool(ready))
    async with harness(2) as h:
        await h.load(0, [Input(0, 0), Send(0, 1, 0), Delete(0)], [V], [], uncounted=[0])
        await h.load(1, [Recv(0, 0, 0), Output(0, 0)], [V], [])
        await h.put(0, 1, np.full(8, 3, np.float32))
        steps = [
            await h.start(0, m.Step, **step(0, {0: 1}, {})),
            await h.start(1, m.Step, **step(0, {}, {0: 5})),
        ]
        await asyncio.wait_for(asyncio.gather(*steps), TIMEOUT_S)
        assert late_devices[0].marked == [1]
        ready.append(True)
        steps = [
            await h.start(0, m.Step, **step(1, {0: 1}, {})),
            await h.start(1, m.Step, **step(1, {}, {0: 6})),
        ]
        await asyncio.wait_for(asyncio.gather(*steps), TIMEOUT_S)
        assert late_devices[0].marked == [1], "what is there needs no mark"
        for value in await h.fetch(1, 5, 6):
            assert np.all(value == 3)


# ---------------------------------------------------------------- receiving


async def receiving(h, n=6):
    """Actor 0 sends `n` numbers one after the other; actor 1 adds them up, one receive buffer at a time."""
    first, second = [], [Input(0, 0, True)]
    for k in range(n):
        first += [Input(k, k), Send(k, 1, k), Delete(k)]
        second += [Recv(20 + k, 0, k), Run(f"acc {k}", 0, (k, 20 + k), (k + 1,), (0,)), Delete(20 + k)]
    await h.load(0, first, [V] * n, [], uncounted=range(n))
    await h.load(1, [*second, Output(n, 0)], [V] * (21 + n), [blob(add, V, V)])
    for k in range(n):
        await h.put(0, k, np.full(8, k + 1, np.float32))
    await h.put(1, 100, np.zeros(8, np.float32))
    return n


async def test_receive_buffers_are_the_arrays_memory_and_are_used_again():
    async with harness(2) as h:
        n = await receiving(h)
        pool = h.actors[1]._resources.step_resources.pool
        free = pool.buffers_of(V).free
        addresses = {buffer.array.unsafe_buffer_pointer() for buffer in free}
        assert (
            addresses == {buffer.pieces[0].address for buffer in free}
            and len(addresses) == pool.free_buffers > 0
        )
        for number in range(3):
            inputs = {k: k for k in range(n)}
            steps = [
                await h.start(0, m.Step, **step(number, inputs, {})),
                await h.start(1, m.Step, **step(number, {0: 100 + number}, {0: 101 + number})),
            ]
            await asyncio.wait_for(asyncio.gather(*steps), TIMEOUT_S)
        assert {buffer.pieces[0].address for buffer in free} == addresses
        (total,) = await h.fetch(1, 103)
        assert np.all(total == 3 * sum(range(1, n + 1)))
        assert (await h.numbers(1))["store_arrays"] == 1


async def test_memory_is_written_again_only_when_the_device_has_read_it(gate, late_devices):
    """The run that reads a receive buffer was called long ago; what counts is that it has computed."""
    async with harness(2) as h:
        n = await receiving(h)
        program = h.actors[1]._programs[0]
        steps = [
            await h.start(1, m.Step, **step(0, {0: 100}, {0: 101})),
            await h.start(0, m.Step, **step(0, {k: k for k in range(n)}, {})),
        ]
        place = program.buffers[1]
        await until(lambda: late_devices[1].marked == [1])
        taken = len(place.free)
        await settle()
        assert len(place.free) == taken, "the run has been called, and its input is still the device's"
        gate.let_through()
        await until(lambda: len(late_devices[1].marked) == 2)
        gate.open = True
        gate.let_through(50)
        await asyncio.wait_for(asyncio.gather(*steps), TIMEOUT_S)
        assert len(place.free) == taken + 1
        (total,) = await h.fetch(1, 101)
        assert np.all(total == sum(range(1, n + 1)))


async def test_what_outlives_its_receive_buffer_is_copied_before_that_is_given_back(gate, late_devices):
    async with harness(2) as h:
        await h.load(0, [Input(0, 0), Send(0, 1, 0), Delete(0)], [V], [], uncounted=[0])
        await h.load(1, [Recv(0, 0, 0), Output(0, 0)], [V], [])
        await h.put(0, 1, np.full(8, 7, np.float32))
        place = h.actors[1]._programs[0].buffers[0]
        free = len(place.free)
        steps = [
            await h.start(0, m.Step, **step(0, {0: 1}, {})),
            await h.start(1, m.Step, **step(0, {}, {0: 5})),
        ]
        await until(lambda: late_devices[1].marked == [1])
        await settle()
        assert len(place.free) == free - 1 and not steps[1].done()
        gate.let_through()
        await asyncio.wait_for(asyncio.gather(*steps), TIMEOUT_S)
        assert len(place.free) == free
        array = store_array(h, 5, actor=1)
        assert array.unsafe_buffer_pointer() not in {b.pieces[0].address for b in place.free}
        (value,) = await h.fetch(1, 5)
        assert np.all(value == 7)


async def test_replicas_are_sent_once_and_spread_on_the_devices(late_devices):
    aval = Aval((8, 4), "float32", ("a",))  # split over "a", the same on both devices of "b"
    axes = {"spmd_mesh": (("a", 2), ("b", 2)), "axis_types": ("auto", "auto")}
    sizes = []
    network = FaultyNetwork(delay=lambda sender, peer, tag, size: sizes.append(size) or 0.0)
    async with harness(2, network=network, **axes) as h:
        await h.load(0, [Input(0, 0), Send(0, 1, 0), Delete(0)], [aval], [], uncounted=[0])
        await h.load(1, [Recv(0, 0, 0), Output(0, 0)], [aval], [])
        value = np.arange(32, dtype=np.float32).reshape(8, 4)
        await h.put(0, 1, value, ("a",))
        sizes.clear()
        for number in range(2):
            steps = [
                await h.start(0, m.Step, **step(number, {0: 1}, {})),
                await h.start(1, m.Step, **step(number, {}, {0: 5 + number})),
            ]
            await asyncio.wait_for(asyncio.gather(*steps), TIMEOUT_S)
        assert sizes == [64] * 4, "two distinct shards, once each"
        # two copies between devices, then the array that outlives the buffer
        assert late_devices[1].marked == [-2, 1] * 2
        for shard in store_array(h, 6, actor=1).addressable_shards:
            assert np.array_equal(np.asarray(shard.data), value[shard.index])


# ---------------------------------------------------------------- failing and ending


async def test_a_device_that_fails_ends_the_step_with_its_words(gate, late_devices):
    async with harness() as h:
        program = [Input(0, 0), Run("bwd(stage 1, mb 3)", 0, (0,), (1,)), Output(1, 0)]
        await h.load(0, program, [V] * 2, [blob(double, V)])
        await h.put(0, 1, np.ones(8, np.float32))
        gate.failure = RuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")
        gate.let_through()
        reply = await h.step(0, 0, {0: 1}, {0: 2}, fails=True)
        assert "cudaErrorIllegalAddress" in reply.message and "bwd(stage 1, mb 3)" in reply.instruction


async def test_an_abort_while_the_device_computes_gives_no_buffer_back_too_early(gate, late_devices):
    async with harness(2) as h:
        n = await receiving(h)
        place = h.actors[1]._programs[0].buffers[1]
        steps = [
            await h.start(1, m.Step, **step(0, {0: 100}, {0: 101})),
            await h.start(0, m.Step, **step(0, {k: k for k in range(n)}, {})),
        ]
        await until(lambda: len(late_devices[1].marked) == 1)
        held = {b.pieces[0].address for b in h.actors[1]._steps.current._receiving.values()}
        for k in range(2):
            await h.ask(k, m.Abort, epoch=2, cause="a test")
        assert isinstance(await steps[0], m.Failed)
        gate.open = True
        gate.let_through(50)
        await settle()
        assert held and held.isdisjoint({b.pieces[0].address for b in place.free})


REFUSED = RuntimeError("cudaErrorInvalidValue: invalid argument")
AXES = {"spmd_mesh": (("a", 2), ("b", 2)), "axis_types": ("auto", "auto")}
SPLIT = Aval((8, 4), "float32", ("a",))


@pytest.mark.parametrize("late", [False, True], ids=["as it is asked for", "later"])
@pytest.mark.parametrize("what", ["spreading", "a late argument"])
async def test_a_device_that_refuses_a_copy_ends_the_step_and_frees_nothing_early(
    gate, late_devices, monkeypatch, what, late
):
    """A copy between devices, or waiting for an argument that is to be sent: the step fails with the device's
    words, once, its buffers stay in use, and the actors go on in the next epoch."""
    culprit, instruction = (1, "recv") if what == "spreading" else (0, "send")
    gate.open = True
    async with harness(2, **AXES) as h:
        await h.load(0, [Input(0, 0), Send(0, 1, 0), Delete(0)], [SPLIT], [], uncounted=[0])
        await h.load(1, [Recv(0, 0, 0), Output(0, 0)], [SPLIT], [])
        value = np.arange(32, dtype=np.float32).reshape(8, 4)
        await h.put(0, 1, value, ("a",))
        place = h.actors[1]._programs[0].buffers[0]
        addresses = {piece.address for buffer in place.free for piece in buffer.pieces}
        if culprit == 0:
            monkeypatch.setattr(type(jax.numpy.zeros(1)), "is_ready", lambda array: False)
        setattr(*((gate, "failure") if late else (late_devices[culprit], "refuses")), REFUSED)
        second = await h.start(1, m.Step, **step(0, {}, {0: 5}))
        await settle()  # what comes finds its receive, and nobody's commands are being carried out
        first = [await h.start(0, m.Step, **step(0, {0: 1}, {})), second]
        failed = await asyncio.wait_for(first[culprit], TIMEOUT_S)
        assert isinstance(failed, m.Failed) and "cudaErrorInvalidValue" in failed.message
        assert f" {instruction} " in failed.instruction
        await settle()
        assert addresses.isdisjoint({piece.address for buffer in place.free for piece in buffer.pieces})
        gate.failure = late_devices[culprit].refuses = None
        h.epoch = 2
        await h.transport.abort()
        for k in range(2):
            await h.ask(k, m.Abort, epoch=2, cause="a device refused")
        replies = await asyncio.wait_for(asyncio.gather(*first), TIMEOUT_S)
        assert isinstance(replies[1], m.Failed), "everybody is told"
        await h.connect()
        await h.put(0, 1, value, ("a",))
        again = [step(1, {0: 1}, {}) | {"epoch": 2}, step(1, {}, {0: 6}) | {"epoch": 2}]
        replies = [await h.start(k, m.Step, **fields) for k, fields in enumerate(again)]
        assert all(
            isinstance(r, m.StepDone) for r in await asyncio.wait_for(asyncio.gather(*replies), TIMEOUT_S)
        )
        (found,) = await h.fetch(1, 6)
        assert np.array_equal(found, value)


async def test_a_mesh_whose_device_refuses_a_copy_says_so_and_closes(monkeypatch):
    monkeypatch.setattr(FakeDevices, "refuses", None)
    params, batch = problem()
    network = FaultyNetwork()
    launcher = InlineLauncher(
        actor="fake_device:DeviceActor",
        make_transport=lambda kind, process_id: FakeDeviceTransport(network, process_id),
    )
    async with jpp.RemoteMesh(2, launcher=launcher, spmd_mesh={"data": 2}, platform="cpu") as mesh:
        run = mesh.distributed(train_step(jpp.Std1F1B(2)))
        await run.compile(params, batch)
        monkeypatch.setattr(FakeDevices, "refuses", REFUSED)
        with pytest.raises(RemoteError, match="cudaErrorInvalidValue"):
            await asyncio.wait_for(mesh.run(run, params, batch), TIMEOUT_S)
    names = {thread.name for thread in threading.enumerate()}
    assert not {name for name in names if name.endswith(("-runs", "-copies"))}, "threads end with their actor"


async def test_the_first_devices_context_is_the_event_loops(late_devices):
    async with harness(2) as h:
        assert [devices.entered for devices in late_devices] == [[threading.get_ident()]] * 2
        ready = await h.ask(0, m.Inspect)
    assert isinstance(ready, m.Inspected)
    names = {thread.name for thread in threading.enumerate()}
    assert not {name for name in names if name.endswith(("-runs", "-copies"))}, "threads end with their actor"


# ---------------------------------------------------------------- which way


@pytest.mark.parametrize(
    "ways, is_staged",
    [
        (("cuda_copy", "cuda_ipc", "posix"), False),
        (("cuda_copy", "posix", "tcp"), True),
        (("cuda_copy", "rc_mlx5"), False),
        (("dc_mlx5", "tcp"), False),
        (("ud_mlx5",), True),
        ((), False),
    ],
)
def test_what_goes_through_host_memory(ways, is_staged):
    assert staged({3: ways}) == ({3: ways} if is_staged else {})


async def test_processes_on_late_devices_compute_what_jit_does():
    """Over UCX, from where an array lies in one process to where another does."""
    launcher = LocalLauncher(actor="fake_device:DeviceActor")
    async with jpp.RemoteMesh(2, launcher=launcher, env=checkpoint_faults.ENV) as mesh:
        for name, kind in (("mlp", jpp.Interleaved1F1B), ("gpt", jpp.Std1F1B), ("uneven", jpp.GPipe)):
            await check_five_steps(mesh, name, kind)
        slow = []
    async for event in mesh.events():
        slow += [event] if event.kind == "staged" else []
    assert [(event.actor, event.details["peers"]) for event in slow] == [(0, (1,)), (1, (0,))]
    assert "through host memory: UCX has posix to them" in slow[0].text


async def test_actors_of_several_processes_on_late_devices_compute_what_jit_does():
    launcher = LocalLauncher(actor="fake_device:DeviceActor")
    options = {"spmd_mesh": {"data": 2, "model": 2}, "processes_per_actor": 2, "env": checkpoint_faults.ENV}
    async with jpp.RemoteMesh(2, launcher=launcher, **options) as mesh:
        params, batch = problem()
        plain = jax.jit(train_step(jpp.Std1F1B(2)))
        for shardings in (DP, FSDP, BOTH):
            step = mesh.distributed(train_step(jpp.Std1F1B(2)), in_shardings=shardings, donate_argnums=0)
            state, expected = params, params
            for _ in range(2):
                state, losses = await mesh.run(step, state, batch)
                expected, wanted = plain(expected, batch)
            close(await mesh.fetch((state, losses)), (expected, wanted))
