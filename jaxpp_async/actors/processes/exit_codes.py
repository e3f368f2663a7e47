"""exit_codes: how an actor process ends itself, and what that means. Plain data."""

from __future__ import annotations

import enum

LEASE_S = 15.0
"""Silence of the driver after which an actor, or a host's keeper, ends itself, unless a mesh says otherwise."""


def beat_s_of(lease_s: float) -> float:
    """How often the driver gives a sign of life, on each stdin, to keep a lease."""
    return min(lease_s / 5, 3.0)


class ExitCode(enum.IntEnum):
    """How an actor process ends itself; `ActorDiedError` explains the code."""

    OK = 0
    CRASH = 1
    CONFIG = 80
    CONTROLLER_GONE = 81
    LEASE_EXPIRED = 82
    REFUSED = 83
    CONNECTION_LOST = 84
    HOST_LOST = 85


EXIT_REASONS: dict[int, str] = {
    ExitCode.CRASH: "it raised outside any request",
    ExitCode.CONFIG: "its configuration on stdin was unusable",
    ExitCode.CONTROLLER_GONE: "its stdin reached end of file: the controller was gone",
    ExitCode.LEASE_EXPIRED: "the driver, this process, was silent for longer than lease_s: it, or the keeper on the "
    "actor's host, was stopped, or a native call held Python's GIL",
    ExitCode.REFUSED: "the handshake with the controller failed",
    ExitCode.CONNECTION_LOST: "its control connection broke",
    ExitCode.HOST_LOST: "unknown how: the connection to its host ended",
}


def last_words(lease_s: float) -> str:
    """Say, for a process that ends itself with `ExitCode.LEASE_EXPIRED`, why."""
    return (
        f"the driver was silent for {lease_s:g} s (lease_s={lease_s:g}): it was stopped, or a native call in it holds "
        "Python's GIL; a longer lease_s= of RemoteMesh waits for that"
    )
