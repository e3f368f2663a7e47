"""Exchange messages with a program over its stdin and stdout, one message per line.

Messages to the program are called orders. An order is a line with one JSON array: the message's name, then
its fields. Dots before the array are heartbeats: each dot was sent to show that the sender is alive, and has
no other meaning. Messages from the program are called records. A record is a line that begins with `RECORD`
(a control character) and continues with such an array. Any other line, such as a login banner or a warning of
a shell, is not a record. Both sides check the type of every field, since a host may be broken or may not be
the expected one.

The JSON itself is Python's and not msgspec's, since names of files and variables of the environment may
contain bytes that are not UTF-8, for which Python's strings have surrogates.
"""

from __future__ import annotations

import json
from typing import Any, Generic, TypeVar

import msgspec

RECORD = "\x1e"
SIGN_OF_LIFE = b"."

O = TypeVar("O")  # noqa: E741
R = TypeVar("R")


class LineProtocol(Generic[O, R]):
    """A codec for the orders (messages to a program) and the records (messages from it) of one kind of
    program.

    Args:
        whose: a name for the program in errors, such as `"a host agent"`.
        orders, records: the message types, each a union of subclasses of `messages.Message`.
    """

    def __init__(self, whose: str, orders: Any, records: Any):
        self._whose, self._orders, self._records = whose, orders, records

    def write_order(self, order: O) -> bytes:
        """Encode an order (a message to the program) as a line."""
        return _write(order)

    def read_order(self, line: bytes) -> O | None:
        """Decode the order (a message to the program) in a line; return None if the line has only heartbeats
        (dots).

        Raises:
            ValueError: the line is neither an order nor heartbeats. The error message does not quote the
                line, which may contain a secret.
        """
        text = line.lstrip(SIGN_OF_LIFE).strip()
        return self._read(text, self._orders) if text else None

    def write_record(self, record: R) -> bytes:
        """Encode a record (a message from the program) as a line."""
        return RECORD.encode() + _write(record)

    def read_record(self, line: str) -> R | None:
        """Decode the record (a message from the program) in a line; return None if the line is not a record,
        such as a line of a login banner.

        Raises:
            ValueError: the line begins like a record but is not a valid one.
        """
        before, mark, text = line.partition(RECORD)
        return self._read(text, self._records) if mark and not before else None

    def _read(self, text: str | bytes, accepted: Any) -> Any:
        try:
            return msgspec.convert(json.loads(text if isinstance(text, str) else text.decode()), accepted)
        except (msgspec.ValidationError, ValueError, RecursionError) as error:
            cause = type(error).__name__
        # Raised outside the handler: the decoding error contains the whole line and would become the context.
        raise ValueError(f"no message of {self._whose} ({cause})")


def _write(message: object) -> bytes:
    return json.dumps(msgspec.to_builtins(message)).encode() + b"\n"
