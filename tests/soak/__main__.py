"""Train while everything goes wrong: `make soak MINUTES=20`. Exit status 1, and the seed, if something is not right.

Two meshes train the same model on the same data; faults are let loose on one of them. Each step's losses must be
equal bit for bit, and in the end nothing may be left: processes, buffers, descriptors, shared memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import pathlib
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import deque
from typing import Any

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import conftest  # noqa: F401, E402  (settings of JAX, before it starts)
import psutil  # noqa: E402
from disturbing import Disturber, Tally  # noqa: E402
from fault_plan import KINDS, LETHAL, fault_plan  # noqa: E402
from lockstep import SoakFailure, Trainer  # noqa: E402
from resources import differences, held, no_new_shared_memory, shared_memory  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import jaxpp_async as jpp  # noqa: E402

BACKUP_EVERY = 5
COUNTED = ("live_arrays", "store_arrays")
SETTLE_S = 10.0
"""What frees and ends that are on their way may take."""

CONSOLE = Console(width=110)


class Listener(logging.Handler):
    """Keeps what was logged last, and what asyncio had to complain of, also in the actors."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
        self.last: deque[str] = deque(maxlen=40)
        self.complaints: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Called by `logging`."""
        text = self.format(record)
        self.last.append(text[:2000])
        is_leak = record.name == "py.warnings" and ("ResourceWarning" in text or "never awaited" in text)
        if is_leak or (record.name == "asyncio" and record.levelno >= logging.WARNING):
            self.complaints.append(text)

    def check(self) -> None:
        """Raises:
        SoakFailure: there was a complaint.
        """
        gc.collect()
        if self.complaints:
            raise SoakFailure(f"{len(self.complaints)} complaints, the first: {self.complaints[0]}")


def main() -> None:
    """Run one soak."""
    parser = argparse.ArgumentParser(description=__doc__, prog="make soak")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long faults go on (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="default: a fresh one")
    parser.add_argument("--actors", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--without", action="append", default=[], choices=KINDS, help="leave these faults out")
    options = parser.parse_args()
    if options.seed % 2:  # without it, actors of one host share memory, and there is no connection to cut
        os.environ.setdefault("UCX_TLS", "tcp,self")
    CONSOLE.print(
        f"seed {options.seed}, {options.minutes:g} minutes, {options.actors} actors, "
        f"data over {os.environ.get('UCX_TLS', 'whatever UCX takes')}"
    )
    tally, log = Tally(), Listener()
    logging.getLogger().addHandler(log)
    logging.captureWarnings(True)
    warnings.simplefilter("default", ResourceWarning)
    try:
        steps, seconds = asyncio.run(soak(options, tally))
        log.check()
    except BaseException as error:  # whatever it is: a soak that ends early has failed, Ctrl-C too
        CONSOLE.print(report(tally))
        for line in ["what was logged last:", *log.last, "the last faults:", *tally.last]:
            CONSOLE.print(f"  {line}", markup=False)
        traceback.print_exc()
        CONSOLE.print(
            f"FAILED: {type(error).__name__}: {error}\nto repeat it: make soak MINUTES={options.minutes:g} "
            f'ARGS="--seed {options.seed} --actors {options.actors}"',
            markup=False,
        )
        sys.exit(1)
    CONSOLE.print(report(tally))
    CONSOLE.print(f"{steps} steps in {seconds:.0f} s, all equal to the undisturbed run bit for bit; nothing is left")


async def soak(options: argparse.Namespace, tally: Tally) -> tuple[int, float]:
    """Steps run and seconds taken.

    Raises:
        SoakFailure: something was not as it should.
    """
    async with _mesh(1):  # whatever a process takes once and keeps
        pass
    before, files, start_s = held(), shared_memory(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jaxpp-soak-") as folder:
        async with _mesh(options.actors) as reference, _mesh(options.actors) as mesh:
            trainer = Trainer(mesh, reference, options.actors, pathlib.Path(folder))
            disturber = Disturber(mesh, trainer, steps_between=2 * BACKUP_EVERY)
            disturber.tally = tally
            watching = asyncio.create_task(disturber.watch(), name="watch the events")
            await trainer.warm_up()
            await _train(trainer, disturber, options)
            await trainer.compare_states()
            await _same_buffers(mesh, reference, trainer)
        await watching
    await _nothing_left(before, files, tally)
    return trainer.num_run, time.monotonic() - start_s


def _mesh(num_actors: int) -> jpp.RemoteMesh:
    return jpp.RemoteMesh(num_actors, max_restarts=1_000_000, backup_every=BACKUP_EVERY)


async def _train(trainer: Trainer, disturber: Disturber, options: argparse.Namespace) -> None:
    """Until the time is over, the last wish granted, the mesh calm again and as far as the other one."""
    seconds = 60 * options.minutes
    plan = fault_plan(options.seed, seconds, options.actors)
    wanted = [fault for fault in plan if fault.kind not in options.without]
    disturbing = asyncio.create_task(_until(seconds, disturber, wanted), name="disturb the mesh")
    try:
        while not disturbing.done() or trainer.wishes:
            await trainer.run_one()
        disturbing.result()
    finally:
        disturbing.cancel()
        await asyncio.wait([disturbing])
    until = trainer.num_run + 4 * BACKUP_EVERY
    while trainer.num_run < until or trainer.is_behind:  # after a restore
        await trainer.run_one()


async def _until(seconds: float, disturber: Disturber, plan: Any) -> None:
    """Disturb for so long; then wait for the recovery from the last fault."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await disturber.disturb(plan)
    await disturber.calm()


