"""contenders: which programs of this folder take part in which part of a benchmark run. Starts nothing.

`bench.py` asks; names are keys of the results. Plain JAX runs in this project's environment, the others in the peers'
(`make bench-peers` makes it).
"""

from __future__ import annotations

from pathlib import Path

from rounds import Contender, ours

PYTHON = Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"


def contenders(part: str, *, with_peers: bool) -> list[Contender]:
    """Those of one part (a name of `parts.PARTS`), in the order of the results.

    Args:
        with_peers: also those that need the peers' environment.
    """
    return _PLAIN_JAX.get(part, []) + (_PEERS.get(part, []) if with_peers else [])


def _peer(name: str, program: str, *args: str) -> Contender:
    return Contender(name, (str(PYTHON), str(Path(__file__).parent / program), *args))


_PLAIN_JAX = {
    "tiny_step": [ours("jax_spmd", "peers/jax_spmd.py", "tiny"), ours("jit", "peers/jax_jit.py", "tiny")],
    "big_step": [
        ours("jax_spmd", "peers/jax_spmd.py", "big"),
        ours("jit_one_core", "peers/jax_jit.py", "big", "--cores", "1"),
        ours("jit_two_cores", "peers/jax_jit.py", "big", "--cores", "2"),
    ],
}
_PEERS = {
    "tiny_step": [_peer("torch", "torch_pipeline.py", "tiny"), _peer("ray", "ray_tasks.py", "tiny")],
    "big_step": [_peer("torch", "torch_pipeline.py", "big")],
    "rpc_us": [_peer("ray", "ray_tasks.py", "rpc"), _peer("monarch", "monarch_rpc.py")],
}
