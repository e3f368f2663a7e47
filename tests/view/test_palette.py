"""Tests of `view/palette.py`: people with and without colour blindness can tell the kinds apart."""

from itertools import combinations

import numpy as np
import pytest

from jaxpp_async.view.drawing import CELL_KINDS
from jaxpp_async.view.palette import CELL_TEXT, DARK, INKS, LIGHT, USES

SIMULATED = {
    "none": np.eye(3),
    # Machado, Oliveira and Fernandes, 2009: severity 1.0, for linear RGB.
    "protan": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "deutan": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "tritan": np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]),
}


def linear(colour: str) -> np.ndarray:
    """Return a colour such as `"#56b4e9"` as linear RGB, from 0 to 1."""
    rgb = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """Return linear RGB as CIE L*a*b*, in which distances are about those that people see."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(a: str, b: str) -> float:
    """Return the contrast of two colours as WCAG 2 defines it, from 1 to 21."""
    light, dark = sorted((linear(c) @ [0.2126, 0.7152, 0.0722] for c in (a, b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("seeing", list(SIMULATED))
@pytest.mark.parametrize("side", ["light", "dark"])
def test_any_two_kinds_can_be_told_apart(seeing, side):
    matrix = SIMULATED[seeing]
    seen = {kind: lab(matrix @ linear(getattr(INKS[kind], side))) for kind in CELL_KINDS}
    near = {(a, b): float(np.linalg.norm(seen[a] - seen[b])) for a, b in combinations(CELL_KINDS, 2)}
    # Kinds of which one has stripes may come nearer: failure and backward are both warm colours.
    least = {pair: 10.0 if INKS[pair[0]].pattern or INKS[pair[1]].pattern else 15.0 for pair in near}
    assert {pair: round(d, 1) for pair, d in near.items() if d < least[pair]} == {}


@pytest.mark.parametrize("seeing", list(SIMULATED))
@pytest.mark.parametrize("side", [0, 1])
def test_any_two_uses_of_time_can_be_told_apart_and_none_looks_like_a_kind(seeing, side):
    matrix = SIMULATED[seeing]
    seen = {use: lab(matrix @ linear(colours[side])) for use, colours in USES.items()}
    assert min(np.linalg.norm(seen[a] - seen[b]) for a, b in combinations(USES, 2)) > 25
    paper, name = (LIGHT, "light") if side == 0 else (DARK, "dark")
    assert min(contrast(colours[side], paper.background) for colours in USES.values()) > 1.6
    if seeing == "none":
        kinds = [lab(linear(getattr(ink, name))) for ink in INKS.values()]
        own = [use for use in USES if use != "restarts"]  # which are failures
        assert min(np.linalg.norm(seen[use] - kind) for use in own for kind in kinds) > 20


def test_text_can_be_read_on_each_cell_and_page():
    assert {kind for kind in CELL_KINDS if contrast(CELL_TEXT, INKS[kind].light) < 4.5} == {"transfer"}
    for paper in (LIGHT, DARK):
        assert contrast(paper.text, paper.background) > 7
        assert contrast(paper.faint, paper.background) > 4.5


def test_each_kind_has_a_letter_of_its_own():
    assert len({ink.letter for ink in INKS.values()}) == len(CELL_KINDS) == len(INKS)
