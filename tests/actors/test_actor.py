"""Actors in one process over the memory transport, driven by messages as the controller would."""

from __future__ import annotations

import asyncio
import random
import time
import warnings
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from faulty_network import FaultyNetwork
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxpp_async.actors.actor import Actor
from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import CONTROLLER, Aval, Delete, Input, Output, Recv, Run, Send
from jaxpp_async.protocol import messages as m
from jaxpp_async.transport.base import HOST_CHANNEL, make_tag
from jaxpp_async.transport.memory import MemoryTransport

TIMEOUT_S = 20


class Harness:
    """A controller's side: sends requests, awaits replies, holds the data plane's other end.

    Attributes:
        options: of every `Actor`; tests of devices that compute on their own set `open_devices`.
        transport_type: of every actor; the same tests set one that takes those devices' memory.
    """

    options: ClassVar[dict[str, Any]] = {}
    transport_type: ClassVar[type[MemoryTransport]] = MemoryTransport

    def __init__(self, num_actors, network):
        self.network = network
        self.transport = MemoryTransport(network, CONTROLLER)
        self.transports = {}
        self.waiting, self.requests, self.sequences = {}, 0, 0
        self.epoch = self.transport.epoch = 1
        self.actors = [
            Actor(
                k,
                make_transport=lambda name, network, k=k: self._transport(k),
                send=self._replied,
                inline=True,
                **self.options,
            )
            for k in range(num_actors)
        ]

    def _transport(self, actor):
        self.transports[actor] = self.transport_type(self.network, actor)
        return self.transports[actor]

    def _replied(self, message, number=None):
        if number is not None:  # else it is a report of how far a `Load` is
            self.waiting.pop(number).set_result(message)

    async def start(self, actor, kind, **fields):
        """Send a request; returns the future of its reply."""
        self.requests += 1
        future = self.waiting[self.requests] = asyncio.get_running_loop().create_future()
        self.actors[actor].handle(kind(**fields), self.requests)
        return future

    async def ask(self, actor, kind, *, fails=False, **fields):
        reply = await asyncio.wait_for(await self.start(actor, kind, **fields), TIMEOUT_S)
        assert isinstance(reply, m.Failed) == fails, getattr(reply, "traceback", reply)
        return reply

    async def configure(self, spmd_mesh=(), axis_types=(), **fields):
        none = dict(cache_dir=None, setup=None, setup_folder=None)
        values = none | dict(platform="cpu", jax_config={}, transport="memory", epoch=self.epoch)
        values |= fields
        for k in range(len(self.actors)):
            await self.ask(k, m.Configure, spmd_mesh=spmd_mesh, axis_types=axis_types, **values)
        await self.connect()

    async def connect(self):
        addresses = {k: t.address for k, t in self.transports.items()} | {CONTROLLER: self.transport.address}
        for k, t in self.transports.items():
            await self.transport.connect(k, t.address)
        for k in self.transports:
            await self.ask(k, m.Connect, epoch=self.epoch, addresses=addresses)

    async def load(self, actor, instructions, avals, blobs, program_id=0, uncounted=(), modelled_s=None):
        program = ActorProgram(actor, tuple(instructions), tuple(avals), frozenset(uncounted))
        return await self.ask(
            actor,
            m.Load,
            program_id=program_id,
            program=program,
            executables={k: f"key{k}" for k in range(len(blobs))},
            blobs={f"key{k}": blob for k, blob in enumerate(blobs)},
            modelled_s=modelled_s or {},
        )

    async def put(self, actor, array_id, value, spec=()):
        value = np.asarray(value)
        aval = Aval(value.shape, str(value.dtype), spec)
        put = m.Put(array_id, aval, value.tobytes())
        sending = None
        if value.nbytes > m.INLINE_BYTES:
            self.sequences += 1
            put = m.Put(array_id, aval, None, self.sequences)
            flat = value.reshape(-1).view(np.uint8)
            sending = self.transport.send(flat, actor, make_tag(self.epoch, HOST_CHANNEL, self.sequences))
        await self.ask(actor, m.Store, puts=(put,), frees=())
        if sending is not None:
            await sending

    async def fetch(self, actor, *array_ids):
        sequences = tuple(range(1000, 1000 + len(array_ids)))
        reply = await self.ask(actor, m.Fetch, array_ids=array_ids, sequences=sequences)
        values = []
        for (shape, name, data), sequence in zip(reply.arrays, sequences, strict=True):
            flat = np.frombuffer(data, np.uint8) if data is not None else None
            dtype = np.dtype(getattr(ml_dtypes, name, name))
            if flat is None:
                flat = np.empty(int(np.prod(shape)) * dtype.itemsize, np.uint8)
                await self.transport.recv(flat, actor, make_tag(self.epoch, HOST_CHANNEL, sequence))
            values.append(flat.view(dtype).reshape(shape))
        return values

    async def step(self, actor, number, inputs, outputs, program_id=0, fails=False, **fields):
        fields = {"epoch": self.epoch} | fields
        return await self.ask(
            actor,
            m.Step,
            fails=fails,
            step=number,
            program_id=program_id,
            inputs=inputs,
            outputs=outputs,
            **fields,
        )

    async def numbers(self, actor):
        return (await self.ask(actor, m.Inspect)).numbers


