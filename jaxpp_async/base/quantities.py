"""Write times, bytes and counts for people, everywhere alike."""

from __future__ import annotations

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
