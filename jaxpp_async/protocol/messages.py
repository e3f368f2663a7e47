"""Define the messages that the controller and the actor processes exchange, in the order of their
conversation.

The controller sends requests. The actor process answers a request with exactly one reply, of the type that
the request's `Rules` name, or `Failed`. An actor process sends `Beat`, `Log` and `CompileProgress` unasked. A
message travels in an envelope, together with the number of the request that it makes or answers. `codec`
encodes envelopes as bytes, and `frames` signs them.

Several messages carry the epoch of the mesh, a number that is 0 at first and grows by one with each attempt
of a restart, and with the end of the mesh. The steps of an epoch and the tags of its transfers contain the
number, so that messages and data of an earlier epoch are recognized and ignored.

Adding a message takes a class here and its handler on the actor: the side that accepts a message finds the
message's class among the subclasses of `Request` or `Reply`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal, TypeAlias, dataclass_transform

import msgspec

from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import ActorId, Aval, BufferId, ProcessId, Tag
from jaxpp_async.protocol.actor_info import Position

ArrayId: TypeAlias = int
"""The number of one array of the mesh. The controller counts these ids up and never uses one twice."""

StepId: TypeAlias = int
"""The number of one run of a program on all its actors; these ids increase over a mesh's life.

Users count the steps that they run and nothing else. An id therefore starts with the number of the user's
step that the run is, or that it precedes. Then follow the number of runs that precede that step too, and the
kind of the run; see `step_id`.
"""

RunKind: TypeAlias = Literal["move", "init", "step"]
"""The kind of a run: `"move"` carries an argument to the actors where a step needs it, `"init"` runs the
program of a `step.init`, and `"step"` is a step of the user's.
"""

_TEXTS: Final[dict[RunKind, str]] = {
    "move": "a move for step {}",
    "init": "an init ahead of step {}",
    "step": "step {}",
}
_KINDS: Final = tuple(_TEXTS)


def step_id(number: int, kind: RunKind = "step", ahead: int = 0) -> StepId:
    """Return the id of one run of a program on all its actors.

    Args:
        number: the number of the user's step that the run is or prepares, counted from 0 over the mesh's
            life.
        kind: the kind of the run: `"move"` (sends an argument to the actors on which a step needs it),
            `"init"` (runs the program of a `step.init`) or `"step"` (a step of the user's).
        ahead: how many moves and inits ran between the user's previous step and this run.
    """
    return number << 32 | ahead << 2 | _KINDS.index(kind)


def step_number(step: StepId) -> int:
    """Return the number of the user's step to which a run of a program belongs. A run is either the user's
    step itself or a preparation of the step (it moves an argument between actors, or runs the program of a
    `step.init`).

    Args:
        step: the id of the run.
    """
    return step >> 32


def step_kind(step: StepId) -> RunKind:
    """Return the kind of a run of a program: `"move"`, `"init"` or `"step"`.

    Args:
        step: the id of the run. An actor may have sent it, so it is not checked: every number has a kind.
    """
    return _KINDS[min(step & 3, len(_KINDS) - 1)]


def step_text(step: StepId) -> str:
    """Return a text that names a run of a program to users, such as `"step 7"` or `"a move for step 7"`.

    Args:
        step: the id of the run.
    """
    return _TEXTS[step_kind(step)].format(step_number(step))


INLINE_BYTES = 16 * 1024
"""The most bytes of a host value that is sent in a control frame; larger ones are sent over the data plane.
"""

Setting: TypeAlias = bool | int | float | str | None
"""The value of a setting of JAX."""


# ---------------------------------------------------------------- kinds of messages


@dataclass_transform(frozen_default=True)
class MessagePart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The base class of data inside messages. An instance travels as an array of its fields' values.

    Instances refer to plain data and to other parts, so they form no cycles, and Python's garbage collector
    need not track them.
    """


class Message(MessagePart, tag=True):
    """The base class of messages. A message travels as an array of its class's name and its fields."""


class Reply(Message):
    """The base class of the messages with which an actor process answers a request."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules for all requests of one type: what answers them, and what a restart does with them.

    A restart is the replacement of lost actors. All actors then return to a replica, an earlier copy of their
    arrays, and the controller makes requests again that it has made since.

    Args:
        reply: the type of the reply to a request that succeeds.
        ordered: whether the request takes effect in order with steps: after those that were requested before
            it, and before those that are requested later. The actor's handler has done this part of its work
            when it returns.
        repeated: whether a restart makes the request again if it has not been answered. Such requests are
            remembered, and wait while a restart is under way. All others are sent at once, also in a restart.
        changes_state: whether the request changes which arrays an actor holds. A restart makes such a request
            again even if it was answered.
        ended_by: the type of the request whose reply ends the effect of this one. The effect is not part of a
            replica, so no replica is taken before that reply. Two requests belong together if their
            `Request.scope` is equal. None if the request has no such effect.
        reads_files: whether the request reads files, which must not be removed while a restart might read
            them again.
    """

    reply: type[Reply]
    ordered: bool = False
    repeated: bool = False
    changes_state: bool = False
    ended_by: type[Request] | None = None
    reads_files: bool = False

    def __post_init__(self) -> None:
        if self.changes_state and not (self.ordered and self.repeated):
            raise ValueError("a request that changes state is ordered and repeated")
        if (self.ended_by is not None or self.reads_files) and not self.changes_state:
            raise ValueError("a request that has a lasting effect or reads files changes state")
        if self.ended_by is not None and not self.ended_by.rules.repeated:
            raise ValueError("a request that ends a lasting effect is repeated")


class Request(Message):
    """The base class of the messages that the controller sends to an actor process.

    Each subclass declares its rules as `rules`.
    """

    rules: ClassVar[Rules]

    @property
    def scope(self) -> bytes | None:
        """The object that the request concerns, by which `Rules.ended_by` matches requests; None if the type
        of the request decides alone.
        """
        return None

    def again(self, epoch: int) -> Request:
        """Return the request as a restart sends it again.

        Args:
            epoch: the present epoch of the mesh.
        """
        return self


def accepted_messages(side: Literal["actor", "controller"]) -> tuple[type[Message], ...]:
    """Return the types of the messages that one side accepts on the control connection."""
    if side == "actor":
        return tuple(Request.__subclasses__())
    return (*Reply.__subclasses__(), CompileProgress, Log)


class Done(Reply):
    """Reply to a request that was carried out and that has no other kind of reply."""


class Failed(Reply):
    """Reply to a request that has failed. A process also sends this message in an envelope without a number,
    so that it answers no request, if the actor itself has failed.

    Args:
        exception_type: the qualified name of the exception's type.
        message: the exception's text.
        traceback: the exception's traceback as text.
        step: the id of the run of a program that was under way, or None.
        instruction: the text of the instruction that was under way, or None.
    """

    exception_type: str
    message: str
    traceback: str
    step: StepId | None = None
    instruction: str | None = None


# ---------------------------------------------------------------- start and end of a process


class Reserved(Reply):
    """Reply to `Reserve`: a TCP port that the process has reserved for its actor."""

    port: int


class Reserve(Request):
    """A request to the first process of an actor to reserve a TCP port to which the actor's other processes
    will connect.

    If actors have several processes, the controller sends this request before `Configure`.
    """

    rules = Rules(reply=Reserved)


class Ready(Reply):
    """Reply to `Configure`: JAX and the transport of the process have started.

    Args:
        address: the transport's address, which peers use to connect to it.
        devices: one text per device of the process, such as `"cpu:0"`.
        versions: the version of each package by name, which the controller compares with its own.
        hardware: a description of the devices.
    """

    address: bytes
    devices: tuple[str, ...]
    versions: dict[str, str]
    hardware: Hardware


class Configure(Request):
    """A request to a process to start JAX and its transport. The controller sends it before every other
    request except `Reserve`.

    Args:
        spmd_mesh: the axes of the actor's device mesh, as (axis name, size) pairs; () is one device.
        axis_types: the type of each axis, `"auto"` or `"explicit"`.
        platform: `"cpu"` or `"cuda"`.
        jax_config: values of `jax.config` options by name, plain data, set before JAX creates a backend.
        cache_dir: the folder of JAX's persistent compilation cache; `compilation_cache.DEFAULT` for the
            folder that `JAX_COMPILATION_CACHE_DIR` names on the process's host, or else a default folder;
            None for no cache.
        setup: the name of a function to call before JAX starts, as `"module:function"`; None for no function.
        setup_folder: a folder that is appended to `sys.path`, so that the module of `setup` is found in it;
            None to append no folder.
        transport: `"ucx"`, `"memory"` or `"nccl"`.
        epoch: the epoch of the mesh, which the tags of all transfers contain from now on.
        cluster: a description of this actor's processes; None if the actor has only one process.
        address: the address of this process's host at which the other processes can connect to it. A loopback
            address means that all processes run on one machine. None means that the address is not known.
    """

    rules = Rules(reply=Ready)

    spmd_mesh: tuple[tuple[str, int], ...]
    axis_types: tuple[str, ...]
    platform: str
    jax_config: dict[str, Setting]
    cache_dir: str | None
    setup: str | None
    setup_folder: bytes | None
    transport: str
    epoch: int
    cluster: Cluster | None = None
    address: str | None = None


class Cluster(MessagePart):
    """A description of how the processes of an actor find each other, for an actor that has several.

    Args:
        coordinator: the address of the first process, as host and port, which the other processes use to join
            it.
        addresses: for each process, an address of the process's host at which the other processes can connect
            to it.
        rank: the number of the process that receives this description, counted from 0 in the actor.
    """

    coordinator: str
    addresses: tuple[str, ...]
    rank: int

    @property
    def size(self) -> int:
        """The number of processes of the actor."""
        return len(self.addresses)


class Hardware(MessagePart):
    """A description of the devices of an actor's process.

    Args:
        kind: the devices' name in JAX, such as `"cpu"` or `"NVIDIA H100 80GB HBM3"`.
        count: the number of devices of the process.
        memory_bytes: the memory of one device; 0 if it is not known, or if it is the host's memory.
        cuda: the version of CUDA for which JAX's plugin was built, such as `"13.0"` or `"13"`; empty without
            GPUs.
        driver: the newest CUDA version that the host's driver supports, written as in `cuda`; empty without
            GPUs.
        gpus: the UUIDs of the GPUs, or of parts of one (MIG); empty without GPUs.
        memory_fraction: the fraction of each GPU's memory that JAX reserves when it starts; 0 for none.
        nccl: the version of the NCCL library, such as `"2.32.3"`; empty if the transport is not `"nccl"`.
        nccl_shares: whether that NCCL library accepts two ranks on one GPU.
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


class Admit(Request):
    """A request to let the given peers, and no other process, connect to the process's data plane (its
    transport for arrays). The controller sends it to every process before it sends any `Connect`, if other
    machines can connect to the data plane.

    Args:
        addresses: the addresses of the peers' transports.
    """

    rules = Rules(reply=Done)

    addresses: tuple[bytes, ...]


class Connected(Reply):
    """Reply to `Connect`: the transport is connected.

    Args:
        routes: for each peer, the UCX transports that send data to the peer, as UCX names them (`"cuda_ipc"`,
            `"rc_mlx5"`, `"tcp"`); empty if the transport does not report them, or if only host memory is
            sent.
    """

    routes: dict[ProcessId, tuple[str, ...]]


class Connect(Request):
    """A request to a process to connect its transport to those of its peers. The controller sends it when all
    processes are ready, and again when some were replaced.

    Args:
        epoch: the epoch of the mesh, which the tags of all transfers contain from now on.
        addresses: the address of each process's transport; the receiver of this request ignores its own
            entry.
    """

    rules = Rules(reply=Connected)

    epoch: int
    addresses: dict[ProcessId, bytes]


class LinksOffered(Reply):
    """Reply to `OfferLinks`: the address of the process's NCCL transport, and the new communicator ids."""

    address: bytes
    ids: tuple[bytes, ...]


