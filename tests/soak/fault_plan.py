"""fault_plan: a seed in, a list of faults out: what happens when to whom. Pure, so that a seed repeats a
soak."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Lethal: TypeAlias = Literal[
    "kill", "kill, and its successor", "terminate", "stop for ever", "cut the control connection"
]
"""The actor is lost and has to be replaced."""

LethalCut: TypeAlias = Literal["cut a control link past 10 s"]
"""The same, and its successor cannot start before the link is back."""

Harmless: TypeAlias = Literal["stop for 1 s", "stop for 4 s", "slow", "cut the data connections", "garbage"]
"""The mesh may replace the actor, or carry on."""

Link: TypeAlias = Literal[
    "cut a data link for 2 s", "cut a data link for 15 s", "cut a control link for 2 s", "slow a data link"
]
"""Everything of a kind to and from a host is lost, or late. Nobody is to be replaced."""

RequestedRun: TypeAlias = Literal[
    "interrupt the loop",
    "cancel a run",
    "cancel an await",
    "cancel a fetch",
    "cancel a save",
    "save",
    "save to an odd path",
    "save beside another driver",
    "restore",
]
"""What the one who trains does itself, between two steps or in one."""

Kind: TypeAlias = Lethal | LethalCut | Harmless | Link | RequestedRun

LETHAL: tuple[Kind, ...] = (*get_args(Lethal), *get_args(LethalCut))
ASKED: tuple[Kind, ...] = get_args(RequestedRun)
LINKS: tuple[Kind, ...] = (*get_args(LethalCut), *get_args(Link))
"""What takes hosts with links of their own."""

KINDS: tuple[Kind, ...] = (*get_args(Lethal), *get_args(Harmless), *get_args(RequestedRun))
"""What can happen anywhere."""

PAUSE_S, BREATHER_S, BREATHERS = 0.8, 6.0, 0.5
"""Longest pause between two faults that come close together, and between others; how many of these there are.
"""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Args:
        at_s: when it is due, in seconds from the start; what must not meet another one waits longer.
        actor: whom it happens to.
        seconds: what it takes, where it takes any: until a successor is killed, an await cancelled, or a link
            restored (after its actor was given up, where that is awaited).
        number: for what else has to be drawn.
    """

    at_s: float
    kind: Kind
    actor: int
    seconds: float
    number: int


def fault_plan(seed: int, seconds: float, num_actors: int, *, links: bool = False) -> list[Fault]:
    """Faults of every kind, in an order that is drawn anew for each round through them.

    Args:
        seconds: when the last one may be due.
        links: there are links to cut. These come first, so that a short soak gets to them.
    """
    rng = random.Random(seed)
    faults: list[Fault] = []
    kinds = KINDS + LINKS if links else KINDS
    at_s, round_of_kinds = (
        1.0,
        rng.sample(KINDS, len(KINDS)) + (rng.sample(LINKS, len(LINKS)) if links else []),
    )
    while True:
        if not round_of_kinds:
            round_of_kinds = rng.sample(kinds, len(kinds))
        kind = round_of_kinds.pop()
        at_s += rng.uniform(0, BREATHER_S if rng.random() < BREATHERS else PAUSE_S)
        if at_s > seconds:
            return faults
        faults.append(
            Fault(at_s, kind, rng.randrange(num_actors), _seconds(kind, rng), rng.randrange(1 << 30))
        )


def _seconds(kind: Kind, rng: random.Random) -> float:
    match kind:
        case "stop for 1 s":
            return 1.0
        case "stop for 4 s":
            return 4.0
        case "cut a data link for 2 s" | "cut a control link for 2 s":
            return 2.0
        case "cut a data link for 15 s":
            return 15.0
        case "slow a data link":
            return rng.uniform(2.0, 5.0)
        case "cut a control link past 10 s":
            return rng.uniform(0.0, 12.0)
        case "slow" | "kill, and its successor":
            return rng.uniform(0.0, 3.0)
        case (
            "interrupt the loop"
            | "cancel a run"
            | "cancel an await"
            | "cancel a fetch"
            | "cancel a save"
            | "save beside another driver"
        ):
            return rng.choice([0.0, rng.uniform(0, 0.01), rng.uniform(0, 0.1)])
        case _:
            return 0.0
