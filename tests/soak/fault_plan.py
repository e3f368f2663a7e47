"""fault_plan: a seed in, a list of faults out: what happens when to whom. Pure, so that a seed repeats a soak."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Lethal: TypeAlias = Literal[
    "kill", "kill, and its successor", "terminate", "stop for ever", "cut the control connection"
]
"""The actor is lost and has to be replaced."""

Harmless: TypeAlias = Literal["stop for 1 s", "stop for 4 s", "slow", "cut the data connections", "garbage"]
"""The mesh may replace the actor, or carry on."""

Asked: TypeAlias = Literal["cancel a run", "cancel an await", "cancel a fetch", "cancel a save", "save", "restore"]
"""What the one who trains does itself, between two steps or in one."""

Kind: TypeAlias = Lethal | Harmless | Asked

LETHAL: tuple[Kind, ...] = get_args(Lethal)
ASKED: tuple[Kind, ...] = get_args(Asked)
KINDS: tuple[Kind, ...] = (*get_args(Lethal), *get_args(Harmless), *get_args(Asked))

PAUSE_S, BREATHER_S, BREATHERS = 0.8, 6.0, 0.5
"""Longest pause between two faults that come close together, and between others; how many of these there are."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Args:
        at_s: when it is due, in seconds from the start; what must not meet another one waits longer.
        actor: whom it happens to.
        seconds: what it takes, where it takes any: until a successor is killed, or an await cancelled.
        number: for what else has to be drawn.
    """

    at_s: float
    kind: Kind
    actor: int
    seconds: float
    number: int


def fault_plan(seed: int, seconds: float, num_actors: int) -> list[Fault]:
    """Faults of every kind, in an order that is drawn anew for each round through them.

    Args:
        seconds: when the last one may be due.
    """
    rng = random.Random(seed)
    faults: list[Fault] = []
    at_s, round_of_kinds = 1.0, []
    while True:
        if not round_of_kinds:
            round_of_kinds = rng.sample(KINDS, len(KINDS))
        kind = round_of_kinds.pop()
        at_s += rng.uniform(0, BREATHER_S if rng.random() < BREATHERS else PAUSE_S)
        if at_s > seconds:
            return faults
        faults.append(Fault(at_s, kind, rng.randrange(num_actors), _seconds(kind, rng), rng.randrange(1 << 30)))


def _seconds(kind: Kind, rng: random.Random) -> float:
    match kind:
        case "stop for 1 s":
            return 1.0
        case "stop for 4 s":
            return 4.0
        case "slow" | "kill, and its successor":
            return rng.uniform(0.0, 3.0)
        case "cancel a run" | "cancel an await" | "cancel a fetch" | "cancel a save":
            return rng.choice([0.0, rng.uniform(0, 0.01), rng.uniform(0, 0.1)])
        case _:
            return 0.0
