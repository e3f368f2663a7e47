"""Messages with random fields. The fields are read from the messages' type hints, so a new type of message
needs no line here.
"""

from __future__ import annotations

import dataclasses
import random
import types
import typing
from functools import cache
from typing import Any

from jaxpp_async.protocol import messages as m

INTEGERS = (
    0, 1, 2, 127, 128, 255, 256, 65535, 65536, 2**31, 2**32, 2**53, 2**63 - 1, 2**64 - 1, -1, -33, -(2**63)
)  # fmt: skip
FLOATS = (0.0, -0.0, 0.5, 1e300, -1e-300, float("inf"), float("nan"))


def draw(hint: Any, rng: random.Random, depth: int = 0) -> Any:
    """Return a random value of a type hint, such as the class of a message."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if fields := _fields(hint):
        return hint(**{name: draw(of, rng, depth + 1) for name, of in fields.items()})
    if origin in (typing.Union, types.UnionType):
        return draw(rng.choice(args), rng, depth)
    if origin is typing.Literal:
        return rng.choice(args)
    few = 0 if depth > 6 else rng.choice((0, 1, 2, 3))
    if origin is tuple and args[-1:] == (Ellipsis,):
        return tuple(draw(args[0], rng, depth + 1) for _ in range(few))
    if origin is frozenset:
        return frozenset(draw(args[0], rng, depth + 1) for _ in range(few))
    if origin is tuple:
        return tuple(draw(of, rng, depth + 1) for of in args)
    if origin is dict:
        return {draw(args[0], rng, depth + 1): draw(args[1], rng, depth + 1) for _ in range(few)}
    return hint() if isinstance(hint, type) and issubclass(hint, m.MessagePart) else _plain(hint, rng)


def examples(side: typing.Literal["actor", "controller"]) -> list[m.Message]:
    """Return one message of each type that a side accepts, always the same ones."""
    return [draw(cls, random.Random(cls.__name__)) for cls in m.accepted_messages(side)]


@cache
def _fields(cls: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(cls) and isinstance(cls, type):
        names = [field.name for field in dataclasses.fields(cls)]
    else:
        names = getattr(cls, "__struct_fields__", getattr(cls, "_fields", ()))  # of a Struct, of a NamedTuple
    hints = typing.get_type_hints(cls) if names else {}
    return {name: hints[name] for name in names}


def _plain(hint: Any, rng: random.Random) -> Any:
    if hint is int:
        return rng.choice(INTEGERS) if rng.random() < 0.2 else rng.randrange(1000)
    if hint is float:
        return rng.choice(FLOATS[:-1])  # without NaN, a message equals itself
    if hint is bool:
        return rng.random() < 0.5
    if hint is str:
        return "".join(
            rng.choices("abcdefgh \n\0\N{GREEK SMALL LETTER PI}\N{ROCKET}", k=rng.choice((0, 1, 5, 40)))
        )
    if hint is bytes:
        return rng.randbytes(rng.choice((0, 1, 16, 300)))
    if hint is type(None):
        return None
    raise TypeError(f"teach the examples of messages about {hint!r}")


def subclasses(base: type) -> list[type]:
    """Return all subclasses of a class, and theirs."""
    return [cls for direct in base.__subclasses__() for cls in (direct, *subclasses(direct))]
