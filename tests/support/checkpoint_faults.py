"""Faults while actors write: `RemoteMesh(setup="checkpoint_faults:install", env=checkpoint_faults.ENV)`. What
is in the tree says what happens to the actor that writes it: a leaf `full` meets a full disk, a leaf `die`
kills the process."""

from __future__ import annotations

import os
import resource
import signal
from typing import Any

HERE = os.path.dirname(__file__)
ENV = {"PYTHONPATH": os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


def install() -> None:
    """Runs in the actor."""
    from jaxpp_async.storage import tensor_files

    original = tensor_files.write

    def write(path: str, arrays: Any, metadata: Any, is_stopped: Any) -> Any:
        if "die" in arrays:
            with open(path + tensor_files.PARTIAL, "wb") as file:
                file.write(b"half a header")
            os.kill(os.getpid(), signal.SIGKILL)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            if "full" in arrays:
                resource.setrlimit(resource.RLIMIT_FSIZE, (256, limit[1]))
            return original(path, arrays, metadata, is_stopped)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    tensor_files.write = write