class OfferLinks(Request):
    """A request for the address of a process's NCCL transport, which carries the arrays of programs, and for
    new ids of NCCL communicators. The controller sends it before `JoinLinks`, and only with transport
    `"nccl"`.

    Args:
        num_ids: how many communicator ids to make. Each new link is an NCCL communicator between two devices,
            and one of its two processes makes its id (see `transport.nccl.order.NcclLink.maker`). `num_ids`
            is the number of new links for which the receiver of this request does so.
    """

    rules = Rules(reply=LinksOffered)

    num_ids: int


class JoinLinks(Request):
    """A request to connect a process's NCCL transport to new peers, and then to make links (NCCL
    communicators between two devices), one after the other. The controller sends it when all peers have
    answered `OfferLinks`.

    Reply: `Done`, after a message has passed over each link.

    Args:
        addresses: for each peer in `links`, the address of its NCCL transport.
        links: the new links, in the order in which they are made.
    """

    rules = Rules(reply=Done)

    addresses: dict[ProcessId, bytes]
    links: tuple[JoinLink, ...]


class JoinLink(MessagePart):
    """A description of a link to make: an NCCL communicator for one direction between a device of one process
    and a device of another (see `transport.nccl.order.NcclLink`).

    Args:
        sender, receiver: the process that sends and the process that receives.
        from_device, to_device: the index of the device in the sending process, and in the receiving process.
        unique_id: the communicator's id, made by whichever of the two processes has the lower number.
    """

    sender: ProcessId
    receiver: ProcessId
    from_device: int
    to_device: int
    unique_id: bytes


