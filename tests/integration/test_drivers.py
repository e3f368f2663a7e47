"""A driver leaves nothing when it is killed, interrupted by Ctrl-C, or ended by an error nobody catches."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import faults
import jax
import psutil
import pytest
from paths import ROOT
from resources import shared_memory

COMPLAINTS = ("never retrieved", "was destroyed", "Warning", "Fatal", "never awaited", "Exception ignored")

# With real actors. {body} runs in the mesh; what it prints first says that the moment has come.
REAL = """
import asyncio, threading
import numpy as np
import jaxpp_async as jpp
from jaxpp_async.storage import tensor_files

def say(*words):
    print(*words, flush=True)

def slow_write(*args):
    say("now")
    threading.Event().wait(1)
    return original(*args)

original, tensor_files._write_array = tensor_files._write_array, slow_write

def add(x):
    return x + 1

async def main():
    x = np.ones(3, np.float32)
    async with jpp.RemoteMesh({actors}, launcher={launcher!r}) as mesh:
        step = mesh.distributed(add)
        say("pids", *(a.pid for a in mesh.actors))
        {body}

if __name__ == "__main__":
    asyncio.run(main())
"""

# Actors without JAX: for what has nothing to do with programs.
FAKE = """
import asyncio
from fake_actor import scripted, start_fakes
from jaxpp_async.launch import LocalLauncher
from jaxpp_async.controller.deploy import LoadableProgram
from jaxpp_async.controller.options import ActorConfig

async def main():
    launcher = LocalLauncher(actor="fake_actor:FakeActor", forward=lambda line: None)
    print("now" if {setup!r} else "", flush=True)
    mesh = await start_fakes(2, launcher, ActorConfig(setup={setup!r}))
    try:
        print("pids", *(info.pid for info in mesh.actors), flush=True)
        program, _ = await mesh.load(LoadableProgram(scripted({text!r})))
    finally:
        print("now", flush=True)
        await mesh.aclose()

asyncio.run(main())
"""


class Driver:
    """A process that runs `code`; its actors are its children."""

    def __init__(self, code: str):
        path = [faults.HERE, str(ROOT), os.environ.get("PYTHONPATH", "")]
        self.popen = subprocess.Popen(
            [sys.executable, "-W", "default::ResourceWarning", "-c", code],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path).rstrip(os.pathsep), "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._too_late = threading.Timer(60, self.popen.kill)
        self._too_late.start()
        self.children: list[psutil.Process] = []

    def wait_for(self, word: str) -> None:
        """Until it has printed a line that begins so."""
        out = self.popen.stdout
        assert out is not None
        while not (line := out.readline()).startswith(word):
            assert line, self.popen.communicate()[1]
        self.children = psutil.Process(self.popen.pid).children(recursive=True)

    def communicate(self) -> tuple[str, str, float]:
        """What it still prints, on stdout and on stderr, and the seconds to its end."""
        began = time.monotonic()
        out, errors = self.popen.communicate()
        return out, errors, time.monotonic() - began

    def children_end_within(self, timeout_s: float) -> bool:
        """Whether they are gone in time (as zombies they may wait for an init that does not reap)."""
        deadline = time.monotonic() + timeout_s
        while any(_is_running(child) for child in self.children):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def end(self) -> None:
        self._too_late.cancel()
        for process in [self.popen, *self.children]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.popen.communicate()


def _is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def real(body: str, *, actors: int = 1, launcher: str = "inline") -> str:
    return REAL.format(body=body, actors=actors, launcher=launcher)


@contextlib.contextmanager
def driver(code: str) -> Iterator[Driver]:
    """Runs one; afterwards nothing of it may be there."""
    files, found = shared_memory(), Driver(code)
    try:
        yield found
        assert found.children_end_within(1)
        deadline = time.monotonic() + 5
        while left := shared_memory() - files:  # other tests' processes may have theirs for a moment
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
    finally:
        found.end()


LONG = "mesh.distributed(lambda x: [x := x @ x.T + 1 for _ in range(60)])"
INTERRUPTED = {
    "launch": FAKE.format(setup="silent", text=""),
    # Not inline: what XLA does in this process while it ends makes Python forget that it was interrupted
    # (exit code 1).
    "compile": real(f"say('now'); await mesh.run({LONG}, x[None])", launcher="local"),
    "save": real("await mesh.save('{folder}', await mesh.run(step, x))"),
    "aclose": FAKE.format(setup=None, text="stubborn"),
}


@pytest.mark.parametrize("moment", INTERRUPTED)
def test_ctrl_c(moment, tmp_path):
    """Case 17; within a step: `integration/test_failures.py::test_ctrl_c_in_the_middle_of_a_step`."""
    with driver(INTERRUPTED[moment].replace("{folder}", str(tmp_path / "saved"))) as process:
        process.wait_for("now")
        if moment == "launch":
            time.sleep(0.3)  # the actors are on their way
        process.popen.send_signal(signal.SIGINT)
        _, errors, seconds = process.communicate()
        assert seconds < 10
        assert process.popen.returncode == -signal.SIGINT and errors.rstrip().endswith("KeyboardInterrupt"), (
            errors
        )
        assert [complaint for complaint in COMPLAINTS if complaint in errors] == [], errors
    assert not os.path.exists(tmp_path / "saved")


def test_a_driver_that_is_killed_in_a_step_leaves_nothing():
    """Case 14, with actors that have JAX and UCX."""
    with driver(
        real("say('now')\n        while True: x = await mesh.run(step, x)", actors=2, launcher="local")
    ) as process:
        process.wait_for("now")
        assert len(process.children) == 2
        process.popen.kill()
        assert process.children_end_within(2)


# Trains as docs/operations.md says; "now" comes in the middle of the fourth step. Only that one takes long.
SAVING = """
import asyncio
import jax, numpy as np
import jaxpp_async as jpp
from docs_code import doc_code

