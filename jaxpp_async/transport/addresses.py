"""addresses: a medium's raw address in, one that can be checked out, and back. Pure: no I/O.

A raw address goes into code that trusts it: one garbage byte in a UCX worker address ends the process. So it travels
with what it is, whose, of which epoch, and a SHA-256 of all of that. This finds damage, mix-ups and what is out of
date; who made it is for the control channel to know, whose frames carry a MAC and are the one way that addresses come.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Final

from jaxpp_async.errors import ProtocolError
from jaxpp_async.transport.base import Peer

MAX_RAW_BYTES: Final = 1 << 16
_MAGIC: Final = b"JXA"
_VERSION: Final = 2
_HEADER: Final = struct.Struct(">3sB8siIH")  # magic, version, medium, peer, epoch, how long the list of hosts is
_DIGEST_BYTES: Final = hashlib.sha256().digest_size


def seal(medium: str, raw: bytes, peer: Peer, epoch: int, hosts: Iterable[str] = ()) -> bytes:
    """A raw address as it travels.

    Args:
        medium: `"ucx"`, at most 8 ASCII letters.
        raw: what the medium itself gave.
        peer: whose it is. epoch: of the mesh, in which it is good.
        hosts: IP addresses on which its TCP sockets listen, and from which it connects to others.
    """
    listed = ",".join(sorted(set(hosts))).encode("ascii")
    header = _HEADER.pack(_MAGIC, _VERSION, medium.encode("ascii"), peer, epoch, len(listed))
    return header + _digest(header, listed + raw) + listed + raw


def hosts_of(address: bytes) -> tuple[str, ...]:
    """The IP addresses that a sealed address lists; none if it is no such address: `unseal` says why."""
    start = _HEADER.size + _DIGEST_BYTES
    if len(address) < start or address[:4] != _MAGIC + bytes([_VERSION]):
        return ()
    *_, length = _HEADER.unpack(address[: _HEADER.size])
    listed = address[start : start + length].decode("ascii", "replace")
    return tuple(listed.split(",")) if listed else ()


def unseal(medium: str, address: bytes, peer: Peer, epoch: int) -> bytes:
    """The raw address, if `address` is `peer`'s and of `epoch`.

    Raises:
        ProtocolError: it is damaged, of another kind, somebody else's, or out of date.
    """
    data = bytes(address)
    start = _HEADER.size + _DIGEST_BYTES
    if len(data) < start or not data.startswith(_MAGIC):
        raise ProtocolError(f"{len(data)} bytes are no address of peer {peer}; do both sides use transport {medium!r}?")
    header, digest, raw = data[: _HEADER.size], data[_HEADER.size : start], data[start:]
    _, version, kind, owner, made, num_listed = _HEADER.unpack(header)
    if version != _VERSION:
        raise ProtocolError(f"peer {peer}'s address has layout {version}, here {_VERSION}: install the same version")
    if digest != _digest(header, raw):
        raise ProtocolError(f"peer {peer}'s {medium} address of {len(data)} bytes is damaged (checksum)")
    if kind.rstrip(b"\0") != medium.encode("ascii"):
        raise ProtocolError(f"peer {peer}'s address is of transport {kind.rstrip(bytes(1))!r}, expected {medium!r}")
    if owner != peer:
        raise ProtocolError(f"expected the {medium} address of peer {peer}, got that of peer {owner}")
    if made != epoch:
        raise ProtocolError(
            f"peer {peer}'s {medium} address is of epoch {made}, but this is epoch {epoch}: out of date"
        )
    if not 0 < len(raw) - num_listed <= MAX_RAW_BYTES:
        raise ProtocolError(f"peer {peer}'s {medium} address has {len(raw)} bytes, which is not plausible")
    return raw[num_listed:]


def _digest(header: bytes, raw: bytes) -> bytes:
    return hashlib.sha256(header + raw).digest()
