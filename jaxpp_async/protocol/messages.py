"""Define the messages that the controller and the actor processes exchange, in the order of their
conversation.

The controller sends requests, and each carries a number. The actor process answers a request with exactly one
reply that has the same number: the reply that the request's docstring names, or `Failed`. `Beat` and `Log`
are sent by the actor process on its own. `codec` makes bytes of messages, and `frames` signs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from jaxpp_async.program.instructions import ActorId, Aval, BufferId, ProcessId, Tag

ArrayId: TypeAlias = int
"""Names one array of the mesh. The controller gives the ids out, counts them up, and uses none twice."""

StepId: TypeAlias = int
"""Names one run of a program on all its actors; ids count up over a mesh's life.

Users count the steps that they run and nothing else. An id therefore starts with the number of the user's
step that the run is, or that it precedes. Then follow the number of runs that precede that step too, and the
kind of the run; see `step_id`.
"""

RunKind: TypeAlias = Literal["move", "init", "step"]
"""`"move"` carries an argument to where a step needs it, `"init"` runs the program of a `step.init`, `"step"`
is a step of the user's.
"""

_TEXTS: Final[dict[RunKind, str]] = {
    "move": "a move for step {}",
    "init": "an init ahead of step {}",
    "step": "step {}",
}
_KINDS: Final = tuple(_TEXTS)


def step_id(number: int, kind: RunKind = "step", ahead: int = 0) -> StepId:
    """Make the id of one run.

    Args:
        number: of the user's step, counted from 0 over the mesh's life.
        kind: of the run.
        ahead: how many moves and inits ran between the user's step before and this run.
    """
    return number << 32 | ahead << 2 | _KINDS.index(kind)


def step_number(step: StepId) -> int:
    """Give the number of the user's step that a run is, or that it precedes."""
    return step >> 32


def step_kind(step: StepId) -> RunKind:
    """Tell which kind of run an id names. Any number is accepted, since an actor may have sent it."""
    return _KINDS[min(step & 3, len(_KINDS) - 1)]


def step_text(step: StepId) -> str:
    """Name a run for users, such as `"step 7"` or `"a move for step 7"`."""
    return _TEXTS[step_kind(step)].format(step_number(step))


INLINE_BYTES = 16 * 1024
"""Host values of at most this size travel in control frames; larger ones travel over the data plane."""


# ---------------------------------------------------------------- start and end of a process


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask the first process of an actor, ahead of `Configure`, for a TCP port at which the actor's other
    processes find it.

    The controller sends it where actors are of several processes. Reply: `Reserved`.
    """

    request: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """Reply to `Reserve`: a TCP port that the process has reserved for its actor."""

    request: int
    port: int


@dataclass(frozen=True, slots=True)
class Configure:
    """Have a process start JAX and its transport. The controller sends it before every other request but
    `Reserve`.

    Reply: `Ready`.

    Args:
        spmd_mesh: (axis name, size) pairs; () is one device.
        axis_types: `"auto"` or `"explicit"`, one an axis.
        platform: `"cpu"` or `"cuda"`.
        jax_config: `jax.config` names and plain values, set before JAX makes a backend.
        cache_dir: folder of JAX's persistent compilation cache, `compilation_cache.DEFAULT`, or None for no
            cache.
        setup: `"module:function"` that is called before JAX starts, or None.
        setup_folder: the folder that is searched last for the module of `setup`, or None.
        transport: `"ucx"`, `"memory"` or `"nccl"`.
        epoch: first epoch of the tags.
        cluster: the other processes of this actor, which start together with this one; None: there are none.
        address: address of this process's host, by which the other processes reach it. Loopback: all
            processes run on one machine. None: the address is not known.
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
class Cluster:
    """Describes, for one process of an actor of several, how the processes of that actor find each other.

    Args:
        coordinator: host and port at which they find each other; the first process opens it.
        addresses: of each process's host, by which the others reach it.
        rank: the receiver's number among them, counted from 0.
    """

    coordinator: str
    addresses: tuple[str, ...]
    rank: int

    @property
    def size(self) -> int:
        """The number of processes of the actor."""
        return len(self.addresses)


@dataclass(frozen=True, slots=True)
class Ready:
    """Reply to `Configure`: JAX and the transport of the process have started.

    Args:
        address: of the transport.
        devices: one text a device, such as `"cpu:0"`.
        versions: package name to version, which the controller compares with its own.
        hardware: describes the devices.
    """

    request: int
    address: bytes
    devices: tuple[str, ...]
    versions: dict[str, str]
    hardware: Hardware