class Shutdown(Request):
    """A request to a process to close its transport and to end. The controller sends it last.

    Reply: `Done`, after which the process closes the connection.
    """

    rules = Rules(reply=Done)


# ---------------------------------------------------------------- programs and steps


class Loaded(Reply):
    """Reply to `Load`: the program can run.

    Args:
        compile_s: the seconds spent compiling.
        temp_bytes: the size of XLA's temporary buffers for each executable, in bytes, by the executable's
            index.
    """

    compile_s: float
    temp_bytes: dict[int, int]


class Load(Request):
    """A request to a process to compile the executables that are new to it, and to store a program. The
    controller sends it before the first `Step` that names the program.

    Args:
        program_id: the id that the controller has given the program; `Step` contains this id.
        program: the actor's part of the program.
        executables: the executables that the program uses. The keys are the executables' indices in the
            program; the values are the content keys of the executables (hashes of their content).
        blobs: the executables that were not sent to this process before. The keys are their content keys; the
            values are serialized `jax.export.Exported` objects.
        names: the user's names of the step's arguments, by argument number, for error messages about NaNs and
            infinities; empty unless JAX's options forbid these.
        modelled_s: how long a call of an executable lasts at least, in seconds, by the executable's index;
            empty unless the mesh has a device model.
    """

    rules = Rules(reply=Loaded, repeated=True)

    program_id: int
    program: ActorProgram
    executables: dict[int, str]
    blobs: dict[str, bytes]
    names: dict[int, str] = {}
    modelled_s: dict[int, float] = {}


