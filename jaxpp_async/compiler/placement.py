"""compiler.placement: where everything outside the loops runs, and where arguments and results live. No jax.

In: a traced step and the actors that each loop's values need. Out: for each outer operation its actors and level, for
each input its home, for each result its homes. `DESIGN.md` 4 has the rules. A choice between equals always goes to the
lowest actor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from jaxpp_async.compiler.ir import Lit, Loop, Op, Ref, Types
from jaxpp_async.program import ActorId

Actors: TypeAlias = frozenset[ActorId]

# Below this a value says nothing about where its user should run: moving it costs less than a wrong choice.
SMALL_BYTES = 64

# Sums and the like over values of several actors are regrouped: each actor joins its own, then the parts meet.
ASSOCIATIVE = frozenset(("add", "add_any", "mul", "max", "min", "and", "or"))


@dataclass(frozen=True, eq=False)
class OuterStep:
    """A step whose loops are cut, ready to be placed.

    Args:
        inputs: ids of the step's inputs (arguments, captured arrays).
        items: operations and loops in program order.
        outputs: the step's results.
        loop_needs: for each loop (by position in `items`) the actors that need each outer value it reads.
        loop_makes: for each loop, the outer values it makes and their actor.
        continues: result position to the input position it continues (a state's old and new leaf).
        result_homes: where results have to be, for those that the caller says; others follow from the program.
    """

    inputs: tuple[int, ...]
    items: tuple[Op | Loop, ...]
    outputs: tuple[Ref, ...]
    loop_needs: dict[int, dict[int, Actors]]
    loop_makes: dict[int, dict[int, ActorId]]
    continues: dict[int, int]
    num_actors: int
    result_homes: dict[int, Actors] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Placement:
    """Where things are.

    Args:
        items: the outer operations and loops, sums regrouped.
        op_actors: actors that run each operation, by position in `items`.
        levels: (position, actor) to the level of an operation's task; `loop_levels` for loops.
        input_homes: input id to the actors that hold it when the step starts.
        output_homes: for each result, the actors that hold it when the step ends.
    """

    items: tuple[Op | Loop, ...]
    op_actors: dict[int, Actors]
    levels: dict[tuple[int, ActorId], int]
    loop_levels: dict[int, int]
    input_homes: dict[int, Actors]
    output_homes: tuple[Actors, ...]
    num_levels: int
    loop_makes: dict[int, dict[int, ActorId]] = field(default_factory=dict)


def place(step: OuterStep, types: Types) -> Placement:
    """Choose actors and levels for everything outside the loops."""
    draft = _Placer(step, types)
    draft.run()
    regrouped = _regroup(draft)
    if regrouped is not None:
        draft = _Placer(regrouped, types)
        draft.run()
    levels, loop_levels, depth = _levels(draft)
    return Placement(
        items=draft.step.items,
        op_actors={i: frozenset(a) for i, a in draft.actors.items()},
        levels=levels,
        loop_levels=loop_levels,
        input_homes={v: frozenset(draft.homes[v]) for v in step.inputs},
        output_homes=tuple(draft.output_homes),
        num_levels=depth,
        loop_makes=draft.step.loop_makes,
    )


class _Placer:
    """Working state. `bound` operations depend on a loop's results and run on one actor; `free` ones run on every actor
    that needs them.
    """

    def __init__(self, step: OuterStep, types: Types) -> None:
        self.step, self.types = step, types
        self.items = step.items
        self.producer = {o: i for i, op in enumerate(self.items) if isinstance(op, Op) for o in op.outputs if o >= 0}
        self.users: dict[int, list[int]] = defaultdict(list)
        for i, op in enumerate(self.items):
            if isinstance(op, Op):
                for r in op.reads:
                    self.users[r].append(i)
        self.loop_home = {v: a for makes in step.loop_makes.values() for v, a in makes.items()}
        self.bound = self._bound_ops()
        self.owned = self._owned_ops()
        self.actors: dict[int, set[ActorId]] = {i: set() for i, op in enumerate(self.items) if isinstance(op, Op)}
        self.homes: dict[int, set[ActorId]] = defaultdict(set)  # of inputs
        self.output_homes: list[Actors] = []

    def _bound_ops(self) -> set[int]:
        values, ops = set(self.loop_home), set()
        for i, op in enumerate(self.items):
            if isinstance(op, Op) and any(r in values for r in op.reads):
                ops.add(i)
                values.update(op.outputs)
        return ops

    def _owned_ops(self) -> set[int]:
        """Free operations that make a floating result: computed once, then sent, so that copies are equal."""
        made = {self.producer[r] for r in self.step.outputs if isinstance(r, int) and r in self.producer}
        return {
            i
            for i in made - self.bound
            if any(
                self.types[o].aval.dtype.startswith(("float", "bfloat", "complex"))
                for o in self._op(i).outputs
                if o >= 0
            )
        }

    def _op(self, position: int) -> Op:
        op = self.items[position]
        assert isinstance(op, Op)
        return op

    def run(self) -> None:
        for needs in self.step.loop_needs.values():
            for value, actors in needs.items():
                self._need(value, actors)
        deferred = [i for i in sorted(self.bound) if not self._choose(i, SMALL_BYTES)]
        for i in reversed(deferred):
            self._choose_by_users(i)
        self._place_results()

    def _need(self, value: int, actors: Actors | set[ActorId]) -> None:
        """`value` is used on `actors`: free operations run there too, inputs live there."""
        stack = [(value, set(actors))]
        while stack:
            v, wanted = stack.pop()
            i = self.producer.get(v)
            if i is None:
                if v not in self.loop_home:
                    self.homes[v] |= wanted
                continue
            if i in self.bound or (i in self.owned and self.actors[i]):
                continue
            if i in self.owned:
                wanted = {min(wanted)}
            new = wanted - self.actors[i]
            if new:
                self.actors[i] |= new
                stack += [(r, new) for r in self._op(i).reads]

    # ---- bound operations

    def _weights(self, values: Sequence[int]) -> dict[ActorId, int]:
        """Bytes of `values` that each actor holds."""
        held: dict[ActorId, int] = defaultdict(int)
        for v in values:
            for a in self._where(v):
                held[a] += max(self.types[v].aval.size_bytes, 1)
        return held

    def _where(self, value: int) -> set[ActorId]:
        if value in self.loop_home:
            return {self.loop_home[value]}
        i = self.producer.get(value)
        return self.homes.get(value, set()) if i is None else self.actors[i]

    def _choose(self, position: int, threshold: int) -> bool:
        """Put a bound operation where most of its operands' bytes are. False: its operands are too small to say."""
        op = self._op(position)
        held = self._weights(op.reads)
        sizes = [self.types[r].aval.size_bytes for r in op.reads] + [
            self.types[o].aval.size_bytes for o in op.outputs if o >= 0
        ]
        best = max(held.values(), default=0)
        if best <= threshold < max(sizes, default=0):
            return False
        self._assign(position, min((a for a in held if held[a] == best), default=0))
        return True

    def _choose_by_users(self, position: int) -> None:
        op = self._op(position)
        held: dict[ActorId, int] = defaultdict(int)
        for o in op.outputs:
            for u in self.users.get(o, ()):
                for a in self.actors[u]:
                    held[a] += 1
        if held:
            best = max(held.values())
            self._assign(position, min(a for a in held if held[a] == best))
        else:
            self._choose(position, 1 << 62)

    def _assign(self, position: int, actor: ActorId) -> None:
        self.actors[position] = {actor}
        for r in self._op(position).reads:
            self._need(r, {actor})

    # ---- results

    def _place_results(self) -> None:
        """A result lives where the input it continues lives, else where it is made."""
        homes: list[Actors] = []
        for k, ref in enumerate(self.step.outputs):
            assert not isinstance(ref, Lit), "constant results are made by an operation"
            continued = self.step.continues.get(k)
            home = set(self.homes.get(self.step.inputs[continued], ())) if continued is not None else set()
            home = set(self.step.result_homes.get(k, ())) or home or self._where(ref) or {0}
            self._need(ref, home)
            if continued is not None:
                self._need(self.step.inputs[continued], home)
            homes.append(frozenset(home))
        for v in self.step.inputs:
            # Inputs nobody uses rest on actor 0.
            if not self.homes.get(v):
                self.homes[v] = {0}
        self.output_homes = homes


# ---------------------------------------------------------------- regrouping


def _regroup(draft: _Placer) -> OuterStep | None:
    """Rewrite sums (and products, maxima, ...) of small values from several actors as partial ones per actor."""
    trees = _trees(draft)
    if not trees:
        return None
    replaced: dict[int, list[Op]] = {}
    removed: set[int] = set()
    for root, (members, leaves) in trees.items():
        removed |= members
        replaced[root] = _grouped(draft, root, leaves)
    items: list[Op | Loop] = []
    renumbered: dict[int, int] = {}
    for i, item in enumerate(draft.items):
        if i in replaced:
            items += replaced[i]
        elif i not in removed:
            renumbered[i] = len(items)
            items.append(item)
    step = draft.step
    return OuterStep(
        inputs=step.inputs,
        items=tuple(items),
        outputs=step.outputs,
        loop_needs={renumbered[i]: needs for i, needs in step.loop_needs.items()},
        loop_makes={renumbered[i]: makes for i, makes in step.loop_makes.items()},
        continues=step.continues,
        num_actors=step.num_actors,
        result_homes=step.result_homes,
    )


def _trees(draft: _Placer) -> dict[int, tuple[set[int], list[int]]]:
    """Maximal trees of one associative operation over small bound values that live on several actors."""
    kept = {r for r in draft.step.outputs if isinstance(r, int)}
    kept.update(v for needs in draft.step.loop_needs.values() for v in needs)
    inside: set[int] = set()
    found = {}
    for i in reversed(sorted(draft.bound)):
        op = draft._op(i)
        if i in inside or not _regroupable(draft, op):
            continue
        members, leaves, stack = {i}, [], list(reversed(op.reads))
        while stack:
            v = stack.pop()
            p = draft.producer.get(v)
            child = draft.items[p] if p is not None else None
            if (
                p is not None
                and isinstance(child, Op)
                and child.name == op.name
                and p in draft.bound
                and len(draft.users[v]) == 1
                and v not in kept
                and _regroupable(draft, child)
            ):
                members.add(p)
                stack += reversed(child.reads)
            else:
                leaves.append(v)
        inside |= members
        if len(leaves) > 2 and len({min(draft._where(v), default=0) for v in leaves}) > 1:
            found[i] = (members, leaves)
    return found


def _regroupable(draft: _Placer, op: Op) -> bool:
    if op.name not in ASSOCIATIVE or len(op.inputs) != 2 or len(op.reads) != 2:
        return False
    out = draft.types[op.outputs[0]].aval
    same = all(draft.types[r].aval.shape == out.shape and draft.types[r].aval.dtype == out.dtype for r in op.reads)
    return same and out.size_bytes <= SMALL_BYTES


def _grouped(draft: _Placer, root: int, leaves: list[int]) -> list[Op]:
    op = draft._op(root)
    by_actor: dict[ActorId, list[int]] = defaultdict(list)
    for v in leaves:
        by_actor[min(draft._where(v), default=0)].append(v)
    made: list[Op] = []

    def join(values: list[int], last: int | None) -> int:
        total = values[0]
        for k, v in enumerate(values[1:], 2):
            out = last if last is not None and k == len(values) else draft.types.new(draft.types[op.outputs[0]])
            made.append(Op(op.name, (total, v), (out,), op.run, op.line, op.transposed))
            total = out
        return total

    partial = [join(by_actor[a], None) for a in sorted(by_actor)]
    join(partial, op.outputs[0])
    return made


# ---------------------------------------------------------------- levels


def _levels(p: _Placer) -> tuple[dict[tuple[int, ActorId], int], dict[int, int], int]:
    """Group operations by how many times data has to cross actors first.

    Each runs as late as possible, since an early result is a buffer to keep.
    """
    early, loops = _earliest(p)
    depth = max([*early.values(), *(n + 1 for n in loops.values())], default=0)
    late: dict[tuple[int, ActorId], int] = {}
    loop_limits: dict[int, list[tuple[ActorId, int]]] = defaultdict(list)
    for i, needs in p.step.loop_needs.items():
        for value, actors in needs.items():
            loop_limits[value] += [(a, loops[i] - 1) for a in actors]
    for i in reversed(range(len(p.items))):
        op = p.items[i]
        if not isinstance(op, Op):
            continue
        for a in p.actors[i]:
            limit = depth
            for o in op.outputs:
                for u in p.users.get(o, ()):
                    limit = min([limit, *_user_limits(p, i, a, u, late)])
                limit = min([limit, *(n for b, n in loop_limits.get(o, ()) if b == a or len(p.actors[i]) == 1)])
            late[i, a] = limit
    return late, loops, depth + 1


def _user_limits(p: _Placer, position: int, actor: ActorId, user: int, late: dict) -> list[int]:
    """The latest level at which `position` may run on `actor` for the sake of one user."""
    limits = []
    for b in p.actors[user]:
        if b == actor:
            limits.append(late[user, b])
        elif b not in p.actors[position] and actor == min(p.actors[position]):
            limits.append(late[user, b] - 1)
    return limits


def _earliest(p: _Placer) -> tuple[dict[tuple[int, ActorId], int], dict[int, int]]:
    early: dict[tuple[int, ActorId], int] = {}
    loops: dict[int, int] = {}
    made_in: dict[int, int] = {}
    last_loop = -1

    def available(value: int, actor: ActorId) -> int:
        """The first level at which an operation on `actor` can read `value`."""
        if value in made_in:
            return made_in[value] + 1
        i = p.producer.get(value)
        if i is None:
            return 0
        if actor in p.actors[i]:
            return early[i, actor]
        return early[i, min(p.actors[i])] + 1

    for i, op in enumerate(p.items):
        if isinstance(op, Op):
            for a in sorted(p.actors[i]):
                early[i, a] = max([available(r, a) for r in op.reads], default=0)
            continue
        before = [
            # An operation's result enters the loop one level after the operation, on any actor.
            max((available(v, a) for a in actors), default=0) + (1 if v in p.producer else 0)
            for v, actors in p.step.loop_needs[i].items()
        ]
        loops[i] = last_loop = max([last_loop + 1, *before])
        for v in p.step.loop_makes[i]:
            made_in[v] = last_loop
    return early, loops