@dataclass(frozen=True, slots=True)
class Hardware:
    """Describes the devices of an actor.

    Args:
        kind: as JAX names them, such as `"cpu"` or `"NVIDIA H100 80GB HBM3"`.
        count: how many devices the actor has.
        memory_bytes: memory of one device; 0: it is not known, or it is the host's.
        cuda: version of the CUDA that JAX's plugin is for, such as `"13.0"`, or `"13"`; empty without GPUs.
        driver: the newest CUDA that the host's driver supports, in the same form.
        gpus: the UUIDs of GPUs, or of parts of one (MIG); empty without GPUs.
        memory_fraction: the part of each GPU's memory that JAX sets aside beforehand; 0: none.
        nccl: version of the NCCL that programs transfer over, such as `"2.32.3"`; empty with other
            transports.
        nccl_shares: whether that NCCL accepts two ranks on one GPU.
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
class Admit:
    """Let these peers connect to the process's data plane, and nobody else. The controller sends it to every
    process before it sends any `Connect`, where other machines can reach the data plane.

    Reply: `Done`.

    Args:
        addresses: of the peers' transports.
    """

    request: int
    addresses: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Connect:
    """Have a process connect its transport to these peers; it leaves itself out. The controller sends it when
    all processes are ready, and again when some were replaced.

    Reply: `Connected`.

    Args:
        epoch: of the tags from here on.
        addresses: of the peers' transports, by process.
    """

    request: int
    epoch: int
    addresses: dict[ProcessId, bytes]


@dataclass(frozen=True, slots=True)
class Connected:
    """Reply to `Connect`: the transport is connected.

    Args:
        routes: the ways by which the transport reaches each peer, as UCX names them (`"cuda_ipc"`,
            `"rc_mlx5"`, `"tcp"`); empty where the transport does not say, or where only host memory travels.
    """

    request: int
    routes: dict[ProcessId, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class OfferLinks:
    """Ask a process for the address of its transport for programs, and for new ids of communicators. The
    controller sends it before `JoinLinks`, with transport `"nccl"` alone.

    Reply: `LinksOffered`.

    Args:
        num_ids: how many ids to make: one for each new link of which this process is the `maker`.
    """

    request: int
    num_ids: int


@dataclass(frozen=True, slots=True)
class LinksOffered:
    """Reply to `OfferLinks`: the address of the transport for programs, and the new ids."""

    request: int
    address: bytes
    ids: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class JoinLinks:
    """Have a process connect its transport for programs to new peers, and then make these links, one after
    the other. The controller sends it when all peers have answered `OfferLinks`.

    Reply: `Done`, once a message has passed over each link.

    Args:
        addresses: of every peer of `links`.
        links: the new ones, in the order in which they are made.
    """

    request: int
    addresses: dict[ProcessId, bytes]
    links: tuple[JoinLink, ...]


@dataclass(frozen=True, slots=True)
class JoinLink:
    """Describes one direction between two processes, from a device to a device (`transport.nccl.plan.Link`).

    Args:
        sender, receiver: the two processes.
        from_device, to_device: index of the device in each of them.
        unique_id: id of the communicator, made by the lower of the two processes.
    """

    sender: ProcessId
    receiver: ProcessId
    from_device: int
    to_device: int
    unique_id: bytes


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Have a process close its transport and end. The controller sends it last.

    Reply: `Done`, then end of file.
    """

    request: int


# ---------------------------------------------------------------- programs and steps


@dataclass(frozen=True, slots=True)
class Load:
    """Have a process compile the executables that are new to it, and keep a program. The controller sends it
    before the first `Step` that names the program.

    Reply: `Loaded`.

    Args:
        program_id: chosen by the controller; `Step` names it.
        program: text of the `ActorProgram`.
        executables: a content key for each executable index that the program uses.
        blobs: serialized `jax.export.Exported`, by content key; only keys that were not sent to this process
            before.
        names: the user's names of the step's arguments, by number, where errors may have to name them.
    """

    request: int
    program_id: int
    program: str
    executables: dict[int, str]
    blobs: dict[str, bytes]
    names: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Reply to `Load`: the program can run.

    Args:
        compile_s: seconds spent compiling.
        temp_bytes: size of XLA's temporaries, in bytes, by executable index.
    """

    request: int
    compile_s: float
    temp_bytes: dict[int, int]


@dataclass(frozen=True, slots=True)
class Step:
    """Have a process run a loaded program once. The controller sends it to every process of the actors that
    the program runs on.

    Reply: `StepDone`.

    Steps run in the order in which they arrive, one after the other. The controller may send the next step
    before the last is done, and that step may name the last one's outputs as inputs. A step whose epoch and
    number were seen before gets the reply that was kept of it. Any other step of the past is refused.

    Args:
        epoch: of the tags that its transfers use.
        step: the id of the run.
        program_id: of the program to run.
        inputs: the array for each argument of the step that this actor's program binds (the program's
            `Input.arg`).
        outputs: the new array's id for each result that this actor's program makes (`Output.result`).
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
class StepDone:
    """Reply to `Step`: the process has run the last instruction of its program.

    Args:
        step: the id of the run.
        stats: where the time went.
    """

    request: int
    step: StepId
    stats: StepStats


