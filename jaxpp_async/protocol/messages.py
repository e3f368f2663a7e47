"""messages: what controller and actor say to each other over the control channel. Plain frozen data, no I/O.

Requests go controller to actor and carry a `request` number; the actor answers each with exactly one reply bearing the
same number: the reply type named in the request's docstring, or `Failed`. `protocol` turns messages into frames.

starting   how actors start, connect and end
steps      programs, the steps that run them, values in and out
files      what is written to checkpoints and read of them
restarts   aborts, and the copies from which actors go on
where      where an actor is, how it does and what it says of itself

steps: programs, the steps that run them, and the values that go in and come out. Plain frozen data, no I/O.

files: what actors write to checkpoints and read of them. Plain frozen data, no I/O.

Paths travel as the bytes that the file system has, so that every name it allows is one here; they are absolute.

restarts: aborts, and the copies from which actors go on after one. Plain frozen data, no I/O.

starting: what is said while actors start, connect and end. Plain frozen data, no I/O.

where: where an actor is, how it does and what it says of itself. Plain frozen data, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from jaxpp_async.program.instructions import ActorId, Aval, BufferId, ProcessId, Tag

ArrayId: TypeAlias = int
"""Names one array of the mesh; given out by the controller, counting up, never used twice."""

StepId: TypeAlias = int
"""Names one run of a program on all its actors; counts up over a mesh's life.

Users count the steps that they run and nothing else. So an id has the number of the user's step that its run is or goes
ahead of, then how many runs go ahead of that step too, then which kind of run it is: see `step_id`.
"""

RunKind: TypeAlias = Literal["move", "init", "step"]
"""An argument carried to where a step needs it, the program of a `step.init`, or a step of the user's."""

_TEXTS: Final[dict[RunKind, str]] = {
    "move": "a move for step {}",
    "init": "an init ahead of step {}",
    "step": "step {}",
}
_KINDS: Final = tuple(_TEXTS)


def step_id(number: int, kind: RunKind = "step", ahead: int = 0) -> StepId:
    """The id of one run.

    Args:
        number: of the user's step, counted from 0 over the mesh's life.
        ahead: how many moves and inits came before this run and behind the user's step before.
    """
    return number << 32 | ahead << 2 | _KINDS.index(kind)


def step_number(step: StepId) -> int:
    """The number of the user's step that a run is, or goes ahead of."""
    return step >> 32


def step_kind(step: StepId) -> RunKind:
    """Which kind of run it is."""
    return _KINDS[min(step & 3, len(_KINDS) - 1)]  # whatever an actor has sent


def step_text(step: StepId) -> str:
    """Name a run for users, such as `"step 7"` or `"a move for step 7"`."""
    return _TEXTS[step_kind(step)].format(step_number(step))


INLINE_BYTES = 16 * 1024
"""Host values up to this size ride in control frames; larger ones take the data plane."""


