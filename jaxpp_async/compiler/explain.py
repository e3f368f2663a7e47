"""compiler.explain: why things are where they are. In: a placed step. Out: reasons, as words for `report`. No jax.

Decides nothing: reads from the graph who uses what.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxpp_async.compiler.graph import PlacedStep
from jaxpp_async.compiler.ir import Op, Traced
from jaxpp_async.compiler.lowering import plan_transfers
from jaxpp_async.program import ActorId, Node, ValueId

IN_LOOP = "in the loop"


@dataclass(frozen=True, slots=True)
class Crossing:
    """One array that goes from one actor to another.

    Args:
        what: what it is: type, and the task or operation that makes it.
        when: `"in the loop"`, or which part of the step outside it.
        why: who needs it there.
    """

    value: ValueId
    from_actor: ActorId
    to_actor: ActorId
    what: str
    when: str
    why: str


class Explainer:
    """Reasons for one step.

    Args:
        traced: the step, for names.
        placed: the same, placed.
        continues: result leaf to the argument leaf it continues.
    """

    def __init__(self, traced: Traced, placed: PlacedStep, continues: Mapping[int, int]) -> None:
        self.traced, self.placed, self.continues = traced, placed, continues
        self.graph = placed.graph
        self.maker = {v: n for n in self.graph.nodes for v in n.outputs}
        self.readers: dict[tuple[ValueId, ActorId], list[Node]] = defaultdict(list)
        for n in self.graph.nodes:
            for v in n.inputs:
                self.readers[v, n.actor].append(n)
        self.results: dict[tuple[ValueId, ActorId], list[int]] = defaultdict(list)
        for o in self.graph.outputs:
            for a in o.actors:
                self.results[o.value, a].append(o.result)

    @cached_property
    def _items(self) -> list[tuple[int, Op]]:
        return [(i, item) for i, item in enumerate(self.placed.placement.items) if isinstance(item, Op)]

    @cached_property
    def _producers(self) -> dict[int, Op]:
        return {o: op for _, op in self._items for o in op.outputs if o >= 0}

    @cached_property
    def _users(self) -> dict[tuple[int, ActorId], list[str]]:
        users: dict[tuple[int, ActorId], list[str]] = defaultdict(list)
        for i, op in self._items:
            for r in op.reads:
                for a in self.placed.placement.op_actors[i]:
                    users[r, a].append(op.name)
        return users

    @cached_property
    def _continued(self) -> dict[ValueId, list[int]]:
        """The results that continue an argument."""
        values = {i.arg: i.value for i in self.graph.inputs}
        found: dict[ValueId, list[int]] = defaultdict(list)
        for result, arg in self.continues.items():
            found[values[arg]].append(result)
        return found

    # ---- transfers

    def crossings(self) -> list[Crossing]:
        """Every transfer of a step, by value."""
        planned = sorted((t.value, t.to_actor, t.from_actor) for t in plan_transfers(self.graph))
        return [Crossing(v, source, a, self._what(v), self._when(v, a), self._who(v, a)) for v, a, source in planned]

    def _what(self, value: ValueId) -> str:
        aval = self.graph.values[value].aval
        return f"{aval.dtype}{list(aval.shape)} {self._origin(value)}"

    def _origin(self, value: ValueId) -> str:
        node = self.maker.get(value)
        if node is None:
            return self.graph.values[value].label
        if node.task is not None:
            verb = {"accumulator": "accumulated by", "result": "collected by"}.get(self.graph.values[value].kind, "of")
            return f"{verb} {task_kind(node)}"
        op = self._producers.get(self.placed.value_ids[value])
        return f"of {node.label}" if op is None else f"{op.name} at {_short(op.line)}"

    def _is_total(self, value: ValueId) -> bool:
        return self.graph.values[value].kind in ("accumulator", "result")

    def _when(self, value: ValueId, actor: ActorId) -> str:
        """The part of the step in which a transfer happens."""
        node = self.maker.get(value)
        readers = self.readers.get((value, actor), [])
        if node is not None and node.task is not None and not self._is_total(value):
            return IN_LOOP
        outside = [n for n in readers if n.task is None]
        if outside:
            return self.phase(outside[0])
        if node is not None and node.task is None:
            return self.phase(node)
        return self._phases[-1]

    def _who(self, value: ValueId, actor: ActorId) -> str:
        readers = self.readers.get((value, actor), [])
        tasks = list(dict.fromkeys(task_kind(n) for n in readers if n.task is not None))
        found = [f"for {_listed(tasks)}"] if tasks else []
        if any(n.task is None for n in readers):
            ops = dict.fromkeys(self._users.get((self.placed.value_ids[value], actor), []))
            found.append(f"for {_listed(ops)} there")
        names = [self.traced.result_name(k) for k in self.results.get((value, actor), [])]
        if names:
            found.append(f"as {_listed(names)}, which lives there")
        return "; ".join(found)

    # ---- parts of the step

    def is_in_loop(self, when: str) -> bool:
        """Whether a transfer at that time happens for each microbatch."""
        return when == IN_LOOP

    @property
    def num_microbatches(self) -> int:
        """Of the largest loop; 1 without one."""
        return max((s.staged.loop.num_microbatches for s in self.placed.loops.values()), default=1)

    @cached_property
    def _loop_levels(self) -> list[int]:
        return sorted(self.placed.placement.loop_levels.values())

    @cached_property
    def _phases(self) -> list[str]:
        count = len(self._loop_levels)
        if count < 2:
            return ["before the loop", "after the loop"] if count else ["in the step"]
        return ["before loop 1", *(f"before loop {k}" for k in range(2, count + 1)), f"after loop {count}"]

    def phase(self, node: Node) -> str:
        """In which part of the step a node outside the loops runs."""
        level = self.placed.outer_levels.get(node.label, 0)
        return self._phases[sum(level > loop for loop in self._loop_levels)]

    # ---- arguments and results

    def why_input(self, value: ValueId, actors: Sequence[ActorId]) -> str:
        """Why an argument lives where it lives."""
        if not actors:
            return self._why_unused(value)
        return _by_actor({a: self._why_input_on(value, a) for a in actors})

    def _why_input_on(self, value: ValueId, actor: ActorId) -> str:
        readers = self.readers.get((value, actor), [])
        tasks = dict.fromkeys(task_kind(n) for n in readers if n.task is not None)
        phases = dict.fromkeys(self.phase(n) for n in readers if n.task is None)
        through = self._used_through(value, actor) if any(p.startswith("before") for p in phases) else []
        if through:
            phases = [f"{p} for {_listed(through)}" if p.startswith("before") else p for p in phases]
        users = [*tasks, *phases]
        if users:
            return f"used by {_listed(users)}" if tasks else f"used {_listed(users)}"
        passed = [self.traced.result_name(k) for k in self.results.get((value, actor), [])]
        if passed:
            return f"passed on as {_listed(passed)}"
        if continued := [self.traced.result_name(k) for k in self._continued.get(value, [])]:
            return f"replaced by {_listed(continued)}, which is made there"
        return f"nobody uses it on actor {actor}"

    def _why_unused(self, value: ValueId) -> str:
        argument = self.placed.value_ids[value]
        back = [self.traced.result_name(k) for k, v in self.placed.placement.handed_back.items() if v == argument]
        if back:
            return f"not used: stays where it is, and is handed back as {_listed(back)}"
        if continued := [self.traced.result_name(k) for k in self._continued.get(value, [])]:
            return f"not used: stays where it is; {_listed(continued)} replaces it"
        return "not used: stays where it is"

    def _used_through(self, value: ValueId, actor: ActorId) -> list[str]:
        """Tasks of loops on an actor that use what is made of an argument outside of them, such as a cast of it."""
        argument, homes = self.placed.value_ids[value], self.placed.placement.op_actors
        made = {o for i, op in self._items if actor in homes[i] and argument in op.reads for o in op.outputs}
        here = (n for n in self.graph.nodes if n.actor == actor and n.task is not None)
        return list(
            dict.fromkeys(task_kind(n) for n in here if any(self.placed.value_ids[v] in made for v in n.inputs))
        )

    def why_result(self, result: int, value: ValueId) -> str:
        """Why a result lives where it lives."""
        if result in self.placed.placement.handed_back:
            return f"is {self.graph.values[value].label}, handed back where it lies"
        if result in self.placed.placement.asked:
            return "asked for by init"
        if result in self.continues:
            return f"continues {self.traced.arg_names[self.continues[result]]}"
        if value not in self.maker:
            return f"is {self.graph.values[value].label}"
        return f"made there: {self._origin(value)}"


def task_kind(node: Node) -> str:
    """A loop's node without its microbatch, such as `"bwd(stage 1)"`."""
    return node.label.split(", mb ")[0] + ")" if ", mb " in node.label else node.label


def _by_actor(reasons: Mapping[ActorId, str]) -> str:
    if len(set(reasons.values())) == 1:
        return next(iter(reasons.values()))
    return "; ".join(f"actor {a}: {reason}" for a, reason in reasons.items())


def _short(line: str) -> str:
    return os.path.basename(line)


def _listed(names: Iterable[str], most: int = 4) -> str:
    shown = list(names)
    return ", ".join(shown if len(shown) <= most else [*shown[: most - 1], f"{len(shown) - most + 1} more"])