@dataclass(frozen=True, slots=True)
class StepStats:
    """Tells where the time of one actor went in one step, in seconds, and what its buffer table held, in
    bytes.

    Args:
        compute_s: time spent executing tasks.
        wait_s: time with nothing to execute, because data of another actor or of the controller was missing.
        total_s: from the start of the step to its last instruction.
        peak_bytes: most bytes that the buffer table held (without `ActorProgram.uncounted`).
        live_buffers: number of arrays in the actor's store after the step.
        stamps: two little-endian float64 for each instruction of the actor's program, in order: when it was
            begun and when it was done, in seconds of the actor's monotonic clock; NaN where there is no such
            time. `jaxpp_async.timeline` reads them.
    """

    compute_s: float
    wait_s: float
    total_s: float
    peak_bytes: int
    live_buffers: int
    stamps: bytes = b""


# ---------------------------------------------------------------- values in and out


@dataclass(frozen=True, slots=True)
class Store:
    """Have a process take host values and then free arrays, outside of a step. The controller sends it for
    arguments that users put on the mesh, and for arrays that users give up.

    Reply: `Done`, once the values are there.

    Args:
        puts: host values to take.
        frees: arrays to free.
    """

    request: int
    puts: tuple[Put, ...]
    frees: tuple[ArrayId, ...]


@dataclass(frozen=True, slots=True)
class Put:
    """A host value that a process keeps as `array_id`; part of `Store` and of `Step`.

    Args:
        array_id: the id under which the value is kept.
        aval: its shape and type.
        data: its C-order bytes; None: the bytes come over the data plane.
        sequence: the value's number on the host channel of the data plane. With an actor of several processes
            each of the array's `parts` comes by itself, with the numbers from there on, to the process that
            owns it, which passes it on.
    """

    array_id: ArrayId
    aval: Aval
    data: bytes | None
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Fetch:
    """Have a process send arrays to the controller, whole (unsharded). The controller sends it when a user
    asks for values.

    Reply: `Fetched`.

    With an actor of several processes each one sends the bytes of the `parts` that it owns, one after the
    other.

    Args:
        array_ids: the arrays.
        sequences: array k travels over the data plane with the number `sequences[k]` of the host channel,
            unless it has at most `INLINE_BYTES`.
    """

    request: int
    array_ids: tuple[ArrayId, ...]
    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    """Reply to `Fetch`: the arrays.

    Args:
        arrays: one entry an array: (shape, dtype name, bytes or None when the bytes take the data plane).
    """

    request: int
    arrays: tuple[tuple[tuple[int, ...], str, bytes | None], ...]


# ---------------------------------------------------------------- files of checkpoints