@asynccontextmanager
async def harness(num_actors=1, *, network=None, **configure):
    h = Harness(num_actors, network or FaultyNetwork())
    try:
        await h.configure(**configure)
        yield h
    finally:
        for actor in h.actors:
            await actor.aclose()
        await h.transport.aclose()


def blob(fn, *avals, mesh=None, in_specs=None, out_specs=None):
    """A function as the compiler ships it."""
    shapes = [jax.ShapeDtypeStruct(a.shape, getattr(jnp, a.dtype)) for a in avals]
    if mesh is None:
        return bytes(export.export(jax.jit(fn), platforms=["cpu", "cuda"])(*shapes).serialize())
    placed = lambda specs: tuple(NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs)  # noqa: E731
    with jax.sharding.use_abstract_mesh(mesh):
        jitted = jax.jit(fn, in_shardings=placed(in_specs), out_shardings=placed(out_specs))
        return bytes(export.export(jitted, platforms=["cpu", "cuda"])(*shapes).serialize())


V = Aval((8,), "float32")


def double(x):
    return (x * 2,)


def add(x, y):
    return (x + y,)


# ---------------------------------------------------------------- values in and out


@pytest.mark.parametrize("dtype", ["float32", "bool", "int8", "bfloat16", "float8_e4m3fn", "int4", "uint32"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (300, 301)], ids=str)
async def test_put_and_fetch(dtype, shape):
    value = np.asarray(np.random.default_rng(0).integers(0, 2, shape)).astype(
        getattr(ml_dtypes, dtype, dtype)
    )
    async with harness() as h:
        await h.put(0, 5, value)
        (found,) = await h.fetch(0, 5)
    assert found.dtype == value.dtype and found.shape == value.shape
    assert found.tobytes() == value.tobytes()


async def test_freed_and_unknown_arrays():
    async with harness() as h:
        await h.put(0, 1, np.ones(8, np.float32))
        assert (await h.numbers(0))["store_arrays"] == 1
        await h.ask(0, m.Store, puts=(), frees=(1, 77))
        assert (await h.numbers(0))["store_arrays"] == 0
        reply = await h.ask(0, m.Fetch, fails=True, array_ids=(1,), sequences=(1,))
    assert reply.exception_type == "jaxpp_async.errors.ArrayError"
    assert "array 1 is not on this actor" in reply.message


async def test_64_bit_values_need_no_setting():
    """The controller has decided on types; an actor keeps to them."""
    async with harness() as h:
        put = m.Put(1, Aval((2,), "float64"), np.ones(2).tobytes())
        await h.ask(0, m.Store, puts=(put,), frees=())
        assert (await h.numbers(0))["store_arrays"] == 1


# ---------------------------------------------------------------- steps


async def two_stage_pipeline(h, num_microbatches=3, aval=V):
    """Actor 0 doubles each microbatch and sends it; actor 1 adds it to an accumulator in place."""
    first, second, n = [], [], num_microbatches
    for k in range(n):
        first += [
            Input(k, k),
            Run(f"fwd(stage 0, mb {k})", 0, (k,), (n + k,)),
            Send(n + k, 1, k),
            Delete(n + k),
        ]
    second.append(Input(0, 0, True))
    for k in range(n):
        second += [Recv(n + k, 0, k), Run(f"acc(mb {k})", 0, (k, n + k), (k + 1,), (0,)), Delete(n + k)]
    second.append(Output(n, 0))
    # Slot n is both the last accumulator and would be the first receive: keep them apart.
    second = [_shift(i, n, 10) for i in second]
    await h.load(0, first, [aval] * (2 * n), [blob(double, aval)], uncounted=range(n))
    await h.load(1, second, [aval] * (2 * n + 11), [blob(add, aval, aval)])
    return n


