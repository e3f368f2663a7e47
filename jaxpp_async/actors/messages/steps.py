"""steps: programs, the steps that run them, and the values that go in and come out. Plain frozen data, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from jaxpp_async.program import Aval

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