@dataclass(frozen=True, slots=True)
class BeginSnapshot:
    """Have a process hold arrays for a save as they are between the steps before and after this request. The
    controller sends it first in a save.

    Reply: `Done`, once the steps before have made the arrays. The process holds them until they are written
    or swept.

    Args:
        folder: where the files of the save go, as the bytes of an absolute path, like every path in these
            messages: the bytes that the file system has, so that every name that it allows can travel. A
            folder takes one save at a time.
        array_ids: the arrays to hold.
    """

    request: int
    folder: bytes
    array_ids: tuple[ArrayId, ...]


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Have a process write arrays that it holds to one file, make sure that the file is on the disk, and hold
    these arrays no longer. The controller sends it after `BeginSnapshot`.

    Reply: `Written`.

    Args:
        folder: of the save.
        file: name of the file.
        arrays: for each array: its id, its name in the file, and which of its `parts` it is; -1: all of it.
        metadata: for the file's header.
    """

    request: int
    folder: bytes
    file: str
    arrays: tuple[tuple[ArrayId, str, int], ...]
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class Written:
    """Reply to `WriteFile`: the size of the file, and the SHA-256 of each array's bytes, in the order of the
    request.
    """

    request: int
    size_bytes: int
    sha256: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CheckFiles:
    """Have a process check that files which it has written are still there and whole. The controller sends it
    before a save counts as complete.

    Reply: `Done`.

    Args:
        folder: of the save.
        files: name and size in bytes of each.
    """

    request: int
    folder: bytes
    files: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Have a process end the save in this folder, if there is one, and remove files, whole or not. The
    controller sends it when a save is done or has failed, and when old checkpoints are removed.

    Reply: `Done`.

    Args:
        folder: of the save.
        files: names of files of saves; some may not exist here.
        remove_folder: whether to remove the folder too, if it is empty then.
    """

    request: int
    folder: bytes
    files: tuple[str, ...] = ()
    remove_folder: bool = False


@dataclass(frozen=True, slots=True)
class ReadFile:
    """Have a process read arrays of one file, check them, and keep them. The controller sends it while it
    restores a checkpoint.

    Reply: `Done`, once the arrays are on the devices.

    Args:
        path: of the file.
        parts: the arrays to read.
    """

    request: int
    path: bytes
    parts: tuple[FilePart, ...]


