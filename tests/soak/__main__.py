"""Train while everything goes wrong: `make soak MINUTES=20`. Exit status 1, and the seed, if something is not
right.

Two meshes train the same model on the same data; faults are let loose on one of them. Each step's losses must
be equal bit for bit, and in the end nothing may be left: processes, buffers, descriptors, shared memory.
Where network namespaces can be made (as root, on Linux), they are its actors' hosts, and their links are cut
and restored as well.
"""

from __future__ import annotations

import argparse
import asyncio
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
from collections.abc import Sequence
from typing import Any

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "support")]

# Actors on other hosts do not inherit the flags with which `conftest` has tests compile in less time, and
# would compute other last bits than this process: without flags all compile as they do for users.
os.environ.setdefault("XLA_FLAGS", "")

import conftest  # noqa: F401, E402  (settings of JAX, before it starts)
import psutil  # noqa: E402
from disturbing import Disturber, Tally  # noqa: E402
from fault_plan import KINDS, LETHAL, LINKS, Fault, fault_plan  # noqa: E402
from lockstep import SoakFailure, Trainer  # noqa: E402
from namespaces import Network, skip_reason  # noqa: E402
from places import Place, place  # noqa: E402
from resources import differences, held, inspect_actors, no_new_shared_memory, shared_memory  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import jaxpp_async as jpp  # noqa: E402

BACKUP_EVERY = 5
COUNTED = ("live_arrays", "store_arrays")
SETTLE_S = 10.0
"""What frees and ends that are on their way may take."""

HOSTS_SETTLE_S = 30.0
"""The same on other hosts: an sshd notices only by TCP's own clocks that a client went away while its link
was cut."""

CONSOLE = Console(width=110)


