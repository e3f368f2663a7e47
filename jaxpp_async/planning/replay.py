"""Replay the compiled programs of a step in virtual time.

The rules are those of `actors.executor` and `actors.step_run`. An actor goes through its instructions in
order and stops only at a `Run`, which begins when the previous one has ended, the buffers that it reads have
arrived, and the sends of buffers that it consumes have ended. A buffer arrives by a receive, or as an
argument that is not there yet when the step begins; tasks that do not read it do not wait for it. Receives
are posted, and sends are started, when the run before them has ended. A transfer begins when its send has
started and its receive is posted. The transfers from one actor to another follow one after the other; each
occupies the link for as long as its bytes take, and arrives one latency later. Deletions and results take no
time.

All these rules are of one form: an event happens a given delay after the latest of some other events. So a
program becomes an `EventGraph` once, and every replay is one pass over it with other delays, for one draw of
the delays or for several at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import ActorId, BufferId, Delete, Input, Output, Recv, Run, Send, Tag
from jaxpp_async.timeline.event_graph import EventGraph

EAGER_BYTES = 8192
"""The size in bytes up to which a send ends when it starts, because the transport copies the message."""


@dataclass(frozen=True, slots=True)
class ReplayDelays:
    """The delays of all events of a replay, in seconds.

    The shape of each array is (actors, draws), (late inputs, draws), (runs, draws) or (transfers, draws).
    Inputs and runs are numbered in the order of the programs, transfers in the order of their sends in the
    programs.

    Args:
        begin_s: by actor: from the moment at which the controller sends the step until the actor begins it.
        arguments_s: by late input: from then until the argument is available.
        dispatch_s: by run: from the end of the previous run until the run's task begins, if it waits for
            nothing else.
        run_s: by run: the time of its task.
        wake_s: by run: from the arrival of the last buffer that the run waits for until its task begins.
        post_s: by transfer: from the moment at which the send could start, or the one before it started,
            until it starts.
        occupied_s: by transfer: how long it keeps the link from the next transfer.
        latency_s: by transfer: from then until the data is available to the receiver.
    """

    begin_s: np.ndarray
    arguments_s: np.ndarray
    dispatch_s: np.ndarray
    run_s: np.ndarray
    wake_s: np.ndarray
    post_s: np.ndarray
    occupied_s: np.ndarray
    latency_s: np.ndarray


@dataclass(frozen=True)
class ReplayTimes:
    """The result of a replay: when every instruction began and ended, in seconds since the step's start.

    Attributes:
        begin_s, end_s: shape (instructions of all actors, draws), one actor after the other in program order.
            A time that an instruction does not have, such as that of a deletion, is NaN.
        last_s: when the last instruction ended, of shape (draws,).
        first: the index of each actor's first instruction in `begin_s` and `end_s`, and then their number.
    """

    begin_s: np.ndarray
    end_s: np.ndarray
    last_s: np.ndarray
    first: tuple[int, ...]

    def stamps(self, position: int, draw: int) -> bytes:
        """Return the times of one actor's instructions in the form of `StepStats.stamps`.

        Args:
            position: the position of the actor's program among the programs.
            draw: the index of the draw.
        """
        of_actor = slice(self.first[position], self.first[position + 1])
        return np.stack([self.begin_s[of_actor, draw], self.end_s[of_actor, draw]], axis=1).tobytes()


class Replay:
    """The programs of one step, prepared for replaying them any number of times.

    Args:
        programs: the program of each actor, valid in the sense of `compiler.verify`.
        late_arguments: the numbers of the arguments that may not be available yet when an actor begins.

    Attributes:
        actors: the number of each program's actor.
        late_inputs: by late input, the number of its argument.
        num_instructions: the number of instructions of all programs.
        run_executables: by run, the index of its executable.
        run_labels: by run, the label of its task.
        sends: by transfer, the sending actor, the receiving actor and the size in bytes.

    Raises:
        ValueError: a receive has no send, or the programs wait for each other in a cycle.
    """

    def __init__(self, programs: Sequence[ActorProgram], late_arguments: Collection[int] = ()):
        self.actors = tuple(p.actor for p in programs)
        graph = _GraphBuilder(programs, late_arguments)
        self.late_inputs = tuple(graph.late_inputs)
        self.run_executables = np.array([run.executable for run in graph.runs], dtype=np.intp)
        self.run_labels = tuple(run.label for run in graph.runs)
        self.sends = tuple(graph.sends)
        for program in programs:
            graph.add(program)
        self._graph = EventGraph(graph.needs)
        self._begins, self._ends = np.array(graph.begins, np.intp), np.array(graph.ends, np.intp)
        self._first = tuple(accumulate((len(p.instructions) for p in programs), initial=0))
        self.num_instructions = self._first[-1]

    def run(self, delays: ReplayDelays) -> ReplayTimes:
        """Replay the step once for each draw of the delays.

        Args:
            delays: the delays of all events.
        """
        rows = np.concatenate(
            [
                delays.begin_s,
                delays.arguments_s,
                delays.dispatch_s,
                delays.run_s,
                delays.wake_s - delays.dispatch_s,  # a run begins `dispatch_s` after its data is there
                delays.post_s,
                delays.occupied_s,
                delays.latency_s,
            ]
        )
        times = self._graph.times_of_draws(rows)
        last_s = times[self._ends[self._ends != _NEVER]].max(axis=0, initial=0.0)
        times = np.concatenate([times, np.full((1, times.shape[1]), np.nan)])  # at _NEVER
        return ReplayTimes(times[self._begins], times[self._ends], last_s, self._first)


_NEVER = -1
"""The number of the event that stands for a time that an instruction does not have."""


class _GraphBuilder:
    """The events of a step's programs, numbered as `Replay.run` orders their delays.

    There is one event per actor (it begins), one per late input (the argument is available), three per run
    (its task begins; the task ends; the data that it waits for is there), and three per transfer (its send
    starts; the link is free again; the data has arrived).

    Args:
        programs: the program of each actor.
        late_arguments: the numbers of the arguments whose inputs are late.

    Attributes:
        late_inputs: by late input, the number of its argument.
        runs: the `Run` instructions of all programs.
        sends: by transfer, the sending actor, the receiving actor and the size in bytes.
        needs: for each event, the numbers of the events that it needs.
        begins, ends: for each instruction, the numbers of the events at which it begins and ends.
    """

    def __init__(self, programs: Sequence[ActorProgram], late_arguments: Collection[int]):
        self._late = frozenset(late_arguments)
        inputs = (i for p in programs for i in p.instructions if isinstance(i, Input))
        self.late_inputs = [i.arg for i in inputs if i.arg in self._late]
        self.runs = [i for p in programs for i in p.instructions if isinstance(i, Run)]
        self.sends: list[tuple[ActorId, ActorId, int]] = []
        self._transfers: dict[Tag, int] = {}
        for p in programs:
            for i in p.instructions:
                if isinstance(i, Send):
                    self._transfers[i.tag] = len(self.sends)
                    self.sends.append((p.actor, i.to_actor, p.avals[i.buffer].size_bytes))
        num_actors, num_runs, num_transfers = len(programs), len(self.runs), len(self.sends)
        blocks = [num_actors, len(self.late_inputs)] + [num_runs] * 3 + [num_transfers] * 3
        starts = list(accumulate(blocks, initial=0))
        self._actor, self._input, self._started, self._ended, self._there = starts[:5]
        self._posted, self._released, self._arrived, count = starts[5:]
        self.needs: list[list[int]] = [[] for _ in range(count)]
        self.begins: list[int] = []
        self.ends: list[int] = []
        self._num_actors = self._num_inputs = self._num_runs = 0
        self._last_on_link: dict[tuple[ActorId, ActorId], int] = {}

    def add(self, program: ActorProgram) -> None:
        """Add the events of one actor's program; programs are added in their order.

        Raises:
            ValueError: a receive has no send.
        """
        needs, transfers = self.needs, self._transfers
        began = self._actor + self._num_actors
        self._num_actors += 1
        passed = began  # the event at which the actor passes the instructions before the next run
        last_post = -1  # the last send that starts at that event
        arrivals: dict[BufferId, int] = {}  # of buffers that come late and that no run has waited for yet
        sending: dict[BufferId, list[int]] = {}  # the ends of sends, of buffers that sends read
        for i in program.instructions:
            begin = end = _NEVER
            if isinstance(i, Delete | Output):  # the slot may hold another buffer from now on
                arrivals.pop(i.buffer, None)
                sending.pop(i.buffer, None)
            elif isinstance(i, Run):
                number = self._num_runs
                self._num_runs += 1
                begin, end = self._started + number, self._ended + number
                needs[begin].append(passed)
                there = [arrivals.pop(b) for b in i.inputs if b in arrivals] if arrivals else []
                for position in i.donated:
                    there += sending.pop(i.inputs[position], ())
                if there:
                    needs[self._there + number] = there
                    needs[begin].append(self._there + number)
                needs[end].append(begin)
                passed, last_post = end, -1
            elif isinstance(i, Send):
                number = transfers[i.tag]
                begin = self._posted + number
                released, arrived = self._released + number, self._arrived + number
                eager = self.sends[number][2] <= EAGER_BYTES
                end = begin if eager else arrived
                needs[begin].append(passed)
                if last_post >= 0:
                    needs[begin].append(last_post)
                if i.buffer in arrivals:  # the actor passes on what it receives
                    needs[begin].append(arrivals[i.buffer])
                last_post = begin
                needs[released].append(begin)
                link = program.actor, i.to_actor
                if link in self._last_on_link:
                    needs[released].append(self._last_on_link[link])
                self._last_on_link[link] = released
                needs[arrived].append(released)
                if not eager:
                    sending.setdefault(i.buffer, []).append(arrived)
            elif isinstance(i, Recv):
                if i.tag not in transfers:
                    raise ValueError(f"actor {program.actor} receives tag {i.tag}, which no actor sends")
                begin, end = passed, self._arrived + transfers[i.tag]
                needs[self._released + transfers[i.tag]].append(begin)
                arrivals[i.buffer] = end
            elif isinstance(i, Input):
                begin = end = began
                if i.arg in self._late:
                    end = arrivals[i.buffer] = self._input + self._num_inputs
                    self._num_inputs += 1
                    needs[end].append(began)
            self.begins.append(begin)
            self.ends.append(end)