# ---------------------------------------------------------------- what is left


async def _same_buffers(mesh: jpp.RemoteMesh, reference: jpp.RemoteMesh, trainer: Trainer) -> None:
    """Both hold the same number of arrays on each actor, at the same distance from the last copy of the state: that has
    the memory of the arrays of then."""
    ours = await _buffers(mesh)
    seen = []
    for _ in range(2 * BACKUP_EVERY):
        seen.append(await _buffers(reference))
        if ours == seen[-1]:
            return
        await trainer.run_reference()
    nearest = min((differences(ours, theirs) for theirs in seen), key=len)
    raise SoakFailure(f"arrays differ (disturbed, undisturbed): {nearest}")


async def _buffers(mesh: jpp.RemoteMesh) -> dict[str, int]:
    gc.collect()
    await mesh._running().inspect()  # with it go the frees of what was collected
    await asyncio.sleep(0.2)
    numbers = await mesh._running().inspect()
    return {f"actor {actor}: {name}": numbers[actor][name] for actor in sorted(numbers) for name in COUNTED}


async def _nothing_left(before: dict[str, Any], files: set[str], tally: Tally) -> None:
    deadline = time.monotonic() + SETTLE_S
    while left := differences(before, held()):
        if time.monotonic() > deadline:
            raise SoakFailure(f"left over (before, after): {left}")
        await asyncio.sleep(0.1)
    await no_new_shared_memory(files, SETTLE_S)
    # An orphan would be nobody's child: look for all that were ever started.
    pids = {event.details["pid"] for event in tally.events if event.kind == "started"}
    if orphans := [pid for pid in pids if _is_actor(pid)]:
        raise SoakFailure(f"processes left over: {orphans}")


def _is_actor(pid: int) -> bool:
    try:
        return "jaxpp_async.actors" in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False


def report(tally: Tally) -> Table:
    """How many faults of each kind."""
    restarts, suspicions = tally.num_events("restarted"), tally.num_events("suspect")
    table = Table(title=f"faults ({restarts} restarts, {suspicions} suspicions)", title_justify="left")
    table.add_column("fault")
    for name in ("survived", "not possible", "longest until it went on"):
        table.add_column(name, justify="right")
    for kind in KINDS:
        longest = f"{tally.longest_restart_s[kind]:.1f} s" if kind in tally.longest_restart_s else ""
        name = f"{kind} (lost)" if kind in LETHAL else kind
        table.add_row(name, str(tally.injected[kind]), str(tally.missed[kind] or ""), longest)
    return table


if __name__ == "__main__":
    main()
