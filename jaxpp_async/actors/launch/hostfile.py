"""hostfile: text in, `Host`s out. Pure but for `load_hostfile`, which reads the file.

    # comment
    node1 slots=4 devices=0-3
    node2:4                                  # MPICH's form
    alice@node3 port=2222 python=/opt/venv/bin/python env=OMP_NUM_THREADS=4 cpus=0-15,32-47 interface=ib0

Every mistake is an error that names file and line. There is never a silent local run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxpp_async.actors.launch.hosts import Host, Settings, parse_cpus, parse_devices, parse_ports
from jaxpp_async.errors import MeshError

KEYS = ("slots", "user", "port", "python", "env", "cpus", "devices", "interface", "ports")
_MAX_BYTES = 1 << 22


def load_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Read a hostfile.

    Raises:
        MeshError: it is missing, unreadable, empty or wrong; names file and line.
    """
    try:
        if Path(path).stat().st_size > _MAX_BYTES:
            raise MeshError(f"hostfile {path} has more than {_MAX_BYTES >> 20} MiB; is it a hostfile?")
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        what = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise MeshError(f"hostfile {path} {what}; give the path of a file with one host a line") from None
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, name: str = "hostfile") -> tuple[Host, ...]:
    """Hosts from a hostfile's text.

    Args:
        name: of the file, for errors.

    Raises:
        MeshError: names file and line.
    """
    lines = enumerate(text.removeprefix("\ufeff").splitlines(), 1)
    return _distinct([(f"{name}:{number}", _parse(line, f"{name}:{number}")) for number, line in lines], name)


def parse_hosts(given: Sequence[str | Host], name: str = "hosts") -> tuple[Host, ...]:
    """Hosts from a list: each a `Host` or a line as in a hostfile.

    Raises:
        MeshError: names the element.
    """
    found: list[tuple[str, Host | None]] = []
    for index, entry in enumerate(given):
        at = f"{name}[{index}]"
        if not isinstance(entry, str | Host):
            raise MeshError(f"{at} is {entry!r}; a host is a string such as 'node1 slots=4', or a Host")
        found.append((at, _parse(entry, at) if isinstance(entry, str) else entry))
    return _distinct(found, name)


def _distinct(found: Sequence[tuple[str, Host | None]], name: str) -> tuple[Host, ...]:
    seen: dict[Any, str] = {}
    for at, host in found:
        if host is not None:
            first = seen.setdefault(host.where, at)
            if first != at:
                raise MeshError(f"{at}: host {host} stands at {first} already; write it once, with slots=N")
    if not seen:
        raise MeshError(f"{name} names no host; write one host a line, such as 'node1 slots=4'")
    return tuple(host for _, host in found if host is not None)


def _parse(line: str, at: str) -> Host | None:
    """One line; None if it is empty."""
    try:
        words = shlex.split(line, comments=True)
        if not words:
            return None
        host = _parse_name(words[0])
        for word in words[1:]:
            host = _with_word(host, word, given=[w.partition("=")[0] for w in words[1:]], has_slots=":" in words[0])
        return host
    except ValueError as error:  # MeshError is one
        raise MeshError(f"{at}: {error}") from None


def _parse_name(word: str) -> Host:
    match = re.fullmatch(r"(?:(?P<user>[^@]*)@)?(?P<name>[^:@]*)(?::(?P<slots>\d+))?", word)
    if match is None:
        raise ValueError(f"{word!r} is no host; write 'host', 'user@host' or 'host:slots' (IPv6 addresses by a name)")
    if "=" in word:
        raise ValueError(f"the line begins with {word!r}; a host's name comes first")
    return Host(match["name"], int(match["slots"] or 1), match["user"])


def _with_word(host: Host, word: str, given: Sequence[str], has_slots: bool) -> Host:
    key, equals, value = word.partition("=")
    if not equals or key not in KEYS:
        raise ValueError(f"unknown {word!r}; a host takes {', '.join(f'{k}=' for k in KEYS)}")
    if not value:
        raise ValueError(f"{key}= has no value")
    if key != "env" and given.count(key) > 1:
        raise ValueError(f"{key}= stands twice")
    if (key == "slots" and has_slots) or (key == "user" and host.user is not None):
        raise ValueError(f"{key}= is given a second time, after the one beside the host's name")
    if key in ("slots", "port"):
        if not re.fullmatch(r"-?\d{1,9}", value):
            raise ValueError(f"{key}={value} is no whole number")
        return replace(host, **{key: int(value)})
    if key == "user":
        return replace(host, user=value)
    return replace(host, settings=_with_setting(host.settings, key, value))


def _with_setting(settings: Settings, key: str, value: str) -> Settings:
    if key == "env":
        name, equals, content = value.partition("=")
        if not equals:
            raise ValueError(f"env={value} has no second '='; write env=NAME=VALUE")
        return replace(settings, env={**settings.env, name: content})
    parse: Any = {"cpus": parse_cpus, "devices": parse_devices, "ports": parse_ports}.get(key, str)
    return replace(settings, **{key: parse(value)})
