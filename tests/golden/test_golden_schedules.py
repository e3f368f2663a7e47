"""The order of every built-in schedule, as the grid in `schedules/`; `make golden` rewrites them."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpp_async.schedules import (
    DualPipeV,
    Eager1F1B,
    GPipe,
    Interleaved1F1B,
    LoopedBFS,
    Std1F1B,
    VHalf,
    VMin,
    ZeroBubbleH1,
    ZeroBubbleH2,
    ZeroBubbleV,
    format_grid,
    resolve,
)

STAGES = {
    GPipe: 4,
    Std1F1B: 4,
    Eager1F1B: 4,
    Interleaved1F1B: 8,
    LoopedBFS: 8,
    ZeroBubbleH1: 4,
    ZeroBubbleH2: 4,
    ZeroBubbleV: 8,
    DualPipeV: 8,
    VHalf: 8,
    VMin: 8,
}


@pytest.mark.parametrize("actors", [4, 2])
@pytest.mark.parametrize(("cls", "stages"), STAGES.items())
def test_order(cls, stages, actors, request):
    rows = resolve(cls(stages), num_stages=stages, num_microbatches=8, num_actors=actors)
    name = f"{cls.__name__.lower()}_{stages}stages_{actors}actors_8microbatches.txt"
    path = Path(__file__).parent / "schedules" / name
    text = format_grid(rows) + "\n"
    if request.config.getoption("--golden", default=False):
        path.write_text(text)
    assert text == path.read_text()
