"""All built-in schedules, for tests that hold for each of them."""

from __future__ import annotations

from typing import Any

from jaxpp_async import schedules
from jaxpp_async.schedules.base import BuiltIn

BUILT_IN: tuple[Any, ...] = tuple(
    cls for cls in vars(schedules).values() if isinstance(cls, type) and issubclass(cls, BuiltIn)
)
"""The class of every schedule that `jaxpp_async` has."""


def every_schedule(num_stages: int) -> list[BuiltIn]:
    """Return one schedule of each class, with so many stages."""
    options = {schedules.ControllableMemory: {"activations": 1.5}}
    return [cls(num_stages, **options.get(cls, {})) for cls in BUILT_IN]