def _shift(instruction, start, by):
    """Move receive slots out of the accumulators' way."""
    match instruction:
        case Recv(buffer, peer, tag):
            return Recv(buffer + by, peer, tag)
        case Delete(buffer):
            return Delete(buffer + by)
        case Run(label, executable, (accumulator, received), outputs, donated):
            return Run(label, executable, (accumulator, received + by), outputs, donated)
    return instruction


@pytest.mark.parametrize(
    "aval", [V, Aval((64, 64), "float32"), Aval((6,), "bfloat16")], ids=["small", "large", "bf16"]
)
async def test_two_actors_in_a_pipeline(aval):
    async with harness(2) as h:
        n = await two_stage_pipeline(h, aval=aval)
        dtype = getattr(ml_dtypes, aval.dtype, aval.dtype)
        for k in range(n):
            await h.put(0, k, np.full(aval.shape, k + 1, dtype))
        await h.put(1, 100, np.zeros(aval.shape, dtype))
        for number in range(4):
            both = [
                await h.start(
                    0, m.Step, epoch=1, step=number, program_id=0, inputs={0: 0, 1: 1, 2: 2}, outputs={}
                ),
                await h.start(
                    1,
                    m.Step,
                    epoch=1,
                    step=number,
                    program_id=0,
                    inputs={0: 100 + number},
                    outputs={0: 101 + number},
                ),
            ]
            done = await asyncio.wait_for(asyncio.gather(*both), TIMEOUT_S)
            assert all(isinstance(reply, m.StepDone) for reply in done), done
        (total,) = await h.fetch(1, 104)
        assert np.all(total.astype(np.float32) == 4 * 2 * (1 + 2 + 3))
        stats = done[1].stats
        assert stats.peak_bytes == 2 * aval.size_bytes  # the accumulator and one receive
        times = np.frombuffer(stats.stamps, "<f8").reshape(-1, 2)  # input, (recv, acc, delete) * 3, output
        accumulated = times[2::3][:n]
        assert np.all(times[1::3][:n, 1] <= accumulated[:, 0]), "a run begins when its data is in"
        assert np.all(np.diff(accumulated.reshape(-1)) > 0), "one run after the other"
        assert stats.live_buffers == 1
        assert 0 < stats.compute_s <= stats.total_s and 0 <= stats.wait_s <= stats.total_s
        assert done[0].stats.peak_bytes == aval.size_bytes  # inputs are uncounted, what is sent is pending
        assert (await h.numbers(1))["store_arrays"] == 1


async def test_donated_state_is_updated_in_place_and_leaves_the_store():
    big = Aval((1024,), "float32")
    async with harness() as h:
        await h.load(
            0,
            [Input(0, 0, True), Run("f", 0, (0,), (1,), (0,)), Output(1, 0)],
            [big, big],
            [blob(double, big)],
        )
        await h.put(0, 1, np.ones(1024, np.float32))
        address = store_array(h, 1).unsafe_buffer_pointer()
        await h.step(0, 0, {0: 1}, {0: 2})
        assert store_array(h, 2).unsafe_buffer_pointer() == address
        await h.fetch(0, 2)  # a fetch must not leave a view behind that hinders donation
        await h.step(0, 1, {0: 2}, {0: 3})
        assert store_array(h, 3).unsafe_buffer_pointer() == address
        reply = await h.step(0, 2, {0: 2}, {0: 4}, fails=True)
    assert "array 2 is not on this actor" in reply.message and reply.step == 2


def store_array(h, array_id, actor=0):
    return h.actors[actor]._store.get(array_id).array


async def test_a_fetch_sees_the_array_that_a_later_step_consumes():
    big = Aval((512, 1024), "float32")
    async with harness() as h:
        await h.load(
            0,
            [Input(0, 0, True), Run("f", 0, (0,), (1,), (0,)), Output(1, 0)],
            [big, big],
            [blob(double, big)],
        )
        await h.put(0, 1, np.ones(big.shape, np.float32))
        fields = {"epoch": 1, "program_id": 0}
        first = await h.start(0, m.Step, step=0, inputs={0: 1}, outputs={0: 2}, **fields)
        fetched = await h.start(0, m.Fetch, array_ids=(2,), sequences=(9,))
        second = await h.start(0, m.Step, step=1, inputs={0: 2}, outputs={0: 3}, **fields)
        memory = np.zeros(big.shape, np.float32)
        await h.transport.recv(memory.reshape(-1).view(np.uint8), 0, make_tag(1, HOST_CHANNEL, 9))
        await asyncio.wait_for(asyncio.gather(first, fetched, second), TIMEOUT_S)
        assert np.all(memory == 2)
        (later,) = await h.fetch(0, 3)
        assert np.all(later == 4)


