"""Direct tests of text from outside as text that every stream takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpp_async.base.printable import printable, shown, visible


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ""),
        ("weiß\n", "weiß\n"),
        ("a\udcffb", "a\\udcffb"),
        ("\ud800", "\\ud800"),
        ("\U0001f600", "\U0001f600"),
    ],
    ids=ascii,
)
def test_only_what_utf8_has_no_bytes_for_is_escaped(text, found):
    assert printable(text) == found
    assert printable(text).encode() == found.encode()


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/tmp/weiß", "/tmp/weiß"),
        (b"/tmp/\xff", "/tmp/\\xff"),
        ("/tmp/\udcff", "/tmp/\\xff"),  # the same file, as Python decodes its name
        ("/tmp/\ud800", "/tmp/\\ud800"),  # no name of a file
        ("/tmp/a\nb\x1b[31m\t", "/tmp/a\\nb\\x1b[31m\\t"),
        (Path("/tmp/x y"), "/tmp/x y"),
        ("a'b\"c", "a'b\"c"),
    ],
    ids=ascii,
)
def test_a_path_is_shown_on_one_line_with_what_cannot_be_seen_escaped(path, found):
    assert shown(path) == found


def test_a_terminal_gets_no_commands():
    assert visible("a\nb\tc") == "a\nb\\tc" and visible("a\nb", keep="") == "a\\nb"
    assert visible("\x1b]0;title\x07\x1b[2J\u202e") == "\\x1b]0;title\\x07\\x1b[2J\\u202e"
    assert visible("wei\xdf \U0001f600") == "wei\xdf \U0001f600"