class StepDone(Reply):
    """Reply to `Step`: the process has run the last instruction of its program.

    Args:
        step: the id of this run of the program.
        stats: the times and the memory use of the run.
    """

    step: StepId
    stats: StepStats


class Step(Request):
    """A request to a process to run a loaded program once. The controller sends it to every process of the
    actors on which the program runs.

    Steps run in the order in which they arrive, one after the other. The controller may send the next step
    before the last one has ended, and the next step may use the last one's outputs as inputs. Within an epoch
    the ids of the steps increase; a step whose id does not is refused.

    Args:
        epoch: the epoch of the mesh, which the tags of the step's transfers contain.
        step: the id of this run of the program.
        program_id: the id of the program to run.
        inputs: the arrays to use as inputs of this actor's program. The keys are the numbers of the step's
            arguments (`Input.arg`); the values are the ids of the arrays.
        outputs: the ids to give to the arrays that this actor's program returns. The keys are the numbers of
            the step's results (`Output.result`); the values are the ids.
        puts: host values to store before the step.
        frees: the ids of arrays to free before the step.
        frees_after: the ids of arrays to free when the step has ended (host arguments).
    """

    rules = Rules(reply=StepDone, ordered=True, repeated=True, changes_state=True)

    epoch: int
    step: StepId
    program_id: int
    inputs: dict[int, ArrayId]
    outputs: dict[int, ArrayId]
    puts: tuple[Put, ...] = ()
    frees: tuple[ArrayId, ...] = ()
    frees_after: tuple[ArrayId, ...] = ()

    def again(self, epoch: int) -> Step:
        return msgspec.structs.replace(self, epoch=epoch)


