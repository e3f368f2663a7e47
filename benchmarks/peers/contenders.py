"""contenders: a part of the benchmark in, the programs of this folder that are measured in it out. Starts
nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rounds import Contender

HERE = Path(__file__).parent
PYTHON = HERE.parent.parent / ".venv-peers" / "bin" / "python"
"""Of the environment that `make bench-peers` makes."""


def contenders(part: str, *, with_peers: bool) -> Sequence[Contender]:
    """Who is measured beside us.

    Args:
        part: a key of `results/latest.json`.
        with_peers: also what needs the peers' environment. One that is not installed there fails when it is
            started, and its last words say what is missing.
    """
    ours = {
        "tiny_step": [_jax("jit", "jax_jit.py", "tiny"), _jax("jax_spmd", "jax_spmd.py", "tiny")],
        "big_step": [
            _jax("jit_one_core", "jax_jit.py", "big", "--cores", "1"),
            _jax("jit_two_cores", "jax_jit.py", "big", "--cores", "2"),
            _jax("jit_two_cores_whole", "jax_jit.py", "big", "--cores", "2", "--whole"),
            _jax("jax_spmd", "jax_spmd.py", "big"),
        ],
    }
    theirs = {
        "tiny_step": [_peer("torch", "torch_pipeline.py", "tiny"), _peer("ray", "ray_tasks.py", "tiny")],
        "big_step": [
            _peer("torch", "torch_pipeline.py", "big"),
            _peer("torch_default_threads", "torch_pipeline.py", "big", "--default-threads"),
        ],
        "rpc_us": [_peer("ray", "ray_tasks.py", "rpc"), _peer("monarch", "monarch_rpc.py")],
    }
    return [*ours.get(part, []), *(theirs.get(part, []) if with_peers else [])]


def _jax(name: str, program: str, *args: str) -> Contender:
    """In the environment of this process."""
    return Contender(name, (sys.executable, str(HERE / program), *args), env={"JAX_PLATFORMS": "cpu"})


def _peer(name: str, program: str, *args: str) -> Contender:
    return Contender(name, (os.fspath(PYTHON), str(HERE / program), *args))
