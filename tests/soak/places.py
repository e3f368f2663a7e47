"""places: where a soak's actors run: on this machine, or on hosts of their own, with links that can be cut.
Out: what `RemoteMesh` has to be told, and the network."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import namespaces
from lockstep import SoakFailure
from namespaces import Network


@dataclass(frozen=True)
class Place:
    """Where the actors of the disturbed mesh run; the undisturbed one is always on this machine.

    Args:
        options: of its `RemoteMesh`.
        network: of their hosts, one an actor; None: they are here.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    network: Network | None = None

    def __str__(self) -> str:
        where = "on this machine" if self.network is None else "on hosts of their own (network namespaces)"
        return f"{where}, data over {os.environ.get('UCX_TLS', 'whatever UCX takes')}"


@contextlib.contextmanager
def place(num_actors: int, *, with_links: bool, tcp: bool) -> Iterator[Place]:
    """One place; nothing of it is there afterwards.

    Args:
        with_links: hosts of their own.
        tcp: without it, actors of one host share memory, and there is no connection to cut.

    Raises:
        SoakFailure: something is still there.
    """
    if not with_links:
        if tcp:
            os.environ.setdefault("UCX_TLS", "tcp,self")
        yield Place()
        return
    # All hosts share this machine's memory, which UCX would find out.
    os.environ.update(UCX_TLS="tcp", UCX_NET_DEVICES=namespaces.INTERFACE["data"])
    before = namespaces.present()
    folder = tempfile.TemporaryDirectory(prefix="jaxpp-soak-net-")
    with folder, namespaces.network(Path(folder.name), num_actors) as network:
        yield Place(_options(network), network)
    if left := namespaces.present() - before:
        raise SoakFailure(f"left of the network: {sorted(left)}")


def _options(network: Network) -> dict[str, Any]:
    return {
        "hosts": [host.address["control"] for host in network.hosts],
        "ssh_options": network.ssh_options,
        "interface": namespaces.INTERFACE["data"],
        "env": {"UCX_TLS": "tcp"},
        "compilation_cache": jax.config.jax_compilation_cache_dir,  # pyright: ignore[reportAttributeAccessIssue]
    }