class StepStats(MessagePart):
    """The times of one actor in one step, in seconds, and its memory use, in bytes.

    Args:
        compute_s: the time spent executing tasks.
        wait_s: the time during which the actor executed nothing, because it waited for data from another
            actor or from the controller.
        total_s: the time from the start of the step to its last instruction.
        peak_bytes: the largest total size of the arrays in the program's buffers at any time; arrays in the
            buffers that `ActorProgram.uncounted` lists do not count.
        live_buffers: the number of arrays that the actor stores after the step.
        stamps: two little-endian float64 for each instruction of the actor's program, in order: the times
            when the instruction began and ended, in seconds of the actor's monotonic clock; NaN for a time
            that is not known. `jaxpp_async.timeline` decodes them.
    """

    compute_s: float
    wait_s: float
    total_s: float
    peak_bytes: int
    live_buffers: int
    stamps: bytes = b""


# ---------------------------------------------------------------- values in and out


class Store(Request):
    """A request to a process to store host values and then to free arrays, outside of a step. The controller
    sends it for arguments that users put on the mesh, and for arrays that users no longer need.

    Reply: `Done`, after the values have arrived.

    Args:
        puts: the host values to store.
        frees: the ids of the arrays to free.
    """

    rules = Rules(reply=Done, ordered=True, repeated=True, changes_state=True)

    puts: tuple[Put, ...]
    frees: tuple[ArrayId, ...]


class Put(MessagePart):
    """A host value for a process to store as an array; part of `Store` and of `Step`.

    Args:
        array_id: the id under which the array is stored.
        aval: the array's shape, dtype and sharding.
        data: the bytes in C order; None if they are sent over the data plane (the transport for arrays).
        sequence: the number of the transfer on the data plane's host channel, which carries host values; used
            only if `data` is None. If the actor has several processes, each part of the array (see
            `layout.array_parts`) is a transfer of its own, and part number `i` has the transfer number
            `sequence + i`. The process that owns a part receives the part, and sends it to those other
            processes of the actor that need it.
    """

    array_id: ArrayId
    aval: Aval
    data: bytes | None
    sequence: int = 0


class Fetched(Reply):
    """Reply to `Fetch`: the arrays.

    Args:
        arrays: one entry per array: (shape, dtype name, bytes). The bytes are None if they are sent over the
            data plane (the transport for arrays).
    """

    arrays: tuple[tuple[tuple[int, ...], str, bytes | None], ...]


class Fetch(Request):
    """A request to a process to send arrays to the controller, whole (unsharded). The controller sends it
    when a user asks for values.

    If an actor has several processes, each of them sends the bytes of the parts of the array that it owns
    (see `layout.array_parts`), one after the other.

    Args:
        array_ids: the ids of the arrays.
        sequences: for each array, the number of its transfer on the host channel of the data plane (the
            transport for arrays). An array of at most `INLINE_BYTES` is sent in the reply instead, and its
            number is not used.
    """

    rules = Rules(reply=Fetched, ordered=True, repeated=True)

    array_ids: tuple[ArrayId, ...]
    sequences: tuple[int, ...]


# ---------------------------------------------------------------- files of checkpoints


class Sweep(Request):
    """A request to a process to end the save in a folder, if one is under way, and to remove some of its
    files, whether they are complete or not. The controller sends it when a save is complete or has failed,
    and when old checkpoints are removed.

    Args:
        folder: the folder of the save.
        files: the names of the files to remove; some may not exist on this host.
        remove_folder: whether to remove the folder too, if it is empty after that; if False, the folder
            stays.
    """

    rules = Rules(reply=Done, ordered=True, repeated=True)

    folder: bytes
    files: tuple[str, ...] = ()
    remove_folder: bool = False

    @property
    def scope(self) -> bytes:
        return self.folder