async def test_two_steps_in_flight_with_puts_and_frees():
    async with harness() as h:
        program = [Input(0, 0, True), Input(1, 1), Run("add", 0, (0, 1), (2,), (0,)), Output(2, 0)]
        await h.load(0, program, [V] * 3, [blob(add, V, V)], uncounted=[1])
        await h.put(0, 1, np.zeros(8, np.float32))
        futures = []
        for number in range(5):
            put = m.Put(50 + number, V, np.full(8, number, np.float32).tobytes())
            futures.append(
                await h.start(
                    0, m.Step, epoch=1, step=number, program_id=0, inputs={0: 1 + number, 1: 50 + number},
                    outputs={0: 2 + number}, puts=(put,), frees_after=(50 + number,),
                )
            )  # fmt: skip
        done = await asyncio.wait_for(asyncio.gather(*futures), TIMEOUT_S)
        assert [reply.step for reply in done] == list(range(5))
        (total,) = await h.fetch(0, 6)
        assert np.all(total == 0 + 1 + 2 + 3 + 4)
        assert (await h.numbers(0))["store_arrays"] == 1


async def test_a_late_host_argument_is_waited_for():
    big = Aval((100, 100), "float32")
    async with harness() as h:
        await h.load(0, [Input(0, 0), Run("f", 0, (0,), (1,)), Output(1, 0)], [big, big], [blob(double, big)])
        put = m.Put(1, big, None, 33)
        step = await h.start(
            0, m.Step, epoch=1, step=0, program_id=0, inputs={0: 1}, outputs={0: 2}, puts=(put,)
        )
        assert not step.done()
        value = np.ones(big.shape, np.float32)
        await h.transport.send(value.reshape(-1).view(np.uint8), 0, make_tag(1, HOST_CHANNEL, 33))
        reply = await asyncio.wait_for(step, TIMEOUT_S)
        assert reply.stats.wait_s > 0
        (found,) = await h.fetch(0, 2)
        assert np.all(found == 2)


async def test_an_argument_handed_back_is_a_copy():
    """Two ids must never share one array: donating one would delete the other."""
    async with harness() as h:
        await h.load(0, [Input(0, 0), Output(0, 0), Output(0, 1)], [V], [])
        await h.put(0, 1, np.ones(8, np.float32))
        await h.step(0, 0, {0: 1}, {0: 2, 1: 3})
        addresses = {store_array(h, k).unsafe_buffer_pointer() for k in (1, 2, 3)}
        assert len(addresses) == 3


async def test_one_array_as_two_arguments_one_of_them_donated():
    async with harness() as h:
        program = [Input(0, 0, True), Input(1, 1), Run("add", 0, (0, 1), (2,), (0,)), Output(2, 0)]
        await h.load(0, program, [V] * 3, [blob(add, V, V)])
        await h.put(0, 1, np.ones(8, np.float32))
        await h.step(0, 0, {0: 1, 1: 1}, {0: 2})
        (found,) = await h.fetch(0, 2)
        assert np.all(found == 2)


async def test_received_results_do_not_share_receive_memory():
    async with harness(2) as h:
        await h.load(0, [Input(0, 0), Send(0, 1, 0)], [V], [])
        await h.load(1, [Recv(0, 0, 0), Output(0, 0)], [V], [])
        for number in range(3):
            await h.put(0, 10 + number, np.full(8, number, np.float32))
            sent = await h.start(
                0, m.Step, epoch=1, step=number, program_id=0, inputs={0: 10 + number}, outputs={}
            )
            await h.step(1, number, {}, {0: 20 + number})
            await asyncio.wait_for(sent, TIMEOUT_S)
        values = await h.fetch(1, 20, 21, 22)
        assert [v[0] for v in values] == [0, 1, 2]


