"""harness: what every benchmark shares: timing on one core, medians, growth, and results as JSON. Measures no
product code itself.

A benchmark is a program of this folder. It calls `measure` or `Stopwatch` for its figures and `write` at the
end.
"""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass
class Stopwatch:
    """CPU seconds of this process, lap by lap.

    CPU time and not the wall's: other programs on the machine then cost a figure little, and what several
    threads compute counts several times, so that it reads as time on one core.
    """

    laps: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.process_time)

    def lap(self, name: str) -> None:
        """End the part `name`."""
        now = time.process_time()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now


def measure(run: Callable[[Callable[[str], None]], Any], times: int) -> list[dict[str, float]]:
    """Run something several times, each from a clean heap.

    Args:
        run: takes what to call at the end of each of its parts.

    Returns:
        One dict a run: part to CPU seconds.
    """
    found = []
    for _ in range(times):
        gc.collect()
        watch = Stopwatch()
        run(watch.lap)
        found.append(watch.laps)
    return found


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each part."""
    return {name: statistics.median(r[name] for r in runs) for name in runs[0]}


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The p of the best fit `seconds = c * size ** p`, by least squares of logarithms. 1 is linear growth."""
    x, y = [math.log(s) for s in sizes], [math.log(max(t, 1e-9)) for t in seconds]
    slope, _ = statistics.linear_regression(x, y)
    return slope


def machine() -> dict[str, Any]:
    """Where figures were taken, as far as it matters to read them."""
    import jax

    model = next((m for m in _cpu_lines("model name")), platform.machine())
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "commit": _commit(),
    }


def _cpu_lines(name: str) -> list[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return [line.split(":", 1)[1].strip() for line in lines if line.startswith(name)]


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    except OSError:  # there is no git here
        return "unknown"
    return done.stdout.strip() or "unknown"


def write(name: str, figures: dict[str, Any]) -> Path:
    """Keep a benchmark's figures, with the machine they were taken on, as `results/NAME.json`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **figures}, indent=1) + "\n")
    return path


def rounded(values: dict[str, float]) -> dict[str, float]:
    """To a tenth of a millisecond."""
    return {name: round(v, 4) for name, v in values.items()}