class BeginSnapshot(Request):
    """A request to a process to retain the present values of arrays for a save (the writing of a checkpoint).
    The values are those after all steps that were requested before this message. This is the first request of
    a save.

    Reply: `Done`, after the earlier steps have computed the arrays. The process keeps the values until
    `WriteFile` has written them or `Sweep` ends the save.

    Args:
        folder: the folder for the files of the save, as an absolute path. All paths in these messages are
            bytes, because a file name on Linux need not be valid UTF-8. Only one save at a time may use a
            folder.
        array_ids: the ids of the arrays to keep.
    """

    rules = Rules(reply=Done, ordered=True, repeated=True, changes_state=True, ended_by=Sweep)

    folder: bytes
    array_ids: tuple[ArrayId, ...]

    @property
    def scope(self) -> bytes:
        return self.folder


class Written(Reply):
    """Reply to `WriteFile`: the size of the file in bytes, and the SHA-256 of each array's bytes, in the
    order of `WriteFile.arrays`.
    """

    size_bytes: int
    sha256: tuple[str, ...]


class WriteFile(Request):
    """A request to a process to write arrays that it has retained for a save to one file, to flush the file
    to the disk, and to release the arrays. The controller sends it after `BeginSnapshot`.

    Args:
        folder: the folder of the save.
        file: the name of the file.
        arrays: for each array, its id, its name in the file, and the number of the part to write (see
            `layout.array_parts`); -1 for the whole array.
        metadata: the entries for the file's header.
    """

    rules = Rules(reply=Written, ordered=True, repeated=True)

    folder: bytes
    file: str
    arrays: tuple[tuple[ArrayId, str, int], ...]
    metadata: dict[str, str]


class CheckFiles(Request):
    """A request to a process to check that files which the process has written still exist and are complete.
    The controller sends it at the end of a save, before the checkpoint is declared complete.

    Args:
        folder: the folder of the save.
        files: one (name, size in bytes) pair for each file.
    """

    rules = Rules(reply=Done, repeated=True)

    folder: bytes
    files: tuple[tuple[str, int], ...]


class ReadFile(Request):
    """A request to a process to read arrays from one file, to check them, and to store them. The controller
    sends it while it restores a checkpoint.

    Reply: `Done`, after the arrays have been placed on the devices.

    Args:
        path: the path of the file.
        parts: the arrays to read.
    """

    rules = Rules(reply=Done, ordered=True, repeated=True, changes_state=True, reads_files=True)

    path: bytes
    parts: tuple[FilePart, ...]


class FilePart(MessagePart):
    """An array for a process to read, as part of a `ReadFile` request.

    Args:
        name: the array's name in the file.
        sha256: the SHA-256 of the array's bytes in the file.
        array_id: the id under which the process stores the array.
        aval: the array's shape, dtype and sharding.
        pieces: the pieces that together make up the array, and the file of each, if several processes have
            written it, or if it is a part of an array in a checkpoint; empty if the file `ReadFile.path`
            contains the whole array.
    """

    name: str
    sha256: str
    array_id: ArrayId
    aval: Aval
    pieces: tuple[FilePiece, ...] = ()


class FilePiece(MessagePart):
    """One piece of an array that is stored in pieces, and the file that contains this piece. If the array to
    read is a part of a stored one, a piece may go beyond it.

    Args:
        path: the path of the file.
        name: the name of the piece in the file.
        start: the index of the piece's first element in the array to read, one number per dimension; below 0
            if the piece begins before that array.
        shape: the shape of the piece.
        sha256: the SHA-256 of the piece's bytes.
    """

    path: bytes
    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    sha256: str


# ---------------------------------------------------------------- aborts and replicas


class Abort(Request):
    """A request to a process to drop every step under way, to end all transfers, and to enter a new epoch.
    When an actor has failed, the controller sends this request to the other actors.

    Args:
        epoch: the new epoch of the mesh.
        cause: a description of the failure, for the errors of the dropped steps.
    """

    rules = Rules(reply=Done, ordered=True)

    epoch: int
    cause: str


class TransportReset(Reply):
    """Reply to `ResetTransport`: the address of the new transport."""

    address: bytes


