"""Loggers of a mesh: they get everything in order, and one that raises or blocks harms nobody."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from waiting import until

import jaxpp_async as jpp
from jaxpp_async.errors import ActorDiedError, ArrayError, MeshClosedError, MeshError
from jaxpp_async.session import logger_delivery
from jaxpp_async.session import metrics as metrics_module
from jaxpp_async.session.logger_delivery import LoggerState
from jaxpp_async.session.metrics import Metrics

NO_ARRAYS: Any = None


class Recorder:
    def __init__(self):
        self.got = []

    def log(self, step, values):
        self.got.append((step, values))


class AsyncRecorder(Recorder):
    async def log(self, step, values):
        await asyncio.sleep(0)
        super().log(step, values)


class Raising(Recorder):
    def log(self, step, values):
        super().log(step, values)
        raise SystemExit("the disk is full") if step else OSError("no\nconnection")


class Blocked(Recorder):
    def __init__(self):
        super().__init__()
        self.go_on = threading.Event()

    def log(self, step, values):
        assert self.go_on.wait(30)
        super().log(step, values)


class Hung:
    async def log(self, step, values):
        await asyncio.sleep(30)


def told(caplog, level=logging.WARNING):
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


async def test_loggers_get_everything_in_order_and_a_copy_each():
    loggers = [Recorder(), AsyncRecorder()]
    metrics = Metrics(NO_ARRAYS, loggers)
    for step in range(50):
        metrics.log(step, {"loss": step / 2, "rate": np.float32(0.5)})
    await metrics.aclose()
    expected = [(step, {"loss": step / 2, "rate": 0.5}) for step in range(50)]
    assert [logger.got for logger in loggers] == [expected, expected]
    assert loggers[0].got[0][1] is not loggers[1].got[0][1]
    assert metrics.names == ("loss", "rate") and metrics.latest()["loss"] == (49, 24.5)
    assert metrics.history("loss").num_values == 50
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("jaxpp-logger")]


async def test_a_logger_that_raises_is_told_of_once_and_others_get_their_values(caplog):
    bad, good = Raising(), Recorder()
    metrics = Metrics(NO_ARRAYS, [bad, good])
    for step in range(5):
        metrics.log(step, {"loss": 1.0})
    await metrics.aclose()
    assert len(bad.got) == len(good.got) == 5
    first, last = told(caplog)
    assert first.startswith(r"logger Raising raised OSError at step 0: no\nconnection; training goes on")
    assert last == "logger Raising raised 5 errors in all"
    assert metrics.loggers() == (
        LoggerState("Raising", num_failed=5, last_error="SystemExit: the disk is full"),
        LoggerState("Recorder"),
    )
    assert [logger.keeps_up for logger in metrics.loggers()] == [False, True]


async def test_loggers_of_one_class_have_names_of_their_own():
    metrics = Metrics(NO_ARRAYS, [Recorder(), AsyncRecorder(), Recorder(), Recorder()])
    names = [logger.name for logger in metrics.loggers()]
    assert names == ["Recorder", "AsyncRecorder", "Recorder 2", "Recorder 3"]
    await metrics.aclose()


async def test_a_logger_that_blocks_loses_its_oldest_values_and_nobody_waits(caplog, monkeypatch):
    monkeypatch.setattr(logger_delivery, "QUEUED", 10)
    blocked, good = Blocked(), AsyncRecorder()
    metrics = Metrics(NO_ARRAYS, [blocked, good])
    for step in range(30):
        metrics.log(step, {"loss": 1.0})
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    assert len(good.got) == 30
    (warning,) = told(caplog)
    assert warning.startswith("logger Blocked has been busy with step 0 for 0.0 s; training goes on")
    state, other = metrics.loggers()
    assert (state.num_waiting, state.num_dropped, state.keeps_up) == (10, 19, False) and state.busy_s > 0
    assert other == LoggerState("AsyncRecorder")
    blocked.go_on.set()
    await metrics.aclose()
    assert [step for step, _ in blocked.got] == [0, *range(20, 30)]
    assert told(caplog)[1:] == ["logger Blocked was too slow for 19 steps, which it did not get"]


@pytest.mark.parametrize("is_async", [False, True])
async def test_closing_does_not_wait_for_ever(caplog, monkeypatch, is_async):
    monkeypatch.setattr(metrics_module, "FLUSH_S", 0.05)
    hung, good = Hung() if is_async else Blocked(), Recorder()
    metrics = Metrics(NO_ARRAYS, [hung, good])
    metrics.log(0, {"loss": 1.0})
    metrics.log(1, {"loss": 1.0})
    await asyncio.sleep(0.01)
    await metrics.aclose()
    assert told(caplog) == [
        f"logger {type(hung).__name__} had not returned 0.05 s after the mesh closed; 1 steps are not logged"
    ]
    assert len(good.got) == 2
    assert metrics.loggers()[0] == LoggerState(type(hung).__name__, num_dropped=2)
    if isinstance(hung, Blocked):
        hung.go_on.set()
    await metrics.aclose()  # a second time: nothing
    with pytest.raises(MeshClosedError, match=r"mesh.log: the mesh is closed; log before it closes"):
        metrics.log(2, {"loss": 1.0})


class Holding(Recorder):
    """A logger that blocks the event loop, and raises what a thread may raise as well."""

    def __init__(self, error: BaseException | None = None):
        super().__init__()
        self.error = error

    async def log(self, step, values):
        if self.error is not None and step == 0:
            raise self.error
        super().log(step, values)
        time.sleep(0.02)  # noqa: ASYNC251


async def test_an_async_logger_that_holds_the_event_loop_is_told_of_once(caplog, monkeypatch):
    monkeypatch.setattr(logger_delivery, "HELD_S", 0.01)
    logger = Holding()
    metrics = Metrics(NO_ARRAYS, [logger])
    for step in range(5):
        metrics.log(step, {"loss": 1.0})
    await until(lambda: len(logger.got) > 0)
    assert len(logger.got) < 5  # the loop goes on between two calls
    await metrics.aclose()
    assert len(logger.got) == 5
    (said,) = told(caplog)
    assert said.startswith("logger Holding held the event loop for") and "write `def log`" in said


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError("of its own")])
async def test_an_async_logger_cannot_end_training(caplog, error):
    logger = Holding(error)
    metrics = Metrics(NO_ARRAYS, [logger])
    for step in range(2):
        metrics.log(step, {"loss": 1.0})
    await metrics.aclose()
    assert logger.got == [(1, {"loss": 1.0})]
    assert type(error).__name__ in told(caplog)[0]


async def test_an_async_logger_that_awaits_gets_results_and_errors():
    class Awaiting(Recorder):
        async def log(self, step, values):
            values["sum"] = await asyncio.gather(*(asyncio.sleep(0.001, k) for k in range(3)))
            with pytest.raises(ZeroDivisionError):
                await asyncio.to_thread(lambda: 1 / 0)
            super().log(step, values)

    logger = Awaiting()
    metrics = Metrics(NO_ARRAYS, [logger])
    metrics.log(0, {})
    metrics.log(1, {"loss": 1.0})
    await metrics.aclose()
    assert logger.got == [(1, {"loss": 1.0, "sum": [0, 1, 2]})]


async def test_values_that_come_while_a_thread_is_about_to_wait_are_not_forgotten():
    """The thread is held up where it has found the queue empty and does not wait yet."""
    logger = Recorder()
    delivery = logger_delivery.make_delivery(logger, "Recorder")
    take, found_none, go_on = delivery._queue.take, threading.Event(), threading.Event()

    def take_and_pause(**options):
        entry = take(**options)
        if entry is None:
            found_none.set()
            go_on.wait(10)
        return entry

    delivery._queue.take = take_and_pause
    delivery.put(0, {})
    await asyncio.to_thread(found_none.wait, 1)
    delivery.put(1, {})
    go_on.set()
    await until(lambda: len(logger.got) == 2)
    delivery.end()
    await delivery.wait_ended(5)


async def test_a_plain_log_that_returns_a_coroutine_is_told_how_to_be_written(caplog):
    class Wrapped:
        def log(self, step, values):
            return asyncio.sleep(0)

    metrics = Metrics(NO_ARRAYS, [Wrapped()])
    metrics.log(0, {"loss": 1.0})
    await metrics.aclose()
    assert "write it as `async def log(self, step, values)`" in told(caplog)[0]


async def test_names_without_end_are_told_of_once(caplog, monkeypatch):
    monkeypatch.setattr("jaxpp_async.session.metric_log.MOST_NAMES", 2)
    recorder = Recorder()
    metrics = Metrics(NO_ARRAYS, [recorder])
    for step in range(5):
        metrics.log(step, {f"loss {step}": 1.0})
    await metrics.aclose()
    assert len(recorder.got) == 5 and metrics.names == ("loss 0", "loss 1")
    (warning,) = told(caplog)
    assert "log one name for all steps, not one name a step" in warning


def test_another_thread_is_told_what_to_write():
    with pytest.raises(MeshError, match=r"write `loop.call_soon_threadsafe\(mesh.log, step, values\)`"):
        Metrics(NO_ARRAYS, []).log(0, {"loss": 1.0})


@pytest.mark.parametrize(
    ("loggers", "message"),
    [
        (Recorder(), "loggers is .*Recorder.*; put it into a list"),
        (None, "loggers is None; give a list of loggers"),
        ([print], r"loggers has <built-in function print>; give objects with a method log\(step, values\)"),
        ([Recorder], r"loggers has <class .*Recorder'>; give objects with a method"),
        ([logging.getLogger("x")], "loggers has <Logger x .*>, whose method `log` takes a level and a text"),
        (
            [type("Short", (), {"log": lambda self, values: None})()],
            r"cannot be called as log\(step, values\)",
        ),
    ],
)
def test_what_is_no_logger_is_refused(loggers, message):
    with pytest.raises(MeshError, match=message):
        jpp.RemoteMesh(1, loggers=loggers)


# ---------------------------------------------------------------- on a mesh


async def test_the_event_loop_of_another_thread_is_not_that_of_the_mesh():
    async def log():
        mesh.log(0, {"loss": 1.0})

    async with jpp.RemoteMesh(1, launcher="inline") as mesh:
        with pytest.raises(MeshError, match="outside of the mesh's event loop"):
            await asyncio.to_thread(asyncio.run, log())
        await log()
        assert mesh.metrics.latest()["loss"].step == 0


def scaled(state):
    return {"w": state["w"] * 2}, jnp.sum(state["w"])


@pytest.mark.parametrize("launcher", ["inline", "local"])
async def test_remote_arrays_are_logged_in_order_and_may_be_donated_at_once(launcher):
    recorder = Recorder()
    async with jpp.RemoteMesh(1, launcher=launcher, loggers=[recorder]) as mesh:
        step = mesh.distributed(scaled, donate_argnums=0)
        consume = mesh.distributed(lambda loss: loss + 1, donate_argnums=0)
        state = {"w": jnp.ones(4)}
        for number in range(6):
            state, loss = (await mesh.submit(step, state)).outputs
            mesh.log(number, {"loss": loss, "number": number})
            await mesh.run(consume, loss)
        mesh.log(6, {"loss": 0.0})
        here = await mesh.put(jnp.asarray(3.5))
        mesh.log(7, {"loss": here})
    expected = [(number, {"loss": 4.0 * 2**number, "number": float(number)}) for number in range(6)]
    assert recorder.got == [*expected, (6, {"loss": 0.0}), (7, {"loss": 3.5})]
    assert mesh.metrics.latest()["loss"] == (7, 3.5)


async def test_logging_is_for_a_mesh_that_runs():
    mesh = jpp.RemoteMesh(1, launcher="inline")
    with pytest.raises(MeshError, match="this mesh has not started"):
        mesh.log(0, {"loss": 1.0})
    async with mesh:
        losses = await mesh.run(mesh.distributed(lambda x: x), jnp.ones(4))
        with pytest.raises(ValueError, match=r"such as \(await loss\).mean\(\) if that is meant"):
            mesh.log(0, {"loss": losses})
        one = await mesh.run(mesh.distributed(lambda x: x[0]), losses)
        with pytest.raises(TypeError, match=r"mesh.log: step is RemoteArray.*; `await` it first"):
            mesh.log(one, {"loss": 1.0})  # type: ignore[arg-type]
        await one.delete()
        with pytest.raises(ArrayError, match=r"mesh.log: 'loss' cannot be used: it was deleted"):
            mesh.log(0, {"loss": one})
    with pytest.raises(MeshClosedError, match=r"mesh.log: the mesh is closed"):
        mesh.log(0, {"loss": 1.0})


async def test_a_failure_loses_what_was_on_its_way_and_is_still_raised(caplog):
    """Nobody awaits a logged value, so that the next call on the mesh raises the failure itself."""
    recorder = Recorder()
    async with jpp.RemoteMesh(1, loggers=[recorder]) as mesh:
        loss = await mesh.run(mesh.distributed(lambda x: x + 1), jnp.ones(()))
        os.kill(mesh.actors[0].pid, signal.SIGSTOP)  # so that it cannot answer
        mesh.log(0, {"loss": loss, "rate": 0.5})
        os.kill(mesh.actors[0].pid, signal.SIGKILL)
        await until(lambda: mesh.is_closed)
        with pytest.raises(ActorDiedError):
            await mesh.run(mesh.distributed(lambda x: x), jnp.ones(2))
    assert recorder.got == [(0, {"rate": 0.5})]
    assert any("mesh.log: 'loss' of step 0 is lost" in text for text in told(caplog))
