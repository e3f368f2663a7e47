"""gpu: everything that wants a GPU, in one go: tests, transfers, a training step; prints one table, writes
results/gpu.json. `make bench-gpu`.

    python benchmarks/gpu.py                          # on a GPU; takes less than ten minutes
    python benchmarks/gpu.py --platform cpu --small   # the same programs where there is none, to see that they run
    python benchmarks/gpu.py transfers step           # these parts

Measures nothing itself: it starts `tests/test_on_gpu*.py`, `ours/device_peer.py` and `ours/device_step.py`, one after
the other, each with a process group and an end of its own, and goes on when one fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import harness
from rich.console import Console
from rich.markup import escape
from rich.table import Table

HERE = Path(__file__).parent
ROOT = HERE.parent
BUDGET_S = 570.0
"""Of all parts together. A part gets what is left of it at most."""

GPU_TESTS = ("tests/test_on_gpu.py", "tests/test_on_gpu_nccl.py")
"""As `make test-gpu` runs them."""

PACKAGES = (
    "jaxpp-async",
    "jax",
    "jaxlib",
    "ucxx-cu13",
    "ucxx-cu12",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "nvidia-nccl-cu13",
)

VARIANTS: dict[str, dict[str, str]] = {
    "error handling on": {},
    "error handling off": {"JAXPP_UCX_ERROR_HANDLING": "n"},
    "tcp, staged": {"UCX_TLS": "tcp,cuda_copy,self"},
}
"""Ways to send, and what chooses them. The first is how actors do it."""


@dataclass(frozen=True)
class Program:
    """What a part runs.

    Args:
        command: after the interpreter.
        env: variables to add.
        limit_s: how long it may take at most.
    """

    command: tuple[str, ...]
    limit_s: float
    env: Mapping[str, str] | None = None


class Failed(Exception):
    """A program did not give its figures; says why."""


class Bench:
    """One run of all parts.

    Args:
        platform: `"cuda"` or `"cpu"`.
        small: sizes for a machine without a GPU.
        console: progress goes here.
    """

    def __init__(self, platform: str, small: bool, console: Console):
        self.platform, self.small, self.console = platform, small, console
        self._end_s = time.monotonic() + BUDGET_S

    def run(self, program: Program) -> str:
        """What it printed.

        Raises:
            Failed: it failed, or took too long.
        """
        limit_s = min(program.limit_s, self._end_s - time.monotonic())
        if limit_s <= 5:
            raise Failed(f"no time left of {BUDGET_S:.0f} s")
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *_python_path()])} | dict(program.env or {})
        child = subprocess.Popen(
            [sys.executable, *program.command],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise Failed(f"took longer than {limit_s:.0f} s") from None
        finally:
            _end_group(child)
        if child.returncode:
            last = [line for line in (err or out).splitlines() if line.strip()][-1:] or ["no output"]
            raise Failed(f"ended with code {child.returncode}: {last[0].strip()}"[:300])
        return out

    def figures(self, program: Program) -> dict[str, Any]:
        """The JSON that a program prints last.

        Raises:
            Failed: as `run`.
        """
        lines = [line for line in self.run(program).splitlines() if line.startswith("{")]
        if not lines:
            raise Failed("printed no figures")
        return json.loads(lines[-1])


# ---------------------------------------------------------------- parts


def tests(bench: Bench) -> dict[str, Any]:
    """The conformance suite on device memory and on NCCL, and numerics with actors that share the GPU."""
    command = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *GPU_TESTS)
    if bench.small:
        command += ("-k", "share_a_gpu and 2 or dtypes or abort")
    try:
        out = bench.run(Program(command, 240.0, {"JAXPP_TEST_GPU": bench.platform}))
    except Failed as error:
        return {"failed": str(error)}
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", out.splitlines()[-1])}
    skipped = sorted({line.split(": ", 1)[-1] for line in out.splitlines() if line.startswith("SKIPPED")})
    return counts | {"why_skipped": skipped}


def transfers(bench: Bench) -> dict[str, Any]:
    """Two processes on one device send each other its memory, in each of the ways."""
    command: tuple[str, ...] = ("benchmarks/ours/device_peer.py", bench.platform)
    if bench.small:
        command += ("--small", "--sizes", "65536,1048576", "--pings", "50")
    found: dict[str, Any] = {}
    for name, env in VARIANTS.items():
        bench.console.print(f"  {name}")
        # Two processes on the device, each with half of what is left to take.
        shared = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3", **env}
        if bench.platform == "cpu" and "UCX_TLS" in shared:
            shared["UCX_TLS"] = "tcp,self"  # naming cuda_copy where there is no CUDA ends every link
        try:
            found[name] = bench.figures(Program(command, 60.0, shared))
        except Failed as error:
            found[name] = {"failed": str(error)}
    return found


def step(bench: Bench) -> dict[str, Any]:
    """The step of examples/train_gpt.py, bfloat16, by two actors that share the device, and by `jax.jit` on it."""
    sizes = _step_sizes(bench)
    found: dict[str, Any] = {"sizes": sizes}
    arguments = tuple(str(part) for name, value in sizes.items() for part in (f"--{name}", value))
    for contender in ("jit", "ours"):
        bench.console.print(f"  {contender}")
        stand_in = ("--stand-in",) if contender == "ours" and bench.platform == "cpu" else ()
        command = ("benchmarks/ours/device_step.py", contender, bench.platform, *stand_in, *arguments)
        try:
            found[contender] = bench.figures(Program(command, 200.0))
        except Failed as error:
            found[contender] = {"failed": str(error)}
    return found


def _step_sizes(bench: Bench) -> dict[str, int]:
    """As large as the device takes: two stages' states, and activations of as many microbatches as there are stages."""
    if bench.small:
        return {"layers": 2, "dim": 32, "head-dim": 16, "seq-len": 32, "microbatches": 4, "steps": 3, "warm": 1}
    large = {"layers": 16, "dim": 2048, "head-dim": 128, "seq-len": 1024, "microbatches": 8, "microbatch-size": 4}
    if _gpu_bytes() < 60 << 30:
        large |= {"layers": 12, "dim": 1024, "head-dim": 64}
    if _gpu_bytes() < 20 << 30:
        large |= {"layers": 8, "microbatch-size": 2}
    return large | {"steps": 20, "warm": 3}


