"""Direct tests of orders and records as lines of text."""

from __future__ import annotations

import pytest

from jaxpp_async.protocol.line_protocol import RECORD, LineProtocol
from jaxpp_async.protocol.messages import Message


class Go(Message):
    where: str
    times: tuple[int, ...]


class Stop(Message):
    pass


class Gone(Message):
    far: float
    names: dict[str, str | None]


LINES = LineProtocol("a walker", Go | Stop, Gone)


@pytest.mark.parametrize("order", [Go("a\nb \xfc \udcff", (1, 2)), Go("", ()), Stop()], ids=repr)
def test_an_order_is_one_line_that_reads_back(order):
    line = LINES.write_order(order)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert LINES.read_order(line) == order


def test_signs_of_life_before_an_order_are_skipped_and_alone_are_none():
    assert LINES.read_order(b"...." + LINES.write_order(Stop())) == Stop()
    assert LINES.read_order(b"...\n") is None
    assert LINES.read_order(b"\n") is None


def test_a_record_reads_back_and_other_lines_are_no_records():
    record = Gone(2.0, {"jax": "0.10", "ray": None})
    assert LINES.read_record(LINES.write_record(record).decode()) == record
    assert LINES.read_record("Welcome to host7!") is None
    assert LINES.read_record(f'prompt {RECORD}["Gone", 2.0, {{}}]') is None


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (b"{", "JSONDecodeError"),
        (b'["Gone", 1.0, {}]', "ValidationError"),  # a record, and no order
        (b'["Go", "secret-word", ["one"]]', "ValidationError"),
        (b'["Go", "secret-word"]', "ValidationError"),
        (b'["Stop", "secret-word"]', "ValidationError"),
        (b"[]", "ValidationError"),
        (b"7", "ValidationError"),
        (b"[" * 100_000, "RecursionError"),
        (b"secret-word \xff", "UnicodeDecodeError"),
    ],
)
def test_a_line_that_is_no_order_is_refused_without_quoting_it(line, cause):
    with pytest.raises(ValueError) as caught:
        LINES.read_order(line)
    assert str(caught.value) == f"no message of a walker ({cause})"
    assert type(caught.value) is ValueError
    assert caught.value.__cause__ is None and caught.value.__context__ is None  # they would hold the line


def test_a_line_that_begins_like_a_record_and_is_none_is_refused():
    with pytest.raises(ValueError, match=r"^no message of a walker \(ValidationError\)$"):
        LINES.read_record(f'{RECORD}["Go", "", []]')
