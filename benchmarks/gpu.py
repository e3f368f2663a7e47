"""gpu: everything that wants a GPU, in one go: tests, transfers, a training step; prints one table, writes
results/gpu.json. `make bench-gpu`.

    python benchmarks/gpu.py                          # on a GPU; takes less than ten minutes
    python benchmarks/gpu.py --platform cpu --small   # the same programs without one, as a check
    python benchmarks/gpu.py transfers step           # these parts
    python benchmarks/gpu.py --markdown               # the table as docs/gpu.md has it

All of it on one GPU, the first that `CUDA_VISIBLE_DEVICES` leaves, but for NCCL's bandwidth, which is that
between the first two. Measures nothing itself: it starts `tests/gpu/test_on_gpu*.py`, `ours/device_peer.py`,
`ours/nccl_peer.py` and `ours/device_step.py`, one after the other, each with a process group and an end of
its own, and goes on when one fails. Ends with 1 if any did.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gpu_table
import harness
from gpu_table import ERRORS_HANDLED, ERRORS_NOT_HANDLED
from rich.console import Console

from jaxpp_async.base.gpu_inventory import MEMORY_FRACTION, VISIBLE, host_gpus
from jaxpp_async.doctor import gather
from jaxpp_async.doctor.facts import Gpu
from jaxpp_async.transport.nccl.order import ENVIRONMENT as NCCL_ENVIRONMENT

HERE = Path(__file__).parent
ROOT = HERE.parent
BUDGET_S = 570.0
"""Of all programs together: what each may take adds up to no more, so that one that hangs costs only itself.
"""

GPU_TESTS = {"tests/gpu/test_on_gpu.py": 165.0, "tests/gpu/test_on_gpu_nccl.py": 85.0}
"""As `make test-gpu` runs them, and how long each file may take, in seconds."""

PYTEST = ("-m", "pytest", "-v", "-rsfE", "--color=no", "-p", "no:cacheprovider")
"""How tests are run, so that `results` can read what they print."""

TRANSFERS_S, NCCL_S, STEP_S = 30.0, 25.0, 102.0
"""What one way of sending, NCCL between two GPUs, and one of the contenders in the step, may take."""

FULL = 0.9
"""Of an actor's memory, by estimate; a first actor that runs out of it has measured nothing."""

COPIES = 8
"""Of the parameters: themselves, two moments, a microbatch's gradients and their sum, and what the optimizer
makes."""

ACTIVATION_BYTES = {2048: 260 << 20, 1024: 194 << 20}
"""Of a layer of that width, for a sequence of 1024 tokens in bfloat16: what autodiff keeps (232 and 172 MiB
on JAX 0.12; 248 and 180 on JAX 0.10, whose gelu keeps one array more), and some 12 % for what XLA adds."""

UNKNOWN_BYTES = 16 << 30
"""Taken for the memory of a GPU that nobody can be asked about."""

VARIANTS: dict[str, dict[str, str]] = {
    ERRORS_HANDLED: {},
    ERRORS_NOT_HANDLED: {"JAXPP_UCX_ERROR_HANDLING": "n"},
    "tcp, staged": {"UCX_TLS": "tcp,cuda_copy,self"},
}
"""Ways to send, and what chooses them. The first is how actors do it."""


@dataclass(frozen=True)
class Program:
    """What a part runs.

    Args:
        command: after the interpreter.
        limit_s: how long it may take at most.
        env: variables to add.
    """

    command: tuple[str, ...]
    limit_s: float
    env: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Ran:
    """What came of it.

    Args:
        code: its exit status; None: it was ended after `limit_s`.
        out, err: what it printed, until then.
    """

    code: int | None
    out: str
    err: str
    limit_s: float

    @property
    def failed(self) -> str:
        """Why it gave nothing, in words; empty if it did."""
        if self.code is None:
            return f"took longer than {self.limit_s:.0f} s"
        last = [line for line in (self.err or self.out).splitlines() if line.strip()][-1:] or ["no output"]
        return f"ended with code {self.code}: {last[0].strip()}"[:300] if self.code else ""