def train_step(state, x):
    turns = jax.numpy.where(state["count"] == 3, {turns}, 0)
    nothing = jax.lax.fori_loop(0, turns, lambda _, m: m @ m, np.zeros((500, 500), np.float32))
    return {{"w": state["w"] * 3 + x + nothing[0, 0], "count": state["count"] + 1}}, x

def batches():
    for i in range(100):
        if i == 3:
            asyncio.get_running_loop().call_later(0.2, lambda: print("now", flush=True))
        yield np.float32(i)

async def main():
    async with jpp.RemoteMesh(2, launcher="local") as mesh:
        step = mesh.distributed(train_step, donate_argnums=0)
        state = {{"w": np.float32(1), "count": np.int32(0)}}
        state, _ = await mesh.run(mesh.distributed(lambda s: (s, 0)), state)
        await step.compile(state, np.float32(0))
        await doc_code("operations.md")["train"](mesh, step, state, batches(), {path!r})

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
async def test_a_driver_saves_on_sigterm_what_it_was_computing(number, tmp_path, remote_mesh):
    """Case 26, in the words of docs/operations.md: the step under way counts."""
    with driver(SAVING.format(turns=300, path=str(tmp_path))) as process:
        process.wait_for("now")
        process.popen.send_signal(number)
        _, errors, seconds = process.communicate()
        assert seconds < 20
        assert (
            "step 4 ('train_step') runs on, though its `run` ended by CancelledError: state stands for"
            in errors
        )
        assert [complaint for complaint in COMPLAINTS if complaint in errors] == [], errors
    mesh = await remote_mesh(1, launcher="inline")
    like = {name: jax.ShapeDtypeStruct((), dtype) for name, dtype in (("w", "float32"), ("count", "int32"))}
    state = await mesh.fetch(await mesh.restore(tmp_path, like))
    w = 1.0
    for i in range(4):
        w = w * 3 + i
    assert state == {"w": w, "count": 4}


def test_an_error_that_nobody_catches_ends_the_driver():
    """Whatever fails a step: the driver ends by that error and by nothing else."""
    body = "import os; os.kill(mesh.actors[1].pid, 9)\n        while True: x = await mesh.run(step, x)"
    with driver(real(body, actors=2, launcher="local")) as process:
        process.wait_for("pids")
        _, errors, seconds = process.communicate()
        assert seconds < 15
        assert process.popen.returncode == 1
        assert re.search(
            r"^jaxpp_async\.errors\.ActorDiedError: actor 1 .* was killed by SIGKILL", errors, re.MULTILINE
        )
        assert [complaint for complaint in COMPLAINTS if complaint in errors] == [], errors