class ResetTransport(Request):
    """A request to a process to close its transport and to make a new one, to which no peer is connected. The
    controller sends it after an `Abort`.
    """

    rules = Rules(reply=TransportReset)


class ReplicaTaken(Reply):
    """Reply to `TakeReplica`: descriptions of the arrays of the replica (a copy of the process's arrays for
    restarts), in the order in which `SendReplica` sends them.
    """

    arrays: tuple[ReplicaArray, ...]


class TakeReplica(Request):
    """A request to a process to copy every array to host memory, with the values that the arrays have after
    all earlier requests. Such a copy is called a replica; the arrays of a lost actor are restored from it.
    The controller sends this request every few steps if the mesh replaces lost actors.

    Reply: `ReplicaTaken`, after the earlier steps have computed the arrays.

    Args:
        generation: the number of the replica, which counts up over the mesh's life.
    """

    rules = Rules(reply=ReplicaTaken, ordered=True)

    generation: int


class ReplicaArray(MessagePart):
    """A description of one array of a replica (a copy of a process's arrays for restarts).

    Args:
        array_id: the array's id.
        aval: the array's shape, dtype and sharding.
        shard_bytes: the size in bytes of each of the array's distinct shards.
    """

    array_id: ArrayId
    aval: Aval
    shard_bytes: tuple[int, ...]


class SendReplica(Request):
    """A request to a process to send a replica (a copy of a process's arrays for restarts) to a peer. The
    controller sends this request after `ReplicaTaken`, so that a peer stores a second copy. After a restart,
    the controller sends this request to the peer, which returns the replica to the process that replaces the
    lost one.

    Reply: `Done`, after all of the replica has been sent.

    Args:
        epoch: the epoch of the mesh, which the transfers' tags contain.
        generation: the number of the replica.
        owner: the process whose arrays the replica contains: the sender itself, or a process whose replica
            the sender keeps.
        to: the number of the receiving process, to which the controller sends `ReceiveReplica`.
    """

    rules = Rules(reply=Done)

    epoch: int
    generation: int
    owner: ProcessId
    to: ProcessId


class ReceiveReplica(Request):
    """A request to a process to receive a replica (a copy of a process's arrays for restarts) from a peer and
    to keep it in host memory. The controller sends it together with the peer's `SendReplica`.

    Reply: `Done`, after all of the replica has arrived.

    Args:
        epoch: the epoch of the mesh, which the transfers' tags contain.
        generation: the number of the replica.
        owner: the process whose arrays the replica contains.
        source: the process that sends the replica.
        arrays: descriptions of the arrays, in the order in which they arrive.
    """

    rules = Rules(reply=Done)

    epoch: int
    generation: int
    owner: ProcessId
    source: ProcessId
    arrays: tuple[ReplicaArray, ...]


class DropReplicas(Request):
    """A request to a process to delete all replicas (copies of arrays for restarts) except those of one
    generation (replicas that were taken at the same time). The controller sends it when every process has the
    new generation.

    Args:
        generation: the number of the replicas to keep.
    """

    rules = Rules(reply=Done)

    generation: int


class Rollback(Request):
    """A request to a process to drop every array, and to restore the arrays of a replica (a copy made for
    restarts) under the ids that they had when the replica was taken. The controller sends it after an
    `Abort`.

    Args:
        generation: the number of the replica; None to drop the arrays and restore none.
    """

    rules = Rules(reply=Done, ordered=True)

    generation: int | None


# ---------------------------------------------------------------- status: how an actor does


class Inspected(Reply):
    """Reply to `Inspect`: the counters. Keys are names such as `live_arrays`, `file_descriptors` or
    `compilations`.
    """

    numbers: dict[str, int]


class Inspect(Request):
    """A request for counters that describe the state of a process, such as how many arrays it has. Tests send
    it to find what a process keeps.
    """

    rules = Rules(reply=Inspected, ordered=True, repeated=True)