class Bench:
    """One run of all parts.

    Args:
        platform: `"cuda"` or `"cpu"`.
        small: sizes for a machine without a GPU.
        say: told what is going on.
        gpu: the one that all programs get, as CUDA names it; empty: what they find. memory_bytes: that it
            has; 0: not known.
        second: another one, for what takes two; empty: there is none.
    """

    def __init__(
        self,
        platform: str,
        small: bool,
        say: Callable[[str], None],
        gpu: str = "",
        memory_bytes: int = 0,
        second: str = "",
    ):
        self.platform, self.small, self.say = platform, small, say
        self.gpu, self.memory_bytes, self.second = gpu, memory_bytes, second

    def run(self, program: Program) -> Ran:
        """Run it to its end, or to that of its time."""
        env = (
            os.environ
            | {"PYTHONPATH": os.pathsep.join([str(ROOT), *_python_path()])}
            | dict(program.env or {})
        )
        if self.gpu:
            env[VISIBLE] = self.gpu  # on a host with several, actors would have one each
        child = subprocess.Popen(
            [sys.executable, *program.command],
            cwd=ROOT,
            env=env | {"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        late = False
        try:
            out, err = child.communicate(timeout=program.limit_s)
        except subprocess.TimeoutExpired:
            late = True
            _end_group(child)
            out, err = child.communicate()
        finally:
            _end_group(child)
        return Ran(None if late else child.returncode, out, err, program.limit_s)

    def figures(self, program: Program) -> dict[str, Any]:
        """The JSON that a program prints last; of one that fails, `failed` with the reason."""
        ran = self.run(program)
        lines = [line for line in ran.out.splitlines() if line.startswith("{")]
        if ran.failed or not lines:
            return {"failed": ran.failed or "printed no figures"}
        return json.loads(lines[-1])


# ---------------------------------------------------------------- parts


def tests(bench: Bench) -> dict[str, Any]:
    """The conformance suite on device memory and on NCCL, and numerics with actors that share the GPU."""
    found: dict[str, Any] = {}
    for file, limit_s in GPU_TESTS.items():
        bench.say(f"  {file}")
        command = (*PYTEST, file)
        if bench.small:
            command += ("-k", "(share_a_gpu and 2-ucx) or dtypes or abort")
        found[file] = results(bench.run(Program(command, limit_s, {"JAXPP_TEST_GPU": bench.platform})))
    return found


def results(ran: Ran) -> dict[str, Any]:
    """How many tests passed, failed and were skipped, and why; of a run that was ended, up to there."""
    outcomes = re.findall(r"(?m)^\S+::.* (PASSED|FAILED|SKIPPED|ERROR)\b", ran.out)
    found: dict[str, Any] = {"counts": {kind.lower(): n for kind, n in Counter(outcomes).items()}}
    found["why_skipped"] = sorted(set(re.findall(r"(?m)^SKIPPED \[\d+\] [^:]+(?::\d+)?: (.*)$", ran.out)))
    broken = re.findall(r"(?m)^(?:FAILED|ERROR) \S*?(test_\w+\.py\S*)", ran.out)
    under_way = re.findall(r"(?m)^(\S+::\S+) *$", ran.out)[-1:] if ran.code is None else []
    if under_way:
        found["failed"] = f"{ran.failed}, in {under_way[0].rpartition('/')[2]}"
    elif broken:
        found["failed"] = f"{len(broken)} failed: {', '.join(broken[:3])}"
    elif ran.failed and ran.code != 5:  # no test of this file is among those asked for
        found["failed"] = ran.failed
    return found


def transfers(bench: Bench) -> dict[str, Any]:
    """Two processes on one device send each other its memory, in each of the ways."""
    command: tuple[str, ...] = ("benchmarks/ours/device_peer.py", bench.platform)
    if bench.small:
        command += ("--small", "--sizes", "65536,1048576", "--pings", "50")
    found: dict[str, Any] = {}
    for name, env in VARIANTS.items():
        bench.say(f"  {name}")
        # Two processes on the device, each with part of its memory.
        shared = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3", **env}
        if bench.platform == "cpu" and "UCX_TLS" in shared:
            shared["UCX_TLS"] = "tcp,self"  # naming cuda_copy where there is no CUDA ends every link
        found[name] = bench.figures(Program(command, TRANSFERS_S, shared))
    return found


def nccl(bench: Bench) -> dict[str, Any]:
    """Two processes with a GPU each send each other its memory over NCCL."""
    if bench.platform == "cuda" and not bench.second:
        return {"skipped": "there is one GPU, and NCCL's bandwidth is that between two"}
    command: tuple[str, ...] = ("benchmarks/ours/nccl_peer.py", bench.platform)
    if bench.second:
        command += ("--other", bench.second)
    if bench.small:
        command += ("--small", "--sizes", "65536,1048576")
    return bench.figures(Program(command, NCCL_S, NCCL_ENVIRONMENT))


def step(bench: Bench) -> dict[str, Any]:
    """The step of examples/train_gpt.py, bfloat16, by two actors that share the device, and by `jax.jit` on
    it."""
    sizes = step_sizes(bench.small, bench.memory_bytes)
    found: dict[str, Any] = {"sizes": sizes}
    arguments = tuple(str(part) for name, value in sizes.items() for part in (f"--{name}", value))
    for contender in ("jit", "ours"):
        bench.say(f"  {contender}")
        stand_in = ("--stand-in",) if contender == "ours" and bench.platform == "cpu" else ()
        command = ("benchmarks/ours/device_step.py", contender, bench.platform, *stand_in, *arguments)
        found[contender] = bench.figures(Program(command, STEP_S))
    return found


def step_sizes(small: bool, gpu_bytes: int) -> dict[str, int]:
    """What fills the memory of the actor that needs most, by estimate to `FULL` of its part: the microbatches
    are as large as fit. The first of two actors has half the state and gradients, and activations of its
    layers for as many microbatches as there are stages; the second has those of one, so it, and the GPU, are
    less full."""
    if small:
        return {
            "layers": 2,
            "dim": 32,
            "head-dim": 16,
            "seq-len": 32,
            "microbatches": 4,
            "steps": 3,
            "warm": 1,
        }
    gpu_bytes = gpu_bytes or UNKNOWN_BYTES
    sizes = {"layers": 16, "dim": 2048, "head-dim": 128, "seq-len": 1024, "microbatches": 8}
    if gpu_bytes < 60 << 30:
        sizes |= {"layers": 12, "dim": 1024, "head-dim": 64}
    if gpu_bytes < 30 << 30:
        sizes |= {"layers": 8}
    fixed, sequence = step_bytes(sizes)
    room = FULL * MEMORY_FRACTION / 2 * gpu_bytes - fixed
    return sizes | {"microbatch-size": max(1, int(room / sequence)), "steps": 20, "warm": 3}


def step_bytes(sizes: Mapping[str, int]) -> tuple[float, float]:
    """What the first actor has, in bytes: whatever the microbatches are, and for each sequence of a
    microbatch."""
    fixed = COPIES * 2 * 12 * sizes["layers"] * sizes["dim"] ** 2 / 2
    return fixed, 2 * sizes["layers"] / 2 * ACTIVATION_BYTES[sizes["dim"]]


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "tests": tests,
    "transfers": transfers,
    "nccl": nccl,
    "step": step,
}
"""In this order: figures of what is wrong are worth nothing."""

# ---------------------------------------------------------------- the run


def the_one(named: Sequence[str], there: Sequence[Gpu]) -> tuple[str, Gpu | None]:
    """The first GPU that may be used: everything is about actors on one. What CUDA is to be given for it, and
    what is known of it: of a part of a GPU (MIG), nothing.

    Args:
        named: those that may be used, as `CUDA_VISIBLE_DEVICES` has them; numbers count as NVIDIA's tools
            count.
        there: all.
    """
    if not named:
        return "", None
    for gpu in there:
        if named[0] == str(gpu.index) or gpu.uuid.lower().startswith(named[0].lower()):
            return gpu.uuid, gpu
    return named[0], None


def about(platform: str, small: bool, gpu: Gpu | None) -> dict[str, Any]:
    """When, on what and with which versions."""
    driver, _, _ = gather.find_gpus()
    versions = gather.find_packages()
    if driver is not None:
        versions["driver"] = f"{driver.version} (CUDA {'.'.join(map(str, driver.cuda))})"
    device = gpu.name if gpu is not None else platform
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": date, "platform": platform, "small": small, "device": device, "versions": versions}


def _python_path() -> list[str]:
    return [path] if (path := os.environ.get("PYTHONPATH")) else []


def _end_group(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small sizes, few rounds: to see that it runs")
    parser.add_argument("--markdown", action="store_true", help="print the table for docs/gpu.md")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    named, there = (host_gpus(os.environ), gather.find_gpus()[1]) if options.platform == "cuda" else ((), ())
    name, gpu = the_one(named, there)
    memory_bytes = gpu.memory_bytes if gpu is not None else 0
    bench = Bench(
        options.platform, options.small, console.print, name, memory_bytes, the_one(named[1:], there)[0]
    )
    found: dict[str, Any] = {"about": about(options.platform, options.small, gpu)}
    begin = time.monotonic()
    for name in options.parts or PARTS:
        console.print(f"{name} ...")
        found[name] = PARTS[name](bench)
    found["took_s"] = round(time.monotonic() - begin, 1)
    print(gpu_table.markdown(found)) if options.markdown else console.print(gpu_table.table(found))
    # the figures of a stand-in are nobody's results
    name = "gpu" if options.platform == "cuda" else "gpu-on-cpu"
    console.print(f"written to {harness.write(name, found)}, after {found['took_s']:.0f} s")
    failed = gpu_table.failures(found)
    for text in failed:
        console.print(f"failed: {text}", markup=False, soft_wrap=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
