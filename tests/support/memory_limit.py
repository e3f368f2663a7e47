"""A limit of the kernel's on a process's memory: a control group of its own, where this user may make one."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def memory_limit(pid: int, limit_bytes: int) -> Iterator[None]:
    """Hold a process to so much memory beyond what it has; the test is skipped where that is not allowed."""
    name = f"jaxpp-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    older = (_ROOT / "memory").is_dir()
    group = _ROOT / "memory" / name if older else _ROOT / name
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here, which takes root: {error}")
    try:
        try:
            limit = group / ("memory.limit_in_bytes" if older else "memory.max")
            limit.write_text(str(limit_bytes))
            (group / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            pytest.skip(f"control groups here do not limit memory: {error}")
        yield
    finally:
        with contextlib.suppress(OSError):  # the process may have gone already
            (group.parent / "cgroup.procs").write_text(str(pid))
        group.rmdir()
