"""Test on this host whether JAX or UCX starts as it would in an actor. The command is `python -m
jaxpp_async.doctor.probe_programs ucx`, or the same with `jax PLATFORM` instead of `ucx`.

The program prints one line of JSON: an object with what the library found, or a string that says why the
library did not start. The test of JAX also makes the folder of the compilation cache as an actor would, so
that the test shows whether the folder can be used.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import msgspec

from jaxpp_async.doctor.facts import JaxStart, Ucx, UcxResource
from jaxpp_async.errors import InstallError, MeshError


def probe_jax(platform: str) -> JaxStart | str:
    """Start JAX on a platform and make the folder of the compilation cache, to test whether an actor could do
    the same.

    Args:
        platform: the name of the platform in `JAX_PLATFORMS`.

    Returns:
        The result of the start, or the text of the error if JAX did not start.
    """
    os.environ["JAX_PLATFORMS"] = platform
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # another run may need the memory
    try:
        import jax

        from jaxpp_async.jax_bridge.compilation_cache import DEFAULT, make_cache  # this needs JAX

        devices = jax.devices(platform)
    except (ImportError, RuntimeError) as error:
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else 'it said nothing'}"
    cache_error = ""
    try:
        make_cache(DEFAULT)
    except MeshError as error:
        cache_error = str(error)
    return JaxStart(devices[0].platform, len(devices), devices[0].device_kind, cache_error)


def probe_ucx() -> Ucx | str:
    """Start UCX as an actor does, to test whether UCX works on this host.

    Returns:
        The facts about UCX, or the text of the error if UCX did not start.
    """
    from jaxpp_async.transport.ucx.context import open_context, resources  # JAX's probe does not need it

    try:
        context = open_context(None)
    except (InstallError, MeshError) as error:
        return str(error)
    version = ".".join(map(str, context.ucxx.get_ucx_version()))
    found = tuple(UcxResource(transport, device) for transport, device in resources(context.ucp.info))
    return Ucx(version, _loaded_libucp(), found)


def _loaded_libucp() -> str:
    """Return the path of the file libucp.so (a library of UCX) that this process has loaded; empty if it has
    loaded none.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/libucp.so" in line:
            return line[line.index("/") :]
    return ""


if __name__ == "__main__":
    result = probe_ucx() if sys.argv[1] == "ucx" else probe_jax(sys.argv[2])
    print(json.dumps(msgspec.to_builtins(result)))
