"""bench: measures the project, alone or beside the peers, and writes `results/latest.json`; prints what became of the
targets. `make bench`, `make bench-peers`.

    python benchmarks/bench.py                      # all parts, and what runs in this environment
    python benchmarks/bench.py tiny_step big_step   # these parts; the others keep their figures
    python benchmarks/bench.py --peers              # beside the peers, from their environment
    python benchmarks/bench.py --show               # the last results
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import harness
import targets
from parts import PARTS, Context
from rich.console import Console
from rich.table import Table
from rounds import Contender, ContenderError

LATEST = harness.RESULTS / "latest.json"
sys.path.insert(0, str(Path(__file__).parent / "peers"))


def others(part: str, with_peers: bool) -> Sequence[Contender]:
    """The contenders beside ours: those of plain JAX always, the peers' where they are asked for."""
    import contenders  # peers/contenders.py

    return contenders.contenders(part, with_peers=with_peers)


async def measure(names: Sequence[str], with_peers: bool, console: Console) -> dict[str, Any]:
    """Run parts one after the other; one that fails is told and left out."""
    context = Context(lambda part: others(part, with_peers), lambda line: console.print(f"  {line}", style="yellow"))
    found: dict[str, Any] = {}
    for name in names:
        start = time.perf_counter()
        console.print(f"{name} ...", end="")
        load = round(os.getloadavg()[0], 1)
        try:
            figures = await PARTS[name](context)
        except (ContenderError, OSError) as error:
            console.print(f" failed: {error}", style="red")
            continue
        console.print(f" {time.perf_counter() - start:.0f} s")
        found[name] = figures
        found.setdefault("taken", {})[name] = {"date": _now(), "load": load, "commit": harness.machine()["commit"]}
    return found


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new figures, and the old ones of parts that were not measured; `taken` says when each was."""
    taken = {**old.get("taken", {}), **new.get("taken", {})}
    return {"machine": harness.machine(), "date": _now(), **_rounded(old | new), "taken": taken}


def table(figures: dict[str, Any]) -> Table:
    """Limit, wish, what was measured, and whether that is enough."""
    found = Table("what", "limit", "want", "measured", "", title=f"jaxpp-async, {figures.get('date', '')}")
    for column in found.columns[1:4]:
        column.justify = "right"
    colour = {"wish met": "bold green", "met": "green", "missed": "red", "not measured": "dim"}
    for row in targets.rows(figures):
        target = row.target
        sign = "≥ " if target.at_least else "< " if target.strictly else "≤ "
        wish = "" if target.wish is None else _shown(target.wish, target.unit)
        value = "" if row.value is None else _shown(row.value, target.unit)
        state = f"[{colour[row.state]}]{row.state}[/]"
        found.add_row(target.what, sign + _shown(target.limit, target.unit), wish, value, state)
    return found


def medians(figures: dict[str, Any]) -> Table:
    """What was measured of each contender, in ms, with the distance of the quartiles."""
    found = Table("step", "contender", "median ms", "spread ms", "ours takes", title="contenders")
    for column in found.columns[2:]:
        column.justify = "right"
    for part in ("tiny_step", "big_step", "overlap"):
        own = figures.get(part, {})
        for name, spread in own.get("spread", {}).items():
            ratio = own.get("ratio", {}).get(f"ours/{name}")
            shown = "" if ratio is None else f"{ratio:.3g}x"
            found.add_row(part, name, f"{own[name]:.4g}", f"{spread:.2g}", shown)
    return found


def _shown(value: float, unit: str) -> str:
    if unit == "x":
        return f"{value:.2f}x"
    return f"{value:.3g} {unit}"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _rounded(value: Any) -> Any:
    """To five significant digits, which is more than anything here is good for."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value


async def _until_stopped(names: Sequence[str], with_peers: bool, console: Console) -> dict[str, Any]:
    task = asyncio.current_task()
    assert task is not None
    # The default would end this process alone and leave the contenders to themselves.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await measure(names, with_peers, console)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--peers", action="store_true", help="beside the peers (make bench-peers sets them up)")
    parser.add_argument("--show", action="store_true", help="print the last results; measure nothing")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    console = Console(highlight=False)
    figures = json.loads(LATEST.read_text()) if LATEST.exists() else {}
    if not args.show:
        new = asyncio.run(_until_stopped(args.parts or list(PARTS), args.peers, console))
        figures = merged(figures, new)
        LATEST.write_text(json.dumps(figures, indent=1) + "\n")
    console.print(medians(figures))
    console.print(table(figures))


if __name__ == "__main__":
    main()
