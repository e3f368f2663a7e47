"""Turn one actor's program and the time stamps of its instructions into events, which say what happened when.

This module does not align clocks. The caller says which time of the stamps' clock is zero in the events'
times.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast

from jaxpp_async.program.actor_program import ActorProgram, format_instructions
from jaxpp_async.program.buffer_table import held_bytes
from jaxpp_async.program.instructions import (
    ActorId,
    BufferId,
    Delete,
    ExecutableId,
    Input,
    Instruction,
    Output,
    Recv,
    Run,
    Send,
    Tag,
    buffers_made,
)

Kind: TypeAlias = Literal["run", "send", "recv", "input", "output", "delete"]

TransferKey: TypeAlias = tuple[ActorId, ActorId, Tag]
"""The key of one transfer of a step: the sending actor, the receiving actor and the tag."""

_STAMPS = struct.Struct("<dd")


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One instruction of an actor in one step, with its times.

    All times are in seconds since the step's start, on the controller's clock.

    Args:
        actor: the actor that ran the instruction.
        instruction: the index of the instruction in the actor's program.
        kind: `"run"` (a task), `"send"`, `"recv"`, `"input"`, `"output"` or `"delete"`.
        label: a name for users: for a task such as `"fwd(stage 0, mb 3)"`, for a transfer the name of the
            task or argument that made the value.
        start_s, end_s: the start and end of the instruction. For a run, the start and end of its task; for a
            send, the end is when its buffer can be used again; for a receive, the start is when memory for
            the data was available and the end is when the data had arrived; for an input, the start is when
            the argument was asked for and the end is when it had arrived; for an output or delete, both are
            the moment when it happened.
        size_bytes: the size of the value that is sent, received, bound, returned or freed; 0 for a run.
        peer: the other actor of a transfer; None for other kinds.
        tag: the tag of a transfer, which identifies it together with the two actors; None for other kinds.
        needs: the indices of the actor's instructions whose results this instruction reads.
        executable: the index of the executable that a run calls; None for other kinds.
        held_bytes: the bytes of the actor's buffer table at this instruction, as its program says.
        text: the instruction's line in the compiled step's `as_text()`.
    """

    actor: ActorId
    instruction: int
    kind: Kind
    label: str
    start_s: float
    end_s: float
    size_bytes: int = 0
    peer: ActorId | None = None
    tag: Tag | None = None
    needs: tuple[int, ...] = ()
    executable: ExecutableId | None = None
    held_bytes: int = 0
    text: str = field(default="", repr=False)

    @property
    def duration_s(self) -> float:
        """The seconds from the start of the instruction to its end."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class ActorTimeline:
    """The events of one actor in one step.

    Args:
        actor: the actor.
        events: the events in program order, without instructions that have no recorded time (such as a
            delete).
        clock_error_s: the largest possible error of the events' times against the controller's clock; 0: both
            use the same clock.
        host, pid: the machine and the process id of the actor.
    """

    actor: ActorId
    events: tuple[TimelineEvent, ...]
    clock_error_s: float = 0.0
    host: str = ""
    pid: int = 0

    def __repr__(self) -> str:
        times = f"from {self.begin_s} to {self.end_s} s"
        return f"<ActorTimeline: actor {self.actor}, {len(self.events)} events {times}>"

    @property
    def runs(self) -> tuple[TimelineEvent, ...]:
        """The events of the actor's tasks, in order."""
        return tuple(e for e in self.events if e.kind == "run")

    @property
    def begin_s(self) -> float:
        """The time at which the actor began the step, in seconds since the step's start."""
        return min((e.start_s for e in self.events), default=0.0)

    @property
    def end_s(self) -> float:
        """The time at which the actor's last instruction ended, sends included, in seconds since the step's
        start.
        """
        return max((e.end_s for e in self.events), default=0.0)


@dataclass(frozen=True, slots=True)
class TimelineTransfer:
    """A transfer of a value from one actor to another: the event of its send and that of its receive."""

    send: TimelineEvent
    receive: TimelineEvent

    @property
    def duration_s(self) -> float:
        """The seconds from the start of the send until the data had arrived."""
        return self.receive.end_s - self.send.start_s


@dataclass(frozen=True, slots=True)
class Recorded:
    """The facts that the controller recorded of one actor's part in a step.

    Args:
        program: the program that the actor ran.
        stamps: the times of its instructions as in `StepStats.stamps`, in seconds of the actor's own clock.
        heard_s: when the controller received the actor's reply, in seconds of the controller's clock.
        offset_s: the estimate of how many seconds the actor's clock was ahead of the controller's.
        error_s: the largest possible error of that estimate in seconds; None: there is no estimate.
        host, pid: the machine and the process id of the actor.
    """

    program: ActorProgram
    stamps: bytes
    heard_s: float
    offset_s: float = 0.0
    error_s: float | None = 0.0
    host: str = ""
    pid: int = 0


def read_stamps(stamps: bytes) -> list[tuple[float, float]]:
    """Decode `StepStats.stamps` into one pair per instruction: when it began and when it ended, in seconds.

    A time that an instruction does not have is NaN.
    """
    return list(_STAMPS.iter_unpack(stamps))


