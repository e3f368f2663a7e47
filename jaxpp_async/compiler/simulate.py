"""simulate: runs all programs of a step together, without data, to find deadlocks. Never touches a device or a clock.

The rules are the executor's: each actor issues in order; `Recv` and `Send` never block; a `Run` blocks until its inputs
have arrived. Links are taken at their strictest: a transfer completes only once its receive is posted (rendezvous) and
every earlier one between the same two actors, in the same direction, has completed (NCCL). Programs that end so end
under any transport.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jaxpp_async.errors import ScheduleError
from jaxpp_async.program import ActorId, ActorProgram, BufferId, Recv, Run, Send, Tag
from jaxpp_async.program_text import format_instruction


@dataclass(frozen=True, slots=True)
class Wait:
    """An actor that cannot go on.

    Args:
        actor: who waits.
        at: text of the instruction it waits at, or "the end of the step".
        tag: the transfer it waits for.
        peer: the other actor of that transfer.
        sends: whether the actor is the transfer's sender.
    """

    actor: ActorId
    at: str
    tag: Tag
    peer: ActorId
    sends: bool = False

    def __str__(self) -> str:
        what = (
            f"actor {self.peer} to receive tag {self.tag}" if self.sends else f"tag {self.tag} from actor {self.peer}"
        )
        return f"actor {self.actor} waits at {self.at} for {what}"


_Link: TypeAlias = tuple[ActorId, ActorId, Tag | None]


class _Simulation:
    """Program counters, links and what has not arrived yet."""

    def __init__(self, programs: Sequence[ActorProgram], rendezvous: bool):
        self.streams = {p.actor: p.instructions for p in programs}
        self.rendezvous = rendezvous
        self.counter = dict.fromkeys(self.streams, 0)
        self.blocked: dict[ActorId, BufferId] = {}
        self.pending: dict[ActorId, dict[BufferId, Recv]] = {a: {} for a in self.streams}
        self.sent: dict[_Link, deque[Tag]] = defaultdict(deque)
        self.posted: dict[_Link, deque[tuple[Tag, BufferId]]] = defaultdict(deque)
        self.ready = deque(self.streams)

    def run(self) -> None:
        while self.ready:
            self.advance(self.ready.popleft())

    def advance(self, actor: ActorId) -> None:
        """Issue until a run blocks or the program ends."""
        stream, pending = self.streams[actor], self.pending[actor]
        index = self.counter[actor]
        while index < len(stream):
            instruction = stream[index]
            if isinstance(instruction, Run):
                missing = next((b for b in instruction.inputs if b in pending), None) if pending else None
                if missing is not None:
                    self.blocked[actor] = missing
                    break
            elif isinstance(instruction, Send):
                link = self.link(actor, instruction.to_actor, instruction.tag)
                self.sent[link].append(instruction.tag)
                if self.posted[link]:
                    self.match(link)
            elif isinstance(instruction, Recv):
                pending[instruction.buffer] = instruction
                link = self.link(instruction.from_actor, actor, instruction.tag)
                self.posted[link].append((instruction.tag, instruction.buffer))
                if self.sent[link]:
                    self.match(link)
            index += 1
        self.counter[actor] = index

    def link(self, sender: ActorId, receiver: ActorId, tag: Tag) -> _Link:
        """The queue that a transfer stands in: one for the pair, or one for itself where nothing holds it up."""
        return (sender, receiver, None if self.rendezvous else tag)

    def match(self, link: _Link) -> None:
        """Complete what both ends of the link have issued."""
        sent, posted = self.sent[link], self.posted[link]
        while sent and posted and sent[0] == posted[0][0]:
            sent.popleft()
            self.arrive(link[1], posted.popleft()[1])

    def arrive(self, actor: ActorId, buffer: BufferId) -> None:
        self.pending[actor].pop(buffer, None)
        if self.blocked.get(actor) == buffer:
            del self.blocked[actor]
            self.ready.append(actor)

    def waits(self) -> list[Wait]:
        """What every unfinished actor waits for, in order of actors."""
        found: dict[ActorId, Wait] = {}
        for actor, buffer in self.blocked.items():
            recv, at = self.pending[actor][buffer], self.streams[actor][self.counter[actor]]
            found[actor] = Wait(actor, format_instruction(at), recv.tag, recv.from_actor)
        end = "the end of the step"
        for actor, pending in self.pending.items():
            for recv in pending.values():
                found.setdefault(actor, Wait(actor, end, recv.tag, recv.from_actor))
        if self.rendezvous:
            for (sender, receiver, _), tags in self.sent.items():
                for tag in tags:
                    found.setdefault(sender, Wait(sender, end, tag, receiver, sends=True))
        return [found[a] for a in sorted(found)]


def simulate(programs: Sequence[ActorProgram], *, rendezvous: bool = True) -> list[Wait]:
    """Run the programs together until nothing moves any more.

    Args:
        programs: one an actor.
        rendezvous: links as strict as the module says. False: a send completes by itself and transfers pair by tag.

    Returns:
        The actors that cannot go on; empty when all end.
    """
    simulation = _Simulation(programs, rendezvous)
    simulation.run()
    return simulation.waits()


def _cycle(waits: list[Wait]) -> list[Wait]:
    """The circle of waiting that the first actor's chain leads into; the chain itself where it ends elsewhere."""
    by_actor = {w.actor: w for w in waits}
    chain: list[Wait] = []
    actor = waits[0].actor
    while actor in by_actor and by_actor[actor] not in chain:
        chain.append(by_actor[actor])
        actor = chain[-1].peer
    return chain[chain.index(by_actor[actor]) :] if actor in by_actor else chain


def check_deadlock(programs: Sequence[ActorProgram]) -> None:
    """Refuse programs that wait for each other for ever.

    Args:
        programs: one an actor.

    Raises:
        ScheduleError: they deadlock; the message says who waits for whom.
    """
    waits = simulate(programs)
    if waits:
        cycle = _cycle(waits)
        lines = "".join(f"\n  {w}" for w in cycle)
        raise ScheduleError(
            f"the schedule deadlocks: {len(waits)} of {len(programs)} actors cannot go on. Who waits for whom:{lines}\n"
            "Order the tasks of these actors so that each comes after what it needs from the others."
        )
