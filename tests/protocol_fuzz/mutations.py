"""Hostile changes: to the pieces of a conversation, to bytes, and to the plain values of a message. All from
a seed."""

from __future__ import annotations

import datetime
import random
import struct
from collections.abc import Callable
from typing import Any

from conversations import Conversation
from message_examples import FLOATS, INTEGERS
from msgspec.msgpack import Ext

LENGTHS = (0, 1, 15, 2**16, 2**20, 2**20 + 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)

STRANGERS = (
    b"",
    b"j",
    b"jpp",
    b"jpp3",
    b"jpp2\x00\x01\xc0",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    bytes.fromhex("160301020001000001fc0303") + bytes(64),  # how TLS begins
    b"SSH-2.0-OpenSSH_9.2\r\n",
    b"\0" * 5000,
    b"\xff" * 5000,
)


LOG = b"\x92\xc0\x96\xa3Log\x01\xa1a\xa1b\xc0"
"""An envelope with a `Log`, up to its attributes."""


def bombs() -> tuple[bytes, ...]:
    """Msgpack that promises, nests or means more than it is."""
    return (
        b"\xdc\x0f\xff" * 1300,  # arrays of 4095 in arrays of 4095
        b"\xdd\x7f\xff\xff\xff" * 800,
        b"\xdd\xff\xff\xff\xff",
        b"\xdc\x01\x00" * 1300,
        b"\x91" * 4000,
        b"\x91" * 900 + b"\xc0",
        b"\x92\x01" + b"\x91" * 4000,
        b"\x92\x01" + b"\x91" * 900_000,
        b"\x92\x01\x92\xa5Fetch" + b"\x91" * 900_000,
        b"\x92\x01\x92\xa1?" + b"\x91" * 900_000,  # an unknown message, whose fields are skipped
        b"\x81\xc0" * 2000,
        b"\x81\x01" * 900 + b"\x01",
        b"\xdf\xff\xff\xff\xff",
        b"\xde\xff\xff" * 1000,
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        LOG + b"\x81\xa1a" + b"\x91" * 600 + b"\xc0",  # well-formed, and deep
        LOG + b"\x81\xa1a" + b"\x81\x01" * 600 + b"\xc0",
        LOG + b"\x82\xa1a\x01\xa1a\x02",  # one key twice
        LOG + b"\x81\x91\x90\x01",  # an array as a key
        LOG + b"\x81\x80\x01",  # a map as a key
        b"\x92\x01\x92\xa5Abort\xcb\x7f\xf8\0\0\0\0\0\0",  # NaN, and too few fields
        b"\x92\x01\x93\xa5Abort\x02\xa2\xff\xfe",  # a text that is none
        b"\x92\xcb\x7f\xf8\0\0\0\0\0\0\x91\xa7Inspect",  # a number that is none
        b"\x92\xd7\xff" + b"\xff" * 8 + b"\x91\xa7Inspect",  # a timestamp that is none
        b"\x92\xc7\x01\xff\x00\x91\xa7Inspect",
        b"\x92\x01\x91" + b"\xdb\x00\x0f\x00\x00" + b"x" * 0xF0000,  # a very long name
        b"\xdd\x00\x0f\xff\xff" + b"\xc0" * 0xFFFFF,  # a very long array of nothing
        b"\xc1",
    )


