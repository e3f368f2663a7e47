"""Faults inside real actors: `RemoteMesh(setup="faults:install", env=faults.at(...))`. The first run of that
label in that step or a later one goes wrong, inside the actor's own way of calling an executable. Some faults
are not of one
run: `"die while sending"` and `"lose"` (whatever the label) and `"slow"` (every run whose label begins like
    it)."""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import resource
import signal
import sys
import threading
import time
from typing import Any

from jaxpp_async.protocol.messages import step_number

HERE = os.path.dirname(__file__)


def at(step: int, label: str, what: str) -> dict[str, str]:
    """Environment of actors in which `label` does `what` (see `FAULTS`) in step `step`."""
    path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {"PYTHONPATH": path, "JAXPP_TEST_FAULT": json.dumps([step, label, what])}


def install() -> None:
    """Runs in the actor."""
    from jaxpp_async.actors.step_run import StepRun

    step, label, what = json.loads(os.environ["JAXPP_TEST_FAULT"])
    original = StepRun._call

    def call(self: Any, command: Any) -> Any:
        here = self.program.plan.program.instructions[command.instruction].label
        if what in FAULTS and step_number(self.message.step) >= step and here == label:
            self.program.tasks[command.instruction]._call = FAULTS[what]
        return original(self, command)

    StepRun._call = call  # type: ignore[method-assign]
    if what == "die while sending":
        StepRun._send = _send_and_die(StepRun._send)  # type: ignore[method-assign]
    if what == "lose":
        StepRun._send = _lose(StepRun._send, step)  # type: ignore[method-assign]
    if what == "hold":
        StepRun._call = _hold(StepRun._call, step, label)  # type: ignore[method-assign]
    if what == "slow":
        StepRun._call = _slow(StepRun._call, label)  # type: ignore[method-assign]


def refuse() -> None:
    """What a launch hook that fails looks like."""
    raise RuntimeError("this hook refuses")


def report_compilations() -> None:
    """No fault: prints what JAX's compilation cache does, an event a line."""
    from jax import monitoring

    def report(event: str, **_: Any) -> None:
        if "/compilation_cache/" in event:
            os.write(1, f"{event}\n".encode())  # whole lines, also from several threads at once

    monitoring.register_event_listener(report)


def _raise(*arrays: Any) -> Any:
    raise ValueError("this executable fails")


def _exit(*arrays: Any) -> Any:
    print("last words", file=sys.stderr, flush=True)
    os._exit(3)


def _crash(*arrays: Any) -> Any:
    ctypes.string_at(0)


def _exhaust(*arrays: Any) -> Any:
    """XLA finds no memory for a result."""
    import jax.numpy as jnp

    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), limits[1]))
    try:
        return [jnp.zeros(1 << 28) + 1]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _fill(*arrays: Any) -> Any:
    """Uses a GiB, which a memory limit of the test's is to end."""
    held = []
    for _ in range(64):
        held.append(b"x" * (16 << 20))
    raise MemoryError("nobody has ended this process")


def _hang(*arrays: Any) -> Any:
    print("hanging", flush=True)
    time.sleep(60)


def _hold(original: Any, step: int, label: str) -> Any:
    """Native code keeps Python's global lock for 5 s, once."""
    held: list[bool] = []

    def call(self: Any, command: Any) -> Any:
        here = self.program.plan.program.instructions[command.instruction].label
        if step_number(self.message.step) >= step and here == label and not held:
            held.append(True)
            ctypes.PyDLL(None).usleep(5_000_000)
        return original(self, command)

    return call


def _lose(original: Any, step: int) -> Any:
    """The link takes what this actor sends, from this step on, and it never arrives."""

    def send(self: Any, command: Any) -> None:
        if step_number(self.message.step) < step:
            original(self, command)
        else:
            self._pieces_left[command.instruction] = 1

    return send


def _slow(original: Any, label: str) -> Any:
    def call(self: Any, command: Any) -> Any:
        if self.program.plan.program.instructions[command.instruction].label.startswith(label):
            time.sleep(0.01)  # the fault itself: a slow device
        return original(self, command)

    return call


def _send_and_die(original: Any) -> Any:
    def send(self: Any, command: Any) -> None:
        original(self, command)
        size = self.program.plan.avals[command.buffer].size_bytes
        if size >= 1 << 20:
            # A moment later: 64 MiB take longer than that.
            threading.Timer(0.003, os.kill, (os.getpid(), signal.SIGKILL)).start()

    return send


FAULTS = {"raise": _raise, "exit": _exit, "crash": _crash, "hang": _hang, "exhaust": _exhaust, "fill": _fill}
