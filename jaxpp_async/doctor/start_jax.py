"""The program `python -m jaxpp_async.doctor.start_jax PLATFORM`: starts JAX and prints what it found as JSON."""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Print one line: an object, or a string that says why there is none."""
    platform = sys.argv[1]
    os.environ["JAX_PLATFORMS"] = platform
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # somebody's run may need the memory
    try:
        import jax

        devices = jax.devices(platform)
    except (ImportError, RuntimeError) as error:
        lines = str(error).strip().splitlines()
        print(json.dumps(f"{type(error).__name__}: {lines[0] if lines else 'it said nothing'}"))
        return
    kind = devices[0].device_kind
    print(json.dumps({"platform": devices[0].platform, "num_devices": len(devices), "device_kind": kind}))


if __name__ == "__main__":
    main()
