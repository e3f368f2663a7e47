"""verify: checks what must hold after each stage of lowering; makes nothing, changes nothing.

`verify_graph` before lowering; after each of its stages the rules that the stage could break (`verify_programs`: all of
them). What they find is a bug of this package (`InternalError`), except a deadlock, which a schedule can ask for
(`ScheduleError`). Everything is linear in the number of instructions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NoReturn, TypeVar

from jaxpp_async.compiler.alone import InternalError, Made, verify_program
from jaxpp_async.compiler.simulate import check_deadlock
from jaxpp_async.frozen import frozen
from jaxpp_async.program import (
    ActorId,
    ActorProgram,
    Aval,
    Delete,
    ExecutableId,
    Recv,
    Run,
    Send,
    Tag,
    TaskGraph,
)

_T = TypeVar("_T")

# ---------------------------------------------------------------- task graph


def _fail_graph(message: str) -> NoReturn:
    raise InternalError(f"task graph: {message}; this is a bug in jaxpp_async.compiler.placement")


def verify_graph(graph: TaskGraph) -> None:
    """Check that values are assigned once, before they are read, and that every index is in range.

    Args:
        graph: what placement made.

    Raises:
        InternalError: a rule is broken.
    """
    num_values = len(graph.values)
    made = Made(num_values)

    def make(value: int, where: str) -> None:
        if not 0 <= value < num_values:
            _fail_graph(f"{where} makes value {value} of {num_values}")
        if value in made:
            _fail_graph(f"{where} makes {graph.values[value].label!r}, which exists already")
        made.add(value)

    for i in graph.inputs:
        if i.actors:
            make(i.value, f"argument {i.arg}")
        _verify_homes("argument", i.arg, i.actors, graph.num_actors)
    for node in graph.nodes:
        if not 0 <= node.actor < graph.num_actors:
            _fail_graph(f"{node.label} runs on actor {node.actor} of {graph.num_actors}")
        if node.donatable and not (min(node.donatable) >= 0 and max(node.donatable) < len(node.inputs)):
            _fail_graph(f"{node.label} donates {node.donatable}")
        if not made.has(node.inputs):
            v = next(v for v in node.inputs if v not in made)
            label = graph.values[v].label if 0 <= v < num_values else v
            _fail_graph(f"{node.label} reads {label!r} before it is made")
        if not made.extend(node.outputs):
            for v in node.outputs:
                make(v, node.label)
    for o in graph.outputs:
        if o.value not in made:
            _fail_graph(f"result {o.result} is value {o.value}, which nothing makes")
        _verify_homes("result", o.result, o.actors, graph.num_actors)
    if (arg := _twice([i.arg for i in graph.inputs])) is not None:
        _fail_graph(f"argument {arg} appears twice")
    # A scalar that every actor computes for itself is one result made of several values, one an actor.
    if (at := _twice([(o.result, a) for o in graph.outputs for a in o.actors])) is not None:
        _fail_graph(f"result {at[0]} on actor {at[1]} appears twice")


def _verify_homes(what: str, number: int, homes: Sequence[ActorId], num_actors: int) -> None:
    """Check the actors on which an argument or a result lives."""
    if homes and not (min(homes) >= 0 and max(homes) < num_actors):
        _fail_graph(f"{what} {number} lives on actors {homes}")
    if len(homes) > 1 and len(set(homes)) != len(homes):
        _fail_graph(f"{what} {number} names an actor twice: {homes}")


def _twice(things: Sequence[_T]) -> _T | None:
    """The first of `things` that is there more than once."""
    if len(set(things)) == len(things):
        return None
    return next((thing for thing, times in Counter(things).items() if times > 1), None)


# ---------------------------------------------------------------- programs together


@frozen()
class _End:
    """One side of a transfer."""

    actor: ActorId
    peer: ActorId
    aval: Aval


def _fail_transfer(tag: Tag, message: str) -> NoReturn:
    raise InternalError(f"transfer with tag {tag}: {message}; this is a bug in jaxpp_async.compiler.lowering")


def _add_end(ends: dict[Tag, _End], tag: Tag, end: _End, verb: str) -> None:
    if tag in ends:
        _fail_transfer(tag, f"actor {end.actor} {verb} it, and so does actor {ends[tag].actor}")
    ends[tag] = end


def verify_transfers(programs: Sequence[ActorProgram]) -> None:
    """Check that every send has exactly one matching receive, in the same order between each pair of actors.

    Args:
        programs: one an actor.

    Raises:
        InternalError: a rule is broken; names the tag and the actors.
    """
    sends: dict[Tag, _End] = {}
    recvs: dict[Tag, _End] = {}
    sent_on, received_on = defaultdict(list), defaultdict(list)
    for p in programs:
        for i in p.instructions:
            if isinstance(i, Send):
                _add_end(sends, i.tag, _End(p.actor, i.to_actor, p.avals[i.buffer]), "sends")
                sent_on[p.actor, i.to_actor].append(i.tag)
            elif isinstance(i, Recv):
                _add_end(recvs, i.tag, _End(p.actor, i.from_actor, i.aval), "receives")
                received_on[i.from_actor, p.actor].append(i.tag)
    for tag in sends.keys() ^ recvs.keys():
        end, verb = (sends[tag], "sends") if tag in sends else (recvs[tag], "receives")
        _fail_transfer(tag, f"actor {end.actor} {verb} it, but actor {end.peer} has no part in it")
    for tag, s in sends.items():
        r = recvs[tag]
        if (s.actor, s.peer) != (r.peer, r.actor) or s.actor == s.peer:
            _fail_transfer(tag, f"sent {s.actor} -> {s.peer}, received {r.peer} -> {r.actor}")
        if s.aval is not r.aval and s.aval != r.aval:
            _fail_transfer(tag, f"actor {s.actor} sends {s.aval}, actor {r.actor} receives {r.aval}")
    for (a, b), tags in sent_on.items():
        for sent, received in zip(tags, received_on[a, b], strict=True):
            if sent != received:
                _fail_transfer(sent, f"actor {a} sends it to actor {b}, which posts tag {received} in its place")


def verify_signatures(programs: Sequence[ActorProgram]) -> None:
    """Check that every run of an executable has operands and results of the same shapes and dtypes.

    Args:
        programs: one an actor.

    Raises:
        InternalError: an executable is called in two ways.
    """
    first: dict[ExecutableId, tuple[Run, tuple, tuple]] = {}
    for p in programs:
        aval = p.avals.__getitem__
        for i in p.instructions:
            if not isinstance(i, Run):
                continue
            operands, results = tuple(map(aval, i.inputs)), tuple(map(aval, i.outputs))
            known = first.setdefault(i.executable, (i, operands, results))
            # Mostly these are the same objects, which is quickly seen.
            if (known[1] != operands or known[2] != results) and _kinds(*known[1:]) != _kinds(operands, results):
                raise InternalError(
                    f"actor {p.actor}: {i.label!r} calls executable {i.executable} with {_kinds(operands, results)}, "
                    f"{known[0].label!r} with {_kinds(*known[1:])}; this is a bug in jaxpp_async.compiler.placement"
                )


def _kinds(operands: Sequence[Aval], results: Sequence[Aval]) -> tuple[list, list]:
    """What an executable asks of its operands and results. Not the spec: ("data",) and ("data", None) say the same."""
    return [(a.shape, a.dtype) for a in operands], [(a.shape, a.dtype) for a in results]


def verify_alone(programs: Sequence[ActorProgram], *, complete: bool = True) -> None:
    """Check each program of a step by itself: `verify_program`.

    Args:
        programs: one an actor.
        complete: see `verify_program`.

    Raises:
        InternalError: a rule is broken.
    """
    for actor, p in enumerate(programs):
        if p.actor != actor:
            raise InternalError(f"program {actor} is actor {p.actor}'s; this is a bug in jaxpp_async.compiler.lowering")
        verify_program(p, complete=complete)


def verify_together(programs: Sequence[ActorProgram]) -> None:
    """Check what holds between the programs of a step: transfers, executables, progress.

    Args:
        programs: one an actor.

    Raises:
        InternalError: a rule is broken.
        ScheduleError: the programs deadlock; the message says who waits for whom.
    """
    verify_transfers(programs)
    verify_signatures(programs)
    check_deadlock(programs)


def verify_only_deletes(before: Sequence[ActorProgram], after: Sequence[ActorProgram]) -> None:
    """Check that `Delete`s are all that programs gained: what held for them together then still holds.

    Args:
        before, after: one an actor.

    Raises:
        InternalError: another instruction came, went or moved.
    """
    for old, new in zip(before, after, strict=True):
        if [i for i in new.instructions if not isinstance(i, Delete)] != list(old.instructions):
            raise InternalError(
                f"actor {new.actor}: more than Deletes changed; this is a bug in jaxpp_async.compiler.lowering"
            )


def verify_programs(programs: Sequence[ActorProgram], *, complete: bool = True) -> None:
    """Check all programs of a step, each alone and together.

    Args:
        programs: one an actor.
        complete: see `verify_program`.

    Raises:
        InternalError: a rule is broken.
        ScheduleError: the programs deadlock; the message says who waits for whom.
    """
    verify_alone(programs, complete=complete)
    verify_together(programs)