async def test_received_arrays_alias_receive_memory_and_are_built_once():
    async with harness(2) as h:
        await two_stage_pipeline(h)
        pool = h.actors[1]._resources.step_resources.pool
        (free,) = [b for place in pool._buffers.values() for b in place.free]
        assert free.array is not None
        assert free.array.unsafe_buffer_pointer() == free.memory[0].ctypes.data
        for k in range(3):
            await h.put(0, k, np.ones(8, np.float32))
        await h.put(1, 100, np.zeros(8, np.float32))
        other = await h.start(0, m.Step, epoch=1, step=0, program_id=0, inputs={0: 0, 1: 1, 2: 2}, outputs={})
        await h.step(1, 0, {0: 100}, {0: 101})
        await other
        assert [b for place in pool._buffers.values() for b in place.free] == [free]


async def test_many_steps_leave_nothing_behind():
    async with harness(2) as h:
        await two_stage_pipeline(h)
        for k in range(3):
            await h.put(0, k, np.ones(8, np.float32))
        await h.put(1, 100, np.zeros(8, np.float32))
        for number in range(60):
            fields = {"epoch": 1, "step": number, "program_id": 0}
            other = await h.start(0, m.Step, inputs={0: 0, 1: 1, 2: 2}, outputs={}, **fields)
            await h.ask(1, m.Step, inputs={0: 100 + number}, outputs={0: 101 + number}, **fields)
            await other
            if number == 9:
                before = [await h.numbers(k) for k in range(2)]
        after = [await h.numbers(k) for k in range(2)]
        assert after == before


# ---------------------------------------------------------------- requests that come twice, late or wrong


async def test_a_step_that_is_not_the_next_one_of_its_epoch_is_refused():
    async with harness() as h:
        await h.load(
            0, [Input(0, 0, True), Run("f", 0, (0,), (1,), (0,)), Output(1, 0)], [V, V], [blob(double, V)]
        )
        await h.put(0, 1, np.ones(8, np.float32))
        await h.step(0, 0, {0: 1}, {0: 2})
        (found,) = await h.fetch(0, 2)
        assert np.all(found == 2)
        await h.step(0, 1, {0: 2}, {0: 3})
        assert "in the same epoch" in (await h.step(0, 0, {0: 3}, {0: 4}, fails=True)).message
        assert "in the same epoch" in (await h.step(0, 1, {0: 3}, {0: 4}, fails=True)).message
        assert "epoch 0" in (await h.step(0, 50, {0: 1}, {0: 2}, fails=True, epoch=0)).message


@pytest.mark.parametrize(
    ("program_id", "inputs", "message"),
    [
        (9, {0: 1}, "program 9 is not loaded"),
        (0, {}, "step argument 0 names no array"),
        (0, {0: 9}, "array 9 is not on this actor"),
        (0, {0: 2}, "step argument 0 is Aval"),
    ],
)
async def test_steps_that_cannot_start(program_id, inputs, message):
    async with harness() as h:
        await h.load(0, [Input(0, 0), Run("f", 0, (0,), (1,)), Output(1, 0)], [V, V], [blob(double, V)])
        await h.put(0, 2, np.ones(4, np.float32))
        reply = await h.step(0, 0, inputs, {0: 5}, program_id=program_id, fails=True)
    assert message in reply.message and reply.step == 0


async def test_requests_before_configure():
    h = Harness(1, FaultyNetwork())
    reply = await h.ask(0, m.Store, fails=True, puts=(), frees=())
    assert "actor 0 is not configured" in reply.message
    await h.actors[0].aclose()


@pytest.mark.parametrize(
    ("instructions", "says"),
    [
        ([Input(9, 0)], "slot 9 does not exist; the program has 2 slots"),
        ([Input(0, -1)], "arg -1 is negative"),
        ([Input(0, 0, True), Run("f", 0, (0,), (1,), (-1,))], "position -1 of 1 inputs cannot be donated"),
        ([Input(0, 0), Run("f", 5, (0,), (1,))], "the program came without this executable"),
    ],
)
async def test_programs_that_cannot_be_are_refused_and_the_actor_goes_on(instructions, says):
    async with harness() as h:
        with pytest.raises(AssertionError, match=says):
            await h.load(0, instructions, [V, V], [blob(double, V)])
        await h.load(0, [Input(0, 0), Run("f", 0, (0,), (1,)), Output(1, 0)], [V, V], [blob(double, V)])
        await h.put(0, 1, np.ones(8, np.float32))
        await h.step(0, 0, {0: 1}, {0: 2})


