"""routes: by which ways a transport reaches its peers in, which of them make device memory go through the host's out.
Plain data.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxpp_async.program import ProcessId

_READ_DEVICE_MEMORY = ("rc", "dc", "gga")
"""Beginnings of UCX's names of transports between hosts (`rc_mlx5`, `dc_mlx5`) that can read and write device memory
where it lies. That they do also takes a driver (docs/gpu.md), and UCX does not tell."""


def staged(routes: Mapping[ProcessId, tuple[str, ...]]) -> dict[ProcessId, tuple[str, ...]]:
    """The peers that device memory reaches only by copies in host memory, with the ways to them. A peer whose ways are
    not known is none of them."""
    return {peer: ways for peer, ways in routes.items() if ways and not any(map(_is_direct, ways))}


def _is_direct(way: str) -> bool:
    return way == "cuda_ipc" or way.partition("_")[0] in _READ_DEVICE_MEMORY
