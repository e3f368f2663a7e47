"""Decide what a step does next: the caller reports events, and the executor returns the commands that follow.

The executor goes through the instructions in program order. At a receive, the executor posts the receive and
continues without the data. At a send, the executor continues too, and the send starts once its buffer is
available. At a deletion, the executor continues as well, and the deletion is carried out once no send reads
the buffer any more. Only at a `Run` does the executor stop, until the executable has computed its results.
The count of memory in use, and with it the peak, therefore depends on the program alone and not on timing.

While one `Run` executes, the next one may be issued early if its inputs are available or are results of the
executing one. Memory is still counted in program order.

In a step of small tasks this code takes the largest share of the time, so it goes over the commands once and
avoids function calls.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from jaxpp_async.actors.execution_plan import (
    BufferKey,
    Command,
    Drop,
    Execute,
    ExecutionPlan,
    Finish,
    KeepOutput,
    StartSend,
)

_FINISH = Finish()


class Executor:
    """A state machine for one step that returns, for each reported event, the commands to carry out next.

    Args:
        plan: the program, prepared for execution.
        alone: the indices of the `Run` instructions of quick tasks, which run on the event loop's thread.
            While such a task runs, the next `Run` is not issued early. The sends that follow the task thus
            start before the next `Run`.

    Attributes:
        peak_bytes: the greatest number of bytes of buffers in use so far.
        table_bytes: the number of bytes of buffers in use now.
        pending_bytes: the bytes of buffers that are deleted but that transfers still use.
        finished: whether the command `Finish` has been returned.
        starved: True while no task executes because the next `Run` waits for buffers.
        at: the index of the instruction under way.
    """

    peak_bytes = table_bytes = pending_bytes = at = 0
    finished = starved = False
    _open = 0  # transfers and inputs under way
    _running: Execute | None = None
    _issued: Execute | None = None  # the `Run` after the running one, if it was issued early
    _candidate: Execute | None = None  # the `Run` to issue next, which waits for `_awaited`

    def __init__(self, plan: ExecutionPlan, *, alone: Container[int] = ()):
        self.plan, self._alone = plan, alone
        count = len(plan.avals)
        self._available = [False] * count
        self._sends = [0] * count
        self._held = [0] * count  # the bytes that each buffer now adds to table_bytes
        self._unsent: dict[BufferKey, list[StartSend]] = {}
        self._unkept: dict[BufferKey, list[KeepOutput]] = {}
        self._pending: dict[BufferKey, Drop] = {}
        self._awaited: set[BufferKey] = set()

    # ------------------------------------------------------------ events

    def start(self, available: Iterable[BufferKey] = ()) -> list[Command]:
        """Begin the step, and return the first commands.

        Args:
            available: the keys of the buffers of step arguments that are available already and so need no
                `BindInput`.
        """
        for key in available:
            self._available[key] = True
        return self._advance([])

    def arrived(self, buffer: BufferKey) -> list[Command]:
        """Report that a step argument or the data of a receive is available; return the commands that
        follow."""
        out: list[Command] = []
        self._open -= 1
        self._available[buffer] = True
        if buffer in self._unsent:
            out.extend(self._unsent.pop(buffer))
        if buffer in self._unkept:
            out.extend(self._unkept.pop(buffer))
        if buffer in self._pending:
            self._release(buffer, out)
        return self._after_transfer(buffer, out)

    def ran(self, instruction: int) -> list[Command]:
        """Report that a `Run` instruction has computed its results; return the commands that follow.

        Args:
            instruction: the index of the `Run`, which must be the earliest one that was issued and not
                reported yet.
        """
        run = self._running
        assert run is not None and run.instruction == instruction, (
            "runs complete in the order they are issued"
        )
        held, sizes = self._held, self.plan.counted_bytes
        table = self.table_bytes
        for position in run.donated:
            table -= held[run.inputs[position]]
        for key in run.outputs:
            self._available[key] = True
            table += sizes[key]
            held[key] = sizes[key]
        self.table_bytes = table
        if table > self.peak_bytes:
            self.peak_bytes = table
        self._running = None
        self.at += 1
        return self._advance([])

    def sent(self, buffer: BufferKey) -> list[Command]:
        """Report that a send has completed and no longer reads its buffer; return the commands that
        follow."""
        out: list[Command] = []
        self._open -= 1
        self._sends[buffer] -= 1
        if buffer in self._pending:
            self._release(buffer, out)
        return self._after_transfer(buffer, out)

    # ------------------------------------------------------------ state

    @property
    def draining(self) -> bool:
        """True if every instruction is complete and transfers are still under way."""
        return self.at >= len(self.plan.commands) and self._open > 0

    @property
    def awaited(self) -> frozenset[BufferKey]:
        """The buffers for which the next `Run` waits, because their data is not available, or because the
        `Run` consumes them and a send still reads them. Empty if no `Run` waits."""
        return frozenset(self._awaited) if self.starved else frozenset()

    @property
    def unsent(self) -> list[StartSend]:
        """The sends that the program has passed but that have not started, because their data is not
        available yet."""
        return [command for commands in self._unsent.values() for command in commands]

    def is_available(self, buffer: BufferKey) -> bool:
        """Return whether the data of a buffer is available on this actor."""
        return self._available[buffer]

    def position(self) -> str:
        """Return the text of the instruction under way, with the number of buffers or transfers that it waits
        for."""
        if self.at >= len(self.plan.commands):
            return f"end of program, {self._open} transfers open" if self._open else "end of program"
        text = self.plan.text(self.at)
        return f"{text}, waiting for {len(self._awaited)} buffers" if self.starved else text

    # ------------------------------------------------------------ program order

    def _advance(self, out: list[Command]) -> list[Command]:
        """Process instructions up to the next `Run`, or up to the end. If the inputs of that `Run` are
        available, issue it.

        Args:
            out: the list of commands to return; new commands are appended.
        """
        commands, available, sends = self.plan.commands, self._available, self._sends
        count, at = len(commands), self.at
        while at < count:
            command = commands[at]
            if isinstance(command, Drop):
                key = command.buffer
                size = self._held[key]
                self.table_bytes -= size
                if available[key] and not sends[key]:
                    out.append(command)
                else:
                    self._pending[key] = command
                    self.pending_bytes += size
            elif isinstance(command, Execute):
                self.at = at
                self._process_run(command, out)
                return out
            elif isinstance(command, StartSend):
                self._open += 1
                sends[command.buffer] += 1
                if available[command.buffer]:
                    out.append(command)
                else:
                    self._unsent.setdefault(command.buffer, []).append(command)
            elif isinstance(command, KeepOutput):
                self._keep(command, out)
            else:
                assert not isinstance(command, Finish)  # no program contains one
                self._define(command.buffer)
                if not available[command.buffer]:
                    self._open += 1
                    out.append(command)
            at += 1
        self.at = at
        if not self._open and not self.finished:
            self.finished = True
            out.append(_FINISH)
        return out

    def _define(self, key: BufferKey) -> None:
        size = self._held[key] = self.plan.counted_bytes[key]
        self.table_bytes += size
        if self.table_bytes > self.peak_bytes:
            self.peak_bytes = self.table_bytes

    def _keep(self, command: KeepOutput, out: list[Command]) -> None:
        key = command.buffer
        self.table_bytes -= self._held[key]
        self._held[key] = 0
        if self._available[key]:
            out.append(command)
        else:
            self._unkept.setdefault(key, []).append(command)

    def _release(self, key: BufferKey, out: list[Command]) -> None:
        """If the data of a deleted buffer has arrived and no send reads the buffer, append the command that
        frees it to `out`."""
        if self._available[key] and not self._sends[key]:
            out.append(self._pending.pop(key))
            self.pending_bytes -= self._held[key]

    # ------------------------------------------------------------ runs

    def _process_run(self, run: Execute, out: list[Command]) -> None:
        """Process a `Run` instruction. If the `Run` has to wait for buffers, record which; otherwise issue
        the `Run`, unless it was issued early. Then issue the next `Run` early, if that is possible.

        Args:
            run: the command of the instruction.
            out: the list of commands to return; new commands are appended.
        """
        if self._issued is not None:
            assert self._issued is run
            self._running, self._issued = run, None
            self._look_ahead(run, out)
            return
        self._find_missing(run, made=())
        if self._awaited:
            self.starved = True
            return
        self._running, self._candidate = run, None
        out.append(run)
        self._look_ahead(run, out)

    def _look_ahead(self, running: Execute, out: list[Command]) -> None:
        if running.instruction in self._alone:
            return
        following = self.plan.next_run[running.instruction]
        if following is None:
            return
        run = self.plan.commands[following]
        assert isinstance(run, Execute)
        self._find_missing(run, made=running.outputs)
        if not self._awaited:
            self._issue_candidate(out)

    def _find_missing(self, run: Execute, made: tuple[BufferKey, ...]) -> None:
        available, awaited = self._available, set()
        for key in run.inputs:
            if not available[key] and key not in made:
                awaited.add(key)
        for position in run.donated:
            if self._sends[run.inputs[position]]:
                awaited.add(run.inputs[position])
        self._candidate, self._awaited = run, awaited

    def _issue_candidate(self, out: list[Command]) -> None:
        run, self._candidate = self._candidate, None
        assert run is not None
        out.append(run)
        if self._running is not None:
            self._issued = run
            return
        self._running = run
        self.starved = False
        self._look_ahead(run, out)

    def _after_transfer(self, buffer: BufferKey, out: list[Command]) -> list[Command]:
        """If the next `Run` no longer waits for any buffer, issue it. If the program's end is reached and no
        transfer is under way, end the step.

        This is called after a buffer has arrived or has been sent.

        Args:
            buffer: the key of the buffer.
            out: the list of commands to return; new commands are appended.

        Returns:
            The list `out`.
        """
        if buffer in self._awaited and self._available[buffer] and not self._consumed_while_sent(buffer):
            self._awaited.discard(buffer)
            if not self._awaited and self._candidate is not None:
                self._issue_candidate(out)
        if not self._open and self.at >= len(self.plan.commands):
            self._advance(out)
        return out

    def _consumed_while_sent(self, buffer: BufferKey) -> bool:
        run = self._candidate
        return (
            bool(self._sends[buffer])
            and run is not None
            and any(run.inputs[p] == buffer for p in run.donated)
        )
