"""Calibrate the constants on three rows, and predict the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from paper import closed_forms
from paper.compiled import CompiledPrograms, step_s
from paper.costs import Constants
from paper.rows import FSDP, JAXPP, Row

GPT3 = "GPT-3 175B"

MATMUL_ROW, EXPOSED_ROW, STRAGGLING_ROW = (JAXPP, GPT3, 64), (FSDP, GPT3, 64), (FSDP, GPT3, 1024)
"""The rows on which the constants of these names are calibrated."""

STATED = Constants(matmul=0.5)
"""Constants of which only those that are stated count."""

CALIBRATED = (MATMUL_ROW, EXPOSED_ROW, STRAGGLING_ROW)


@dataclass(frozen=True)
class Prediction:
    """The prediction of one row.

    Args:
        row: the row.
        predicted_s: the predicted seconds of a step.
        constant_s: the seconds that follow if GPUs reach the TFLOPS of one row of the system: of its
            calibrated row, or of JaxPP's if it has none.
        calibrated: whether a constant was calibrated on the row.
    """

    row: Row
    predicted_s: float
    constant_s: float
    calibrated: bool

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return self.predicted_s / self.row.step_s - 1

    @property
    def constant_error(self) -> float:
        """The relative error that follows from constant TFLOPS."""
        return self.constant_s / self.row.step_s - 1


def calibrate(
    rows: Sequence[Row],
    compiled: Mapping[tuple[str, str, int], CompiledPrograms],
    base: Constants = STATED,
) -> Constants:
    """Return the constants with which the three calibrated rows are predicted as they are.

    Args:
        rows: the rows of the table.
        compiled: JaxPP's rows, compiled; `MATMUL_ROW` at least.
        base: the constants that are stated; those that are calibrated do not count.
    """
    by_key = {row.key: row for row in rows}
    base = replace(base, exposed=0.0, straggling=0.0)
    wanted = by_key[MATMUL_ROW]
    step = compiled[MATMUL_ROW]
    # More work per second, less time: with the inverse the time is nearly a line.
    inverse = solve(lambda x: step_s(step, replace(base, matmul=1 / x)), wanted.step_s, 1.25, 2.5)
    constants = replace(base, matmul=1 / inverse)
    row = by_key[EXPOSED_ROW]
    exposed = solve(lambda x: closed_forms.fsdp_s(row, replace(constants, exposed=x)), row.step_s, 0.0, 1.0)
    constants = replace(constants, exposed=exposed)
    row = by_key[STRAGGLING_ROW]
    lost = row.step_s / closed_forms.fsdp_s(row, constants) - 1
    return replace(constants, straggling=lost)


def solve(fn: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Return the argument at which a nearly linear function has a value, by the secant method.

    Args:
        fn: the function.
        wanted: the value.
        low, high: two arguments to start from.
    """
    a, b = low, high
    at_a, at_b = fn(a) - wanted, fn(b) - wanted
    for _ in range(20):
        if abs(at_b) <= 1e-6 * abs(wanted) or at_a == at_b:
            break
        a, b, at_a = b, b - at_b * (b - a) / (at_b - at_a), at_b
        at_b = fn(b) - wanted
    return b


def predict(
    rows: Sequence[Row], compiled: Mapping[tuple[str, str, int], CompiledPrograms], constants: Constants
) -> list[Prediction]:
    """Return the prediction of every row, in the order of the rows.

    Args:
        rows: the rows of the table.
        compiled: JaxPP's rows, compiled.
        constants: the calibrated constants.
    """
    by_key = {row.key: row for row in rows}
    made = []
    for row in rows:
        if row.system == JAXPP:
            seconds = step_s(compiled[row.key], constants)
        else:
            seconds = closed_forms.FORMS[row.system](row, constants)
        same = by_key[EXPOSED_ROW if row.system == FSDP else MATMUL_ROW]
        constant_s = row.model_flops / row.gpus / (same.tflops * 1e12)
        made.append(Prediction(row, seconds, constant_s, row.key in CALIBRATED))
    return made