async def test_programs_that_do_not_fit_their_executables():
    async with harness() as h:
        with pytest.raises(AssertionError, match=r"output 0: the executable has float32\[8\]"):
            await h.load(
                0,
                [Input(0, 0), Run("f", 0, (0,), (1,)), Output(1, 0)],
                [V, Aval((4,), "float32")],
                [blob(double, V)],
            )


async def test_too_few_devices():
    h = Harness(1, FaultyNetwork())
    with pytest.raises(
        AssertionError, match=r"spmd_mesh \{'data': 64\} needs 64 devices.*jax_num_cpu_devices"
    ):
        await h.configure(spmd_mesh=(("data", 64),), axis_types=("auto",))
    await h.actors[0].aclose()


def bad_setup():
    raise RuntimeError("no licence")


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ("no_such_module_here:f", "cannot import 'no_such_module_here'"),
        (f"{__name__}:bad_setup", f"setup='{__name__}:bad_setup' raised RuntimeError: no licence"),
    ],
)
async def test_setup_hooks_that_cannot_run(setup, message):
    h = Harness(1, FaultyNetwork())
    with pytest.raises(AssertionError, match=message):
        await h.configure(setup=setup)
    await h.actors[0].aclose()


# ---------------------------------------------------------------- failures inside a step


async def test_an_executable_that_raises():
    async with harness() as h:
        await h.load(
            0,
            [Input(0, 0), Run("fwd(stage 0, mb 0)", 0, (0,), (1,)), Output(1, 0)],
            [V, V],
            [blob(double, V)],
        )
        await h.put(0, 1, np.ones(8, np.float32))

        def broken(*_):
            raise FloatingPointError("injected")

        h.actors[0]._programs[0].tasks[1]._call = broken
        fetch = None
        step = await h.start(0, m.Step, epoch=1, step=0, program_id=0, inputs={0: 1}, outputs={0: 2})
        fetch = await h.start(0, m.Fetch, array_ids=(2,), sequences=(1,))
        queued = await h.start(0, m.Step, epoch=1, step=1, program_id=0, inputs={0: 1}, outputs={0: 3})
        reply, fetched = await asyncio.wait_for(asyncio.gather(step, fetch), TIMEOUT_S)
        assert (reply.exception_type, reply.message, reply.step) == ("FloatingPointError", "injected", 0)
        assert "fwd(stage 0, mb 0)" in reply.instruction
        assert "in broken" in reply.traceback
        assert fetched.message == "injected"
        assert not queued.done()
        await h.ask(0, m.Abort, epoch=2, cause="actor 0: injected")
        assert (await queued).exception_type == "jaxpp_async.errors.StepAbortedError"
        assert "actor 0: injected" in (await queued).message


HOUR_S = 3600.0
DOUBLES = Input(0, 0), Run("f", 0, (0,), (1,)), Output(1, 0)


async def test_a_task_lasts_as_long_as_the_model_of_the_device_says():
    async with harness() as h:
        await h.load(0, DOUBLES, [V, V], [blob(double, V)], modelled_s={0: 0.03})
        await h.put(0, 1, np.ones(8, np.float32))
        for number in range(6):  # also when it could be known to be quick
            done = await h.step(0, number, {0: 1}, {0: 10 + number})
            start_s, end_s = np.frombuffer(done.stats.stamps, "<f8").reshape(-1, 2)[1]
            assert end_s - start_s >= 0.03
            assert done.stats.total_s >= done.stats.compute_s >= 0.03
        (found,) = await h.fetch(0, 15)
        assert np.all(found == 2)


async def test_a_task_that_outlasts_its_step_keeps_nothing_waiting():
    """The compute thread waits for the end of an hour until the step is aborted, or the actor closes."""
    async with harness() as h:
        await h.load(0, DOUBLES, [V, V], [blob(double, V)])
        await h.load(0, DOUBLES, [V, V], [blob(double, V)], program_id=1, modelled_s={0: HOUR_S})
        await h.put(0, 1, np.ones(8, np.float32))
        long = {"program_id": 1, "inputs": {0: 1}}
        waiting = await h.start(0, m.Step, epoch=1, step=0, outputs={0: 2}, **long)
        await asyncio.sleep(0.1)
        report = await h.ask(0, m.Report)
        assert report.running and not waiting.done(), "to the stall detector it computes"
        began_s = time.monotonic()
        h.epoch = 2
        await h.ask(0, m.Abort, epoch=2, cause="actor 5 died")
        reply = await asyncio.wait_for(waiting, TIMEOUT_S)
        assert "actor 5 died" in reply.message and reply.instruction.startswith("#1 run")
        await h.step(0, 0, {0: 1}, {0: 3})
        assert time.monotonic() - began_s < 5
        await h.start(0, m.Step, epoch=2, step=1, outputs={0: 4}, **long)
        await asyncio.sleep(0.1)
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 5


