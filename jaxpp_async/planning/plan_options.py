"""Check the options of `plan` before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, SupportsIndex

from jaxpp_async.base.printable import shown_value
from jaxpp_async.errors import PlanError
from jaxpp_async.planning.cost_model import CostModel
from jaxpp_async.planning.machine import Machine


def check_plan_options(
    *,
    machine: Any,
    costs: Any,
    global_batch: Any,
    microbatches: Any,
    num_stages: Any,
    batch_argnums: Any,
    iterations: Any,
    seed: Any,
    on_progress: Any,
) -> None:
    """Check that each option of `plan` has the right type, and that no number is too small.

    Args:
        machine, costs, global_batch, microbatches, num_stages, batch_argnums, iterations, seed, on_progress:
            the options, as the user gave them to `plan`.

    Raises:
        PlanError: an option is wrong; the message names it and its value, and says what to write.
    """
    machines = [machine] if isinstance(machine, Machine) else machine
    if not _is_list(machines) or not all(isinstance(each, Machine) for each in machines):
        _refuse("machine", machine, "a jpp.Machine, or a list of them")
    if not (costs is None or isinstance(costs, CostModel) or callable(costs)):
        _refuse("costs", costs, "a CostModel, or a function that returns one")
    if microbatches is not None and not (
        _is_list(microbatches) and len(microbatches) and all(_is_count(x, 1) for x in microbatches)
    ):
        _refuse("microbatches", microbatches, "a list of numbers of at least 1, such as [8, 16]")
    for name, value, least in (
        ("global_batch", global_batch, 1),
        ("num_stages", num_stages, None),  # its bounds depend on the step
        ("iterations", iterations, 0),
    ):
        if value is not None and not _is_count(value, least):
            _refuse(name, value, f"a whole number{'' if least is None else f' of at least {least}'}, or None")
    if not _is_count(seed, 0):
        _refuse("seed", seed, "a whole number of at least 0")
    positions = batch_argnums if _is_list(batch_argnums) else [batch_argnums]
    if batch_argnums is not None and not all(_is_count(position) for position in positions):
        _refuse("batch_argnums", batch_argnums, "the position of an argument, or a list of positions")
    if on_progress is not None and not callable(on_progress):
        _refuse("on_progress", on_progress, "a function of a text")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | Mapping)


def _is_count(value: Any, least: int | None = None) -> bool:
    """Return whether a value is a whole number, and not less than `least`."""
    if not isinstance(value, SupportsIndex) or isinstance(value, bool):
        return False
    return least is None or value.__index__() >= least


def _refuse(name: str, value: Any, wanted: str) -> NoReturn:
    raise PlanError(f"{name} is {shown_value(value)}; write {wanted}")