class Listener(logging.Handler):
    """Keep what was logged last, and asyncio's complaints, also those of actors; count restarts."""

    def __init__(self, tally: Tally) -> None:
        super().__init__(logging.INFO)
        self._tally = tally
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
        self.last: deque[str] = deque(maxlen=40)
        self.complaints: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Called by `logging`."""
        text = self.format(record)
        self.last.append(text[:2000])
        if record.name == "jaxpp_async" and record.getMessage().startswith("restarting because of"):
            self._tally.num_attempts += 1
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
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="how long faults go on (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="default: a fresh one")
    parser.add_argument("--actors", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--without", action="append", default=[], choices=KINDS + LINKS, help="leave these faults out"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--net", action="store_true", help="actors on network namespaces as hosts, or not at all"
    )
    where.add_argument(
        "--local", action="store_true", help="actors on this machine, whose links cannot be cut"
    )
    options = parser.parse_args()
    reason = None if options.local else skip_reason("make soak")
    if reason and options.net:
        parser.error(f"--net: {reason}")
    if reason:
        CONSOLE.print(f"all actors are on this machine, and no links are cut: {reason}", markup=False)
    options.net = not options.local and not reason
    tally = Tally()
    log = Listener(tally)
    logging.getLogger().addHandler(log)
    logging.captureWarnings(True)
    warnings.simplefilter("default", ResourceWarning)
    try:
        with place(options.actors, with_links=options.net, tcp=options.seed % 2 == 1) as chosen:
            CONSOLE.print(
                f"seed {options.seed}, {options.minutes:g} minutes, {options.actors} actors {chosen}"
            )
            steps, seconds = asyncio.run(soak(options, tally, chosen))
        log.check()
    except BaseException as error:  # whatever it is: a soak that ends early has failed, Ctrl-C too
        CONSOLE.print(report(tally, options))
        for line in ["what was logged last:", *log.last, "the last faults:", *tally.last]:
            CONSOLE.print(f"  {line}", markup=False)
        traceback.print_exc()
        CONSOLE.print(
            f"FAILED: {type(error).__name__}: {error}\nto repeat it: make soak MINUTES={options.minutes:g} "
            f'ARGS="--seed {options.seed} --actors {options.actors} {"--net" if options.net else "--local"}"',
            markup=False,
        )
        sys.exit(1)
    CONSOLE.print(report(tally, options))
    CONSOLE.print(
        f"{steps} steps in {seconds:.0f} s, all equal to the undisturbed run bit for bit; nothing is left"
    )


async def soak(options: argparse.Namespace, tally: Tally, chosen: Place) -> tuple[int, float]:
    """Steps run and seconds taken.

    Raises:
        SoakFailure: something was not as it should.
    """
    async with _mesh(1):  # whatever a process takes once and keeps
        pass
    before, files, start_s = held(), shared_memory(), time.monotonic()
    on_hosts = _on_hosts(chosen.network)
    with tempfile.TemporaryDirectory(prefix="jaxpp-soak-") as folder:
        async with _mesh(options.actors) as reference, _mesh(options.actors, chosen) as mesh:
            trainer = Trainer(mesh, reference, options.actors, pathlib.Path(folder))
            disturber = Disturber(mesh, trainer, steps_between=2 * BACKUP_EVERY, network=chosen.network)
            disturber.tally = tally
            watching = asyncio.create_task(disturber.watch(), name="watch the events")
            await trainer.warm_up()
            await _train(trainer, disturber, options)
            await trainer.compare_states()
            await _same_buffers(mesh, reference, trainer)
        await watching
    await _hosts_are_clean(chosen.network, on_hosts)
    await _nothing_left(before, files, tally)
    return trainer.num_run, time.monotonic() - start_s


def _mesh(num_actors: int, chosen: Place | None = None) -> jpp.RemoteMesh:
    where = chosen.options if chosen else {}
    return jpp.RemoteMesh(num_actors, max_restarts=1_000_000, backup_every=BACKUP_EVERY, **where)


async def _train(trainer: Trainer, disturber: Disturber, options: argparse.Namespace) -> None:
    """Until the time is over, the last wish granted, the mesh calm again and as far as the other one."""
    seconds = 60 * options.minutes
    plan = fault_plan(options.seed, seconds, options.actors, links=options.net)
    wanted = [fault for fault in plan if fault.kind not in options.without]
    disturbing = asyncio.create_task(_disturb(disturber, wanted, seconds), name="disturb the mesh")
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


async def _disturb(disturber: Disturber, plan: Sequence[Fault], seconds: float) -> None:
    """Disturb for so long; then wait for the recovery from the last fault."""
    await disturber.disturb(plan, seconds)
    await disturber.calm()


# ---------------------------------------------------------------- what is left


async def _same_buffers(mesh: jpp.RemoteMesh, reference: jpp.RemoteMesh, trainer: Trainer) -> None:
    """Both hold the same number of arrays on each actor, at the same distance from the last replica of the
    state: that has the memory of the arrays of then."""
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
    await inspect_actors(mesh._running())  # with it go the frees of what was collected
    await asyncio.sleep(0.2)
    numbers = await inspect_actors(mesh._running())
    return {f"actor {actor}: {name}": numbers[actor][name] for actor in sorted(numbers) for name in COUNTED}


def _on_hosts(network: Network | None) -> dict[str, set[int]]:
    """Processes on each host."""
    return {host.name: host.pids() for host in network.hosts} if network else {}


async def _hosts_are_clean(network: Network | None, before: dict[str, set[int]]) -> None:
    deadline = time.monotonic() + HOSTS_SETTLE_S
    while left := [(name, pid) for name, pids in _on_hosts(network).items() for pid in pids - before[name]]:
        if time.monotonic() > deadline:
            raise SoakFailure(f"left on hosts: {[(name, pid, _command(pid)) for name, pid in left]}")
        await asyncio.sleep(0.2)


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
    return "jaxpp_async.actors" in _command(pid)


def _command(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []


def report(tally: Tally, options: argparse.Namespace) -> Table:
    """How many faults of each kind."""
    restarts, suspicions = tally.num_events("restarted"), tally.num_events("suspect")
    title = f"faults ({restarts} restarts, {tally.num_attempts} attempts, {suspicions} suspicions)"
    table = Table(title=title, title_justify="left")
    table.add_column("fault")
    for name in ("survived", "not possible", "longest until it went on", "most attempts"):
        table.add_column(name, justify="right")
    for kind in KINDS + (LINKS if options.net else ()):
        longest = f"{tally.longest_restart_s[kind]:.1f} s" if kind in tally.longest_restart_s else ""
        name = f"{kind} (lost)" if kind in LETHAL else kind
        missed, attempts = tally.missed[kind] or "", tally.most_restarts[kind] or ""
        table.add_row(name, str(tally.injected[kind]), str(missed), longest, str(attempts))
    return table


if __name__ == "__main__":
    main()