async def test_abort_ends_waiting_steps_and_the_actors_go_on():
    async with harness(2) as h:
        await two_stage_pipeline(h)
        await h.put(1, 100, np.zeros(8, np.float32))
        waiting = await h.start(1, m.Step, epoch=1, step=0, program_id=0, inputs={0: 100}, outputs={0: 101})
        late_put = await h.start(1, m.Store, puts=(m.Put(7, V, None, 5),), frees=())
        assert not waiting.done()
        h.epoch = 2
        await h.transport.abort()
        for k in range(2):
            await h.ask(k, m.Abort, epoch=2, cause="actor 5 died")
        reply = await asyncio.wait_for(waiting, TIMEOUT_S)
        assert (
            reply.exception_type == "jaxpp_async.errors.StepAbortedError" and "actor 5 died" in reply.message
        )
        assert "acc(mb 0)" in reply.instruction and "waiting for 1 buffers" in reply.instruction
        assert isinstance(await asyncio.wait_for(late_put, TIMEOUT_S), m.Failed)
        await h.connect()
        for k in range(3):
            await h.put(0, k, np.ones(8, np.float32))
        await h.put(1, 100, np.zeros(8, np.float32))
        other = await h.start(0, m.Step, epoch=2, step=0, program_id=0, inputs={0: 0, 1: 1, 2: 2}, outputs={})
        await h.step(1, 0, {0: 100}, {0: 101})
        await other
        (found,) = await h.fetch(1, 101)
        assert np.all(found == 6)


async def test_a_transfer_that_fails_names_its_instruction():
    network = FaultyNetwork()
    async with harness(2, network=network) as h:
        await two_stage_pipeline(h)
        await h.put(1, 100, np.zeros(8, np.float32))
        waiting = await h.start(1, m.Step, epoch=1, step=0, program_id=0, inputs={0: 100}, outputs={0: 101})
        network.fail_link(0, 1)
        reply = await asyncio.wait_for(waiting, TIMEOUT_S)
    assert reply.exception_type == "jaxpp_async.errors.TransferError"
    assert "recv" in reply.instruction and "from 0" in reply.instruction


async def test_closing_in_the_middle_of_a_step():
    async with harness(2) as h:
        await two_stage_pipeline(h)
        await h.put(1, 100, np.zeros(8, np.float32))
        await h.start(1, m.Step, epoch=1, step=0, program_id=0, inputs={0: 100}, outputs={0: 101})
        await h.actors[1].aclose()
        await h.actors[1].aclose()


# ---------------------------------------------------------------- several devices in an actor

AXES = (("data", 2), ("model", 2))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize(
    "spec", [("data", "model"), ("data",), (None, "model"), (), (("data", "model"),)], ids=str
)
async def test_sharded_arrays_travel(spec, kind):
    aval = Aval((8, 4), "float32", spec)
    types = (AxisType.Auto if kind == "auto" else AxisType.Explicit,) * 2
    mesh = AbstractMesh((2, 2), ("data", "model"), axis_types=types)
    double_blob = blob(double, aval, mesh=mesh, in_specs=[spec], out_specs=[spec])
    async with harness(2, spmd_mesh=AXES, axis_types=(kind, kind)) as h:
        await h.load(
            0,
            [Input(0, 0), Run("f", 0, (0,), (1,)), Send(1, 1, 0), Delete(1)],
            [aval] * 2,
            [double_blob],
        )
        await h.load(
            1,
            [Recv(0, 0, 0), Run("f", 0, (0,), (1,)), Delete(0), Output(1, 0)],
            [aval] * 2,
            [double_blob],
        )
        for number in range(3):
            value = np.random.default_rng(number).normal(size=(8, 4)).astype(np.float32)
            await h.put(0, 10 + number, value, spec)
            other = await h.start(
                0, m.Step, epoch=1, step=number, program_id=0, inputs={0: 10 + number}, outputs={}
            )
            reply = await h.step(1, number, {}, {0: 20 + number})
            await other
            (found,) = await h.fetch(1, 20 + number)
            np.testing.assert_array_equal(found, value * 4)
            assert reply.stats.peak_bytes == 2 * aval.size_bytes
        pool = h.actors[1]._resources.step_resources.pool
        assert all(b.array is not None for place in pool._buffers.values() for b in place.free)


