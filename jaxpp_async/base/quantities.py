"""Write times, bytes and counts for people, everywhere alike; read numbers of bytes that a user wrote."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, SupportsIndex

from jaxpp_async.errors import PlanError

_BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def format_bytes(amount: float) -> str:
    """Return a number of bytes as text of three digits, such as `"1.5 GB"`.

    Args:
        amount: the bytes, not negative.
    """
    for unit, size in _BYTES:
        if amount >= 0.9995 * size:  # so that 999.9 MB is 1 GB
            shown = amount / size
            return f"{shown:.3g} {unit}" if shown < 999.5 else f"{shown:,.0f} {unit}"
    return f"{amount:.0f} B"


def format_seconds(seconds: float, digits: int = 3) -> str:
    """Return a time as text, such as `"12.5 ms"`, `"2 min 5 s"` or `"1 h 1 min"`.

    Args:
        seconds: the time in seconds; it may be negative.
        digits: the significant digits of a time of less than two minutes.
    """
    sign, seconds = "-" * (seconds < 0), abs(seconds)
    if seconds >= 3599.5:
        minutes = round(seconds / 60)
        return f"{sign}{minutes // 60:,} h {minutes % 60} min"
    if seconds >= 119.5:
        whole = round(seconds)
        return f"{sign}{whole // 60} min {whole % 60} s"
    rounded = float(f"{seconds:.{digits}g}")
    if not rounded:
        return "0 s"
    for unit, size in _SECONDS:
        if rounded >= size or unit == "us":
            return f"{sign}{rounded / size:.{digits}g} {unit}"
    raise AssertionError


def count(number: int, noun: str) -> str:
    """Return a number with its noun as text, such as `"1 step"` or `"1,000 steps"`.

    Args:
        number: the number.
        noun: the noun in the singular, whose plural ends in "s".
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


# ---------------------------------------------------------------- reading

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
    count = _whole_bytes(memory)
    if count is None or not 1 <= count <= MOST_BYTES:
        shown = "a huge number" if isinstance(memory, int) and abs(memory) > MOST_BYTES else repr(memory)
        if len(shown) > _MOST_CHARACTERS:
            shown = f"{shown[:_MOST_CHARACTERS]}..."
        raise PlanError(
            f"{name} is {shown}; write bytes, or text such as '70GB' or '64GiB': at least 1 byte, at most "
            f"{MOST_BYTES:.0e}"
        )
    return count


def _whole_bytes(memory: Any) -> int | None:
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
