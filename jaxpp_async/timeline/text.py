"""text: a timeline's numbers in, a page for people out."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from jaxpp_async.timeline.bill import Bill
from jaxpp_async.timeline.shares import Shares

_ITEMS = (
    ("queue", "until the first actor took it up"),
    ("compute", "all tasks, shared evenly by the actors"),
    ("imbalance", "the busiest actor computes more than that"),
    ("schedule", "tasks wait for others: the bubble"),
    ("transfer", "data was on its way"),
    ("start", "an actor began, or had its arguments, later than the first"),
    ("dispatch", "everything was there, and the next thing had not begun"),
    ("reply", "from the last instruction until the controller knew"),
)


def title(step: int, name: str, duration_s: float, num_actors: int, clock_error_s: float) -> str:
    """The first line."""
    clocks = f", clocks within {_time(clock_error_s)}" if clock_error_s else ""
    plural = "s" if num_actors != 1 else ""
    return f"step {step} of {name!r}: {_time(duration_s)} on {num_actors} actor{plural}{clocks}"


def shares_table(rows: Sequence[Shares]) -> str:
    """Where each actor's time went, in parts of what its first cell says: from the first actor's start to the end."""
    span_s = rows[0].duration_s if rows else 0.0
    header = (f"of {_time(span_s)}", "computing", "waiting", "transfers", "dispatch", "idle")
    return _table(
        header,
        ((f"actor {s.actor}", *(_share(x, s.duration_s) for x in _five(s))) for s in rows),
    )


def tasks_table(rows: Iterable[tuple[str, int, float, float]]) -> str:
    """Kind of task, how often, median and sum of its times."""
    header = ("task", "runs", "median", "together")
    return _table(header, ((kind, str(n), _time(median), _time(total)) for kind, n, median, total in rows))


def bill_table(bill: Bill) -> str:
    """The bill, an item a line."""
    rows = []
    for item, why in _ITEMS:
        seconds = getattr(bill, f"{item}_s")
        rows.append((item, _time(seconds), _share(seconds, bill.total_s), why))
    allowed = f"{_time(bill.bound_s)} (compute, imbalance, schedule) at best"
    took = f"{_time(bill.span_s)} taken (all but queue and reply)"
    rows.append(
        ("", _time(bill.total_s), "100%", f"{bill.efficiency:.0%} of what the schedule allows: {allowed}, {took}")
    )
    return _table(("bill", "time", "share", ""), rows, left=(0, 3))


def _five(s: Shares) -> tuple[float, float, float, float, float]:
    return s.compute_s, s.wait_s, s.transfer_s, s.dispatch_s, s.idle_s


def _share(part_s: float, whole_s: float) -> str:
    return f"{round(100 * part_s / whole_s) + 0 if whole_s > 0 else 0}%"


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if abs(seconds) * scale >= 0.9995:
            return f"{seconds * scale:.2f} {unit}"
    return f"{seconds * 1e6:.0f} us" if abs(seconds) >= 0.5e-6 else "0"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], left: tuple[int, ...] = (0,)) -> str:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for k, name in enumerate(header):
        table.add_column(name, justify="left" if k in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=200, color_system=None, highlight=False, markup=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().split("\n"))
