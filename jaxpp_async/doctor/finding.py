"""finding: one thing that the doctor has to say. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Level: TypeAlias = Literal["ok", "note", "warning", "error"]

ALL: Final = "all hosts"

SECTIONS: Final = {
    "hosts": "Hosts",
    "python": "Python",
    "packages": "Packages",
    "versions": "Versions",
    "jax": "JAX",
    "gpu": "GPUs",
    "nccl": "NCCL",
    "ucx": "UCX",
    "infiniband": "InfiniBand",
    "memory": "Memory and settings",
    "clock": "Clocks",
    "control": "Control connection",
    "transfer": "Transfers",
}
"""Key and title, in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line.

    Args:
        section: of `SECTIONS`. host: its name, or whom it is about.
        remedy: what to do; empty where there is nothing to do.
    """

    level: Level
    section: str
    host: str
    what: str
    remedy: str = ""


def ok(section: str, host: str, what: str) -> Finding:
    """It is well."""
    return Finding("ok", section, host, what)


def note(section: str, host: str, what: str, remedy: str) -> Finding:
    """It is worth knowing."""
    return Finding("note", section, host, what, remedy)


def warning(section: str, host: str, what: str, remedy: str) -> Finding:
    """A run works, but not as well as it could."""
    return Finding("warning", section, host, what, remedy)


def error(section: str, host: str, what: str, remedy: str) -> Finding:
    """A run of the asked kind does not work."""
    return Finding("error", section, host, what, remedy)
