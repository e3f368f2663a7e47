"""The program `python -m jaxpp_async.doctor.start_jax PLATFORM`: starts JAX and prints what it found as JSON.

It also makes the folder of the compilation cache, as an actor would: what is wrong with it is part of what is found.
"""

from __future__ import annotations

import json
import os
import sys

from jaxpp_async.errors import MeshError


def main() -> None:
    """Print one line: an object, or a string that says why there is none."""
    platform = sys.argv[1]
    os.environ["JAX_PLATFORMS"] = platform
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # somebody's run may need the memory
    try:
        import jax

        from jaxpp_async.compilation_cache import DEFAULT, make_cache  # it needs JAX, which may be missing

        devices = jax.devices(platform)
    except (ImportError, RuntimeError) as error:
        lines = str(error).strip().splitlines()
        print(json.dumps(f"{type(error).__name__}: {lines[0] if lines else 'it said nothing'}"))
        return
    cache_error = ""
    try:
        make_cache(DEFAULT)
    except MeshError as error:
        cache_error = str(error)
    kind, platform = devices[0].device_kind, devices[0].platform
    found = {"platform": platform, "num_devices": len(devices), "device_kind": kind, "cache_error": cache_error}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