class Reported(Reply):
    """Reply to `Report`: the process's position in its program, its open transfers and its clock.

    Args:
        step: the id of the program run that is under way. If no run is under way, this is None, and only
            `now_s` has a meaning.
        program_id: the id of the program that runs.
        instruction: the index of the current instruction.
        at: the text of the current instruction.
        running: whether the process is executing a task.
        transfers_done: the number of transfers of this step that are complete.
        transfers: the transfers of this step that are not complete.
        now_s: the time that the process's clock shows, in seconds (see `clocks`).
    """

    step: StepId | None
    program_id: int = 0
    instruction: int = 0
    at: str = ""
    running: bool = False
    transfers_done: int = 0
    transfers: tuple[OpenTransfer, ...] = ()
    now_s: float | None = None


class Report(Request):
    """A request for a process's position in its program, and for the transfers that it waits for. The
    controller sends this request if a step makes no progress, and also to read the process's clock.
    """

    rules = Rules(reply=Reported)


class OpenTransfer(MessagePart):
    """A transfer of a step that is not complete: its data has not arrived, or has not been sent.

    Args:
        kind: `"receive"`, `"send"`, or `"argument"` for a value that the controller sends.
        buffer: the number of the program's buffer from which the data is sent, or into which the data is
            received.
        peer: the number of the other actor; for an argument, the number that stands for the controller.
        tag: the transfer's tag; -1 for an argument.
        size_bytes: the size of the data.
        posted: whether the transfer has been handed to the transport. If False for a send, the data to send
            has not been computed yet.
        needed: whether the actor cannot go on before the transfer is complete.
    """

    kind: Literal["receive", "send", "argument"]
    buffer: BufferId
    peer: ActorId
    tag: Tag
    size_bytes: int
    posted: bool
    needed: bool


# ---------------------------------------------------------------- profiles

PROFILE_PART_BYTES = 256 * 1024
"""The most bytes of a file of a profile in one message, so that replies to steps are not held up for long."""


class StartProfile(Request):
    """A request to a process to begin to record XLA's profile of itself.

    Args:
        folder: the folder into which the process writes the profile, as an absolute path; None for a
            temporary folder, from which the controller fetches the files.
    """

    rules = Rules(reply=Done)

    folder: bytes | None


class Profiled(Reply):
    """Reply to `StopProfile`: the path in the profile's folder and the size in bytes of each file."""

    files: tuple[tuple[str, int], ...]


class StopProfile(Request):
    """A request to a process to end the recording and to write the profile."""

    rules = Rules(reply=Profiled)


class ProfilePart(Reply):
    """Reply to `ReadProfile`: the bytes; fewer than asked for at the end of the file."""

    data: bytes


class ReadProfile(Request):
    """A request for a part of a file of the profile that a process has written.

    Args:
        file: the path of the file, as `Profiled` has it.
        offset: the number of bytes in front of the part.
        size: the size of the part in bytes; of more than `PROFILE_PART_BYTES`, so many are sent.
    """

    rules = Rules(reply=ProfilePart)

    file: str
    offset: int
    size: int


class EndProfile(Request):
    """A request to a process to forget its profile and to remove its temporary folder. The controller sends
    it when it has the files, and also when the profile could not begin.
    """

    rules = Rules(reply=Done)


# ---------------------------------------------------------------- messages that answer nothing


class Beat(Message):
    """A heartbeat, which shows that a process is alive. The process sends it at regular intervals over a
    separate connection that carries only heartbeats, and gets no reply.

    Args:
        position: the actor's position in its program; None before its first instruction.
        clock: the name of the clock with which the process measures time (`clocks.clock_name`).
    """

    position: Position | None
    clock: str = ""


class CompileProgress(Message):
    """A report of how far a process is with a `Load`. The process sends it for each executable that is new to
    it, and gets no reply.

    Args:
        program_id: the program that is being loaded.
        done: how many of the executables are compiled.
        total: how many executables are new to the process.
        cached: how many of `done` came from JAX's compilation cache.
    """

    program_id: int
    done: int
    total: int
    cached: int


class Log(Message):
    """A log record for the controller's `logging`. The process sends it when a record is logged in the
    process, and gets no reply.

    Args:
        level: the record's level, a number as in `logging`.
        logger: the name of the logger.
        message: the record's text.
        step: the number of the user's step under way, or None.
        fields: further attributes of the record by name.
    """

    level: int
    logger: str
    message: str
    step: int | None = None
    fields: dict[str, str | int | float] = {}
