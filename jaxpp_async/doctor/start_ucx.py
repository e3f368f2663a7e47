"""The program `python -m jaxpp_async.doctor.start_ucx`: starts UCX as an actor would, prints what it finds."""

from __future__ import annotations

import json
from pathlib import Path

from jaxpp_async.errors import InstallError, MeshError
from jaxpp_async.transport.ucx.context import open_context, resources


def main() -> None:
    """Print one line: an object, or a string that says why there is none."""
    try:
        context = open_context(None)
    except (InstallError, MeshError) as error:
        print(json.dumps(str(error)))
        return
    version = ".".join(map(str, context.ucxx.get_ucx_version()))
    print(json.dumps({"version": version, "library": _library(), "resources": resources(context.ucp.info)}))


def _library() -> str:
    """The libucp that this process has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/libucp.so" in line:
            return line[line.index("/") :]
    return ""


if __name__ == "__main__":
    main()