def _gpu_bytes() -> int:
    """Memory of the first GPU; 0: not known."""
    try:
        import pynvml
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total)
    except pynvml.NVMLError:
        return 0


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {"transfers": transfers, "step": step, "tests": tests}
"""In this order: should time run out, the tests can be run alone (`make test-gpu`)."""

# ---------------------------------------------------------------- showing


def table(found: Mapping[str, Any]) -> Table:
    """All figures."""
    about = found["about"]
    head = f"{about['device']}, {about['date'][:10]}, JAX {about['versions'].get('jax', '?')}"
    shown = Table(title=head, title_justify="left", box=None, pad_edge=False)
    shown.add_column("what", no_wrap=True)
    shown.add_column("figure", justify="right", no_wrap=True)
    shown.add_column("beside")
    for row in [*_transfer_rows(found.get("transfers", {})), *_step_rows(found.get("step", {}))]:
        shown.add_row(*map(escape, row))
    if (ran := found.get("tests")) is not None:
        text = ran.get("failed") or ", ".join(f"{n} {kind}" for kind, n in ran.items() if isinstance(n, int))
        shown.add_row("tests", escape(text), escape("; ".join(ran.get("why_skipped", ()))))
    return shown


def _transfer_rows(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    rows = []
    for name, figures in found.items():
        if "failed" in figures:
            rows.append((name, "-", figures["failed"]))
            continue
        rows.append((f"{name}: half round trip, 8 B", f"{figures['half_rtt_us']:.1f} us", ", ".join(figures["routes"])))
        for size, rate in figures["gb_s"].items():
            beside = f"a copy on the device: {figures['copy_gb_s'][size]:.1f} GB/s"
            rows.append((f"{name}: {_size(int(size))}", f"{rate:.2f} GB/s", beside))
        ended = figures["abort"]
        if "ms" in ended:
            rows.append((f"{name}: abort of four of the largest", f"{ended['ms']:.1f} ms", ", ".join(ended["ended"])))
        else:
            rows.append((f"{name}: abort", "-", ended["failed"]))
    return rows


def _step_rows(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    rows, medians = [], {}
    for name in ("jit", "ours"):
        figures = found.get(name, {})
        if "ms" not in figures:
            rows.append((f"step, {name}", "-", figures.get("failed", "not measured")))
            continue
        medians[name] = statistics.median(figures["ms"])
        sizes = found["sizes"]
        tokens = sizes["microbatches"] * sizes.get("microbatch-size", 2) * sizes["seq-len"]
        rows.append((f"step, {name}", f"{medians[name]:.1f} ms", f"{tokens / medians[name] * 1e3:,.0f} tokens/s"))
    if len(medians) == 2:
        losses = f"last losses {found['ours']['losses'][-1]:.4f} and {found['jit']['losses'][-1]:.4f}"
        rows.append(("step, ours to jit", f"{medians['ours'] / medians['jit']:.2f}x", losses))
    if "gaps" in (ours := found.get("ours", {})):
        gaps = ours["gaps"]
        between = gaps["between_us"]
        rows.append(("between tasks of an actor", f"{between['median']:.0f} us", f"p90 {between['p90']:.0f} us"))
        bill = ", ".join(f"{name} {ms:.1f}" for name, ms in gaps["bill_ms"].items())
        rows.append(("where a step's time goes", f"{gaps['efficiency']:.0%}", f"of the schedule's bound; ms: {bill}"))
    return rows


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"


# ---------------------------------------------------------------- the run


def about(platform: str, small: bool, found: Mapping[str, Any]) -> dict[str, Any]:
    """When, on what and with which versions."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    measured = [f for f in found.get("transfers", {}).values() if "device" in f]
    device, cuda = (measured[0]["device"], measured[0]["cuda"]) if measured else (platform, "")
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": date, "platform": platform, "small": small, "device": device, "cuda": cuda, "versions": versions}


def _python_path() -> list[str]:
    return [path] if (path := os.environ.get("PYTHONPATH")) else []


def _end_group(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small sizes, few rounds: to see that it runs")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    bench = Bench(options.platform, options.small, console)
    found: dict[str, Any] = {}
    for name in options.parts or PARTS:
        console.print(f"{name} ...")
        found[name] = PARTS[name](bench)
    found["about"] = about(options.platform, options.small, found)
    console.print(table(found))
    name = "gpu" if options.platform == "cuda" else "gpu-on-cpu"  # the figures of a stand-in are nobody's results
    console.print(f"written to {harness.write(name, found)}")
    return int(any("failed" in str(figures.keys()) for figures in _all(found)))


def _all(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Everything that may have failed."""
    inner = [*found.get("transfers", {}).values(), found.get("tests", {}), found.get("step", {})]
    return [*inner, *(found.get("step", {}).get(name, {}) for name in ("ours", "jit"))]


if __name__ == "__main__":
    sys.exit(main())
