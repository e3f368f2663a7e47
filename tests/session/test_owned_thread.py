"""Computations in threads that end with the coroutine that waits for them."""

from __future__ import annotations

import asyncio
import threading
import time

import jax
import pytest

from jaxpp_async.session.owned_thread import run_in_owned_thread


async def test_the_result_and_the_error_of_the_work():
    assert await run_in_owned_thread(lambda tell: 3) == 3
    with pytest.raises(ZeroDivisionError):
        await run_in_owned_thread(lambda tell: 1 // 0)


async def test_the_thread_has_the_settings_of_jax_of_its_owner():
    def settings(tell):
        return jax.numpy.arange(1.0).dtype, jax.config.jax_default_matmul_precision

    with jax.enable_x64(True), jax.default_matmul_precision("float32"):
        assert await run_in_owned_thread(settings) == ("float64", "float32")
    assert await run_in_owned_thread(settings) == ("float32", None)


async def test_a_cancelled_await_ends_only_after_the_thread_has_ended():
    events, began = [], threading.Event()

    def work(tell):
        try:
            while True:
                began.set()
                tell("working")
                time.sleep(1e-3)
        finally:
            time.sleep(0.05)
            events.append("ended")

    task = asyncio.create_task(run_in_owned_thread(work))
    await asyncio.to_thread(began.wait)
    task.cancel()
    await asyncio.sleep(0.01)
    task.cancel()  # a second time, while the thread ends
    with pytest.raises(asyncio.CancelledError):
        await task
    assert events == ["ended"]