async def test_sharded_pipeline_with_collectives_under_random_delays():
    """Three actors over four shared devices: replicas are sent once, and messages overtake each other."""
    rng, n = random.Random(0), 4
    network = FaultyNetwork(delay=lambda *_: rng.random() * 0.002)
    spec, whole = ("data", "model"), Aval((), "float32")
    aval = Aval((8, 4), "float32", spec)
    mesh = AbstractMesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    code = blob(lambda x: (x * 2, x.sum()), aval, mesh=mesh, in_specs=[spec], out_specs=[spec, ()])
    first, second, third = [Input(0, 0)], [], []
    for k in range(n):
        a, b = 1 + 2 * k, 2 + 2 * k
        first += [Run("f", 0, (0,), (a, b)), Send(a, 1, k), Send(b, 2, n + k), Delete(a), Delete(b)]
        a, b, c = 3 * k, 3 * k + 1, 3 * k + 2
        second += [
            Recv(a, 0, k),
            Run("f", 0, (a,), (b, c)),
            Send(b, 2, k),
            Delete(a),
            Delete(b),
            Delete(c),
        ]
        a, b, c, d = range(4 * k, 4 * k + 4)
        third += [Recv(a, 1, k), Recv(b, 0, n + k), Run("f", 0, (a,), (c, d)), Delete(a)]
        third += [Output(b, 3 * k), Output(c, 3 * k + 1), Output(d, 3 * k + 2)]
    async with harness(3, network=network, spmd_mesh=AXES, axis_types=("auto", "auto")) as h:
        await h.load(0, first, [aval] + [aval, whole] * n, [code])
        await h.load(1, second, [aval, aval, whole] * n, [code])
        await h.load(2, third, [aval, whole, aval, whole] * n, [code])
        for number in range(5):
            value = np.random.default_rng(number).normal(size=(8, 4)).astype(np.float32)
            await h.put(0, number, value, spec)
            ids = {k: 1000 + 100 * number + k for k in range(3 * n)}
            fields = {"epoch": 1, "step": number, "program_id": 0}
            replies = [
                await h.start(2, m.Step, inputs={}, outputs=ids, **fields),
                await h.start(1, m.Step, inputs={}, outputs={}, **fields),
                await h.start(0, m.Step, inputs={0: number}, outputs={}, **fields),
            ]
            replies = await asyncio.wait_for(asyncio.gather(*replies), TIMEOUT_S)
            assert all(isinstance(reply, m.StepDone) for reply in replies), replies
            found = await h.fetch(2, *ids.values())
            for k in range(n):
                np.testing.assert_allclose(found[3 * k], value.sum(), rtol=1e-5, atol=1e-5)
                np.testing.assert_array_equal(found[3 * k + 1], value * 8)
                np.testing.assert_allclose(found[3 * k + 2], value.sum() * 4, rtol=1e-5, atol=1e-5)


async def test_unusable_donation_does_not_warn():
    async with harness() as h:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            await h.load(
                0,
                [Input(0, 0, True), Run("f", 0, (0,), (1,), (0,)), Output(1, 0)],
                [V, Aval((), "float32")],
                [blob(lambda x: (x.sum(),), V)],
            )
        await h.put(0, 1, np.ones(8, np.float32))
        await h.step(0, 0, {0: 1}, {0: 2})
        (found,) = await h.fetch(0, 2)
        assert found == 8


async def test_the_loop_lives_while_a_task_computes():
    big = Aval((1200, 1200), "float32")

    def heavy(x):
        for _ in range(4):
            x = x @ x * 1e-3
        return (x,)

    async with harness() as h:
        await h.load(0, [Input(0, 0), Run("f", 0, (0,), (1,)), Output(1, 0)], [big, big], [blob(heavy, big)])
        await h.put(0, 1, np.ones(big.shape, np.float32))
        step = await h.start(0, m.Step, epoch=1, step=0, program_id=0, inputs={0: 1}, outputs={0: 2})
        turns = 0
        while not step.done():
            turns += 1
            await asyncio.sleep(0)
        assert isinstance(step.result(), m.StepDone)
        assert turns > 10
