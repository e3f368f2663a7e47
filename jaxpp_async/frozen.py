"""frozen: a decorator for values that are made by the ten thousand. In: a class. Out: a dataclass of it.

To a type checker it is `dataclass(frozen=True)`. While the program runs nothing stands guard: a frozen dataclass sets
each field through `object.__setattr__`, which takes three quarters of the time that making it takes, and a compilation
makes a quarter of a million. All other classes use `dataclass(frozen=True)` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(*, eq: bool = True, slots: bool = True) -> Callable[[type[_T]], type[_T]]:
    """A dataclass whose fields nobody sets again.

    Args:
        eq: instances with equal fields are equal and have one hash; False: an instance equals itself alone.
        slots: no other attributes than the fields.
    """
    return dataclass(slots=slots, eq=eq, unsafe_hash=eq)
