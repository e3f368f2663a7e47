"""joining: a transport's name in, this process's end of the data plane out. It connects to nobody, and reads one
variable of the environment.

UCX and NCCL are imported once they are named: a process without a GPU needs no NCCL.
"""

from __future__ import annotations

import os

from jaxpp_async.errors import MeshError
from jaxpp_async.transport.base import Transport
from jaxpp_async.transport.network import Network

ERROR_HANDLING = "JAXPP_UCX_ERROR_HANDLING"
"""`n` switches UCX's error handling off, for this process and the actors it starts here; see `UCXTransport`."""


def make_process_transport(kind: str, peer_id: int, network: Network | None = None) -> Transport:
    """The end of a data plane that joins processes.

    Args:
        network: where it listens; None: as the environment says, and everybody may connect.

    Raises:
        MeshError: a data plane that does not exist, does not leave the process, or lacks what it needs.
    """
    if kind == "ucx":
        from jaxpp_async.transport.ucx.transport import UCXTransport

        return UCXTransport(peer_id, network=network, error_handling=os.environ.get(ERROR_HANDLING, "y") != "n")
    if kind == "nccl":
        from jaxpp_async.transport.nccl.library import load_library
        from jaxpp_async.transport.nccl.transport import NcclTransport

        return NcclTransport(peer_id, load_library())
    if kind == "memory":
        raise MeshError('transport "memory" does not leave a process: use it with launcher="inline", or "ucx" here')
    raise MeshError(f'unknown transport {kind!r}: choose "ucx" or "nccl"')
