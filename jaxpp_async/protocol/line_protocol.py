"""line_protocol: what two programs say over stdin and stdout, as lines. Sans-I/O: text in, frozen values out.

Orders go to the program, one JSON array a line: the message's name, then its fields; dots before one are signs of life
and mean nothing else. Records come back, each a line of `RECORD` and such an array; whatever else comes (a login
banner, a warning of a shell) is no record. Both sides check every field for its type: a host may be broken, or not what
it seems.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from jaxpp_async.errors import ProtocolError
from jaxpp_async.protocol import codec

RECORD = "\x1e"
SIGN_OF_LIFE = b"."

O = TypeVar("O")  # noqa: E741
R = TypeVar("R")


class LineProtocol(Generic[O, R]):
    """What one kind of program is told and tells.

    Args:
        whose: messages these are, for errors: `"a keeper"`.
        orders, records: unions of frozen dataclasses.
    """

    def __init__(self, whose: str, orders: Any, records: Any):
        self._whose = whose
        self._orders, self._records = codec.message_types(orders), codec.message_types(records)

    def write_order(self, order: O) -> bytes:
        """An order as a line."""
        return _write(order)

    def read_order(self, line: bytes) -> O | None:
        """The order in a line; None for signs of life alone.

        Raises:
            ValueError: anything else. The message does not quote the line, which may hold a secret.
        """
        text = line.lstrip(SIGN_OF_LIFE).strip()
        return self._read(text.decode(), self._orders) if text else None

    def write_record(self, record: R) -> bytes:
        """A record as a line."""
        return RECORD.encode() + _write(record)

    def read_record(self, line: str) -> R | None:
        """The record in a line; None if it is none, such as a line of a login banner.

        Raises:
            ValueError: it begins like one, but is not.
        """
        before, mark, text = line.partition(RECORD)
        return self._read(text, self._records) if mark and not before else None

    def _read(self, text: str, known: Mapping[str, type]) -> Any:
        try:
            name, fields = json.loads(text)
            return codec.build(known[name], _with_tuples(fields))
        except (ValueError, KeyError, TypeError, RecursionError, ProtocolError) as error:
            raise ValueError(f"no message of {self._whose} ({type(error).__name__})") from None


def _write(message: object) -> bytes:
    text = json.dumps([type(message).__name__, codec.fields_of(message)], default=codec.fields_of)
    return text.encode() + b"\n"


def _with_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_with_tuples, value))
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return value
