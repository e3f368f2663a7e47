"""agreement: what the processes of a mesh have for devices in; why they cannot work together out. Pure.

Asked once all have come up, before anything is compiled. What a host can say of itself alone (a GPU is missing, or its
memory set aside twice by actors that were started together) it has said by then; here is what only all of them show.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxpp_async.errors import MeshError
from jaxpp_async.extras import pip_install
from jaxpp_async.transport.nccl.plan import MULTI_RANK, ONE_GPU

MOST = 1.0
"""Shares of one GPU's memory may add up to this."""

_SLACK = 1e-6  # thirds are written as .333333

_UNIQUE = ("GPU-", "MIG-")
"""How names begin that no two GPUs in the world share."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process, and its devices.

    Args:
        who: for errors, such as `"actor 1 (host n2, pid 7)"`.
        actor: whose process it is.
        host: on which machine.
        cuda: version of the CUDA that JAX is for, such as `"13.0"`; empty without GPUs.
        gpus: their UUIDs, or whatever tells the GPUs of a machine apart; empty: not known.
        memory_fraction: how much of each GPU's memory it sets aside; 0: none beforehand.
        nccl: version of the NCCL that programs transfer over; empty with other transports.
        nccl_shares: whether that takes two ranks on one GPU.
    """

    who: str
    actor: int
    host: str
    cuda: str = ""
    gpus: tuple[str, ...] = ()
    memory_fraction: float = 0.0
    nccl: str = ""
    nccl_shares: bool = False

    @property
    def named_gpus(self) -> list[str]:
        """What to call its GPUs, so that equal names mean one GPU: one machine may be known by several names, and a
        UUID needs none."""
        return [gpu if gpu.startswith(_UNIQUE) else f"{gpu} of host {self.host}" for gpu in self.gpus]


def check_agreement(members: Sequence[Member]) -> None:
    """Raises:
    MeshError: they cannot work together: JAXs for different CUDAs, NCCLs of different versions, a GPU that two
        processes of one actor have, one that two have between which NCCL refuses to send, or one whose memory is set
        aside more than once.
        Names who, and says what to do.
    """
    for why in (_cudas(members), _nccls(members), _twice(members), _between(members), _shared(members)):
        if why is not None:
            raise MeshError(why)


def _cudas(members: Sequence[Member]) -> str | None:
    by_cuda = _grouped((member.cuda.partition(".")[0], member.who) for member in members if member.cuda)
    if len(by_cuda) < 2:
        return None
    said = "; ".join(f"CUDA {major}: {_names(who)}" for major, who in by_cuda.items())
    return (
        f"JAX is for different CUDAs ({said}); install the same extra on all hosts, {pip_install('cuda13')} or "
        f"{pip_install('cuda12')}"
    )


def _nccls(members: Sequence[Member]) -> str | None:
    """Both ends of a communicator need the same."""
    by_nccl = _grouped((member.nccl, member.who) for member in members if member.nccl)
    if len(by_nccl) < 2:
        return None
    said = "; ".join(f"NCCL {version}: {_names(who)}" for version, who in by_nccl.items())
    return (
        f"programs transfer over NCCL, of which there are different versions ({said}); install the same version "
        "(nvidia-nccl-cu13 or -cu12) on all hosts"
    )


def _twice(members: Sequence[Member]) -> str | None:
    """XLA's collectives are between different GPUs: an actor cannot have one of them as two of its devices."""
    by_gpu = _grouped(((gpu, member.actor), member.who) for member in members for gpu in member.named_gpus)
    for (gpu, actor), who in by_gpu.items():
        if len(who) > 1:
            return (
                f"{_names(who)} have GPU {gpu}, but actor {actor} wants a GPU for each device; "
                "make spmd_mesh smaller, name more GPUs with devices=, or give it more hosts"
            )
    return None


def _between(members: Sequence[Member]) -> str | None:
    """Neighbours send to each other in every pipeline. Whether others do is the program's: their links will tell."""
    by_gpu = _grouped((gpu, member) for member in members for gpu in member.named_gpus if member.nccl)
    for gpu, sharing in by_gpu.items():
        for one, other in pairwise(sorted(sharing, key=lambda member: member.actor)):
            if other.actor - one.actor == 1 and not (one.nccl_shares and other.nccl_shares):
                return (
                    f"{_names([one.who, other.who])} share GPU {gpu}, and {ONE_GPU} where they send to each other over "
                    f"NCCL {one.nccl}, which refuses that; give each actor a GPU of its own (devices=), leave "
                    f"transport= out for UCX, or, with NCCL 2.30 or later, try env={{'{MULTI_RANK}': '1'}}"
                )
    return None


def _shared(members: Sequence[Member]) -> str | None:
    by_gpu = _grouped((gpu, member) for member in members for gpu in member.named_gpus)
    for gpu, sharing in by_gpu.items():
        total = sum(member.memory_fraction for member in sharing)
        if len(sharing) > 1 and total > MOST + _SLACK:
            each = ", ".join(f"{member.memory_fraction:.3g}" for member in sharing)
            part = f"env={{'XLA_PYTHON_CLIENT_MEM_FRACTION': '{0.9 / len(sharing):.2f}'}}"
            return (
                f"{_names([member.who for member in sharing])} share GPU {gpu}, and set aside {each} of "
                f"its memory, {total:.3g} together; give each its part, such as {part}, or each actor a GPU: devices="
            )
    return None


def _grouped(pairs: Iterable[tuple]) -> Mapping:
    found: dict = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def _names(who: Sequence[str]) -> str:
    """A few of them, and how many there are besides."""
    shown = ", ".join(who[:4])
    return shown if len(who) <= 4 else f"{shown} and {len(who) - 4} more"
