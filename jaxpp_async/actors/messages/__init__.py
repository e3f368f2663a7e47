"""messages: what controller and actor say to each other over the control channel. Plain frozen data, no I/O.

Requests go controller to actor and carry a `request` number; the actor answers each with exactly one reply bearing the
same number: the reply type named in the request's docstring, or `Failed`. `protocol` turns messages into frames.

starting   how actors start, connect and end
steps      programs, the steps that run them, values in and out
files      what is written to checkpoints and read of them
restarts   aborts, and the copies from which actors go on
where      where an actor is, how it does and what it says of itself
"""

from __future__ import annotations

from typing import TypeAlias

from jaxpp_async.actors.messages.files import (
    CheckFiles,
    FilePart,
    FilePiece,
    ReadFile,
    Sweep,
    Take,
    WriteFile,
    Written,
)
from jaxpp_async.actors.messages.restarts import (
    Abort,
    Forget,
    Hold,
    Keep,
    Kept,
    KeptArray,
    Lend,
    Renew,
    Renewed,
    Rollback,
)
from jaxpp_async.actors.messages.starting import (
    Admit,
    Cluster,
    Configure,
    Connect,
    Connected,
    Hardware,
    JoinLink,
    JoinLinks,
    LinksOffered,
    OfferLinks,
    Ready,
    Reserve,
    Reserved,
    Shutdown,
)
from jaxpp_async.actors.messages.steps import (
    INLINE_BYTES,
    ArrayId,
    Done,
    Failed,
    Fetch,
    Fetched,
    Load,
    Loaded,
    Put,
    RunKind,
    Step,
    StepDone,
    StepId,
    StepStats,
    Store,
    step_id,
    step_kind,
    step_number,
    step_text,
)
from jaxpp_async.actors.messages.where import (
    Beat,
    Inspect,
    Inspected,
    Log,
    OpenTransfer,
    Report,
    Reported,
)

__all__ = [
    "INLINE_BYTES",
    "Abort",
    "Admit",
    "ArrayId",
    "Beat",
    "CheckFiles",
    "Cluster",
    "Configure",
    "Connect",
    "Connected",
    "Done",
    "Failed",
    "Fetch",
    "Fetched",
    "FilePart",
    "FilePiece",
    "Forget",
    "Hardware",
    "Hold",
    "Inspect",
    "Inspected",
    "JoinLink",
    "JoinLinks",
    "Keep",
    "Kept",
    "KeptArray",
    "Lend",
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
    "Renew",
    "Renewed",
    "Reply",
    "Report",
    "Reported",
    "Request",
    "Reserve",
    "Reserved",
    "Rollback",
    "RunKind",
    "Shutdown",
    "Step",
    "StepDone",
    "StepId",
    "StepStats",
    "Store",
    "Sweep",
    "Take",
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
    | Take
    | WriteFile
    | CheckFiles
    | Sweep
    | ReadFile
    | Abort
    | Renew
    | Keep
    | Lend
    | Hold
    | Forget
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
    | Renewed
    | Kept
    | Inspected
    | Reported
    | Failed
)
Message: TypeAlias = Request | Reply | Log | Beat
