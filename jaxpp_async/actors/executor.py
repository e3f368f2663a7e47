"""executor: events of one step in, next commands out; owns the buffer table and the pending deletions. Never waits,
never touches a device, a clock or a socket.

Instructions are taken in program order. A receive is posted and passed; a send is passed and starts when its buffer is
there; a deletion is passed and carried out when no send reads the buffer any more. Only a run holds the order up, until
it has run. So the buffer table, and with it peak bytes, depends on the program alone and not on timing.

While a run executes the next one may be issued already (`ahead`) if its inputs are there or come from the run that
executes; the table still counts in program order.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpp_async.actors.plan import (
    BindInput,
    BufferKey,
    Command,
    Drop,
    Execute,
    ExecutionPlan,
    Finish,
    KeepOutput,
    PostRecv,
    StartSend,
)


class Executor:
    """Executes one plan once.

    Args:
        plan: the program, made ready.
        ahead: issue one run while the one before executes.

    Attributes:
        peak_bytes: most bytes the table has held so far.
        table_bytes: bytes it holds now.
        pending_bytes: bytes of deleted buffers that transfers still use.
        finished: whether `Finish` was given.
    """

    def __init__(self, plan: ExecutionPlan, *, ahead: bool = True):
        self.plan, self._ahead = plan, ahead
        count = len(plan.avals)
        self.peak_bytes = self.table_bytes = self.pending_bytes = 0
        self.finished = False
        self._sizes = [0] * count
        self._here = [False] * count
        self._sends = [0] * count
        self._unsent: dict[BufferKey, list[StartSend]] = {}
        self._unkept: dict[BufferKey, list[KeepOutput]] = {}
        self._pending: dict[BufferKey, Drop] = {}
        self._open = 0  # transfers and inputs under way
        self._at = 0
        self._running: Execute | None = None
        self._issued: Execute | None = None  # the run after the running one, issued early
        self._candidate: Execute | None = None  # the run to issue next, and what it waits for
        self._awaited: set[BufferKey] = set()

    # ------------------------------------------------------------ events

    def start(self) -> list[Command]:
        """Begin the step."""
        return self._advance([])

    def arrived(self, buffer: BufferKey, nbytes: int) -> list[Command]:
        """An input is bound, or the data of a receive is in, and the array has `nbytes` bytes."""
        out: list[Command] = []
        self._open -= 1
        self._here[buffer] = True
        kept = self._unkept.pop(buffer, ())
        if self.plan.counted[buffer] and not kept:
            self._count(nbytes - self._sizes[buffer], pending=buffer in self._pending)
            self._sizes[buffer] = nbytes
        out.extend(self._unsent.pop(buffer, ()))
        out.extend(kept)
        self._release(buffer, out)
        return self._settled(buffer, out)

    def ran(self, instruction: int, nbytes: Sequence[int]) -> list[Command]:
        """The oldest issued run has run, and its outputs have these sizes."""
        run = self._running
        assert run is not None and run.instruction == instruction, "runs complete in the order they are issued"
        for position in run.donated:
            self._count(-self._sizes[run.inputs[position]])
        for key, size in zip(run.outputs, nbytes, strict=True):
            self._here[key] = True
            self._sizes[key] = size if self.plan.counted[key] else 0
            self._count(self._sizes[key])
        self._running = None
        self._at += 1
        return self._advance([])

    def sent(self, buffer: BufferKey) -> list[Command]:
        """A send of this buffer has completed: its memory is no longer read."""
        out: list[Command] = []
        self._open -= 1
        self._sends[buffer] -= 1
        if not self._sends[buffer]:
            self._release(buffer, out)
        return self._settled(buffer, out)

    # ------------------------------------------------------------ what others ask

    @property
    def starved(self) -> bool:
        """Nothing executes, because a run waits for buffers."""
        return self._running is None and self._candidate is not None

    @property
    def draining(self) -> bool:
        """Every instruction is done, and transfers are still under way."""
        return self._at >= len(self.plan.commands) and self._open > 0

    @property
    def awaited(self) -> frozenset[BufferKey]:
        """What the run to come waits for: buffers that are not here, or that it consumes while a send reads them."""
        return frozenset(self._awaited) if self.starved else frozenset()

    @property
    def unsent(self) -> list[StartSend]:
        """Sends that were reached before their data came."""
        return [command for commands in self._unsent.values() for command in commands]

    def is_here(self, buffer: BufferKey) -> bool:
        """Whether its data has come or has been made."""
        return self._here[buffer]

    @property
    def at(self) -> int:
        """Index of the instruction under way."""
        return self._at

    def position(self) -> str:
        """The instruction under way, as text, with what it waits for."""
        if self._at >= len(self.plan.commands):
            return f"end of program, {self._open} transfers open" if self._open else "end of program"
        text = self.plan.text(self._at)
        return f"{text}, waiting for {len(self._awaited)} buffers" if self.starved else text

    # ------------------------------------------------------------ program order

    def _advance(self, out: list[Command]) -> list[Command]:
        commands = self.plan.commands
        while self._at < len(commands):
            command = commands[self._at]
            if isinstance(command, Execute):
                self._reach(command, out)
                self._look_ahead(out)
                return out
            self._take(command, out)
            self._at += 1
        if not self._open and not self.finished:
            self.finished = True
            out.append(Finish())
        return out

    def _take(self, command: Command, out: list[Command]) -> None:
        match command:
            case PostRecv(buffer=key) | BindInput(buffer=key):
                self._sizes[key] = self.plan.avals[key].size_bytes if self.plan.counted[key] else 0
                self._count(self._sizes[key])
                self._open += 1
                out.append(command)
            case StartSend(buffer=key):
                self._open += 1
                self._sends[key] += 1
                if self._here[key]:
                    out.append(command)
                else:
                    self._unsent.setdefault(key, []).append(command)
            case Drop(buffer=key):
                self._delete(command, out)
            case KeepOutput(buffer=key):
                self._count(-self._sizes[key])
                self._sizes[key] = 0
                if self._here[key]:
                    out.append(command)
                else:
                    self._unkept.setdefault(key, []).append(command)

    def _reach(self, run: Execute, out: list[Command]) -> None:
        """Program order has come to a run: issue it, or find out what it waits for."""
        if self._issued is not None:
            assert self._issued is run
            self._running, self._issued = run, None
            return
        self._await(run, made=())
        if not self._awaited:
            self._running, self._candidate = run, None
            out.append(run)

    def _look_ahead(self, out: list[Command]) -> None:
        running = self._running
        if running is None or not self._ahead:
            return
        following = self.plan.next_run[running.instruction]
        if following is None:
            return
        run = self.plan.commands[following]
        assert isinstance(run, Execute)
        self._await(run, made=running.outputs)
        self._issue_candidate(out)

    def _await(self, run: Execute, made: tuple[BufferKey, ...]) -> None:
        self._candidate = run
        self._awaited = {key for key in run.inputs if not self._here[key] and key not in made}
        self._awaited.update(run.inputs[position] for position in run.donated if self._sends[run.inputs[position]])

    def _issue_candidate(self, out: list[Command]) -> None:
        run = self._candidate
        if run is None or self._awaited:
            return
        out.append(run)
        self._candidate = None
        if self._running is None:
            self._running = run
            self._look_ahead(out)
        else:
            self._issued = run

    def _settled(self, buffer: BufferKey, out: list[Command]) -> list[Command]:
        """A buffer arrived or was sent: a run may have waited for it, or the step's end for the last transfer."""
        if buffer in self._awaited and self._here[buffer] and not self._consumed_while_sent(buffer):
            self._awaited.discard(buffer)
            self._issue_candidate(out)
        if not self._open and self._at >= len(self.plan.commands):
            self._advance(out)
        return out

    def _consumed_while_sent(self, buffer: BufferKey) -> bool:
        run = self._candidate
        return bool(self._sends[buffer]) and run is not None and any(run.inputs[p] == buffer for p in run.donated)

    # ------------------------------------------------------------ the buffer table

    def _delete(self, drop: Drop, out: list[Command]) -> None:
        key = drop.buffer
        self._count(-self._sizes[key])
        self._pending[key] = drop
        self.pending_bytes += self._sizes[key]
        self._release(key, out)

    def _release(self, key: BufferKey, out: list[Command]) -> None:
        """Free a deleted buffer once its data is in and no send reads it."""
        if key in self._pending and self._here[key] and not self._sends[key]:
            out.append(self._pending.pop(key))
            self.pending_bytes -= self._sizes[key]

    def _count(self, size_bytes: int, *, pending: bool = False) -> None:
        if pending:
            self.pending_bytes += size_bytes
            return
        self.table_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.table_bytes)
