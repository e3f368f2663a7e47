"""ports: a port for UCX to listen on, found before UCX looks for one. What makes a worker in, that worker out.

Where every port of `UCX_TCP_PORT_RANGE` is taken, UCX draws one after the other for ever; where the range is one port,
it prints lines of its own. Never listens itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from jaxpp_async.errors import MeshError
from jaxpp_async.transport.ucx.interfaces import addresses_of_devices

T = TypeVar("T")

PORTS: Final = "UCX_TCP_PORT_RANGE"

_LAST_PORT: Final = 65535
_LOOKS: Final = 2000  # at ports, at least, before a range has none: some 20 ms
_LEAST_ROUNDS: Final = 3


def with_free_port(make: Callable[[str | None], T], devices: str | None) -> T:
    """Call `make`, which has UCX listen, so that it takes a port of `UCX_TCP_PORT_RANGE` that is free.

    Args:
        make: is given the range of one port that UCX is to take; None: as the environment says.
        devices: on which UCX listens, as `UCX_NET_DEVICES` has them.

    Raises:
        MeshError: there is none, or it is no range of ports.
    """
    given = os.environ.get(PORTS, "")
    ports = _read_range(given)
    if ports is None or devices == "":  # any port, or UCX's own error; or it listens nowhere
        return make(None)
    for port in _free(ports, addresses_of_devices(devices)):
        try:
            return make(f"{port}-{port}")
        except Exception as error:  # which of UCX's it is says its name: it is not to be imported here
            if type(error).__name__ != "UCXXBusyError":  # taken since: the next
                raise
    raise MeshError(
        f"ports= {given} ({PORTS}) has no free port left on host {socket.gethostname()}; each process there needs one, "
        "and one that was given back rests for a minute (TIME-WAIT): give a larger range, or one that no other program "
        "uses (`ss -tanp` there lists who does, and ports at rest)"
    )


def _read_range(given: str) -> range | None:
    """The ports of `"47000-47100"` or `"47000"`, read as UCX does: blanks in front of a number, anything behind it.

    Returns:
        None: any port (0), or nothing that UCX can read either.

    Raises:
        MeshError: these cannot be TCP ports. UCX would cut the numbers off, or look for ever.
    """
    first, dash, last = given.partition("-")
    numbers = [re.match(r"\s*\+?(\d+)", part, re.ASCII) for part in (first, last if dash else first)]
    begin, end = (int(number[1]) if number else -1 for number in numbers)
    if begin <= 0 or end < 0:
        return None
    if not begin <= end <= _LAST_PORT:
        raise MeshError(f"{PORTS}={given} (ports=) is no range of TCP ports: give the first and the last, up to 65535")
    return range(begin, end + 1)


def _free(ports: range, addresses: list[str]) -> Iterator[int]:
    """Those on which nobody listens now, several times over.

    Processes that start together begin at different ones, and still may find a port taken for the moment in which
    another one looks at it: a small range is gone through again, at others' turns.
    """
    begin = os.getpid() % len(ports)
    for _ in range(max(_LEAST_ROUNDS, _LOOKS // len(ports))):
        for port in (*ports[begin:], *ports[:begin]):
            if _is_free(port, addresses):
                yield port
        os.sched_yield()


def _is_free(port: int, addresses: list[str]) -> bool:
    with contextlib.ExitStack() as sockets:
        try:
            for address in addresses:
                # As UCX binds its own: without SO_REUSEADDR.
                sockets.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)).bind((address, port))
        except OSError:
            return False
    return True