# ---------------------------------------------------------------- bytes


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """One to three changes: bits, bytes, a cut, something put in, taken out or doubled, a length."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        rng.choice(_BYTE_CHANGES)(changed, rng)
    return bytes(changed)


def _flip(data: bytearray, rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _overwrite(data: bytearray, rng: random.Random) -> None:
    if data:
        start = rng.randrange(len(data))
        length = min(rng.randint(1, 8), len(data) - start)
        data[start : start + length] = rng.randbytes(length)


def _cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _insert(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.choice((1, 2, 8, 100)))


def _remove(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    del data[at : at + rng.randint(1, 8)]


def _double(data: bytearray, rng: random.Random) -> None:
    at, length = rng.randrange(len(data) + 1), rng.randint(1, 40)
    data[at:at] = data[at : at + length]


def _set_length(data: bytearray, rng: random.Random) -> None:
    """A frame's length stands first; a greeting's behind its magic."""
    if data.startswith(b"jpp3"):
        data[4:6] = struct.pack(">H", rng.choice((0, 1, 4089, 4090, 4091, 65535)))
    else:
        data[:8] = struct.pack(">Q", rng.choice(LENGTHS))


_BYTE_CHANGES: tuple[Callable[[bytearray, random.Random], None], ...] = (
    _flip,
    _flip,
    _overwrite,
    _cut,
    _insert,
    _remove,
    _double,
    _set_length,
)


# ---------------------------------------------------------------- conversations


def mutate_pieces(
    pieces: list[bytes], role: str, elsewhere: Conversation, here: Conversation, rng: random.Random
):
    """What comes to `role` instead of `pieces`.

    Args:
        elsewhere: another conversation, of the same mesh or of another one, to take pieces from.
    """
    pieces = pieces or [rng.randbytes(64)]  # all has come: this is more
    index = rng.randrange(len(pieces))
    other_way = "controller" if role == "actor" else "actor"
    match rng.randrange(10):
        case 0 | 1 | 2:
            pieces[index] = mutate_bytes(pieces[index], rng)
        case 3:  # replayed
            pieces.insert(rng.randrange(len(pieces) + 1), pieces[index])
        case 4:  # reordered
            second = rng.randrange(len(pieces))
            pieces[index], pieces[second] = pieces[second], pieces[index]
        case 5:  # lost
            del pieces[index]
        case 6:  # reflected
            pieces[index] = rng.choice(here.pieces(other_way))
        case 7:  # of another conversation
            pieces[index] = rng.choice(elsewhere.pieces(rng.choice((role, other_way))))
        case 8:  # another conversation from here on
            pieces[index:] = elsewhere.pieces(role)[index:]
        case 9:
            bomb = rng.choice(bombs())[:4096]
            pieces[index] = rng.choice((rng.choice(STRANGERS), b"jpp3" + struct.pack(">H", len(bomb)) + bomb))
    return pieces


def split(data: bytes, rng: random.Random) -> list[bytes]:
    """Data in the pieces in which a network may bring it."""
    if rng.random() < 0.3:
        return [data]
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((1, 2, 5))))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


# ---------------------------------------------------------------- values

HOSTILE: tuple[Any, ...] = (
    *INTEGERS,
    *FLOATS,
    None,
    True,
    "",
    "x" * 1000,
    "\N{ROCKET}",
    b"",
    b"\xff" * 100,
    (),
    ((), ((), ())),
    {},
    {None: None},
    {1: {2: {}}},
    (1,) * 300,
    Ext(4, b"x"),
    Ext(127, b""),
    datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC),
)


def mutate_value(value: Any, rng: random.Random) -> Any:
    """Plain values with one of them changed, doubled, taken out or put deeper."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        changed = dict(value)
        if rng.random() < 0.5:
            changed[key] = mutate_value(changed[key], rng)
        else:
            changed[rng.choice((0, "", -1, None, 2**64 - 1, True, b"k", 0.5))] = changed.pop(key)
        return changed
    if isinstance(value, list | tuple) and value and rng.random() < 0.85:
        changed = list(value)
        index = rng.randrange(len(changed))
        match rng.randrange(6):
            case 0:
                del changed[index]
            case 1:
                changed.insert(index, changed[index])
            case _:
                changed[index] = mutate_value(changed[index], rng)
        return changed
    if rng.random() < 0.1:
        for _ in range(rng.choice((1, 40, 300))):
            value = [value] if rng.random() < 0.5 else {1: value}
        return value
    return rng.choice(HOSTILE)
