"""gpu_table: what `gpu.py` found in, its rows, what failed and what to choose out. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from rich.markup import escape
from rich.table import Table

ERRORS_HANDLED, ERRORS_NOT_HANDLED = "error handling on", "error handling off"

WORTH = 0.9
"""As much of the bandwidth without UCX's error handling as it may cost: without it an abort ends nothing."""

Row: TypeAlias = tuple[str, str, str]
"""What, figure, beside."""

_SHOWN = ("jaxpp-async", "jax", "driver", "ucxx-", "libucx-", "cupy-", "nvidia-nccl-", "nccl4py", "jax-cuda")


def table(found: Mapping[str, Any]) -> Table:
    """All figures."""
    shown = Table(title=escape(title(found["about"])), title_justify="left", box=None, pad_edge=False)
    shown.caption, shown.caption_justify = escape(versions(found["about"])), "left"
    shown.add_column("what", no_wrap=True)
    shown.add_column("figure", justify="right", no_wrap=True)
    shown.add_column("beside")
    for row in rows(found):
        shown.add_row(*map(escape, row))
    return shown


def markdown(found: Mapping[str, Any]) -> str:
    """All figures, as docs/gpu.md has them."""
    lines = [
        f"{title(found['about'])}; {versions(found['about'])}.",
        "",
        "| what | figure | beside |",
        "|---|---|---|",
    ]
    return "\n".join(
        [*lines, *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows(found))]
    )


def title(about: Mapping[str, Any]) -> str:
    """Device and date."""
    return f"{about['device']}, {about['date'][:10]}" + (", small sizes" if about["small"] else "")


def versions(about: Mapping[str, Any]) -> str:
    """Of everything that a figure may depend on."""
    return ", ".join(
        f"{name} {version}" for name, version in about["versions"].items() if name.startswith(_SHOWN)
    )


def rows(found: Mapping[str, Any]) -> list[Row]:
    """All figures, in the order of the parts."""
    return [
        *_test_rows(found.get("tests", {})),
        *_transfer_rows(found.get("transfers", {})),
        *([choice(found["transfers"])] if "transfers" in found else []),
        *_nccl_rows(found.get("nccl", {})),
        *_step_rows(found.get("step", {})),
    ]


def failures(found: Mapping[str, Any]) -> list[str]:
    """What failed, wherever it stands, with where that is."""
    return list(_failures("", found))


def _failures(where: str, found: Mapping[str, Any]) -> Iterator[str]:
    if "failed" in found:
        yield f"{where}: {found['failed']}"
    for name, inner in found.items():
        if isinstance(inner, Mapping):
            yield from _failures(f"{where}, {name}" if where else name, inner)


def choice(found: Mapping[str, Any]) -> Row:
    """Whether to keep UCX's error handling on, by what it costs and what an abort does with it."""
    name, on, off = "UCX's error handling", found.get(ERRORS_HANDLED, {}), found.get(ERRORS_NOT_HANDLED, {})
    if "gb_s" not in on or "gb_s" not in off:
        return name, "not decided", "both ways have to be measured"
    if "cuda_ipc" in off["routes"] and "cuda_ipc" not in on["routes"]:
        return name, "switch off", f"with it there is no cuda_ipc; {_WITHOUT}"
    large = [size for size in on["gb_s"] if int(size) >= 1 << 20]
    ratios = {size: on["gb_s"][size] / off["gb_s"][size] for size in large}
    size = min(ratios, key=lambda size: ratios[size])
    latency = on["half_rtt_us"] / off["half_rtt_us"]
    cost = (
        f"{ratios[size]:.2f}x the bandwidth without ({_size(int(size))}), {latency:.2f}x the half round trip"
    )
    if "ms" not in on["abort"]:
        return name, "look again", f"{cost}, and yet an abort does not end transfers: {on['abort']['failed']}"
    cost = f"{cost}; an abort takes {on['abort']['ms']:.1f} ms"
    return (name, "keep on", cost) if ratios[size] >= WORTH else (name, "look again", f"{cost}; {_WITHOUT}")


_WITHOUT = (
    "without it (JAXPP_UCX_ERROR_HANDLING=n) nothing ends a transfer, and an abort has to end processes"
)


def _test_rows(found: Mapping[str, Any]) -> Iterator[Row]:
    for file, ran in found.items():
        counts = ", ".join(f"{n} {kind}" for kind, n in ran["counts"].items()) or "none ran"
        yield (
            file.rpartition("/")[2],
            counts,
            "; ".join([*filter(None, [ran.get("failed")]), *ran["why_skipped"]]),
        )


def _transfer_rows(found: Mapping[str, Any]) -> Iterator[Row]:
    for name, figures in found.items():
        if "failed" in figures:
            yield name, "-", figures["failed"]
            continue
        yield (
            f"{name}: half round trip, 8 B",
            f"{figures['half_rtt_us']:.1f} us",
            ", ".join(figures["routes"]),
        )
        for size, rate in figures["gb_s"].items():
            beside = f"a copy on the device: {figures['copy_gb_s'][size]:.1f} GB/s"
            yield f"{name}: {_size(int(size))}", f"{rate:.2f} GB/s", beside
        ended = figures["abort"]
        if "ms" in ended:
            yield f"{name}: abort of four of the largest", f"{ended['ms']:.1f} ms", ", ".join(ended["ended"])
        else:
            yield f"{name}: abort", "-", ended.get("failed") or ended["not_tried"]


def _nccl_rows(found: Mapping[str, Any]) -> Iterator[Row]:
    name = "NCCL between two GPUs"
    if why := found.get("skipped") or found.get("failed"):
        yield name, "-", why
    for size, rate in found.get("gb_s", {}).items():
        yield f"{name}: {_size(int(size))}", f"{rate:.2f} GB/s", f"NCCL {found['nccl']}"


def _step_rows(found: Mapping[str, Any]) -> Iterator[Row]:
    medians: dict[str, float] = {}
    for name in ("jit", "ours") if found else ():
        figures = found.get(name, {})
        if "ms" not in figures:
            yield f"step, {name}", "-", figures.get("failed", "not measured")
            continue
        medians[name] = statistics.median(figures["ms"])
        sizes = found["sizes"]
        tokens = sizes["microbatches"] * sizes.get("microbatch-size", 2) * sizes["seq-len"]
        beside = f"{tokens / medians[name] * 1e3:,.0f} tokens/s; compiled in {figures['compile_s']:.1f} s"
        yield f"step, {name}", f"{medians[name]:.1f} ms", beside
    if len(medians) == 2:
        losses = f"last losses {found['ours']['losses'][-1]:.4f} and {found['jit']['losses'][-1]:.4f}"
        yield "step, ours to jit", f"{medians['ours'] / medians['jit']:.2f}x", losses
    ours = found.get("ours", {})
    if "gaps" in ours:
        yield from _gap_rows(ours["gaps"])
    for text in ours.get("staged", ()):
        yield "through host memory", "yes", text


def _gap_rows(gaps: Mapping[str, Any]) -> Iterator[Row]:
    between = gaps["between_us"]
    yield (
        "between tasks of an actor",
        f"{between['median']:.0f} us",
        f"p90 {between['p90']:.0f} us (timeline)",
    )
    bill = ", ".join(f"{name} {ms:.1f}" for name, ms in gaps["bill_ms"].items())
    yield "where a step's time goes", f"{gaps['efficiency']:.0%}", f"of the schedule's bound; ms: {bill}"


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"