@dataclass(frozen=True, slots=True)
class FilePart:
    """An array that `ReadFile` reads.

    Args:
        name: of the array in the file.
        sha256: of the array's bytes there.
        array_id: the id under which the process keeps it.
        aval: its shape and type.
        pieces: the pieces of which the array is made, in whatever files; empty: the array is whole in one
            file.
    """

    name: str
    sha256: str
    array_id: ArrayId
    aval: Aval
    pieces: tuple[FilePiece, ...] = ()


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A piece of an array that several processes have written.

    Args:
        path: of the piece's file.
        name: of the piece in that file.
        start: index of its first element in the array, one number a dimension.
        shape: of the piece.
        sha256: of its bytes.
    """

    path: bytes
    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    sha256: str


# ---------------------------------------------------------------- aborts and replicas


@dataclass(frozen=True, slots=True)
class Abort:
    """Have a process drop every step under way, end all transfers, and enter a new epoch. The controller
    sends it to the other actors when one has failed.

    Reply: `Done`.

    Args:
        epoch: the new one.
        cause: what happened, for the errors of the dropped steps.
    """

    request: int
    epoch: int
    cause: str


@dataclass(frozen=True, slots=True)
class ResetTransport:
    """Have a process give up its transport and make another one, which no peer has used. The controller sends
    it after an `Abort`.

    Reply: `TransportReset`.
    """

    request: int


@dataclass(frozen=True, slots=True)
class TransportReset:
    """Reply to `ResetTransport`: the address of the new transport."""

    request: int
    address: bytes


@dataclass(frozen=True, slots=True)
class TakeReplica:
    """Have a process copy every array to host memory, as it is between the requests before and after this.
    The controller sends it every few steps, where lost actors are to be replaced.

    Reply: `ReplicaTaken`, once the steps before have made the arrays.

    Args:
        generation: names the replica; counts up.
    """

    request: int
    generation: int


@dataclass(frozen=True, slots=True)
class ReplicaTaken:
    """Reply to `TakeReplica`: the arrays of the replica, in the order in which `SendReplica` sends them."""

    request: int
    arrays: tuple[ReplicaArray, ...]


@dataclass(frozen=True, slots=True)
class ReplicaArray:
    """Describes an array of a replica: its id, its type, and the size in bytes of each of its distinct
    shards.
    """

    array_id: ArrayId
    aval: Aval
    shard_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendReplica:
    """Have a process send a replica to a peer. The controller sends it after `ReplicaTaken`, and to return a
    replica to a process that was replaced.

    Reply: `Done`, once all of the replica has left.

    Args:
        epoch: of the tags.
        generation: of the replica.
        owner: the process whose arrays they are: the sender itself, or another one whose replica it holds.
        to: the peer, which was told to `ReceiveReplica`.
    """

    request: int
    epoch: int
    generation: int
    owner: ProcessId
    to: ProcessId


@dataclass(frozen=True, slots=True)
class ReceiveReplica:
    """Have a process receive a replica of `owner`'s arrays from a peer and keep it in host memory. The
    controller sends it together with the peer's `SendReplica`.

    Reply: `Done`, once all of the replica is here.

    Args:
        epoch: of the tags.
        generation: of the replica.
        owner: the process whose arrays they are.
        source: the process that sends them.
        arrays: in the order in which they come.
    """

    request: int
    epoch: int
    generation: int
    owner: ProcessId
    source: ProcessId
    arrays: tuple[ReplicaArray, ...]


@dataclass(frozen=True, slots=True)
class DropReplicas:
    """Have a process drop all replicas but those of one generation. The controller sends it when every
    process has the new generation.

    Reply: `Done`.

    Args:
        generation: the one to keep.
    """

    request: int
    generation: int


@dataclass(frozen=True, slots=True)
class Rollback:
    """Have a process forget every array and take back those of a replica, under their ids. The controller
    sends it after an `Abort`.

    Reply: `Done`.

    Args:
        generation: of the replica; None: forget the arrays and take back none.
    """

    request: int
    generation: int | None


# ---------------------------------------------------------------- status: how an actor does


@dataclass(frozen=True, slots=True)
class Inspect:
    """Ask a process for numbers about itself. The controller sends it when tests or users ask for them.

    Reply: `Inspected`.
    """

    request: int


@dataclass(frozen=True, slots=True)
class Inspected:
    """Reply to `Inspect`: numbers such as `live_arrays`, `file_descriptors`, `compilations`."""

    request: int
    numbers: dict[str, int]


@dataclass(frozen=True, slots=True)
class Report:
    """Ask a process where it is and for what it waits. The controller sends it when a step does not go on.

    Reply: `Reported`.
    """

    request: int


@dataclass(frozen=True, slots=True)
class Reported:
    """Reply to `Report`: where the process is in its program.

    Args:
        step: the id of the step under way; None: there is none, and the fields that follow say nothing.
        program_id: of the program that runs.
        instruction: index of the instruction.
        at: text of the instruction.
        running: whether the process executes a task.
        transfers_done: number of transfers of this step that are complete.
        transfers: those that are not.
        now_s: the time that the process's clock shows (`clocks`), in seconds.
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
class OpenTransfer:
    """A transfer of a step whose data has not come yet, or has not left.

    Args:
        kind: `"receive"`, `"send"`, or `"argument"`: a value of the controller (`peer`), without a tag (-1).
        buffer: the program's slot.
        peer: the other actor.
        tag: of the transfer.
        size_bytes: of the data.
        posted: whether the transport has been given it; a send of data that does not exist yet has not.
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
class Beat:
    """A heartbeat. The process sends it again and again over a connection of its own, and gets no reply.

    Args:
        position: where the actor is, as the fields of `actor_info.Position`; None before its first
            instruction.
        clock: names the clock with which the process takes times (`clocks.clock_name`).
    """

    position: tuple[int, int, int, bool, bool] | None
    clock: str = ""


@dataclass(frozen=True, slots=True)
class Log:
    """A record for the controller's `logging`. The process sends it when something is logged there, and gets
    no reply.

    Args:
        level: as in `logging`.
        logger: name of the logger.
        message: the text.
        step: the number of the user's step under way.
        fields: further attributes of the record.
    """

    level: int
    logger: str
    message: str
    step: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------- replies to many requests


@dataclass(frozen=True, slots=True)
class Done:
    """Reply to a request that has been carried out and has no other reply."""

    request: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Reply to a request that has failed. With `request` None the process sends it on its own, because the
    actor has failed.

    Args:
        request: its number, or None.
        exception_type: qualified name.
        message: the exception's text.
        traceback: as text.
        step: id of the step under way.
        instruction: text of the instruction under way.
    """

    request: int | None
    exception_type: str
    message: str
    traceback: str
    step: StepId | None = None
    instruction: str | None = None


Request: TypeAlias = (
    Reserve | Configure | Admit | Connect | OfferLinks | JoinLinks | Shutdown
    | Load | Step | Store | Fetch
    | BeginSnapshot | WriteFile | CheckFiles | Sweep | ReadFile
    | Abort | ResetTransport | TakeReplica | SendReplica | ReceiveReplica | DropReplicas | Rollback
    | Inspect | Report
)  # fmt: skip
Reply: TypeAlias = (
    Done | Failed
    | Reserved | Ready | Connected | LinksOffered
    | Loaded | StepDone | Fetched
    | Written
    | TransportReset | ReplicaTaken
    | Inspected | Reported
)  # fmt: skip
Message: TypeAlias = Request | Reply | Log | Beat
