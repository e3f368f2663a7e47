"""Read numbers of bytes that a user wrote, such as `"70GB"`."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, SupportsIndex

from jaxpp_async.errors import PlanError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}I": 2 ** (10 * power) for power, unit in enumerate("KMGT", 1)}

MOST_BYTES = 10**18
"""The largest number of bytes that counts as a memory."""

_MOST_CHARACTERS = 40
"""The number of characters beyond which a text is no number of bytes, and which an error message shows."""


def parse_bytes(memory: int | str, name: str = "memory") -> int:
    """Return the number of bytes that a user gave, such as `70_000_000_000`, `"70GB"` or `"64GiB"`.

    Args:
        memory: the number, or a text. A number with a decimal point needs a unit, and is rounded down to
            whole bytes.
        name: the name of the option, for the error message.

    Raises:
        PlanError: the value is no number of bytes, or less than 1 byte, or more than `MOST_BYTES`.
    """
    count = _count(memory)
    if count is None or not 1 <= count <= MOST_BYTES:
        shown = "a huge number" if isinstance(memory, int) and abs(memory) > MOST_BYTES else repr(memory)
        if len(shown) > _MOST_CHARACTERS:
            shown = f"{shown[:_MOST_CHARACTERS]}..."
        raise PlanError(
            f"{name} is {shown}; write bytes, or text such as '70GB' or '64GiB': at least 1 byte, at most "
            f"{MOST_BYTES:.0e}"
        )
    return count


def _count(memory: Any) -> int | None:
    """Return the number of whole bytes of a value; None if it is no number of bytes."""
    if isinstance(memory, bool):
        return None
    if isinstance(memory, SupportsIndex):
        return memory.__index__()
    if isinstance(memory, float):
        return int(memory) if memory.is_integer() else None
    if not isinstance(memory, str) or len(memory) > _MOST_CHARACTERS:
        return None
    match = re.fullmatch(r" *([0-9]+(?:\.[0-9]+)?) *([KMGT]?I?)B? *", memory.upper())
    if match is None or match[2] not in _UNITS or ("." in match[1] and not match[2]):
        return None
    return int(Fraction(match[1]) * _UNITS[match[2]])
