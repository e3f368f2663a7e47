"""ports: a port for UCX to listen on, found before UCX looks for one. What makes a worker in, that worker out.

Where every port of `UCX_TCP_PORT_RANGE` is taken, UCX draws one after the other for ever; where the range is one port,
it prints lines of its own. Never listens itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from jaxpp_async.errors import MeshError
from jaxpp_async.transport.ucx.net_devices import DEVICES, named_devices

T = TypeVar("T")

PORTS: Final = "UCX_TCP_PORT_RANGE"

_GIVE_ADDRESS = 0x8915  # SIOCGIFADDR


def with_free_port(make: Callable[[], T]) -> T:
    """Call `make`, which has UCX listen, so that it takes a port of `UCX_TCP_PORT_RANGE` that is free.

    Raises:
        MeshError: there is none.
    """
    given = os.environ.get(PORTS, "")
    first, dash, last = given.partition("-")
    if not (dash and first.isdigit() and last.isdigit() and int(first) > 0):  # UCX's own default, or its own error
        return make()
    try:
        for port in _free(range(int(first), int(last) + 1), _addresses(os.environ.get(DEVICES, ""))):
            # Only UCX sees this: `os.environ`, which other processes start with, stays as it is.
            os.putenv(PORTS, f"{port}-{port}")
            try:
                return make()
            except Exception as error:
                if type(error).__name__ != "UCXXBusyError":  # not to be imported here. Taken since: the next
                    raise
    finally:
        os.putenv(PORTS, given)
    raise MeshError(
        f"ports= {given} ({PORTS}) has no free port left on host {socket.gethostname()}; each process there needs "
        "one: give a larger range, or one that no other program uses (`ss -ltnp` there lists who does)"
    )


def _free(ports: range, addresses: list[str]) -> Iterator[int]:
    """Those on which nobody listens now. Processes that start together begin at different ones."""
    begin = os.getpid() % max(1, len(ports))
    for port in (*ports[begin:], *ports[:begin]):
        with contextlib.ExitStack() as sockets:
            try:
                for address in addresses:
                    # As UCX binds its own: without SO_REUSEADDR.
                    sockets.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)).bind((address, port))
            except OSError:
                continue
        yield port


def _addresses(names: str) -> list[str]:
    """IPv4 addresses of the devices on which UCX will listen; UCX takes IPv6 only where there is none."""
    asked = named_devices(names)
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            if asked is None or name in asked:
                with contextlib.suppress(OSError):  # it has no address
                    request = struct.pack("256s", name.encode()[:15])
                    found.append(socket.inet_ntoa(fcntl.ioctl(sock.fileno(), _GIVE_ADDRESS, request)[20:24]))
    return found
