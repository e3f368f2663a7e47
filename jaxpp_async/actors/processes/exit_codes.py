"""exit_codes: how an actor process ends itself, and what that means. Plain data."""

from __future__ import annotations

import enum

LEASE_S = 15.0
"""Silence on stdin after which an actor ends itself."""


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
    ExitCode.LEASE_EXPIRED: f"nothing came on its stdin for {LEASE_S:g} s: the controller was stopped or gone",
    ExitCode.REFUSED: "the handshake with the controller failed",
    ExitCode.CONNECTION_LOST: "its control connection broke",
    ExitCode.HOST_LOST: "unknown how: the connection to its host ended",
}
