"""bench: measures the project, alone or beside the peers, and writes `results/latest.json`; prints what
became of the targets. `make bench`, `make bench-peers`.

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
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import harness
import plan_tables
import targets
from parts import PARTS, Context
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rounds import Contender

LATEST = harness.RESULTS / "latest.json"
sys.path.insert(0, str(Path(__file__).parent / "peers"))


PEERS_PYTHON = Path(__file__).parent.parent / ".venv-peers" / "bin" / "python"


def others(part: str, with_peers: bool) -> Sequence[Contender]:
    """The contenders beside ours: those of plain JAX always, the peers' where they are asked for."""
    import contenders  # peers/contenders.py

    return contenders.contenders(part, with_peers=with_peers)


Keep = Callable[[str, Any, dict[str, Any]], None]
"""Takes a part's name, its figures, and when and where they were taken."""


async def measure(names: Sequence[str], with_peers: bool, console: Console, keep: Keep) -> list[str]:
    """Run parts one after the other. Whatever is wrong with one is told, and the others are measured all the
    same.

    Args:
        names: of parts.
        with_peers: beside the peers.
        console: what is being measured is printed here; on a terminal also how far it is.
        keep: takes each part's figures as soon as they are there.

    Returns:
        The parts that failed.
    """
    failed = []
    for name in names:
        part = PARTS[name]
        longer = ", longer beside the peers" if with_peers and others(name, True) else ""
        console.print(f"[bold]{name}[/]: {part.what} (may take {part.may_take}{longer})")
        start, load = time.perf_counter(), round(os.getloadavg()[0], 1)
        with console.status(name) as status:
            context = Context(
                others=lambda part: others(part, with_peers),
                tell=lambda line: console.print(f"  {line}", style="yellow", markup=False),
                progress=lambda line, name=name: status.update(f"{name}: {line}"),
            )
            try:
                figures = await part.measure(context)
            except Exception as error:  # of whatever kind: it must not cost the figures of the others
                console.print(f"  failed: {type(error).__name__}: {error}", style="red", markup=False)
                failed.append(name)
                continue
        console.print(f"  {time.perf_counter() - start:.0f} s")
        keep(name, figures, {"date": _now(), "load": load, "commit": harness.machine()["commit"]})
    return failed


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new figures, and the old ones of parts that were not measured; `taken` says when each was."""
    taken = {**old.get("taken", {}), **new.get("taken", {})}
    head = {"machine": harness.machine(), "date": _now()}
    return head | {key: _rounded(v) for key, v in (old | new).items() if key not in head} | {"taken": taken}


def table(figures: dict[str, Any]) -> Table:
    """Limit, wish, what was measured, and whether that is enough."""
    found = Table("what", "limit", "want", "measured", "", title=f"jaxpp-async, {figures.get('date', '')}")
    for column in found.columns[1:4]:
        column.justify = "right"
    colour = {"wish met": "bold green", "met": "green", "missed": "red", "not measured": "dim"}
    for row in targets.rows(figures):
        target = row.target
        sign = "≥ " if target.at_least else "< " if target.strictly else "≤ "
        wish = "" if row.wish is None else _shown(row.wish, target.unit)
        value = "" if row.value is None else _shown(row.value, target.unit)
        state = f"[{colour[row.state]}]{row.state}[/]"
        what = f"{target.what} ({row.note})" if row.note else target.what
        found.add_row(what, sign + _shown(row.limit, target.unit), wish, value, state)
    return found


OWN = {
    "tiny_step": ("ms", "ours"),
    "big_step": ("ms", "ours"),
    "overlap": ("ms", ""),
    "rpc_us": ("us", "ours_two_actors"),
}
"""Parts with contenders: the unit of their figures, and whose ratios to the others are shown."""


def medians(figures: dict[str, Any]) -> Table:
    """Return the figures of each contender, with the quartiles' distance, or why it has none."""
    found = Table("part", "contender", "median", "spread", "ours takes", title="contenders")
    for column in found.columns[2:]:
        column.justify = "right"
    for part, (unit, own) in OWN.items():
        taken = figures.get(part, {})
        failed = taken.get("failed", {})
        for name, spread in taken.get("spread", {}).items():
            ratio = taken.get("ratio", {}).get(f"{own}/{name}")
            shown = "" if ratio is None else f"{ratio:.3g}x"
            note = f" (failed later: {_shortly(failed[name])})" if name in failed else ""
            apart = "" if spread is None else f"{spread:.2g} {unit}"
            found.add_row(part, escape(name + note), f"{taken[name]:.4g} {unit}", apart, shown)
        for name, why in failed.items():
            if name not in taken.get("spread", {}):
                found.add_row(
                    part, escape(f"{name}: not available: {_shortly(why)}"), "", "", "", style="yellow"
                )
    return found


def _shortly(why: str) -> str:
    """A failure's last line, which says the most."""
    line = why.rpartition(" | ")[2]
    return line if len(line) <= 100 else line[:97] + "..."


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


async def _until_stopped(names: Sequence[str], with_peers: bool, console: Console, keep: Keep) -> list[str]:
    task = asyncio.current_task()
    assert task is not None
    # The default would end this process alone and leave the contenders to themselves.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await measure(names, with_peers, console, keep)


def _keep(name: str, figures: Any, taken: dict[str, Any]) -> None:
    """Into the results, at once: a run that is stopped keeps what it has measured."""
    found = merged(_latest(), {name: figures, "taken": {name: taken}})
    # Whole or not at all.
    new = LATEST.with_suffix(".new")
    new.write_text(json.dumps(found, indent=1) + "\n")
    new.replace(LATEST)


def _latest() -> dict[str, Any]:
    return json.loads(LATEST.read_text()) if LATEST.exists() else {}


def _tell_what_is_old(figures: dict[str, Any], measured: Sequence[str], console: Console) -> None:
    for name, taken in figures.get("taken", {}).items():
        if name not in measured:
            where = f"{taken['date']}, commit {taken['commit']}"
            console.print(f"{name}: not measured now; its figures are of {where}", style="dim", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument(
        "--peers", action="store_true", help="beside the peers (make bench-peers sets them up)"
    )
    parser.add_argument("--show", action="store_true", help="print the last results; measure nothing")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    if args.peers and not PEERS_PYTHON.exists():
        parser.error(f"--peers needs {PEERS_PYTHON.parent.parent.name}, which `make bench-peers` makes")
    console = Console(highlight=False)
    failed: list[str] = []
    if not args.show:
        names = list(args.parts or PARTS)
        failed = asyncio.run(_until_stopped(names, args.peers, console, _keep))
        _tell_what_is_old(_latest(), [name for name in names if name not in failed], console)
    figures = _latest()
    console.print(medians(figures))
    for shown in plan_tables.tables(figures.get("plan", {})):
        console.print(shown)
    console.print(table(figures))
    if failed:
        console.print(f"failed, and left as they were: {', '.join(failed)}", style="red")


if __name__ == "__main__":
    main()