def stamp_range(stamps: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Return the earliest and the latest of all time stamps, or None if all of them are NaN."""
    moments = [t for pair in stamps for t in pair if not math.isnan(t)]
    return (min(moments), max(moments)) if moments else None


def read_events(
    program: ActorProgram,
    stamps: Sequence[tuple[float, float]],
    origin_s: float,
    labels: Mapping[TransferKey, str],
) -> tuple[TimelineEvent, ...]:
    """Return the events of one actor in one step, in program order.

    Args:
        program: the program that the actor ran.
        stamps: one pair per instruction: when it began and when it ended, in seconds of one clock.
        origin_s: the time of that clock at the step's start.
        labels: for each transfer, the name of the task or argument that made its value, from
            `transfer_labels`.

    Raises:
        ValueError: there are more or fewer pairs than instructions.
    """
    if len(stamps) != len(program.instructions):
        raise ValueError(f"{len(stamps)} pairs of stamps for {len(program.instructions)} instructions")
    made_by: dict[BufferId, int] = {}  # the last instruction so far that wrote each buffer
    texts, held = format_instructions(program), held_bytes(program)
    events: list[TimelineEvent] = []
    for index, (instruction, moments) in enumerate(zip(program.instructions, stamps, strict=True)):
        needs = tuple(dict.fromkeys(made_by[b] for b in _buffers_read(instruction) if b in made_by))
        made_by.update(dict.fromkeys(buffers_made(instruction), index))
        known = [t for t in moments if not math.isnan(t)]
        if not known:
            continue
        label, peer, tag = _describe(program.actor, instruction, labels)
        events.append(
            TimelineEvent(
                actor=program.actor,
                instruction=index,
                kind=cast(Kind, instruction.__struct_config__.tag),
                label=label,
                start_s=known[0] - origin_s,
                end_s=known[-1] - origin_s,
                size_bytes=0
                if isinstance(instruction, Run)
                else program.avals[instruction.buffer].size_bytes,
                peer=peer,
                tag=tag,
                needs=needs,
                executable=instruction.executable if isinstance(instruction, Run) else None,
                held_bytes=held[index],
                text=texts[index],
            )
        )
    return tuple(events)


def transfer_labels(programs: Sequence[ActorProgram]) -> dict[TransferKey, str]:
    """Return, for each transfer of a step, the label of the task or argument that made its value.

    An argument is named like `"arg 3"`. For a value that an actor received and passed on, the label is that
    of the task or argument that made it on its first actor.

    Args:
        programs: the programs of all actors.

    Returns:
        A dictionary. Its keys are (sending actor, receiving actor, tag); its values are the labels.
    """
    makers: dict[TransferKey, Instruction | None] = {}
    for program in programs:
        made: dict[BufferId, Instruction] = {}
        for instruction in program.instructions:
            if isinstance(instruction, Send):
                makers[(program.actor, instruction.to_actor, instruction.tag)] = made.get(instruction.buffer)
            made.update(dict.fromkeys(buffers_made(instruction), instruction))

    def name(key: TransferKey, hops: int) -> str:
        maker = makers.get(key)
        if isinstance(maker, Run):
            return maker.label
        if isinstance(maker, Input):
            return f"arg {maker.arg}"
        if isinstance(maker, Recv) and hops:  # the actor received the value and passed it on
            return name((maker.from_actor, key[0], maker.tag), hops - 1)
        return "?"

    return {key: name(key, len(programs)) for key in makers}


def pair_transfers(actors: Sequence[ActorTimeline]) -> tuple[TimelineTransfer, ...]:
    """Return each send with its receive, in the order in which the sends were started.

    A send and its receive have the same sender, receiver and tag. A send without a receive is left out.
    """
    receives: dict[tuple[ActorId, ActorId | None, Tag | None], TimelineEvent] = {
        (e.actor, e.peer, e.tag): e for a in actors for e in a.events if e.kind == "recv"
    }
    sends = [e for a in actors for e in a.events if e.kind == "send"]
    pairs = ((e, receives.get((e.peer or 0, e.actor, e.tag))) for e in sends)
    both = [TimelineTransfer(send, receive) for send, receive in pairs if receive is not None]
    return tuple(sorted(both, key=lambda t: (t.send.start_s, t.send.actor, t.send.instruction)))


def _buffers_read(instruction: Instruction) -> tuple[BufferId, ...]:
    if isinstance(instruction, Run):
        return instruction.inputs
    return (instruction.buffer,) if isinstance(instruction, Send | Output | Delete) else ()


def _describe(
    actor: ActorId, instruction: Instruction, labels: Mapping[TransferKey, str]
) -> tuple[str, ActorId | None, Tag | None]:
    """Return the label, the peer and the tag of an actor's instruction, as in `TimelineEvent`."""
    match instruction:
        case Run(label=label):
            return label, None, None
        case Send(to_actor=peer, tag=tag):
            return labels.get((actor, peer, tag), "?"), peer, tag
        case Recv(from_actor=peer, tag=tag):
            return labels.get((peer, actor, tag), "?"), peer, tag
        case Input(arg=arg):
            return f"arg {arg}", None, None
        case Output(result=result):
            return f"result {result}", None, None
        case Delete(buffer=buffer):
            return f"b{buffer}", None, None
