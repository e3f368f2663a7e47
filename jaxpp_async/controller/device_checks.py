"""Check that the processes of a mesh can work together: their versions of JAX, their GPUs, their NCCL.

These checks need facts from all processes, so they run when all actors have started, and before anything is
compiled. Checks that concern one host only were made earlier: that no GPU is missing, and that actors which
were started together on the host do not reserve the same GPU memory twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise

from jaxpp_async.base.install_hints import SAME_VERSIONS, pip_install
from jaxpp_async.base.printable import listed
from jaxpp_async.controller.error_messages import location
from jaxpp_async.errors import HandshakeError, MeshError
from jaxpp_async.protocol.actor_info import ActorInfo
from jaxpp_async.transport.nccl.order import MULTI_RANK, ONE_GPU

MOST = 1.0
"""The largest allowed sum of the fractions of one GPU's memory that the processes on it set aside."""


_SLACK = 1e-6  # a third may have been written as .333333


_UNIQUE = ("GPU-", "MIG-")
"""The beginnings of GPU names that are unique worldwide: UUIDs of GPUs, and of their instances (MIG)."""


@dataclass(frozen=True, slots=True)
class ProcessDevices:
    """The devices of one process, for checks of all processes together.

    Args:
        who: the process's name in errors, such as `"actor 1 (host n2, pid 7)"`.
        actor: the id of the actor that the process belongs to.
        host: the name of the machine on which the process runs.
        cuda: the version of CUDA for which its JAX was built, such as `"13.0"`; empty without GPUs.
        gpus: the UUIDs of its GPUs, or other names that are unique on its host; empty if not known.
        memory_fraction: the fraction of each GPU's memory that the process allocates in advance; 0: none.
        nccl: the version of the NCCL that programs use for transfers; empty with other transports.
        nccl_shares: whether this NCCL allows two ranks on one GPU.
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
        """The names of the process's GPUs, chosen so that equal names of two processes mean the same GPU.

        A UUID is used alone, because one machine may be known by several host names. To any other name the
        host's name is added.
        """
        return [gpu if gpu.startswith(_UNIQUE) else f"{gpu} of host {self.host}" for gpu in self.gpus]


def check_agreement(members: Sequence[ProcessDevices]) -> None:
    """Check that the processes of a mesh can work together with the devices and libraries that they have.

    Args:
        members: the devices of every process of the mesh.

    Raises:
        MeshError: the processes cannot work together, for one of these reasons: their copies of JAX are built
            for different versions of CUDA; they have different versions of NCCL; two processes of one actor
            have the same GPU; two actors share a GPU and NCCL refuses to send between these actors; or more
            than the whole memory of a GPU is allocated in advance. The error names the processes and says
            what to do.
    """
    for why in (
        _cuda_conflict(members),
        _nccl_conflict(members),
        _gpu_twice_in_actor(members),
        _gpu_of_neighbours(members),
        _memory_conflict(members),
    ):
        if why is not None:
            raise MeshError(why)


def check_library_versions(actor: ActorInfo, versions: Mapping[str, str]) -> None:
    """Check that an actor has the same versions of jax and jaxlib as the controller.

    Args:
        actor: the actor process to check.
        versions: the version of each library that the process reported.

    Raises:
        HandshakeError: a version differs.
    """
    for name in SAME_VERSIONS:
        theirs = versions.get(name)
        ours = metadata.version(name) if theirs is not None else None
        if theirs != ours:
            raise HandshakeError(
                f"{actor} runs {name} {theirs}, the controller {ours}; install the same version on both",
                **location(actor),
            )


def _cuda_conflict(members: Sequence[ProcessDevices]) -> str | None:
    by_cuda = _grouped((member.cuda.partition(".")[0], member.who) for member in members if member.cuda)
    if len(by_cuda) < 2:
        return None
    said = "; ".join(f"CUDA {major}: {listed(who, 4)}" for major, who in by_cuda.items())
    return (
        f"JAX is for different CUDAs ({said}); install the same extra on all hosts, "
        f"{pip_install('cuda13')} or {pip_install('cuda12')}"
    )


def _nccl_conflict(members: Sequence[ProcessDevices]) -> str | None:
    """Return an error text if processes have different versions of NCCL, and None otherwise.

    Both ends of a communicator need the same version.
    """
    by_nccl = _grouped((member.nccl, member.who) for member in members if member.nccl)
    if len(by_nccl) < 2:
        return None
    said = "; ".join(f"NCCL {version}: {listed(who, 4)}" for version, who in by_nccl.items())
    return (
        f"programs transfer over NCCL, of which there are different versions ({said}); install "
        "the same version (nvidia-nccl-cu13 or -cu12) on all hosts"
    )


def _gpu_twice_in_actor(members: Sequence[ProcessDevices]) -> str | None:
    """Return an error text if one GPU serves as two devices of the same actor, and None otherwise.

    XLA's collectives only run between different GPUs.
    """
    by_gpu = _grouped(((gpu, member.actor), member.who) for member in members for gpu in member.named_gpus)
    for (gpu, actor), who in by_gpu.items():
        if len(who) > 1:
            return (
                f"{listed(who, 4)} have GPU {gpu}, but actor {actor} wants a GPU for each device; "
                "make spmd_mesh smaller, name more GPUs with devices=, or give it more hosts"
            )
    return None


def _gpu_of_neighbours(members: Sequence[ProcessDevices]) -> str | None:
    """Return an error text if actors with consecutive ids share a GPU though NCCL forbids it, and None
    otherwise.

    Actors with consecutive ids usually send arrays to each other. Whether other actors do so depends on the
    program. For those, the error is raised later, when the NCCL link between them is made.
    """
    by_gpu = _grouped((gpu, member) for member in members for gpu in member.named_gpus if member.nccl)
    for gpu, sharing in by_gpu.items():
        for one, other in pairwise(sorted(sharing, key=lambda member: member.actor)):
            if other.actor - one.actor == 1 and not (one.nccl_shares and other.nccl_shares):
                return (
                    f"{listed([one.who, other.who], 4)} share GPU {gpu}, and {ONE_GPU} where they send to "
                    f"each other over NCCL {one.nccl}, which refuses that; give each actor a GPU of its own "
                    "(devices=), leave transport= out for UCX, or, with NCCL 2.30 or later, "
                    f"try env={{'{MULTI_RANK}': '1'}}"
                )
    return None


def _memory_conflict(members: Sequence[ProcessDevices]) -> str | None:
    by_gpu = _grouped((gpu, member) for member in members for gpu in member.named_gpus)
    for gpu, sharing in by_gpu.items():
        total = sum(member.memory_fraction for member in sharing)
        if len(sharing) > 1 and total > MOST + _SLACK:
            each = ", ".join(f"{member.memory_fraction:.3g}" for member in sharing)
            part = f"env={{'XLA_PYTHON_CLIENT_MEM_FRACTION': '{0.9 / len(sharing):.2f}'}}"
            return (
                f"{listed([member.who for member in sharing], 4)} share GPU {gpu}, and set aside {each} of "
                f"its memory, {total:.3g} together; give each its part, such as {part}, "
                "or each actor a GPU: devices="
            )
    return None


def _grouped(pairs: Iterable[tuple]) -> Mapping:
    found: dict = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