@dataclass(frozen=True, slots=True)
class Load:
    """Compile what is new of `executables` and keep the program. Answer: `Loaded`.

    Args:
        program_id: given out by the controller; `Step` names it.
        program: text of the `ActorProgram`.
        executables: a content key for each executable index the program uses.
        blobs: serialized `jax.export.Exported`, by content key; only keys this actor has not been sent before.
        names: the user's names of the step's arguments, by number, where errors may have to name them.
    """

    request: int
    program_id: int
    program: str
    executables: dict[int, str]
    blobs: dict[str, bytes]
    names: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Put:
    """A host value to keep as `array_id`. `data` is its C-order bytes, or None: it comes over the data plane with
    sequence number `sequence` of the host channel. To an actor of several processes each of its `parts` comes by
    itself, with the numbers from there on, to the process that owns it, which passes it on."""

    array_id: ArrayId
    aval: Aval
    data: bytes | None
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Store:
    """Take host values and free arrays, in that order, outside a step. Answer: `Done`, once the values are there."""

    request: int
    puts: tuple[Put, ...]
    frees: tuple[ArrayId, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """Run a loaded program once. Answer: `StepDone`.

    Steps run in the order they arrive, one after the other; the next may be sent before the last is done, and may name
    outputs of it as inputs. A step of an epoch and number seen before gets the cached answer; any other past one is
    refused.

    Args:
        step: its id, as wherever an actor names one.
        inputs: for each step argument this actor's program binds (the program's `Input.arg`), the array.
        outputs: for each result this actor's program makes (`Output.result`), the new array's id.
        puts: host values to take first.
        frees: arrays to free first.
        frees_after: arrays to free when the step is done (host arguments).
    """

    request: int
    epoch: int
    step: StepId
    program_id: int
    inputs: dict[int, ArrayId]
    outputs: dict[int, ArrayId]
    puts: tuple[Put, ...] = ()
    frees: tuple[ArrayId, ...] = ()
    frees_after: tuple[ArrayId, ...] = ()


@dataclass(frozen=True, slots=True)
class Fetch:
    """Send arrays to the controller, whole (unsharded). Answer: `Fetched`. Array k travels over the data plane with
    `sequences[k]` of the host channel unless it is small (`INLINE_BYTES`). Of an actor of several processes each sends
    the bytes of those `parts` that it owns, one after the other."""

    request: int
    array_ids: tuple[ArrayId, ...]
    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Done:
    request: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """Args: compile_s: seconds spent compiling. temp_bytes: XLA's temporaries by executable index."""

    request: int
    compile_s: float
    temp_bytes: dict[int, int]


@dataclass(frozen=True, slots=True)
class StepStats:
    """Where one actor's time went in one step, in seconds, and what its buffer table held, in bytes.

    Args:
        compute_s: executing tasks.
        wait_s: nothing to execute, because data from another actor or the controller was not there.
        total_s: from taking up the step to its last instruction.
        peak_bytes: most bytes the buffer table held (`ActorProgram.uncounted` left out).
        live_buffers: arrays in the actor's store after the step.
        stamps: two little-endian float64 for each instruction of the actor's program, in order: when it was taken up
            and when it was done, in seconds of the actor's monotonic clock; NaN for what has no such moment.
            `jaxpp_async.timeline` reads them.
    """

    compute_s: float
    wait_s: float
    total_s: float
    peak_bytes: int
    live_buffers: int
    stamps: bytes = b""


@dataclass(frozen=True, slots=True)
class StepDone:
    request: int
    step: StepId
    stats: StepStats


@dataclass(frozen=True, slots=True)
class Fetched:
    """One entry an array: (shape, dtype name, bytes or None when it takes the data plane)."""

    request: int
    arrays: tuple[tuple[tuple[int, ...], str, bytes | None], ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed, or (request None) the actor did.

    Args:
        exception_type: qualified name. traceback: text. instruction: text of the instruction under way.
    """

    request: int | None
    exception_type: str
    message: str
    traceback: str
    step: StepId | None = None
    instruction: str | None = None


# ---------------------------------------------------------------- files


@dataclass(frozen=True, slots=True)
class BeginSnapshot:
    """Hold arrays for a save as they are between the steps before and after this. Answer: `Done`, once the steps before
    have made them; they are held until they are written or swept away.

    Args:
        folder: where the save's files go; there is one save at a time in a folder.
    """

    request: int
    folder: bytes
    array_ids: tuple[ArrayId, ...]


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Write held arrays to one file, which is then on the disk, and hold them no longer. Answer: `Written`.

    Args:
        arrays: array, its name in the file, and which of its `parts` this is, or -1: all of it.
        metadata: for the file's header.
    """

    request: int
    folder: bytes
    file: str
    arrays: tuple[tuple[ArrayId, str, int], ...]
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class CheckFiles:
    """Look whether files that this process has written are still there and whole. Answer: `Done`.

    Args:
        files: of each its name and its size in bytes.
    """

    request: int
    folder: bytes
    files: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Sweep:
    """End the save in this folder, if there is one, and remove these files, whole or not. Answer: `Done`.

    Args:
        files: names of files of saves; there may be none of them here.
        remove_folder: the folder too, should it then be empty.
    """

    request: int
    folder: bytes
    files: tuple[str, ...] = ()
    remove_folder: bool = False


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A piece of an array that was written by several processes: its file and its name there, where it begins in the
    array, its shape, and the SHA-256 of its bytes."""

    path: bytes
    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class FilePart:
    """An array to read: its name in the file, the SHA-256 of its bytes there, the id to keep it under, and its type; or
    the pieces of which it is made, in whatever files."""

    name: str
    sha256: str
    array_id: ArrayId
    aval: Aval
    pieces: tuple[FilePiece, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadFile:
    """Read arrays of one file, check them, and keep them. Answer: `Done`, once they are on the devices."""

    request: int
    path: bytes
    parts: tuple[FilePart, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """A file's size, and the SHA-256 of each of its arrays' bytes, in the order in which they were asked for."""

    request: int
    size_bytes: int
    sha256: tuple[str, ...]


# ---------------------------------------------------------------- restarts


@dataclass(frozen=True, slots=True)
class Abort:
    """Another actor failed: drop every step under way, end all transfers, enter `epoch`. Answer: `Done`."""

    request: int
    epoch: int
    cause: str


@dataclass(frozen=True, slots=True)
class ResetTransport:
    """After an `Abort`: give up the transport and make another, which no peer has ever seen. Answer: `TransportReset`."""

    request: int


@dataclass(frozen=True, slots=True)
class ReplicaArray:
    """An array of a copy: its id, its type, and the bytes of each of its distinct shards."""

    array_id: ArrayId
    aval: Aval
    shard_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TakeReplica:
    """Take a copy, in host memory, of every array as it is between the requests before and after this. Answer: `ReplicaTaken`,
    once the steps before have made them.

    Args:
        generation: names the copy; counts up.
    """

    request: int
    generation: int


@dataclass(frozen=True, slots=True)
class SendReplica:
    """Send a copy to a peer. Answer: `Done`, once all of it has left.

    Args:
        of: whose arrays: this process's own, or another's whose copy it holds.
        to: the peer, which has been told to `ReceiveReplica` it.
    """

    request: int
    epoch: int
    generation: int
    of: ProcessId
    to: ProcessId


@dataclass(frozen=True, slots=True)
class ReceiveReplica:
    """Receive a copy of `of`'s arrays from a peer and keep it in host memory. Answer: `Done`, once all is here."""

    request: int
    epoch: int
    generation: int
    of: ProcessId
    source: ProcessId
    arrays: tuple[ReplicaArray, ...]


@dataclass(frozen=True, slots=True)
class DropReplicas:
    """Drop all copies but this generation's. Answer: `Done`."""

    request: int
    generation: int


@dataclass(frozen=True, slots=True)
class Rollback:
    """After an `Abort`: forget every array, and have those of a copy again, under their ids. Answer: `Done`.

    Args:
        generation: of which copy; None: have none.
    """

    request: int
    generation: int | None


@dataclass(frozen=True, slots=True)
class TransportReset:
    """The new transport's address."""

    request: int
    address: bytes


@dataclass(frozen=True, slots=True)
class ReplicaTaken:
    """What the copy has, in the order in which `SendReplica` sends it."""

    request: int
    arrays: tuple[ReplicaArray, ...]


# ---------------------------------------------------------------- starting


@dataclass(frozen=True, slots=True)
class Cluster:
    """Several processes that are one actor, for one of them.

    Args:
        coordinator: host and port where they find each other; the first process opens it.
        addresses: of each process's host, by which the others reach it.
        rank: which of them this is.
    """

    coordinator: str
    addresses: tuple[str, ...]
    rank: int

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.addresses)


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ahead of `Configure`, to the first of an actor's processes: find a port for the others. Answer: `Reserved`."""

    request: int


@dataclass(frozen=True, slots=True)
class Configure:
    """First request: start JAX and the transport. Answer: `Ready`.

    Args:
        spmd_mesh: (axis name, size) pairs; () is one device.
        axis_types: `"auto"` or `"explicit"`, one an axis.
        jax_config: `jax.config` names and plain values to set before JAX makes a backend.
        cache_dir: JAX's persistent compilation cache: a folder, `compilation_cache.DEFAULT`, or None.
        setup: `"module:function"` called before JAX starts, or None.
        setup_folder: where to look for its module after all else, or None.
        transport: `"ucx"`, `"memory"` or `"nccl"`.
        epoch: first epoch of the tags.
        cluster: the other processes of this actor, which start with this one; None: there are none.
        address: of this process's host, by which the others reach it; loopback: all are on one machine; None: not
            known.
    """

    request: int
    spmd_mesh: tuple[tuple[str, int], ...]
    axis_types: tuple[str, ...]
    platform: str
    jax_config: dict[str, Any]
    cache_dir: str | None
    setup: str | None
    setup_folder: bytes | None
    transport: str
    epoch: int
    cluster: Cluster | None = None
    address: str | None = None


@dataclass(frozen=True, slots=True)
class Admit:
    """Ahead of every `Connect`, where other machines can reach the data plane: let these peers connect to it, and
    nobody else. Answer: `Done`.

    Args:
        addresses: of the peers' transports.
    """

    request: int
    addresses: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect the transport to these peers (the process skips itself). Answer: `Connected`."""

    request: int
    epoch: int
    addresses: dict[ProcessId, bytes]


@dataclass(frozen=True, slots=True)
class OfferLinks:
    """Say how programs reach this process, and make ids for communicators. Only with transport `"nccl"`. Answer:
    `LinksOffered`.

    Args:
        num_ids: how many: one for each new link that this process is the `maker` of.
    """

    request: int
    num_ids: int


@dataclass(frozen=True, slots=True)
class JoinLink:
    """One direction between two processes, from a device to a device (`transport.nccl.plan.Link`).

    Args:
        unique_id: made by the lower of the two.
    """

    sender: ProcessId
    receiver: ProcessId
    from_device: int
    to_device: int
    unique_id: bytes


@dataclass(frozen=True, slots=True)
class JoinLinks:
    """Connect the programs' plane to peers that are new, then make these links, one after the other. Answer: `Done`,
    once a message has passed on each.

    Args:
        addresses: of every peer of `links`.
    """

    request: int
    addresses: dict[ProcessId, bytes]
    links: tuple[JoinLink, ...]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Close the transport and end the process. Answer: `Done`, then end of file."""

    request: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """A TCP port that is this process's."""

    request: int
    port: int


@dataclass(frozen=True, slots=True)
class Hardware:
    """The devices of an actor.

    Args:
        kind: as JAX names them, such as `"cpu"` or `"NVIDIA H100 80GB HBM3"`.
        count: how many the actor has.
        memory_bytes: of one; 0: not known, or the host's.
        cuda: version of the CUDA that JAX's plugin is for, such as `"13.0"`, or `"13"`; empty without GPUs.
        driver: the newest CUDA that the host's driver knows, written alike.
        gpus: the UUIDs of GPUs, or of parts of one (MIG); empty without GPUs.
        memory_fraction: how much of each GPU's memory JAX takes beforehand; 0: none.
        nccl: version of the NCCL that programs transfer over, such as `"2.32.3"`; empty with other transports.
        nccl_shares: whether that takes two ranks on one GPU.
    """

    kind: str
    count: int
    memory_bytes: int = 0
    cuda: str = ""
    driver: str = ""
    gpus: tuple[str, ...] = ()
    memory_fraction: float = 0.0
    nccl: str = ""
    nccl_shares: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """The actor's JAX and transport are up.

    Args:
        address: the transport's address.
        devices: one text a device, such as `"cpu:0"`.
        versions: package name to version, for the mismatch check.
        hardware: what the devices are.
    """

    request: int
    address: bytes
    devices: tuple[str, ...]
    versions: dict[str, str]
    hardware: Hardware


@dataclass(frozen=True, slots=True)
class Connected:
    """The transport is connected.

    Args:
        routes: by which of its ways the transport reaches each peer, as it names them (`"cuda_ipc"`, `"rc_mlx5"`,
            `"tcp"`); empty where it does not say, or where only host memory travels.
    """

    request: int
    routes: dict[ProcessId, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class LinksOffered:
    """The address of the programs' plane, and new ids."""

    request: int
    address: bytes
    ids: tuple[bytes, ...]


# ---------------------------------------------------------------- where


@dataclass(frozen=True, slots=True)
class Inspect:
    """Ask for numbers about the actor. Answer: `Inspected`."""

    request: int


@dataclass(frozen=True, slots=True)
class Report:
    """Ask where the actor is and what it waits for, when its step does not go on. Answer: `Reported`."""

    request: int


@dataclass(frozen=True, slots=True)
class Inspected:
    """Numbers such as `live_arrays`, `store_arrays`, `file_descriptors`, `compilations`."""

    request: int
    numbers: dict[str, int]


@dataclass(frozen=True, slots=True)
class OpenTransfer:
    """Data of a step that is not there yet, or that has not left.

    Args:
        kind: `"receive"`, `"send"`, or `"argument"`: a value from the controller (`peer`), without a tag (-1).
        buffer: the program's slot.
        posted: whether the transport has it; a send of data that is not there is not.
        needed: whether the actor cannot go on without it.
    """

    kind: Literal["receive", "send", "argument"]
    buffer: BufferId
    peer: ActorId
    tag: Tag
    size_bytes: int
    posted: bool
    needed: bool


@dataclass(frozen=True, slots=True)
class Reported:
    """Where the actor is.

    Args:
        step: the id of the step under way; None: there is none, and what follows says nothing.
        at: text of the instruction.
        running: whether it executes a task.
        transfers_done: of this step, so far.
        now_s: what its clock shows (`clocks`).
    """

    request: int
    step: StepId | None
    program_id: int = 0
    instruction: int = 0
    at: str = ""
    running: bool = False
    transfers_done: int = 0
    transfers: tuple[OpenTransfer, ...] = ()
    now_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Log:
    """A line for the controller's `logging`. `step`: the number of the user's step under way."""

    level: int
    logger: str
    message: str
    step: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life, over a connection of its own.

    Args:
        position: where the actor is, as `progress.Position`'s fields; None before its first instruction.
        clock: which clock it stamps with (`clocks.clock_name`).
    """

    position: tuple[int, int, int, bool, bool] | None
    clock: str = ""


# ----------------------------------------------------------------   init

__all__ = [
    "INLINE_BYTES",
    "Abort",
    "Admit",
    "ArrayId",
    "Beat",
    "BeginSnapshot",
    "CheckFiles",
    "Cluster",
    "Configure",
    "Connect",
    "Connected",
    "Done",
    "DropReplicas",
    "Failed",
    "Fetch",
    "Fetched",
    "FilePart",
    "FilePiece",
    "Hardware",
    "Inspect",
    "Inspected",
    "JoinLink",
    "JoinLinks",
    "LinksOffered",
    "Load",
    "Loaded",
    "Log",
    "Message",
    "OfferLinks",
    "OpenTransfer",
    "Put",
    "ReadFile",
    "Ready",
    "ReceiveReplica",
    "ReplicaArray",
    "ReplicaTaken",
    "Reply",
    "Report",
    "Reported",
    "Request",
    "Reserve",
    "Reserved",
    "ResetTransport",
    "Rollback",
    "RunKind",
    "SendReplica",
    "Shutdown",
    "Step",
    "StepDone",
    "StepId",
    "StepStats",
    "Store",
    "Sweep",
    "TakeReplica",
    "TransportReset",
    "WriteFile",
    "Written",
    "step_id",
    "step_kind",
    "step_number",
    "step_text",
]

Request: TypeAlias = (
    Reserve
    | Configure
    | Admit
    | Connect
    | OfferLinks
    | JoinLinks
    | Load
    | Store
    | Step
    | Fetch
    | BeginSnapshot
    | WriteFile
    | CheckFiles
    | Sweep
    | ReadFile
    | Abort
    | ResetTransport
    | TakeReplica
    | SendReplica
    | ReceiveReplica
    | DropReplicas
    | Rollback
    | Inspect
    | Report
    | Shutdown
)
Reply: TypeAlias = (
    Done
    | Reserved
    | Ready
    | Connected
    | LinksOffered
    | Loaded
    | StepDone
    | Fetched
    | Written
    | TransportReset
    | ReplicaTaken
    | Inspected
    | Reported
    | Failed
)
Message: TypeAlias = Request | Reply | Log | Beat
